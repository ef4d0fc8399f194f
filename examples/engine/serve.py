"""Serve a checkpoint over HTTP.

    python -m examples.engine.serve --model DIR
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 20}'

`--help` lists the rest; `examples/engine/app.py` says what is served.
"""

# ruff: noqa: E402 (missing packages are reported before they are imported)

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Sequence

_packages = ("jax", "flax", "safetensors", "tqdm", "starlette", "uvicorn")
if _missing := [name for name in _packages if not importlib.util.find_spec(name)]:
    sys.exit(f"this server needs {', '.join(_missing)}: pip install -e '.[serve]'")

import uvicorn

import jattn
from examples.engine.app import make_app
from examples.engine.caches import aligned_block_size, group_layers
from examples.engine.engine import Engine
from examples.engine.model import StateCache, load_model
from examples.engine.scheduler import PAGES, Limits
from examples.options import KV_FORMATS, SPEAKING, add_engine_options, checkpoint_directory, integer
from examples.text import load_tokenizer


def build(options: argparse.Namespace) -> Engine:
    """Load the model, make its caches and compile its steps, behind a progress bar.

    Raises:
      ValueError: options that do not fit each other or the checkpoint.
      jattn.UnsupportedError: `--implementation` cannot run this model.
    """
    directory = checkpoint_directory(options.model)
    model = load_model(directory, options.dtype)
    kv_format = KV_FORMATS[options.kv_format or model.dtype]
    block_size = options.block_size
    if options.unified:
        if not any(isinstance(cache, StateCache) for cache in model.layers.values()):
            raise ValueError(f"--unified is for models with recurrent layers, not {model.name}")
        item = jattn.init_kv_cache(1, 1, 1, 1, format=kv_format)[0].data.dtype.itemsize
        block_size = aligned_block_size(model.layers, item, block_size)
    groups = group_layers(model.layers, unified=options.unified)
    names = [PAGES] if options.unified else [group.name for group in groups]
    limits = Limits(
        groups=groups,
        max_seqs=options.max_seqs,
        token_budget=options.token_budget,
        block_size=block_size,
        max_len=min(options.max_len, model.max_positions),
        num_blocks=dict.fromkeys(names, options.blocks) if options.blocks else None,
        prefix_caching=not options.no_prefix_cache,
        unified=options.unified,
    )
    return Engine(
        model,
        limits,
        kv_format=kv_format,
        tokenizer=load_tokenizer(directory, model.vocab_size),
        implementation=options.implementation,
        quiet=False,
    )


def options_parser() -> argparse.ArgumentParser:
    """Every option, its default and its help."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.engine.serve",
        description="Serve a model over HTTP, in the shapes of OpenAI's completions API.",
    )
    add = parser.add_argument
    add("--model", default=SPEAKING, help="a directory or bundled checkpoint (%(default)s)")
    add("--host", default="127.0.0.1", help="(%(default)s)")
    add("--port", type=int, default=8000, help="(%(default)s)")
    number = functools.partial(add, metavar="N", type=integer(1))
    number("--max-requests", default=256, help="requests waiting and running (%(default)s)")
    add_engine_options(parser, max_seqs=16, token_budget=128)
    number("--max-len", default=1024, help="tokens of a sequence (%(default)s)")
    number("--blocks", help="blocks in each pool (default: never a shortage)")
    add("--unified", action="store_true", help="recurrent states in pages of the KV pools")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is interrupted. Wrong arguments exit with status 2."""
    parser = options_parser()
    options = parser.parse_args(arguments)
    try:
        engine = build(options)
    except (ValueError, jattn.UnsupportedError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    app = make_app(engine, options.max_requests)
    uvicorn.run(app, host=options.host, port=options.port, log_level="info")


if __name__ == "__main__":
    main()
