"""Tables of a study: cells for people, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partita.engine.record import Record, numbers

Runs = Mapping[str, Sequence[Record]]
"""The records of a study by variant, one for each seed."""


class Table(NamedTuple):
    """Figures for people: `rows` of cells under `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        ruler = ("---", *["---:"] * (len(self.columns) - 1))
        table = "\n".join(f"| {' | '.join(line)} |" for line in (self.columns, ruler, *self.rows))
        return f"**{self.title}**\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


def mean_std(values: Iterable[float | None], scale: float = 1.0, digits: int = 2) -> str:
    """Return '93.18 ± 0.05' over seeds, and '93.18 ± 0.05 (2 of 3)' where one of them has no finite value.

    One value alone has no deviation; '-' where there is none.
    """
    given = list(values)
    scaled = scale * np.array(numbers(given))
    if not len(scaled):
        return "-"
    spread = f" ± {scaled.std(ddof=1):.{digits}f}" if len(scaled) > 1 else ""
    known = f" ({len(scaled)} of {len(given)})" if len(scaled) < len(given) else ""
    return f"{scaled.mean():.{digits}f}{spread}{known}"


def score(runs: Sequence[Record], model: str = "personal", scale: float = 100, digits: int = 1) -> str:
    """Return the test score of a variant over seeds, in percent unless `scale` says otherwise."""
    return mean_std((run.summary()["test"][model] for run in runs), scale, digits)
