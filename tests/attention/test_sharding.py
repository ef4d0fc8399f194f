"""Attention over a mesh: four devices together compute what one does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
import jattn.sharding
from jattn.call import arguments
from tests.support import processes
from tests.support.compiled import compilations

FOUR = AbstractMesh((4,), ("heads",))
PRELUDE = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import jattn, jattn.sharding

assert len(jax.devices()) == 4
rng = np.random.default_rng(0)
def floats(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)
def mesh_of(kind):
    return jax.make_mesh((4,), ("heads",), axis_types=(kind,))
tables = jnp.asarray([[5, 0], [2, 4], [1, 3]], jnp.int32)
lens = jnp.asarray([3, 8, 5], jnp.int32)
slots = jnp.asarray([20, 21, 22, 8, 9, 10, 11, 16, 17, 18, 19, 4, 5, 6, 7, 12], jnp.int32)
"""


def on_four_devices(code: str) -> str:
    """Run `code` in a process with four devices, and return what it printed."""
    return processes.python(PRELUDE + code, JAX_NUM_CPU_DEVICES="4")


def test_heads_over_four_devices():
    """Caches with every kind of scale, in both layouts, are written and read on both kinds of mesh.

    The last two caches have one KV head, which every device holds: MQA, and a latent cache whose
    keys hold their values.
    """
    code = """
cases = [
    (None, "HND", AxisType.Auto, 4, None),
    (jattn.Nvfp4(), "NHD", AxisType.Explicit, 8, None),
    (jattn.Dense("bfloat16"), "NHD", AxisType.Auto, 1, None),
    (jattn.Fp8("e4m3"), "HND", AxisType.Explicit, 1, 12),
]
for format, layout, kind, kv_heads, latent in cases:
    on = {"mesh": mesh_of(kind), "axis_name": "heads"}
    sizes = (6, kv_heads, 4, 16)
    key, value = floats(16, kv_heads, 16), floats(16, kv_heads, 16)
    query = floats(3, 8, 16)
    by_head = {"sinks": floats(8), "alibi_slopes": floats(8)}
    if layout == "NHD":
        by_head = {"sinks": floats(3, 8), "relative_bias": floats(8, 9)}
    given = {"block_tables": tables, "seq_lens": lens, **by_head, "logits_soft_cap": 5.0,
             "kv_layout": layout, "return_lse": True, "value_dim": latent}
    value = None if latent else value
    scales = {"k_scale": 0.5, "v_scale": jnp.full(kv_heads, 2.0)} if format is None else {}
    how = {"format": format, "kv_layout": layout, "values_in_keys": latent is not None}
    one = jattn.init_kv_cache(*sizes, **how)
    many = jattn.sharding.init_kv_cache(*sizes, **how, **on)
    if format is None:  # plain arrays
        one, many = [tuple(c.numbers() for c in caches) for caches in (one, many)]
    elif format.takes_scale:
        scale = jnp.arange(1, kv_heads + 1, dtype=jnp.float32) / 2
        one = tuple(c and c.replace(scale=scale) for c in one)
        where = P("heads") if kv_heads > 1 else P()
        scale = jax.device_put(scale, jax.sharding.NamedSharding(on["mesh"], where))
        many = tuple(c and c.replace(scale=jnp.copy(scale)) for c in many)
    one = jattn.update_kv_cache(*one, key, value, slots, kv_layout=layout, **scales)
    want = jattn.paged_attention(query, *one, **given, **scales)
    heads_axis = 2 if layout == "NHD" else 1
    share = {s.data.shape[heads_axis] for s in jax.tree.leaves(many[0])[0].addressable_shards}
    assert share == {max(kv_heads // 4, 1)}, share
    write = jax.jit(lambda *a: jattn.sharding.update_kv_cache(
        *a, kv_layout=layout, **scales, **on), donate_argnums=(0, 1))
    many = write(*many, key, value, slots)
    attend = jax.jit(lambda q, k, v, a: jattn.sharding.paged_attention(
        q, k, v, **a, logits_soft_cap=5.0, kv_layout=layout, return_lse=True, value_dim=latent,
        **scales, **on))
    arrays = {n: given[n] for n in ("block_tables", "seq_lens", *by_head)}
    have = attend(query, *many, arrays)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    text = attend.lower(query, *many, arrays).compile().as_text()
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert (word in text) is False, (word, kv_heads)
print("same")
"""
    assert on_four_devices(code) == "same"


def test_a_cache_made_under_jit_is_split():
    code = """
for kind in (AxisType.Auto, AxisType.Explicit):
    on = {"mesh": mesh_of(kind), "axis_name": "heads"}
    for format in (None, jattn.Int8()):
        make = functools.partial(jattn.sharding.init_kv_cache, 6, 4, 8, 16, format=format, **on)
        with jax.set_mesh(on["mesh"]):
            for program in (make, jax.jit(make)):
                for x in jax.tree.leaves(program()):
                    shares = {shard.data.shape for shard in x.addressable_shards}
                    assert shares == {(6, 1, *x.shape[2:])}, (kind, format, x.shape, shares)
print("split")
"""
    assert on_four_devices(code) == "split"


@pytest.mark.extended
def test_tables_that_an_explicit_mesh_splits():
    """Cascades and `AttentionMetadata.from_arrays` take a batch that is split over sequences."""
    code = """
mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
def put(x, *axes):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*axes)))
query, keys, values = floats(4, 8, 16), floats(8, 4, 4, 16), floats(8, 4, 4, 16)
batch = {"block_tables": jnp.asarray([[1, 2], [1, 3], [1, 4], [1, 5]], jnp.int32),
         "seq_lens": jnp.asarray([5, 6, 7, 8], jnp.int32)}
starts = jnp.asarray([0, 1, 2, 3, 4], jnp.int32)
split = {name: put(x, "data") for name, x in batch.items()}
pools = [put(x, None, "heads") for x in (keys, values)]
for ragged in ({}, {"query_start_loc": starts}):
    want = jattn.paged_attention(query, keys, values, **batch, **ragged)
    for rows in (put(query, "data"), put(query, "data", "heads")):
        for name in (None, "xla"):
            attend = lambda q, k, v, given: jattn.cascade_attention(
                q, k, v, num_shared_blocks=1, **given, **ragged, implementation=name)
            for run in (attend, jax.jit(attend)):
                for caches in ((keys, values), pools):
                    found = run(rows, *caches, split)
                    np.testing.assert_allclose(np.asarray(found), np.asarray(want), 1e-5, 1e-6)
make = lambda given: jattn.AttentionMetadata.from_arrays(
    **given, query_start_loc=starts, num_tokens=4, block_size=4, max_query_len=1)
flat = dict(split, block_tables=put(batch["block_tables"].reshape(-1), ("data", "heads")))
for given in (split, flat):
    for run in (make, jax.jit(make)):
        for a, b in zip(*map(jax.tree.leaves, (run(given), make(batch))), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
print("same")
"""
    assert on_four_devices(code) == "same"


@pytest.mark.extended
def test_keys_over_four_devices():
    """In decode over split keys, each device attends to its own, and results merge once."""
    code = """
from jattn import blocks
mesh = jax.make_mesh((4,), ("keys",), axis_types=(AxisType.Auto,))
parts = blocks.ContextParallel(size=4, interleave=2)
query, keys, values = floats(3, 4, 16), floats(3, 40, 2, 16), floats(3, 40, 2, 16)
sinks = floats(4)
lens = (37, 3, 0)  # of three keys two devices have none, of the last sequence all
pools = np.full((2, 4, 6, 2, 16, 16), np.nan, np.float32)
for b, n in enumerate(lens):
    for position in range(n):
        turn, offset = divmod(position, 8)
        rank, local = offset // 2, turn * 2 + offset % 2
        pools[0, rank, b, :, local] = keys[b, position]
        pools[1, rank, b, :, local] = values[b, position]
local = jnp.asarray([[parts.local_length(n, rank) for n in lens] for rank in range(4)], jnp.int32)
tables = jnp.asarray([[0], [1], [2]], jnp.int32)

def attend(query, key_cache, value_cache, seq_lens):
    out, lse = jattn.paged_attention(query, key_cache[0], value_cache[0], block_tables=tables,
                                     seq_lens=seq_lens[0], return_lse=True)
    return jattn.sharding.merge_over(out, lse, "keys")

run = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(P(), P("keys"), P("keys"), P("keys")),
                            out_specs=(P(), P())))
out, lse = run(query, *jnp.asarray(pools), local)
assert np.isneginf(np.asarray(lse)[2]).all()
slope, lse_slope = floats(3, 4, 16), floats(3, 4)
pools_of = [jnp.nan_to_num(x) for x in pools]

def value(run, query, *caches):
    out, lse = run(query, *caches)
    return (out * slope).sum() + jnp.where(jnp.isfinite(lse), lse * lse_slope, 0).sum()

found = jax.grad(lambda q, k, v: value(lambda q, k, v: run(q, k, v, local), q, k, v), (0, 1, 2))(
    query, *pools_of)
out, lse = jattn.merge_attention_states(
    out, lse, jnp.zeros_like(out), jnp.broadcast_to(sinks[None], lse.shape))
whole = [x.reshape(15, 8, 2, 16).swapaxes(1, 2) for x in (keys, values)]
flat = dict(block_tables=jnp.arange(15, dtype=jnp.int32).reshape(3, 5),
            seq_lens=jnp.asarray(lens, jnp.int32), return_lse=True)
want = jattn.paged_attention(query, *whole, sinks=sinks, **flat)
by_all = jax.grad(lambda q, k, v: value(
    lambda *a: jattn.paged_attention(*a, **flat), q, k, v), (0, 1, 2))(query, *whole)
np.testing.assert_allclose(np.asarray(found[0]), np.asarray(by_all[0]), rtol=1e-4, atol=1e-5)
for pair in zip(found[1:], by_all[1:]):
    parts_of, whole_of = map(np.asarray, pair)
    assert np.abs(whole_of).max() > 0.1
    for b, n in enumerate(lens):
        for position in range(n):
            turn, offset = divmod(position, 8)
            mine = parts_of[offset // 2, b, :, turn * 2 + offset % 2]
            other = whole_of[5 * b + position // 8, :, position % 8]
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(np.asarray(out), np.asarray(want[0]), rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(np.asarray(lse), np.asarray(want[1]), rtol=1e-5, atol=1e-6)
print("same")
"""
    assert on_four_devices(code) == "same"


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    "format",
    [
        jattn.Dense("float16"),
        jattn.Fp8(),
        jattn.Fp8("e4m3", "block"),
        jattn.Int4(zero_point=True),
        jattn.Nvfp4(),
    ],
)
def test_every_array_of_a_cache_is_split_where_its_heads_are(format, kv_layout):
    caches = jattn.init_kv_cache(6, 8, 4, 16, format=format, kv_layout=kv_layout)
    specs = jattn.sharding.cache_specs(caches[0], mesh=FOUR, axis_name="heads", kv_layout=kv_layout)
    arrays, said = jax.tree.leaves(caches[0]), jax.tree.leaves(specs, is_leaf=_is_spec)
    assert len(arrays) == len(said) > 0
    for x, spec in zip(arrays, said, strict=True):
        split = [x.shape[i] for i, name in enumerate(spec) if name == "heads"]
        assert split == ([8] if x.ndim else [])


def _is_spec(x) -> bool:
    return isinstance(x, P)


def test_wrong_meshes_are_refused_by_name():
    three = jnp.zeros((6, 3, 4, 16))
    with pytest.raises(ValueError, match=r"kv_cache: 3 KV heads, but must be a multiple of the 4"):
        jattn.sharding.cache_specs(three, mesh=FOUR, axis_name="heads")
    with pytest.raises(ValueError, match=r"(?s)axis_name: 'tp'.*kv_layout: 'NHWC'.*kv_cache: "):
        jattn.sharding.cache_specs(three[0], mesh=FOUR, axis_name="tp", kv_layout="NHWC")
    with pytest.raises(ValueError, match=r"axis_name: \['heads'\], but must be an axis of"):
        jattn.sharding.cache_specs(three, mesh=FOUR, axis_name=["heads"])
    with pytest.raises(ValueError, match=r"mesh: NoneType None, but must be a jax.sharding.Mesh"):
        jattn.sharding.init_kv_cache(6, 4, 4, 16, mesh=None, axis_name="heads")
    cache = jnp.zeros((6, 4, 4, 16))
    with pytest.raises(ValueError, match=r"query: float32\[3, 6, 16\], but must be .* multiple of"):
        jattn.sharding.paged_attention(
            jnp.zeros((3, 6, 16)), cache, cache, mesh=FOUR, axis_name="heads"
        )
    rows, slots = jnp.zeros((3, 4, 16)), jnp.zeros(3, jnp.int32)
    for given, names in (
        ((jnp.zeros((3, 8, 16)), rows, slots), [r"key: float32\[3, 8, 16\], .* = \[3, 4, 16\]"]),
        ((rows, rows[:2], slots), [r"value: float32\[2, 4, 16\], .* = \[3, 4, 16\]"]),
        (
            (rows, rows, [0.5]),
            ["key: ", "value: ", r"slot_mapping: list \[0.5\], but must be int32"],
        ),
    ):
        for words in names:
            with pytest.raises(ValueError, match=rf"(?s)^update_kv_cache: .*  - {words}"):
                jattn.sharding.update_kv_cache(
                    *(cache, cache, *given), mesh=FOUR, axis_name="heads"
                )
    for name in ("k_scale", "implementation"):
        with pytest.raises(ValueError, match=rf"^update_kv_cache: 1 wrong .*\n  - {name}: .*'x'"):
            jattn.sharding.update_kv_cache(
                *(cache, cache, rows, rows, slots), **{name: "x"}, mesh=FOUR, axis_name="heads"
            )
    with pytest.raises(ValueError, match=r"lse: float32\[3\], but must be of shape \[2\]"):
        jattn.sharding.merge_over(jnp.zeros((2, 4)), jnp.zeros(3), "keys")
    with pytest.raises(ValueError, match=r"out: list \[1.0\], but must be an array"):
        jattn.sharding.merge_over([1.0], jnp.zeros(3), "keys")
    assert jattn.sharding.cache_specs(None, mesh=FOUR, axis_name="heads") is None


@pytest.mark.extended
def test_eager_calls_compile_once():
    """New numbers and tables compile nothing; a new option does compile."""
    on = {"mesh": jax.make_mesh((1,), ("heads",)), "axis_name": "heads"}
    caches = jattn.sharding.init_kv_cache(4, 2, 16, 24, format=jattn.Fp8(), **on)
    with compilations(at_most=0):  # of another layer
        jattn.sharding.init_kv_cache(4, 2, 16, 24, format=jattn.Fp8(), **on)
    given = {"seq_lens": jnp.asarray([5], jnp.int32), "implementation": ["xla"]}
    row = jnp.ones((1, 2, 24))

    def step(number: int, caches):
        slots = jnp.asarray([16 + number], jnp.int32)
        caches = jattn.sharding.update_kv_cache(*caches, row, row, slots, **on)
        tables = jnp.asarray([[number % 4]], jnp.int32)
        numbers = {"scale": 0.5 + number, "sliding_window": 3 + number}
        query = jnp.ones((1, 4, 24))
        jattn.sharding.paged_attention(
            query, *caches, block_tables=tables, **given, **numbers, **on
        )
        return caches

    for number in range(2):
        caches = step(number, caches)
    with compilations(at_most=0):
        for number in range(2, 5):
            caches = step(number, caches)
    # NumPy's integers, bools and types are static arguments, as in the plain call.
    static = {"max_query_len": np.int64(1), "is_causal": np.True_, "out_dtype": np.float32}
    query, tables = jnp.ones((1, 4, 24)), jnp.asarray([[1]], jnp.int32)
    alone = jax.tree.map(np.asarray, caches)
    plain = jattn.paged_attention(query, *alone, block_tables=tables, **given, **static)
    found = jattn.sharding.paged_attention(
        query, *caches, block_tables=tables, **given, **static, **on
    )
    np.testing.assert_array_equal(found, plain)


def test_new_numbers_compile_nothing():
    """For every argument that is a number, including those added to `KINDS` later."""
    on = {"mesh": jax.make_mesh((1,), ("heads",)), "axis_name": "heads"}
    pool = jnp.ones((4, 2, 16, 24))
    batch = {"block_tables": jnp.asarray([[1]], jnp.int32), "seq_lens": jnp.asarray([5], jnp.int32)}
    names = [name for name, kind in arguments.KINDS.items() if kind.number]
    assert {"scale", "sliding_window", "k_scale"} <= set(names)

    def attend(*numbers):
        given = dict(zip(names, numbers, strict=True))
        jattn.sharding.paged_attention(
            jnp.ones((1, 4, 24)), pool, pool, **batch, **given, implementation="xla", **on
        )

    first = [3] * len(names)
    with compilations(at_least=1):
        attend(*first)
    for i in range(len(names)):
        with compilations(at_most=0):
            attend(*first[:i], 4, *first[i + 1 :])


@pytest.mark.extended
def test_shard_map_with_its_default_checks():
    """Loop carries that start as zeros vary like their inputs; shared numbers' gradients add up."""
    code = """
H = P(None, "heads")
mesh = mesh_of(AxisType.Auto)
starts = jnp.asarray([0, 1, 8, 11], jnp.int32)
query, cache = floats(11, 8, 16), floats(6, 4, 4, 16)

def attend(q, k, b, l, s, scale):
    return jattn.paged_attention(q, k, k, block_tables=b, seq_lens=l, query_start_loc=s,
                                 scale=scale, logits_soft_cap=5.0)

specs = (H, H, P(), P(), P(), P())
on_all = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=H))
given = (query, cache, tables, lens, starts, jnp.float32(0.3))
np.testing.assert_allclose(np.asarray(on_all(*given)), np.asarray(attend(*given)), rtol=1e-5,
                           atol=1e-6)
weights = floats(11, 8, 16)
def loss(f):
    return jax.grad(lambda q, k, scale: (f(q, k, *given[2:5], scale) * weights).sum(), (0, 1, 2))
have, want = (loss(f)(query, cache, given[5]) for f in (on_all, attend))
for a, b in zip(have, want, strict=True):
    assert np.abs(np.asarray(b)).max() > 1e-3
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
print("same")
"""
    assert on_four_devices(code) == "same"


def test_a_pool_split_over_its_head_size_is_refused():
    def pool(*axes: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(FOUR, P(*axes))
        return jax.ShapeDtypeStruct((6, 4, 4, 16), jnp.float32, sharding=sharding)

    query = jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)
    tables = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    given = {"block_tables": tables, "seq_lens": jax.ShapeDtypeStruct((3,), jnp.int32)}
    split, fine = pool(None, None, None, "heads"), pool(None, "heads")
    words = jattn.KVArray(split, None, jattn.Dense("float32"))
    rows = jattn.KVRows(split, 4, 8, 16, 8, 8)
    for caches in ((split, split), (words, words), (rows, None)):
        with pytest.raises(ValueError, match=r"split over its last axis along \('heads',\)"):
            jattn.explain(query, *caches, **given)
    assert jattn.explain(query, fine, fine, **given)
