"""`update_kv_cache` by the native kernel: XLA's bits, in place, with any number of threads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import testing
from tests.support import problems
from tests.support.native import library as native_library
from tests.support.native import writing as native_writing

pytestmark = native_library.needed
PLAIN = [
    ((jattn.Dense(key), jattn.Dense(value)), layout, "float32", 48, True)
    for key, value, layout in (("bfloat16", "float16", "NHD"), ("float32", "bfloat16", "HND"))
]
PLAIN += [((jattn.Fp8("e4m3"), jattn.Fp8("e5m2")), "HND", "bfloat16", 48, True)]


def assert_same_bits(have, want) -> None:
    for a, b in zip(*map(native_writing.bits, (have, want)), strict=True):
        np.testing.assert_array_equal(a, b)


def check(case) -> None:
    before, have = native_writing.written("native", *case)
    _, want = native_writing.written("xla", *case)
    for old, mine, other in zip(before, have, want, strict=True):
        assert_same_bits(mine, other)
        mine, old = native_writing.bits(mine)[0], native_writing.bits(old)[0]
        assert (mine != old).sum() > native_writing.TOKENS


@pytest.mark.parametrize(
    "case", [*native_writing.cases()[::2], *PLAIN[:1]], ids=lambda case: case[0][0].name
)
def test_the_same_bits_as_xla(case):
    check(case)


@pytest.mark.extended
@pytest.mark.parametrize(
    "case", [*native_writing.cases()[1::2], *PLAIN[1:]], ids=lambda case: case[0][0].name
)
def test_all_formats_have_the_same_bits_as_xla(case):
    check(case)


def big_call(format, dim=64, tokens=3000, blocks=40):
    """Return a call with enough work for several threads; many tokens share a slot."""
    rng = np.random.default_rng(5)
    caches = jattn.init_kv_cache(blocks, 2, 16, dim, format=format)
    new = jnp.asarray(rng.standard_normal((tokens, 2, dim)), jnp.float32)
    where = rng.integers(0, blocks * 16, tokens).astype(np.int32)
    return caches, new, where


@pytest.mark.parametrize("format", [jattn.Int8(True), jattn.Nvfp4(), jattn.Fp8("e4m3", "block")])
def test_the_later_of_two_tokens_with_one_slot_stays(format):
    """On several threads too, as if tokens had been written one after the other."""
    caches, new, where = big_call(format)
    write = native_writing.writer("native")
    have = write(*caches, new, new, jnp.asarray(where))
    last = {slot: t for t, slot in enumerate(where)}
    keep = np.full(len(where), -1, np.int32)
    for slot, t in last.items():
        keep[t] = slot
    if format.per == "block":  # the scale depends on every token of the call
        for again in range(4):
            same = write(*caches, new, new, jnp.asarray(where))
            assert all(
                map(np.array_equal, map(np.asarray, jax.tree.leaves(have)), jax.tree.leaves(same))
            ), again
        keys = have[0].numbers()[:, 0, :, 0].reshape(-1)
        np.testing.assert_allclose(
            keys[keep[keep >= 0]], new[keep >= 0, 0, 0], rtol=0.07, atol=0.02
        )
        return
    want = write(*caches, new, new, jnp.asarray(keep))
    assert have[0] == want[0]
    assert have[1] == want[1]


@pytest.mark.parametrize(
    ("format", "blocks", "size"),
    [
        (jattn.Int8(True), 200, 16),
        (jattn.Fp8("e4m3", "block"), 200, 16),
        (jattn.Fp8("e4m3", "block"), 4, 1024),  # fewer blocks than threads
    ],
    ids=["slots", "blocks", "heads"],
)
def test_however_tokens_are_divided(format, blocks, size):
    """Among threads: by ranges, by blocks, by heads, or scattered if none of these works."""
    native_writing.check_divisions(format, blocks, size)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_every_bfloat16_is_rounded_as_xla_does(name):
    """All 65,536 at a scale of 1; for formats with groups, all up to 6, with a 6 in each group."""
    every = np.arange(2**16, dtype=np.uint16)
    if name == "nvfp4":
        six = int(jnp.bfloat16(6).view(jnp.uint16))
        every = np.concatenate([np.arange(six + 1), np.arange(six + 1) + 2**15])
        every = np.resize(every, (2**13, 8))
        every = np.concatenate([every, np.full_like(every, six)], 1).astype(np.uint16)
    new = jnp.asarray(every.reshape(-1, 4, 64)).view(jnp.bfloat16)
    caches = jattn.init_kv_cache(len(new) // 16, 4, 16, 64, format=problems.FORMATS[name])
    slots = jnp.arange(len(new), dtype=jnp.int32)
    have, want = (
        native_writing.writer(each)(*caches, new, new, slots)[0] for each in ("native", "xla")
    )
    assert_same_bits(have, want)


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_zero_scales_of_blocks_count_as_one(scale):
    """In blocks whose first slot is never written they stay 0, and count as 1."""
    caches = jattn.init_kv_cache(3, 2, 4, 16, format=jattn.Fp8("e4m3", "block"))
    caches = tuple(x.replace(scale=jnp.full_like(x.scale, scale)) for x in caches)
    rows = jnp.asarray(np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 2, 16))
    slots = jnp.asarray([1, 6], jnp.int32)
    for ours, xlas in zip(
        *(native_writing.writer(name)(*caches, rows, rows, slots) for name in ("native", "xla")),
        strict=True,
    ):
        np.testing.assert_array_equal(ours.data, xlas.data)
        np.testing.assert_array_equal(
            np.asarray(ours.scale).view(np.uint32), np.asarray(xlas.scale).view(np.uint32)
        )


@pytest.mark.parametrize("format", ["bfloat16", "float8_e4m3fn"])
def test_plain_arrays_are_written_in_place(format):
    """XLA may copy them or convert their types: the docstring of `update_kv_cache` says when."""
    pool = jnp.zeros((2**12, 2, 16, 32), format)
    new, where = jnp.ones((8, 2, 32), jnp.bfloat16), jnp.arange(8, dtype=jnp.int32)

    def steps(*caches):
        def one(caches, slots):
            return jattn.update_kv_cache(*caches, new, new, slots), None

        return jax.lax.scan(one, caches, jnp.stack([where, where + 100]))[0]

    for step in (lambda *caches: jattn.update_kv_cache(*caches, new, new, where), steps):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < 2**12
        assert memory.alias_size_in_bytes == 2 * pool.nbytes


@pytest.mark.extended
@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_a_mapped_update_copies_no_pool(name):
    """Under `vmap` over two donated pools, XLA writes in place."""
    init = functools.partial(jattn.init_kv_cache, format=problems.FORMATS[name])
    pools = jax.eval_shape(lambda: jax.vmap(lambda _: init(2**14, 2, 16, 64))(jnp.arange(2)))
    new = jax.ShapeDtypeStruct((2, 3, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    write = jax.jit(jax.vmap(jattn.update_kv_cache), donate_argnums=(0, 1))
    compiled = write.lower(*pools, new, new, slots).compile()
    testing.assert_nothing_pool_sized(compiled, pools, max_temporaries=2**16)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
    assert compiled.memory_analysis().alias_size_in_bytes == size


def test_derivatives_and_batches_are_xlas():
    rng = np.random.default_rng(6)
    pool = jnp.asarray(rng.standard_normal((3, 2, 4, 8)), jnp.float32)
    new = jnp.asarray(rng.standard_normal((5, 2, 8)), jnp.float32)
    where = jnp.asarray([3, -1, 8, 0, 99], jnp.int32)

    def loss(implementation, pool, new):
        keys, values = jattn.update_kv_cache(
            pool, 2 * pool, new, 3 * new, where, implementation=implementation
        )
        return (keys**2).sum() + (values**3).sum()

    for of in (functools.partial(jax.grad, argnums=(1, 2)), lambda f: f):
        have, want = (of(loss)(name, pool, new) for name in ("native", "xla"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), have, want)
    moved = [
        jax.jvp(functools.partial(loss, name), (pool, new), (pool, new))[1]
        for name in ("native", "xla")
    ]
    np.testing.assert_allclose(*moved, rtol=1e-5)
    both = jnp.stack([new, 2 * new])
    batched = jax.vmap(lambda x: loss("native", pool, x))(both)
    np.testing.assert_allclose(batched[1], loss("xla", pool, 2 * new), rtol=1e-5)


def test_what_it_cannot_write_is_refused_by_name():
    pool = jnp.zeros((2, 1, 4, 8), jnp.float32)
    new, where = jnp.ones((1, 1, 8), jnp.float8_e4m3fn), jnp.zeros((1,), jnp.int32)
    with pytest.raises(jattn.UnsupportedError, match=r"native .* key is float8_e4m3fn; it takes"):
        jattn.update_kv_cache(pool, pool, new, new, where, implementation="native")
    jattn.update_kv_cache(pool, pool, new, new, where)  # XLA accepts it
    with pytest.raises(ValueError, match=r"implementation: 'triton', but must be None, 'native'"):
        jattn.update_kv_cache(pool, pool, new, new, where, implementation="triton")


@pytest.mark.parametrize("name", ["int8", "int8_zero", "int4", "nvfp4"])
@pytest.mark.parametrize(
    "implementation", ["native", pytest.param("xla", marks=pytest.mark.extended)]
)
def test_a_nan_is_not_lost_when_compiled(name, implementation):
    """XLA's maximum of floats ignores NaN when compiled."""
    caches = jattn.init_kv_cache(2, 1, 4, 32, format=problems.FORMATS[name])
    new = np.ones((2, 1, 32), np.float32)
    new[1, 0, 3] = np.nan
    where = jnp.asarray([0, 1], jnp.int32)
    write = native_writing.writer(implementation)
    keys, _ = write(*caches, jnp.asarray(new), jnp.asarray(new), where)
    numbers = np.asarray(keys.numbers())[0, 0]
    assert np.isfinite(numbers[0]).all()
    assert np.isnan(numbers[1, :16]).all()
