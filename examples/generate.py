"""Generate text with a language model whose keys and values live in paged caches.

    python examples/generate.py

runs a small byte-level Gemma-4-style model on your CPU and serves a few requests as a server would:
requests arrive while others run, prompts are prefilled in chunks while other requests decode, and
each kind of layer has a pool of blocks that sequences share. `--verify` instead serves the prompts
of two reference checkpoints and compares tokens and logits with another library's. `--model DIR`
runs any Gemma 4, Qwen3, GPT-OSS, Qwen3-Next, Nemotron-H or DeepSeek-V3 checkpoint in Hugging Face's
layout, as its config.json says. See `--help` for the rest.
"""

# ruff: noqa: E402 (when run as a file, it must make its packages importable before it imports them)

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):  # run as a file: make `examples` and `jattn` importable
    sys.path.insert(0, str(HERE.parent))

_packages = ("jax", "flax", "safetensors", "tqdm")
if _missing := [name for name in _packages if not importlib.util.find_spec(name)]:
    sys.exit(f"this example needs {', '.join(_missing)}: pip install -e '.[examples]'")

import jax
from tqdm import tqdm

import jattn
from examples.engine.engine import Engine
from examples.engine.statistics import count_compilations
from examples.engine.step import make_buckets
from examples.job import Job, Report, prepare
from examples.options import BUNDLED, KV_FORMATS, SPEAKING, options_parser
from examples.verify import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0, or 1 if `--verify` failed. Wrong arguments exit with status 2."""
    parser = options_parser()
    options = parser.parse_args(arguments)
    passed = True
    bundled = BUNDLED if options.verify else (SPEAKING,)
    for name in [options.model] if options.model else bundled:
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
            (_print_completions if options.verify else _print_texts)(job, report)
        _print_summary(report, compilations.count)
        if job.reference is not None:
            verdict = compare(job.reference, report.sequences, job.kv_format)
            passed &= verdict.passed
            _line("verify", str(verdict))
        print()
    return 0 if passed else 1


def build(job: Job, options: argparse.Namespace) -> Engine:
    """Make the caches and compile the step, printing progress."""
    _describe(job)
    limits = job.limits
    states = {limits.pool_of(group) for group in limits.groups if group.is_state}
    pools = [f"{n} {name} slots" for name, n in limits.num_blocks.items() if name in states]
    blocks = [f"{n} {name}" for name, n in limits.num_blocks.items() if name not in states]
    pools.append(f"{' and '.join(blocks)} blocks of {limits.block_size} tokens")
    _line("pools", f"{' and '.join(pools)} in shuffled order, {job.kv_format}")
    _line(
        "compiling",
        f"a step of up to {limits.max_seqs} decoding tokens and one of {limits.token_budget} "
        "mixed tokens ...",
    )
    engine = Engine(
        job.model,
        limits,
        kv_format=KV_FORMATS[job.kv_format],
        tokenizer=job.tokenizer,
        # The run is short: compile two programs, not the further ones that speed up small steps.
        buckets=make_buckets(limits, [limits.max_seqs], [limits.token_budget]),
        implementation=options.implementation,
        check=options.verify,
        keep_logits=job.reference is not None,
        seed=options.seed,
    )
    _line("compiled", f"in {engine.compile_seconds:.1f} s; pools of {_size(engine.cache_bytes)}")
    return engine


def serve(job: Job, engine: Engine, *, quiet: bool = False) -> Report:
    """Serve a job's requests, each from the step it arrives at, behind a progress bar."""
    total = sum(request.max_new_tokens for _, request in job.requests)
    coming, sequences, num_steps = list(job.requests), [], 0
    start = time.perf_counter()
    with tqdm(total=total, unit="token", desc="serving", disable=quiet) as bar:
        while coming or engine.has_work:
            while coming and coming[0][0] <= num_steps:
                sequences.append(engine.add(coming.pop(0)[1]))
            bar.update(len(engine.step()))
            pools = engine.scheduler.pools.items()
            used = ", ".join(f"{name} {p.num_used}/{p.num_blocks}" for name, p in pools)
            bar.set_postfix_str(f"{len(engine.scheduler.running)} running, blocks {used}", False)
            num_steps += 1
        seconds = time.perf_counter() - start
        bar.total = engine.statistics.num_new_tokens  # fewer if some text ended early
    engine.check_idle()
    arrivals = [step for step, _ in job.requests]
    state_pools = {job.limits.pool_of(group) for group in job.limits.groups if group.is_state}
    state_bytes = sum(engine.id_bytes[name] for name in state_pools)
    bytes_per_token = (sum(engine.id_bytes.values()) - state_bytes) // job.limits.block_size
    return Report(
        sequences, arrivals, num_steps, seconds, engine.statistics, bytes_per_token, state_bytes
    )


def _describe(job: Job) -> None:
    model, parts = job.model, []
    for group in job.limits.groups:
        caches = [model.layers[index] for index in group.layers]
        if group.is_state:
            size = sum(cache.layout.nbytes for cache in caches)
            parts.append(f"{len(caches)} recurrent ({_size(size)} of states per sequence)")
            continue
        heads = sorted({(cache.head_dim, cache.num_kv_heads) for cache in caches})
        shapes = ", ".join(f"D={d} with {k} KV head{'s' * (k > 1)}" for d, k in heads)
        sees = "" if group.window is None else f", window {group.window}"
        parts.append(f"{len(caches)} {group.name} ({shapes}{sees})")
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    _line(job.name, f"{size / 1e6:,.1f} M parameters in {model.dtype}")
    _line("layers that keep", "; ".join(parts))


def _print_texts(job: Job, report: Report) -> None:
    """Print every text in full, with a bar where the prompt ends."""
    for done in report.sequences:
        prompt, text = map(job.tokenizer.decode, (done.request.prompt, done.chosen))
        shown = _shorten(f"{prompt}|{text.rstrip()}", sys.maxsize)
        print(textwrap.fill(shown, 100, initial_indent="  ", subsequent_indent="    "))


def _print_completions(job: Job, report: Report, most: int = 16) -> None:
    """Print a line per request: its prompt and its continuation."""
    print(f"  {'request':<8} {'arrives':>7} {'prompt':>6}  {'reads':<26}  continues")
    for i, done in enumerate(report.sequences[:most]):
        arrival, count = report.arrivals[i], len(done.request.prompt)
        reads, writes = (
            _shorten(text, width)
            for text, width in ((job.tokenizer.decode(done.request.prompt), 26), (done.text, 40))
        )
        print(f"  {i:<8} {arrival:>7} {count:>6}  {reads:<26}  {writes}")
    if len(report.sequences) > most:
        print(f"  ... and {len(report.sequences) - most} more")


def _print_summary(report: Report, num_compilations: int) -> None:
    done, seconds, peak = report.statistics, report.seconds, report.statistics.peak
    num_read, num_new = done.num_prompt_tokens, done.num_new_tokens
    notes = f", {done.num_preemptions} preemptions" if done.num_preemptions else ""
    notes += f", {done.num_reused_tokens} prompt tokens reused" if done.num_reused_tokens else ""
    _line(
        "served",
        f"{len(report.sequences)} requests in {report.num_steps} steps and {seconds:.2f} s, "
        f"at most {peak.rows} at once{notes}",
    )
    _line(
        "tokens/s",
        f"{num_new / seconds:,.0f} generated ({num_new}), "
        f"{(num_new + num_read) / seconds:,.0f} with prompts ({num_read})",
    )
    _line("host", f"{100 * done.host_share:.1f} % of the steps' time outside the jitted call")
    blocks = " and ".join(f"{n} {name}" for name, n in peak.ids.items())
    ratio = report.dense_kv_bytes / peak.cache_bytes
    _line(
        "KV at peak",
        f"{_size(peak.cache_bytes)} ({blocks} blocks); a dense cache of {peak.rows} x "
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
    """Put text on one line, cut to a width, with unprintable characters escaped."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    shown = "".join(escaped)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
