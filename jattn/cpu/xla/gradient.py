"""Gradients of the XLA path: the flash backward pass, tile by tile and slab by slab.

With `p = exp(s - lse)` recomputed from the saved lse, `do` and `dlse` the cotangents and
`delta = sum(do * out)` per row,

    ds = p * (do v^T - delta + dlse)        dv = p^T do
    dq, dk, dscale, dcap, dslopes = the transpose of s = transform(q k^T), applied to ds
    dsink = exp(sink - lse) * (dlse - delta)

so nothing the size of queries x keys is ever held. Gradients reach query, plain float caches,
scale, cap, sinks, slopes, the bias table and the caches' scales; stored words have none.
"""

from __future__ import annotations

from operator import add, mul

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import lanes, masks, pool, tiles
from jattn.cpu.xla import numbers as words_to_numbers
from jattn.cpu.xla import prefill as ragged


def run(
    call: calls.Call,
    operands: calls.Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> calls.Operands:
    """The cotangents of `operands`, None for integers and for what is absent."""
    tile = tiles.ragged_tiles(call)
    span, slab = tile.query_tokens, tile.slab
    counts = operands.query_start_loc[1:] - operands.query_start_loc[:-1]
    ends = ragged.tile_ends(counts, span)
    d_out = d_out.astype(jnp.float32)
    delta = (d_out * out.astype(jnp.float32)).sum(axis=-1)
    back = d_lse - delta  # [T, H]: what every p of a row is pulled by besides do v^T
    query = operands.query.astype(jnp.float32)
    numbers = {
        "scale": operands.scale,
        "k_scale": operands.k_scale,
        "logits_soft_cap": operands.logits_soft_cap,
        "alibi_slopes": operands.alibi_slopes,
        "relative_bias": operands.relative_bias,
    }

    def body(index: jax.Array, grads):
        here = ragged.locate(index, ends, counts, call, operands, tile)
        lane = here.lane
        own = jnp.repeat(here.own, call.group)[None, :, None]

        def own_rows(whole: jax.Array) -> jax.Array:
            """Zeros in rows not the tile's own: those of padding may hold NaN, and 0 * NaN is."""
            return jnp.where(own, ragged.rows_of(whole, here, call, span), jnp.float32(0))

        q, do = own_rows(query), own_rows(d_out)
        row_lse, row_back = own_rows(lse[..., None]), own_rows(back[..., None])
        base = softmax.finite_max(row_lse)

        def step(i: jax.Array, carry):
            d_q, d_key, d_value, d_v_scale, d_numbers = carry
            token = lane.token + i * slab.tokens
            k_pos = masks.key_positions(lane.run, token, slab.tokens, call.block_size)  # [1, C]
            mine = ((k_pos >= lane.start[:, None]) & (k_pos < lane.end[:, None]))[:, :, None]
            seen, keys = masks.seen(lane, k_pos)

            def read(side: pool.Side) -> jax.Array:
                where = (lane.run.table, token, slab)
                x = pool.read_numbers(side, *where, jnp.dtype(jnp.float32))
                x = words_to_numbers.join(x)
                for own, combine in zip(pool.read_scales(side, *where), (mul, add), strict=True):
                    x = x if own is None else combine(x, own[0][..., None])
                return jnp.where(mine, x, jnp.float32(0))

            keys_side, values_side = lanes.sides(call, operands)
            k = read(keys_side)
            v = k[..., : call.value_dim] if call.values_in_keys else read(values_side)

            def logits_of(q: jax.Array, k: jax.Array, numbers: dict) -> jax.Array:
                scale, slopes = lanes.per_row(call, operands._replace(**numbers), q.shape[1])
                bias = None
                if numbers["relative_bias"] is not None:
                    bias = masks.position_bias(numbers["relative_bias"], lane, keys, call)[0]
                return spec.transform_logits(
                    lanes.dot(q, k, ((2,), (2,))),
                    scale=scale[0],
                    logits_soft_cap=numbers["logits_soft_cap"],
                    alibi_slopes=None if slopes is None else slopes[0],
                    q_pos=lane.rows.positions[0][None, :, None],
                    k_pos=keys,
                    position_bias=bias,
                )

            logits, transpose = jax.vjp(logits_of, q, k, numbers)
            p = jnp.where(seen & own, jnp.exp(logits - base), jnp.float32(0))
            do_v = lanes.dot(do, v, ((2,), (2,)))
            pulled = lanes.dot(p, do, ((1,), (1,)))  # [K, C, V]: p^T do
            if operands.v_scale is not None:
                d_v_scale = d_v_scale + (pulled * v).sum(axis=(1, 2))
                do_v = do_v * operands.v_scale[:, None, None]
                pulled = pulled * operands.v_scale[:, None, None]
            step_q, step_k, step_numbers = transpose(p * (do_v + row_back))
            if call.plain_cache:
                where = (lane.run.table, token, slab, call.kv_layout)
                if call.values_in_keys:
                    rest = call.head_dim - call.value_dim
                    step_k = step_k + jnp.pad(pulled, ((0, 0), (0, 0), (0, rest)))
                else:
                    d_value = pool.add(d_value, pulled, *where)
                d_key = pool.add(d_key, step_k, *where)
            d_numbers = jax.tree.map(jnp.add, d_numbers, step_numbers)
            return d_q + step_q, d_key, d_value, d_v_scale, d_numbers

        d_query, *rest = grads
        d_q, *rest = lax.fori_loop(0, here.steps, step, (jnp.zeros_like(q), *rest))
        return ragged.put_rows(d_query, d_q, here, call, span), *rest

    def zeros(cache: jax.Array | None) -> jax.Array | None:
        given = call.plain_cache and cache is not None
        return jnp.zeros(cache.shape, jnp.float32) if given else None

    d_query, d_key, d_value, d_v_scale, d_numbers = lax.fori_loop(
        0,
        ends[-1],
        body,
        (
            jnp.zeros_like(query),
            zeros(operands.key_cache),
            zeros(operands.value_cache),
            jnp.zeros((call.num_kv_heads,), jnp.float32),
            jax.tree.map(jnp.zeros_like, numbers),
        ),
    )
    d_sinks = None
    if operands.sinks is not None:
        real = lse > -jnp.inf
        per_token = operands.sinks.ndim == 2
        sinks = operands.sinks if per_token else operands.sinks[None]
        weight = jnp.where(real, jnp.exp(sinks - softmax.finite_max(lse)), 0.0)
        d_sinks = weight * back if per_token else (weight * back).sum(axis=0)

    def as_cache(grad: jax.Array | None, cache: jax.Array) -> jax.Array | None:
        return None if grad is None else grad.astype(cache.dtype)

    return calls.Operands(
        query=d_query.astype(operands.query.dtype),
        key_cache=as_cache(d_key, operands.key_cache),
        value_cache=as_cache(d_value, operands.value_cache),
        block_tables=None,
        seq_lens=None,
        query_start_loc=None,
        is_causal=None,
        sliding_window=None,
        sinks=d_sinks,
        v_scale=None if operands.v_scale is None else d_v_scale,
        k_quant_params=None,
        v_quant_params=None,
        **d_numbers,
    )
