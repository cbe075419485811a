"""Runs that end when validation has stopped improving, and keep the best round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.engine.convergence import Convergence
from support import each


def data(**changed: Any) -> pt.data.FederatedData:
    return pt.data.digits(clients=6, partition=pt.data.label_skew(classes=3), **changed)


def federate(method: pt.Algorithm | None = None, **settings: Any) -> pt.Run:
    given = {"steps": 3, "batch": 8, "baselines": False, "executor": "vmap", "progress": False, **settings}
    given.setdefault("data", data())
    model = pt.models.mlp(64, 8, 10)
    method = method or pt.fedalt(personal="output", lr=0.3)
    return pt.federate(lambda: model, given.pop("data"), method, **given)


def follow(scores: list[float], losses: list[float], higher: bool = True) -> list[int]:
    convergence, waited = Convergence(), []
    for round, (score, loss) in enumerate(zip(scores, losses), 1):
        convergence.see(round, score, loss, higher)
        waited.append(convergence.waited)
    return [convergence.round, *waited]


def test_what_counts_as_an_improvement() -> None:
    level = [0.5] * 3
    assert follow([0.1, *level, *level], [1.0] * 7) == [4, 0, 0, 0, 0, 1, 2, 3]  # means of three
    assert follow(level * 2, [2.0, 1.0, 0.5, 0.2, 0.1, 0.1]) == [6, 0, 0, 0, 0, 0, 0]  # the loss still falls
    # steps of less than 0.2 % of all progress are none
    assert follow([0.0, *[0.9] * 3, 0.9001, 0.9002], [1.0] * 6) == [6, 0, 0, 0, 0, 1, 2]
    falling = [9.0, *[4.0] * 3, 5.0]
    assert follow(falling, falling, higher=False) == [4, 0, 0, 0, 0, 1]


def test_a_single_lucky_evaluation_is_not_the_best() -> None:
    scores = [0.5, 0.6, 0.7, 0.9, 0.7, 0.8, 0.8, 0.8, 0.85, 0.7]
    assert follow(scores, [1.0] * len(scores))[0] == 9


def test_the_first_evaluations_are_no_match_for_means() -> None:
    scores = [0.9, 0.5, 0.6, 0.7, 0.8, 0.85, 0.85, 0.85]
    assert follow(scores, [1.0] * len(scores))[0] == 8


def test_patience_ends_a_run_at_its_best_round() -> None:
    run = federate(until="converged", patience=3, rounds=400, evaluate_every=4)
    training = run.summary()["training"]
    assert training["ended"] == "converged"
    assert training["rounds"] < 400
    assert training["model_of_round"] < training["rounds"]
    alike = federate(rounds=training["model_of_round"])
    for name, value in alike.shared.items():
        assert torch.equal(value, run.shared[name]), name
    for client in range(6):
        for name, value in alike.client(client).personal.items():
            assert torch.equal(value, run.client(client).personal[name]), name
    assert alike.scores().tolist() == run.scores().tolist()
    row = next(r for r in run.metrics if r["round"] == training["model_of_round"])
    assert row["test.personal"] == run.summary()["test"]["personal"]
    others = [r["test.personal"] for r in run.metrics if r is not row]
    assert others
    assert others == [None] * len(others)  # test is read once


def test_the_last_round_may_be_kept() -> None:
    run = federate(until="converged", patience=3, rounds=400, evaluate_every=4, keep="last")
    rounds = run.summary()["training"]["rounds"]
    assert run.summary()["training"]["model_of_round"] == rounds
    alike = federate(rounds=rounds)
    assert all(torch.equal(value, run.shared[name]) for name, value in alike.shared.items())


def test_the_best_of_a_fixed_number_of_rounds() -> None:
    run = federate(rounds=60, evaluate_every=2, keep="best")
    rows, window = run.metrics, [run.metrics[max(0, i - 2) : i + 1] for i in range(len(run.metrics))]
    means = [
        [np.mean([r[f"validation.{of}"] for r in some]) for of in ("personal", "loss")] for some in window
    ]
    best = max(zip(means, rows), key=lambda pair: (round(pair[0][0], 12), -pair[0][1]))[1]
    training = run.summary()["training"]
    assert (training["rounds"], training["ended"]) == (60, "rounds")
    assert training["model_of_round"] == best["round"] < 60


def test_a_run_that_keeps_its_best_round_is_not_extended() -> None:
    run = federate(rounds=4, evaluate_every=1, keep="best")
    with pytest.raises(ValueError, match="best round") as refused:
        run.extend(rounds=2)
    assert refused.value.field == "rounds"  # type: ignore[attr-defined]


def test_nor_is_it_resumed_with_more_rounds(tmp_path: Path) -> None:
    given = {"evaluate_every": 1, "keep": "best", "out": tmp_path / "run", "report": False}
    federate(pt.fedalt(personal="output", lr=3.0), rounds=6, **given)
    with pytest.raises(ValueError, match="best round") as refused:
        federate(pt.fedalt(personal="output", lr=3.0), rounds=8, resume=True, **given)
    assert refused.value.field == "rounds"  # type: ignore[attr-defined]


def test_a_curve_that_still_rises_is_told() -> None:
    assert federate(pt.fedavg(lr=0.01), rounds=24, evaluate_every=1).summary()["training"]["rising"]
    assert federate(rounds=3).summary()["training"]["rising"] is None  # too few evaluations


class Killed(BaseException):
    pass


class KillAt(pt.callbacks.Callback):
    def __init__(self, round: int) -> None:
        self.at = round

    def round(self, event: Any) -> None:
        if event.round == self.at:
            raise Killed


@each("at", [5, 33, 42])
def test_killed_and_resumed_with_the_same_bits(at: int, tmp_path: Path) -> None:
    settings = {"until": "converged", "patience": 3, "rounds": 400, "evaluate_every": 4}
    whole = federate(**settings)
    assert whole.summary()["training"]["rounds"] > 42
    out = tmp_path / str(at)
    with pytest.raises(Killed):
        federate(**settings, out=out, checkpoint_every=2, report=False, callbacks=[KillAt(at)])
    again = federate(**settings, out=out, checkpoint_every=2, report=False, resume=True)
    assert again.summary()["training"] == whole.summary()["training"]
    assert all(torch.equal(value, again.shared[name]) for name, value in whole.shared.items())
    read = pt.load(out)
    assert all(torch.equal(value, read.shared[name]) for name, value in whole.shared.items())
    assert torch.equal(
        read.client(3).personal["output.linear.bias"], whole.client(3).personal["output.linear.bias"]
    )


def test_stages_converge_one_after_another() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.2), rounds=300), pt.stage(pt.finetune(personal="output", lr=0.05), epochs=2)
    )
    run = federate(method, until="converged", patience=3, evaluate_every=4)
    training = run.summary()["training"]
    assert training["rounds"] < 301
    assert (training["ended"], training["rising"]) == ("converged", False)  # fine-tuning is one round
    assert run.summary()["test"]["global"] > 0.7


def test_an_early_stage_that_rises_is_not_forgotten() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.01), rounds=24), pt.stage(pt.finetune(personal="output", lr=0.1), epochs=1)
    )
    training = federate(method, evaluate_every=1).summary()["training"]
    assert (training["ended"], training["rising"]) == ("rounds", True)


def test_alone_converges_under_every_schedule() -> None:
    schedule = pt.schedule.asynchronous(concurrency=3, buffer=2)
    alone = [
        federate(rounds=4, schedule=chosen, baselines=True).summary()["baselines"]["local"]
        for chosen in (None, schedule)
    ]
    assert alone[0] == alone[1]
    assert alone[0]["ended"] == "converged"
    assert alone[0]["epochs"]["min"] > 10


@each(
    ("field", "settings"),
    [
        ("until", {"until": "converged", "data": data(validation=0)}),
        ("keep", {"keep": "best", "rounds": 3, "data": data(validation=0)}),
        ("until", {"until": "convergd"}),
        ("patience", {"until": "converged", "patience": 0}),
        ("rounds", {}),
    ],
)
def test_refusals(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field) as refused:
        federate(**settings)
    assert refused.value.field == field  # type: ignore[attr-defined]


def test_states_on_disk_keep_the_last_round(tmp_path: Path) -> None:
    given = {"rounds": 4, "evaluate_every": 1, "store": "disk", "report": False}
    with pytest.raises(ValueError, match="store='memory'"):
        federate(keep="best", out=tmp_path / "a", **given)
    run = federate(until="converged", out=tmp_path / "b", **given)
    assert run.summary()["training"]["model_of_round"] == 4
