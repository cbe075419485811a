"""`partita.compare` and `partita.split`: studies on a model and data of one's own, and what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from partita.algorithms import METHODS
from partita.core import check, notebook
from partita.core.options import signature
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.record import Record
from partita.engine.settings import Settings, declarations
from partita.recipes import advice, splits
from partita.recipes.advice import Advice, Split
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, run_study
from partita.recipes.tables import Table
from partita.recipes.versus import ALONE, GLOBAL, beside
from partita.report import compare as figures
from partita.report import header, ranking, write
from partita.workers import requested as workers_requested

Model = nn.Module | Callable[[], nn.Module]
Methods = Mapping[str, Algorithm] | Sequence[Algorithm] | Algorithm
SPREADS = ("local", "global", "personal", "worst_tenth")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What `partita.compare` returns: the records of all runs, and tables of them.

    `records` has a list for each method, by its label, with the record of each seed.
    """

    records: dict[str, list[Record]]

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each method, with plain numbers: `pandas.DataFrame(comparison.table())`.

        `personal`, `global`, `local` and `worst_tenth` are means over the seeds, `personal_std` and the like
        the deviations; None where there is no score.
        """
        return [_flat(row) for row in figures.table(self.records)]

    def paired(self, against: str | None = None) -> list[dict[str, Any]]:
        """Return a row for each method: its personal models against the best one's, client by client."""
        return [dict(row) for row in figures.paired(self.records, against)]

    @property
    def best(self) -> str | None:
        """The label that is better than every other beyond chance; None where the ranking is not clear."""
        found = ranking.standing(self.records).clearly_best
        return found if found in self.records else None

    @property
    def leading(self) -> str | None:
        """The label with the best mean of personal test scores, be it by chance; None without scores."""
        return next((row["label"] for row in figures.table(self.records) if row["best"]), None)

    def summary(self) -> str:
        """Return the table as Markdown, with what may be said of it below."""
        return self._figure().markdown()

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page that opens offline: all methods side by side, who gains and who loses."""
        return write(self.records, path)

    def _figure(self) -> Table:
        rows, seeds = self.table(), max(map(len, self.records.values()))
        over = "1 seed" if seeds == 1 else f"mean ± deviation of {seeds} seeds"
        head: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "alone": lambda row: _number(row, "local"),
            "global": lambda row: _number(row, "global"),
            "personal": lambda row: _number(row, "personal"),
            "95 % interval": _interval,
            "worst tenth": lambda row: _number(row, "worst_tenth"),
            "worse than global": lambda row: _share(row, "hurt_vs_global"),
            "worse than alone": lambda row: _share(row, "hurt_vs_local"),
            "local epochs": lambda row: "-" if row["epochs"] is None else f"{row['epochs']:,.3g}",
        }
        cells = [(row["label"], *(cell(row) for cell in head.values())) for row in rows]
        note = "worse: clients whose personal model scores less than the global one, or than training alone"
        words = "\n\n".join([note, *header.said(self.records)])
        return Table(f"test {rows[0]['metric']}, {over}", ("method", *head), cells, words)

    def __str__(self) -> str:
        return aligned(self._figure())

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {', '.join(self.records)}\n{self}"

    def _repr_html_(self) -> str:
        return as_html(self._figure())


@dataclass(frozen=True, eq=False, repr=False)
class SplitComparison(Comparison):
    """What `partita.split` returns: a comparison of personal parts, with a recommendation.

    `remarks` say which parts were left out, or stand for several.
    """

    parts: dict[str, str]
    remarks: list[str]

    @property
    def splits(self) -> list[Split]:
        """The figures of each split, from nothing personal to everything."""
        return advice.figures(self.records, self.parts)

    @property
    def recommendation(self) -> Advice:
        """The part to make personal, with the reason and notes of caution."""
        return advice.advice(self.records, self.splits)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each split, with plain numbers."""
        return [_flat(row._asdict(), ("score", "worst_tenth")) for row in self.splits]

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page that opens offline: the splits with the recommendation, who gains and who loses."""
        return write(self.records, path, tables=[self._figure()])

    def _figure(self) -> Table:
        rows = self.splits
        return advice.table(self.records, rows, advice.advice(self.records, rows))

    def __str__(self) -> str:
        return f"{aligned(self._figure()._replace(note=''))}\n\n{advice.text(self.recommendation)}"


def compare(
    model: Model,
    data: FederatedData,
    methods: Methods,
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    resume: bool = False,
    alone: bool = False,
    **settings: Any,
) -> Comparison:
    """Compare methods on the same data, from the same initial weights, over seeds.

    methods    {"label": method}, or a list of methods, as `[partita.fedalt(...), partita.ditto(...)]`
    seeds      how many, from `seed` on (default: 0), or a list of them. They change what training draws; the
               data are those given
    out        a folder for all runs and a page; `resume` continues the study in it
    alone      make one run after another; by default those of one method, all seeds and settings of it, train
               as one batch
    settings   further arguments of `federate`, the same for all methods

    Every client alone (`local`) and one global model (`fedavg`) are always among them, with the options of
    the first method unless they are given. `partita compare` is the same for recipes.

        result = pt.compare(model, data, [pt.fedalt("output", lr=0.1), pt.ditto(lr=0.1)], rounds=50)
        print(result)
    """
    labelled = labels(methods)
    experiment, options = described(model, data, labelled, settings)
    chosen = seeds_of(seeds, experiment.seed)
    records, _ = run_study(
        lambda seed: beside(dataclasses.replace(experiment, seed=seed), labelled),
        chosen,
        out=None if out is None else check.path("out", out),
        resume=resume,
        alone=alone,
        **options,
    )
    return Comparison(records)


def split(
    model: Model,
    data: FederatedData,
    parts: Sequence[str] = (),
    *,
    method: Algorithm | None = None,
    solver_steps: int = 20,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    resume: bool = False,
    alone: bool = False,
    lr: float = 0.1,
    **settings: Any,
) -> SplitComparison:
    """Find out which part of the model should be personal: a run for each candidate, and a recommendation.

    parts         such as ["input", "output", "head.*", "input+norm"] (default: 'input', 'output', 'adapter'
                  and 'norm', as far as the model has them); nothing and everything are always among them
    method        one with a personal part, whose `personal` is replaced (default: `fedalt` with this `lr`)
    solver_steps  gradient steps with which a client fits its part, to measure what is left to learn
    seeds, out, resume, alone, settings   as for `compare`

        result = pt.split(model, data, rounds=30, cohort=10, steps=5, batch=16)
        print(result.recommendation.part)
    """
    own = method if method is not None else METHODS["fedalt"](personal="output", lr=lr)
    experiment, options = described(model, data, {"method": own}, settings)
    if own.stages or "personal" not in signature(METHODS[own.name]).parameters:
        able = [name for name, m in METHODS.items() if "personal" in signature(m).parameters]
        raise check.fail("method", own.name, f"one with a personal part: {', '.join(able)}")
    wanted = [parts] if isinstance(parts, str) else list(parts)
    chosen, remarks = splits.candidates(experiment, wanted)
    asked: dict[str, Any] = {"method": own.name, "solver_steps": solver_steps}

    def study(seed: int) -> Study:
        return splits.splits(dataclasses.replace(experiment, seed=seed), wanted, **asked)

    records, _ = run_study(
        study,
        seeds_of(seeds, experiment.seed),
        out=None if out is None else check.path("out", out),
        resume=resume,
        alone=alone,
        **options,
    )
    return SplitComparison(records, splits.names(chosen), remarks)


# ---- arguments


def labels(methods: Any) -> dict[str, Algorithm]:
    """Return methods by label; those of a list have their names, numbered where they are equal."""
    listed = [methods] if isinstance(methods, Algorithm) else methods
    if not isinstance(listed, Mapping):
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise check.fail("methods", methods, "a list of methods, or {'label': method}")
        listed = _numbered(list(listed))
    if not listed:
        raise check.fail("methods", methods, "at least one method such as partita.fedavg(lr=0.1)")
    for label, method in listed.items():
        if not isinstance(method, Algorithm):
            raise check.fail(f"methods[{label!r}]", method, "a method such as partita.fedavg(lr=0.1)")
        if label in (ALONE, GLOBAL) and method.name != label:
            reason = f"{label!r} is what all methods are compared with"
            raise check.fail("methods", label, f"partita.{label}(...), or another label", reason)
    return dict(listed)


def _numbered(methods: Sequence[Any]) -> dict[str, Any]:
    labelled: dict[str, Any] = {}
    for method in methods:
        name = getattr(method, "name", "") or "method"
        candidates = (name, *(f"{name}-{i}" for i in range(2, len(methods) + 2)))
        labelled[next(x for x in candidates if x not in labelled)] = method
    return labelled


def described(
    model: Model, data: FederatedData, methods: Mapping[str, Algorithm], settings: Mapping[str, Any]
) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment of the first method, and those of the settings that are none of its fields."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    known = [name for name in declarations(Settings) if name not in ("out", "resume", "baselines", "report")]
    for name in settings:
        if name not in known:
            reason = f"no such setting{check.meant(name, known)}"
            raise check.fail(name, settings[name], f"one of {', '.join(known)}", reason)
    fields = {f.name for f in dataclasses.fields(Experiment)}
    own = {k: v for k, v in settings.items() if k in fields}
    experiment = Experiment(model=model, data=data, algorithm=next(iter(methods.values())), **own)
    experiment.settings.checked(data.clients, data.names)  # refused before anything is written
    options = {k: v for k, v in settings.items() if k not in fields}
    workers_requested("workers", options.get("workers"))
    callbacks = options.pop("callbacks", ())
    options["listen"] = lambda folder: callbacks  # noqa: ARG005
    if options.get("progress") is False:
        options["announce"] = lambda text: None  # noqa: ARG005
    return experiment, options


def seeds_of(seeds: Any, first: int) -> list[int]:
    """Return the seeds: so many from the first on, or those listed."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        listed = [check.integer("seeds", seed, low=0) for seed in seeds]
        if not listed or len(set(listed)) < len(listed):
            raise check.fail("seeds", seeds, "a number of seeds, or different seeds in a list")
        return listed
    return list(range(first, first + check.integer("seeds", seeds, low=1)))


# ---- cells


def _flat(row: Mapping[str, Any], spreads: Iterable[str] = SPREADS) -> dict[str, Any]:
    """Return a row with the means of its spreads in place and the deviations beside them.

    What is a group of figures has a name for each: `chance_vs_global.low`.
    """
    plain: dict[str, Any] = {}
    for key, value in row.items():
        if key in spreads:
            plain[key], plain[f"{key}_std"] = (value["mean"], value["std"]) if value else (None, None)
        elif isinstance(value, Mapping):
            plain |= {f"{key}.{name}": v for name, v in value.items() if not isinstance(v, Mapping)}
        else:
            plain[key] = value
    return plain


def _number(row: Mapping[str, Any], key: str) -> str:
    if row[key] is None:
        return "-"
    return f"{row[key]:.4f}" + (f" ± {row[f'{key}_std']:.4f}" if row["seeds"] > 1 else "")


def _interval(row: Mapping[str, Any]) -> str:
    return " to ".join(f"{x:.4f}" for x in row["interval"]) if row["interval"] else "-"


def _share(row: Mapping[str, Any], key: str) -> str:
    return "-" if row[key] is None else f"{row[key]:.3g}/{row['scored']:g}"


def aligned(figure: Table) -> str:
    """Return a table in columns of equal width."""
    lines = [figure.columns, *figure.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(figure.columns))]
    texts = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    return "\n".join([figure.title, *texts, *([figure.note] if figure.note else [])])


def as_html(figure: Table) -> str:
    """Return a small plain table for a notebook."""
    return notebook.table(figure.title, figure.columns, figure.rows, figure.note)
