"""The inner loop of both XLA paths: lanes of query rows, each reading its own keys, slab by slab.

A lane is some query rows of one sequence and a run of that sequence's keys. `P` lanes step
together, because XLA for CPU spreads a dot over cores by its batch: `P * K` small dots in one.

    for each step:                                   # a traced number, the same for every lane
        k, v = the next C tokens of every lane       # [P * K, C, D], gathered once into cache
        s = transform(q k^T), masked where a lane is at an edge of what it sees
        m, l, acc = online softmax of s, v

A step at which every lane sees its whole slab takes a body without masks. Elsewhere logits are
masked, and rows of V that no row of the lane may see are replaced by zeros: they can hold NaN, and
0 * NaN is not 0.

Few rows of a format with a scale per group of numbers take no slab of numbers but of bytes
(`grouped`). Where both sides do, every step is masked: that costs them a few rows of C.
"""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import masks, numbers, pool
from jattn.cpu.xla import nvfp4_dots as grouped


class Lanes(typing.NamedTuple):
    """Rows and key runs of P lanes; R rows per KV head, `R = query tokens * G`, token-major."""

    queries: jax.Array  # [P, K, R, D] in the compute dtype
    rows: masks.Rows  # where each row's query token is, and what it sees
    first: jax.Array  # int32 [P]: no row that counts is at a position before this
    last: jax.Array  # int32 [P]: nor after this
    first_own: jax.Array  # int32 [P]: position of the sequence's first query token
    seq_len: jax.Array  # int32 [P]
    sight: spec.Sight  # of every row, to meet [P, R, C]
    run: masks.Run  # the keys to look at
    start: jax.Array  # int32 [P]: nobody in the lane sees a key before this
    end: jax.Array  # int32 [P]: nor at or after this
    token: jax.Array  # int32 [P]: where in the run it begins, a multiple of the slab's piece
    active: jax.Array  # bool [P]: whether the lane has a run at all


def attend(
    lanes: Lanes,
    steps: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    slab: pool.Slab,
    dtype: np.dtype,
) -> softmax.Partial:
    """The softmax state of every lane's rows over `steps` slabs: `Partial` of rows [P, K, R].

    What an inactive lane returns means nothing.
    """
    num_lanes, kv_heads, num_rows, head_dim = lanes.queries.shape
    batch = num_lanes * kv_heads
    queries = lanes.queries.reshape(batch, num_rows, head_dim)
    scale, slopes = per_row(call, operands, num_rows)
    keys, values = sides(call, operands)
    query_sums = queries.astype(jnp.float32).sum(axis=-1).reshape(num_lanes, kv_heads, num_rows, 1)
    few_k, few_v = (
        grouped.fits(format, num_rows, slab.tokens)
        for format in (call.key_format, call.value_format)
    )
    halves = numbers.split(queries, call.key_format)
    # A dot with whole keys, its last columns dropped, is cheaper than cutting values out first.
    whole_keys = call.values_in_keys and 4 * call.head_dim <= 5 * call.value_dim

    def look(token: jax.Array, masked: bool, state: softmax.Partial) -> softmax.Partial:
        where = (lanes.run.table, token, slab)
        # Scales and zeros of tokens join the logits and the weights: rows of C, not slabs of C x D.
        k_scale, k_zero = pool.read_scales(keys, *where)
        k = pool.read_bytes(keys, *where) if few_k else pool.read_numbers(keys, *where, dtype)
        if not call.values_in_keys:
            read = pool.read_bytes if few_v else functools.partial(pool.read_numbers, dtype=dtype)
            v = read(values, *where)
            v_scale, v_zero = pool.read_scales(values, *where)
        else:
            v, v_scale, v_zero = k, k_scale, k_zero
            if not (few_v or whole_keys):
                v = tuple(x[..., : call.value_dim // len(k)] for x in k)
        k_pos = masks.key_positions(lanes.run, token, slab.tokens, call.block_size)  # [P, C]
        seen, k_rows = None, k_pos[:, None, :]
        if masked:
            seen, k_rows = masks.seen(lanes, k_pos)
            # Made once for all KV heads: XLA would make it anew for each, in passing.
            seen = lax.optimization_barrier(seen)
        if few_k:
            dots = grouped.scores(queries.astype(jnp.float32), *k, token[0])
        else:
            dots = sum(dot(*parts, ((2,), (2,))) for parts in zip(halves, k, strict=True))
        dots = dots.reshape(num_lanes, kv_heads, num_rows, slab.tokens)
        if k_scale is not None:
            dots = dots * k_scale[:, :, None]
        if k_zero is not None:
            dots = dots + query_sums * k_zero[:, :, None]
        bias = None
        if operands.relative_bias is not None:
            bias = masks.position_bias(operands.relative_bias, lanes, k_rows, call)
        logits = spec.transform_logits(
            dots,
            scale=scale,
            logits_soft_cap=operands.logits_soft_cap,
            alibi_slopes=slopes,
            q_pos=lanes.rows.positions[:, None, :, None],
            k_pos=k_rows[:, None],
            position_bias=bias,
        )
        if masked:
            logits = jnp.where(seen[:, None], logits, jnp.float32(-jnp.inf))
            mine = (k_pos >= lanes.start[:, None]) & (k_pos < lanes.end[:, None])
            rows = jnp.repeat(mine, kv_heads, axis=0)[:, :, None]
            if not few_v:
                v = tuple(jnp.where(rows, part, jnp.zeros((), dtype)) for part in v)
            v_scale, v_zero = (
                None if x is None else jnp.where(mine[:, None], x, jnp.float32(0))
                for x in (v_scale, v_zero)
            )
        m = jnp.maximum(state.m, logits.max(axis=-1))
        p = jnp.exp(logits - softmax.finite_max(m)[..., None])
        shrink = jnp.exp(state.m - softmax.finite_max(m))
        weights = p if v_scale is None else p * v_scale[:, :, None]
        weights = weights.reshape(batch, num_rows, slab.tokens)
        if few_v:
            words, groups = v
            scales = grouped.scales_of(groups)
            if masked:
                scales = jnp.where(rows, scales, jnp.float32(0))
            pv = grouped.mix(weights, words, scales, token[0])
        else:
            pv = [dot(weights.astype(dtype), part, ((2,), (1,))) for part in v]
        width = call.value_dim // len(pv)
        pv = jnp.concatenate([part[..., :width] for part in pv], axis=-1)
        pv = pv.reshape(state.acc.shape)
        if v_zero is not None:
            pv = pv + (p * v_zero[:, :, None]).sum(axis=-1, keepdims=True)
        return softmax.Partial(
            m, state.l * shrink + p.sum(axis=-1), state.acc * shrink[..., None] + pv
        )

    def body(step: jax.Array, state: softmax.Partial) -> softmax.Partial:
        token = lanes.token + step * slab.tokens
        if few_k and few_v:
            return look(token, True, state)
        whole = masks.sees_whole(lanes, token, slab.tokens, call) | ~lanes.active
        return lax.cond(
            whole.all(),
            lambda s: look(token, False, s),
            lambda s: look(token, True, s),
            state,
        )

    empty = softmax.empty((num_lanes, kv_heads, num_rows), call.value_dim)
    state = lax.fori_loop(0, steps, body, empty)
    parts = jnp.split(state.acc, call.value_format.values_per_word, axis=-1)
    return state._replace(acc=numbers.join(tuple(parts)))


def sides(call: calls.Call, operands: calls.Operands) -> tuple[pool.Side, pool.Side]:
    """The cache's keys and values, each with how it is read."""
    keys = pool.Side(operands.key_cache, operands.k_quant_params, call.key_format, call.kv_layout)
    if call.values_in_keys:
        return keys, keys
    return keys, pool.Side(
        operands.value_cache, operands.v_quant_params, call.value_format, call.kv_layout
    )


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


def dot(a: jax.Array, b: jax.Array, contract: tuple) -> jax.Array:
    """A batched product accumulated in float32; full precision also where a GPU would take TF32."""
    return lax.dot_general(
        a,
        b,
        (contract, ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
