"""Prefill, chunked prefill and mixtures on Mosaic GPU: head sizes up to 256.

For the rows of a tile (query head h, query token t) and the keys j that they see,

    out = sum_j exp2(s_j - m) v_j / (sum_j exp2(s_j - m) + exp2(sink - m))

with `s_j` the base-2 logit of `jattn.spec` and `m` the largest so far: one pass over the keys, and
what is summed already is rescaled when `m` grows. One block of the grid answers one tile of
`jattn.pallas.mosaic_prefill_plan` for one group of query heads:

    for each tile of block_kv keys in [base, end):            # the producer's copies run ahead
        s = q k^T                                              # wgmma, shared memory to registers
        s = logits(s), masked only where the tile has an edge
        m, l, acc = rescale(m, l, acc); p = exp2(s - m); l += sum(p)
        acc += p v                                             # wgmma, p from registers

Three warpgroups. Warpgroups 0 and 1 hold 64 rows each and share every tile of keys; warpgroup 2
issues the copies and keeps 40 registers, so that the others may have 232.

| buffer | written by | read by | handed over by |
|---|---|---|---|
| q[w] | warpgroup w's own copies | warpgroup w | q_ready[w] |
| k[stage] | producer's copies | both | k_ready[stage]; back by k_free[stage] |
| v[stage] | producer's copies; 0 puts zeros behind the last key | both | v_ready[stage], then v_clean; back by v_free[stage] |
| out[w], on q[w]'s memory | warpgroup w | copies to the result | the end of w's loop; commit_smem |

`turn` orders the tensor cores: a warpgroup passes it on when its products are issued, so that one
computes its softmax while the other multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

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
PRODUCER = 2
ROW_LAYOUT = mgpu.WGMMA.reduce(1)


def run(
    call: calls.Call, operands: calls.Operands, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; tokens of sequences whose count is 0 are
    left as they come. The lse is -inf everywhere if the call does not ask for it.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those another kernel answers.
    """
    tiles = tiling.choose(call)
    arrays = parts.inputs(call, operands, counts, tiles)
    out, lse = _narrow(call, tiles, arrays)
    return out[: call.num_tokens], (
        parts.gather_lse(lse, call, operands, counts, tiles, arrays.plan)
        if call.return_lse
        else jnp.full((call.num_tokens, call.num_heads), -jnp.inf, jnp.float32)
    )


def _narrow(
    call: calls.Call, tiles: tiling.Tiles, arrays: parts.Inputs
) -> tuple[jax.Array, jax.Array | None]:
    given = [name for name, x in arrays._asdict().items() if x is not None]
    num_tiles, head_tiles = arrays.plan.shape[0], call.num_heads // tiles.tile_heads
    dtype = arrays.query.dtype
    num_tokens = arrays.query.shape[0]
    out_type = [
        jax.ShapeDtypeStruct(
            (num_tokens, call.num_heads, call.value_dim), jnp.dtype(call.out_dtype)
        )
    ]
    token_units = 1 if tiles.split_heads else tiles.units
    if call.return_lse:
        shape = (num_tiles, call.num_heads // tiles.row_heads, token_units, ROWS)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))

    def body(*refs: Any, **scratch: Any) -> None:
        ins = dict.fromkeys(parts.Inputs._fields)
        ins.update(zip(given, refs, strict=False))
        outs = refs[len(given) :]
        _body(call, tiles, parts.Inputs(**ins), *outs, **scratch)

    d, v, stages = tiles.head_dim, tiles.value_dim, tiles.stages
    v_swizzle = tiling.value_swizzle(tiles)
    out_dtype = out_type[0].dtype
    query = mgpu.swizzled((2, ROWS, d), dtype, tiling.swizzle_of(d))
    result = (
        (mgpu.swizzled((2, ROWS, v), out_dtype, tiling.swizzle_of(v)),),
        (mgpu.SMEM((2, ROWS, v), out_dtype),),
    )
    scratch = {
        # The warpgroups end apart, so one's result may only lie on its own query.
        "own": mgpu.RefUnion((query,), *result) if d == v else (query, mgpu.RefUnion(*result)),
        "k": mgpu.swizzled((stages, tiles.block_kv, d), dtype, tiling.swizzle_of(d)),
        "v": mgpu.swizzled((stages, tiles.block_kv, v), dtype, v_swizzle),
        "q_ready": mgpu.Barrier(num_arrivals=tiles.row_heads, num_barriers=2),
        "k_ready": mgpu.Barrier(num_arrivals=tiles.copies, num_barriers=stages),
        "v_ready": mgpu.Barrier(num_arrivals=tiles.copies, num_barriers=stages),
        "k_free": mgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": mgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_clean": mgpu.Barrier(),
        "turn": mgpu.Barrier(num_arrivals=2),
    }
    if call.return_lse:
        scratch["lse_rows"] = mgpu.SMEM((2, ROWS), jnp.float32)
    if mgpu.interpreting():
        scratch["p"] = mgpu.swizzled((2, ROWS, tiles.block_kv), dtype, v_swizzle)
    outs = mgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=(num_tiles, head_tiles),
        grid_names=("tile", "heads"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True),
    )(*(x for x in arrays if x is not None))
    return outs if call.return_lse else (*outs, None)


def _body(call, tiles, ins, out, lse=None, **scratch):
    work = parts.Work.read(ins.plan, lax.axis_index("tile"))
    heads = lax.axis_index("heads")
    kv_head = lax.div(heads * tiles.tile_heads, jnp.int32(call.group))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(work.own_end > work.own_start)
    def _() -> None:
        @pl.when(warpgroup == PRODUCER)
        def _() -> None:
            mgpu.set_max_registers(40, action="decrease")
            _produce(call, tiles, ins, work, kv_head, scratch)

        @pl.when(warpgroup != PRODUCER)
        def _() -> None:
            mgpu.set_max_registers(232, action="increase")
            _consume(call, tiles, ins, work, kv_head, heads, warpgroup, out, lse, scratch)


def _produce(call, tiles, ins, work, kv_head, scratch):
    fetch = parts.Fetch(call, tiles, ins.tables, work, kv_head)
    steps = work.steps(tiles)

    @pl.loop(0, steps)
    def _(step):
        stage = lax.rem(step, tiles.stages)
        places = fetch.places(step)
        for name, pool, columns in (
            ("k", ins.keys, tiles.head_dim),
            ("v", ins.values, tiles.value_dim),
        ):

            @pl.when(step >= tiles.stages)
            def _(name=name):
                mgpu.barrier_wait(scratch[name + "_free"].at[stage])

            fetch.copy(
                places,
                pool,
                (0, columns),
                scratch[name].at[stage],
                scratch[name + "_ready"].at[stage],
            )

    # Nothing may be in flight when the block ends, arrivals included.
    @pl.loop(jnp.maximum(steps - tiles.stages, 0), steps)
    def _(step):
        for name in ("k_free", "v_free"):
            mgpu.barrier_wait(scratch[name].at[lax.rem(step, tiles.stages)])


def _consume(call, tiles, ins, work, kv_head, heads, w, out, lse, scratch):
    if tiles.head_dim == tiles.value_dim:
        (q,), (out_tiled,), (out_plain,) = scratch["own"]
    else:
        q, ((out_tiled,), (out_plain,)) = scratch["own"]
    q, out_tiled, out_plain = q.at[w], out_tiled.at[w], out_plain.at[w]
    k, v = scratch["k"], scratch["v"]
    turn = scratch["turn"]
    steps = work.steps(tiles)
    count = tiles.row_tokens
    first_head = heads * tiles.tile_heads + (w * tiles.row_heads if tiles.split_heads else 0)
    first_token = jnp.int32(0) if tiles.split_heads else w * count
    rows = parts.Rows(
        call,
        tiles,
        ins,
        work,
        kv_head,
        unit=lax.div(first_head, jnp.int32(tiles.row_heads)),
        first_token=first_token,
    )
    box = pl.ds(pl.multiple_of(work.token + first_token, plan.ALIGNMENT), count)
    for p in range(tiles.row_heads):
        mgpu.copy_gmem_to_smem(
            ins.query.at[box, first_head + p],
            q.at[pl.ds(p * count, count)],
            scratch["q_ready"].at[w],
        )
    mgpu.barrier_wait(scratch["q_ready"].at[w])
    scale = ins.scale[kv_head]

    def pass_turn():
        mgpu.barrier_arrive(turn)
        mgpu.barrier_wait(turn)

    def step_body(step, carry):
        acc, m, l = carry
        stage = lax.rem(step, tiles.stages)
        mgpu.barrier_wait(scratch["k_ready"].at[stage])

        def dots(acc_ref):
            mgpu.wgmma(acc_ref, q, k.at[stage].T)
            pass_turn()
            return acc_ref[...]

        s = pl.run_scoped(dots, mgpu.ACC((ROWS, tiles.block_kv), jnp.float32))
        mgpu.barrier_arrive(scratch["k_free"].at[stage])
        first_key = work.base + step * tiles.block_kv
        s = rows.logits(s, first_key, scale)
        top = jnp.maximum(m, s.max(axis=1))
        rescale = jnp.exp2(m - top)
        prob = jnp.exp2(s - fragments.along(top, s.shape, 0))
        acc = acc * fragments.along(rescale, acc.shape, 0)
        l = l * rescale + prob.sum(axis=1)
        prob = prob.astype(k.dtype)
        mgpu.barrier_arrive(turn)
        mgpu.barrier_wait(scratch["v_ready"].at[stage])
        mgpu.barrier_wait(turn)
        _clean(tiles, work, w, first_key, v.at[stage], scratch["v_clean"])
        acc = _weigh(acc, prob, v.at[stage], scratch, w)
        mgpu.barrier_arrive(scratch["v_free"].at[stage])
        return acc, top, l

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
    factor, row_lse = rows.finish(m, l)
    if lse is not None:
        scratch["lse_rows"][w] = row_lse
        mgpu.commit_smem()
        place = jnp.int32(0) if tiles.split_heads else w
        mgpu.copy_smem_to_gmem(
            scratch["lse_rows"].at[w], lse.at[lax.axis_index("tile"), rows.unit, place]
        )
    acc = (acc * fragments.along(factor, acc.shape, 0)).astype(out_tiled.dtype)

    def store(ref):
        ref[...] = acc

    parts.write_rows(
        out,
        store,
        out_tiled,
        out_plain,
        tiles,
        work,
        first_head=first_head,
        first_token=first_token,
        columns=(0, tiles.value_dim),
    )


def _clean(tiles, work, w, first_key, v, v_clean):
    """Zeros behind the sequence's last key, where the last copy brought slots that nobody owns."""
    each = tiles.copy_tokens
    reach = lax.div(work.end + (each - 1), each) * each
    needed = (first_key + tiles.block_kv >= work.end) & (reach > work.num_keys)

    @pl.when(needed & (w == 0))
    def _():
        parts.clear_rows(v, work.num_keys - first_key, tiles.block_kv, tiles.value_dim)
        mgpu.barrier_arrive(v_clean)

    @pl.when(needed & (w == 1))
    def _():
        mgpu.barrier_wait(v_clean)


def _weigh(acc, prob, v, scratch, w):
    """`acc + prob v`."""
    if mgpu.interpreting():
        p = scratch["p"].at[w]
        p[...] = prob
        mgpu.commit_smem()

        def fresh(acc_ref):
            mgpu.wgmma(acc_ref, p, v)
            return acc_ref[...]

        return acc + pl.run_scoped(fresh, mgpu.ACC(acc.shape, jnp.float32))
    return pl.run_state(lambda acc_ref: mgpu.wgmma(acc_ref, prob, v))(mgpu.ACC.init(acc))


_ = plan
