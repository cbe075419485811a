"""What may be said of a run so that it stays true when the seed changes, in words.

Nothing is called better unless both sides have trained enough (they converged, or their curves are known to
be level) and the interval of the mean difference over the clients excludes zero. Otherwise the sentence says
what is not known and what to raise. Every function takes plain figures, those of summary.json or of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

IMBALANCED = 0.6
"""From this share of the most frequent class on, the classes are called imbalanced."""
MODELS = {"local": "training alone", "global": "one global model", "personal": "personal models"}
MOST_LISTED = 8
"""Names in a sentence."""
REMEDY = "raise rounds, or use until='converged'"
TELLING = "metric='auc' or 'balanced_accuracy'"


class Difference(NamedTuple):
    """A mean difference over the clients, above zero is better, with the ends of its interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{_signed(self.mean, self._digits)} ({self.interval()})"

    def size(self) -> str:
        """Write 0.043 (0.031 to 0.055): how large it is, whichever way it goes."""
        ends = sorted((abs(self.low), abs(self.high)))
        return (
            f"{_plain(abs(self.mean), self._digits)} ({' to '.join(_plain(x, self._digits) for x in ends)})"
        )

    def interval(self) -> str:
        """Write −0.031 to 0.055."""
        return f"{_plain(self.low, self._digits)} to {_plain(self.high, self._digits)}"

    @property
    def _digits(self) -> int:
        return digits(self.high - self.low)


def digits(width: float) -> int:
    """Return how many decimals a number has whose interval is so wide: two digits of the width."""
    return max(0, min(6, 1 - math.floor(math.log10(width)))) if width > 0 else 4


def difference_of(facts: object) -> Difference | None:
    """Read {"difference", "low", "high"}; None where one of them is missing."""
    values = [facts.get(k) for k in ("difference", "low", "high")] if isinstance(facts, Mapping) else []
    known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return Difference(*known) if len(known) == 3 else None


# ---- enough training


def trained(training: object) -> bool | None:
    """Return whether a run has trained enough: True, False where it still rises, None where nobody knows."""
    if not isinstance(training, Mapping):
        return None
    if training.get("ended") == "converged":
        return True
    rising = training.get("rising")
    return None if rising is None else not rising


def ending(training: object) -> str:
    """Say how training ended: 'converged at round 40', 'stopped after 50 rounds, still rising'."""
    if not isinstance(training, Mapping) or training.get("rounds") is None:
        return ""
    rounds = training["rounds"]
    if training.get("ended") == "converged":
        return f"converged at round {rounds:,}"
    state = {True: ", level", False: ", still rising", None: ""}[trained(training)]
    return f"stopped after {rounds:,} round{'s' * (rounds != 1)}{state}"


def untrained(parts: Mapping[str, Iterable[object]]) -> str:
    """Say which of these still rise, or may, and what to raise; '' where all have trained enough.

    `parts` are the `training` of the runs under each name.
    """
    states = {name: [trained(t) for t in runs] for name, runs in parts.items()}
    rising = [name for name, known in states.items() if False in known]
    unknown = [name for name, known in states.items() if None in known and False not in known]
    words = []
    if rising:
        words.append(f"{listed(rising)} still {'improves' if _one(rising) else 'improve'} at the last round")
    if unknown:
        words.append(
            f"it is not known whether {listed(unknown)} {'has' if _one(unknown) else 'have'} converged"
        )
    return f"{'; '.join(words)}: {REMEDY}" if words else ""


# ---- one method


def of_models(
    differences: Mapping[str, Difference | None],
    trainings: Mapping[str, Iterable[object]],
    *,
    subject: str = "personal models",
    losses: str = "",
) -> str:
    """Say how the models of a run compare with each reference: the one sentence to remember.

    differences  of the run's models to 'global' and 'local', the more telling first; None where not known
    trainings    `training` of the run ('run') and of what it is compared with, by kind
    losses       who is worse off, for the end of the sentence
    """
    known, early = list[str](), list[str]()
    verb = "are" if subject.endswith("s") else "is"
    for kind, difference in differences.items():
        if untrained({subject: trainings.get("run", ()), "": trainings.get(kind, ())}):
            early.append(kind)
        elif difference is None:
            known.append(f"not to be compared with {MODELS[kind]}, as the clients are too few")
        else:
            known.append(_compared(difference, MODELS[kind]))
    parts = [f"On average {subject} {verb} {' and '.join(known)}"] if known else []
    if losses and next(iter(differences)) not in early:  # they are of the first reference
        parts.append(losses)
    if early:
        others = " or ".join(MODELS[kind] for kind in early)
        sides = {subject: trainings.get("run", ()), **{MODELS[k]: trainings.get(k, ()) for k in early}}
        words = f"is too early to say whether {subject} {verb} better than {others}: {untrained(sides)}"
        parts = [f"It {words}", *parts] if not known else [*parts, f"it {words}"]
    return "; ".join(parts) + "." if differences else f"There is nothing to compare {subject} with."


def _compared(difference: Difference, other: str) -> str:
    if not difference.clear:
        return f"not clearly different from {other}: {difference}"
    return f"{'better' if difference.mean > 0 else 'worse'} than {other} by {difference.size()}"


# ---- who loses


def losers(chance: object, reference: str, *, short: bool = False) -> str:
    """Say the three things: worse in the sample, worse beyond chance, how many truly lose; '' if not known.

    `chance` is the entry of summary.json; `short` leaves the clause for the end of a title. Nothing is said
    where the two models are the same for everybody.
    """
    if not isinstance(chance, Mapping) or chance.get("beyond_chance") is None or chance.get("same"):
        return ""
    model = {"global": "with one global model", "local": "alone"}[reference]
    beyond, of = chance["beyond_chance"], chance.get("of")
    if short:
        sides = {"better off": chance.get("better_beyond_chance"), "worse off": beyond}
        counts = [(side, number) for side, number in sides.items() if number is not None]
        verb = "is" if counts[0][1] == 1 else "are"
        others = [f"{_count(number)} {side}" for side, number in counts[1:]]
        first = f"{_count(counts[0][1])} of {_count(of)} clients {verb} {counts[0][0]}"
        return f"{' and '.join([first, *others])} than {model} beyond chance"
    words = f"{_count(chance.get('worse'))} of {_count(of)} clients do worse than {model}"
    words += f"; beyond chance {_count(beyond)}"
    truly = estimate(chance)
    return words + (f"; estimate of those who truly lose: {truly}" if truly else "")


def estimate(chance: object) -> str:
    """Write 6 (2 to 31): how many truly lose; '' if not known."""
    if not isinstance(chance, Mapping):
        return ""
    middle, low, high = (chance.get(k) for k in ("estimate", "low", "high"))
    if middle is None or low is None or high is None:
        return ""
    return f"{_count(round(middle))} ({_count(low)} to {_count(high)})"


def choice(facts: Mapping[str, Any]) -> str:
    """Say what would come of deploying whichever model is better on validation samples; '' if nothing."""
    found, test = facts.get("choice") or {}, facts.get("test") or {}
    score, count = found.get("test"), found.get("global")
    if not count or score is None or test.get("personal") is None:
        return ""
    hurt = (facts.get("hurt") or {}).get("vs_global")
    before = f" instead of {_count(hurt)}" if hurt is not None else ""
    return (
        f"If each client kept whichever model is better on its validation samples, {_count(count)} of "
        f"{_count(found.get('of'))} would take the global one: {facts.get('metric')} {score:.4f} instead of "
        f"{test['personal']:.4f}, and {_count(found.get('worse'))}{before} worse than with the global model."
    )


# ---- imbalanced classes


def majority_first(metric: str, majority: object, best: float | None, low: float | None) -> str:
    """Say that accuracy says little, where the most frequent class alone comes close to the best models.

    `low` is the lower end of the best models' interval.
    """
    share = _majority(majority)
    if metric != "accuracy" or share is None or best is None:
        return ""
    level, whose = max((share["everyone"], "everyone's"), (share["own"], "each client's own"))
    if level < (best if low is None else low):
        return ""
    return (
        f"Accuracy says little here: always predicting {whose} most frequent class scores {level:.3f}, "
        f"the best models {best:.3f}. Compare by {TELLING}"
    )


def majority_line(metric: str, majority: object) -> str:
    """Say what the most frequent class alone would score, where classes are imbalanced."""
    share = _majority(majority)
    if share is None or max(share.values()) < IMBALANCED:
        return ""
    advice = f" {TELLING} would tell more." if metric == "accuracy" else ""
    return (
        "Classes are imbalanced: always predicting everyone's most frequent class has an accuracy of "
        f"{share['everyone']:.3f}, each client's own {share['own']:.3f}.{advice}"
    )


def _majority(majority: object) -> dict[str, float] | None:
    if not isinstance(majority, Mapping):
        return None
    share = {k: majority.get(k) for k in ("everyone", "own")}
    return {k: float(v) for k, v in share.items() if v is not None} if None not in share.values() else None


# ---- a summary


def of_summary(facts: Mapping[str, Any]) -> list[str]:
    """Return what summary.json says of a run: the sentence, what training and classes limit, who loses."""
    metric, test = str(facts.get("metric")), facts.get("test") or {}
    best = best_of((test.get(k) for k in MODELS), bool(facts.get("higher_is_better", True)))
    intervals, chance = facts.get("intervals") or {}, facts.get("chance") or {}
    lines = []
    shown = next((k for k in MODELS if best is not None and test.get(k) == best), "personal")
    low = (intervals.get(shown) or [None])[0]
    first = majority_first(metric, facts.get("majority"), best, low)
    lines += [f"{first}."] if first else []
    same = test.get("personal") == test.get("global") and test.get("personal") is not None
    kinds = [k for k in ("global", "local") if f"vs_{k}" in intervals and not (k == "global" and same)]
    if kinds:
        subject = "one global model" if same else "personal models"
        trainings = {
            "run": [facts.get("training")],
            **{k: [v] for k, v in (facts.get("baselines") or {}).items()},
        }
        differences = {k: difference_of(intervals[f"vs_{k}"]) for k in kinds}
        lines.append(
            of_models(differences, {**dict.fromkeys(kinds, trainings["run"]), **trainings}, subject=subject)
        )
    lines += [f"{words}." for k in ("global", "local") if (words := losers(chance.get(f"vs_{k}"), k))]
    lines += [words] if (words := choice(facts)) else []
    line = majority_line(metric, facts.get("majority"))
    return [*lines, *([line] if line and not first else [])]


def best_of(scores: Iterable[object], higher_is_better: bool) -> float | None:
    """Return the best of the scores that are known."""
    known = [float(x) for x in scores if isinstance(x, int | float) and math.isfinite(x)]
    return (max if higher_is_better else min)(known, default=None)


# ---- words


def listed(words: Sequence[str]) -> str:
    """Write a, b and c; of many the first ones, and how many others there are."""
    if len(words) > MOST_LISTED:
        shown = words[: MOST_LISTED - 1]
        return f"{', '.join(shown)} and {len(words) - len(shown)} others"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _one(words: Sequence[str]) -> bool:
    return len(words) == 1 and not words[0].endswith("models")


def _plain(x: float, digits: int) -> str:
    return f"{'−' if round(x, digits) < 0 else ''}{abs(x):,.{digits}f}"


def _signed(x: float, digits: int) -> str:
    return f"{'+' if round(x, digits) > 0 else ''}{_plain(x, digits)}"


def _count(x: object) -> str:
    if not isinstance(x, int | float) or not math.isfinite(x):
        return "?"
    return f"{x:,.0f}" if x == int(x) else f"{x:,.1f}"
