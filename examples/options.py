"""Command-line options that `examples/generate.py` and `examples/engine/serve.py` share."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jattn
from jattn import implementations

SPEAKING = "byte-gemma"  # writes English-looking sentences
BUNDLED = ("gemma4-e2b-tiny", "gemma4-31b-tiny")  # they have references: --verify runs them
MORE_BUNDLED = (
    *("deepseek-v3-tiny", "gpt-oss-tiny", "nemotron-h-tiny"),
    *("qwen3-next-tiny", "qwen3-tiny"),
)
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
KV_FORMATS = {
    "float32": jattn.Dense("float32"),
    "bfloat16": jattn.Dense("bfloat16"),
    "float16": jattn.Dense("float16"),
    "e4m3": jattn.Fp8("e4m3"),
    "e5m2": jattn.Fp8("e5m2"),
    "e4m3-block": jattn.Fp8("e4m3", "block"),
    "e4m3-token": jattn.Fp8("e4m3", "token"),
    "int8": jattn.Int8(),
    "int8-zero": jattn.Int8(zero_point=True),
    "int4": jattn.Int4(),
    "int4-zero": jattn.Int4(zero_point=True),
    "nvfp4": jattn.Nvfp4(),
    "int8-int4": (jattn.Int8(), jattn.Int4(zero_point=True)),  # keys, values
}


def checkpoint_directory(name: str) -> Path:
    """Return the directory of a bundled checkpoint, or the one that a path names."""
    bundled = name in (SPEAKING, *BUNDLED, *MORE_BUNDLED)
    return CHECKPOINTS / name if bundled else Path(name)


def add_engine_options(
    parser: argparse.ArgumentParser, *, max_seqs: int, token_budget: int
) -> None:
    """Add the options of every program that runs an engine, with the given defaults."""
    add = functools.partial(parser.add_argument, metavar="N", type=integer(1))
    add("--max-seqs", default=max_seqs, help="sequences in a step (%(default)s)")
    add("--token-budget", default=token_budget, help="tokens in a step (%(default)s)")
    add("--block-size", default=16, help="tokens in a block (%(default)s)")
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype to compute in (default: config.json's, or float32)",
    )
    parser.add_argument(
        "--kv-format",
        choices=KV_FORMATS,
        help="storage format of the caches, or of keys and of values (default: same as --dtype)",
    )
    parser.add_argument(
        "--mesh", metavar="AXIS=N", help="devices that share the model, such as tensor=2"
    )
    parser.add_argument(
        "--implementation",
        choices=tuple(implementations.BY_NAME),
        help="implementation of jattn.paged_attention (default: the best that can run here)",
    )


def options_parser() -> argparse.ArgumentParser:
    """Make the parser, with every option, its default and its help."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Serve requests with a language model over paged KV caches.",
        epilog="Without --prompt, the prompts of the checkpoint's prompts.txt or reference.npz are "
        f"served. {SPEAKING} was trained by examples/train_byte_model.py. The others have random "
        "weights: they write noise, but the same noise as another library.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a directory with config.json and safetensors, or one of "
        f"{', '.join((SPEAKING, *BUNDLED, *MORE_BUNDLED))} (default: the first; with --verify: "
        f"{' and '.join(BUNDLED)})",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", help="a text to continue; may be repeated"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare tokens and logits with the checkpoint's reference.npz; "
        "exit with status 1 if they differ",
    )
    add_engine_options(parser, max_seqs=8, token_budget=64)
    positive, natural = integer(1), integer(0)
    add = functools.partial(parser.add_argument, metavar="N", type=positive)
    add(
        "--max-new-tokens",
        help="tokens to generate per request (default: 192 for byte models, 32 for others)",
    )
    add("--arrive-every", type=natural, default=3, help="steps between two arrivals (%(default)s)")
    add("--sliding-blocks", help="blocks in the sliding layers' pool (default: never too few)")
    add("--global-blocks", help="blocks in the global layers' pool (default: never too few)")
    add("--seed", type=natural, default=0, help="seed of block order and sampling (%(default)s)")
    add("--top-k", type=natural, default=0, help="sample from the N likeliest tokens (0: all)")
    fraction = functools.partial(parser.add_argument, metavar="X", type=float)
    fraction("--temperature", help=f"sampling temperature (default: 0, greedy; {SPEAKING}: 0.4)")
    fraction("--top-p", default=1.0, help="sample from the likeliest with total probability X")
    parser.add_argument("--quiet", action="store_true", help="print no progress bar and no texts")
    return parser


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers of at least `least` and, if given, at most `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        known = text.isascii() and text.removeprefix("-").isdigit() and int(text) >= least
        if not known or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer {bounds}")
        return int(text)

    return parse
