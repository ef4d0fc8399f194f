"""sglang-jax with jattn in the place of its TPU kernel, judged by NumPy in float64.

Needs the host, in an environment of its own with Python 3.12 or 3.13, and minutes:

    pip install -e '.[sglang]' pytest openai
    pytest -m hosts tests/integrations/test_sglang_jax.py
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support import numpy_hybrid, numpy_model, processes

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(pytest.mark.skip(reason="needs sglang-jax: pip install 'jattn[sglang]'"))

COUNT = 12
FLAGS = {
    "attention_backend": "fa",
    "chunked_prefill_size": 64,
    "context_length": 256,
    "device": "cpu",
    "dtype": "float32",
    "max_prefill_tokens": 256,
    "max_running_requests": 8,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.5,
    "random_seed": 0,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(processes.ROOT),
    "SGLANG_CI_SMALL_KV_SIZE": "4096",  # the pool of drafts is half of the memory otherwise
    "SGLANG_JAX_CONV_STATE_DTYPE": "float32",  # it is bfloat16 in models of float32 too
    "XLA_FLAGS": "",
}
GENERATE = """
import json, os, sys
import jattn.integrations.sglang_jax

jattn.integrations.sglang_jax.install()
from sgl_jax.srt.entrypoints.engine import Engine

given = json.loads(sys.argv[1])
engine = Engine(
    model_path=given["folder"], skip_tokenizer_init=True, enable_single_process=True,
    disable_precompile=True, **given["engine"],
)
sampling = {"temperature": 0.0, "max_new_tokens": given["count"], "ignore_eos": True}
answers, drafts = [], "speculative_algorithm" in given["engine"]  # the host then has no logprobs
for turn in range(2):  # the second time, from the prefix cache
    answers += engine.generate(
        input_ids=given["prompts"], sampling_params=sampling, return_logprob=not drafts
    )
found = [
    (answer["output_ids"], [one[0] for one in answer["meta_info"].get("output_token_logprobs", ())])
    for answer in answers
]
cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
print("RESULT", json.dumps({"found": found, "cached": cached}), flush=True)
os._exit(0)
"""


def prompts() -> list[list[int]]:
    """Prompts of several lengths; two of them begin alike, for more than two pages."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, 90, length).tolist() for length in (21, 5, 75, 16)]
    return [*found, found[2][:40] + found[0]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A checkpoint, and how the judge continues the prompts."""

    config: dict
    folder: str
    weights: numpy_model.Weights
    tokens: list[list[int]]

    def logprobs(self, precision: object = np.float64, **changes: object) -> list[list[float]]:
        """Of the judge's tokens, with another precision or configuration."""
        config = {**self.config, **changes}
        return [
            numpy_model.logprobs(config, self.weights, prompt + tokens, COUNT, precision)
            for prompt, tokens in zip(prompts(), self.tokens, strict=True)
        ]


def judged(folder, config: dict) -> Judged:
    weights = numpy_model.make(folder, config)
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(folder), weights, tokens)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("qwen3"), numpy_model.QWEN3)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("gemma2"), numpy_model.GEMMA2)


def start(
    folder: str,
    devices: int = 1,
    texts: list[list[int]] | None = None,
    count: int = COUNT,
    **engine: object,
) -> subprocess.Popen[str]:
    given = {"folder": folder, "prompts": texts or prompts(), "count": count}
    given["engine"] = {**FLAGS, **engine}
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, json.dumps(given)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    folder: str,
    devices: int = 1,
    texts: list[list[int]] | None = None,
    count: int = COUNT,
    **engine: object,
) -> list[tuple[list[int], list[float]]]:
    """The engine's tokens and their log probabilities, of each prompt.

    The engine is given the prompts twice; the second time it has their pages.
    """
    with start(folder, devices, texts, count, **engine) as process:
        try:
            out, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, errors[-6000:]
    found, cached = json.loads(lines[-1].removeprefix("RESULT ")).values()
    first, again = found[: len(found) // 2], found[len(found) // 2 :]
    if not engine.get("disable_radix_cache"):
        assert max(cached[len(first) :]) >= 64
    if engine.get("dtype", "float32") == "float32":
        assert [row[:count] for row, _ in again] == [row[:count] for row, _ in first]
    return first


def generate(folder: str, devices: int = 1, **engine: object) -> list[list[int]]:
    return [tokens for tokens, _ in run(folder, devices, **engine)]


@pytest.mark.parametrize("page_size", [16, 1])
def test_tokens_are_the_judges(qwen3, page_size):
    assert generate(qwen3.folder, page_size=page_size) == qwen3.tokens


def test_windows_and_soft_caps_are_the_judges(gemma2):
    """Without either the log probabilities are off by far."""
    found = run(gemma2.folder, page_size=16)
    assert [tokens for tokens, _ in found] == gemma2.tokens
    want = gemma2.logprobs()
    np.testing.assert_allclose([row for _, row in found], want, atol=1e-3)
    for name in ("attn_logit_softcapping", "sliding_window"):
        assert np.abs(np.subtract(gemma2.logprobs(**{name: None}), want)).max() > 0.1


@pytest.mark.parametrize(("devices", "page_size"), [(1, 16), (1, 2), (2, 16)])
def test_latents_and_experts_are_those_of_transformers(tmp_path, devices, page_size):
    """A bundled DeepSeek-V3 with tokens and logits of transformers in float32."""
    folder = tmp_path / "deepseek-v3"
    shutil.copytree(processes.ROOT / "examples/checkpoints/deepseek-v3-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in config  # but in rope_parameters, as transformers 5 writes it
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    check_bundled(folder, devices, page_size=page_size, tp_size=devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_two_head_sizes_are_those_of_transformers(tmp_path, devices):
    """A bundled Gemma 4, with windows and heads of their own size on some layers."""
    folder = bundled(tmp_path, "gemma4-31b-tiny")
    check_bundled(folder, devices, page_size=16, tp_size=devices)


def test_layers_that_the_host_would_leave_out_are_refused(tmp_path):
    folder = bundled(tmp_path, "gemma4-e2b-tiny")
    with start(str(folder), page_size=16) as process:
        out, errors = process.communicate(timeout=300)
    assert "RESULT" not in out
    assert "--model-path: a model with num_kv_shared_layers=" in errors
    assert "hidden_size_per_layer_input=" in errors


def bundled(tmp_path, name: str) -> pathlib.Path:
    """A checkpoint of a Gemma 4 of text, as the published ones have their configuration."""
    folder = tmp_path / name
    shutil.copytree(processes.ROOT / "examples/checkpoints" / name, folder)
    text = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}
    full = next(iter(text.pop("per_layer_config", {}).values()), {})
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    text |= {name: full.get(field, text[field]) for field, name in names.items()}
    whole = {name: text[name] for name in ("tie_word_embeddings", "torch_dtype", "vocab_size")}
    whole |= {"model_type": "gemma4", "architectures": ["Gemma4ForCausalLM"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def check_bundled(folder: pathlib.Path, devices: int, **engine: object) -> None:
    """Tokens and log-probabilities are those that transformers wrote next to the checkpoint."""
    with np.load(folder / "reference.npz") as file:
        lens, padded, tokens, logits = (
            file[name] for name in ("prompt_lens", "prompts", "tokens", "logits")
        )
    given = [row[:length].tolist() for row, length in zip(padded, lens, strict=True)]
    count = tokens.shape[1]
    found = run(str(folder), devices, given, count, context_length=256, **engine)
    assert [row for row, _ in found] == tokens.tolist()
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.take_along_axis(want, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose([row for _, row in found], want, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_bfloat16_is_off_by_its_rounding(request, family):
    """By twice what a plain computation in bfloat16 is off by, while the tokens are the same."""
    judge = request.getfixturevalue(family)
    want = judge.logprobs()
    budget = 2 * np.abs(np.subtract(judge.logprobs(ml_dtypes.bfloat16), want)).max()
    if family == "gemma2":
        for name in ("attn_logit_softcapping", "sliding_window"):
            assert np.abs(np.subtract(judge.logprobs(**{name: None}), want)).max() > 4 * budget
    found = run(judge.folder, page_size=16, dtype="bfloat16")
    differences = numpy_model.errors(*zip(*found, strict=True), judge.tokens, want)
    assert len(differences) > COUNT * len(want) / 2
    assert 1e-3 < np.abs(differences).max() < budget


def drafted(target, draft) -> Judged:
    """A Qwen3 whose next token is mostly that of its last one alone, and EAGLE3 drafts of that.

    The draft's attention sees its own token, whose embedding it passes on.
    """
    config = {**numpy_model.QWEN3, "num_hidden_layers": 3}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    weights = numpy_model.make(target, config)
    for name in weights:
        if name.endswith(("o_proj", "down_proj")):
            weights[name] /= 4
    save(target, weights)
    size, inner, dim = (config[f"{n}"] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    passed = np.tile(np.eye(dim, 2 * size), (heads, 1))  # of an embedding and a hidden state
    layer = {
        "hidden_norm": np.ones(size),
        "input_layernorm": np.ones(size),
        "post_attention_layernorm": np.ones(size),
        "mlp.gate_proj": np.zeros((inner, size)),
        "mlp.up_proj": np.zeros((inner, size)),
        "mlp.down_proj": np.zeros((size, inner)),
        "self_attn.q_proj": 4 * passed,
        "self_attn.k_proj": passed[: kv_heads * dim],
        "self_attn.v_proj": passed[: kv_heads * dim],
        "self_attn.o_proj": np.eye(size, heads * dim),
    }
    drafts = {f"midlayer.{name}.weight": x for name, x in layer.items()}
    drafts["fc.weight"] = np.zeros((size, 3 * size))
    drafts |= {"norm.weight": weights["model.norm"], "lm_head.weight": weights["lm_head"]}
    stored = {name: x.astype(np.float32) for name, x in drafts.items()}
    stored["d2t"] = np.zeros(config["vocab_size"], np.int64)
    save_file(stored, draft / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"draft_vocab_size": config["vocab_size"], "num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps(config))
    config = json.loads((target / "config.json").read_text())
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(target), weights, tokens)


def drafted_in_blocks(target, draft) -> Judged:
    """A Qwen3 whose next token is mostly that of its last one alone, and DFLASH drafts of that.

    Tokens to draft have embeddings of zeros, and see the embedding of the last token of the block.
    """
    mask = numpy_model.QWEN3["vocab_size"] - 1
    config = numpy_model.QWEN3
    weights = numpy_model.make(target, config)
    weights["model.embed_tokens"][mask] = 0
    for name in weights:
        if name.endswith(("o_proj", "down_proj")):
            weights[name] /= 4
    save(target, weights)
    size, inner, dim = (config[f"{n}"] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = {
        "input_layernorm": np.ones(size),
        "post_attention_layernorm": np.ones(size),
        "mlp.gate_proj": np.zeros((inner, size)),
        "mlp.up_proj": np.zeros((inner, size)),
        "mlp.down_proj": np.zeros((size, inner)),
        "self_attn.q_norm": np.ones(dim),
        "self_attn.k_norm": np.ones(dim),
        "self_attn.q_proj": np.zeros((heads * dim, size)),
        "self_attn.k_proj": np.zeros((kv_heads * dim, size)),
        "self_attn.v_proj": np.tile(np.eye(dim, size), (kv_heads, 1)),
        "self_attn.o_proj": np.eye(size, heads * dim),
    }
    drafts = {f"layers.0.{name}": x for name, x in layer.items()}
    drafts |= {"fc": np.zeros((size, 2 * size)), "hidden_norm": np.ones(size)}
    save(draft, {**drafts, "norm": weights["model.norm"]})
    blocks = {"mask_token_id": mask, "target_layer_ids": [-1, 0]}
    config = {**config, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1}
    config |= {"block_size": 3, "dflash_config": blocks}
    (draft / "config.json").write_text(json.dumps(config))
    config = json.loads((target / "config.json").read_text())
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(target), weights, tokens)


def save(folder, weights: numpy_model.Weights) -> None:
    """As a checkpoint."""
    stored = {f"{name}.weight": x.astype(np.float32) for name, x in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("overlaps", [True, False])
def test_blocks_of_drafts_change_no_token(tmp_path, overlaps):
    """DFLASH, whose drafts see each other, and keys made of the model's hidden states."""
    folders = [tmp_path / name for name in ("target", "draft")]
    for folder in folders:
        folder.mkdir()
    judge = drafted_in_blocks(*folders)
    found = run(
        judge.folder,
        page_size=16,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(folders[1]),
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
        speculative_num_steps=1,
        grammar_backend="none",
        disable_overlap_schedule=not overlaps,
    )
    assert [tokens[:COUNT] for tokens, _ in found] == judge.tokens
    assert max(len(tokens) for tokens, _ in found) > COUNT  # of drafts taken with the last one


@pytest.mark.parametrize("overlaps", [True, False])
def test_chains_of_drafts_change_no_token(tmp_path, overlaps):
    """EAGLE3 drafts, many of which are right; the host's answers may be longer than asked for."""
    folders = [tmp_path / name for name in ("target", "draft")]
    for folder in folders:
        folder.mkdir()
    judge = drafted(*folders)
    found = run(
        judge.folder,
        page_size=16,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folders[1]),
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        speculative_num_steps=3,
        disable_overlap_schedule=not overlaps,
    )
    assert [tokens[:COUNT] for tokens, _ in found] == judge.tokens
    assert max(len(tokens) for tokens, _ in found) > COUNT  # of drafts taken with the last one


HYBRID = {
    "qwen3_5": numpy_hybrid.QWEN3_5,
    "kimi_linear": numpy_hybrid.KIMI_LINEAR,
    "bailing": numpy_hybrid.BAILING,
}
UNCACHED = {"disable_radix_cache": True, "page_size": 16}
# The host keeps recurrent states at the ends of chunks, for prefixes that come again.
KEPT = {
    "enable_unified_radix_tree": True,
    "enable_recurrent_extra_buffer": True,
    "page_size": 16,
    "chunked_prefill_size": 32,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_5", UNCACHED),
        ("qwen3_5", KEPT),
        ("kimi_linear", UNCACHED),
        ("kimi_linear", KEPT),
        ("bailing", UNCACHED),  # whose states the host does not keep
    ],
    ids=["qwen3_5", "qwen3_5-kept", "kimi_linear", "kimi_linear-kept", "bailing"],
)
def test_linear_attention_is_the_judges(tmp_path, family, settings):
    """Gated delta nets, Kimi's and Lightning's, each next to layers of attention."""
    check_hybrid(tmp_path, numpy_hybrid.Model(HYBRID[family]), **settings)


@pytest.mark.parametrize("devices", [1, 2])
def test_sinks_are_the_judges(tmp_path, devices):
    """MiMo-V2-Flash: heads of 192 with values of 128, windows with sinks and heads of their own."""
    model = numpy_hybrid.Model(numpy_hybrid.MIMO)
    want = check_hybrid(tmp_path, model, devices, page_size=16, tp_size=devices)
    for name, wrong in (("add_swa_attention_sink_bias", False), ("sliding_window", None)):
        other = numpy_hybrid.Model({**model.config, name: wrong}, model.weights)
        found = [
            numpy_hybrid.logprobs(other, prompt + row)[-COUNT:]
            for prompt, (row, _) in zip(prompts(), want, strict=True)
        ]
        assert np.abs(np.subtract(found, [row for _, row in want])).max() > 0.1


def check_hybrid(
    folder, model: numpy_hybrid.Model, devices: int = 1, **engine: object
) -> list[tuple[list[int], list[float]]]:
    """The judge's tokens and their log probabilities, which the engine has too."""
    model.save(folder)
    want = [model.greedy(prompt, COUNT) for prompt in prompts()]
    found = run(str(folder), devices, **engine)
    assert [row for row, _ in found] == [row for row, _ in want]
    np.testing.assert_allclose([row for _, row in found], [row for _, row in want], atol=1e-3)
    return want


@contextlib.contextmanager
def server(folder: str, tmp_path, *flags: str) -> Iterator[str]:
    """The host's server with jattn, whose scheduler is a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "jattn.integrations.sglang_jax", "--model-path", folder]
    command += ["--port", port, "--disable-precompile", "--skip-server-warmup", *flags]
    for name, value in FLAGS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 300
            while not processes.answers(f"http://127.0.0.1:{port}/health"):
                late = process.poll() is not None or time.monotonic() > end
                assert not late, (tmp_path / "log").read_text()[-6000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_server_takes_tokens(qwen3, tmp_path):
    sampling = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True}
    given = json.dumps({"input_ids": prompts(), "sampling_params": sampling}).encode()
    with server(qwen3.folder, tmp_path, "--skip-tokenizer-init") as address:
        request = urllib.request.Request(
            f"{address}/generate", given, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)
    assert [one["output_ids"] for one in found] == qwen3.tokens


def ask(address: str, **fields: object) -> tuple[int, dict]:
    """The status and body of a server's answer to a request, greedy unless told otherwise.

    Fields are those of sampling, but for log-probabilities and hidden states.
    """
    given = {"input_ids": fields.pop("input_ids", prompts()[0])}
    given |= {name: fields.pop(name) for name in list(fields) if name.startswith("return_")}
    sampling = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True, **fields}
    body = json.dumps({**given, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"{address}/generate", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


LONG, SHORT = "[ab]{9}c", "[xyz]{3}"
WRONG = {"regex": "(", "json_schema": '{"type": "nothing"}', "ebnf": "start: ["}


def test_grammars_hold_for_their_own_requests(tmp_path):
    """Several requests with one grammar, others next to them, and grammars that are none."""
    config = {**numpy_model.QWEN3, "vocab_size": 320}
    judge = judged(tmp_path, config)
    numpy_model.save_letters(judge.folder)
    fields = [{"regex": LONG}, {}, {"regex": SHORT}, {"regex": LONG}, {"regex": LONG}, {}]
    fields += [{"regex": SHORT}, {"regex": LONG}]
    with (
        server(judge.folder, tmp_path, "--page-size", "16") as address,
        concurrent.futures.ThreadPoolExecutor(len(fields)) as threads,
    ):
        for _ in range(3):
            for name, grammar in WRONG.items():
                status, answer = ask(address, **{name: grammar})
                assert (status, "nvalid grammar" in str(answer)) == (400, True), answer
            found = list(threads.map(lambda one: ask(address, ignore_eos=not one, **one), fields))
            for given, (status, answer) in zip(fields, found, strict=True):
                assert status == 200, answer
                if given:
                    assert re.fullmatch(given["regex"], answer["text"]), answer
                else:
                    assert answer["output_ids"] == judge.tokens[0], answer


def test_requests_that_the_host_would_not_follow_are_refused_alone(tmp_path):
    """HTTP 400 each; log-probabilities of drafts would end the scheduler."""
    folders = [tmp_path / name for name in ("target", "draft")]
    for folder in folders:
        folder.mkdir()
    judge = drafted(*folders)
    chains = {"algorithm": "EAGLE3", "draft-model-path": str(folders[1]), "eagle-topk": "1"}
    chains |= {"num-draft-tokens": "4", "num-steps": "3"}
    flags = [word for name, x in chains.items() for word in (f"--speculative-{name}", x)]
    with server(
        judge.folder, tmp_path, "--skip-tokenizer-init", "--page-size", "16", *flags
    ) as address:
        for fields in (
            {"return_logprob": True},
            {"logit_bias": {"5": 2.0}},
            {"repetition_penalty": 1.5},
            {"min_p": 0.5, "temperature": 1.0},
            {"sampling_seed": 7, "temperature": 1.0},
            {"frequency_penalty": 1.0},
            {"presence_penalty": 1.0},
            {"min_new_tokens": 3},
            {"regex": LONG},
        ):
            status, answer = ask(address, **fields)
            assert (status, next(iter(fields)) in str(answer)) == (400, True), answer
            status, answer = ask(address)
            assert status == 200
            assert answer["output_ids"][:COUNT] == judge.tokens[0]


@pytest.mark.parametrize("flag", ["is_embedding", "multimodal"])
def test_uses_of_which_every_request_fails_are_refused_at_the_start(qwen3, flag):
    with start(qwen3.folder, page_size=16, **{flag: True}) as process:
        out, errors = process.communicate(timeout=300)
    assert "RESULT" not in out
    assert f"--{flag.replace('_', '-')}: given, but must be left out" in errors


def test_the_server_answers_openais_client(gemma2, tmp_path):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    numpy_model.save_tokenizer(gemma2.folder)
    # The host reads grammars with a tokenizer of bytes, and this one has numbers.
    with (
        server(gemma2.folder, tmp_path, "--grammar-backend", "none") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300) as client,
    ):
        for prompt, tokens in zip(prompts(), gemma2.tokens, strict=True):
            answer = client.completions.create(
                model=gemma2.folder,
                prompt=prompt,
                max_tokens=COUNT,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage.prompt_tokens == len(prompt)
            assert [int(word) for word in answer.choices[0].text.split()] == tokens
        given = {"model": gemma2.folder, "prompt": prompts()[0], "max_tokens": COUNT}
        for more, word in (
            ({"seed": 7}, "sampling_seed"),
            ({"extra_body": {"return_hidden_states": True}}, "return_hidden_states"),
        ):
            with pytest.raises(openai.BadRequestError, match=word):
                client.completions.create(**given, **more)
        client.completions.create(**given, seed=7, temperature=0)


def test_two_devices_have_requests_of_their_own(qwen3):
    """`--dp-size`: each has the whole model."""
    assert generate(qwen3.folder, devices=2, page_size=16, tp_size=2, dp_size=2) == qwen3.tokens


def test_two_devices_share_the_heads(qwen3):
    assert generate(qwen3.folder, devices=2, page_size=16, tp_size=2) == qwen3.tokens


def test_two_processes_share_the_heads(qwen3):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = {"page_size": 16, "tp_size": 2, "nnodes": 2, "dist_init_addr": address}
    with start(qwen3.folder, node_rank=1, **nodes) as other:
        try:
            assert generate(qwen3.folder, node_rank=0, **nodes) == qwen3.tokens
        finally:
            other.kill()
