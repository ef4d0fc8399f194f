"""Workloads of a few tokens and a fake contender, for the tests of the benchmarks."""

import dataclasses

import pytest

from benchmarks import ceilings, timing
from benchmarks.workloads import Workload

TINY = Workload(
    name="tiny-head16-kv2-fp32",
    group="tiny",
    query_lens=(1, 5, 1),
    seq_lens=(9, 5, 30),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=16,
    block_size=4,
    dtype="float32",
)
WINDOW = dataclasses.replace(TINY, name="tiny-window", sliding_window=6)
BFLOAT16 = dataclasses.replace(TINY, name="tiny-bf16", dtype="bfloat16")
LIMITS = ceilings.Ceilings(read=1e10, matrix={"float32": 1e11, "bfloat16": 2e11})


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    """Pretend that caches are tiny: small workloads would need thousands of copies to be cold."""
    monkeypatch.setattr(timing, "cache_bytes", lambda: 4096)


class Clock:
    """A contender whose calls take a given time."""

    implementation, layers = "clock", 1

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def run(self, count):
        self.log.append((self.name, count))
        return [self.seconds] * count
