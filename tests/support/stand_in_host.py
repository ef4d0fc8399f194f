"""A stand-in for tpu-inference and vLLM, as far as jattn's integration knows their modules.

A test file has its fixture by `host = stand_in_host.host`.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import importlib.metadata
import sys
import types
from types import SimpleNamespace

import jax
import pytest

from jattn.integrations import tpu_inference
from jattn.integrations.tpu_inference import linear, processes


class Connecting:
    """vLLM's mixin of runners, which starts loads before a step or after it."""

    @staticmethod
    @contextlib.contextmanager
    def _get_kv_connector_output(scheduler_output, defer_finalize=False):
        assert defer_finalize
        yield


def module(name: str, **names: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


class Backends(enum.Enum):
    """vLLM's `AttentionBackendEnum`, whose members can be added."""

    FLASH_ATTN = "a class of vLLM"
    FLASH_ATTN_MLA = "the host's for latents"

    @classmethod
    def register(cls, name: str, path: str) -> Backends:
        member = object.__new__(cls)
        member._name_, member._value_ = name, path
        cls._member_map_[name] = cls._value2member_map_[path] = member
        return member

    @classmethod
    def forget(cls, name: str) -> None:
        """As if this process had not loaded vLLM's plugins."""
        del cls._value2member_map_[cls._member_map_.pop(name).value]


class Platform:
    """The host's `TpuPlatform`."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, **more):
        if attn_selector_config.use_mla and selected_backend.name == "JATTN":
            raise ValueError("--attention-backend jattn does not support MLA models.")
        return selected_backend.value

    @classmethod
    def check_and_update_config(cls, config):
        sys.modules["tpu_inference.platforms.tpu_platform"].check_attention_backend_config(config)
        config.parallel_config.worker_cls = "the host's"


class HostWorker:
    """Its `TPUWorker`."""

    distributed_init_method, rank = "tcp://10.0.0.1:4321", 1
    parallel_config = SimpleNamespace(placement_group=SimpleNamespace(bundle_specs=[{}, {}]))

    def init_device(self):
        self.ready = True


def apply_act_fn(both, name):
    """The host's, which finds gates and the rest by a function of its module."""
    gmm = sys.modules["tokamax._src.ops.experimental.gmm_v2.gmm_v2"]
    gates, rest = gmm.deinterleave_lane(both)
    return {"relu": jax.nn.relu}[name](gates) * rest


@pytest.fixture
def host(monkeypatch):
    """Modules of tpu-inference and vLLM as far as jattn knows them; what they were told."""
    told: dict[str, dict] = {}

    def register_attention_backend(name, **given):
        told[name] = given

    def refuse(config):
        raise ValueError("forked processes only")

    class Impl:
        def __init__(self, cap=None, attn_type="decoder"):
            self.logits_soft_cap, self.attn_type = cap, attn_type

    current = SimpleNamespace(config=None, told=told, chips=0, impl="flax_nnx")
    common = "tpu_inference.layers.common"
    modules = [
        module("tpu_inference", __path__=[], __spec__=SimpleNamespace(name="tpu_inference")),
        module("tpu_inference.envs", JAX_PLATFORMS="cpu"),
        module("tpu_inference.tpu_info", get_num_chips=lambda: current.chips),
        module(
            "tpu_inference.utils",
            make_optimized_mesh=None,
            general_device_put=lambda tensors, sharding: tensors,
        ),
        module("tpu_inference.models", __path__=[]),
        module("tpu_inference.models.common", __path__=[]),
        module("tpu_inference.models.common.compiler_options"),
        module(
            "tpu_inference.models.common.model_loader",
            resolve_model_impl_type=lambda config: current.impl,
        ),
        module("tpu_inference.layers", __path__=[]),
        module(common, __path__=[]),
        module(
            f"{common}.attention_backend",
            AttentionBackend=object,
            LinearAttentionBackend=type("LinearAttentionBackend", (), {}),
            GDNLinearAttentionBackend=type("GDNLinearAttentionBackend", (), {}),
            register_attention_backend=register_attention_backend,
            attention_backend_name=lambda config: config.backend.name.lower(),
        ),
        module(f"{common}.utils"),
        module("tpu_inference.distributed", __path__=[]),
        module("tpu_inference.distributed.utils"),
        module("tpu_inference.distributed.kv_transfer"),
        module("tpu_inference.platforms", __path__=[]),
        module(
            "tpu_inference.platforms.tpu_platform",
            TpuPlatform=type("TpuPlatform", (Platform,), {}),
            check_attention_backend_config=refuse,
        ),
        module("tpu_inference.worker", __path__=[]),
        module("tpu_inference.worker.tpu_worker", TPUWorker=HostWorker),
        module(f"{common}.attention_interface"),
        module(f"{common}.quantization", quantize_tensor=lambda *given: ("rounded", given)),
        module(
            f"{common}.sharding",
            ShardingAxisName=SimpleNamespace(ATTN_DATA="data", ATTN_HEAD="model"),
        ),
        module("tpu_inference.layers.vllm", __path__=[]),
        module("tpu_inference.layers.vllm.custom_ops", __path__=[]),
        module("tpu_inference.layers.vllm.custom_ops.mla_attention"),
        module("tpu_inference.layers.vllm.process_weights", __path__=[]),
        module("tpu_inference.layers.vllm.process_weights.cleanup_sharding"),
        module("tpu_inference.models.vllm", __path__=[]),
        module("tpu_inference.models.vllm.vllm_model_wrapper"),
        module("tpu_inference.layers.vllm.quantization", __path__=[]),
        module(
            "tpu_inference.layers.vllm.quantization.unquantized",
            t2j=lambda tensor, use_dlpack: tensor,
        ),
        module(f"{common}.fused_moe_gmm"),
        module(f"{common}.ragged_conv1d_jax"),
        module("tpu_inference.kernels", __path__=[]),
        module("tpu_inference.kernels.gdn", __path__=[]),
        module("tpu_inference.kernels.gdn.reference", __path__=[]),
        module("tpu_inference.kernels.gdn.reference.ragged_gated_delta_rule_chunked"),
        module("tokamax", __path__=[]),
        module("tokamax._src", __path__=[]),
        module("tokamax._src.ops", __path__=[]),
        module("tokamax._src.ops.experimental", __path__=[]),
        module("tokamax._src.ops.experimental.gmm_v2", __path__=[]),
        module("tokamax._src.ops.experimental.gmm_v2.gmm_v2", apply_act_fn=apply_act_fn),
        module("tpu_inference.layers.vllm.backends", __path__=[]),
        module(
            "tpu_inference.layers.vllm.backends.flash_attn",
            AttentionType=SimpleNamespace(DECODER="decoder"),
            PallasAttentionBackend=object,
            PallasAttentionBackendImpl=Impl,
        ),
        module("vllm", __path__=[]),
        module("vllm.config", get_current_vllm_config_or_none=lambda: current.config),
        module("vllm.v1", __path__=[]),
        module("vllm.v1.attention", __path__=[]),
        module("vllm.v1.attention.backends", __path__=[]),
        module("vllm.v1.attention.backends.registry", AttentionBackendEnum=Backends),
        module("vllm.v1.worker", __path__=[]),
        module(
            "vllm.v1.worker.kv_connector_model_runner_mixin",
            KVConnectorModelRunnerMixin=type("KVConnectorModelRunnerMixin", (Connecting,), {}),
        ),
    ]
    for made in modules:
        monkeypatch.setitem(sys.modules, made.__name__, made)
        parent, _, last = made.__name__.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, made, raising=False)
    version = importlib.metadata.version
    current.version = tpu_inference.TESTED
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: current.version if name == "tpu-inference" else version(name),
    )
    made_once = (
        *(tpu_inference._vllm_backend, tpu_inference._backend_class),
        *(processes.worker_class, linear.backend_class),
    )
    for cached in made_once:
        cached.cache_clear()
    yield current
    for cached in made_once:
        cached.cache_clear()
    copyreg.dispatch_table.pop(Backends, None)
