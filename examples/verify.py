"""Compare a run with a checkpoint's `reference.npz`: the tokens and logits of another library.

The file holds prompts, the greedy continuation of each, and the float32 logits from which every
token was chosen. In float32, this program must choose the same tokens, with logits within 2e-4.
With narrower caches one choice may differ, and then everything after it differs too. The program is
therefore fed the reference's tokens instead of its own, and the root mean square of the logits'
error is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from examples.engine.request import Request, Sequence

MAX_LIMIT = 2e-4  # correct float32 implementations differ by 1e-4

# A window off by one token gives 0.62, other faults more. Correct attention over rounded caches
# gives the number in parentheses. e5m2 (0.49) is too close to the faults to be judged this way.
RMS_LIMITS = {
    "float16": 0.01,  # (0.002)
    "bfloat16": 0.04,  # (0.018)
    "e4m3": 0.45,  # (0.29)
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """Prompts and their correct continuations."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: np.ndarray  # int32 [R, n]
    logits: np.ndarray  # float32 [R, n, vocabulary]

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read a `reference.npz`.

        Raises:
          ValueError: the file is missing, or is not a reference.
        """
        try:
            with np.load(path) as file:
                lens, padded = file["prompt_lens"], file["prompts"]
                prompts = tuple(
                    tuple(row[:n].tolist()) for row, n in zip(padded, lens, strict=True)
                )
                return cls(prompts, file["tokens"], file["logits"])
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: there is nothing to compare with") from None
        except (KeyError, OSError) as error:
            raise ValueError(f"{path}: not a reference file ({error})") from error

    def requests(
        self, max_new_tokens: int, arrive_every: int, *, forced: bool
    ) -> list[tuple[int, Request]]:
        """Return the prompts as requests, each with the step at which it arrives.

        If `forced`, they are fed the reference's tokens.
        """
        return [
            (
                i * arrive_every,
                Request(prompt, max_new_tokens, follow=tuple(row.tolist()) if forced else None),
            )
            for i, (prompt, row) in enumerate(zip(self.prompts, self.tokens, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far a run was from its reference."""

    equal_tokens: int
    num_tokens: int
    max_error: float
    rms_error: float
    rms_limit: float | None  # None: judged as float32

    @property
    def passed(self) -> bool:
        """Whether the run matches its reference."""
        if self.rms_limit is not None:
            return self.rms_error <= self.rms_limit
        return self.equal_tokens == self.num_tokens and self.max_error <= MAX_LIMIT

    def __str__(self) -> str:
        tokens = f"{self.equal_tokens} of {self.num_tokens} greedy tokens equal"
        if self.rms_limit is None:
            logits = f"logits within {self.max_error:.1e} (limit {MAX_LIMIT:.0e})"
        else:
            logits = f"rms of the logits' error {self.rms_error:.3f} (limit {self.rms_limit})"
        return f"{tokens}, {logits}: {'PASS' if self.passed else 'FAIL'}"


def compare(reference: Reference, sequences: Iterable[Sequence], kv_format: str) -> Verdict:
    """Judge a run of `reference.requests(...)` whose logits were kept."""
    tokens = np.array([sequence.chosen for sequence in sequences])
    logits = np.stack([np.stack(sequence.logits) for sequence in sequences])
    count = tokens.shape[1]
    # In float64, and NaN counts as infinitely wrong: max() would otherwise lose it.
    error = np.abs(logits.astype(np.float64) - reference.logits[:, :count])
    error = np.where(np.isfinite(error), error, np.inf)
    return Verdict(
        equal_tokens=int((tokens == reference.tokens[:, :count]).sum()),
        num_tokens=tokens.size,
        max_error=float(error.max()),
        rms_error=float(np.sqrt(np.square(error).mean())),
        rms_limit=None if kv_format == "float32" else RMS_LIMITS[kv_format],
    )
