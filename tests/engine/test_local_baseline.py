"""Every client alone, as a baseline: how much it trains follows neither the cohort nor the schedule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.core.parts import StagePlan
from partita.engine import loop
from partita.engine import stage as stages
from partita.engine.callbacks import Callback
from partita.engine.settings import ROUNDS_ALONE, as_alone
from partita.recipes.experiment import Experiment
from partita.recipes.versus import versus
from partita.report import figures, header, rows, time
from partita.schedule import asynchronous, delays, exponential, synchronous
from support import each

CLIENTS = 10
SLOW = delays(upload=exponential(2.0), dropout=0.2)
WORK: dict[str, Any] = {"rounds": 8, "steps": 2, "batch": 8}
FEDALT, FEDAVG = pt.fedalt(personal="output", lr=0.3), pt.fedavg(lr=0.3)


def digits(validation: float = 0) -> pt.data.FederatedData:
    partition = pt.data.label_skew(classes=3)
    return pt.data.digits(clients=CLIENTS, partition=partition, test=0.4, validation=validation)


def run(method: Any = FEDAVG, validation: float = 0, **options: Any) -> pt.Run:
    return pt.federate(pt.models.mlp(64, 8, 10), digits(validation), method, **{**WORK, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"cohort": 2},
        {"schedule": asynchronous(concurrency=3, delays=SLOW)},
        {"schedule": asynchronous(concurrency=3, buffer=2, delays=SLOW), "evaluate_every": 1.5},
        {"schedule": asynchronous(concurrency=3, delays=SLOW, until=2.0)},
        {"schedule": synchronous(delays=SLOW, deadline=1.0, quorum=2), "cohort": 4},
        {"method": FEDALT, "schedule": synchronous("turns"), "cohort": 3},
    ],
    ids=["cohort", "asynchronous", "by-time", "until", "deadline", "turns"],
)
def test_alone_is_the_same_whatever_the_method_does(options) -> None:
    """Everyone, in every round, without delays: what `local` gives as a method, bit for bit."""
    alone = run(pt.local(lr=0.3), baselines=False).scores("local")
    assert np.array_equal(run(**options).scores("local"), alone)


def test_with_validation_samples_alone_trains_until_it_has_converged() -> None:
    """It costs no communication: neither the rounds of the method nor its schedule hold it back."""
    options = {"validation": 0.2, "rounds": 2}
    alone = run(pt.local(lr=0.3), baselines=False, until="converged", **{**options, "rounds": None})
    assert alone.summary()["training"]["ended"] == "converged"
    for how in ({"cohort": 2}, {"schedule": asynchronous(concurrency=3, delays=SLOW)}):
        found = run(**options, **how)
        assert np.array_equal(found.scores("local"), alone.scores("local"))
        training = found.summary()["baselines"]["local"]
        assert training["ended"] == "converged"
        assert training["epochs"] == alone.summary()["training"]["epochs"]


def test_a_rate_that_changes_over_the_rounds_goes_by_its_own() -> None:
    """Of 3 × ROUNDS_ALONE arrivals, alone has ROUNDS_ALONE rounds, in which the rate falls to its end."""
    rate, short = pt.optim.linear(0.3), {"steps": 1, "evaluate_every": 10**6}
    schedule = asynchronous(concurrency=3, delays=SLOW)
    found = run(pt.fedavg(lr=rate), rounds=3 * ROUNDS_ALONE, schedule=schedule, **short)
    alone = run(pt.local(lr=rate), rounds=ROUNDS_ALONE, baselines=False, **short)
    assert np.array_equal(found.scores("local"), alone.scores("local"))


@each(
    ("rounds", "cohort", "schedule", "expected"),
    [
        (50, 2, synchronous(), 50),
        (5000, 2, synchronous(), 1000),  # as often as a client has its turn
        (5000, None, synchronous(), 5000),
        (
            5000,
            None,
            synchronous(until=5.0),
            ROUNDS_ALONE,
        ),  # `rounds` is a bound then: nobody knows the turns
        (1000, 2, asynchronous(), ROUNDS_ALONE),
        (50_000, 2, asynchronous(), 5000),
        (50_000, 2, asynchronous(buffer=5), 25_000),
        (150, 2, asynchronous(), 150),
    ],
)
def test_how_many_rounds_alone_has(rounds, cohort, schedule, expected) -> None:
    stage = StagePlan(FEDAVG, rounds=rounds, cohort=cohort, steps=3, batch=8)
    found = as_alone([stage], [schedule.of(FEDAVG)], CLIENTS, None, validated=False)
    assert found["rounds"] == expected
    assert found["cohort"] is None
    assert "until" not in found
    assert (found["steps"], found["batch"]) == (3, 8)


def test_of_a_pipeline_the_turns_of_all_stages_count() -> None:
    stages = [
        StagePlan(FEDAVG, rounds=3000, cohort=1),
        StagePlan(FEDALT, rounds=1000, cohort=5),
        StagePlan(FEDALT, rounds=1),
    ]
    found = as_alone(stages, [synchronous()] * 3, CLIENTS, 2.5, validated=False)
    assert found["rounds"] == 300 + 500 + 1
    assert found["evaluate_every"] is None  # virtual time says nothing there
    assert as_alone(stages, [synchronous()] * 3, CLIENTS, 7, validated=False)["evaluate_every"] == 7


def test_its_files_have_rounds_for_time(tmp_path) -> None:
    run(schedule=asynchronous(3, delays=SLOW), evaluate_every=1.5, out=tmp_path / "run")
    folder = tmp_path / "run" / "baselines" / "local"
    config = json.loads((folder / "config.json").read_text())
    assert config["schedule"]["name"] == "synchronous"
    assert config["schedule"]["delays"] is None
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in found] == [row["time"] for row in found] == [*range(1, 9)]
    assert {row["reports"] for row in pt.load(folder).clients} == {8}


def test_clients_alone_train_block_by_block(monkeypatch) -> None:
    """However many there are, no more than a block of them is stacked at once."""
    alone = run(cohort=2).scores("local")
    most: list[int] = []
    execute = loop.execute

    def counted(stage, state, cohort):
        most.append(len(cohort.clients))
        return execute(stage, state, cohort)

    monkeypatch.setattr(stages, "BLOCK_CLIENTS", 3)
    monkeypatch.setattr(loop, "execute", counted)
    parts = run(cohort=2).scores("local")
    assert max(most) <= 3
    assert np.allclose(parts, alone)


def test_who_follows_the_run_is_told_that_it_is_about_everyone() -> None:
    heard: list[tuple[str, str]] = []

    class Heard(Callback):
        def note(self, what: str, text: str) -> None:
            heard.append((what, text))

    run(cohort=2, callbacks=[Heard()])
    assert ("baseline local", "all 10 clients in each round") in heard
    assert not [text for what, text in heard if what != "baseline local" and "in each round" in text]


def test_side_by_side_alone_is_the_baseline_of_a_single_run() -> None:
    """`compare` trains it in the same way; its report has it neither on the clock nor among the rounds."""
    made = Experiment(pt.models.mlp(64, 8, 10), digits(), FEDALT, cohort=3, evaluate_every=2.5, **WORK)
    made = Experiment(**{**vars(made), "schedule": synchronous(delays=SLOW)})
    study = versus(made, ["fedalt"])
    local = study.variants["local"].experiment
    assert (local.cohort, local.schedule, local.evaluate_every) == (None, synchronous(), None)
    runs = {name: [v.experiment.run(baselines=False)] for name, v in study.variants.items()}
    assert np.array_equal(runs["local"][0].scores("local"), made.run().scores("local"))

    assert "8 rounds with 3 clients each" in header.what_ran(runs)
    found, section = time.time(runs, rows.averages(runs))
    for name in ("time.scores", "time.active"):
        assert "local" not in [trace["name"] for trace in found[name]["data"]]
    assert "local ran without delays" not in str(section)
    assert "<td>local</td>" not in str(section)
    curves = {trace["name"]: trace for trace in figures.curves(runs, "accuracy")["data"]}
    in_time = {trace["name"]: trace for trace in found["time.scores"]["data"]}
    assert "local" in curves
    assert in_time["fedalt"]["line"]["color"] == curves["fedalt"]["line"]["color"]
