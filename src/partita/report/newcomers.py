"""Clients that were held out of training: how they do with what they got afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from partita.engine.record import MODELS, Record, lookup, mean, spread
from partita.report.html import Safe, how, join, note, section, table, tag
from partita.report.rows import NAMES, Runs, average, metric, over_seeds
from partita.report.words import MISSING, count, score, shorten
from partita.report.words import spread as spread_text

MOST_ROWS = 50
"""Clients that are listed for a label."""


def newcomers(runs: Runs) -> Safe | None:
    """Return the section with their means for each label, and a row for each; None where nobody came."""
    came = {label: [run for run in seeds if run.facts.get("newcomers")] for label, seeds in runs.items()}
    came = {label: seeds for label, seeds in came.items() if seeds}
    if not came:
        return None
    several = len(runs) > 1
    head = ["", "newcomers", *NAMES.values(), "worse than global", "worse than alone"]
    means = table(head, [[label, *_means(seeds)] for label, seeds in came.items()])
    words = (
        f"Test {metric(runs)} of clients that took no part in training and came after it; they are in no "
        "other figure of this page. Alone: trained on their own samples only. Worse: clients whose personal "
        f"model scores less in the sample, which may be chance.{over_seeds(runs)}"
    )
    parts: list[Safe | None] = []
    for label, seeds in came.items():
        rows = _rows(seeds)
        parts += [tag("h3", label) if several and rows is not None else None, rows]
    return section("newcomers", "Clients that came after training", means, *parts, how(words))


def _means(seeds: Sequence[Record]) -> list[str]:
    facts = [run.facts["newcomers"] for run in seeds]
    scored = mean(each.get("scored") for each in facts)
    cells = [count(mean(each.get("clients") for each in facts))]
    cells += [spread_text(spread(lookup(f, "test", model) for f in facts), len(seeds)) for model in MODELS]
    for kind in ("global", "local"):
        hurt = mean(lookup(each, "hurt", f"vs_{kind}") for each in facts)
        cells.append(MISSING if hurt is None else f"{count(hurt)} of {count(scored)}")
    return cells


def _rows(seeds: Sequence[Record]) -> Safe | None:
    """Return a row for each client, averaged over the seeds in which it came."""
    known = [Record([], run.newcomers, run.config, run.facts) for run in seeds if len(run.newcomers)]
    if not known:
        return None
    found = average(known).table
    columns = ["client", "n_train", "n_test", *MODELS]
    rows = [
        [shorten(str(name), 60), count(train), count(test), *map(score, scores)]
        for name, train, test, *scores in found.between(0, min(MOST_ROWS, len(found))).values(columns)
    ]
    more = len(found) - len(rows)
    shown = table(["client", "train", "test", "alone", "global", "personal"], rows)
    return join([shown, note(f"and {more:,} more; clients.csv has them") if more else None])
