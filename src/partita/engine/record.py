"""The figures of a run: its settings, its metrics, a row for each client, a summary.

Every statistic that is told of a run is defined here, once: what a client gains by its personal model, how
many are hurt, the worst tenth, the time to a score, and the spread over several seeds.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check, notebook
from partita.data.population import Numbered
from partita.engine.divergence import DIVERGED, sentences
from partita.engine.formats import CONFIG, SUMMARY, check_form
from partita.engine.samples import Samples
from partita.engine.store.files import from_text, read_jsonl
from partita.engine.table import BLOCK, Table
from partita.engine.verdict import ending, of_summary

MODELS = ("local", "global", "personal")
"""The models that each client is scored with: trained alone, the server's, its own."""
SUFFIXES = {"test": "", "validation": "_validation", "train": "_train"}
"""What the columns of their scores end in, by split."""
ROUNDING = 1e-9
"""Scores that differ by at most this share of the larger one are equal."""
COUNTS = (
    *("n_train", "n_validation", "n_test", "memory", "byzantine"),
    *("reports", "late", "lost", "newcomer"),
)
CLIENT_COLUMNS = (
    "client",
    "n_train",
    "n_validation",
    "n_test",
    "class",
    "capacity",
    "memory",
    "byzantine",
    *MODELS,
    *(f"{model}_validation" for model in MODELS),
    *(f"{model}_train" for model in MODELS),
    *(f"vs_{other}_{of}" for other in ("global", "local") for of in ("low", "high", "p")),
    *(f"hurt_vs_{other}" for other in ("global", "local")),
    "distance",
    "label_shift",
    "input_z",
    "label_z",
    "reports",
    "epochs",
    "delay",
    "late",
    "lost",
    "newcomer",
)
FURTHER = tuple(f"{model}." for model in MODELS)
"""What the columns of a run's further metrics begin with: 'personal.auc'."""
NUMERIC_COLUMNS = tuple(name for name in CLIENT_COLUMNS if name not in ("client", "class"))

# ---- statistics


def number(value: object) -> float | None:
    """Return a finite number as a float, and None for everything else: missing, NaN, infinite."""
    # most cells of a large table are floats or None; isinstance(..., Real) takes ten times as long
    if value is None or type(value) is float:
        return value if value is not None and math.isfinite(value) else None
    return float(value) if isinstance(value, int | Real) and math.isfinite(value) else None


def numbers(values: Iterable[object]) -> list[float]:
    """Return those of the values that are finite numbers."""
    return [x for x in map(number, values) if x is not None]


def mean(values: Iterable[object]) -> float | None:
    """Return the mean of the finite numbers among the values; None if there are none."""
    known = numbers(values)
    return math.fsum(known) / len(known) if known else None


def spread(values: Iterable[object]) -> dict[str, float] | None:
    """Return {"mean", "std"} of the finite numbers among the values; None if there are none.

    `std` is the sample standard deviation, 0 for a single value.
    """
    known = numbers(values)
    if not known:
        return None
    return {"mean": statistics.fmean(known), "std": statistics.stdev(known) if len(known) > 1 else 0.0}


def gain(score: ArrayLike, reference: ArrayLike, higher_is_better: bool) -> np.ndarray:
    """Return how much better each score is than its reference: above zero is better, below zero worse.

    It is exactly 0 where the two differ by rounding alone, and NaN where one of them is no finite number.
    """
    ours, theirs = np.asarray(score, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        difference = ours - theirs if higher_is_better else theirs - ours
        equal = np.abs(difference) <= ROUNDING * np.maximum(np.abs(ours), np.abs(theirs))
    known = np.isfinite(ours) & np.isfinite(theirs)
    return np.where(known, np.where(equal, 0.0, difference), np.nan)


def lookup(values: object, *keys: str) -> Any:
    """Return `values[key][key]...`; None where a level is missing or no mapping."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


# ---- a run


class Summary(dict[str, Any]):
    """What summary.json holds; printed, it is a table for people."""

    def __str__(self) -> str:
        test, hurt, metric = self["test"], self["hurt"], self["metric"]
        diverged = sentences(self.get("diverged"))
        lines = [f"{DIVERGED} {diverged[0]}", *(f"  {words}" for words in diverged[1:])] if diverged else []
        lines.append(
            f"{self['algorithm']}: {self['clients']} clients, {self['rounds']} rounds, seed {self['seed']}"
        )
        if ended := self.get("ended"):
            lines.append(f"  ended by a callback before round {ended['of']}: {ended['reason']}")
        names = {"local": "each alone", "global": "one global model", "personal": "personal models"}
        if self.get("deployed"):
            names = {k: name for k, name in names.items() if test[k] is not None}
            lines += [] if names else ["  no scores: each client keeps those of its own model"]
        lines += [f"  {names[k]:18} {metric} {score_text(test[k])}" for k in names]
        for other, scores in further_metrics(self).items():
            means = ", ".join(f"{names[k]} {score_text(scores[k])}" for k in names)
            lines.append(f"  {other}: {means}")
        lines += [f"  {words}" for words in undefined(self)]
        if part := personal_part(self):
            lines.append(f"  personal: {part}")
        for key, other in (("vs_global", "with the global model"), ("vs_local", "alone")):
            if hurt[key] is not None and not (self.get("chance") or {}).get(key):
                lines.append(f"  {hurt[key]} of {self['scored']} clients do worse than {other} (sample)")
        lines += [f"  {words}" for words in of_summary(self)]
        lines += self._training()
        lines += [*self._clock(), *self.abandoned(), *self.privacy(), *self._classes()]
        if byzantine := self.get("byzantine"):
            count, attack = byzantine["clients"], byzantine["attack"]
            lines.append(f"  {count} Byzantine clients ({attack}); scores are those of the honest clients")
        if newcomers := self.get("newcomers"):
            texts = [f"{names[k]} {score_text(v)}" for k, v in newcomers["test"].items() if v is not None]
            lines.append(f"  {newcomers['clients']} newcomers, not in training: {', '.join(texts)}")
        if self["excluded"]:
            lines.append(f"  excluded for unusable uploads: {self._excluded()}")
        speed = self["client_steps_per_second"]
        lines.append(
            f"  {self['seconds']:.1f} s, {speed:,.0f} client steps per second, "
            f"{human_bytes(self['bytes_up'])} up, {human_bytes(self['bytes_down'])} down"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        several = self.get("metrics") or {self["metric"]: {"test": self["test"]}}
        names = {"local": "each alone", "global": "one global model", "personal": "personal models"}
        rows = [[names[k], *(score_text(m["test"][k]) for m in several.values())] for k in names]
        title = (
            f"{self['algorithm']}: {self['clients']} clients, {self['rounds']} rounds, seed {self['seed']}"
        )
        return notebook.table(title, ("model", *(f"test {m}" for m in several)), rows, more=str(self))

    def _training(self) -> list[str]:
        """Say how long each client has trained, and how training ended, in the run and in its baselines."""
        names = {"local": "alone", "global": "global model"}
        runs = {"": self.get("training"), **(self.get("baselines") or {})}
        words = []
        for kind, training in runs.items():
            epochs = number(lookup(training, "epochs", "mean"))
            if epochs is not None:
                start = f"{names[kind]}: " if kind else ""
                words.append(f"{start}{epochs:,.3g} local epochs per client, {ending(training)}")
        return [f"  {'; '.join(words)}"] if words else []

    @property
    def virtual_time(self) -> float | None:
        """The virtual time of the run; None where it is just the number of rounds."""
        time, rounds = number(lookup(self, "clock", "time")), number(self.get("rounds"))
        if time is None or rounds is None:
            return time
        events = (("staleness", "max"), ("late",), ("lost",), ("abandoned",))
        eventful = any(number(lookup(self, "clock", *keys)) for keys in events)
        return time if eventful or not math.isclose(time, rounds) else None

    def _clock(self) -> list[str]:
        if not self.virtual_time:
            return []
        clock = self["clock"]
        age = clock["staleness"]
        time, rate = f"{clock['time']:,.1f}", f"{clock['updates_per_time']:.3g} server steps per"
        real = self.get("deployed")
        text = f"  {time} s of training: {rate} second, " if real else f"  virtual time {time}: {rate} unit, "
        text += f"{clock['active']:.0%} of the clients at work"
        text += f", staleness {age['mean']:.1f} (at most {age['max']})" if age["max"] else ""
        counts = [f"{clock[k]} uploads {k}" for k in ("late", "lost") if clock[k]]
        return ["; ".join([text, *counts])]

    def abandoned(self) -> list[str]:
        """Say in how many rounds the server took no step, if there were any."""
        count = lookup(self, "clock", "abandoned")
        return [f"  {count} of {self['rounds']} rounds abandoned: too few usable uploads"] if count else []

    def privacy(self) -> list[str]:
        """Say what a client risks by its uploads, where that was accounted for."""
        epsilon, delta, noise = (number(lookup(self, "privacy", k)) for k in ("epsilon", "delta", "noise"))
        if epsilon is None or delta is None:
            return []
        noises = "" if noise is None else f", noise {noise:.3g} times the clip"
        return [f"  (ε, δ) = ({epsilon:.3g}, {delta:.1g}) for each client's uploads{noises}"]

    def _classes(self) -> list[str]:
        return [
            f"  {name}: {facts['clients']} clients, {facts['capacity']:.0%} of the memory, "
            f"{self['metric']} {score_text(facts['test']['personal'])}"
            for name, facts in (self.get("classes") or {}).items()
        ]

    def _excluded(self, most: int = 5) -> str:
        reasons, names = self.get("excluded_why") or {}, self["excluded"]
        listed = [f"{name} ({reasons[name]})" if name in reasons else name for name in names[:most]]
        return ", ".join(listed) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """The figures of a run.

    `metrics` are the rows of metrics.jsonl, `clients` those of clients.csv, `config` is config.json, and
    `samples` what is kept of every test sample. `newcomers` are the rows of clients that were held out of
    training; `clients` are the others.
    """

    metrics: list[dict[str, Any]]
    clients: Sequence[dict[str, Any]]
    config: dict[str, Any]
    facts: Summary
    samples: Samples | None = field(default=None, kw_only=True)
    newcomers: Table = field(default_factory=lambda: Table(0, {}), kw_only=True)

    @property
    def table(self) -> Table:
        """The clients by columns."""
        if isinstance(self.clients, Table):
            return self.clients
        columns = dict.fromkeys(k for row in self.clients for k in row)
        return Table(len(self.clients), {k: [row.get(k) for row in self.clients] for k in columns})

    @property
    def names(self) -> list[str]:
        """The clients' names, in order."""
        return [name for (name,) in self.table.values(["client"])]

    @property
    def honest(self) -> np.ndarray:
        """For each client, in order, whether it is not Byzantine."""
        return ~(self.table.numbers("byzantine") > 0)

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is a better one."""
        return bool(self.facts.get("higher_is_better", True))

    def scores(self, model: str = "personal", split: str = "test") -> np.ndarray:
        """The score of every client, in order, under its 'local', 'global' or 'personal' model.

        Scores on the 'validation' part are there where the data have one, on the 'train' part for runs with
        `train_scores=True`.
        """
        check.choice("model", model, MODELS)
        return self.table.numbers(f"{model}{SUFFIXES[check.choice('split', split, SUFFIXES)]}")

    def column(self, name: str) -> np.ndarray | None:
        """The numbers of a column of clients.csv; None where it has no such column, or an empty one."""
        if name not in self.table.names:
            return None
        numbers = self.table.numbers(name)
        return None if np.isnan(numbers).all() else numbers

    def gains(self, reference: str = "global", split: str = "test") -> np.ndarray:
        """How much better every client, in order, does with its personal model than with a reference model.

        reference   'global' or 'local'

        Above zero is better, 0 equal up to rounding; NaN for a client that lacks one of the two scores.
        """
        check.choice("reference", reference, ("global", "local"))
        return gain(self.scores("personal", split), self.scores(reference, split), self.higher_is_better)

    def better(self) -> list[str]:
        """Which model each client, in order, should deploy: 'personal', or 'global' where that is better.

        Judged by the client's validation samples; where the two score the same, or one has no score, it is
        the personal model. Refused where nobody has both scores.
        """
        gains = self.gains("global", "validation")
        if np.isnan(gains).all():
            allowed = "validation samples, and a global model beside the personal ones (baselines=True)"
            raise check.fail("run", self.facts.get("algorithm"), f"one with {allowed}")
        return ["global" if gain < 0 else "personal" for gain in gains]

    def choice(self) -> dict[str, Any] | None:
        """What comes of it, on test samples: {"global", "of", "test", "worse"}; None where nobody has both.

        Of so many honest clients, how many would deploy the global model, the mean score then, and how many
        would still do worse than with the global model.
        """
        gains = self.gains("global", "validation")
        scored = self.honest & np.isfinite(gains)
        if not scored.any():
            return None
        whole = np.isfinite(gains) & (gains < 0)
        chosen = np.where(whole, self.scores("global"), self.scores("personal"))
        weight = np.where(self.honest & np.isfinite(chosen), self.table.numbers("n_test"), 0.0)
        worse = gain(chosen, self.scores("global"), self.higher_is_better)[self.honest] < 0
        total = float((np.nan_to_num(chosen) * weight).sum() / weight.sum()) if weight.any() else None
        return {
            "global": int((whole & self.honest).sum()),
            "of": int(scored.sum()),
            "test": total,
            "worse": int(worse.sum()),
        }

    def hurt(self, reference: str = "global") -> int | None:
        """How many honest clients do worse with their personal model than with the 'global' or 'local' one.

        None if no honest client has both scores.
        """
        gains = self.gains(reference)[self.honest]
        return None if np.isnan(gains).all() else int((gains < 0).sum())

    def worst_tenth(self, model: str = "personal") -> float | None:
        """The score that nine honest clients in ten reach; None if no honest client has a score."""
        scores = self.scores(model)[self.honest]
        scores = scores[np.isfinite(scores)]
        return float(np.quantile(scores, 0.1 if self.higher_is_better else 0.9)) if len(scores) else None

    @property
    def watched(self) -> str:
        """The split whose scores are in `metrics`: 'validation', or 'test' where there is none."""
        validated = any(number(row.get("validation.personal")) is not None for row in self.metrics)
        return "validation" if validated else "test"

    def time_to(self, score: float, model: str = "personal") -> float | None:
        """The virtual time of the first evaluation that reached this score; None if none did.

        Evaluations are of the validation samples, where there are such, else of the test samples.
        """
        check.number("score", score)
        key = f"{self.watched}.{check.choice('model', model, ('global', 'personal'))}"
        sign = 1.0 if self.higher_is_better else -1.0
        for row in self.metrics:
            value, time = number(row.get(key)), number(row.get("time"))
            if value is not None and time is not None and sign * value >= sign * score:
                return time
        return None

    def summary(self) -> Summary:
        """Scores of local-only, global and personal models, and how many clients were hurt."""
        return self.facts

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.facts}"

    def _repr_html_(self) -> str:
        return self.facts._repr_html_()


# ---- words


def personal_part(facts: Mapping[str, Any], most: int = 4) -> str:
    """Say what stays with clients: 'head.weight, head.bias (650 of 4,810 parameters, 13.5 %)'.

    Empty where nothing does, and for summaries that do not say.
    """
    part = facts.get("personal_part")
    names, count, total = (lookup(part, key) for key in ("names", "parameters", "of"))
    if not names or not total:
        return ""
    if count == total:
        copy = lookup(facts, "parameters", "shared") == total
        return f"{'a copy of everything' if copy else 'everything'} ({total:,} parameters)"
    listed = ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
    return f"{listed} ({count:,} of {total:,} parameters, {100 * count / total:.3g} %)"


def further_metrics(facts: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the mean test scores of each model by the metrics beyond the first."""
    others = {name: of for name, of in (facts.get("metrics") or {}).items() if name != facts.get("metric")}
    return {name: {k: number(lookup(of, "test", k)) for k in MODELS} for name, of in others.items()}


def undefined(facts: Mapping[str, Any], most: int = 5) -> list[str]:
    """Say for whom a metric is undefined: 'auc is undefined for 2 clients: d, e'."""
    return [
        f"{name} is undefined for {len(who):,} client{'s' * (len(who) != 1)}: {', '.join(who[:most])}"
        + (f" and {len(who) - most:,} more" if len(who) > most else "")
        for name, who in (facts.get("undefined") or {}).items()
    ]


def human_bytes(count: float) -> str:
    """Write 1,234,567 as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def score_text(value: float | None) -> str:
    """Write a score as tables show it."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


# ---- reading


def read(folder: str | Path) -> Record:
    """Read the figures of a finished run from its folder; needs no checkpoint."""
    folder = check.path("folder", folder)
    if not (folder / "summary.json").is_file():
        raise check.fail("folder", str(folder), "the folder of a finished run (it has no summary.json)")
    rows = _read_clients(folder / "clients.csv")
    trained = len(rows) - int((rows.numbers("newcomer") > 0).sum())  # newcomers stand behind the others
    return Record(
        metrics=read_jsonl(folder / "metrics.jsonl"),
        clients=rows.between(0, trained),
        newcomers=rows.between(trained, len(rows)),
        config=_read_config(folder / "config.json"),
        facts=_read_summary(folder / "summary.json"),
        samples=Samples.read(folder),
    )


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    check_form(path, config, CONFIG)
    return config


def _read_summary(path: Path) -> Summary:
    summary = Summary(read_json(path))
    check_form(path, summary, SUMMARY)
    try:
        str(summary)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise check.fail("file", str(path), f"a summary, as a run writes it ({error!r})") from None
    return summary


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise check.fail("file", str(path), "a JSON object, as a run writes it")
    return value


def _read_clients(path: Path) -> Table:
    """Read a table with numbers; a column that an older run did not write is empty."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            lines = csv.reader(f)
            header = next(lines, [])
            columns = _read_columns(path, header, filter(None, lines))
    except (OSError, UnicodeError, csv.Error) as error:
        raise check.fail("file", str(path), f"a table, as a run writes it ({error})") from None
    if not columns or not {"client", "n_train", "n_test"} <= set(header):
        raise check.fail("file", str(path), "the columns client, n_train, n_test, ..., as a run writes them")
    names = columns["client"]
    if names == [*Numbered(len(names))]:
        columns["client"] = Numbered(len(names))
    return Table(len(names), {**columns, **dict.fromkeys(set(CLIENT_COLUMNS) - set(header))})


def _read_columns(path: Path, header: Sequence[str], lines: Iterator[list[str]]) -> dict[str, Any]:
    """Read what stands below each heading, block by block; nothing if there is no line."""
    blocks: dict[str, list[Any]] = {}
    while rows := list(itertools.islice(lines, BLOCK)):
        for name, cells in zip(header, itertools.zip_longest(*rows, fillvalue="")):
            try:
                blocks.setdefault(name, []).append(_parse(name, cells))
            except (ValueError, TypeError, OverflowError):
                allowed = f"numbers in column {name}, as a run writes them"
                raise check.fail("file", str(path), allowed) from None
    return {name: _join(parts) for name, parts in blocks.items()}


def _parse(name: str, cells: Sequence[str]) -> Any:
    """Return numbers as an array where none is missing or NaN stands for it, all else as a list."""
    if name not in CLIENT_COLUMNS[1:] and not name.startswith(FURTHER):
        return [from_text(cell) for cell in cells]
    kind: Any = int if name in COUNTS else from_text if name == "class" else float
    values = [kind(cell) if cell else None for cell in cells]
    if kind is float or (kind is int and None not in values):
        return np.array(values, dtype=kind)
    return values


def _join(blocks: list[Any]) -> Any:
    if all(isinstance(block, np.ndarray) for block in blocks):
        return np.concatenate(blocks)
    return [
        value for block in blocks for value in (block.tolist() if isinstance(block, np.ndarray) else block)
    ]
