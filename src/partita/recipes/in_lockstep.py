"""The runs of a study in lockstep: those of one method train as one batch, all variants and seeds of it.

They are the same runs as one after another, each in its own folder, with the draws that it has alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.engine.callbacks import Callback
from partita.engine.folder import resuming_from
from partita.engine.lockstep.member import joins
from partita.engine.lockstep.runs import MOST_TOGETHER, in_lockstep
from partita.engine.record import Record
from partita.engine.settings import device_of
from partita.engine.stopping import Stopped
from partita.engine.store import durable
from partita.recipes.variant import Variant, forget, run_variant, time_left, without_tensors

Run = tuple[str, int]
"""A run of a study: the variant, and the seed."""


def can_be_joined(
    runs: int, listen: Callable[[Path | None], Sequence[Callback]], options: Mapping[str, Any]
) -> bool:
    """Return whether runs may go on together: several in this process, and nobody listens to a single one."""
    elsewhere = options.get("workers") is not None or options.get("shares") is not None
    stacks = joins(options.get("executor") or "auto")
    return runs > 1 and stacks and not (elsewhere or options.get("profile") or listen(None))


def together(
    studies: Iterator[tuple[int, Mapping[str, Variant]]],
    seeds: int,
    wanted: Sequence[str],
    out: Path | None,
    resume: bool,
    end: float,
    announce: Callable[[str], None],
    options: Mapping[str, Any],
) -> dict[str, list[Record]]:
    """Make the runs of a study, as many at once as `meetings` says; `studies` has the variants of each seed.

    Who goes on with whom depends on the study alone, not on who has finished before: resumed runs meet again.
    """
    records: dict[str, list[Record]] = {}
    total, count, some = len(wanted) * seeds, 0, False
    while by_seed := dict(itertools.islice(studies, MOST_TOGETHER)):
        trained: dict[int, dict[str, Record]] = {seed: {} for seed in by_seed}
        variants = next(iter(by_seed.values()))
        planned = meetings(variants, MOST_TOGETHER // len(by_seed))
        order = [name for names in planned for name in names]
        for names in planned:
            runs: dict[Run, Callable[..., Record]] = {}
            finished: list[Run] = []
            begun: list[Path] = []
            for name, seed in itertools.product(names, by_seed):
                variant, folder = by_seed[seed][name], None if out is None else out / name / f"seed-{seed}"
                over = folder is not None and (folder / "summary.json").exists()
                if name not in wanted and not (over and set(variant.needs) <= set(trained[seed])):
                    continue  # finished runs of other calls are read too
                run = functools.partial(_run, variant, trained[seed], folder, resume, end, options)
                if over:
                    trained[seed][name] = run()
                    finished += [(name, seed)] if name in wanted else []
                else:
                    runs[name, seed] = run
                    if resume and folder is not None and _goes_on(variant, folder):
                        begun.append(folder)
            if finished:
                announce(f"{count + 1}/{total}  {_named(finished)} (finished before)")
                count += len(finished)
            if runs:
                announce(f"{count + 1}/{total}  {_named(list(runs))}")
                count += len(runs)
                if some and time.monotonic() >= end:
                    raise Stopped(_named(list(runs)), 0)
                some = True
                for (name, seed), record in _made(runs, begun, options).items():
                    trained[seed][name] = record
            for name, seed in itertools.product(names, by_seed):
                if name in trained[seed]:
                    records.setdefault(name, []).append(without_tensors(trained[seed][name]))
            for seed, own in by_seed.items():
                forget(trained[seed], {name: own[name] for name in order}, names[-1])
    return {name: records[name] for name in variants if name in records}


def meetings(variants: Mapping[str, Variant], most: int) -> list[list[str]]:
    """Return which variants go on at the same time, for all seeds: those of one method, `most` at once.

    Those of other methods have nothing to compute together. None meets, or comes before, one that it needs.
    """
    planned: list[list[str]] = []
    for name, variant in variants.items():
        after = max([i + 1 for i, names in enumerate(planned) if set(names) & set(variant.needs)], default=0)
        method = variant.experiment.algorithm.name
        for names in planned[after:]:
            if len(names) < most and variants[names[0]].experiment.algorithm.name == method:
                names.append(name)
                break
        else:
            planned.append([name])
    return planned


def _goes_on(variant: Variant, folder: Path) -> bool:
    """Return whether the run in a folder goes on from a checkpoint; one that writes none begins anew."""
    return variant.experiment.checkpoint_every != 0 and (folder / "config.json").exists()


def _run(
    variant: Variant,
    trained: Mapping[str, Record],
    folder: Path | None,
    resume: bool,
    end: float,
    options: Mapping[str, Any],
    **shown: bool,
) -> Record:
    """Make a run in the time that is left when it begins."""
    return run_variant(variant, trained, folder, resume, {**options, **shown, **time_left(end, variant)})


def _made(
    runs: Mapping[Run, Callable[..., Record]], begun: Sequence[Path], options: Mapping[str, Any]
) -> dict[Run, Record]:
    """Make the runs at once; `begun` are the folders of those that go on."""
    if len(runs) == 1:
        return {name: run() for name, run in runs.items()}
    exactly = {k: options[k] for k in ("precision", "deterministic") if k in options}
    on_cpu = device_of(options.get("device", "auto")) == "cpu"
    first, *others = runs.values()
    quiet = [functools.partial(run, progress=False) for run in others]  # one bar for all
    everyone: list[Callable[[], Record]] = [first, *quiet]
    with resuming_from(_common_round(begun)):
        made = in_lockstep(everyone, **exactly, folder=begun[0] if begun and on_cpu else None)
    return dict(zip(runs, made))


def _common_round(begun: Sequence[Path]) -> dict[Path, int]:
    """Return the newest round of which all runs that have begun have a checkpoint: a kill may come between.

    Then as many of them compute together as before, until their ends, with the same roundings. Where there is
    none, the kill having come before all had written one, each goes on from its own.
    """
    common = set.intersection(*[{*durable.rounds(folder / "checkpoint")} for folder in begun] or [set[int]()])
    return dict.fromkeys(begun, max(common)) if common else {}


def _named(runs: Sequence[Run]) -> str:
    """Return such as 'fedalt, seeds 0 to 4 together', or 'fedprox-1, fedprox-2, seed 0 together'."""
    seeds = {name: [seed for other, seed in runs if other == name] for name, _ in runs}
    groups: dict[str, list[str]] = {}
    for name, own in seeds.items():
        groups.setdefault(_listed(own), []).append(name)
    text = "; ".join(f"{', '.join(names)}, {listed}" for listed, names in groups.items())
    return f"{text} together" if len(runs) > 1 else text


def _listed(seeds: Sequence[int]) -> str:
    """Return such as 'seeds 0 to 4'."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"
