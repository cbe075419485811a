"""`partita.tune`: search for good options of methods, with equal budgets, by scores on validation samples.

    trial 0      the method as it was given
    trial n      what the sampler (TPE) proposes, given the trials of earlier generations and the seed, and
                 nothing else; a generation is at most 16 trials, which train as one batch where they can
    objective    the mean validation score of the clients' own models; test samples are never looked at

A trial is a line of trials.jsonl. As a proposal is a function of the lines of earlier generations, a search
that was killed goes on as if it had not been: what is lost are the trials that were running.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from partita.algorithms import METHODS
from partita.api import deadline
from partita.core import check
from partita.core.options import Option, Range, declared, members, signature
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.callbacks import Callback, Event
from partita.engine.description import describe
from partita.engine.divergence import sentences
from partita.engine.lockstep.runs import MOST_TOGETHER, in_lockstep
from partita.engine.record import Record, lookup, number, read_json
from partita.engine.stopping import Stopped
from partita.engine.store.files import append_jsonl, plain, read_jsonl, write_json
from partita.engine.store.output import new_folder, new_page
from partita.engine.workers.crew import staying
from partita.optim.rates import size_of, with_size
from partita.recipes.comparison import Methods, Model, aligned, as_html, described, labels
from partita.recipes.experiment import Experiment, changed
from partita.recipes.in_lockstep import can_be_joined
from partita.recipes.study import Study, check_parts
from partita.recipes.tables import Table
from partita.recipes.versus import beside, separate
from partita.report import tuning as pages
from partita.report import write_whole

LOG = logging.getLogger("partita")

FILE, TRIALS, PAGE = "tuning.json", "trials.jsonl", "report.html"
APART = 1 << 40
"""Trials run with the seed `seed + APART`, final runs with `seed`, `seed + 1`, ...: they share no draw."""
WARMUP = 2
"""Evaluations before which no trial is pruned: small steps still look worse than they are."""
DIGITS = 3
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"

Search = Mapping[str, Range | Sequence[Any] | bool]
"""Where to search instead, by option ('lr') or by label and option ('fedalt.lr'): a range, a list of values,
True for an option that is searched only when asked for, False for one that keeps its value."""


def validation_score(record: Record) -> float | None:
    """Return the mean validation score of the clients' own models; refuse runs on data without such samples.

    None where training left no score that is a number.
    """
    scores = record.summary().get("validation")
    if scores is None:
        raise _no_validation()
    return number(lookup(scores, "personal"))


def check_validation(data: FederatedData) -> None:
    """Refuse data without validation samples."""
    if not int(data.validation[:, 1].sum()):
        raise _no_validation()


def _no_validation() -> check.Refused:
    reason = "tuning needs validation samples, and this data has none: by test scores it would be cheating"
    return check.fail(
        "data", "no validation samples", "data with such, as data.hold_out(validation=0.1) makes them", reason
    )


# ---- what is searched


@dataclass(frozen=True)
class Dimension:
    """An option that is searched.

    values   the range, or the candidates
    integer  whether it is a whole number
    start    the value of the first trial; None where the sampler has no word for it
    rate     a learning rate whose size is searched, and whose course over the rounds stays
    """

    name: str
    values: Range | tuple[Any, ...]
    integer: bool = False
    start: Any = None
    rate: Any = None

    def option(self, param: Any) -> Any:
        """Return the value of the option that the sampler's number stands for."""
        if not isinstance(self.values, Range):
            return self.values[param]
        return param if self.rate is None else with_size(self.rate, param)

    def rounded(self, param: Any) -> Any:
        """Return the sampler's number with as many digits as anybody would write."""
        if not isinstance(param, float) or not isinstance(self.values, Range):
            return param
        return min(max(float(f"{param:.{DIGITS}g}"), self.values.low), self.values.high)

    @property
    def log(self) -> bool:
        """Whether it is searched on a logarithmic scale."""
        return isinstance(self.values, Range) and self.values.log


def space(algorithm: Algorithm, search: Search | None = None, label: str = "") -> dict[str, Dimension]:
    """Return what is searched of a method, by option; those of a pipeline are '0.lr', '1.lr', ..."""
    dimensions = {}
    for name, kind, option, value, fallback in _options(algorithm):
        wish = (search or {}).get(f"{label}.{name}", (search or {}).get(name))
        dimension = _dimension(name, kind, option, value, fallback, wish)
        if dimension is not None:
            dimensions[name] = dimension
    return dimensions


def _options(algorithm: Algorithm, prefix: str = "") -> Iterator[tuple[str, Any, Option, Any, Any]]:
    """Yield name, type, declaration and value of each option, and the value that it has where it is None."""
    if algorithm.name == "pipeline":
        for i, stage in enumerate(algorithm.stages):
            yield from _options(stage.algorithm, f"{prefix}{i}.")
        return
    if algorithm.name not in METHODS:
        raise check.fail("methods", algorithm.name or algorithm, "methods that are made by @partita.method()")
    values = algorithm.options
    for p in signature(METHODS[algorithm.name]).parameters.values():
        kind, option = declared(p.annotation)
        yield f"{prefix}{p.name}", kind, option, values.get(p.name), values.get(option.like)


def _dimension(
    name: str, kind: Any, option: Option, value: Any, fallback: Any, wish: Any
) -> Dimension | None:
    """Return how an option is searched; None if it is not."""
    if wish is False or (wish is None and (not isinstance(option.search, Range) or option.search.asked)):
        return None
    values = option.search if wish is None or wish is True else wish
    if values is None:
        values = option.choices or ((False, True) if kind is bool else None)
    if values is None:
        raise check.fail(f"search[{name!r}]", wish, "a list of values: this option declares no range")
    start = fallback if value is None else value
    if not isinstance(values, Range):
        candidates = _candidates(name, values)
        places = [i for i, candidate in enumerate(candidates) if describe(candidate) == describe(start)]
        return Dimension(name, candidates, start=places[0] if places else None)
    numbers = {float, int} & {*members(kind)}
    if not numbers:
        raise check.fail(f"search[{name!r}]", wish, "a list of values: this option is no number")
    rate = None if size_of(start) is None else start
    start = start if rate is None else size_of(rate)
    if callable(start):  # a rate of the user's own, whose size has no name
        return None
    start = number(start)
    values = _around(values, start)
    integer = float not in numbers
    inside = start if start is not None and start in values else None
    return Dimension(name, values, integer, int(inside) if integer and inside is not None else inside, rate)


def _around(values: Range, start: float | None) -> Range:
    """Return the range; beyond the given value, with a decade of room, where that is not inside of it."""
    if start is None or (values.log and start <= 0) or values.low < start < values.high:
        return values
    room = 10.0 if values.log else 1.0
    return replace(values, low=min(values.low, start / room), high=max(values.high, start * room))


def _candidates(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        allowed = "partita.Range(low, high, log=True), a list, True or False"
        raise check.fail(f"search[{name!r}]", values, allowed)
    return tuple(values)


def _check_search(search: Any, spaces: Mapping[str, Algorithm]) -> None:
    """Refuse a name in `search` that is no option of any method."""
    if search is not None and not isinstance(search, Mapping):
        raise check.fail("search", search, "such as {'lr': partita.Range(0.001, 1, log=True)}")
    known = [(label, name) for label, method in spaces.items() for name, *_ in _options(method)]
    names = dict.fromkeys([*(name for _, name in known), *(f"{label}.{name}" for label, name in known)])
    for name in search or {}:
        check.choice("search", name, list(names))


# ---- trials


class Trial(NamedTuple):
    """One run of the search.

    label, number  the method, and which of its trials
    state          'complete', 'pruned' (ended early, as it did worse than half of the others), or 'failed'
    score          on validation samples; of a pruned trial the last one, None of a failed one
    params         what the sampler chose
    options        the same as values of the method's options, in JSON's types
    curve          (round, validation score) of each evaluation
    reason         why it failed
    """

    label: str
    number: int
    state: str
    score: float | None
    params: dict[str, Any]
    options: dict[str, Any]
    curve: list[tuple[int, float]]
    higher_is_better: bool | None
    metric: str | None
    seconds: float
    reason: str = ""


class _Ended(Exception):
    """Ends a trial before its last round."""

    def __init__(self, state: str, reason: str = "") -> None:
        super().__init__(state, reason)
        self.state, self.reason = state, reason


class _Watch(Callback):
    """Follows a trial: ends it where training diverges, or where `hopeless(round, score)` says so."""

    def __init__(self, hopeless: Callable[[int, float], bool]) -> None:
        self.curve: list[tuple[int, float]] = []
        self._hopeless, self._rounds = hopeless, 0

    def start(self, what: str, round: int, rounds: int) -> None:  # noqa: ARG002
        self._rounds = rounds

    def round(self, event: Event) -> None:
        if event.diverged:
            raise _Ended(FAILED, f"training diverged in round {event.round}")

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:  # noqa: ARG002
        score, now = number(row.get("validation.personal")), int(row["round"])
        if score is None:
            return
        self.curve.append((now, score))
        hopeless = self._hopeless(now, score)  # told of every score
        if hopeless and len(self.curve) > WARMUP and now < self._rounds:
            raise _Ended(PRUNED)


def attempt(
    experiment: Experiment,
    label: str,
    trial: _Proposal,
    dimensions: Mapping[str, Dimension],
    options: Mapping[str, Any],
) -> Trial:
    """Run a trial; what diverges, or cannot be run with these options, is a failed one."""
    watch, begun = _Watch(trial.hopeless), time.monotonic()
    state, score, reason = COMPLETE, None, ""
    record: Record | None = None
    try:
        method = changed(experiment.algorithm, trial.options)
        record = replace(experiment, algorithm=method).run(
            **{**options, "callbacks": [watch, *options.get("callbacks", ())]}
        )
        score = validation_score(record)
        if diverged := sentences(record.summary().get("diverged")):
            raise _Ended(FAILED, diverged[0])
        if score is None:
            raise _Ended(FAILED, "no client has a validation score")
    except _Ended as end:
        state, reason = end.state, end.reason
        score = watch.curve[-1][1] if state == PRUNED else None
    except (ValueError, ArithmeticError, RuntimeError) as error:
        if trial.number == 0 or (record is not None and isinstance(error, check.Refused)):
            raise  # the request itself is wrong, or the data
        state, reason = FAILED, check.named_reason(error)
    facts = {} if record is None else record.summary()
    return Trial(
        label,
        trial.number,
        state,
        score,
        trial.params,
        plain(describe({name: dimensions[name].option(value) for name, value in trial.params.items()})),
        watch.curve,
        None if record is None else record.higher_is_better,
        facts.get("metric"),
        round(time.monotonic() - begun, 3),
        reason,
    )


# ---- the sampler


def generation_size(budget: int) -> int:
    """Return how many trials are a generation: all generations of a budget are about as large."""
    return -(-budget // -(-budget // MOST_TOGETHER))


class _Proposal(NamedTuple):
    number: int
    params: dict[str, Any]
    options: dict[str, Any]
    hopeless: Callable[[int, float], bool]


def propose(
    dimensions: Mapping[str, Dimension],
    done: Sequence[Trial],
    number: int,
    budget: int,
    seed: int,
    label: str,
) -> list[_Proposal]:
    """Return the trials of a generation: a function of those `done` in earlier ones, budget and seed.

    The first ones are drawn at random. Later each one is proposed as if those before it in its generation had
    turned out badly (the constant liar), so that they are not all at the same place.
    """
    optuna = _optuna()
    known = [t.higher_is_better for t in done if t.higher_is_better is not None]
    sign = 1.0 if not known or known[0] else -1.0
    distributions = {d.name: _distribution(optuna, d) for d in dimensions.values()}
    key = hashlib.sha256(f"{seed}/{label}/{number}".encode()).digest()
    drawn, samplers = int.from_bytes(key[:4], "big"), optuna.samplers
    startup = max(3, min(budget // 4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older versions call the liar experimental
        study = optuna.create_study(
            direction="maximize",
            sampler=samplers.TPESampler(seed=drawn, n_startup_trials=2 * startup, constant_liar=True)
            if done
            else samplers.RandomSampler(seed=drawn),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=startup, n_warmup_steps=0),
        )
        for trial in done:
            study.add_trial(_frozen(optuna, trial, sign, distributions))
        asked = [study.ask(distributions) for _ in range(generation_size(budget))]

    def proposed(number: int, asked: Any) -> _Proposal:
        def hopeless(now: int, score: float) -> bool:
            asked.report(sign * score, now)
            return bool(known) and asked.should_prune()

        params = {name: dimensions[name].rounded(asked.params[name]) for name in dimensions}
        options = {name: dimensions[name].option(value) for name, value in params.items()}
        return _Proposal(number, params, options, hopeless)

    return [proposed(number + i, each) for i, each in enumerate(asked)]


def _as_given(dimensions: Mapping[str, Dimension]) -> _Proposal:
    """Return trial 0: the method as it was given."""
    params = {d.name: d.start for d in dimensions.values() if d.start is not None}
    return _Proposal(0, params, {}, lambda now, score: False)  # noqa: ARG005


def _frozen(optuna: Any, trial: Trial, sign: float, distributions: Mapping[str, Any]) -> Any:
    """Return a trial as the sampler knows it; one that failed is as bad as a trial can be."""
    states = optuna.trial.TrialState
    complete = trial.state == COMPLETE
    assert not complete or trial.score is not None
    return optuna.trial.create_trial(
        state=states.COMPLETE if complete else states.PRUNED,
        value=sign * trial.score if complete and trial.score is not None else None,
        params=trial.params,
        distributions={name: distributions[name] for name in trial.params},
        intermediate_values={now: sign * score for now, score in trial.curve if trial.state != FAILED},
    )


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    values = dimension.values
    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(tuple(range(len(values))))
    if dimension.integer:
        return optuna.distributions.IntDistribution(math.ceil(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


@functools.cache
def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        needed = f"the package optuna (pip install 'partita[tune]'); {check.reason(error)}"
        raise check.fail("tune", "optuna", needed) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ---- the search


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """What `partita.tune` returns: what was tried, and the best options of each method.

    methods  as they were given, by label
    trials   in the order in which they ended
    spaces   what was searched, by label and option
    """

    methods: dict[str, Algorithm]
    spaces: dict[str, dict[str, Dimension]]
    budget: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> dict[str, Algorithm]:
        """Each method with the best options that were found; as given, where no trial was completed."""
        return {label: self._with(label, self.best_trial(label)) for label in self.methods}

    def of(self, label: str) -> list[Trial]:
        """The trials of a method, by number."""
        return sorted((t for t in self.trials if t.label == label), key=lambda t: t.number)

    def best_trial(self, label: str) -> Trial | None:
        """The trial of a method with the best validation score; the earliest of equals."""
        check.choice("label", label, list(self.methods))
        complete = [t for t in self.of(label) if t.state == COMPLETE]
        if not complete:
            return None
        sign = 1.0 if complete[0].higher_is_better else -1.0
        return max(complete, key=lambda t: sign * (t.score or 0.0))

    def _with(self, label: str, trial: Trial | None) -> Algorithm:
        method = self.methods[label]
        if trial is None or trial.number == 0:
            return method
        dimensions = self.spaces[label]
        return changed(method, {name: dimensions[name].option(v) for name, v in trial.params.items()})

    def expression(self, label: str, given: str = "") -> str:
        """Return the best of a method as `partita compare --algorithms` reads it; `given` is what was."""
        trial = self.best_trial(label)
        found = {} if trial is None or trial.number == 0 else trial.options
        chosen = {name: _written(value) for name, value in found.items()}
        if self.methods[label].name != "pipeline":
            return _call(given or self.methods[label].name, chosen) if chosen else given or label
        stages = [stage.strip() for stage in given.split(">")]
        own = [
            {k.partition(".")[2]: v for k, v in chosen.items() if k.startswith(f"{i}.")}
            for i in range(len(stages))
        ]
        return " > ".join(map(_call, stages, own)) if given else label

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each trial, with plain values: `pandas.DataFrame(tuning.table())`."""
        return [
            {
                "label": t.label,
                "trial": t.number,
                "state": t.state,
                "validation": t.score,
                **{f"option.{name}": value for name, value in t.options.items()},
                "seconds": t.seconds,
                "reason": t.reason,
            }
            for label in self.methods
            for t in self.of(label)
        ]

    def summary(self) -> str:
        """Return what was found as text."""
        return self.figure().markdown()

    def figure(self) -> Table:
        """Return a row for each method: what was found, against what was given."""
        metric = next((t.metric for t in self.trials if t.metric), "score")
        rows = [self._cells(label) for label in self.methods]
        columns = ("method", f"validation {metric}", "as given", "complete", "pruned", "failed", "options")
        note = "chosen by validation scores; the largest of many is too good: report test scores of new runs"
        return Table(f"Best of {self.budget} trials for each method", columns, rows, note)

    def _cells(self, label: str) -> tuple[str, ...]:
        trials, best = self.of(label), self.best_trial(label)
        first = trials[0].score if trials and trials[0].state == COMPLETE else None
        counts = [str(sum(t.state == state for t in trials)) for state in (COMPLETE, PRUNED, FAILED)]
        words = "as given" if best is None else _words(best)
        scores = ("-" if s is None else f"{s:.4f}" for s in (best and best.score, first))
        return (label, *scores, *counts, words)

    def report(self, path: str | Path = "tuning.html") -> Path:
        """Write a page that opens offline: best score against budget, score against each option, trials."""
        target = new_page("path", path)
        figure = self.figure()
        logs = {(label, d.name): d.log for label, ds in self.spaces.items() for d in ds.values()}
        rows = [t._asdict() for label in self.methods for t in self.of(label)]
        write_whole(target, pages.page(rows, (figure.columns, figure.rows, figure.note), logs, self.budget))
        return target

    def __str__(self) -> str:
        return aligned(self.figure())

    def __repr__(self) -> str:
        return f"Tuning of {', '.join(self.methods)}\n{self}"

    def _repr_html_(self) -> str:
        return as_html(self.figure())


def tune(
    model: Model,
    data: Any,
    methods: Methods,
    *,
    budget: int = 20,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    search: Search | None = None,
    alone: bool = False,
    **settings: Any,
) -> Tuning:
    """Search for good options of each method, with the same number of trials, on validation samples.

    methods    {"label": method}, or a list of methods. The first trial of each is the method as it is given
    budget     trials of each method; those that are pruned or fail count, too
    seed       on which the search depends. Trials draw from seeds of their own, apart from those of the final
               runs, `seed`, `seed + 1`, ...
    out        a folder for the trials and a page; `resume` continues the search in it
    search     what to search instead of what the options declare (`partita show METHOD`): {"lr":
               partita.Range(0.01, 1, log=True), "momentum": True, "fedalt.personal": ["input", "output"],
               "lam": False}
    alone      run one trial after another; by default those of a generation train as one batch
    settings   further arguments of `federate`, the same for all methods

    The personal part, optimizers and other words are not searched unless `search` asks for it. It needs the
    package optuna: `pip install 'partita[tune]'`.

        found = pt.tune(model, data, [pt.fedalt("output", lr=0.1), pt.ditto(lr=0.1)], rounds=50)
        print(found)
        pt.compare(model, data, found.best, rounds=50)
    """
    labelled = labels(methods)
    experiment, options = described(model, data, labelled, {**settings, "seed": seed})
    study = beside(experiment, labelled)
    chosen = Study({label: study.variants[label] for label in labelled})
    callbacks = options.pop("listen")(None)
    return tune_study(
        chosen,
        budget=budget,
        out=out,
        resume=resume,
        search=search,
        alone=alone,
        **{**options, "callbacks": callbacks},
    )


@staying()
def tune_study(
    study: Study,
    *,
    budget: int,
    out: str | Path | None = None,
    resume: bool = False,
    search: Search | None = None,
    max_time: float | str | None = None,
    announce: Callable[[str], None] | None = None,
    about: Mapping[str, Any] | None = None,
    alone: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Tuning:
    """Search for the options of each variant of a study; `options` are further arguments of `federate`.

    max_time  for all trials together: then `partita.Stopped` is raised, and `resume` goes on. Trials come to
              their ends before, all of those that train as one batch
    announce  is told of each trial in a line (default: the log, `logging.getLogger("partita")`)
    about     what to write into tuning.json: how the search was asked for
    alone     run one trial after another; else those of a generation train as one batch, where that can be
    callbacks hear of each trial's rounds, one trial after another
    """
    budget = check.integer("budget", budget, low=1)
    methods = {label: variant.experiment.algorithm for label, variant in study.variants.items()}
    _check_search(search, methods)
    spaces = {label: space(method, search, label) for label, method in methods.items()}
    if budget > 1 and any(spaces.values()):
        _optuna()  # refused before the first trial
    for variant in study.variants.values():
        check_parts(variant.experiment)
        check_validation(variant.experiment.data)
    folder = None if out is None else check.path("out", out)
    if resume and folder is None:
        raise check.fail("resume", True, "out=, the folder of the search to continue")
    end, tell = deadline(max_time, folder), announce or LOG.info
    first = next(iter(study.variants.values())).experiment
    tuning = Tuning(methods, spaces, budget, [])
    tuning.trials.extend(_open(folder, _asked(first, tuning, about), resume))
    arguments = {
        **options,
        "callbacks": callbacks,
        "baselines": False,
        "report": False,
        "progress": False,
        "out": None,
    }
    begun, joined = False, not alone and can_be_joined(generation_size(budget), lambda _: callbacks, options)
    for label, variant in study.variants.items():
        seed = check.integer("seed", variant.experiment.seed, low=0, high=check.LARGEST - APART)
        experiment = replace(variant.experiment, seed=seed + APART)
        trials = budget if spaces[label] else 1  # the same again would have the same score

        def finished(trial: Trial, trials: int = trials) -> None:
            tuning.trials.append(trial)
            if folder is not None:
                append_jsonl(folder / TRIALS, trial._asdict())
            tell(_line(tuning, trial, trials))

        while left := sorted(set(range(trials)) - {t.number for t in tuning.trials if t.label == label}):
            if begun and time.monotonic() >= end:
                raise Stopped(f"trial {left[0]} of {label}", 0)
            begun = True
            first_of = left[0] - left[0] % generation_size(budget)
            earlier = [t for t in tuning.of(label) if t.number < first_of]
            own = range(first_of, first_of + generation_size(budget))
            together = [n for n in left if n in own] if joined else left[:1]
            proposals = _proposals(spaces[label], earlier, together, budget, seed, label)
            _attempt_all(experiment, label, proposals, spaces[label], arguments, finished)
        done = tuning.of(label)
        if done and not any(t.state == COMPLETE for t in done):
            reason = done[-1].reason
            check.warn(f"tune: no trial of {label} was completed ({reason}): it stays as it was given")
    if folder is not None:
        tuning.report(folder / PAGE)
    return tuning


def _proposals(
    dimensions: Mapping[str, Dimension],
    earlier: Sequence[Trial],
    numbers: Sequence[int],
    budget: int,
    seed: int,
    label: str,
) -> list[_Proposal]:
    """Return some trials of a generation."""
    first = numbers[0] - numbers[0] % generation_size(budget)
    others = [n for n in numbers if n]
    found = propose(dimensions, earlier, first, budget, seed, label) if others else []
    return [found[n - first] if n else _as_given(dimensions) for n in numbers]


def _attempt_all(
    experiment: Experiment,
    label: str,
    proposals: Sequence[_Proposal],
    dimensions: Mapping[str, Dimension],
    options: Mapping[str, Any],
    finished: Callable[[Trial], None],
) -> None:
    """Run trials, several of them as one batch; tell of each when it is over."""

    def run(proposal: _Proposal) -> None:
        finished(attempt(experiment, label, proposal, dimensions, options))

    runs = [functools.partial(run, proposal) for proposal in proposals]
    exactly = {k: options[k] for k in ("precision", "deterministic") if k in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a trial has to say is in its line
        if len(runs) == 1:
            runs[0]()
        else:
            in_lockstep(runs, **exactly)


def _asked(experiment: Experiment, tuning: Tuning, about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what tuning.json holds: all that decides the trials."""
    fields = get_type_hints(Experiment)
    settings = {k: getattr(experiment, k) for k in fields if k not in ("model", "data", "algorithm")}
    searched = {
        label: {d.name: describe(d.values) for d in ds.values()} for label, ds in tuning.spaces.items()
    }
    asked = {
        **(about or {}),
        "methods": describe(tuning.methods),
        "budget": tuning.budget,
        "searched": searched,
        "settings": describe(settings),
        "data": experiment.data.fingerprint(),
    }
    return plain(asked)  # type: ignore[no-any-return]


def _open(folder: Path | None, asked: Mapping[str, Any], resume: bool) -> list[Trial]:
    """Make the folder, or return the trials in it if they are of the same search."""
    if folder is None:
        return []
    if not (folder / FILE).exists():
        new_folder("out", folder, left=r"\.tuning\.json\.tmp")
        write_json(folder / FILE, asked)
        return []
    if not resume:
        raise check.fail("out", str(folder), "a new folder, or resume to continue the search in it")
    before = read_json(folder / FILE)
    for key in asked:
        if before.get(key) != asked[key]:
            reason = f"{folder} holds a search with other {key}"
            allowed = f"{check.shortened(before.get(key))}, or a new folder"
            raise check.fail("resume", asked[key], allowed, reason)
    new_page("out", folder / PAGE)
    if not (folder / TRIALS).exists():
        return []
    return [_read(row, folder / TRIALS) for row in read_jsonl(folder / TRIALS)]


def _read(row: Mapping[str, Any], path: Path) -> Trial:
    try:
        return Trial(**{**row, "curve": [(int(now), float(score)) for now, score in row["curve"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise check.fail("file", str(path), f"trials, as a search writes them ({error!r})") from None


# ---- words


def _line(tuning: Tuning, trial: Trial, trials: int) -> str:
    """Return such as 'fedalt 3/20  0.9312 (best 0.9400)  lr=0.0123'."""
    best = tuning.best_trial(trial.label)
    score = f"{trial.score:.4f}" if trial.state == COMPLETE and trial.score is not None else trial.state
    lead = "" if best is None else " (best so far)" if best is trial else f" (best {best.score:.4f})"
    reason = f"; {trial.reason}" if trial.reason else ""
    return f"{trial.label} {trial.number + 1}/{trials}  {score}{lead}  {_words(trial)}{reason}"


def _words(trial: Trial) -> str:
    """Return such as 'lr=0.0123, lam=0.5', or 'as given: ...' for the first trial."""
    values = {
        name: f"{value:.4g}" if isinstance(value, float) else _written(value)
        for name, value in trial.options.items()
    }
    words = ", ".join(f"{name}={value}" for name, value in values.items())
    return words if trial.number else f"as given{words and ': '}{words}"


def _call(given: str, options: Mapping[str, str]) -> str:
    """Return the call of a method with these options in place of those that it has."""
    name, _, inside = given.removesuffix(")").partition("(")
    before = dict(word.split("=", 1) for word in separate(inside))
    words = ", ".join(f"{k}={v}" for k, v in {**before, **options}.items())
    return f"{name}({words})" if words else name


def _written(value: Any) -> str:
    """Return a value as a call has it; a rate by its constructor."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{k}={_written(v)}" for k, v in value.items() if k != "name")
        return f"{value['name']}({rest})"
    return repr(value)
