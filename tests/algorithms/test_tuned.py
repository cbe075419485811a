"""The same method, evaluated after a common budget of fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita.algorithms.base import as_is
from partita.core.parts import Algorithm
from partita.core.types import RoundContext, Work
from partita.engine.description import describe
from partita.engine.execute.plan import draw
from partita.recipes import Experiment
from partita.recipes.experiment import changed
from partita.recipes.versus import versus
from reference import plain
from support import each

ROUNDS, SEED, LR = 2, 5, 0.2
both_executors = each("executor", ["loop", "vmap"])


def arrays() -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(4), [9, 12, 15, 20])
    y = rng.integers(0, 3, len(client))
    x = rng.normal(size=(3, 6))[y] + 0.7 * rng.normal(size=(4, 6))[client] + rng.normal(size=(len(y), 6))
    return pt.data.from_arrays(torch.from_numpy(x), y, client, test=0.3, validation=0, seed=0)


DATA = arrays()


def federate(method: Algorithm, **settings: Any) -> pt.Run:
    given = {"rounds": ROUNDS, "steps": 3, "batch": 4, "cohort": 2, "seed": SEED, "executor": "vmap"}
    model = pt.models.mlp(6, 5, 3, seed=1).double()
    quiet = {"baselines": False, "progress": False}
    return pt.federate(model, DATA, method, **{**given, **quiet, **settings})


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def descended(w: dict[str, Tensor], client: int, steps: int, batch: int | None) -> plain.Params:
    """Plain SGD on the rows that an evaluation after the last round sees."""
    work = Work(steps=steps, batch=batch)
    plan = draw(DATA, np.array([client]), work, 0, RoundContext(SEED, ROUNDS, 0, ROUNDS, ROUNDS, work))
    batches = [plan.rows[0, k, : plan.size[0, k]].numpy() for k in range(steps)]
    given = plain.Given(DATA.x.numpy(), DATA.y.numpy(), DATA.sizes(), [], None, 0, 0, True)
    return plain.descend({k: v.numpy() for k, v in w.items()}, given, batches, dict.fromkeys(w, LR), {})[0]


@both_executors
@each("batch", [None, 4])
@each(
    "method", [pt.fedavg(0.3), pt.fedalt("output", 0.3), pt.ditto(0.3, 0.1), pt.persafl_me(0.1, 5.0, 0.05, 3)]
)
def test_clients_take_plain_steps_from_what_they_have(
    method: Algorithm, batch: int | None, executor: str
) -> None:
    settings = {"schedule": pt.schedule.synchronous(), "executor": executor}
    before, run = (federate(m, **settings) for m in (method, pt.tuned(method, LR, 6, batch)))
    assert same(run.shared, before.shared)  # training is the method's own
    for i in range(DATA.clients):
        assert same(run.client(i).personal, before.client(i).personal)
        begin = {**run.shared, **run.client(i).personal}
        expected = descended({k: begin[k] for k in run.personalized(i)}, i, 6, batch)
        for k, value in run.personalized(i).items():
            np.testing.assert_allclose(value, expected[k], rtol=0, atol=1e-10)
        x, y = (t.numpy() for t in DATA.client(i, "test"))
        assert run.scores("personal")[i] == pytest.approx(plain.accuracy(expected, x, y))


def test_it_replaces_the_way_of_the_method() -> None:
    own = federate(pt.perfedavg(0.2, LR))
    again = federate(pt.tuned(pt.perfedavg(0.2, LR), LR, 1))
    other = federate(pt.tuned(pt.perfedavg(0.2, LR), 0.0))
    for i in range(DATA.clients):
        assert same(own.personalized(i), again.personalized(i))  # one step of size α either way
        assert same(other.personalized(i), other.shared)  # none of any size


def test_it_is_known_by_its_method(tmp_path: Path) -> None:
    method = pt.tuned(pt.fedavg(lr=0.3, momentum=0.5), lr=LR, steps=4, batch=8)
    assert (method.name, method.options["lr"]) == ("fedavg", 0.3)
    assert describe(method)["tuned"] == {"lr": LR, "steps": 4, "batch": 8}
    federate(method, out=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm"]["tuned"] == {"lr": LR, "steps": 4, "batch": 8}
    resumed = federate(method, out=tmp_path / "run", resume=True)
    assert resumed.summary()["algorithm"] == "fedavg"
    with pytest.raises(ValueError, match="tuned"):
        federate(pt.tuned(pt.fedavg(lr=0.3, momentum=0.5), lr=LR), out=tmp_path / "run", resume=True)


def test_the_last_stage_of_a_pipeline_is_tuned() -> None:
    stages = (pt.stage(pt.fedavg(0.3), rounds=1), pt.stage(pt.fedsim("output", 0.3), rounds=1))
    plainly, run = pt.pipeline(*stages), pt.tuned(pt.pipeline(*stages), LR, 6)
    assert run.name == "pipeline"
    assert run.stages[0].algorithm.personalize is as_is
    assert [list(s.algorithm.options).count("tuned") for s in run.stages] == [0, 1]
    alone = pt.pipeline(stages[0], pt.stage(pt.tuned(pt.fedsim("output", 0.3), LR, 6), rounds=1))
    one, other, before = federate(run), federate(alone), federate(plainly)
    for i in range(DATA.clients):
        assert same(one.personalized(i), other.personalized(i))
        assert not same(one.personalized(i), before.personalized(i))
    assert same(one.shared, before.shared)


def test_it_keeps_what_the_method_wants_of_a_schedule() -> None:
    assert pt.tuned(pt.fedbuff(0.1, buffer=2), LR).asynchronous == {"buffer": 2, "staleness": "sqrt"}
    assert pt.tuned(pt.l2gd(0.1, 1.0, 0.2), LR).synchronous_only == pt.l2gd(0.1, 1.0, 0.2).synchronous_only


def test_a_method_with_other_options_is_tuned_still() -> None:
    method = pt.tuned(pt.fedavg(lr=0.3), LR, 4)
    for chosen in ({"lr": 0.1}, {"": "fedprox", "mu": 0.1}):
        other = changed(method, chosen)
        assert other.options["tuned"] == {"lr": LR, "steps": 4, "batch": None}
        assert other.personalize is not as_is
    experiment = Experiment(pt.models.mlp(6, 5, 3).double(), DATA, method, rounds=1)
    study = versus(experiment, ["fedprox(mu=0.1)"])
    assert "tuned" in study.variants["fedprox-mu=0.1"].experiment.algorithm.options


@each(
    ("make", "start"),
    [
        (
            lambda: pt.tuned("fedavg", 0.1),
            "algorithm='fedavg': expected a method such as partita.fedavg(lr=0.1)",
        ),
        (lambda: pt.tuned(pt.fedavg, 0.1), "algorithm=<function fedavg"),
        (lambda: pt.tuned(pt.fedavg(0.1), -1), "lr=-1: expected a number from 0"),
        (lambda: pt.tuned(pt.fedavg(0.1), 0.1, 0), "steps=0: expected a whole number from 1"),
        (lambda: pt.tuned(pt.fedavg(0.1), 0.1, batch=0), "batch=0: expected a whole number from 1"),
        (lambda: pt.tuned(pt.fedavg(0.1)), "lr: tuned needs this argument"),
    ],
)
def test_refusals(make: Any, start: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(start)
