"""New rows written by the native kernel and by XLA, which must give the same bits.

The rows have all numbers that matter to rounding: zeros, infinities, subnormals, NaN, ties. Slots
are inside and outside the pool, and none occurs twice.
"""

from __future__ import annotations

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.integers import round_up
from tests.support import problems

BLOCKS, HEADS, SIZE, TOKENS = 13, 3, 16, 200


@functools.cache
def writer(implementation: str, layout: str = "HND"):
    """Return `jattn.update_kv_cache` of one implementation, compiled."""
    write = functools.partial(
        jattn.update_kv_cache, implementation=implementation, kv_layout=layout
    )
    return jax.jit(write)


def garbage(format: jattn.formats.Format, layout: str, dim: int, seed: int = 0):
    """Return caches whose words and scales all hold something, as in a pool in use."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if x.ndim < 2 or x.dtype == np.float32:
            return jnp.asarray(rng.uniform(0.5, 2, x.shape), jnp.float32)
        info = np.iinfo(x.dtype)
        return jnp.asarray(rng.integers(info.min, info.max, x.shape, x.dtype, endpoint=True))

    caches = jattn.init_kv_cache(BLOCKS, HEADS, SIZE, dim, format=format, kv_layout=layout)
    caches = jax.tree.map(fill, caches)
    if format.takes_scale:
        caches = tuple(x.replace(scale=x.scale * jnp.float32([0.01, 1, 7])) for x in caches)
    return caches


def new_rows(dim: int, dtype: str, seed: int = 1) -> jax.Array:
    """Rows [T, K, D] with sizes from subnormal to infinite, and with NaN and ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, HEADS, dim)) * np.exp2(
        rng.integers(-14, 12, (TOKENS, HEADS, 1))
    )
    x[3], x[4, 0, 2], x[5, 1, 3] = 0, np.inf, -np.inf
    x[6:9] *= 1e-36
    x[9] *= 1e34
    x[10], x[11] = 1e-41, 2.5
    x[12] = np.round(4 * x[12]) / 4
    x[13, 0, 5], x[13, 1, 21], x[14, 1] = np.nan, np.nan, np.nan
    x[15] = np.abs(x[15]) + 1
    x[25, 1, 3] = np.inf  # in a block whose scale is set
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def slots(seed: int = 2) -> jax.Array:
    """Slots [T]: some anywhere, for the special rows; a run in order; others, some out of range."""
    rng = np.random.default_rng(seed)
    run = np.arange(2 * SIZE, 4 * SIZE)
    inside = rng.permutation(np.setdiff1d(np.arange(BLOCKS * SIZE), run))
    outside = np.append(np.arange(-30, 0), BLOCKS * SIZE + np.arange(30))
    last = rng.permutation(np.append(inside[19:], outside))[: TOKENS - 20 - len(run)]
    found = np.concatenate([[2**31 - 1], inside[:19], run, last])
    found[-1] = -(2**31)
    return jnp.asarray(found, jnp.int32)


def divisions(blocks: int, size: int, tokens: int) -> dict[str, np.ndarray]:
    """Return slots that threads divide in different ways: by ranges, by blocks, or scattered."""
    rng = np.random.default_rng(7)
    runs = rng.permutation(blocks)[:, None] * size + np.arange(size)
    in_blocks = runs.reshape(-1)[:tokens]  # each block once, the last one in part
    return {
        "blocks": runs[:, ::-1].reshape(-1)[:tokens],
        "gaps": np.where(rng.random(tokens) < 0.1, -1, in_blocks),
        "anywhere": rng.permutation(blocks * size)[:tokens],
        "twice": np.where(np.arange(tokens) < tokens - 10, in_blocks, in_blocks[0]),
        "again": rng.integers(0, blocks * size, tokens),  # many slots more than once
        "pairs": np.repeat(in_blocks, 2)[:tokens],  # some pairs lie in two threads' ranges
    }


def check_divisions(format: jattn.formats.Format, blocks: int, size: int) -> None:
    """Check that the native kernel writes XLA's bits however threads divide 3,000 tokens."""
    rng = np.random.default_rng(8)
    caches = jattn.init_kv_cache(blocks, 3, size, 64, format=format)
    new = jnp.asarray(rng.standard_normal((3000, 3, 64)), jnp.float32)
    for name, slots in divisions(blocks, size, 3000).items():
        call = (*caches, new, -new, jnp.asarray(slots, jnp.int32))
        have, want = (writer(each)(*call) for each in ("native", "xla"))
        assert all(map(np.array_equal, bits(have), bits(want))), (format, name)


def bits(cache) -> list[np.ndarray]:
    """Return all that a cache stores as integers, with every NaN replaced by the same one."""
    found = []
    for x in jax.tree.leaves(cache):
        x = np.asarray(x)
        if not np.issubdtype(x.dtype, np.integer):
            with np.errstate(invalid="ignore"):
                x = np.where(np.isnan(x), np.full_like(x, np.nan), x)
        found.append(x.view(f"uint{8 * x.dtype.itemsize}"))
    return found


def cases() -> list[tuple]:
    """Return `(formats of keys and values, layout, dtype, D)`, with every format in both places."""
    formats = list(problems.FORMATS.values())
    dtypes, layouts, dims = ("bfloat16", "float32", "float16"), ("HND", "NHD"), (128, 44)
    found = []
    for i, pair in enumerate(zip(formats, formats[1:] + formats[:1], strict=True)):
        dim = round_up(dims[i // 2 % 2], math.lcm(*(each.dim_multiple for each in pair)))
        found.append((pair, layouts[i % 2], dtypes[i % 3], dim))
    return found


def written(implementation: str, formats, layout: str, dtype: str, dim: int, plain: bool = False):
    """Return the contents of a pool in use, before and after new rows are written into it."""
    caches = tuple(garbage(each, layout, dim)[i] for i, each in enumerate(formats))
    if plain:
        caches = tuple(x.values() for x in caches)
    key = new_rows(dim, dtype)
    return caches, writer(implementation, layout)(*caches, key, key[..., ::-1], slots())


def digest() -> str:
    """Return a digest of what the native kernel writes in all cases."""
    found = hashlib.sha256()
    for case in cases():
        for cache in written("native", *case)[1]:
            for x in bits(cache):
                found.update(x.tobytes())
    return found.hexdigest()[:16]
