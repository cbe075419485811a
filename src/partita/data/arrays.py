"""What users pass becomes tensors: of the few dtypes that the library stores, and finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from partita.core import check
from partita.data import columns
from partita.data.columns import Column, Columns, Ragged
from partita.data.mapped import FilePart, Mapped, not_writable
from partita.data.padding import MASKS, SEQUENCES

IntArray = NDArray[np.int64]

IGNORED = -100  # the label of positions that do not count
TEXT = "numbers (encode text as integers first)"
ADVICE = {  # by the kind of a NumPy dtype
    "c": "real numbers: real and imaginary part as two features, for example",
    "O": f"{TEXT} of one type: fill in what is missing, then astype('float32') or astype('int64')",
    "V": "a plain array: numpy.lib.recfunctions.structured_to_unstructured makes one of named columns",
    "M": "numbers: days or seconds since some moment, for example",
    "m": "numbers: astype('float64') gives how many of its unit",
}
KINDS: tuple[tuple[Any, Any], ...] = (  # of objects, and the dtypes that hold them
    (bool | np.bool_, np.bool_),
    (Integral, np.int64),
    (Real | np.bool_, np.float64),
    (str, np.str_),
)


def features(values: Any, *, single: bool = False, field: str = "x") -> Columns:
    """Return x as it is stored: uint8 images, int32 or int64 ids, float32 or float64 numbers.

    A dictionary of arrays, or a tuple of them, are several inputs. Among these booleans stay what they are,
    since they are masks, and uint8 is an image only with three axes or more. A list of arrays that differ in
    length is a column of sequences, and so are those of a dictionary that are `sequences` by their form.
    `single`: float64 of a tensor only, since NumPy and pandas hand it over unasked.
    """
    if not is_several(values):
        return column(field, values, single=single)
    if not values:
        raise check.fail(field, values, "at least one input")
    if isinstance(values, Mapping):
        strange = next((name for name in values if not isinstance(name, str)), None)
        if strange is not None:
            raise check.fail(f"{field}: a name of an input", strange, "the names of the model's arguments")
        lengths = sequences(values)
        return {
            n: column(f"{field}[{n!r}]", v, lengths.get(n), single=single, several=True)
            for n, v in values.items()
        }
    return tuple([column(f"{field}[{i}]", v, single=single, several=True) for i, v in enumerate(values)])


def is_several(values: Any) -> bool:
    """Return whether they are several inputs: a dictionary, or a tuple with an array or a column in it.

    A list, and a tuple of numbers or lists, are the rows of one.
    """
    return isinstance(values, Mapping) or (isinstance(values, tuple) and any(map(_is_array, values)))


def _is_array(values: Any) -> bool:
    kept = isinstance(values, Column)
    return kept or (hasattr(values, "__array__") and getattr(values, "ndim", 1) > 0)


def column(
    field: str, values: Any, lengths: Tensor | None = None, *, single: bool = False, several: bool = False
) -> Column:
    """Return one input as it is stored; `several` says that it is one of them. See `features`.

    `lengths` are those of sequences, where it is known that they are such.
    """
    if isinstance(values, Ragged | Mapped):
        return values
    if isinstance(values, np.memmap) and (mapped := _mapped(field, values, single, several)) is not None:
        return mapped
    if (lengths := different_lengths(values) if lengths is None else lengths) is not None:
        entries = _entries(field, values, lengths)
        stored = column(field, entries, single=single, several=True)
        assert isinstance(stored, Tensor)
        return Ragged.of(stored, lengths)
    x = _tensor(field, values, single)
    if several and x.dtype == torch.bool:
        return x
    if x.dtype == torch.uint8 and several and x.ndim < 3:
        return x.to(torch.int32)
    if x.dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64):
        return x
    if x.dtype in (torch.int8, torch.int16, torch.uint16):
        return x.to(torch.int32)
    if x.dtype in (torch.uint32, torch.uint64):
        return x.to(torch.int64)
    return x.to(torch.float32)


def _mapped(field: str, values: np.memmap[Any, Any], single: bool, several: bool) -> Mapped | None:
    """Return rows of a file as they are there; None where torch cannot read them so."""
    first = column(field, np.array(values[:1]), single=single, several=several)  # refuses what is no number
    try:
        tensor = not_writable(values)
    except (TypeError, ValueError):  # another order of bytes, or of rows
        return None
    return Mapped(tensor, torch.arange(len(tensor)), first.dtype, FilePart.of(values))


def padded_with(x: Columns, pad: Any) -> Columns:
    """Return sequences with the value that pads them: one for all, or by the names or places of inputs."""
    sequences = [name for name, column in columns.named(x) if isinstance(column, Ragged)]
    if isinstance(pad, Mapping):
        values = {f"x[{name!r}]": check.number(f"pad[{name!r}]", value) for name, value in pad.items()}
        for name in values:
            if name not in sequences:
                raise check.fail(
                    "pad", name, f"names of sequences: {', '.join(sequences) or 'there are none'}"
                )
    else:
        value = check.number("pad", pad)
        if value and len(sequences) > 1:
            allowed = f"a value for each of {', '.join(sequences)}, such as {{'input_ids': {pad}}}"
            raise check.fail("pad", pad, allowed)
        values = dict.fromkeys(sequences, value)

    def padded_column(name: str, column: Column) -> Column:
        if not isinstance(column, Ragged) or name not in values:
            return column
        if not column.dtype.is_floating_point and not values[name].is_integer():
            raise check.fail("pad", values[name], f"a whole number, as {name} has")
        return replace(column, pad=values[name])

    return columns.each_named(padded_column, x)


def different_lengths(values: Any) -> Tensor | None:
    """Return the length of each sequence, where they are sequences of different lengths, else None."""
    lengths = _lengths(values)
    return torch.tensor(lengths) if len(set(lengths)) > 1 else None


def sequences(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the lengths of the inputs that are sequences by their form, whether they differ or not.

    Lists of ids are, and lists under one of the names that masks belong to, so that it is no matter of chance
    whether a model gets a mask. Where one is given, the form does not matter.
    """
    if any(name in MASKS for name in inputs):
        return {}
    found = {}
    for name, values in inputs.items():
        lengths = _lengths(values)
        if lengths and all(lengths) and (name in SEQUENCES or all(map(_is_ids, values))):
            found[name] = torch.tensor(lengths)
    return found


def _lengths(values: Any) -> list[int]:
    """Return the length of each sequence; nothing where it is no list of sequences."""
    listed = isinstance(values, list | tuple)
    objects = str(getattr(values, "dtype", "")) == "object" and getattr(values, "ndim", 0) == 1
    return [len(v) for v in values] if (listed or objects) and all(map(_is_sequence, values)) else []


def _is_sequence(values: Any) -> bool:
    return isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0


def _is_ids(values: Any) -> bool:
    """Return whether a sequence has whole numbers for its entries."""
    if isinstance(values, list | tuple):
        return all(isinstance(v, Integral) and not isinstance(v, bool) for v in values)
    if isinstance(values, Tensor):
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    else:
        whole = np.asarray(values).dtype.kind in "iu"
    return whole and values.ndim == 1


def _entries(field: str, values: Any, lengths: Tensor) -> Tensor | NDArray[Any]:
    """Return the entries of all sequences one after another."""
    if not bool(lengths.all()):
        row = int((lengths == 0).nonzero()[0])
        raise check.fail(f"length of {field}[{row}]", 0, "sequences of at least one entry")
    rows = list(values)
    try:
        if all(isinstance(v, Tensor) for v in rows):
            return torch.cat(rows)
        parts = [v.detach().cpu().numpy() if isinstance(v, Tensor) else dense(field, v) for v in rows]
        entries = np.concatenate(parts)
    except (ValueError, TypeError, RuntimeError) as error:
        allowed = f"sequences of entries of one kind and one shape ({check.reason(error)})"
        raise check.fail(field, "sequences that do not fit together", allowed) from None
    arrays = any(isinstance(v, Tensor | np.ndarray) for v in rows)
    return _cast(field, entries, np.float32) if entries.dtype == np.float64 and not arrays else entries


def targets(values: Any, *, single: bool = False) -> Tensor | Ragged:
    """Return y as it is stored: int64 labels, float32 or float64 numbers; `single` as for `features`.

    Lists of different lengths are labels of positions.
    """
    if isinstance(values, Ragged):
        return values
    if (lengths := different_lengths(values)) is not None:
        entries = _tensor("y", _entries("y", values, lengths))
        if entries.is_floating_point():
            allowed = "labels (whole numbers), or as many numbers for each sample: padding would count"
            raise check.fail("y", "sequences of real numbers", allowed)
        return Ragged.of(entries.to(torch.int64), lengths, IGNORED)
    y = _tensor("y", values, single)
    if not y.is_floating_point():
        return y.to(torch.int64)
    return y if y.dtype == torch.float64 else y.to(torch.float32)


def padded(y: Tensor | Ragged) -> tuple[Tensor, Tensor | None]:
    """Return targets of one shape, with the lengths that they had where labels of positions are padded."""
    if isinstance(y, Tensor):
        return y, None
    return columns.read(replace(y, fixed=True), torch.arange(len(y))), y.length


def same_rows(x: Columns, y: Column) -> int:
    """Return how many rows there are; refuse columns of which one has more than another."""
    (first, column), *others = columns.named(x)
    rows = len(column)
    for name, other in (*others, ("y", y)):
        if len(other) != rows:
            raise check.fail(f"rows of {name}", len(other), f"{rows}, as many as {first}")
    return rows


def labels(values: Any) -> tuple[Tensor | Ragged, list[str]]:
    """Return y as it is stored, and the names of classes that were given as words: 0, 1, ... as sorted."""
    if isinstance(values, Tensor | Ragged) or different_lengths(values) is not None:
        return targets(values), []
    y = dense("y", values)
    if y.dtype.kind == "S":
        y = np.char.decode(y)
    if _is_column(values) and y.dtype.kind in "biuU":
        y = y.reshape(-1)
    if y.dtype.kind != "U" or y.ndim != 1:
        return targets(y if _is_column(values) else values, single=True), []
    strange = next((v for v in values if not isinstance(v, str)), None) if isinstance(values, list) else None
    if strange is not None:  # NumPy would spell it out
        raise check.fail("y", strange, "all labels as words, or all as numbers")
    names, places = np.unique(y, return_inverse=True)
    return torch.from_numpy(places.astype(np.int64)), [str(name) for name in names]


def decode(x: Tensor) -> Tensor:
    """Return stored features as a model takes them: images in [0, 1], ids as int64."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32).div_(255)
    return x.to(torch.int64) if x.dtype == torch.int32 else x


def stack(field: str, values: Iterable[Any], dtype: str | None = None) -> Tensor:
    """Return samples (numbers, lists, arrays, tensors, images) as one tensor; colours come first."""
    items = [v if isinstance(v, Tensor) else _sample(field, v) for v in values]
    try:
        if items and isinstance(items[0], Tensor):
            return torch.stack(items)
        array = np.stack(items) if items else np.zeros(0)
    except (ValueError, TypeError, RuntimeError) as error:
        shapes = list(dict.fromkeys(str(list(np.shape(i))) for i in items))
        raise check.fail(
            f"shapes of {field}", ", ".join(shapes[:3]), f"samples of one kind and one shape ({error})"
        ) from None
    if dtype is not None and array.dtype.kind in "biuf":
        array = array.astype(dtype)
    return _tensor(field, _cast(field, array, np.float32) if array.dtype == np.float64 else array)


def ids(field: str, values: Any) -> NDArray[Any]:
    """Return the ids of rows: whole numbers or strings, one for each."""
    _refuse_masked(field, values)
    try:
        rows = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:  # lists of different lengths
        raise check.fail(field, values, "a whole number or a string for each row") from None
    rows = _of_one_kind(rows.reshape(-1) if _is_column(values) else rows)
    if rows.dtype.kind == "f" and np.isfinite(rows).all() and (rows == np.rint(rows)).all():
        rows = rows.astype(np.int64)  # pandas makes floats of whole numbers where a value was missing
    if rows.dtype.kind == "S":
        rows = np.char.decode(rows)
    if rows.dtype.kind == "U" and isinstance(values, list | tuple):  # NumPy would spell out a NaN
        strange = next((i for i in values if not isinstance(i, str | Integral)), None)
        if strange is not None:
            raise check.fail(field, strange, "a whole number or a string for each row")
    if rows.ndim != 1 or rows.dtype.kind not in "iuU":
        raise check.fail(field, values, "a whole number or a string for each row")
    return rows


def finite(field: str, values: Column, client: Callable[[int], str]) -> None:
    """Refuse NaN and infinity, and say in which row of which client."""
    if not values.dtype.is_floating_point:
        return
    for start, block in columns.blocks(values):
        if bool(torch.isfinite(block).all()):
            continue
        flat = block.reshape(len(block), -1)
        bad = ~torch.isfinite(flat)
        first = int(bad.any(1).nonzero()[0])
        row = start + first
        if isinstance(values, Ragged):
            row = int(torch.searchsorted(values.length.cumsum(0).cpu(), row, right=True))
        raise check.fail(
            f"{field}[{row}] of {client(row)}", float(flat[first][bad[first]][0]), "finite numbers"
        )


def covered(ranges: IntArray, rows: int) -> NDArray[np.bool_]:
    """Return which of so many rows lie in one of the ranges (start, length), which may lead beyond them."""
    begins, ends = (
        np.bincount(np.minimum(place, rows), minlength=rows + 1) for place in (ranges[:, 0], ranges.sum(1))
    )
    inside: NDArray[np.bool_] = np.cumsum(begins - ends)[:rows] > 0
    return inside


def dense(field: str, values: Any) -> NDArray[Any]:
    """Return what is no tensor as an array; refuse what would lose a mask or its zeros."""
    _refuse_masked(field, values)
    if isinstance(values, DataLoader | Dataset):
        allowed = "an array with a row of each sample; from_datasets takes a Dataset for each client"
        raise check.fail(field, type(values).__name__, f"{allowed}, such as {{'ann': loader.dataset}}")
    if hasattr(values, "toarray") and hasattr(values, "nnz"):  # of SciPy
        raise check.fail(field, type(values).__name__, "a dense array, such as its toarray()")
    try:
        return _of_one_kind(np.asarray(values))
    except ValueError as error:
        raise check.fail(field, values, f"rows of one shape ({error})") from None


def _of_one_kind(array: NDArray[Any]) -> NDArray[Any]:
    """Return objects that are all booleans, numbers or words as such: pandas hands over objects."""
    if array.dtype != object or not array.size:
        return array
    found = set(map(type, array.flat))
    for kinds, dtype in KINDS:
        if all(issubclass(kind, kinds) for kind in found):
            try:
                return array.astype(dtype)
            except OverflowError:  # whole numbers beyond int64
                return array
    return array


def _is_column(values: Any) -> bool:
    """Return whether it is a table of pandas with a single column."""
    return hasattr(values, "columns") and np.ndim(values) == 2 and np.shape(values)[1] == 1


def _sample(field: str, value: Any) -> Any:
    array = dense(field, value)
    image = hasattr(value, "mode") and array.ndim == 3  # a colour image of PIL: height, width, colour
    return np.moveaxis(array, -1, 0) if image else array


def _tensor(field: str, values: Any, single: bool = False) -> Tensor:
    if not isinstance(values, Tensor):
        array = dense(field, values)
        if array.dtype.kind not in "biuf":
            advice = ADVICE.get(array.dtype.kind, TEXT)
            raise check.fail(f"dtype of {field}", str(array.dtype), advice)
        dtype = np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}")  # in this machine's order of bytes
        if array.dtype == np.float64 and not isinstance(values, np.ndarray):
            _refuse_large(field, values, array)
            dtype = np.dtype(np.float32)  # a list of numbers asks for no precision
        elif array.dtype.kind == "f" and array.dtype.itemsize >= 8:
            dtype = np.dtype(np.float32 if single else np.float64)
        values = torch.from_numpy(np.require(_cast(field, array, dtype), dtype, ["C", "W"]))
    if values.layout != torch.strided or values.is_nested:
        what = "a nested tensor" if values.is_nested else str(values.layout)
        raise check.fail(field, what, "a dense tensor, such as its to_dense() or to_padded_tensor(0)")
    if values.is_meta or values.is_quantized:
        what = "a tensor without numbers (device meta)" if values.is_meta else str(values.dtype)
        raise check.fail(field, what, "a tensor with its numbers, such as dequantize() gives")
    if values.dtype == torch.uint64 and bool((values.view(torch.int64) < 0).any()):
        row = int((values.view(torch.int64) < 0).reshape(len(values), -1).any(1).nonzero()[0])
        largest = max(values[row].reshape(-1).tolist())
        raise check.fail(
            f"{field}[{row}]", largest, f"whole numbers up to {check.LARGEST}, the largest of int64"
        )
    if values.dtype.is_complex or values.ndim == 0:
        raise check.fail(field, f"{values.dtype} with {values.ndim} axes", "real numbers, one row per sample")
    tensor: Tensor = values.detach().cpu()
    return tensor


def _refuse_masked(field: str, values: Any) -> None:
    """Refuse masked entries of an array or a list: as numbers they are what lies under the mask."""
    if _masked(values):
        raise check.fail(
            field, "masked entries", "all entries: fill them in, such as values.filled(0), or drop those rows"
        )


def _masked(values: Any) -> bool:
    if isinstance(values, np.ma.MaskedArray):
        return bool(np.ma.is_masked(values))
    if not isinstance(values, list | tuple):
        return False
    inside = any(issubclass(kind, list | tuple | np.ma.MaskedArray) for kind in set(map(type, values)))
    return inside and any(map(_masked, values))


def _refuse_large(field: str, values: Any, array: NDArray[Any]) -> None:
    """Refuse a list with whole numbers beyond int64, which NumPy has rounded."""
    if np.abs(array).max(initial=0) < 2.0**63:
        return
    for v in np.asarray(values, dtype=object).flat:
        if isinstance(v, Integral) and abs(int(v)) > check.LARGEST:
            raise check.fail(field, v, f"whole numbers up to {check.LARGEST}, the largest of int64")


def _cast(field: str, array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return the array in another dtype, if that can hold its numbers."""
    if array.dtype.kind != "f" or np.dtype(dtype).itemsize >= array.dtype.itemsize:
        return array
    with np.errstate(over="ignore"):
        cast: NDArray[Any] = array.astype(dtype)
    lost = np.isinf(cast) & np.isfinite(array)
    if lost.any():
        place = tuple(np.argwhere(lost)[0].tolist())
        most = f"{np.finfo(dtype).max:.1e}"
        wider = "; scale them, or give a tensor of float64" if np.dtype(dtype) == np.float32 else ""
        allowed = f"numbers up to {most}, the largest of {np.dtype(dtype)}{wider}"
        raise check.fail(f"{field}[{place[0]}]", str(array[place]), allowed)
    return cast
