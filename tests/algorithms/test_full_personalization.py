"""Pieces of full personalization and control variates that no method's own options reach."""

from __future__ import annotations

import warnings

import pytest
import torch

import partita as pt
from partita.algorithms.local.prox import proximal
from partita.core import tree
from partita.core.metrics import LOSSES, METRICS
from partita.core.types import Batch, Partition, Tensors, Upload
from partita.engine.model.problem import ModelProblem, make_problem

LAM, LR = 2.0, torch.tensor(0.2, dtype=torch.float64)


def given() -> tuple[ModelProblem, Tensors, Batch]:
    """A small problem, its start and a batch of it."""
    model = pt.models.logistic(6, 4, seed=1).double()  # smooth, so that gradients vanish
    w = {k: v.detach() for k, v in model.named_parameters()}
    criteria = LOSSES["cross_entropy"], METRICS["accuracy"]
    problem = make_problem(model, Partition(tuple(w), tuple(w)), *criteria, ())
    random = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=random, dtype=torch.float64)
    return problem, w, Batch(x, torch.arange(9) % 4, None, torch.tensor(0))


def length(problem: ModelProblem, theta: Tensors, w: Tensors, batch: Batch) -> float:
    """‖∇f(θ) + λ (θ − w)‖."""
    _, g, _ = problem.grad(theta, batch, wrt=problem.trainable)
    return float(tree.norm(tree.axpy(LAM, tree.sub(theta, w), g)))


def test_inner_steps_stop_where_the_gradient_is_short() -> None:
    problem, w, batch = given()
    begin = length(problem, w, w, batch)
    for nu in (begin / 3, begin / 100):
        steps = [proximal(problem, LAM, k, pt.optim.sgd(), nu)(w, batch, LR)[0] for k in (30, 60)]
        assert 0.1 * nu < length(problem, steps[0], w, batch) <= nu
        assert all(torch.equal(steps[0][k], steps[1][k]) for k in w)
    stays = proximal(problem, LAM, 5, pt.optim.sgd(), 2 * begin)(w, batch, LR)[0]
    assert all(torch.equal(stays[k], w[k]) for k in w)


def test_many_inner_steps_find_the_minimizer() -> None:
    problem, w, batch = given()
    theta, loss, missed = proximal(problem, LAM, 200, pt.optim.sgd())(w, batch, LR)
    assert length(problem, theta, w, batch) < 1e-9
    assert loss == problem.grad(w, batch, wrt=problem.trainable)[0]
    assert missed is None  # nobody asked for an accuracy


@pytest.mark.parametrize("robust", [True, False])
def test_the_aggregator_protects_the_control_variate(robust: bool) -> None:
    aggregate = pt.aggregate.coordinate_median() if robust else None
    rows = torch.tensor([[1.0], [2.0], [3.0], [1e12], [5.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # the last one has no data
    upload = Upload({"w": rows}, weight=weight, sums={"w": rows})
    problem, _, _ = given()
    found = pt.scaffold(0.1, aggregate=aggregate).aggregate(problem)(upload, torch.tensor(0)).sums["w"]
    assert float(found) == (4 * 2.5 if robust else 1e12 + 6)  # |S| times the median, or the mean


def test_control_variates_need_a_memory() -> None:
    data = pt.data.digits(clients=4, test=0.2, seed=0)
    work = {"rounds": 1, "steps": 1, "batch": 8, "baselines": False, "progress": False}
    model = pt.models.logistic(64, 10)
    words = "state='reset': scaffold relies on what clients remember, and they forget; use state='keep'"
    with pytest.warns(UserWarning, match=words):
        pt.federate(model, data, pt.scaffold(0.1), state="reset", **work)
    stages = pt.pipeline(
        pt.stage(pt.scaffold(0.1), rounds=1, state="reset"), pt.stage(pt.fedavg(0.1), rounds=1)
    )
    with pytest.warns(UserWarning, match=words):
        pt.federate(model, data, stages, **{**work, "rounds": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.federate(model, data, pt.scaffold(0.1), **work)
        pt.federate(model, data, pt.fedavg(0.1), state="reset", **work)
