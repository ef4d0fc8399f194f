"""How jattn starts inside tpu-inference: hooks, processes, memory, and what is refused there.

`test_tpu_inference.py` has attention, `test_vllm.py` runs the real host.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import sys
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import tpu_inference
from jattn.integrations.tpu_inference import cpu, memory, processes
from tests.support import stand_in_host
from tests.support.processes import ROOT
from tests.support.stand_in_host import Backends, module

host = stand_in_host.host  # the fixture


def test_vllm_finds_the_plugin_by_its_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    plugins = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    point = importlib.metadata.EntryPoint("jattn", plugins["jattn"], "vllm.general_plugins")
    assert point.load() is tpu_inference.register


def test_the_extra_is_the_version_that_was_tested():
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    tested = tpu_inference.TESTED
    assert extras["vllm"] == [f"tpu-inference=={tested}", f"vllm-tpu=={tested}"]


def test_the_plugin_does_nothing_without_its_host(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tpu_inference.register()
    assert not caplog.records


def test_the_plugin_only_logs_where_the_host_takes_no_backends(host, caplog):
    host.version = "0.27.0"
    del sys.modules["tpu_inference.layers.common.attention_backend"].register_attention_backend
    tpu_inference.register()
    [record] = caplog.records
    assert "0.27.0" in record.getMessage()
    assert tpu_inference.TESTED in record.getMessage()
    assert not host.told


def test_another_version_is_refused_when_jattn_is_asked_for_and_not_before(host, monkeypatch):
    host.version = "0.33.1"
    tpu_inference.register()
    assert not hasattr(sys.modules["tpu_inference.utils"], "hbm_usage_bytes")
    with pytest.raises(ValueError, match=r"tpu-inference: version 0\.33\.1, but must be 0\.32\.0"):
        host.start()
    monkeypatch.setenv(tpu_inference.ANY_VERSION, "1")
    host.start()


@pytest.mark.parametrize(
    ("platforms", "chips", "hooked"),
    [
        ("", 4, False),
        ("tpu,cpu", 4, False),
        ("proxy", 0, False),
        ("", 0, True),
        ("cpu", 4, True),  # other accelerators have files where TPUs have theirs
    ],
)
def test_hooks_are_for_machines_without_tpus(host, monkeypatch, platforms, chips, hooked):
    host.chips = chips
    monkeypatch.setattr("tpu_inference.envs.JAX_PLATFORMS", platforms)
    tpu_inference.register()
    utils, info = (sys.modules[f"tpu_inference.{name}"] for name in ("utils", "tpu_info"))
    assert hasattr(utils, "hbm_usage_bytes") == hooked
    if not hooked:
        assert info.get_num_chips() == chips
        return
    assert info.get_num_chips() == 0
    assert info.get_num_cores_per_chip() == 1
    mesh = utils.make_optimized_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    [(used, there)] = utils.hbm_usage_bytes(jax.devices()[:1])
    assert 0 == used < 2**20 < there
    assert utils.get_device_name(2) == "cpu-2"
    options = sys.modules["tpu_inference.models.common.compiler_options"]
    assert options.get_step_fn_compiler_options() == {}
    overwritten = np.zeros(3)
    sent, kept = utils.general_device_put((overwritten, None), sharding=None)
    overwritten[:] = 1
    assert not sent.any()
    assert kept is None
    put = utils.general_device_put
    tpu_inference.enable_cpu()
    assert utils.general_device_put is put  # once is enough
    t2j = sys.modules["tpu_inference.layers.vllm.quantization.unquantized"].t2j
    assert t2j(SimpleNamespace(clone=lambda: "a copy"), use_dlpack=False) == "a copy"


def test_blocks_that_come_are_in_the_caches_before_the_step(host):
    tpu_inference.enable_cpu()
    mixin = sys.modules["vllm.v1.worker.kv_connector_model_runner_mixin"]
    step = SimpleNamespace(has_sync_kv_loads=False)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step, defer_finalize=True):
        assert step.has_sync_kv_loads


def test_runs_of_blocks_are_put_into_every_layer(host):
    tpu_inference.enable_cpu()
    copy = sys.modules["tpu_inference.distributed.kv_transfer"].multi_layer_copy
    blocks = [jnp.zeros((5, 3)) + jnp.arange(1.0, 6.0)[:, None] * layer for layer in (1, 10)]
    found = {}
    for count in (2, None):
        caches = [jnp.zeros((9, 3)) for _ in blocks]
        put = copy(
            src_array=blocks,
            dest_array=caches,
            src_offsets=jnp.array([3, 0, 2], jnp.int32),
            dest_offsets=jnp.array([1, 6, 8], jnp.int32),
            chunk_sizes=jnp.array([2, 2, 1], jnp.int32),
            num_chunks=None if count is None else jnp.array([count], jnp.int32),
            mesh=None,
        )
        assert all(cache.is_deleted() for cache in caches)  # written in place
        np.testing.assert_array_equal(put[1], 10 * put[0])
        found[count] = put[0][:, 0].tolist()
    assert found == {2: [0, 4, 5, 0, 0, 0, 1, 2, 0], None: [0, 4, 5, 0, 0, 0, 1, 2, 3]}


def test_drafts_are_compiled_without_options_for_tpus(host):
    modules = "tpu_inference.spec_decode.jax."
    eagle3 = sys.modules[f"{modules}eagle3"].Eagle3Proposer()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        eagle3._propose([jnp.zeros(2)], 3, ())
    tpu_inference.enable_cpu()
    caches = [jnp.zeros(2)]
    steps = {"num_speculative_tokens": 3, "layer_name_to_kvcache_index": (("layer.0", 0),)}
    [found] = eagle3._propose(kv_caches=caches, **steps)
    assert found.tolist() == [3, 3]
    assert caches[0].is_deleted()  # written in place
    caches = [jnp.zeros(2)]
    [found] = sys.modules[f"{modules}dflash"].DFlashProposer()._propose(caches)
    assert found.tolist() == [1, 1]
    assert caches[0].is_deleted()


def test_torch_weights_are_loaded_on_this_process_s_cpu(host, monkeypatch):
    processes.use_local_cpus()
    ours = [jax.devices()[-1]]
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: ours)
    for name in ("models.vllm.vllm_model_wrapper", "layers.vllm.process_weights.cleanup_sharding"):
        seen = sys.modules[f"tpu_inference.{name}"].jax
        assert seen.devices("cpu") is ours
        assert seen.devices() == jax.devices()
        assert seen.default_device is jax.default_device


def test_a_process_that_was_not_forked_finds_the_backend(host):
    path = f"{tpu_inference.__name__}.VllmBackend"
    member = Backends.register("JATTN", path)
    sent = [pickle.dumps(member)]
    tpu_inference.register()
    sent.append(pickle.dumps([member, Backends.FLASH_ATTN]))
    Backends.forget("JATTN")
    with pytest.raises(ValueError, match="is not a valid Backends"):
        pickle.loads(sent[0])
    try:
        found, other = pickle.loads(sent[1])
        assert (found.name, found.value, other) == ("JATTN", path, Backends.FLASH_ATTN)
        assert pickle.loads(sent[1])[0] is found
    finally:
        Backends.forget("JATTN")


def test_the_host_takes_jattn_in_any_process_and_no_other_backend(host):
    tpu_inference.register()
    tpu_inference.register()
    check = sys.modules["tpu_inference.platforms.tpu_platform"].check_attention_backend_config
    check(SimpleNamespace(backend=SimpleNamespace(name="JATTN")))
    with pytest.raises(ValueError, match="forked processes only"):
        check(SimpleNamespace(backend=SimpleNamespace(name="ANOTHER")))


def test_several_machines_without_tpus_get_a_worker_that_brings_them_together(host, monkeypatch):
    tpu_inference.register()
    platform = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform
    asked = stand_in_host.config()
    asked.backend = SimpleNamespace(name="JATTN")
    platform.check_and_update_config(asked)
    assert asked.parallel_config.worker_cls == "the host's"
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    platform.check_and_update_config(asked)
    path, _, name = asked.parallel_config.worker_cls.rpartition(".")
    joined = []
    monkeypatch.setattr(processes, "join", lambda *given: joined.append(given))
    worker = getattr(sys.modules[path], name)()
    worker.init_device()
    assert hasattr(sys.modules["tpu_inference.models.vllm.vllm_model_wrapper"], "jax")
    assert worker.ready
    assert joined == [("tcp://10.0.0.1:4321", 1, 2)]
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND: 0, but must be 1"):
        platform.check_and_update_config(asked)


def test_processes_agree_on_where_they_meet(monkeypatch):
    kept, asked, started = {}, [], []

    class Store:
        def __init__(self, *where, **options):
            asked.append((where, options["is_master"]))

        def set(self, key, value):
            kept[key] = value.encode()

        def get(self, key):
            return kept[key]

    monkeypatch.setitem(sys.modules, "torch", module("torch", __path__=[]))
    monkeypatch.setitem(
        sys.modules, "torch.distributed", module("torch.distributed", TCPStore=Store)
    )
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda address, **given: started.append((address, given))
    )
    for rank in range(2):
        processes.join("tcp://127.0.0.1:4321", rank, 2)
    assert asked == [(("127.0.0.1", 4321), False)] * 2
    (first, zero), (second, one) = started
    assert first == second
    assert first.startswith("127.0.0.1:")
    assert first != "127.0.0.1:4321"
    assert zero == {"num_processes": 2, "process_id": 0}
    assert one == {"num_processes": 2, "process_id": 1}


def test_the_memory_of_other_processes_is_taken_to_be_as_ours():
    here = SimpleNamespace(
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_in_use": 3, "bytes_limit": 10},
    )
    there = SimpleNamespace(platform="gpu", process_index=1)
    assert cpu._memory([there, here]) == [(3, 10), (3, 10)]


GIB = 1 << 30


MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"}


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


CONTAINERS = {  # its files, and how many GiB are left
    "none": ({}, 32),
    "version 2, unlimited": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "max\n",
            f"{V2}/memory.current": f"{3 * GIB}\n",
            f"{V2}/memory.stat": "anon 5\n",
        },
        32,
    ),
    "version 2, by the group above": (
        {
            "proc/self/cgroup": "0::/pods/one\n",
            f"{V2}/pods/memory.max": f"{16 * GIB}\n",
            f"{V2}/pods/memory.current": f"{12 * GIB}\n",
            f"{V2}/pods/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            f"{V2}/pods/one/memory.max": f"{20 * GIB}\n",
            f"{V2}/pods/one/memory.current": f"{GIB}\n",
            f"{V2}/pods/one/memory.stat": "anon 5\n",
        },
        6,
    ),
    "version 1, seen from inside": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/pods\n4:memory:/not/mounted/here\n0::/\n",
            f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{V1}/memory.usage_in_bytes": f"{5 * GIB}\n",
            f"{V1}/memory.stat": f"cache 7\ntotal_inactive_file {GIB}\n",
        },
        4,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_memory_is_what_the_machine_and_the_container_have_left(tmp_path, name):
    files, left = CONTAINERS[name]
    for path, text in {**MACHINE, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory.available(tmp_path) == left * GIB


def test_workers_of_one_machine_share_its_memory(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setattr(memory, "available", lambda: 24 * GIB)
    monkeypatch.setattr(cpu, "local_workers", 1)
    here = SimpleNamespace(platform="cpu", process_index=0)
    shares = {}
    for stages in (1, 3):
        host.start(pipeline_parallel_size=stages)
        shares[stages] = cpu._memory([here, here])
    assert shares == {1: [(0, 6 * GIB)] * 2, 3: [(0, 2 * GIB)] * 2}
    platform = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform
    host.config = stand_in_host.config(data_parallel_size_local=2)
    host.config.backend = SimpleNamespace(name="JATTN")
    platform.check_and_update_config(host.config)  # before a process of its own for each
    host.told["jattn"]["attention"]()
    assert cpu._memory([here]) == [(0, 6 * GIB)]
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")  # a machine for each
    host.start()
    assert cpu._memory([here]) == [(0, 12 * GIB)]


REFUSED = {
    "decode context": (
        {"decode_context_parallel_size": 2},
        "--decode-context-parallel-size: 2, but must be 1",
    ),
    "prefill context": (
        {"prefill_context_parallel_size": 4},
        "--prefill-context-parallel-size: 4, but must be 1",
    ),
    "data, a process each": (
        {"data_parallel_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "data, one process": (
        {"model_dp_size": 2, "total_dp_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "data of attention": (
        {"total_dp_size": 4},
        "enable_dp_attention of --additional_config: true, with 4 devices that attend to requests "
        "of their own, but must be left out, or with fewer devices, on a cpu",
    ),
    "latents in pages that are padded": (
        {"use_mla": True, "block_size": 48},
        "--block-size: 48, but must be a multiple of 32 (MLA_KV_PACKING_SIZE) for a model with MLA",
    ),
    "layers that skip a prompt": (
        {"kv_sharing_fast_prefill": True},
        "--kv-sharing-fast-prefill: given, but must be left out",
    ),
    "logits": (
        {"logprobs_mode": "raw_logits"},
        "--logprobs-mode: raw_logits, but must be one of raw_logprobs, processed_logprobs",
    ),
    "processed logits": (
        {"logprobs_mode": "processed_logits"},
        "--logprobs-mode: processed_logits, but must be one of raw_logprobs, processed_logprobs",
    ),
    "log-probabilities of all tokens": (
        {"max_logprobs": -1},
        "--max-logprobs: -1, but must be from 0 to 128, the model's vocabulary",
    ),
    "log-probabilities of more tokens than there are": (
        {"max_logprobs": 129},
        "--max-logprobs: 129, but must be from 0 to 128, the model's vocabulary",
    ),
    "cache": ({"cache_dtype": "nvfp4"}, "--kv-cache-dtype: nvfp4, but must be one of auto"),
    "latents on two devices": (
        {"use_mla": True, "tensor_parallel_size": 2},
        "--tensor-parallel-size: 2, but must be 1 for a model with MLA layers",
    ),
    "more devices than KV heads": (
        {"tensor_parallel_size": 8},
        "--tensor-parallel-size: 8, but must be at most the model's 4 KV heads",
    ),
    "more devices than KV heads, by a strategy": (
        {"tp_size": 4, "expert_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 8, but must be at most",
    ),
    "latents on two devices, by a strategy": (
        {"use_mla": True, "tp_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 2, but must be 1 for",
    ),
    "layers with another cache": (
        {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "sliding_window"]},
        "--kv-cache-dtype-skip-layers: 0 sliding_window, but must be left out",
    ),
    "adapters": (
        {"lora_config": SimpleNamespace(target_modules=None)},
        "MODEL_IMPL_TYPE: auto, but must be vllm with --enable-lora",
    ),
    "recurrent layers of another kind": (
        {"is_hybrid": True, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
        "--model: NemotronHForCausalLM, but must be one whose recurrent layers",
    ),
    "windows after a prefix": (
        {"rswa_window": 128},
        "--model: Qwen3ForCausalLM with rswa_window=128, but must be one without",
    ),
    "images whose tokens see each other": (
        {"is_multimodal_model": True, "is_mm_prefix_lm": True},
        "--limit-mm-per-prompt: not 0 for all kinds of input, but must be 0 for each",
    ),
    "drafts": (
        {
            "is_hybrid": True,
            "model_type": "qwen3_next",
            "speculative_config": SimpleNamespace(method="ngram"),
        },
        "--speculative-config: given, but must be left out for a model with recurrent states",
    ),
    "kernels": (
        {"architectures": ["Llama4ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm",
    ),
    "a model of text whose configuration is another's": (
        {"architectures": ["Gemma4ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Gemma4ForCausalLM reads",
    ),
    "heads that the host pads": (
        {"head_size": 96},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Qwen3ForCausalLM loads "
        "weights for head sizes of 64 and multiples of 128 only, not 96",
    ),
    "a head of its own": (
        {"architectures": ["Qwen2ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Qwen2ForCausalLM reads",
    ),
    "prompts that are no tokens": (
        {"enable_prompt_embeds": True},
        "--enable-prompt-embeds: given, but must be left out",
    ),
    "processors of logits": (
        {"logits_processors": ["package:Class"]},
        "--logits-processors: package:Class, but must be left out",
    ),
    "weights quantized as they are loaded": (
        {"quantization": "fp8", "quant_config": type("OnlineQuantizationConfig", (), {})()},
        "--quantization: fp8, but must be left out",
    ),
    "several tokens a step": (
        {"additional_config": {"enable_continue_decode": True}},
        "enable_continue_decode of --additional_config: true, but must be left out, or given with "
        "--no-async-scheduling",
    ),
    "several tokens a step, of layers of two kinds": (
        {
            "additional_config": {"enable_continue_decode": True},
            "async_scheduling": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "enable_continue_decode of --additional_config: true, for layers of full_attention and "
        "sliding_attention, but must be left out",
    ),
    "requests that are sent again": (
        {"use_v2_model_runner": True},
        "VLLM_USE_V2_MODEL_RUNNER: 0, but must be 0: vLLM's scheduler would send a request",
    ),
    "images with drafts": (
        {
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
            "speculative_config": SimpleNamespace(method="ngram"),
        },
        "--speculative-config: given, but must be left out for a model of more than text",
    ),
    "chunks of two kinds": (
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "--model: Qwen3ForCausalLM with dual_chunk_attention_config, but must be one without it "
        """(--hf-overrides '{"dual_chunk_attention_config": null}')""",
    ),
    "memory of caches": (
        {"kv_cache_memory_bytes": 2**30},
        "--kv-cache-memory-bytes: 1073741824, but must be left out",
    ),
    "caches elsewhere": (
        {"kv_offloading_size": 4.0},
        "--kv-offloading-size: 4.0, but must be left out: the host moves no blocks elsewhere",
    ),
    "marks in a text": (
        {"watermark_config": "gumbel", "use_v2_model_runner": True},
        "--watermark-config: gumbel, but must be left out: the host would mark no text",
    ),
    "masks of samples": (
        {"return_sampling_mask": True},
        "--return-sampling-mask: True, but must be left out",
    ),
    "traces": ({"enable_trace_replay": True}, "--enable-trace-replay: True, but must be left out"),
}


SERVED = {
    "drafts of a model of images that is given none": {
        "is_multimodal_model": True,
        "speculative_config": SimpleNamespace(method="ngram"),
    },
    "several tokens a step": {
        "additional_config": {"enable_continue_decode": True},
        "async_scheduling": False,
    },
    "latents in pages that are not padded": {"use_mla": True, "block_size": 64},
    "blocks that are no pages of latents": {"block_size": 48},
    "processed log-probabilities": {"logprobs_mode": "processed_logprobs", "max_logprobs": 128},
    "one token a step": {"additional_config": {"enable_continue_decode": False}},
    "heads of 64": {"head_size": 64},
    "heads of 256": {"head_size": 256},
    "heads of a model that pads its weights": {
        "head_size": 96,
        "architectures": ["LlamaForCausalLM"],
    },
    "a head that is the embedding": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "weights that a checkpoint has quantized": {
        "quantization": "fp8",
        "quant_config": type("VllmFp8Config", (), {})(),
    },
    "a model of text, from a configuration of more": {
        "architectures": ["Gemma4ForCausalLM"],
        "text_config": {},
    },
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_next_to_a_refusal_is_served(host, name):
    tpu_inference.register()
    host.start(**SERVED[name])


ADAPTERS = SimpleNamespace(target_modules=None)
TORCH = {
    "Gemma 4 of text": {"architectures": ["Gemma4ForCausalLM"]},
    "any head size": {"head_size": 96},
    "adapters": {"lora_config": ADAPTERS},
    "adapters with experts": {
        "lora_config": SimpleNamespace(target_modules=["q_proj"]),
        "experts": 8,
    },
}


@pytest.mark.parametrize("name", TORCH)
def test_some_models_are_served_as_torch_models(host, name):
    tpu_inference.register()
    host.impl = "vllm"
    host.start(**TORCH[name])


@pytest.mark.parametrize("targets", [None, ["q_proj", "experts"]])
def test_adapters_of_experts_are_refused(host, targets):
    tpu_inference.register()
    adapters = SimpleNamespace(target_modules=targets)
    host.impl = "vllm"
    said = "left out" if targets is None else "q_proj experts"
    with pytest.raises(ValueError, match=f"--lora-target-modules: {said}, but must be names of"):
        host.start(lora_config=adapters, experts=8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(host, name):
    changes, message = REFUSED[name]
    tpu_inference.register()
    with pytest.raises(ValueError, match="--attention-backend jattn") as error:
        host.start(**changes)
    assert message in str(error.value)
    assert "1 wrong argument(s)" in str(error.value)
    host.start()


def test_models_of_torch_may_have_adapters_and_fewer_kv_heads_than_devices(host):
    """The host also takes vLLM's model where it has none of its own."""
    tpu_inference.register()
    changes = {"lora_config": ADAPTERS, "tensor_parallel_size": 8}
    for host.impl, host.has_jax_model in (("vllm", True), ("flax_nnx", False)):
        host.start(**changes)
    with pytest.raises(ValueError, match="--enable-lora: given, for a vocabulary of 96 tokens"):
        host.start(**changes, vocabulary=96)
    host.has_jax_model = True
    with pytest.raises(ValueError, match=r"2 wrong argument\(s\)"):
        host.start(**changes)


@pytest.mark.parametrize("given", [None, "1"])
def test_vllm_schedules_for_the_runner_that_the_host_has(host, monkeypatch, given):
    """Unless its user says otherwise, and is told."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given)
    tpu_inference.register()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == (given or "0")


def test_a_variable_does_not_name_experts_for_adapters(host, monkeypatch):
    tpu_inference.register()
    host.impl = "vllm"
    monkeypatch.setenv("LORA_MODULE_PATH", "mlp/(gate|experts)")
    adapted = {"lora_config": SimpleNamespace(target_modules=["q_proj"])}
    host.start(**adapted)
    with pytest.raises(ValueError, match=r"LORA_MODULE_PATH: mlp/\(gate\|experts\), but must be"):
        host.start(**adapted, experts=8)
    monkeypatch.setenv("LORA_MODULE_PATH", "")
    host.start(**adapted, experts=8)
    with pytest.raises(ValueError, match="--lora-target-modules: left out, but must be names of"):
        host.start(lora_config=ADAPTERS, experts=8)


def test_ends_of_answers_are_looked_for_in_each_of_several_steps(host, monkeypatch):
    tpu_inference.register()
    several = SERVED["several tokens a step"]
    monkeypatch.setenv("CONTINUE_DECODE_EOS_CHECK_INTERVAL", "4")
    host.start()
    with pytest.raises(ValueError, match="CONTINUE_DECODE_EOS_CHECK_INTERVAL: 4, but must be 1"):
        host.start(**several)
    monkeypatch.setenv("CONTINUE_DECODE_EOS_CHECK_INTERVAL", "1")
    host.start(**several)


@pytest.mark.parametrize("setting", ["ENABLE_QUANTIZED_MATMUL_KERNEL", "TPU_ENABLE_D2H_TRANSFER"])
def test_kernels_that_settings_ask_for_are_refused_without_a_tpu(host, setting, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv(setting, "1")
    with pytest.raises(ValueError, match=f"{setting}: 1, but must be 0"):
        host.start()


def test_pages_of_latents_with_their_tokens_last_are_refused(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv("MLA_TRANSPOSE_KV_CACHE", "1")
    host.start()
    with pytest.raises(ValueError, match="MLA_TRANSPOSE_KV_CACHE: 1, but must be 0"):
        host.start(use_mla=True)


def drafting(method, architecture="Draft", count=3, head_size=128, hidden_size=256, heads=2):
    """A vLLM `SpeculativeConfig`."""
    config = SimpleNamespace(hidden_size=hidden_size, num_attention_heads=heads)
    draft = SimpleNamespace(
        architectures=[architecture], hf_config=config, get_head_size=lambda: head_size
    )
    return SimpleNamespace(method=method, num_speculative_tokens=count, draft_model_config=draft)


LLAMA, TIED = {"architectures": ["LlamaForCausalLM"]}, {"tie_word_embeddings": True}
DRAFTS_SERVED = {  # how the model is run, a draft, and what the model is
    "EAGLE3 for a JAX model": ("flax_nnx", drafting("eagle3"), LLAMA),
    "EAGLE3 for a torch model": ("vllm", drafting("eagle3", head_size=96), {}),
    "heads that are padded alike": (
        "flax_nnx",
        drafting("eagle3", head_size=96, hidden_size=192),
        {**LLAMA, "head_size": 224},
    ),
    "heads of 64, and of 128": (
        "flax_nnx",
        drafting("eagle3", head_size=64, hidden_size=128),
        LLAMA,
    ),
    "DFLASH": ("flax_nnx", drafting("dflash"), TIED),
    "DFLASH of a Llama": ("flax_nnx", drafting("dflash"), LLAMA),
    "MTP of a JAX model": ("flax_nnx", drafting("mtp", "Gemma4MTPModel"), {}),
    "MTP of a torch model": ("vllm", drafting("mtp", "Glm4MoeMTPModel"), {}),
    "MTP of one token": ("vllm", drafting("mtp", "MiMoMTPModel", count=1), {}),
}


@pytest.mark.parametrize("name", DRAFTS_SERVED)
def test_drafts_are_served_a_step_at_a_time(host, name):
    host.impl, draft, changes = DRAFTS_SERVED[name]
    tpu_inference.register()
    host.start(speculative_config=draft, async_scheduling=False, **changes)
    with pytest.raises(ValueError, match="--async-scheduling: on, but must be off") as error:
        host.start(speculative_config=draft, async_scheduling=True, **changes)
    assert "1 wrong argument(s)" in str(error.value)


DRAFTS_REFUSED = {
    "EAGLE": ("vllm", drafting("eagle"), {}, "--speculative-config: method eagle, but must be"),
    "EAGLE3 for another JAX model": (
        "flax_nnx",
        drafting("eagle3"),
        {},
        "MODEL_IMPL_TYPE: auto, but must be vllm, and DRAFT_MODEL_IMPL_TYPE too: hidden states for",
    ),
    "DFLASH for a torch model": (
        "vllm",
        drafting("dflash"),
        TIED,
        "MODEL_IMPL_TYPE: auto, but must be flax_nnx, and DRAFT_MODEL_IMPL_TYPE too, with drafts",
    ),
    "DFLASH for another JAX model": (
        "flax_nnx",
        drafting("dflash"),
        {"architectures": ["Gemma4ForCausalLM"], "text_config": {}},
        "--speculative-config: method dflash, but must be left out: hidden states for it come only",
    ),
    "DFLASH for a head of its own": (
        "flax_nnx",
        drafting("dflash"),
        {},
        "must be left out for a Qwen3ForCausalLM without tie_word_embeddings",
    ),
    "heads that are padded as the model's are": (
        "flax_nnx",
        drafting("eagle3", head_size=64, hidden_size=128),
        {**LLAMA, "head_size": 96},
        "model of --speculative-config: one with head size 64 (hidden_size / heads: 64), but must",
    ),
    "a cache for smaller heads": (
        "flax_nnx",
        drafting("dflash", hidden_size=128),
        TIED,
        "model of --speculative-config: one with head size 128 (hidden_size / heads: 64), but must",
    ),
    "MTP that returns two arrays": (
        "vllm",
        drafting("mtp", "DeepSeekMTPModel"),
        {},
        "--speculative-config: mtp with DeepSeekMTPModel, but must be left out",
    ),
    "MTP of one token": (
        "vllm",
        drafting("mtp", "MiMoMTPModel", count=2),
        {},
        "num_speculative_tokens of --speculative-config: 2, but must be 1: MiMoMTPModel drafts",
    ),
}


@pytest.mark.parametrize("name", DRAFTS_REFUSED)
def test_drafts_that_end_the_host_are_refused_at_the_start(host, name):
    host.impl, draft, changes, message = DRAFTS_REFUSED[name]
    tpu_inference.register()
    with pytest.raises(ValueError, match=r"1 wrong argument\(s\)") as error:
        host.start(speculative_config=draft, async_scheduling=False, **changes)
    assert message in str(error.value)
