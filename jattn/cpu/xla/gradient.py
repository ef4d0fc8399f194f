"""Gradients of the XLA path: the flash backward pass, by query tiles and KV tiles.

With `p = exp(s - lse)` recomputed from the saved lse, `do` and `dlse` the cotangents and
`delta = sum(do * out)` per row,

    ds = p * (do v^T - delta + dlse)        dv = p^T do
    dq, dk, dscale, dcap, dslopes = the transpose of s = transform(q k^T), applied to ds
    dsink = exp(sink - lse) * (dlse - delta)

so no array of size queries x keys is ever held. Gradients reach query, plain float caches, scale,
cap, sinks, slopes, the bias table and the caches' scales; stored words have none. Gradients of
plain fp8 caches are fp8 too: with most losses they are too large for it, and saturate.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import call as calls
from jattn import capability, softmax, spec
from jattn.cpu.xla import kv_loop, masks, pool, prefill, tiles
from jattn.cpu.xla import numbers as words_to_numbers
from jattn.cpu.xla.work_items import WorkItems, key_positions
from jattn.varying import (
    as_cotangent,
    as_varying,
    axes_along,
    explicit_mesh,
    on_automatic_axes,
)

# What the backward pass needs: the operands, `out` and `lse`.
Saved = tuple[calls.Operands, jax.Array, jax.Array]


def differentiable(attend: calls.Run) -> calls.Run:
    """Give a function that returns `(out, lse)` the gradients that `run` computes."""
    function = jax.custom_vjp(attend, nondiff_argnums=(0,))

    def forward(
        call: calls.Call, operands: calls.Operands
    ) -> tuple[tuple[jax.Array, jax.Array], Saved]:
        out, lse = function(call, operands)
        return (out, lse), (operands, out, lse)

    def backward(
        call: calls.Call, saved: Saved, cotangents: tuple[jax.Array, jax.Array]
    ) -> tuple[calls.Operands]:
        return (_once(call, saved, cotangents),)

    function.defvjp(forward, backward)
    return function


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(
    call: calls.Call, saved: Saved, cotangents: tuple[jax.Array, jax.Array]
) -> calls.Operands:
    """Return the gradients, which have none themselves: lengths set how often `run` loops."""
    return _run_on_mesh(call, saved, cotangents)


@_once.defjvp
def _no_second_derivatives(call: calls.Call, primals: Any, tangents: Any) -> Any:
    raise capability.UnsupportedError(
        "paged_attention: second derivatives are not supported: gradients have none"
    )


class Sums(NamedTuple):
    """The float32 gradients that the loops have added up so far."""

    query: jax.Array  # of all queries; within a query tile, of its rows
    key: jax.Array | None  # of plain float caches
    value: jax.Array | None
    v_scale: jax.Array
    numbers: dict[str, jax.Array | None]  # of the arguments of `transform_logits`


class Rows(NamedTuple):
    """The rows of a query tile; those that do not count are zeros."""

    tile: prefill.QueryTile
    counted: jax.Array
    query: jax.Array
    d_out: jax.Array
    lse: jax.Array
    back: jax.Array  # dlse - delta, which is added to do v^T


@dataclasses.dataclass(frozen=True)
class Backward:
    """One call's backward pass."""

    call: calls.Call
    operands: calls.Operands
    d_out: jax.Array  # float32
    lse: jax.Array
    back: jax.Array  # dlse - delta [T, H]

    @property
    def varying(self) -> tuple[calls.Operands, jax.Array, jax.Array]:
        """The arrays that may vary over a mesh's devices; loop carries must vary if they do."""
        return self.operands, self.d_out, self.back

    @functools.cached_property
    def sizes(self) -> tiles.PrefillTiles:
        return tiles.prefill_tiles(self.call)

    @functools.cached_property
    def numbers(self) -> dict[str, jax.Array | None]:
        """The arguments of `transform_logits` that have gradients."""
        names = ("scale", "k_scale", "logits_soft_cap", "alibi_slopes", "relative_bias")
        return {name: getattr(self.operands, name) for name in names}

    def zeros(self) -> Sums:
        """Return the sums before the first tile."""

        def of_cache(cache: jax.Array | None) -> jax.Array | None:
            if cache is None or not self.call.plain_cache:
                return None
            return jnp.zeros(cache.shape, jnp.float32)

        x = self.operands
        zeros = Sums(
            jnp.zeros(x.query.shape, jnp.float32),
            of_cache(x.key_cache),
            of_cache(x.value_cache),
            jnp.zeros((self.call.num_kv_heads,), jnp.float32),
            jax.tree.map(jnp.zeros_like, self.numbers),
        )
        return as_varying(zeros, self.varying)

    def sums(self) -> Sums:
        """The gradients of everything but the sinks."""
        starts = self.operands.query_start_loc
        broken = calls.broken_promises(self.call, self.operands)[0]
        counts = jnp.where(broken, 0, starts[1:] - starts[:-1])
        ends = prefill.tile_ends(counts, self.sizes.query_tokens)

        def add(index: jax.Array, sums: Sums) -> Sums:
            tile = prefill.locate(index, ends, counts, self.call, self.operands, self.sizes)
            return self.add_query_tile(tile, sums)

        return lax.fori_loop(0, ends[-1], add, self.zeros())

    def add_query_tile(self, tile: prefill.QueryTile, sums: Sums) -> Sums:
        """Add the gradients from the rows of a query tile and all the keys they see."""
        span = self.sizes.query_tokens
        counted = jnp.repeat(tile.counted, self.call.group)[None, :, None]

        def rows_of(whole: jax.Array) -> jax.Array:
            """Zero the rows that do not count: padding may hold NaN, and 0 * NaN is NaN."""
            return jnp.where(counted, prefill.rows_of(whole, tile, self.call, span), jnp.float32(0))

        query = self.operands.query.astype(jnp.float32)
        per_row = (self.lse[..., None], self.back[..., None])
        rows = Rows(tile, counted, *map(rows_of, (query, self.d_out, *per_row)))
        start = as_varying(sums._replace(query=jnp.zeros_like(rows.query)), self.varying)
        found = lax.fori_loop(
            0, tile.num_steps, functools.partial(self.add_kv_tile, rows=rows), start
        )
        d_query = prefill.put_rows(sums.query, found.query, tile, self.call, span)
        return found._replace(query=d_query)

    def add_kv_tile(self, i: jax.Array, sums: Sums, *, rows: Rows) -> Sums:
        """Add the gradients from `rows` and KV tile `i`; `sums.query` has only these rows."""
        call, item, kv_tile = self.call, rows.tile.item, self.sizes.kv_tile
        token = item.token + i * kv_tile.tokens
        place = pool.Place(item.run.table, token, kv_tile, call.kv_layout)
        k_pos = key_positions(item.run, token, kv_tile.tokens, call.block_size)  # [1, C]
        seen, keys = masks.seen(item, k_pos)
        key_source, value_source = pool.of_call(call, self.operands)
        k = self.read(key_source, place, item, k_pos)
        if call.values_in_keys:
            v = k[..., : call.value_dim]
        else:
            v = self.read(value_source, place, item, k_pos)
        logits_of = functools.partial(self.logits, item=item, keys=keys)
        # The gradients of inputs that do not vary would be summed over the mesh inside the loop.
        varying = as_varying((rows.query, k, self.numbers), self.varying)
        logits, transpose = jax.vjp(logits_of, *varying)
        base = softmax.finite_max(rows.lse)
        p = jnp.where(seen & rows.counted, jnp.exp(logits - base), jnp.float32(0))
        do_v = kv_loop.dot(rows.d_out, v, ((2,), (2,)))
        pulled = kv_loop.dot(p, rows.d_out, ((1,), (1,)))  # [K, C, V]: p^T do
        d_v_scale = sums.v_scale
        if self.operands.v_scale is not None:
            d_v_scale = d_v_scale + (pulled * v).sum(axis=(1, 2))
            do_v = do_v * self.operands.v_scale[:, None, None]
            pulled = pulled * self.operands.v_scale[:, None, None]
        d_q, d_k, d_numbers = transpose(p * (do_v + rows.back))
        d_key, d_value = sums.key, sums.value
        if d_key is not None:
            if call.values_in_keys:
                rest = call.head_dim - call.value_dim
                d_k = d_k + jnp.pad(pulled, ((0, 0), (0, 0), (0, rest)))
            elif d_value is None:  # one array of both
                d_key = pool.add(d_key, pulled, place, value_source.part)
            else:
                d_value = pool.add(d_value, pulled, place)
            d_key = pool.add(d_key, d_k, place, key_source.part)
        d_numbers = jax.tree.map(jnp.add, sums.numbers, d_numbers)
        return Sums(sums.query + d_q, d_key, d_value, d_v_scale, d_numbers)

    def read(
        self, source: pool.Source, place: pool.Place, item: WorkItems, k_pos: jax.Array
    ) -> jax.Array:
        """Read a kv tile's numbers [K, C, D], with zeros where no row sees the key."""
        x = words_to_numbers.join(pool.read_numbers(source, place, np.dtype(np.float32)))
        scale, zero = pool.read_scales(source, place)
        x = x if scale is None else x * scale[0][..., None]
        x = x if zero is None else x + zero[0][..., None]
        visible = (k_pos >= item.run.first_key[:, None]) & (k_pos < item.run.end_key[:, None])
        return jnp.where(visible[:, :, None], x, jnp.float32(0))

    def logits(
        self,
        q: jax.Array,
        k: jax.Array,
        numbers: dict[str, Any],
        *,
        item: WorkItems,
        keys: jax.Array,
    ) -> jax.Array:
        """The logits of a query tile and a KV tile; `numbers` as in `Sums`."""
        operands = self.operands._replace(**numbers)
        scale, slopes = kv_loop.per_row(self.call, operands, q.shape[1])
        bias = None
        if numbers["relative_bias"] is not None:
            bias = masks.position_bias(numbers["relative_bias"], item, keys, self.call)[0]
        return spec.transform_logits(
            kv_loop.dot(q, k, ((2,), (2,))),
            scale=scale[0],
            logits_soft_cap=numbers["logits_soft_cap"],
            alibi_slopes=None if slopes is None else slopes[0],
            q_pos=item.rows.positions[0][None, :, None],
            k_pos=keys,
            position_bias=bias,
        )

    def of_sinks(self) -> jax.Array | None:
        """The gradients of the sinks."""
        sinks = self.operands.sinks
        if sinks is None:
            return None
        sinks = sinks if self.call.sinks_per_token else sinks[None]
        weight = jnp.exp(sinks - softmax.finite_max(self.lse))
        pulled = jnp.where(self.lse > -jnp.inf, weight, 0.0) * self.back
        return pulled if self.call.sinks_per_token else pulled.sum(axis=0)


def _run_on_mesh(
    call: calls.Call, saved: Saved, cotangents: tuple[jax.Array, jax.Array]
) -> calls.Operands:
    """Call `run`; where types carry shardings, every cotangent gets that of its primal."""
    given = (*saved, *cotangents)
    if explicit_mesh(given) is None:
        return run(call, *given)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    grads = jax.eval_shape(functools.partial(run, call), *shapes)
    primals = saved[0]._asdict()
    specs = {
        name: None if grad is None else jax.tree.map(lambda x: axes_along(x, x.ndim), primals[name])
        for name, grad in grads._asdict().items()
    }
    found = on_automatic_axes(lambda x: run(call, *x)._asdict(), given, specs)
    return calls.Operands(**found)


def run(
    call: calls.Call,
    operands: calls.Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> calls.Operands:
    """Return the cotangents of `operands`: None for integers and absent operands."""
    d_out = d_out.astype(jnp.float32)
    delta = (d_out * out.astype(jnp.float32)).sum(axis=-1)
    backward = Backward(call, operands, d_out, lse, d_lse - delta)
    sums = backward.sums()

    def as_cache(grad: jax.Array | None, cache: jax.Array | None) -> jax.Array | None:
        if grad is None or cache is None:
            return None
        if cache.dtype.itemsize == 1:  # saturate: e4m3 would turn what is too large into NaN
            most = float(jnp.finfo(cache.dtype).max)
            grad = jnp.clip(grad, -most, most)
        return grad.astype(cache.dtype)

    grads = {
        "query": sums.query.astype(operands.query.dtype),
        "key_cache": as_cache(sums.key, operands.key_cache),
        "value_cache": as_cache(sums.value, operands.value_cache),
        "sinks": backward.of_sinks(),
        "v_scale": None if operands.v_scale is None else sums.v_scale,
        **sums.numbers,
    }
    given = operands._asdict()
    # None for integers and for operands that the call does not have.
    nothing: dict[str, Any] = dict.fromkeys(given)
    return calls.Operands(
        **nothing | {name: as_cotangent(x, given[name]) for name, x in grads.items()}
    )
