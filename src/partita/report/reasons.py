"""Why a client may have been hurt: what is unusual about it, in plain words.

These are hints from what was recorded, not causes: several may hold, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partita.engine.record import MODELS, Record, number
from partita.report.rows import Row
from partita.report.words import count, shorten, signed

CHANCE_SAMPLES = 2
"""A change of at most this many test samples may be chance."""
FAR = 2.0
"""A personal part this many times farther from the mean than the median one is far."""


class Crowd(NamedTuple):
    """What is usual among the clients of a run; None where it was not recorded."""

    few_samples: float | None  # lower quartile of the numbers of training samples
    median_distance: float | None
    parts_of_one: bool  # scores such as accuracy, to which every test sample adds at most 1/n


class Notes(NamedTuple):
    """What runs noted of single clients, by name: why uploads were set aside, what is unlike the others."""

    excluded: Mapping[str, str]
    unusual: Mapping[str, Sequence[str]]


def crowd(clients: Record) -> Crowd:
    """Return what is usual among these clients."""
    scores = np.concatenate([clients.scores(model) for model in MODELS])
    scores = scores[np.isfinite(scores)]
    return Crowd(
        few_samples=_quantile(clients, "n_train", 0.25),
        median_distance=_quantile(clients, "distance", 0.5),
        parts_of_one=clients.higher_is_better and bool(((scores >= 0) & (scores <= 1)).all()),
    )


def reasons(row: Row, gained: float, gained_on_train: float, usual: Crowd, notes: Notes) -> list[str]:
    """Return everything about a hurt client that may explain why; empty when nothing stands out."""
    tested = any(number(row.get(f"vs_{kind}_p")) is not None for kind in ("global", "local"))
    hints = (
        _excluded(row, notes.excluded),
        _few_samples(row, usual),
        None if tested else _few_tests(row, gained, usual),  # a test says it better
        *notes.unusual.get(str(row["client"]), ()),
        _moved_far(row, usual),
        f"it overfits: {signed(gained_on_train)} on its training samples" if gained_on_train > 0 else None,
    )
    return [hint for hint in hints if hint]


def _excluded(row: Row, excluded: Mapping[str, str]) -> str | None:
    reason = excluded.get(str(row["client"]))
    if reason is None:
        return None
    return "it was excluded: its uploads were unusable" + (f" ({shorten(reason, 120)})" if reason else "")


def _few_samples(row: Row, usual: Crowd) -> str | None:
    n = number(row.get("n_train"))
    if n is None or usual.few_samples is None or n >= usual.few_samples:
        return None
    samples = "sample" if n == 1 else "samples"
    most = count(np.ceil(usual.few_samples))
    return f"few data: {count(n)} training {samples}, three clients in four have {most} or more"


def _few_tests(row: Row, gained: float, usual: Crowd) -> str | None:
    n = number(row.get("n_test"))
    if not usual.parts_of_one or not n or abs(gained) * n > CHANCE_SAMPLES + 1e-6:
        return None
    if n == 1:
        return "may be chance: it has a single test sample"
    return f"may be chance: of its {count(n)} test samples, a single one is {100 / n:.2g} points"


def _moved_far(row: Row, usual: Crowd) -> str | None:
    distance = number(row.get("distance"))
    if distance is None or not usual.median_distance or distance < FAR * usual.median_distance:
        return None
    return f"its personal part moved far: {distance / usual.median_distance:.1f} times the median"


def _quantile(clients: Record, column: str, q: float) -> float | None:
    values = clients.table.numbers(column)
    values = values[np.isfinite(values)]
    return float(np.quantile(values, q)) if len(values) else None
