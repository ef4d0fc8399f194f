"""Gradients of the XLA path: the flash backward pass, by query tiles and KV tiles.

With `p = exp(s - lse)` recomputed from the saved lse, `do` and `dlse` the cotangents and
`delta = sum(do * out)` per row,

    ds = p * (do v^T - delta + dlse)        dv = p^T do
    dq, dk, dscale, dcap, dslopes = the transpose of s = transform(q k^T), applied to ds
    dsink = exp(sink - lse) * (dlse - delta)

so nothing the size of queries x keys is ever held. Gradients reach query, plain float caches,
scale, cap, sinks, slopes, the bias table and the caches' scales; stored words have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import kv_loop, masks, pool, prefill, tiles
from jattn.cpu.xla import numbers as words_to_numbers
from jattn.cpu.xla.varying import as_cotangent, as_varying
from jattn.cpu.xla.work_items import key_positions

Attend = Callable[[calls.Call, calls.Operands], tuple[jax.Array, jax.Array]]


def differentiable(attend: Attend) -> Attend:
    """A function that returns `(out, lse)`, with the gradients that `run` computes."""
    function = jax.custom_vjp(attend, nondiff_argnums=(0,))

    def forward(call: calls.Call, operands: calls.Operands) -> tuple[Any, Any]:
        out, lse = function(call, operands)
        return (out, lse), (operands, out, lse)

    def backward(call: calls.Call, saved: Any, cotangents: Any) -> tuple[calls.Operands]:
        return (run(call, *saved, *cotangents),)

    function.defvjp(forward, backward)
    return function


def run(
    call: calls.Call,
    operands: calls.Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> calls.Operands:
    """The cotangents of `operands`, None for integers and for what is absent."""
    sizes = tiles.prefill_tiles(call)
    span, tile = sizes.query_tokens, sizes.kv_tile
    starts = operands.query_start_loc
    counts = jnp.where(calls.broken_promises(call, operands)[0], 0, starts[1:] - starts[:-1])
    ends = prefill.tile_ends(counts, span)
    d_out = d_out.astype(jnp.float32)
    delta = (d_out * out.astype(jnp.float32)).sum(axis=-1)
    back = d_lse - delta  # [T, H]: what every p of a row is pulled by in addition to do v^T
    query = operands.query.astype(jnp.float32)
    keys_source, values_source = pool.of_call(call, operands)
    everything = (operands, d_out, d_lse)
    numbers = {
        "scale": operands.scale,
        "k_scale": operands.k_scale,
        "logits_soft_cap": operands.logits_soft_cap,
        "alibi_slopes": operands.alibi_slopes,
        "relative_bias": operands.relative_bias,
    }

    def body(index: jax.Array, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        here = prefill.locate(index, ends, counts, call, operands, sizes)
        item = here.item
        counted = jnp.repeat(here.counted, call.group)[None, :, None]

        def counted_rows(whole: jax.Array) -> jax.Array:
            """Zeros in rows that do not count: those of padding may hold NaN, and 0 * NaN is."""
            return jnp.where(counted, prefill.rows_of(whole, here, call, span), jnp.float32(0))

        q, do = counted_rows(query), counted_rows(d_out)
        row_lse, row_back = counted_rows(lse[..., None]), counted_rows(back[..., None])
        base = softmax.finite_max(row_lse)

        def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            d_q, d_key, d_value, d_v_scale, d_numbers = carry
            token = item.token + i * tile.tokens
            place = pool.Place(item.run.table, token, tile, call.kv_layout)
            k_pos = key_positions(item.run, token, tile.tokens, call.block_size)  # [1, C]
            visible = (k_pos >= item.run.first_key[:, None]) & (k_pos < item.run.end_key[:, None])
            seen, keys = masks.seen(item, k_pos)

            def read(source: pool.Source) -> jax.Array:
                parts = pool.read_numbers(source, place, np.dtype(np.float32))
                x = words_to_numbers.join(parts)
                scale, zero = pool.read_scales(source, place)
                x = x if scale is None else x * scale[0][..., None]
                x = x if zero is None else x + zero[0][..., None]
                return jnp.where(visible[:, :, None], x, jnp.float32(0))

            k = read(keys_source)
            v = k[..., : call.value_dim] if call.values_in_keys else read(values_source)

            def logits_of(q: jax.Array, k: jax.Array, numbers: dict[str, Any]) -> jax.Array:
                scale, slopes = kv_loop.per_row(call, operands._replace(**numbers), q.shape[1])
                bias = None
                if numbers["relative_bias"] is not None:
                    bias = masks.position_bias(numbers["relative_bias"], item, keys, call)[0]
                return spec.transform_logits(
                    kv_loop.dot(q, k, ((2,), (2,))),
                    scale=scale[0],
                    logits_soft_cap=numbers["logits_soft_cap"],
                    alibi_slopes=None if slopes is None else slopes[0],
                    q_pos=item.rows.positions[0][None, :, None],
                    k_pos=keys,
                    position_bias=bias,
                )

            # What does not vary would be summed over the mesh inside the loop.
            logits, transpose = jax.vjp(logits_of, *as_varying((q, k, numbers), everything))
            p = jnp.where(seen & counted, jnp.exp(logits - base), jnp.float32(0))
            do_v = kv_loop.dot(do, v, ((2,), (2,)))
            pulled = kv_loop.dot(p, do, ((1,), (1,)))  # [K, C, V]: p^T do
            if operands.v_scale is not None:
                d_v_scale = d_v_scale + (pulled * v).sum(axis=(1, 2))
                do_v = do_v * operands.v_scale[:, None, None]
                pulled = pulled * operands.v_scale[:, None, None]
            step_q, step_k, step_numbers = transpose(p * (do_v + row_back))
            if call.plain_cache:
                if call.values_in_keys:
                    rest = call.head_dim - call.value_dim
                    step_k = step_k + jnp.pad(pulled, ((0, 0), (0, 0), (0, rest)))
                elif call.rows is not None:  # one array of both
                    d_key = pool.add(d_key, pulled, place, values_source.part)
                else:
                    d_value = pool.add(d_value, pulled, place)
                d_key = pool.add(d_key, step_k, place, keys_source.part)
            d_numbers = jax.tree.map(jnp.add, d_numbers, step_numbers)
            return d_q + step_q, d_key, d_value, d_v_scale, d_numbers

        d_query, *rest = grads
        start = as_varying((jnp.zeros_like(q), *rest), everything)
        d_q, *rest = lax.fori_loop(0, here.num_steps, step, start)
        return prefill.put_rows(d_query, d_q, here, call, span), *rest

    def zeros(cache: jax.Array | None) -> jax.Array | None:
        if cache is None or not call.plain_cache:
            return None
        return jnp.zeros(cache.shape, jnp.float32)

    d_query, d_key, d_value, d_v_scale, d_numbers = lax.fori_loop(
        0,
        ends[-1],
        body,
        as_varying(
            (
                jnp.zeros_like(query),
                zeros(operands.key_cache),
                zeros(operands.value_cache),
                jnp.zeros((call.num_kv_heads,), jnp.float32),
                jax.tree.map(jnp.zeros_like, numbers),
            ),
            everything,
        ),
    )
    d_sinks = None
    if operands.sinks is not None:
        real = lse > -jnp.inf
        per_token = operands.sinks.ndim == 2
        sinks = operands.sinks if per_token else operands.sinks[None]
        weight = jnp.where(real, jnp.exp(sinks - softmax.finite_max(lse)), 0.0)
        d_sinks = weight * back if per_token else (weight * back).sum(axis=0)

    def as_cache(grad: jax.Array | None, cache: jax.Array | None) -> Any:
        return None if grad is None or cache is None else grad.astype(cache.dtype)

    grads = {
        "query": d_query.astype(operands.query.dtype),
        "key_cache": as_cache(d_key, operands.key_cache),
        "value_cache": as_cache(d_value, operands.value_cache),
        "sinks": d_sinks,
        "v_scale": None if operands.v_scale is None else d_v_scale,
        **d_numbers,
    }
    given = operands._asdict()
    # None for integers, and for what the call does not have.
    nothing: dict[str, Any] = dict.fromkeys(given)
    return calls.Operands(
        **nothing | {name: as_cotangent(x, given[name]) for name, x in grads.items()}
    )
