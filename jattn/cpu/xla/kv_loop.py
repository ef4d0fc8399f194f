"""The inner loop of both XLA paths: work items, each reading its own keys, tile by tile.

`P` work items step together, because XLA for CPU spreads a dot over cores by its batch: `P * K`
small dots are one dot.

    for each step:                                # a traced number, the same for every work item
        k, v = the next C tokens of every item    # [P * K, C, D], gathered once into cache
        s = transform(q k^T), masked where an item is at an edge of what it sees
        m, l, acc = online softmax of s, v

A step in which every item sees its whole KV tile runs a body without masks. In other steps logits
are masked, and rows of V that no row of the item may see are replaced by zeros: they can hold NaN,
and 0 * NaN is not 0.

With few query rows, a format with a scale per group of numbers uses dots on bytes (`nvfp4_dots`)
instead of a tile of numbers. If keys and values both do, every step is masked, which costs only a
few rows of C.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import masks, numbers, nvfp4_dots, pool
from jattn.cpu.xla.work_items import WorkItems, key_positions
from jattn.varying import as_varying


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What all steps of a loop share.

    Attributes:
      call, tile, k_from_bytes, v_from_bytes: static; the last two say which dots are on bytes.
      operands, items: arrays.
      queries: [P * K, R, D].
      query_parts: the queries, split like tiles of keys.
      query_sums: float32 [P, K, R, 1], sums over D: a key's zero point is multiplied by them.
      scale, slopes: as `per_row` returns them.
      keys, values: what the steps read.
    """

    call: calls.Call
    operands: calls.Operands
    items: WorkItems
    tile: pool.KVTile
    queries: jax.Array
    query_parts: tuple[jax.Array, ...]
    query_sums: jax.Array
    scale: jax.Array
    slopes: jax.Array | None
    keys: pool.Source
    values: pool.Source
    k_from_bytes: bool
    v_from_bytes: bool

    @classmethod
    def of(
        cls,
        items: WorkItems,
        call: calls.Call,
        operands: calls.Operands,
        tile: pool.KVTile,
    ) -> _Loop:
        """The loop of a call over tiles of one size."""
        num_items, kv_heads, num_rows, head_dim = items.queries.shape
        queries = items.queries.reshape(num_items * kv_heads, num_rows, head_dim)
        scale, slopes = per_row(call, operands, num_rows)
        keys, values = pool.of_call(call, operands)
        sums = queries.astype(jnp.float32).sum(axis=-1)
        return cls(
            *(call, operands, items, tile, queries),
            query_parts=numbers.split(queries, call.key_format),
            query_sums=sums.reshape(num_items, kv_heads, num_rows, 1),
            scale=scale,
            slopes=slopes,
            keys=keys,
            values=values,
            k_from_bytes=nvfp4_dots.fits(call.key_format, num_rows, tile.tokens),
            v_from_bytes=nvfp4_dots.fits(call.value_format, num_rows, tile.tokens),
        )


class _Tile(typing.NamedTuple):
    """The keys or the values of a step."""

    parts: tuple[Any, ...]  # `pool.read_numbers`, or `pool.read_bytes` for dots on bytes
    scale: jax.Array | None  # [P, K, C]
    zero: jax.Array | None  # [P, K, C]


def attend(
    items: WorkItems,
    num_steps: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    tile: pool.KVTile,
) -> softmax.Partial:
    """The softmax state of every item's rows over `num_steps` tiles: `Partial` of rows [P, K, R].

    The result of an inactive item is meaningless.
    """
    loop = _Loop.of(items, call, operands, tile)

    def body(i: jax.Array, state: softmax.Partial) -> softmax.Partial:
        token = items.token + i * tile.tokens
        if loop.k_from_bytes and loop.v_from_bytes:
            return _step(loop, token, True, state)
        whole = masks.sees_whole(items, token, tile.tokens, call) | ~items.active
        return lax.cond(
            whole.all(),
            lambda s: _step(loop, token, False, s),
            lambda s: _step(loop, token, True, s),
            state,
        )

    empty = softmax.init(items.queries.shape[:3], call.value_dim)
    empty = as_varying(empty, (items, operands))
    state = lax.fori_loop(0, num_steps, body, empty)
    parts = jnp.split(state.acc, call.value_format.values_per_word, axis=-1)
    return state._replace(acc=numbers.join(tuple(parts)))


def _step(loop: _Loop, token: jax.Array, masked: bool, state: softmax.Partial) -> softmax.Partial:
    """The state after the tiles that start at `token` [P]; `masked` is static."""
    items = loop.items
    k, v = _read(loop, pool.Place(items.run.table, token, loop.tile, loop.call.kv_layout))
    k_pos = key_positions(items.run, token, loop.tile.tokens, loop.call.block_size)  # [P, C]
    if not masked:
        logits = _logits(loop, k, k_pos[:, None, :], token)
        return softmax.update(
            state, logits, functools.partial(_weigh_values, loop, v, token=token, visible=None)
        )
    seen, k_rows = masks.seen(items, k_pos)
    # Computed once for all KV heads: XLA would fuse it into the work of each.
    seen = lax.optimization_barrier(seen)
    logits = _logits(loop, k, k_rows, token)
    logits = jnp.where(seen[:, None], logits, jnp.float32(-jnp.inf))
    in_run = (k_pos >= items.run.first_key[:, None]) & (k_pos < items.run.end_key[:, None])
    visible = jnp.repeat(in_run, items.queries.shape[1], axis=0)[:, :, None]  # [P * K, C, 1]
    v = _without_unseen(loop, v, in_run, visible)
    return softmax.update(
        state, logits, functools.partial(_weigh_values, loop, v, token=token, visible=visible)
    )


def _read(loop: _Loop, place: pool.Place) -> tuple[_Tile, _Tile]:
    """Read the keys and the values at a place.

    Scales and zero points of tokens are applied to logits and weights: rows of C, not tiles of
    C x D.
    """

    def read(source: pool.Source, from_bytes: bool) -> _Tile:
        parts: tuple[Any, ...]
        if from_bytes:
            parts = pool.read_bytes(source, place)
        else:
            parts = pool.read_numbers(source, place, loop.queries.dtype)
        return _Tile(parts, *pool.read_scales(source, place))

    call = loop.call
    k = read(loop.keys, loop.k_from_bytes)
    if not call.values_in_keys:
        return k, read(loop.values, loop.v_from_bytes)
    # A dot with whole keys whose last columns are dropped is cheaper than slicing values out first.
    whole_keys = 4 * call.head_dim <= 5 * call.value_dim
    if loop.v_from_bytes or whole_keys:
        return k, k
    width = call.value_dim // len(k.parts)
    return k, k._replace(parts=tuple(part[..., :width] for part in k.parts))


def _logits(loop: _Loop, k: _Tile, k_pos: jax.Array, token: jax.Array) -> jax.Array:
    """float32 [P, K, R, C], before any mask; `k_pos` is [P, 1, C] or [P, R, C]."""
    call, operands, items = loop.call, loop.operands, loop.items
    if loop.k_from_bytes:
        words, groups = k.parts
        dots = nvfp4_dots.scores(loop.queries.astype(jnp.float32), words, groups, token[0])
    else:
        pairs = zip(loop.query_parts, k.parts, strict=True)
        dots = functools.reduce(jnp.add, [dot(*pair, ((2,), (2,))) for pair in pairs])
    dots = dots.reshape(*items.queries.shape[:3], loop.tile.tokens)
    if k.scale is not None:
        dots = dots * k.scale[:, :, None]
    if k.zero is not None:
        dots = dots + loop.query_sums * k.zero[:, :, None]
    bias = None
    if operands.relative_bias is not None:
        bias = masks.position_bias(operands.relative_bias, items, k_pos, call)
    return spec.transform_logits(
        dots,
        scale=loop.scale,
        logits_soft_cap=operands.logits_soft_cap,
        alibi_slopes=loop.slopes,
        q_pos=items.rows.positions[:, None, :, None],
        k_pos=k_pos[:, None],
        position_bias=bias,
    )


def _without_unseen(loop: _Loop, v: _Tile, in_run: jax.Array, visible: jax.Array) -> _Tile:
    """Zero the values outside their item's run; `_weigh_values` does it for bytes.

    Args:
      in_run: bool [P, C].
      visible: the same, [P * K, C, 1].
    """
    parts, zero = v.parts, jnp.zeros((), loop.queries.dtype)
    if not loop.v_from_bytes:
        parts = tuple(jnp.where(visible, part, zero) for part in parts)
    scale, zero_point = (
        None if x is None else jnp.where(in_run[:, None], x, jnp.float32(0))
        for x in (v.scale, v.zero)
    )
    return _Tile(parts, scale, zero_point)


def _weigh_values(
    loop: _Loop, v: _Tile, p: jax.Array, *, token: jax.Array, visible: jax.Array | None
) -> jax.Array:
    """Sum the values with weights `p` [P, K, R, C]: float32 [P, K, R, V]."""
    num_items, kv_heads, num_rows, tokens = p.shape
    weights = p if v.scale is None else p * v.scale[:, :, None]
    weights = weights.reshape(num_items * kv_heads, num_rows, tokens)
    sums: Sequence[jax.Array]
    if loop.v_from_bytes:
        words, groups = v.parts
        scales = nvfp4_dots.scales_of(groups)
        if visible is not None:
            scales = jnp.where(visible, scales, jnp.float32(0))
        sums = nvfp4_dots.mix(weights, words, scales, token[0])
    else:
        dtype = loop.queries.dtype
        sums = [dot(weights.astype(dtype), part, ((2,), (1,))) for part in v.parts]
    width = loop.call.value_dim // len(sums)
    pv = jnp.concatenate([part[..., :width] for part in sums], axis=-1)
    pv = pv.reshape(num_items, kv_heads, num_rows, loop.call.value_dim)
    if v.zero is not None:
        pv = pv + (p * v.zero[:, :, None]).sum(axis=-1, keepdims=True)
    return pv


def per_row(
    call: calls.Call, operands: calls.Operands, num_rows: int
) -> tuple[jax.Array, jax.Array | None]:
    """The logit scale [1, K, 1, 1] and ALiBi slopes [1, K, R, 1] of token-major rows."""
    scale = jnp.broadcast_to(operands.scale, (call.num_kv_heads,))
    if operands.k_scale is not None:
        scale = scale * operands.k_scale
    slopes = None
    if operands.alibi_slopes is not None:
        slopes = operands.alibi_slopes.reshape(call.num_kv_heads, call.group)
        slopes = jnp.tile(slopes, (1, num_rows // call.group))[None, :, :, None]
    return scale[None, :, None, None], slopes


def sinks_per_row(call: calls.Call, sinks: jax.Array, num_rows: int) -> jax.Array:
    """Sinks [H] of token-major rows: [K, R]."""
    return jnp.tile(sinks.reshape(call.num_kv_heads, call.group), (1, num_rows // call.group))


def dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """A batched product summed in float32, in full precision where a GPU would use TF32."""
    return lax.dot_general(
        a,
        b,
        (contract, ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
