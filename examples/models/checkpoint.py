"""Read a Hugging Face checkpoint directory: `config.json` and one or more safetensors files.

Tensors are read one at a time, converted on the host and put on the device, which compiles nothing
and never holds the model twice. On a mesh, only the parts of a tensor that this process's devices
hold are read. Weights in fp8 with a scale per block are decoded (`fp8.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from examples.engine.mesh import DeviceMesh, Parameter
from examples.models import fp8

# Prefixes of a text model's parameters in its own checkpoints and in those of a whole model.
PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "backbone.",
)


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A parameter that a checkpoint may hold in parts, such as one per expert, or transposed."""

    parts: tuple[str, ...]  # names
    put_together: Callable[[Sequence[np.ndarray]], np.ndarray]  # joins the parts, as stored
    # How many parts make one row (along the first axis) of the parameter, row 0's parts first;
    # None: each part has all rows.
    parts_per_row: int | None = None
    otherwise: Assembly | None = None  # if the checkpoint lacks these parts

    def there(self, name: str, files: Container[str]) -> Assembly | None:
        """Return the first assembly whose parts a checkpoint has; None: the parameter is whole.

        Args:
          name: the parameter's name.
          files: names in the checkpoint.
        """
        if all(part in files for part in self.parts) and (name not in files or name in self.parts):
            return self
        return self.otherwise and self.otherwise.there(name, files)

    def select(self, rows: slice) -> tuple[tuple[str, ...], slice]:
        """Return the parts that hold some rows, and the rows to take from each."""
        if self.parts_per_row is None:
            return self.parts, rows
        begin, end, _ = rows.indices(len(self.parts) // self.parts_per_row)
        return self.parts[begin * self.parts_per_row : end * self.parts_per_row], slice(None)


# Puts a parameter on one device or several, given its name and a function that reads a part of it.
Place = Callable[[str, Callable[[tuple[slice, ...]], np.ndarray]], jax.Array]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory that has been opened but not loaded. Make one with `open_checkpoint`."""

    directory: Path
    config: Mapping[str, Any]  # config.json, without what `block` says
    stop_tokens: tuple[int, ...]  # tokens that end a text, from generation_config.json if it exists
    files: Mapping[str, tuple[Path, str]]  # parameter name: file, and its name there
    # For parameters in fp8: where their scales are, likewise, and the size of their blocks.
    scales: Mapping[str, tuple[Path, str]] = dataclasses.field(default_factory=dict)
    block: tuple[int, int] | None = None

    def assemble(
        self,
        name: str,
        assembly: Assembly,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        place: Place,
    ) -> jax.Array:
        """Assemble a parameter from its parts.

        Raises:
          ValueError: the result has the wrong shape, or the parts do not fit each other.
        """

        def read(index: tuple[slice, ...]) -> np.ndarray:
            rows, *others = index
            assert all(other == slice(None) for other in others), "split along the first axis only"
            names, rows_of_each = assembly.select(rows)
            parts = []
            for part in names:
                with _open(self.files[part][0]) as tensors:
                    parts.append(self._part(part, tensors, (rows_of_each,), dtype))
            try:
                value = assembly.put_together(parts)
            except ValueError as error:
                raise ValueError(f"{self.directory}: {name} in parts: {error}") from error
            wanted = (len(range(shape[0])[rows]), *shape[1:])
            if value.shape != wanted:
                raise ValueError(
                    f"{self.directory}: {name}, put together, is {list(value.shape)}, "
                    f"but must be {list(wanted)}"
                )
            return self._floats(name, value).astype(dtype)

        return place(name, read)

    def read(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, jnp.dtype],
        place: Place,
    ) -> dict[str, jax.Array]:
        """Read the named parameters.

        Raises:
          ValueError: parameters are missing or have the wrong shape; the error lists them.
        """
        problems = [f"{name} is missing" for name in sorted(set(shapes) - set(self.files))]
        by_file: dict[Path, list[str]] = {}
        for name in sorted(set(shapes) & set(self.files)):
            by_file.setdefault(self.files[name][0], []).append(name)

        arrays = {}
        for path, names in by_file.items():
            with _open(path) as tensors:
                for name in names:
                    stored = self.files[name][1]
                    found, wanted = _shape(path, tensors, stored), shapes[name]
                    if found != wanted:
                        problems.append(f"{name} is {list(found)}, but must be {list(wanted)}")
                    elif not problems:
                        arrays[name] = place(
                            name,
                            lambda index, n=name, d=dtypes[name], t=tensors: self._floats(
                                n, self._part(n, t, index, d)
                            ).astype(d, copy=False),
                        )
        if problems:
            raise ValueError(f"{self.directory}: " + _join(problems))
        return arrays

    def _floats(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return a parameter's numbers, after checking that they are floats.

        Raises:
          ValueError: they are integers, which are codes in quantized weights.
        """
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{self.directory}: {name} is {value.dtype}, but must be float32, float16, "
                "bfloat16, or fp8 with a scale per block"
            )
        return value

    def _part(
        self, name: str, tensors: Any, index: tuple[slice, ...], dtype: jnp.dtype
    ) -> np.ndarray:
        """Read a part of a tensor as stored, or in `dtype` if it is stored in fp8."""
        path, stored = self.files[name]
        if name not in self.scales:
            return _numbers(path, tensors, stored, index)
        assert self.block is not None
        there, scales = self.scales[name]
        with _open(there) as opened:
            return fp8.read(
                path,
                stored,
                index,
                _shape(there, opened, scales),
                lambda part: _numbers(there, opened, scales, part),
                self.block,
                dtype,
            )


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Find the config and the tensors of a checkpoint directory.

    Raises:
      ValueError: the directory lacks a file, or a file is invalid.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    config = read_json(directory / "config.json")
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():  # if both exist, transformers reads this one as well
        with _open(single) as tensors:
            where = dict.fromkeys(tensors.keys(), single)
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(type(x) is str for x in weight_map.values()):
            raise ValueError(f"{index}: weight_map must have a file name for each parameter")
        where = {name: directory / file for name, file in weight_map.items()}
    else:
        raise ValueError(f"{directory} has neither {single.name} nor {index.name}")
    missing = sorted({path.name for path in where.values() if not path.is_file()})
    if missing:
        raise ValueError(f"{directory}: {index.name} names files that do not exist: {missing}")
    files = {short_name(name): (path, name) for name, path in where.items()}
    scales, block = {}, fp8.block_size_of(config)
    if block is not None:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        names = [name for name in files if f"{name}{fp8.SUFFIX}" in files]
        scales = {name: files.pop(f"{name}{fp8.SUFFIX}") for name in names}
    stop_tokens = _stop_tokens(directory, config)
    return Checkpoint(directory, config, stop_tokens, files, scales, block)


def load_parameters(
    abstract: nnx.Module,
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    unused: Iterable[str] = (),
    assemblies: Mapping[str, Assembly] | None = None,
    mesh: DeviceMesh | None = None,
    local: nnx.Module | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Fill a model of shapes (from `nnx.eval_shape`) with the parameters of the same names.

    Args:
      abstract: the model, whose parameter paths are the checkpoint's names.
      checkpoint: the opened checkpoint.
      dtype: of assembled parameters; the others have the model's dtypes.
      unused: names that the checkpoint may have but the model does not need.
      assemblies: parameters to assemble if the checkpoint has their parts.
      mesh: where to put them; None: all on the default device.
      local: the model of shapes that each device of the mesh has.

    Returns:
      `(graphdef, params)`, as from `nnx.split`: on a mesh, one device's model, and all devices'
      parts.

    Raises:
      ValueError: parameters are missing, have the wrong shape, or would be ignored by the model.
    """
    _, variables = _variables(abstract)
    graphdef, local_variables = _variables(abstract if local is None else local)
    shapes = {name: tuple(variable.get_value().shape) for name, (_, variable) in variables.items()}

    def place(name: str, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
        if mesh is None:
            return jax.device_put(read((slice(None),) * len(shapes[name])))
        whole, part = (_parameter(found[name][1]) for found in (variables, local_variables))
        return mesh.array(whole, part, read)

    parts = {name.split(".")[0] for name in shapes}  # without towers for images and audio
    candidates = {name: a.there(name, checkpoint.files) for name, a in (assemblies or {}).items()}
    separate = {name: assembly for name, assembly in candidates.items() if assembly is not None}
    known = {*shapes, *unused, *(part for assembly in separate.values() for part in assembly.parts)}
    ignored = sorted(
        name for name in checkpoint.files if name.split(".")[0] in parts and name not in known
    )
    if ignored:
        raise ValueError(f"{checkpoint.directory}: the model has no place for {_join(ignored)}")
    dtypes = {name: variable.get_value().dtype for name, (_, variable) in variables.items()}
    arrays = checkpoint.read(
        {n: shape for n, shape in shapes.items() if n not in separate}, dtypes, place
    )
    for name, assembly in separate.items():
        arrays[name] = checkpoint.assemble(name, assembly, shapes[name], dtype, place)
    filled = [(path, v.replace(arrays[name])) for name, (path, v) in local_variables.items()]
    return graphdef, nnx.from_flat_state(filled)


def shapes_of(abstract: nnx.Module, local: nnx.Module) -> dict[str, tuple[Parameter, Parameter]]:
    """Return the shapes of a model's parameters by name, whole and as a device has them."""
    whole, part = (
        {name: _parameter(v) for name, (_, v) in _variables(m)[1].items()}
        for m in (abstract, local)
    )
    return {name: (shape, part[name]) for name, shape in whole.items()}


def _variables(abstract: nnx.Module) -> tuple[nnx.GraphDef, dict[str, tuple[Any, nnx.Variable]]]:
    """Return a model's structure, and its parameters' paths and variables by name."""
    graphdef, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    return graphdef, {".".join(map(str, path)): (path, v) for path, v in flat}


def _parameter(variable: nnx.Variable) -> Parameter:
    sections = variable.get_metadata().get("sections", ())
    return Parameter(tuple(variable.get_value().shape), sections)


def _stop_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    sources = [read_json(generation)] if generation.is_file() else []
    text = config.get("text_config")
    sources += [config, text if isinstance(text, Mapping) else {}]
    found = next((s["eos_token_id"] for s in sources if s.get("eos_token_id") is not None), [])
    tokens = tuple(found if isinstance(found, list) else [found])
    if not all(type(token) is int for token in tokens):
        raise ValueError(
            f"{directory}: eos_token_id is {found!r}, but must be a token or a list of tokens"
        )
    return tokens


def short_name(name: str) -> str:
    """Return a parameter's name without the path to the text model."""
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)


def _join(problems: list[str], most: int = 6) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a safetensors file ({error})") from error


def _shape(path: Path, tensors: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(tensors.get_slice(name).get_shape())
    except SafetensorError as error:
        raise ValueError(f"{path}: {name} cannot be read ({error})") from error


def _numbers(path: Path, tensors: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a tensor.

    Raises:
      ValueError: the file lacks it or is truncated, or it is in fp8 without scales.
    """
    try:
        part = tensors.get_slice(name)
        if part.get_dtype().startswith("F8"):
            raise ValueError(f"{path}: {name} is in fp8 without {name}{fp8.SUFFIX}")
        return np.asarray(part[index])
    except (SafetensorError, OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {name} cannot be read ({error})") from error


def read_text(path: Path) -> str:
    """Read a text file of a checkpoint.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found
