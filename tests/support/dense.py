"""Plain dense attention in NumPy, written independently of `jattn.spec` and `jattn.reference`.

It has three uses: in float64 it checks the oracle; in the call's own dtypes it is the "plain
computation" whose error is the tests' budget; and with a field of its `View` changed it is a wrong
kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class View:
    """A batch without pages: real query tokens, and every sequence's keys and values in order.

    `query` [T, H, D]; `sinks` [H] or [T, H]; `keys[b]` [n, K, D] and `values[b]` [n, K, V], as
    stored, before scales; `kv_heads` [H] says which KV head a query head reads. `ahead` moves the
    causal edge, `drop` hides one visible key of every row, "newest" or "oldest", and `keep_dims`
    cuts D: only wrong kernels set these three.

    `chunk`: keys a chunk holds. Per sequence, of n query tokens and m keys: `ends[b]` [n], where a
    query's image ends; `parents[b]` [n], the query token before each in a tree, -1 for none;
    `selected[b]` bool [m], keys in selected blocks. `bias` [H, 2 E + 1]. If `at_depth` is False, a
    tree's tokens keep their positions in the row.
    """

    query: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    starts: np.ndarray
    kv_heads: np.ndarray
    scale: float
    is_causal: np.ndarray
    window: int | None
    cap: float | None
    sinks: np.ndarray | None
    slopes: np.ndarray | None
    k_scale: np.ndarray
    v_scale: np.ndarray
    chunk: int | None = None
    ends: list[np.ndarray] | None = None
    parents: list[np.ndarray] | None = None
    selected: list[np.ndarray] | None = None
    bias: np.ndarray | None = None
    at_depth: bool = True
    ahead: int = 0
    drop: str | None = None
    keep_dims: int | None = None

    def replace(self, **changes: Any) -> View:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, without padding."""
        return len(self.keys)


def paths(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `(bool [n, n], int [n])`: which tokens are on each one's path, and its depth."""
    n = len(parents)
    on_path, depth = np.zeros((n, n), bool), np.zeros(n, int)
    for i, parent in enumerate(parents):
        if parent >= 0:
            on_path[i], depth[i] = on_path[parent], depth[parent] + 1
        on_path[i, i] = True
    return on_path, depth


def positions(view: View, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `(query [n, 1], key [1, len])`: true positions of sequence b's queries and keys."""
    num_keys = len(view.keys[b])
    num_queries = int(view.starts[b + 1] - view.starts[b])
    key = np.arange(num_keys)
    query = np.arange(num_keys - num_queries, num_keys)
    if view.parents is not None and view.at_depth:
        query = query[:1] + paths(view.parents[b])[1]
        key[max(num_keys - num_queries, 0) :] = query[max(num_queries - num_keys, 0) :]
    return query[:, None], key[None, :]


def visible(view: View, b: int) -> np.ndarray:
    """bool [n, len]: which keys the n queries of sequence b see."""
    num_keys = len(view.keys[b])
    num_queries = int(view.starts[b + 1] - view.starts[b])
    query, key = positions(view, b)
    seen = np.ones((num_queries, num_keys), bool)
    forward = key > query + view.ahead
    if view.is_causal[b] and view.parents is not None:
        column = np.arange(num_keys) - (num_keys - num_queries)
        on_path = paths(view.parents[b])[0]
        seen = (column[None, :] < 0) | on_path[:, np.maximum(column, 0)]
    elif view.is_causal[b]:
        seen &= ~forward if view.ends is None else ~forward | (key < view.ends[b][:, None])
    if view.window is not None:
        near = np.abs(query - key) < view.window
        seen &= near | (forward if view.is_causal[b] else False)
    if view.chunk is not None:
        seen &= query // view.chunk == key // view.chunk
    if view.selected is not None:
        seen &= view.selected[b][None, :]
    if view.drop is not None and num_keys:
        order = seen[:, ::-1] if view.drop == "newest" else seen
        index = order.argmax(axis=1)
        index = num_keys - 1 - index if view.drop == "newest" else index
        seen[np.arange(num_queries), index] = False
    return seen


def attend(view: View, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Return `(out [T, H, V], lse [T, H])`, with operands of products in `dtype`.

    With float64 everything is float64. Any other dtype computes as plain code does: products of
    that dtype accumulate in float32, softmax is float32, and weights are rounded to the dtype.
    """
    wide = np.float64 if dtype == np.float64 else np.float32

    def number(x: Any) -> Any:
        return None if x is None else np.asarray(x, wide)

    tokens, heads = view.query.shape[:2]
    out = np.zeros((tokens, heads, view.values[0].shape[-1]), wide)
    lse = np.full((tokens, heads), -np.inf, wide)
    k_scale = number(view.k_scale)[view.kv_heads]
    v_scale = number(view.v_scale)[view.kv_heads]
    # One accumulator per sum, as in a plain loop. A library's matrix product keeps several, which
    # is more exact than a kernel must be.
    multiply = np.matmul if wide == np.float64 else _multiply_in_turn
    exp, tanh = (np.exp, np.tanh) if wide == np.float64 else (_exp, _tanh)
    for b in range(view.num_seqs):
        rows = slice(int(view.starts[b]), int(view.starts[b + 1]))
        if rows.start == rows.stop:
            continue
        query, keys, values = (
            x.astype(dtype, copy=False).astype(wide, copy=False)
            for x in (view.query[rows], view.keys[b], view.values[b])
        )
        num_queries, num_keys = len(query), len(keys)
        logits = np.zeros((heads, num_queries, num_keys), wide)
        for kv_head in np.unique(view.kv_heads):
            mine = np.flatnonzero(view.kv_heads == kv_head)
            rows_of_it = query[:, mine, : view.keep_dims].swapaxes(0, 1)
            rows_of_it = rows_of_it.reshape(len(mine) * num_queries, -1)
            dots = multiply(rows_of_it, keys[:, kv_head, : view.keep_dims].T)
            logits[mine] = dots.reshape(len(mine), num_queries, num_keys)
        logits *= (number(view.scale) * k_scale)[:, None, None]
        if view.cap is not None:
            logits = tanh(logits / number(view.cap)) * number(view.cap)
        if view.slopes is not None:
            query_at, key_at = positions(view, b)
            distance = (key_at - query_at).astype(wide)
            logits += number(view.slopes)[:, None, None] * distance
        if view.bias is not None:
            query_at, key_at = positions(view, b)
            extent = view.bias.shape[1] // 2
            logits += number(view.bias)[:, extent + np.clip(key_at - query_at, -extent, extent)]
        logits = np.where(visible(view, b)[None], logits, wide(-np.inf))
        if view.sinks is not None:
            sink = number(view.sinks)
            sink = sink[:, None] if sink.ndim == 1 else sink[rows].T
            sink = np.broadcast_to(sink[..., None], (heads, num_queries, 1))
            logits = np.concatenate([logits, sink], axis=2)
        if logits.shape[2] == 0:
            continue
        top = logits.max(axis=2, keepdims=True)
        top = np.where(np.isfinite(top), top, wide(0))
        weights = exp(logits - top)
        total = weights.sum(axis=2, keepdims=True)
        seen = total > 0
        total = np.where(seen, total, wide(1))
        shares = (weights / total)[..., :num_keys].astype(dtype).astype(wide, copy=False)
        for kv_head in np.unique(view.kv_heads):
            mine = np.flatnonzero(view.kv_heads == kv_head)
            sums = multiply(
                shares[mine].reshape(len(mine) * num_queries, num_keys), values[:, kv_head]
            )
            sums = sums.reshape(len(mine), num_queries, sums.shape[1]) * v_scale[mine, None, None]
            out[rows, mine] = sums.swapaxes(0, 1)
        lse[rows] = np.where(seen, np.log(total) + top, wide(-np.inf))[..., 0].T
    return out, lse


PART = 2**14


def _elementwise(function: Any) -> Any:
    """Apply JAX's float32 `function` to NumPy arrays, so that it rounds as usual JAX code does."""
    compiled = jax.jit(function)

    def apply(x: np.ndarray) -> np.ndarray:
        count = max(1, -(-x.size // PART))  # one shape, one compilation
        parts = np.zeros((count, PART), np.float32)
        parts.reshape(-1)[: x.size] = x.ravel()
        found = np.concatenate([np.asarray(compiled(part)) for part in parts])
        return found[: x.size].reshape(x.shape)

    return apply


_exp, _tanh = _elementwise(jnp.exp), _elementwise(jnp.tanh)


def _multiply_in_turn(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute `a @ b` with one float32 accumulator per element, term by term."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    term = np.empty_like(total)
    for x, y in zip(np.ascontiguousarray(a.T), np.ascontiguousarray(b), strict=True):
        np.multiply(x[:, None], y, out=term)
        total += term
    return total
