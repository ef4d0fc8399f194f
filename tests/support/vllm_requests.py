"""Requests of several kinds to one engine of vLLM on JAX, and embeddings by transformers.

These are parts of `vllm_host.main`, each run in a separate process.
"""

from __future__ import annotations

import os
from typing import Any

from tests.support import vllm_host


def judge(folder: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return `embeddings` of prompts: the last hidden state in float64, scaled to length one."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    found = []
    for prompt in prompts:
        with torch.no_grad():
            last = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        found.append((last / last.norm()).tolist())
    return {"embeddings": found}


def embed(folder: str, prompts: list[list[int]], engine: dict[str, Any]) -> dict[str, Any]:
    """Return `embeddings` of prompts by vLLM's own engine in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    small = {**vllm_host.SMALL, "skip_tokenizer_init": False, "runner": "pooling", **engine}
    llm = LLM(model=folder, attention_backend="jattn", **small)
    answers = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    return {"embeddings": [list(answer.outputs.embedding) for answer in answers]}


def ask(
    folder: str,
    prompts: list[list[int]],
    engine: dict[str, Any],
    requests: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Continue all prompts with vLLM's own engine in this process, once per request in turn.

    Args:
      requests: fields of `SamplingParams`, on top of 6 greedy tokens; `choice`, a list of texts,
        stands for `structured_outputs`.

    Returns:
      For each request `tokens`, a list per prompt, or `error`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    small = {**vllm_host.SMALL, "skip_tokenizer_init": False, **engine}
    llm = LLM(model=folder, attention_backend="jattn", **small)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for fields in requests:
        try:
            answers = llm.generate(given, _sampling(fields), use_tqdm=False)
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
            continue
        found.append({"tokens": [list(answer.outputs[0].token_ids) for answer in answers]})
    return found


def ask_together(
    folder: str,
    prompts: list[list[int]],
    engine: dict[str, Any],
    requests: list[dict[str, Any]],
    resets: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Continue each prompt with vLLM's own engine in this process, all at once.

    Args:
      requests: one per prompt, as in `ask`.
      resets: steps before which the prefix cache is reset and running requests start again.

    Returns:
      `tokens` of each request, the log probabilities of its `prompt` if it asks for them, and the
      number of `preemptions`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    small = {**vllm_host.SMALL, "skip_tokenizer_init": False, "disable_log_stats": False}
    llm = LLM(model=folder, attention_backend="jattn", **{**small, **engine})
    if resets:
        _reset_before(llm.llm_engine, resets)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(given, [_sampling(fields) for fields in requests], use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "prompt": [
            [next(iter(one.values())).logprob for one in answer.prompt_logprobs or () if one]
            for answer in answers
        ],
        "preemptions": metrics["vllm:num_preemptions"].value,
    }


def _reset_before(engine: Any, resets: tuple[int, ...]) -> None:
    """Make vLLM's engine reset its prefix cache before some steps, counted from 1."""
    step, count = engine.step, 0

    def count_and_step() -> Any:
        nonlocal count
        count += 1
        if count in resets:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        return step()

    engine.step = count_and_step


def _sampling(fields: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = {"temperature": 0.0, "max_tokens": 6, **fields}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): x for token, x in fields["logit_bias"].items()}
    if "choice" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(choice=fields.pop("choice"))
    return SamplingParams(**fields)
