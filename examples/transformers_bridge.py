"""Run unmodified transformers models on jattn: its attention, over scattered pages.

    from examples import transformers_bridge

    transformers_bridge.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="jattn")

Each attention call copies its keys and values into pages of a pool in shuffled order, with NaN in
every slot that no token owns, and calls `jattn.paged_attention`. This is not for serving (an engine
keeps the pages) but a strong check: a model's logits must be those of transformers' own attention,
whatever surrounds it. Gradients flow through it to queries, keys, values and sinks.

Nothing is approximated in silence. The mask that transformers built for the layer is compared with
what jattn would show each query, and unknown options are refused. Both raise
`jattn.UnsupportedError`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import jattn
from jattn import spec

# Arguments that models pass along and that do not change attention.
HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Mask entries from here down hide a key: the exponential of a logit that much lower is 0 even in
# float64. float16's lowest number, -65504, is among them.
HIDDEN = -1e4


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
          UnsupportedError: an option, a dtype or a mask that jattn does not have.
        """
        if query.dtype not in DTYPES:
            raise jattn.UnsupportedError(
                f"{type(module).__name__} attends in {query.dtype}, but jattn computes in float32, "
                "bfloat16 or float16"
            )
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
            "sinks": s_aux,
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
      is_causal: whether a query sees no later key.
      block_size: S.
      options: of `jattn.paged_attention`; sinks are a tensor.

    Returns: [B, Tq, H, V].
    """
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    # Lengths are rounded up, and padded before JAX sees them: few shapes, so few compilations.
    room = _round_up(num_keys)
    query_room = 1 if num_queries == 1 else _round_up(max(num_queries, num_keys))
    width = -(-room // block_size)
    num_blocks = batch * width + 3
    ids = np.random.default_rng(num_keys).permutation(num_blocks)[: batch * width]
    needed = np.arange(width) < -(-num_keys // block_size)
    tables = np.where(needed, ids.reshape(batch, width), 10**6)  # garbage where none is needed
    written = jattn.AttentionMetadata.from_lengths(
        [num_keys] * batch, [num_keys] * batch, tables, block_size
    ).pad_to(num_tokens=batch * room)
    starts = np.arange(batch + 1, dtype=np.int32) * num_queries
    metadata = dataclasses.replace(written, query_start_loc=starts, max_query_len=query_room)
    sinks = options.pop("sinks", None)
    tensors = [
        _rows(query, batch * query_room),
        _rows(key, batch * room),
        _rows(value, batch * room),
        *([] if sinks is None else [sinks]),
    ]
    call = functools.partial(
        _write_and_attend,
        metadata=metadata,
        num_blocks=num_blocks,
        block_size=block_size,
        is_causal=is_causal,
        **{name: x for name, x in options.items() if x is not None},
    )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out = _Differentiable.apply(call, *tensors)
    else:
        out = torch.from_dlpack(call(*map(_to_jax, tensors)))
    out = out[: batch * num_queries]
    return out.reshape(batch, num_queries, *out.shape[1:])


class _Differentiable(torch.autograd.Function):
    """A function of JAX arrays as one of tensors, with JAX's gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., jax.Array], *tensors: torch.Tensor) -> torch.Tensor:
        out, ctx.gradients = jax.vjp(call, *map(_to_jax, tensors))
        return torch.from_dlpack(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *map(torch.from_dlpack, ctx.gradients(_to_jax(gradient)))


def _to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.from_dlpack(x.detach().contiguous())


def _round_up(count: int) -> int:
    """The power of two from 16 on that holds `count` tokens."""
    return max(16, 1 << (count - 1).bit_length())


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, heads, T, D] as the tokens of all sequences one after another, padded."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return torch.nn.functional.pad(flat, (0, 0, 0, 0, 0, count - flat.shape[0]))


@functools.partial(
    jax.jit,
    static_argnames=("num_blocks", "block_size", "is_causal", "implementation", "kv_layout"),
)
def _write_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
    *,
    metadata: jattn.AttentionMetadata,
    num_blocks: int,
    block_size: int,
    kv_layout: str = "HND",
    **options: Any,
) -> jax.Array:
    def pool(x: jax.Array) -> jax.Array:
        heads, size = x.shape[1:]
        axes = (heads, block_size) if kv_layout == "HND" else (block_size, heads)
        return jnp.full((num_blocks, *axes, size), jnp.nan, x.dtype)

    caches = jattn.update_kv_cache(
        pool(key), pool(value), key, value, metadata.slot_mapping, kv_layout=kv_layout
    )
    options |= metadata.as_kwargs()
    return jattn.paged_attention(query, *caches, sinks=sinks, kv_layout=kv_layout, **options)


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
    mask = mask[..., :num_keys]  # of a cache with room for more
    if mask.dtype != torch.bool:
        hidden = mask <= HIDDEN
        if not (hidden | (mask == 0)).all():
            raise jattn.UnsupportedError(
                f"the mask {list(mask.shape)} adds numbers to logits: jattn takes masks of which "
                f"every entry is 0 or hides a key (at most {HIDDEN:g})"
            )
        mask = ~hidden
    seen = mask.numpy(force=True)
    queries = np.arange(num_keys - num_queries, num_keys)[:, None]
    keys = np.arange(num_keys)[None]
    for causal, width in ((is_causal, window), (True, window), (True, None), (False, None)):
        ours = spec.visible(queries, keys, num_keys, spec.Sight(causal, width))
        if (seen == ours).all():
            return causal, width
    padded = " (it hides some keys from all queries, as padding does)"
    raise jattn.UnsupportedError(
        f"the mask {list(seen.shape)} is neither causal nor full, with or without a window of "
        f"{window}{'' if seen.any(axis=-2).all() else padded}"
    )
