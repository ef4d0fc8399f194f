"""The facts in which two engines must agree for one to continue the other's contents."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from examples.engine import hosts
from examples.engine.caches import Caches
from examples.engine.model import Model
from examples.engine.transfer.contents import Part, Transfer
from examples.engine.transfer.fingerprint import fingerprint

if TYPE_CHECKING:
    from examples.engine.engine import Engine

VERSION = 4  # of the description and of the order of bytes


def describe(model: Model, transfer: Transfer, caches: Caches) -> dict[str, Any]:
    """Return the facts in which two engines must agree, as JSON."""
    tied = transfer.align > 1
    return {
        "version": VERSION,
        "byte order": sys.byteorder,
        "vocabulary": model.vocab_size,
        "dtype": model.dtype,
        "weights": fingerprint(model),
        "MTP layer": model.mtp is not None,
        "caches": [_what(part) for part in transfer.parts],
        "scales": digest({"scales": transfer.set_scales(caches)}),
        "block size": transfer.block_size if tied else None,
    }


@hosts.on_all_hosts
def description_of(engine: Engine) -> dict[str, Any]:
    """Describe an engine, as `describe` does, even if its devices belong to several processes."""
    return describe(engine.model, engine.transfer, engine.caches)


def differences(theirs: Any, ours: Mapping[str, Any]) -> list[str]:
    """Return how another engine's description differs, one sentence each; none: it fits."""
    if not isinstance(theirs, Mapping):
        return ["its description must be a JSON object"]
    found = []
    for name, here in ours.items():
        there = theirs.get(name)
        if there == here:
            continue
        if name == "caches" and isinstance(there, list) and len(there) == len(here):
            there, here = next(
                pair for pair in zip(there, here, strict=True) if len({*map(str, pair)}) > 1
            )
        elif name == "caches" and isinstance(there, list):
            there, here = f"of {len(there)} parts", f"of {len(here)}"
        found.append(f"its {name}: {str(there)[:80]!r}, but must be {str(here)[:80]!r}, as here")
    return found


def digest(description: Mapping[str, Any]) -> str:
    """Return a short name for a description."""
    return hashlib.sha256(repr(sorted(description.items())).encode()).hexdigest()[:32]


def _what(part: Part) -> str:
    """Describe a part in words."""
    sight = "" if part.window is None else f", window {part.window}"
    return f"layer {part.layer} {part.name}: {part.dtype}{list(part.row)} per {part.per}{sight}"
