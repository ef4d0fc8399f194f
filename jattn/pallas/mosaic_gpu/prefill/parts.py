"""The parts that both prefill kernels share: read the plan, fetch keys, mask, finish rows.

Logits are kept in base 2: `exp2` is what the hardware has. `scale`, the cap and the slopes come
multiplied by log2(e), which carries through `spec.transform_logits` because it is homogeneous.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn import softmax, spec
from jattn.integers import round_up
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fp8, fragments, pools, scratch
from jattn.pallas.mosaic_gpu.prefill import plan
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling
from jattn.pallas.mosaic_gpu.prefill.plan import Column

ROWS = tiling.ROWS
PRODUCER = 2  # the last of three warpgroups
IDS_AT_A_TIME = 4  # block ids that the producer keeps in registers
# A factor of logits must not be 0: 0 * -inf is NaN.
_SMALLEST = float(np.finfo(np.float32).tiny)
SOFTMAX = fragments.Online(axis=0, exp=jnp.exp2, floor=float(np.finfo(np.float32).min))


class Inputs(typing.NamedTuple):
    """A kernel's inputs, as arrays outside it and as refs inside; None for absent ones."""

    query: Any  # [T, H, D]
    keys: Any  # the pool, in its own layout
    values: Any
    tables: Any  # int32 [B, M]
    plan: Any  # int32 [tiles, columns]
    scale: Any  # float32 [K]: softmax scale * k_scale * log2(e), / cap where there is one
    row_scale: Any  # float32 [tiles, H // row_heads, units of tokens, 64]: `scale` for each row
    v_scale: Any  # float32 [K]
    sight: spec.Sight  # of `fragments.sight_inputs`
    cap: Any  # float32 [1], times log2(e)
    sinks: Any  # float32 [H // row_heads, 64], times log2(e): one number per row of a unit
    slopes: Any  # likewise
    columns: Any  # int32 [block_kv]: 0, 1 and so on; None above D = 256 or not causal
    ahead: Any  # the same in float32, where there are slopes


def inputs(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    tiles: tiling.Tiles,
) -> Inputs:
    """The arrays a kernel is called with."""
    keys, values = pools.arrays(call, operands)
    query, powers = operands.query, None
    if query.dtype != scratch.compute_dtype(call):
        query, powers = fp8.narrowed(query, scratch.compute_dtype(call))
    num_tokens = max(round_up(call.num_tokens, plan.ALIGNMENT), tiles.tile_tokens)
    if num_tokens > call.num_tokens:
        query = jnp.pad(query, ((0, num_tokens - call.num_tokens), (0, 0), (0, 0)))
    planned = plan.make(
        call,
        operands,
        counts,
        num_tokens=num_tokens,
        tile_tokens=tiles.tile_tokens,
        copy_tokens=tiles.copy_tokens,
    )
    scale = jnp.broadcast_to(operands.scale * jnp.float32(softmax.LOG2E), (call.num_kv_heads,))
    if operands.k_scale is not None:
        scale = scale * operands.k_scale
    cap = jax.tree.map(lambda x: x * jnp.float32(softmax.LOG2E), operands.logits_soft_cap)
    if cap is not None:
        scale = scale / cap
    row_scale = None
    if powers is not None:
        powers = jnp.pad(powers, ((0, num_tokens - call.num_tokens), (0, 0)))
        powers = powers * jnp.repeat(scale, call.group)[None]
        row_scale = by_unit(powers, call, tiles, planned)

    columns = jnp.arange(tiles.block_kv, dtype=jnp.int32)
    sloped = operands.alibi_slopes is not None

    def per_row(numbers: jax.Array) -> jax.Array:
        numbers = jnp.repeat(numbers * jnp.float32(softmax.LOG2E), tiles.row_tokens)
        return numbers.reshape(call.num_heads // tiles.row_heads, ROWS)

    return Inputs(
        query=query,
        keys=keys,
        values=values,
        tables=operands.block_tables,
        plan=planned,
        scale=scale,
        row_scale=row_scale,
        v_scale=operands.v_scale,
        sight=fragments.sight_inputs(call, operands),
        cap=jax.tree.map(lambda x: x.reshape(1), cap),
        sinks=jax.tree.map(per_row, operands.sinks),
        slopes=jax.tree.map(per_row, operands.alibi_slopes),
        columns=None if tiles.wide or call.is_causal is False else columns,
        ahead=columns.astype(jnp.float32) if not tiles.wide and sloped else None,
    )


def by_unit(
    numbers: jax.Array, call: calls.Call, tiles: tiling.Tiles, planned: jax.Array
) -> jax.Array:
    """[tiles, H // row_heads, units of tokens, 64] of numbers [T, H]: those of each unit's rows."""
    offset = jnp.arange(tiles.tile_tokens, dtype=jnp.int32)[None]
    rows = numbers[planned[:, Column.TOKEN, None] + offset]
    shape = (planned.shape[0], -1, tiles.row_tokens, call.num_heads // tiles.row_heads)
    rows = rows.reshape(*shape, tiles.row_heads).transpose(0, 3, 1, 4, 2)
    return rows.reshape(*rows.shape[:3], ROWS)


# The columns of the plan that every step needs.
IN_STEPS = (Column.BASE, Column.CLEAR_START, Column.CLEAR_END, Column.UNOWNED)


class Work:
    """One tile: the columns of the plan by name, each read when it is asked for.

    Args:
      planned: the plan.
      tile: its row.
      known: columns that have been read; others are not worth a register throughout a loop.
    """

    def __init__(
        self, planned: Any, tile: jax.Array, known: Mapping[int, jax.Array] | None = None
    ) -> None:
        self._planned, self._tile, self._known = planned, tile, known or {}

    def __getitem__(self, column: int) -> jax.Array:
        if column in self._known:
            return self._known[column]
        return self._planned[self._tile, column]

    def read(self, columns: Iterable[int] = IN_STEPS) -> Work:
        """A copy with these columns already loaded."""
        return Work(self._planned, self._tile, {column: self[column] for column in columns})

    def steps(self, tiles: tiling.Tiles) -> jax.Array:
        """Tiles of keys to go through."""
        keys = self[Column.END] - self[Column.BASE]
        return lax.div(keys + (tiles.block_kv - 1), tiles.block_kv)


class Block(typing.NamedTuple):
    """The work of a block of the grid."""

    call: calls.Call
    tiles: tiling.Tiles
    inputs: Inputs
    work: Work
    kv_head: jax.Array


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copies of tiles of keys or values, block by block, into shared memory."""

    call: calls.Call
    tiles: tiling.Tiles
    tables: Any
    sequence: jax.Array
    base: jax.Array
    end: jax.Array
    kv_head: jax.Array

    @classmethod
    def of(cls, block: Block) -> Fetch:
        """Return the copies that a block's work needs."""
        return cls(
            block.call,
            block.tiles,
            block.inputs.tables,
            sequence=block.work[Column.SEQUENCE],
            base=block.work[Column.BASE],
            end=block.work[Column.END],
            kv_head=block.kv_head,
        )

    def place(self, step: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(block, first slot of the block)` of a tile's copy j.

        Copies past the last key that the tile needs repeat that key's copy: what is past it may be
        in no block of the sequence.
        """
        size, each = self.call.block_size, self.tiles.copy_tokens
        last = lax.div(self.end - 1, each) * each
        key = jnp.minimum(self.base + step * self.tiles.block_kv + j * each, last)
        entry = lax.div(key, size)
        block = self.tables[self.sequence, entry]
        return jnp.clip(block, 0, self.call.num_blocks - 1), key - entry * size

    def places(self, step: jax.Array) -> list[tuple[jax.Array, jax.Array]] | None:
        """The places of a tile's copies if there are one or two, read before the wait for room.

        None if there are more: the producer has few registers.
        """
        if self.tiles.copies > 2:
            return None
        return [self.place(step, jnp.int32(j)) for j in range(self.tiles.copies)]

    def copy(
        self,
        step: jax.Array,
        places: list[tuple[jax.Array, jax.Array]] | None,
        pool: Any,
        columns: tuple[int, int],
        into: Any,
        barrier: Any,
        **collective: Any,
    ) -> None:
        """Issue the copies of `columns = (first, how many)` of one tile; each arrives once."""
        each = self.tiles.copy_tokens
        where = pl.ds(*columns)

        def issue(row: jax.Array | int, place: tuple[jax.Array, jax.Array]) -> None:
            block, slot = place
            slots = pl.ds(pl.multiple_of(slot, scratch.COPIED_ROWS), each)
            source = pools.copy_source(self.call, pool, block, self.kv_head, slots, where)
            mgpu.copy_gmem_to_smem(source, into.at[pl.ds(row, each)], barrier, **collective)

        if places is not None:
            for j, place in enumerate(places):
                issue(j * each, place)
            return

        # The compiler must not know the count, or it unrolls the loop and spills.
        several = math.gcd(self.tiles.copies, IDS_AT_A_TIME)
        rounds = jnp.int32(self.tiles.copies // several)
        rounds = jnp.where(self.end > 0, rounds, jnp.int32(0))

        @pl.loop(0, rounds)
        def _(i: jax.Array) -> None:
            # All ids are prefetched before the first is needed.
            found = [self.place(step, i * several + j) for j in range(several)]
            for j, place in enumerate(found):
                issue(pl.multiple_of((i * several + j) * each, each), place)


def warpgroups(
    call: calls.Call,
    tiles: tiling.Tiles,
    produce: Callable[..., None],
    consume: Callable[..., None],
) -> Callable[..., None]:
    """A kernel's body: warpgroup `PRODUCER` copies, with few registers, and the others compute.

    A block whose tile has no rows to write does nothing.
    """

    def body(ins: Inputs, out: Any, lse: Any, refs: dict[str, Any]) -> None:
        work = Work(ins.plan, lax.axis_index("tile"))
        heads = lax.axis_index("heads")
        kv_head = lax.div(heads * tiles.tile_heads, jnp.int32(call.group))
        block = Block(call, tiles, ins, work, kv_head)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(work[Column.WRITE_END] > work[Column.WRITE_START])
        def _() -> None:
            @pl.when(warpgroup == PRODUCER)
            def _() -> None:
                mgpu.set_max_registers(tiling.REGISTERS[1], action="decrease")
                produce(block, refs)

            @pl.when(warpgroup != PRODUCER)
            def _() -> None:
                mgpu.set_max_registers(tiling.REGISTERS[0], action="increase")
                consume(block, heads, warpgroup, out, lse, refs)

    return body


def recomputed(number: jax.Array, count: jax.Array) -> jax.Array:
    """Return `number`, computed here: it adds `count >> 30`, which is 0, unknown to the compiler.

    `count` is a number of steps below 2^30. Otherwise the compiler computes what depends on nothing
    in the loop ahead of it, and keeps what is needed before and after the loop in between, both in
    registers that the loop needs.
    """
    return number + lax.shift_right_logical(count, 30)


def clear_rows(ref: Any, first: jax.Array, block_kv: int, columns: int) -> None:
    """Zero the rows of a tile of values from `first` on: a weight of 0 times NaN is NaN.

    Tiles of fewer than 64 keys are transposed: registers hold 64 rows at a time.
    """
    turned = block_kv % ROWS != 0
    height, width = (block_kv, ROWS) if turned else (ROWS, math.gcd(columns, ROWS))
    for row in range(0, block_kv, height):
        for column in range(0, columns, width):
            here = ref.at[pl.ds(row, height), pl.ds(column, width)]
            here = here.T if turned else here
            kept = mgpu.load(here, mgpu.WGMMA)
            k = fragments.positions(kept.shape, 1 if turned else 0, jnp.int32(row))
            here[...] = jnp.where(k < first, kept, jnp.zeros_like(kept))
    mgpu.commit_smem()


class _Numbers:
    """`jax.numpy` for `spec`, except for tanh."""

    tanh = staticmethod(fragments.tanh)
    __getattr__ = staticmethod(functools.partial(getattr, jnp))


class Feed(abc.ABC):
    """How a warpgroup gets its tiles of keys and values, and hands them back.

    Args:
      tiles, work: the block's.
      w: the warpgroup.
      refs: shared memory.
    """

    def __init__(self, tiles: tiling.Tiles, work: Work, w: jax.Array, refs: dict[str, Any]) -> None:
        self.tiles, self.work, self.w, self.refs = tiles, work, w, refs
        self.steps = work.steps(tiles)

    def owned(self, step: jax.Array) -> jax.Array:
        """How many of a tile's first slots the sequence owns; `block_kv` or more for all."""
        return self.work[Column.UNOWNED] - (self.work[Column.BASE] + step * self.tiles.block_kv)

    def begin(self) -> None:  # noqa: B027
        """Run before the first step."""

    @abc.abstractmethod
    def await_keys(self, step: jax.Array) -> None:
        """Wait until a tile's keys are there."""

    @abc.abstractmethod
    def keys(self, step: jax.Array) -> Any:
        """A tile's keys."""

    def during_logits(self, step: jax.Array) -> None:  # noqa: B027
        """Run while the tensor cores compute logits."""

    @abc.abstractmethod
    def keys_read(self, step: jax.Array) -> None:
        """Hand the keys back."""

    @abc.abstractmethod
    def await_values(self, step: jax.Array) -> None:
        """Wait until a tile's values are there."""

    @abc.abstractmethod
    def values(self, step: jax.Array) -> Any:
        """A tile's values, zeros in slots that no sequence owns."""

    def during_values(self, step: jax.Array) -> None:  # noqa: B027
        """Run while the tensor cores weigh values."""

    @abc.abstractmethod
    def values_read(self, step: jax.Array) -> None:
        """Hand the values back."""

    def end(self) -> None:  # noqa: B027
        """Run after the last step."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The 64 rows of a unit: which they are, what their logits are, what they see.

    Attributes:
      block: what the block of the grid works on.
      first_head: of the unit.
      first_token: of the unit, counted within the tile.
      unit: its row of `sinks` and `slopes`.
    """

    block: Block
    first_head: jax.Array
    first_token: jax.Array
    unit: jax.Array

    @classmethod
    def of(cls, block: Block, heads: jax.Array, number: jax.Array) -> Rows:
        """Return unit `number` of one group of query heads."""
        tiles = block.tiles
        first_head = heads * tiles.tile_heads + (
            number * tiles.row_heads if tiles.split_heads else 0
        )
        first_token = jnp.int32(0) if tiles.split_heads else number * tiles.row_tokens
        unit = lax.div(first_head, jnp.int32(tiles.row_heads))
        return cls(block, first_head, first_token, unit)

    def recomputed(self, steps: jax.Array) -> Rows:
        """Return the same for use after a loop, not kept in registers in it; see `recomputed`."""
        first_head = recomputed(self.first_head, steps)
        first_token = recomputed(self.first_token, steps)
        return dataclasses.replace(self, first_head=first_head, first_token=first_token)

    def fetch(self, into: Any, barrier: Any) -> None:
        """Issue the copies of the rows' queries, one for each of the unit's heads."""
        tiles, token = self.block.tiles, self.block.work[Column.TOKEN] + self.first_token
        count = tiles.row_tokens
        tokens = pl.ds(pl.multiple_of(token, plan.ALIGNMENT), count)
        for p in range(tiles.row_heads):
            query = self.block.inputs.query.at[tokens, self.first_head + p]
            mgpu.copy_gmem_to_smem(query, into.at[pl.ds(p * count, count)], barrier)

    def scales(self) -> jax.Array:
        """The factor of a tile's dots: a number, or one for each row."""
        if self.block.inputs.row_scale is None:
            return self.block.inputs.scale[self.block.kv_head]
        place = lax.div(self.first_token, jnp.int32(self.block.tiles.row_tokens))
        rows = self.block.inputs.row_scale.at[lax.axis_index("tile"), self.unit, place]
        return fragments.vector(rows, 0)

    def q_positions(self) -> jax.Array:
        """int32 [64]: the position of each row's query."""
        rows = mgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mgpu.WGMMA.reduce(1))
        token = lax.rem(rows, jnp.full_like(rows, self.block.tiles.row_tokens))
        return token + (self.block.work[Column.POSITION] + self.first_token)

    def pairs(self, shape: fragments.Shape, first_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(q_pos, k_pos)`, int32 `shape`: the positions of each logit's query and key."""
        if self.block.inputs.columns is None:
            # Where nothing is causal a mask may need only key positions. In the form below the
            # compiler would spend minutes searching for a layout of the unused query positions.
            row = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=mgpu.WGMMA)
            token = lax.rem(row, jnp.full_like(row, self.block.tiles.row_tokens))
            q_pos = token + (self.block.work[Column.POSITION] + self.first_token)
            return q_pos, fragments.positions(shape, 1, first_key)
        # Query positions are computed for each row: otherwise they take one register per logit,
        # since the compiler does not see that an index divided by the number of columns is the same
        # throughout a row. Key positions are read from a table for each column: computed from a
        # thread's index, they would be computed ahead of the loop and kept.
        columns = fragments.vector(self.block.inputs.columns.at[pl.ds(0, shape[1])], 1)
        q_pos = fragments.along(self.q_positions(), shape, 0)
        return q_pos, fragments.along(columns + first_key, shape, 1)

    def distances(
        self, shape: fragments.Shape, first_key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`(q_pos, k_pos)` of which the ALiBi term takes the difference."""
        if self.block.inputs.ahead is None:
            return self.pairs(shape, first_key)
        # Counted from the tile's first key, so that float32 holds them exactly and nothing needs
        # to be converted for every logit.
        q_pos = (self.q_positions() - first_key).astype(jnp.float32)
        q_pos = fragments.along(q_pos, shape, 0)
        k_pos = fragments.vector(self.block.inputs.ahead.at[pl.ds(0, shape[1])], 1)
        return q_pos, fragments.along(k_pos, shape, 1)

    def logits(
        self, dots: jax.Array, first_key: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Base-2 logits of a tile's dots, -inf where a query does not see the key.

        As `(x, factor)` of `fragments.Online`. A scale that is negative or 0 cannot be the factor:
        then every tile counts as an edge, and where edges are masked, dots take its sign, or
        become 0.

        Args:
          dots: [64, block_kv].
          first_key: of the tile.
          scale: from `scales`.
        """
        shape, ins, options = dots.shape, self.block.inputs, self.block.call.options
        capped, sloped = "logits_soft_cap" in options, "alibi_slopes" in options
        if not capped and not sloped:
            sign = ins.scale[self.block.kv_head] if scale.ndim else scale
            size, smallest = abs(scale), jnp.full_like(scale, _SMALLEST)
            return self._seen(dots, first_key, sign), lax.select(size < smallest, smallest, size)
        if scale.ndim:
            scale = fragments.along(scale, shape, 0)
        if capped:
            # Here the cap is 1, and `scale` is divided by the true cap, which is multiplied later.
            dots = spec.transform_logits(
                dots,
                scale=scale,
                logits_soft_cap=1.0,
                alibi_slopes=None,
                q_pos=None,
                k_pos=None,
                xp=_Numbers(),
            )
            scale = ins.cap[0]
            if not sloped:
                return self._seen(dots, first_key), scale
        slopes = q_pos = k_pos = None
        if sloped:
            slopes = fragments.along(fragments.vector(ins.slopes.at[self.unit], 0), shape, 0)
            q_pos, k_pos = self.distances(shape, first_key)
        dots = spec.transform_logits(
            dots,
            scale=scale,
            logits_soft_cap=None,
            alibi_slopes=slopes,
            q_pos=q_pos,
            k_pos=k_pos,
        )
        return self._seen(dots, first_key), None

    def _seen(
        self, x: jax.Array, first_key: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """`x` where a query sees the key, with the sign of the scale, and otherwise -inf."""
        edge = first_key < self.block.work[Column.CLEAR_START]
        edge = edge | (first_key + x.shape[1] > self.block.work[Column.CLEAR_END])
        if scale is None:
            sign = None
        else:
            edge = edge | (scale <= 0.0)
            sign = lax.select(scale < 0.0, jnp.float32(-1.0), jnp.float32(1.0))
            sign = lax.select(scale == 0.0, jnp.float32(0.0), sign)
        return lax.cond(edge, functools.partial(self._masked, first_key, sign), lambda x: x, x)

    def _masked(self, first_key: jax.Array, sign: jax.Array | None, x: jax.Array) -> jax.Array:
        if sign is not None:
            x = x * sign
        if self.block.inputs.columns is None:
            # Positions are made again: shared with the ALiBi term they would stay in registers, one
            # for every logit, and spill.
            first_key = lax.optimization_barrier(first_key)
        causal = self.block.call.is_causal
        is_causal = self.block.work[Column.IS_CAUSAL] if causal is None else causal
        sight = fragments.sight(self.block.inputs.sight, is_causal)
        pairs = self.pairs(x.shape, first_key)
        seen = fragments.visible(*pairs, self.block.work[Column.NUM_KEYS], sight)
        return jnp.where(seen, x, jnp.full_like(x, -jnp.inf))

    def finish(self, m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(factor, lse)` [64]: what the accumulator is multiplied by, and the natural lse."""
        sink = None
        if "sinks" in self.block.call.options:
            sink = fragments.vector(self.block.inputs.sinks.at[self.unit], 0)
        factor, lse = fragments.finish(m, l, sink)
        if "v_scale" in self.block.call.options:
            factor = factor * self.block.inputs.v_scale[self.block.kv_head]
        # A sequence that breaks a promise gets NaN.
        nan = fragments.nan_where(self.block.work[Column.BROKEN] != 0)
        return factor + nan, lse + nan

    def write(
        self, out: Any, rows: jax.Array, tiled: Any, plain: Any, columns: tuple[Any, int]
    ) -> None:
        """Write the rows that this tile owns to `out` [T, H, V].

        Args:
          out: the result.
          rows: [64, how many columns].
          tiled, plain: one memory, as a buffer for TMA's boxes and as one of plain rows.
          columns: `(first, how many)` of V.
        """
        tiles, work = self.block.tiles, self.block.work
        first_head, first_token, count = self.first_head, self.first_token, tiles.row_tokens
        start = jnp.maximum(work[Column.WRITE_START] - first_token, 0)
        end = jnp.minimum(work[Column.WRITE_END] - first_token, count)
        token = work[Column.TOKEN] + first_token
        where = pl.ds(*columns)
        box = pl.ds(pl.multiple_of(token, plan.ALIGNMENT), count)
        whole = (start == 0) & (end == count)

        @pl.when(whole)
        def _() -> None:
            tiled[...] = rows
            mgpu.commit_smem()
            for p in range(tiles.row_heads):
                mgpu.copy_smem_to_gmem(
                    tiled.at[pl.ds(p * count, count)],
                    out.at[box, first_head + p, where],
                )
            mgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(whole) & (end > start))
        def _() -> None:
            mgpu.store(plain, rows)
            mgpu.commit_smem()

            # The warpgroup writes the rows itself: a row of V may begin where a copy may not, at an
            # address that is not a multiple of 128.
            @pl.loop(start, end)
            def _(t: jax.Array) -> None:
                for p in range(tiles.row_heads):
                    row = fragments.vector(plain.at[p * count + t], 1)
                    mgpu.store(out.at[token + t, first_head + p, where], row)


def accumulate(acc: jax.Array, products: Callable[[Any], None]) -> jax.Array:
    """`acc` plus what `products` adds to an accumulator."""
    if not mgpu.interpreting():
        return pl.run_state(products)(mgpu.ACC.init(acc))

    def fresh(acc_ref: Any) -> jax.Array:
        products(acc_ref)
        return acc_ref[...]

    return acc + pl.run_scoped(fresh, mgpu.ACC(acc.shape, jnp.float32))


def write_lse(rows: jax.Array, buffer: Any, lse: Any, unit: jax.Array, place: jax.Array) -> None:
    """Write the lse of all of a unit's 64 rows: `gather_lse` picks those that are the tile's."""
    buffer[...] = rows
    mgpu.commit_smem()
    mgpu.copy_smem_to_gmem(buffer, lse.at[lax.axis_index("tile"), unit, place])
    mgpu.wait_smem_to_gmem(0)


def gather_lse(
    lse: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    tiles: tiling.Tiles,
    planned: jax.Array,
) -> jax.Array:
    """float32 [T, H] from the kernel's [tiles, H // row_heads, units of tokens, 64]."""
    token = planned[:, Column.TOKEN, None] + jnp.arange(tiles.tile_tokens, dtype=jnp.int32)[None]
    offset = jnp.arange(tiles.tile_tokens, dtype=jnp.int32)[None]
    there = (offset >= planned[:, Column.WRITE_START, None]) & (
        offset < planned[:, Column.WRITE_END, None]
    )
    there &= token < operands.query_start_loc[-1]  # padding has no sink
    rows = lse.reshape(
        planned.shape[0], call.num_heads // tiles.row_heads, -1, tiles.row_heads, tiles.row_tokens
    )
    rows = rows.transpose(0, 2, 4, 1, 3).reshape(-1, call.num_heads)
    where = jnp.where(there, token, call.num_tokens).reshape(-1)
    full = jnp.full((call.num_tokens, call.num_heads), -jnp.inf, jnp.float32)
    return full.at[where].set(rows, mode="drop")


def results(
    call: calls.Call, tiles: tiling.Tiles, arrays: Inputs
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of a kernel's results: out, and every unit's lse if the call asks for it."""
    num_tiles, num_tokens = arrays.plan.shape[0], arrays.query.shape[0]
    shape = (num_tokens, call.num_heads, call.value_dim)
    out = jax.ShapeDtypeStruct(shape, jnp.dtype(call.out_dtype))
    if not call.return_lse:
        return (out,)
    token_units = 1 if tiles.split_heads else tiles.units
    rows = (num_tiles, call.num_heads // tiles.row_heads, token_units, ROWS)
    return out, jax.ShapeDtypeStruct(rows, jnp.float32)


def launch(
    body: Callable[..., None],
    call: calls.Call,
    tiles: tiling.Tiles,
    arrays: Inputs,
    declared: scratch.Scratch,
    **settings: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Run `body(inputs, out, lse or None, scratch)` for every tile and group of query heads."""

    def flat(ins: Inputs, out: Any, *rest: Any) -> None:
        body(ins, out, rest[0] if call.return_lse else None, rest[-1])

    found = mgpu.launch(
        flat,
        arrays,
        out_type=results(call, tiles, arrays),
        name="jattn_prefill",
        declared=declared,
        grid=(arrays.plan.shape[0], call.num_heads // tiles.tile_heads),
        grid_names=("tile", "heads"),
        num_threads=3,
        thread_name="warpgroup",
        approx_math=True,
        auto_barriers=tiles.narrow,  # between widening a tile and multiplying it
        **settings,
    )
    return found if call.return_lse else (*found, None)
