"""What the arrays of a known archive must be, so that a file of another form is refused and not misread."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.core import check
from partita.data.readers import read_npz

KINDS = {"numbers": "biuf", "whole numbers": "iu", "True and False": "b", "words": "U"}


class Form(NamedTuple):
    """One array of an archive.

    holds   one of KINDS
    rows    arrays with the same word have as many rows, at least one
    axes    how many it has (None: two or more)
    places  values are from 0 up to the last row of this array
    """

    holds: str
    rows: str
    axes: int | None = 1
    places: str = ""


def labels(rows: str = "sample") -> Form:
    """Return the form of a class for each row."""
    return Form("whole numbers", rows)


def read_forms(path: str | PathLike[str], **forms: Form) -> dict[str, NDArray[Any]]:
    """Return the arrays of an archive, each of its form."""
    arrays = read_npz(path, forms)
    lengths: dict[str, int] = {}
    for key, form in forms.items():
        reason = _wrong(arrays[key], form)
        if not reason and len(arrays[key]) != lengths.setdefault(form.rows, len(arrays[key])):
            reason = f"{lengths[form.rows]} rows, one for each {form.rows}"
        if reason:
            raise _refusal(path, key, arrays[key], reason)
    for key, form in forms.items():
        if form.places:
            within(path, arrays, key, high=len(arrays[form.places]) - 1)
    return arrays


def within(path: str | PathLike[str], arrays: Mapping[str, NDArray[Any]], key: str, high: int) -> None:
    """Refuse values that are no places in something."""
    values = arrays[key]
    if values.size and (values.min() < 0 or values.max() > high):
        raise _refusal(path, key, values, f"values from 0 to {high}")


def same_shape(path: str | PathLike[str], arrays: Mapping[str, NDArray[Any]], key: str, other: str) -> None:
    """Refuse rows of two shapes."""
    if arrays[key].shape[1:] != arrays[other].shape[1:]:
        raise _refusal(
            path, key, arrays[key], f"rows of shape {list(arrays[other].shape[1:])} as {other} has"
        )


def _wrong(values: NDArray[Any], form: Form) -> str:
    """Return what the array should be, if it is not that."""
    axes = f"{form.axes} axes" if form.axes is not None else "two axes or more"
    fits = values.ndim == form.axes if form.axes is not None else values.ndim >= 2
    if values.dtype.kind not in KINDS[form.holds] or not fits or not values.size:
        return f"{form.holds} in {axes.replace('1 axes', '1 axis')}, and not none"
    if values.dtype.kind == "u" and values.max() > check.LARGEST:
        return f"whole numbers up to {check.LARGEST}"
    return ""


def _refusal(path: str | PathLike[str], key: str, values: NDArray[Any], allowed: str) -> ValueError:
    got = f"{values.dtype} of shape {list(values.shape)}"
    return check.fail("path", str(path), f"an archive whose {key!r} has {allowed}; it has {got}")


def refuse(path: str | PathLike[str], allowed: str) -> ValueError:
    """Return the error of an archive whose arrays do not fit together."""
    return check.fail("path", str(path), f"an archive with {allowed}")


def increasing(values: NDArray[np.integer[Any]]) -> bool:
    """Return whether no value is below the one before."""
    return bool((values[1:] >= values[:-1]).all())
