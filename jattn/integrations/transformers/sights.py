"""Visibility as transformers describes it, in tensors, and reading it once per mask."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

import jattn
from jattn import spec
from jattn.integrations.transformers import biases, masks

# Mask entries up to this value hide a key: the exponential of a logit that much lower is 0 even in
# float64. These include float16's lowest number, -65504, and -1e4, which is -9984 in bfloat16.
HIDDEN = -9e3

# What was read from each mask, and the mask's version then: layers share masks.
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


ADDITIONS = {
    *(torch.add, torch.Tensor.add, torch.Tensor.add_),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__),
}
# Reads a view's base. torch.compile follows bases to the last, so a mask's base stays unwrapped:
# wrapping it would make another view.
BASE = torch.Tensor._base.__get__


class BoolMask(torch.Tensor):
    """A bool mask that refuses to be added to logits, which would hide nothing.

    A model that adds it, in its own attention or to a bias, expects numbers.
    """

    _plain: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor) -> BoolMask:
        """Wrap the mask, which shares its memory."""
        found = mask.as_subclass(cls)
        found._plain = mask
        return found

    def plain(self) -> torch.Tensor:
        """Return the mask, the same tensor in every layer that shares it."""
        known = self.__dict__.get("_plain")
        return self.as_subclass(torch.Tensor) if known is None else known

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in ADDITIONS:
            raise jattn.UnsupportedError(
                "the model adds its mask to logits or biases by itself, as if it were numbers, but "
                'jattn\'s masks are bool: load it with attn_implementation="eager"'
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func == BASE:
            return out
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool and not isinstance(out, cls):
            return out.as_subclass(cls)
        return out


class Planned(Protocol):
    """What was made from a reading."""

    @property
    def reading(self) -> masks.SplitMask:
        """The mask's reading."""


Plan = TypeVar("Plan", bound=Planned)


@dataclasses.dataclass(frozen=True, eq=False)
class Read(Generic[Plan]):
    """What was read from a mask, for all layers that share it.

    Attributes:
      plan: made from the reading.
      seen: the mask as bool [B, Tq, Tk].
    """

    plan: Plan
    seen: np.ndarray

    @functools.cached_property
    def columns(self) -> biases.Columns:
        """The key-query distance of every visible entry."""
        return biases.Columns.of(self.plan.reading, self.seen)

    @functools.cached_property
    def ranges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The queries [n] that see something, and the first and last key of each, numbered across
        all batch rows."""
        _, num_queries, num_keys = self.seen.shape
        seen = self.seen.reshape(-1, num_keys)
        queries = np.flatnonzero(seen.any(axis=1))
        first = queries // num_queries * num_keys
        last = first + num_keys - 1 - seen[queries, ::-1].argmax(axis=1)
        return queries, first + seen[queries].argmax(axis=1), last


@dataclasses.dataclass(frozen=True, eq=False)
class MaskSight:
    """The visibility in one call of attention.

    Attributes:
      mask: [B or 1, heads or 1, Tq or 1, Tk or more], bool (True shows the key) or numbers added
        to logits; or None.
      is_causal: whether attention without a mask is causal.
      window: the window of attention without a mask, or None.
      bias: [B or 1, H or 1, Tq, Tk] added to logits, or None.
      packing: where packed texts start and the last ends, among all queries and among all keys; or
        None.
    """

    mask: torch.Tensor | None
    is_causal: bool
    window: int | None = None
    bias: torch.Tensor | None = None
    packing: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(
        self,
        key: tuple[Hashable, ...],
        batch: int,
        num_queries: int,
        num_keys: int,
        make: Callable[..., Plan],
        kept: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Read[Plan]:
        """Return `make(reading, *key)`, made once per mask.

        Args:
          key: hashable; what else the plan depends on.
          batch, num_queries, num_keys: B, Tq and Tk.
          make: makes the plan.
          kept: returns the keys that are stored, bool [B, Tk], for a mask [B, Tq, Tk]; None for
            those that some query sees.

        Raises:
          UnsupportedError: the mask cannot be read, or shows packed texts to each other.
        """
        sizes = batch, num_queries, num_keys
        # In cross-attention these biases are only ever zeros (T5), so these are the same tokens.
        of_text = num_queries == num_keys and self.bias is not None and bool(self.bias.any())

        def read() -> Read[Plan]:
            seen = self._without_mask(*sizes) if self.mask is None else _seen(self.mask, *sizes)
            if of_text:
                seen = masks.without_padding_after(seen)
            return Read(make(masks.read_mask(seen, kept and kept(seen)), *key), seen)

        # Masks made in inference mode do not track changes, so they are read every time.
        once = self.mask is None or self.mask.is_inference()
        found = read() if once else _remembered(self.mask, (*sizes, of_text, make, *key), read)
        if self.packing is not None:
            _check_packing(found, *(x.numpy(force=True) for x in self.packing))
        return found

    def _without_mask(self, batch: int, num_queries: int, num_keys: int) -> np.ndarray:
        causal = self.is_causal and num_queries > 1
        if causal and num_queries != num_keys:
            raise jattn.UnsupportedError(
                f"{num_queries} queries attend to {num_keys} keys without a mask, as if causal, "
                "but nothing says which keys come before which query"
            )
        sight = spec.Sight(causal, self.window if self.is_causal or num_queries > 1 else None)
        queries = np.arange(num_keys - num_queries, num_keys)[:, None]
        keys = np.arange(num_keys)[None]
        seen = spec.visible(queries, keys, num_keys, sight)
        return np.broadcast_to(seen, (batch, num_queries, num_keys))

    def relative_bias(
        self, read: Read[Plan], num_heads: int, has_sinks: bool
    ) -> torch.Tensor | None:
        """Return `relative_bias` for `jattn.paged_attention`, [H, 2 E + 1] float32, or None.

        Args:
          read: what was read from the mask.
          num_heads: H.
          has_sinks: whether the call has sinks; a bias added for all keys then does not cancel.

        Raises:
          UnsupportedError: the bias depends on more than the distance between key and query, or
            could come to do so by learning.
        """
        bias = self._numbers(*read.seen.shape[1:])
        if bias is None:
            return None
        table = biases.relative_bias(bias, read.columns, has_sinks)
        return table.expand(num_heads, -1) if len(table) == 1 else table

    def _numbers(self, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """Return the numbers added to logits of visible keys, [B or 1, H or 1, Tq, Tk].

        None if all are zero, unless they are trainable: those need a gradient.
        """
        found = []
        for given in (self.bias, self.mask):
            if given is None or given.dtype == torch.bool:
                continue
            added = biases.unlearned(given)[..., :num_keys].expand(-1, -1, num_queries, -1)
            if given is self.mask:
                added = added.masked_fill(added <= HIDDEN, 0).to(torch.float32)
            if added.requires_grad or added.any():
                found.append(added)
        return sum(found[1:], found[0]) if found else None


def _remembered(
    mask: torch.Tensor, name: tuple[Hashable, ...], read: Callable[[], Read[Plan]]
) -> Read[Plan]:
    """Return what was read from this version of a mask under a name, or call `read`."""
    version, remembered = _plans.get(mask, (None, {}))
    if version != mask._version:
        remembered = {}
        _plans[mask] = mask._version, remembered
    if name not in remembered:
        remembered[name] = read()
    found: Read[Plan] = remembered[name]
    return found


def _check_packing(read: Read[Plan], of_queries: np.ndarray, of_keys: np.ndarray) -> None:
    """Refuse a mask that shows packed texts to each other."""
    queries, first, last = read.ranges
    text = np.searchsorted(of_queries, queries, side="right") - 1
    inside = (text >= 0) & (text < len(of_queries) - 1)
    queries, first, last, text = (x[inside] for x in (queries, first, last, text))
    wrong = np.flatnonzero((first < of_keys[text]) | (last >= of_keys[text + 1]))
    if wrong.size:
        at = wrong[0]
        raise jattn.UnsupportedError(
            f"cu_seq_lens_q puts query {queries[at]} in packed text {text[at]}, whose keys are "
            f"{of_keys[text[at]]} to {of_keys[text[at] + 1] - 1}, but the mask shows it keys "
            f"{first[at]} to {last[at]}: call the model with use_cache=False, so that transformers "
            "makes masks of packed texts"
        )


def _seen(mask: torch.Tensor, batch: int, num_queries: int, num_keys: int) -> np.ndarray:
    """Return a mask as bool [B, Tq, Tk]."""
    if mask.ndim != 4 or mask.shape[3] < num_keys:
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} does not fit {num_queries} queries and {num_keys} keys"
        )
    if mask.dtype != torch.bool:
        mask = mask > HIDDEN
    found = mask.numpy(force=True)
    if found[..., num_keys:].any():
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} does not fit {num_keys} keys: it shows some after them"
        )
    found = found[..., :num_keys]  # drop the unused room of a static cache
    if (found != found[:, :1]).any():
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} differs between heads: all jattn heads see the same keys"
        )
    if found.shape[0] not in (1, batch) or found.shape[2] not in (1, num_queries):
        raise jattn.UnsupportedError(
            f"the mask {list(mask.shape)} does not fit {batch} batch rows of {num_queries} queries"
        )
    return np.broadcast_to(found[:, 0], (batch, num_queries, num_keys))
