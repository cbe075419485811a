"""A study: experiments that are compared, on the same data and from the same initial weights.

It is a loop over `federate` and nothing else. A variant may begin with the model that another one has trained
(the pipelines of a paper share their first, longest stage), and is compared with variants that have run.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.api import deadline
from partita.core import check
from partita.core.parts import Algorithm, StagePlan
from partita.engine.callbacks import Callback
from partita.engine.initial import own_copy
from partita.engine.model.probe import names_of
from partita.engine.record import Record, read, read_json
from partita.engine.stopping import Stopped
from partita.engine.store.files import json_text, write_json, write_text
from partita.engine.store.output import new_folder, new_page
from partita.engine.workers.crew import staying
from partita.recipes.experiment import Experiment
from partita.recipes.in_lockstep import can_be_joined, together
from partita.recipes.side_by_side import can_be_spread, side_by_side
from partita.recipes.tables import Runs, Table
from partita.recipes.variant import Variant as Variant
from partita.recipes.variant import forget, run_variant, time_left, without_tensors
from partita.report import write_page
from partita.report.charts import Chart, as_chart
from partita.report.everyone import FILE as FILE_OF_CLIENTS
from partita.report.everyone import write_everyone

LOG = logging.getLogger("partita")

FILE, FILE_OF_FIGURES = "study.json", "figures.json"


@dataclass(frozen=True)
class Study:
    """Variants in the order in which they run, for one seed; `tables` and `charts` are of all seeds' runs."""

    variants: Mapping[str, Variant]
    tables: Callable[[Runs], Sequence[Table]] = lambda runs: ()  # noqa: ARG005
    charts: Callable[[Runs], Sequence[Chart]] = lambda runs: ()  # noqa: ARG005


def under(experiment: Experiment, methods: Mapping[str, Algorithm]) -> dict[str, Variant]:
    """Return the experiment as a variant under each of these methods."""
    return {name: Variant(replace(experiment, algorithm=method)) for name, method in methods.items()}


@check.each_warning_once()
@staying()
def run_study(
    build: Callable[[int], Study],
    seeds: Sequence[int],
    *,
    about: Mapping[str, Any] | None = None,
    out: Path | None = None,
    resume: bool = False,
    only: Sequence[str] = (),
    max_time: float | str | None = None,
    alone: bool = False,
    announce: Callable[[str], None] = LOG.info,
    listen: Callable[[Path | None], Sequence[Callback]] = lambda folder: (),  # noqa: ARG005
    **options: Any,
) -> tuple[dict[str, list[Record]], Sequence[Table]]:
    """Run every variant for every seed; return the records by variant, one per seed, and the study's tables.

    build     makes the study for a seed
    about     what to write into study.json: how the study was asked for
    out       a folder for each run below this one, and the tables; `resume` continues the study in it
    only      patterns of the variants to run now, with those that they need; the others can follow later, or
              in another process once what both need has finished, with the same `out` and `resume`
    max_time  seconds, or such as '2h', for all runs together: then `partita.Stopped` is raised
    alone     make one run after another; else those of a method train as one batch, where that can be
    announce  is told of each run that begins (default: the log, `logging.getLogger("partita")`)
    listen    makes the callbacks of a run with this folder
    options   further arguments of `federate`
    """
    end = deadline(max_time, out)
    study = build(seeds[0])
    _check_names(study)
    wanted = _wanted(study, only)
    for name in wanted:
        check_parts(study.variants[name].experiment)
    _open(out, {"variants": list(study.variants), "seeds": list(seeds), **(about or {})}, resume)
    runs = zip(seeds, itertools.chain([study], map(build, seeds[1:])))
    if len(wanted) * len(seeds) > 1 and can_be_spread(study.variants, out, listen, options):
        by_seed = {seed: each.variants for seed, each in runs}
        records = side_by_side(by_seed, wanted, out, resume, end, announce, options)
    elif not alone and can_be_joined(len(wanted) * len(seeds), listen, options):
        studies = ((seed, each.variants) for seed, each in runs)
        records = together(studies, len(seeds), wanted, out, resume, end, announce, options)
    else:
        records = _one_after_another(runs, len(seeds), wanted, out, resume, end, announce, listen, options)
    if out is not None and only:
        records = read_study(out)  # with the runs of other calls
    complete = all(len(records.get(name, ())) == len(seeds) for name in study.variants)
    tables = study.tables(records) if complete else ()
    if out is not None:
        charts = study.charts(records) if complete else ()
        if tables:
            write_text(out / "tables.md", "\n".join(table.markdown() for table in tables))
        if tables or charts:
            write_text(out / FILE_OF_FIGURES, json_text({"tables": tables, "charts": charts}))
        if records:
            write_everyone(records, out / FILE_OF_CLIENTS)
            write_page(records, out / "report.html", tables, charts)
    return records, tables


def _one_after_another(
    runs: Iterable[tuple[int, Study]],
    seeds: int,
    wanted: Sequence[str],
    out: Path | None,
    resume: bool,
    end: float,
    announce: Callable[[str], None],
    listen: Callable[[Path | None], Sequence[Callback]],
    options: Mapping[str, Any],
) -> dict[str, list[Record]]:
    """Make all runs in this process, one after another."""
    records: dict[str, list[Record]] = {}
    total, count, begun = len(wanted) * seeds, 0, False
    for seed, study in runs:
        trained: dict[str, Record] = {}
        for name, variant in study.variants.items():
            folder = None if out is None else out / name / f"seed-{seed}"
            finished = folder is not None and (folder / "summary.json").exists()
            if name in wanted:
                count += 1
                announce(f"{count}/{total}  {name}, seed {seed}{' (finished before)' if finished else ''}")
                if begun and not finished and time.monotonic() >= end:
                    raise Stopped(f"{name}, seed {seed}", 0)
                begun = begun or not finished
            elif not finished or not set(variant.needs) <= set(trained):
                continue  # finished runs of other calls are read too
            arguments = {**options, "callbacks": listen(folder), **time_left(end, variant)}
            trained[name] = run_variant(variant, trained, folder, resume, arguments)
            records.setdefault(name, []).append(without_tensors(trained[name]))
            forget(trained, study.variants, name)
    return records


# ---- the folder of a study


def is_study(folder: Path) -> bool:
    """Return whether a study wrote this folder."""
    return (folder / FILE).is_file()


def read_study(folder: Path) -> dict[str, list[Record]]:
    """Read the finished runs of a study, by variant."""
    about = _about(folder)
    records: dict[str, list[Record]] = {}
    for name in about["variants"]:
        for seed in about["seeds"]:
            place = folder / name / f"seed-{seed}"
            if (place / "summary.json").exists():
                records.setdefault(name, []).append(read(place))
    if not records:
        raise check.fail("folder", str(folder), "a study with at least one finished run")
    return records


def read_figures(folder: Path) -> tuple[list[Table], list[Chart]]:
    """Read the tables and charts of a study; there are none before all of its runs have finished."""
    if not (folder / FILE_OF_FIGURES).is_file():
        return [], []
    figures = read_json(folder / FILE_OF_FIGURES)
    try:
        return [Table(*table) for table in figures["tables"]], [as_chart(*c) for c in figures["charts"]]
    except (KeyError, TypeError) as error:
        allowed = "tables and charts, as a study writes them"
        raise check.fail("file", str(folder / FILE_OF_FIGURES), allowed) from error


def unfinished(folder: Path) -> str:
    """Return such as '2 of 8 runs have finished', or '' when all have."""
    about, finished = _about(folder), sum(map(len, read_study(folder).values()))
    total = len(about["variants"]) * len(about["seeds"])
    return f"{finished} of {total} runs have finished" if finished < total else ""


def _about(folder: Path) -> dict[str, Any]:
    """Read study.json; refuse names that cannot be those of folders, and seeds that are none."""
    about = read_json(folder / FILE)
    names, seeds = about.get("variants"), about.get("seeds")
    if not _each(names, lambda n: isinstance(n, str) and _can_be_folder(n)) or not _each(
        seeds, lambda s: type(s) is int and s >= 0
    ):
        raise check.fail("file", str(folder / FILE), "variants and seeds, as a study writes them")
    return about


def _each(values: Any, good: Callable[[Any], bool]) -> bool:
    """Return whether `values` is a list of good values without duplicates."""
    return isinstance(values, list) and all(map(good, values)) and len(set(values)) == len(values)


def _can_be_folder(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


def _open(out: Path | None, about: Mapping[str, Any], resume: bool) -> None:
    """Make the folder with study.json, or check that the study in it is this one."""
    if out is None:
        return
    check.path("out", out)
    if (out / "config.json").exists():
        raise check.fail("out", str(out), "a new folder: this one holds a single run")
    if not is_study(out):
        new_folder("out", out, left=r"\.study\.json\.tmp|tuning")
        write_json(out / FILE, about)
        return
    if not resume:
        raise check.fail("out", str(out), "a new folder, or --resume to continue the study in it")
    before = _about(out)
    for key in about:
        if before.get(key) != about[key]:
            raise ValueError(
                f"resume: {out} holds a study with other {key} ({before.get(key)!r} -> {about[key]!r})"
            )
    new_page("out", out / "report.html")


# ---- checks before anything runs


def _wanted(study: Study, only: Sequence[str]) -> list[str]:
    """Return the variants that match, and those that they need, in order."""
    for pattern in only:
        if not fnmatch.filter(study.variants, pattern):
            names = ", ".join(study.variants)
            raise check.fail(
                "only", pattern, f"one of {names}, or a pattern{check.meant(pattern, study.variants)}"
            )
    wanted = {n for n in study.variants if not only or any(fnmatch.fnmatchcase(n, p) for p in only)}
    for name in reversed(list(study.variants)):
        if name in wanted:
            wanted |= set(study.variants[name].needs)
    return [n for n in study.variants if n in wanted]


def _check_names(study: Study) -> None:
    """Refuse names that cannot be those of folders, and variants that need a later one."""
    seen: set[str] = set()
    for name, variant in study.variants.items():
        for other in variant.needs:
            if other not in seen:
                raise check.fail("variant", other, f"one that runs before {name!r}")
        if not _can_be_folder(name):
            raise check.fail("variant", name, "a name that can be a folder's")
        seen.add(name)


def check_parts(experiment: Experiment) -> None:
    """Refuse a wrong personal part, or a schedule that does not fit, before any variant has run."""
    model = own_copy(experiment.model, experiment.seed)
    names = names_of(model, experiment.data)
    for stage in experiment.algorithm.stages or (StagePlan(experiment.algorithm),):
        stage.algorithm.partition(model, names)
        once = stage.rounds is None and stage.epochs is not None  # all clients at once, synchronously
        schedule = stage.schedule or check.schedule("schedule", None if once else experiment.schedule)
        if schedule is not None:
            clients = experiment.data.clients
            schedule.of(stage.algorithm).check(clients, stage.cohort or experiment.cohort or clients)
