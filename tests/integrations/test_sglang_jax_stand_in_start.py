"""What jattn replaces and refuses when an engine of sglang-jax starts, with a stand-in.

`tests/integrations/test_sglang_jax.py` runs the real host.
"""

from __future__ import annotations

import pickle
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

from jattn.integrations import sglang_jax, versions
from tests.support import stand_in_sglang
from tests.support.processes import ROOT

host = stand_in_sglang.host  # the fixture


def test_install_replaces_the_kernels_on_cpus(host):
    sglang_jax.install()
    choose = host.ModelRunner._get_attention_backend
    sglang_jax.install()  # the second time changes nothing
    assert host.ModelRunner._get_attention_backend is choose
    runner = host.ModelRunner()
    made = runner._get_attention_backend()
    assert made.made_with != {"device": "cpu"}  # for which the host would not choose "fa"
    assert runner.server_args.device == "cpu"
    kernel = host.backend.ragged_paged_attention_v3
    assert kernel.__wrapped__ is sglang_jax.ragged_paged_attention
    assert host.moe.gmm is sglang_jax.experts.gmm
    write = sglang_jax.writes.update_fused_kv_cache_vectorized
    assert host.memory_pool.update_fused_kv_cache_vectorized is write
    assert host.kda.chunk_kda is sglang_jax.recurrent.chunk_kda
    assert host.lightning.simple_gla_fwd is sglang_jax.recurrent.simple_gla_fwd
    decode = sglang_jax.recurrent.decode_simple_gla_fused
    assert host.lightning.decode_simple_gla_fused is decode


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROTARY = {  # what transformers 5 writes, what a user gives, and what the host reads
    "plain": ({"rope_theta": 5e5, "rope_type": "default"}, {}, (5e5, None, 1)),
    "scaled": (
        {"rope_theta": 5e5, **YARN}, {},
        (5e5, YARN, 1),
    ),
    "a rotated part of heads": (
        {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5}, {},
        (5e5, None, 0.5),
    ),
    "three positions": (
        {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [2, 3, 3]}, {},
        (5e5, {"rope_type": "default", "mrope_section": [2, 3, 3]}, 1),
    ),
    "scaled, by an older name": (
        {"rope_theta": 5e5, "type": "linear", "factor": 4.0}, {},
        (5e5, {"rope_type": "linear", "factor": 4.0}, 1),
    ),
    "two kinds of layers, read by their model": (
        {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}, {},
        (10.0, "none", 1),
    ),
    "nothing": (None, {}, (10.0, "none", 1)),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embeddings_as_transformers_5_writes_them_are_read(host, name, nested):
    written, given, want = ROTARY[name]
    sglang_jax.install()
    text = SimpleNamespace(
        rope_parameters=written, rope_theta=10.0, rope_scaling="none", partial_rotary_factor=1
    )
    config = SimpleNamespace(text_config=text) if nested else text
    assert host.model_config.get_config(config, model_override_args=given) is config
    assert (text.rope_theta, text.rope_scaling, text.partial_rotary_factor) == want


def test_a_users_settings_of_rotary_embeddings_are_kept(host):
    """The host applies them to the whole configuration, but not to its text part."""
    sglang_jax.install()
    written = {"rope_theta": 5e5, **YARN}
    text = SimpleNamespace(rope_parameters=written, rope_theta=10.0)
    config = SimpleNamespace(rope_parameters=written, rope_theta=7.0, text_config=text)
    host.model_config.get_config(config, model_override_args={"rope_theta": 7.0})
    assert (config.rope_theta, text.rope_theta) == (7.0, 5e5)
    assert config.rope_scaling == text.rope_scaling == YARN


def test_a_model_that_reads_rotary_dim_gets_it(host):
    sglang_jax.install()
    config = SimpleNamespace(
        model_type="minimax_m2",
        head_dim=128,
        rope_parameters={"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5},
    )
    host.model_config.get_config(config)
    assert (config.rotary_dim, config.rope_theta) == (64, 5e6)


def test_every_request_has_a_grammar_of_its_own(host):
    """Each is compiled once and then copied; an invalid one is reported and not compiled again."""
    sglang_jax.install()
    backend = host.grammar.BaseGrammarBackend()
    found = [backend.get_cached_or_future_value(("regex", "5")) for _ in range(3)]
    assert [(one.token, ready) for one, ready in found] == [(5, True)] * 3
    assert len({id(one) for one, _ in found}) == 3
    for _ in range(2):
        invalid = backend.get_cached_or_future_value(("regex", "("))
        assert invalid == (host.grammar.INVALID_GRAMMAR_OBJ, True)
    assert backend.compiled == [("regex", "5"), ("regex", "(")]


def test_requests_without_a_grammar_may_have_any_token(host):
    """So may padding rows and requests whose grammar has ended; then a row changes its request."""
    sglang_jax.install()
    make = host.batch.ModelWorkerSamplingInfo
    first, second, ended = (
        stand_in_sglang.Grammar(3),
        stand_in_sglang.Grammar(4),
        stand_in_sglang.Grammar(5),
    )
    ended.finished = True
    masks = []
    for grammars in ([None, first, second], [first, ended]):
        info = make(grammars, 4)
        info.update_grammar_vocab_mask()
        masks.append(info.vocab_mask)
    assert masks[0][:, 0].tolist() == [-1, 8, 16, -1]
    assert masks[1][:, 0].tolist() == [8, -1, -1, -1]
    for grammars in (None, [None]):
        info = make(grammars, 4)
        info.update_grammar_vocab_mask()
        assert info.vocab_mask is None


def test_arrays_that_the_host_overwrites_later_are_copied(host):
    """JAX arrays on CPUs may share NumPy's memory; modules import the host's function by name."""
    sglang_jax.install()
    for _ in range(2):  # of engines
        host.ModelRunner()._get_attention_backend()
    lens = np.arange(3)
    (found, kept), sharding = host.backend.device_array((lens, "a"), "sharding")
    assert sharding == "sharding"
    assert kept == "a"
    assert not np.shares_memory(found, lens)
    np.testing.assert_array_equal(found, lens)


def test_the_kernel_for_latents_is_replaced(host):
    """Only while it is created, the host's backend is given a memory size: it would ask a TPU."""
    plain = host.mla.MLAAttentionBackend
    sglang_jax.install()
    made = host.ModelRunner(use_mla_backend=True)._get_attention_backend()
    assert made.made_with == {"page_size": 16, "vmem_limit_bytes": 0}
    assert host.mla.MLAAttentionBackend is plain
    kernel = host.mla.mla_ragged_paged_attention
    assert kernel.__wrapped__ is sglang_jax.latent.mla_ragged_paged_attention


@pytest.mark.parametrize("changes", [{}, {"hybrid": True}, {"use_mla_backend": True}])
def test_engines_of_a_process_keep_their_own_lengths(host, monkeypatch, changes):
    """The engines share the modules with the kernels; the second has shorter sequences."""
    for module in (sglang_jax, sglang_jax.latent):
        name = (
            "mla_ragged_paged_attention" if module is not sglang_jax else "ragged_paged_attention"
        )
        monkeypatch.setattr(module, name, lambda *args, max_seq_len: (args, max_seq_len))
    sglang_jax.install()
    made = [
        host.ModelRunner(context_len=length, **changes)._get_attention_backend()
        for length in (64, 32)
    ]
    first, second = (getattr(one, "full_attn_backend", one) for one in made)
    assert first("q") == (("q",), 64)
    assert second("q") == (("q",), 32)
    with pytest.raises(LookupError):
        host.backend.ragged_paged_attention_v3("q")


def test_draft_tokens_come_on_top_of_the_longest_sequence(host, monkeypatch):
    monkeypatch.setattr(sglang_jax, "ragged_paged_attention", lambda *, max_seq_len: max_seq_len)
    sglang_jax.install()
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}
    assert host.ModelRunner(context_len=32, **drafts)._get_attention_backend()() == 36


def test_a_draft_model_has_the_served_models_longest_sequence(host, monkeypatch):
    """A draft model may name a shorter context, but the host does not shorten its sequences."""
    monkeypatch.setattr(sglang_jax, "ragged_paged_attention", lambda *, max_seq_len: max_seq_len)
    sglang_jax.install()
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}
    pool = SimpleNamespace(max_context_len=68)
    runner = host.ModelRunner(context_len=32, req_to_token_pool=pool, **drafts)
    assert runner._get_attention_backend()() == 72


def test_windows_of_dflash_are_refused(host, monkeypatch):
    sglang_jax.install()
    monkeypatch.setenv("SGL_JAX_DFLASH_DRAFT_PREFIX_WINDOW", "64")
    host.ModelRunner()._get_attention_backend()
    runner = host.ModelRunner(speculative_algorithm="DFLASH", speculative_eagle_topk=1)
    with pytest.raises(ValueError, match="SGL_JAX_DFLASH_DRAFT_PREFIX_WINDOW: 64, but must be 0"):
        runner._get_attention_backend()
    monkeypatch.setenv("SGL_JAX_DFLASH_DRAFT_PREFIX_WINDOW", "all")
    with pytest.raises(ValueError, match="PREFIX_WINDOW: all, but must be 0"):
        runner._get_attention_backend()
    monkeypatch.delenv("SGL_JAX_DFLASH_DRAFT_PREFIX_WINDOW")
    runner._get_attention_backend()


def test_eagle3_without_the_hosts_fused_step_is_refused(host, monkeypatch):
    sglang_jax.install()
    runner = host.ModelRunner(speculative_algorithm="EAGLE3", speculative_eagle_topk=1)
    runner._get_attention_backend()
    monkeypatch.setenv(sglang_jax.refusals.RECURRENT, "1")
    with pytest.raises(ValueError, match=f"{sglang_jax.refusals.RECURRENT}: 1, but must be 0"):
        runner._get_attention_backend()


def test_pages_of_latents_in_float32_may_be_odd(host):
    sglang_jax.install()
    host.ModelRunner(use_mla_backend=True, page_size=3, dtype="float32")._get_attention_backend()


def test_the_schedulers_process_has_jattn_too(host):
    """A spawned process finds a function by its module and name."""
    sglang_jax.install()
    run = pickle.loads(pickle.dumps(host.engine.run_scheduler_process))
    plain = host.ModelRunner._get_attention_backend.__wrapped__
    host.ModelRunner._get_attention_backend = plain  # as in a new process
    seen = []
    host.scheduler.run_scheduler_process = lambda *arguments: seen.append(
        (arguments, host.ModelRunner._get_attention_backend is not plain)
    )
    run("arguments", "ports", None, "pipe")
    assert seen == [(("arguments", "ports", None, "pipe"), True)]


REFUSED = {
    "backend": ({"attention_backend": "native"}, "--attention-backend: native, but must be fa"),
    "latents": (
        {"use_mla_backend": True, "page_size": 1},
        "--page-size: 1, but must be even for a model with MLA",
    ),
    "latents in pages that are padded": (
        {"use_mla_backend": True, "page_size": 3},
        "--page-size: 3, but must be even for a model with MLA",
    ),
    "narrow latents in pages that are padded": (
        {"use_mla_backend": True, "page_size": 3, "dtype": "float32", "kv_cache_dtype": "bf16"},
        "--page-size: 3, but must be even for a model with MLA",
    ),
    "wide latents": (
        {"use_mla_backend": True, "page_size": 1, "dtype": "float32"},
        "--page-size: 1, but must be at least 2 for a model with MLA",
    ),
    "layers that share keys and values": (
        {"hf_text_config": {"num_kv_shared_layers": 20}},
        "--model-path: a model with num_kv_shared_layers=20, but must be one without (Gemma 4 26B",
    ),
    "a window that the host does not implement": (
        {
            "hf_config": {"architectures": ["Qwen3ForCausalLM"]},
            "hf_text_config": {"sliding_window": 64},
        },
        "--context-length: 128, but must be at most 64, the sliding window of Qwen3ForCausalLM",
    ),
    "biases that the host ignores": (
        {
            "hf_config": {"architectures": ["LlamaForCausalLM"]},
            "hf_text_config": {"mlp_bias": True},
        },
        "--model-path: a model of LlamaForCausalLM with mlp_bias, but must be one without",
    ),
    "a rotated part of heads, for Phi-3": (
        {
            "hf_config": {"architectures": ["Phi3ForCausalLM"]},
            "hf_text_config": {"partial_rotary_factor": 0.75},
        },
        "--model-path: a model of Phi3ForCausalLM with partial_rotary_factor=0.75, but must be one",
    ),
    "a RoPE attention factor": (
        {
            "hf_config": {"architectures": ["Qwen2ForCausalLM"]},
            "hf_text_config": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.5}},
        },
        "with attention_factor=1.5 of rope_scaling, but must be one without",
    ),
    "RoPE without truncation": (
        {
            "hf_config": {"architectures": ["Qwen2ForCausalLM"]},
            "hf_text_config": {"rope_scaling": {"rope_type": "yarn", "truncate": False}},
        },
        "with truncate=False of rope_scaling, but must be one without",
    ),
    "RoPE scaling": (
        {
            "hf_config": {"architectures": ["Qwen3ForCausalLM"]},
            "hf_text_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        },
        "a model of Qwen3ForCausalLM with rope_scaling of rope_type yarn, but must be one without",
    ),
    "biases of Ling": (
        {
            "hf_config": {"architectures": ["BailingMoeV2ForCausalLM"]},
            "hf_text_config": {"use_qkv_bias": True},
        },
        "a model of BailingMoeV2ForCausalLM with use_qkv_bias, but must be one without",
    ),
    "another activation": (
        {
            "hf_config": {"architectures": ["LlamaForCausalLM"]},
            "hf_text_config": {"hidden_act": "gelu"},
        },
        "a model of LlamaForCausalLM with hidden_act=gelu, but must be one with silu",
    ),
    "an unknown quantization": (
        {
            "hf_config": {
                "architectures": ["Qwen3ForCausalLM"],
                "quantization_config": {"quant_method": "awq"},
            },
        },
        "a model of Qwen3ForCausalLM with weights quantized by awq, but must be one with "
        "unquantized weights",
    ),
    "as many adapters as the limit": (
        {"enable_lora": True, "lora_paths": ["a", "b"], "max_loras_per_batch": 2},
        "--max-loras-per-batch: 2, but must be at least 3, one more than --lora-paths",
    ),
    "long prompts without chunks": (
        {"chunked_prefill_size": -1, "max_prefill_tokens": 100},
        "--max-prefill-tokens: 100, but must be at least 128, the longest prompt, with",
    ),
    "experts without a scoring_func": (
        {"hf_config": {"architectures": ["DeepseekV2ForCausalLM"]}},
        'with no scoring_func, but must be one with "scoring_func": "softmax"',
    ),
    "rotary embeddings of two kinds": (
        {
            "hf_text_config": {
                "rope_parameters": {"full_attention": {"rope_theta": 5e6}},
            },
            "hf_config": {"architectures": ["MiMoV2FlashForCausalLM"]},
        },
        "--model-path: a model of MiMoV2FlashForCausalLM with rope_parameters of several kinds of",
    ),
    "per-layer embeddings": (
        {"hf_text_config": {"hidden_size_per_layer_input": 256}},
        "--model-path: a model with hidden_size_per_layer_input=256, but must be one without",
    ),
    "draft layers of MiMo": (
        {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1},
        "--speculative-algorithm: NEXTN, but must be EAGLE3",
    ),
    "speculative decoding with seeds": (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
            "enable_deterministic_sampling": True,
        },
        "--enable-deterministic-sampling: given, but must be left out with --speculative-algorithm",
    ),
    "trees of draft tokens": (
        {"speculative_algorithm": "EAGLE3"},
        "--speculative-eagle-topk: 5, but must be 1, for chains of draft tokens",
    ),
    "speculative decoding with latents": (
        {"use_mla_backend": True, "speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
        "--speculative-algorithm: EAGLE3, but must be left out: the host cannot verify draft "
        "tokens of models with MLA or linear attention",
    ),
    "speculative decoding with recurrent layers": (
        {
            "linear_recurrent_config": {},
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
        },
        "--speculative-algorithm: EAGLE3, but must be left out: the host cannot verify draft "
        "tokens of models with MLA or linear attention",
    ),
    "another number of draft tokens": (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "speculative_num_steps": 4,
        },
        "--speculative-num-draft-tokens: 4, but must be 5, one more than --speculative-num-steps",
    ),
    "single draft tokens": (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 2,
            "speculative_num_steps": 1,
        },
        "--speculative-num-steps: 1, but must be at least 2: the host verifies a single draft "
        "token with a TPU kernel",
    ),
    "draft tokens verified as trees": (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
        "--speculative-algorithm: EAGLE, but must be EAGLE3: the host verifies these draft "
        "tokens with a TPU kernel",
    ),
    "fused dense layers": (
        {"hf_config": {"architectures": ["GlmMoeDsaForCausalLM"]}},
        "--model-path: a model of GlmMoeDsaForCausalLM without quantization, but must be another",
    ),
    "fused experts": (
        {"moe_backend": "auto", "effective_moe_backend": "fused"},
        "--moe-backend: auto, but must be epmoe: ",
    ),
    "only fused experts": (
        {"effective_moe_backend": "fused"},
        "--model-path: a mixture of experts that the host always computes with its fused kernel",
    ),
    "block scales": (
        {"quantization_config": SimpleNamespace(weight_block_size=(128, 128))},
        "--model-path: weights with scales for blocks of (128, 128) (weight_block_size), but must",
    ),
    "configured block scales": (
        {
            "quantization_config": SimpleNamespace(weight_block_size=(128, 128)),
            "quantization_config_path": "fp8.yaml",
        },
        "--quantization-config-path: weights with scales for blocks of (128, 128)",
    ),
    "delta nets": (
        {
            "qwen3_5_hybrid_config": {},
            "_explicit_cli_args": {"--gdn-prefill-impl=fused_chunk_parallel"},
        },
        "--gdn-prefill-impl: fused_chunk_parallel, but must be chunked_jax, or left out",
    ),
    "temperatures that grow with the position": (
        {"hf_config": {"attn_temperature_len": 1024}},
        "--model-path: a model with attn_temperature_len=1024, but must be one without",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(host, name):
    changes, message = REFUSED[name]
    sglang_jax.install()
    with pytest.raises(ValueError, match="1 wrong argument") as error:
        host.ModelRunner(**changes)._get_attention_backend()
    assert message in str(error.value)


def test_a_device_that_jax_does_not_find_is_refused(host):
    """This comes before the host asks a CPU how much memory a TPU has."""
    sglang_jax.install()
    assert host.ModelRunner(device="cpu").get_available_device_memory() == 1000
    with pytest.raises(ValueError, match=r"--device: tpu, .* but must be cpu,"):
        host.ModelRunner(device="tpu").get_available_device_memory()


@pytest.mark.parametrize("flag", ["--is-embedding", "--multimodal", "--enable-mixed-chunk"])
def test_modes_in_which_requests_fail_are_refused(host, flag):
    """When settings are created, and by a runner whose settings predate `install`."""
    sglang_jax.install()
    setting = {flag[2:].replace("-", "_"): True}
    message = f"{flag}: given, but must be left out"
    with pytest.raises(ValueError, match=message):
        host.ServerArgs(**setting)
    assert host.ServerArgs().finished
    with pytest.raises(ValueError, match=message):
        host.ModelRunner(**setting).get_available_device_memory()


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("BailingMoeV2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}),
        ("Qwen3ForCausalLM", {"sliding_window": 128}),
        ("Gemma2ForCausalLM", {"sliding_window": 64}),
        ("Qwen3ForCausalLM", {"sliding_window": None, "mlp_bias": True}),
    ],
    ids=["not in use", "as long as the context", "that the host implements", "none"],
)
def test_models_whose_window_hides_nothing_or_is_implemented_are_served(host, architecture, text):
    sglang_jax.install()
    runner = host.ModelRunner(hf_config={"architectures": [architecture]}, hf_text_config=text)
    runner._get_attention_backend()


def test_adapters_activations_and_weights_close_to_refused_ones_are_served(host):
    sglang_jax.install()
    changes = [
        {"enable_lora": True, "lora_paths": ["a", "b"], "max_loras_per_batch": 3},
        # No prompt is longer than the cache.
        {"chunked_prefill_size": -1, "max_prefill_tokens": 100, "max_total_tokens": 96},
        {"lora_paths": None, "max_loras_per_batch": 1, "enable_lora": True},
        {
            "hf_config": {"architectures": ["Gemma2ForCausalLM"]},
            "hf_text_config": {"hidden_act": "gelu"},
        },
        {
            "hf_config": {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config": SimpleNamespace(weight_block_size=None),
        },
    ]
    for change in changes:
        host.ModelRunner(**change)._get_attention_backend()


def test_quantized_dense_layers_are_not_fused(host):
    sglang_jax.install()
    host.ModelRunner(
        hf_config={"architectures": ["GlmMoeDsaForCausalLM"]},
        quantization_config=SimpleNamespace(weight_block_size=None),
    )._get_attention_backend()


@pytest.mark.parametrize("model", [None, {}])
def test_gated_delta_nets_prefill_without_a_tpu(host, caplog, model):
    """They do unless another way was asked for; other models ignore the setting and keep it."""
    sglang_jax.install()
    runner = host.ModelRunner(qwen3_5_hybrid_config=model)
    with caplog.at_level("INFO", "jattn.integrations.sglang_jax"):
        runner._get_attention_backend()
    want = "fused_chunk_parallel" if model is None else "chunked_jax"
    assert runner.server_args.gdn_prefill_impl == want
    assert ("--gdn-prefill-impl is chunked_jax" in caplog.text) == (model is not None)


@pytest.mark.parametrize("length", [-1, None])
def test_models_without_such_a_temperature_are_served(host, length):
    sglang_jax.install()
    host.ModelRunner(hf_config={"attn_temperature_len": length})._get_attention_backend()


def test_the_extra_is_the_version_that_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = sglang_jax.TESTED
    assert extras["optional-dependencies"]["sglang"] == [f"sglang-jax[cpu]=={tested}"]


def test_another_version_is_refused(host, monkeypatch):
    host.version = "0.0.2"
    with pytest.raises(ValueError, match=r"sglang-jax: version 0\.0\.2, but must be 0\.1\.0rc0"):
        sglang_jax.install()
    monkeypatch.setenv(versions.ANY_VERSION, "1")
    sglang_jax.install()
