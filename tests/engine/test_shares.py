"""Prompts that move between engines with other meshes: tokens and contents as on one device."""

from __future__ import annotations

import numpy as np
import pytest

from examples.engine.mesh import Parameter
from examples.engine.transfer.shares import Share
from tests.support.devices import on_eight_devices

TOKENS = np.arange(12 * 4 * 3).reshape(12, 4, 3)


@pytest.mark.parametrize(
    ("part", "devices", "context", "first"),
    [
        ((4, 3), 2, 1, TOKENS),
        ((2, 3), 2, 1, TOKENS[:, 2:]),
        ((2, 3), 4, 1, TOKENS[:, :2]),
        ((2, 3), 4, 2, TOKENS[1::2, :2]),
        ((1, 3), 8, 2, TOKENS[1::2, :1]),
        ((1, 3), 8, 1, TOKENS[:, :1]),
    ],
    ids=str,
)
def test_heads_and_tokens_of_devices_make_up_the_whole(part, devices, context, first):
    """`first` is what the second device has. With more devices than heads, each is on several."""
    share = Share(Parameter((4, 3)), Parameter(part), devices, context)
    dealt = share.deal(TOKENS)
    np.testing.assert_array_equal(dealt[1], first)
    np.testing.assert_array_equal(share.join(dealt), TOKENS)


def test_channels_of_several_sections():
    """Each device has a run of the queries, one of the keys and one of the values."""
    share = Share(Parameter((2, 8), (2, 2, 4)), Parameter((2, 4), (1, 1, 2)), 2)
    whole = np.arange(16).reshape(1, 2, 8)
    dealt = share.deal(whole)
    assert dealt[:, 0, 0].tolist() == [[0, 2, 4, 5], [1, 3, 6, 7]]
    np.testing.assert_array_equal(share.join(dealt), whole)


PRELUDE = """
from examples.engine.caches import aligned_block_size
from examples.engine.transfer.description import describe, differences
from examples.engine.request import Request

def engine_on(name, axes, **options):
    model = load_model(checkpoints.CHECKPOINTS / name, mesh=make_mesh(axes) if axes else None)
    if options.get("unified"):
        options["block_size"] = aligned_block_size(model.layers, 4, 4)
    return checkpoints.make_engine(model, **options)

def read(engine, prompts):
    requests = [Request(prompt[:-1], 1, hands_over=True) for prompt in prompts]
    found = [sequence.taken.fetched() for sequence in engine.generate(requests)]
    engine.check_idle()
    return found

def check(name, *engines, num_new=6):
    wanted = checkpoints.reference(name)
    rows = [i for i, n in enumerate(wanted["prompt_lens"]) if n > 1]
    prompts = [tuple(wanted["prompts"][i][: wanted["prompt_lens"][i]].tolist()) for i in rows]
    described = [describe(e.model, e.transfer, e.caches) for e in engines]
    contents = [read(engine, prompts) for engine in engines]
    for one, description in zip(contents, described):
        assert not differences(description, described[0]), differences(description, described[0])
        for found, first in zip(one, contents[0]):
            for x, y in zip(found.arrays, first.arrays, strict=True):
                pair = [a.view("float32") for a in (x, y)]
                np.testing.assert_allclose(*pair, atol=checkpoints.MAX_ERROR / 2)
    for given in contents:
        for engine in engines:
            engine.reset()
            engine.caches = jax.tree.map(checkpoints.poison, engine.caches)
            pairs = zip(prompts, given)
            sequences = [engine.add(Request(p, num_new), contents) for p, contents in pairs]
            list(engine.stream())
            engine.check_idle()
            tokens = [s.chosen for s in sequences]
            np.testing.assert_array_equal(tokens, wanted["tokens"][rows, :num_new])
            assert engine.statistics.num_computed_tokens == len(rows) * num_new
"""
MESHES = {
    # Sinks, windows, and tokens split among devices.
    "gpt-oss-tiny": 'engine_on(name, "tensor=2", block_size=8), engine_on(name, "context=2")',
    # States in separate pools, and in pages.
    "nemotron-h-tiny": 'engine_on(name, ""), engine_on(name, "tensor=2", unified=True)',
    # Four devices share two KV heads.
    "qwen3-tiny": 'engine_on(name, ""), engine_on(name, "tensor=2,context=2"), '
    'engine_on(name, "tensor=4", block_size=4)',
    "qwen3-next-tiny": 'engine_on(name, ""), engine_on(name, "tensor=2")',
    "gemma4-e2b-tiny": 'engine_on(name, ""), engine_on(name, "tensor=2")',
    # One KV head, whose latents lie on all devices or are split by token.
    "deepseek-v3-tiny": 'engine_on(name, ""), engine_on(name, "tensor=2"), '
    'engine_on(name, "tensor=2,context=2")',
    "gemma4-31b-tiny": 'engine_on(name, "tensor=4"), engine_on(name, "context=2")',
}


@pytest.mark.extended
def test_meshes_and_joined_products_do_not_change_the_fingerprint():
    """With split heads, experts and sections, and with KV heads that lie on several devices."""
    on_eight_devices("""
from examples.engine.transfer import fingerprint as module
from examples.engine.transfer.fingerprint import fingerprint
axes = {
    "qwen3-tiny": ["tensor=2", "tensor=4", "tensor=2,context=2"],
    "gpt-oss-tiny": ["tensor=2"],
    "nemotron-h-tiny": ["tensor=2"],
    "deepseek-v3-tiny": ["tensor=2,context=2"],
}
found = {}
for name, meshes in axes.items():
    load = lambda **options: fingerprint(load_model(checkpoints.CHECKPOINTS / name, **options))
    found[name] = {load(), load(join=True), *(load(mesh=make_mesh(text)) for text in meshes)}
module.NUMBERS_AT_A_TIME = 5000  # of large arrays some parts
model = load_model(checkpoints.CHECKPOINTS / "qwen3-tiny", mesh=make_mesh("tensor=4"))
assert any(x.size > 10000 for x in jax.tree.leaves(model.params))
found["qwen3-tiny"].add(fingerprint(model))
assert [len(some) for some in found.values()] == [1] * 4, found
assert len(set.union(*found.values())) == 4
""")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.extended if n == "gpt-oss-tiny" else pytest.mark.slow)
        for n in MESHES
    ],
)
def test_prompts_move_between_meshes(name):
    """From each engine to each, itself included, into caches that hold NaN elsewhere."""
    on_eight_devices(PRELUDE + f"name = {name!r}\ncheck(name, {MESHES[name]})")
