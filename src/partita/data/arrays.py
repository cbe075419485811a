"""What users pass becomes tensors: of the few dtypes that the library stores, and finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita import check

IntArray = NDArray[np.int64]


def features(values: Any) -> Tensor:
    """x as it is stored: uint8 images, int32 or int64 ids, float32 or float64 numbers."""
    x = _tensor("x", values)
    if x.dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64):
        return x
    if x.dtype in (torch.int8, torch.int16, torch.uint16):
        return x.to(torch.int32)
    if x.dtype in (torch.uint32, torch.uint64):
        return x.to(torch.int64)
    return x.to(torch.float32)


def targets(values: Any) -> Tensor:
    """y as it is stored: int64 labels, float32 or float64 numbers."""
    y = _tensor("y", values)
    if not y.is_floating_point():
        return y.to(torch.int64)
    return y if y.dtype == torch.float64 else y.to(torch.float32)


def decode(x: Tensor) -> Tensor:
    """Stored features as a model takes them: images in [0, 1], ids as int64."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32).div_(255)
    return x.to(torch.int64) if x.dtype == torch.int32 else x


def stack(field: str, values: Iterable[Any], dtype: str | None = None) -> Tensor:
    """Samples one by one (numbers, lists, arrays, tensors, images) as one tensor; colours come first."""
    items = [v if isinstance(v, Tensor) else _sample(v) for v in values]
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
    return _tensor(field, array.astype(np.float32) if array.dtype == np.float64 else array)


def ids(field: str, values: Any) -> NDArray[Any]:
    """Ids of rows: whole numbers or strings, one for each."""
    try:
        found = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:  # lists of different lengths
        raise check.fail(field, values, "a whole number or a string for each row") from None
    if found.dtype == object and all(isinstance(i, str) for i in found.flat):
        found = found.astype(str)
    if found.ndim != 1 or found.dtype.kind not in "iuU":
        raise check.fail(field, values, "a whole number or a string for each row")
    return found


def finite(field: str, values: Tensor, client: Callable[[int], str]) -> None:
    """Refuses NaN and infinity, and says in which row of which client."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    flat = values.reshape(len(values), -1)
    bad = ~torch.isfinite(flat)
    row = int(bad.any(1).nonzero()[0])
    raise check.fail(f"{field}[{row}] of {client(row)}", float(flat[row][bad[row]][0]), "finite numbers")


def covered(ranges: IntArray, rows: int) -> NDArray[np.bool_]:
    """Which rows lie in one of the ranges (start, length)."""
    begins = np.bincount(ranges[:, 0], minlength=rows + 1)
    ends = np.bincount(ranges.sum(1), minlength=rows + 1)
    inside: NDArray[np.bool_] = np.cumsum(begins - ends)[:rows] > 0
    return inside


def _sample(value: Any) -> Any:
    array = np.asarray(value)
    image = hasattr(value, "mode") and array.ndim == 3  # a colour image of PIL: height, width, colour
    return np.moveaxis(array, -1, 0) if image else array


def _tensor(field: str, values: Any) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise check.fail(field, values, f"rows of one shape ({error})") from None
        if array.dtype.kind not in "biuf":
            raise check.fail(f"dtype of {field}", str(array.dtype), "numbers (encode text as integers first)")
        dtype = array.dtype.newbyteorder("=")
        if array.dtype == np.float64 and not isinstance(values, np.ndarray):
            dtype = np.dtype(np.float32)  # a list of numbers asks for no precision
        elif array.dtype.itemsize > 8:
            dtype = np.dtype(np.float64)
        values = torch.from_numpy(np.require(array, dtype, ["C", "W"]))
    if values.layout != torch.strided:
        raise check.fail(field, str(values.layout), "a dense tensor, such as its to_dense()")
    if values.dtype.is_complex or values.ndim == 0:
        raise check.fail(field, f"{values.dtype} with {values.ndim} axes", "real numbers, one row per sample")
    tensor: Tensor = values.detach().cpu()
    return tensor
