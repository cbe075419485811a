"""How samples are kept: columns with a row of each sample, in memory or mapped, of one shape or ragged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partita.core import check, tree
from partita.core.types import Inputs
from partita.data.mapped import Mapped

BLOCK_BYTES = 1 << 24  # of a column that is read at a time, where all of it is looked at


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, one after another: row i is `values[start[i] : start[i] + length[i]]`.

    Rows are padded with `pad` when they are read: to the longest of those that are read together (see
    `width_of`), or always to `longest`, which no row exceeds, where shapes are `fixed`.
    """

    values: Tensor
    start: Tensor
    length: Tensor
    longest: int
    pad: float = 0
    fixed: bool = False

    @classmethod
    def of(cls, values: Tensor, length: Tensor, pad: float = 0) -> Ragged:
        """Return sequences of these lengths, whose entries are one after another."""
        return cls(values, length.cumsum(0) - length, length, int(length.max()), pad)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self.values.dtype

    def lengths(self, rows: Tensor) -> Tensor:
        """Return how long these rows are."""
        return self.length.index_select(0, rows)


Column = Tensor | Mapped | Ragged
Columns = Column | tuple[Column, ...] | dict[str, Column]
"""What a model takes, as it is kept; see `Inputs` for what it is when it is read."""

pytree.register_pytree_node(
    Ragged,
    lambda r: ([r.values, r.start, r.length], (r.longest, r.pad, r.fixed)),
    lambda parts, options: Ragged(*parts, *options),
)


def each(fn: Callable[[Column], Column], columns: Columns) -> Columns:
    """Return the columns with each of them changed."""
    if isinstance(columns, dict):
        return {name: fn(column) for name, column in columns.items()}
    return tuple([fn(column) for column in columns]) if isinstance(columns, tuple) else fn(columns)


def each_named(fn: Callable[[str, Column], Column], columns: Columns, field: str = "x") -> Columns:
    """Return the columns with each of them changed, by a function of its name in messages and the column."""
    names = iter([name for name, _ in named(columns, field)])
    return each(lambda column: fn(next(names), column), columns)


def rebuilt(columns: Columns, parts: Sequence[Column]) -> Columns:
    """Return other columns in the structure of these."""
    others = iter(parts)
    return each(lambda column: next(others), columns)  # noqa: ARG005


def each_read(fn: Callable[[Column], Tensor], columns: Columns) -> Inputs:
    """Return what is read of each column."""
    if isinstance(columns, dict):
        return {name: fn(column) for name, column in columns.items()}
    return tuple([fn(column) for column in columns]) if isinstance(columns, tuple) else fn(columns)


def listed(columns: Columns) -> list[Column]:
    """Return the columns, in order."""
    if isinstance(columns, dict):
        return list(columns.values())
    return list(columns) if isinstance(columns, tuple) else [columns]


def named(columns: Columns, field: str = "x") -> list[tuple[str, Column]]:
    """Return the columns with their names in messages: x, x['mask'] or x[1]."""
    if isinstance(columns, dict):
        return [(f"{field}[{name!r}]", column) for name, column in columns.items()]
    several = isinstance(columns, tuple)
    return [(f"{field}[{i}]" if several else field, column) for i, column in enumerate(listed(columns))]


def home(column: Column) -> torch.device:
    """Return the device on which it is kept."""
    return column.device if isinstance(column, Tensor) else column.values.device


def is_ids(column: Column) -> bool:
    """Return whether entries are whole numbers, and no images: rows of different lengths are sequences."""
    return not column.dtype.is_floating_point and column.dtype != torch.uint8


def sample_shape(column: Column) -> list[int | str]:
    """Return the shape of a row; the length of a sequence is 'n'."""
    if isinstance(column, Ragged):
        return ["n", *column.values.shape[1:]]
    return list(column.shape[1:])


def row_bytes(column: Column) -> int:
    """Return the bytes of a row; of sequences on average, rounded up."""
    if isinstance(column, Ragged):
        entry = math.prod(column.values.shape[1:]) * column.values.element_size()
        return -(-int(column.length.sum()) * entry // max(1, len(column)))
    return math.prod(column.shape[1:]) * column.dtype.itemsize


def nbytes(column: Column) -> int:
    """Return the bytes of all rows."""
    return row_bytes(column) * len(column)


def read(column: Column, rows: Tensor) -> Tensor:
    """Return rows by number, where they are kept; sequences padded."""
    if isinstance(column, Tensor):
        return column.index_select(0, rows)
    if isinstance(column, Mapped):
        return column.values.index_select(0, column.rows.index_select(0, rows)).to(column.dtype)
    inside, start = real(column, rows), column.start.index_select(0, rows)
    place = start[:, None] + torch.arange(inside.shape[1], device=rows.device)
    place = torch.where(inside, place, 0).reshape(-1)
    entries = column.values.index_select(0, place).reshape(*inside.shape, *column.values.shape[1:])
    inside = inside.reshape(*inside.shape, *[1] * (entries.ndim - 2))
    return torch.where(
        inside, entries, torch.full((), column.pad, dtype=entries.dtype, device=entries.device)
    )


def real(column: Ragged, rows: Tensor) -> Tensor:
    """Return which entries are no padding, when these rows are read."""
    length = column.lengths(rows)
    width = column.longest if column.fixed else width_of(length, column.longest)
    return torch.arange(width, device=rows.device) < length[:, None]


def width_of(lengths: Tensor, longest: int) -> int:
    """Return to how many entries sequences of these lengths are padded: a quarter above the longest at most.

    A step is worked out anew for each width of its batch, so that there are four in each power of two.
    """
    most = int(lengths.max()) if len(lengths) else 0
    step = 1 << max(0, most.bit_length() - 3)
    return min(longest, -(-most // step) * step)


def select(column: Column, rows: Tensor) -> Column:
    """Return the column of some rows. What is mapped stays in its file, and sequences where they are."""
    if isinstance(column, Tensor):
        return column.index_select(0, rows)
    if isinstance(column, Mapped):
        return replace(column, rows=column.rows.index_select(0, rows))
    return replace(column, start=column.start.index_select(0, rows), length=column.lengths(rows))


def packed(column: Column, rows: Tensor) -> Tensor | Ragged:
    """Return some rows, and no others, in memory of their own."""
    if not isinstance(column, Ragged):
        return read(column, rows)
    length, entries = column.lengths(rows), column.values.index_select(0, places(column, rows))
    return replace(column, values=entries, start=length.cumsum(0) - length, length=length)


def sent(column: Column, rows: Tensor, device: torch.device) -> Tensor | Ragged:
    """Return some rows, and no others, on a device; the host goes on while they are on their way to a GPU."""
    if device.type != "cuda" or home(column).type == "cuda":
        return to(packed(column, rows), device)
    if isinstance(column, Ragged):
        kept = tree.map_tensors(lambda t: t.pin_memory(), packed(column, rows))
        moved: Ragged = tree.map_tensors(lambda t: t.to(device, non_blocking=True), kept)
        return moved
    values, chosen = (column, rows) if isinstance(column, Tensor) else (column.values, column.rows[rows])
    pinned = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    torch.index_select(values, 0, chosen, out=pinned)
    return pinned.to(device, non_blocking=True).to(column.dtype)


def tensors(column: Column) -> list[Tensor]:
    """Return the tensors in which it is kept."""
    if isinstance(column, Tensor):
        return [column]
    return [column.values, *([column.rows] if isinstance(column, Mapped) else [column.start, column.length])]


def places(column: Column, rows: Tensor) -> Tensor:
    """Return where rows are kept: their numbers, and of sequences those of their entries."""
    if not isinstance(column, Ragged):
        return rows
    length = column.lengths(rows)
    first = column.start.index_select(0, rows) - (length.cumsum(0) - length)
    return torch.arange(int(length.sum()), device=rows.device) + torch.repeat_interleave(first, length)


def entries(column: Column) -> Tensor:
    """Return the memory in which `places` are numbers of rows."""
    kept = whole(column)
    return kept.values if isinstance(kept, Ragged) else kept


def alike(columns: Columns, like: Columns) -> Columns:
    """Return columns with numbers of the precision that others of the same structure have."""
    others = dict(named(like))
    return each_named(lambda name, column: _alike(column, others.get(name, column)), columns)


def _alike(column: Column, like: Column) -> Column:
    kept: Column = _as_ragged(whole(column)) if isinstance(like, Ragged) else column
    if column.dtype.is_floating_point and like.dtype.is_floating_point:
        if isinstance(kept, Mapped):
            return replace(kept, dtype=like.dtype)
        kept = tree.map_tensors(lambda t: t.to(like.dtype) if t.is_floating_point() else t, kept)
    return replace(kept, pad=like.pad) if isinstance(kept, Ragged) and isinstance(like, Ragged) else kept


def in_memory(columns: Columns, who: str) -> Tensor:
    """Return the one tensor that x is; refuse several inputs, sequences and files for what takes only one."""
    if isinstance(columns, Tensor):
        return columns
    raise check.fail("x", described(columns), f"one array in memory, for {who}")


def described(columns: Columns) -> str:
    """Return the form of a sample in words, such as "x['input_ids'] [n] of int32"."""
    several = len(listed(columns)) > 1 or isinstance(columns, tuple | dict)
    return ", ".join(f"{name if several else ''} {_form(column)}".strip() for name, column in named(columns))


def _form(column: Column) -> str:
    shape = ", ".join(map(str, sample_shape(column)))
    return f"[{shape}] of {str(column.dtype).removeprefix('torch.')}"


def to(column: Column, device: torch.device | str) -> Tensor | Ragged:
    """Return it in the memory of a device."""
    kept = whole(column)
    moved: Tensor | Ragged = tree.to(kept, device)
    return moved


def whole(column: Column) -> Tensor | Ragged:
    """Return it in memory."""
    return packed(column, torch.arange(len(column))) if isinstance(column, Mapped) else column


def together(parts: Sequence[Columns]) -> Columns:
    """Return inputs of one structure under each other."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts if isinstance(part, dict)]) for name in first}
    if not isinstance(first, tuple):
        return joined([part for part in parts if not isinstance(part, tuple | dict)])
    return tuple(map(joined, zip(*[part for part in parts if isinstance(part, tuple)])))


def joined(columns: Sequence[Column]) -> Column:
    """Return columns of one kind under each other: as sequences, where rows differ in length."""
    if len(columns) == 1:
        return columns[0]
    parts = [whole(column) for column in columns]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    alike = len({part.shape[1:] for part in tensors}) == 1 or not is_ids(parts[0])
    if len(tensors) == len(parts) and alike:
        return torch.cat(tensors)
    sequences = [_as_ragged(part) for part in parts]
    ends = torch.tensor([len(part.values) for part in sequences]).cumsum(0).tolist()
    return replace(
        next((part for part in parts if isinstance(part, Ragged)), sequences[0]),
        values=torch.cat([part.values for part in sequences]),
        start=torch.cat([part.start + end for part, end in zip(sequences, [0, *ends])]),
        length=torch.cat([part.length for part in sequences]),
        longest=max(part.longest for part in sequences),
    )


def _as_ragged(column: Tensor | Ragged) -> Ragged:
    """Return rows of one length as sequences."""
    if isinstance(column, Ragged):
        return column
    n, length = column.shape[:2]
    lengths = torch.full((n,), length, device=column.device)
    return Ragged(column.reshape(n * length, *column.shape[2:]), lengths.cumsum(0) - lengths, lengths, length)


def blocks(column: Column, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield some rows at a time with the number of the first; of sequences, entries one after another.

    The bytes of all blocks but the last are a multiple of this number.
    """
    rows: Column = column
    if isinstance(column, Ragged):
        rows = column.values.index_select(
            0, places(column, torch.arange(len(column)).to(column.start.device))
        )
    total, size = len(rows), max(1, row_bytes(rows))
    step = multiple // math.gcd(multiple, size)
    step *= max(1, BLOCK_BYTES // (size * step))
    for start in range(0, total, step):
        end = min(start + step, total)
        yield start, rows[start:end] if isinstance(rows, Tensor) else read(rows, torch.arange(start, end))


def room(column: Column, rows: int) -> Tensor | Ragged:
    """Return memory for so many rows like these, and of sequences for as many entries as a power of two."""
    if isinstance(column, Ragged):
        entries = 1 << max(0, len(column.values) - 1).bit_length()
        start, length = (t.new_zeros(rows) for t in (column.start, column.length))
        return replace(column, values=_zeros(column.values, entries), start=start, length=length)
    return _zeros(column, rows)


def _zeros(column: Tensor | Mapped, rows: int) -> Tensor:
    return torch.zeros(rows, *column.shape[1:], dtype=column.dtype, device=home(column))


def fits(place: Column, column: Column) -> bool:
    """Return whether there is room for the rows of a column."""
    enough = len(column) <= len(place)
    if isinstance(place, Ragged) and isinstance(column, Ragged):
        return enough and len(column.values) <= len(place.values)
    return enough


def fill(place: Column, column: Column) -> None:
    """Copy the rows of a column to where there is room for them."""
    if isinstance(place, Ragged) and isinstance(column, Ragged):
        for to, values in zip(
            (place.values, place.start, place.length), (column.values, column.start, column.length)
        ):
            to[: len(values)].copy_(values)
    elif isinstance(place, Tensor) and isinstance(column, Tensor):
        place[: len(column)].copy_(column)
