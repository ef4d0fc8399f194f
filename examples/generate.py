"""Generate text with a Gemma 4 model whose keys and values live in paged caches.

    python examples/generate.py --verify

serves the prompts of two small reference checkpoints the way a server would: requests arrive while
others are running, their prompts are read in chunks beside other requests' decoding, and every
layer kind has a pool of blocks that sequences share. `--model DIR` runs any other Gemma 4
checkpoint in Hugging Face's layout. See `--help` for the rest.
"""

# ruff: noqa: E402 (run as a file, it must find its packages before it can import them)

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):  # run as a file: find `examples` and `jattn` beside it
    sys.path.insert(0, str(HERE.parent))

_packages = ("jax", "flax", "safetensors", "tqdm")
if _missing := [name for name in _packages if not importlib.util.find_spec(name)]:
    sys.exit(f"this example needs {', '.join(_missing)}: pip install -e '.[examples]'")

import jax
from tqdm import tqdm

import jattn
from examples.job import Job, prepare
from examples.options import BUNDLED, KV_FORMATS, options_parser
from examples.serving.engine import Chunk, Engine, Report, count_compilations
from examples.verify import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program: 0, or 1 if `--verify` failed. Wrong arguments exit with status 2."""
    parser = options_parser()
    options = parser.parse_args(arguments)
    passed = True
    for name in [options.model] if options.model else BUNDLED:
        with count_compilations() as compilations:
            try:
                job = prepare(name, options)
            except ValueError as error:
                parser.exit(2, f"{parser.prog}: error: {error}\n")
            try:
                engine = build(job, options)
            except jattn.UnsupportedError as error:
                parser.exit(2, f"{parser.prog}: error: --implementation: {error}\n")
            report = serve(job, engine, quiet=options.quiet)
        if not options.quiet:
            _print_completions(job, report)
        _print_summary(report, compilations.count)
        if job.reference is not None:
            verdict = compare(job.reference, report.completions, job.kv_format)
            passed &= verdict.passed
            _line("verify", str(verdict))
        print()
    return 0 if passed else 1


def build(job: Job, options: argparse.Namespace) -> Engine:
    """Make the caches and compile the step, and say so: it takes a while."""
    _describe(job)
    limits = job.limits
    pools = " and ".join(f"{n} {kind}" for kind, n in limits.num_blocks.items())
    _line(
        "pools",
        f"{pools} blocks of {limits.block_size} tokens in shuffled order, {job.kv_format}",
    )
    _line(
        "compiling",
        f"a step of up to {limits.max_seqs} decoding tokens and one of {limits.token_budget} "
        "mixed tokens ...",
    )
    engine = Engine(
        job.model,
        limits,
        kv_format=KV_FORMATS[job.kv_format],
        implementation=options.implementation,
        check=options.verify,
        seed=options.seed,
    )
    _line("compiled", f"in {engine.compile_seconds:.1f} s; pools of {_size(engine.pool_bytes)}")
    return engine


def serve(job: Job, engine: Engine, *, quiet: bool = False) -> Report:
    """Serve a job's requests behind a progress bar."""
    total = sum(request.max_new_tokens for request in job.requests)
    with tqdm(total=total, unit="token", desc="serving", disable=quiet) as bar:

        def on_step(plan: list[Chunk]) -> None:
            pools = engine.scheduler.pools.items()
            used = ", ".join(f"{kind} {p.num_used}/{p.num_blocks}" for kind, p in pools)
            bar.set_postfix_str(f"{len(engine.scheduler.running)} running, blocks {used}", False)
            bar.update(sum(chunk.is_last for chunk in plan))

        keep = job.reference is not None
        report = engine.serve(job.requests, keep_logits=keep, on_step=on_step)
        bar.total = report.num_new_tokens  # fewer than hoped where a text came to its end
    return report


def _describe(job: Job) -> None:
    config = job.model.config
    parts = []
    for kind, window in config.windows.items():
        layers = [layer for layer in config.layers if layer.kind == kind]
        owners = sum(layer.owns_cache for layer in layers)
        heads = sorted({(layer.head_dim, layer.num_kv_heads) for layer in layers})
        shapes = ", ".join(f"D={d} with {k} KV head{'s' * (k > 1)}" for d, k in heads)
        sees = "" if window is None else f", window {window}"
        shared = "" if owners == len(layers) else f", {owners} with a cache"
        parts.append(f"{len(layers)} {kind} ({shapes}{sees}{shared})")
    size = sum(leaf.size for leaf in jax.tree.leaves(job.model.params))
    _line(
        job.name,
        f"{size / 1e6:,.1f} M parameters in {job.model.dtype}, {config.num_heads} query heads",
    )
    _line("layers", "; ".join(parts))


def _print_completions(job: Job, report: Report, most: int = 16) -> None:
    """A line per request: what it asked and what it got."""
    print(f"  {'request':<8} {'arrives':>7} {'prompt':>6}  {'reads':<26}  continues")
    for i, done in enumerate(report.completions[:most]):
        prompt, text = map(job.tokenizer.decode, (done.request.prompt, done.tokens))
        reads, writes = _shorten(prompt, 26), _shorten(text, 40)
        arrival, count = done.request.arrival, len(done.request.prompt)
        print(f"  {i:<8} {arrival:>7} {count:>6}  {reads:<26}  {writes}")
    if len(report.completions) > most:
        print(f"  ... and {len(report.completions) - most} more")


def _print_summary(report: Report, num_compilations: int) -> None:
    num_read, num_new, seconds = report.num_prompt_tokens, report.num_new_tokens, report.seconds
    preempted = f", {report.num_preemptions} preemptions" if report.num_preemptions else ""
    _line(
        "served",
        f"{len(report.completions)} requests in {report.num_steps} steps and {seconds:.2f} s, "
        f"at most {report.peak.rows} at once{preempted}",
    )
    _line(
        "tokens/s",
        f"{num_new / seconds:,.0f} generated ({num_new}), "
        f"{(num_new + num_read) / seconds:,.0f} with prompts ({num_read})",
    )
    blocks = " and ".join(f"{n} {kind}" for kind, n in report.peak.blocks.items())
    ratio = report.dense_kv_bytes / report.peak.kv_bytes
    _line(
        "KV at peak",
        f"{_size(report.peak.kv_bytes)} ({blocks} blocks); a dense cache of {report.peak.rows} x "
        f"{report.longest} tokens takes {_size(report.dense_kv_bytes)}, {ratio:.1f} times as much",
    )
    _line("compilations", f"{num_compilations} in all")


def _line(label: str, text: str) -> None:
    print(f"{label:<16} {text}", flush=True)


def _size(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def _shorten(text: str, width: int) -> str:
    """Text in one line, cut to a width, with what cannot be printed escaped."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    shown = "".join(escaped)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
