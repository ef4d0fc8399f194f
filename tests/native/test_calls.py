"""The native CPU kernel: its semantics point by point, batches, and what a compiled call contains.

The matrix, and every test that runs all rows, cover what its row claims.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.sharding
from jattn import call as calls
from jattn import formats, spec, testing
from tests.support import budget, problems, processes
from tests.support.native import batches as native_batches
from tests.support.native import library as native_library

pytestmark = native_library.needed

native = native_library.native  # the fixture


def test_the_library_knows_operands_in_the_order_of_a_call():
    """`kSeqLens` is `seq_lens`: the last word of a C++ name is part of the Python name."""
    source = pathlib.Path(jattn.__file__).parent / "cpu" / "native" / "src" / "ffi.cc"
    listed = re.search(r"enum Operand \{(.*?)\};", source.read_text(), re.DOTALL)[1]
    known = re.findall(r"k\w+", listed)
    parts = formats.QuantParams._fields
    given = [
        f"{name}.{part}" if part else name
        for name in calls.Operands._fields
        for part in (parts if name.endswith("quant_params") else ("",))
    ]
    assert known.pop() == "kOperands"
    for ours, theirs in zip(known, given, strict=True):
        assert re.findall("[A-Z][a-z]*", ours)[-1].lower().rstrip("s") in theirs


NONE = -(2**63)  # a window or chunk that is not given


BASE = problems.Problem(
    query_lens=(0, 1, 1, 16, 1, 20, 9),
    seq_lens=(0, 1, 15, 16, 17, 130, 23),
    options=frozenset({"return_lse"}),
    seed=7,
)


def test_visible_is_what_the_spec_says(native):
    seq_len, positions = 9, range(-3, 12)
    query, key = np.meshgrid(positions, positions, indexing="ij")
    sizes = (None, 1, 2, 5, 30, 2**31 - 1)
    for causal, window, chunk, end in itertools.product((False, True), sizes, sizes, (None, 0, 6)):
        if end is not None and not causal:
            continue
        sight = spec.Sight(causal, window, chunk, end)
        want = spec.visible(query, key, np.int64(seq_len), sight)
        for i, q in enumerate(positions):
            found = np.zeros(2, np.int64)
            limits = (NONE if x is None else x for x in (window, chunk))
            native.jattn_native_visible(q, seq_len, causal, *limits, end or 0, found.ctypes.data)
            have = (key[i] >= found[0]) & (key[i] < found[1])
            np.testing.assert_array_equal(have, want[i], err_msg=f"{sight} at {q}")


def test_trees_are_what_the_spec_says(native):
    rng = np.random.default_rng(0)
    for words, query in itertools.product((1, 2), (0, 1, 30, 31, 32, 40, 63, 64, 70)):
        mask = rng.integers(0, 2**32, words, np.uint32)
        keys = np.arange(-3, query + 5)
        rows = spec.path_bits(mask, np.asarray(query), xp=np)
        seen, distance = spec.tree_path(rows, np.asarray(query), keys, xp=np)
        for key, want_seen, want in zip(keys, seen, distance, strict=True):
            found = np.zeros(1, np.int64)
            have = native.jattn_native_tree(mask.ctypes.data, words, query, key, found.ctypes.data)
            assert (bool(have), int(found[0])) == (bool(want_seen), int(want)), (query, key)


@pytest.mark.parametrize("cap", [None, 1e-3, 6.0, 50.0])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_what_the_spec_says(native, cap, biased):
    rng = np.random.default_rng(1)
    dots = np.float32(rng.standard_normal(400) * np.exp2(rng.integers(-20, 12, 400)))
    dots[:3] = 0, 1e30, -1e30
    table = rng.standard_normal(2 * 20 + 1).astype(np.float32) if biased else None
    q, k, scale, slope = 150, 100, np.float32(0.3), np.float32(0.05)
    out = np.zeros_like(dots)
    limit = None if cap is None else np.array([cap], np.float32)
    pointers = [None if x is None else x.ctypes.data for x in (limit, table)]
    columns = 0 if table is None else len(table)
    native.jattn_native_logits(
        *(dots.ctypes.data, scale, pointers[0], slope, pointers[1], columns),
        *(q, k, len(dots), out.ctypes.data),
    )
    keys = k + np.arange(len(dots))
    bias = None if table is None else table[spec.relative_index(q, keys, len(table), xp=np)]
    want = spec.transform_logits(
        dots.astype(np.float64),
        scale=np.float64(scale),
        logits_soft_cap=None if limit is None else np.float64(limit[0]),
        alibi_slopes=np.float64(slope),
        q_pos=np.int64(q),
        k_pos=keys,
        position_bias=bias,
        xp=np,
    )
    np.testing.assert_allclose(out, want, rtol=6e-7, atol=4e-7 * (1 if cap is None else cap) + 4e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_in_every_batch(dtype):
    """Sequences whose keys are split over threads, and prompts, alone and among others."""
    whole, parts = native_batches.run(dtype)
    for part in parts:
        for have, want in zip(part.found, whole.found, strict=True):
            rows = [want[whole.rows(b)] for b in part.sequences]
            np.testing.assert_array_equal(have, np.concatenate(rows), str(part.sequences))


@pytest.mark.extended
def test_bits_do_not_depend_on_the_number_of_threads():
    digests = {
        native_library.run_python("-m", "tests.support.native.batches", PJRT_NPROC=str(n))
        for n in (1, 2, 3, 9)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "seq_lens",
    [
        BASE.seq_lens,
        pytest.param((0, 2300, 15, 16, 1700, 130, 23), marks=pytest.mark.extended),
    ],
)
def test_many_threads_at_once(seq_lens):
    """For small calls, which stay on their thread, and calls whose keys are split and merged."""
    batch = problems.build(BASE.replace(seq_lens=seq_lens))
    want = batch.run("native")
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        for have in pool.map(lambda _: batch.run("native"), range(400)):
            for x, y in zip(have, want, strict=True):
                np.testing.assert_array_equal(x, y)


STARVED = """
import resource

import jax, jax.numpy as jnp, numpy as np
import jattn

D = 1 << 16
query, pool = jnp.ones((96, 1, D), jnp.float32), jnp.ones((6, 1, 16, D), jnp.float32)
batch = jattn.AttentionMetadata.from_lengths([96], [96], block_tables=[range(6)], block_size=16)

@jax.jit
def attend(query, pool):
    return jattn.paged_attention(query, pool, pool, **batch.as_kwargs(), implementation="native")

program = attend.lower(query, pool).compile()
used = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) << 10
whole = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (10 << 20), whole[1]))
try:
    program(query, pool).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, whole)
print(float(program(query, pool).mean()))
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_too_little_memory_is_an_error_and_the_process_goes_on():
    first, last = processes.python(STARVED).splitlines()
    assert first == "RESOURCE_EXHAUSTED: jattn's native kernel: out of memory"
    assert last == "1.0"


def test_broken_promises_are_nan():
    """In the rows of the sequence that breaks them, or in all rows if starts are broken."""
    batch = problems.build(BASE)
    out, _ = batch.run("native")
    starts = np.asarray(batch.kwargs["query_start_loc"])
    tables = np.asarray(batch.kwargs["block_tables"])
    lens = np.asarray(batch.kwargs["seq_lens"])

    def broken(rows: slice, **changes) -> None:
        have, have_lse = batch.run("native", **{k: jnp.asarray(v) for k, v in changes.items()})
        assert np.isnan(have[rows]).all()
        assert np.isnan(have_lse[rows]).all()
        rest = np.ones(len(have), bool)
        rest[rows] = False
        np.testing.assert_array_equal(have[rest], out[rest])

    for b in (3, 5):
        rows = slice(starts[b], starts[b + 1])
        wrong = lens.copy()
        wrong[b] = tables.shape[1] * 16 + 1
        broken(rows, seq_lens=wrong)
        for value in (-1, batch.key_cache.shape[0], 2**31 - 1):
            wrong = tables.copy()
            wrong[b, 0] = value
            broken(rows, block_tables=wrong)
    for at, value in ((0, -1), (1, -1), (4, starts[3] - 2), (-1, len(out) + 1)):
        wrong = starts.copy()
        wrong[at] = value
        broken(slice(None), query_start_loc=wrong)
    for dtype in ("bfloat16", "float16"):
        have, _ = batch.run("native", query_start_loc=jnp.asarray(wrong), out_dtype=dtype)
        assert np.isnan(have).all(), dtype


def test_ids_outside_the_window_may_be_anything():
    batch = problems.build(BASE.replace(options=frozenset({"return_lse", "sliding_window"})))
    tables = np.asarray(batch.kwargs["block_tables"]).copy()
    tables[5, : (130 - 20 - 11) // 16] = -7
    for have, want in zip(
        batch.run("native", block_tables=jnp.asarray(tables)), batch.run("native"), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def attend(query, key_cache, value_cache, tables, lens):
    return jattn.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=tables,
        seq_lens=lens,
        implementation="native",
    )


def called(caches, query, new, slots, *batch):
    return attend(query, *caches, *batch)


def updated(caches, query, new, slots, *batch):
    caches = jattn.update_kv_cache(*caches, new, new, slots, implementation="native")
    return attend(query, *caches, *batch), caches


def carried(caches, query, new, slots, *batch):
    """Run layers that write and read a pool in the carry of a scan."""

    def layer(carry, i):
        return updated(carry[1], carry[0], new, slots + i, *batch), None

    return jax.lax.scan(layer, (query, caches), jnp.arange(3, dtype=jnp.int32))[0]


def stacked(caches, query, new, slots, tables, lens):
    """Run layers that read their part of a pool for all layers, outside the scan."""
    blocks = caches[0].shape[0] // 4

    def layer(carry, i):
        return attend(carry, *caches, tables + i * blocks, lens), None

    return jax.lax.scan(layer, query, jnp.arange(4, dtype=jnp.int32))[0]


def sharded(caches, *arrays):
    """Run under `shard_map` over KV heads, with its default checks."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.sharding.PartitionSpec(None, "heads"), jax.sharding.PartitionSpec()
    pools = tuple(
        jattn.sharding.cache_specs(cache, mesh=mesh, axis_name="heads") for cache in caches
    )
    call = jax.shard_map(
        updated,
        mesh=mesh,
        in_specs=(pools, heads, heads, whole, whole, whole),
        out_specs=(heads, pools),
    )
    return call(caches, *arrays)


def mapped(caches, query, new, slots, *batch):
    """Run under `vmap` of queries, tables and lengths, with one pool."""
    twice = [jnp.stack([x, x]) for x in (query, *batch)]
    return jax.vmap(lambda query, *batch: attend(query, *caches, *batch))(*twice)


def mapped_with_pools(caches, query, new, slots, *batch):
    """Run under `vmap` over the whole call, including its pools."""
    pools = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), caches)
    twice = [jnp.stack([x, x]) for x in (query, *batch)]
    return jax.vmap(lambda pools, query, *batch: attend(query, *pools, *batch))(pools, *twice)


@pytest.mark.parametrize(
    ("step", "format"),
    [
        *((called, "bfloat16"), (called, "nvfp4")),
        *((updated, "float32"), (updated, "int4_zero")),
        *((carried, "bfloat16"), (carried, "fp8_e4m3")),
        *((stacked, "float32"), (stacked, "nvfp4")),
        *((sharded, "bfloat16"), (sharded, "int4_zero")),
        *((mapped, "fp8_e4m3"), (mapped_with_pools, "int4_zero")),
    ],
)
def test_a_step_copies_nothing(step, format):
    """With keys and values of 1 GiB each, which are never allocated."""
    init = functools.partial(jattn.init_kv_cache, format=problems.FORMATS[format])
    block = jax.eval_shape(lambda: init(1, 2, 16, 64))[0].data
    blocks = 2**30 // (block.size * block.dtype.itemsize)
    caches = jax.eval_shape(lambda: init(blocks, 2, 16, 64))
    shape = jax.ShapeDtypeStruct
    query, new = (shape((3, heads, 64), jnp.bfloat16) for heads in (4, 2))
    slots, tables, lens = (shape(sizes, jnp.int32) for sizes in ((3,), (3, 8), (3,)))
    donated = (0,) if step in (updated, carried, sharded) else ()
    lowered = jax.jit(step, donate_argnums=donated).lower(caches, query, new, slots, tables, lens)
    compiled = lowered.compile()
    assert compiled.as_text().count('"jattn_native_attend"') == 1
    testing.assert_nothing_pool_sized(compiled, caches, max_temporaries=2**16)


@pytest.mark.parametrize("format", ["float32", "nvfp4"])
def test_a_batch_of_calls_with_a_pool_each(format):
    """The pools are joined, but an id outside a call's own pool breaks only that call's promise."""
    blocks, block_size = 3, 16
    rng = np.random.default_rng(5)
    new = jnp.asarray(rng.normal(size=(2, 2, blocks * block_size, 2, 64)), jnp.float32)
    slots = jnp.arange(blocks * block_size, dtype=jnp.int32)

    def written(key, value):
        format_ = problems.FORMATS[format]
        pools = jattn.init_kv_cache(blocks, 2, block_size, 64, format=format_)
        return jattn.update_kv_cache(*pools, key, value, slots)

    pools = jax.vmap(written)(*new)
    query = jnp.asarray(rng.normal(size=(2, 3, 4, 64)), jnp.float32)
    tables = jnp.asarray([[[0, 1], [2, 0], [1, 2]], [[2, 1], [0, 3], [-1, 0]]], jnp.int32)
    lens = jnp.asarray([[5, 20, 32], [16, 17, 9]], jnp.int32)
    calls = (query, *pools, tables, lens)
    have = jax.jit(jax.vmap(attend))(*calls)
    first, second = (jax.tree.map(lambda x, i=i: x[i], calls) for i in range(2))
    np.testing.assert_array_equal(have[0], attend(*first))
    np.testing.assert_array_equal(have[1], attend(*second))
    broken = np.isnan(np.asarray(have)).all((2, 3))
    np.testing.assert_array_equal(broken, [[False] * 3, [False, True, True]])
    of_keys = jax.vmap(attend, (None, 0, None, None, None))
    have = of_keys(first[0], pools[0], *first[2:])
    np.testing.assert_array_equal(have[1], attend(first[0], second[1], *first[2:]))


@pytest.mark.extended
def test_vmap_and_gradients():
    batch = problems.build(BASE.replace(plain=True))

    def loss(query, implementation):
        out, lse = jattn.paged_attention(
            *(query, batch.key_cache, batch.value_cache),
            implementation=implementation,
            **batch.kwargs,
        )
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    query = jnp.nan_to_num(jnp.asarray(batch.query))
    have, want = (jax.grad(loss)(query, name) for name in ("native", "xla"))
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    both = jax.vmap(lambda q: loss(q, "native"))(jnp.stack([query, 2 * query]))
    np.testing.assert_allclose(both[0], loss(query, "native"), rtol=1e-6)


def test_splits_and_their_merge_agree_with_the_oracle():
    """One long sequence is split by its keys, and the partial results merge in the same call."""
    problem = problems.Problem(
        query_lens=(1,),
        seq_lens=(9000,),
        num_heads=8,
        num_kv_heads=1,
        head_dim=128,
        value_dim=128,
        block_size=64,
        ragged=False,
        options=frozenset({"return_lse", "sinks"}),
    )
    batch = problems.build(problem)
    budget.of(batch).check(*batch.run("native"))
