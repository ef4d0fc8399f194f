"""Prefill, chunked prefill and mixtures on Mosaic GPU: head sizes up to 256.

For the rows of a tile (query head h, query token t) and the keys j that they see,

    out = sum_j exp2(s_j - m) v_j / (sum_j exp2(s_j - m) + exp2(sink - m))

with `s_j` the base-2 logit of `jattn.spec` and `m` the largest so far: one pass over the keys, and
what is summed already is rescaled when `m` grows. One block of the grid answers one tile of
`jattn.pallas.mosaic_gpu.prefill.plan` for one group of query heads:

    for each tile of block_kv keys in [base, end):            # the producer's copies run ahead
        s = q k^T                                              # wgmma, shared memory to registers
        s = logits(s), masked only where the tile has an edge
        m, l, acc = rescale(m, l, acc); p = exp2(s - m); l += sum(p)
        acc += p v                                             # wgmma, p from registers

Three warpgroups. Warpgroups 0 and 1 hold 64 rows each and share every tile of keys; warpgroup 2
issues the copies and keeps 24 registers, so that the others may have 240.

| buffer | written by | read by | handed over by |
|---|---|---|---|
| q[w] | warpgroup w's own copies | warpgroup w | q_ready[w] |
| k[stage] | producer's copies | both | ready; back by free |
| v[stage] | producer's copies; 0 zeros the tail | both | ready, v_clean; back by free |
| out[w], on q[w]'s memory | warpgroup w | copies to the result | the end of w's loop; commit_smem |

`turn` orders the tensor cores: a warpgroup passes it on when its products are issued, so that one
computes its softmax while the other multiplies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fragments
from jattn.pallas.mosaic_gpu.prefill import fp8 as widened
from jattn.pallas.mosaic_gpu.prefill import parts, plan
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling
from jattn.pallas.mosaic_gpu.prefill import wide as mosaic_prefill_wide

ROWS = tiling.ROWS
ROW_LAYOUT = mgpu.WGMMA.reduce(1)


def run(
    call: calls.Call, operands: calls.Operands, counts: jax.Array, *, cluster: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; tokens of sequences whose count is 0 are
    left as they come. The lse is -inf everywhere if the call does not ask for it.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those another kernel answers.
      cluster: whether two blocks share their copies where D or V is above 256; see `choose`.
    """
    tiles = tiling.choose(call, cluster=cluster)
    arrays = parts.inputs(call, operands, counts, tiles)
    kernel = mosaic_prefill_wide.attend if tiles.wide else attend
    out, lse = kernel(call, tiles, arrays)
    if lse is None:
        lse = jnp.full((call.num_tokens, call.num_heads), -jnp.inf, jnp.float32)
    else:
        lse = parts.gather_lse(lse, call, operands, tiles, arrays.plan)
    return out[: call.num_tokens], lse


def attend(
    call: calls.Call, tiles: tiling.Tiles, arrays: parts.Inputs
) -> tuple[jax.Array, jax.Array | None]:
    """The kernel: `out` [T, H, V] and the lse of every unit's rows, or None."""
    dtype = arrays.query.dtype
    out_dtype = jnp.dtype(call.out_dtype)
    d, v = tiles.head_dim, tiles.value_dim
    v_swizzle = tiling.value_swizzle(tiles)
    query = mgpu.swizzled((2, ROWS, d), dtype, tiling.swizzle_of(d))
    result = (
        (mgpu.swizzled((2, ROWS, v), out_dtype, tiling.swizzle_of(v)),),
        (mgpu.SMEM((2, ROWS, v), out_dtype),),
    )
    scratch = {
        # The warpgroups end apart, so one's result may only lie on its own query.
        "own": mgpu.RefUnion((query,), *result) if d == v else (query, mgpu.RefUnion(*result)),
        "q_ready": mgpu.Barrier(num_arrivals=tiles.row_heads, num_barriers=2),
        "ready": mgpu.Barrier(num_arrivals=tiles.copies, num_barriers=2 * tiles.stages),
        "turn": mgpu.Barrier(num_arrivals=2),
        **(_Stored if tiles.stored_bytes == 2 else widened.Widened).scratch(call, tiles, dtype),
    }
    if call.return_lse:
        scratch["lse_rows"] = mgpu.SMEM((2, ROWS), jnp.float32)
    if mgpu.interpreting():
        scratch["p"] = mgpu.swizzled((2, ROWS, tiles.block_kv), dtype, v_swizzle)
    body = parts.warpgroups(call, tiles, _produce, _consume)
    return parts.launch(body, call, tiles, arrays, scratch)


def _produce(call, tiles, ins, work, kv_head, scratch):
    fetch = parts.Fetch.of(call, tiles, ins, work, kv_head)
    steps = work.steps(tiles)

    @pl.loop(0, steps)
    def _(step):
        stage = lax.rem(step, tiles.stages)
        places = fetch.places(step)
        for name, pool, columns, place in (
            ("k", ins.keys, tiles.head_dim, stage),
            ("v", ins.values, tiles.value_dim, tiles.stages + stage),
        ):

            @pl.when(step >= tiles.stages)
            def _(place=place):
                mgpu.barrier_wait(scratch["free"].at[place])

            fetch.copy(
                step,
                places,
                pool,
                (0, columns),
                scratch[name].at[stage],
                scratch["ready"].at[place],
            )

    # Nothing may be in flight when the block ends, arrivals included.
    @pl.loop(jnp.maximum(steps - tiles.stages, 0), steps)
    def _(step):
        for first in (0, tiles.stages):
            mgpu.barrier_wait(scratch["free"].at[first + lax.rem(step, tiles.stages)])


def _consume(call, tiles, ins, work, kv_head, heads, w, out, lse, scratch):
    if tiles.head_dim == tiles.value_dim:
        (q,), (out_tiled,), (out_plain,) = scratch["own"]
    else:
        q, ((out_tiled,), (out_plain,)) = scratch["own"]
    turn = scratch["turn"]
    steps = work.steps(tiles)
    cache = _Stored if tiles.stored_bytes == 2 else widened.Widened
    cache = cache(tiles, work, w, scratch)
    first_head = heads * tiles.tile_heads + (w * tiles.row_heads if tiles.split_heads else 0)
    first_token = jnp.int32(0) if tiles.split_heads else w * tiles.row_tokens
    rows = parts.Rows(
        call,
        tiles,
        ins,
        work,
        kv_head,
        unit=lax.div(first_head, jnp.int32(tiles.row_heads)),
        first_token=first_token,
    )
    parts.fetch_query(
        ins.query, q.at[w], tiles, work, first_head, first_token, scratch["q_ready"].at[w]
    )
    mgpu.barrier_wait(scratch["q_ready"].at[w])

    def pass_turn(meanwhile=lambda: None):
        mgpu.barrier_arrive(turn)
        meanwhile()
        mgpu.barrier_wait(turn)

    def step_body(step, carry):
        acc, m, l = carry
        k = cache.keys(step)

        mine = q.at[parts.anew(w, step)]  # or the addresses of all of q stay in registers

        def dots(acc_ref):
            mgpu.wgmma(acc_ref, mine, k.T)
            pass_turn(lambda: cache.beside_logits(step))
            return acc_ref[...]

        s = pl.run_scoped(dots, mgpu.ACC((ROWS, tiles.block_kv), jnp.float32))
        cache.keys_read(step)
        first_key = work[plan.BASE] + step * tiles.block_kv
        s = rows.logits(s, first_key, rows.scales(s.shape))
        top = jnp.maximum(m, s.max(axis=1))
        rescale = jnp.exp2(m - top)
        prob = jnp.exp2(s - fragments.along(top, s.shape, 0))
        acc = acc * fragments.along(rescale, acc.shape, 0)
        l = l * rescale + prob.sum(axis=1)
        prob = prob.astype(q.dtype)
        pass_turn(lambda: cache.await_values(step))
        v = cache.values(step)
        acc = _weigh(acc, prob, v, scratch, w, lambda: cache.beside_values(step))
        cache.values_read(step)
        return acc, top, l

    cache.begin()
    pl.when(w == 1)(pass_turn)
    acc, m, l = lax.fori_loop(
        0,
        steps,
        step_body,
        (
            fragments.filled((ROWS, tiles.value_dim), 0.0, mgpu.WGMMA),
            fragments.filled((ROWS,), parts.FLOOR, ROW_LAYOUT),
            fragments.filled((ROWS,), 0.0, ROW_LAYOUT),
        ),
    )
    pl.when(w == 0)(pass_turn)
    cache.end()
    factor, row_lse = rows.finish(m, l)
    if lse is not None:
        place = jnp.int32(0) if tiles.split_heads else w
        parts.write_lse(row_lse, scratch["lse_rows"].at[w], lse, rows.unit, place)
    acc = (acc * fragments.along(factor, acc.shape, 0)).astype(out_tiled.dtype)
    mine = parts.anew(w, steps)
    parts.write_rows(
        out,
        acc,
        out_tiled.at[mine],
        out_plain.at[mine],
        tiles,
        work,
        first_head=parts.anew(first_head, steps),
        first_token=parts.anew(first_token, steps),
        columns=(0, tiles.value_dim),
    )


def _wait_for_keys(ready):
    """On its own so that a test can leave it out and see the race detector notice."""
    mgpu.barrier_wait(ready)


class _Stored:
    """Tiles in the dtype of the products, which read them where the copies put them."""

    @staticmethod
    def scratch(call, tiles, dtype):
        """The tiles, and the barriers by which consumers hand them over."""
        shape = (tiles.stages, tiles.block_kv)
        d, v = tiles.head_dim, tiles.value_dim
        return {
            "k": mgpu.swizzled((*shape, d), dtype, tiling.swizzle_of(d)),
            "v": mgpu.swizzled((*shape, v), dtype, tiling.value_swizzle(tiles)),
            "free": mgpu.Barrier(num_arrivals=2, num_barriers=2 * tiles.stages),
            "v_clean": mgpu.Barrier(),
        }

    def __init__(self, tiles, work, w, scratch):
        self.tiles, self.work, self.w, self.scratch = tiles, work, w, scratch

    def at(self, name, step, first=0):
        """The buffer or barrier of a step's stage."""
        return self.scratch[name].at[first + lax.rem(step, self.tiles.stages)]

    def begin(self):
        """Before the first step."""

    def keys(self, step):
        """A tile's keys, once they are there."""
        _wait_for_keys(self.at("ready", step))
        return self.at("k", step)

    def beside_logits(self, step):
        """While the tensor cores make logits."""

    def keys_read(self, step):
        """Hand the keys back."""
        mgpu.barrier_arrive(self.at("free", step))

    def await_values(self, step):
        """Until a tile's values are there."""
        mgpu.barrier_wait(self.at("ready", step, self.tiles.stages))

    def values(self, step):
        """A tile's values, zeros where nobody owns them."""
        tiles, v = self.tiles, self.at("v", step)
        owned = self.work[plan.UNOWNED] - (self.work[plan.BASE] + step * tiles.block_kv)
        needed = owned < tiles.block_kv

        # Warpgroup 0, always the first to need them, puts the zeros. The two must not wait for
        # each other here: `turn` has one of them half a step ahead.
        @pl.when(needed & (self.w == 0))
        def _():
            parts.clear_rows(v, owned, tiles.block_kv, tiles.value_dim)
            mgpu.barrier_arrive(self.scratch["v_clean"])

        @pl.when(needed & (self.w == 1))
        def _():
            mgpu.barrier_wait(self.scratch["v_clean"])

        return v

    def beside_values(self, step):
        """While the tensor cores weigh values."""

    def values_read(self, step):
        """Hand the values back."""
        mgpu.barrier_arrive(self.at("free", step, self.tiles.stages))

    def end(self):
        """After the last step."""


def _weigh(acc, prob, v, scratch, w, meanwhile):
    """`acc + prob v`; the interpreter's wgmma wants the probabilities in shared memory."""
    if mgpu.interpreting():
        p = scratch["p"].at[w]
        p[...] = prob
        mgpu.commit_smem()
        prob = p

    def weigh(acc_ref):
        mgpu.wgmma(acc_ref, prob, v)
        meanwhile()

    return parts.accumulate(acc, weigh)
