"""Equality of dataclasses that are pytrees of arrays."""

from __future__ import annotations

import jax
import numpy as np

from jattn import checks


def equal(ours: object, theirs: object) -> bool:
    """Whether two pytrees have one structure, static parts included, and the same leaves.

    Arrays are the same where dtype, shape and every bit are, NaN included; shapes without numbers,
    `jax.ShapeDtypeStruct`, where dtype and shape are. Waits for the device.
    """
    leaves, here = jax.tree.flatten(ours)
    others, there = jax.tree.flatten(theirs)
    trees: list[object] = [here, there]  # jax types no comparison of their definitions
    return bool(trees[0] == trees[1]) and all(map(_same, leaves, others))


def _same(ours: object, theirs: object) -> bool:
    if checks.numpy_dtype(ours) is None or checks.numpy_dtype(theirs) is None:
        return bool(ours == theirs)  # a PartitionSpec, a stand-in
    structs = [isinstance(x, jax.ShapeDtypeStruct) for x in (ours, theirs)]
    if any(structs):  # described by dtype and shape
        return all(structs) and checks.describe(ours) == checks.describe(theirs)
    a, b = np.asarray(ours), np.asarray(theirs)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
