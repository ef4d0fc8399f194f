"""An MTP layer on several devices gives the tokens and drafts of one device."""

from __future__ import annotations

import pytest

from benchmarks.serving.servers import free_port
from examples.options import CHECKPOINTS
from tests.support.devices import on_eight_devices
from tests.support.processes import start
from tests.support.published_mtp import write_deepseek, write_qwen3_next

PRELUDE = """
import jattn.testing
from examples.engine.mesh import make_meshes
from examples.engine.request import Request, Sampling
from examples.engine.drafts.speculation import Speculation
from tests.support import drafts

DRAFTED = checkpoints.Bucket(32, 8, 4, 3)

def engine_on(folder, mesh, **options):
    model = load_model(folder, mesh=mesh, mtp=True)
    return checkpoints.make_engine(
        model, speculation=Speculation(3, mtp=True, backs_off=False),
        buckets=(checkpoints.MIXED, DRAFTED), **options
    )

def some_requests():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, size=10).tolist()
    drawn = [Sampling(), Sampling(temperature=0.8, seed=3)]
    return [
        Request(tuple(rng.integers(0, 256, size=n).tolist()), 9, drawn[i == 4])
        for i, n in enumerate(lengths)
    ]

def serve(engine, coming):
    # The tokens of each request, and what was guessed after which tokens.
    noting = drafts.Noting(engine._speculator.proposer, coming)
    engine._speculator.proposer = noting
    sequences = engine.generate(REQUESTS)
    engine.check_idle()
    return {s.request: s.chosen for s in sequences}, noting.noted, engine.statistics

def check(folder, meshes):
    first = engine = engine_on(folder, None)
    guesser, engine._speculator.proposer = engine._speculator.proposer, drafts.Silent()
    coming = {s.request: s.chosen for s in engine.generate(REQUESTS)}  # without guesses
    engine._speculator.proposer = guesser
    tokens, guessed, _ = serve(engine, coming)
    assert tokens == coming
    assert len(guessed) > 20
    GUESSED[:], first_guesser = guessed, guesser
    COMING.update(coming)
    for mesh in meshes:
        engine = engine_on(folder, mesh, check=True)
        guesser = engine._speculator.proposer
        found = serve(engine, coming)
        assert found[0] == coming
        assert found[1] == guessed, [pair for pair in zip(found[1], guessed) if pair[0] != pair[1]]
        assert 10 < found[2].num_accepted_tokens < found[2].num_drafted_tokens - 10
    return first, first_guesser, engine, guesser

def check_moved(reader, decoder, guesser):
    # Prompts that one engine reads and the other goes on with: the guesses of one engine.
    prompts = {r: r.prompt for r in REQUESTS if len(r.prompt) > 1}
    given = [Request(p[:-1], 1, follow=p[-1:], hands_over=True) for p in prompts.values()]
    contents = [s.taken.fetched() for s in reader.generate(given)]
    decoder.reset()
    decoder.caches = jax.tree.map(checkpoints.poison, decoder.caches)
    noting = drafts.Noting(guesser, COMING)
    decoder._speculator.proposer = noting
    sequences = [decoder.add(*pair) for pair in zip(prompts, contents)]
    list(decoder.stream())
    assert {s.request: s.chosen for s in sequences} == {r: COMING[r] for r in prompts}
    assert decoder.statistics.num_received_prompts == len(prompts) > 8
    found = {tuple(tokens): guess for tokens, guess in noting.noted}
    known = {tuple(tokens): guess for tokens, guess in GUESSED}
    both = [tokens for tokens in found if tokens in known]
    assert len(both) > 10
    assert [found[t] for t in both] == [known[t][:len(found[t])] for t in both]

def check_collectives(engine, guesser, steps, guesses):
    found = collectives(engine.steps.programs[checkpoints.MIXED])
    assert found == steps, found
    found = collectives(guesser._programs[8])  # one guess, since a loop makes all of them
    assert found == guesses, found
    # A guess over pools of a hundred times as many blocks: none is copied.
    def enlarged(x, times):
        shape = (x.shape[0] * times, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
    small = engine.caches
    engine.caches = jax.tree.map(lambda x: enlarged(x, 100), small)
    of_a_device = jax.tree.map(lambda x: enlarged(x, 50), small)
    jattn.testing.assert_nothing_pool_sized(guesser._compile(8), of_a_device)

REQUESTS, GUESSED, COMING = some_requests(), [], {}
"""
WRITERS = {"qwen3-next": write_qwen3_next, "deepseek-v3": write_deepseek}
# All-reduces of a step of 40 tokens: one more than without MTP, for the embeddings of the tokens
# that come next. A guess for 8 sequences has three: embeddings, attention and experts.
REDUCES = {"qwen3-next": 9 + 1, "deepseek-v3": 7 + 1}
LOGITS = ("all-gather", "f32[8,256]")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3-next", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", marks=pytest.mark.extended),
    ],
)
def test_two_devices_give_the_drafts_and_tokens_of_one(name, tmp_path):
    """Experts, columns, heads and KV heads are split; prompts move from one to two and back."""
    WRITERS[name](tmp_path / "model")
    steps = {("all-reduce", "f32[40,64]"): REDUCES[name], LOGITS: 1}
    guesses = {("all-reduce", "f32[8,64]"): 3, LOGITS: 1}
    on_eight_devices(f"""{PRELUDE}
first, first_guesser, engine, guesser = check(
    {str(tmp_path / "model")!r}, make_meshes("tensor=2")
)
check_moved(first, engine, guesser)
check_moved(engine, first, first_guesser)
check_collectives(engine, guesser, {steps}, {guesses})
""")


@pytest.mark.slow
def test_keys_under_context_parallelism(tmp_path):
    """Latents, with experts on four devices; keys of two heads, which both devices hold."""
    write_deepseek(tmp_path / "deepseek")
    write_qwen3_next(tmp_path / "qwen3-next")
    exchanged = {("all-gather", "f32[8,2,576]"): 1, ("all-to-all", "f32[1,8,1]"): 2}
    exchanged |= {("all-to-all", "f32[1,8,1,512]"): 2}
    guesses = {("all-reduce", "f32[8,64]"): 3, LOGITS: 1, **exchanged}
    on_eight_devices(f"""{PRELUDE}
*_, guesser = check({str(tmp_path / "deepseek")!r}, make_meshes("tensor=2,context=2"))
found = collectives(guesser._programs[8])
assert found == {guesses}, found
check({str(tmp_path / "qwen3-next")!r}, make_meshes("context=2"))
""")


@pytest.mark.slow
def test_each_group_of_devices_guesses_for_itself(tmp_path):
    write_deepseek(tmp_path / "model")
    on_eight_devices(
        PRELUDE + f"check({str(tmp_path / 'model')!r}, make_meshes('data=2,tensor=2'))"
    )


PROCESS = (
    """
import dataclasses, sys
import jax, numpy as np
from examples.engine import hosts
from examples.engine.mesh import make_mesh
from examples.engine.model import load_model
from tests.support import checkpoints

rank, address, folder, how = int(sys.argv[1]), *sys.argv[2:5]
hosts.join(address, 2, rank)
"""
    + PRELUDE
    + """
from examples.engine.drafts.speculation import read_speculation

def engine_over(mesh):
    model = load_model(folder, mesh=mesh, mtp=how == "mtp")
    draft = load_model(folder, mesh=mesh) if how == "draft" else None
    speculation = dataclasses.replace(read_speculation(f"{how}=3", draft), backs_off=False)
    buckets = (checkpoints.MIXED, DRAFTED)
    return checkpoints.make_engine(model, speculation=speculation, buckets=buckets)

def repeats():
    # For lookup, texts that go on as they began, whatever is chosen.
    cycles = [tuple(range(n, n + 5)) for n in range(8)]
    follows = (cycle * 3 if how == "lookup" else None for cycle in cycles)
    return [Request(c * 4, 15, follow=f) for c, f in zip(cycles, follows, strict=True)]

def leads(engine):
    if how != "mtp":
        found = [s.chosen for s in engine.generate(repeats())]
        drafted = engine.statistics.num_accepted_tokens
        assert how == "lookup" or drafted == engine.statistics.num_drafted_tokens  # its own model
        engine._speculator.proposer = drafts.Silent()
        assert found == [s.chosen for s in engine.generate(repeats())]
        assert engine.statistics.num_accepted_tokens == drafted
        engine.followers.tell(hosts.END)
        print("drafted", drafted, flush=True)
        return
    proposer, engine._speculator.proposer = engine._speculator.proposer, drafts.Silent()
    coming = {s.request: s.chosen for s in engine.generate(REQUESTS)}
    engine._speculator.proposer = proposer
    before = engine.statistics.num_drafted_tokens
    found = serve(engine, coming)
    assert found[0] == coming
    assert before == 0 and found[2].num_accepted_tokens > 10
    engine.followers.tell(hosts.END)
    engine = engine_over(None)
    assert serve(engine, coming)[:2] == found[:2]
    print("drafted", found[2].num_drafted_tokens, flush=True)

try:
    engine = engine_over(make_mesh("tensor=2"))
    hosts.follow(engine) if rank else leads(engine)
except Exception as failure:
    hosts.exit_with(failure)
"""
)


@pytest.mark.extended
@pytest.mark.rotated
@pytest.mark.parametrize("how", [pytest.param("lookup", marks=pytest.mark.slow), "draft", "mtp"])
def test_drafts_over_two_processes(how, tmp_path):
    """The first one guesses, or has both guess. Tokens are as without drafts; drafts as of one."""
    folder = CHECKPOINTS / "qwen3-tiny"
    if how == "mtp":
        write_deepseek(folder := tmp_path / "model")
    address = f"127.0.0.1:{free_port()}"
    given = (address, str(folder), how)
    group = [start(rank, *given, code=PROCESS, devices="1") for rank in (0, 1)]
    try:
        found = [process.communicate(timeout=300) for process in group]
        assert [process.returncode for process in group] == [0, 0], found
        assert int(found[0][0].split()[-1]) > 20
    finally:
        for process in group:
            process.kill()
            process.communicate()
