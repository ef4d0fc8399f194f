"""A stand-in for the modules of tpu-inference and vLLM that jattn's integration uses.

A docstring "The host's `X`" means tpu-inference's. A test file gets the fixture by
`host = stand_in_host.host`.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import importlib.metadata
import sys
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
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
        """Remove a member, as if this process had not loaded vLLM's plugins."""
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


@dataclasses.dataclass
class Sampling:
    """The fields of vLLM's `SamplingParams` that jattn reads."""

    temperature: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    structured_outputs: object | None = None
    extra_args: dict[str, object] | None = None


class ValidationError(Exception):
    """vLLM's `VLLMValidationError`, which a server turns into status 400."""


class Processor:
    """vLLM's `InputProcessor`, in the server's process."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config

    def _validate_params(self, params, supported_tasks):
        return "a watermark"

    def process_inputs(self, request_id, prompt, params, supported_tasks, resumable=False):
        self._validate_params(params, supported_tasks)
        kinds = prompt.get("multi_modal_data", ())
        features = [SimpleNamespace(modality=kind) for kind in kinds]
        return SimpleNamespace(mm_features=features or None, resumable=resumable)


class HostWorker:
    """The host's `TPUWorker`."""

    distributed_init_method, rank = "tcp://10.0.0.1:4321", 1
    parallel_config = SimpleNamespace(placement_group=SimpleNamespace(bundle_specs=[{}, {}]))

    def init_device(self):
        self.ready = True


def apply_act_fn(both, name):
    """The host's `apply_act_fn`, which splits gates from the rest by a function of its module."""
    gmm = sys.modules[GMM]
    gates, rest = gmm.deinterleave_lane(both)
    return {"relu": jax.nn.relu}[name](gates) * rest


class LayerImpl:
    """The host's `PallasAttentionBackendImpl` of one layer."""

    def __init__(self, cap=None, attn_type="decoder"):
        self.logits_soft_cap, self.attn_type = cap, attn_type

    def forward(self, layer, query):
        return self.attention_backend


class Runner:
    """vLLM's `MoERunner`."""

    def __init__(self, router, routed_experts, layer_name="layers.0.experts"):
        self.router, self.routed_experts = router, routed_experts
        self.layer_name = layer_name


class UnsupportedArchitectureError(ValueError):
    pass


def apply_experts(layer, x, gating_output, weights, moe_backend, mesh, extra_backend_kwargs):
    """The host's `moe_apply`: return inputs of the experts, their weights, and their ids."""
    gmm = sys.modules[f"{COMMON}.fused_moe_gmm"]
    scores = gmm.apply_scoring_fn(layer.scoring_func, gating_output)
    ids = extra_backend_kwargs.get("hash_based_topk_indices")
    if ids is None:
        ids = jax.lax.top_k(scores, layer.top_k)[1]
    found = jnp.take_along_axis(scores, ids, axis=1)
    if layer.renormalize:
        found /= found.sum(1, keepdims=True)
    return x, found, ids


def refuse_config(config):
    """The host's check of a configuration, which accepts only its own kind of processes."""
    raise ValueError("forked processes only")


TPU_OPTIONS = {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd_conservative"}


class Eagle3Proposer:
    """The host's class of this name, whose step is compiled with options for TPUs."""

    @functools.partial(jax.jit, static_argnums=(0, 2, 3), compiler_options=TPU_OPTIONS)
    def _propose(self, kv_caches, num_speculative_tokens, layer_name_to_kvcache_index):
        return [cache + num_speculative_tokens for cache in kv_caches]


class DFlashProposer:
    """The host's class of this name."""

    @functools.partial(jax.jit, static_argnums=0, compiler_options=TPU_OPTIONS)
    def _propose(self, kv_caches):
        return [cache + 1 for cache in kv_caches]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p"],
    meta_fields=["do_sampling"],
)
@dataclasses.dataclass
class SamplingOfBatch:
    """The host's `TPUSupportedSamplingMetadata`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    do_sampling: bool = True


def segments(counts, total):
    """The host's `_get_segment_info`, of which jattn uses the first result."""
    return jnp.repeat(jnp.arange(counts.shape[0]), counts, total_repeat_length=total), None


def transform(logits, sampling):
    """The host's `_apply_sampling_transforms`, without `top_p`."""
    logits = logits / sampling.temperature[:, None]
    ranks = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
    dropped = (sampling.top_k[:, None] > 0) & (ranks >= sampling.top_k[:, None])
    return jnp.where(dropped, -1e12, logits)


@dataclasses.dataclass
class Request:
    """The host's `CachedRequestState`."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    in_progress_prompt_logprobs_cpu: object = None

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)


class Batch:
    """The host's `InputBatch`: makes an array for each request that asks for log probabilities."""

    def __init__(self):
        self.num_prompt_logprobs = {}

    def add_request(self, request, req_index=None, dp_rank=0):
        self.num_prompt_logprobs[request.req_id] = 1
        request.in_progress_prompt_logprobs_cpu = "whatever memory has"
        return dp_rank


class BatchManager:
    """The host's `PersistentBatchManager`."""

    def __init__(self, requests, input_batch=None):
        self.requests, self.input_batch = requests, input_batch

    def update_states(self, scheduler_output, get_mrope_input_positions_fn):
        return {name: request.output_token_ids for name, request in self.requests.items()}

    def _reorder_batch(self, scheduler_output):
        batch = self.input_batch
        if max(scheduler_output.num_scheduled_tokens.values()) == 1:
            batch.request_distribution = [batch.num_reqs] * 3
        return "swaps"


class ModelRunner:
    """The host's `TPUModelRunner`, with a model that the test chooses."""

    def __init__(self, model_config, is_pooling_model=False, embed_multimodal_fn=None):
        self.model_config, self.is_pooling_model = model_config, is_pooling_model
        self.embed_multimodal_fn, self.is_multimodal_model = embed_multimodal_fn, False
        self._pre_async_results = None

    def load_model(self):
        self.pooler_fn = self.pool

    def pool(self, hidden_states, metadata, seq_lens, num_scheduled_tokens):
        self.pooled = seq_lens.tolist(), num_scheduled_tokens.tolist()
        return [f"of {row}" for row in hidden_states]

    def _execute_model(self, scheduler_output, intermediate_tensors=None):
        return intermediate_tensors

    def _get_input_ids_embeds(self, input_ids, mm_embeds, is_mm_embed):
        return (input_ids, None) if mm_embeds is None else (None, mm_embeds)


class ImageModel:
    """A JAX model of the host that takes images, where token 9 stands for an image."""

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None):
        text = jnp.stack([input_ids, -input_ids], axis=1).astype(jnp.float32)
        if multimodal_embeddings is None:
            return text
        rows = jnp.cumsum(input_ids == 9) - 1
        return jnp.where((input_ids == 9)[:, None], multimodal_embeddings[rows], text)

    def get_mrope_input_positions(self, input_tokens, mm_features):
        raise IndexError


class VllmImageModel:
    """A model of vLLM that takes images."""

    def iter_mm_grid_thw(self, mm_features):
        yield from (self.config, *mm_features)

    def get_mrope_input_positions(self, input_tokens, mm_features):
        found = [*self.iter_mm_grid_thw(mm_features), *input_tokens]
        return SimpleNamespace(numpy=lambda: np.array(found)), 7


class MaskManager:
    """The host's `StructuredDecodingManager`, which assumes masks are sorted by request name."""

    def __init__(self, runner):
        self.runner = runner

    def prepare_structured_decoding_input(self, logits, grammar_output):
        names = sorted(grammar_output.structured_output_request_ids)
        return dict(zip(names, grammar_output.grammar_bitmask.tolist(), strict=True))


@dataclasses.dataclass(eq=False)
class Host:
    """The state of the stand-in: what jattn registered, and what a test makes it return."""

    config: object = None  # the current `VllmConfig`
    chips: int = 0
    impl: str = "flax_nnx"
    has_jax_model: bool = True
    version: str = tpu_inference.TESTED
    told: dict[str, dict] = dataclasses.field(default_factory=dict)
    noted: list | None = None  # routed experts of a step's layers; empty unless requested
    functions: dict[str, object] = dataclasses.field(default_factory=dict)  # torch's, in JAX

    def register(self, name, **given):
        self.told[name] = given

    def start(self, **changes):
        """Ask jattn for its backend with `config(**changes)`, where jattn refuses settings."""
        self.config = config(**changes)
        return self.told["jattn"]["attention"]()

    def register_function(self, name):
        return functools.partial(self.functions.__setitem__, name)

    def find_jax_model(self, hf_config):
        if not self.has_jax_model:
            raise UnsupportedArchitectureError

    def wrapper_context(self):
        assert self.noted is not None, "VllmModelWrapperContext is not set."
        aux = SimpleNamespace(enable_return_routed_experts=bool(self.noted))
        config = SimpleNamespace(aux_output_config=aux)
        return SimpleNamespace(vllm_config=config, expert_indices_list=self.noted)


Modules = dict[str, dict[str, object]]  # the names that each leaf module defines
IMAGES, GEMMA = "Qwen2_5_VLForConditionalGeneration", "Gemma4ForConditionalGeneration"
COMMON = "tpu_inference.layers.common"
TORCH = "tpu_inference.layers.vllm"
GMM = "tokamax._src.ops.experimental.gmm_v2.gmm_v2"


def serving_modules(host: Host) -> Modules:
    """Modules of tpu-inference that start and configure it."""
    return {
        "tpu_inference.envs": {"JAX_PLATFORMS": "cpu", "MODEL_IMPL_TYPE": "auto"},
        "tpu_inference.tpu_info": {"get_num_chips": lambda: host.chips},
        "tpu_inference.utils": {
            "make_optimized_mesh": None,
            "general_device_put": lambda tensors, sharding: tensors,
        },
        "tpu_inference.models.common.compiler_options": {},
        "tpu_inference.models.common.model_loader": {
            "resolve_model_impl_type": lambda config: host.impl,
            "_get_model_architecture": host.find_jax_model,
            "UnsupportedArchitectureError": UnsupportedArchitectureError,
        },
        "tpu_inference.models.vllm.vllm_model_wrapper": {},
        "tpu_inference.models.vllm.vllm_model_wrapper_context": {
            "get_vllm_model_wrapper_context": host.wrapper_context,
        },
        "tpu_inference.layers.jax.sample.rejection_sampler": {
            "_compute_probs": None,
            "_get_segment_info": segments,
        },
        "tpu_inference.layers.jax.sample.sampling": {"_apply_sampling_transforms": transform},
        "tpu_inference.runner.input_batch": {"InputBatch": type("InputBatch", (Batch,), {})},
        "tpu_inference.runner.persistent_batch_manager": {
            "PersistentBatchManager": type("PersistentBatchManager", (BatchManager,), {}),
        },
        "tpu_inference.runner.structured_decoding_manager": {
            "StructuredDecodingManager": type("StructuredDecodingManager", (MaskManager,), {}),
        },
        "tpu_inference.runner.tpu_runner": {
            "TPUModelRunner": type("TPUModelRunner", (ModelRunner,), {}),
        },
        "tpu_inference.models.jax.qwen2_5_vl": {IMAGES: type(IMAGES, (ImageModel,), {})},
        "tpu_inference.models.jax.gemma4_mm": {GEMMA: type(GEMMA, (ImageModel,), {})},
        "tpu_inference.distributed.utils": {},
        "tpu_inference.spec_decode.jax.dflash": {
            "DFlashProposer": type("DFlashProposer", (DFlashProposer,), {}),
        },
        "tpu_inference.spec_decode.jax.eagle3": {
            "Eagle3Proposer": type("Eagle3Proposer", (Eagle3Proposer,), {}),
        },
        "tpu_inference.distributed.kv_transfer": {},
        "tpu_inference.platforms.tpu_platform": {
            "TpuPlatform": type("TpuPlatform", (Platform,), {}),
            "check_attention_backend_config": refuse_config,
        },
        "tpu_inference.worker.tpu_worker": {"TPUWorker": HostWorker},
    }


def layer_modules(host: Host) -> Modules:
    """Modules of tpu-inference that compute, and the tokamax kernel that they call."""
    return {
        f"{COMMON}.attention_backend": {
            "AttentionBackend": object,
            "LinearAttentionBackend": type("LinearAttentionBackend", (), {}),
            "GDNLinearAttentionBackend": type("GDNLinearAttentionBackend", (), {}),
            "register_attention_backend": host.register,
            "attention_backend_name": lambda config: config.backend.name.lower(),
        },
        f"{COMMON}.attention_interface": {},
        f"{COMMON}.fused_moe_gmm": {
            "apply_scoring_fn": lambda name, x: getattr(jax.nn, name)(x),
        },
        f"{COMMON}.linear": {},
        f"{COMMON}.ragged_conv1d_jax": {},
        f"{COMMON}.sharding": {
            "ShardingAxisName": SimpleNamespace(ATTN_DATA="data", ATTN_HEAD="model"),
        },
        f"{COMMON}.utils": {},
        f"{TORCH}.backends.flash_attn": {
            "AttentionType": SimpleNamespace(DECODER="decoder"),
            "PallasAttentionBackend": object,
            "PallasAttentionBackendImpl": LayerImpl,
        },
        f"{TORCH}.custom_ops.mla_attention": {},
        f"{TORCH}.interface.moe": {"moe_apply": apply_experts},
        f"{TORCH}.process_weights.cleanup_sharding": {},
        f"{TORCH}.quantization.unquantized": {"t2j": lambda tensor, use_dlpack: tensor},
        "tpu_inference.kernels.gdn.reference.ragged_gated_delta_rule_chunked": {},
        GMM: {"apply_act_fn": apply_act_fn},
        f"{TORCH}.ops": {},
        "torch.nn.functional": {"scaled_dot_product_attention": "attention"},
        "torch.ops.vllm": {"torch_sdpa_wrapper": "items"},
        "torchax.ops.jtorch": {"register_function": host.register_function},
        "torchax.interop": {"jax_view": lambda x: x, "torch_view": lambda x: x},
    }


def vllm_modules(host: Host) -> Modules:
    """Modules of vLLM."""
    mixin = type("KVConnectorModelRunnerMixin", (Connecting,), {})
    return {
        "vllm.config": {"get_current_vllm_config_or_none": lambda: host.config},
        "vllm.model_executor.layers.fused_moe.runner.moe_runner": {
            "MoERunner": type("MoERunner", (Runner,), {}),
        },
        "vllm.model_executor.models.qwen2_5_vl": {IMAGES: VllmImageModel},
        "vllm.v1.core.sched.output": {"strip_covered_mm_data": lambda features, covered: []},
        "vllm.v1.attention.ops.vit_attn_wrappers": {},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": Backends},
        "vllm.exceptions": {"VLLMValidationError": ValidationError},
        "vllm.sampling_params": {"SamplingParams": Sampling},
        "vllm.v1.engine.input_processor": {
            "InputProcessor": type("InputProcessor", (Processor,), {}),
        },
        "vllm.v1.worker.kv_connector_model_runner_mixin": {"KVConnectorModelRunnerMixin": mixin},
    }


def install(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make modules, and the packages above them, importable."""
    parts = [name.split(".") for name in modules]
    packages = {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}
    for name in sorted({*modules, *packages}):
        made = module(name, **modules.get(name, {"__path__": []}))
        if name == "tpu_inference":
            made.__spec__ = SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, made, raising=False)


def config(**changes: object) -> SimpleNamespace:
    """Return a vLLM configuration that jattn accepts, with `changes`."""
    values = {
        "cache_dtype": "auto",
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "model_dp_size": 1,
        "total_dp_size": 1,
        "block_size": 32,
        "kv_sharing_fast_prefill": False,
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": 20,
        "tp_size": 1,
        "expert_size": 1,
        "kv_cache_dtype_skip_layers": [],
        "is_hybrid": False,
        "is_attention_free": False,
        "is_multimodal_model": False,
        "supports_multimodal_inputs": False,
        "is_mm_prefix_lm": False,
        "use_mla": False,
        "async_scheduling": True,
        "max_num_batched_tokens": 64,
        "dtype": "torch.bfloat16",
        "architectures": ["Qwen3ForCausalLM"],
        "experts": 0,
        "vocabulary": 128,
        "head_size": 128,
        "enable_prompt_embeds": False,
        "logits_processors": None,
        "quantization": None,
        "return_sampling_mask": False,
        "enable_trace_replay": False,
        "kv_cache_memory_bytes": None,
        "kv_offloading_size": None,
        "model": "organization/name",
        "revision": None,
        "convert_type": "none",
        "runner_type": "generate",
        "multimodal_config": None,
        "load_format": "auto",
        "sliding_window": None,
        **changes,
    }
    found = SimpleNamespace(
        **values,
        get_num_experts=lambda: values["experts"],
        get_total_num_kv_heads=lambda: 4,
        get_vocab_size=lambda: values["vocabulary"],
        get_head_size=lambda: values["head_size"],
        get_sliding_window=lambda: values["sliding_window"],
    )
    found.hf_config = found.hf_text_config = found
    parts = ("model", "parallel", "cache", "scheduler", "sharding", "load")
    names = [f"{part}_config" for part in parts]
    optional = (
        *("speculative_config", "lora_config", "quant_config", "watermark_config"),
        *("ec_transfer_config", "weight_transfer_config", "kv_transfer_config"),
    )
    given = {name: changes.get(name) for name in optional}
    given["backend"] = SimpleNamespace(name="JATTN")
    given["use_v2_model_runner"] = changes.get("use_v2_model_runner", False)
    given["additional_config"] = changes.get("additional_config", {})
    return SimpleNamespace(**dict.fromkeys(names, found), **given)


@pytest.fixture
def host(monkeypatch):
    """Install stand-ins of modules of tpu-inference and vLLM, and return their state."""
    host = Host()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # undone after the test
    modules = {**serving_modules(host), **layer_modules(host), **vllm_modules(host)}
    install(modules, monkeypatch)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: host.version if name == "tpu-inference" else version(name),
    )
    made_once = (
        *(tpu_inference._vllm_backend, tpu_inference._backend_class),
        *(processes.worker_class, linear.backend_class),
    )
    for cached in made_once:
        cached.cache_clear()
    yield host
    for cached in made_once:
        cached.cache_clear()
    copyreg.dispatch_table.pop(Backends, None)
