"""A client's state as one row of bytes: where each named tensor lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.check import fail
from partita.core.types import ClientState, Tensors

IntArray = NDArray[np.int64]
Clients = Sequence[int] | IntArray
_ALIGN = 16  # the widest item (complex128), so that every slice of a row can be viewed as its dtype


class Field(NamedTuple):
    """One named tensor of a row. `part` is 'personal' or 'memory'."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.items * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The fields of a row and its width in bytes."""

    fields: tuple[Field, ...]
    width: int

    @classmethod
    def of(cls, template: ClientState) -> Layout:
        """Return the layout of states like this one."""
        fields: dict[tuple[str, str], Field] = {}
        offset = 0
        names = [(part, name) for part, tensors in template._asdict().items() for name in tensors]
        for part, name in sorted(names):  # places follow the names: files return tensors in another order
            x = getattr(template, part)[name]
            fields[part, name] = Field(part, name, tuple(x.shape), x.dtype, offset)
            offset = _aligned(fields[part, name].end)
        # never zero: torch cannot view rows of no bytes as another dtype
        return cls(tuple(fields[key] for key in names), max(offset, _ALIGN))

    def pack(self, states: ClientState, count: int) -> Tensor:
        """Return stacked states of `count` clients as rows, uint8 [count, width], on the states' device."""
        self._check_states(states, count)
        parts = states._asdict()
        device = parts[self.fields[0].part][self.fields[0].name].device if self.fields else "cpu"
        rows = torch.zeros(count, self.width, dtype=torch.uint8, device=device)
        views = self.unpack(rows, device)._asdict()
        for f in self.fields:
            views[f.part][f.name].copy_(parts[f.part][f.name].detach())
        return rows

    def unpack(self, rows: Tensor, device: torch.device | str = "cpu") -> ClientState:
        """Return rows as stacked states on a device, views of the rows there."""
        rows = rows.to(device)
        parts: dict[str, Tensors] = {"personal": {}, "memory": {}}
        for f in self.fields:
            items = rows[:, f.offset : f.end].view(f.dtype)
            parts[f.part][f.name] = items.view(len(rows), *f.shape)
        return ClientState(**parts)

    def describe(self) -> list[list[Any]]:
        """Return the layout in JSON's types."""
        fields = sorted(self.fields, key=lambda f: f.offset)
        return [[f.part, f.name, list(f.shape), _short(f.dtype), f.offset] for f in fields]

    def check(self, description: object, where: str) -> None:
        """Refuse what was written with another layout, of which this is the description."""
        fields = self.describe()
        if description == fields:
            return
        written = description if isinstance(description, list) else []
        only_written = [_line(f) for f in written if f not in fields]
        only_here = [_line(f) for f in fields if f not in written]
        raise ValueError(
            f"{where} was written for other client states: there {_few(only_written)}, here {_few(only_here)}"
        )

    def _check_states(self, states: ClientState, count: int) -> None:
        parts = states._asdict()
        expected = {(f.part, f.name) for f in self.fields}
        names = {(part, name) for part in parts for name in parts[part]}
        if names != expected:
            differing = ", ".join(f"{part} {name!r}" for part, name in sorted(names ^ expected))
            raise ValueError(f"states: names differ from the template's: {differing}")
        for f in self.fields:
            x = parts[f.part][f.name]
            if tuple(x.shape) != (count, *f.shape) or x.dtype != f.dtype:
                raise ValueError(
                    f"states: {f.part} {f.name!r} is {_short(x.dtype)} {list(x.shape)}, "
                    f"expected {_short(f.dtype)} {[count, *f.shape]} (one row per client)"
                )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(field: Any) -> str:
    if not isinstance(field, list) or len(field) != 5:
        return repr(field)
    part, name, shape, dtype, offset = field
    return f"{part} {name!r} {dtype} {shape} at byte {offset}"


def _few(lines: list[str], most: int = 3) -> str:
    rest = f" and {len(lines) - most} more" if len(lines) > most else ""
    return (", ".join(lines[:most]) or "nothing else") + rest


def indices(clients: Clients, total: int, *, distinct: bool = False) -> IntArray:
    """Return client numbers as an array, checked."""
    numbers = np.asarray(clients, dtype=np.int64)
    outside = numbers[(numbers < 0) | (numbers >= total)]
    if len(outside):
        raise fail("clients", int(outside[0]), f"numbers from 0 to {total - 1}")
    if distinct and len(np.unique(numbers)) < len(numbers):
        raise fail("clients", numbers.tolist(), "each client once")
    return numbers
