"""Grouping by exact pattern: fewer empty slots than vLLM's rule, at a bounded number of tables.

Groups share tensors, one layer of each group per tensor, so every group occupies as many tensors
as the largest has layers. With buckets of n_1, n_2, ... layers cut into groups of g,

    groups(g) = sum_i ceil(n_i / g),    empty(g) = groups(g) * g - sum_i n_i.

Of all g with groups(g) <= max_groups the one that leaves the fewest slots empty is chosen, and on a
tie the largest, which needs the fewest tables. 20 full and 30 sliding layers make 2 + 3 groups of
10 without empty slots, where vLLM's rule makes 1 + 2 groups of 20 with 10 empty slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jattn.blocks.planning.grouping import (
    LayerGroups,
    bucket_layers,
    make_groups,
    unify_page_sizes,
)
from jattn.blocks.planning.layer_specs import LayerSpec
from jattn.checks import checking
from jattn.integers import ceil_div, python_int, require_int


def least_padding_multiple(values: Sequence[int], at_least: int) -> int:
    """Return the d that pads `values` least when each is rounded up to a multiple of d.

    It minimizes `sum(-value % d)` over `at_least <= d <= max(values)`; on a tie it is the
    largest d. If `at_least` exceeds all values, it is `at_least`. (vLLM's `_approximate_gcd`.)
    """
    candidates = range(at_least, max(values) + 1) or (at_least,)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d))


def exact_group_size(bucket_sizes: Sequence[int], *, max_groups: int = 16) -> int:
    """Return the group size g that leaves the fewest slots empty with at most `max_groups` groups.

    Args:
      bucket_sizes: the number of layers of each kind.
      max_groups: the most groups to make, each with a block table; one per kind is always allowed.

    Returns: layers in a group; on a tie the largest.
    Raises: `ValueError` if `bucket_sizes` is empty, or for a size or `max_groups` below 1.

    >>> exact_group_size([20, 30])
    10
    """
    bucket_sizes = tuple(map(python_int, bucket_sizes))
    with checking("exact_group_size") as problems:
        problems.require(bool(bucket_sizes), "bucket_sizes", "empty", "one or more sizes")
        for i, size in enumerate(bucket_sizes):
            require_int(problems, f"bucket_sizes[{i}]", size, 1)
        require_int(problems, "max_groups", max_groups, 1)
    max_groups = max(max_groups, len(bucket_sizes))

    # The larger g, the fewer groups: the least g that respects `max_groups` bounds the search.
    least = next(
        g
        for g in range(1, max(bucket_sizes) + 1)
        if sum(ceil_div(n, g) for n in bucket_sizes) <= max_groups
    )
    return least_padding_multiple(bucket_sizes, least)


def group_layers_exactly(specs: Iterable[LayerSpec], *, max_groups: int = 16) -> LayerGroups:
    """Group layers with as few empty slots as `max_groups` block tables allow.

    Args:
      specs: one per layer, in order. Their pages are unified as in vLLM 0.32.
      max_groups: the most groups to make; one per kind of layer is always allowed.

    Returns: `LayerGroups`. If `group_layers` makes no more than `max_groups` groups, this leaves no
      more empty slots than it does.
    Raises: `ValueError` as `unify_page_sizes`, or if `max_groups` is below 1.

    >>> full, local = FullAttention(16, 8, 128), SlidingWindow(16, 8, 128, window=1024)
    >>> groups = group_layers_exactly([full, full, local, local, local] * 10)
    >>> [len(group.layers) for group in groups.groups], groups.empty_slots
    ([10, 10, 10, 10, 10], 0)
    """
    buckets = bucket_layers(unify_page_sizes(specs))
    if not buckets:
        return LayerGroups(())
    size = exact_group_size([len(layers) for layers in buckets.values()], max_groups=max_groups)
    return make_groups(buckets, size)
