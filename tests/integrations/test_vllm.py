"""vLLM on JAX with jattn as its attention backend, judged by transformers in float64.

Needs the host in its own environment, and takes minutes:

    pip install -e '.[vllm]' pytest openai
    pytest -m hosts tests/integrations/test_vllm.py

A random model continues prompts greedily, once in vLLM's engine with its scheduler and paged pool,
and once in transformers in float64 without any cache. The prompts differ in length, and some are
longer than what the engine prefills at once. Every token must be the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import urllib.error
import urllib.request

import numpy as np
import pytest

from benchmarks.serving.servers import free_port
from examples.options import CHECKPOINTS
from tests.support import numpy_model, vllm_checkpoints, vllm_host
from tests.support.families import FAMILIES, Family
from tests.support.vllm_host import prompts

pytestmark = [pytest.mark.hosts]
if not (importlib.util.find_spec("tpu_inference") and importlib.util.find_spec("vllm")):
    pytestmark.append(pytest.mark.skip(reason="needs vLLM on JAX: pip install 'jattn[vllm]'"))

COUNT = 12
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
TIED = {"tie_word_embeddings": True}
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2}
LATENT = {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}}
SEVERAL = {"enable_continue_decode": True, "max_decode_steps": 4}
BIASED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as DeepSeek publishes it
DEEPSEEK = {**BIASED, "n_routed_experts": 8}
DEEPSEEK |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
UNGROUPED = {"n_group": 1, "topk_group": 1}
GEMMA_EXPERTS = {**TIED, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
GEMMA_EXPERTS |= {"moe_intermediate_size": 32}
LLAMA4 = Family("llama4_text", "chunks on one layer, weights applied to experts' input", {
    "head_dim": 32, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "no_rope_layers": [1, 0], "attention_chunk_size": 16,
})  # fmt: skip
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function that makes a family's checkpoint once, and returns its folder and reference."""
    made = {}

    def make(
        model_type: str,
        *,
        without: dict | None = None,
        stored: str = "float32",
        packed: bool = False,
        cached: str | None = None,
        adapted: bool = False,
        **changes: object,
    ) -> dict:
        facts = [model_type, stored, packed, cached, adapted, without, changes]
        key = json.dumps(facts, sort_keys=True)
        if key not in made:
            families = (*FAMILIES, LLAMA4)
            family = next(family for family in families if family.model_type == model_type)
            folder = str(tmp_path_factory.mktemp(model_type))
            found = vllm_host.run(
                "judge",
                folder=folder,
                model_type=model_type,
                settings={**family.settings, **changes},
                prompts=prompts(),
                count=COUNT,
                without=without,
                stored=stored,
                packed=packed,
                cached=cached,
                adapted=adapted,
            )
            # The engine computes in float32: with closer logits, the tokens would prove nothing.
            assert found["margin"] > 1e-4
            made[key] = {"folder": folder, **found}
        return made[key]

    return make


def generate(
    folder: str,
    environment: dict[str, str] | None = None,
    logprobs: bool = False,
    nodes: int = 0,
    adapted: list[bool] | None = None,
    **engine: object,
) -> dict:
    given = {"folder": folder, "prompts": prompts(), "count": COUNT, "engine": engine}
    given |= {"logprobs": logprobs, "nodes": nodes, "adapted": adapted}
    return vllm_host.run("generate", environment=environment, **given)


CASES = {
    "a JAX model": ("qwen3", "flax_nnx", {}, None),
    "a torch model": ("qwen3", "vllm", {}, None),
    "windows": ("mistral", "vllm", {}, {"sliding_window": None}),
    "windows on some layers": ("gemma3_text", "vllm", {}, {"sliding_window": 200}),
    "soft cap": ("gemma2", "vllm", TIED, {"attn_logit_softcapping": None}),
    "D=512, shared keys": ("gemma4_text", "vllm", TIED, {"sliding_window": 200}),
    "experts": ("qwen3_moe", "vllm", FEW, {"num_experts_per_tok": 1}),
    "latents written out as keys and values": ("deepseek_v3", "vllm", DEEPSEEK, UNGROUPED),
    "chunks, weights applied to experts' input": (
        "llama4_text", "vllm", {}, {"attention_chunk_size": 200},
    ),
    "experts with scales": ("gemma4_text", "vllm", GEMMA_EXPERTS, {"top_k_experts": 1}),
    "experts with biases, sinks": ("gpt_oss", "auto", GPT_OSS, {"num_experts_per_tok": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_judges(checkpoint, name):
    """So are their probabilities, and a model without the feature is far off.

    The last prompt but one begins with four blocks of another prompt, found in the prefix cache.
    """
    model_type, implementation, changes, without = CASES[name]
    want = checkpoint(model_type, without=without, **changes)
    assert without is None or want["bite"] > 0.02
    environment = {"MODEL_IMPL_TYPE": implementation, "VLLM_MLA_DISABLE": "1"}  # for DeepSeek
    found = generate(want["folder"], environment, logprobs=True)
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=1e-3)
    assert max(found["cached"]) >= 64


@pytest.mark.parametrize("page", [32, 64])
def test_latents_are_the_judges(checkpoint, page):
    """The cache holds only latents, for which the host needs `NEW_MODEL_DESIGN`."""
    want = checkpoint("deepseek_v3", without=UNGROUPED, **DEEPSEEK)
    assert want["bite"] > 0.02
    environment = {"MODEL_IMPL_TYPE": "vllm", "NEW_MODEL_DESIGN": "1"}
    found = generate(
        want["folder"], environment, logprobs=True, block_size=page, additional_config=LATENT
    )
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=1e-3)
    assert max(found["cached"]) >= page


def test_pages_of_latents_that_would_be_padded_are_refused(checkpoint):
    want = checkpoint("deepseek_v3", without=UNGROUPED, **DEEPSEEK)
    environment = {"MODEL_IMPL_TYPE": "vllm", "NEW_MODEL_DESIGN": "1"}
    found = generate(want["folder"], environment, block_size=48, additional_config=LATENT)
    assert "--block-size: 48, but must be a multiple of 32 (MLA_KV_PACKING" in found["error"]


ROUNDED = {
    "a JAX model": ("qwen3", "flax_nnx", {}, None),
    "a torch model": ("qwen3", "vllm", {}, None),
    "windows and soft cap": ("gemma2", "vllm", TIED, {"attn_logit_softcapping": None}),
    "delta nets": ("qwen3_next", "auto", {}, None),
    # Every token gets all experts: otherwise rounding could change its choice, a far larger error.
    "experts, sinks": ("gpt_oss", "auto", {}, {"sliding_window": 200}),
    "latents": ("deepseek_v3", "vllm", BIASED, None),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_is_off_by_its_rounding(checkpoint, name):
    """While the tokens agree, the error is at most twice that of transformers in bfloat16."""
    model_type, implementation, changes, without = ROUNDED[name]
    want = checkpoint(model_type, without=without, stored="bfloat16", **changes)
    budget = 2 * want["rounding"]
    assert without is None or want["bite"] > 2 * budget
    environment, engine = {"MODEL_IMPL_TYPE": implementation}, {"dtype": "bfloat16"}
    if model_type == "deepseek_v3":
        environment["NEW_MODEL_DESIGN"] = "1"
        engine |= {"block_size": 64, "additional_config": LATENT}
    found = generate(want["folder"], environment, logprobs=True, **engine)
    assert found.get("error") is None
    assert_rounded(found, want, budget)


def assert_rounded(found: dict, want: dict, budget: float) -> None:
    differences = numpy_model.errors(
        found["tokens"], found["logprobs"], want["tokens"], want["logprobs"]
    )
    assert len(differences) > COUNT * len(want["tokens"]) / 2
    assert 1e-4 < np.abs(differences).max() < budget


def test_packed_experts_are_what_they_were_rounded_to(checkpoint):
    """MXFP4 as GPT-OSS is published, which the host requantizes, with these settings exactly."""
    want = checkpoint("gpt_oss", stored="bfloat16", packed=True)
    budget = 2 * want["rounding"]
    whole = checkpoint("gpt_oss", stored="bfloat16", without={"sliding_window": 200})
    assert np.abs(np.subtract(want["logprobs"], whole["logprobs"])[:, 0]).max() > 2 * budget
    environment = {"MOE_REQUANTIZE_BLOCK_SIZE": "32"}
    found = generate(want["folder"], environment, logprobs=True, dtype="bfloat16")
    assert found.get("error") is None
    assert_rounded(found, want, budget)


SETTINGS = {
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 32": {"block_size": 32},
    "one at a time": {"max_num_seqs": 1},
    "several tokens a step": {"additional_config": SEVERAL, "async_scheduling": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_engines_settings_change_no_token(checkpoint, setting):
    want = checkpoint("qwen3")
    assert generate(want["folder"], **SETTINGS[setting]) == {"tokens": want["tokens"]}


def test_draft_tokens_from_the_prompt_change_no_token(checkpoint):
    want = checkpoint("qwen3")
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    found = generate(
        want["folder"], disable_log_stats=False, speculative_config={"method": "ngram", **lookup}
    )
    assert found["tokens"] == want["tokens"]
    assert 0 < found["accepted"] < found["drafted"]


# The host's JAX models cannot load weights with fewer KV heads than devices.
@pytest.mark.parametrize(
    ("implementation", "kv_heads"), [("flax_nnx", 2), ("vllm", 2), ("vllm", 1)]
)
def test_two_devices_share_the_heads(checkpoint, implementation, kv_heads):
    want = checkpoint("qwen3", num_key_value_heads=kv_heads)
    environment = {"MODEL_IMPL_TYPE": implementation, **TWO_DEVICES}
    found = generate(want["folder"], environment, tensor_parallel_size=2)
    assert found == {"tokens": want["tokens"]}


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole experts"])
def test_two_devices_share_the_experts(checkpoint, whole):
    """Each has half of every expert, or half of the experts."""
    want = checkpoint("qwen3_moe", without={"num_experts_per_tok": 1}, **FEW)
    found = generate(
        want["folder"],
        {"MODEL_IMPL_TYPE": "vllm", **TWO_DEVICES},
        logprobs=True,
        tensor_parallel_size=2,
        enable_expert_parallel=whole,
    )
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=1e-3)


HYBRID = {
    "several at once": ({}, None),
    "one at a time": ({"max_num_seqs": 1}, None),
    "two devices": ({"tensor_parallel_size": 2}, TWO_DEVICES),
}


@pytest.mark.parametrize("name", HYBRID)
def test_delta_nets_between_layers_of_attention(checkpoint, name):
    """The cache has prefixes, and slots are reused, also by a prompt of one token."""
    engine, environment = HYBRID[name]
    want = checkpoint("qwen3_next")
    engine = {"enable_prefix_caching": True, **engine}
    found = generate(want["folder"], environment, logprobs=True, **engine)
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=1e-3)
    assert max(found["cached"]) > 0


@pytest.mark.parametrize(("implementation", "devices"), [("flax_nnx", 1), ("vllm", 1), ("vllm", 2)])
def test_two_pipeline_stages_have_half_of_the_layers_each(checkpoint, implementation, devices):
    """One process passes hidden states to the other; if each has two devices, these share heads."""
    want = checkpoint("qwen3")
    environment = {"MODEL_IMPL_TYPE": implementation, **(TWO_DEVICES if devices == 2 else {})}
    parallel = {"pipeline_parallel_size": 2, "tensor_parallel_size": devices}
    assert generate(want["folder"], environment, **parallel) == {"tokens": want["tokens"]}


@pytest.mark.parametrize("implementation", ["flax_nnx", "vllm"])
def test_two_nodes_of_ray_share_the_heads(checkpoint, implementation):
    """Two processes, as on two machines, connected by JAX's distributed runtime."""
    want = checkpoint("qwen3")
    environment = {"MODEL_IMPL_TYPE": implementation, "TPU_MULTIHOST_BACKEND": "ray"}
    found = generate(want["folder"], environment, nodes=2, tensor_parallel_size=2)
    assert found == {"tokens": want["tokens"]}


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("implementation", ["flax_nnx", "vllm"])
def test_an_fp8_cache_is_read_as_it_was_rounded(checkpoint, implementation, kind):
    """The judge also rounds keys and values, but from float64, so a few round the other way."""
    dtype = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[kind]
    want, exact = checkpoint("qwen3", cached=dtype), checkpoint("qwen3")
    environment = {"MODEL_IMPL_TYPE": implementation}
    found = generate(want["folder"], environment, logprobs=True, kv_cache_dtype=f"fp8_{kind}")
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=0.01)
    first = [[row[0] for row in each["logprobs"]] for each in (exact, want)]
    assert np.abs(np.subtract(*first)).max() > 0.05  # what rounding changes


def test_fp8_latents_are_read_as_they_were_rounded(checkpoint):
    want = checkpoint("deepseek_v3", cached="float8_e4m3fn", **DEEPSEEK)
    exact = checkpoint("deepseek_v3", **DEEPSEEK)
    environment = {"MODEL_IMPL_TYPE": "vllm", "NEW_MODEL_DESIGN": "1"}
    environment |= {"DISABLE_MLA_Q_ACTIVATION_QUANTIZATION": "1"}
    engine = {"block_size": 64, "additional_config": LATENT, "kv_cache_dtype": "fp8_e4m3"}
    found = generate(want["folder"], environment, logprobs=True, **engine)
    assert found.get("error") is None
    first = [[row[0] for row in each["logprobs"]] for each in (exact, want, found)]
    changed = np.abs(np.subtract(first[0], first[1])).max()
    off = np.abs(np.subtract(first[2], first[1])).max()
    assert changed > 0.01  # what rounding changes
    assert off < changed / 4, (off, changed)  # a few round the other way
    assert found["tokens"] == want["tokens"]


@pytest.mark.parametrize("devices", [1, 2])
def test_some_requests_have_an_adapter(checkpoint, devices):
    """They share batches. One without an adapter begins like one with it, but its keys differ."""
    plain, merged = (checkpoint("qwen3", vocab_size=128, adapted=x) for x in (False, True))
    asked = [False, True, True, False, False, True]
    environment = {"MODEL_IMPL_TYPE": "vllm", **(TWO_DEVICES if devices == 2 else {})}
    found = generate(
        merged["folder"],
        environment,
        logprobs=True,
        adapted=asked,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        tensor_parallel_size=devices,
    )
    assert found.get("error") is None
    for i, adapted in enumerate(asked):
        want, other = (merged, plain) if adapted else (plain, merged)
        assert found["tokens"][i] == want["tokens"][i] != other["tokens"][i]
        np.testing.assert_allclose(found["logprobs"][i], want["logprobs"][i], atol=1e-3)


@pytest.mark.parametrize("implementation", ["flax_nnx", "vllm"])
def test_images_are_seen_as_the_judge_sees_them(tmp_path, implementation):
    """A batch has two images, whose encoder runs in XLA, and texts that contain image tokens.

    The limit names only audio. That leaves room for images, and for videos, which jattn refuses for
    the JAX model because it would not see them.
    """
    want = vllm_host.run("judge images", folder=str(tmp_path))
    assert want["tokens"][-2] != want["tokens"][-1]
    engine = {**vllm_host.SMALL, "limit_mm_per_prompt": {"audio": 0}}
    del engine["skip_tokenizer_init"]
    found = vllm_host.run(
        "generate images",
        environment={"MODEL_IMPL_TYPE": implementation},
        folder=str(tmp_path),
        engine=engine,
    )
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=3e-3)
    refused = "multi_modal_data: video, but must be of images, or MODEL_IMPL_TYPE=vllm set"
    assert (refused in found["video"]) == (implementation == "flax_nnx")


def test_per_layer_embeddings_are_right_in_a_step_with_images(tmp_path):
    """They are also right for a text in the same step."""
    want = vllm_host.run("judge images of Gemma", folder=str(tmp_path))
    assert want["tokens"][-2] != want["tokens"][-1]
    limits = {"image": 1, "video": 0, "audio": 0}
    engine = {**vllm_host.SMALL, "max_num_batched_tokens": 256, "limit_mm_per_prompt": limits}
    del engine["skip_tokenizer_init"]
    found = vllm_host.run(
        "generate images",
        environment={"MODEL_IMPL_TYPE": "vllm"},
        folder=str(tmp_path),
        engine=engine,
        gemma=True,
    )
    assert found.get("error") is None
    assert found["tokens"] == want["tokens"]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=3e-3)


def test_data_parallel_in_one_process_is_refused_as_the_engine_starts(checkpoint):
    """The host would fork schedulers while JAX's threads run, and hang."""
    environment = {"TPU_MULTIPROCESS_DP": "0"}
    error = generate(checkpoint("qwen3")["folder"], environment, data_parallel_size=2)["error"]
    assert "--data-parallel-size: 2, but must be 1 on a cpu" in error


ON_TWO = {"sharding": {"sharding_strategy": {"tensor_parallelism": 2}}}
REFUSED = {  # a model, settings, and the error when the engine starts
    "layers with another cache": (
        "qwen3",
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
        "--kv-cache-dtype-skip-layers: 0, but must be left out",
    ),
    "more devices than KV heads, by a strategy": (
        "qwen3",
        {"additional_config": ON_TWO},
        "of --additional_config: 2, but must be at most the model's 1 KV heads",
    ),
    "adapters": ("qwen3", {"enable_lora": True}, "MODEL_IMPL_TYPE: flax_nnx, but must be vllm"),
    "other recurrent layers": ("nemotron_h", {}, "--model: NemotronHForCausalLM, but must be one"),
    "a text model without a text_config": (
        "gemma4_text",
        {},
        "MODEL_IMPL_TYPE: flax_nnx, but must be vllm: the host's JAX model of Gemma4ForCausalLM",
    ),
    "several tokens a step": (
        "qwen3",
        {"additional_config": SEVERAL},
        "enable_continue_decode of --additional_config: true, but must be left out, or given with",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_host_would_get_wrong_is_refused_as_the_engine_starts(checkpoint, name):
    model_type, engine, message = REFUSED[name]
    changes = {"num_key_value_heads": 1} if model_type == "qwen3" else {}
    environment = {"MODEL_IMPL_TYPE": "flax_nnx", **TWO_DEVICES}
    error = generate(checkpoint(model_type, **changes)["folder"], environment, **engine)["error"]
    assert message in error


SERVED = {
    "qwen3": ("qwen3", "auto", {}, 0),
    "gemma": ("gemma4_text", "vllm", TIED, 0),
    "gpt-oss": ("gpt_oss", "auto", GPT_OSS, 0),
    "qwen3 on two nodes of Ray": ("qwen3", "auto", {}, 2),
    "gemma on two nodes of Ray": ("gemma2", "auto", TIED, 2),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_server_answers_openais_client(checkpoint, name):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    model_type, implementation, changes, nodes = SERVED[name]
    want = checkpoint(model_type, **changes)
    flags = ("--tensor-parallel-size", "2") if nodes else ()
    environment = {"MODEL_IMPL_TYPE": implementation}
    environment |= {"TPU_MULTIHOST_BACKEND": "ray"} if nodes else {}
    with (
        vllm_host.server(want["folder"], *flags, nodes=nodes, environment=environment) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        for prompt, tokens in zip(prompts(), want["tokens"], strict=True):
            answer = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=COUNT,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.choices[0].token_ids == tokens


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 1.0, "beta_fast": 32.0}
YARN |= {"beta_slow": 1.0, "original_max_position_embeddings": 4096}  # has no effect
BUNDLED = {  # the model's implementation, and changes to config.json that the host needs
    "qwen3-tiny": ("flax_nnx", {}),
    "gemma4-31b-tiny": ("vllm", {"architectures": ["Gemma4ForCausalLM"]}),
    "gemma4-e2b-tiny": ("vllm", {"architectures": ["Gemma4ForCausalLM"]}),
    "gemma4-e2b-tiny with a text_config": ("flax_nnx", {}),
    "gpt-oss-tiny": ("auto", {"architectures": ["GptOssForCausalLM"], "rope_parameters": YARN}),
    "qwen3-next-tiny": ("auto", {"architectures": ["Qwen3NextForCausalLM"]}),
    "deepseek-v3-tiny": ("vllm", BIASED),
}
LATENT_FLAGS = ("--block-size", "32", "--additional-config", json.dumps(LATENT))


@pytest.mark.parametrize("name", BUNDLED)
def test_the_server_continues_bundled_checkpoints_like_their_reference(name, tmp_path):
    """`reference.npz` has transformers' tokens in float32, 32 for each of 8 prompts."""
    openai = pytest.importorskip("openai", reason="needs the openai client")
    folder, implementation, changes = tmp_path / name.split()[0], *BUNDLED[name]
    shutil.copytree(CHECKPOINTS / folder.name, folder)
    with np.load(folder / "reference.npz") as file:
        lens, padded, want = (file[key] for key in ("prompt_lens", "prompts", "tokens"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if name.endswith("with a text_config"):
        vllm_checkpoints.publish_gemma4(folder)
    environment, flags = {"MODEL_IMPL_TYPE": implementation}, ["--skip-tokenizer-init"]
    if "kv_lora_rank" in config:
        environment["NEW_MODEL_DESIGN"] = "1"
        flags += LATENT_FLAGS
    with (
        vllm_host.server(str(folder), *flags, environment=environment) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        for row, length, tokens in zip(padded, lens, want, strict=True):
            answer = client.completions.create(
                model="tiny",
                prompt=row[:length].tolist(),
                max_tokens=len(tokens),
                temperature=0,
                extra_body={
                    "ignore_eos": True,
                    "return_token_ids": True,
                    "detokenize": False,
                },
            )
            assert answer.choices[0].token_ids == tokens.tolist()


CONNECTOR = {
    "kv_connector": "TPUConnector",
    "kv_connector_module_path": "tpu_inference.distributed.tpu_connector",
}


def ask(
    address: str, prompt: list[int], count: int, rank: int | None = None, **more: object
) -> dict:
    """Return the completion of a prompt by a server, or by one of its replicas."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    url = f"{address}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def metric(address: str, name: str) -> float:
    """Return a metric of a server, summed over its labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(value) for _, value in found)


def test_every_program_is_compiled_before_the_first_request(checkpoint):
    """This is the default of `vllm serve`; other tests skip it to save time."""
    want = checkpoint("qwen3")
    with vllm_host.server(want["folder"], environment={"SKIP_JAX_PRECOMPILE": "0"}) as address:
        for prompt, tokens in zip(prompts(), want["tokens"], strict=True):
            assert ask(address, prompt, COUNT)["choices"][0]["token_ids"] == tokens


def test_replicas_answer_alike(checkpoint):
    """`vllm serve` starts a process for each. Each replica has its own prefix cache."""
    want = checkpoint("qwen3")
    with vllm_host.server(want["folder"], "--data-parallel-size", "2") as address:
        for rank in (0, 1):
            for prompt, tokens in zip(prompts(), want["tokens"], strict=True):
                answer = ask(address, prompt, COUNT, rank)
                assert answer["choices"][0]["token_ids"] == tokens
        assert metric(address, "vllm:prefix_cache_hits_total") == 2 * 64


def test_one_server_prefills_prompts_and_another_decodes(checkpoint):
    """The second server fetches the full blocks of a prompt, and returns the judge's tokens.

    A request that does not say where the blocks are is refused, without harm to others.
    """
    want = checkpoint("qwen3")

    def flags(role: str) -> tuple[str, str]:
        return "--kv-transfer-config", json.dumps({**CONNECTOR, "kv_role": role})

    shared = {"TPU_SIDE_CHANNEL_PORT": str(free_port())}  # of the producer, for the consumer
    with contextlib.ExitStack() as stack:
        addresses = []
        for role in ("kv_producer", "kv_consumer"):
            environment = {**shared, "TPU_KV_TRANSFER_PORT": str(free_port())}
            server = vllm_host.server(want["folder"], *flags(role), environment=environment)
            addresses.append(stack.enter_context(server))
        reading, decoding = addresses
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(decoding, prompts()[2], 1, kv_transfer_params={"uuid": 5})
        for prompt, tokens in zip(prompts(), want["tokens"], strict=True):
            where = ask(reading, prompt, 1, kv_transfer_params={})["kv_transfer_params"]
            answer = ask(decoding, prompt, COUNT, kv_transfer_params=where)
            assert answer["choices"][0]["token_ids"] == tokens
        assert metric(decoding, "vllm:external_prefix_cache_hits_total") > 64
