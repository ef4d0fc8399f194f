"""Visibility as transformers describes it, as tensors, and reading it once per mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

import jattn
from jattn import spec
from jattn.integrations.transformers import batches, masks

Plan = TypeVar("Plan")

# Mask entries from here down hide a key: the exponential of a logit that much lower is 0 even in
# float64. float16's lowest number, -65504, is among them.
HIDDEN = -1e4

# Layers share masks. What was read of one goes with it.
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class Sight:
    """The visibility in one call of attention.

    Attributes:
      mask: [B or 1, heads or 1, Tq or 1, Tk or more], bool (sees) or numbers that are added to
        logits; or None.
      is_causal: what holds without a mask.
      window: the window that holds without a mask, or None.
      bias: [B or 1, H or 1, Tq, Tk] added to logits, or None.
    """

    mask: torch.Tensor | None
    is_causal: bool
    window: int | None = None
    bias: torch.Tensor | None = None

    def plan(
        self,
        key: tuple[Hashable, ...],
        batch: int,
        num_queries: int,
        num_keys: int,
        make: Callable[..., Plan],
        kept: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> tuple[Plan, np.ndarray]:
        """`make(reading, *key)` and the mask as bool [B, Tq, Tk], made once for each mask.

        Args:
          key: hashable; what else the plan depends on.
          batch, num_queries, num_keys: B, Tq and Tk.
          make: makes the plan.
          kept: gives the keys that are stored, bool [B, Tk], for a mask [B, Tq, Tk]; None for
            those that some query sees.
        """

        def read(seen: np.ndarray) -> tuple[Plan, np.ndarray]:
            return make(masks.read_mask(seen, kept and kept(seen)), *key), seen

        if self.mask is None:
            return read(self._without_mask(batch, num_queries, num_keys))
        remembered = None
        if not self.mask.is_inference():  # those do not say whether they were changed since
            remembered = _plans.setdefault(self.mask, {})
        version = self.mask._version if remembered is not None else 0
        name = (version, batch, num_queries, num_keys, make, *key)
        if remembered is not None and name in remembered:
            found: tuple[Plan, np.ndarray] = remembered[name]
            return found
        found = read(_seen(self.mask, batch, num_queries, num_keys))
        if remembered is not None:
            remembered[name] = found
        return found

    def _without_mask(self, batch: int, num_queries: int, num_keys: int) -> np.ndarray:
        causal = self.is_causal and num_queries > 1
        if causal and num_queries != num_keys:
            raise jattn.UnsupportedError(
                f"{num_queries} queries attend to {num_keys} keys without a mask, as if causal: "
                "nothing says which keys come before which query"
            )
        sight = spec.Sight(causal, self.window if self.is_causal or num_queries > 1 else None)
        queries = np.arange(num_keys - num_queries, num_keys)[:, None]
        keys = np.arange(num_keys)[None]
        seen = spec.visible(queries, keys, num_keys, sight)
        return np.broadcast_to(seen, (batch, num_queries, num_keys))

    def relative_bias(
        self, reading: masks.SplitMask, seen: np.ndarray, has_sinks: bool
    ) -> torch.Tensor | None:
        """The biases as `relative_bias` of `jattn.paged_attention`, [H, 2 E + 1] float32, or None.

        What is the same for all keys of a query cancels in its softmax: biases may also be
        functions of the key alone that become one of the distance so, as ALiBi's are.

        Raises:
          UnsupportedError: the bias depends on more than the distance of key and query.
        """
        bias = self._numbers(seen)
        if bias is None:
            return None
        distances, where, of_entry = masks.relative_columns(reading, seen)
        entries = np.flatnonzero(of_entry.reshape(-1) >= 0)
        which = torch.from_numpy(of_entry.reshape(-1)[entries])
        away = np.where(of_entry >= 0, np.abs(distances)[of_entry], seen.shape[2])
        table = None
        for candidate in [bias] if has_sinks else [bias, _less_nearest(bias, away)]:
            flat = candidate.expand(seen.shape[0], -1, -1, -1).transpose(0, 1).flatten(1)
            found = flat[:, torch.from_numpy(where)]
            with torch.no_grad():
                error = (found[:, which] - flat[:, torch.from_numpy(entries)]).abs().max()
                largest = flat[:, torch.from_numpy(entries)].abs().max()
            if error <= 1e-5 * largest:
                table = found
                break
        if table is None:
            raise jattn.UnsupportedError(
                f"a bias {list(bias.shape)} is added to logits that depends on more than the "
                "distance of key and query: jattn's relative_bias is a function of that distance"
            )
        extent = batches.bucket(int(np.abs(distances).max()) + 1)
        columns = table.new_zeros(table.shape[0], 2 * extent + 1, dtype=torch.float32)
        at = torch.from_numpy(distances + extent).to(table.device)
        return columns.index_copy(1, at, table.float())

    def _numbers(self, seen: np.ndarray) -> torch.Tensor | None:
        """The numbers added to logits of visible keys, [B or 1, H or 1, Tq, Tk]; None for zeros.

        Zeros that learn stay: they have a gradient.
        """
        num_queries, num_keys = seen.shape[1:]
        bias = self.bias
        if bias is not None:
            bias = bias[..., :num_keys].expand(-1, -1, num_queries, -1)
        if self.mask is not None and self.mask.dtype != torch.bool:
            added = self.mask[..., :num_keys]
            added = added.masked_fill(added <= HIDDEN, 0)
            if added.any():
                added = added.expand(-1, -1, num_queries, -1).to(torch.float32)
                bias = added if bias is None else bias + added
        return bias if bias is not None and (bias.requires_grad or bias.any()) else None


def _less_nearest(bias: torch.Tensor, away: np.ndarray) -> torch.Tensor:
    """Biases minus that of the key nearest to each query, which `away` [B, Tq, Tk] shows."""
    at = torch.from_numpy(away.argmin(axis=2))[:, None, :, None].to(bias.device)
    full = bias.expand(away.shape[0], -1, -1, -1)
    return full - full.gather(3, at.expand(-1, full.shape[1], -1, -1))


def _seen(mask: torch.Tensor, batch: int, num_queries: int, num_keys: int) -> np.ndarray:
    """A mask as bool [B, Tq, Tk]."""
    if mask.ndim != 4 or mask.shape[3] < num_keys:
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} does not fit {num_queries} queries and {num_keys} keys"
        )
    mask = mask[..., :num_keys]  # of a cache with room for more
    if mask.dtype != torch.bool:
        mask = mask > HIDDEN
    found = mask.numpy(force=True)
    if (found != found[:, :1]).any():
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} differs between heads: jattn's heads see the same keys"
        )
    if found.shape[0] not in (1, batch) or found.shape[2] not in (1, num_queries):
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} does not fit {batch} batch rows of {num_queries} queries"
        )
    return np.broadcast_to(found[:, 0], (batch, num_queries, num_keys))
