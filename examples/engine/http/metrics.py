"""An engine's statistics in Prometheus' text format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from examples.engine.engine import Engine
from examples.engine.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Family:
    """A metric: its name, type, help and samples, each with its suffix and labels."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, object]]


def exposition(engine: Engine, responses: Mapping[tuple[str, int], int]) -> str:
    """Format every metric; `responses` counts HTTP responses by path and status."""
    return text_of([*families(engine), http(responses)])


def joined(found: Sequence[Sequence[Family]]) -> list[Family]:
    """Join the metrics of several engines, whose labels differ."""
    return [
        dataclasses.replace(same[0], samples=[s for family in same for s in family.samples])
        for same in zip(*found, strict=True)
    ]


def text_of(families: Iterable[Family]) -> str:
    """Format metrics for Prometheus."""
    lines = []
    for family in families:
        lines.append(f"# HELP jattn_{family.name} {family.text}")
        lines.append(f"# TYPE jattn_{family.name} {family.kind}")
        lines += [f"jattn_{family.name}{where} {value}" for where, value in family.samples]
    return "\n".join(lines) + "\n"


def http(responses: Mapping[tuple[str, int], int]) -> Family:
    """Return the metric of HTTP responses, by path and status."""
    samples = [(_labels(path=path, status=s), n) for (path, s), n in sorted(responses.items())]
    return Family("http_requests_total", "counter", "HTTP requests, by path and status.", samples)


def families(engine: Engine, **labels: object) -> list[Family]:
    """Return every metric of an engine, with the given labels on all samples."""
    done, scheduler = engine.statistics, engine.scheduler
    counters = {
        "requests_received": (done.num_requests, "Requests accepted."),
        "prompt_tokens": (done.num_prompt_tokens, "Tokens of prompts that were read."),
        "generated_tokens": (done.num_new_tokens, "Tokens generated."),
        "computed_tokens": (done.num_computed_tokens, "Tokens run through the model."),
        "prefix_cache_hit_tokens": (done.num_reused_tokens, "Prompt tokens found in the cache."),
        "received_prompts": (done.num_received_prompts, "Prompts that another server has read."),
        "received_tokens": (done.num_received_tokens, "Tokens of received prompts."),
        "received_bytes": (done.num_received_bytes, "Bytes of received prompts' caches."),
        "failed_prompts": (done.num_failed_prompts, "Prompts that no other server could read."),
        "preemptions": (done.num_preemptions, "Times a sequence gave up its blocks."),
        "steps": (done.num_steps, "Steps run."),
        "drafted_chunks": (done.num_drafted_chunks, "Rows of steps that had draft tokens."),
        "drafted_tokens": (done.num_drafted_tokens, "Draft tokens verified."),
        "accepted_tokens": (done.num_accepted_tokens, "Draft tokens accepted."),
        "host_seconds": (done.host_seconds, "Time in steps outside the jitted call."),
        "device_seconds": (done.device_seconds, "Time in steps inside the jitted call."),
    }
    gauges = {
        "requests_running": (len(scheduler.running), "Sequences running."),
        "requests_waiting": (len(scheduler.waiting), "Sequences waiting."),
        "programs_compiled": (len(engine.steps.programs), "Step shapes compiled."),
        "programs_coming": (engine.steps.num_coming, "Step shapes still to be compiled."),
        "cache_bytes": (engine.cache_bytes, "Bytes of all caches."),
        "accepted_length": (done.accepted_length, "Mean tokens per row with draft tokens."),
        "tokens_per_second": (done.tokens_per_second, "Tokens generated per second of steps."),
        "cache_used_bytes": (engine.used_bytes, "Bytes of blocks and states in use."),
    }
    if (host := engine.host_cache) is not None:
        counters |= {
            "host_cache_stored": (host.num_stored, "Evicted blocks copied to host memory."),
            "host_cache_returned": (host.num_returned, "Blocks copied back from host memory."),
            "host_cache_dropped": (host.num_dropped, "Blocks that host memory had no room for."),
        }
        gauges |= {
            "host_cache_blocks": (len(host), "Blocks in host memory."),
            "host_cache_used_bytes": (host.used_bytes, "Bytes of blocks in host memory."),
            "host_cache_bytes": (host.max_bytes, "Host memory available for blocks, in bytes."),
        }
    where = _labels(**labels)
    found = [
        Family(f"{name}_total", "counter", text, [(where, value)])
        for name, (value, text) in counters.items()
    ]
    reasons = [
        (_labels(**labels, reason=reason), done.finished[reason])
        for reason in ("stop", "length", "abort", "error")
    ]
    text = "Requests finished, by reason."
    found.append(Family("requests_finished_total", "counter", text, reasons))
    found += [
        Family(name, "gauge", text, [(where, value)]) for name, (value, text) in gauges.items()
    ]
    pools = [(_labels(**labels, pool=name), pool) for name, pool in scheduler.pools.items()]
    used, size = ([(at, getattr(p, n)) for at, p in pools] for n in ("num_used", "num_blocks"))
    found.append(Family("blocks_used", "gauge", "Blocks, or states, in use.", used))
    found.append(Family("blocks", "gauge", "Blocks, or states, in the pool.", size))
    for name, histogram, text in (
        ("queue", done.queue_seconds, "From arrival to the first step."),
        ("time_to_first_token", done.first_token_seconds, "From arrival to the first token."),
        ("time_per_output_token", done.next_token_seconds, "Mean per request after the first one."),
        ("request", done.request_seconds, "From arrival to the end."),
    ):
        samples = list(_histogram(histogram, labels))
        found.append(Family(f"{name}_seconds", "histogram", text, samples))
    return found


def _labels(**labels: object) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _histogram(histogram: Histogram, labels: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f"_bucket{_labels(**labels, le=bound)}", total
    yield f"_sum{_labels(**labels)}", histogram.sum
    yield f"_count{_labels(**labels)}", total
