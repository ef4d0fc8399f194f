"""The bytes of a block in a layer, and the blocks a sequence can need: one type per kind of layer.

    full, MLA    ceil(local(L) / S)                   L tokens at most
    sliding      ceil(local(min(W - 1 + Q, L)) / S) + 1    window W, Q tokens in a step at most
    chunked      ceil(local(min(C + Q, L)) / S)       chunks of C tokens; + 1 if they may start
                                                      inside a block of some rank
    cross        ceil(E / S)                          E encoder tokens
    state        1 + s | 2 + s | ceil(L / S) + s      modes none | align | all, s speculative tokens

where local(n) is the most that one of c context-parallel ranks keeps of n consecutive tokens
(`ContextParallel.longest_local_length`), which is n for one rank.

A page is S times the bytes of a token (`jattn.formats.token_bytes`) or the bytes of a state, unless
a layer pads it to share memory with others. Source: vLLM's `KVCacheSpec` (0.23 and 0.32).
"""

from __future__ import annotations

import abc
import dataclasses
import math

from jattn.blocks.states.layouts import MODES, StateLayout
from jattn.blocks.tables.context import ContextParallel
from jattn.checks import Problems, checking, describe
from jattn.formats.token_bytes import (
    CacheDtype,
    check_token_layout,
    kv_bytes_per_token,
    page_share_bytes,
    scale_bytes_per_block,
    with_name,
    word_bytes_per_token,
)
from jattn.integers import ceil_div, keep_python_ints, require_int, require_ints


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long sequences and steps can be.

    Attributes:
      max_model_len: L, tokens of a sequence.
      max_num_batched_tokens: Q, tokens of a step.
      max_encoder_len: E, encoder tokens of a sequence.
      context_parallel: c, ranks that the tokens of a sequence are dealt to.
      interleave: I, tokens a rank takes in one turn.

    Raises: `ValueError` for a negative `max_encoder_len`, or another field below 1.

    >>> limits = Limits(max_model_len=8192, max_num_batched_tokens=2048, context_parallel=2)
    >>> limits.local_blocks(100, block_size=16)
    4
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
        """Return the blocks for `num_tokens` consecutive tokens on the rank that keeps most."""
        context = ContextParallel(self.context_parallel, 0, self.interleave)
        return ceil_div(context.longest_local_length(num_tokens), block_size)


@dataclasses.dataclass(frozen=True)
class LayerSpec(abc.ABC):
    """The abstract base of every kind of layer, such as `FullAttention`.

    Attributes:
      block_size: S, tokens in a block.
      padded_page_bytes: bytes of a page with padding. None: no padding.

    Raises: `ValueError` for a block size below 1 or a padded page smaller than the block needs.

    >>> spec = FullAttention(16, 8, 128, padded_page_bytes=2**17)
    >>> isinstance(spec, LayerSpec), spec.page_bytes, spec.unpadded_page_bytes
    (True, 131072, 65536)
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
        """Note what is wrong with this kind's fields; return whether a page can be computed."""

    @property
    @abc.abstractmethod
    def unpadded_page_bytes(self) -> int:
        """Bytes that a block needs."""

    @abc.abstractmethod
    def max_blocks(self, limits: Limits) -> int:
        """Return the most blocks that a sequence holds at any time."""

    def row_width(self, limits: Limits) -> int:
        """Return the entries of a row for all blocks that a sequence has over its lifetime."""
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
      value_dim: V, of values. None: D.
      dtype: as `kv_bytes_per_token` takes it.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: CacheDtype = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", with_name(self.dtype))
        super().__post_init__()

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
        """The unit, in bytes, in which states take up this layer's pages."""
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
    """A layer that keeps every key of the sequence.

    Attributes:
      block_size: S, tokens in a block.
      num_kv_heads: K, on this rank.
      head_dim: D, of keys.
      value_dim: V, of values. None: D.
      dtype: as `kv_bytes_per_token` takes it.
      window, chunk: of a sliding or chunked layer that keeps every key nevertheless. None: neither.
      padded_page_bytes: bytes of a page with padding. None: no padding.

    Raises: `ValueError` for sizes below 1, a dtype that `kv_bytes_per_token` refuses, or a padded
      page smaller than the block needs.

    >>> spec = FullAttention(16, num_kv_heads=8, head_dim=128, dtype="fp8")
    >>> spec.bytes_per_token, spec.page_bytes
    (2048, 32768)
    """

    window: int | None = None
    chunk: int | None = None

    def _check(self, problems: Problems) -> bool:
        given = {"window": self.window, "chunk": self.chunk}
        require_ints(problems, 1, **{k: v for k, v in given.items() if v is not None})
        return super()._check(problems)

    def max_blocks(self, limits: Limits) -> int:
        return self.row_width(limits)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(KeysAndValues):
    """A layer that keeps only the last `window` keys, including that of the query.

    Attributes:
      window: W, tokens.
      block_size, num_kv_heads, head_dim, value_dim, dtype, padded_page_bytes: as `FullAttention`.

    Raises: `ValueError` as `FullAttention`, or if `window` is below 1.

    >>> spec = SlidingWindow(16, num_kv_heads=8, head_dim=256, window=1024)
    >>> limits = Limits(max_model_len=8192, max_num_batched_tokens=2048)
    >>> spec.max_blocks(limits), spec.row_width(limits)
    (193, 512)
    """

    window: int = dataclasses.field(kw_only=True)

    def _check(self, problems: Problems) -> bool:
        require_int(problems, "window", self.window, 1)
        return super()._check(problems)

    def max_blocks(self, limits: Limits) -> int:
        tokens = min(self.window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = limits.local_blocks(tokens, self.block_size)
        blocks += 1  # the window need not start at a block boundary
        # On one rank this is vLLM's bound, which may exceed the row by that block.
        return blocks if limits.context_parallel == 1 else min(blocks, self.row_width(limits))


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(KeysAndValues):
    """A layer that keeps only the keys of the query's chunk.

    Attributes:
      chunk: C, tokens.
      block_size, num_kv_heads, head_dim, value_dim, dtype, padded_page_bytes: as `FullAttention`.

    Raises: `ValueError` as `FullAttention`, or if `chunk` is below 1.

    >>> spec = ChunkedLocal(16, num_kv_heads=8, head_dim=128, chunk=1024)
    >>> spec.max_blocks(Limits(max_model_len=8192, max_num_batched_tokens=2048))
    192
    """

    chunk: int = dataclasses.field(kw_only=True)

    def _check(self, problems: Problems) -> bool:
        require_int(problems, "chunk", self.chunk, 1)
        return super()._check(problems)

    def max_blocks(self, limits: Limits) -> int:
        tokens = min(self.chunk + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = limits.local_blocks(tokens, self.block_size)
        # vLLM's bound holds if every chunk starts a block on every rank, so that all ranks have the
        # same number of whole blocks before it. Other chunks may start inside a block.
        whole, ranks = self.block_size, limits.context_parallel
        if ranks > 1:
            whole = ranks * math.lcm(limits.interleave, self.block_size)
        return min(blocks + bool(self.chunk % whole), self.row_width(limits))


@dataclasses.dataclass(frozen=True)
class CrossAttention(KeysAndValues):
    """A layer that keeps the encoder's keys, however long the decoder's sequence is.

    Attributes:
      block_size, num_kv_heads, head_dim, value_dim, dtype, padded_page_bytes: as `FullAttention`.

    Raises: `ValueError` as `FullAttention`.

    >>> spec = CrossAttention(16, num_kv_heads=20, head_dim=64)
    >>> spec.max_blocks(Limits(448, max_num_batched_tokens=2048, max_encoder_len=1500))
    94
    """

    def max_blocks(self, limits: Limits) -> int:
        return ceil_div(limits.max_encoder_len, self.block_size)

    def row_width(self, limits: Limits) -> int:
        """Return the entries for the longer of the two sequences, as in vLLM."""
        return max(super().row_width(limits), self.max_blocks(limits))


@dataclasses.dataclass(frozen=True)
class LatentAttention(LayerSpec):
    """A layer with MLA: one latent vector per token serves as key and value of all heads.

    Attributes:
      block_size: S, tokens in a block.
      head_dim: D, elements of the latent vector.
      dtype: as `kv_bytes_per_token` takes it with `is_mla`.
      padded_page_bytes: bytes of a page with padding. None: no padding.

    Raises: `ValueError` as `FullAttention`.

    >>> LatentAttention(64, head_dim=576).page_bytes
    73728
    """

    head_dim: int = dataclasses.field(kw_only=True)
    dtype: CacheDtype = dataclasses.field(default="bfloat16", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", with_name(self.dtype))
        super().__post_init__()

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
        """The unit, in bytes, in which states take up this layer's pages."""
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
    """A layer with a state per sequence (mode "none"), or also one per block ("align", "all").

    Attributes:
      block_size: tokens between two kept states.
      layout: the tensors of a state.
      mode: "none", "align" or "all".
      num_speculative_blocks: s, further states, for tokens that may be rolled back.
      padded_page_bytes: bytes of a page with padding. None: no padding.

    Raises: `ValueError` for an unknown mode, a size out of range, or an empty state.

    >>> layout = short_conv_state(intermediate_size=2048, conv_kernel=3, dtypes=("bfloat16",))
    >>> spec = RecurrentState(1024, layout=layout, mode="align")
    >>> spec.page_bytes, spec.max_blocks(Limits(8192, max_num_batched_tokens=2048))
    (8192, 2)
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
