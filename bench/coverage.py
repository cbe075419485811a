"""How often what Partita says about chance is true, on synthetic clients of which it is known who is hurt.

Each row draws many federations anew and counts: how often an interval holds the true value (it should in
95 % of them or more), how many of the clients called worse are not (10 % or less), how often a flat curve is
called rising (5 %). Truth is what would be found with endless test samples.

    python bench/coverage.py                        # all tables
    python bench/coverage.py losers rising          # some of them
    python bench/coverage.py --replications 2000    # more exact: the error is about 1 / √replications
"""

from __future__ import annotations

import argparse
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from partita.engine import significance as s

Row = dict[str, Any]


class Clients(NamedTuple):
    """Clients with known true changes, and how two models do on their test samples."""

    truth: np.ndarray
    changes: s.Changes


SETTINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nobody hurt": lambda u: 0 * u,
    "10 % hurt": lambda u: np.where(u < 0.1, -1.0, 0.0),
    "10 % hurt, others gain": lambda u: np.where(u < 0.1, -1.0, 1.0),
    "half hurt": lambda u: np.where(u < 0.5, -1.0, 1.0),
    "all, a little": lambda u: -0.1 + 0 * u,
}
"""From a client's place among all, 0 to 1, to its true change, in units of a clear one."""
CLEAR = {"accuracy": 0.15, "log loss": 0.25, "normal": 0.5}
"""A clear change: 15 points of accuracy; in log loss; in standard deviations."""


def accuracy(rng: np.random.Generator, change: np.ndarray, n: int, differ: float = 0.2) -> Clients:
    """Models that differ in a share of the samples, more of them won or lost according to the change."""
    u, both = rng.random((len(change), n)), rng.random((len(change), n)) < 0.85
    won = u < (differ + change[:, None]) / 2
    lost = ~won & (u < differ)
    ours, theirs = won | (both & ~lost), lost | (both & ~won)
    return Clients(change, s.right_wrong(ours.ravel(), theirs.ravel(), ranges(len(change), n)))


def log_loss(rng: np.random.Generator, change: np.ndarray, n: int) -> Clients:
    """Losses log(1 + e^−margin) of two models whose margins are correlated; differences are skewed."""
    margin = rng.normal(1.5, 1.5, (len(change), n))
    ours, theirs = (margin + rng.normal(0, 0.7, margin.shape) for _ in range(2))
    gains = np.logaddexp(0, -theirs) - np.logaddexp(0, -(ours + 2 * change[:, None]))
    shifts = np.unique(change)
    truth = dict(zip(shifts.tolist(), (_loss_gain(2 * shift) for shift in shifts.tolist())))
    true = np.array([truth[shift] for shift in change.tolist()])
    return Clients(true, s.mean_changes(gains.ravel(), ranges(len(change), n)))


def _loss_gain(shift: float) -> float:
    x = np.linspace(-8, 8, 4001)
    weight = np.exp(-(x**2) / 2)
    margin = 1.5 + np.sqrt(1.5**2 + 0.7**2) * x
    gain = np.logaddexp(0, -margin) - np.logaddexp(0, -(margin + shift))
    return float((weight * gain).sum() / weight.sum())


def normal(rng: np.random.Generator, change: np.ndarray, n: int) -> Clients:
    """Gains that are normal, with standard deviation 1."""
    gains = change[:, None] + rng.standard_normal((len(change), n))
    return Clients(change, s.mean_changes(gains.ravel(), ranges(len(change), n)))


def ranges(clients: int, n: int) -> np.ndarray:
    return np.stack([np.arange(clients) * n, np.full(clients, n)], axis=1)


KINDS = {"accuracy": accuracy, "log loss": log_loss, "normal": normal}


def rng_of(*names: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def clients(kind: str, setting: str, m: int, n: int, rng: np.random.Generator) -> Clients:
    change = CLEAR[kind] * SETTINGS[setting]((np.arange(m) + 0.5) / m)
    return KINDS[kind](rng, change, n)


# ---- tables


def intervals(replications: int, sizes: tuple[int, ...] = (5, 10, 20, 50, 200)) -> Iterator[Row]:
    """The interval of one client's change, and how often p_worse is at most 5 %."""
    for kind, n in itertools.product(KINDS, sizes):
        row: Row = {"metric": kind, "n_test": n}
        for name, effect in (("no change", 0.0), ("clear loss", -1.0)):
            change = np.full(10 * replications, CLEAR[kind] * effect)
            truth, c = KINDS[kind](rng_of("intervals", kind, n, name), change, n)
            row[f"coverage, {name}"] = np.mean((c.low <= truth + 1e-12) & (truth <= c.high + 1e-12))
            row[f"width, {name}"] = np.median(c.high - c.low)
            if not effect:
                row["p ≤ 5 %"] = np.mean(c.p_worse <= 0.05)
            else:
                row["power"] = np.mean(c.p_worse <= 0.05)
        yield row


def auc_intervals(replications: int, sizes: tuple[int, ...] = (20, 50, 200)) -> Iterator[Row]:
    """The interval of one client's change in AUC, a third of its samples positive; 399 resamples."""
    from scipy.stats import norm, rankdata

    def auc(scores: np.ndarray, positive: np.ndarray) -> float:
        ones = int(positive.sum())
        return (rankdata(scores)[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(scores) - ones))

    m = max(20, replications // 4)
    for n in sizes:
        row: Row = {"n_test": n}
        for name, ours, theirs in (("no change", 1.2, 1.2), ("clear loss", 0.6, 1.8)):
            rng = rng_of("auc", n, name)
            positive = np.tile(np.arange(n) % 3 == 0, m)
            base = rng.standard_normal(m * n)
            outputs = [
                shift * positive + 0.7 * base + np.sqrt(1 - 0.7**2) * rng.standard_normal(m * n)
                for shift in (ours, theirs)
            ]
            c = s.metric_changes(
                auc, *outputs, positive, ranges(m, n), higher_is_better=True, strata=positive, resamples=399
            )
            truth = norm.cdf(ours / np.sqrt(2)) - norm.cdf(theirs / np.sqrt(2))
            row[f"coverage, {name}"] = np.mean((c.low <= truth) & (truth <= c.high))
            row[f"width, {name}"] = np.median(c.high - c.low)
            row["p ≤ 5 %" if ours == theirs else "power"] = np.mean(c.p_worse <= 0.05)
        yield row


def losers(
    replications: int,
    counts: tuple[int, ...] = (10, 30, 100, 300),
    sizes: tuple[int, ...] = (5, 20, 50, 200),
    kinds: tuple[str, ...] = ("accuracy",),
    settings: Iterable[str] = SETTINGS,
) -> Iterator[Row]:
    """How many truly lose, and who is named at a false discovery rate of 10 %."""
    for kind, setting, m, n in itertools.product(kinds, settings, counts, sizes):
        covered, figures, false, found = 0, [], [], []
        rng = rng_of("losers", kind, setting, m, n)
        for _ in range(replications):
            truth, c = clients(kind, setting, m, n, rng)
            true, told, named = int((truth < 0).sum()), s.losers(c), s.worse(c)
            covered += told.low <= true <= told.high
            figures.append((told.low, told.estimate, told.high, (c.change < 0).sum()))
            false.append((named & (truth >= 0)).sum() / max(1, named.sum()))
            found.append((named & (truth < 0)).sum())
        low, estimate, high, sample = np.mean(figures, axis=0)
        yield {
            "metric": kind,
            "setting": setting,
            "clients": m,
            "n_test": n,
            "truly lose": true,
            "worse in the sample": sample,
            "estimate": estimate,
            "low": low,
            "high": high,
            "coverage": covered / replications,
            "named rightly": np.mean(found),
            "false discoveries": np.mean(false),
        }


def losers_by_loss(replications: int) -> Iterator[Row]:
    """The same by log loss, with sign flips instead of exact tests."""
    return losers(replications, (30, 100), (5, 20, 50), ("log loss",))


def means(replications: int) -> Iterator[Row]:
    """The mean over clients and seeds: of new clients, and of new test samples of the same clients."""
    for seeds, m, weighted, fixed in itertools.product(
        (1, 3, 5), (10, 30, 100), (False, True), (False, True)
    ):
        rng, covered, widths = rng_of("means", seeds, m, weighted, fixed), 0, []
        for _ in range(replications):
            n = rng.integers(5, 100, m)
            noise = rng.standard_normal(m) / np.sqrt(n)  # of the test samples, the same for every seed
            mine = rng.standard_normal(m)
            scores = mine + noise + 0.5 * rng.standard_normal((seeds, m)) * (seeds > 1)
            scores += rng.standard_normal((seeds, 1)) / np.sqrt(m) * (seeds > 1)
            weights = n if weighted else np.ones(m)
            told = s.mean_interval(scores, weights=weights, errors=1 / np.sqrt(n) if fixed else None)
            truth = np.average(mine, weights=weights) if fixed else 0.0
            covered += told.low <= truth <= told.high
            widths.append(told.high - told.low)
        yield {
            "seeds": seeds,
            "clients": m,
            "weighted": "by samples" if weighted else "no",
            "covers": told.covers,
            "coverage": covered / replications,
            "width": np.median(widths),
        }


def methods(replications: int) -> Iterator[Row]:
    """Methods that are alike: how often any two are told apart. Others: whether all intervals hold."""
    for m, k in itertools.product((10, 30, 100), (2, 4, 8)):
        rng, apart, friedman, means, held = rng_of("methods", m, k), 0, 0, 0, 0
        true = 0.05 * np.arange(k)
        for _ in range(replications):
            noise = rng.standard_normal((m, 1)) + 0.3 * rng.standard_t(5, (m, k))
            told = s.rank_methods(noise)
            apart += any(pair.p_rank < 0.05 for pair in told.pairs)
            means += any(pair.p_mean < 0.05 for pair in told.pairs)
            friedman += told.p < 0.05
            pairs = s.rank_methods(noise + true).pairs
            held += all(p.low <= true[p.first] - true[p.second] <= p.high for p in pairs)
        yield {
            "clients": m,
            "methods": k,
            "Friedman p < 5 %": friedman / replications,
            "any pair by ranks": apart / replications,
            "any pair by means": means / replications,
            "all intervals hold": held / replications,
        }


def rising(replications: int) -> Iterator[Row]:
    """How often curves are called rising: flat ones with correlated noise, and ones that approach 0.9."""
    for n in (8, 12, 24, 48, 100):
        rng, row = rng_of("rising", n), {"evaluations": n}
        for φ in (0.0, 0.3, 0.6):
            flat = _noise(rng, 5 * replications, n, φ)
            row[f"flat, correlation {φ:g}"] = np.mean([bool(s.rising(y).rising) for y in flat])
        for τ in (0.1, 0.5, 1.0):
            curves = 0.9 - 0.8 * np.exp(-np.arange(1, n + 1) / n / τ)
            told = [bool(s.rising(curves + 0.01 * y).rising) for y in _noise(rng, replications, n, 0.0)]
            left = f"{0.8 * np.exp(-1 / τ):.3f} to go"
            row[left] = np.mean(told)
        yield row


def _noise(rng: np.random.Generator, curves: int, n: int, φ: float) -> np.ndarray:
    e = rng.standard_normal((curves, n + 50))
    for i in range(1, n + 50):
        e[:, i] += φ * e[:, i - 1]
    return e[:, 50:]


def unusual(replications: int) -> Iterator[Row]:
    """How often any client stands out where all are alike, and how often one that is not does."""
    for m in (10, 30, 100):
        rng, labels, shifted, inputs, moved = rng_of("unusual", m), 0, 0, 0, 0
        for _ in range(replications):
            n = rng.integers(10, 100, m)
            counts = np.stack([rng.multinomial(a, p) for a, p in zip(n, rng.dirichlet([1.0] * 10, m))])
            labels += s.unlike_labels(counts).stands_out.any()
            alike = np.stack([rng.multinomial(a, [0.1] * 10) for a in n])
            alike[0] = rng.multinomial(n[0], [0.5, 0.5] + [0.0] * 8)
            shifted += s.unlike_labels(alike).stands_out[0]
            x = rng.standard_normal((n.sum(), 20)) + np.repeat(0.3 * rng.standard_normal((m, 20)), n, axis=0)
            where = np.stack([np.cumsum(n) - n, n], axis=1)
            inputs += s.unlike_inputs(x, where).stands_out.any()
            x[: n[0]] += rng.standard_normal(20)
            moved += s.unlike_inputs(x, where).stands_out[0]
        counted = {
            "labels, all alike": labels,
            "labels, two classes only": shifted,
            "inputs, all alike": inputs,
            "inputs, moved": moved,
        }
        yield {"clients": m, **{name: c / replications for name, c in counted.items()}}


TABLES: dict[str, Callable[[int], Iterator[Row]]] = {
    "intervals": intervals,
    "auc_intervals": auc_intervals,
    "losers": losers,
    "losers_by_loss": losers_by_loss,
    "means": means,
    "methods": methods,
    "rising": rising,
    "unusual": unusual,
}


def _cell(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="which tables; all if none is named")
    parser.add_argument("--replications", type=int, default=400, help="federations drawn for each row")
    given = parser.parse_args()
    for name in given.tables or TABLES:
        print(f"\n## {name}\n\n{(TABLES[name].__doc__ or '').strip()}\n")
        for i, row in enumerate(TABLES[name](given.replications)):
            if not i:
                print(f"| {' | '.join(row)} |\n|{' --- |' * len(row)}")
            print(f"| {' | '.join(_cell(v) for v in row.values())} |", flush=True)


if __name__ == "__main__":
    main()
