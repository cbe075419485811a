"""The runs of a study in lockstep: a variant's runs, one for each seed, train as one batch.

They are the same runs as one after another, each in its own folder, with the draws that it has alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.engine.callbacks import Callback
from partita.engine.folder import resuming_from
from partita.engine.lockstep.member import joins
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.record import Record
from partita.engine.stopping import Stopped
from partita.engine.store import durable
from partita.recipes.variant import Variant, forget, run_variant, time_left, without_tensors

MOST_TOGETHER = 16
"""Runs that advance at the same time: each of them holds the states of its clients in memory."""


def can_be_joined(
    seeds: Sequence[int],
    listen: Callable[[Path | None], Sequence[Callback]],
    options: Mapping[str, Any],
) -> bool:
    """Return whether runs may go on together: several in this process, and nobody listens to a single one."""
    elsewhere = options.get("workers") is not None or options.get("shares") is not None
    stacks = joins(options.get("executor") or "auto")
    return len(seeds) > 1 and stacks and not (elsewhere or options.get("profile") or listen(None))


def together(
    by_seed: Mapping[int, Mapping[str, Variant]],
    wanted: Sequence[str],
    out: Path | None,
    resume: bool,
    end: float,
    announce: Callable[[str], None],
    options: Mapping[str, Any],
) -> dict[str, list[Record]]:
    """Make the runs of one variant after the other, those of all seeds at once."""
    trained: dict[int, dict[str, Record]] = {seed: {} for seed in by_seed}
    records: dict[str, list[Record]] = {}
    total, count, begun = len(wanted) * len(by_seed), 0, False
    names = list(next(iter(by_seed.values())))
    for name in names:
        runs: dict[int, Callable[[], Record]] = {}
        finished: list[int] = []
        for seed, variants in by_seed.items():
            variant, folder = variants[name], None if out is None else out / name / f"seed-{seed}"
            over = folder is not None and (folder / "summary.json").exists()
            if name not in wanted and not (over and set(variant.needs) <= set(trained[seed])):
                continue  # finished runs of other calls are read too
            run = functools.partial(_run, variant, trained[seed], folder, resume, end, options)
            if over:
                trained[seed][name] = run()
                finished.append(seed)
            else:
                runs[seed] = run
        if name in wanted and finished:
            announce(f"{count + 1}/{total}  {_named(name, finished)} (finished before)")
            count += len(finished)
        seeds = list(runs)
        for first in range(0, len(seeds), MOST_TOGETHER):
            group = seeds[first : first + MOST_TOGETHER]
            announce(f"{count + 1}/{total}  {_named(name, group)}")
            count += len(group)
            if begun and time.monotonic() >= end:
                raise Stopped(_named(name, group), 0)
            begun = True
            resumed = out / name if out is not None and resume else None
            for seed, record in _made({seed: runs[seed] for seed in group}, resumed, options).items():
                trained[seed][name] = record
        records[name] = [without_tensors(trained[seed][name]) for seed in by_seed if name in trained[seed]]
        for seed, variants in by_seed.items():
            forget(trained[seed], variants, name)
    return {name: found for name, found in records.items() if found}


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
    runs: Mapping[int, Callable[..., Record]], resumed: Path | None, options: Mapping[str, Any]
) -> dict[int, Record]:
    """Make the runs by seed at once; `resumed` is the folder in which they go on."""
    if len(runs) == 1:
        return {seed: run() for seed, run in runs.items()}
    exactly = {k: options[k] for k in ("precision", "deterministic") if k in options}
    folders = [] if resumed is None else [resumed / f"seed-{seed}" for seed in runs]
    first, *others = runs.values()
    quiet = [functools.partial(run, progress=False) for run in others]  # one bar for all
    everyone: list[Callable[[], Record]] = [first, *quiet]
    with resuming_from(_common_round(folders)):
        made = in_lockstep(everyone, **exactly)
    return dict(zip(runs, made))


def _common_round(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the newest round of which all runs have a checkpoint: a kill may have left some of them ahead.

    Then as many of them compute together as before, until their ends, with the same roundings.
    """
    known = [durable.rounds(folder / "checkpoint") for folder in folders]
    common = min((rounds[0] for rounds in known if rounds), default=0)
    return dict.fromkeys(folders, common) if all(common in rounds for rounds in known) else {}


def _named(name: str, seeds: Sequence[int]) -> str:
    """Return such as 'fedalt, seeds 0 to 4 together'."""
    if len(seeds) == 1:
        return f"{name}, seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{name}, seeds {seeds[0]} to {seeds[-1]} together"
    return f"{name}, seeds {', '.join(map(str, seeds))} together"
