"""Reading a mask: sequences, windows and chunks that show every query the keys its mask shows.

transformers describes visibility by a matrix, jattn by lengths. In each batch row of a mask, keys
that no query sees are dropped (padding before or after, the unused rest of a static cache), and the
others are numbered without gaps. Every query must then see a range of them,

    first[i] <= k < end[i]

Consecutive queries of a row form one sequence if `end` grows by one (causal) or stays the same
(bidirectional: encoders, prefixes, images). Their `first` must follow from a window or from chunks,
or be the start of a document, whose keys are stored separately. Any other mask is refused.

This file uses neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jattn.capability import UnsupportedError

Integers = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Each document stores a copy of the keys that it shares: together at most this many times the keys.
MOST_COPIES = 4


@dataclasses.dataclass(frozen=True, eq=False)
class SplitMask:
    """A mask [B, Tq, Tk] as R sequences over C documents: runs of stored keys.

    Attributes:
      num_queries: B * Tq.
      kept: bool [B, Tk]; the keys that are stored.
      documents: [C, 3]; batch row, first key and end of each, among the row's stored keys.
      document: [R]; the document that each sequence reads.
      tokens: [T]; which of the B * Tq queries each token is. Queries that see nothing are left out.
      query_start_loc: [R + 1].
      seq_lens: [R]; number of keys, from the document's first.
      is_causal: one bool, or bool [R].
      sliding_window, attention_chunk_size: as `jattn.paged_attention` takes them, or None.
    """

    num_queries: int
    kept: Bools
    documents: Integers
    document: Integers
    tokens: Integers
    query_start_loc: Integers
    seq_lens: Integers
    is_causal: bool | Bools
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @property
    def positions(self) -> Integers:
        """The position [T] of every token in its document."""
        counts = np.diff(self.query_start_loc)
        return np.arange(len(self.tokens)) + np.repeat(
            self.seq_lens - self.query_start_loc[1:], counts
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Queries:
    """The Q queries that see something, row by row: the range of the row's stored keys they see."""

    row: Integers
    index: Integers
    first: Integers
    end: Integers


@dataclasses.dataclass(frozen=True, eq=False)
class _Runs:
    """R runs of consecutive queries: where each starts, how many keys it has, and the position of
    every query."""

    starts: Integers  # [R + 1]
    seq_lens: Integers  # [R]
    causal: Bools  # [R]
    positions: Integers  # [Q]


def read_mask(mask: Bools, kept: Bools | None = None) -> SplitMask:
    """Find arguments of `jattn.paged_attention` that show every query the keys of a mask.

    Args:
      mask: bool [B, Tq, Tk]; whether the query sees the key.
      kept: bool [B, Tk]; the keys that are stored, if already decided: then every batch row is one
        document. None stores the keys that some query sees.

    Raises:
      UnsupportedError: no lengths, windows, chunks or documents match the mask.
    """
    num_queries = mask.shape[1]
    stored: Bools = np.asarray(mask.any(axis=1)) if kept is None else kept
    if not mask.any():
        return _reading(stored, stored.sum(axis=1), num_queries, *_nothing())
    if kept is not None and (mask & ~kept[:, None]).any():
        raise UnsupportedError(
            f"the mask {list(mask.shape)} shows keys that were hidden from all queries when they "
            "were written to the cache"
        )
    queries = _visible_ranges(mask, stored)
    counts = stored.sum(axis=1)
    attempts = (
        _as_window,
        _as_chunks,
        _as_window_both_ways,
        _as_window_of_text,
        _as_documents,
    )
    for attempt in attempts:
        reading = attempt(stored, counts, num_queries, queries)
        if reading is not None and (kept is None or not reading.documents[:, 1].any()):
            return reading
    raise UnsupportedError(
        f"the mask {list(mask.shape)} shows queries ranges of keys that are neither all keys "
        "before an end, nor a window, nor chunks"
        + (", nor documents" if kept is None else " of the keys in the cache")
    )


def without_padding_after(mask: Bools) -> Bools:
    """Hide all keys from queries after the last visible key of a mask [B, T, T].

    Queries and keys are the same tokens, so these queries are padding. jattn counts the positions
    of queries back from the last key: with padding, the positions of the text would be too low.
    """
    _, num_queries, num_keys = mask.shape
    seen: Bools = np.asarray(mask.any(axis=1))
    lengths = np.where(seen.any(axis=1), num_keys - seen[:, ::-1].argmax(axis=1), 0)
    found: Bools = mask & (np.arange(num_queries) < lengths[:, None])[..., None]
    return found


def _visible_ranges(mask: Bools, stored: Bools) -> _Queries:
    """Return the range of stored keys that each query sees."""
    num_keys = mask.shape[2]
    place = stored.cumsum(axis=1) - 1
    counts = mask.sum(axis=2)
    row, index = np.nonzero(counts)
    first = place[row, mask.argmax(axis=2)[row, index]]
    end = place[row, num_keys - 1 - mask[..., ::-1].argmax(axis=2)[row, index]] + 1
    gaps = np.flatnonzero(counts[row, index] != end - first)
    if gaps.size:
        at = gaps[0]
        raise UnsupportedError(
            f"the mask {list(mask.shape)} shows query {index[at]} of batch row {row[at]} only "
            f"{counts[row[at], index[at]]} of the {end[at] - first[at]} keys between its first and "
            "its last: jattn's queries see ranges of keys"
        )
    return _Queries(row, index, first, end)


def _nothing() -> tuple[_Queries, _Runs]:
    """Return the queries and runs of a mask that shows no key."""
    empty = np.zeros(0, np.int64)
    return (
        _Queries(empty, empty, empty, empty),
        _Runs(np.zeros(1, np.int64), empty, empty.astype(bool), empty),
    )


def _runs(queries: _Queries, split: Bools | None = None) -> _Runs:
    """Return runs of queries of one row whose ends grow by one, or stay the same.

    Args:
      queries: those that see something.
      split: bool [Q - 1]; further places between two queries where a run must end.
    """
    total = len(queries.row)
    step = np.diff(queries.end)
    step[np.diff(queries.row) != 0] = -1
    if split is not None:
        step[split] = -1
    # The ends of stretches of equal steps.
    edges = np.append(np.flatnonzero(np.diff(step)) + 1, len(step))
    starts, causal, at = [], [], 0
    while at < total:
        kind = step[at] if at < total - 1 else -1
        starts.append(at)
        causal.append(kind != 0)
        if kind in (0, 1):
            at = int(edges[np.searchsorted(edges, at, side="right")]) + 1
        else:
            at += 1
    bounds = np.array([*starts, total], np.int64)
    seq_lens = queries.end[bounds[1:] - 1]
    positions = np.arange(total) + np.repeat(seq_lens - bounds[1:], np.diff(bounds))
    return _Runs(bounds, seq_lens, np.array(causal, bool), positions)


def _reading(
    stored: Bools,
    counts: Integers,
    num_queries: int,
    queries: _Queries,
    runs: _Runs,
    **limits: int | None,
) -> SplitMask:
    """Build the reading of runs over one document per batch row."""
    batch = len(counts)
    documents = np.stack([np.arange(batch), np.zeros(batch, np.int64), counts], axis=1)
    return SplitMask(
        len(stored) * num_queries,
        stored,
        documents,
        queries.row[runs.starts[:-1]],
        queries.row * num_queries + queries.index,
        runs.starts,
        runs.seq_lens,
        _one_or_many(runs.causal),
        **limits,
    )


def _one_or_many(causal: Bools) -> bool | Bools:
    if causal.all():
        return True
    return causal if causal.any() else False


def _as_window(
    stored: Bools, counts: Integers, num_queries: int, queries: _Queries
) -> SplitMask | None:
    """Try all keys before an end, or a window of them."""
    runs = _runs(queries)
    later = np.flatnonzero(queries.first)
    if not later.size:
        return _reading(stored, counts, num_queries, queries, runs)
    window = int(runs.positions[later[0]] - queries.first[later[0]] + 1)
    causal = np.repeat(runs.causal, np.diff(runs.starts))
    fits = queries.first == np.maximum(0, runs.positions - window + 1)
    fits &= causal | (queries.end - runs.positions <= window)
    if window < 1 or not fits.all():
        return None
    return _reading(stored, counts, num_queries, queries, runs, sliding_window=window)


def _as_chunks(
    stored: Bools, counts: Integers, num_queries: int, queries: _Queries
) -> SplitMask | None:
    """Try causal chunks, the first of which starts at the first key."""
    runs = _runs(queries)
    chunk = math.gcd(*queries.first.tolist())
    if not chunk or not runs.causal.all():
        return None
    if (queries.first != runs.positions // chunk * chunk).any():
        return None
    return _reading(stored, counts, num_queries, queries, runs, attention_chunk_size=chunk)


def _as_window_both_ways(
    stored: Bools, counts: Integers, num_queries: int, queries: _Queries
) -> SplitMask | None:
    """Try a window around every query, whose own key is among the stored ones.

    Queries before the first stored key or after the last are padding. Those that still see a few
    keys get a document each.
    """
    length = counts[queries.row]
    total = np.bincount(queries.row, minlength=len(counts))[queries.row]
    nth = np.arange(len(queries.row)) - np.searchsorted(queries.row, queries.row)
    for start in (np.maximum(length - total, 0), length - total):
        positions = start + nth
        inside = (positions >= 0) & (positions < length)
        first, end, at = queries.first[inside], queries.end[inside], positions[inside]
        edges = np.append((at - first + 1)[first > 0], (end - at)[end < length[inside]])
        window = int(edges[0]) if edges.size else 0
        fits = first == np.maximum(0, at - window + 1)
        fits &= end == np.minimum(length[inside], at + window)
        if window >= 1 and fits.all():
            return _documents(stored, num_queries, queries, inside, length, window)
    return None


def _as_window_of_text(
    stored: Bools, counts: Integers, num_queries: int, queries: _Queries
) -> SplitMask | None:
    """Try a causal window, and documents for what does not fit it: the padding after a text."""
    last_seen = queries.end - 1
    later = np.flatnonzero(queries.first)
    window = int((queries.end - queries.first)[later[0]])
    whole = queries.first == np.maximum(0, last_seen - window + 1)
    # Padding that sees the same keys as the text's last query must not join the text's run.
    repeated = np.append(False, (np.diff(queries.end) == 0) & (np.diff(queries.row) == 0))
    return _documents(stored, num_queries, queries, whole & ~repeated, queries.end, window)


def _as_documents(
    stored: Bools, counts: Integers, num_queries: int, queries: _Queries
) -> SplitMask | None:
    """Try runs of queries with the same first key: packed texts, blocks of a picture."""
    return _documents(
        stored, num_queries, queries, np.zeros(len(queries.row), bool), queries.end, None
    )


def _documents(
    stored: Bools,
    num_queries: int,
    queries: _Queries,
    whole: Bools,
    end: Integers,
    window: int | None,
) -> SplitMask | None:
    """Give queries in `whole` their row's keys and a window, and the others documents.

    Args:
      whole: bool [Q].
      end: [Q]; the end of the keys given to each query in `whole`; the window may hide some.
      window: the window, or None.

    Returns: None if the documents would duplicate too many keys, or the window hide a visible one.
    """
    first = np.where(whole, 0, queries.first)
    seen = dataclasses.replace(queries, first=first, end=np.where(whole, end, queries.end))
    runs = _runs(seen, split=(np.diff(first) != 0) | (np.diff(whole.astype(int)) != 0))
    of_run = runs.starts[:-1]
    both_ways = np.repeat(~runs.causal, np.diff(runs.starts))
    reach = np.where(both_ways, seen.end - runs.positions, 0)
    back = runs.positions - first + 1
    if window is not None and (np.maximum(reach, back)[~whole] > window).any():
        return None
    names = np.stack([queries.row[of_run], first[of_run]], axis=1)
    names, document = np.unique(names, axis=0, return_inverse=True)
    document = document.reshape(-1)
    ends = np.zeros(len(names), np.int64)
    np.maximum.at(ends, document, runs.seq_lens)
    if (ends - names[:, 1]).sum() > MOST_COPIES * stored.sum():
        return None
    return SplitMask(
        len(stored) * num_queries,
        stored,
        np.concatenate([names, ends[:, None]], axis=1),
        document,
        queries.row * num_queries + queries.index,
        runs.starts,
        runs.seq_lens - names[document, 1],
        _one_or_many(runs.causal),
        sliding_window=window,
    )


def relative_columns(reading: SplitMask, mask: Bools) -> tuple[Integers, Integers, Integers]:
    """Find the distance, key position minus query position, of every visible entry of a mask.

    Args:
      reading: the mask's reading.
      mask: bool [B, Tq, Tk].

    Returns:
      `(distances, where, of_entry)`: the distances [U] between visible keys and their queries, in
      order; the first entry of the flat mask with each distance; and the index [B, Tq, Tk] of every
      entry's distance, -1 where the key is hidden.
    """
    _, num_queries, _ = mask.shape
    place = reading.kept.cumsum(axis=1) - 1
    counts = np.diff(reading.query_start_loc)
    first = np.repeat(reading.documents[reading.document, 1], counts)
    at = np.zeros(mask.shape[:2], np.int64)
    at[reading.tokens // num_queries, reading.tokens % num_queries] = reading.positions + first
    visible = np.flatnonzero(mask)
    found = (place[:, None] - at[:, :, None]).reshape(-1)[visible]
    distances, first_seen, which = np.unique(found, return_index=True, return_inverse=True)
    of_entry = np.full(mask.size, -1)
    of_entry[visible] = which.reshape(-1)
    return distances, visible[first_seen], of_entry.reshape(mask.shape)
