"""Run unmodified transformers models on jattn: its attention, over scattered pages.

    from examples import transformers_bridge

    transformers_bridge.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="jattn")

Each attention call copies its keys and values into pages of a pool in shuffled order, NaN in every
slot that no token owns, and asks `jattn.paged_attention`. That is no way to serve (an engine keeps
the pages), but a strong way to check: whatever a model family does around attention, its logits
must come out as with transformers' own.

Nothing is approximated in silence. The mask that transformers built for the layer is compared with
what jattn would show each query; options that jattn has no word for are refused. Both raise
`jattn.UnsupportedError`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import jattn
from jattn import spec

# Keyword arguments that models pass along and that do not change what attention computes.
HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "is_causal",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


def register(name: str = "jattn", **options: Any) -> None:
    """Make `attn_implementation=name` mean jattn. `options` are the fields of `Bridge`."""
    AttentionInterface.register(name, Bridge(**options))
    AttentionMaskInterface.register(name, bool_mask)


def bool_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Who sees whom, bool [B, 1, Tq, Tk]: never left out, so that it can be checked."""
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(*args, **options)


@dataclasses.dataclass(frozen=True)
class Bridge:
    """An attention function as transformers calls it.

    Attributes:
      block_size: S.
      implementation: which of `jattn.paged_attention`'s, or None.
      kv_layout: "HND" or "NHD".
    """

    block_size: int = 16
    implementation: str | None = None
    kv_layout: str = "HND"

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [B, H, Tq, D]
        key: torch.Tensor,  # [B, K, Tk, D]
        value: torch.Tensor,  # [B, K, Tk, V]
        attention_mask: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention output [B, Tq, H, V], and no weights.

        Raises:
          UnsupportedError: an option or a mask that jattn has no word for.
        """
        unknown = sorted(key for key, x in others.items() if x is not None and key not in HARMLESS)
        if unknown or dropout or (s_aux is not None and s_aux.ndim != 1):
            raise jattn.UnsupportedError(
                f"{type(module).__name__} attends with {unknown}, dropout {dropout} and sinks of "
                f"{None if s_aux is None else list(s_aux.shape)}: jattn has no such options, no "
                "dropout, and sinks of shape [H]"
            )
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        is_causal, window = _visibility(
            attention_mask, query.shape[2], key.shape[2], is_causal, sliding_window
        )
        numbers = {
            "scale": scaling,
            "logits_soft_cap": softcap,
            "sinks": None if s_aux is None else jnp.from_dlpack(s_aux.detach()),
            "sliding_window": window,
        }
        out = attend(
            query,
            key,
            value,
            is_causal=is_causal,
            block_size=self.block_size,
            implementation=self.implementation,
            kv_layout=self.kv_layout,
            **numbers,
        )
        return out, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    block_size: int,
    **options: Any,
) -> torch.Tensor:
    """Attention of the last Tq of Tk tokens, through scattered pages.

    Args:
      query: [B, H, Tq, D].
      key, value: [B, K, Tk, D] and [B, K, Tk, V].
      is_causal, block_size: as it says.
      options: of `jattn.paged_attention`.

    Returns: [B, Tq, H, V].
    """
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    # Lengths are rounded up, and padded before JAX sees them: few shapes, so few compilations.
    room = max(16, 1 << (num_keys - 1).bit_length())
    query_room = 1 if num_queries == 1 else room
    width = -(-room // block_size)
    num_blocks = batch * width + 3
    ids = np.random.default_rng(num_keys).permutation(num_blocks)[: batch * width]
    needed = np.arange(width) < -(-num_keys // block_size)
    tables = np.where(needed, ids.reshape(batch, width), 10**6)  # garbage where none is needed
    metadata = jattn.AttentionMetadata.from_lengths(
        [num_keys] * batch, [num_keys] * batch, tables, block_size
    ).pad_to(num_tokens=batch * room)
    out = _write_and_attend(
        _rows(query, batch * query_room),
        _rows(key, batch * room),
        _rows(value, batch * room),
        metadata.slot_mapping,
        metadata.block_tables,
        metadata.seq_lens,
        np.arange(batch + 1, dtype=np.int32) * num_queries,
        num_blocks=num_blocks,
        block_size=block_size,
        max_query_len=query_room,
        is_causal=is_causal,
        **{name: x for name, x in options.items() if x is not None},
    )
    out = torch.from_dlpack(out)[: batch * num_queries]
    return out.reshape(batch, num_queries, *out.shape[1:])


def _rows(x: torch.Tensor, count: int) -> jax.Array:
    """[B, heads, T, D] as the tokens of all sequences one after another, padded."""
    flat = x.detach().transpose(1, 2).flatten(0, 1)
    padding = (0, 0, 0, 0, 0, count - flat.shape[0])
    return jnp.from_dlpack(torch.nn.functional.pad(flat, padding).contiguous())


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_blocks",
        "block_size",
        "max_query_len",
        "is_causal",
        "implementation",
        "kv_layout",
    ),
)
def _write_and_attend(
    query,
    key,
    value,
    slot_mapping,
    block_tables,
    seq_lens,
    starts,
    *,
    num_blocks,
    block_size,
    kv_layout="HND",
    **options,
):
    def pool(x: jax.Array) -> jax.Array:
        heads, size = x.shape[1:]
        axes = (heads, block_size) if kv_layout == "HND" else (block_size, heads)
        return jnp.full((num_blocks, *axes, size), jnp.nan, x.dtype)

    caches = jattn.update_kv_cache(
        pool(key), pool(value), key, value, slot_mapping, kv_layout=kv_layout
    )
    return jattn.paged_attention(
        query,
        *caches,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=starts,
        kv_layout=kv_layout,
        **options,
    )


def _visibility(
    mask: torch.Tensor | None,
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    window: int | None,
) -> tuple[bool, int | None]:
    """`is_causal` and `sliding_window` that show every query what its mask shows it."""
    if mask is None:
        return is_causal, window
    seen = mask.numpy() if mask.dtype == torch.bool else mask.numpy() > -1e30
    queries = np.arange(num_keys - num_queries, num_keys)[:, None]
    keys = np.arange(num_keys)[None]
    for causal, width in ((is_causal, window), (True, window), (True, None), (False, None)):
        ours = spec.visible(queries, keys, num_keys, spec.Sight(causal, width))
        if (seen == ours).all():
            return causal, width
    raise jattn.UnsupportedError(
        f"the mask {list(seen.shape)} is neither causal nor full, with or without a window of "
        f"{window}: jattn attends to whole sequences without padding"
    )
