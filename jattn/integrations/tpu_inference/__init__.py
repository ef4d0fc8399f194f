"""jattn as the attention of vLLM on JAX: a backend of tpu-inference.

    pip install 'jattn[vllm]'
    vllm serve MODEL --attention-backend jattn

vLLM schedules, samples and serves; tpu-inference runs the model as one jitted step; jattn lays out
the KV cache and attends to it. Nothing has to be imported: vLLM finds `register` by its entry
point `vllm.general_plugins`. A layer's cache is one array `[N, S, K, 2, D]`, a key and its value
next to each other, and the host splits its axis K over the devices of its mesh.

What jattn or the host cannot do is refused while the engine starts, with the setting to change.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jattn import checks
from jattn.integrations.layer import attend
from jattn.integrations.tpu_inference import cpu, experts, latent, linear, processes, routing
from jattn.integrations.tpu_inference.cpu import enable_cpu
from jattn.integrations.tpu_inference.settings import VllmConfig, is_off

__all__ = ["cache_shape", "check", "enable_cpu", "register"]

NAME = "jattn"
TESTED = "0.32.0"  # of tpu-inference, and of the vLLM that it needs
# Set to 1 to try a version of the host that this module was not tested with.
ANY_VERSION = "JATTN_ANY_HOST_VERSION"
# JAX models of the host that call a kernel for TPUs themselves, past the registered backend.
WITH_TPU_KERNELS = (
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
)
VOCABULARY = 64  # tokens that vLLM pads a vocabulary to multiples of
DELTA_NETS = ("qwen3_next", "qwen3_5")  # how the types of models with them begin
CHUNKED = "ChunkedLocalAttention"  # how vLLM's name of a backend with chunks begins
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")

logger = logging.getLogger(__name__)


# What the host calls to find jattn.


def register() -> None:
    """Make `--attention-backend jattn` known to vLLM: its entry point `vllm.general_plugins`.

    Does nothing where tpu-inference is not installed (vLLM on torch), and only logs where it has
    no place for a backend. vLLM calls it in every process. On a machine without TPUs it also calls
    `enable_cpu`.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        return
    try:
        from tpu_inference.layers.common.attention_backend import register_attention_backend
    except ImportError:
        logger.warning(
            "no --attention-backend jattn: tpu-inference %s takes no backends (%s does)",
            _host_version(),
            TESTED,
        )
        return
    register_attention_backend(
        NAME,
        attention=_backend,
        linear_attention=_linear_attention,
        vllm_backend=f"{__name__}.VllmBackend",
    )
    if _tested():
        processes.enable(NAME)
        latent.enable(NAME)
        if cpu.without_tpus():
            enable_cpu()


def __getattr__(name: str) -> Any:
    """The classes that vLLM finds by their paths, made when first asked for."""
    if name == "VllmBackend":
        return _vllm_backend()
    if name == "Worker":
        return processes.worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _vllm_backend() -> type[Any]:
    """The attention backend, with each layer's part, that vLLM uses for models of torch."""
    from tpu_inference.layers.vllm.backends import flash_attn

    class VllmImpl(flash_attn.PallasAttentionBackendImpl):
        """One layer: the host's, but for the name of the backend, the soft cap and chunks."""

        attention_backend = NAME
        kind = ""  # of a layer with a mask of its own

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.attn_type != flash_attn.AttentionType.DECODER:
                raise ValueError(
                    f"--attention-backend jattn: a layer has attention of type {self.attn_type}, "
                    "which the host computes with a kernel for TPUs: leave the flag out"
                )
            if self.kind and not self.kind.startswith(CHUNKED):
                raise ValueError(
                    f"--attention-backend jattn: a layer has {self.kind}, whose mask vLLM makes "
                    f"where tpu-inference {TESTED} never asks it to: serve the model by vLLM on "
                    "torch"
                )
            self.attention_backend = _with_options(self.logits_soft_cap, None)

        def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kind:
                chunk = layer.attention_chunk_size
                self.attention_backend = _with_options(self.logits_soft_cap, chunk)
            return super().forward(layer, *args, **kwargs)

    class VllmBackend(flash_attn.PallasAttentionBackend):
        impl: type[VllmImpl] = VllmImpl

        def __init_subclass__(cls) -> None:
            """vLLM makes a class for layers whose mask it keeps in a builder, and names it."""
            name = cls.__name__.removesuffix(VllmBackend.__name__).strip("_")
            cls.impl = type(VllmImpl.__name__, (VllmImpl,), {"kind": name})

        @staticmethod
        def get_name() -> str:
            return NAME.upper()

        @classmethod
        def get_impl_cls(cls) -> type[VllmImpl]:
            return cls.impl

    return VllmBackend


def _with_options(soft_cap: float | None, chunk: int | None) -> str:
    """The name of a registered backend of which every layer has these options.

    The host passes the name to the jitted step and drops the options.
    """
    from tpu_inference.layers.common.attention_backend import register_attention_backend

    options = {"cap": soft_cap, "chunk": chunk}
    given = [f"{key}_{value:.17g}" for key, value in options.items() if value]
    name = "_".join([NAME, *given]).replace(".", "_")
    if given:
        register_attention_backend(
            name,
            attention=functools.partial(_backend, soft_cap, chunk),
            vllm_backend=f"{__name__}.VllmBackend.{name}",
        )
    return name


def _backend(soft_cap: float | None = None, chunk: int | None = None) -> Any:
    """The host's `AttentionBackend`: made by its runner as it starts, and wherever it is traced.

    Args:
      soft_cap, chunk: `logits_soft_cap` and `attention_chunk_size` of a torch model's layers, which
        the host does not pass on.
    """
    from tpu_inference.layers.common import attention_interface
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None:
        check(config)
        cpu.share_memory(config.parallel_config)
    # The host's JAX models attend without naming a backend, in a cache that the named one has laid
    # out (0.32.0): the one they fall back to has to be the same.
    attention_interface.RPAAttentionBackend = _backend_class()
    routing.enable()
    return _backend_class()(soft_cap, chunk)


@functools.cache
def _backend_class() -> type[Any]:
    """The cache's shape, and attention."""
    from tpu_inference.layers.common import attention_backend
    from tpu_inference.layers.common.sharding import ShardingAxisName

    class Backend(attention_backend.AttentionBackend):
        name = NAME

        def __init__(self, soft_cap: float | None = None, chunk: int | None = None) -> None:
            self.soft_cap, self.chunk = soft_cap, chunk

        def get_kv_cache_shape(
            self,
            total_num_pages: int,
            page_size: int,
            num_kv_heads: int,
            head_dim: int,
            kv_dtype: Any,
        ) -> tuple[int, ...]:
            del kv_dtype
            return cache_shape(total_num_pages, page_size, num_kv_heads, head_dim)

        def attention(
            self,
            kv_cache: jax.Array,
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            md: Any,
            shared_md: Any,
            mesh: Mesh,
            *,
            attention_chunk_size: int | None,  # a window, in spite of its name
            attn_logits_soft_cap: float | None,
            sinks: jax.Array | None,
            update_kv_cache: bool,
            use_causal_mask: bool,
            sm_scale: float,
            k_scale: float | None,
            v_scale: float | None,
            **unused: Any,  # q_scale rounds the query for a product in fp8, which there is none of
        ) -> tuple[jax.Array, jax.Array]:
            run = functools.partial(
                attend,
                write=update_kv_cache,
                is_causal=use_causal_mask,
                sliding_window=attention_chunk_size,
                attention_chunk_size=self.chunk,
                logits_soft_cap=attn_logits_soft_cap or self.soft_cap,
                scale=sm_scale,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            tokens, heads = ShardingAxisName.ATTN_DATA, ShardingAxisName.ATTN_HEAD
            out, kv_cache = _on_mesh(run, mesh, tokens, heads)(
                *(q, k, v, kv_cache),
                shared_md.seq_lens,
                md.block_tables,
                shared_md.query_start_loc,
                shared_md.request_distribution,
                sinks,
            )
            return kv_cache, out

    return Backend


def _on_mesh(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    mesh: Mesh,
    tokens: str | Sequence[str],
    heads: str | Sequence[str],
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`integrations.layer.attend` of a mesh's devices, each with its tokens and heads.

    Args:
      run: `attend` with its options: of queries, keys, values, the cache, four arrays of the batch
        and sinks.
      mesh: the devices.
      tokens, heads: names of the mesh's axes.
    """
    rows, pool = P(tokens, heads), P(tokens, None, heads)
    in_specs = (rows, rows, rows, pool, *[P(tokens)] * 4, P(heads))

    def attend_all(
        q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        # Fewer KV heads than devices: more than once.
        repeats = max(1, _devices(mesh, heads) // k.shape[1])
        on_devices = jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=(rows, pool), check_vma=False
        )
        return on_devices(q, jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1), *rest)

    return attend_all


def _linear_attention() -> Any:
    """The host's kernel for gated delta nets, which needs a TPU, or XLA's operations."""
    if jax.default_backend() == "tpu":
        from tpu_inference.layers.common.attention_backend import GDNLinearAttentionBackend

        return GDNLinearAttentionBackend()
    return linear.backend_class()()


def check(config: VllmConfig) -> None:
    """Raise if a vLLM configuration asks for what jattn or the host cannot do.

    Args:
      config: `vllm.config.VllmConfig`.

    Raises:
      ValueError: every such setting, with what it has to be.
    """
    platform = jax.default_backend()
    with checks.checking(f"--attention-backend {NAME}") as problems:
        problems.require(
            _tested(),
            "tpu-inference",
            f"version {_host_version()}",
            f"{TESTED}, which this jattn was tested with ({ANY_VERSION}=1 tries any)",
        )
        _check_devices(problems, config, platform)
        _check_cache(problems, config)
        implementation = _implementation(config)
        _check_kv_heads(problems, config, implementation)
        _check_kernels(problems, config, platform)
        _check_model(problems, config, implementation)


def _implementation(config: VllmConfig) -> str:
    """ "flax_nnx" or "vllm", which the host falls back to where it has no JAX model."""
    from tpu_inference.models.common import model_loader

    asked: str = model_loader.resolve_model_impl_type(config)
    if asked == "flax_nnx":
        try:
            model_loader._get_model_architecture(config.model_config.hf_config)
        except model_loader.UnsupportedArchitectureError:
            return "vllm"
    return asked


def _check_devices(problems: checks.Problems, config: VllmConfig, platform: str) -> None:
    """No context parallelism, and replicas on TPUs only."""
    parallel = config.parallel_config
    for phase in ("decode", "prefill"):
        ranks = getattr(parallel, f"{phase}_context_parallel_size")
        problems.require(
            ranks == 1,
            f"--{phase}-context-parallel-size",
            str(ranks),
            "1: use --tensor-parallel-size",
        )
    # In one process the host counts ranks by its own sharding and sets vLLM's number to 1.
    replicas = max(parallel.data_parallel_size, config.sharding_config.total_dp_size)
    problems.require(
        replicas == 1 or platform == "tpu",
        "--data-parallel-size",
        str(replicas),
        f"1 on a {platform}: start a server for each replica",
    )


def _check_cache(problems: checks.Problems, config: VllmConfig) -> None:
    """The cache's dtype, and pages of latents: whole, with tokens first."""
    dtype, use_mla = config.cache_config.cache_dtype, config.model_config.use_mla
    problems.require(
        dtype in CACHE_DTYPES, "--kv-cache-dtype", dtype, f"one of {', '.join(CACHE_DTYPES)}"
    )
    others = config.cache_config.kv_cache_dtype_skip_layers
    problems.require(
        not others,
        "--kv-cache-dtype-skip-layers",
        " ".join(others),
        "left out: the host's caches all have one dtype",
    )
    setting, devices = _devices_of_heads(config)
    problems.require(
        not use_mla or devices == 1,
        setting,
        str(devices),
        "1 for a model with MLA layers, whose scales the host cannot split; "
        "VLLM_MLA_DISABLE=1 writes keys and values out, and takes more",
    )
    transposed = os.environ.get("MLA_TRANSPOSE_KV_CACHE", "0")
    problems.require(
        not use_mla or is_off(transposed),
        "MLA_TRANSPOSE_KV_CACHE",
        transposed,
        "0: pages with their tokens last would be copied to be read",
    )


def _check_kv_heads(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """A KV head for every device, where the host loads weights for no more."""
    model = config.model_config
    kv_heads, (setting, devices) = model.get_total_num_kv_heads(), _devices_of_heads(config)
    problems.require(
        implementation == "vllm" or model.use_mla or devices <= kv_heads,
        setting,
        str(devices),
        f"at most the model's {kv_heads} KV heads, or MODEL_IMPL_TYPE=vllm: the host's JAX "
        "models load no weights for more devices",
    )


def _devices_of_heads(config: VllmConfig) -> tuple[str, int]:
    """Over how many devices heads are split, and the setting that says so."""
    by_flag = config.parallel_config.tensor_parallel_size
    sharding = config.sharding_config
    by_strategy = sharding.tp_size * sharding.expert_size
    if by_strategy > by_flag:
        return "tensor_parallelism * expert_parallelism of --additional_config", by_strategy
    return "--tensor-parallel-size", by_flag


def _check_kernels(problems: checks.Problems, config: VllmConfig, platform: str) -> None:
    """No kernel for TPUs is asked for elsewhere."""
    kernels = experts.KERNELS if config.model_config.get_num_experts() else ()
    for setting in ("ENABLE_QUANTIZED_MATMUL_KERNEL", "TPU_ENABLE_D2H_TRANSFER", *kernels):
        value = os.environ.get(setting, "0")
        problems.require(
            platform == "tpu" or is_off(value),
            setting,
            value,
            f"0 on a {platform}: it asks for a kernel for TPUs",
        )


def _check_model(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """No layers that the host computes otherwise than jattn or vLLM would, or not at all."""
    model = config.model_config
    names = ", ".join(model.architectures or ())
    kind = getattr(model.hf_text_config, "model_type", "")
    has_delta_nets = kind.startswith(DELTA_NETS)
    problems.require(
        not model.is_hybrid or has_delta_nets,
        "--model",
        names,
        "one whose recurrent layers are Qwen's gated delta nets: the host computes no others",
    )
    problems.require(
        not (config.speculative_config and model.is_hybrid and has_delta_nets),
        "--speculative-config",
        "given",
        "left out for a model with recurrent states: the host keeps rejected drafts in them",
    )
    window = getattr(model.hf_config, "rswa_window", None)
    problems.require(
        window is None,
        "--model",
        f"{names} with rswa_window={window}",
        "one without such windows: the host computes full attention for them",
    )
    problems.require(
        not (model.is_multimodal_model and model.is_mm_prefix_lm),
        "--limit-mm-per-prompt",
        "not 0 for all kinds of input",
        f"0 for each: tokens of an image see each other in {names}, and the host has each see "
        "those before it only",
    )
    past_the_backend = [name for name in model.architectures or () if name in WITH_TPU_KERNELS]
    problems.require(
        not past_the_backend or implementation == "vllm",
        "MODEL_IMPL_TYPE",
        os.environ.get("MODEL_IMPL_TYPE", "auto"),
        f"vllm: the host's JAX model of {', '.join(past_the_backend)} takes no backend",
    )
    problems.require(
        config.lora_config is None or implementation == "vllm",
        "MODEL_IMPL_TYPE",
        os.environ.get("MODEL_IMPL_TYPE", "auto"),
        f"vllm with --enable-lora: the host's JAX model of {names} takes no adapters",
    )
    vocabulary = model.get_vocab_size()
    problems.require(
        config.lora_config is None or vocabulary % VOCABULARY == 0,
        "--enable-lora",
        f"given, for a vocabulary of {vocabulary} tokens",
        f"left out: the host adds adapters to logits of multiples of {VOCABULARY} tokens only",
    )


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """The shape of one layer's cache: keys and values side by side, `[N, S, K, 2, D]`.

    Args:
      num_blocks, block_size, num_kv_heads, head_dim: N, S, K and D.
    """
    return num_blocks, block_size, num_kv_heads, 2, head_dim


def _devices(mesh: Mesh, axes: str | Sequence[str]) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape.get(name, 1) for name in names)


def _tested() -> bool:
    return _host_version() == TESTED or os.environ.get(ANY_VERSION) == "1"


def _host_version() -> str:
    return importlib.metadata.version("tpu-inference")
