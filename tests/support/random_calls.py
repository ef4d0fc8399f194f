"""Calls drawn at random from all that a capability row takes: sizes, formats, masks, lengths.

The matrix covers every pair of the levels it lists; here nothing is listed. Head sizes, groups,
block sizes, windows and lengths are any numbers in range, options any set that makes sense. One
seed is one call. `LARGE` calls have sequences, heads and head sizes that kernels split.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from jattn import capability, formats
from tests.support import problems

# Of each of these groups a call may have one option at most.
EXCLUSIVE = (
    ("not_causal", "is_causal_per_sequence", "tree_mask"),
    ("not_causal", "visible_end"),
    ("tree_mask", "visible_end"),
    ("alibi_slopes", "relative_bias"),
    ("sinks", "sinks_per_token"),
    ("value_dim", "v_scale"),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Upper limits of what is drawn."""

    head_dim: int
    block: int
    group: int
    keys: int
    window: int


SMALL = Sizes(head_dim=96, block=40, group=7, keys=130, window=100)
LARGE = Sizes(head_dim=576, block=160, group=32, keys=4000, window=5000)


def draw(seed: int, row: capability.Row, sizes: Sizes = SMALL) -> problems.Problem:
    """Draw the call of a seed, among those that `row` takes."""
    rng = np.random.default_rng((seed, 77))
    named = [problems.FORMATS[name] for name in row.formats]
    key = named[rng.integers(len(named))]
    value = key if rng.random() < 0.6 else named[rng.integers(len(named))]
    options = _options(rng, row)
    if "value_dim" in options:
        value = key
    step = int(np.lcm(key.dim_multiple, value.dim_multiple))
    head_dim = _size(rng, row.head_dims, step, sizes.head_dim)
    value_dim = _size(rng, row.value_dims, step, sizes.head_dim)
    if "value_dim" in options:
        value_dim = min(head_dim, value_dim)
    plain = all(formats.plain_format(one.value_dtype) == one for one in (key, value))
    block_size = _size(rng, row.block_sizes, 1, sizes.block)
    ragged = bool(rng.random() < 0.7)
    query_lens, seq_lens = _lengths(rng, block_size, sizes.keys, ragged)
    kv_heads = int(rng.integers(1, 4))
    kv_layout = str(rng.choice(row.layouts))
    if kv_layout == formats.ROWS_LAYOUT and (key != value or key.name not in problems.IN_ROWS):
        kv_layout = "NHD"
    if "value_dim" in options and kv_layout == formats.ROWS_LAYOUT:
        kv_layout = "NHD"
    return problems.Problem(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=kv_heads * int(rng.integers(1, sizes.group + 1)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=block_size,
        query_dtype=str(rng.choice(row.query_dtypes)),
        format=key.name,
        value_format=value.name,
        plain=plain and bool(rng.random() < 0.3),
        kv_layout=kv_layout,
        options=options,
        ragged=ragged,
        padded_tokens=max(int(rng.integers(0, 5)), 1 - sum(query_lens)),  # no call is empty
        padded_seqs=int(rng.integers(0, 3)),
        window=int(rng.integers(1, sizes.window)),
        chunk=int(rng.integers(1, 60)),
        tree_columns=int(rng.integers(1, 40)),
        explicit_scale=bool(rng.random() < 0.3),
        seed=seed,
    )


def _options(rng: np.random.Generator, row: capability.Row) -> frozenset[str]:
    wanted = {name for name in row.options if rng.random() < 0.25}
    for names in EXCLUSIVE:
        both = sorted(wanted.intersection(names))
        wanted -= set(both[1:])
    # An output rounded to 16 bits hides what the lse shows.
    return frozenset(wanted | ({"return_lse"} & {*row.options}))


def _size(rng: np.random.Generator, sizes: capability.Sizes, step: int, most: int) -> int:
    step = int(np.lcm(step, sizes.multiple_of))
    low = max(1, -(-sizes.low // step))
    return step * int(rng.integers(low, max(low, min(sizes.high, most) // step) + 1))


def _lengths(
    rng: np.random.Generator, block_size: int, most: int, ragged: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw lengths at the edges of blocks, and others."""
    query_lens, seq_lens = [], []
    for _ in range(int(rng.integers(1, 7))):
        edge = block_size * int(rng.integers(0, 4)) + int(rng.integers(-1, 2))
        keys = max(0, edge if rng.random() < 0.4 else int(rng.integers(0, most)))
        queries = int(rng.choice([0, 1, 1, int(rng.integers(0, 40))])) if ragged else 1
        query_lens.append(min(queries, keys) if ragged else 1)
        seq_lens.append(keys)
    return tuple(query_lens), tuple(seq_lens)


@st.composite
def lengths_within(
    draw: st.DrawFn, frame: tuple[int, int, int, int], block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw `(query_lens, seq_lens)` of sequences that fit T, B, M and N of a frame."""
    tokens, most, width, blocks = frame
    pairs = []
    for _ in range(draw(st.integers(1, most))):
        query = draw(st.integers(0, min(tokens, 30)))
        room = min(blocks, width) * block_size
        if query > room:
            break
        keys = draw(st.integers(query, room))
        pairs.append((query, keys))
        tokens -= query
        blocks -= -(-keys // block_size)
    query_lens, seq_lens = zip(*(pairs or [(1, 1)]), strict=True)
    return query_lens, seq_lens
