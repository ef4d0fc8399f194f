"""Plans for caching a hybrid model: how states and attention blocks share memory.

vLLM gives a state and an attention block pages of one size, which makes blocks of hundreds of
tokens. With t bytes per token and layer, S bytes per state and layer, and blocks of b tokens, so
pages of b t bytes, a plan says how m states lie in n pages, m S <= n b t:

    two pools         states in separate slots: nothing padded, the smallest block   (the default)
    one per page      m = n = 1: vLLM's alignment
    several per page  n = 1, m = b t // S
    over pages        m = 1, n = ceil(S / (b t)): small blocks stay small
    several over several    the least padding with n <= max_pages

Every plan is a value: its padding, the ids that find a state, the prefix granularity. The cost of a
plan is the memory a sequence holds beyond its need, as a share of that need,

    cost = mean over the given lengths of  held(length) / ideal(length) - 1,
    ideal = A length t + M s S,
    held  = A ceil(length / b) b t + the states' bytes as the plan lays them,

with A attention layers, M recurrent layers, and s states per sequence and layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jattn.blocks.planning.align import align_hybrid_block_size
from jattn.blocks.planning.kernel_sizes import (
    Backends,
    preferred_common_block_size,
    select_kernel_block_size,
)
from jattn.checks import checking
from jattn.integers import INT32_MAX, ceil_div, require_int

LENGTHS = (256, 1024, 4096, 32768)


@dataclasses.dataclass(frozen=True)
class HybridModel:
    """What a plan must know of a model. All fields are integers, per tensor-parallel rank.

    Attributes:
      attention_layers: A, layers with keys and values.
      state_layers: M, layers with a recurrent state.
      bytes_per_token: t, of one attention layer (`kv_bytes_per_token`).
      state_bytes: S, of one recurrent layer (`StateLayout.nbytes`).
      states_per_sequence: s, states a sequence keeps per layer: 1, and one per speculative token.
    """

    attention_layers: int
    state_layers: int
    bytes_per_token: int
    state_bytes: int
    states_per_sequence: int = 1

    def __post_init__(self) -> None:
        with checking("HybridModel") as problems:
            for field in dataclasses.fields(self):
                require_int(problems, field.name, getattr(self, field.name), 1)

    @property
    def states(self) -> int:
        """States of one sequence, in all layers."""
        return self.state_layers * self.states_per_sequence

    def ideal_bytes(self, length: int) -> int:
        """What a sequence of `length` tokens needs without any waste."""
        tokens = self.attention_layers * length * self.bytes_per_token
        return tokens + self.states * self.state_bytes


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How attention blocks and states lie in memory. Printing one explains it.

    Attributes:
      name: the kind of plan.
      model: the model it is for.
      block_size: b, tokens in an attention block.
      kernel_block_size: tokens a kernel reads at a time; divides `block_size`.
      states: m, states that lie together.
      pages: n, the pages they lie in; 0 for separate slots.
      state_block_size: tokens between two states that a prefix can be resumed from, or None if
        the plan leaves that free.
      why: one sentence.
    """

    name: str
    model: HybridModel
    block_size: int
    kernel_block_size: int
    states: int
    pages: int
    why: str
    state_block_size: int | None = None

    def __post_init__(self) -> None:
        with checking(f"CachePlan {self.name!r}") as problems:
            problems.require(
                self.block_size % self.kernel_block_size == 0,
                "kernel_block_size",
                f"{self.kernel_block_size}",
                f"a divisor of block_size={self.block_size}",
            )
            problems.require(
                self.padding_bytes >= 0,
                "states",
                f"{self.states} states of {self.model.state_bytes} bytes in {self.pages} pages of "
                f"{self.page_bytes} bytes",
                "no more than fit",
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of an attention block in one layer."""
        return self.block_size * self.model.bytes_per_token

    @property
    def padding_bytes(self) -> int:
        """Bytes that the states of `pages` pages leave unused."""
        used = self.states * self.model.state_bytes
        return self.pages * self.page_bytes - used if self.pages else 0

    @property
    def padding_percent(self) -> float:
        """Padding in percent of those pages."""
        return 100.0 * self.padding_bytes / (self.pages * self.page_bytes) if self.pages else 0.0

    @property
    def ids_per_state(self) -> int:
        """Ids that find one state: the pages it may touch, or its one slot."""
        if self.pages == 0:
            return 1
        size, page = self.model.state_bytes, self.page_bytes
        starts = (i * size for i in range(self.states))
        return max(ceil_div(start + size, page) - start // page for start in starts)

    @property
    def prefix_granularity(self) -> int:
        """Tokens by which a shared prefix of keys and values can grow."""
        return self.block_size

    def state_bytes_held(self) -> int:
        """Bytes that the states of one sequence hold, groups of pages not shared."""
        if self.pages == 0:
            return self.model.states * self.model.state_bytes
        return ceil_div(self.model.states, self.states) * self.pages * self.page_bytes

    def held_bytes(self, length: int) -> int:
        """What a sequence of `length` tokens holds."""
        blocks = ceil_div(length, self.block_size)
        return self.model.attention_layers * blocks * self.page_bytes + self.state_bytes_held()

    def cost(self, lengths: Sequence[int] = LENGTHS) -> float:
        """Mean over `lengths` of held / ideal - 1."""
        overhead = (self.held_bytes(n) / self.model.ideal_bytes(n) - 1 for n in lengths)
        return sum(overhead) / len(lengths)

    def num_blocks(self, memory_bytes: int) -> int:
        """Blocks per layer that fit `memory_bytes` if all of it were blocks.

        Raises: `ValueError` if their slots, `num_blocks * block_size`, do not fit int32.
        """
        blocks = memory_bytes // (self.model.attention_layers * self.page_bytes)
        most = INT32_MAX // self.block_size
        with checking(f"CachePlan {self.name!r}") as problems:
            problems.require(
                blocks <= most,
                "memory_bytes",
                f"{memory_bytes} bytes make {blocks} blocks of {self.block_size} tokens, "
                f"{blocks * self.block_size} slots",
                f"at most {most} blocks, since slots are int32",
            )
        return blocks

    def __str__(self) -> str:
        return table([self])


def two_pools(model: HybridModel, kernel_sizes: Backends, *, block_size: int = 16) -> CachePlan:
    """States in separate slots, and the smallest block that every backend reads."""
    block = preferred_common_block_size(kernel_sizes, block_size)
    why = f"a state is a slot, whatever the block; backends read blocks of {block}"
    return _plan("two pools", model, kernel_sizes, block, 1, 0, why)


def one_state_per_page(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    max_model_len: int = max(LENGTHS),
    block_size: int | None = None,
    mode: str = "none",
    chunk_size: int = 2048,
) -> CachePlan:
    """vLLM's alignment: the block grows until a page holds a state."""
    found = align_hybrid_block_size(
        bytes_per_token=model.bytes_per_token,
        state_bytes=model.state_bytes,
        kernel_sizes=kernel_sizes,
        max_model_len=max_model_len,
        mode=mode,
        block_size=block_size,
        chunk_size=chunk_size,
    )
    why = f"vLLM's: a state of {model.state_bytes} bytes needs {found.block_size} tokens' page"
    return dataclasses.replace(
        _plan("one per page", model, kernel_sizes, found.block_size, 1, 1, why),
        state_block_size=None if mode == "none" else found.state_block_size,
    )


def states_per_page(
    model: HybridModel, kernel_sizes: Backends, *, block_size: int = 16
) -> CachePlan | None:
    """As many states in a page as it holds; None if it holds not even one."""
    block = preferred_common_block_size(kernel_sizes, block_size)
    fit = block * model.bytes_per_token // model.state_bytes
    if fit == 0:
        return None
    why = f"a page of {block} tokens holds {fit} state(s)"
    return _plan("several per page", model, kernel_sizes, block, fit, 1, why)


def pages_per_state(
    model: HybridModel, kernel_sizes: Backends, *, block_size: int = 16
) -> CachePlan:
    """A state over as many pages as it needs, with blocks as small as kernels like them."""
    block = preferred_common_block_size(kernel_sizes, block_size)
    pages = ceil_div(model.state_bytes, block * model.bytes_per_token)
    why = f"a state is {pages} page(s) of {block} tokens"
    return _plan("over pages", model, kernel_sizes, block, 1, pages, why)


def states_in_pages(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int = 16,
    max_pages: int = 16,
    max_padding_percent: float = 0.0,
) -> CachePlan | None:
    """The m states in n <= `max_pages` pages that pad least; None if no state fits.

    States that lie together are of one sequence, so m is at most `model.states`.

    Args:
      max_padding_percent: take the fewest pages that pad no more than this, if any do.
    """
    block = preferred_common_block_size(kernel_sizes, block_size)
    page = block * model.bytes_per_token
    found = []
    for pages in range(1, max_pages + 1):
        states = min(pages * page // model.state_bytes, model.states)
        if states:
            padding = 1 - states * model.state_bytes / (pages * page)
            enough = 100 * padding <= max_padding_percent
            found.append((not enough, 0.0 if enough else padding, pages, states))
    if not found:
        return None
    _, _, pages, states = min(found)
    common = math.gcd(pages, states)
    pages, states = pages // common, states // common
    why = f"{states} state(s) fill {pages} page(s) best, of at most {max_pages}"
    return _plan("several over several", model, kernel_sizes, block, states, pages, why)


def table(
    plans: Sequence[CachePlan],
    lengths: Sequence[int] = LENGTHS,
    chosen: CachePlan | None = None,
) -> str:
    """The plans as lines of a table."""
    head = ("plan", "block", "kernel", "states:pages", "padding", "% of page", "ids/state", "cost")
    rows = [head]
    for plan in plans:
        share = f"{plan.states}:{plan.pages}" if plan.pages else "slots"
        rows.append(
            (
                plan.name + (" *" if plan == chosen else ""),
                str(plan.block_size),
                str(plan.kernel_block_size),
                share,
                f"{plan.padding_bytes} B",
                f"{plan.padding_percent:.1f}",
                str(plan.ids_per_state),
                f"{100 * plan.cost(lengths):.1f} %",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _plan(
    name: str,
    model: HybridModel,
    kernel_sizes: Backends,
    block: int,
    states: int,
    pages: int,
    why: str,
) -> CachePlan:
    kernel = select_kernel_block_size(block, kernel_sizes)
    return CachePlan(name, model, block, kernel, states, pages, why)
