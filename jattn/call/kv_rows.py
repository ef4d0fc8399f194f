"""Checks of an array that holds keys and values side by side."""

from __future__ import annotations

import math

from jattn import checks, formats, integers
from jattn.call import arrays


def check_rows(
    problems: checks.Problems, name: str, cache: formats.KVRows, value_cache: object
) -> formats.Format | None:
    """Check a `KVRows`; return its format, or None if anything is wrong."""
    arrays.check_last_axis_is_whole(problems, f"{name}.data", cache.data)
    good = problems.expect(
        value_cache is None,
        "value_cache",
        value_cache,
        f"None: {name} is a jattn.KVRows, which holds the values",
    )
    for field in ("num_kv_heads", "head_dim", "row_width", "value_dim"):
        size = getattr(cache, field)
        good &= problems.expect(
            integers.is_int(size, 1), f"{name}.{field}", size, "an integer of at least 1"
        )
    start, shape = cache.value_start, tuple(getattr(cache.data, "shape", ()))
    good &= problems.expect(
        integers.is_int(start, 0), f"{name}.value_start", start, "an integer of at least 0"
    )
    good &= problems.require(
        len(shape) >= 3 and min(shape) > 0,
        f"{name}.data",
        f"of shape {list(shape)}",
        "[N, S, ...] with no empty axis",
    )
    if not problems.expect(
        arrays.is_array(cache.data), f"{name}.data", cache.data, "an array of [N, S, ...]"
    ):
        return None
    format = formats.plain_format(cache.data.dtype) if cache.format is None else cache.format
    good &= problems.require(
        isinstance(format, formats.Format)
        and format.per in (None, "head")
        and (format.values_per_word, format.group) == (1, None)
        and cache.data.dtype == (format.word_dtype if cache.format else format.value_dtype),
        f"{name}.format",
        f"{cache.format} for {checks.describe(cache.data)}",
        "None for floats; for words, their jattn.Dense or jattn.Fp8 (scale_per='head')",
    )
    if not good:
        return None
    size, dim, width = math.prod(shape[2:]), cache.head_dim, cache.row_width
    good &= problems.require(
        size % width == 0 and size // width >= cache.num_kv_heads,
        f"{name}.data",
        f"{size} numbers a token",
        f"a multiple of row_width = {width}, with a row for each of {cache.num_kv_heads} KV heads",
    )
    good &= problems.require(
        dim <= width, f"{name}.head_dim", f"{dim}", f"at most row_width = {width}"
    )
    good &= problems.require(
        start + cache.value_dim <= width,
        f"{name}.value_dim",
        f"{cache.value_dim} numbers from {start} on",
        f"within row_width = {width}",
    )
    good &= problems.require(
        start >= dim or (start == 0 and cache.value_dim <= dim),
        f"{name}.value_start",
        f"{start}",
        f"at least head_dim = {dim}, or 0 with a value_dim of at most that",
    )
    return format if good else None
