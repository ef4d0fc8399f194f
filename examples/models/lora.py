"""LoRA adapters: low-rank products that are added to a model's linear layers, token by token.

For a sequence with adapter a, a linear layer computes

    y = W x + s B_a A_a x        A_a [r, in],  B_a [out, r],  s = alpha / r, or alpha / sqrt(r)

The sequences of a step have different adapters, or none. All adapters of a layer are stacked in two
matrices, padded with zeros to a common rank r, and all tokens are multiplied with both:

    h = x A^T                    [T, n * r], of all n adapters;  A [n * r, in]
    h[t, i] = 0                  unless i belongs to the adapter of token t
    y = y + h B^T                B [out, n * r], with the scales in it

This takes n r (in + out) multiplications per token, compared with in * out for W. If no token of a
step has an adapter, the device skips all of it. On a mesh a device has the same rows of B and
columns of A as of W, so partial sums are added up together with W's, and nothing else is sent.

`read_lora` reads PEFT's files. Every `Linear` of a model can be adapted; embeddings, heads and the
stacked matrices of experts cannot.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from examples.engine.mesh import DeviceMesh, Parameter
from examples.models.checkpoint import short_name
from examples.models.layers import Linear, product

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Supported values of these keys of adapter_config.json, and why others are not supported.
ONLY: dict[str, tuple[tuple, str]] = {
    "peft_type": (("LORA",), "other kinds of adapters are not supported"),
    "bias": (("none",), "biases are not adapted"),
    "init_lora_weights": (
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "others change the model's own weights (save such an adapter converted)",
    ),
}
LARGEST = 65504.0  # number of an adapter: float16's maximum
# Keys that are read elsewhere here, and keys that do not affect the numbers.
READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
SILENT = {
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
    *("eva_config", "ensure_weight_tying"),
}

# The weights of linear layers: whole, and as one device has them.
Linears = Mapping[str, tuple[Parameter, Parameter]]


@dataclasses.dataclass(frozen=True)
class Room:
    """How many adapters a model can hold, and their largest rank."""

    count: int
    rank: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.rank < 1:
            raise ValueError(f"{self}: both must be at least 1")


@dataclasses.dataclass(frozen=True)
class Lora:
    """A PEFT checkpoint that has been read."""

    directory: Path
    # A [r, in] and s B [out, r] in float32, by linear layer.
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max(len(down) for down, _ in self.factors.values())

    @property
    def digest(self) -> bytes:
        """A digest of all its numbers, which identifies the adapter."""
        digest = hashlib.blake2b(digest_size=16)
        for layer, pair in sorted(self.factors.items()):
            digest.update(f"{layer} {[array.shape for array in pair]}".encode())
            for array in pair:
                digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """One linear layer's adapters. Number i, from 1, has rows (i - 1) r .. i r - 1 of `down`."""

    down: jax.Array  # A [n * r, in]
    up: jax.Array  # B [out, n * r], times the scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model's parameters together with its adapters'."""

    base: Any
    stacks: dict[str, Stack]  # by linear layer
    rank: int = dataclasses.field(metadata={"static": True})


def linears_of(whole: nnx.Module, local: nnx.Module) -> dict[str, tuple[Parameter, Parameter]]:
    """Return the weights of a model's linear layers by path; `local` is one device's model."""

    def parameter(linear: Linear) -> Parameter:
        sections = linear.weight.get_metadata().get("sections", ())
        return Parameter(tuple(linear.weight.get_value().shape), sections)

    parts = dict(_linears(local))
    return {name: (parameter(linear), parameter(parts[name])) for name, linear in _linears(whole)}


def attach(model: nnx.Module, adapted: Adapted, adapters: jax.Array) -> None:
    """Make a model's linear layers add the products of its adapters.

    Args:
      model: a model made for one step, whose linear layers this changes.
      adapted: the adapters.
      adapters: int32 [T], each token's adapter number; 0: none.
    """
    wanted = jnp.any(adapters > 0)
    for name, linear in _linears(model):
        linear.change = _change(adapted.stacks[name], adapted.rank, adapters, wanted)


def _change(
    stack: Stack, rank: int, adapters: jax.Array, wanted: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Make the function that adds adapters to a linear layer's output, given its input."""

    def change(x: jax.Array, y: jax.Array) -> jax.Array:
        def add() -> jax.Array:
            owners = 1 + jnp.arange(len(stack.down), dtype=jnp.int32) // rank
            inner = product(x, stack.down)
            inner = jnp.where(adapters[:, None] == owners[None], inner, jnp.zeros_like(inner))
            return y + product(inner, stack.up)

        return jax.lax.cond(wanted, add, lambda: y)

    return change


def _linears(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield ".".join(map(str, path)), module


class Stacks:
    """The matrices of all adapters on the host, copied to the devices again when one is added."""

    def __init__(self, linears: Linears, room: Room, dtype: str, mesh: DeviceMesh | None):
        """Make matrices of zeros.

        Args:
          linears: the model's linear layers.
          room: room for adapters.
          dtype: the model's dtype.
          mesh: its devices.
        """
        self._linears, self._room, self._mesh = linears, room, mesh
        rows, dtype = room.count * room.rank, jnp.dtype(dtype)
        self._arrays = {
            name: (
                np.zeros((rows, whole.shape[1]), dtype),
                np.zeros((whole.shape[0], rows), dtype),
            )
            for name, (whole, _) in linears.items()
        }

    def set(self, number: int, lora: Lora | None) -> None:
        """Replace adapter `number`, counted from 1, or clear it if `lora` is None.

        Raises:
          ValueError: its rank is too large.
        """
        rank = self._room.rank
        if lora is not None and lora.rank > rank:
            raise ValueError(
                f"{lora.directory}: its rank is {lora.rank}, but there is room for {rank}"
            )
        start = (number - 1) * rank
        for name, (down, up) in self._arrays.items():
            down[start : start + rank] = 0
            up[:, start : start + rank] = 0
            if lora is not None and name in lora.factors:
                new_down, new_up = lora.factors[name]
                down[start : start + len(new_down)] = new_down.astype(down.dtype)
                up[:, start : start + len(new_down)] = new_up.astype(up.dtype)

    def place(self) -> dict[str, Stack]:
        """Copy the matrices to the device, or to each device its part."""
        return {name: self._stack(name, *arrays) for name, arrays in self._arrays.items()}

    def _stack(self, name: str, down: np.ndarray, up: np.ndarray) -> Stack:
        if self._mesh is None:
            return Stack(jax.device_put(down.copy()), jax.device_put(up.copy()))
        whole, local = self._linears[name]

        def place(array: np.ndarray, shape: Callable, sections: bool) -> jax.Array:
            parts = (Parameter(shape(p), p.sections if sections else ()) for p in (whole, local))
            return self._mesh.array(*parts, array.__getitem__)

        rows = len(down)
        return Stack(
            place(down.copy(), lambda p: (rows, p.shape[1]), sections=False),
            place(up.copy(), lambda p: (p.shape[0], rows), sections=True),
        )


def read_lora(directory: str | Path, linears: Linears, unused: frozenset[str]) -> Lora:
    """Read an adapter that PEFT's `save_pretrained` wrote.

    Args:
      directory: has adapter_config.json and adapter_model.safetensors.
      linears: the model's linear layers.
      unused: parameters in checkpoints that the model does not need, nor their adapters.

    Raises:
      ValueError: files or values are missing, invalid or not supported; the error names them.
    """
    directory = Path(directory)
    config = _read_config(directory)
    scale = _scales(config)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    paths: dict[str, str] = {}  # layers' names that patterns match
    problems, idle = [], {name.removesuffix(".weight") for name in unused}
    try:
        with safe_open(directory / TENSORS, framework="numpy") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (it is not a mapping)
                found = re.fullmatch(r"(?:base_model\.model\.)?(.*)\.lora_([AB])\.weight", stored)
                layer = short_name(found[1]) if found else None
                if layer in idle:
                    continue
                if layer not in linears:
                    problems.append(f"{stored} does not belong to a linear layer of this model")
                else:
                    array = tensors.get_tensor(stored).astype(np.float32)
                    pairs.setdefault(layer, {})[found[2]] = array
                    paths[layer] = found[1]
    except (OSError, SafetensorError, AttributeError, TypeError) as error:  # or a dtype NumPy lacks
        raise ValueError(f"{directory}: {TENSORS} cannot be read ({error})") from error
    factors = {}
    for layer, pair in sorted(pairs.items()):
        (num_out, num_in), (rank, times) = linears[layer][0].shape, scale(paths[layer])
        wanted = {"A": (rank, num_in), "B": (num_out, rank)}
        shapes = {which: array.shape for which, array in sorted(pair.items())}
        if shapes != wanted:
            problems.append(f"{layer}: lora_A and lora_B are {shapes}, but must be {wanted}")
            continue
        down, up = pair["A"], pair["B"] * np.float32(times)
        # All adapters share one product: 0 times infinity would affect other requests.
        if max(np.abs(down).max(), np.abs(up).max()) <= LARGEST:
            factors[layer] = (down, up)
        else:
            problems.append(f"{layer}: lora_A or lora_B has NaN or numbers above {LARGEST:g}")
    if not pairs and not problems:
        problems.append(f"{TENSORS} adapts nothing")
    if problems:
        more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ValueError(f"{directory}: {'; '.join(problems[:6])}{more}")
    return Lora(directory, factors)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_text())
    except OSError as error:
        raise ValueError(f"{directory}: {CONFIG} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{directory}: {CONFIG} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{directory}: {CONFIG} is not a JSON object")
    problems = []
    for key, (values, why) in ONLY.items():
        if config.get(key, values[0]) not in values:
            allowed = " or ".join(map(repr, values))
            problems.append(f"{key} is {config[key]!r}, but must be {allowed}: {why}")
    for key in sorted(set(config) - set(ONLY) - READ - SILENT):
        if config[key]:
            problems.append(f"{key} is {config[key]!r}, which is not supported here")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            problems.append(f"{key} is {config.get(key)!r}, but must be a number above 0")
    for key in ("rank_pattern", "alpha_pattern"):
        if not _is_pattern(config.get(key) or {}):
            problems.append(f"{key} must map regular expressions to numbers above 0")
    if problems:
        raise ValueError(f"{directory}: {CONFIG}: " + "; ".join(problems))
    return config


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    try:
        return all(re.compile(key) and number > 0 for key, number in value.items())
    except (re.error, TypeError):
        return False


def _scales(config: Mapping[str, Any]) -> Callable[[str], tuple[int, float]]:
    """Make a function that returns the rank and the scale of a linear layer's adapter."""

    def of(pattern: str, default: str, layer: str) -> Any:
        # As in PEFT: the first name or regular expression that matches the end of the path.
        found = config.get(pattern) or {}
        matching = (value for key, value in found.items() if re.match(rf"(.*\.)?({key})$", layer))
        return next(matching, config[default])

    def scale(layer: str) -> tuple[int, float]:  # takes PEFT's path of the layer
        rank, alpha = of("rank_pattern", "r", layer), of("alpha_pattern", "lora_alpha", layer)
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale
