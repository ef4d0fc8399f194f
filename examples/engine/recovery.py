"""How far a step got, and which sequences fail if it raises.

inputs cannot be laid out, a grammar fails     those sequences; nothing has run
devices begin
  a device fails                               all sequences of the step
each sequence's tokens become text
  one sequence's cannot                        that sequence; the others get their tokens
  a prompt cannot be transferred               that sequence; others may lack their tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from examples.engine.request import Chunk, Sequence

if TYPE_CHECKING:
    from examples.engine.engine import Output


@dataclasses.dataclass(eq=False)
class Progress:
    """How far a step got, for `Engine.recover`."""

    plan: list[Chunk]
    launched: bool = False  # devices, and other processes, have begun
    done: bool = False  # every sequence has its tokens, except those that failed
    finishing: Sequence | None = None  # a sequence whose prompt may be in transfer
    failed: dict[Sequence, Exception] = dataclasses.field(default_factory=dict)
    outputs: list[Output] = dataclasses.field(default_factory=list)

    @property
    def on_devices(self) -> bool:
        """Whether devices failed, in which case their contents are unknown."""
        return self.launched and not self.done


def at_fault(
    progress: Progress, error: Exception, can_pack: Callable[[Chunk], bool]
) -> dict[Sequence, Exception]:
    """Return the sequences that made a step raise, each with its error.

    Also removes the last output of a failed sequence that was about to finish.

    Args:
      progress: how far the step got.
      error: what it raised.
      can_pack: whether inputs can be laid out for a single chunk.
    """
    failed = dict(progress.failed)
    if progress.done:
        return failed
    if progress.finishing is not None:
        failed[progress.finishing] = error
        progress.outputs = [
            output
            for output in progress.outputs
            if output.sequence not in failed or output.finish_reason is None
        ]
        return failed
    planned = [chunk for chunk in progress.plan if chunk.sequence.finish_reason is None]
    wrong = [] if progress.launched else [chunk for chunk in planned if not can_pack(chunk)]
    return failed | {chunk.sequence: error for chunk in wrong or planned}
