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

from jattn.integrations import versions
from jattn.integrations.layer import attend
from jattn.integrations.tpu_inference import (
    batches,
    cpu,
    latent,
    linear,
    processes,
    requests,
    routing,
)
from jattn.integrations.tpu_inference.cpu import enable_cpu
from jattn.integrations.tpu_inference.refusals import (
    HOST,
    NAME,
    NEWER_RUNNER,
    TESTED,
    check,
)
from jattn.integrations.versions import ANY_VERSION

__all__ = ["ANY_VERSION", "TESTED", "cache_shape", "check", "enable_cpu", "register"]

CHUNKED = "ChunkedLocalAttention"  # how vLLM's name of a backend with chunks begins

logger = logging.getLogger(__name__)


# What the host calls to find jattn.


def register() -> None:
    """Make `--attention-backend jattn` known to vLLM: its entry point `vllm.general_plugins`.

    Does nothing where tpu-inference is not installed (vLLM on torch), and only logs where it has
    no place for a backend. vLLM calls it in every process. On a machine without TPUs it also calls
    `enable_cpu`. `VLLM_USE_V2_MODEL_RUNNER` becomes 0 where it is not set: with a GPU vLLM would
    schedule for a runner that tpu-inference does not have.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        return
    try:
        from tpu_inference.layers.common.attention_backend import register_attention_backend
    except ImportError:
        logger.warning(
            "no --attention-backend jattn: tpu-inference %s takes no backends (%s does)",
            versions.installed(HOST),
            TESTED,
        )
        return
    register_attention_backend(
        NAME,
        attention=_backend,
        linear_attention=_linear_attention,
        vllm_backend=f"{__name__}.VllmBackend",
    )
    if versions.is_taken(HOST, TESTED):
        os.environ.setdefault(NEWER_RUNNER, "0")
        processes.enable(NAME)
        latent.enable(NAME)
        requests.enable(NAME)
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
        cpu.share_memory(config)
    # The host's JAX models attend without naming a backend, in a cache that the named one has laid
    # out (0.32.0): the one they fall back to has to be the same.
    attention_interface.RPAAttentionBackend = _backend_class()
    routing.enable()
    batches.enable()
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
