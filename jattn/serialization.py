"""The static parts of pytrees as JSON, so that `jax.export` can save functions that take them.

A static part is a number, a string, a bool, None, a tuple of static parts, or a frozen dataclass of
them that was registered; NumPy numbers are saved as Python ones. Load a saved function with the
version that saved it: an unknown field or class is an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import numpy as np
from jax import export

_CLASSES: dict[str, type] = {}


def register(pytree: type, *statics: type) -> None:
    """Let `jax.export` save and load functions of `pytree`, which is a registered pytree.

    Args:
      pytree: a registered pytree class.
      statics: the dataclasses that its static part may contain.
    """
    register_statics(statics)
    export.register_pytree_node_serialization(
        pytree,
        serialized_name=f"jattn.{pytree.__name__}",
        serialize_auxdata=lambda static: json.dumps(_encode(static)).encode(),
        deserialize_auxdata=lambda text: _decode(json.loads(text)),
    )


def register_statics(classes: Iterable[type]) -> None:
    """Let static parts of registered pytrees contain these dataclasses."""
    _CLASSES.update({cls.__name__: cls for cls in classes})


def _encode(x: object) -> object:
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, tuple):
        return {"tuple": [_encode(part) for part in x]}
    if dataclasses.is_dataclass(x):
        name = type(x).__name__
        assert _CLASSES.get(name) is type(x), f"{name} is not registered"
        return {name: {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x)}}
    assert x is None or isinstance(x, bool | int | float | str), x
    return x


def _decode(x: object) -> object:
    if not isinstance(x, dict):
        return x
    ((name, value),) = x.items()
    if name == "tuple":
        return tuple(map(_decode, value))
    return _CLASSES[name](**{field: _decode(part) for field, part in value.items()})
