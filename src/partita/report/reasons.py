"""Why a client may have been hurt: what is unusual about it, in plain words.

These are hints from what was recorded, not causes: several may hold, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partita.report.rows import KINDS, Row, change, number, numbers
from partita.report.words import count, score, shorten, signed

# a change of at most this many test samples may be chance
CHANCE_SAMPLES = 2
# personal tensors this many times farther than usual are far
FAR = 2.0


class Crowd(NamedTuple):
    """What is usual among the clients of a run; None where it was not recorded."""

    few: float | None  # lower quartile of the numbers of training samples
    unlike: float | None  # the label shift that only a tenth of the clients reach
    usual_shift: float | None
    usual_distance: float | None
    parts_of_one: bool  # scores such as accuracy, to which every test sample adds at most 1/n


def crowd(rows: Sequence[Row], higher: bool) -> Crowd:
    """What is usual among these clients."""
    shifts = [row.get("label_shift") for row in rows]
    scores = numbers(row.get(kind) for row in rows for kind in KINDS)
    return Crowd(
        few=_quantile((row.get("n_train") for row in rows), 0.25),
        unlike=_quantile(shifts, 0.9),
        usual_shift=_quantile(shifts, 0.5),
        usual_distance=_quantile((row.get("distance") for row in rows), 0.5),
        parts_of_one=higher and all(0 <= x <= 1 for x in scores),
    )


def reasons(row: Row, reference: str, usual: Crowd, higher: bool, excluded: Mapping[str, str]) -> list[str]:
    """Everything about a hurt client that may explain why; empty when nothing stands out.

    `excluded` says why uploads were set aside, by client.
    """
    found = (
        _excluded(row, excluded),
        _few_samples(row, usual),
        _few_tests(row, change(row, reference, higher), usual),
        _unlike_labels(row, usual),
        _moved_far(row, usual),
        _overfits(row, reference, higher),
    )
    return [reason for reason in found if reason]


def _excluded(row: Row, excluded: Mapping[str, str]) -> str | None:
    why = excluded.get(str(row["client"]))
    if why is None:
        return None
    return "it was excluded: its uploads were unusable" + (f" ({shorten(why, 120)})" if why else "")


def _few_samples(row: Row, usual: Crowd) -> str | None:
    n = number(row.get("n_train"))
    if n is None or usual.few is None or n >= usual.few:
        return None
    samples = "sample" if n == 1 else "samples"
    most = count(np.ceil(usual.few))
    return f"few data: {count(n)} training {samples}, three clients in four have {most} or more"


def _few_tests(row: Row, lost: float | None, usual: Crowd) -> str | None:
    n = number(row.get("n_test"))
    if not usual.parts_of_one or lost is None or not n or abs(lost) * n > CHANCE_SAMPLES + 1e-6:
        return None
    if n == 1:
        return "may be chance: it has a single test sample"
    return f"may be chance: of its {count(n)} test samples, a single one is {100 / n:.2g} points"


def _unlike_labels(row: Row, usual: Crowd) -> str | None:
    shift = number(row.get("label_shift"))
    if shift is None or usual.unlike is None or usual.usual_shift is None:
        return None
    # where all are alike, the top tenth is nothing special
    if shift < usual.unlike or shift <= usual.usual_shift:
        return None
    return f"its labels are unlike the others’: shift {score(shift, 2)}, usual {score(usual.usual_shift, 2)}"


def _moved_far(row: Row, usual: Crowd) -> str | None:
    distance = number(row.get("distance"))
    if distance is None or not usual.usual_distance or distance < FAR * usual.usual_distance:
        return None
    return f"its personal part moved far: {distance / usual.usual_distance:.1f} times the median"


def _overfits(row: Row, reference: str, higher: bool) -> str | None:
    train, test = change(row, reference, higher, "_train"), change(row, reference, higher)
    if train is None or test is None or not train > 0 > test:
        return None
    return f"it overfits: {signed(train)} on its training samples"


def _quantile(values: Iterable[object], q: float) -> float | None:
    found = numbers(values)
    return float(np.quantile(found, q)) if found else None
