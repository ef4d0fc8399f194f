"""Grouping by exact pattern: fewer empty slots than vLLM's rule, at a bounded number of tables.

Groups share tensors, one layer of each group per tensor, so every group occupies as many tensors
as the largest has layers. With buckets of n_1, n_2, ... layers cut into groups of g,

    groups(g) = sum_i ceil(n_i / g),    empty(g) = groups(g) * g - sum_i n_i.

Of all g with groups(g) <= max_groups the one that leaves the fewest slots empty is taken; of equals
the largest, which needs the fewest tables. 20 full and 30 sliding layers make 2 + 3 groups of 10
without a gap, where vLLM's rule makes 1 + 2 groups of 20 with 10 gaps.
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
    """The d that pads `values` least when each is rounded up to a multiple of d.

    `sum(-value % d)` is least, over `at_least <= d <= max(values)`; of equals the largest d.
    `at_least` itself if it exceeds all values. (vLLM's `_approximate_gcd`.)
    """
    candidates = range(at_least, max(values) + 1) or (at_least,)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d))


def exact_group_size(bucket_sizes: Sequence[int], *, max_groups: int = 16) -> int:
    """The g that leaves the fewest slots empty with at most `max_groups` groups.

    Args:
      bucket_sizes: how many layers there are of each kind.
      max_groups: the most block tables to keep; as many as kinds are always allowed.

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

    # Larger groups are fewer: the least g that keeps to `max_groups` bounds the search.
    least = next(
        g
        for g in range(1, max(bucket_sizes) + 1)
        if sum(ceil_div(n, g) for n in bucket_sizes) <= max_groups
    )
    return least_padding_multiple(bucket_sizes, least)


def group_layers_exactly(specs: Iterable[LayerSpec], *, max_groups: int = 16) -> LayerGroups:
    """Group layers with as few empty slots as `max_groups` block tables allow.

    Args:
      specs: one per layer, in order. Pages are unified as by vLLM 0.32.
      max_groups: the most groups to make.

    Returns: `LayerGroups`, with no more empty slots than `group_layers` leaves if it makes no
      more than `max_groups` groups.
    Raises: `ValueError` as `unify_page_sizes`.
    """
    buckets = bucket_layers(unify_page_sizes(specs))
    if not buckets:
        return LayerGroups(())
    size = exact_group_size([len(layers) for layers in buckets.values()], max_groups=max_groups)
    return make_groups(buckets, size)
