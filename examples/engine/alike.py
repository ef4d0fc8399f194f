"""The options that must be the same in all processes of a group, in a form that can be compared.

Hosts may keep checkpoints and adapters in different places, so a path is replaced by a digest of
its contents: the configuration, and every tensor's name, dtype, shape and some of its bytes. Two
trainings of one model differ in nearly all their numbers, so a few bytes of each tensor tell them
apart, and files of any size need only a read of `SAMPLE_BYTES` per tensor. How tensors are
distributed over files does not matter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.models.checkpoint import open_checkpoint
from examples.models.lora import CONFIG, TENSORS
from examples.options import checkpoint_directory

# Options of programs and caches.
ALIKE = (
    *("mesh", "max_seqs", "token_budget", "max_len", "block_size", "blocks", "unified", "dtype"),
    *("kv_format", "implementation", "speculate", "host_cache", "max_loras", "max_lora_rank"),
    *("role", "heartbeat"),
)
# Options with paths, which may differ; the contents must be the same.
ALIKE_INSIDE = ("model", "draft", "lora")
SAMPLE_BYTES = 1024  # of a tensor, from its middle
MOST_HEADER = 100_000_000  # bytes, as in the safetensors package


def shared_options(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that must be the same in all processes of a group, by name."""
    found = {name: getattr(options, name) for name in ALIKE}
    found |= {name: _of_model(getattr(options, name)) for name in ("model", "draft")}
    pairs = [text.partition("=")[::2] for text in options.lora]
    return found | {"lora": " ".join(f"{name}: {_of_adapter(place)}" for name, place in pairs)}


def _of_model(name: str | None) -> str | None:
    """Return a checkpoint's digest, or why there is none."""
    if name is None:
        return None
    directory = checkpoint_directory(name)
    try:
        checkpoint = open_checkpoint(directory)
        places = (*checkpoint.files.values(), *checkpoint.scales.values())
        return _digest(directory / "config.json", {path for path, _ in places})
    except (OSError, ValueError):  # loading it will report why
        return "not a checkpoint"


def _of_adapter(place: str) -> str:
    """Return an adapter's digest, or why there is none."""
    try:
        return _digest(Path(place) / CONFIG, [Path(place) / TENSORS])
    except (OSError, ValueError):
        return "not an adapter"


def _digest(config: Path, files: Iterable[Path]) -> str:
    """Return a digest of a configuration and of tensors.

    Raises:
      OSError, ValueError: a file cannot be read.
    """
    tensors = sorted(tensor for path in files for tensor in _samples(path))
    digest = hashlib.sha256(config.read_bytes())
    digest.update(repr(tensors).encode())
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """Yield the name, dtype and shape of each tensor in a file, and bytes from its middle.

    Raises:
      OSError, ValueError: the file cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"{path}: its header has {length} bytes")
        try:
            for name, tensor in json.loads(file.read(length)).items():
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                size = min(end - begin, SAMPLE_BYTES)
                file.seek(8 + length + begin + (end - begin - size) // 2)
                yield name, tensor["dtype"], tensor["shape"], file.read(size)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{path}: its header is not a safetensors header: {error}") from error
