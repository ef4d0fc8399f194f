"""Compiled programs: nothing compiles twice, nothing the size of a pool is copied.

Also covers the transformations of a serving loop: jit with donation, scan over layers, vmap,
gradients, shard_map, and export.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb
from jattn import call as calls
from jattn import testing
from tests.support import budget, dense, matrix, problems, processes
from tests.support.compiled import compilations

pytestmark = pytest.mark.usefixtures("each_row")

MIB = 2**20
by_name = {"ids": lambda format: format.name}
struct = jax.ShapeDtypeStruct

EVERYTHING = frozenset(matrix.EVERYTHING)


def test_new_numbers_never_compile():
    problem = problems.Problem(
        query_lens=(5, 1, 12),
        seq_lens=(40, 17, 12),
        options=EVERYTHING,
        explicit_scale=True,
        frame=(24, 4, 5, 16),
    )
    batch = problems.build(problem)
    # NumPy arrays too: moving them to the device is also compiled, once per shape.
    arrays = ("sinks", "alibi_slopes", "k_scale", "v_scale", "is_causal")
    given = {name: np.asarray(batch.kwargs[name]) for name in arrays}
    with compilations(at_least=1):
        first = batch.run(**given)
    other = problems.build(
        problem.replace(query_lens=(1, 1, 3, 11), seq_lens=(1, 80, 3, 30), seed=5)
    )
    numbers = {
        "scale": 0.3,
        "sliding_window": 29,
        "logits_soft_cap": jnp.float32(2.5),
        "sinks": np.linspace(-1, 1, 4).astype(np.float32),
        "alibi_slopes": np.linspace(0, 1, 4).astype(np.float32),
        "k_scale": np.array([0.3, 2.0], np.float32),
        "v_scale": np.array([3.0, 0.2], np.float32),
        "is_causal": np.array([False, True, False, True]),
    }
    with compilations(at_most=0):
        same = batch.run()
        changed = other.run(**numbers)
        widest = batch.run(sliding_window=2**31 - 1)
    np.testing.assert_array_equal(first[0], same[0])
    np.testing.assert_allclose(changed[0], other.run("reference", **numbers)[0], atol=0.02)
    for out in (changed[0], widest[0]):
        assert np.isfinite(out).all()
        assert np.abs(out - first[0]).max() > 0.1


def test_a_jitted_step_compiles_once():
    """One jitted step writes and reads donated caches, over the steps of a decode."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, query, key, value, meta):
        caches = jattn.update_kv_cache(*caches, key, value, meta.slot_mapping)
        return caches, jattn.paged_attention(query, *caches, **meta.as_kwargs())

    rng = np.random.default_rng(0)
    caches = jattn.init_kv_cache(6, 1, 4, 16, format=jattn.Fp8("e5m2"))
    tables = [[5, 0, 3], [2, 4, 1]]
    lens, outs = [3, 7], []
    for number in range(4):
        counts = [1, 0] if number == 2 else [1, 1]
        lens = [a + b for a, b in zip(lens, counts, strict=True)]
        meta = jattn.AttentionMetadata.from_lengths(counts, lens, tables, 4, max_query_len=1)
        meta = jax.tree.map(jnp.asarray, meta.pad_to(num_tokens=2))
        rows = jnp.asarray(rng.standard_normal((3, 2, 1, 16)).astype(np.float32))
        with compilations(at_least=1) if number == 0 else compilations(at_most=0):
            caches, out = step(caches, *rows, meta)
        outs.append(np.asarray(out))
    assert np.isfinite(np.stack(outs)).all()
    np.testing.assert_array_equal(outs[2][1], 0)


def caches_like(num_blocks: int, format, kv_layout: str, plain: bool = False, size: int = 16):
    """Return a pair of caches of ShapeDtypeStructs, with 2 KV heads and D = V = 32."""
    inner = (size, 2) if kv_layout == "NHD" else (2, size)
    shape = (num_blocks, *inner, 32)
    if plain:
        return (struct(shape, format.value_dtype),) * 2
    shape = (*shape[:-1], shape[-1] // format.values_per_word)
    params = format.quant_param_shapes(shape, kv_layout)
    scale = params.scale or () if format.per is not None else None
    scale, zero = (None if x is None else struct(x, jnp.float32) for x in (scale, params.zero))
    groups = None if params.group_scale is None else struct(params.group_scale, jnp.uint8)
    words = struct(shape, format.word_dtype)
    return (jattn.KVArray(words, scale, format, zero, groups, kv_layout),) * 2


def bytes_of(caches) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches) if x.ndim)


ALL = [
    pytest.param(format, layout, False, id=f"{format.name}-{layout}")
    for format in problems.FORMATS.values()
    for layout in calls.LAYOUTS
]
# Formats without scales per token or block, and one for each way of reading and writing these.
READ = [p for p in ALL if p.id.endswith("HND") and p.values[0].per in (None, "head")]
READ += [p for p in ALL if p.id in ("int4_zero-HND", "fp8_e4m3_block-HND", "int8_zero-NHD")]
WRITTEN = [p for p in ALL if p in READ or p.values[0].per in (None, "head")]


def rest(*tried):
    """The other formats and layouts, for the longer sweeps."""
    left = [p for p in ALL if p not in tried]
    return [pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in left]


PLAIN = [
    pytest.param(jattn.Dense("float32"), layout, True, id=f"plain-float32-{layout}")
    for layout in calls.LAYOUTS
]


@pytest.mark.parametrize(("format", "kv_layout", "plain"), [*WRITTEN, *PLAIN, *rest(*WRITTEN)])
def test_writing_copies_nothing(format, kv_layout, plain):
    step = jax.jit(
        functools.partial(jattn.update_kv_cache, kv_layout=kv_layout), donate_argnums=(0, 1)
    )
    temporaries = []
    for num_blocks in (2**12, 2**15):
        caches = caches_like(num_blocks, format, kv_layout, plain)
        new = struct((8, 2, 32), jnp.bfloat16)
        memory = step.lower(*caches, new, new, struct((8,), jnp.int32)).compile()
        memory = memory.memory_analysis()
        assert memory.alias_size_in_bytes >= bytes_of(caches)
        temporaries.append(memory.temp_size_in_bytes)
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert fresh < 1024, "outputs that are not the donated caches"
    assert temporaries[1] <= temporaries[0] + 1024
    assert temporaries[1] < MIB / 4


def two_by_two(params):
    """Pair keys of one format with values of another, in one layout: half as many programs."""
    for layout in calls.LAYOUTS:
        mine = [p for p in params if p.values[1] == layout]
        for keys, values in zip(mine[::2], [*mine[1::2], mine[0]], strict=False):
            quick = "zero" in keys.id  # the format with the most arrays; CI runs all
            marks = () if quick else pytest.mark.extended
            name = f"{keys.id}-{values.id}"
            yield pytest.param(keys.values, values.values, id=name, marks=marks)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        *two_by_two([*READ, ALL[3]]),
        *(
            pytest.param(p.values, p.values, id=p.id, marks=p.marks)
            for p in (PLAIN[0], *rest(*READ, ALL[3]))
        ),
    ],
)
def test_reading_allocates_nothing_that_grows_with_the_pool(keys, values):
    """In a mixed call, which has both loops; the larger pools have 256 MiB and more."""
    temporaries, kv_layout = [], keys[1]
    words = max(keys[0].values_per_word, values[0].values_per_word)
    for num_blocks in (2**10, 2**17 * words):
        caches = tuple(caches_like(num_blocks, *of)[i] for i, of in enumerate((keys, values)))
        arguments = {
            "block_tables": struct((3, 8), jnp.int32),
            "seq_lens": struct((3,), jnp.int32),
            "query_start_loc": struct((4,), jnp.int32),
        }
        read = jax.jit(functools.partial(jattn.paged_attention, kv_layout=kv_layout))
        query = struct((20, 4, 32), jnp.bfloat16)
        memory = read.lower(query, *caches, **arguments).compile().memory_analysis()
        temporaries.append(memory.temp_size_in_bytes)
    assert bytes_of(caches) >= 256 * MIB
    assert temporaries[1] <= temporaries[0] + 1024, temporaries
    assert temporaries[1] < 16 * MIB


LAYERS = 3


def layers_problem() -> problems.Batch:
    return problems.build(
        problems.Problem(
            query_lens=(1,) * 4,
            seq_lens=(1, 15, 16, 33),
            ragged=False,
            format="bfloat16",
            query_dtype="bfloat16",
            num_kv_heads=1,
            spare_blocks=1,
        )
    )


def test_scan_over_layers_in_one_pool():
    """Layers share a donated pool [L * N, K, S, D] as the carry, which nothing copies."""
    batch = layers_problem()
    num_blocks = batch.key_cache.shape[0]
    rng = np.random.default_rng(8)
    words = [np.asarray(cache.data) for cache in (batch.key_cache, batch.value_cache)]
    rolled = [np.concatenate([np.roll(x, i, axis=-1) for i in range(LAYERS)]) for x in words]
    pools = tuple(jattn.KVArray(jnp.asarray(x), None, jattn.Dense("bfloat16")) for x in rolled)
    queries = jnp.asarray(rng.standard_normal((LAYERS, *batch.query.shape)), jnp.bfloat16)
    news = jnp.asarray(rng.standard_normal((LAYERS, 4, 1, 32)), jnp.bfloat16)
    tables, lens = batch.kwargs["block_tables"], batch.kwargs["seq_lens"]
    last = np.asarray(lens) - 1
    slots = np.asarray(tables)[np.arange(4), last // 16] * 16 + last % 16
    slots = jnp.asarray(slots)

    def layer(caches, each):
        query, new, index = each
        here = slots + index * num_blocks * 16
        caches = jattn.update_kv_cache(*caches, new, new, here)
        mine = jnp.where(tables < num_blocks, tables + index * num_blocks, tables)
        out = jattn.paged_attention(query, *caches, block_tables=mine, seq_lens=lens)
        return caches, out

    @functools.partial(jax.jit, donate_argnums=0)
    def model(caches, queries, news):
        each = (queries, news, jnp.arange(LAYERS, dtype=jnp.int32))
        return jax.lax.scan(layer, caches, each)

    expected = []
    for i in range(LAYERS):
        one = tuple(
            cache.replace(data=jnp.asarray(np.roll(x, i, axis=-1)))
            for cache, x in zip((batch.key_cache, batch.value_cache), words, strict=True)
        )
        one = jattn.update_kv_cache(*one, news[i], news[i], slots)
        expected.append(jattn.paged_attention(queries[i], *one, block_tables=tables, seq_lens=lens))
    _, outs = model(pools, queries, news)
    assert pools[0].data.is_deleted()
    # The same loop on the same numbers gives the same bits, whatever the pool around them.
    np.testing.assert_array_equal(
        np.asarray(outs, np.float32), np.stack([np.asarray(x, np.float32) for x in expected])
    )
    big = caches_like(LAYERS * 2**14, jattn.Dense("bfloat16"), "HND")
    big = jax.tree.map(lambda x: struct((x.shape[0], 1, *x.shape[2:]), x.dtype), big)
    assert bytes_of(big) > 80 * MIB
    compiled = model.lower(big, queries, news).compile()
    testing.assert_nothing_pool_sized(compiled, big, max_temporaries=4 * MIB)


def test_vmap_over_a_leading_batch():
    batches = [
        problems.build(
            problems.Problem(query_lens=(0, 3, 1), seq_lens=lens, frame=(6, 4, 4, 9), seed=seed)
        )
        for seed, lens in enumerate([(0, 20, 33), (7, 3, 48)])
    ]
    names = ("block_tables", "seq_lens", "query_start_loc")
    arrays = [
        (
            jnp.asarray(batch.query),
            batch.key_cache,
            batch.value_cache,
            {name: batch.kwargs[name] for name in names},
        )
        for batch in batches
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arrays)
    outs = jax.vmap(lambda q, k, v, kwargs: jattn.paged_attention(q, k, v, **kwargs))(*stacked)
    for batch, out in zip(batches, outs, strict=True):
        budget.of(batch).check(np.asarray(out))


def dense_in_jax(batch: problems.Batch, query, keys, values, numbers):
    """Differentiable dense attention of the batch's real rows; keys and values per sequence."""
    view = batch.view
    outs = []
    for b in range(view.num_seqs):
        rows = slice(int(view.starts[b]), int(view.starts[b + 1]))
        if rows.start == rows.stop:
            continue
        q, k, v = query[rows], keys[b][:, view.kv_heads], values[b][:, view.kv_heads]
        s = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * numbers["scale"]
        if view.cap is not None:
            s = view.cap * jnp.tanh(s / view.cap)
        s = jnp.where(dense.visible(view, b)[None], s, -jnp.inf)
        if view.sinks is not None:
            sink = jnp.broadcast_to(numbers["sinks"][:, None, None], (*s.shape[:2], 1))
            s = jnp.concatenate([s, sink], axis=2)
        p = jax.nn.softmax(s, axis=-1)[..., : len(k)]
        outs.append(jnp.einsum("hqk,khv->qhv", p, v, precision="highest"))
    return jnp.concatenate(outs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="causal", marks=pytest.mark.slow),
        pytest.param(("sliding_window", "logits_soft_cap", "sinks"), id="options"),
    ],
)
def test_gradients(options):
    """Of query, plain float32 caches, scale and sinks, against jax.grad of a dense computation."""
    problem = problems.Problem(
        query_lens=(1, 9, 4),
        seq_lens=(20, 9, 33),
        plain=True,
        head_dim=16,
        value_dim=8,
        options=frozenset(options),
        padded_tokens=2,
    )
    batch = problems.build(problem)
    real = int(batch.view.starts[-1])
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((real, 4, 8)).astype(np.float32)
    # Padded rows and unowned slots hold NaN, which must not reach a gradient.
    query = jnp.asarray(batch.query)

    numbers = {"scale": jnp.float32(batch.view.scale)}
    if "sinks" in options:
        numbers["sinks"] = batch.kwargs["sinks"]

    def paged(query, key_cache, value_cache, numbers):
        kwargs = {**batch.kwargs, **numbers}
        out = jattn.paged_attention(query, key_cache, value_cache, **kwargs)
        return (out[:real] * weights).sum()

    def plain(query, keys, values, numbers):
        return (dense_in_jax(batch, query, keys, values, numbers) * weights).sum()

    given = (query, batch.key_cache, batch.value_cache, numbers)
    *have, have_numbers = jax.jit(jax.grad(paged, argnums=(0, 1, 2, 3)))(*given)
    keys, values = ([jnp.float32(x) for x in rows] for rows in (batch.view.keys, batch.view.values))
    given = (query[:real], keys, values, numbers)
    *want, want_numbers = jax.jit(jax.grad(plain, argnums=(0, 1, 2, 3)))(*given)
    have = [np.asarray(x) for x in have]
    # Gradients are float32 sums over some dozen keys.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    close(have[0][:real], want[0])
    for name, gradient in want_numbers.items():
        assert np.abs(np.asarray(gradient)).max() > 1e-2
        close(have_numbers[name], gradient, rtol=1e-3)  # a sum over everything, with cancellation
    np.testing.assert_array_equal(have[0][real:], 0)
    tables = np.asarray(batch.kwargs["block_tables"])
    for pool, caches in zip(have[1:], want[1:], strict=True):
        rest = np.ones((pool.shape[0], 16), bool)
        for b, cache in enumerate(caches):
            at = np.arange(len(cache))
            block, offset = tables[b, at // 16], at % 16
            close(pool[block, :, offset], cache)
            assert np.abs(np.asarray(cache)).max() > 1e-3
            rest[block, offset] = False
        np.testing.assert_array_equal(pool.swapaxes(1, 2)[rest], 0)


@pytest.mark.extended
def test_shard_map_over_kv_heads():
    """Two devices with half of the heads each compute what one device does."""
    code = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import jattn

assert len(jax.devices()) == 2
rng = np.random.default_rng(0)
mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
query = jnp.asarray(rng.standard_normal((3, 4, 16)), jnp.float32)
pools = jnp.asarray(rng.standard_normal((2, 6, 2, 4, 16)), jnp.float32)
caches = tuple(jattn.KVArray.from_values(x, jattn.Fp8("e4m3"), 0.5) for x in pools)
tables = jnp.asarray([[5, 0], [2, 4], [1, 3]], jnp.int32)
lens = jnp.asarray([3, 8, 5], jnp.int32)
sinks = jnp.asarray([0.5, 1.0, -1.0, 2.0], jnp.float32)

def attend(query, key_cache, value_cache, tables, lens, sinks):
    return jattn.paged_attention(
        query, key_cache, value_cache, block_tables=tables, seq_lens=lens, sinks=sinks)

cache = jattn.KVArray(P(None, "heads"), P(), jattn.Fp8("e4m3"))
sharded = jax.jit(jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(P(None, "heads"), cache, cache, P(), P(), P("heads")),
    out_specs=P(None, "heads"),
))
have = sharded(query, *caches, tables, lens, sinks)
want = attend(query, *caches, tables, lens, sinks)
np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-5, atol=1e-6)
assert not np.allclose(np.asarray(have)[:, :2], np.asarray(have)[:, 2:])
print("same")
"""
    assert processes.python(code, JAX_NUM_CPU_DEVICES="2") == "same"


@pytest.mark.extended
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_pools_past_two_to_the_31(kv_layout):
    """The last block of a pool of more than 2^31 elements is written and read back."""
    size, dim = 128, 512
    num_blocks = 2**31 // (size * dim) + 2
    caches = jattn.init_kv_cache(
        num_blocks, 1, size, dim, value_dim=2, format=jattn.Fp8("e4m3"), kv_layout=kv_layout
    )
    assert caches[0].data.size > 2**31
    step = jax.jit(
        functools.partial(jattn.update_kv_cache, kv_layout=kv_layout), donate_argnums=(0, 1)
    )
    key = np.ones((3, 1, dim), np.float32)
    key[1] *= 2  # only the middle token's key is like the query, and by far
    value = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    last = num_blocks - 1
    slots = jnp.asarray([last * size, last * size + 1, last * size + 2], jnp.int32)
    caches = step(*caches, jnp.asarray(key), jnp.asarray(value), slots)
    out, lse = jattn.paged_attention(
        jnp.ones((1, 1, dim)),
        *caches,
        block_tables=jnp.asarray([[last]], jnp.int32),
        seq_lens=jnp.asarray([3], jnp.int32),
        scale=1.0,
        kv_layout=kv_layout,
        return_lse=True,
    )
    np.testing.assert_array_equal(np.asarray(out), [[[2, 3]]])
    np.testing.assert_array_equal(np.asarray(lse), [[2 * dim]])


def test_exported_functions_take_caches_metadata_and_tables():
    """A function saved to bytes and read back takes them; what is static stays as it was."""
    caches = jattn.init_kv_cache(8, 1, 16, 32, format=jattn.Fp8("e5m2", "block"), kv_layout="NHD")
    tables = jb.init_block_tables([jb.BlockGroup(16, 4, context=jb.ContextParallel(2, 1))], 2)
    batch = jattn.AttentionMetadata.from_lengths([1], [3], [[2]], 16, max_query_len=np.max([1]))
    rows, query = jnp.ones((1, 1, 32)), jnp.ones((1, 2, 32))

    def step(caches, batch, tables):
        caches = jattn.update_kv_cache(*caches, rows, rows, batch.slot_mapping)
        out = jattn.paged_attention(query, *caches, **batch.as_kwargs())
        return caches, out, jb.clear_row(tables, jnp.asarray([0]))

    given = jax.tree.map(jnp.asarray, (caches, batch, tables))
    step, checks = jax.jit(step), jattn.export_checks()
    saved = jax.export.export(step, disabled_checks=checks)(*given).serialize()
    have = jax.export.deserialize(saved).call(*given)
    want = step(*given)
    assert jax.tree.structure(have) == jax.tree.structure(want)
    assert have[0][0] == want[0][0]
    np.testing.assert_array_equal(np.asarray(have[1]), np.asarray(want[1]))


def test_forward_mode_says_that_only_reverse_mode_exists():
    query, pool = jnp.ones((1, 2, 8)), jnp.ones((2, 1, 4, 8))
    given = {
        "block_tables": jnp.asarray([[1]], jnp.int32),
        "seq_lens": jnp.asarray([3], jnp.int32),
    }
    with pytest.raises(jattn.UnsupportedError, match=r"jvp.* reverse mode"):
        jax.jvp(lambda q: jattn.paged_attention(q, pool, pool, **given), (query,), (query,))
