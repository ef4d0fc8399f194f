"""Decode's query rows: queries in the order that the kernel takes them, results where tokens are.

Row `r` of a sequence and a KV head is query token `r // G`, head `r % G` of the group. A work item
has R of them, so a sequence has J blocks of rows for every KV head: [B, K, J, R, ...].

If groups are multiples of 8, none of this is needed: the kernel copies queries from where they are
(`boxes`) and the merge writes rows where they belong (`Rows.stay_in_place`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import call as calls
from jattn.integers import ceil_div
from jattn.pallas.mosaic_gpu import fp8, scratch
from jattn.pallas.mosaic_gpu.decode import tiles as tiling


def boxes(call: calls.Call, tiles: tiling.DecodeTiles) -> tuple[int, int]:
    """Return how many copies bring an item's rows from the queries [T, H, D], and rows of each.

    (0, 0) if they are gathered first: if a copy would bring a number of rows that is not a multiple
    of 8, or if queries in another dtype are narrowed.
    """
    size = math.gcd(call.group, tiles.rows)
    if size % scratch.COPIED_ROWS or call.query_dtype != str(scratch.compute_dtype(call)):
        return 0, 0
    return tiles.row_block // size, size


def by_row(numbers: jax.Array, call: calls.Call, blocks: int, row_block: int) -> jax.Array:
    """[K, J, R] of a number for every query head [H]."""
    group = numbers.reshape(call.num_kv_heads, call.group)
    which = np.arange(blocks * row_block) % call.group
    return group[:, which].reshape(call.num_kv_heads, blocks, row_block)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The query rows of the sequences that are decoded.

    Attributes:
      call: the call.
      operands: its operands as `promises.marked` returns them.
      counts: int32 [B]; query tokens of each sequence, at most `span`; 0 for those of other
        kernels.
      tiles: the kernel's.
      span: static bound on `counts`.
    """

    call: calls.Call
    operands: calls.Operands
    counts: jax.Array
    tiles: tiling.DecodeTiles
    span: int

    @property
    def blocks(self) -> int:
        """J: blocks of R rows that hold a sequence's query tokens in one KV head."""
        return ceil_div(self.span * self.call.group, self.tiles.row_block)

    @property
    def stay_in_place(self) -> bool:
        """Whether the merge can write rows to the call's result: no column of V is stored twice."""
        call = self.call
        whole = call.group % scratch.COPIED_ROWS == 0
        return whole and self.tiles.stored_rows == call.value_dim

    def queries(self) -> tuple[jax.Array, jax.Array]:
        """Return rows [B, K, J, R, D] of the kernel's dtype, and what to multiply their dots by.

        That is [B, K, J, R] if rows are narrowed, each by a different number, and otherwise [K], or
        [1] for all. Rows that a sequence does not have are zeros. If the kernel copies rows from
        where they are (`boxes`), the queries are returned as they come.
        """
        call, operands, row_block = self.call, self.operands, self.tiles.row_block
        kv_heads, group, dtype = call.num_kv_heads, call.group, scratch.compute_dtype(call)
        scales = operands.scale[None]
        if operands.k_scale is not None:
            scales = scales * operands.k_scale
        if boxes(call, self.tiles)[0]:
            return operands.query, scales
        rows = jnp.arange(self.blocks * row_block, dtype=jnp.int32)
        token = rows // group
        at = operands.query_start_loc[:-1, None] + token[None]
        live = token[None] < self.counts[:, None]
        queries = operands.query.reshape(call.num_tokens, kv_heads, group, call.head_dim)
        at = jnp.where(live, at, 0)
        queries = queries.at[at, :, (rows % group)[None]].get(mode="clip")  # [B, rows, K, D]
        queries = jnp.where(live[:, :, None, None], queries, jnp.zeros_like(queries)).swapaxes(1, 2)
        shape = (call.num_seqs, kv_heads, self.blocks, row_block)
        if queries.dtype != dtype:
            queries, power = fp8.narrowed(queries, dtype)
            scales = (scales[None, :, None] * power).reshape(shape)
        return queries.reshape(*shape, call.head_dim), scales

    def result(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `(out [T, H, V], lse [T, H])` of finished rows, if no other kernel has any."""
        call, starts = self.call, self.operands.query_start_loc
        if not call.ragged:
            return self._one_token_each(out, lse)
        tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
        b = jnp.searchsorted(starts, tokens, side="right", method="scan_unrolled")
        b = jnp.clip(b.astype(jnp.int32) - 1, 0, call.num_seqs - 1)
        return self._of_tokens(out, lse, b, tokens)

    def scatter(
        self, out: jax.Array, lse: jax.Array, others: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the `(out, lse)` of other kernels with finished rows in their places."""
        call, span, starts = self.call, self.span, self.operands.query_start_loc

        def scattered(others: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            b, index = jnp.divmod(jnp.arange(call.num_seqs * span, dtype=jnp.int32), span)
            token = starts[b] + index
            rows = self._of_tokens(out, lse, b, token)
            where = jnp.where(index < self.counts[b], token, call.num_tokens)
            return (
                others[0].at[where].set(rows[0], mode="drop"),
                others[1].at[where].set(rows[1], mode="drop"),
            )

        return lax.cond(jnp.any(self.counts > 0), scattered, lambda others: others, others)

    def _columns(self, out: jax.Array) -> jax.Array:
        """`out` [..., V] from what the kernels stored, some columns perhaps twice."""
        if self.tiles.stored_rows == self.call.value_dim:
            return out
        return out[..., np.asarray(self.tiles.row_of_value)]

    def _one_token_each(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`result` where each sequence has one token: the rows in their order."""
        call = self.call
        heads = (call.num_seqs, call.num_kv_heads, -1)
        out = self._columns(out).reshape(*heads, call.value_dim)[:, :, : call.group]
        lse = lse.reshape(heads)[:, :, : call.group]
        shape = (call.num_tokens, call.num_heads)
        return out.reshape(*shape, call.value_dim), lse.reshape(shape)

    def _of_tokens(
        self, out: jax.Array, lse: jax.Array, b: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`out` [n, H, V] and `lse` [n, H] for tokens [n] of sequences `b` [n], of finished rows.

        Zeros and -inf for tokens that are not among the `counts` of their sequence, and NaN for
        those of one that breaks a promise, which may be more than the kernels have rows for.
        """
        call, operands = self.call, self.operands
        group, row_block = call.group, self.tiles.row_block
        out = self._columns(out)
        index = tokens - operands.query_start_loc[b]
        real = (tokens < operands.query_start_loc[-1])[:, None, None]
        mine = real & (index < self.counts[b])[:, None, None]
        index = jnp.clip(index, 0, lse.shape[2] * row_block // group - 1)
        row = index[:, None, None] * group + jnp.arange(group, dtype=jnp.int32)[None, None]
        kv_head = jnp.arange(call.num_kv_heads, dtype=jnp.int32)[None, :, None]
        where = (b[:, None, None], kv_head, row // row_block, row % row_block)
        broken = real & (operands.seq_lens[b] < 0)[:, None, None]
        absent = jnp.where(broken, jnp.float32(jnp.nan), jnp.float32(0))
        mine = mine & ~broken
        out = jnp.where(mine[..., None], out[where], absent[..., None].astype(out.dtype))
        lse = jnp.where(mine, lse[where], absent - jnp.float32(jnp.inf))
        shape = (tokens.size, call.num_heads)
        return out.reshape(*shape, call.value_dim), lse.reshape(shape)
