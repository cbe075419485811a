"""The clients that their personal model hurt, worst first, and why it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.report.html import Safe, join, section, table, tag
from partita.report.reasons import Crowd, crowd, reasons
from partita.report.rows import (
    Means,
    Result,
    Row,
    Runs,
    change,
    changes,
    differs,
    higher_is_better,
    marks,
    over_seeds,
    references,
    same_clients,
)
from partita.report.words import count, score, shorten, signed

MOST_ROWS = 50
HEAD = ["client", "train", "test", "alone", "global", "personal", "change", "why it may be"]
WORSE = {"global": "worse than with the global model", "local": "worse than alone"}


def hurt(runs: Runs, means: Means) -> Safe:
    """A table for each label and reference; the first one that has any client is open."""
    higher, parts, opened = higher_is_better(runs), list[Safe](), False
    for label, seeds in runs.items():
        rows = means[label]
        for reference in _telling(rows, higher):
            losers = worst_first(rows, reference, higher)
            name = f"{label}: " if len(runs) > 1 else ""
            name += f"{len(losers):,} of {len(changes(rows, reference, higher)):,} clients {WORSE[reference]}"
            name += _counted(seeds)
            if losers:
                excluded = _excluded(seeds)
                body = _losers(losers, reference, crowd(rows, higher), higher, excluded)
                parts.append(tag("details", tag("summary", name), body, **({} if opened else {"open": ""})))
                opened = True
            else:
                parts.append(tag("p", name, class_="none"))
    start = None if opened else tag("p", "Nobody was hurt." if parts else "Nothing to compare with.")
    return section("hurt", "Who was hurt, and why it may be", start, *parts, _note(runs) if opened else None)


def _counted(seeds: Sequence[Result]) -> str:
    """The table counts the hurt in each seed; this list, of all seeds, is another number."""
    if len(seeds) == 1:
        return ""
    return ", averaged over the seeds" if same_clients(seeds) else ", all seeds together"


def _excluded(seeds: Sequence[Result]) -> dict[str, str]:
    """Whose uploads were set aside, and why, as far as it is known."""
    found: dict[str, str] = {}
    for run, mark in zip(seeds, marks(seeds)):
        facts = run.summary()
        why = facts.get("excluded_why") or {}
        found |= {f"{c}{mark}": str(why.get(c) or "") for c in facts.get("excluded") or ()}
    return found


def _telling(rows: Sequence[Row], higher: bool) -> list[str]:
    """The references, less one that the personal models are the same as for everyone."""
    found = references(rows, higher)
    return [kind for kind in found if differs(rows, kind, higher)] or found


def worst_first(rows: Sequence[Row], reference: str, higher: bool) -> list[Row]:
    """The clients that score worse with their personal model, the largest loss first."""
    found = [(change(row, reference, higher), row) for row in rows]
    losers = [(lost, row) for lost, row in found if lost is not None and lost < 0]
    return [row for _, row in sorted(losers, key=lambda pair: pair[0])]


def _losers(
    losers: Sequence[Row], reference: str, usual: Crowd, higher: bool, excluded: Mapping[str, str]
) -> Safe:
    shown = [_line(row, reference, usual, higher, excluded) for row in losers[:MOST_ROWS]]
    more = len(losers) - len(shown)
    rest = tag("p", f"and {more:,} more", class_="how") if more else None
    return tag("div", table(HEAD, shown, words=(0, 7)), rest)


def _line(row: Row, reference: str, usual: Crowd, higher: bool, excluded: Mapping[str, str]) -> list[object]:
    why = reasons(row, reference, usual, higher, excluded) or ["nothing stands out"]
    return [
        shorten(str(row["client"]), 60),
        count(row.get("n_train")),
        count(row.get("n_test")),
        *(score(row.get(kind)) for kind in ("local", "global", "personal")),
        tag("span", signed(change(row, reference, higher)), class_="lost"),
        join([tag("div", reason[:1].upper() + reason[1:]) for reason in why]),
    ]


def _note(runs: Runs) -> Safe:
    words = "Reasons are what is unusual about a client, not proof of a cause."
    return tag("p", words + over_seeds(runs), class_="how")
