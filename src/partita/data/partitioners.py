"""Rows to clients: each partitioner is called as (labels, clients, generator) -> rows of each client.

Nothing here repeats a draw until it suits: one draw, then at most a bounded repair that is announced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check
from partita.data import arrays
from partita.data.arrays import IntArray

Array = NDArray[Any]
Assign = Callable[[Array, int, np.random.Generator], IntArray]


@dataclass(frozen=True, repr=False)
class Partitioner:
    """`assign` (labels, clients, generator) -> the client of each row, −1 for a row that no one gets.

    Since every row has one client at most, no row is ever given twice. Each client needs `minimum` rows.
    """

    name: str
    assign: Assign
    options: Mapping[str, Any]
    minimum: int = 1

    def __call__(self, y: Array, clients: int, rng: np.random.Generator) -> list[IntArray]:
        check.integer("clients", clients, low=1)
        y = np.asarray(y)
        if len(y) < clients * self.minimum:
            short = clients - len(y) // self.minimum
            fate = "empty" if self.minimum == 1 else f"left with fewer than {self.minimum} rows"
            allowed = f"at most {len(y) // self.minimum} for {len(y)} rows"
            raise check.fail("clients", clients, f"{allowed} ({short} clients would be {fate})")
        owner = self.assign(y, clients, rng)
        order = np.argsort(owner, kind="stable")
        return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def iid() -> Partitioner:
    """Deal rows at random; sizes differ by one at most."""

    def assign(y: Array, clients: int, rng: np.random.Generator) -> IntArray:
        return rng.permutation(np.arange(len(y)) % clients)

    return Partitioner("iid", assign, {})


def dirichlet(alpha: float, minimum: int = 1) -> Partitioner:
    """Share out the rows of each label in proportions p ~ Dir(α, ..., α) over the clients.

    Small α: few clients hold most of a label. Clients left with fewer than `minimum` rows get rows of the
    largest clients, and a warning says how many clients that were.

    Hsu, Qi, Brown (2019), Measuring the effects of non-identical data distribution. arXiv:1909.06335
    """
    alpha = check.number("alpha", alpha, low=0, high=1e6, open_low=True)
    minimum = check.integer("minimum", minimum, low=0)

    def assign(y: Array, clients: int, rng: np.random.Generator) -> IntArray:
        owner = np.empty(len(y), dtype=np.int64)
        for label in np.unique(labels("dirichlet", y)):
            rows = rng.permutation(np.flatnonzero(y == label))
            owner[rows] = deal(len(rows), rng.dirichlet(np.full(clients, alpha)))
        short = int((np.bincount(owner, minlength=clients) < minimum).sum())
        if short:
            check.warn(
                f"dirichlet(alpha={alpha:g}): {short} of {clients} clients had fewer than {minimum} rows "
                "and received rows of the largest clients"
            )
        return _top_up(owner, clients, minimum, rng)

    return Partitioner("dirichlet", assign, {"alpha": alpha, "minimum": minimum}, minimum)


def label_skew(classes: int, sigma: float = 0.0, minimum: int = 1) -> Partitioner:
    """Give every client exactly `classes` classes; the rows of a class are split evenly among its holders.

    With `sigma`, they are shared out in proportions p ~ LogNormal(0, σ²), after `minimum` rows for each
    holder: σ = 2 and minimum 5 are those of Li et al. (2020), FedProx, who call such sizes a power law. All
    classes have about the same number of holders, and at least one if clients × classes suffices; a class
    without holders is left out, and a warning names it.
    """
    classes = check.integer("classes", classes, low=1)
    sigma = check.number("sigma", sigma, low=0, high=10)
    minimum = check.integer("minimum", minimum, low=1)

    def assign(y: Array, clients: int, rng: np.random.Generator) -> IntArray:
        names, which, counts = np.unique(labels("label_skew", y), return_inverse=True, return_counts=True)
        if classes > len(names):
            raise check.fail("classes", classes, f"at most {len(names)}, the number of labels")
        # A class cannot have more holders than it has rows for, nor twice the same one.
        holders = _fill(np.minimum(counts // minimum, clients), clients * classes, rng)
        if holders is None:
            raise check.fail(
                "classes", classes, f"fewer, or fewer than {clients} clients: labels are too rare"
            )
        if not holders.all():
            lost = ", ".join(map(str, names[holders == 0]))
            check.warn(f"label_skew(classes={classes}): no client holds the labels {lost}")
        held: list[list[int]] = [[] for _ in names]
        # Taking the classes that still need most holders always works out (Gale-Ryser).
        for client in rng.permutation(clients):
            chosen = np.lexsort((rng.random(len(names)), -holders))[:classes]
            holders[chosen] -= 1
            for c in chosen:
                held[c].append(int(client))
        owner = np.full(len(y), -1, dtype=np.int64)
        for c, clients_of_c in enumerate(held):
            if clients_of_c:
                rows, order = rng.permutation(np.flatnonzero(which == c)), rng.permutation(clients_of_c)
                if sigma:
                    rank = _at_least(minimum, len(rows), rng.lognormal(0, sigma, len(order)))
                else:
                    rank = np.arange(len(rows)) % len(order)
                owner[rows] = order[rank]
        return owner

    options: dict[str, Any] = {"classes": classes}
    options |= {"sigma": sigma, "minimum": minimum} if sigma or minimum > 1 else {}
    return Partitioner("label_skew", assign, options)


def power_law(exponent: float = 1.0, minimum: int = 1) -> Partitioner:
    """Deal sizes n_r = minimum + c·r^(−exponent) for ranks r = 1, 2, ... in random order; labels as iid."""
    exponent = check.number("exponent", exponent, low=0, high=100)
    minimum = check.integer("minimum", minimum, low=0)

    def assign(y: Array, clients: int, rng: np.random.Generator) -> IntArray:
        rank = _at_least(minimum, len(y), np.arange(1, clients + 1, dtype=np.float64) ** -exponent)
        return rng.permutation(rng.permutation(clients)[rank])

    return Partitioner("power_law", assign, {"exponent": exponent, "minimum": minimum}, minimum)


def natural(ids: Any) -> Partitioner:
    """Keep rows with the same id together: a client for each id in sorted order.

    With fewer clients than ids, whole ids are dealt at random.
    """
    ids = arrays.ids("ids", ids)
    names, which = np.unique(ids, return_inverse=True)

    def assign(y: Array, clients: int, rng: np.random.Generator) -> IntArray:
        if len(y) != len(ids):
            raise check.fail("ids", f"{len(ids)} ids", f"one id for each of the {len(y)} rows")
        if clients > len(names):
            raise check.fail("clients", clients, f"at most {len(names)}, the number of ids")
        dealt = np.arange(len(names)) % clients
        owner: IntArray = (dealt if clients == len(names) else rng.permutation(dealt))[which]
        return owner

    return Partitioner("natural", assign, {"ids": len(names)})


def labels(name: str, y: Array) -> Array:
    """Return y, if it is one label per row."""
    if y.ndim != 1 or y.dtype.kind not in "biuU":
        raise check.fail(f"y of {name}", f"{y.dtype} {list(y.shape)}", "one whole number or word per row")
    return y


def deal(rows: int, proportions: NDArray[np.float64]) -> IntArray:
    """Return the client of each of some rows in order, so that clients get them in these proportions."""
    # Rounded, not cut off: the last client would collect what 0.999... leaves over for every label.
    cuts = np.minimum(np.rint(np.cumsum(proportions) * rows), rows).astype(np.int64)
    cuts[-1] = rows
    return np.repeat(np.arange(len(proportions)), np.diff(cuts, prepend=0))


def _at_least(minimum: int, rows: int, weights: NDArray[np.float64]) -> IntArray:
    """Return the owner of each of some rows: everyone gets `minimum`, the rest goes by these weights."""
    extra = deal(rows - minimum * len(weights), weights / weights.sum())
    return np.concatenate([np.repeat(np.arange(len(weights)), minimum), extra])


def _fill(most: IntArray, total: int, rng: np.random.Generator) -> IntArray | None:
    """Return whole numbers as equal as their upper bounds allow, with this sum; None if these are too low."""
    if most.sum() < total:
        return None
    filled = np.zeros_like(most)
    while (left := total - int(filled.sum())) > 0:
        room = np.flatnonzero(filled < most)
        room = rng.permutation(room)[:left]
        filled[room] += np.minimum(left // len(room), (most - filled)[room])
    return filled


def _top_up(owner: IntArray, clients: int, minimum: int, rng: np.random.Generator) -> IntArray:
    """Give each client `minimum` rows, one by one from whoever has most."""
    sizes = np.bincount(owner, minlength=clients)
    short = np.flatnonzero(sizes < minimum)
    donors = [(-int(n), i) for i, n in enumerate(sizes) if n > minimum]
    heapq.heapify(donors)
    owner, spare = owner.copy(), dict[int, list[int]]()
    for receiver in np.repeat(short, minimum - sizes[short]):
        n, donor = donors[0]
        if donor not in spare:
            spare[donor] = rng.permutation(np.flatnonzero(owner == donor)).tolist()
        owner[spare[donor].pop()] = receiver
        heapq.heapreplace(donors, (n + 1, donor))
    return owner
