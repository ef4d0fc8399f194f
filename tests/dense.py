"""Plain dense attention in NumPy, written apart from `jattn.spec` and `jattn.reference`.

It is three things: in float64 an independent check of the oracle; in the call's own dtypes the
"plain computation" whose error is the tests' budget; and, with a field of its `View` changed, a
wrong kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class View:
    """A batch without pages: real query tokens, and every sequence's keys and values in order.

    `query` [T, H, D]; `keys[b]` [n, K, D] and `values[b]` [n, K, V], as stored, before scales;
    `kv_heads` [H] says which KV head a query head reads. `ahead` moves the causal edge, `drop`
    hides one visible key of every row, "newest" or "oldest", and `keep_dims` cuts D: right
    computations leave them alone.
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
    ahead: int = 0
    drop: str | None = None
    keep_dims: int | None = None

    def replace(self, **changes: Any) -> View:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, padding not counted."""
        return len(self.keys)


def visible(view: View, b: int) -> np.ndarray:
    """bool [n, len]: which keys the n queries of sequence b see."""
    num_keys = len(view.keys[b])
    num_queries = int(view.starts[b + 1] - view.starts[b])
    key = np.arange(num_keys)[None, :]
    query = np.arange(num_keys - num_queries, num_keys)[:, None]
    seen = np.ones((num_queries, num_keys), bool)
    if view.is_causal[b]:
        seen &= key <= query + view.ahead
    if view.window is not None:
        seen &= np.abs(query - key) < view.window
    if view.drop is not None and num_keys:
        order = seen[:, ::-1] if view.drop == "newest" else seen
        index = order.argmax(axis=1)
        index = num_keys - 1 - index if view.drop == "newest" else index
        seen[np.arange(num_queries), index] = False
    return seen


def attend(view: View, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """`(out [T, H, V], lse [T, H])` with the dots' operands in `dtype`.

    float64 computes everything in float64. Any other dtype is what plain code does: dots of
    operands in that dtype accumulated in float32, softmax in float32, weights rounded to the dtype.
    """
    wide = np.float64 if dtype == np.float64 else np.float32

    def number(x: Any) -> Any:
        return None if x is None else np.asarray(x, wide)

    tokens, heads = view.query.shape[:2]
    out = np.zeros((tokens, heads, view.values[0].shape[-1]), wide)
    lse = np.full((tokens, heads), -np.inf, wide)
    k_scale = number(view.k_scale)[view.kv_heads]
    v_scale = number(view.v_scale)[view.kv_heads]
    for b in range(view.num_seqs):
        rows = slice(int(view.starts[b]), int(view.starts[b + 1]))
        num_keys = len(view.keys[b])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        query = view.query[rows].astype(dtype).astype(wide)[..., : view.keep_dims]
        keys = view.keys[b][:, view.kv_heads].astype(dtype).astype(wide)[..., : view.keep_dims]
        values = view.values[b][:, view.kv_heads].astype(dtype).astype(wide)
        logits = query.transpose(1, 0, 2) @ keys.transpose(1, 2, 0)  # [H, n, len]
        logits = logits * (number(view.scale) * k_scale)[:, None, None]
        if view.cap is not None:
            logits = np.tanh(logits / number(view.cap)) * number(view.cap)
        if view.slopes is not None:
            position = np.arange(num_keys - num_queries, num_keys)[:, None]
            distance = (np.arange(num_keys)[None, :] - position).astype(wide)
            logits = logits + number(view.slopes)[:, None, None] * distance
        logits = np.where(visible(view, b)[None], logits, -np.inf)
        if view.sinks is not None:
            sink = np.broadcast_to(number(view.sinks)[:, None, None], (heads, num_queries, 1))
            logits = np.concatenate([logits, sink], axis=2)
        if logits.shape[2] == 0:
            continue
        top = logits.max(axis=2, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(logits - top)
        total = weights.sum(axis=2, keepdims=True)
        seen = total > 0
        total = np.where(seen, total, 1)
        shares = (weights / total).astype(dtype).astype(wide)[..., :num_keys]
        part = shares @ values.transpose(1, 0, 2) * v_scale[:, None, None]
        out[rows] = part.transpose(1, 0, 2)
        row_lse = np.where(seen, np.log(total) + top, -np.inf)[..., 0]
        lse[rows] = row_lse.T
    return out, lse
