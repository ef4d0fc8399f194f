"""An engine's statistics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from examples.engine.engine import Engine
from examples.engine.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(engine: Engine, responses: Mapping[tuple[str, int], int]) -> str:
    """Every metric, with its help and type; `responses` counts them by path and status."""
    done, scheduler = engine.statistics, engine.scheduler
    counters = {
        "requests_received": (done.num_requests, "Requests taken."),
        "prompt_tokens": (done.num_prompt_tokens, "Tokens of prompts that were read."),
        "generated_tokens": (done.num_new_tokens, "Tokens generated."),
        "computed_tokens": (done.num_computed_tokens, "Tokens run through the model."),
        "prefix_cache_hit_tokens": (done.num_reused_tokens, "Prompt tokens found in the cache."),
        "received_prompts": (done.num_received_prompts, "Prompts that another server has read."),
        "received_tokens": (done.num_received_tokens, "Tokens of such prompts."),
        "received_bytes": (done.num_received_bytes, "Bytes of their caches."),
        "failed_prompts": (done.num_failed_prompts, "Prompts that no other server could read."),
        "preemptions": (done.num_preemptions, "Times a sequence gave up its blocks."),
        "steps": (done.num_steps, "Steps run."),
        "drafted_chunks": (done.num_drafted_chunks, "Rows of steps that had drafts."),
        "drafted_tokens": (done.num_drafted_tokens, "Drafts verified."),
        "accepted_tokens": (done.num_accepted_tokens, "Drafts accepted."),
        "host_seconds": (done.host_seconds, "Time in steps outside the jitted call."),
        "device_seconds": (done.device_seconds, "Time in steps inside the jitted call."),
    }
    gauges = {
        "requests_running": (len(scheduler.running), "Sequences running."),
        "requests_waiting": (len(scheduler.waiting), "Sequences waiting."),
        "programs_compiled": (len(engine.steps.programs), "Shapes of steps that are compiled."),
        "programs_coming": (engine.steps.num_coming, "Shapes that are still being compiled."),
        "cache_bytes": (engine.cache_bytes, "Bytes of all caches."),
        "accepted_length": (done.accepted_length, "Mean tokens per row of a step with drafts."),
        "tokens_per_second": (done.tokens_per_second, "Tokens generated per second of steps."),
        "cache_used_bytes": (engine.used_bytes, "Bytes of blocks and states that are held."),
    }
    lines: list[str] = []
    for name, (value, text) in counters.items():
        lines += _header(f"{name}_total", "counter", text)
        lines.append(f"jattn_{name}_total {value}")
    lines += _header("requests_finished_total", "counter", "Requests finished, by reason.")
    for reason in ("stop", "length", "abort", "error"):
        count = done.finished[reason]
        lines.append(f'jattn_requests_finished_total{{reason="{reason}"}} {count}')
    lines += _header("http_requests_total", "counter", "HTTP requests, by path and status.")
    for (path, status), count in sorted(responses.items()):
        lines.append(f'jattn_http_requests_total{{path="{path}",status="{status}"}} {count}')
    for name, (value, text) in gauges.items():
        lines += _header(name, "gauge", text)
        lines.append(f"jattn_{name} {value}")
    lines += _header("blocks_used", "gauge", "Blocks, or states, that are held.")
    for name, pool in scheduler.pools.items():
        lines.append(f'jattn_blocks_used{{pool="{name}"}} {pool.num_used}')
    lines += _header("blocks", "gauge", "Blocks, or states, there are.")
    for name, pool in scheduler.pools.items():
        lines.append(f'jattn_blocks{{pool="{name}"}} {pool.num_blocks}')
    for name, histogram, text in (
        ("queue", done.queue_seconds, "From arrival to the first step."),
        ("time_to_first_token", done.first_token_seconds, "From arrival to the first token."),
        ("time_per_output_token", done.next_token_seconds, "Mean of a request, after its first."),
        ("request", done.request_seconds, "From arrival to the end."),
    ):
        lines += _header(f"{name}_seconds", "histogram", text)
        lines += _histogram(f"jattn_{name}_seconds", histogram)
    return "\n".join(lines) + "\n"


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP jattn_{name} {text}", f"# TYPE jattn_{name} {kind}"]


def _histogram(name: str, histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{bound}"}} {total}'
    yield f"{name}_sum {histogram.sum}"
    yield f"{name}_count {total}"
