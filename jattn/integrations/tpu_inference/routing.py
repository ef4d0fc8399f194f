"""Routing to the experts of a torch model by the rules that tpu-inference leaves out.

The host routes a token to the experts with the highest scores. A layer of vLLM may also choose
among groups of experts (DeepSeek-V3), scale the weights (Ling), call a function of the model
(Gemma 4), or weight an expert's input instead of its output (Llama 4). vLLM's router does all of
this, but the host never calls it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.integrations.tpu_inference import experts
from jattn.integrations.tpu_inference.settings import is_off

GIVEN = "given"  # a scoring function whose scores are the weights
# Routers of vLLM whose rules are implemented here or in the host.
KNOWN = ("CustomRoutingRouter", "FusedTopKBiasRouter", "FusedTopKRouter", "GroupedTopKRouter")
SIMULATION = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


def enable() -> None:
    """Make the host's mixtures of experts follow the rules of vLLM's routers.

    - `layers.vllm.interface.moe.moe_apply` chooses experts by score. If a layer has another rule,
      the hook passes it the experts and weights of that rule, and reports these experts to requests
      with `--enable-return-routed-experts`.
    - `layers.common.fused_moe_gmm.apply_scoring_fn` makes weights from scores. The hook returns
      weights that are given as they are.
    - vLLM's `MoERunner.__init__`: the hook refuses a layer whose rule is unknown.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.layers.common import fused_moe_gmm
    from tpu_inference.layers.vllm.interface import moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if hasattr(moe.moe_apply, "__wrapped__"):
        return  # done before
    moe.moe_apply = _with_rules(moe.moe_apply)
    fused_moe_gmm.apply_scoring_fn = _or_given(fused_moe_gmm.apply_scoring_fn)
    runner: Any = MoERunner
    runner.__init__ = _checked(runner.__init__)


def choose(
    logits: jax.Array,
    bias: jax.Array | None,
    score: Callable[[jax.Array], jax.Array],
    *,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Choose each token's experts from the best groups of experts.

    A group ranks by its best expert, or, with a bias, by the sum of its two best.

    Args:
      logits: [T, E].
      bias: [E], added to the scores for choosing, but not to the weights; or None.
      score: makes scores from logits.
      top_k: the number of experts per token.
      groups: the number of groups, of E / groups experts each.
      kept_groups: the number of groups that a token may choose from.
      renormalize: whether a token's weights sum to `scale`.
      scale: of the weights.

    Returns: weights and experts, float32 and int32 [T, top_k].
    """
    scores = score(logits.astype(jnp.float32))
    choice = scores if bias is None else scores + bias[None].astype(jnp.float32)
    if kept_groups < groups:
        grouped = choice.reshape(len(choice), groups, -1)
        best = jax.lax.top_k(grouped, 1 if bias is None else 2)[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, kept_groups)[1], groups, dtype=bool).any(1)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    ids = jax.lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if renormalize:
        weights /= weights.sum(-1, keepdims=True)
    return weights * scale, ids


def has_rule(layer: Any) -> bool:
    """Whether the host would choose other experts for a layer, or weight them differently.

    Args:
      layer: `RoutedExperts` of vLLM.
    """
    return bool(
        layer.use_grouped_topk
        or layer.custom_routing_function
        or layer.apply_router_weight_on_input
        or layer.routed_scaling_factor != 1.0
    )


def _route(
    layer: Any, rows: jax.Array, logits: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return each token's weights and experts as vLLM's router computes them."""
    if layer.custom_routing_function is not None:
        from torchax.interop import jax_view, torch_view

        found = layer.custom_routing_function(
            hidden_states=torch_view(rows),
            gating_output=torch_view(logits),
            topk=layer.top_k,
            renormalize=layer.renormalize,
        )
        weights, ids = (jax_view(x) for x in found)
        return weights.astype(jnp.float32), ids.astype(jnp.int32)
    from tpu_inference.layers.common import fused_moe_gmm

    count, groups = logits.shape[1], layer.num_expert_group
    # vLLM's router ignores groups of one expert, and groups of different sizes.
    grouped = layer.use_grouped_topk and groups < count and count % groups == 0
    return choose(
        logits,
        bias,
        functools.partial(fused_moe_gmm.apply_scoring_fn, layer.scoring_func),
        top_k=layer.top_k,
        groups=groups if grouped else 1,
        kept_groups=layer.topk_group if grouped else 1,
        renormalize=layer.renormalize,
        scale=layer.routed_scaling_factor,
    )


class _Given:
    """A layer without its rule: its experts and weights are given."""

    scoring_func, renormalize = GIVEN, False

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_rules(moe_apply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap the host's function, to pass it the experts of layers with a rule of their own."""

    @functools.wraps(moe_apply)
    def apply(
        layer: Any,
        x: jax.Array,
        gating_output: jax.Array,
        weights: Any,
        moe_backend: Any,
        mesh: Any,
        extra_backend_kwargs: dict[str, Any],
    ) -> jax.Array:
        rest = (weights, moe_backend, mesh)
        extra = dict(extra_backend_kwargs)
        given, bias = (extra.get(n) for n in ("hash_based_topk_indices", "e_score_correction_bias"))
        if given is not None or not has_rule(layer):
            if given is None and bias is not None:
                _, given = _route(layer, x, gating_output, bias)
            _report(given)
            return moe_apply(layer, x, gating_output, *rest, extra)
        extra.pop("e_score_correction_bias", None)
        each, ids = _route(layer, x, gating_output, bias)
        _report(ids)
        if layer.apply_router_weight_on_input:
            x, each = x * each.astype(x.dtype), jnp.ones_like(each)
        # A product with one-hot rows, because the experts may be split over devices.
        chosen = jax.nn.one_hot(ids, layer.global_num_experts, dtype=jnp.float32)
        scores = (chosen * each[..., None]).sum(1)
        extra["hash_based_topk_indices"] = ids
        return moe_apply(_Given(layer), x, scores, *rest, extra)

    return apply


def _report(ids: jax.Array | None) -> None:
    """Replace the experts that the host recorded for a layer with `ids`.

    If routed experts are returned, the host records those with the highest scores right before it
    calls `moe_apply`.
    """
    from tpu_inference.models.vllm import vllm_model_wrapper_context as wrapper

    try:
        context = wrapper.get_vllm_model_wrapper_context()
    except AssertionError:  # outside of a step
        return
    config = context.vllm_config
    if ids is not None and config and config.aux_output_config.enable_return_routed_experts:
        noted = context.expert_indices_list
        noted[-1] = ids.astype(noted[-1].dtype)


def _or_given(
    apply_scoring_fn: Callable[[str, jax.Array], jax.Array],
) -> Callable[[str, jax.Array], jax.Array]:
    @functools.wraps(apply_scoring_fn)
    def apply(scoring_fn: str, x: jax.Array) -> jax.Array:
        return x if scoring_fn == GIVEN else apply_scoring_fn(scoring_fn, x)

    return apply


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the runner's `__init__` to refuse a layer whose rule is unknown."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        _check(self.layer_name, self.router, self.routed_experts)

    return checked


def _check(name: str, router: Any, layer: Any) -> None:
    if simulated := os.environ.get(SIMULATION):
        raise ValueError(
            f"{SIMULATION}: {simulated}, but must be left out: the host never calls a router"
        )
    kind = type(router).__name__
    if kind not in KNOWN or getattr(router, "bias_vl", None) is not None:
        of_images = "" if kind not in KNOWN else " with a bias for images"
        raise ValueError(
            f"--attention-backend jattn: experts of {name} are chosen by {kind}{of_images}, but "
            f"must be by one of {', '.join(KNOWN)}: tpu-inference calls no router, and jattn "
            "implements no others"
        )
    for setting in experts.KERNELS if has_rule(layer) else ():
        value = os.environ.get(setting, "0")
        if not is_off(value):
            raise ValueError(
                f"{setting}: {value}, but must be 0 for {name}, whose experts are chosen by "
                f"{kind}: the kernel chooses only by the highest scores"
            )
