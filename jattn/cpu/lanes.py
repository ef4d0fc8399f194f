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
from jattn.cpu import masks, pool


class Lanes(typing.NamedTuple):
    """Rows and key runs of P lanes; R rows per KV head, `R = query tokens * G`, token-major."""

    queries: jax.Array  # [P, K, R, D] in the compute dtype
    rows: masks.Rows  # where each row's query token is, and what it sees
    first: jax.Array  # int32 [P]: no row that counts is at a position before this
    last: jax.Array  # int32 [P]: nor after this
    first_own: jax.Array  # int32 [P]: position of the sequence's first query token
    seq_len: jax.Array  # int32 [P]
    is_causal: typing.Any  # bool, or bool [P]
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
    # A dot with whole keys, its last columns dropped, is cheaper than cutting values out first: a
    # decode at 576 / 512 on two cores takes three quarters of the time with JAX 0.12, and no more
    # with 0.10.
    whole_keys = call.values_in_keys and 4 * call.head_dim <= 5 * call.value_dim

    def look(token: jax.Array, masked: bool, state: softmax.Partial) -> softmax.Partial:
        def read(words: jax.Array, format):
            return pool.read(
                words,
                lanes.run.table,
                token,
                slab,
                call.kv_layout,
                functools.partial(pool.decode, format=format, dtype=dtype),
            )

        k = read(operands.key_cache, call.key_format)
        v = k if whole_keys else read_values(call, operands, k, read)
        k_pos = masks.key_positions(lanes.run, token, slab.tokens, call.block_size)  # [P, C]
        seen, keys = masks.seen(lanes, k_pos, operands) if masked else (None, k_pos[:, None, :])
        dots = dot(queries, k, ((2,), (2,))).reshape(num_lanes, kv_heads, num_rows, slab.tokens)
        bias = None
        if operands.relative_bias is not None:
            bias = masks.position_bias(operands.relative_bias, lanes.rows, keys, call)
        logits = spec.transform_logits(
            dots,
            scale=scale,
            logits_soft_cap=operands.logits_soft_cap,
            alibi_slopes=slopes,
            q_pos=lanes.rows.positions[:, None, :, None],
            k_pos=keys[:, None],
            position_bias=bias,
        )
        if masked:
            logits = jnp.where(seen[:, None], logits, jnp.float32(-jnp.inf))
            mine = (k_pos >= lanes.start[:, None]) & (k_pos < lanes.end[:, None])
            v = jnp.where(jnp.repeat(mine, kv_heads, axis=0)[:, :, None], v, jnp.zeros((), v.dtype))
        m = jnp.maximum(state.m, logits.max(axis=-1))
        p = jnp.exp(logits - softmax.finite_max(m)[..., None])
        shrink = jnp.exp(state.m - softmax.finite_max(m))
        pv = dot(p.astype(dtype).reshape(batch, num_rows, slab.tokens), v, ((2,), (1,)))
        pv = pv[..., : call.value_dim].reshape(state.acc.shape)
        return softmax.Partial(
            m,
            state.l * shrink + p.sum(axis=-1),
            state.acc * shrink[..., None] + pv,
        )

    def body(step: jax.Array, state: softmax.Partial) -> softmax.Partial:
        token = lanes.token + step * slab.tokens
        whole = masks.sees_whole(lanes, token, slab.tokens, call, operands) | ~lanes.active
        return lax.cond(
            whole.all(),
            lambda s: look(token, False, s),
            lambda s: look(token, True, s),
            state,
        )

    empty = softmax.empty((num_lanes, kv_heads, num_rows), call.value_dim)
    return lax.fori_loop(0, steps, body, empty)


def read_values(
    call: calls.Call, operands: calls.Operands, k: jax.Array, read: typing.Callable
) -> jax.Array:
    """The slab of values: read, or the leading part of the keys `k` [P * K, C, D] in cache."""
    if call.values_in_keys:
        return k[..., : call.value_dim]
    return read(operands.value_cache, call.value_format)


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
