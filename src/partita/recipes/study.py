"""A study: experiments that are compared, on the same data and from the same initial weights.

It is a loop over `federate` and nothing else. A variant may begin with the model that another one has trained
(the pipelines of a paper share their first, longest stage), and is compared with variants that have run.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from partita.api import Run, deadline, load
from partita.core import check
from partita.core.parts import StagePlan
from partita.engine.callbacks import Callback
from partita.engine.execute import names_of
from partita.engine.initial import own_copy
from partita.engine.record import Record, read, read_json, write_page
from partita.engine.stopping import Stopped
from partita.engine.store.files import write_json, write_text
from partita.engine.store.output import new_folder, new_page
from partita.recipes.experiment import Experiment

Runs = dict[str, list[Record]]
FILE = "study.json"
TINY = 1e-9  # seconds: a run takes at least a round, however little time is left


class Table(NamedTuple):
    """Figures for people: `rows` of cells under `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """As it stands in a document."""
        lines = [
            self.columns,
            tuple("---" if i == 0 else "---:" for i in range(len(self.columns))),
            *self.rows,
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{self.title}**\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


@dataclass(frozen=True)
class Variant:
    """One experiment of a study.

    start      the variant whose model it begins with
    baselines  variants it is compared with: {'global': NAME, 'local': NAME}; without, none are trained
    """

    experiment: Experiment
    start: str | None = None
    baselines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Variants in the order in which they run, for one seed; `tables` makes figures of all seeds' runs."""

    variants: Mapping[str, Variant]
    tables: Callable[[Mapping[str, Sequence[Record]]], Sequence[Table]] = lambda runs: ()  # noqa: ARG005


def run_study(
    build: Callable[[int], Study],
    seeds: Sequence[int],
    *,
    about: Mapping[str, Any] | None = None,
    out: Path | None = None,
    resume: bool = False,
    only: Sequence[str] = (),
    max_time: float | str | None = None,
    announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    listen: Callable[[Path | None], Sequence[Callback]] = lambda folder: (),  # noqa: ARG005
    **options: Any,
) -> tuple[Runs, Sequence[Table]]:
    """Every variant for every seed: the runs by name, a run per seed, and the study's tables.

    build    the study for a seed
    about    what to write into study.json: how the study was asked for
    out      a folder for each run below this one, and the tables; `resume` goes on where it was
    only     patterns of the variants to run now, and of what they need; the others can follow later, or in
             another process as soon as what both need is there, with the same `out` and `resume`
    max_time seconds, or such as '2h', for all of it: then it ends with `partita.Stopped`; `resume` goes on
    listen   callbacks for a run with this folder
    options  further arguments of `federate`
    """
    runs: Runs = {}
    end = deadline(max_time, out)
    study = build(seeds[0])
    _check_names(study)
    wanted = _wanted(study, only)
    for name in wanted:
        _check_parts(study.variants[name].experiment)
    total, done, begun = len(wanted) * len(seeds), 0, False
    _open(out, {"variants": list(study.variants), "seeds": list(seeds), **(about or {})}, resume)
    for i, seed in enumerate(seeds):
        study = study if i == 0 else build(seed)
        trained: dict[str, Record] = {}
        for name, variant in study.variants.items():
            folder = None if out is None else out / name / f"seed-{seed}"
            there = folder is not None and (folder / "summary.json").exists()
            if name in wanted:
                done += 1
                announce(f"{done}/{total}  {name}, seed {seed}{' (already there)' if there else ''}")
                if begun and not there and time.monotonic() >= end:
                    raise Stopped(f"{name}, seed {seed}", 0)
                begun = begun or not there
            elif not there or not set(_needs(variant)) <= set(trained):
                continue  # of what other calls have done, what is there is looked at too
            given = {**options, "callbacks": listen(folder), **_left(end, variant)}
            trained[name] = _run(variant, trained, folder, resume, given)
            runs.setdefault(name, []).append(_figures(trained[name]))
            _forget(trained, study, name)
    if out is not None and only:  # what other calls have done
        runs = read_study(out)
    complete = all(len(runs.get(name, ())) == len(seeds) for name in study.variants)
    tables = study.tables(runs) if complete else ()
    if out is not None:
        if tables:
            write_text(out / "tables.md", "\n".join(table.markdown() for table in tables))
        if runs:
            write_page(runs, out / "report.html")
    return runs, tables


def read_study(folder: Path) -> Runs:
    """The finished runs of a study, by variant."""
    about = _about(folder)
    runs: Runs = {}
    for name in about["variants"]:
        for seed in about["seeds"]:
            place = folder / name / f"seed-{seed}"
            if (place / "summary.json").exists():
                runs.setdefault(name, []).append(read(place))
    if not runs:
        raise check.fail("folder", str(folder), "a study with at least one finished run")
    return runs


def _about(folder: Path) -> dict[str, Any]:
    """What study.json says: names that can be folders', and seeds."""
    found = read_json(folder / FILE)
    names, seeds = found.get("variants"), found.get("seeds")
    if not _each(names, lambda n: isinstance(n, str) and _can_be_folder(n)) or not _each(
        seeds, lambda s: type(s) is int and s >= 0
    ):
        raise check.fail("file", str(folder / FILE), "variants and seeds, as a study writes them")
    return found


def _each(values: Any, good: Callable[[Any], bool]) -> bool:
    """Whether it is a list of such values, each there once."""
    return isinstance(values, list) and all(map(good, values)) and len(set(values)) == len(values)


def _can_be_folder(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


def unfinished(folder: Path) -> str:
    """'2 of 8 runs are there', or nothing when all are."""
    about, there = _about(folder), sum(map(len, read_study(folder).values()))
    total = len(about["variants"]) * len(about["seeds"])
    return f"{there} of {total} runs are there" if there < total else ""


def is_study(folder: Path) -> bool:
    """Whether a study wrote this folder."""
    return (folder / FILE).is_file()


def _left(end: float, variant: Variant) -> dict[str, float]:
    """The time that is left for a run. One that leaves no checkpoint is not stopped in its middle."""
    if end == math.inf or variant.experiment.checkpoint_every == 0:
        return {}
    return {"max_time": max(end - time.monotonic(), TINY)}


def _run(
    variant: Variant,
    trained: Mapping[str, Record],
    folder: Path | None,
    resume: bool,
    options: Mapping[str, Any],
) -> Record:
    experiment = variant.experiment
    if variant.start is not None:
        before = trained[variant.start]
        if not isinstance(before, Run):  # finished by an earlier call
            assert folder is not None
            before = load(folder.parents[1] / variant.start / folder.name)
        experiment = replace(experiment, model=_continued(experiment, before))
    baselines = {kind: trained[name] for kind, name in variant.baselines.items()}
    given = {"baselines": baselines, "report": False, **options}
    if folder is not None and resume and (folder / "summary.json").exists():
        experiment.check_finished(folder, **given)
        return read(folder)
    again = resume and folder is not None and (folder / "config.json").exists()
    if again and experiment.checkpoint_every == 0:  # nothing to go on from: it begins anew
        assert folder is not None
        shutil.rmtree(folder)
        again = False
    with _trained() if variant.start else contextlib.nullcontext():
        return experiment.run(**given, out=folder, resume=again)


@contextlib.contextmanager
def _trained() -> Iterator[None]:
    """No doubt whether a model is trained that another variant has left, however little it has learnt."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "finetune: the model")
        yield


def _needs(variant: Variant) -> list[str]:
    """The variants that it begins with or is compared with."""
    return [name for name in (variant.start, *variant.baselines.values()) if name is not None]


def _check_parts(experiment: Experiment) -> None:
    """A wrong personal part, or a schedule that does not fit, is refused before any variant has run."""
    model = own_copy(experiment.model, experiment.seed)
    names = names_of(model, experiment.data)
    for stage in experiment.algorithm.stages or (StagePlan(experiment.algorithm),):
        stage.algorithm.partition(model, names)
        once = stage.rounds is None and stage.epochs is not None  # all clients at once, in step
        schedule = stage.schedule or check.schedule("schedule", None if once else experiment.schedule)
        if schedule is not None:
            clients = experiment.data.clients
            schedule.of(stage.algorithm).check(clients, stage.cohort or experiment.cohort or clients)


def _continued(experiment: Experiment, run: Run) -> nn.Module:
    """The experiment's model with the weights that the other run has trained."""
    model = own_copy(experiment.model, experiment.seed)
    there = model.state_dict()
    if run.holdings.untrained:
        own = ", ".join(run.holdings.untrained[:3])
        allowed = f"a variant whose server trains a whole model; this one's has not trained {own}"
        raise check.fail("start", run.facts["algorithm"], allowed)
    wrong = [k for k, v in run.shared.items() if k not in there or there[k].shape != v.shape]
    if wrong:
        raise check.fail("start", wrong[0], "a variant whose model fits into this one's")
    model.load_state_dict(run.shared, strict=False)
    return model


def _figures(run: Record) -> Record:
    """Without its tensors: a study may have many runs."""
    return Record(run.metrics, run.clients, run.config, run.facts)


def _forget(trained: dict[str, Record], study: Study, last: str) -> None:
    """Drop models that no later variant starts from or is compared with."""
    names = list(study.variants)
    later = [study.variants[n] for n in names[names.index(last) + 1 :]]
    needed = {n for v in later for n in _needs(v)}
    for name in [n for n in trained if n not in needed]:
        del trained[name]


def _wanted(study: Study, only: Sequence[str]) -> list[str]:
    """The variants that match, and those that they need, in order."""
    for pattern in only:
        if not fnmatch.filter(study.variants, pattern):
            known = ", ".join(study.variants)
            raise check.fail(
                "only", pattern, f"one of {known}, or a pattern{check.meant(pattern, study.variants)}"
            )
    wanted = {n for n in study.variants if not only or any(fnmatch.fnmatchcase(n, p) for p in only)}
    for name in reversed(list(study.variants)):
        if name in wanted:
            wanted |= set(_needs(study.variants[name]))
    return [n for n in study.variants if n in wanted]


def _check_names(study: Study) -> None:
    seen: set[str] = set()
    for name, variant in study.variants.items():
        for other in _needs(variant):
            if other not in seen:
                raise check.fail("variant", other, f"one that runs before {name!r}")
        if not _can_be_folder(name):
            raise check.fail("variant", name, "a name that can be a folder's")
        seen.add(name)


def _open(out: Path | None, about: Mapping[str, Any], resume: bool) -> None:
    if out is None:
        return
    check.path("out", out)
    if (out / "config.json").exists():
        raise check.fail("out", str(out), "a new folder: this one holds a single run")
    if is_study(out):
        if not resume:
            raise check.fail("out", str(out), "a new folder, or --resume to go on with the study in it")
        before = _about(out)
        for key in about:
            if before.get(key) != about[key]:
                raise ValueError(
                    f"resume: {out} holds a study with other {key} ({before.get(key)!r} -> {about[key]!r})"
                )
        new_page("out", out / "report.html")
        return
    new_folder("out", out, left=r"\.study\.json\.tmp")
    write_json(out / FILE, about)


def mean_std(values: Iterator[float] | Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """'93.18 ± 0.05', over seeds; one value alone has no deviation, and NaN is no value."""
    found = np.array([scale * v for v in values])
    found = found[~np.isnan(found)]
    if not len(found):
        return "-"
    spread = f" ± {found.std(ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{found.mean():.{digits}f}{spread}"
