"""Pauses of sglang-jax that keep its requests (`/pause_generation`, `in_place` and `retract`).

If the last step was a prefill, its requests are not in the running batch yet. A pause then drops
the step's batch and forgets them, and they hang. So jattn delays the pause to the next step, which
adds them to the running batch.
"""

from __future__ import annotations

import functools
from typing import Any

WAITING = "jattn_pause"  # attribute of a scheduler: the pause request that waits


def enable() -> None:
    """Make pauses wait for requests whose prompts were just computed.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.managers.scheduler import Scheduler

    pause, resume = Scheduler.pause_generation, Scheduler.continue_generation
    receive = Scheduler.process_input_requests

    @functools.wraps(pause)
    def wait_and_pause(scheduler: Any, asked: Any) -> None:
        last = scheduler.last_batch
        must_wait = last is not None and last.forward_mode.is_extend() and not scheduler.pd
        setattr(scheduler, WAITING, asked if must_wait else None)
        if not must_wait:
            pause(scheduler, asked)

    @functools.wraps(resume)
    def forget_and_resume(scheduler: Any, asked: Any) -> None:
        setattr(scheduler, WAITING, None)
        resume(scheduler, asked)

    @functools.wraps(receive)
    def pause_and_receive(scheduler: Any, requests: list[Any]) -> None:
        waiting = getattr(scheduler, WAITING, None)
        if waiting is not None:
            wait_and_pause(scheduler, waiting)
        receive(scheduler, requests)

    Scheduler.pause_generation = wait_and_pause
    Scheduler.continue_generation = forget_and_resume
    Scheduler.process_input_requests = pause_and_receive
