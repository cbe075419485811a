"""The runs of a study side by side: each is made by one worker, as it would be in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.engine.callbacks import Callback
from partita.engine.record import Record
from partita.engine.settings import device_of
from partita.engine.stopping import Stopped
from partita.engine.workers.crew import crew_of
from partita.engine.workers.ray_actors import cluster_address
from partita.recipes.variant import Variant, run_variant, time_left, without_tensors
from partita.workers import Processes, requested


def can_be_spread(
    variants: Mapping[str, Variant],
    out: Path | None,
    listen: Callable[[Path | None], Sequence[Callback]],
    options: Mapping[str, Any],
) -> bool:
    """Return whether whole runs go to workers; else each run spreads its cohorts, in shares.

    With `shares` cohorts are spread. Callbacks and trackers listen in this process. A run that begins with
    another's model finds it in its folder, and folders are on this machine.
    """
    spec = requested("workers", options.get("workers"))
    if spec is None or options.get("shares") is not None or options.get("profile") or listen(None):
        return False
    if out is None:
        return all(variant.start is None for variant in variants.values())
    return isinstance(spec, Processes) or cluster_address(spec) is None


class _Run:
    """A run to be made elsewhere, by a worker that may have to go on with what a dead one has left."""

    def __init__(
        self,
        variant: Variant,
        trained: Mapping[str, Record],
        folder: Path | None,
        end: float,
        options: Mapping[str, Any],
    ) -> None:
        self.variant, self.end, self.options = variant, end, options
        self.folder = None if folder is None else folder.resolve()  # a worker may be elsewhere
        self.needed = {name: trained[name] for name in variant.needs}

    def __call__(self) -> Record:
        """Make it; the clock of the day says when to stop, which all machines have."""
        end = self.end - time.time() + time.monotonic()
        options = {**self.options, **time_left(end, self.variant)}
        return without_tensors(run_variant(self.variant, self.needed, self.folder, True, options))


def side_by_side(
    by_seed: Mapping[int, Mapping[str, Variant]],
    wanted: Sequence[str],
    out: Path | None,
    resume: bool,
    end: float,
    announce: Callable[[str], None],
    options: Mapping[str, Any],
) -> dict[str, list[Record]]:
    """Let each worker make whole runs; those that need others come after them."""
    alone = {k: v for k, v in options.items() if k not in ("workers", "shares")} | {"progress": False}
    spec = requested("workers", options["workers"])
    assert spec is not None
    crew = crew_of(spec, device_of(options.get("device", "auto")))
    trained: dict[int, dict[str, Record]] = {seed: {} for seed in by_seed}
    runs = dict[tuple[int, str], _Run]()
    left = [(seed, name) for seed, variants in by_seed.items() for name in variants]
    count, total, stop = 0, len(wanted) * len(by_seed), end - time.monotonic() + time.time()
    begun = False
    while left:
        runs.clear()
        for seed, name in list(left):
            variant = by_seed[seed][name]
            folder = None if out is None else out / name / f"seed-{seed}"
            finished = folder is not None and (folder / "summary.json").exists()
            if name not in wanted and not finished:
                left.remove((seed, name))
            elif set(variant.needs) <= set(trained[seed]):
                left.remove((seed, name))
                if finished:
                    trained[seed][name] = run_variant(variant, trained[seed], folder, resume, alone)
                    count += name in wanted
                    announce(f"{count}/{total}  {name}, seed {seed} (finished before)")
                else:
                    runs[seed, name] = _Run(variant, trained[seed], folder, stop, alone)
        if not runs:
            break
        if begun and time.monotonic() >= end:
            seed, name = next(iter(runs))
            raise Stopped(f"{name}, seed {seed}", 0)
        begun = True
        labels = [f"{name}, seed {seed}" for seed, name in runs]
        announce(f"{len(labels)} runs on {crew.count} workers: {'; '.join(labels)}")

        def done(number: int, record: Record) -> None:
            nonlocal count
            seed, name = list(runs)[number]
            trained[seed][name] = record
            count += 1
            announce(f"{count}/{total}  {name}, seed {seed} (finished)")

        crew.call(list(runs.values()), labels, done)
    names = next(iter(by_seed.values()))
    found = {name: [trained[seed][name] for seed in by_seed if name in trained[seed]] for name in names}
    return {name: records for name, records in found.items() if records}
