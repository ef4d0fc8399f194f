"""The LoRA adapters of an engine, which requests choose by name.

    limits = Limits(..., adapters=Room(count=4, rank=16))
    engine = Engine(model, limits, loras={"poet": "adapters/poet"})
    engine.add(Request(prompt, 100, adapter=engine.adapters["poet"]))
    engine.adapters.load("sailor", "adapters/sailor")            # between steps; compiles nothing
    engine.adapters.unload("poet")                               # likewise; sequences keep theirs

`examples/models/lora.py` has the mathematics. The step's inputs name each token's adapter by its
number. Keys and values of the same tokens differ between adapters, so the hashes of prefixes begin
with the adapter's salt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, ValuesView
from pathlib import Path

from examples.engine.model import Model
from examples.models.lora import Adapted, Lora, Room, Stacks, read_lora


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A loaded adapter. Get one from `Adapters`."""

    name: str
    directory: str
    number: int  # from 1: its place in the stacks
    salt: bytes  # different for adapters with different weights


class AdapterNotLoadedError(ValueError):
    """No adapter of this name is loaded, or it was unloaded."""


class Adapters(Mapping[str, Adapter]):
    """The adapters of a model, by name, and room for more."""

    def __init__(
        self,
        model: Model,
        room: Room | None = None,
        loras: Mapping[str, str | Path | Lora] | None = None,
        used: Callable[[], Container[Adapter | None]] | None = None,
    ):
        """Make room, and load the given adapters.

        Args:
          model: the model to adapt.
          room: room for adapters; None: for none.
          loras: directories that PEFT has written, or results of `read_lora`, by name.
          used: returns the adapters of waiting and running sequences; None: any may be in use, so
            unloaded ones keep their places.

        Raises:
          ValueError: the model cannot be adapted at all, or by one of these.
        """
        if room is not None and not model.linears:
            raise ValueError(f"{model.name} has no linear layers that adapters could change")
        self.model, self.room = model, room  # `model` has the adapters in its parameters
        self._base, self._loaded = model, dict[str, Adapter]()
        self._unloaded: list[Adapter] = []  # sequences may still use their places
        self._used = used
        self._stacks = room and Stacks(model.linears, room, model.dtype, model.mesh)
        for name, lora in (loras or {}).items():
            self._take(name, lora)
        self._place()

    def __getitem__(self, name: str) -> Adapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._loaded))

    def __len__(self) -> int:
        return len(self._loaded)

    def values(self) -> ValuesView[Adapter]:
        """Return a copy of the loaded adapters, which the engine's thread may change."""
        return dict(self._loaded).values()

    def check_name(self, name: str) -> None:
        """Check that an adapter can have this name.

        Raises:
          ValueError: a model or adapter of this name exists.
        """
        if name in self._loaded or name == self._base.name:
            raise ValueError(f"adapter {name!r}: a model of this name exists")

    def no_room(self, name: str, num_unloaded: int) -> ValueError:
        """Return the error if all places are taken, `num_unloaded` of them by unloaded adapters."""
        count = self.room.count if self.room else 0
        until = ""
        if num_unloaded:
            until = f"; {num_unloaded} unloaded but in use until their requests end"
        return ValueError(
            f"adapter {name!r}: there is room for {count}, and all of it is taken{until}"
        )

    def unloaded(self) -> set[Adapter]:
        """Return unloaded adapters that keep their places because sequences still use them."""
        if self._unloaded and self._used is not None:
            used = self._used()
            self._unloaded = [adapter for adapter in self._unloaded if adapter in used]
        return set(self._unloaded)

    def free(self) -> set[int]:
        """Return the places that another adapter could take."""
        taken = {adapter.number for adapter in (*self._loaded.values(), *self.unloaded())}
        return {*range(1, 1 + (self.room.count if self.room else 0))} - taken

    def load(
        self,
        name: str,
        source: str | Path | Lora,
        *,
        number: int | None = None,
    ) -> None:
        """Load another adapter. Call this between steps.

        Args:
          name: the name that requests use.
          source: a directory that PEFT has written, or a result of `read_lora`.
          number: the place to put it; None: the first free one.

        Raises:
          ValueError: the name is taken, there is no room, the adapter does not fit the model, or
            other processes share the model.
        """
        mesh = self._base.mesh
        if mesh is not None and mesh.devices.is_multi_process:
            raise ValueError(f"adapter {name!r}: several processes load adapters only at startup")
        self._take(name, source, number)
        try:
            self._place()
        except Exception:  # the devices' memory is full
            del self._loaded[name]
            raise

    def unload(self, name: str) -> None:
        """Prevent new requests from choosing an adapter. Call this between steps.

        Sequences that use it keep it, and its place becomes free when they are finished.

        Raises:
          AdapterNotLoadedError: no adapter of this name is loaded.
        """
        if name not in self._loaded:
            raise AdapterNotLoadedError(f"adapter {name!r} is not loaded")
        self._unloaded.append(self._loaded.pop(name))

    def _take(
        self,
        name: str,
        source: str | Path | Lora,
        number: int | None = None,
    ) -> None:
        base, free = self._base, self.free()
        self.check_name(name)
        if not free:
            raise self.no_room(name, len(self._unloaded))
        lora = source if isinstance(source, Lora) else read_lora(source, base.linears, base.unused)
        number = min(free) if number is None else number
        assert number in free
        self._stacks.set(number, lora)
        salt = b"adapter" + lora.digest
        self._loaded[name] = Adapter(name, str(lora.directory), number, salt)

    def _place(self) -> None:
        """Put all matrices on the devices."""
        if self._stacks is not None:
            params = Adapted(self._base.params, self._stacks.place(), self.room.rank)
            self.model = dataclasses.replace(self._base, params=params)
