"""LoRA adapters: tokens as with merged weights, many adapters in a batch, no recompilation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.engine.adapters import Adapters
from examples.engine.drafts.speculation import Speculation
from examples.engine.model import load_model
from examples.engine.request import Request
from examples.engine.statistics import count_compilations
from examples.engine.step import pack
from examples.models.lora import Adapted, Room
from examples.options import CHECKPOINTS
from tests.support import lora as support
from tests.support.checkpoints import MAX_ERROR, MODELS, some
from tests.support.devices import on_eight_devices
from tests.support.drafts import Foresight
from tests.support.lora import (
    MIXED,
    ROOM,
    build,
    merged,
    prompts,
    restart,
    run,
    two_adapters,
    write_adapter,
)
from tests.support.tiny_model import tiny_model

ALL = (*MODELS, "gemma4-e2b-tiny", "gemma4-31b-tiny")
qwen3 = support.qwen3  # the fixture


@pytest.mark.parametrize("name", some(ALL, slow=("qwen3-next-tiny",)))
def test_a_batch_of_adapters_has_the_tokens_of_merged_weights(name, request, tmp_path):
    """For every linear layer of every family, with different ranks, scales and prefixes."""
    if name == "qwen3-tiny":
        engine = request.getfixturevalue("qwen3")
        restart(engine)
    else:
        model = load_model(CHECKPOINTS / name)
        engine = build(model, **two_adapters(model, tmp_path))
    model, names = engine.adapters._base, [None, "a", "b"]
    requests = [
        Request(prompt, 8, adapter=which and engine.adapters[which])
        for prompt in prompts(2)
        for which in names
    ]
    # The second time, each prompt reuses the prefix that its own adapter left, and no other's.
    first = engine.generate(requests)
    second = engine.generate(requests)
    assert [s.chosen for s in first] == [s.chosen for s in second]
    assert sum(s.num_reused == 0 for s in first) >= len(names)
    assert sum(s.num_reused > 0 for s in second) > 0  # states of some may be evicted by then
    engine.check_idle()
    chosen = [tuple(s.chosen) for s in first]
    assert all(len(set(chosen[i : i + 3])) == 3 for i in range(0, 6, 3)), "adapters change nothing"

    try:
        for which in names:
            directory = None if which is None else Path(engine.adapters[which].directory)
            restart(engine, base=model if directory is None else merged(model, directory))
            for sequence in first[names.index(which) :: 3]:
                alone = run(engine, sequence.request.prompt, None, 8)
                assert alone.chosen == sequence.chosen
                np.testing.assert_allclose(alone.logits, sequence.logits, atol=2 * MAX_ERROR)
    finally:
        restart(engine, base=model)


@pytest.mark.extended
def test_drafts_are_verified_with_the_adapter_of_each_sequence(qwen3):
    """Draft tokens that another adapter would choose are refused."""
    restart(qwen3)
    folders = {name: qwen3.adapters[name].directory for name in "ab"}
    engine = build(qwen3.adapters._base, Speculation(4, backs_off=False), **folders)
    wanted, coming = {}, {}
    for which, other in (("a", "b"), ("b", None), (None, "a")):
        for i, prompt in enumerate(prompts(2)):
            request = Request(prompt, 12, adapter=which and engine.adapters[which])
            wanted[request] = run(qwen3, prompt, which)
            coming[request] = run(qwen3, prompt, other if i else which).chosen
    engine._speculator.proposer = Foresight(coming, np.random.default_rng(0), wrong=0.2)
    for sequence in engine.generate(wanted):
        expected = wanted[sequence.request]
        assert sequence.chosen == expected.chosen
        np.testing.assert_allclose(sequence.logits, expected.logits, atol=2 * MAX_ERROR)
    done = engine.statistics
    assert 6 < done.num_accepted_tokens < done.num_drafted_tokens - 6
    engine.check_idle()


def test_a_new_adapter_compiles_nothing(qwen3, tmp_path):
    engine, prompt = qwen3, prompts(1)[0]
    restart(engine)
    before = {name: run(engine, prompt, name).chosen for name in (None, "a", "b")}
    c = write_adapter(tmp_path / "c", engine.adapters._base, seed=7, targets="proj")
    with pytest.raises(ValueError, match=r"room for 2, and all of it is taken"):
        engine.adapters.load("c", c)
    b = engine.adapters["b"]
    with count_compilations() as compilations:
        engine.adapters.unload("b")
        engine.adapters.load("c", c)
        assert run(engine, prompt, "c").chosen not in before.values()
        assert run(engine, prompt, "a").chosen == before["a"]
        assert run(engine, prompt, None).chosen == before[None]
        with pytest.raises(ValueError, match=r"adapter 'b' is not loaded"):
            engine.add(Request(prompt, 2, adapter=b))
        engine.adapters.unload("c")
        engine.adapters.load("b", b.directory)
    assert compilations.count == 0
    again = run(engine, prompt, "b")
    assert (again.chosen, again.num_reused) == (before["b"], 16)  # same weights, same prefix


def test_an_adapter_that_is_unloaded_stays_with_its_sequences(qwen3, tmp_path):
    """Both running and waiting ones keep it, and leave right blocks in the prefix cache."""
    engine = qwen3
    restart(engine)
    asked = [Request(p, 12, adapter=engine.adapters["b"]) for p in prompts(9)]
    wanted = [engine.generate([request])[0].chosen for request in asked]
    restart(engine)
    live = [engine.add(request) for request in asked]  # the engine runs eight of them at a time
    for _ in range(9):
        engine.step()
    assert engine.scheduler.waiting
    assert any(0 < len(sequence.chosen) < 12 for sequence in live)
    b = engine.adapters["b"]
    engine.adapters.unload("b")
    c = write_adapter(tmp_path / "c", engine.adapters._base, seed=7, targets="proj")
    with pytest.raises(ValueError, match=r"all of it is taken; 1 unloaded but in use until"):
        engine.adapters.load("c", c)
    list(engine.stream())
    assert [sequence.chosen for sequence in live] == wanted
    engine.adapters.load("c", c)  # into the place of "b"
    assert engine.adapters["c"].number == b.number
    engine.adapters.unload("c")
    engine.adapters.load("b", b.directory)
    again = run(engine, asked[0].prompt, "b")
    assert (again.chosen, again.num_reused) == (wanted[0], 16)


def test_what_cannot_be_loaded_or_unloaded(qwen3, tmp_path):
    adapters = qwen3.adapters
    with pytest.raises(ValueError, match=r"adapter 'x' is not loaded"):
        adapters.unload("x")
    for name in ("a", adapters.model.name):
        with pytest.raises(ValueError, match=r"a model of this name exists"):
            adapters.load(name, tmp_path)
    large = write_adapter(tmp_path / "large", adapters._base, rank=7)
    small = Adapters(adapters._base, ROOM)
    with pytest.raises(ValueError, match=r"its rank is 7, but there is room for 6"):
        small.load("large", large)
    assert len(small) == 0
    with pytest.raises(ValueError, match=r"there is room for 0"):
        Adapters(adapters._base).load("a", large)
    with pytest.raises(ValueError, match=r"tiny has no linear layers"):
        Adapters(tiny_model(), ROOM)
    with pytest.raises(ValueError, match=r"both must be at least 1"):
        Room(0, 4)


@pytest.mark.extended
def test_only_texts_with_the_same_adapter_share_a_prompt(qwen3):
    """Texts are right, which they would not be if prefixes were shared across adapters."""
    restart(qwen3)
    prompt = prompts(1)[0]
    expected = {name: run(qwen3, prompt, name).chosen for name in (None, "a", "b")}
    restart(qwen3)
    which = [None, "a", "a", "b", None]
    sequences = qwen3.generate(
        Request(prompt, 12, adapter=name and qwen3.adapters[name]) for name in which
    )
    assert [s.chosen for s in sequences] == [expected[name] for name in which]
    assert [s.num_reused for s in sequences] == [0, 0, 19, 0, 19]
    qwen3.check_idle()


def _ids_of_the_first(plan, bucket, limits):
    inputs = pack(plan, bucket, limits)
    return dataclasses.replace(inputs, adapters=np.full_like(inputs.adapters, inputs.adapters[0]))


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("examples.engine.request.Request.salt", b""),
        ("examples.engine.engine.pack", _ids_of_the_first),
    ],
    ids=["prefixes-of-other-adapters", "one-adapter-for-all"],
)
def test_a_wrong_engine_is_caught(qwen3, monkeypatch, where, wrong):
    restart(qwen3)
    prompt = prompts(1)[0]
    expected = [run(qwen3, prompt, name).chosen for name in ("a", "b")]
    monkeypatch.setattr(where, wrong)
    restart(qwen3)
    requests = [Request(tuple(prompt), 12, adapter=qwen3.adapters[name]) for name in ("a", "b")]
    if isinstance(wrong, bytes):
        found = [qwen3.generate([request])[0].chosen for request in requests]
    else:
        found = [sequence.chosen for sequence in qwen3.generate(requests)]
    assert found != expected


def test_without_room_for_adapters_nothing_changes(qwen3):
    """Parameters, inputs and program are those of an engine that knows of no adapters."""
    model, limits = qwen3.adapters._base, dataclasses.replace(qwen3.limits, adapters=None)
    assert Adapters(model).model is model
    assert pack([], MIXED, limits).adapters is None


@pytest.mark.extended
def test_a_step_without_adapters_branches_around_them(qwen3):
    """Room for adapters adds a branch with two products per linear layer, taken on the device."""
    steps, limits = qwen3.steps, dataclasses.replace(qwen3.limits, adapters=None)
    step = jax.jit(steps._step(qwen3.adapters._base, MIXED))
    bare = step.lower(qwen3.adapters._base.params, *steps._state[1:], pack([], MIXED, limits))
    texts = [steps._lower(MIXED).as_text(), bare.as_text()]
    branches, products = (
        [text.count(op) for text in texts] for op in ("stablehlo.case", "stablehlo.dot_general")
    )
    assert branches[0] - branches[1] == len(qwen3.model.linears)
    assert products[0] - products[1] == 2 * len(qwen3.model.linears)


def test_parameters_are_not_held_twice(qwen3):
    """Adapter matrices are allocated once, as large as the room, and weights are the model's."""
    adapted, base = qwen3.model.params, qwen3.adapters._base.params
    assert isinstance(adapted, Adapted)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (adapted.base, base)), strict=True))
    rows = ROOM.count * ROOM.rank
    sizes = sum(sum(whole.shape) for whole, _ in qwen3.model.linears.values())
    assert sum(x.size for x in jax.tree.leaves(adapted.stacks)) == rows * sizes


# -- several devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3-tiny", marks=pytest.mark.extended),
        pytest.param("nemotron-h-tiny", marks=pytest.mark.slow),
        pytest.param("qwen3-next-tiny", marks=pytest.mark.slow),
    ],
)
def test_two_devices_give_the_tokens_of_one(name, tmp_path):
    """Adapters join the partial sums of the weights, and are split by the same sections."""
    model = load_model(CHECKPOINTS / name)
    sources = {n: write_adapter(tmp_path / n, model, seed=i) for i, n in enumerate(("a", "b"))}
    engine = build(model, **sources)
    given = prompts(4)
    chosen = [run(engine, p, w).chosen for p in given for w in (None, "a", "b")]
    code = f"""
import dataclasses
from examples.engine.engine import Engine
from examples.engine.request import Request
from tests.support.lora import MIXED, build, prompts
model = load_model(checkpoints.CHECKPOINTS / {name!r}, mesh=make_mesh("tensor=2"))
engine = build(model, a={str(sources["a"])!r}, b={str(sources["b"])!r})
sequences = engine.generate(
    Request(p, 12, adapter=w and engine.adapters[w])
    for p in prompts(4) for w in (None, "a", "b"))
print([s.chosen for s in sequences])
bare = dataclasses.replace(engine.limits, adapters=None)
bare = Engine(engine.adapters._base, bare, buckets=(MIXED,))
def widths(engine):  # the last feed-forward part has all rows where tokens have adapters
    found = collectives(engine.steps.programs[MIXED])
    each = ((kind, shape.partition(",")[2]) for (kind, shape), n in found.items() for _ in range(n))
    return sorted(each)
assert widths(bare) == widths(engine)
"""
    assert json.loads(on_eight_devices(code)) == chosen


# -- PEFT -----------------------------------------------------------------------------------------


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma4-e2b-tiny", "qwen3-next-tiny"])
def test_adapters_that_peft_saves_give_its_logits(name, rslora, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / name, dtype=torch.float32
    )
    # PEFT would adapt the stacked matrices of experts.
    parts = "self_attn|linear_attn" if name == "qwen3-next-tiny" else "self_attn|mlp"
    config = peft.LoraConfig(
        r=4,
        lora_alpha=3,
        use_rslora=rslora,
        target_modules=rf".*({parts})\.[a-z_]*(proj|qkvz|ba)",
        rank_pattern={"q_proj": 6},
        alpha_pattern={r"layers\.1\..*": 7},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(theirs, config).eval()
    with torch.no_grad():
        for parameter in (p for n, p in theirs.named_parameters() if "lora_" in n):
            parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)
    engine = build(load_model(CHECKPOINTS / name), peft=tmp_path)
    prompt = prompts(1)[0]
    alone = run(engine, prompt, "peft")
    with torch.no_grad():
        logits = theirs(torch.tensor([[*prompt, *alone.chosen[:-1]]])).logits
    wanted = logits[0, len(prompt) - 1 :].numpy()
    np.testing.assert_allclose(alone.logits, wanted, atol=2e-3)
    assert run(engine, prompt, None).chosen != alone.chosen
