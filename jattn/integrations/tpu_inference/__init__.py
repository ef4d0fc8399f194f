"""jattn as the attention of vLLM on JAX: a backend of tpu-inference.

    pip install 'jattn[vllm]'
    vllm serve MODEL --attention-backend jattn

vLLM schedules, samples and serves. tpu-inference, the host, runs the model as one jitted step.
jattn lays out the KV cache and computes attention over it. No import is needed: vLLM finds
`register` through the entry point `vllm.general_plugins`. A layer's cache is one array
`[N, S, K, 2, D]`, each key next to its value. The host shards axis K over the devices of its mesh.

The engine does not start with settings that jattn or the host cannot follow: an error names each
setting and what it must be.
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

CHUNKED = "ChunkedLocalAttention"  # how vLLM's name for a backend with chunks begins

logger = logging.getLogger(__name__)


# What the host calls to find jattn.


def register() -> None:
    """Register `--attention-backend jattn` with vLLM (entry point `vllm.general_plugins`).

    vLLM calls it in every process. It does nothing if tpu-inference is not installed (vLLM on
    torch), and only logs a warning if its version cannot register backends. On a machine
    without TPUs it also calls `enable_cpu`. It sets `VLLM_USE_V2_MODEL_RUNNER` to 0 unless the
    variable is set: with a GPU, vLLM would schedule for a runner that tpu-inference does not have.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        return
    try:
        from tpu_inference.layers.common.attention_backend import register_attention_backend
    except ImportError:
        logger.warning(
            "no --attention-backend jattn: tpu-inference %s cannot register backends (%s can)",
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
    """Create the classes that vLLM imports by path when they are first used."""
    if name == "VllmBackend":
        return _vllm_backend()
    if name == "Worker":
        return processes.worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _vllm_backend() -> type[Any]:
    """Return vLLM's attention backend for torch models, with its implementation of a layer."""
    from tpu_inference.layers.vllm.backends import flash_attn

    class VllmImpl(flash_attn.PallasAttentionBackendImpl):
        """The host's layer, except for the backend's name, the soft cap and chunks."""

        attention_backend = NAME
        kind = ""  # of a layer whose mask a metadata builder of vLLM makes

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.attn_type != flash_attn.AttentionType.DECODER:
                raise ValueError(
                    f"--attention-backend jattn: a layer has attention of type {self.attn_type}, "
                    "which the host computes with a TPU kernel: leave the flag out"
                )
            if self.kind and not self.kind.startswith(CHUNKED):
                raise ValueError(
                    f"--attention-backend jattn: a layer has {self.kind}, whose mask vLLM makes "
                    f"in a metadata builder that tpu-inference {TESTED} never calls: serve the "
                    "model with vLLM on torch"
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
            """Read the kind of layer from the name of the class that vLLM derives for it."""
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
    """Register a backend whose layers have these options, and return its name.

    The host passes a layer's backend name on to the jitted step, but not its options.
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
    """Return the host's `AttentionBackend`; called as its runner starts, and while it traces.

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
    # The host's JAX models (0.32.0) attend with the default backend, although the selected backend
    # laid out their cache. So make jattn's the default.
    attention_interface.RPAAttentionBackend = _backend_class()
    routing.enable()
    batches.enable()
    return _backend_class()(soft_cap, chunk)


@functools.cache
def _backend_class() -> type[Any]:
    """Return the host's backend class, with jattn's cache shape and attention."""
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
            attention_chunk_size: int | None,  # a window, despite its name
            attn_logits_soft_cap: float | None,
            sinks: jax.Array | None,
            update_kv_cache: bool,
            use_causal_mask: bool,
            sm_scale: float,
            k_scale: float | None,
            v_scale: float | None,
            **unused: Any,  # q_scale rounds queries for products in fp8; jattn has none
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
    """Run `integrations.layer.attend` on each device of a mesh, with its tokens and heads.

    Args:
      run: `attend` with its options bound: a function of queries, keys, values, the cache, four
        arrays of the batch, and sinks.
      mesh: the devices.
      tokens, heads: names of the mesh's axes.
    """
    rows, pool = P(tokens, heads), P(tokens, None, heads)
    in_specs = (rows, rows, rows, pool, *[P(tokens)] * 4, P(heads))

    def attend_all(
        q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        # With fewer KV heads than devices, several devices get the same head.
        repeats = max(1, _devices(mesh, heads) // k.shape[1])
        on_devices = jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=(rows, pool), check_vma=False
        )
        return on_devices(q, jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1), *rest)

    return attend_all


def _linear_attention() -> Any:
    """Return the host's kernel for gated delta nets on a TPU, or XLA's operations elsewhere."""
    if jax.default_backend() == "tpu":
        from tpu_inference.layers.common.attention_backend import GDNLinearAttentionBackend

        return GDNLinearAttentionBackend()
    return linear.backend_class()()


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of one layer's cache: `[N, S, K, 2, D]`, each key next to its value.

    Args:
      num_blocks, block_size, num_kv_heads, head_dim: N, S, K and D.
    """
    return num_blocks, block_size, num_kv_heads, 2, head_dim


def _devices(mesh: Mesh, axes: str | Sequence[str]) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape.get(name, 1) for name in names)
