"""One experiment of a study: what it begins with and is compared with, and how it is run."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from partita.api import Run, load
from partita.core import check
from partita.engine.initial import own_copy
from partita.engine.record import Record, read
from partita.recipes.experiment import Experiment

SHORTEST = 1e-9  # seconds: a run takes at least a round, however little time is left


@dataclass(frozen=True)
class Variant:
    """One experiment of a study.

    start      the variant whose model it begins with
    baselines  variants it is compared with: {'global': NAME, 'local': NAME}; by default none are trained
    """

    experiment: Experiment
    start: str | None = None
    baselines: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> list[str]:
        """The variants that it begins with or is compared with."""
        return [name for name in (self.start, *self.baselines.values()) if name is not None]


def run_variant(
    variant: Variant,
    trained: Mapping[str, Record],
    folder: Path | None,
    resume: bool,
    options: Mapping[str, Any],
) -> Record:
    """Run a variant, or read it if it has finished before; `trained` has those that it needs."""
    experiment = variant.experiment
    if variant.start is not None:
        before = trained[variant.start]
        if not isinstance(before, Run):  # finished by an earlier call
            assert folder is not None
            before = load(folder.parents[1] / variant.start / folder.name)
        experiment = replace(experiment, model=_continued(experiment, before))
    baselines = {kind: trained[name] for kind, name in variant.baselines.items()}
    arguments = {"baselines": baselines, "report": False, **options}
    if folder is not None and resume and (folder / "summary.json").exists():
        experiment.check_finished(folder, **arguments)
        return read(folder)
    again = resume and folder is not None and (folder / "config.json").exists()
    if again and experiment.checkpoint_every == 0:  # no checkpoint to resume from: it begins anew
        assert folder is not None
        shutil.rmtree(folder)
        again = False
    with contextlib.ExitStack() as stack:
        if variant.start:  # its model is trained, however little it has learnt
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "finetune: the model")
        return experiment.run(**arguments, out=folder, resume=again)


def _continued(experiment: Experiment, run: Run) -> nn.Module:
    """Return the experiment's model with the weights that the other run has trained."""
    model = own_copy(experiment.model, experiment.seed)
    if run.holdings.untrained:
        names = ", ".join(run.holdings.untrained[:3])
        allowed = f"a variant whose server trains a whole model; this one's has not trained {names}"
        raise check.fail("start", run.facts["algorithm"], allowed)
    state = model.state_dict()
    unfit = [k for k, v in run.shared.items() if k not in state or state[k].shape != v.shape]
    if unfit:
        raise check.fail("start", unfit[0], "a variant whose model fits into this one's")
    model.load_state_dict(run.shared, strict=False)
    return model


def time_left(end: float, variant: Variant) -> dict[str, float]:
    """Return `max_time` for a run. One that leaves no checkpoint is not stopped in its middle."""
    if end == math.inf or variant.experiment.checkpoint_every == 0:
        return {}
    return {"max_time": max(end - time.monotonic(), SHORTEST)}


def without_tensors(run: Record) -> Record:
    """Return the figures of a run alone: a study may have many."""
    return Record(
        run.metrics, run.clients, run.config, run.facts, samples=run.samples, newcomers=run.newcomers
    )


def forget(trained: dict[str, Any], variants: Mapping[str, Variant], last: str) -> None:
    """Drop models that no later variant needs."""
    names = list(variants)
    needed = {n for later in names[names.index(last) + 1 :] for n in variants[later].needs}
    for name in [n for n in trained if n not in needed]:
        del trained[name]
