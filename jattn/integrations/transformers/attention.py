"""The attention function that transformers calls, and how a call's keys reach a pool."""

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
from transformers.masking_utils import eager_mask, sdpa_mask

import jattn
from jattn import checks, implementations
from jattn.formats.kv_array import LAYOUTS
from jattn.integers import ceil_div
from jattn.integrations.transformers import batches, masks, sights

# Arguments that models pass and that do not change attention.
HARMLESS = {
    "cache_position",
    "deterministic",
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
    "seq_idx",
    "use_cache",
}
# Model types that attend without transformers' interface and need a mask of numbers.
WITHOUT_INTERFACE = {"gemma4_audio"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def register(name: str, block_size: int, implementation: str | None, kv_layout: str) -> None:
    """See `jattn.integrations.transformers.register`."""
    with checks.checking("jattn.integrations.transformers.register") as problems:
        positive = isinstance(block_size, int) and block_size > 0
        problems.expect(positive, "block_size", block_size, "a number of tokens above 0")
        known = implementation is None or implementation in implementations.BY_NAME
        names = ", ".join(implementations.BY_NAME)
        problems.expect(known, "implementation", implementation, f"None or one of {names}")
        problems.expect(kv_layout in LAYOUTS, "kv_layout", kv_layout, '"HND" or "NHD"')
    AttentionInterface.register(name, Attention(block_size, implementation, kv_layout))
    AttentionMaskInterface.register(name, bool_mask)


def bool_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Build the mask, bool [B, 1, Tq, Tk], and never skip it: None would be ambiguous.

    Types in `WITHOUT_INTERFACE` get eager attention's mask.
    """
    if getattr(options.get("config"), "model_type", None) in WITHOUT_INTERFACE:
        numbers: torch.Tensor | None = eager_mask(*args, **options)
        return numbers
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = sdpa_mask(*args, **options)
    return None if mask is None else sights.BoolMask.of(mask)


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention function that transformers calls.

    Attributes:
      block_size: S of the pools that keys are copied into.
      implementation: an implementation of `jattn.paged_attention`, or None.
      kv_layout: "HND" or "NHD".
    """

    block_size: int = 16
    implementation: str | None = None
    kv_layout: str = "HND"

    # JAX computes attention: torch.compile breaks the graph here.
    @torch.compiler.disable
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
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention output [B, Tq, H, V], and None for the weights.

        Raises:
          UnsupportedError: jattn does not support an option, the dtype or the mask.
        """
        name = type(module).__name__
        _refuse_what_jattn_lacks(name, query, s_aux, dropout, others)
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
            if is_causal and attention_mask is None and query.shape[2] > 1:
                raise jattn.UnsupportedError(
                    f"{name} attends without a mask: eager attention shows its queries all keys, "
                    "sdpa those before them, because the layer says is_causal"
                )
        if isinstance(attention_mask, sights.BoolMask):
            attention_mask = attention_mask.plain()
        window = sliding_window if attention_mask is None else None
        packing = None
        if cu_seq_lens_q is not None:
            packing = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        sight = sights.MaskSight(attention_mask, is_causal, window, position_bias, packing)
        options: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
        for option, x in (("scale", scaling), ("logits_soft_cap", softcap)):
            if x is not None:
                options[option] = float(x)
        with batches.placed(query):
            if hasattr(key, "jattn_layer"):
                out = key.jattn_layer.attend(module, query, sight, self.implementation, options)
            else:
                out = attend(
                    query,
                    key,
                    value,
                    sight,
                    block_size=self.block_size,
                    implementation=self.implementation,
                    kv_layout=self.kv_layout,
                    **options,
                )
        return out, None


def _refuse_what_jattn_lacks(
    name: str,
    query: torch.Tensor,
    sinks: torch.Tensor | None,
    dropout: float,
    others: dict[str, object],
) -> None:
    if query.dtype not in DTYPES:
        raise jattn.UnsupportedError(
            f"{name} attends in {query.dtype}, but jattn computes in float32, bfloat16 or float16"
        )
    if query.ndim != 4:
        raise jattn.UnsupportedError(
            f"{name} attends with queries of shape {list(query.shape)}, not [B, H, Tq, D]"
        )
    if others.get("output_attentions"):
        raise jattn.UnsupportedError(
            f"{name} is asked for attention weights (output_attentions): jattn computes none; use "
            'attn_implementation="eager" to get them'
        )
    if not HARMLESS.issuperset(others) and (
        unknown := sorted(key for key, x in others.items() if x is not None and key not in HARMLESS)
    ):
        if isinstance(computed := others.get("sinks"), torch.Tensor):  # Inkling2's
            raise jattn.UnsupportedError(
                f"{name} attends with sinks of shape {list(computed.shape)}, which are computed "
                "for each token: jattn.integrations.transformers takes those of heads only (s_aux)"
            )
        raise jattn.UnsupportedError(f"{name} attends with {unknown}: jattn has no such options")
    if dropout:
        raise jattn.UnsupportedError(
            f"{name} attends with dropout {dropout}: jattn has none; call model.eval() or set the "
            "config's attention_dropout to 0"
        )
    if sinks is not None and sinks.ndim != 1:
        raise jattn.UnsupportedError(
            f"{name} attends with sinks of shape {list(sinks.shape)}: jattn takes [H]"
        )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sight: sights.MaskSight,
    *,
    block_size: int = 16,
    kv_layout: str = "HND",
    implementation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Copy keys and values into the blocks of a pool, and attend to them.

    Args:
      query: [B, H, Tq, D].
      key, value: [B, K, Tk, D] and [B, K, Tk, V].
      sight: the visibility.
      block_size: S.
      kv_layout: of the pool.
      implementation, options: arguments of `jattn.paged_attention`; sinks are a torch tensor.

    Returns: [B, Tq, H, V]; gradients flow to queries, keys, values, sinks and biases.
    """
    batch, num_queries, num_keys = query.shape[0], query.shape[2], key.shape[2]
    if key.shape[0] != batch and key.shape[0] == 1:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    read = sight.plan((block_size,), batch, num_queries, num_keys, _plan)
    plan = read.plan
    if not len(plan.reading.tokens):
        return query.new_zeros(batch, num_queries, query.shape[1], value.shape[3])
    rows = [plan.batch.take_queries(query)]
    for x in (key, value):
        flat = x.transpose(1, 2).flatten(0, 1)
        if plan.key_rows is not None:
            flat = flat[plan.key_rows]
        rows.append(batches.pad_rows(flat, len(plan.slots)))
    bias = sight.relative_bias(read, query.shape[1], "sinks" in options)
    extra = {"sinks": options.pop("sinks", None), "relative_bias": bias}
    extra = {name: x.to(query.device) for name, x in extra.items() if x is not None}
    call = functools.partial(
        _write_and_attend,
        names=tuple(extra),
        slots=plan.slots,
        num_blocks=plan.num_blocks,
        block_size=block_size,
        kv_layout=kv_layout,
        implementation=implementation,
        batch=plan.batch.arrays,
        options=options | plan.batch.limits,
        is_causal=plan.batch.is_causal,
        max_query_len=plan.batch.max_query_len,
    )
    tensors = [*rows, *extra.values()]
    batches.refuse_tangents(tensors)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out = _Differentiable.apply(call, *tensors)
    else:
        out = torch.from_dlpack(call(*map(batches.to_jax, tensors)))
    return plan.batch.put_back(out, batch, num_queries)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """Where the keys of one reading are in a pool made for them."""

    reading: masks.SplitMask
    batch: batches.Batch
    key_rows: torch.Tensor | None  # which of the B * Tk keys are stored; None for all in order
    slots: jax.Array
    num_blocks: int


def _plan(reading: masks.SplitMask, block_size: int) -> _Plan:
    documents = reading.documents
    lengths = documents[:, 2] - documents[:, 1]
    needed = ceil_div(lengths, block_size)
    first_block = np.cumsum(needed) - needed
    width = batches.bucket(max([1, *needed.tolist()]), 1)
    tables = first_block[:, None] + np.arange(width)
    rows, slots = [], []
    for (b, start, end), block in zip(documents, first_block, strict=True):
        rows.append(b * reading.kept.shape[1] + np.flatnonzero(reading.kept[b])[start:end])
        slots.append(block * block_size + np.arange(end - start))
    key_rows, slot_mapping = np.concatenate(rows), np.concatenate(slots)
    in_order = np.array_equal(key_rows, np.arange(reading.kept.size))
    padded = np.full(batches.bucket(len(key_rows)), -1, np.int32)
    padded[: len(slot_mapping)] = slot_mapping
    return _Plan(
        reading,
        batches.make_batch(reading, tables[reading.document]),
        None if in_order else torch.from_numpy(key_rows),
        jnp.asarray(padded),
        batches.bucket(int(needed.sum())),
    )


class _Differentiable(torch.autograd.Function):
    """A function of JAX arrays applied to tensors, with JAX's gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., jax.Array], *tensors: torch.Tensor) -> torch.Tensor:
        found, ctx.gradients = jax.vjp(call, *map(jnp.asarray, map(batches.to_jax, tensors)))
        out = torch.from_dlpack(found)
        # JAX's residuals share their memory. Saving them lets PyTorch notice in-place changes.
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if one was changed
        with batches.placed(gradient):  # runs in a thread of PyTorch
            found = ctx.gradients(jnp.asarray(batches.to_jax(gradient)))
        return None, *map(torch.from_dlpack, found)


@functools.partial(
    jax.jit,
    static_argnames=(
        *("names", "num_blocks", "block_size", "kv_layout"),
        *("implementation", "is_causal", "max_query_len"),
    ),
)
def _write_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *extra: jax.Array,
    names: tuple[str, ...],
    slots: jax.Array,
    num_blocks: int,
    block_size: int,
    kv_layout: str,
    batch: dict[str, jax.Array],
    options: dict[str, Any],
    is_causal: bool | None,
    implementation: str | None,
    max_query_len: int,
) -> jax.Array:
    def pool(x: jax.Array) -> jax.Array:
        heads, size = x.shape[1:]
        axes = (heads, block_size) if kv_layout == "HND" else (block_size, heads)
        # NaN, so that reading a slot that was never written shows.
        return jnp.full((num_blocks, *axes, size), jnp.nan, x.dtype)

    caches = jattn.update_kv_cache(pool(key), pool(value), key, value, slots, kv_layout=kv_layout)
    options = options | batch | dict(zip(names, extra, strict=True))
    options |= {} if is_causal is None else {"is_causal": is_causal}
    return jattn.paged_attention(
        query,
        *caches,
        kv_layout=kv_layout,
        implementation=implementation,
        max_query_len=max_query_len,
        **options,
    )
