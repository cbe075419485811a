"""Federated data from arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import check, draws
from partita.data import arrays, columns
from partita.data.arrays import IntArray
from partita.data.columns import Ragged
from partita.data.federated import SPLITS, FederatedData
from partita.data.validation import SHARE, Mask, fraction, validated

Partition = Callable[[NDArray[Any], int, np.random.Generator], Sequence[IntArray]]


def from_arrays(
    x: Any,
    y: Any,
    client: Any,
    *,
    test: Any = 0.2,
    validation: Any = SHARE,
    names: Sequence[str] | None = None,
    pad: float | Mapping[str | int, float] = 0,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> FederatedData:
    """Return data whose rows say which client they belong to.

    x, y and `client` are arrays, tensors, lists, or tables and columns of pandas. Labels may be words: they
    become the classes 0, 1, ... in sorted order, and `source["classes"]` has them.
    A model with several inputs has for x a dictionary of arrays, by the names of its arguments, or a tuple of
    arrays, each with a row of every sample. A list of arrays of different lengths is a column of sequences,
    and so is a list of ids in a dictionary: a batch pads them with `pad` (a number, or one by the name of
    each input) to its longest one, labels of positions with −100, and a model that takes an `attention_mask`
    gets one with its dictionary. An array that is mapped into memory (`numpy.load(path, mmap_mode="r")`)
    stays in its file.
    `client` has an id per row, whole numbers or strings; clients come in the order of their sorted ids, and
    `names` may name them in that order. `test` is a boolean per row, or the fraction of each client's rows
    that is drawn for its test: at least one row of a client with two, and never all. `validation` is a
    boolean per row too, or the fraction of each client's training rows that is held out, stratified by class
    where y has classes (0: none); test rows do not depend on that fraction.

    >>> from_arrays(x, y, client=["ann", "ann", "bob"], test=0.5)
    >>> from_arrays({"input_ids": ids, "attention_mask": mask}, y, client=["ann", "ann", "bob"])
    """
    x, (y, classes) = arrays.padded_with(arrays.features(x, single=True), pad), arrays.labels(y)
    rows = len(columns.listed(x)[0])
    if not rows:
        raise check.fail("rows of x", 0, "at least one sample")
    ids, owner = np.unique(arrays.ids("client", client), return_inverse=True)
    if len(owner) != rows:
        raise check.fail("ids in client", len(owner), f"{rows}, one for each row of x")
    if names is not None and (not _is_list(names) or len(names) != len(ids)):
        raise check.fail("names", names, f"{len(ids)} names, one for each client")
    return assemble(
        x,
        y,
        owner,
        [str(i) for i in ids] if names is None else names,
        test=test,
        validation=validation,
        seed=seed,
        source={**(source or {"name": "from_arrays"}), **({"classes": classes} if classes else {})},
    )


def split(
    x: Any,
    y: Any,
    clients: int,
    partition: Partition,
    *,
    test: Any = 0.2,
    validation: Any = SHARE,
    pad: float | Mapping[str | int, float] = 0,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> FederatedData:
    """Return data without clients dealt to a number of them, for example by `dirichlet(0.1)`.

    x, y, `test`, `validation` and `pad` are those of `from_arrays`.
    """
    x, (y, classes) = arrays.padded_with(arrays.features(x, single=True), pad), arrays.labels(y)
    owner = owners(partition, y, clients, seed)
    source = {**(source or {"name": "split"}), "clients": clients, "partition": describe(partition)}
    source |= {"classes": classes} if classes else {}
    names = numbered(clients)
    return assemble(x, y, owner, names, test=test, validation=validation, seed=seed, source=source)


@dataclass
class Rows:
    """Samples that are collected client by client: blocks of x and y, and of each row whose it is."""

    x: list[Any] = field(default_factory=list)
    y: list[Any] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    split: list[str] = field(default_factory=list)

    def add(self, client: int, x: Any, y: Any, split: str) -> None:
        """Add some samples of a client, for one of its splits."""
        if n := len(y):
            self.x.append(x)
            self.y.append(y)
            self.owner += [client] * n
            self.split += [split] * n

    def assembled(
        self,
        x: Any,
        y: Any,
        names: Sequence[str],
        source: Mapping[str, Any],
        *,
        test: Any,
        validation: Any,
        seed: int,
    ) -> FederatedData:
        """Return the data of the joined blocks; None for a split: its samples are those added as such."""
        owner, split = np.array(self.owner, dtype=np.int64), np.array(self.split)
        test = split == "test" if test is None else test
        validation = split == "validation" if validation is None else validation
        return assemble(x, y, owner, names, test=test, validation=validation, seed=seed, source=source)


def numbered(clients: int) -> list[str]:
    """Return the names of clients that have only numbers."""
    return [str(i) for i in range(clients)]


def assemble(
    x: Any,
    y: Any,
    owner: IntArray,
    names: Sequence[str],
    *,
    test: Any,
    validation: Any,
    seed: int,
    source: Mapping[str, Any] | None = None,
) -> FederatedData:
    """Return rows sorted by client, and in a client by split; `owner` is the client of each row, −1 for none.

    A mask marks rows first; fractions are of the rows that no mask has marked, those of test before those of
    validation.
    """
    x, y = arrays.features(x, single=True), arrays.targets(y, single=True)
    rows, clients = arrays.same_rows(x, y), len(names)

    def client(row: int) -> str:
        return f"client {names[owner[row]]!r}" if owner[row] >= 0 else "no client"

    for name, column in (*columns.named(x), ("y", y)):
        arrays.finite(name, column, client)  # while rows have the numbers that the user knows
    source = dict(source or {})
    split = np.zeros(rows, dtype=np.int8)  # by the places in SPLITS
    given = {"test": test, "validation": validation}
    drawn = {name: fraction(name, value) for name, value in given.items() if np.ndim(value) == 0}
    for name in [name for name in given if name not in drawn]:
        mask = _mask(name, given[name], rows)
        if (split[mask] > 0).any():
            row = int((mask & (split > 0)).argmax())
            raise check.fail("validation", f"row {row}", "rows that are not for testing")
        split[mask] = SPLITS.index(name)
    classes = y.numpy() if isinstance(y, Tensor) else np.zeros((rows, 0))
    for name in drawn:
        free = np.where(split == 0, owner, -1)
        draw = held_out if name == "test" else partial(_validated, classes)
        split[draw(free, clients, drawn[name], seed)] = SPLITS.index(name)
        if name == "test" or drawn[name]:
            source |= {name: drawn[name], "seed": seed}
    order = np.lexsort((split, owner))
    order = order[np.searchsorted(owner[order], 0) :]
    sizes = np.bincount(3 * owner[order] + split[order], minlength=3 * clients)
    ranges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1).reshape(clients, 3, 2)
    chosen = torch.from_numpy(order)
    x, y = columns.each(lambda column: columns.select(column, chosen), x), columns.select(y, chosen)
    train, validation, test = ranges.transpose(1, 0, 2)
    return FederatedData.make(x, y, train, test, validation=validation, names=names, source=source)


def _mask(field: str, values: Any, rows: int) -> Mask:
    mask = values.cpu().numpy() if isinstance(values, Tensor) else arrays.dense(field, values)
    if mask.dtype != np.bool_ or mask.shape != (rows,):
        got = f"{mask.dtype} {list(mask.shape)}"
        raise check.fail(field, got, f"a fraction, or a boolean for each of the {rows} rows")
    return mask


def held_out(owner: IntArray, clients: int, share: float, seed: int) -> Mask:
    """Return which rows are for testing: a share of each client's, at least one of two and never all."""
    share = fraction("test", share)
    check.integer("seed", seed, low=0)
    mask = np.zeros(len(owner), dtype=np.bool_)
    for i, rows in enumerate(_by_client(owner, clients)):
        if share > 0 and len(rows) > 1:
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            mask[draws.generator(seed, "test-split", i).permutation(rows)[:count]] = True
    return mask


def _validated(y: NDArray[Any], owner: IntArray, clients: int, share: float, seed: int) -> Mask:
    """Return which rows are for validation."""
    check.integer("seed", seed, low=0)
    mask = np.zeros(len(owner), dtype=np.bool_)
    if share > 0:
        for i, rows in enumerate(_by_client(owner, clients)):
            mask[rows] = validated(y[rows], share, seed, i)
    return mask


def _by_client(owner: IntArray, clients: int) -> list[IntArray]:
    """Return the rows of each client, in their order."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]


def owners(partition: Partition, targets: Tensor | Ragged, clients: int, seed: int) -> IntArray:
    """Return the client of each row, −1 for none, by a partitioner that may be the user's own."""
    check.integer("clients", clients, low=1)
    check.integer("seed", seed, low=0)
    y, _ = arrays.padded(targets)
    check.takes("partition", partition, 3, "iid(), dirichlet(alpha), ... or (y, clients, rng) -> rows")
    parts = partition(y.numpy(), clients, draws.generator(seed, "partition"))
    if not _is_list(parts) or len(parts) != clients or not all(map(_is_list, parts)):
        raise check.fail("partition", partition, f"a function that returns {clients} lists of rows")
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    if len(np.unique(rows)) != len(rows):
        raise check.fail("partition", partition, f"{clients} lists of rows, no row twice")
    if len(rows) and (rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(y)):
        raise check.fail("partition", partition, f"row numbers from 0 to {len(y) - 1}")
    owner = np.full(len(y), -1, dtype=np.int64)
    owner[rows] = np.repeat(np.arange(clients), [len(p) for p in parts])
    return owner


def describe(partition: Any) -> dict[str, Any]:
    """Return a partitioner in JSON terms."""
    if hasattr(partition, "options"):
        return {"name": partition.name, **partition.options}
    return {"name": getattr(partition, "__name__", type(partition).__name__)}


def _is_list(values: Any) -> bool:
    """Return whether it is a list, a tuple, an array or a tensor, and not one string."""
    kinds = isinstance(values, Sequence | np.ndarray | Tensor) and not isinstance(values, str)
    return kinds and getattr(values, "ndim", 1) > 0
