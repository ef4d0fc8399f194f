"""Contents of blocks: copied within a pool, taken out of it, and put into the same or another pool.

Every array that grows with a pool has the block axis first, so words, scales and zero points of a
block move in the same way. A cache here is a `KVArray`, an array whose first axis is the blocks, or
a tuple of these (keys and values, all layers); caches in one call share their ids. A scale per head
or per cache does not move, so both pools must have the same one.

Contents taken from blocks of S tokens and put into blocks of S' are moved token by token,

    token i of the sequence = token i mod S of block i div S = token i mod S' of block i div S'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.arguments import Integers, as_int32, inside_or_end
from jattn.checks import Problems, checking, describe
from jattn.formats import KVArray, rounding
from jattn.formats.kv_array import LAYOUTS
from jattn.integers import ceil_div, require_int

Caches = TypeVar("Caches")


def copy_blocks(caches: Caches, source: Integers, target: Integers) -> Caches:
    """Copy whole blocks within a pool: copy-on-write of a block that others hold.

    Copies in place when the caches are donated. The exception is plain arrays of fp8 (and, before
    JAX 0.12, bfloat16) on CPU, which are copied whole; the words of a `KVArray` are not.

    Args:
      caches: a cache or a tuple of them, [N, ...].
      source, target: int32 [m], block ids. All are read before any is written. Targets must
        differ. A pair with an id outside 0..N-1 (-1 pads) does nothing.

    Returns: the caches.
    Raises: `ValueError` for wrong dtypes or shapes, and for concrete pairs that write one block.

    >>> copy_blocks(jnp.arange(4.0)[:, None], [3, 1], [0, -1])[:, 0].tolist()
    [3.0, 1.0, 2.0, 3.0]
    """
    with checking("copy_blocks") as problems:
        source = as_int32(problems, "source", source, ranks=(1,))
        target = as_int32(problems, "target", target, ranks=(1,))
        problems.require(
            bool(problems.found) or source.shape == target.shape,
            "source and target",
            f"{list(source.shape)} and {list(target.shape)}",
            "of one shape",
        )
        if not problems.found:
            _check_targets(problems, "target", source, target, _num_blocks(caches))
    return _copy(caches, source, target)


def take_blocks(caches: Caches, ids: Integers) -> Caches:
    """Return the contents of blocks as caches of `len(ids)` blocks, to swap out or transfer.

    `jax.device_get` moves the result to the host; `put_blocks` puts it into a pool.

    Args:
      caches: a cache or a tuple of them, [N, ...].
      ids: int32 [n]. An id outside 0..N-1 (-1 pads) reads as zeros.

    Returns: caches like `caches`, [n, ...], in the order of `ids`.
    Raises: `ValueError` for a wrong dtype or shape of `ids`.

    >>> take_blocks(jnp.arange(4.0)[:, None], [3, 1, -1])[:, 0].tolist()
    [3.0, 1.0, 0.0]
    """
    with checking("take_blocks") as problems:
        ids = as_int32(problems, "ids", ids, ranks=(1,))
    return _take(caches, ids)


def put_blocks(
    caches: Caches,
    ids: Integers,
    blocks: Caches,
    *,
    kv_layout: str | None = None,
    blocks_layout: str | None = None,
    num_tokens: int | None = None,
) -> Caches:
    """Write what `take_blocks` took into blocks of this or another pool.

    Writes in place when the caches are donated, as `copy_blocks` does. If the pools differ in block
    size or layout, caches must be HND [N, K, S, ...] or NHD [N, S, K, ...]; tokens keep their
    order, and the rest of the last block is zeroed.

    Args:
      caches: a cache or a tuple of them, [N, ...].
      ids: int32 [m], the blocks to write. Those in 0..N-1 must differ; others (-1 pads) write
        nothing.
      blocks: what `take_blocks` returned for caches of the same formats.
      kv_layout: layout of `caches`. None: the layout of a `KVArray`, "HND" for plain arrays.
      blocks_layout: layout of `blocks`. None: the layout of a `KVArray`, that of `caches` for plain
        arrays.
      num_tokens: tokens to write, from the first of `blocks` on. Static, so every count compiles
        a program. Where counts vary, leave it out: take and put a few fixed numbers of blocks, with
        ids padded with -1. None: all of them.

    Returns: the caches.
    Raises: `ValueError` for formats, dtypes or heads that differ, for a layout that is unknown or
      not that of a `KVArray`, for a scale per block between blocks of two sizes, for more tokens
      than `blocks` hold, for `num_tokens` of arrays without tokens, for more or fewer ids than the
      tokens need, for concrete ids in 0..N-1 named twice, and for concrete scales per head or
      cache that differ.

    >>> caches = jnp.arange(8.0).reshape(2, 1, 4, 1)  # two blocks of 4 tokens
    >>> larger = jnp.zeros((3, 1, 8, 1))
    >>> put_blocks(larger, [2], take_blocks(caches, [1, 0]), num_tokens=6)[2].ravel().tolist()
    [4.0, 5.0, 6.0, 7.0, 0.0, 1.0, 0.0, 0.0]
    """
    with checking("put_blocks") as problems:
        ids = as_int32(problems, "ids", ids, ranks=(1,))
        if not problems.found:
            _check_targets(problems, "ids", ids, ids, _num_blocks(caches))
        if num_tokens is not None:
            require_int(problems, "num_tokens", num_tokens, 0)
        mine, theirs = (_leaves(x) for x in (caches, blocks))
        problems.require(
            len(mine) == len(theirs), "blocks", f"{len(theirs)} caches", f"{len(mine)}, as caches"
        )
        layout = _layout(problems, "kv_layout", kv_layout, mine, "HND")
        layouts = (layout, _layout(problems, "blocks_layout", blocks_layout, theirs, layout))
        if not problems.found:
            for i, (cache, block) in enumerate(zip(mine, theirs, strict=True)):
                _check_fit(problems, f"blocks[{i}]", cache, block, layouts, len(ids), num_tokens)
    return _put(caches, ids, blocks, layouts, num_tokens)


@functools.partial(jax.jit, inline=True)
def _copy(caches: Caches, source: jax.Array, target: jax.Array) -> Caches:
    def one(array: jax.Array) -> jax.Array:
        end = array.shape[0]
        row = jnp.where((source >= 0) & (source < end), inside_or_end(target, end), end)
        rows = array.at[inside_or_end(source, end)].get(mode="fill", fill_value=0)
        return array.at[row].set(rows, mode="drop")

    return _map(one, caches)


@functools.partial(jax.jit, inline=True)
def _take(caches: Caches, ids: jax.Array) -> Caches:
    def one(array: jax.Array) -> jax.Array:
        return array.at[inside_or_end(ids, array.shape[0])].get(mode="fill", fill_value=0)

    return _map(one, caches)


@functools.partial(jax.jit, inline=True, static_argnames=("layouts", "num_tokens"))
def _put(
    caches: Caches,
    ids: jax.Array,
    blocks: Caches,
    layouts: tuple[str, str],
    num_tokens: int | None,
) -> Caches:
    def one(array: jax.Array, new: jax.Array) -> jax.Array:
        if new.ndim > 2 and (new.shape[1:] != array.shape[1:] or layouts[0] != layouts[1]):
            new = _cut(new, array, layouts, num_tokens)
        elif num_tokens is not None:
            new = new[: ids.shape[0]]
        return array.at[inside_or_end(ids, array.shape[0])].set(new, mode="drop")

    return _map(one, caches, blocks)


def _cut(
    new: jax.Array, array: jax.Array, layouts: tuple[str, str], num_tokens: int | None
) -> jax.Array:
    """Return blocks of one size and layout as blocks of another, token by token."""
    layout, new_layout = layouts
    rows = new if new_layout == "NHD" else new.swapaxes(1, 2)  # [n, S, K, ...]
    rows = rows.reshape(-1, *rows.shape[2:])[:num_tokens]
    size = array.shape[1 if layout == "NHD" else 2]
    missing = -len(rows) % size
    rows = jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])
    rows = rows.reshape(-1, size, *rows.shape[1:])
    return rows if layout == "NHD" else rows.swapaxes(1, 2)


def _layout(
    problems: Problems, argument: str, given: str | None, caches: list[Any], default: str
) -> str:
    """Return the layout of caches: the one a `KVArray` carries, the one given, or the default."""
    problems.require(given in (None, *LAYOUTS), argument, f"{given!r}", f"one of {LAYOUTS}")
    carried = {x.kv_layout for x in caches if isinstance(x, KVArray)}
    agrees = len(carried | ({given} - {None})) < 2
    problems.require(agrees, argument, f"{given!r}", f"that of the caches, {sorted(carried)}")
    return next(iter(carried), given or default)


def _leaves(caches: object) -> list[Any]:
    return jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, KVArray))


def _map(function: Callable[..., jax.Array], caches: Caches, *others: object) -> Caches:
    """Map the arrays whose first axis is the blocks; a scale per head or cache is unchanged."""

    def words(array: Any, *rest: Any) -> jax.Array:
        # XLA for CPU writes some dtypes by converting the whole pool, which rewrites NaNs. As words
        # they keep their bits, at the price of a copy. A KVArray's words are written in place.
        dtype = stored = np.dtype(array.dtype)
        if rounding.scatter_converts(dtype):
            stored = np.dtype(f"uint{8 * dtype.itemsize}")
        arrays = (rounding.bitcast(jnp.asarray(x), stored) for x in (array, *rest))
        return rounding.bitcast(function(*arrays), dtype)

    def one(cache: Any, *rest: Any) -> Any:
        if not isinstance(cache, KVArray):
            return words(cache, *rest)
        changes = {"data": words(cache.data, *(x.data for x in rest))}
        for name, array in cache.quant_params._asdict().items():
            if array is not None:
                changes[name] = words(array, *(getattr(x, name) for x in rest))
        return cache.replace(**changes)

    return jax.tree.map(one, caches, *others, is_leaf=lambda x: isinstance(x, KVArray))


def _num_blocks(caches: object) -> int:
    """Return the blocks of the largest cache."""
    arrays = (x.data if isinstance(x, KVArray) else x for x in _leaves(caches))
    return max((x.shape[0] for x in arrays), default=0)


def _check_targets(
    problems: Problems, argument: str, source: jax.Array, target: jax.Array, num_blocks: int
) -> None:
    """Note targets of several pairs; pairs with an id outside the pool write nothing."""
    if any(isinstance(ids, jax.core.Tracer) for ids in (source, target)):
        return
    pairs = np.stack([np.asarray(source), np.asarray(target)])
    written = pairs[1, np.all((pairs >= 0) & (pairs < num_blocks), axis=0)]
    named, counts = np.unique(written, return_counts=True)
    again = named[counts > 1].tolist()
    problems.require(not again, argument, f"{again} more than once", "different ids")


def _check_fit(
    problems: Problems,
    name: str,
    cache: Any,
    block: Any,
    layouts: tuple[str, str],
    num_ids: int,
    num_tokens: int | None,
) -> None:
    """Note why blocks cannot go into a cache."""
    formats = [x.format if isinstance(x, KVArray) else np.dtype(x.dtype) for x in (cache, block)]
    if not problems.require(formats[0] == formats[1], name, f"{formats[1]}", f"{formats[0]}"):
        return
    words, new = (x.data if isinstance(x, KVArray) else x for x in (cache, block))
    if words.ndim == 4 == new.ndim:
        (heads, size, last), (new_heads, new_size, new_last) = (
            (x.shape[2], x.shape[1], x.shape[3])
            if layout == "NHD"
            else (x.shape[1], x.shape[2], x.shape[3])
            for x, layout in zip((words, new), layouts, strict=True)
        )
        same = (heads, last) == (new_heads, new_last)
    else:
        size = new_size = 1
        same = words.shape[1:] == new.shape[1:]
        if num_tokens is not None:
            what = f"{num_tokens} for {name}, {describe(new)}"
            problems.add("num_tokens", what, "None for arrays that are not 4-dimensional")
            return
    problems.require(same, name, describe(new), f"blocks for {describe(words)}")
    held = new.shape[0] * new_size
    tokens = held if num_tokens is None else num_tokens
    if not problems.require(
        tokens <= held,
        "num_tokens",
        f"{tokens}",
        f"at most {held}, the tokens in {name}, {new.shape[0]} blocks of {new_size}",
    ):
        return
    problems.require(
        ceil_div(tokens, size) == num_ids,
        "ids",
        f"{num_ids} ids for {tokens} tokens in {new.shape[0]} blocks of {new_size}",
        f"{ceil_div(tokens, size)}, blocks of {size} for all of the tokens",
    )
    if not isinstance(cache, KVArray):
        return
    problems.require(
        cache.format.per != "block" or size == new_size,
        name,
        f"blocks of {new_size} tokens with a scale per block",
        f"blocks of {size} tokens",
    )
    scales = (cache.scale, block.scale)
    if cache.format.takes_scale and not any(isinstance(x, jax.core.Tracer) for x in scales):
        first, second = (1.0 if x is None else np.asarray(x) for x in scales)
        problems.require(
            bool(np.all(first == second)),
            name,
            "scales that are not the cache's",
            "words of the same scale",
        )
