"""Generation by vLLM on JAX and by transformers, each in a separate process.

`main` prints a line of JSON after `RESULT`. The host changes how JAX and torch behave, so it never
shares a process with tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.processes import answers

ROOT = pathlib.Path(__file__).parents[2]
BOOT = "from tests.support import vllm_host; vllm_host.main()"
SETTINGS = {  # no TPUs, no network, and nothing compiled in advance
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "SKIP_JAX_PRECOMPILE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ADAPTER, RANK = "adapter", 8
ADAPTED = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
SMALL = {  # an engine that prefills in chunks and has more blocks than it needs
    "block_size": 16,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 96,
    "skip_tokenizer_init": True,
}


def prompts() -> list[list[int]]:
    """Prompts of 1 to 91 tokens; two share more than four blocks, or one of Qwen3-Next's."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, 90, length).tolist() for length in (21, 5, 75, 16)]
    return [*found, found[2][:70] + found[0], [7]]


@contextlib.contextmanager
def server(
    folder: str, *flags: str, nodes: int = 0, environment: dict[str, str] | None = None
) -> Iterator[str]:
    """Run `vllm serve` on a checkpoint with jattn, in separate processes; yield its address.

    Args:
      folder: the checkpoint, with a tokenizer.
      *flags: on top of those in `SMALL`.
      nodes: how many Ray nodes this machine simulates, for the workers; 0 runs without Ray.
      environment: on top of `SETTINGS`.
    """
    everywhere = {**os.environ, "XLA_FLAGS": "", **SETTINGS, **(environment or {})}
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(_ray(nodes, everywhere)) if nodes else {}
        yield stack.enter_context(_server(folder, flags, {**everywhere, **ray}))


@contextlib.contextmanager
def _ray(count: int, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start Ray nodes in separate processes; yield the variable that holds their address."""
    with subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps({"part": "nodes", "count": count})],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        for line in process.stdout:
            if line.startswith("NODES "):
                break
        else:
            raise AssertionError("Ray's nodes did not start")
        try:
            yield {"RAY_ADDRESS": line.split()[1]}
        finally:
            process.stdin.close()  # stops them


@contextlib.contextmanager
def _server(folder: str, flags: tuple[str, ...], environment: dict[str, str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = {name: value for name, value in SMALL.items() if name != "skip_tokenizer_init"}
    given = [x for name, value in small.items() for x in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, *map(str, given)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *where, "--attention-backend", "jattn", *flags],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            while not answers(f"{address}/health"):
                if process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(f"vllm serve: {log.read()[-6000:]}")
                time.sleep(1)
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(part: str, *, environment: dict[str, str] | None = None, **given: Any) -> Any:
    """Run a part in a separate process and return its result.

    Args:
      part: a name in `parts` of `main`, such as `judge`, `generate` or `generate images`.
      environment: on top of `SETTINGS`.
      **given: the part's arguments.
    """
    done = subprocess.run(
        [sys.executable, "-c", BOOT, json.dumps({"part": part, **given})],
        env={**os.environ, "XLA_FLAGS": "", **SETTINGS, **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    said = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"  # the host logs to both
    assert lines, f"{part} exited with {done.returncode}: {said}"
    return json.loads(lines[-1].removeprefix("RESULT "))


def judge(
    folder: str,
    model_type: str,
    settings: dict[str, Any],
    prompts: list[list[int]],
    count: int,
    without: dict[str, Any] | None = None,
    stored: str = "float32",
    packed: bool = False,
    cached: str | None = None,
    adapted: bool = False,
) -> dict[str, Any]:
    """Save a random model and continue prompts greedily with it, in float64 and without a cache.

    Also save a tokenizer whose words are numbers, for servers that need one.

    Args:
      folder: where to save; created by the caller.
      model_type, settings: for `transformers.AutoConfig`.
      prompts, count: as in `generate`.
      without: settings that turn a feature off.
      stored: the dtype of the checkpoint; the judge has the same rounded weights.
      packed: whether experts are stored, and computed, as MXFP4.
      cached: the torch dtype that keys and values are rounded to, as in a cache of that dtype. For
        a model with latents, latents and the rotated part of keys are rounded.
      adapted: whether to save a LoRA adapter in the folder `ADAPTER` below, and merge it into the
        judge.

    Returns:
      `tokens`, a list per prompt, and their log probabilities `logprobs`; `margin`, the smallest
      lead of a best logit; `rounding`, the largest error of a log probability computed in bfloat16;
      and `bite`, the largest change of one by `without`.
    """
    import torch
    import transformers

    from tests.support import mxfp4
    from tests.support.families import Family
    from tests.support.transformers_models import make_model

    def logprobs(model: Any, text: list[int], first: int) -> Any:
        with torch.no_grad():
            return model(torch.tensor([text])).logits[0, first:].log_softmax(-1)

    def make(**changes: Any) -> Any:
        family = Family(model_type, "", {**settings, **changes})
        made = make_model(torch, transformers, family)
        experts.update(mxfp4.round_experts(made) if packed else {})
        return made.to(getattr(torch, stored))

    if cached is not None:
        _round_cached(model_type, getattr(torch, cached), settings.get("kv_lora_rank"))
    experts: dict[str, Any] = {}
    model = make()
    model.save_pretrained(folder)
    if packed:
        mxfp4.replace(folder, experts)
    _save_tokenizer(folder, settings["vocab_size"])
    others = {"rounding": model.bfloat16()}
    if adapted:
        _adapt(others["rounding"], f"{folder}/{ADAPTER}")
    if without is not None:
        others["bite"] = make(**without).double()
    off = dict.fromkeys(("rounding", "bite"), 0.0)
    model, margin = make().double(), float("inf")
    if adapted:
        _adapt(model, f"{folder}/{ADAPTER}")
    found: dict[str, Any] = {"tokens": [], "logprobs": []}
    for prompt in prompts:
        text, chosen = list(prompt), []
        for _ in range(count):
            best = logprobs(model, text, -1)[0].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            text.append(int(best.indices[0]))
            chosen.append(float(best.values[0]))
        found["tokens"].append(text[len(prompt) :])
        found["logprobs"].append(chosen)
        for name, other in others.items():
            rows = logprobs(other, text[:-1], len(prompt) - 1).double()
            changed = rows[range(count), found["tokens"][-1]] - torch.tensor(chosen)
            off[name] = max(off[name], float(changed.abs().max()))
    return {**found, "margin": margin, **off}


def _round_cached(model_type: str, dtype: Any, latent: int | None) -> None:
    """Make transformers round keys and values to a torch dtype, as a cache of it would.

    For a model with latents (of `latent` numbers), round these and the rotated part of keys.
    """
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")

    def rounded(x: Any) -> Any:
        return x.to(dtype).to(x.dtype)

    if latent is None:
        eager = module.eager_attention_forward

        def attend(
            layer: Any, query: Any, key: Any, value: Any, *given: Any, **options: Any
        ) -> Any:
            return eager(layer, query, rounded(key), rounded(value), *given, **options)

        module.eager_attention_forward = attend
        return
    rotated = module.apply_rotary_pos_emb_interleave
    norm = module.DeepseekV3RMSNorm.forward

    def rotate(query: Any, key: Any, *given: Any, **options: Any) -> Any:
        query, key = rotated(query, key, *given, **options)
        return query, rounded(key)

    def normalize(layer: Any, x: Any) -> Any:
        found = norm(layer, x)
        return rounded(found) if x.shape[-1] == latent else found

    module.apply_rotary_pos_emb_interleave = rotate
    module.DeepseekV3RMSNorm.forward = normalize


def _save_tokenizer(folder: str, vocab_size: int) -> None:
    """Save a tokenizer whose words are token ids."""
    import tokenizers
    import transformers

    words = {str(token): token for token in range(vocab_size)}
    numbers = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    numbers.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=numbers, unk_token="0", eos_token="2"
    ).save_pretrained(folder)


def _adapt(model: Any, folder: str) -> None:
    """Save a random adapter of some linear layers, and merge it into them."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(2), {}
    for name, layer in model.named_modules():
        if not name.endswith(ADAPTED):
            continue
        rows, columns = layer.weight.shape
        down = torch.randn((RANK, columns), generator=generator) / columns**0.5
        up = torch.randn((rows, RANK), generator=generator) / RANK**0.5
        with torch.no_grad():
            layer.weight += (up.double() @ down.double()).to(layer.weight.dtype)
        path = f"base_model.model.{name}.lora"
        tensors |= {f"{path}_A.weight": down, f"{path}_B.weight": up}
    pathlib.Path(folder).mkdir(exist_ok=True)
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*ADAPTED]}
    pathlib.Path(folder, "adapter_config.json").write_text(json.dumps(config))


def generate(
    folder: str,
    prompts: list[list[int]],
    count: int,
    engine: dict[str, Any],
    logprobs: bool = False,
    nodes: int = 0,
    adapted: list[bool] | None = None,
) -> dict[str, Any]:
    """Continue prompts greedily with vLLM's own engine in this process.

    With `nodes`, its workers run in separate processes, on that many Ray nodes that this machine
    simulates. `adapted` says which prompts use the adapter in the folder.

    Returns:
      `tokens`, a list per prompt. With `logprobs`, their log probabilities too. With a
      `speculative_config`, how many tokens were `drafted` and `accepted`. With either of these,
      `cached`, how many tokens of each prompt were found in the pools. Or `error`, what the engine
      raised when it started.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with contextlib.ExitStack() as stack:
        if nodes:
            import ray

            ray.init(stack.enter_context(_ray(nodes, dict(os.environ)))["RAY_ADDRESS"])
        return _generate(folder, prompts, count, engine, logprobs, adapted)


def nodes(count: int) -> None:
    """Start Ray nodes, each with resources that vLLM takes for a machine with one TPU.

    Prints a line `NODES ADDRESS`, and stops the nodes when standard input closes. It needs its own
    process: vLLM's threads would reconnect to the nodes while they stop.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1, resources={"TPU": 1}, object_store_memory=100 << 20)
        print("NODES", cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


def _generate(
    folder: str,
    prompts: list[list[int]],
    count: int,
    engine: dict[str, Any],
    logprobs: bool,
    adapted: list[bool] | None,
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    try:
        llm = LLM(model=folder, attention_backend="jattn", **{**SMALL, **engine})
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        logprobs=1 if logprobs else None,
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    adapter = LoRARequest("adapter", 1, f"{folder}/{ADAPTER}")
    adapters = None if adapted is None else [adapter if x else None for x in adapted]
    requests = llm.generate(given, sampling, use_tqdm=False, lora_request=adapters)
    answers = [request.outputs[0] for request in requests]
    found: dict[str, Any] = {"tokens": [list(answer.token_ids) for answer in answers]}
    if logprobs or "speculative_config" in engine:
        found["cached"] = [request.num_cached_tokens for request in requests]
    if "speculative_config" in engine:
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        for name, metric in (("drafted", "draft"), ("accepted", "accepted")):
            found[name] = metrics[f"vllm:spec_decode_num_{metric}_tokens"].value
    if logprobs:
        found["logprobs"] = [
            [
                one[token].logprob
                for token, one in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            for answer in answers
        ]
    return found


def main() -> None:
    """Run the part that the command line asks for, and exit."""
    from tests.support import vllm_images, vllm_requests

    parts = {"judge": judge, "generate": generate, "nodes": nodes}
    parts |= {"judge images": vllm_images.judge, "generate images": vllm_images.generate}
    parts["judge images of Gemma"] = vllm_images.judge_gemma
    parts |= {"ask": vllm_requests.ask, "embed": vllm_requests.embed}
    parts["ask together"] = vllm_requests.ask_together
    parts["judge embeddings"] = vllm_requests.judge
    asked = json.loads(sys.argv[1])
    found = parts[asked.pop("part")](**asked)
    print("RESULT", json.dumps(found), flush=True)
    os._exit(0)  # a normal exit of the host raises (0.32.0)
