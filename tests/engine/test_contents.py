"""One engine reads prompts and another continues them, with the tokens of a single engine."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb
import jattn.testing
from examples.engine.caches import Caches, Place, init_caches
from examples.engine.engine import Engine
from examples.engine.model import AttentionCache, load_model
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.transfer.contents import Contents, Transfer, put_rows, take_rows
from examples.engine.transfer.description import describe, differences
from examples.options import KV_FORMATS
from tests.support import checkpoints
from tests.support.engines import (
    BLOCK,
    SCARCE,
    build,
    compare_with_separate_runs,
    limits,
    restart,
    serve_at_random,
    some_requests,
)
from tests.support.tiny_model import tiny_model


def reader(block_size: int, **options) -> Engine:
    """Build an engine that reads prompts, with another block size."""
    return build(sizes={"budget": 16, "block_size": block_size}, **options)


@pytest.fixture(scope="module")
def sender() -> Engine:
    return restart(reader(8))


@pytest.fixture(scope="module", params=["two-pools", "unified"])
def receiver(request) -> Engine:
    return build(unified=request.param == "unified")


def read(engine: Engine, prompts: list[tuple[int, ...]]) -> list[Contents | None]:
    """Return the contents that an engine hands over for prompts, or None if there are none."""
    long = {p: Request(p[:-1], 1, hands_over=True) for p in prompts if len(p) > 1}
    found = dict(zip(long, engine.generate(long.values()), strict=True))
    return [found[p].taken.fetched() if p in found else None for p in prompts]


class Arriving:
    """An engine that is given prompts which another one has read."""

    def __init__(self, engine: Engine, contents: dict[Request, Contents]):
        self.engine, self.contents = engine, contents

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def add(self, request: Request) -> Sequence:
        return self.engine.add(request, self.contents[request])


@pytest.mark.extended
@pytest.mark.parametrize("scarce", [False, True], ids=["ample", "scarce"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no-prefixes"])
def test_random_traffic_gives_the_tokens_of_one_engine(sender, receiver, caching, scarce):
    """With windows and states, drawn and greedy tokens, and also when the receiver lacks blocks."""
    rng = np.random.default_rng([caching, scarce])
    requests = some_requests(rng, 60 if scarce else 20)
    restart(sender)
    given = dict(zip(requests, read(sender, [r.prompt for r in requests]), strict=True))
    sender.check_idle()
    counts = SCARCE[receiver.limits.unified] if scarce else None
    restart(receiver, prefix_caching=caching, num_blocks=counts)
    sequences = serve_at_random(Arriving(receiver, given), requests, rng)
    done = receiver.statistics
    assert done.num_received_prompts >= len(requests) * 0.7  # some are aborted before
    if not (scarce or caching):
        assert done.num_reused_tokens == 0
        assert done.num_computed_tokens == done.num_new_tokens
    assert (receiver.scheduler.num_preemptions > 0) == scarce
    compare_with_separate_runs(receiver, sequences)


@pytest.mark.extended
def test_texts_of_one_prompt_share_what_arrived(sender, receiver):
    restart(receiver)
    prompt = tuple(range(60, 60 + 5 * BLOCK + 2))
    (given,) = read(sender, [prompt])
    requests = [
        Request(prompt, 7, Sampling(1.0, seed=i, logit_bias=((65, 2.0),))) for i in range(4)
    ]
    sequences = [receiver.add(requests[0], given), *map(receiver.add, requests[1:])]
    list(receiver.stream())
    assert receiver.statistics.num_computed_tokens == 4 * 7
    compare_with_separate_runs(receiver, sequences)


@pytest.mark.extended
def test_what_arrived_is_found_by_the_next_prompt(sender, receiver):
    restart(receiver)
    prompt = tuple(range(100, 100 + 4 * BLOCK + 1))
    (given,) = read(sender, [prompt])
    receiver.add(Request(prompt, 3), given)
    list(receiver.stream())
    assert receiver.scheduler.pools[next(iter(receiver.scheduler.pools))].num_published > 0
    (again,) = receiver.generate([Request((*prompt[:-1], 7, 8), 3)])
    # States are kept only where a chunk ends; the one that arrived is from the end of a sender's.
    assert again.num_reused in (0, 4 * BLOCK)
    compare_with_separate_runs(receiver, [again])


@pytest.mark.extended
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_a_block_that_arrived_in_part_is_not_reused(sender, receiver, monkeypatch, wrong):
    """For layers with a window only the last 9 of 23 tokens arrive: half of the block 12..15."""

    def publish_all(sequence: Sequence, num_tokens: int) -> None:
        begin_at(sequence, num_tokens)
        for table in sequence.tables.values():
            table.num_published = 0

    begin_at = Sequence.begin_at
    if wrong:
        monkeypatch.setattr(Sequence, "begin_at", publish_all)
    prompt = tuple(range(70, 94))
    (given,) = read(sender, [prompt])
    restart(receiver)
    receiver.add(Request(prompt, 6), given)
    list(receiver.stream())
    request = Request((*prompt[:16], 9), 2)
    first, second = (receiver.generate([r])[0] for r in (Request(prompt[:17], 6), request))
    assert (first.num_reused, second.num_reused) == (0, 16)
    (alone,) = restart(receiver, prefix_caching=False).generate([request])
    assert np.allclose(second.logits[0], alone.logits[0], atol=2e-4) != wrong


@pytest.mark.extended
@pytest.mark.parametrize("wrong", ["rows", "state", "window"])
def test_wrong_contents_are_caught(sender, receiver, wrong):
    """The comparisons above notice a wrong row, a lost state, or a window that is off by one."""
    restart(receiver)
    prompt = tuple(range(30, 30 + 6 * BLOCK + 1))
    (given,) = read(sender, [prompt])
    arrays = list(given.arrays)
    for i, part in enumerate(sender.transfer.parts):
        if wrong == "rows" and part.window is None and part.per == "token":
            arrays[i] = np.concatenate([arrays[i][:3], arrays[i][2:3], arrays[i][4:]])
        elif wrong == "state" and part.per == "state":
            arrays[i] = np.zeros_like(arrays[i])
        elif wrong == "window" and part.window:
            arrays[i] = np.concatenate([arrays[i][1:], arrays[i][-1:]])
    changed = dataclasses.replace(given, arrays=tuple(arrays))
    logits = []
    for contents in (given, changed):
        sequence = receiver.add(Request(prompt, 4), contents)
        list(receiver.stream())
        logits.append(sequence.logits[0])
        restart(receiver)
    (alone,) = receiver.generate([Request(prompt, 4)])
    np.testing.assert_allclose(logits[0], alone.logits[0], atol=2e-4)
    assert np.abs(logits[1] - alone.logits[0]).max() > 0.01


# -- formats, layouts, block sizes -----------------------------------------------------------------


def pools(kv_format, kv_layout: str, block_size: int, count: int = 12) -> Caches:
    """Build the caches of two layers and fill them with random numbers."""
    rng, pairs, places = np.random.default_rng(0), [], []
    for layer in range(2):
        pair = jattn.init_kv_cache(count, 2, block_size, 32, format=kv_format, kv_layout=kv_layout)
        new = jnp.asarray(rng.normal(size=(2, count * block_size, 2, 32)), jnp.float32)
        slots = np.arange(count * block_size, dtype=np.int32)
        pairs.append(jattn.update_kv_cache(*pair, *new, slots))
        places.append(Place(layer, AttentionCache(2, 32), "global", layer))
    return Caches(tuple(pairs), tuple(places))


FORMATS = {
    "bfloat16": (jattn.Dense("bfloat16"), 8),
    "e4m3-token": (jattn.Fp8("e4m3", "token"), 8),
    "e4m3-block": (jattn.Fp8("e4m3", "block"), 4),
    "int8-int4": ((jattn.Int8(), jattn.Int4(zero_point=True)), 8),
    "nvfp4": (jattn.Nvfp4(), 8),
}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param(name, layouts, marks=() if i + j == 0 else pytest.mark.extended)
        for i, name in enumerate(("int8-int4", "bfloat16", "e4m3-token", "e4m3-block", "nvfp4"))
        for j, layouts in enumerate((("HND", "NHD"), ("NHD", "HND")))
    ],
    ids=str,
)
def test_bits_are_kept_between_layouts_and_block_sizes(name, layouts):
    kv_format, size = FORMATS[name]
    source, target = pools(kv_format, layouts[0], 4), pools(kv_format, layouts[1], size)
    taken = take_rows(source, jnp.asarray([7, 2, 11, 5], jnp.int32), "global")
    ids = jnp.asarray([3, 9, 1, 8][: 16 // size], jnp.int32)
    before = jax.tree.map(np.asarray, target)
    target = put_rows(target, ids, taken, "global")
    again = take_rows(target, ids, "global")
    for one, other in zip(taken, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    others = jnp.asarray([i for i in range(12) if i not in ids], jnp.int32)
    for one, other in zip(
        take_rows(before, others, "global"), take_rows(target, others, "global"), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.extended
def test_kernel_blocks_have_ids_of_their_own():
    """Rows of a pool of kernel blocks are taken by the expanded ids of the manager's blocks."""
    whole, cut = (pools(jattn.Dense("float32"), "NHD", size) for size in (8, 4))
    cut = cut.with_pools(
        tuple(a.replace(data=b.data.reshape(24, 4, 2, 32)) for a, b in zip(*pair, strict=True))
        for pair in zip(cut.pools, whole.pools, strict=True)
    )
    ids = jnp.asarray([5, 0, 3], jnp.int32)
    taken = take_rows(whole, ids, "global")
    expanded = take_rows(cut, jb.expand_block_ids(ids, 2), "global")
    for one, other in zip(taken, expanded, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.extended
def test_caches_are_written_in_place():
    for kv_format in (jattn.Dense("bfloat16"), jattn.Nvfp4()):
        caches = pools(kv_format, "HND", 4, count=512)
        rows = take_rows(caches, jnp.zeros(2, jnp.int32), "global")
        program = put_rows.lower(caches, jnp.zeros(2, jnp.int32), rows, group="global").compile()
        jattn.testing.assert_nothing_pool_sized(program, caches)


# -- every family ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    checkpoints.some((*checkpoints.MODELS, *checkpoints.SLIDING), slow=("qwen3-next-tiny",)),
)
def test_every_family_matches_its_reference(name):
    """Prompts are read in 16-token blocks and put into caches of NaN; nothing is computed twice."""
    wanted = checkpoints.reference(name)
    engine = checkpoints.make_engine(load_model(checkpoints.CHECKPOINTS / name))
    rows = zip(wanted["prompts"], wanted["prompt_lens"], strict=True)
    prompts = [tuple(row[:n].tolist()) for row, n in rows]
    given = read(engine, prompts)
    engine.check_idle()
    engine.caches = jax.tree.map(checkpoints.poison, engine.caches)
    engine.reset()
    num_new = wanted["tokens"].shape[1]
    sequences = [
        engine.add(Request(prompt, num_new), contents)
        for prompt, contents in zip(prompts, given, strict=True)
    ]
    list(engine.stream())
    np.testing.assert_array_equal([s.chosen for s in sequences], wanted["tokens"])
    error = np.abs(np.stack([s.logits for s in sequences]) - wanted["logits"])
    assert error.max() <= checkpoints.MAX_ERROR
    alone = sum(len(prompt) == 1 for prompt in prompts)
    assert engine.statistics.num_computed_tokens == len(prompts) * num_new
    assert engine.statistics.num_received_prompts == len(prompts) - alone


# -- what must agree -------------------------------------------------------------------------------


def test_other_models_and_formats_are_recognized(monkeypatch):
    """With a clear reason, before anything is handed over."""
    bounds = limits(budget=16, block_size=8)

    def described(model, kv_format="float32", size=8):
        sized = dataclasses.replace(bounds, block_size=size, checkpoint_every=None)
        caches = init_caches(
            model.layers, {g.name: 9 for g in bounds.groups}, size, KV_FORMATS[kv_format]
        )
        return describe(model, Transfer(sized, caches), caches)

    ours = described(tiny_model())
    assert differences(json.loads(json.dumps(ours)), ours) == []
    assert differences(described(tiny_model(), size=4), ours) == []
    (words,) = differences(described(tiny_model(noise=1e-3)), ours)
    assert words.startswith("its weights: ")
    params = tiny_model().params
    inner = params["v2"].at[1, 2].add(1e-3)  # neither the smallest number nor the largest
    assert params["v2"].min() < inner[1, 2] < params["v2"].max()
    for changed in (
        {"v2": inner},
        {"v2": params["v2"][::-1]},
        {"g0": params["g0"].T},
        {"q0": params["q2"], "q2": params["q0"]},
    ):
        other = dataclasses.replace(tiny_model(), params=params | changed)
        (words,) = differences(described(other), ours)
        assert words.startswith("its weights: ")
    monkeypatch.setattr(
        "examples.engine.transfer.fingerprint.NUMBERS_AT_A_TIME", 24 * 150
    )  # in parts
    assert differences(described(tiny_model()), ours) == []
    (words,) = differences(described(dataclasses.replace(tiny_model(), dtype="bfloat16")), ours)
    assert words == "its dtype: 'bfloat16', but must be 'float32', as here"
    (words,) = differences(described(tiny_model(), "bfloat16"), ours)
    assert "layer 0 key words: uint16[1, 8] per token, window 10" in words
    assert "float32[1, 8]" in words
    tied = described(tiny_model(), "e4m3-block")
    assert differences(tied, tied) == []
    assert "block size" in differences(described(tiny_model(), "e4m3-block", 4), tied)[0]
    for wrong in (None, [], "no", {}, {"caches": 3}):
        assert differences(wrong, ours)
