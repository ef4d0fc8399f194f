"""Counting what XLA compiles."""

from __future__ import annotations

import contextlib

import jax

_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: (
        _compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
)


@contextlib.contextmanager
def compilations(at_most: int | None = None, at_least: int = 0):
    """Check how many programs of any kind XLA compiles in a `with` block."""
    before = len(_compiled)
    yield
    count = len(_compiled) - before
    assert count >= at_least, "the counter does not count"
    assert at_most is None or count <= at_most, f"{count} compilations"
