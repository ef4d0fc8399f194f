"""The arguments of `paged_attention` as a record, the kind of each, and the names of its options.

Each call is taken apart once: `Arguments` holds what the caller gave, `Call` (`jattn.call.call`)
the checked static description, `Operands` the arrays.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jattn import formats
from jattn.call import arrays, caches

# The options a call may carry, by the name of their argument; rows list the ones they take.
CORE_OPTIONS = (
    "not_causal",
    "is_causal_per_sequence",
    "sliding_window",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
    "k_scale",
    "v_scale",
    "return_lse",
)
MASK_OPTIONS = (
    "attention_chunk_size",
    "visible_end",
    "tree_mask",
    "selected_blocks",
    "relative_bias",
)
OPTIONS = (*CORE_OPTIONS, *MASK_OPTIONS, "sinks_per_token", "value_dim")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a keyword argument: unless static, it is an array whose values are dynamic.

    Attributes:
      dtype: the dtype of its operand; None if it is static.
      number: whether it may be a Python number, which becomes an array.
      positive: whether the number must be above 0.
      query_heads: which axis counts query heads, from the end; 0 for none.
      per_kv_head: whether an array with one axis has a number for every KV head.
    """

    dtype: type[np.generic] | None = None
    _: dataclasses.KW_ONLY
    number: bool = False
    positive: bool = False
    query_heads: int = 0
    per_kv_head: bool = False

    @property
    def static(self) -> bool:
        """Whether it is never an array: a new value may compile."""
        return self.dtype is None

    @property
    def scalar(self) -> bool:
        """Whether it is one number."""
        return self.number and not self.per_kv_head


STATIC = Kind()
FLOAT = Kind(np.float32, number=True)
POSITIVE = Kind(np.float32, number=True, positive=True)
COUNT = Kind(np.int32, number=True, positive=True)
SCALE = Kind(np.float32, number=True, per_kv_head=True)
INTEGERS = Kind(np.int32)
PER_HEAD = Kind(np.float32, query_heads=1)

# Every keyword argument of `paged_attention`. Checks, operands, guards and shardings follow.
KINDS = {
    "block_tables": INTEGERS,
    "seq_lens": INTEGERS,
    "query_start_loc": INTEGERS,
    "max_query_len": STATIC,
    "scale": FLOAT,
    "is_causal": Kind(np.bool_),  # a Python bool is static
    "sliding_window": COUNT,
    "logits_soft_cap": POSITIVE,
    "sinks": PER_HEAD,
    "alibi_slopes": PER_HEAD,
    "relative_bias": Kind(np.float32, query_heads=2),
    "attention_chunk_size": COUNT,
    "visible_end": INTEGERS,
    "tree_mask": Kind(np.uint32),
    "selected_blocks": INTEGERS,
    "value_dim": STATIC,
    "k_scale": SCALE,
    "v_scale": SCALE,
    "kv_layout": STATIC,
    "out_dtype": STATIC,
    "return_lse": STATIC,
    "implementation": STATIC,
}

Array = jax.Array | np.ndarray
# For `jattn.explain`, which computes nothing.
ArrayOrStruct = Array | jax.ShapeDtypeStruct
# Scalars of Python and NumPy, and 0-d arrays; `k_scale` and `v_scale` may be [K].
Number = float | np.floating[typing.Any] | np.integer[typing.Any] | Array
Integer = int | np.integer[typing.Any] | Array
A = typing.TypeVar("A", bound=ArrayOrStruct, covariant=True)


class Batch(typing.TypedDict, typing.Generic[A], total=False):
    """The keyword arguments that describe a batch, from `AttentionMetadata.as_kwargs`."""

    block_tables: typing.Required[A]
    seq_lens: typing.Required[A]
    query_start_loc: A | None
    max_query_len: int | None


class _Options(typing.TypedDict, typing.Generic[A], total=False):
    scale: Number | A | None
    is_causal: bool | A
    logits_soft_cap: Number | A | None
    sinks: A | None
    value_dim: int | None
    k_scale: Number | A | None
    v_scale: Number | A | None
    kv_layout: str | None
    out_dtype: DTypeLike | None
    implementation: str | Sequence[str] | None


class Options(_Options[A], typing.Generic[A], total=False):
    """Keyword arguments of `paged_attention`, except the batch and `return_lse`."""

    sliding_window: Integer | A | None
    alibi_slopes: A | None
    relative_bias: A | None
    attention_chunk_size: Integer | A | None
    visible_end: A | None
    tree_mask: A | None
    selected_blocks: A | None


class CallOptions(Options[A], Batch[A], typing.Generic[A]):
    """Keyword arguments of `paged_attention`, except `return_lse`."""


class CascadeOptions(_Options[A], Batch[A], typing.Generic[A]):
    """The options of `cascade_attention`: those independent of key positions."""


@dataclasses.dataclass(frozen=True)
class Arguments(typing.Generic[A]):
    """The arguments of one call of `paged_attention`, which documents them, as given."""

    query: A
    key_cache: formats.Cache | jax.ShapeDtypeStruct
    value_cache: formats.Cache | jax.ShapeDtypeStruct | None
    _: dataclasses.KW_ONLY
    block_tables: A
    seq_lens: A
    query_start_loc: A | None = None
    max_query_len: int | None = None
    scale: Number | A | None = None
    is_causal: bool | A = True
    sliding_window: Integer | A | None = None
    logits_soft_cap: Number | A | None = None
    sinks: A | None = None
    alibi_slopes: A | None = None
    relative_bias: A | None = None
    attention_chunk_size: Integer | A | None = None
    visible_end: A | None = None
    tree_mask: A | None = None
    selected_blocks: A | None = None
    value_dim: int | None = None
    k_scale: Number | A | None = None
    v_scale: Number | A | None = None
    kv_layout: str | None = None
    out_dtype: DTypeLike | None = None
    return_lse: bool = False
    implementation: str | Sequence[str] | None = None

    @classmethod
    def of(cls, where: str, **given: typing.Any) -> Arguments[A]:
        """Make a record of the arguments of `where`, whose name is in the message of an error.

        Raises:
          TypeError: an argument is unknown or missing.
        """
        try:
            return cls(**given)
        except TypeError as error:
            message = str(error).replace("Arguments.__init__", where)
            raise TypeError(message) from None

    @property
    def static_causal(self) -> bool | None:
        """`is_causal` if it is a bool; None if an array says so per sequence."""
        return bool(self.is_causal) if arrays.is_bool(self.is_causal) else None

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the first numbers of keys."""
        if isinstance(self.key_cache, formats.KVRows):
            return self.key_cache.values_in_keys
        return self.value_cache is None

    @property
    def options(self) -> frozenset[str]:
        """Which of `OPTIONS` the call carries, a cache's own scales included."""
        sinks, causal = arrays.shape_of(self.sinks), self.static_causal
        k_scale, v_scale = (
            given is not None or caches.stored_scale(cache) is not None
            for given, cache in ((self.k_scale, self.key_cache), (self.v_scale, self.value_cache))
        )
        present = {name: getattr(self, name) is not None for name in OPTIONS if name in KINDS}
        present |= {
            "not_causal": causal is False,
            "is_causal_per_sequence": causal is None,
            "sinks": self.sinks is not None and len(sinks) == 1,
            "sinks_per_token": self.sinks is not None and len(sinks) == 2,
            "k_scale": k_scale,
            # Values that are part of the keys have the keys' scale.
            "v_scale": k_scale if self.values_in_keys else v_scale,
            "return_lse": self.return_lse,
        }
        return frozenset(name for name in OPTIONS if present[name])
