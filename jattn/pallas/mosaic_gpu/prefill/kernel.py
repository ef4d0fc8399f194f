"""Prefill, chunked prefill and mixtures on Mosaic GPU: head sizes up to 256.

For the rows of a tile (query head h, query token t) and the keys j that they see,

    out = sum_j exp2(s_j - m) v_j / (sum_j exp2(s_j - m) + exp2(sink - m))

with `s_j` the base-2 logit of `jattn.spec` and `m` the largest so far: one pass over the keys, in
which earlier sums are rescaled when `m` grows. One block of the grid computes one tile of
`jattn.pallas.mosaic_gpu.prefill.plan` for one group of query heads:

    s = q k[0]^T
    for each tile i of block_kv keys in [base, end):          # the producer's copies run ahead
        s = logits(s), masked only where the tile has an edge
        m, l = rescale(m, l); p = exp2(s - m); l += sum(p)
        s = q k[i + 1]^T                                       # wgmma, shared memory to registers
        acc = rescale(acc) + p v[i]                            # wgmma, p from registers

fp8 tiles, which are widened in between, and calls with slopes take one tile after the other
(`_in_turn`).

Three warpgroups. Warpgroups 0 and 1 hold 64 rows each and share every tile of keys; warpgroup 2
issues the copies and keeps 24 registers, so that the others may have 240.

| buffer | written by | read by | handed over by |
|---|---|---|---|
| q[w] | warpgroup w's own copies | warpgroup w | q_ready[w] |
| k[stage] | producer's copies | both | ready; back by free |
| v[stage] | producer's copies; 0 zeros the tail | both | ready, v_clean; back by free |
| out[w], on q[w]'s memory | warpgroup w | copies to the result | the end of w's loop; commit_smem |

`turn` orders the tensor cores: a warpgroup passes it on when its products are issued, so that one
computes its softmax while the other multiplies. What a softmax waits for, the other's products wait
for in the end, so a step reads nothing from global memory unless it masks: what every step needs of
the plan is read before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import pools, scratch
from jattn.pallas.mosaic_gpu.prefill import fp8 as widened
from jattn.pallas.mosaic_gpu.prefill import parts, wide
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling
from jattn.pallas.mosaic_gpu.prefill.plan import Column

ROWS = tiling.ROWS


def run(
    call: calls.Call, operands: calls.Operands, counts: jax.Array, *, cluster: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return `(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; tokens of sequences whose count is 0 are
    undefined. The lse is -inf everywhere if the call does not ask for it.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those of another kernel.
      cluster: whether two blocks share their copies where D or V is above 256; see `choose`.
    """
    tiles = tiling.choose(call, cluster=cluster)
    arrays = parts.inputs(call, operands, counts, tiles)
    kernel = wide.attend if tiles.wide else attend
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
    declared = tiling.scratch_of(tiles, call)
    if mgpu.interpreting():
        shape, swizzle = (2, ROWS, tiles.block_kv), tiling.value_swizzle(tiles)
        declared["p"] = scratch.Buffer(shape, arrays.query.dtype, swizzle)
    body = parts.warpgroups(call, tiles, _produce, _consume)
    return parts.launch(body, call, tiles, arrays, declared)


def _produce(block: parts.Block, refs: dict[str, Any]) -> None:
    """The warpgroup that copies."""
    tiles, ins = block.tiles, block.inputs
    fetch = parts.Fetch.of(block)
    steps = block.work.steps(tiles)
    value = pools.first_value_column(block.call)

    @pl.loop(0, steps)
    def _(step: jax.Array) -> None:
        stage = lax.rem(step, tiles.stages)
        places = fetch.places(step)
        for name, pool, columns, place in (
            ("k", ins.keys, (0, tiles.head_dim), stage),
            ("v", ins.values, (value, tiles.value_dim), tiles.stages + stage),
        ):

            @pl.when(step >= tiles.stages)
            def _(place: jax.Array = place) -> None:
                mgpu.barrier_wait(refs["free"].at[place])

            fetch.copy(
                step,
                places,
                pool,
                columns,
                refs[name].at[stage],
                refs["ready"].at[place],
            )

    # Nothing may be in flight when the block ends, arrivals included.
    @pl.loop(jnp.maximum(steps - tiles.stages, 0), steps)
    def _drain(step: jax.Array) -> None:
        for first in (0, tiles.stages):
            mgpu.barrier_wait(refs["free"].at[first + lax.rem(step, tiles.stages)])


def _consume(
    block: parts.Block,
    heads: jax.Array,
    w: jax.Array,
    out: Any,
    lse: Any,
    refs: dict[str, Any],
) -> None:
    """A warpgroup that computes: unit w of the rows."""
    block = block._replace(work=block.work.read())
    tiles, work = block.tiles, block.work
    if "query" in refs:
        q, ((out_tiled,), (out_plain,)) = refs["query"], refs["result"]
    else:
        (q,), (out_tiled,), (out_plain,) = refs["query_and_result"]
    rows = parts.Rows.of(block, heads, w)
    rows.fetch(q.at[w], refs["q_ready"].at[w])
    mgpu.barrier_wait(refs["q_ready"].at[w])
    steps = work.steps(tiles)
    feed = (widened.Widened if tiles.narrow else Stored)(tiles, work, w, refs)
    m, l, acc = (_ahead if tiles.ahead else _in_turn)(feed, rows, q, steps)
    factor, row_lse = rows.finish(m, l)
    if lse is not None:
        place = jnp.int32(0) if tiles.split_heads else w
        parts.write_lse(row_lse, refs["lse_rows"].at[w], lse, rows.unit, place)
    acc = parts.SOFTMAX.rescale(acc, factor).astype(out_tiled.dtype)
    mine = parts.recomputed(w, steps)
    buffers = out_tiled.at[mine], out_plain.at[mine]
    rows.recomputed(steps).write(out, acc, *buffers, columns=(0, tiles.value_dim))


def _ahead(feed: parts.Feed, rows: parts.Rows, q: Any, steps: jax.Array) -> tuple[jax.Array, ...]:
    """`(m, l, acc)` of all keys, each tile's logits computed together with the last one's product.

    In its turn a warpgroup first asks for the next logits. While these are computed it rescales its
    sums and rounds the weights, which no compiler keeps ahead of a wait for the turn.
    """
    tiles, w, turn = feed.tiles, feed.w, feed.refs["turn"]
    scales, base = rows.scales(), feed.work[Column.BASE]

    def logits(step: jax.Array, meanwhile: Callable[[], Any]) -> tuple[Any, jax.Array]:
        # Otherwise the addresses of all of q stay in registers.
        mine, keys = q.at[parts.recomputed(w, step)], feed.keys(step)

        def dots(acc_ref: Any) -> tuple[Any, jax.Array]:
            mgpu.wgmma(acc_ref, mine, keys.T)
            return meanwhile(), acc_ref[...]

        found = pl.run_scoped(dots, mgpu.ACC((ROWS, tiles.block_kv), jnp.float32))
        feed.keys_read(step)
        return found

    def pass_turn() -> None:
        mgpu.barrier_arrive(turn.at[1 - w])

    def softmax(step: jax.Array, m: jax.Array, l: jax.Array, s: jax.Array) -> tuple[Any, ...]:
        x, factor = rows.logits(s, base + step * tiles.block_kv, scales)
        m, prob, shrink = parts.SOFTMAX.update(m, x, factor)
        return m, parts.SOFTMAX.sums(l, prob, shrink), prob, shrink

    def weigh(step: jax.Array, acc: jax.Array, prob: jax.Array, shrink: jax.Array) -> jax.Array:
        feed.await_values(step)
        v = feed.values(step)
        acc = parts.SOFTMAX.rescale(acc, shrink)
        return _weigh(acc, prob.astype(q.dtype), v, feed.refs, w, pass_turn)

    def body(step: jax.Array, carry: Any) -> Any:
        m, l, acc, s = carry
        m, l, prob, shrink = softmax(step, m, l, s)
        feed.await_keys(step + 1)
        mgpu.barrier_wait(turn.at[w])
        acc, s = logits(step + 1, lambda: weigh(step, acc, prob, shrink))
        feed.values_read(step)
        return m, l, acc, s

    def some(m: jax.Array, l: jax.Array, acc: jax.Array) -> tuple[jax.Array, ...]:
        first, last = jnp.int32(0), steps - 1
        feed.await_keys(first)
        mgpu.barrier_wait(turn.at[w])
        _, s = logits(first, pass_turn)
        m, l, acc, s = lax.fori_loop(0, last, body, (m, l, acc, s))
        m, l, prob, shrink = softmax(last, m, l, s)
        mgpu.barrier_wait(turn.at[w])
        acc = weigh(last, acc, prob, shrink)
        feed.values_read(last)
        return m, l, acc

    def none(*empty: jax.Array) -> tuple[jax.Array, ...]:
        # Take turns all the same: a race detector takes queries and results of both for one buffer,
        # and after its turn a warpgroup knows that the other's queries have arrived.
        mgpu.barrier_wait(turn.at[w])
        pass_turn()
        return empty

    pl.when(w == 1)(pass_turn)
    empty = parts.SOFTMAX.empty(ROWS, (ROWS, tiles.value_dim))
    found = lax.cond(steps > 0, some, none, *empty)
    pl.when(w == 0)(lambda: mgpu.barrier_wait(turn.at[w]))
    return found


def _in_turn(feed: parts.Feed, rows: parts.Rows, q: Any, steps: jax.Array) -> tuple[jax.Array, ...]:
    """`(m, l, acc)` of all keys, one tile after the other.

    `turn` is one barrier, at which the two meet: a warpgroup passes it when it has asked for its
    logits and when its softmax is done; the other has then done its softmax, or asked for logits.
    """
    tiles, w, turn = feed.tiles, feed.w, feed.refs["turn"].at[0]
    scales, base = rows.scales(), feed.work[Column.BASE]

    def pass_turn(meanwhile: Callable[[], None] = lambda: None) -> None:
        mgpu.barrier_arrive(turn)
        meanwhile()
        mgpu.barrier_wait(turn)

    def body(step: jax.Array, carry: Any) -> Any:
        m, l, acc = carry
        feed.await_keys(step)
        k = feed.keys(step)
        mine = q.at[parts.recomputed(w, step)]  # or the addresses of all of q stay in registers

        def dots(acc_ref: Any) -> jax.Array:
            mgpu.wgmma(acc_ref, mine, k.T)
            pass_turn(lambda: feed.during_logits(step))
            return acc_ref[...]

        s = pl.run_scoped(dots, mgpu.ACC((ROWS, tiles.block_kv), jnp.float32))
        feed.keys_read(step)
        x, factor = rows.logits(s, base + step * tiles.block_kv, scales)
        m, prob, shrink = parts.SOFTMAX.update(m, x, factor)
        acc = parts.SOFTMAX.rescale(acc, shrink)
        l = parts.SOFTMAX.sums(l, prob, shrink)
        prob = prob.astype(q.dtype)
        pass_turn(lambda: feed.await_values(step))
        v = feed.values(step)
        acc = _weigh(acc, prob, v, feed.refs, w, lambda: feed.during_values(step))
        feed.values_read(step)
        return m, l, acc

    feed.begin()
    pl.when(w == 1)(pass_turn)
    m, l, acc = parts.SOFTMAX.empty(ROWS, (ROWS, tiles.value_dim))
    m, l, acc = lax.fori_loop(0, steps, body, (m, l, acc))
    pl.when(w == 0)(pass_turn)
    feed.end()
    return m, l, acc


def _wait_for_keys(ready: Any) -> None:
    """Wait. It is a function so that a test can leave it out and see the race detector notice."""
    mgpu.barrier_wait(ready)


class Stored(parts.Feed):
    """Tiles in the dtype of the products, which read them where the copies put them."""

    def at(self, name: str, step: jax.Array, first: int = 0) -> Any:
        """The buffer or barrier of a step's stage."""
        return self.refs[name].at[first + lax.rem(step, self.tiles.stages)]

    def await_keys(self, step: jax.Array) -> None:
        _wait_for_keys(self.at("ready", step))

    def keys(self, step: jax.Array) -> Any:
        return self.at("k", step)

    def keys_read(self, step: jax.Array) -> None:
        mgpu.barrier_arrive(self.at("free", step))

    def await_values(self, step: jax.Array) -> None:
        mgpu.barrier_wait(self.at("ready", step, self.tiles.stages))

    def values(self, step: jax.Array) -> Any:
        tiles, v = self.tiles, self.at("v", step)
        owned = self.owned(step)
        needed = owned < tiles.block_kv

        # Warpgroup 0, always the first to need them, writes the zeros. The two must not wait for
        # each other here: `turn` has one of them half a step ahead.
        @pl.when(needed & (self.w == 0))
        def _clear() -> None:
            parts.clear_rows(v, owned, tiles.block_kv, tiles.value_dim)
            mgpu.barrier_arrive(self.refs["v_clean"])

        @pl.when(needed & (self.w == 1))
        def _wait() -> None:
            mgpu.barrier_wait(self.refs["v_clean"])

        return v

    def values_read(self, step: jax.Array) -> None:
        mgpu.barrier_arrive(self.at("free", step, self.tiles.stages))


def _weigh(
    acc: jax.Array,
    prob: Any,
    v: Any,
    refs: dict[str, Any],
    w: jax.Array,
    meanwhile: Callable[[], None],
) -> jax.Array:
    """`acc + prob v`; the interpreter's wgmma wants the probabilities in shared memory."""
    if mgpu.interpreting():
        p = refs["p"].at[w]
        p[...] = prob
        mgpu.commit_smem()
        prob = p

    def weigh(acc_ref: Any) -> None:
        mgpu.wgmma(acc_ref, prob, v)
        meanwhile()

    return parts.accumulate(acc, weigh)
