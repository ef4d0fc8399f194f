"""jattn as the attention of sglang-jax, on CPUs and GPUs.

    import jattn.integrations.sglang_jax

    jattn.integrations.sglang_jax.install()      # before creating the engine
    engine = sgl_jax.srt.entrypoints.engine.Engine(
        model_path=..., device="cpu", attention_backend="fa"
    )

Its server, with the host's own flags:

    python -m jattn.integrations.sglang_jax --model-path MODEL --device cpu --attention-backend fa

sglang-jax has no setting that names an external backend. So `install` replaces the TPU kernel of
its backend "fa" with `ragged_paged_attention`, and allows "fa" on CPUs. The host's cache keeps its
layout, `[N, S, 2 K / pack, pack, D]`, and is read and written in place.

While the engine starts, settings that jattn cannot serve raise an error that says what to change.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import jax

from jattn import checks
from jattn.integrations import layer, versions
from jattn.integrations.sglang_jax import (
    aborts,
    adapters,
    capacity,
    checkpoints,
    copies,
    detokenizer,
    experts,
    finishing,
    grammars,
    latent,
    logprobs,
    pauses,
    penalties,
    recurrent,
    refusals,
    requests,
    rotary,
    sampling,
    settings,
    tables,
    writes,
)

TESTED = "0.1.0rc0"

# What jattn changes in the host, apart from its kernels.
SUBJECTS = (
    aborts,
    adapters,
    capacity,
    checkpoints,
    detokenizer,
    finishing,
    grammars,
    logprobs,
    pauses,
    penalties,
    requests,
    rotary,
    sampling,
)

logger = logging.getLogger(__name__)


def install() -> None:
    """Replace sglang-jax's TPU kernels with jattn, in this process and in those the host spawns.

    Also patch the host where requests would crash it or get wrong results, and check its settings
    and requests. Call it before creating an engine; a second call does nothing.

    Raises:
      ImportError: sglang-jax is not installed.
      ValueError: sglang-jax is not the version that jattn was tested with.
    """
    with checks.checking("jattn.integrations.sglang_jax.install") as problems:
        versions.check(problems, "sglang-jax", TESTED)
    from sgl_jax.srt.entrypoints import engine
    from sgl_jax.srt.layers.attention import flashattention_backend, mla_backend
    from sgl_jax.srt.model_executor.model_runner import ModelRunner
    from sgl_jax.srt.server_args import ServerArgs

    choose, measure = ModelRunner._get_attention_backend, ModelRunner.get_available_device_memory
    if hasattr(choose, "__wrapped__"):
        return  # already installed

    finish = ServerArgs.__post_init__

    @functools.wraps(finish)
    def finish_and_check(arguments: settings.ServerArguments) -> None:
        finish(arguments)
        refusals.check_uses(arguments)

    @functools.wraps(measure)
    def check_and_measure(runner: settings.ModelRunner) -> int:
        refusals.check_uses(runner.server_args)  # may predate `install`
        refusals.check_device(runner.server_args)
        return measure(runner)

    @functools.wraps(choose)
    def check_and_choose(runner: settings.ModelRunner) -> object:
        refusals.check(runner)
        if jax.default_backend() != "tpu":
            replace_kernels()
            choose_gated_delta_net(runner)
        # For device "cpu" the host would choose its own slow path.
        arguments = runner.server_args
        device, arguments.device = arguments.device, "jattn"
        try:
            with latent.backend() if runner.use_mla_backend else contextlib.nullcontext():
                backend = choose(runner)
        finally:
            arguments.device = device
        # With linear attention in the model, the backend combines two.
        full = getattr(backend, "full_attn_backend", backend)
        setattr(full, tables.FIELD, longest(runner) + drafted(arguments))
        return backend

    flashattention_backend.ragged_paged_attention_v3 = tables.bound(ragged_paged_attention)
    mla_backend.mla_ragged_paged_attention = tables.bound(latent.mla_ragged_paged_attention)
    tables.bind(flashattention_backend.FlashAttention)
    tables.bind(mla_backend.MLAAttentionBackend)
    ModelRunner.get_available_device_memory = check_and_measure  # a runner calls it first
    ModelRunner._get_attention_backend = check_and_choose
    ServerArgs.__post_init__ = finish_and_check
    for subject in SUBJECTS:
        subject.enable()
    # The host spawns these, unless enable_single_process is set.
    engine.run_scheduler_process = run_scheduler
    engine.run_detokenizer_process = run_detokenizer


def longest(runner: settings.ModelRunner) -> int:
    """Return the most tokens of a sequence; for a draft model, the most of the served model."""
    pool = runner.req_to_token_pool  # the served model's for a draft model; else None yet
    length = runner.model_config.context_len
    return length if pool is None else max(length, pool.max_context_len)


def drafted(arguments: settings.ServerArguments) -> int:
    """Return how many draft tokens, not yet accepted, may come after the longest sequence."""
    if not arguments.speculative_algorithm:
        return 0
    return max(arguments.speculative_num_draft_tokens, arguments.speculative_num_steps)


def replace_kernels() -> None:
    """Replace the host's TPU kernels other than attention with functions for any machine."""
    from sgl_jax.srt.layers import moe
    from sgl_jax.srt.layers.attention.linear import kda_backend, lightning_backend
    from sgl_jax.srt.mem_cache import memory_pool

    copies.replace_device_array()
    moe.gmm = experts.gmm
    memory_pool.update_fused_kv_cache_vectorized = writes.update_fused_kv_cache_vectorized
    kda_backend.chunk_kda = recurrent.chunk_kda
    lightning_backend.simple_gla_fwd = recurrent.simple_gla_fwd
    lightning_backend.decode_simple_gla_fused = recurrent.decode_simple_gla_fused


def run_scheduler(*arguments: object) -> None:
    """Run the host's scheduler process, which runs the model, after `install`.

    Args:
      *arguments: the arguments of the host's `run_scheduler_process`.
    """
    from sgl_jax.srt.managers.scheduler import run_scheduler_process

    install()
    run_scheduler_process(*arguments)


def run_detokenizer(*arguments: object) -> None:
    """Run the host's detokenizer process with the fixes of `detokenizer`.

    Args:
      *arguments: the arguments of the host's `run_detokenizer_process`.
    """
    from sgl_jax.srt.managers.detokenizer_manager import run_detokenizer_process

    detokenizer.enable()
    run_detokenizer_process(*arguments)


def choose_gated_delta_net(runner: settings.ModelRunner) -> None:
    """Let a model with gated delta nets (Qwen3.5) prefill without a TPU."""
    arguments = runner.server_args
    if runner.qwen3_5_hybrid_config is not None and arguments.gdn_prefill_impl != refusals.GDN:
        logger.info(
            "--gdn-prefill-impl is %s: %s needs a TPU", refusals.GDN, arguments.gdn_prefill_impl
        )
        arguments.gdn_prefill_impl = refusals.GDN


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None = None,
    attention_sink: jax.Array | None = None,
    *,
    max_seq_len: int,
    causal: int = 1,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: object = None,
    mask_aligned_to_cu_kv: bool = False,
    m_block_sizes: object = None,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's keys and values, then attend: sglang-jax calls this in every layer.

    Args:
      queries: [T, H, D].
      keys, values: [T, K, D].
      kv_cache_fused: [N, S, 2 K / pack, pack, D].
      kv_lens: int32 [B]; keys of each sequence, including this step's.
      page_indices: int32 [P]; the pages of all sequences, one sequence after another.
      cu_q_lens: int32 [B + 1].
      cu_kv_lens: int32 [B + 1]; where in `page_indices` a sequence's pages begin, times S.
      distribution: int32 [3]; the last one is the number of sequences.
      custom_mask: None.
      attention_sink: [H], or None.
      max_seq_len: static; the most keys that a sequence has.
      causal: 0 for queries that see all keys of their sequence.
      sm_scale, sliding_window, soft_cap: of the layer; a window or cap of 0 or less is none.
      xai_temperature_len: None.
      softmax_dtype: ignored: softmax is float32.
      mask_aligned_to_cu_kv, m_block_sizes: options of the host's kernel; ignored.

    Returns:
      `(out [T, H, D], kv_cache_fused)`.

    Raises:
      ValueError: a custom mask is given, or a temperature that grows with the position.
    """
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.expect(custom_mask is None, "custom_mask", custom_mask, "None")
        problems.expect(
            xai_temperature_len is None, "xai_temperature_len", xai_temperature_len, "None"
        )
    page_size = kv_cache_fused.shape[1]
    return layer.attend(
        *(queries, keys, values, kv_cache_fused, kv_lens),
        tables.tables_of(page_indices, cu_kv_lens, page_size, max_seq_len),
        *(cu_q_lens, distribution, attention_sink),
        write=True,
        is_causal=bool(causal),
        scale=sm_scale,
        sliding_window=latent.positive(sliding_window),
        logits_soft_cap=latent.positive(soft_cap),
    )
