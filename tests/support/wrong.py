"""Wrong kernels: each a small change to a right computation, in float64.

A tolerance that lets one of them pass tests nothing. Only options and lengths decide which of
them apply to a problem, never their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.support import dense, problems, quantize

Result = tuple[np.ndarray, np.ndarray | None]
NAMES = (
    *("zeros", "mean of V", "scale of 1.01", "newest key dropped", "oldest key dropped"),
    *("last 8 of D dropped", "sequences exchanged", "blocks swapped"),
    *("heads tiled, not repeated", "causal ignored", "causal sees one more"),
    *("causal sees one less", "always causal", "no cap", "no window", "window of one more"),
    *("window of one less", "no sink", "sink of the next head", "no slopes"),
    *("slope of the next head", "k_scale ignored", "v_scale ignored", "lse in base 2"),
    *("lse without sink", "no chunks", "chunk of one more", "visible end ignored"),
    *("visible end of one less", "a chain, not a tree", "tree of the next token"),
    *("tree tokens at their places", "all blocks selected", "a selected block dropped"),
    *("no bias", "bias mirrored", "bias of the next head", "bias of the next distance"),
    *("sink of the next token", "values from the keys' end"),
    *(f"{mistake} of {part}" for mistake in quantize.MISTAKES for part in ("keys", "values")),
)
LN2 = float(np.log(2.0))


def kernels(batch: problems.Batch) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield `(name, wrong kernel)` for every wrong kernel that must differ on this batch.

    A kernel returns `(out, lse)`. With an lse of None, the test must reject the output alone.
    Kernels that spoil only the lse return the right output. A scale that is one percent off, and a
    window of one key more or less, return both: in 16 bits, under a cap, or far away on an ALiBi
    slope, only the lse may give them away.
    """
    problem, view = batch.problem, batch.view
    options = problem.options
    long = max(problem.query_lens) > 1

    def out_only(**changes) -> Callable[[], Result]:
        return lambda: (dense.attend(view.replace(**changes))[0], None)

    def both(**changes) -> Callable[[], Result]:
        return lambda: _with_lse(view.replace(**changes), options)

    yield "zeros", lambda: (np.zeros_like(dense.attend(view)[0]), None)
    yield "mean of V", lambda: (_mean_of_values(view), None)
    yield "scale of 1.01", both(scale=view.scale * 1.01)
    yield "newest key dropped", out_only(drop="newest")
    yield "oldest key dropped", out_only(drop="oldest")
    yield "last 8 of D dropped", out_only(keep_dims=problem.head_dim - 8)
    if view.num_seqs > 1:
        yield "sequences exchanged", lambda: (_exchanged(view), None)
    if max(problem.seq_lens) > problem.block_size and view.selected is None:
        yield "blocks swapped", lambda: (_swapped_blocks(view, problem.block_size), None)
    if problem.num_kv_heads > 1 and problem.group > 1:
        tiled = np.arange(problem.num_heads) % problem.num_kv_heads
        yield "heads tiled, not repeated", out_only(kv_heads=tiled)
    if long and view.is_causal.any() and view.parents is None:
        yield "causal ignored", out_only(is_causal=np.zeros_like(view.is_causal))
        yield "causal sees one more", out_only(ahead=1)
        yield "causal sees one less", out_only(ahead=-1)
    if long and not view.is_causal.all():
        yield "always causal", out_only(is_causal=np.ones_like(view.is_causal))
    if view.cap is not None:
        yield "no cap", out_only(cap=None)
    if view.window is not None:
        yield "no window", out_only(window=None)
        yield "window of one more", both(window=view.window + 1)
        yield "window of one less", both(window=view.window - 1)
    if view.sinks is not None:
        yield "no sink", out_only(sinks=None)
        if problem.num_heads > 1:
            yield "sink of the next head", out_only(sinks=np.roll(view.sinks, 1, axis=-1))
    if view.slopes is not None:
        yield "no slopes", out_only(slopes=None)
        if problem.num_heads > 1:
            yield "slope of the next head", out_only(slopes=np.roll(view.slopes, 1))
    yield from _masks(batch, out_only, both)
    if "k_scale" in options:
        yield "k_scale ignored", out_only(k_scale=np.ones_like(view.k_scale))
    if "v_scale" in options:
        yield "v_scale ignored", out_only(v_scale=np.ones_like(view.v_scale))
    for name, misread in batch.misread.items():
        yield name, out_only(keys=misread.keys, values=misread.values)
    if "return_lse" in options:
        right = dense.attend(view)
        yield "lse in base 2", lambda: (right[0], right[1] / LN2)
        if view.sinks is not None:
            yield "lse without sink", lambda: (right[0], dense.attend(view.replace(sinks=None))[1])


def _masks(
    batch: problems.Batch, out_only: Callable, both: Callable
) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield kernels that get a mask, a table of biases or the place of values wrong."""
    problem, view = batch.problem, batch.view
    if view.chunk is not None and max(problem.seq_lens) > 2 * view.chunk:
        yield "no chunks", out_only(chunk=None)
        yield "chunk of one more", out_only(chunk=view.chunk + 1)
    if view.ends is not None and max(problem.query_lens) > 10 and view.is_causal.any():
        yield "visible end ignored", out_only(ends=None)
        yield "visible end of one less", out_only(ends=[end - 1 for end in view.ends])
    if view.parents is not None and max(problem.query_lens) > 3:
        chains = [np.arange(len(parents)) - 1 for parents in view.parents]
        later = [np.concatenate([[-1], parents[:-1]]) for parents in view.parents if len(parents)]
        rest = iter(later)
        yield "a chain, not a tree", out_only(parents=chains)
        moved = [next(rest) if len(parents) else parents for parents in view.parents]
        yield "tree of the next token", out_only(parents=moved)
        if view.bias is not None:
            yield "tree tokens at their places", out_only(at_depth=False)
    if view.selected is not None and max(problem.seq_lens) > 2 * problem.block_size:
        yield "all blocks selected", out_only(selected=None)
        first = [np.arange(len(s)) < problem.block_size for s in view.selected]
        fewer = [s & ~f for s, f in zip(view.selected, first, strict=True)]
        yield "a selected block dropped", out_only(selected=fewer)
    if view.bias is not None:
        yield "no bias", out_only(bias=None)
        yield "bias of the next distance", out_only(bias=np.roll(view.bias, 1, axis=1))
        yield "bias mirrored", out_only(bias=view.bias[:, ::-1])
        if problem.num_heads > 1:
            yield "bias of the next head", out_only(bias=np.roll(view.bias, 1, axis=0))
    if view.sinks is not None and view.sinks.ndim == 2:
        yield "sink of the next token", out_only(sinks=np.roll(view.sinks, 1, axis=0))
    if "value_dim" in problem.options and problem.value_dim < problem.head_dim:
        ends = [k[..., -problem.value_dim :] for k in view.keys]
        yield "values from the keys' end", out_only(values=ends)


def _with_lse(view: dense.View, options: frozenset[str]) -> Result:
    out, lse = dense.attend(view)
    return out, lse if "return_lse" in options else None


def _mean_of_values(view: dense.View) -> np.ndarray:
    flat = view.replace(query=np.zeros_like(view.query), slopes=None, sinks=None, bias=None)
    return dense.attend(flat)[0]


def _exchanged(view: dense.View) -> np.ndarray:
    """Attend with every sequence reading the previous one's pages, up to the shorter length."""
    order = np.roll(np.arange(view.num_seqs), 1)

    def move(parts: list[np.ndarray]) -> list[np.ndarray]:
        moved = []
        for b, other in enumerate(order):
            new = parts[b].copy()
            n = min(len(new), len(parts[other]))
            new[:n] = parts[other][:n]
            moved.append(new)
        return moved

    return dense.attend(view.replace(keys=move(view.keys), values=move(view.values)))[0]


def _swapped_blocks(view: dense.View, size: int) -> np.ndarray:
    """Attend with every block's keys in the place of the next block's, cyclically.

    Values stay: if keys and values moved together, the result would be right wherever positions do
    not matter.
    """

    def swap(part: np.ndarray) -> np.ndarray:
        return np.roll(part, size, axis=0) if len(part) > size else part

    return dense.attend(view.replace(keys=[swap(k) for k in view.keys]))[0]
