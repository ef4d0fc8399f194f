"""The inner loop of both XLA paths: work items, each reading its own keys, tile by tile.

`P` work items step together, because XLA for CPU spreads a dot over cores by its batch: `P * K`
small dots in one.

    for each step:                                # a traced number, the same for every work item
        k, v = the next C tokens of every item    # [P * K, C, D], gathered once into cache
        s = transform(q k^T), masked where an item is at an edge of what it sees
        m, l, acc = online softmax of s, v

A step at which every item sees its whole KV tile takes a body without masks. Elsewhere logits are
masked, and rows of V that no row of the item may see are replaced by zeros: they can hold NaN, and
0 * NaN is not 0.

Few query rows against a format with a scale per group of numbers take dots on bytes (`nvfp4_dots`)
and no tile of numbers. Where keys and values both do, every step is masked: that costs them a few
rows of C.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import masks, numbers, nvfp4_dots, pool
from jattn.cpu.xla.varying import as_varying
from jattn.cpu.xla.work_items import WorkItems, key_positions


def attend(
    items: WorkItems,
    num_steps: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    tile: pool.KVTile,
) -> softmax.Partial:
    """The softmax state of every item's rows over `num_steps` tiles: `Partial` of rows [P, K, R].

    What an inactive item returns means nothing.
    """
    num_items, kv_heads, num_rows, head_dim = items.queries.shape
    batch, dtype = num_items * kv_heads, items.queries.dtype
    queries = items.queries.reshape(batch, num_rows, head_dim)
    scale, slopes = per_row(call, operands, num_rows)
    keys, values = pool.of_call(call, operands)
    query_sums = queries.astype(jnp.float32).sum(axis=-1).reshape(num_items, kv_heads, num_rows, 1)
    k_from_bytes, v_from_bytes = (
        nvfp4_dots.fits(format, num_rows, tile.tokens)
        for format in (call.key_format, call.value_format)
    )
    query_parts = numbers.split(queries, call.key_format)
    # A dot with whole keys, its last columns dropped, is cheaper than cutting values out first.
    whole_keys = call.values_in_keys and 4 * call.head_dim <= 5 * call.value_dim

    def step(token: jax.Array, masked: bool, state: softmax.Partial) -> softmax.Partial:
        place = pool.Place(items.run.table, token, tile, call.kv_layout)

        def read(source: pool.Source, from_bytes: bool) -> tuple[Any, ...]:
            if from_bytes:
                return pool.read_bytes(source, place)
            return pool.read_numbers(source, place, dtype)

        # Scales and zeros of tokens join the logits and the weights: rows of C, not tiles of C x D.
        k, (k_scale, k_zero) = read(keys, k_from_bytes), pool.read_scales(keys, place)
        if not call.values_in_keys:
            v, (v_scale, v_zero) = read(values, v_from_bytes), pool.read_scales(values, place)
        else:
            v, v_scale, v_zero = k, k_scale, k_zero
            if not (v_from_bytes or whole_keys):
                v = tuple(x[..., : call.value_dim // len(k)] for x in k)
        k_pos = key_positions(items.run, token, tile.tokens, call.block_size)  # [P, C]
        k_rows = k_pos[:, None, :]
        if masked:
            seen, k_rows = masks.seen(items, k_pos)
            # Computed once for all KV heads: XLA would fuse it into the work of each.
            seen = lax.optimization_barrier(seen)
        if k_from_bytes:
            words, groups = k
            dots = nvfp4_dots.scores(queries.astype(jnp.float32), words, groups, token[0])
        else:
            products = [dot(*parts, ((2,), (2,))) for parts in zip(query_parts, k, strict=True)]
            dots = functools.reduce(jnp.add, products)
        dots = dots.reshape(num_items, kv_heads, num_rows, tile.tokens)
        if k_scale is not None:
            dots = dots * k_scale[:, :, None]
        if k_zero is not None:
            dots = dots + query_sums * k_zero[:, :, None]
        bias = None
        if operands.relative_bias is not None:
            bias = masks.position_bias(operands.relative_bias, items, k_rows, call)
        logits = spec.transform_logits(
            dots,
            scale=scale,
            logits_soft_cap=operands.logits_soft_cap,
            alibi_slopes=slopes,
            q_pos=items.rows.positions[:, None, :, None],
            k_pos=k_rows[:, None],
            position_bias=bias,
        )
        if masked:
            logits = jnp.where(seen[:, None], logits, jnp.float32(-jnp.inf))
            visible = (k_pos >= items.run.first_key[:, None]) & (k_pos < items.run.end_key[:, None])
            rows = jnp.repeat(visible, kv_heads, axis=0)[:, :, None]
            if not v_from_bytes:
                v = tuple(jnp.where(rows, part, jnp.zeros((), dtype)) for part in v)
            v_scale, v_zero = (
                None if x is None else jnp.where(visible[:, None], x, jnp.float32(0))
                for x in (v_scale, v_zero)
            )

        def weigh_values(p: jax.Array) -> jax.Array:
            weights = p if v_scale is None else p * v_scale[:, :, None]
            weights = weights.reshape(batch, num_rows, tile.tokens)
            sums: Sequence[jax.Array]
            if v_from_bytes:
                words, groups = v
                scales = nvfp4_dots.scales_of(groups)
                if masked:
                    scales = jnp.where(rows, scales, jnp.float32(0))
                sums = nvfp4_dots.mix(weights, words, scales, token[0])
            else:
                sums = [dot(weights.astype(dtype), part, ((2,), (1,))) for part in v]
            width = call.value_dim // len(sums)
            pv = jnp.concatenate([part[..., :width] for part in sums], axis=-1)
            pv = pv.reshape(state.acc.shape)
            if v_zero is not None:
                pv = pv + (p * v_zero[:, :, None]).sum(axis=-1, keepdims=True)
            return pv

        return softmax.update(state, logits, weigh_values)

    def body(i: jax.Array, state: softmax.Partial) -> softmax.Partial:
        token = items.token + i * tile.tokens
        if k_from_bytes and v_from_bytes:
            return step(token, True, state)
        whole = masks.sees_whole(items, token, tile.tokens, call) | ~items.active
        return lax.cond(
            whole.all(),
            lambda s: step(token, False, s),
            lambda s: step(token, True, s),
            state,
        )

    empty = softmax.init((num_items, kv_heads, num_rows), call.value_dim)
    empty = as_varying(empty, (items, operands))
    state = lax.fori_loop(0, num_steps, body, empty)
    parts = jnp.split(state.acc, call.value_format.values_per_word, axis=-1)
    return state._replace(acc=numbers.join(tuple(parts)))


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


def dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """A batched product accumulated in float32; full precision also where a GPU would take TF32."""
    return lax.dot_general(
        a,
        b,
        (contract, ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
