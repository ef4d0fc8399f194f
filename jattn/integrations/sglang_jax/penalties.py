"""Penalties of sglang-jax for requests that begin again.

A request that had to give its pages away is prefilled with its answer so far. The host counts from
nothing then: it knows of no token that the penalties are for, nor how long the answer is.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def enable() -> None:
    """Count what an answer has already, as its request is prefilled.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.sampling import penaltylib
    from sgl_jax.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch

    @functools.wraps(make)
    def make_and_count(cls: type, info: Any, *arguments: Any, **options: Any) -> Any:
        made = make.__func__(cls, info, *arguments, **options)
        for row, request in enumerate(info.reqs):
            if not request.output_ids:
                continue
            for kind, penalizer in made.penalizer_orchestrator.penalizers.items():
                if not penalizer.is_prepared():
                    continue
                if kind is penaltylib.BatchedFrequencyPenalizer:
                    np.add.at(penalizer.token_frequencies[row], request.output_ids, 1)
                elif kind is penaltylib.BatchedPresencePenalizer:
                    penalizer.token_presence[row, request.output_ids] = True
                elif kind is penaltylib.BatchedMinNewTokensPenalizer:
                    penalizer.len_output_tokens[row] = len(request.output_ids)
        return made

    SamplingBatchInfo.from_schedule_batch = classmethod(make_and_count)
