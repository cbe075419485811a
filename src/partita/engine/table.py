"""A table of clients that is kept by columns, so that a million clients take a few arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

BLOCK = 1024
"""How many rows are held as Python objects at a time."""

Column = Sequence[Any] | np.ndarray | str | float | None
"""A value for each row, or one for all rows. NaN in an array of numbers is a missing value: None."""


class Coded(Sequence[Any]):
    """A column of few different values: row i has `values[codes[i]]`."""

    def __init__(self, codes: np.ndarray, values: Sequence[Any]) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self.values[code] for code in self.codes[place].tolist()]
        return self.values[int(self.codes[place])]


class Table(Sequence[dict[str, Any]]):
    """A list of dictionaries, each of which is made when it is read."""

    def __init__(self, length: int, columns: Mapping[str, Column]) -> None:
        self._length, self._columns = length, dict(columns)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._length))]
        i = range(self._length)[place]
        return next(self._dicts(i, i + 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for a in range(0, self._length, BLOCK):
            yield from self._dicts(a, min(a + BLOCK, self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return f"Table of {self._length} rows with {', '.join(self._columns)}"

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def between(self, a: int, b: int) -> Table:
        """Return the rows a to b − 1."""
        if (a, b) == (0, self._length):
            return self
        columns = {
            name: column if column is None or isinstance(column, str | float) else column[a:b]
            for name, column in self._columns.items()
        }
        return Table(b - a, columns)

    def values(self, names: Sequence[str], *, finite: bool = False) -> Iterator[tuple[Any, ...]]:
        """Yield the values of these columns, row by row; with `finite`, infinite numbers are None as well."""
        for a in range(0, self._length, BLOCK):
            yield from self._tuples(names, a, min(a + BLOCK, self._length), finite)

    def numbers(self, name: str) -> np.ndarray:
        """Return a column as numbers, NaN where a value is missing."""
        column = self._columns.get(name)
        if isinstance(column, np.ndarray):
            return column.astype(np.float64)
        return np.array([np.nan if v is None else v for (v,) in self.values([name])], dtype=np.float64)

    def _dicts(self, a: int, b: int) -> Iterator[dict[str, Any]]:
        names = list(self._columns)
        return (dict(zip(names, row)) for row in self._tuples(names, a, b))

    def _tuples(
        self, names: Sequence[str], a: int, b: int, finite: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        return zip(*[_plain(self._columns.get(name), a, b, finite) for name in names])


def _plain(column: Column, a: int, b: int, finite: bool) -> Sequence[Any]:
    """Return the values of rows a to b as Python objects."""
    if column is None or isinstance(column, str | float):
        return [column] * (b - a)
    if not isinstance(column, np.ndarray):
        return column[a:b]
    block = column[a:b]
    missing = ~np.isfinite(block) if finite else np.isnan(block)
    values: list[Any] = block.tolist()
    for i in np.flatnonzero(missing).tolist():
        values[i] = None
    return values
