"""Each mesh device's share of a prompt's contents, and how shares make up the whole.

    device   its KV heads, heads of states, channels      of the tokens that `context` deals to it
    whole    all of them, as an engine on one device has

Two engines of different meshes exchange whole contents (`contents.py`): the sender joins what its
devices took, and the receiver deals out what each of its own puts. Both happen on the host, where
the bytes are anyway, so no device sends anything to another one.
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
    """Each device's share of rows of one tensor.

    Of fewer KV heads than devices each lies on several devices, which have the same numbers.
    """

    whole: Parameter  # a row
    local: Parameter  # what a device has of it
    num_devices: int
    context: int = 1  # devices that the tokens are dealt to: token p lies on device p % context

    def join(self, found: np.ndarray) -> np.ndarray:
        """Rows [n, *whole] of what the devices have of them, [devices, n / context, *local]."""
        rows = np.empty((found.shape[1] * self.context, *self.whole.shape), found.dtype)
        for device, there in enumerate(found):
            for whole, local in self._places(device):
                rows[device % self.context :: self.context][whole] = there[local]
        return rows

    def deal(self, rows: np.ndarray) -> np.ndarray:
        """Deal rows to devices: the inverse of `join`."""
        count = len(rows) // self.context
        found = np.empty((self.num_devices, count, *self.local.shape), rows.dtype)
        for device, there in enumerate(found):
            for whole, local in self._places(device):
                there[local] = rows[device % self.context :: self.context][whole]
        return found

    def _places(self, device: int) -> Iterator[tuple[Index, Index]]:
        """Where runs of a device's part lie in whole rows, and in its own."""
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
    whole: Mapping[int, AttentionCache | StateCache]  # what layers keep on one device
    local: Mapping[int, AttentionCache | StateCache]

    def of_rows(self, layer: int, row: tuple[int, ...]) -> Share:
        """Of rows `[K, ...]` of an attention layer, given a device's."""
        whole, local = self.whole[layer], self.local[layer]
        assert isinstance(whole, AttentionCache)
        assert isinstance(local, AttentionCache)
        shapes = Parameter((whole.num_kv_heads, *row[1:])), Parameter(row)
        return Share(*shapes, self.mesh.num_parts, local.context)

    def of_states(self, layer: int, index: int) -> Share:
        """Of one of a recurrent layer's tensors."""
        shapes = []
        for cache in (self.whole[layer], self.local[layer]):
            assert isinstance(cache, StateCache)
            sections = cache.sections[index] if cache.sections else ()
            shapes.append(Parameter(cache.layout.shapes[index], sections))
        return Share(*shapes, self.mesh.num_parts)


def shares_of(model: Model) -> Shares | None:
    """The shares of a model's devices; None if it is on one."""
    if model.mesh is None:
        return None
    return Shares(model.mesh, model.whole_layers, model.layers)
