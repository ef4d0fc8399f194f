"""vLLM's hybrid page alignment as a pure function, exact to the byte.

One pool of bytes serves both attention blocks and recurrent states, so both need pages of one
size. With t bytes per token, S bytes per state, and the granularity a (the smallest block that the
attention backend takes and the user allows), the block grows until a state fits its page:

    block = a * ceil(S / (a t))                       modes "none" and "align"
    block = round_up(ceil(S / t), lcm(chunk, a))      mode "all"
    page  = block * t,    padding = page - S per state

In mode "none" a sequence has one state. "align" keeps a state per block to resume from, so the
state block is the attention block. "all" also keeps one per block, at multiples of the kernel's
chunk. `jattn.blocks.planning.plans` has plans that need no such growth.

Typed arrays cannot share bytes, so this is for caches exchanged with vLLM, and for comparison.
Source: `Platform.update_block_size_for_backend` of vLLM 0.23 and 0.32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jattn.blocks.planning.kernel_sizes import (
    Backends,
    KernelSizes,
    common_block_size,
    named_backends,
    preferred_block_size,
    select_kernel_block_size,
    smallest_size,
    takes,
)
from jattn.blocks.states.layouts import MODES
from jattn.checks import checking
from jattn.integers import ceil_div, require_int, require_ints, round_up, with_python_ints

RULES = ("0.23", "0.32")


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request and its outcome.

    Attributes:
      who: "user", "state", "mode", or a backend.
      what: the request, in words.
      outcome: "" if it was granted, otherwise the replacement and the reason.

    >>> aligned = align_hybrid_block_size(
    ...     bytes_per_token=4096, state_bytes=2146304, kernel_sizes={"flash": [MultipleOf(16)]},
    ...     max_model_len=32768, block_size=16)
    >>> aligned.asks[0]
    Ask(who='user', what='block_size=16', outcome='528, so that a state fits the page')
    """

    who: str
    what: str
    outcome: str = ""


@dataclasses.dataclass(frozen=True)
class HybridAlignment:
    """Aligned sizes and the requests behind them. Printing one explains it.

    Attributes:
      block_size: tokens in an attention block.
      kernel_block_size: tokens a kernel reads at a time; divides `block_size`.
      state_block_size: tokens between two kept states.
      page_bytes: bytes of a page, for attention blocks and states.
      state_bytes: bytes of a state without padding.
      padding_bytes: `page_bytes - state_bytes`, or 0 without states.
      asks: the requests that led to these sizes.

    >>> nemotron = align_hybrid_block_size(
    ...     bytes_per_token=1024, state_bytes=1085440, kernel_sizes={"flash": [MultipleOf(16)]},
    ...     max_model_len=32768)
    >>> nemotron.block_size, nemotron.page_bytes, round(nemotron.padding_percent, 2)
    (1072, 1097728, 1.12)
    """

    block_size: int
    kernel_block_size: int
    state_block_size: int
    page_bytes: int
    state_bytes: int
    asks: tuple[Ask, ...]

    @property
    def padding_bytes(self) -> int:
        return self.page_bytes - self.state_bytes if self.state_bytes else 0

    @property
    def padding_percent(self) -> float:
        """Padding in percent of the page: the share of a state's memory that is wasted."""
        return 100.0 * self.padding_bytes / self.page_bytes

    @property
    def padding_percent_of_state(self) -> float:
        """Padding in percent of the state, as vLLM logs it."""
        return 100.0 * self.padding_bytes / self.state_bytes if self.state_bytes else 0.0

    @property
    def overridden(self) -> tuple[Ask, ...]:
        """The user's requests that were not met."""
        return tuple(ask for ask in self.asks if ask.who == "user" and ask.outcome)

    def __str__(self) -> str:
        asks = "".join(
            f"\n  {ask.who}: {ask.what}" + (f" -> {ask.outcome}" if ask.outcome else "")
            for ask in self.asks
        )
        return (
            f"block {self.block_size} tokens, kernel block {self.kernel_block_size}, "
            f"state block {self.state_block_size}, page {self.page_bytes} bytes, "
            f"padding {self.padding_bytes} bytes per state ({self.padding_percent:.2f} % of the "
            f"page, {self.padding_percent_of_state:.2f} % of the state){asks}"
        )


@with_python_ints
def align_hybrid_block_size(
    *,
    bytes_per_token: int,
    state_bytes: int,
    kernel_sizes: Backends,
    max_model_len: int,
    mode: str = "none",
    block_size: int | None = None,
    state_block_size: int | None = None,
    chunk_size: int = 2048,
    is_mla: bool = False,
    default_block_size: int = 16,
    unsplit_backends: tuple[str, ...] = (),
    rules: str = "0.32",
) -> HybridAlignment:
    """Choose the block size at which an attention page holds a state, as vLLM does.

    Args:
      bytes_per_token: t, of one attention layer (`kv_bytes_per_token`).
      state_bytes: S, of one recurrent layer (`StateLayout.nbytes`); 0 for none.
      kernel_sizes: for each attention backend, the kernel blocks it takes.
      max_model_len: tokens a sequence may have; the state block of mode "none".
      mode: "none", "align" or "all".
      block_size: the user's block size, or None.
      state_block_size: the user's state block size, or None.
      chunk_size: tokens in a chunk of the recurrent kernel (mode "all").
      is_mla: whether the cache is for MLA, whose blocks 0.32 keeps at 128 tokens or more.
      default_block_size: the platform's preference: 16 on GPU, 128 on CPU.
      unsplit_backends: backends that cannot cut an aligned block into kernel blocks: it must be one
        of the sizes they take.
      rules: "0.23" follows the first backend only, "0.32" all of them. vLLM 0.32 dropped mode
        "all"; here it uses 0.23's formula, rounded up to what all backends take.

    Returns: `HybridAlignment`. Its `overridden` lists the user's values that were replaced.
    Raises: `ValueError` for wrong arguments, and where vLLM fails, now or later: if the resulting
      block cannot be cut into a kernel block, naming every backend and what it takes.

    >>> qwen = align_hybrid_block_size(  # Qwen3.5-9B
    ...     bytes_per_token=4096, state_bytes=2146304, kernel_sizes={"flash": [MultipleOf(16)]},
    ...     max_model_len=32768)
    >>> qwen.block_size, qwen.padding_bytes
    (528, 16384)
    """
    with checking("align_hybrid_block_size") as problems:
        require_ints(problems, 1, bytes_per_token=bytes_per_token, max_model_len=max_model_len)
        require_int(problems, "state_bytes", state_bytes, 0)
        require_ints(problems, 1, chunk_size=chunk_size, default_block_size=default_block_size)
        asked = {"block_size": block_size, "state_block_size": state_block_size}
        require_ints(problems, 1, **{k: v for k, v in asked.items() if v is not None})
        problems.require(mode in MODES, "mode", f"{mode!r}", f"one of {list(MODES)}")
        problems.require(rules in RULES, "rules", f"{rules!r}", f"one of {list(RULES)}")
        backends = named_backends(problems, "kernel_sizes", kernel_sizes)
        problems.require(bool(backends), "kernel_sizes", "empty", "one entry per backend")
        unknown = sorted(set(unsplit_backends) - set(backends))
        problems.require(
            not unknown, "unsplit_backends", f"{unknown}", f"among the backends, {[*backends]}"
        )

    first = next(iter(backends.values()))
    if block_size is not None:
        block = block_size
    elif rules == "0.23":
        block = preferred_block_size(first, default_block_size)
    else:
        block = common_block_size("kernel_sizes", backends, default_block_size, as_vllm=True)

    granularity = max(smallest_size(first), block)
    if is_mla and rules == "0.32":
        granularity = max(granularity, 128)
    step = math.lcm(state_block_size or chunk_size, granularity) if mode == "all" else granularity
    needed = round_up(ceil_div(state_bytes, bytes_per_token), step)
    if rules == "0.32":
        needed = round_up(needed, math.lcm(*map(smallest_size, backends.values())))
    aligned = max(block, needed) if state_bytes else block

    kept = state_block_size or (max_model_len if mode == "none" else block)
    if state_bytes and mode == "align":
        kept = aligned
    elif state_bytes and mode == "all":
        kept = needed

    if aligned != block:
        _refuse_unsplit(aligned, backends, unsplit_backends)
    return HybridAlignment(
        block_size=aligned,
        kernel_block_size=select_kernel_block_size(aligned, backends),
        state_block_size=kept,
        page_bytes=aligned * bytes_per_token,
        state_bytes=state_bytes,
        asks=(
            *_user_asks(block_size, aligned, state_block_size, kept, mode),
            *(Ask(name, f"kernel blocks of {list(sizes)}") for name, sizes in backends.items()),
            Ask(
                "state",
                f"{state_bytes} bytes, as much as {ceil_div(state_bytes, bytes_per_token)} tokens "
                f"of {bytes_per_token} bytes",
            ),
            Ask("mode", _mode_in_words(mode, state_block_size, chunk_size)),
        ),
    )


def _user_asks(
    block_size: int | None, aligned: int, state_block_size: int | None, kept: int, mode: str
) -> Iterator[Ask]:
    if block_size is not None:
        grown = f"{aligned}, so that a state fits the page" if aligned != block_size else ""
        yield Ask("user", f"block_size={block_size}", grown)
    if state_block_size is not None:
        moved = f"{kept}, the mode {mode!r} decides" if kept != state_block_size else ""
        yield Ask("user", f"state_block_size={state_block_size}", moved)


def _mode_in_words(mode: str, state_block_size: int | None, chunk_size: int) -> str:
    if mode == "none":
        return "none: one state per sequence"
    if mode == "align":
        return "align: a state per attention block"
    return f"all: a state at multiples of {state_block_size or chunk_size} tokens"


def _refuse_unsplit(
    block_size: int, backends: Mapping[str, KernelSizes], unsplit_backends: tuple[str, ...]
) -> None:
    with checking("align_hybrid_block_size") as problems:
        for name in unsplit_backends:
            problems.require(
                takes(backends[name], block_size),
                "block_size",
                f"{block_size} after alignment",
                f"one of {list(backends[name])}, all that {name} takes",
            )
