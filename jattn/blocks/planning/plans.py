"""Plans for caching a hybrid model: how states and attention blocks share memory.

vLLM gives a state and an attention block pages of one size, which makes blocks of hundreds of
tokens. With t bytes per token and layer, S bytes per state and layer, and blocks of b tokens, which
have pages of b t bytes, a plan says how m states are stored in n pages, m S <= n b t:

    two pools         states in separate slots: nothing padded, the smallest block   (the default)
    one per page      m = n = 1: vLLM's alignment
    several per page  n = 1, m = b t // S
    over pages        m = 1, n = ceil(S / (b t)): small blocks stay small
    several over several    the least padding with n <= max_pages

A plan is a value that knows its padding, the ids that find a state, and the prefix granularity. Its
cost is the memory that a sequence holds beyond its need, as a share of that need,

    cost = mean over the given lengths of  held(length) / ideal(length) - 1,
    ideal = A length t + M s k S,
    held  = A ceil(length / b) b t + the bytes of the states as the plan stores them,

with A attention layers, M recurrent layers, s states per sequence and layer, and k = 1. With prefix
caching k = 1 + length // P: the current state, and one every P tokens to resume from.

Pages of formats with scales hold states only in their words, w <= t bytes per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jattn.blocks.planning.align import align_hybrid_block_size
from jattn.blocks.planning.kernel_sizes import (
    Backends,
    MultipleOf,
    common_block_size,
    named_backends,
    select_kernel_block_size,
)
from jattn.blocks.planning.layer_specs import (
    KeysAndValues,
    LatentAttention,
    LayerSpec,
    RecurrentState,
)
from jattn.checks import Problems, checking
from jattn.integers import (
    ceil_div,
    keep_python_ints,
    max_blocks,
    python_int,
    require_int,
    require_ints,
    round_up,
    with_python_ints,
)

LENGTHS = (256, 1024, 4096, 32768)
PLATFORM_BLOCKS = {"gpu": 16, "cpu": 128}


@dataclasses.dataclass(frozen=True)
class HybridModel:
    """The sizes of a model that a plan needs. All fields are integers, per tensor-parallel rank.

    Attributes:
      attention_layers: A, layers with keys and values.
      state_layers: M, layers with a recurrent state.
      bytes_per_token: t, of one attention layer (`kv_bytes_per_token`).
      state_bytes: S, of one recurrent layer (`StateLayout.nbytes`).
      states_per_sequence: s, states a sequence keeps per layer: 1, and one per speculative token.
      is_mla: whether attention is MLA, whose blocks vLLM keeps at 128 tokens or more.
      word_bytes_per_token: w, the part of `bytes_per_token` without scales and zero points. None:
        all of it.
      scale_bytes_per_block: bytes of the scales that a whole block of a layer shares.
      page_share_bytes: u, a state in pages takes a multiple of u bytes: 1, or what `PagePool`
        needs for whole words of keys and values in their ratio.

    `HybridModel.from_specs` derives all of them from the layers.

    Raises: `ValueError` for a count or size out of range, or `word_bytes_per_token` above
      `bytes_per_token`.

    >>> nemotron = HybridModel(attention_layers=6, state_layers=23, bytes_per_token=1024,
    ...                        state_bytes=1085440)
    >>> nemotron.ideal_bytes(4096)
    50130944
    """

    attention_layers: int
    state_layers: int
    bytes_per_token: int
    state_bytes: int
    states_per_sequence: int = 1
    is_mla: bool = False
    word_bytes_per_token: int | None = None
    scale_bytes_per_block: int = 0
    page_share_bytes: int = 1

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking("HybridModel") as problems:
            counted = ("attention_layers", "state_layers", "bytes_per_token", "state_bytes")
            for name in (*counted, "states_per_sequence"):
                require_int(problems, name, getattr(self, name), 1)
            require_int(problems, "scale_bytes_per_block", self.scale_bytes_per_block, 0)
            require_int(problems, "page_share_bytes", self.page_share_bytes, 1)
            words = self.word_bytes_per_token
            if words is not None and require_int(problems, "word_bytes_per_token", words, 1):
                problems.require(
                    words <= self.bytes_per_token,
                    "word_bytes_per_token",
                    f"{words}",
                    f"at most {self.bytes_per_token}, bytes_per_token",
                )

    @classmethod
    def from_specs(cls, specs: Iterable[LayerSpec]) -> HybridModel:
        """Return the model of these layers; all attention layers must be alike, and all states.

        Raises: `ValueError` if attention layers or states differ in their bytes, or if there are
          none of one kind.

        >>> import jattn
        >>> import jattn.blocks as jb
        >>> state = jb.RecurrentState(2048, layout=jb.StateLayout(((8, 64),), ("float32",)))
        >>> attention = jb.FullAttention(16, 2, 64, dtype=jattn.Int4())
        >>> model = jb.HybridModel.from_specs([state, state, attention])
        >>> model.bytes_per_token, model.word_bytes_per_token, model.state_bytes
        (144, 128, 2048)
        """
        states, attention = [], []
        for spec in specs:
            if isinstance(spec, RecurrentState):
                states.append((spec.layout.nbytes, 1 + spec.num_speculative_blocks))
            elif isinstance(spec, (KeysAndValues, LatentAttention)):
                sizes = (spec.bytes_per_token, spec.word_bytes_per_token)
                is_mla = isinstance(spec, LatentAttention)
                shares = (spec.scale_bytes_per_block, spec.page_share_bytes)
                attention.append((*sizes, *shares, is_mla))
        with checking("HybridModel.from_specs") as problems:
            for kind, found in (("attention", attention), ("recurrent", states)):
                problems.require(
                    len(set(found)) == 1,
                    "specs",
                    f"{kind} layers of {len(set(found))} kinds" if found else f"0 {kind} layers",
                    "one or more layers, all of one size in bytes",
                )
        (per_token, words, scales, share, is_mla), (state_bytes, count) = attention[0], states[0]
        layers = (len(attention), len(states))
        return cls(*layers, per_token, state_bytes, count, is_mla, words, scales, share)

    @property
    def token_word_bytes(self) -> int:
        """w, bytes of a token that a state may occupy."""
        return self.word_bytes_per_token or self.bytes_per_token

    @property
    def paged_state_bytes(self) -> int:
        """Bytes that a state takes in pages: S, rounded up to a multiple of u."""
        return round_up(self.state_bytes, self.page_share_bytes)

    @property
    def states(self) -> int:
        """States of one sequence, over all layers."""
        return self.state_layers * self.states_per_sequence

    def ideal_bytes(self, length: int, state_block_size: int | None = None) -> int:
        """Return the bytes that `length` tokens need, with a state per `state_block_size`."""
        tokens = self.attention_layers * length * self.bytes_per_token
        kept = 1 + (length // state_block_size if state_block_size else 0)
        return tokens + kept * self.states * self.state_bytes


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """The sizes of a pool of blocks and a pool of state slots. Printing one explains it.

    Attributes:
      num_blocks: blocks, each with a page in every attention layer.
      num_slots: slots, each with a state in every recurrent layer.
      block_size: tokens in a block.
      num_bytes: bytes of both pools.
      longest: tokens that every sequence may have at the same time.

    >>> nemotron = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    >>> plan = two_pools(nemotron, {"flash": [MultipleOf(16)]})
    >>> sizes = plan.pool_sizes(2**32, max_num_seqs=64, max_model_len=4096)
    >>> print(sizes)  # doctest: +ELLIPSIS
    27437 blocks of 16 tokens and 64 state slots in ... bytes: 6848 tokens in every sequence at once
    """

    num_blocks: int
    num_slots: int
    block_size: int
    num_bytes: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens and {self.num_slots} state "
            f"slots in {self.num_bytes} bytes: {self.longest} tokens in every sequence at once"
        )


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How attention blocks and states are stored in memory. Printing one explains it.

    Attributes:
      name: the kind of plan.
      model: the model it is for.
      block_size: b, tokens in an attention block.
      kernel_block_size: tokens a kernel reads at a time; divides `block_size`.
      states: m, states that are stored together.
      pages: n, the pages they are stored in; 0 for separate slots.
      why: one sentence.
      state_block_size: P, tokens between two states that a prefix can be resumed from. None: no
        states are kept for that.

    Raises: `ValueError` if `kernel_block_size` does not divide `block_size`, if the states do not
      fit in their pages, or if `state_block_size` is below 1.

    >>> nemotron = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    >>> plan = pages_per_state(nemotron, {"flash": [MultipleOf(16)]})
    >>> plan.states, plan.pages, plan.padding_bytes, plan.ids_per_state
    (1, 67, 12288, 67)
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
            used = self.states * self.model.paged_state_bytes
            problems.require(
                self.pages == 0 or used <= self.pages * self.page_word_bytes,
                "states",
                f"{self.states} states of {self.model.paged_state_bytes} bytes in {self.pages} "
                f"pages of {self.page_word_bytes} bytes",
                "no more than fit",
            )
            if self.state_block_size is not None:
                require_int(problems, "state_block_size", self.state_block_size, 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of an attention block in one layer."""
        return self.block_size * self.model.bytes_per_token + self.model.scale_bytes_per_block

    @property
    def page_word_bytes(self) -> int:
        """Bytes of a page that states may occupy: its words, without scales and zero points."""
        return self.block_size * self.model.token_word_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes that `states` states leave unused in `pages` pages."""
        used = self.states * self.model.state_bytes
        return self.pages * self.page_bytes - used if self.pages else 0

    @property
    def padding_percent(self) -> float:
        """Padding in percent of those pages."""
        return 100.0 * self.padding_bytes / (self.pages * self.page_bytes) if self.pages else 0.0

    @property
    def ids_per_state(self) -> int:
        """Ids that find one state: those of all pages it may touch, or of its slot."""
        if self.pages == 0:
            return 1
        size, page = self.model.paged_state_bytes, self.page_word_bytes
        starts = (i * size for i in range(self.states))
        return max(ceil_div(start + size, page) - start // page for start in starts)

    @property
    def prefix_granularity(self) -> int:
        """Tokens by which a shared prefix can grow, in keys, values and kept states."""
        return math.lcm(self.block_size, self.state_block_size or 1)

    def states_held(self, length: int) -> int:
        """Return the states of a sequence of `length` tokens: current, and kept to resume from."""
        kept = 1 + (length // self.state_block_size if self.state_block_size else 0)
        return kept * self.model.states

    def state_bytes_held(self, length: int = 0) -> int:
        """Return the bytes that a sequence's states hold; sequences share no group of pages."""
        if self.pages == 0:
            return self.states_held(length) * self.model.state_bytes
        return ceil_div(self.states_held(length), self.states) * self.pages * self.page_bytes

    @with_python_ints
    def held_bytes(self, length: int) -> int:
        """Return the bytes that a sequence of `length` tokens holds."""
        blocks = ceil_div(length, self.block_size)
        pages = self.model.attention_layers * blocks * self.page_bytes
        return pages + self.state_bytes_held(length)

    def cost(
        self, lengths: Iterable[int] = LENGTHS, *, state_block_size: int | None = None
    ) -> float:
        """Return the mean over `lengths` of held / ideal - 1.

        The ideal has a state per `state_block_size` (None: that of the plan).

        Raises: `ValueError` if there are no lengths, or for a size below 1.
        """
        lengths = tuple(map(python_int, lengths))
        with checking(f"CachePlan {self.name!r}.cost") as problems:
            require_lengths(problems, "lengths", lengths)
            if state_block_size is not None:
                require_int(problems, "state_block_size", state_block_size, 1)
        wanted = state_block_size or self.state_block_size
        overhead = (self.held_bytes(n) / self.model.ideal_bytes(n, wanted) - 1 for n in lengths)
        return sum(overhead) / len(lengths)

    @with_python_ints
    def pool_sizes(self, memory_bytes: int, *, max_num_seqs: int, max_model_len: int) -> PoolSizes:
        """Return the blocks and state slots for a number of sequences, of the plan "two pools".

        There are as many slots as `max_num_seqs` sequences of `max_model_len` tokens hold; with
        prefix caching this includes those to resume from. Blocks take the rest of the memory.

        Raises: `ValueError` for another plan, for memory below the slots and one block, or if the
          slots of the blocks do not fit int32.

        >>> model = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
        >>> plan = two_pools(model, {"flash": [MultipleOf(16)]})
        >>> sizes = plan.pool_sizes(2**32, max_num_seqs=64, max_model_len=4096)
        >>> sizes.num_blocks, sizes.num_slots, sizes.longest
        (27437, 64, 6848)
        """
        model, where = self.model, f"CachePlan {self.name!r}.pool_sizes"
        with checking(where) as problems:
            require_ints(problems, 1, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
            require_int(problems, "memory_bytes", memory_bytes, 1)
            problems.require(self.pages == 0, "plan", f"{self.name!r}", "'two pools'")
        slots = max_num_seqs * self.states_held(max_model_len) // model.state_layers
        slot_bytes = slots * model.state_layers * model.state_bytes
        block_bytes = model.attention_layers * self.page_bytes
        with checking(where) as problems:
            problems.require(
                memory_bytes >= slot_bytes + block_bytes,
                "memory_bytes",
                f"{memory_bytes}",
                f"at least {slot_bytes + block_bytes}, for one block and {slots} state slots",
            )
        blocks = (memory_bytes - slot_bytes) // block_bytes
        self._check_slots(memory_bytes, blocks)
        used = slot_bytes + blocks * block_bytes
        longest = blocks // max_num_seqs * self.block_size
        return PoolSizes(blocks, slots, self.block_size, used, longest)

    @with_python_ints
    def num_blocks(self, memory_bytes: int) -> int:
        """Return the blocks per layer that fit in `memory_bytes` if all of it is blocks.

        Raises: `ValueError` if their slots, `num_blocks * block_size`, do not fit int32.
        """
        blocks = memory_bytes // (self.model.attention_layers * self.page_bytes)
        self._check_slots(memory_bytes, blocks)
        return blocks

    def _check_slots(self, memory_bytes: int, blocks: int) -> None:
        most = max_blocks(self.block_size)
        with checking(f"CachePlan {self.name!r}") as problems:
            problems.require(
                blocks <= most,
                "memory_bytes",
                f"{memory_bytes} bytes make {blocks} blocks of {self.block_size} tokens, "
                f"{blocks * self.block_size} slots",
                f"at most {most} blocks, since slots are int32",
            )

    def __str__(self) -> str:
        return table([self])


@with_python_ints
def two_pools(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int = 16,
    state_block_size: int | None = None,
) -> CachePlan:
    """Return the plan with states in separate slots, and the smallest block all backends read.

    Args:
      model: layers and bytes.
      kernel_sizes: for each attention backend, the kernel blocks it takes.
      block_size: the block to take if all backends can read it.
      state_block_size: with prefix caching, tokens between two states to resume from, rounded up
        to whole blocks. None: no prefix caching.

    Returns: `CachePlan`.
    Raises: `ValueError` if the backends share no block size, or for a size below 1.

    >>> model = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    >>> plan = two_pools(model, {"flash": [MultipleOf(16)]}, state_block_size=1000)
    >>> plan.block_size, plan.state_block_size, plan.padding_bytes
    (16, 1008, 0)
    """
    named, block = _common_block("two_pools", kernel_sizes, block_size)
    why = f"every state has a slot, whatever the block size; backends read blocks of {block}"
    return _plan("two pools", model, named, block, 1, 0, why, state_block_size)


@with_python_ints
def one_state_per_page(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int | None = None,
    mode: str = "none",
    chunk_size: int = 2048,
    platform: str = "gpu",
) -> CachePlan:
    """Return vLLM's plan: the block grows until a page holds a state.

    Args:
      model: layers and bytes.
      kernel_sizes: for each attention backend, the kernel blocks it takes.
      block_size: the block to start from. None: 16 tokens on "gpu", 128 on "cpu", as in vLLM.
      mode: "none"; with prefix caching "align", a state per block, or "all".
      chunk_size: tokens in a chunk of the recurrent kernel (mode "all").
      platform: "gpu" or "cpu".

    Returns: `CachePlan`.
    Raises: `ValueError` for an unknown platform, and as `align_hybrid_block_size`.

    >>> model = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    >>> plan = one_state_per_page(model, {"flash": [MultipleOf(16)]})
    >>> plan.block_size, plan.padding_bytes
    (1072, 12288)
    """
    with checking("one_state_per_page") as problems:
        named = named_backends(problems, "kernel_sizes", kernel_sizes)
        problems.require(
            platform in PLATFORM_BLOCKS,
            "platform",
            f"{platform!r}",
            f"one of {[*PLATFORM_BLOCKS]}",
        )
    found = align_hybrid_block_size(
        bytes_per_token=model.token_word_bytes,
        state_bytes=model.paged_state_bytes,
        kernel_sizes=named,
        max_model_len=1,  # for the state block of mode "none", which no plan keeps
        mode=mode,
        block_size=block_size,
        chunk_size=chunk_size,
        is_mla=model.is_mla,
        default_block_size=PLATFORM_BLOCKS[platform],
    )
    why = f"vLLM's: a state of {model.state_bytes} bytes needs {found.block_size} tokens' page"
    kept = None if mode == "none" else found.state_block_size
    return _plan("one per page", model, named, found.block_size, 1, 1, why, kept)


@with_python_ints
def states_per_page(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int = 16,
    state_block_size: int | None = None,
) -> CachePlan | None:
    """Return the plan with as many states of a sequence in a page as fit.

    Args:
      model, kernel_sizes, block_size, state_block_size: as `two_pools`.

    Returns: `CachePlan`, or None if a page is smaller than a state.
    Raises: `ValueError` as `two_pools`.

    >>> lfm2 = HybridModel(6, 10, bytes_per_token=2048, state_bytes=8192)
    >>> plan = states_per_page(lfm2, {"flash": [MultipleOf(16)]})
    >>> plan.states, plan.pages, plan.padding_bytes
    (4, 1, 0)
    """
    named, block = _common_block("states_per_page", kernel_sizes, block_size)
    fit = min(block * model.token_word_bytes // model.paged_state_bytes, model.states)
    if fit == 0:
        return None
    why = f"a page of {block} tokens holds {fit} state(s)"
    return _plan("several per page", model, named, block, fit, 1, why, state_block_size)


@with_python_ints
def pages_per_state(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int = 16,
    state_block_size: int | None = None,
) -> CachePlan:
    """Return the plan with a state over as many pages as it needs, and the smallest blocks.

    Args:
      model, kernel_sizes, block_size, state_block_size: as `two_pools`.

    Returns: `CachePlan`.
    Raises: `ValueError` as `two_pools`.

    >>> model = HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    >>> plan = pages_per_state(model, {"flash": [MultipleOf(16)]})
    >>> plan.block_size, plan.pages, plan.padding_bytes
    (16, 67, 12288)
    """
    named, block = _common_block("pages_per_state", kernel_sizes, block_size)
    pages = ceil_div(model.paged_state_bytes, block * model.token_word_bytes)
    why = f"a state is {pages} page(s) of {block} tokens"
    return _plan("over pages", model, named, block, 1, pages, why, state_block_size)


@with_python_ints
def states_in_pages(
    model: HybridModel,
    kernel_sizes: Backends,
    *,
    block_size: int = 16,
    max_pages: int = 16,
    max_padding_percent: float = 0.0,
    state_block_size: int | None = None,
) -> CachePlan | None:
    """Return the plan with m states in n <= `max_pages` pages that pads least.

    States that are stored together belong to one sequence, so m is at most `model.states`.

    Args:
      model, kernel_sizes, block_size, state_block_size: as `two_pools`.
      max_pages: the most pages that states may be stored together in.
      max_padding_percent: if some n pads no more than this, take the smallest such n.

    Returns: `CachePlan`, or None if no state fits in `max_pages` pages.
    Raises: `ValueError` if `max_pages` is below 1, and as `two_pools`.

    >>> model = HybridModel(6, 23, bytes_per_token=1024, state_bytes=20480)
    >>> plan = states_in_pages(model, {"flash": [MultipleOf(16)]})
    >>> plan.states, plan.pages, plan.padding_bytes
    (4, 5, 0)
    """
    with checking("states_in_pages") as problems:
        require_int(problems, "max_pages", max_pages, 1)
    named, block = _common_block("states_in_pages", kernel_sizes, block_size)
    page = block * model.token_word_bytes
    found = []
    for pages in range(1, max_pages + 1):
        states = min(pages * page // model.paged_state_bytes, model.states)
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
    return _plan("several over several", model, named, block, states, pages, why, state_block_size)


def require_lengths(problems: Problems, argument: str, lengths: Sequence[object]) -> None:
    """Note a problem unless there are lengths, all of them positive integers."""
    problems.require(bool(lengths), argument, "empty", "one or more integers")
    for i, length in enumerate(lengths):
        require_int(problems, f"{argument}[{i}]", length, 1)


def table(
    plans: Sequence[CachePlan],
    lengths: Sequence[int] = LENGTHS,
    chosen: CachePlan | None = None,
    state_block_size: int | None = None,
) -> str:
    """Return the plans as lines of a table."""
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
                f"{100 * plan.cost(lengths, state_block_size=state_block_size):.1f} %",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _common_block(
    where: str, kernel_sizes: Backends, block_size: int
) -> tuple[dict[str, tuple[int | MultipleOf, ...]], int]:
    """Return the backends by name, and a block that all of them can read."""
    with checking(where) as problems:
        named = named_backends(problems, "kernel_sizes", kernel_sizes)
        require_int(problems, "block_size", block_size, 1)
    return named, common_block_size("kernel_sizes", named, block_size)


def _plan(
    name: str,
    model: HybridModel,
    kernel_sizes: Backends,
    block: int,
    states: int,
    pages: int,
    why: str,
    state_block_size: int | None,
) -> CachePlan:
    kernel = select_kernel_block_size(block, kernel_sizes)
    kept = None if state_block_size is None else round_up(state_block_size, block)
    return CachePlan(name, model, block, kernel, states, pages, why, kept)
