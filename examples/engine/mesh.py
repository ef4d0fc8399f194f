"""A model over several devices: the part that each holds, and a step that runs on all of them.

    mesh = make_mesh("tensor=2")                    # named axes, over the first devices
    model = load_model(directory, mesh=mesh)        # every device gets its part of the weights
    engine = Engine(model, limits)                  # as on one device

A step is one program that every device runs on its own part (`jax.shard_map`): weights, pools of
keys and values, recurrent states. The host sends the same integers to all devices, and they all
choose the same tokens. Each of t devices along `tensor` holds

    q, k, v, gate, up, in_proj    1/t of the outputs: by head, by KV head, by channel
    o, down, out_proj             1/t of the inputs; one all-reduce adds up the partial sums
    embedding, head               1/t of the vocabulary, or all of it if t does not divide it
    experts                       1/t of the experts, whole; one all-reduce with the shared expert
    norms, routers                all
    keys and values               of its own KV heads; with K < t heads, each is on t / K devices
    recurrent states              of its own heads and channels

Devices along `context` (c of them) also split the weights, 1 / (t c) each. They all have the same
1 / t of the KV heads, and the tokens of a sequence are distributed over them (`context.py`).

A device's model is the same module as the whole one, built from a config with smaller counts:
`local_part` says which. The two shapes of a parameter differ in at most one axis, the split one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.models.parallel import AXES, CONTEXT, DATA, MODEL, TENSOR

SUPPORTED = (TENSOR, CONTEXT)  # axes of one model; DATA counts models (`groups.py`)
# Counts that are smaller on a device, by "class.field" of a config.
EVENLY = {
    "Heads.num_heads": "query heads",
    "Layer.intermediate_size": "columns of gate and up",
    "Qwen3Config.intermediate_size": "columns of gate and up",
    "Qwen3NextConfig.intermediate_size": "columns of gate and up",
    "Qwen3NextConfig.shared_expert_size": "columns of the shared expert's gate and up",
    "NemotronHConfig.intermediate_size": "columns of up",
    "ExpertSizes.shared_size": "columns of the shared expert's up",
    "DeltaNet.num_k_heads": "key heads of delta nets",
    "DeltaNet.num_v_heads": "value heads of delta nets",
    "MambaSizes.num_heads": "heads of Mamba layers",
    "MambaSizes.num_groups": "groups of Mamba heads",
    "LatentHeads.num_heads": "query heads",
    "DeepseekConfig.intermediate_size": "columns of gate and up",
}
# Likewise, but if there are fewer than devices, several devices hold the same one.
AT_LEAST_ONE = {"Heads.num_kv_heads": "KV heads"}
# Counts that the config keeps whole and a module divides: they must divide evenly.
COUNTED = {
    "GptOssConfig.num_experts": "experts",
    "Qwen3NextConfig.num_experts": "experts",
    "ExpertSizes.count": "experts",
}


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """Devices with named axes. Make one with `make_mesh`."""

    devices: jax.sharding.Mesh

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices along each axis."""
        return self.devices.shape

    @property
    def num_parts(self) -> int:
        """Devices that share the weights of a layer."""
        return math.prod(self.sizes[axis] for axis in MODEL)

    def on_all(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Run `f` on every device, with that device's parts of the arguments."""
        return jax.shard_map(
            f, mesh=self.devices, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def init(self, make: Callable[[], tuple]) -> Callable[[], tuple]:
        """Run `make() -> (caches, *others)` on every device: its own caches, and equal others."""
        caches, *others = jax.eval_shape(make)
        return self.on_all(make, (), (self.cache_specs(caches), *(P() for _ in others)))

    def cache_specs(self, caches: Any) -> Any:
        """Return specs of pools: each device has its own, concatenated along the first axis."""
        return jax.tree.map(lambda x: P(AXES) if len(x.shape) else P(), caches)

    def step(self, f: Callable, params: Any, caches: Any) -> Callable:
        """Run `f(params, caches, tables, history, inputs) -> (caches, *results)` on every device.

        Except for parameters and caches, all arrays are the same on every device, including the
        seven results.
        """
        weights = jax.tree.map(lambda x: x.sharding.spec, params)
        pools = self.cache_specs(caches)
        return self.on_all(f, (weights, pools, P(), P(), P()), (pools, *[P()] * 7))

    def guess(self, f: Callable, params: Any, caches: Any) -> Callable:
        """Run `f(params, caches, tables, hidden, feed) -> drafts` on every device.

        Except for parameters and caches, all arrays are the same on every device, including the
        drafts.
        """
        weights = jax.tree.map(lambda x: x.sharding.spec, params)
        return self.on_all(f, (weights, self.cache_specs(caches), P(), P(), P()), P())

    def feed(self, f: Callable, params: Any, caches: Any) -> Callable:
        """Run `f(params, caches, feed) -> (caches, drafts)` on every device, as `guess` does."""
        weights, pools = jax.tree.map(lambda x: x.sharding.spec, params), self.cache_specs(caches)
        return self.on_all(f, (weights, pools, P()), (pools, P()))

    def update(self, f: Callable, caches: Any) -> Callable:
        """Run `f(caches, inputs) -> caches` on every device, with the same inputs."""
        pools = self.cache_specs(caches)
        return self.on_all(f, (pools, P()), pools)

    def take(self, f: Callable, caches: Any) -> Callable:
        """Run `f(caches, inputs) -> arrays`, and stack every device's along a new first axis."""

        def take(caches: Any, inputs: Any) -> Any:
            return jax.tree.map(lambda x: x[None], f(caches, inputs))

        return self.on_all(take, (self.cache_specs(caches), P()), P(AXES))

    def put(self, f: Callable, caches: Any) -> Callable:
        """Run `f(caches, inputs, arrays) -> caches`, with arrays as `take` returns them."""

        def put(caches: Any, inputs: Any, arrays: Any) -> Any:
            return f(caches, inputs, jax.tree.map(lambda x: x[0], arrays))

        pools = self.cache_specs(caches)
        return self.on_all(put, (pools, P(), P(AXES)), pools)

    def spread(self, parts: np.ndarray) -> jax.Array:
        """Spread each device's part of `parts` [devices, ...], where `put` expects it."""
        sharding = NamedSharding(self.devices, P(AXES))
        return jax.make_array_from_callback(parts.shape, sharding, lambda index: parts[index])

    def local_parts(self, array: jax.Array) -> np.ndarray:
        """Return this process's parts of a result of `take`, in the order of devices."""
        shards = sorted(array.addressable_shards, key=lambda shard: _place(shard.index))
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    def spread_local(self, parts: np.ndarray) -> jax.Array:
        """Spread a result of `local_parts`; every process has the parts of its own devices."""
        sharding, shape = (
            NamedSharding(self.devices, P(AXES)),
            (self.devices.size, *parts.shape[1:]),
        )
        indices = sharding.addressable_devices_indices_map(shape).values()
        order = sorted(map(_place, indices))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: parts[order.index(_place(index))][None]
        )

    def array(self, whole: Parameter, local: Parameter, read: Read) -> jax.Array:
        """Put a parameter on the devices, reading only the parts that this process holds.

        Args:
          whole, local: the parameter in the whole model, and on one device.
          read: reads a part of the whole one, given a slice per axis.
        """
        axis = split_axis(whole, local)
        if axis is None:
            spec, shape = P(), whole.shape
        else:
            spec = P(*(None,) * axis, MODEL)
            shape = (
                *local.shape[:axis],
                local.shape[axis] * self.num_parts,
                *local.shape[axis + 1 :],
            )
        sharding = NamedSharding(self.devices, spec)

        parts, known = [], {}  # by place, since several devices may have the same part
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            rank = 0 if axis is None else (index[axis].start or 0) // local.shape[axis]
            where = part_slices(whole, local, rank, self.num_parts)
            if (key := repr(where)) not in known:
                found = [read(index) for index in where]
                known[key] = np.concatenate(found, axis) if len(found) > 1 else found[0]
            parts.append(jax.device_put(known[key], device))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _place(index: tuple[slice, ...]) -> int:
    """Return which device has a part of an array [devices, ...]."""
    return index[0].start or 0


Read = Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The shape of a parameter."""

    shape: tuple[int, ...]
    # Sizes of the parts joined along the axis that is split, if there are several.
    sections: tuple[int, ...] = ()


def make_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> DeviceMesh:
    """Make the mesh that a text such as "tensor=2" describes; axes it does not name have size 1.

    Args:
      text: sizes of axes by name, separated by commas.
      devices: its devices; None: the first of `jax.devices()`.

    Raises:
      ValueError: an axis is unknown or repeated, a size is invalid, or there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    return _mesh(_read_sizes(text, SUPPORTED, devices), devices)


def make_meshes(text: str, devices: Sequence[jax.Device] | None = None) -> list[DeviceMesh]:
    """Make the meshes of a text such as "data=2,tensor=2": `data` of them, of the other sizes.

    Args:
      text: sizes of axes by name, separated by commas.
      devices: their devices, one mesh after another; None: the first of `jax.devices()`.

    Raises:
      ValueError: an axis is unknown or repeated, a size is invalid, there are too few devices, or
        several meshes are wanted but other processes have some of the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _read_sizes(text, (DATA, *SUPPORTED), devices)
    count, sizes[DATA] = sizes[DATA], 1
    if count > 1 and jax.process_count() > 1:
        raise ValueError(f"mesh {text!r}: data={count} is for one process: run a server on each")
    each = math.prod(sizes.values())
    return [_mesh(sizes, devices[i * each : (i + 1) * each]) for i in range(count)]


def _read_sizes(
    text: str, supported: Sequence[str], devices: Sequence[jax.Device]
) -> dict[str, int]:
    """Read how many devices there are along each axis."""
    given: dict[str, int] = {}
    problems = []
    for item in text.split(","):
        name, _, size = item.partition("=")
        if name not in supported or not (size.isascii() and size.isdigit() and int(size)):
            problems.append(f"{item!r} must be one of {', '.join(f'{a}=N' for a in supported)}")
        elif name in given:
            problems.append(f"{name} is given twice")
        else:
            given[name] = int(size)
    sizes = {axis: given.get(axis, 1) for axis in AXES}
    count = math.prod(sizes.values())
    if count > len(devices):
        there = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        hint = "; JAX_NUM_CPU_DEVICES=N makes N of a CPU" * (devices[0].platform == "cpu")
        problems.append(f"it needs {count} devices, but there are {there}{hint}")
    if problems:
        raise ValueError(f"mesh {text!r}: {'; '.join(problems)}")
    return sizes


def _mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> DeviceMesh:
    return DeviceMesh(
        jax.make_mesh(
            tuple(sizes.values()),
            AXES,
            devices=devices[: math.prod(sizes.values())],
            axis_types=(AxisType.Auto,) * len(AXES),
        )
    )


def local_part(config: Any, num_parts: int, context: int = 1, name: str = "this model") -> Any:
    """Return the config of the part that one of `num_parts` devices holds and computes.

    Every `context` devices have the same KV heads. Errors call the model `name`.

    Raises:
      ValueError: some counts cannot be divided among so many devices; it lists them all.
    """
    problems: dict[str, None] = {}

    def part(owner: str, name: str, value: Any) -> Any:
        field = f"{owner}.{name}"
        what = EVENLY.get(field) or AT_LEAST_ONE.get(field) or COUNTED.get(field)
        if field == "Outline.num_devices":
            return num_parts
        if field in ("Heads.context", "LatentHeads.context"):
            return context
        if what is None:
            return walk(value)
        count = num_parts // context if field in AT_LEAST_ONE else num_parts
        if value % count and not (field in AT_LEAST_ONE and count % value == 0):
            problems[f"{value} {what}"] = None
            return value
        return value if field in COUNTED else max(value // count, min(value, 1))

    def walk(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        if not dataclasses.is_dataclass(value):
            return value
        kind = type(value).__name__
        local = {
            field.name: part(kind, field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return type(value)(**local)

    local = walk(config)
    if problems:
        raise ValueError(
            f"{name}'s {' and '.join(problems)} cannot be divided among {num_parts} devices"
        )
    return local


def split_axis(whole: Parameter, local: Parameter) -> int | None:
    """Return the axis along which a parameter is split among devices, or None."""
    sizes = enumerate(zip(whole.shape, local.shape, strict=True))
    axes = [axis for axis, (all_of_it, part) in sizes if all_of_it != part]
    assert len(axes) <= 1, f"{whole} is split along several axes"
    return axes[0] if axes else None


def part_slices(whole: Parameter, local: Parameter, rank: int, num_parts: int) -> list[tuple]:
    """Return where a device's part of a parameter is: slices of one or more runs.

    Of a section with `units` parts, rank r has part r * units // num_parts: each device has its
    own, or, with fewer parts than devices (KV heads), several devices share one.
    """
    axis = split_axis(whole, local)
    if axis is None:
        return [(slice(None),) * len(whole.shape)]
    sections = whole.sections or (whole.shape[axis],)
    before, found = 0, []
    for section, size in zip(sections, local.sections or (local.shape[axis],), strict=True):
        start = before + rank * (section // size) // num_parts * size
        found.append((*(slice(None),) * axis, slice(start, start + size)))
        before += section
    return found
