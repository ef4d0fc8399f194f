"""Each mesh device's share of a prompt's contents, and how shares make up the whole.

    device   its KV heads, heads of states, channels      of the tokens that `context` gives it
    whole    all of them, as an engine on one device has

Two engines with different meshes exchange whole contents (`contents.py`): the sender joins its
devices' shares, and the receiver splits them into its own devices' shares. Both happen on the host,
where the bytes are anyway, so devices send nothing to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from examples.engine.mesh import DeviceMesh, Parameter, part_slices, split_axis
from examples.engine.model import AttentionCache, Model, StateCache

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """Each device's share of one tensor's rows.

    If there are fewer KV heads than devices, several devices have the same head's numbers.
    """

    whole: Parameter  # a row
    local: Parameter  # a device's part of it
    num_devices: int
    context: int = 1  # devices that tokens are distributed over: token p is on device p % context

    def join(self, found: np.ndarray) -> np.ndarray:
        """Join the devices' parts [devices, n / context, *local] into rows [n, *whole]."""
        rows = np.empty((found.shape[1] * self.context, *self.whole.shape), found.dtype)
        for device, there in enumerate(found):
            for whole, local in self._places(device):
                rows[device % self.context :: self.context][whole] = there[local]
        return rows

    def deal(self, rows: np.ndarray) -> np.ndarray:
        """Split rows into the devices' parts: the inverse of `join`."""
        count = len(rows) // self.context
        found = np.empty((self.num_devices, count, *self.local.shape), rows.dtype)
        for device, there in enumerate(found):
            for whole, local in self._places(device):
                there[local] = rows[device % self.context :: self.context][whole]
        return found

    def _places(self, device: int) -> Iterator[tuple[Index, Index]]:
        """Yield where runs of a device's part are in whole rows, and in its own."""
        axis, begin = split_axis(self.whole, self.local), 0
        for index in part_slices(self.whole, self.local, device, self.num_devices):
            local = list(index)
            if axis is not None:
                size = index[axis].stop - index[axis].start
                local[axis], begin = slice(begin, begin + size), begin + size
            yield (slice(None), *index), (slice(None), *local)


@dataclasses.dataclass(frozen=True)
class Shares:
    """The shares of all layers."""

    mesh: DeviceMesh
    whole: Mapping[int, AttentionCache | StateCache]  # the layers' caches on a single device
    local: Mapping[int, AttentionCache | StateCache]

    def of_rows(self, layer: int, row: tuple[int, ...]) -> Share:
        """Return the share of an attention layer's rows `[K, ...]`, given a device's row."""
        whole, local = self.whole[layer], self.local[layer]
        assert isinstance(whole, AttentionCache)
        assert isinstance(local, AttentionCache)
        shapes = Parameter((whole.num_kv_heads, *row[1:])), Parameter(row)
        return Share(*shapes, self.mesh.num_parts, local.context)

    def of_states(self, layer: int, index: int) -> Share:
        """Return the share of one of a recurrent layer's tensors."""
        shapes = []
        for cache in (self.whole[layer], self.local[layer]):
            assert isinstance(cache, StateCache)
            sections = cache.sections[index] if cache.sections else ()
            shapes.append(Parameter(cache.layout.shapes[index], sections))
        return Share(*shapes, self.mesh.num_parts)


def shares_of(model: Model) -> Shares | None:
    """Return the shares of a model's devices; None if it is on a single one."""
    if model.mesh is None:
        return None
    return Shares(model.mesh, model.whole_layers, model.layers)
