"""The bytes a layer keeps per block, and the blocks a sequence can need: a type per kind of layer.

    full, MLA    ceil(local(L) / S)                   L tokens at most
    sliding      ceil(local(min(W - 1 + Q, L)) / S) + 1    window W, Q tokens in a step at most
    chunked      ceil(local(min(C + Q, L)) / S)       chunks of C tokens
    cross        ceil(E / S)                          E encoder tokens
    state        1 + s | 2 + s | ceil(L / S) + s      modes none | align | all, s speculative tokens

where local(n) is the most of n neighbouring tokens that one of c context-parallel ranks holds
(`ContextParallel.longest_local_length`); n itself without ranks.

Pages are S times the bytes of a token (`jattn.formats.token_bytes`) or the bytes of a state, unless
a layer pads them to share memory with others. Source: vLLM's `KVCacheSpec` (0.23 and 0.32).
"""

from __future__ import annotations

import abc
import dataclasses

from jattn.blocks.states.layouts import MODES, StateLayout
from jattn.blocks.tables.context import ContextParallel
from jattn.checks import Problems, checking, describe
from jattn.formats.token_bytes import (
    CacheDtype,
    check_token_layout,
    kv_bytes_per_token,
    page_share_bytes,
    scale_bytes_per_block,
    word_bytes_per_token,
)
from jattn.integers import ceil_div, keep_python_ints, require_int


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long sequences and steps can be.

    Attributes:
      max_model_len: L, tokens of a sequence.
      max_num_batched_tokens: Q, tokens of a step.
      max_encoder_len: E, encoder tokens of a sequence.
      context_parallel: c, ranks that the tokens of a sequence are dealt to.
      interleave: I, tokens a rank takes in one turn.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_encoder_len: int = 0
    context_parallel: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking("Limits") as problems:
            for field in dataclasses.fields(self):
                least = 0 if field.name == "max_encoder_len" else 1
                require_int(problems, field.name, getattr(self, field.name), least)

    def local_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks for `num_tokens` neighbouring tokens on the rank that holds most of them."""
        context = ContextParallel(self.context_parallel, 0, self.interleave)
        return ceil_div(context.longest_local_length(num_tokens), block_size)


@dataclasses.dataclass(frozen=True)
class LayerSpec(abc.ABC):
    """The base of every kind of layer. Make one of the kinds below.

    Attributes:
      block_size: S, tokens in a block.
      padded_page_bytes: bytes of a page with padding; None: without any.
    """

    block_size: int
    padded_page_bytes: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking(type(self).__name__) as problems:
            sized = require_int(problems, "block_size", self.block_size, 1)
            if self._check(problems) and sized and self.padded_page_bytes is not None:
                least = self.unpadded_page_bytes
                require_int(problems, "padded_page_bytes", self.padded_page_bytes, least)

    @abc.abstractmethod
    def _check(self, problems: Problems) -> bool:
        """Note what is wrong with the fields of this kind; whether a page can be computed."""

    @property
    @abc.abstractmethod
    def unpadded_page_bytes(self) -> int:
        """Bytes that a block really needs."""

    @abc.abstractmethod
    def max_blocks(self, limits: Limits) -> int:
        """The most blocks that a sequence holds at any time."""

    def row_width(self, limits: Limits) -> int:
        """Entries its block table needs for all blocks it may ever have had."""
        return limits.local_blocks(limits.max_model_len, self.block_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in this layer."""
        return self.padded_page_bytes or self.unpadded_page_bytes


@dataclasses.dataclass(frozen=True)
class KeysAndValues(LayerSpec):
    """Layers whose blocks hold keys and values of tokens.

    Attributes:
      num_kv_heads: K, on this rank.
      head_dim: D, of keys.
      value_dim: V, of values; None: D.
      dtype: as `kv_bytes_per_token` takes it.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: CacheDtype = "bfloat16"

    def _check(self, problems: Problems) -> bool:
        return check_token_layout(
            problems, self.num_kv_heads, self.head_dim, self.value_dim, self.dtype, False
        )

    @property
    def bytes_per_token(self) -> int:
        """t, bytes of a token."""
        return kv_bytes_per_token(
            self.num_kv_heads, self.head_dim, value_dim=self.value_dim, dtype=self.dtype
        )

    @property
    def word_bytes_per_token(self) -> int:
        """Bytes of a token without scales and zero points."""
        return word_bytes_per_token(self.num_kv_heads, self.head_dim, self.value_dim, self.dtype)

    @property
    def page_share_bytes(self) -> int:
        """Bytes of which states in this layer's pages take a whole number."""
        return page_share_bytes(self.num_kv_heads, self.head_dim, self.value_dim, self.dtype)

    @property
    def scale_bytes_per_block(self) -> int:
        """Bytes of the scales that a whole block shares."""
        return scale_bytes_per_block(self.num_kv_heads, self.dtype)

    @property
    def unpadded_page_bytes(self) -> int:
        return self.block_size * self.bytes_per_token + self.scale_bytes_per_block


@dataclasses.dataclass(frozen=True)
class FullAttention(KeysAndValues):
    """Every key of the sequence is kept.

    Attributes:
      window, chunk: of a sliding or chunked layer that keeps everything nevertheless.
    """

    window: int | None = None
    chunk: int | None = None

    def max_blocks(self, limits: Limits) -> int:
        return self.row_width(limits)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(KeysAndValues):
    """Only the last `window` keys, that of the query included, are kept."""

    window: int = dataclasses.field(kw_only=True)

    def _check(self, problems: Problems) -> bool:
        require_int(problems, "window", self.window, 1)
        return super()._check(problems)

    def max_blocks(self, limits: Limits) -> int:
        tokens = min(self.window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = limits.local_blocks(tokens, self.block_size)
        blocks += 1  # the window need not start at a block
        # On one rank this is vLLM's bound, which may exceed the row by that block.
        return blocks if limits.context_parallel == 1 else min(blocks, self.row_width(limits))


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(KeysAndValues):
    """Only the keys of the query's chunk are kept."""

    chunk: int = dataclasses.field(kw_only=True)

    def _check(self, problems: Problems) -> bool:
        require_int(problems, "chunk", self.chunk, 1)
        return super()._check(problems)

    def max_blocks(self, limits: Limits) -> int:
        tokens = min(self.chunk + limits.max_num_batched_tokens, limits.max_model_len)
        # vLLM's bound, for chunks of whole blocks; others need not start at a block.
        blocks = limits.local_blocks(tokens, self.block_size) + bool(self.chunk % self.block_size)
        return min(blocks, limits.local_blocks(limits.max_model_len, self.block_size))


@dataclasses.dataclass(frozen=True)
class CrossAttention(KeysAndValues):
    """The encoder's keys are kept, however long the decoder's sequence is."""

    def max_blocks(self, limits: Limits) -> int:
        return ceil_div(limits.max_encoder_len, self.block_size)

    def row_width(self, limits: Limits) -> int:
        """Entries for the longer of both sequences, as vLLM's tables have."""
        return max(super().row_width(limits), self.max_blocks(limits))


@dataclasses.dataclass(frozen=True)
class LatentAttention(LayerSpec):
    """MLA: one latent vector of `head_dim` elements per token, for keys and values at once."""

    head_dim: int = dataclasses.field(kw_only=True)
    dtype: CacheDtype = dataclasses.field(default="bfloat16", kw_only=True)

    def _check(self, problems: Problems) -> bool:
        return check_token_layout(problems, 1, self.head_dim, None, self.dtype, True)

    @property
    def bytes_per_token(self) -> int:
        """t, bytes of a token."""
        return kv_bytes_per_token(1, self.head_dim, dtype=self.dtype, is_mla=True)

    @property
    def word_bytes_per_token(self) -> int:
        """Bytes of a token without scales and zero points."""
        return word_bytes_per_token(1, self.head_dim, None, self.dtype, is_mla=True)

    @property
    def page_share_bytes(self) -> int:
        """Bytes of which states in this layer's pages take a whole number."""
        return page_share_bytes(1, self.head_dim, None, self.dtype, is_mla=True)

    @property
    def scale_bytes_per_block(self) -> int:
        """Bytes of the scales that a whole block shares."""
        return scale_bytes_per_block(1, self.dtype, is_mla=True)

    @property
    def unpadded_page_bytes(self) -> int:
        return self.block_size * self.bytes_per_token + self.scale_bytes_per_block

    def max_blocks(self, limits: Limits) -> int:
        return self.row_width(limits)


@dataclasses.dataclass(frozen=True)
class RecurrentState(LayerSpec):
    """A state per sequence (mode "none"), or one per block as well ("align", "all").

    Attributes:
      layout: the tensors of a state.
      mode: "none", "align" or "all".
      num_speculative_blocks: s, further states, for tokens that may be rolled back.
    """

    layout: StateLayout = dataclasses.field(kw_only=True)
    mode: str = dataclasses.field(default="none", kw_only=True)
    num_speculative_blocks: int = dataclasses.field(default=0, kw_only=True)

    def _check(self, problems: Problems) -> bool:
        problems.require(self.mode in MODES, "mode", f"{self.mode!r}", f"one of {list(MODES)}")
        require_int(problems, "num_speculative_blocks", self.num_speculative_blocks, 0)
        layout = problems.require(
            isinstance(self.layout, StateLayout), "layout", describe(self.layout), "a StateLayout"
        )
        return layout and problems.require(
            self.layout.nbytes > 0, "layout", f"{self.layout}", "a state of one byte or more"
        )

    @property
    def unpadded_page_bytes(self) -> int:
        return self.layout.nbytes

    def max_blocks(self, limits: Limits) -> int:
        blocks = ceil_div(limits.max_model_len, self.block_size)
        states = {"none": 1, "align": 2, "all": blocks}[self.mode]
        return states + self.num_speculative_blocks

    def row_width(self, limits: Limits) -> int:
        blocks = ceil_div(limits.max_model_len, self.block_size)
        return (1 if self.mode == "none" else blocks) + self.num_speculative_blocks
