"""Penalties of sglang-jax for requests that are retracted and start again.

A request that had to give up its pages is prefilled again, with its output so far. The host's
counts then start from zero: it forgets which tokens to penalize and how long the output is. jattn
counts the output so far.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def enable() -> None:
    """Count the tokens that an output already has when its request is prefilled.

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
