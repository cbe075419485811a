"""The clients that their personal model hurt, worst first, and why it may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partita.engine.record import Record, number
from partita.engine.verdict import estimate
from partita.report.compare import chance
from partita.report.html import Safe, join, note, section, table, tag
from partita.report.reasons import Notes, crowd, reasons
from partita.report.rows import Averages, Runs, differs, over_seeds, references, same_clients, suffixes
from partita.report.words import MISSING, count, score, shorten, signed

MOST_ROWS, MOST_OF_SEVERAL = 50, 10
"""Clients in a table, where there is one method and where there are several."""
WORSE = {"global": "worse than with one global model", "local": "worse than alone"}
NAMES = {"global": "global", "local": "alone"}


def hurt(runs: Runs, averages: Averages) -> Safe:
    """Return a part for each label and reference: who is worse beyond chance, then who is in the sample."""
    parts, named = list[Safe](), False
    most = MOST_ROWS if len(runs) == 1 else MOST_OF_SEVERAL
    for label, seeds in runs.items():
        clients = averages[label]
        for reference in _telling(clients):
            title = f"{label}: {WORSE[reference]}" if len(runs) > 1 else WORSE[reference].capitalize()
            body, any_loser = _part(clients, reference, seeds, most)
            parts += [tag("h3", title), *body]
            named = named or any_loser
    start = None if parts else tag("p", "Nothing to compare with.")
    words = (
        "Beyond chance: a paired test of each client's test samples; of those named one in ten at most is "
        "wrong (false discovery rate). Reasons are what is unusual about a client, not proof of a cause; "
        f"where nothing stands out, nothing is said.{over_seeds(runs)}"
    )
    name = "Who is worse off, and why it may be"
    return section("hurt", name, start, *parts, note(words) if named else None)


def _part(clients: Record, reference: str, seeds: Sequence[Record], most: int) -> tuple[list[Safe], bool]:
    """Return what is said of one label and reference, and whether anybody is worse."""
    losers, flags = worst_first(clients, reference), clients.table.numbers(f"hurt_vs_{reference}")
    compared = np.count_nonzero(~np.isnan(clients.gains(reference)))
    words = f"{len(losers):,} of {compared:,} clients in the sample{_over(seeds)}"
    known = chance(seeds, reference)
    notes = Notes(_excluded(seeds), _unusual(seeds))
    if known is None or not np.isfinite(flags).any():
        words += "; how many beyond chance is not known."
        body = _tables(clients, reference, losers, notes, len(seeds), most)
        return [tag("p", words), *body], bool(len(losers))
    beyond = losers[flags[losers] > 0]
    words += f"; {len(beyond):,} beyond chance{' in at least one seed' if len(seeds) > 1 else ''}"
    truly = estimate(known)
    words += f"; estimate of those who truly lose: {truly}." if truly else "."
    parts = [tag("p", words), *_tables(clients, reference, beyond, notes, len(seeds), most)]
    others = losers[~(flags[losers] > 0)]
    if len(others):
        title = f"{len(others):,} more are worse in the sample, which may be chance"
        body = _tables(clients, reference, others, notes, len(seeds), most)
        parts.append(tag("details", tag("summary", title), *body))
    return parts, bool(len(losers))


def _unusual(seeds: Sequence[Record]) -> dict[str, list[str]]:
    """Return what is unlike others about a client, by name; of several seeds that say it, the first."""
    unusual: dict[str, list[str]] = {}
    for run, suffix in zip(seeds, suffixes(seeds)):
        for client, words in (run.facts.get("unusual") or {}).items():
            unusual.setdefault(f"{client}{suffix}", [str(sentence) for sentence in words])
    return unusual


def _over(seeds: Sequence[Record]) -> str:
    """The comparison counts the hurt in each seed; this list, of all seeds, is another number."""
    if len(seeds) == 1:
        return ""
    return ", averaged over the seeds" if same_clients(seeds) else ", all seeds together"


def _excluded(seeds: Sequence[Record]) -> dict[str, str]:
    """Return whose uploads were set aside, and why, as far as it is known."""
    excluded: dict[str, str] = {}
    for run, suffix in zip(seeds, suffixes(seeds)):
        rejections = run.facts.get("excluded_why") or {}
        excluded |= {f"{c}{suffix}": str(rejections.get(c) or "") for c in run.facts.get("excluded") or ()}
    return excluded


def _telling(clients: Record) -> list[str]:
    """Return the references, less one that the personal models are the same as for everyone."""
    kinds = references(clients)
    return [kind for kind in kinds if differs(clients, kind)] or kinds


def worst_first(clients: Record, reference: str) -> np.ndarray:
    """Return the numbers of the clients that their personal model hurts, the largest loss first."""
    gains = clients.gains(reference)
    losers = np.flatnonzero(gains < 0)
    return losers[np.argsort(gains[losers], kind="stable")]


def _tables(
    clients: Record, reference: str, losers: np.ndarray, notes: Notes, seeds: int, most: int
) -> list[Safe]:
    """Return the table of these clients, and how many more there are; nothing for nobody."""
    if not len(losers):
        return []
    gains, on_train = clients.gains(reference), clients.gains(reference, "train")
    usual, rows = crowd(clients), list[list[object]]()
    for i in losers[:most].tolist():
        row = clients.clients[i]
        hints = reasons(row, gains[i], on_train[i], usual, notes)
        ends = [number(row.get(f"vs_{reference}_{end}")) for end in ("low", "high")]
        rows.append(
            [
                shorten(str(row["client"]), 60),
                count(row.get("n_train")),
                count(row.get("n_test")),
                *(score(row.get(model)) for model in ("local", "global", "personal")),
                tag("span", signed(gains[i]), class_="lost"),
                MISSING if None in ends else f"{signed(ends[0])} to {signed(ends[1])}",
                join(tag("div", hint[:1].upper() + hint[1:]) for hint in hints),
            ]
        )
    interval = "95 % interval" + (", mean over seeds" if seeds > 1 else "")
    head = ["client", "train", "test", "alone", "global", "personal", f"change vs {NAMES[reference]}"]
    more = len(losers) - len(rows)
    found = [table([*head, interval, "why it may be"], rows, words=(0, 8))]
    return [*found, note(f"and {more:,} more; the table of all clients has them")] if more else found
