"""Check that a model supports what a config.json asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from examples.models.rope import rope_problems

DTYPES = ("float32", "bfloat16", "float16")
INTEGERS = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")


@contextlib.contextmanager
def tells_of_config(where: object) -> Iterator[None]:
    """Turn errors from reading a config, for values that no check has refused, into a `ValueError`.

    Args:
      where: the checkpoint.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{where}: config.json: a value is invalid for this model: {type(error).__name__}: "
            f"{error}"
        ) from error


def check_config(
    config: Mapping[str, Any],
    model_types: tuple[str, ...],
    integers: tuple[str, ...],
    only: Mapping[str, tuple[Any, ...]],
    *,
    rope: Mapping[str, Any] | None = None,
    layer_types: Iterable[str] = (),
    more: Callable[[], list[str]] = list,
) -> None:
    """Refuse a `config.json` that a model does not support.

    Args:
      config: the file.
      model_types: the `model_type`s that the model supports.
      integers: keys that must be integers of at least 0; `INTEGERS` must be at least 1.
      only: the supported values of some keys, which may be absent.
      rope: what `rope_parameters` returned.
      layer_types: the supported kinds of layer.
      more: returns further problems; called only if there are none so far.

    Raises:
      ValueError: something does not fit; the error lists every problem.
    """
    if config.get("model_type") not in model_types:
        known = ", ".join(model_types)
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}, but must be {known}"
        )
    problems = []
    for key in (*INTEGERS, *integers):
        value, least = config.get(key), int(key in INTEGERS)
        if value is None:
            problems.append(f"{key} is missing")
        elif type(value) is not int or value < least:
            problems.append(f"{key} is {value!r}, but must be an integer of at least {least}")
    for key, values in only.items():
        if key in config and config[key] not in values:
            allowed = " or ".join(map(repr, values))
            problems.append(f"{key} is {config[key]!r}, but must be {allowed}")
    for key in ("dtype", "torch_dtype"):
        if (dtype := config.get(key)) is not None and dtype not in DTYPES:
            problems.append(f"{key} is {dtype!r}, but must be {' or '.join(DTYPES)}")
    if (quantization := config.get("quantization_config")) is not None:
        problems.append(
            f"quantization_config is {quantization!r}, but weights must be unquantized, or have "
            "quant_method 'fp8' with fmt 'e4m3', weight_block_size [rows, columns] and "
            "activation_scheme 'dynamic'"
        )
    problems += [] if rope is None else rope_problems(rope, ("default", "linear", "yarn"))
    if layer_types and (given := config.get("layer_types")) is not None:
        known, count = sorted(layer_types), config.get("num_hidden_layers")
        if unknown := sorted(set(given) - set(known)):
            problems.append(f"layer_types has {unknown}, but must have only {known}")
        if len(given) != count:
            problems.append(
                f"layer_types has {len(given)} entries, but num_hidden_layers is {count}"
            )
    problems += [] if problems else more()
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
