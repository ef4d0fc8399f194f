"""Compare the engine with transformers: the peer's process, checkpoint sizes and figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import num_cores
from benchmarks.worker import Worker

# The choices of `--geometry`: transformers configs with a real model's layers. With fewer layers
# and a smaller vocabulary, a run takes a minute on two cores.
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
GEOMETRIES = {
    # Qwen3-0.6B: 8 of its 28 layers, 32,768 of its 151,936 tokens; 159 million parameters.
    "qwen3-0.6b-8-layers": {**QWEN3, "vocab_size": 32_768, "num_hidden_layers": 8},
    "qwen3-0.6b": QWEN3,  # all of it: 596 million
}

# The worker's ways to serve, and their names in the summary.
WAYS = {
    "single": "generate, one after another",
    "batch": "generate, one padded batch",
    "continuous": "its continuous batching",
}


class Peer(Worker):
    """transformers in a separate process."""

    def __init__(self, python: str):
        super().__init__(python, "benchmarks.serving.generate")

    def versions(self) -> dict:
        """Return the versions of the worker's packages."""
        return self.ask("versions")

    def make(self, geometry: str, directory: Path) -> None:
        """Write a checkpoint of random weights."""
        self.ask("make", directory=str(directory), config=GEOMETRIES[geometry])

    def load(self, directory: Path, dtype: str) -> dict:
        """Load a checkpoint, and return the worker's versions."""
        return self.ask("load", directory=str(directory), threads=num_cores(), dtype=dtype)

    def serve(self, way: str, prompts: list[list[int]], new: list[int]) -> dict:
        """Generate after each prompt; return "tokens", "seconds" and "cpu"."""
        return self.ask("serve", way=way, prompts=prompts, new=new)


def compare(
    serve: Callable[[], list[list[int]]],
    peer: Peer,
    prompts: Sequence[list[int]],
    new: Sequence[int],
    ways: Sequence[str],
    turns: int,
    *,
    exact: bool,
) -> dict:
    """Serve the same prompts, all there at once, in turn, and return medians of the turns.

    CPU seconds are reported too, because they say more if other processes use the cores.

    Args:
      serve: runs our engine and returns each request's tokens.
      peer: the peer, which has loaded the same checkpoint.
      prompts, new: the prompts, and how many tokens to generate after each.
      ways: names from `WAYS`.
      turns: how many, after one turn of ours and two tokens of each way to warm up.
      exact: whether the tokens of "single" must equal ours; otherwise the share is only reported.

    Raises:
      SystemExit: with `exact`, the tokens differ.
    """
    prompts, new = list(prompts), [int(n) for n in new]
    seconds, cpu = ({name: [] for name in ("ours", *ways)} for _ in range(2))
    same = {}
    serve()
    for way in ways:
        peer.serve(way, prompts, [2] * len(new))
    for _ in range(turns):
        start, used = time.perf_counter(), time.process_time()
        ours = serve()
        took = {"ours": (time.perf_counter() - start, time.process_time() - used)}
        for way in ways:
            answer = peer.serve(way, prompts, new)
            took[way] = answer["seconds"], answer["cpu"]
            same[way] = float(np.mean(np.concatenate(answer["tokens"]) == np.concatenate(ours)))
            if exact and way == "single" and same[way] < 1:
                raise SystemExit(f"{same[way]:.1%} of the peer's tokens equal ours: no figures")
        for name, (by_clock, of_cores) in took.items():
            seconds[name].append(by_clock)
            cpu[name].append(of_cores)
    rates = {name: sum(new) / float(np.median(values)) for name, values in seconds.items()}
    spent = {name: float(np.median(values)) for name, values in cpu.items()}
    return {
        "kind": "peer",
        "concurrent": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(new),
        "turns": turns,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        **{f"{name}_cpu_s": value for name, value in spent.items()},
        **{f"ratio_to_{way}": rates["ours"] / rates[way] for way in ways},
        **{f"cpu_ratio_to_{way}": spent[way] / spent["ours"] for way in ways},
        **{f"same_as_{way}": same[way] for way in ways},
    }


def summary(result: dict, host_share: float) -> str:
    """Write the result of `compare`: a line for each way."""
    lines = [
        f"{result['concurrent']} requests at once, {result['prompt_tokens']} tokens of prompts and "
        f"{result['new_tokens']} new ones: {result['ours_tokens_per_s']:.0f} tokens/s "
        f"(host {host_share:.1%}). transformers:"
    ]
    for way, words in WAYS.items():
        if f"ratio_to_{way}" in result:
            lines.append(
                f"  {words:27} {result[f'{way}_tokens_per_s']:>5.0f} tokens/s: ratio "
                f"{result[f'ratio_to_{way}']:.1f}, by CPU time "
                f"{result[f'cpu_ratio_to_{way}']:.1f}; {result[f'same_as_{way}']:.1%} of its "
                "tokens are ours"
            )
    return "\n".join(lines)
