"""Weights in fp8 with a scale per block, as DeepSeek and Qwen publish them.

    W[i, j] = code[i, j] * scale_inv[i // R, j // C]        R, C: weight_block_size

Codes are e4m3, in `NAME.weight`; scales are floats, in `NAME.weight_scale_inv`, one per block,
where the last blocks may be cut. Weights are decoded when read, so they take as much memory as the
dtype that the model computes in, and its products have inputs in that dtype: a server that rounds
these to fp8 gets different logits. Stacked matrices [..., rows, columns] have a scale per block of
each matrix.

https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_dequant)
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

SUFFIX = "_scale_inv"
STORED = "F8_E4M3"  # as safetensors names it
VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

Index = tuple[slice, ...]


def block_size_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that have a scale; None for other weights.

    Args:
      config: the checkpoint's config.json.
    """
    given = config.get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") != "fp8":
        return None
    size = given.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2:
        return None
    fits = all(type(n) is int and n > 0 for n in size) and given.get("fmt", "e4m3") == "e4m3"
    fits = fits and given.get("activation_scheme") in (None, "dynamic")
    return (size[0], size[1]) if fits else None


def read(
    path: Path,
    name: str,
    index: Index,
    scales_shape: tuple[int, ...],
    scales: Callable[[Index], np.ndarray],
    block: tuple[int, int],
    dtype: jnp.dtype,
) -> np.ndarray:
    """Read and decode a part of a matrix.

    Args:
      path: the safetensors file of the codes.
      name: the codes' name in it.
      index: the part: a slice for each axis, or for the first ones.
      scales_shape: of all scales; must be [..., ceil(rows / R), ceil(columns / C)].
      scales: reads a part of the scales.
      block: R and C.
      dtype: of the result; products are float32, then rounded to it.

    Raises:
      ValueError: the file has no e4m3 matrix of this name, or the scales are for other blocks.
    """
    codes = _codes(path, name)
    counts = (-(-n // size) for n, size in zip(codes.shape[-2:], block, strict=True))
    wanted = (*codes.shape[:-2], *counts)
    if scales_shape != wanted:
        raise ValueError(
            f"{path}: {name}{SUFFIX} is {list(scales_shape)}, but must be {list(wanted)} for "
            f"blocks of {list(block)} in {list(codes.shape)}"
        )
    index = (*index, *(slice(None),) * (codes.ndim - len(index)))
    spans = [slice(*part.indices(size)[:2]) for part, size in zip(index, codes.shape, strict=True)]
    of_blocks = [
        slice(span.start // size, -(-span.stop // size))
        for span, size in zip(spans[-2:], block, strict=True)
    ]
    codes, found = codes[tuple(spans)], scales((*spans[:-2], *of_blocks)).astype(np.float32)
    starts = [span.start for span in spans[-2:]]
    result = np.empty(codes.shape, dtype)
    for at in itertools.product(*map(range, codes.shape[:-2])):
        decode(codes[at], found[at], starts, block, out=result[at])
    return result


def decode(
    codes: np.ndarray,
    scales: np.ndarray,
    starts: list[int],
    block: tuple[int, int],
    out: np.ndarray,
) -> None:
    """Decode codes uint8 [n, m] into `out` [n, m], a row of blocks at a time.

    Args:
      codes: e4m3 codes.
      scales: float32, of the blocks that the codes are in.
      starts: the first code's row and column in the whole matrix.
      block: R and C.
      out: the array to write.
    """
    (row, column), (rows, columns) = starts, block
    for i, of_row in enumerate(scales):
        first = max((row // rows + i) * rows - row, 0)
        stop = (row // rows + i + 1) * rows - row
        factors = np.repeat(of_row, columns)[column % columns :][: codes.shape[1]]
        out[first:stop] = (VALUES[codes[first:stop]] * factors).astype(out.dtype)


def _codes(path: Path, name: str) -> np.ndarray:
    """Map a matrix's codes, uint8, without reading them: safetensors for NumPy lacks fp8."""
    status = os.stat(path)
    begin, header = _header(path, status.st_size, status.st_mtime_ns)
    entry = header.get(name, {})
    if entry.get("dtype") != STORED or len(entry["shape"]) < 2:
        raise ValueError(
            f"{path}: {name} is {entry.get('dtype')}{entry.get('shape')}, but must be a matrix of "
            f"{STORED}, since it has scales"
        )
    offset = begin + entry["data_offsets"][0]
    return np.memmap(path, np.uint8, mode="r", offset=offset, shape=tuple(entry["shape"]))


@functools.lru_cache(maxsize=16)
def _header(path: Path, _size: int, _time: int) -> tuple[int, dict[str, Any]]:
    """Return where a file's tensors begin, and its header entries for them."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))
