"""The engine on several devices: tokens as on one, and only the textbook's collectives."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.serving import mesh as paper
from examples.engine import mesh as meshes
from examples.engine.mesh import Parameter, local_part, make_mesh, part_slices
from examples.models.decoder import Heads
from tests.support import checkpoints, processes
from tests.support.devices import on_eight_devices

# Compiles the decode step of two devices again with 100 times as many blocks: it copies no pool.
NOTHING_POOL_SIZED = """
import jattn.testing
def enlarged(x, times):
    return jax.ShapeDtypeStruct((x.shape[0] * times, *x.shape[1:]), x.dtype, sharding=x.sharding)
steps = engine.steps
params, caches, *others = steps._state
steps._state = (params, jax.tree.map(lambda x: enlarged(x, 100), caches), *others)
of_a_device = jax.tree.map(lambda x: enlarged(x, 50), caches)
jattn.testing.assert_nothing_pool_sized(steps._lower(checkpoints.DECODE).compile(), of_a_device)
"""
# Every family with its number of all-reduces: one after each mixer's projection, one after each
# feed-forward part (Nemotron-H's layers are one or the other), and one for embeddings.
FAMILIES = {
    "qwen3-tiny": 9,
    "gemma4-31b-tiny": 11,
    "gemma4-e2b-tiny": 13,
    "gpt-oss-tiny": 9,
    "nemotron-h-tiny": 7,
    "qwen3-next-tiny": 9,
    "deepseek-v3-tiny": 7,
}


def textbook(num_reduces: int, *, per_layer_embeddings: int = 0) -> dict:
    """Return the collectives of a decode step of 8 sequences, with hidden states of 64 numbers."""
    others = {("all-reduce", f"f32[8,{per_layer_embeddings}]"): 1} if per_layer_embeddings else {}
    return {
        ("all-reduce", "f32[8,64]"): num_reduces,
        ("all-gather", "f32[8,256]"): 1,  # logits, for a vocabulary of 256
        **others,
    }


@pytest.mark.newer
@pytest.mark.parametrize(
    "name",
    checkpoints.some(FAMILIES, slow=("qwen3-next-tiny", "gemma4-31b-tiny", "gemma4-e2b-tiny")),
)
def test_tensor_parallelism_has_the_tokens_of_one_device_and_textbook_collectives(name):
    embeddings = 6 * 16 if name == "gemma4-e2b-tiny" else 0  # one more embedding, for all layers
    code = f"""
engine = check_tokens({name!r}, "tensor=2", buckets=(checkpoints.MIXED, checkpoints.DECODE))
found = collectives(engine.steps.programs[checkpoints.DECODE])
assert found == {textbook(FAMILIES[name], per_layer_embeddings=embeddings)}, found
# Of a mixed step too, of 40 tokens: nothing of another size, but for the last feed-forward part,
# which is computed for the rows of the logits.
found = collectives(engine.steps.programs[checkpoints.MIXED])
last = found.pop(("all-reduce", "f32[8,64]"), 0)
assert last == {int(name != "nemotron-h-tiny")}, (last, found)
assert found.pop(("all-reduce", "f32[40,64]")) + last == {FAMILIES[name]}, found
embeddings = {{("all-reduce", "f32[40,{embeddings}]"): 1}} if {embeddings} else {{}}
assert found == {{("all-gather", "f32[8,256]"): 1}} | embeddings, found
split = [x for x in jax.tree.leaves(engine.model.params) if not x.sharding.is_fully_replicated]
assert sum(x.nbytes for x in split) > {0.75 if name == "deepseek-v3-tiny" else 0.9} * sum(
    x.nbytes for x in jax.tree.leaves(engine.model.params))
"""
    on_eight_devices(code + (NOTHING_POOL_SIZED if name == "qwen3-tiny" else ""))


@pytest.mark.extended
def test_more_devices_than_kv_heads():
    """On four devices, Qwen3 has two KV heads and Gemma 4 one or four: each is on one or more."""
    code = """
engine = check_tokens("qwen3-tiny", "tensor=4")
assert {cache.num_kv_heads for cache in engine.model.layers.values()} == {1}
engine = check_tokens("gemma4-31b-tiny", "tensor=4")
"""
    on_eight_devices(code)


@pytest.mark.extended
def test_recurrent_states_in_pages_on_two_devices():
    """A page of a device's share of keys and values holds the state of its heads and channels."""
    code = """
from examples.engine.caches import aligned_block_size
model = load_model(checkpoints.CHECKPOINTS / "nemotron-h-tiny", mesh=make_mesh("tensor=2"))
size = aligned_block_size(model.layers, 4, 4)
check_tokens("nemotron-h-tiny", "tensor=2", block_size=size, unified=True)
"""
    on_eight_devices(code)


@pytest.mark.slow
def test_latents_are_split_by_token():
    """DeepSeek: each device reads whole latents of its tokens, and has some of the heads."""
    on_eight_devices('check_tokens("deepseek-v3-tiny", "tensor=2,context=2")')


@pytest.mark.newer
@pytest.mark.extended
def test_context_parallelism_merges_partial_results():
    """With sinks and windows, also together with tensor parallelism.

    Two of GPT-OSS's four layers have windows, and whole caches on each device. The caches of the
    others are split by token, so they are half as large.
    """
    code = """
buckets = (checkpoints.MIXED, checkpoints.DECODE)
engine = check_tokens("gpt-oss-tiny", "context=2", buckets=buckets, check=True)
found = collectives(engine.steps.programs[checkpoints.DECODE])
assert found == {
    ("all-reduce", "f32[8,64]"): 9,
    ("all-gather", "f32[8,8,64]"): 4,  # queries
    ("all-gather", "f32[8]"): 2,  # sinks of the layers with windows
    ("all-to-all", "f32[1,8,4,64]"): 4,  # the others' parts: from two devices in two layers
    ("all-to-all", "f32[1,8,4]"): 4,  # with their log-sum-exp
    ("all-gather", "f32[8,256]"): 1,
}, found
sizes = {place.group: engine.caches.pools[place.pool][0].shape[2] for place in engine.caches.places}
assert sizes == {"sliding": 16, "global": 8}, sizes
"""
    more = 'check_tokens("qwen3-tiny", "tensor=2,context=2")'
    on_eight_devices(code + NOTHING_POOL_SIZED + more)


@pytest.mark.slow
def test_context_parallelism_of_other_families():
    """Layers that read another one's keys, heads of two sizes, and models with keys and states."""
    names = ("gemma4-e2b-tiny", "gemma4-31b-tiny", "nemotron-h-tiny", "qwen3-next-tiny")
    on_eight_devices(f"""
for name in {names}:
    check_tokens(name, "context=2", 4)
""")


@pytest.mark.extended
def test_experts_over_four_devices():
    """Eight experts, two on each device, so that routers choose experts on all devices."""
    code = """
import json
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from examples.models import checkpoint, deepseek, gpt_oss, nemotron_h, qwen3_next

def config_of(kind, name, **changes):
    text = (checkpoints.CHECKPOINTS / name / "config.json").read_text()
    return kind.from_hf({**json.loads(text), **changes})

f32, mesh, rng = jnp.dtype("float32"), make_mesh("tensor=2,context=2"), np.random.default_rng(0)
sizes = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
layers = {"layers_block_type": ["moe", "moe"], "n_group": 2, "topk_group": 1, **sizes}
mamba = lambda c: nemotron_h.MixtureOfExperts(c.outline, c.experts, True, f32)
kind, name = nemotron_h.NemotronHConfig, "nemotron-h-tiny"
cases = [
    (lambda c: gpt_oss.MixtureOfExperts(c, f32),
     config_of(gpt_oss.GptOssConfig, "gpt-oss-tiny", num_local_experts=8)),
    (lambda c: qwen3_next.MixtureOfExperts(c, f32),
     config_of(qwen3_next.Qwen3NextConfig, "qwen3-next-tiny", num_experts=8,
               linear_num_key_heads=4)),
    (mamba, config_of(kind, name, n_groups=4, **layers)),
    (mamba, config_of(kind, name, n_groups=4, moe_latent_size=24, **layers)),
    (lambda c: deepseek.MixtureOfExperts(c.outline, c.experts, f32),
     config_of(deepseek.DeepseekConfig, "deepseek-v3-tiny")),
]
x = jnp.asarray(rng.standard_normal((13, 64)), f32)
for make, config in cases:
    whole, variables = checkpoint._variables(nnx.eval_shape(lambda: make(config)))
    graph, parts = checkpoint._variables(nnx.eval_shape(lambda: make(local_part(config, 4, 2))))
    one, many = [], []
    for name, (path, variable) in variables.items():
        value = rng.standard_normal(variable.get_value().shape).astype(np.float32) / 4
        shapes = [checkpoint._parameter(found[name][1]) for found in (variables, parts)]
        one.append((path, variable.replace(jnp.asarray(value))))
        many.append((path, variable.replace(mesh.array(*shapes, value.__getitem__))))
    one, many = map(nnx.from_flat_state, (one, many))
    wanted = nnx.merge(whole, one)(x)
    run = mesh.on_all(lambda params, x: nnx.merge(graph, params)(x),
                      (jax.tree.map(lambda a: a.sharding.spec, many), P()), P())
    np.testing.assert_allclose(jax.jit(run)(many, x), wanted, rtol=2e-5, atol=2e-5)
    assert np.abs(wanted).max() > 0.1
"""
    on_eight_devices(code)


def test_parts_of_parameters():
    """Each device gets a run of every section; with more devices than heads, several share one."""
    whole, part = Parameter((12, 5), (8, 4)), Parameter((3, 5), (2, 1))
    rows = [[s[0].indices(12)[:2] for s in part_slices(whole, part, r, 4)] for r in range(4)]
    assert rows == [
        [(0, 2), (8, 9)],
        [(2, 4), (9, 10)],
        [(4, 6), (10, 11)],
        [(6, 8), (11, 12)],
    ]
    heads = [part_slices(Parameter((5, 6)), Parameter((5, 3)), r, 4) for r in range(4)]
    assert [h[0][1].start for h in heads] == [0, 0, 3, 3]


@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma4-31b-tiny", "deepseek-v3-tiny"])
def test_the_model_on_paper_sends_as_much_as_programs(name):
    """Compiled programs have the collectives of `textbook`; the formulas give the same bytes."""
    config = json.loads((checkpoints.CHECKPOINTS / name / "config.json").read_text())
    sizes = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    shape = paper.Shape(name, *sizes, weight_bytes=0, value_bytes=4)
    found = {}
    for (kind, text), count in textbook(FAMILIES[name]).items():
        sent = text.removeprefix("f32[").rstrip("]").split(",")
        found[kind] = (count, 4 * math.prod(map(int, sent)))
    assert found == {kind.name: kind[1:] for kind in shape.collectives(num_seqs=8)}


def test_the_model_on_paper_by_hand():
    """Gemma 4 31B on 8 devices: each has 2 of 16 sliding KV heads; 4 global ones are on 2 each."""
    read = sum(keys.num_bytes(8192, 8) for keys in paper.GEMMA4_31B.keys)
    assert read == 50 * 2 * 1024 * 1024 + 10 * 1 * 2048 * 8192
    times = paper.step_times(paper.GEMMA4_31B, paper.IN_A_HOST, 8, 32, 8192)
    assert times.caches == pytest.approx(32 * read / 3.35e12)
    reduced, gathered = 32 * 5376 * 2 * 2 * 7 / 8, 32 * 262_144 * 4 * 7 / 8
    assert times.collectives == pytest.approx(
        122 * 10e-6 + (121 * reduced + gathered) / 450e9, rel=1e-6
    )
    page = (processes.ROOT / "docs" / "several-devices.md").read_text()
    assert paper.table() in page, "run python -m benchmarks.serving.mesh"


def test_wrong_meshes_are_refused():
    with pytest.raises(ValueError, match=r"mesh 'tensr=2': 'tensr=2' must be one of tensor=N, con"):
        make_mesh("tensr=2")
    for text, words in (
        ("", "'' must be one of"),
        ("tensor=1,", "'' must be one of"),
        ("tensor=1,tensor=1", "tensor is given twice"),
    ):
        with pytest.raises(ValueError, match=words):
            make_mesh(text)
    with pytest.raises(ValueError, match=r"needs 64 devices, but there are .* cpu device"):
        make_mesh("tensor=64")
    with pytest.raises(ValueError, match="tiny's 8 query heads and 3 KV heads cannot be divide"):
        local_part(Heads(8, 3, 64), 5, name="tiny")
    parts = local_part((Heads(8, 2, 64), Heads(16, 16, 64)), 4)
    assert [(h.num_heads, h.num_kv_heads) for h in parts] == [(2, 1), (4, 4)]


def test_every_name_of_the_table_is_a_field():
    """A renamed field would no longer be split."""
    from examples.models import (
        decoder,
        deepseek,
        gemma4_config,
        gpt_oss,
        nemotron_h_config,
        qwen3,
        qwen3_next_config,
    )

    modules = (
        *(decoder, deepseek, gemma4_config, gpt_oss),
        *(nemotron_h_config, qwen3, qwen3_next_config),
    )
    fields = {
        f"{kind.__name__}.{field}"
        for module in modules
        for kind in vars(module).values()
        for field in getattr(kind, "__dataclass_fields__", ())
    }
    table = {*meshes.EVENLY, *meshes.AT_LEAST_ONE, *meshes.COUNTED}
    assert table <= fields, table - fields
