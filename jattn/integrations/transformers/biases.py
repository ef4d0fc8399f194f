"""Numbers that are added to logits, as a function of the distance between key and query."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import jattn
from jattn.integrations.transformers import batches, masks

# Rounding of sums of gradients, as a share of the largest.
ROUNDING = {torch.float16: 0.1, torch.bfloat16: 0.1}
# How far two biases of one distance may differ: 1e-5 of the largest bias, but at most 1e-3 or the
# rounding of float32. A bias that almost hides a key, say -8000, tells nothing about the others.
SAME, MOST = 1e-5, 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """The key-query distances of the visible entries of a mask.

    Attributes:
      batch: B.
      distances: [U]; key position minus query position, in order.
      where: [U]; the first entry of the flat mask with each distance.
      entries: [n]; the visible entries of the flat mask.
      which: [n]; the distance of each of these, as an index into `distances`.
      nearest: [B, 1, Tq, 1]; the key nearest to each query.
    """

    batch: int
    distances: np.ndarray
    where: torch.Tensor
    entries: torch.Tensor
    which: torch.Tensor
    nearest: torch.Tensor

    @classmethod
    def of(cls, reading: masks.SplitMask, seen: np.ndarray) -> Columns:
        """Return the columns of a mask, bool [B, Tq, Tk], from its reading."""
        distances, where, of_entry = masks.relative_columns(reading, seen)
        entries = np.flatnonzero(of_entry.reshape(-1) >= 0)
        away = np.where(of_entry >= 0, np.abs(distances)[of_entry], seen.shape[2])
        return cls(
            len(seen),
            distances,
            torch.from_numpy(where),
            torch.from_numpy(entries),
            torch.from_numpy(of_entry.reshape(-1)[entries]),
            torch.from_numpy(away.argmin(axis=2))[:, None, :, None],
        )


def relative_bias(bias: torch.Tensor, columns: Columns, has_sinks: bool) -> torch.Tensor:
    """Return a bias [B or 1, H or 1, Tq, Tk] as a table [H, 2 E + 1] float32.

    Without sinks, a number added for all keys of a query cancels in its softmax. A bias may then
    also depend on the key only, like ALiBi's, if such numbers turn it into a function of the
    distance.

    Raises:
      UnsupportedError: the bias depends on more than the distance between key and query, or could
        come to do so by learning.
    """
    table = None
    for candidate in [bias] if has_sinks else [bias, _less_nearest(bias, columns)]:
        flat = candidate.expand(columns.batch, -1, -1, -1).transpose(0, 1).flatten(1)
        found, full = flat[:, columns.where], flat[:, columns.entries]
        with torch.no_grad():
            error = (found[:, columns.which] - full).abs().max()
            largest = float(full.abs().max())
        limit = max(min(SAME * largest, MOST), torch.finfo(torch.float32).eps * largest)
        if error <= limit:
            table = found
            break
    if table is None:
        raise jattn.UnsupportedError(
            f"the bias {list(bias.shape)} that is added to logits depends on more than the "
            "distance of key and query: jattn's relative_bias is a function of that distance"
        )
    if torch.is_grad_enabled() and full.requires_grad:
        _check_learning(bias, found, full, columns.which)
    distances = columns.distances
    extent = batches.bucket(int(np.abs(distances).max()) + 1)
    empty = table.new_zeros(table.shape[0], 2 * extent + 1, dtype=torch.float32)
    at = torch.from_numpy(distances + extent).to(table.device)
    return empty.index_copy(1, at, table.float())


def _less_nearest(bias: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Subtract from every bias that of the key nearest to its query."""
    full = bias.expand(columns.batch, -1, -1, -1)
    at = columns.nearest.to(bias.device)
    return full - full.gather(3, at.expand(-1, full.shape[1], -1, -1))


def _check_learning(
    bias: torch.Tensor, found: torch.Tensor, full: torch.Tensor, which: torch.Tensor
) -> None:
    """Refuse a bias that learns more than a function of the distance.

    jattn sends the gradients of all entries with one distance to the first such entry. That is
    right if all of these entries come from one number. A random gradient shows whether they do: the
    tensors that the bias was computed from must get the same gradient either way.
    """
    generator = torch.Generator(full.device).manual_seed(0)
    gradient = torch.empty_like(full, requires_grad=False).normal_(generator=generator)
    collapsed = torch.zeros_like(found).index_add(1, which.to(found.device), gradient)
    leaves = _leaves(full)
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    wanted = torch.autograd.grad(full, leaves, gradient, **options)
    given = torch.autograd.grad(found, leaves, collapsed, **options)
    for leaf, one, other in zip(leaves, wanted, given, strict=True):
        if one is None or other is None:
            continue  # then both are None: `full` and `found` are entries of one tensor
        limit = max(ROUNDING.get(x.dtype, 1e-3) for x in (leaf, bias)) * one.abs().max()
        if (one - other).abs().max() > limit:
            if leaf.shape == bias.shape and not isinstance(leaf, torch.nn.Parameter):
                raise jattn.UnsupportedError(
                    f"this bias {list(bias.shape)} learns every number separately: jattn's "
                    "relative_bias learns functions of key-query distance only; if gradient "
                    "checkpointing cut it off from its parameters, set use_reentrant=False"
                )
            raise jattn.UnsupportedError(
                f"this bias {list(bias.shape)} has trainable parameters {list(leaf.shape)} that "
                "are not a function of key-query distance: jattn's relative_bias has gradients "
                "only for such functions"
            )


def _leaves(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a result's gradient flows to."""
    found, nodes, known = [], [x.grad_fn], {x.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following not in known:
                known.add(following)
                nodes.append(following)
    return found


def unlearned(bias: torch.Tensor) -> torch.Tensor:
    """Return the bias; if it is a leaf of zeros but no parameter, its gradient becomes NaN.

    T5 makes such zeros under gradient checkpointing and does not read their gradient. jattn cannot
    compute it: it only has gradients summed over all entries with one distance.
    """
    is_leaf = bias.requires_grad and bias.is_leaf and torch.is_grad_enabled()
    if not is_leaf or isinstance(bias, torch.nn.Parameter) or bias.any():
        return bias
    found: torch.Tensor = _Unlearned.apply(bias)
    return found


class _Unlearned(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.nan)
