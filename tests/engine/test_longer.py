"""More rounds: a run that goes on ends with the same bits as one long run, and a callback can end one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.core import check
from partita.engine.callbacks import Callback, Event
from support import Stop, each, tensors

S = pt.schedule
SLOW = S.delays(download=S.exponential(1.0), upload=S.lognormal(4.0), dropout=0.1)
CLIENTS = 6
SHORT, LONG = 3, 7
_digits: dict[float, pt.data.FederatedData] = {}


def digits(validation: float = 0.1) -> pt.data.FederatedData:
    if validation not in _digits:
        _digits[validation] = pt.data.digits(CLIENTS, pt.data.label_skew(3), seed=0, validation=validation)
    return _digits[validation]


def model() -> nn.Module:
    return pt.models.mlp(64, 8, 10)


CASES: dict[str, dict[str, Any]] = {
    "memory": {"store": "memory"},
    "disk": {"store": "disk"},
    "asynchronous": {"schedule": S.asynchronous(concurrency=4, buffer=2, staleness="sqrt", delays=SLOW)},
    "late": {"schedule": S.synchronous(delays=SLOW, deadline=4.0, late="apply", staleness="inverse")},
    "attack": {"attack": pt.attack.alie(), "byzantine": [1, 4], "cohort": CLIENTS},
    "capacity": {
        "capacity": pt.capacity.depth({"strong": 0, "weak": 1}),
        "algorithm": pt.fedavg(lr=0.2),
    },
    "baselines": {"baselines": True},
    "scaffold": {"algorithm": pt.scaffold(lr=0.2)},
    "adam": {"algorithm": pt.fedalt("output", lr=0.2, server=pt.optim.adam(0.02))},
    "halving": {"algorithm": pt.fedalt("output", lr=pt.optim.halving(0.2, every=2))},
    "pipeline": {
        "algorithm": pt.pipeline(pt.stage(pt.fedavg(lr=0.2), rounds=2), pt.fedalt("output", lr=0.2))
    },
}


def federate(folder: Path | None, rounds: int, **changed: Any) -> pt.Run:
    validation = 0 if changed.get("baselines") else 0.1  # without, baselines alone have as many rounds
    given: dict[str, Any] = {"model": model(), "data": digits(validation)}
    given |= {"algorithm": pt.fedalt("output", lr=0.2, momentum=0.5), "executor": "vmap"}
    given |= {"cohort": 3, "steps": 2, "batch": 8, "evaluate_every": 1, "baselines": False, "report": False}
    given |= {"out": folder, "rounds": rounds, "checkpoint_every": 2, **changed}
    return pt.federate(given.pop("model"), given.pop("data"), given.pop("algorithm"), **given)


CLOCKS = ("seconds", "client_steps_per_second", "phases", "peak_memory")


def assert_same(run: pt.Run, long: pt.Run) -> None:
    ours, theirs = tensors(run), tensors(long)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert run.clients == long.clients
    without = [[{k: v for k, v in row.items() if k not in CLOCKS} for row in r.metrics] for r in (run, long)]
    assert without[0] == without[1]
    facts = [{k: v for k, v in r.facts.items() if k not in CLOCKS} for r in (run, long)]
    assert facts[0] == facts[1]


@each("case", CASES)
def test_more_rounds_have_the_bits_of_one_long_run(tmp_path: Path, case: str) -> None:
    given = CASES[case]
    long = federate(tmp_path / "long", LONG, **given)
    federate(tmp_path / "run", SHORT, **given)
    assert_same(federate(tmp_path / "run", LONG, resume=True, **given), long)
    if case != "disk":
        short = federate(None, SHORT, **given)
        before, rows = tensors(short), list(short.metrics)
        assert_same(short.extend(LONG - SHORT), long)
        assert short.metrics == rows
        assert all(torch.equal(x, before[k]) for k, x in tensors(short).items())


def test_extend_goes_on_in_the_folder(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", SHORT, baselines=True).extend(2).extend(LONG - SHORT - 2)
    long = federate(tmp_path / "long", LONG, baselines=True)
    assert_same(run, long)
    assert pt.load(tmp_path / "run").facts["rounds"] == LONG
    assert [r["round"] for r in pt.load(tmp_path / "run" / "baselines" / "local").metrics][-1] == LONG


def test_an_extension_that_is_killed_is_resumed(tmp_path: Path) -> None:
    federate(tmp_path / "run", SHORT)
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path / "run", LONG, resume=True, callbacks=[Stop(5)])
    assert not (tmp_path / "run" / "summary.json").exists()  # else it would pass for a finished run
    run = federate(tmp_path / "run", LONG, resume=True)
    assert_same(run, federate(None, LONG))


def test_fewer_rounds_than_were_taken_are_refused(tmp_path: Path) -> None:
    federate(tmp_path / "run", SHORT)
    with pytest.raises(check.Refused) as refused:
        federate(tmp_path / "run", SHORT - 1, resume=True)
    assert (refused.value.field, refused.value.value) == ("rounds", SHORT - 1)
    assert federate(tmp_path / "run", SHORT, resume=True).facts["rounds"] == SHORT


def test_what_else_differs_is_still_refused(tmp_path: Path) -> None:
    federate(tmp_path / "run", SHORT)
    for change in ({"steps": 3}, {"algorithm": pt.fedalt("output", lr=0.1)}, {"seed": 1}):
        with pytest.raises(check.Refused) as refused:
            federate(tmp_path / "run", LONG, resume=True, **change)
        assert refused.value.field == "resume"


@each("algorithm", [pt.fedavg(lr=pt.optim.linear(0.2)), pt.fedavg(lr=lambda t, rounds: 0.1 + t / rounds)])
def test_a_step_size_that_depends_on_the_rounds_is_refused(tmp_path: Path, algorithm: pt.Algorithm) -> None:
    run = federate(tmp_path / "run", SHORT, algorithm=algorithm)
    with pytest.raises(check.Refused) as refused:
        federate(tmp_path / "run", LONG, resume=True, algorithm=algorithm)
    assert (refused.value.field, refused.value.value) == ("rounds", LONG)
    with pytest.raises(check.Refused) as refused:
        run.extend(1)
    assert (refused.value.field, refused.value.value) == ("rounds", SHORT + 1)
    assert pt.load(tmp_path / "run").facts["rounds"] == SHORT  # it is what it was


def test_a_stage_that_is_over_keeps_its_length(tmp_path: Path) -> None:
    tuned = pt.pipeline(pt.fedavg(lr=0.2), pt.stage(pt.finetune("all", lr=0.1), epochs=1))
    run = federate(tmp_path / "run", SHORT, algorithm=tuned)
    with pytest.raises(check.Refused) as refused:
        federate(tmp_path / "run", LONG, resume=True, algorithm=tuned)
    assert (refused.value.field, refused.value.value) == ("rounds", [LONG, 1])
    with pytest.raises(check.Refused) as refused:
        run.extend(1)
    assert refused.value.field == "rounds"


def test_a_run_that_was_read_says_how_to_extend_it(tmp_path: Path) -> None:
    federate(tmp_path / "run", SHORT)
    with pytest.raises(check.Refused) as refused:
        pt.load(tmp_path / "run").extend(2)
    assert f"rounds={SHORT + 2}" in refused.value.allowed


def test_a_schedule_that_ends_by_time_does_not_go_on() -> None:
    run = federate(None, 50, schedule=S.synchronous(until=3.0))
    assert run.facts["rounds"] == 3
    with pytest.raises(check.Refused) as refused:
        run.extend(2)
    assert refused.value.field == "rounds"


# ---- a callback ends a run


class Ends(Callback):
    """Ends a run after a round, by its round or by its evaluation; the one after it is told all the same."""

    def __init__(self, after: int, what: str = "fedalt", by: str = "round") -> None:
        self.after, self.what, self.by = after, what, by

    def round(self, event: Event) -> None:
        if (event.round, event.what, self.by) == (self.after, self.what, "round"):
            raise pt.Stop("enough")

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:
        if (row["round"], what, self.by) == (self.after, self.what, "evaluation"):
            raise pt.Stop("enough")


class Counts(Callback):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.rounds, self.rows, self.ends = 0, 0, 0

    def round(self, event: Event) -> None:
        self.rounds = event.round

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:
        self.rows += bool(what and row)

    def end(self, what: str) -> None:
        self.ends += bool(what)


@each("by, every", [("round", 1), ("round", 100), ("evaluation", 1)])
def test_a_callback_ends_a_run(tmp_path: Path, by: str, every: int) -> None:
    counts = Counts()
    folder = tmp_path / "run"
    run = federate(folder, LONG, callbacks=[Ends(SHORT, by=by), counts], evaluate_every=every)
    short = federate(None, SHORT, evaluate_every=every)
    assert run.facts["rounds"] == SHORT
    assert run.facts["ended"] == {"reason": "enough", "of": LONG}
    assert "enough" in str(run.summary())
    assert run.clients == short.clients
    assert run.metrics[-1]["test.personal"] == short.metrics[-1]["test.personal"]
    assert (counts.rounds, counts.rows, counts.ends) == (SHORT, len(run.metrics), 1)
    assert pt.load(folder).facts["ended"]["of"] == LONG
    again = federate(folder, LONG, resume=True, evaluate_every=every)  # it has finished: nothing is trained
    assert again.facts["rounds"] == SHORT
    shutil.copytree(folder, tmp_path / "other")
    long, other = tensors(federate(None, LONG)), tmp_path / "other"
    further = run.extend(LONG - SHORT)
    assert all(torch.equal(x, long[k]) for k, x in tensors(further).items())
    assert further.facts["ended"] is None
    assert federate(other, LONG + 1, resume=True, evaluate_every=every).facts["rounds"] == LONG + 1


def test_a_stop_after_the_last_round_is_no_early_end() -> None:
    assert federate(None, SHORT, callbacks=[Ends(SHORT)]).facts["ended"] is None


def test_a_callback_ends_a_baseline_alone() -> None:
    run = federate(None, LONG, baselines=True, callbacks=[Ends(1, "baseline local")])
    assert (run.facts["rounds"], run.facts["ended"]) == (LONG, None)


def test_a_callback_ends_all_stages() -> None:
    both = pt.pipeline(pt.fedavg(lr=0.2), pt.stage(pt.finetune("all", lr=0.1), epochs=1))
    run = federate(None, LONG, algorithm=both, callbacks=[Ends(2, "pipeline")])
    assert run.facts["rounds"] == 2
    assert run.extend(1).facts["rounds"] == 4  # a round of fedavg, one of fine-tuning
