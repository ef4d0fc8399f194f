"""`jattn.testing` fails for each kind of program that makes an array of a pool's size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import testing

struct = jax.ShapeDtypeStruct
POOL = jattn.KVArray(struct((4096, 2, 16, 64), jnp.uint16), None, jattn.Dense("bfloat16"))
NEW, SLOTS = struct((3, 2, 64), jnp.bfloat16), struct((3,), jnp.int32)


def write(keys, values, new, slots):
    return jattn.update_kv_cache(keys, values, new, new, slots)


def compiled(function, *given, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*given).compile()


def test_writing_in_place_passes():
    program = compiled(write, POOL, POOL, NEW, SLOTS, donate=(0, 1))
    testing.assert_nothing_pool_sized(program, (POOL, POOL))
    testing.assert_nothing_pool_sized(program, POOL.data, max_temporaries=2**20)


def test_pools_that_are_not_donated_are_copies():
    with pytest.raises(AssertionError, match="bytes of outputs that reuse no donated input"):
        testing.assert_nothing_pool_sized(compiled(write, POOL, POOL, NEW, SLOTS), POOL)


def test_a_converted_pool_is_named_with_its_instruction():
    def read(keys):
        return jnp.sort(keys.values().astype(jnp.float32), axis=0)[7]

    with pytest.raises(AssertionError, match=r"bytes of temporaries") as caught:
        testing.assert_nothing_pool_sized(compiled(read, POOL), POOL)
    assert "f32[4096,2,16,64]" in str(caught.value)


def test_the_smallest_pool_and_an_explicit_limit_count():
    def read(keys):
        return jnp.fft.fft(keys.values()[:256].astype(jnp.float32)).real.sum()

    program = compiled(read, POOL)
    testing.assert_nothing_pool_sized(program, POOL)
    small = struct((64, 2, 16, 64), jnp.uint16)
    for arguments in ({"pools": (POOL, small)}, {"pools": POOL, "max_temporaries": 1000}):
        with pytest.raises(AssertionError, match="temporaries, but must be below"):
            testing.assert_nothing_pool_sized(program, **arguments)


def test_pools_without_arrays_are_refused():
    with pytest.raises(ValueError, match="pools: no array"):
        testing.assert_nothing_pool_sized(compiled(write, POOL, POOL, NEW, SLOTS), ())
