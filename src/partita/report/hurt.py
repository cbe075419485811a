"""The clients that their personal model hurt, worst first, and why it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from partita.engine.record import Record
from partita.report.html import Safe, join, note, section, table, tag
from partita.report.reasons import crowd, reasons
from partita.report.rows import Averages, Runs, differs, over_seeds, references, same_clients, suffixes
from partita.report.words import count, score, shorten, signed

MOST_ROWS = 50
HEAD = ["client", "train", "test", "alone", "global", "personal", "change", "why it may be"]
WORSE = {"global": "worse than with the global model", "local": "worse than alone"}


def hurt(runs: Runs, averages: Averages) -> Safe:
    """Return a table for each label and reference; the first one that has any client is open."""
    parts, opened = list[Safe](), False
    for label, seeds in runs.items():
        clients = averages[label]
        for reference in _telling(clients):
            losers = worst_first(clients, reference)
            compared = np.count_nonzero(~np.isnan(clients.gains(reference)))
            name = f"{label}: " if len(runs) > 1 else ""
            name += f"{len(losers):,} of {compared:,} clients {WORSE[reference]}{_over(seeds)}"
            if len(losers):
                body = _table(clients, reference, losers, _excluded(seeds))
                parts.append(tag("details", tag("summary", name), body, **({} if opened else {"open": ""})))
                opened = True
            else:
                parts.append(tag("p", name, class_="none"))
    start = None if opened else tag("p", "Nobody was hurt." if parts else "Nothing to compare with.")
    words = f"Reasons are what is unusual about a client, not proof of a cause.{over_seeds(runs)}"
    return section("hurt", "Who was hurt, and why it may be", start, *parts, note(words) if opened else None)


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


def _table(clients: Record, reference: str, losers: np.ndarray, excluded: Mapping[str, str]) -> Safe:
    gains, on_train = clients.gains(reference), clients.gains(reference, "train")
    usual, rows = crowd(clients), list[list[object]]()
    for i in losers[:MOST_ROWS].tolist():
        row = clients.clients[i]
        hints = reasons(row, gains[i], on_train[i], usual, excluded) or ["nothing stands out"]
        rows.append(
            [
                shorten(str(row["client"]), 60),
                count(row.get("n_train")),
                count(row.get("n_test")),
                *(score(row.get(model)) for model in ("local", "global", "personal")),
                tag("span", signed(gains[i]), class_="lost"),
                join(tag("div", hint[:1].upper() + hint[1:]) for hint in hints),
            ]
        )
    more = len(losers) - len(rows)
    return tag("div", table(HEAD, rows, words=(0, 7)), note(f"and {more:,} more") if more else None)
