"""What each cache format costs in accuracy on the example's checkpoints, and what it saves.

    python -m benchmarks.formats [--format NAME ...] [--model NAME ...] [--tokens N]

Every checkpoint in `examples/checkpoints` serves the prompts of its reference, fed the reference's
tokens, with its keys and values in each format. A line gives the root mean square of the logits'
error against another library's float32 logits, how many greedy choices are the reference's, and
the bytes that a token takes in the caches of all layers.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from examples.generate import build, serve
from examples.job import CHECKPOINTS, prepare
from examples.options import BUNDLED, KV_FORMATS, options_parser
from examples.verify import Reference, compare


def measure(model: str, kv_format: str, tokens: int) -> tuple[str, int]:
    """One line of the table, and the bytes of a block of 16 tokens in all layers."""
    words = ["--quiet", "--max-new-tokens", str(tokens), "--kv-format", kv_format]
    options = options_parser().parse_args(words)
    job = prepare(model, options)
    reference = Reference.load(CHECKPOINTS / model / "reference.npz")
    requests = reference.requests(tokens, options.arrive_every, forced=True)
    job = dataclasses.replace(job, requests=requests, reference=reference)
    engine = build(job, options)
    completions = serve(job, engine, quiet=True).completions
    verdict = compare(reference, completions, "bfloat16")  # whose limit nobody asks for here
    num_bytes = sum(engine.block_bytes.values()) // job.limits.block_size
    share = verdict.equal_tokens / verdict.num_tokens
    cells = (model, kv_format, f"{verdict.rms_error:.4f}", f"{share:.1%}", str(num_bytes))
    return "| " + " | ".join(cells) + " |", num_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.formats", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--format", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    parser.add_argument("--model", nargs="+", default=list(BUNDLED))
    parser.add_argument("--tokens", type=int, default=32, help="new ones per prompt (%(default)s)")
    args = parser.parse_args(arguments)
    lines = []
    for model in args.model:
        for kv_format in args.format:
            lines.append(measure(model, kv_format, args.tokens)[0])
            print(lines[-1], flush=True)
    print(
        "\n| checkpoint | format | logit rms | tokens equal | bytes a token |\n"
        "|---|---|---|---|---|"
    )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
