"""The data of all clients in two flat tensors, and for each client a range of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.core import check, notebook
from partita.core.types import Inputs
from partita.data import arrays, columns
from partita.data.arrays import IntArray
from partita.data.columns import Column, Columns, Ragged
from partita.data.padding import MASKS, mask_for, masked_input
from partita.data.population import SPLITS as SPLITS
from partita.data.population import Population, chosen_clients, client_names
from partita.data.summary import described, fingerprint
from partita.data.validation import SHARE, fraction, validated


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """Samples of many clients.

    `x` and `y` hold the rows of all clients; client i has the rows start .. start + length − 1 with
    (start, length) = `train[i]`, and likewise `validation[i]` and `test[i]`. Ranges may overlap: clients may
    share a pool, and any of them may be empty. Images are stored as uint8 and ids as int32 if they came so,
    and reach the model as float32 in [0, 1] and int64. A model with several inputs has a tuple or a
    dictionary of them for x; sequences of different lengths are `Ragged`, and `lengths` are those of labels
    for each position, which are padded with −100.

    mask         names the input that tells entries from padding, where it is made
    computes_on  is the device that computes, where samples are kept elsewhere: rows are sent as they are
                 asked for
    source       says in JSON terms how the data were made
    scaling      are the mean and the deviation by which `standardize` has scaled each input

    Build it with `from_arrays`, `split` or a reader; `FederatedData.make` is for ranges of your own.
    """

    x: Columns
    y: Tensor
    train: IntArray
    validation: IntArray
    test: IntArray
    names: Sequence[str]
    source: dict[str, Any]
    scaling: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    lengths: Tensor | None = None
    mask: str = ""
    computes_on: torch.device | None = None

    @classmethod
    def make(
        cls,
        x: Any,
        y: Any,
        train: Any,
        test: Any = None,
        *,
        validation: Any = None,
        names: Sequence[str] | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> FederatedData:
        """Return checked data from rows and ranges; a split that is None is empty for all clients."""
        x, target = arrays.features(x), arrays.targets(y)
        rows, (y, lengths) = arrays.same_rows(x, target), arrays.padded(target)
        train = _ranges("train", train)
        if len(train) == 0:
            raise check.fail("clients", 0, "at least one client")
        validation, test = (
            np.zeros(train.shape, dtype=np.int64) if ranges is None else _ranges(split, ranges)
            for split, ranges in (("validation", validation), ("test", test))
        )
        names = client_names(names, len(train))
        for split, ranges in zip(SPLITS, (train, validation, test), strict=True):
            if len(ranges) != len(train):
                raise check.fail(f"clients in {split}", len(ranges), f"{len(train)}, as many as in train")
            outside = (ranges < 0).any(1) | (ranges.sum(1) > rows)
            if outside.any():
                i = int(outside.argmax())
                place = f"{split} range of client {names[i]!r}"
                raise check.fail(place, tuple(ranges[i].tolist()), f"(start, length) within {rows} rows")
        if train[:, 1].sum() == 0:
            raise check.fail("training samples", 0, "at least one among all clients")
        data = cls(x, y, train, validation, test, names, dict(source or {}), lengths=lengths)
        for name, column in (*columns.named(x), ("y", y)):
            arrays.finite(name, column, data.owner)
        return data

    @functools.cached_property
    def population(self) -> Population:
        """The clients' names and counts of samples, for code that needs no samples."""
        return Population(self.names, self.train[:, 1], self.validation[:, 1], self.test[:, 1])

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def rows(self) -> int:
        """How many samples there are, of all clients and splits."""
        return len(self.y)

    @property
    def row_bytes(self) -> int:
        """Bytes that the inputs of a sample take as they are stored; of sequences on average."""
        return sum(map(columns.row_bytes, columns.listed(self.x)))

    @property
    def device(self) -> torch.device:
        """Where batches are: the device that computes."""
        return self.y.device if self.computes_on is None else self.computes_on

    @property
    def home(self) -> torch.device:
        """Where samples are kept."""
        return self.y.device

    @property
    def elsewhere(self) -> bool:
        """Whether samples are kept elsewhere than where batches are, so that rows are sent ahead of steps."""
        return self.computes_on is not None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that have a row of each sample."""
        kept = (*columns.listed(self.x), self.y, *([] if self.lengths is None else [self.lengths]))
        return [t for column in kept for t in columns.tensors(column)]

    def sizes(self, split: str = "train") -> IntArray:
        """Return how many samples each client has."""
        return self.population.sizes(split)

    def to(self, device: torch.device | str) -> FederatedData:
        """Return the same data in the memory of a device."""
        return replace(self._each(lambda column: columns.to(column, device)), computes_on=None)

    def to_host(self) -> FederatedData:
        """Return the same data in memory of the host; what is in files stays there."""
        return self._each(
            lambda column: column if columns.home(column).type == "cpu" else columns.to(column, "cpu")
        )

    def stay(self, device: torch.device | str) -> FederatedData:
        """Return the same data where they are, for computations on this device."""
        return replace(self, computes_on=torch.device(device))

    def sent(self, rows: Tensor) -> FederatedData:
        """Return some rows, and no others, on the device that computes; ranges stay as they are.

        The host does not wait for a GPU to have them.
        """
        return replace(
            self._each(lambda column: columns.sent(column, rows, self.device)), computes_on=None, source={}
        )

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Return rows by number: an index of any shape gives x and y of that leading shape.

        Sequences are padded to the longest of these rows.
        """
        flat = index.to(self.home).reshape(-1)

        def taken(column: Column) -> Tensor:
            rows = columns.read(column, flat).to(self.device)
            rows = rows if rows.is_floating_point() else arrays.decode(rows)
            return rows.reshape(index.shape + rows.shape[1:])

        y = self.y.index_select(0, flat)
        if self.lengths is not None:
            width = columns.width_of(self.lengths.index_select(0, flat), y.shape[1])
            y = y[:, :width].contiguous()  # losses look at labels by view(-1)
        x = columns.each_read(taken, self.x)
        if self.mask:
            assert isinstance(x, dict)
            x = {**x, self.mask: self._real(flat).reshape(*index.shape, -1)}
        return x, y.reshape(index.shape + y.shape[1:]).to(self.device)

    def _real(self, rows: Tensor) -> Tensor:
        """Return which entries of the padded sequences are real."""
        assert isinstance(self.x, dict)
        sequence = self.x[masked_input(self.x)]
        assert isinstance(sequence, Ragged)
        return MASKS[self.mask].made(columns.real(sequence, rows)).to(self.device)

    def _each(self, fn: Callable[[Column], Column]) -> FederatedData:
        """Return the data with all that has a row of each sample changed."""
        y, lengths = fn(self.y), None if self.lengths is None else fn(self.lengths)
        assert isinstance(y, Tensor)
        assert lengths is None or isinstance(lengths, Tensor)
        return replace(self, x=columns.each(fn, self.x), y=y, lengths=lengths)

    def _rows(self, rows: IntArray) -> FederatedData:
        """Return the data with some of the rows, and the ranges as they are."""
        chosen = torch.from_numpy(rows).to(self.y.device)
        return self._each(lambda column: columns.select(column, chosen))

    def masked_for(self, model: nn.Module) -> FederatedData:
        """Return data that make the mask of padded sequences, where the model takes one and none is given.

        It belongs to the input that is called `input_ids`, `inputs_embeds`, `input_values`, `input_features`
        or `src`, else to the sequences that there are; these are refused if they differ in length.
        """
        name = mask_for(model, self.x)
        return replace(self, mask=name) if name else self

    @property
    def nbytes(self) -> int:
        """Bytes that all samples take as they are stored."""
        return sum(map(columns.nbytes, (*columns.listed(self.x), self.y)))

    def fixed(self) -> FederatedData:
        """Return data whose batches all have one shape: sequences are padded to the longest of all."""
        sequences = any(isinstance(column, Ragged) for column in columns.listed(self.x))
        if not sequences and self.lengths is None:
            return self
        x = columns.each(lambda c: replace(c, fixed=True) if isinstance(c, Ragged) else c, self.x)
        return replace(self, x=x, lengths=None)

    def same_memory(self, other: FederatedData) -> bool:
        """Return whether both are the same samples at the same place."""
        pairs = zip((*columns.listed(self.x), self.y), (*columns.listed(other.x), other.y))
        return all(columns.entries(a) is columns.entries(b) for a, b in pairs)

    def room(self) -> FederatedData:
        """Return memory for samples like these, and as many or more: the next power of two."""
        rows = 1 << (self.rows - 1).bit_length()
        return replace(self._each(lambda column: columns.room(column, rows)), source={})

    def fits(self, other: FederatedData) -> bool:
        """Return whether there is room for the samples of `other`, which are of the same kind."""
        pairs = zip((*columns.listed(self.x), self.y), (*columns.listed(other.x), other.y))
        return all(columns.fits(room, column) for room, column in pairs)

    def fill(self, other: FederatedData) -> None:
        """Copy the samples of `other` to where there is room for them."""
        for room, column in zip((*columns.listed(self.x), self.y), (*columns.listed(other.x), other.y)):
            columns.fill(room, column)

    def targets(self, rows: Tensor) -> Tensor:
        """Return the targets of some rows, on the device that computes."""
        return self.y.index_select(0, rows.to(self.home)).to(self.device)

    def holding(self, x: Columns, y: Tensor, **ranges: Any) -> FederatedData:
        """Return data of other samples, which are on the device that computes."""
        return replace(self, x=x, y=y, lengths=None, mask="", computes_on=None, **ranges)

    def client(self, i: int, split: str = "train") -> tuple[Inputs, Tensor]:
        """Return x and y of one client; masks are made for a model only, see `masked_for`."""
        check.integer("client", i, low=0, high=self.clients - 1)
        start, length = self.ranges(split)[i].tolist()
        return self.gather(torch.arange(start, start + length))

    def subset(self, clients: Iterable[int]) -> FederatedData:
        """Return some of the clients, in the order given, and only their rows."""
        chosen = chosen_clients(clients, self.clients)
        ranges = [self.ranges(split)[chosen] for split in SPLITS]
        covered = arrays.covered(np.concatenate(ranges), self.rows)
        used = np.append(covered, False).astype(np.int64)
        place = np.cumsum(used) - used  # where a row goes when the unused ones before it are gone
        train, validation, test = (np.stack([place[r[:, 0]], r[:, 1]], axis=1) for r in ranges)
        return replace(
            self._rows(np.flatnonzero(used)),
            train=train,
            validation=validation,
            test=test,
            names=self.population.subset(chosen).names,
            source={**self.source, "subset": chosen},
        )

    def hold_out(self, validation: float = SHARE, seed: int = 0) -> FederatedData:
        """Return the same data with a share of each client's training samples held out for validation.

        The draw is stratified by class, and the test samples stay as they are. Where clients share rows, each
        gets copies of its training rows.
        """
        share = fraction("validation", validation)
        check.integer("seed", seed, low=0)
        if (held := int(self.sizes("validation").sum())) and share:
            reason = f"{held} samples are held out already; build them with validation=0 to draw others"
            raise check.fail("validation", validation, "data without validation samples, or 0", reason)
        if not share:
            return self
        y = self.y.cpu().numpy()
        order, train, held_ranges, end = [], self.train.copy(), self.validation.copy(), 0
        for i, (start, length) in enumerate(self.train.tolist()):
            mask = validated(y[start : start + length], share, seed, i)
            order.append(start + np.argsort(mask, kind="stable"))
            held = int(mask.sum())
            train[i], held_ranges[i] = (end, length - held), (end + length - held, held)
            end += length
        tested = arrays.covered(self.test, self.rows).astype(np.int64)
        place = np.append(np.cumsum(tested) - tested, 0)  # of test rows, which follow all training rows
        test = np.stack([end + place[self.test[:, 0]], self.test[:, 1]], axis=1)
        return replace(
            self._rows(np.concatenate([*order, np.flatnonzero(tested)])),
            train=train,
            validation=held_ranges,
            test=test,
            source={**self.source, "validation": share, "validation_seed": seed},
        )

    def shift(self, shift: Callable[[FederatedData, int], FederatedData], seed: int = 0) -> FederatedData:
        """Return the same samples seen differently by each client, for example `data.shift(rotation())`."""
        check.takes("shift", shift, 2, "rotation(), negative(), noise() or a function (data, seed) -> data")
        shifted = shift(self, seed)
        if not isinstance(shifted, FederatedData):
            raise check.fail("shift", shift, "a function (data, seed) that returns a FederatedData")
        return shifted

    def altered(
        self, clients: Iterable[int], alter: Callable[[Any, Tensor, int], tuple[Any, Tensor]]
    ) -> FederatedData:
        """Return it with the training samples of some clients replaced by `alter(x, y, classes)`.

        They must have the same shapes. Rows that others see too stay as they are for them. What is no single
        tensor in memory (several inputs, sequences) must come back as it was: then y alone is replaced.
        """
        classes = 0 if self.y.is_floating_point() or not len(self.y) else int(self.y.max()) + 1
        order, xs, ys = [np.arange(self.rows)], [], [self.y]
        train, end = self.train.copy(), self.rows
        for i in clients:
            start, length = self.train[i].tolist()
            own = slice(start, start + length)
            before = self.x[own] if isinstance(self.x, Tensor) else self.x
            x, y = alter(before, self.y[own], classes)
            same = x is before if not isinstance(before, Tensor) else x.shape == before.shape
            if not same or len(y) != length:
                what = list(x.shape) if isinstance(x, Tensor) else "other inputs"
                allowed = "as many, of the same shape" if isinstance(before, Tensor) else "only other labels"
                raise check.fail("altered samples", what, allowed)
            xs += [x.to(before.dtype)] if isinstance(before, Tensor) else []
            ys.append(y.to(self.y.dtype))
            order.append(np.arange(start, start + length))
            train[i] = end, length
            end += length
        if isinstance(self.x, Tensor):
            return replace(self, x=torch.cat([self.x, *xs]), y=torch.cat(ys), train=train)
        return replace(self._rows(np.concatenate(order)), y=torch.cat(ys), train=train)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits, the same for the same data, wherever they are kept.

        They tell the shapes, ranges, names, labels and all of x (sums of its blocks, and a sample as it is).
        """
        return fingerprint(self)

    def __repr__(self) -> str:
        title, rows = described(self)
        width = max(map(len, rows))
        return "\n".join([title, *(f"  {name:{width}} {text}" for name, text in rows.items())])

    def _repr_html_(self) -> str:
        title, rows = described(self)
        return notebook.table(title, (), rows.items())

    def ranges(self, split: str = "train") -> IntArray:
        """Return (start, length) of each client's rows."""
        ranges: IntArray = getattr(self, split if split in SPLITS else check.choice("split", split, SPLITS))
        return ranges

    def owner(self, row: int) -> str:
        """Return in words whose row it is."""
        for split in SPLITS:
            start, length = self.ranges(split).T
            holders = np.flatnonzero((start <= row) & (row < start + length))
            if len(holders):
                return f"client {self.names[holders[0]]!r} ({split})"
        return "no client"


def _ranges(field: str, values: Any) -> IntArray:
    ranges = np.asarray(values)
    if ranges.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    if ranges.ndim != 2 or ranges.shape[1] != 2 or ranges.dtype.kind not in "iu":
        raise check.fail(field, values, "whole numbers (start, length), a row for each client")
    return ranges.astype(np.int64)
