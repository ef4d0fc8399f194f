"""Prefill on Mosaic GPU where the head is too large for one warpgroup: up to D = 576, V = 512.

The mathematics and the plan are those of `prefill.kernel`. 64 rows of 512 float32 values are 256
registers a thread, so two warpgroups split the columns of V. Keys come in pairs of tiles, and
warpgroup w computes the logits of tile w of each pair alone, so that no logit is computed twice
and Q is read once a tile; both multiply both tiles' probabilities, each by its half of V:

    for each pair of tiles in [base, end):                     # the producer's copies run ahead
        s = logits(q k[w]^T)                                   # wgmma
        top[w] = max(m, row maxima of s, top[0] if w = 1)      # 1 waits for 0: maxima only grow
        p[w] = exp2(s - top[w])                                # to shared memory
        for tile in 0, 1:
            acc = acc exp2(m - top[tile]) + p[tile] v[tile, my columns]; m = top[tile]

Warpgroup 1 waits for 0's maxima but 0 does not wait for 1's before it multiplies its own tile, so 1
falls behind by about a softmax, and from then on one's softmax runs while the other multiplies.

Three warpgroups: 0 and 1 as above, for the same 64 rows; 2 issues the copies.

| buffer | written by | read by | handed over by |
|---|---|---|---|
| q | warpgroup 0's copies | both | q_ready |
| k[w] | producers' copies | w | k_ready[w]; back by k_free[w] |
| v[tile, w] | producers' copies; w zeros the tail | w | v_ready[2 tile + w]; back by v_free[tile] |
| top[0], p[0] | warpgroup 0 | both | top_ready, p_ready[0]; back by p_free |
| top[1], p[1] | warpgroup 1 | both | p_ready[1]; back by top_ready: 0 has left the pair |
| total[w] | warpgroup w, after its last tile | both | totals_ready; q's memory is free then |
| out[w], on q's memory | warpgroup w | copies to the result | commit_smem |

A cluster of two blocks holds neighbouring units of rows of one KV head, which read the same keys.
Each block fetches half of every copy and sends it to both: half the traffic from L2, which bounds
this kernel otherwise. The interpreter copies for each block separately and cannot check this
sharing, which relies on the following:

- Both blocks have one row of the plan, the union of what their rows see, so they issue the same
  copies, in the same order, and go through the same pairs; a unit without rows of its own does too.
- A block's `ready` expects all bytes of its copies, its own half and its peer's. Bytes may land
  before the block itself has expected them, but no phase ends before it has, and none early: the
  peer sends only after `free`, when every reader of both blocks has waited for the last phase.
- `free` counts the readers of both blocks, in each of them: no half is sent over keys that the
  other block still reads. One thread arrives for a warpgroup, after all its warps are done.
- A producer ends with a wait for the last `free` of every buffer. Then every copy that was sent to
  this block has landed, because its readers have read it, and every arrival from the peer has come
  in, because it is counted; so nothing reaches into a block that is gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import pools
from jattn.pallas.mosaic_gpu.prefill import parts
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling
from jattn.pallas.mosaic_gpu.prefill.plan import Column

ROWS = tiling.ROWS


def attend(
    call: calls.Call, tiles: tiling.Tiles, arrays: parts.Inputs
) -> tuple[jax.Array, jax.Array | None]:
    """The kernel: `out` [T, H, V] and the lse of every unit's rows, or None."""
    settings: dict[str, Any] = {}
    if tiles.units > 1:
        settings = {"cluster": (tiles.units,), "cluster_names": ("unit",)}
    body = parts.warpgroups(call, tiles, _produce, _consume)
    return parts.launch(body, call, tiles, arrays, tiling.scratch_of(tiles, call), **settings)


def _pairs(tiles: tiling.Tiles, work: parts.Work) -> jax.Array:
    """Pairs of tiles to go through; the last one's second tile may be past every key."""
    return lax.div(work.steps(tiles) + 1, jnp.int32(2))


def _produce(block: parts.Block, refs: dict[str, Any]) -> None:
    """The warpgroup that copies."""
    tiles, ins, work = block.tiles, block.inputs, block.work
    fetch = parts.Fetch.of(block)
    columns, value = tiles.value_dim // 2, pools.first_value_column(block.call)
    together: dict[str, Any] = {"collective_axes": "unit"} if tiles.units > 1 else {}
    # The compiler must not know the count, or it unrolls the loops and spills.
    both = lax.optimization_barrier(jnp.where(fetch.end > 0, jnp.int32(2), jnp.int32(0)))

    def fill(name: str, pair: jax.Array, tile: jax.Array) -> tuple[jax.Array, Any]:
        """The step and places of a tile's copies, once there is room for them."""
        step = 2 * pair + tile
        places = fetch.places(step)

        @pl.when(pair > 0)
        def _() -> None:
            mgpu.barrier_wait(refs[name].at[tile])

        return step, places

    @pl.loop(0, _pairs(tiles, work))
    def _(pair: jax.Array) -> None:
        @pl.loop(0, both)
        def _keys(tile: jax.Array) -> None:
            found = fill("k_free", pair, tile)
            into, ready = refs["k"].at[tile], refs["k_ready"].at[tile]
            fetch.copy(*found, ins.keys, (0, tiles.head_dim), into, ready, **together)

        @pl.loop(0, both)
        def _values(tile: jax.Array) -> None:
            found = fill("v_free", pair, tile)
            for w in range(2):
                part = 2 * tile + w
                into, ready = refs["v"].at[part], refs["v_ready"].at[part]
                mine = (value + w * columns, columns)
                fetch.copy(*found, ins.values, mine, into, ready, **together)

    # Nothing may be in flight when the block ends, arrivals included.
    @pl.loop(0, both)
    def _drain(tile: jax.Array) -> None:
        for name in ("k_free", "v_free"):
            mgpu.barrier_wait(refs[name].at[tile])


def _consume(
    block: parts.Block,
    heads: jax.Array,
    w: jax.Array,
    out: Any,
    lse: Any,
    refs: dict[str, Any],
) -> None:
    """A warpgroup that computes: the logits of tile w of each pair, half the columns of V."""
    block = block._replace(work=block.work.read())
    tiles = block.tiles
    (q,), (out_tiled,), (out_plain,) = refs["query_and_result"]
    unit = lax.axis_index("unit") if tiles.units > 1 else jnp.int32(0)
    rows = parts.Rows.of(block, heads, unit)

    @pl.when(w == 0)
    def _() -> None:
        rows.fetch(q.at[0], refs["q_ready"])

    mgpu.barrier_wait(refs["q_ready"])
    consumer = Consumer(rows, w, block.inputs.scale[block.kv_head], q, refs)
    m, l, acc = consumer.all_pairs()
    factor, row_lse = rows.finish(m, consumer.total(l))
    if lse is not None:

        @pl.when(w == 0)
        def _() -> None:
            place = jnp.int32(0) if tiles.split_heads else unit
            parts.write_lse(row_lse, refs["top"].at[0], lse, rows.unit, place)

    acc = parts.SOFTMAX.rescale(acc, factor).astype(out_tiled.dtype)
    mine = (pl.multiple_of(w * consumer.columns, consumer.columns), consumer.columns)
    rows.write(out, acc, out_tiled.at[w], out_plain.at[w], columns=mine)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """The part of every pair of tiles that one warpgroup computes; see the table for barriers.

    Attributes:
      rows: the block's.
      w: which warpgroup.
      scale: what dots are multiplied by.
      q: the queries.
      refs: shared memory.
    """

    rows: parts.Rows
    w: jax.Array
    scale: jax.Array
    q: Any
    refs: dict[str, Any]

    @property
    def tiles(self) -> tiling.Tiles:
        """The block's tiles."""
        return self.rows.block.tiles

    @property
    def columns(self) -> int:
        """How many columns of V this warpgroup weighs."""
        return self.tiles.value_dim // 2

    def all_pairs(self) -> tuple[jax.Array, ...]:
        """`(m, l, acc)` of all keys; l only of those in this warpgroup's tiles."""
        p_free = self.refs["p_free"]
        pl.when(self.w == 1)(lambda: mgpu.barrier_arrive(p_free))
        m, l, acc = parts.SOFTMAX.empty(ROWS, (ROWS, self.columns))
        pairs = _pairs(self.tiles, self.rows.block.work)
        acc, m, l = lax.fori_loop(0, pairs, self.pair, (acc, m, l))
        pl.when(self.w == 0)(lambda: mgpu.barrier_wait(p_free))
        return m, l, acc

    def pair(self, pair: jax.Array, carry: Any) -> Any:
        """One pair: the weights of tile w, then both tiles' products."""
        acc, m, l = carry
        w, refs, block_kv = self.w, self.refs, self.tiles.block_kv
        s = self.dots()
        first_key = self.rows.block.work[Column.BASE] + 2 * pair * block_kv
        x, factor = self.rows.logits(s, first_key + w * block_kv, self.scale)
        top = self.exchange(parts.SOFTMAX.maxima(m, x, factor))
        prob = parts.SOFTMAX.weights(x, top, factor)
        added = prob.sum(axis=1)
        refs["p"][w] = prob.astype(refs["p"].dtype)
        mgpu.commit_smem()
        mgpu.barrier_arrive(refs["p_ready"].at[w])
        for tile in range(2):
            mgpu.barrier_wait(refs["p_ready"].at[tile])
            top = mgpu.load(refs["top"].at[tile], parts.SOFTMAX.layout)
            shrink = parts.SOFTMAX.shrink(m, top)
            m = top
            l = l * shrink + added * (w if tile else 1 - w).astype(jnp.float32)
            acc = self.weigh(parts.SOFTMAX.rescale(acc, shrink), tile, first_key)
            self.give_back("v_free", tile)
            if tile == 0:
                pl.when(w == 1)(lambda: mgpu.barrier_arrive(refs["p_free"]))
        return acc, m, l

    def dots(self) -> jax.Array:
        """Q K^T of tile w of a pair."""
        # The places must seem new in every step, or all products' descriptors are computed before
        # the loop and kept, in more than 64 registers.
        mine, here = lax.optimization_barrier(self.w), lax.optimization_barrier(jnp.int32(0))
        mgpu.barrier_wait(self.refs["k_ready"].at[mine])

        def dots(acc_ref: Any) -> jax.Array:
            mgpu.wgmma(acc_ref, self.q.at[here], self.refs["k"].at[mine].T)
            return acc_ref[...]

        s = pl.run_scoped(dots, mgpu.ACC((ROWS, self.tiles.block_kv), jnp.float32))
        self.give_back("k_free", self.w)
        return s

    def exchange(self, top: jax.Array) -> jax.Array:
        """The rows' maxima up to tile w of a pair, once both may see them."""
        tops, top_ready = self.refs["top"], self.refs["top_ready"]

        def after_first(top: jax.Array) -> jax.Array:
            mgpu.barrier_wait(top_ready)
            return jnp.maximum(top, mgpu.load(tops.at[0], parts.SOFTMAX.layout))

        def first(top: jax.Array) -> jax.Array:
            mgpu.barrier_wait(self.refs["p_free"])
            return top

        top = lax.cond(self.w == 1, after_first, first, top)
        tops[self.w] = top
        pl.when(self.w == 0)(lambda: mgpu.barrier_arrive(top_ready))
        return top

    def weigh(self, acc: jax.Array, tile: int, first_key: jax.Array) -> jax.Array:
        """`acc` plus a tile's probabilities times its values, zeros in slots of no sequence."""
        place, block_kv = 2 * tile + self.w, self.tiles.block_kv
        mgpu.barrier_wait(self.refs["v_ready"].at[place])
        values = self.refs["v"].at[place]
        owned = self.rows.block.work[Column.UNOWNED] - (first_key + tile * block_kv)

        @pl.when(owned < block_kv)
        def _() -> None:
            parts.clear_rows(values, owned, block_kv, self.columns)

        return parts.accumulate(acc, lambda ref: mgpu.wgmma(ref, self.refs["p"].at[tile], values))

    def give_back(self, name: str, tile: Any) -> None:
        """Hand a tile back to the producers that wait for it."""
        # Across the cluster one thread arrives for its warpgroup: when all four warps are done.
        if self.tiles.units > 1:
            mgpu.commit_smem()
        mgpu.barrier_arrive(self.refs[name].at[tile])

    def total(self, l: jax.Array) -> jax.Array:
        """The sum of both warpgroups' l."""
        total, ready, layout = self.refs["total"], self.refs["totals_ready"], parts.SOFTMAX.layout
        total[self.w] = l
        mgpu.barrier_arrive(ready)
        mgpu.barrier_wait(ready)
        return mgpu.load(total.at[0], layout) + mgpu.load(total.at[1], layout)
