"""A stand-in for sglang-jax: the modules that start an engine, and a fixture.

A docstring that is only a name is the host's name of the class. A test file gets the fixture by
`host = stand_in_sglang.host`.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jattn.integrations import sglang_jax
from tests.support import stand_in_sglang_answers


class Serving:
    """`OpenAIServingBase`, the OpenAI-compatible API."""

    def _validate_request(self, request):
        return None

    def _build_sampling_params(self, request):
        return {}

    def _process_logprobs_tokens(self, logprobs, use_token_index=False):
        return use_token_index


class Grammar:
    """The state of one grammar, which allows only the token it is named after."""

    def __init__(self, token):
        self.token, self.finished, self.bitmask = token, False, None

    def is_terminated(self):
        return False

    def copy(self):
        return Grammar(self.token)

    def allocate_vocab_mask(self, count):
        if self.bitmask is None:
            self.bitmask = np.zeros((count, 1), np.int32)
        return self.bitmask


class Grammars:
    """`BaseGrammarBackend`, which compiles grammars and keeps them."""

    def __init__(self):
        self.cache, self.compiled = {}, []

    def _dispatch(self, kind, text):
        self.compiled.append((kind, text))
        return Grammar(int(text))


class SamplingInfo:
    """`ModelWorkerSamplingInfo`: the rows of a step, some of which have grammars."""

    def __init__(self, grammars, count):
        self.grammars, self.count, self.vocab_mask = grammars, count, None

    def update_grammar_vocab_mask(self):
        first = next((one for one in self.grammars or () if one), None)
        if first is None:
            return
        self.vocab_mask = first.allocate_vocab_mask(self.count)
        for row, one in enumerate(self.grammars):
            if one and not one.finished:
                self.vocab_mask[row] = 1 << one.token


class Runner:
    """`ModelRunner`, with default `server_args` and configuration except for `changes`."""

    def __init__(self, **changes):
        self.use_mla_backend = changes.pop("use_mla_backend", False)
        self.page_size = changes.pop("page_size", 16)
        hf_config = SimpleNamespace(**changes.pop("hf_config", {}))
        self.qwen3_5_hybrid_config = changes.pop("qwen3_5_hybrid_config", None)
        self.linear_recurrent_config = changes.pop("linear_recurrent_config", None)
        self.hybrid = changes.pop("hybrid", False)
        self.is_hybrid, self.is_draft_worker = True, changes.pop("is_draft_worker", False)
        self.sliding_window_size = changes.pop("sliding_window_size", 16)
        self.swa_max_total_num_tokens = changes.pop("swa_max_total_num_tokens", 1024)
        self.req_to_token_pool = changes.pop("req_to_token_pool", None)
        self.model_config = SimpleNamespace(
            context_len=changes.pop("context_len", 128),
            dtype=changes.pop("dtype", "bfloat16"),
            hf_config=hf_config,
            hf_text_config=SimpleNamespace(**changes.pop("hf_text_config", {})),
            moe_backend=changes.pop("effective_moe_backend", "epmoe"),
            quantization_config=changes.pop("quantization_config", None),
        )
        values = {
            "attention_backend": "fa",
            "chunked_prefill_size": 64,
            "max_total_tokens": None,
            "device": "cpu",
            "dp_size": 1,
            "enable_lora": False,
            "enable_mixed_chunk": False,
            "enable_deterministic_sampling": False,
            "gdn_prefill_impl": "fused_chunk_parallel",
            "is_embedding": False,
            "kv_cache_dtype": "auto",
            "lora_paths": None,
            "max_loras_per_batch": 8,
            "max_prefill_tokens": 128,
            "moe_backend": "epmoe",
            "multimodal": False,
            "quantization_config_path": None,
            "speculative_algorithm": None,
            "speculative_eagle_topk": 5,
            "speculative_num_draft_tokens": 4,
            "speculative_num_steps": 3,
            **changes,
        }
        self.server_args = SimpleNamespace(**values)

    def set_num_token_hybrid(self):
        pass

    def get_available_device_memory(self):
        return 1000

    def _get_attention_backend(self):
        from sgl_jax.srt.layers.attention import flashattention_backend, mla_backend

        if self.use_mla_backend:
            return mla_backend.MLAAttentionBackend(page_size=self.page_size)
        full = flashattention_backend.FlashAttention(device=self.server_args.device)
        return SimpleNamespace(full_attn_backend=full) if self.hybrid else full


class Args:
    """`ServerArgs`."""

    def __init__(self, **changes):
        values = {"is_embedding": False, "multimodal": False, "speculative_algorithm": None}
        values |= {"dp_size": 1, "enable_deterministic_sampling": False, "enable_lora": False}
        values |= {"disable_overlap_schedule": False, "disaggregation_mode": "null"}
        values |= {"enable_mixed_chunk": False, "enable_return_routed_experts": False}
        values |= {"skip_tokenizer_init": False}
        vars(self).update({**values, **changes})
        self.__post_init__()

    def __post_init__(self):
        self.finished = True


class Tokenizer:
    """`TokenizerManager`."""

    def __init__(self, server_args):
        self.server_args = server_args
        self.model_config = SimpleNamespace(vocab_size=96, hf_eos_token_id={2, 7})
        self.rid_to_state, self.told, self.sent = {}, [], []

    def _send_one_request(self, obj, tokenized_obj, created_time=None):
        self.sent.append(tokenized_obj.rid)

    def _handle_abort_req(self, received):
        self.rid_to_state[received.rid].finished = True

    def _notify_state_event(self, state):
        self.told.append(state)

    def convert_logprob_style(self, found, state):
        found["output_token_logprobs"] = []

    def _create_tokenized_object(self, obj, input_text, input_ids, mm_inputs=None):
        return obj


def choose(args):
    """The host's sampling after division by the temperature; returns how many tokens are left.

    These are the tokens with a probability of at least 1 - top_p.
    """
    logits, _, _, top_p, *_ = args
    return (jax.nn.softmax(logits) >= 1 - top_p[:, None]).sum(-1)


class Backend:
    """An attention backend: it calls whatever its module holds under the name of its kernel."""

    module, name = None, ""

    def __init__(self, **made_with):
        self.made_with = made_with

    def __call__(self, *args):
        return getattr(self.module, self.name)(*args)


def subclass(name, base, /, **values):
    """Make a class under the host's name, new for each test because jattn patches it."""
    return type(name, (base,), values)


@pytest.fixture
def host(monkeypatch):
    """Install stand-ins of the modules of sglang-jax that jattn uses."""
    runner, server_args = subclass("ModelRunner", Runner), subclass("ServerArgs", Args)
    tokenizer = subclass("TokenizerManager", Tokenizer)
    backend, mla = types.ModuleType("flashattention_backend"), types.ModuleType("mla_backend")
    kernel = {"module": backend, "name": "ragged_paged_attention_v3"}
    backend.FlashAttention = subclass("FlashAttention", Backend, **kernel)
    kernel = {"module": mla, "name": "mla_ragged_paged_attention"}
    mla.MLAAttentionBackend = subclass("MLAAttentionBackend", Backend, **kernel)
    utils, jax_utils = types.ModuleType("utils"), types.ModuleType("jax_utils")
    utils.jax_utils = jax_utils
    jax_utils.device_array = backend.device_array = lambda data, sharding: (data, sharding)
    linear = types.ModuleType("linear")
    kda, lightning = types.ModuleType("kda_backend"), types.ModuleType("lightning_backend")
    linear.kda_backend, linear.lightning_backend = kda, lightning
    memory_pool = types.ModuleType("memory_pool")
    engine = types.ModuleType("engine")
    grammar, constrained = types.ModuleType("base"), types.ModuleType("constrained")
    constrained.base_grammar_backend, grammar.INVALID_GRAMMAR_OBJ = grammar, object()
    grammar.BaseGrammarBackend = subclass("BaseGrammarBackend", Grammars)
    serving_class = subclass("OpenAIServingBase", Serving)
    openai, serving = "sgl_jax.srt.entrypoints.openai", {}
    for part, name in (("base", "Base"), ("chat", "Chat"), ("completions", "Completion")):
        serving[f"{openai}.serving_{part}"] = module = types.ModuleType(part)
        of_part = subclass(f"OpenAIServing{name}", serving_class)
        setattr(module, of_part.__name__, serving_class if part == "base" else of_part)
    chat = serving[f"{openai}.serving_chat"].OpenAIServingChat
    answers = stand_in_sglang_answers.modules(subclass)
    batch = answers["sgl_jax.srt.managers.schedule_batch"]
    scheduler = answers["sgl_jax.srt.managers.scheduler"]
    batch.ModelWorkerSamplingInfo = subclass("ModelWorkerSamplingInfo", SamplingInfo)
    sampler = types.ModuleType("sampler")
    sampler.top_k_top_p_min_p_sampling_from_probs_jax_with_mask = choose
    configs, model_config = types.ModuleType("configs"), types.ModuleType("model_config")
    configs.model_config = model_config
    model_config.get_config = lambda config, model_override_args=None: config
    modules = {
        "sgl_jax": types.ModuleType("sgl_jax"),
        "sgl_jax.srt": types.ModuleType("srt"),
        "sgl_jax.srt.configs": configs,
        "sgl_jax.srt.configs.model_config": model_config,
        "sgl_jax.srt.constrained": constrained,
        "sgl_jax.srt.constrained.base_grammar_backend": grammar,
        "sgl_jax.srt.entrypoints": types.ModuleType("entrypoints"),
        "sgl_jax.srt.entrypoints.engine": engine,
        openai: types.ModuleType("openai"),
        **serving,
        "sgl_jax.srt.managers": types.ModuleType("managers"),
        **answers,
        "sgl_jax.srt.managers.tokenizer_manager": types.ModuleType("tokenizer_manager"),
        "sgl_jax.srt.server_args": types.ModuleType("server_args"),
        "sgl_jax.srt.layers": types.ModuleType("layers"),
        "sgl_jax.srt.layers.attention": types.ModuleType("attention"),
        "sgl_jax.srt.layers.attention.flashattention_backend": backend,
        "sgl_jax.srt.layers.attention.linear": linear,
        "sgl_jax.srt.layers.attention.mla_backend": mla,
        "sgl_jax.srt.layers.moe": types.ModuleType("moe"),
        "sgl_jax.srt.layers.sampler": sampler,
        "sgl_jax.srt.mem_cache": types.ModuleType("mem_cache"),
        "sgl_jax.srt.utils": utils,
        "sgl_jax.srt.utils.jax_utils": jax_utils,
        "sgl_jax.srt.model_executor": types.ModuleType("model_executor"),
        "sgl_jax.srt.model_executor.model_runner": types.ModuleType("model_runner"),
    }
    modules["sgl_jax.srt.layers.attention"].flashattention_backend = backend
    modules["sgl_jax.srt.layers.attention"].mla_backend = mla
    modules["sgl_jax.srt.mem_cache"].memory_pool = memory_pool
    modules["sgl_jax.srt.layers"].sampler = sampler
    modules["sgl_jax.srt.layers"].moe = modules["sgl_jax.srt.layers.moe"]
    modules["sgl_jax.srt.entrypoints"].engine = engine
    modules["sgl_jax.srt.model_executor.model_runner"].ModelRunner = runner
    modules["sgl_jax.srt.managers.tokenizer_manager"].TokenizerManager = tokenizer
    modules["sgl_jax.srt.server_args"].ServerArgs = server_args
    modules["sgl_jax.srt.managers"].scheduler_output_processor_mixin = answers[
        "sgl_jax.srt.managers.scheduler_output_processor_mixin"
    ]
    modules["sgl_jax.srt.managers"].detokenizer_manager = answers[
        "sgl_jax.srt.managers.detokenizer_manager"
    ]
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    found = SimpleNamespace(version=sglang_jax.TESTED, ModelRunner=runner, backend=backend)
    found.grammar, found.batch, found.Serving = grammar, batch, of_part
    found.Chat = chat
    found.engine, found.scheduler, found.mla = engine, scheduler, mla
    found.ServerArgs, found.TokenizerManager = server_args, tokenizer
    found.kda, found.lightning, found.memory_pool = kda, lightning, memory_pool
    found.model_config, found.sampler = model_config, sampler
    found.processor = answers["sgl_jax.srt.managers.scheduler_output_processor_mixin"]
    found.detokenizer = answers["sgl_jax.srt.managers.detokenizer_manager"]
    found.io_struct = answers["sgl_jax.srt.managers.io_struct"]
    found.tp_worker = answers["sgl_jax.srt.managers.tp_worker"]
    found.lora = answers["sgl_jax.srt.lora.lora_config"]
    found.sampling_info = answers["sgl_jax.srt.sampling.sampling_batch_info"]
    found.compilation = answers["sgl_jax.srt.model_executor.compilation_manager"]
    found.weights = answers["sgl_jax.srt.utils.weight_utils"]
    found.embeddings = answers["sgl_jax.srt.layers.embeddings"]
    found.moe = modules["sgl_jax.srt.layers.moe"]
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: found.version if name == "sglang-jax" else version(name),
    )
    return found
