"""Time a decode step of a transformers model: jattn with its pools, sdpa with a static cache.

    python -m benchmarks.cpu.transformers_decode [--batch 1] [--context 1024] [--room 2048]
        [--dtype float32] [--turns 9] [--json FILE]

Needs torch and transformers (`pip install '.[transformers]'`). The model has Qwen3-0.6B's sizes and
random weights. Both contenders read the same prompt and then the same tokens, one per step; their
logits of every step are compared before either is timed. Contenders take turns of four steps, and a
line has the medians per step and sdpa's time over jattn's. sdpa is not compiled, because `generate`
does not compile it on a CPU.
"""

import argparse
import time
from typing import Any

import torch
import transformers
from transformers import initialization

import jattn.integrations.transformers as jattn_transformers
from benchmarks import timing
from benchmarks.cpu import tables
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive
from benchmarks.serving.peer import QWEN3

# Qwen3-0.6B's sizes, without the settings that shape no weights.
SIZES: dict[str, Any] = {
    name: value for name, value in QWEN3.items() if name not in ("model_type", "rope_theta")
}
STEPS = 4  # per turn; the first, which finds the other's data in the caches, is not counted
# How much two orders of summation may differ, relative to the logits' root mean square.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


class Contender:
    """A model with one attention and one cache, read up to the end of its prompt."""

    def __init__(self, model: Any, attention: str, cache: Any, prompt: torch.Tensor):
        self.model, self.attention, self.cache = model, attention, cache
        self.step(prompt)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last of `tokens` [B, n]."""
        self.model.set_attn_implementation(self.attention)
        return self.read(tokens)

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run `step` on a model that already has this contender's attention."""
        with torch.no_grad():
            out = self.model(tokens, past_key_values=self.cache, logits_to_keep=1)
        return out.logits[:, -1].float()

    def run(self, tokens: torch.Tensor) -> list[float]:
        """Return the seconds of a step for each but the first of `tokens` [B, n]."""
        seconds = []
        self.model.set_attn_implementation(self.attention)
        for token in tokens.split(1, dim=1):
            begin = time.perf_counter()
            self.read(token)
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]


def measure(batch: int, context: int, room: int, dtype: str, turns: int) -> dict[str, Any]:
    """Time both contenders, and return their ratio.

    Raises:
      AssertionError: the contenders' logits differ by more than rounding; nothing was timed.
    """
    config = transformers.Qwen3Config(**SIZES)
    torch.manual_seed(0)
    with initialization.no_init_weights():  # the default initialization is slow
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.eval().tie_weights()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0) if weight.ndim == 1 else weight.uniform_(-0.05, 0.05)
    jattn_transformers.register()
    text = torch.randint(0, config.vocab_size, (batch, context + 2 + 2 * STEPS + STEPS * turns))
    prompt, text = text[:, :context], text[:, context:]
    contenders = {
        "sdpa": Contender(
            model, "sdpa", transformers.StaticCache(config, max_cache_len=room), prompt
        ),
        "jattn": Contender(model, "jattn", jattn_transformers.PagedCache(config, room), prompt),
    }
    first, text = text[:, : 2 + STEPS], text[:, 2 + STEPS :]
    for token in first.split(1, dim=1):
        wanted, ours = (contender.step(token) for contender in contenders.values())
        error = float((ours - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
        assert error <= LIMITS[dtype], f"logits differ by {error:.2g} of their size"
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        tokens = text[:, STEPS * turn : STEPS * (turn + 1)]
        for name, contender in contenders.items():
            seconds[name] += contender.run(tokens)
    timings = {name: timing.summarize(found) for name, found in seconds.items()}
    return {
        "batch": batch,
        "context": context,
        "room": room,
        "dtype": dtype,
        "layers": config.num_hidden_layers,
        "weights_mb": sum(p.nbytes for p in model.parameters()) / 1e6,
        "threads": torch.get_num_threads(),
        "error": error,
        "steps": timings["jattn"].calls,
        **{f"{name}_ms": 1e3 * found.median for name, found in timings.items()},
        **{f"{name}_spread": found.spread for name, found in timings.items()},
        "ratio": timings["sdpa"].median / timings["jattn"].median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.transformers_decode", description=__doc__.splitlines()[0]
    )
    for name, default, words in (
        ("batch", 1, "sequences"),
        ("context", 1024, "tokens of the prompt"),
        ("room", 2048, "tokens that a cache has room for"),
        ("turns", 9, "turns of each contender"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"{words} (%(default)s)"
        )
    parser.add_argument("--dtype", choices=LIMITS, default="float32")
    add_json(parser)
    args = parser.parse_args()
    row = measure(args.batch, args.context, args.room, args.dtype, args.turns)
    print(
        f"{row['batch']} sequences, {row['context']} tokens in caches for {row['room']}, "
        f"{row['dtype']}: sdpa {row['sdpa_ms']:.1f} ms a step, jattn {row['jattn_ms']:.1f} ms, "
        f"{row['ratio']:.2f} times",
        flush=True,
    )
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        tables.append_lines(args.json, run_record(turns=args.turns, **versions), [row])


if __name__ == "__main__":
    main()
