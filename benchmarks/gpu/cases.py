"""Calls of jattn's GPU kernels to compile, for `benchmarks.gpu.report` and the tests.

A `Case` is one call's static description; `Case.function()` gives `(fn, arguments)` with
`jax.ShapeDtypeStruct`s, through the public function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from jattn import call as calls
from jattn import formats
from jattn.pallas.capability_rows import TRITON

struct = jax.ShapeDtypeStruct
FORMATS = {format.name: format for format in formats.ALL}
_VALUE_DIMS = {192: 128, 576: 512}  # V if it is not D: MLA
HEADS = tuple((d, _VALUE_DIMS.get(d, d)) for d in TRITON.head_dims.tested)
OPTIONS = (
    *("not_causal", "is_causal_per_sequence", "sliding_window", "logits_soft_cap", "sinks"),
    *("alibi_slopes", "k_scale", "v_scale", "return_lse"),
)
MASKS = ("visible_end", "tree_mask", "selected_blocks", "relative_bias", "sinks_per_token")
DRAFTED = ("tree_mask", "sliding_window", "relative_bias", "sinks_per_token")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to compile.

    Attributes:
      head: D and V.
      kind: "decode" (one token a sequence), "speculative" (up to 4), "mixed", or "extend" (two
        sequences with 32 new tokens between them: too few for prefill).
      query_dtype, format: names.
      options: names as in `OPTIONS`.
      block_size, kv_layout, plain: of the cache; `plain` for a float array. The layout "rows" is a
        `jattn.KVRows`, as in vLLM and sglang-jax: keys and values side by side, or with one KV head
        and V < D a latent, whose first numbers are the values.
      heads: H and K.
      tree_words: W of `tree_mask`, if there is one; each word covers 32 query tokens.
      num_blocks: N; 2**20 by default, so that every pool passes 2**31 elements.
      implementation: as in `jattn.paged_attention`.
    """

    head: tuple[int, int] = (512, 512)
    kind: str = "decode"
    query_dtype: str = "bfloat16"
    format: str = "bfloat16"
    options: tuple[str, ...] = ()
    block_size: int = 16
    kv_layout: str = "HND"
    plain: bool = False
    heads: tuple[int, int] = (32, 4)
    tree_words: int = 2
    num_blocks: int = 2**20
    implementation: str = "triton"

    @property
    def label(self) -> str:
        """A label like `triton-head512-decode-bfloat16-fp8_e4m3-block16-HND-sinks`."""
        d, v = self.head
        size = f"head{d}" if d == v else f"head{d}v{v}"
        options = "+".join(self.options) or "causal"
        if len(self.options) > 2:
            options = "drafted" if "tree_mask" in self.options else "everything"
        return "-".join(
            (
                *(self.implementation, size, self.kind, self.query_dtype, self.format),
                *(f"block{self.block_size}", self.kv_layout, f"group{self.group}", options),
            )
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads[0] // self.heads[1]

    def function(self) -> tuple[Callable, tuple[Any, ...]]:
        """Return `(fn, arguments)` to lower."""
        d, v = self.head
        num_heads, kv_heads = self.heads
        format = FORMATS[self.format]
        num_seqs, num_tokens = {
            "decode": (16, 16),
            "speculative": (16, 64),
            "mixed": (9, 1000),
            "extend": (2, 32),
        }[self.kind]

        def cache(dim: int) -> Any:
            inner = (kv_heads, self.block_size)
            if self.kv_layout == "NHD":
                inner = inner[::-1]
            if self.plain:
                return struct((self.num_blocks, *inner, dim), format.value_dtype)
            shape = (self.num_blocks, *inner, dim // format.values_per_word)
            per = format.quant_param_shapes(shape, self.kv_layout)
            scale, zero = (x and struct(x, jnp.float32) for x in (per.scale, per.zero))
            groups = per.group_scale and struct(per.group_scale, jnp.uint8)
            words = struct(shape, format.word_dtype)
            return jattn.KVArray(words, scale, format, zero, groups, self.kv_layout)

        def rows() -> jattn.KVRows:
            pool, dtype = (self.num_blocks, self.block_size), format.value_dtype
            if d == v:
                return jattn.KVRows.pairs(struct((*pool, kv_heads, 2, d), dtype))
            width = -(-d // 128) * 128
            return jattn.KVRows(struct((*pool, width), dtype), kv_heads, d, width, 0, v)

        joined = self.kv_layout == formats.ROWS_LAYOUT
        given = {
            "query": struct((num_tokens, num_heads, d), jnp.dtype(self.query_dtype)),
            "key_cache": rows() if joined else cache(d),
            "value_cache": None if joined else cache(v),
            "block_tables": struct((num_seqs, 512), jnp.int32),
            "seq_lens": struct((num_seqs,), jnp.int32),
        }
        if self.kind != "decode":
            given["query_start_loc"] = struct((num_seqs + 1,), jnp.int32)
        arrays = {
            "is_causal_per_sequence": ("is_causal", struct((num_seqs,), jnp.bool_)),
            "sliding_window": ("sliding_window", struct((), jnp.int32)),
            "attention_chunk_size": ("attention_chunk_size", struct((), jnp.int32)),
            "logits_soft_cap": ("logits_soft_cap", struct((), jnp.float32)),
            "sinks": ("sinks", struct((num_heads,), jnp.float32)),
            "alibi_slopes": ("alibi_slopes", struct((num_heads,), jnp.float32)),
            "k_scale": ("k_scale", struct((kv_heads,), jnp.float32)),
            "v_scale": ("v_scale", struct((kv_heads,), jnp.float32)),
            "visible_end": ("visible_end", struct((num_tokens,), jnp.int32)),
            "tree_mask": ("tree_mask", struct((num_tokens, self.tree_words), jnp.uint32)),
            "selected_blocks": ("selected_blocks", struct((num_seqs, 64), jnp.int32)),
            "relative_bias": ("relative_bias", struct((num_heads, 2 * 128 + 1), jnp.float32)),
            "sinks_per_token": ("sinks", struct((num_tokens, num_heads), jnp.float32)),
        }
        given |= dict(arrays[option] for option in self.options if option in arrays)
        static = self.static()
        return lambda given: jattn.paged_attention(**given, **static), (given,)

    def static(self) -> dict[str, Any]:
        """Return the arguments that are not arrays."""
        return {
            "kv_layout": None if self.kv_layout == formats.ROWS_LAYOUT else self.kv_layout,
            "return_lse": "return_lse" in self.options,
            "max_query_len": 4 if self.kind == "speculative" else None,
            "implementation": self.implementation,
            **({"is_causal": False} if "not_causal" in self.options else {}),
        }

    def call(self) -> calls.Call:
        """Return the call as dispatch sees it."""
        _, (given,) = self.function()
        return described({**given, **self.static()})


def described(given: dict[str, Any]) -> calls.Call:
    """Return the static description of `jattn.paged_attention(**given)`."""
    return calls.describe_call(calls.Arguments(**given))


EVERYTHING = tuple(option for option in OPTIONS if option != "not_causal")


def cases() -> list[tuple[str, Callable, tuple]]:
    """Return the cases of `python -m benchmarks.gpu.report`: every head size, decode and mixed."""
    chosen = [Case(head, kind) for head in HEADS for kind in ("decode", "mixed")]
    return [(case.label, *case.function()) for case in chosen]
