"""Prefill on Mosaic GPU where the head is too large for one warpgroup: up to D = 576, V = 512.

The mathematics and the plan are those of `mosaic_prefill`. 64 rows of 512 float32 values are 256
registers a thread, so two warpgroups split the columns of V, and, not to compute every logit
twice, the keys of a tile when they compute logits:

    for each tile of block_kv keys in [base, end):            # the producer's copies run ahead
        s = q k[my keys]^T                                     # wgmma, half the tile
        m = max(m, row maxima of both halves)                  # through shared memory
        p[my keys] = exp2(logits(s) - m); l += sum(p)          # to shared memory
        acc = rescale(acc) + p v[:, my columns]                # wgmma, p of both halves

Three warpgroups: 0 and 1 as above, for the same 64 rows; 2 issues the copies. With a cluster of two
blocks, which hold neighbouring rows of one KV head and so read the same keys, each fetches half of
every copy for both: half the traffic from L2, which is what bounds this kernel without it.

| buffer | written by | read by | handed over by |
|---|---|---|---|
| q | warpgroup 0's copies | both | q_ready |
| k[stage] | producers' copies | both | k_ready[stage]; back by k_free[stage] |
| v[stage, w] | producers' copies; w zeros the tail | w | v_ready[2 stage + w]; back by v_free |
| top[w], p[w] | warpgroup w | both | tops_ready, p_ready; each waits for the other's reads |
| total[w] | warpgroup w, after its last tile | both | tops_ready; q's memory is free then |
| out[w], on q's memory | warpgroup w | copies to the result | commit_smem |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn.pallas import mosaic_compat as mgpu
from jattn.pallas import mosaic_fragments as fragments
from jattn.pallas import mosaic_prefill_parts as parts
from jattn.pallas import mosaic_prefill_plan as plan
from jattn.pallas import mosaic_prefill_tiles as tiling

ROWS = tiling.ROWS
ROW_LAYOUT = mgpu.WGMMA.reduce(1)


def attend(
    call: calls.Call, tiles: tiling.Tiles, arrays: parts.Inputs
) -> tuple[jax.Array, jax.Array | None]:
    """The kernel: `out` [T, H, V] and the lse of every unit's rows, or None."""
    dtype = arrays.query.dtype
    out_dtype = jnp.dtype(call.out_dtype)
    stages, half, columns = tiles.stages, tiles.block_kv // 2, tiles.value_dim // 2
    d_swizzle, v_swizzle = tiling.swizzle_of(tiles.head_dim), tiling.value_swizzle(tiles)

    def free(num_barriers):
        """A consumer gives a buffer back to everybody who copies into it."""
        if tiles.units == 1:
            return mgpu.Barrier(num_arrivals=2, num_barriers=num_barriers)
        return mgpu.ClusterBarrier(
            collective_axes=("unit",), num_arrivals=2, num_barriers=num_barriers
        )

    scratch = {
        "own": mgpu.RefUnion(
            (mgpu.swizzled((ROWS, tiles.head_dim), dtype, d_swizzle),),
            (mgpu.swizzled((2, ROWS, columns), out_dtype, tiling.swizzle_of(columns)),),
            (mgpu.SMEM((2, ROWS, columns), out_dtype),),
        ),
        "k": mgpu.swizzled((stages, tiles.block_kv, tiles.head_dim), dtype, d_swizzle),
        "v": mgpu.swizzled((2 * stages, tiles.block_kv, columns), dtype, v_swizzle),
        "p": mgpu.swizzled((2, ROWS, half), dtype, v_swizzle),
        "top": mgpu.SMEM((2, ROWS), jnp.float32),
        "total": mgpu.SMEM((2, ROWS), jnp.float32),
        "q_ready": mgpu.Barrier(num_arrivals=tiles.row_heads),
        "k_ready": mgpu.Barrier(num_arrivals=tiles.copies, num_barriers=stages),
        "v_ready": mgpu.Barrier(num_arrivals=tiles.copies, num_barriers=2 * stages),
        "k_free": free(stages),
        "v_free": free(stages),
        "tops_ready": mgpu.Barrier(num_arrivals=2),
        "p_ready": mgpu.Barrier(num_arrivals=2),
    }
    settings = {}
    if tiles.units > 1:
        settings = {"cluster": (tiles.units,), "cluster_names": ("unit",)}
    body = parts.warpgroups(call, tiles, _produce, _consume)
    return parts.launch(body, call, tiles, arrays, scratch, **settings)


def _produce(call, tiles, ins, work, kv_head, scratch):
    fetch = parts.Fetch.of(call, tiles, ins, work, kv_head)
    steps = work.steps(tiles)
    columns = tiles.value_dim // 2
    together = {"collective_axes": "unit"} if tiles.units > 1 else {}

    @pl.loop(0, steps)
    def _(step):
        stage = lax.rem(step, tiles.stages)
        places = fetch.places(step)

        @pl.when(step >= tiles.stages)
        def _():
            mgpu.barrier_wait(scratch["k_free"].at[stage])

        fetch.copy(
            step,
            places,
            ins.keys,
            (0, tiles.head_dim),
            scratch["k"].at[stage],
            scratch["k_ready"].at[stage],
            **together,
        )

        @pl.when(step >= tiles.stages)
        def _():
            mgpu.barrier_wait(scratch["v_free"].at[stage])

        for w in range(2):
            fetch.copy(
                step,
                places,
                ins.values,
                (w * columns, columns),
                scratch["v"].at[2 * stage + w],
                scratch["v_ready"].at[2 * stage + w],
                **together,
            )

    # Nothing may be in flight when the block ends, arrivals included.
    @pl.loop(jnp.maximum(steps - tiles.stages, 0), steps)
    def _(step):
        for name in ("k_free", "v_free"):
            mgpu.barrier_wait(scratch[name].at[lax.rem(step, tiles.stages)])


def _consume(call, tiles, ins, work, kv_head, heads, w, out, lse, scratch):
    (q,), (out_tiled,), (out_plain,) = scratch["own"]
    k, v, p, top_rows = (scratch[name] for name in ("k", "v", "p", "top"))
    half, columns = tiles.block_kv // 2, tiles.value_dim // 2
    unit = lax.axis_index("unit") if tiles.units > 1 else jnp.int32(0)
    first_head = heads * tiles.tile_heads + (unit * tiles.row_heads if tiles.split_heads else 0)
    first_token = jnp.int32(0) if tiles.split_heads else unit * tiles.row_tokens
    rows = parts.Rows(
        call,
        tiles,
        ins,
        work,
        kv_head,
        unit=lax.div(first_head, jnp.int32(tiles.row_heads)),
        first_token=first_token,
    )

    @pl.when(w == 0)
    def _():
        parts.fetch_query(ins.query, q, tiles, work, first_head, first_token, scratch["q_ready"])

    mgpu.barrier_wait(scratch["q_ready"])

    def meet(name):
        mgpu.barrier_arrive(scratch[name])
        mgpu.barrier_wait(scratch[name])

    def both(ref):
        return (mgpu.load(ref.at[i], ROW_LAYOUT) for i in range(2))

    scale = ins.scale[kv_head]

    def step_body(step, carry):
        acc, m, l = carry
        stage = lax.rem(step, tiles.stages)
        mgpu.barrier_wait(scratch["k_ready"].at[stage])

        def dots(acc_ref):
            mgpu.wgmma(acc_ref, q, k.at[stage, pl.ds(pl.multiple_of(w * half, half), half)].T)
            return acc_ref[...]

        s = pl.run_scoped(dots, mgpu.ACC((ROWS, half), jnp.float32))
        mgpu.barrier_arrive(scratch["k_free"].at[stage])
        first_key = work[plan.BASE] + step * tiles.block_kv
        s = rows.logits(s, first_key + w * half, scale)
        top_rows[w] = s.max(axis=1)
        meet("tops_ready")
        top0, top1 = both(top_rows)
        top = jnp.maximum(m, jnp.maximum(top0, top1))
        rescale = jnp.exp2(m - top)
        prob = jnp.exp2(s - fragments.along(top, s.shape, 0))
        l = l * rescale + prob.sum(axis=1)
        p[w] = prob.astype(p.dtype)
        mgpu.commit_smem()
        acc = acc * fragments.along(rescale, acc.shape, 0)
        mgpu.barrier_wait(scratch["v_ready"].at[2 * stage + w])
        mine = v.at[2 * stage + w]

        @pl.when(work[plan.UNOWNED] - first_key < tiles.block_kv)
        def _():
            parts.clear_rows(mine, work[plan.UNOWNED] - first_key, tiles.block_kv, columns)

        meet("p_ready")

        def weigh(acc_ref):
            for i in range(2):
                mgpu.wgmma(acc_ref, p.at[i], mine.at[pl.ds(i * half, half)])

        acc = parts.accumulate(acc, weigh)
        mgpu.barrier_arrive(scratch["v_free"].at[stage])
        return acc, top, l

    acc, m, l = lax.fori_loop(
        0,
        work.steps(tiles),
        step_body,
        (
            fragments.filled((ROWS, columns), 0.0, mgpu.WGMMA),
            fragments.filled((ROWS,), parts.FLOOR, ROW_LAYOUT),
            fragments.filled((ROWS,), 0.0, ROW_LAYOUT),
        ),
    )
    total = scratch["total"]
    total[w] = l
    meet("tops_ready")
    total0, total1 = both(total)
    factor, row_lse = rows.finish(m, total0 + total1)
    if lse is not None:

        @pl.when(w == 0)
        def _():
            place = jnp.int32(0) if tiles.split_heads else unit
            parts.write_lse(row_lse, scratch["top"].at[0], lse, rows.unit, place)

    acc = (acc * fragments.along(factor, acc.shape, 0)).astype(out_tiled.dtype)
    parts.write_rows(
        out,
        acc,
        out_tiled.at[w],
        out_plain.at[w],
        tiles,
        work,
        first_head=first_head,
        first_token=first_token,
        columns=(pl.multiple_of(w * columns, columns), columns),
    )
