"""Which layers share a block table, and pages of one size for all of them, as in vLLM.

Layers of one group share a block table. Groups exchange memory, so their pages must have one size.
The i-th layers of all groups share one tensor: a group with fewer layers than the largest leaves
slots empty.

    unify     P = the largest page; a smaller page p with P mod p = 0 gets blocks P / p times as
              long; otherwise it is padded to P (0.32), or refused (0.23)
    bucket    layers of equal specs; lo, hi = the smallest and largest bucket
    split     groups of g = hi if hi < 1.5 lo else lo layers: a bucket of n makes k = ceil(n / g)
              groups, of which group i gets its layers i, i + k, i + 2 k, ...

Layers that need no unification, because one spec describes all of them or because they differ only
in bytes per token, make one group. Source: `get_kv_cache_groups` of vLLM 0.23 and 0.32, for its
layouts with layers outermost. (0.32's layouts with blocks outermost pack pages of several sizes
into one array of bytes, which typed arrays cannot alias.)
`jattn.blocks.planning.patterns` finds groups that leave fewer slots empty.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jattn.blocks.planning.layer_specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    RecurrentState,
    SlidingWindow,
)
from jattn.checks import Problems, checking
from jattn.integers import ceil_div, require_int, with_python_ints

RULES = ("0.23", "0.32", "mixed")


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
      layers: the indices of the layers.
      specs: one per layer. Equal, except in groups whose layers differ only in bytes.

    >>> local, full = SlidingWindow(16, 8, 128, window=1024), FullAttention(16, 8, 128)
    >>> group = group_layers([local, full] * 2).groups[0]
    >>> group.layers, group.block_size, group.padding_bytes
    ((0, 2), 16, 0)
    """

    layers: tuple[int, ...]
    specs: tuple[LayerSpec, ...]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.specs[0].block_size

    @property
    def is_mixed(self) -> bool:
        """Whether pages differ between layers, which only happens if there is one group."""
        return len(set(self.specs)) > 1

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in one block, over all layers."""
        return sum(spec.page_bytes - spec.unpadded_page_bytes for spec in self.specs)

    @property
    def padding_percent(self) -> float:
        """Padding in percent of the block's bytes over all layers."""
        return 100.0 * self.padding_bytes / sum(spec.page_bytes for spec in self.specs)


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """All groups of a model. Printing one explains it.

    Attributes:
      groups: the groups.

    >>> local, full = SlidingWindow(16, 8, 128, window=1024), FullAttention(16, 8, 128)
    >>> groups = group_layers([local, full] * 2)
    >>> print(groups)
    group 0: SlidingWindow, block 16, page 65536, padding 0 bytes (0.0 %), layers 0, 2
    group 1: FullAttention, block 16, page 65536, padding 0 bytes (0.0 %), layers 1, 3
    0 of 4 slots empty
    >>> groups.block_bytes, groups.num_blocks(2**30)
    (131072, 8192)
    """

    groups: tuple[LayerGroup, ...]

    @property
    def group_size(self) -> int:
        """Layers of the largest group: the number of tensors that memory is cut into."""
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def empty_slots(self) -> int:
        """Layers' worth of memory that smaller groups leave empty."""
        return sum(self.group_size - len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id stands for, over all tensors."""
        if len(self.groups) == 1:
            return sum(spec.page_bytes for spec in self.groups[0].specs)
        return self.group_size * max(
            (spec.page_bytes for group in self.groups for spec in group.specs), default=0
        )

    @property
    def scheduler_block_size(self) -> int:
        """Tokens at which the blocks of all groups end together."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash, so that every block is a whole number of hashes (`block_hashes`)."""
        return math.gcd(*(group.block_size for group in self.groups))

    @with_python_ints
    def num_blocks(self, memory_bytes: int) -> int:
        """Return the number of blocks that fit in `memory_bytes`.

        Raises: `ValueError` if `memory_bytes` is negative or there are no groups.
        """
        with checking("LayerGroups.num_blocks") as problems:
            require_int(problems, "memory_bytes", memory_bytes, 0)
            problems.require(bool(self.groups), "groups", "none", "one or more")
        return memory_bytes // self.block_bytes

    def __str__(self) -> str:
        lines = [
            f"group {i}: {type(group.specs[0]).__name__}, block {group.block_size}, "
            f"page {'mixed' if group.is_mixed else group.specs[0].page_bytes}, "
            f"padding {group.padding_bytes} bytes ({group.padding_percent:.1f} %), "
            f"layers {', '.join(map(str, group.layers))}"
            for i, group in enumerate(self.groups)
        ]
        total = len(self.groups) * self.group_size
        lines.append(f"{self.empty_slots} of {total} slots empty")
        return "\n".join(lines + self._advice())

    def _advice(self) -> list[str]:
        """Return advice about attention blocks that were padded to the page of a state."""
        first = [group.specs[0] for group in self.groups if group.padding_bytes]
        states = [s for group in self.groups for s in group.specs if isinstance(s, RecurrentState)]
        largest = max((state.unpadded_page_bytes for state in states), default=0)
        lines = []
        for spec in first:
            if not isinstance(spec, RecurrentState) and spec.unpadded_page_bytes < largest:
                tokens = ceil_div(largest * spec.block_size, spec.unpadded_page_bytes)
                lines.append(
                    f"align first: a state needs the page of {tokens} tokens, and blocks have "
                    f"{spec.block_size} (align_hybrid_block_size)"
                )
        return list(dict.fromkeys(lines))


def unify_page_sizes(specs: Iterable[LayerSpec], *, rules: str = "0.32") -> tuple[LayerSpec, ...]:
    """Return specs whose pages are all as large as the largest.

    A smaller page that divides the largest gets longer blocks. Other pages, and those of states,
    are padded or refused.

    Args:
      specs: one per layer.
      rules: "0.32" and "mixed" pad pages that do not divide the largest, except MLA's, and smaller
        pages of states; "0.23" refuses all of these.

    Returns: a tuple of specs, one per layer.
    Raises: `ValueError` naming every layer whose page neither divides the largest nor may be
      padded: with "0.32" and "mixed" that of MLA; with "0.23" any, and a state smaller than a page.

    >>> specs = unify_page_sizes([FullAttention(16, 8, 128), FullAttention(16, 2, 128)])
    >>> [(spec.block_size, spec.page_bytes) for spec in specs]
    [(16, 65536), (64, 65536)]
    """
    specs = tuple(specs)
    largest = max((spec.page_bytes for spec in specs), default=0)
    with checking("unify_page_sizes") as problems:
        _check_specs(problems, specs, rules)
    unified = []
    with checking("unify_page_sizes") as problems:
        for i, spec in enumerate(specs):
            page = spec.page_bytes
            state = isinstance(spec, RecurrentState)
            if page == largest:
                unified.append(spec)
            elif largest % page == 0 and not state:
                longer = dataclasses.replace(
                    spec, block_size=spec.block_size * largest // page, padded_page_bytes=None
                )
                # Padded pages and those with scales per block do not grow with tokens alone.
                padded = None if longer.page_bytes == largest else largest
                unified.append(dataclasses.replace(longer, padded_page_bytes=padded))
            elif rules != "0.23" and not isinstance(spec, LatentAttention):
                unified.append(dataclasses.replace(spec, padded_page_bytes=largest))
            else:
                kind = "the state's" if state else f"{type(spec).__name__}'s"
                problems.add(
                    f"specs[{i}]",
                    f"{kind} page of {page} bytes",
                    f"{largest} bytes, the largest page, or a divisor of it",
                )
    return tuple(unified)


def group_layers(
    specs: Iterable[LayerSpec], *, rules: str = "0.32", keep_everything: bool = False
) -> LayerGroups:
    """Group layers as vLLM does.

    Args:
      specs: one per layer, in order.
      rules: "0.23" or "0.32", as these versions of vLLM do. "mixed" is "0.32", but if no other
        layer needs a table, states of several page sizes form one group whose pages differ and are
        not padded; "0.32" makes several groups of them.
      keep_everything: let sliding and chunked layers keep all keys if there are full ones, so that
        all share one table (vLLM's `disable_hybrid_kv_cache_manager`).

    Returns: `LayerGroups`, empty if there are no layers.
    Raises: `ValueError` as `unify_page_sizes`, or if `keep_everything` cannot make one group.

    >>> local = SlidingWindow(16, 8, 128, window=1024)
    >>> groups = group_layers([local, local, FullAttention(16, 8, 128)])
    >>> [group.layers for group in groups.groups]
    [(0,), (1,), (2,)]
    """
    specs = tuple(specs)
    with checking("group_layers") as problems:
        _check_specs(problems, specs, rules)
    if not specs:
        return LayerGroups(())
    if keep_everything and not _one_group(specs, rules):
        specs = _all_full(specs)
        with checking("group_layers") as problems:
            kinds = sorted({type(spec).__name__ for spec in specs})
            problems.require(
                _one_group(specs, rules),
                "keep_everything",
                f"True with {kinds}",
                "False for these layers",
            )
    if merged := _merge(specs):
        return _alone((merged,) * len(specs))
    if _one_group(specs, rules):
        return _alone(specs)
    try:
        unified = unify_page_sizes(specs, rules=rules)
    except ValueError:
        full = _all_full(specs)
        latent = any(isinstance(spec, LatentAttention) for spec in specs)
        if rules != "0.23" and latent and _one_group(full, rules):
            return _alone(full)
        raise
    buckets = bucket_layers(unified)
    buckets = buckets if rules == "0.23" else _join_buckets(buckets)
    return make_groups(buckets, _group_size(buckets))


def bucket_layers(specs: Iterable[LayerSpec]) -> dict[LayerSpec, list[int]]:
    """Return the layers of each spec, in order of appearance."""
    buckets: dict[LayerSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        buckets.setdefault(spec, []).append(i)
    return buckets


def make_groups(buckets: dict[LayerSpec, list[int]], group_size: int) -> LayerGroups:
    """Return groups of at most `group_size` layers; those of a bucket are dealt round-robin."""
    groups = []
    for spec, layers in buckets.items():
        count = ceil_div(len(layers), group_size)
        for i in range(count):
            dealt = tuple(layers[i::count])
            groups.append(LayerGroup(dealt, (spec,) * len(dealt)))
    return LayerGroups(tuple(groups))


def _group_size(buckets: dict[LayerSpec, list[int]]) -> int:
    lengths = [len(layers) for layers in buckets.values()]
    low, high = min(lengths), max(lengths)
    return high if high < 1.5 * low else low


def _join_buckets(buckets: dict[LayerSpec, list[int]]) -> dict[LayerSpec, list[int]]:
    """Join buckets whose specs merge into one, as 0.32 does."""
    joined: list[tuple[LayerSpec, list[int]]] = []
    for spec, layers in buckets.items():
        for i, (other, where) in enumerate(joined):
            if merged := _merge((other, spec)):
                joined[i] = merged, sorted([*where, *layers])
                break
        else:
            joined.append((spec, layers))
    return dict(joined)


def _merge(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return one spec for all if they are equal; full layers may differ in window or chunk."""
    if len(set(specs)) == 1:
        return specs[0]
    full = [spec for spec in specs if isinstance(spec, FullAttention)]
    windows = {spec.window for spec in full if spec.window is not None}
    chunks = {spec.chunk for spec in full if spec.chunk is not None}
    plain = {dataclasses.replace(spec, window=None, chunk=None) for spec in full}
    if len(full) < len(specs) or len(plain) > 1 or len(windows) + len(chunks) > 1:
        return None
    return dataclasses.replace(
        full[0], window=max(windows, default=None), chunk=max(chunks, default=None)
    )


def _one_group(specs: Sequence[LayerSpec], rules: str) -> bool:
    """Return whether one table serves all layers: one kind, one block size, one reach.

    Pages may differ, except pages of states with "0.32".
    """
    if len({spec.block_size for spec in specs}) > 1:
        return False

    def reach(spec: LayerSpec) -> tuple[str | int, ...]:
        if isinstance(spec, SlidingWindow):
            return "sliding", spec.window
        if isinstance(spec, ChunkedLocal):
            return "chunked", spec.chunk
        if isinstance(spec, RecurrentState):
            page = spec.page_bytes if rules == "0.32" else 0
            return "state", spec.mode, spec.num_speculative_blocks, page
        return "cross" if isinstance(spec, CrossAttention) else "full", 0

    return len(set(map(reach, specs))) == 1


def _all_full(specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return sliding and chunked layers as full ones, if any layer is full."""
    if not any(isinstance(spec, (FullAttention, LatentAttention)) for spec in specs):
        return tuple(specs)
    return tuple(_as_full(spec) for spec in specs)


def _as_full(spec: LayerSpec) -> LayerSpec:
    if not isinstance(spec, (SlidingWindow, ChunkedLocal)):
        return spec
    return FullAttention(
        spec.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        spec.value_dim,
        spec.dtype,
        window=spec.window if isinstance(spec, SlidingWindow) else None,
        chunk=spec.chunk if isinstance(spec, ChunkedLocal) else None,
        padded_page_bytes=spec.padded_page_bytes,
    )


def _alone(specs: Sequence[LayerSpec]) -> LayerGroups:
    return LayerGroups((LayerGroup(tuple(range(len(specs))), tuple(specs)),))


def _check_specs(problems: Problems, specs: Sequence[object], rules: str) -> None:
    problems.require(rules in RULES, "rules", f"{rules!r}", f"one of {list(RULES)}")
    for i, spec in enumerate(specs):
        problems.require(isinstance(spec, LayerSpec), f"specs[{i}]", f"{spec!r}", "a LayerSpec")
