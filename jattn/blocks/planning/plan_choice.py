"""Comparing all plans for a hybrid model and choosing the cheapest, with the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jattn.blocks.planning.kernel_sizes import Backends, named_backends
from jattn.blocks.planning.plans import (
    LENGTHS,
    CachePlan,
    HybridModel,
    one_state_per_page,
    pages_per_state,
    require_lengths,
    states_in_pages,
    states_per_page,
    table,
    two_pools,
)
from jattn.checks import checking
from jattn.integers import python_int, require_int, require_ints, with_python_ints


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """The chosen plan, and all plans that were compared. Printing one explains it.

    Attributes:
      plan: the chosen plan.
      considered: every plan, cheapest first.
      lengths: the sequence lengths that the cost averages over.
      why: one sentence.
      state_block_size: with prefix caching, the requested number of tokens between two kept states.
        None: no prefix caching.

    >>> lfm2 = HybridModel(attention_layers=6, state_layers=10, bytes_per_token=2048,
    ...                    state_bytes=8192)
    >>> choice = plan_hybrid_cache(lfm2, {"flash": [MultipleOf(16)]}, one_pool=True)
    >>> [plan.name for plan in choice.considered]
    ['several per page', 'several over several', 'over pages', 'one per page']
    """

    plan: CachePlan
    considered: tuple[CachePlan, ...]
    lengths: tuple[int, ...]
    why: str
    state_block_size: int | None = None

    def __str__(self) -> str:
        plans = table(self.considered, self.lengths, self.plan, self.state_block_size)
        return f"{plans}\nchosen: {self.why}"


@with_python_ints
def plan_hybrid_cache(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    one_pool: bool = False,
    lengths: Iterable[int] = LENGTHS,
    memory_bytes: int | None = None,
    block_sizes: Iterable[int] = (16,),
    max_pages: int = 16,
    state_block_size: int | None = None,
    platform: str = "gpu",
) -> CacheChoice:
    """Compare all plans for a model and choose the cheapest.

    The cost is the mean waste of a sequence over `lengths` (`jattn.blocks.planning.plans`). On a
    tie, fewer ids per state win, then the finer prefix granularity. Two pools waste least, but
    split the memory between blocks and states once and for all; `one_pool` excludes them.

    Args:
      model: layers and bytes.
      kernel_sizes: for each attention backend, the kernel blocks it takes. Every plan's block can
        be cut into a kernel block that all backends take.
      one_pool: choose only among plans whose pages serve both blocks and states.
      lengths: sequence lengths that the cost averages over.
      memory_bytes: bytes for the cache, or None. Plans whose slots would not fit int32 are
        excluded.
      block_sizes: the block sizes to try, where a plan may choose.
      max_pages: the most pages that states may be stored together in.
      state_block_size: with prefix caching, tokens between two states to resume a prefix from. The
        cost then includes their memory; vLLM's plan keeps one per block. None: no prefix caching.
      platform: "gpu" or "cpu", which sets the block size that vLLM's plan starts from.

    Returns: `CacheChoice`.
    Raises: `ValueError` for wrong arguments, or if no plan is left, with the reason for each.

    >>> lfm2 = HybridModel(attention_layers=6, state_layers=10, bytes_per_token=2048,
    ...                    state_bytes=8192)
    >>> choice = plan_hybrid_cache(lfm2, {"flash": [MultipleOf(16)]}, one_pool=True)
    >>> choice.plan.states, choice.plan.pages, choice.plan.padding_percent
    (4, 1, 0.0)
    """
    lengths, block_sizes = (tuple(map(python_int, x)) for x in (lengths, block_sizes))
    with checking("plan_hybrid_cache") as problems:
        named = named_backends(problems, "kernel_sizes", kernel_sizes)
        problems.require(bool(named), "kernel_sizes", "empty", "one entry per backend")
        for name, values in (("lengths", lengths), ("block_sizes", block_sizes)):
            require_lengths(problems, name, values)
        require_int(problems, "max_pages", max_pages, 1)
        limits = {"memory_bytes": memory_bytes, "state_block_size": state_block_size}
        require_ints(problems, 1, **{k: v for k, v in limits.items() if v is not None})

    plans: list[CachePlan] = []
    refusals: list[str] = []

    def consider(make: Callable[..., CachePlan | None], **arguments: Any) -> None:
        try:
            plan = make(model, named, **arguments)
            if plan is not None and memory_bytes is not None:
                plan.num_blocks(memory_bytes)
        except ValueError as error:
            refusals.append(f"{make.__name__}: {error}")
        else:
            if plan is not None and plan not in plans:
                plans.append(plan)

    for block in block_sizes:
        sizes = {"block_size": block, "state_block_size": state_block_size}
        if not one_pool:
            consider(two_pools, **sizes)
        consider(states_per_page, **sizes)
        consider(pages_per_state, **sizes)
        consider(states_in_pages, max_pages=max_pages, **sizes)
    consider(
        one_state_per_page,
        mode="none" if state_block_size is None else "align",
        platform=platform,
    )
    if not plans:
        raise ValueError("plan_hybrid_cache: no plan is possible\n" + "\n".join(refusals))

    def rank(plan: CachePlan) -> tuple[float, int, int]:
        cost = plan.cost(lengths, state_block_size=state_block_size)
        return cost, plan.ids_per_state, plan.prefix_granularity

    plans.sort(key=rank)
    best = plans[0]
    why = (
        f"{best.name}, {best.why}; a sequence wastes {100 * rank(best)[0]:.1f} % on average "
        f"over {', '.join(map(str, lengths))} tokens"
    )
    return CacheChoice(best, tuple(plans), lengths, why, state_block_size)
