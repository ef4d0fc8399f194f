"""The command line of `examples/generate.py`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import jattn

BUNDLED = ("gemma4-e2b-tiny", "gemma4-31b-tiny")
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


def options_parser() -> argparse.ArgumentParser:
    """Every option, its default and its help."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Serve requests with a Gemma 4 model over paged KV caches.",
        epilog="Without --prompt, the prompts of the checkpoint's reference.npz are served. The "
        "bundled checkpoints have random weights: what they write is noise, and exactly the noise "
        "that another library makes of them.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a directory with config.json and safetensors, or one of "
        f"{', '.join(BUNDLED)} (default: each of these in turn)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", help="a text to continue; may be repeated"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare tokens and logits with the checkpoint's reference.npz; "
        "exit with status 1 where they differ",
    )
    positive, natural = _integer(1), _integer(0)
    add = functools.partial(parser.add_argument, metavar="N", type=positive)
    add("--max-new-tokens", help="tokens to generate per request (default: 32)")
    add("--arrive-every", type=natural, default=3, help="steps between two arrivals (%(default)s)")
    add("--max-seqs", default=8, help="sequences in a step (%(default)s)")
    add("--token-budget", default=64, help="tokens in a step (%(default)s)")
    add("--block-size", default=16, help="tokens in a block (%(default)s)")
    add("--sliding-blocks", help="blocks in the sliding layers' pool (default: never a shortage)")
    add("--global-blocks", help="blocks in the global layers' pool (default: never a shortage)")
    add("--seed", type=natural, default=0, help="of the order of blocks (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="what to compute in (default: what config.json says, or float32)",
    )
    parser.add_argument(
        "--kv-format",
        choices=KV_FORMATS,
        help="what caches store, or keys and values each (default: the same as --dtype)",
    )
    parser.add_argument(
        "--implementation",
        choices=("xla", "triton", "mosaic_gpu", "reference"),
        help="of jattn.paged_attention (default: the best that can run here)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no texts")
    return parser


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return parse
