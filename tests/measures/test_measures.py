"""What a run follows beside scores, against the same computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.parts import Algorithm, Measure
from partita.core.types import Tensors
from partita.data import FederatedData
from partita.engine import measuring
from support import each

both_executors = each("executor", ["loop", "vmap"])
LR, CLIENTS = 0.2, 6


def ragged() -> FederatedData:
    """Six clients whose training and test samples differ in number; one has no test sample."""
    train, test = (9, 14, 300, 5, 7, 3), (4, 270, 2, 0, 8, 1)
    sizes = np.array([n for pair in zip(train, test) for n in pair])
    ranges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sizes.sum())
    x = rng.normal(size=(3, 5))[y] + rng.normal(size=(len(y), 5))
    return FederatedData.make(x, y, ranges[::2], ranges[1::2])


DATA = ragged()


def model() -> nn.Module:
    return pt.models.mlp(5, 4, 3, seed=1).double()


def federate(algorithm: Algorithm, *measures: Measure, **settings: Any) -> pt.Run:
    defaults = {"rounds": 1, "steps": 4, "batch": 6, "baselines": False, "progress": False}
    return pt.federate(model(), DATA, algorithm, measures=measures, **{**defaults, **settings})


def found(run: pt.Run, name: str) -> dict[str, Any]:
    measured: dict[str, Any] = run.metrics[-1]["measures"][name]
    return measured


def ended(executor: str) -> list[Tensors]:
    """The clients' models after a round: those of clients that train alone, before they are averaged."""
    run = federate(pt.local(LR), executor=executor)
    return [run.personalized(i) for i in range(CLIENTS)]


def losses(tensors: Tensors, client: int, split: str) -> Tensor:
    start, size = DATA.ranges(split)[client]
    x, y = DATA.x[start : start + size], DATA.y[start : start + size]
    output = torch.func.functional_call(model(), tensors, (x,))
    return nn.functional.cross_entropy(output, y, reduction="none")


# ---- at aggregation


@both_executors
def test_the_change_of_fedavg_is_the_way_to_the_aggregate(executor: str) -> None:
    run = federate(pt.fedavg(LR), pt.measures.aggregation_change(), executor=executor)
    ways = []
    for own in ended(executor):
        squares = [(run.shared[k] - own[k]).square().sum() for k in run.shared]
        ways.append(float(sum(squares)) ** 0.5)
    measured = found(run, "aggregation_change")
    assert measured["mean"] == pytest.approx(np.mean(ways), rel=1e-9)
    assert measured["std"] == pytest.approx(np.std(ways), rel=1e-9)


@both_executors
@pytest.mark.parametrize(
    "method",
    [pt.local(LR), pt.fedplus(pt.psi.avg(0.1), LR, 0.2, lam=0.0)],
    ids=["alone", "Fed+ with λ = 0"],
)
def test_nothing_changes_where_clients_go_on_from_their_own_models(method: Algorithm, executor: str) -> None:
    run = federate(method, pt.measures.aggregation_change(), rounds=3, executor=executor)
    for row in run.metrics:
        change = row["measures"]["aggregation_change"]
        assert (change["mean"], change["std"]) == pytest.approx((0, 0), abs=1e-12)


@both_executors
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_line_goes_from_the_own_to_the_aggregated_model(split: str, executor: str) -> None:
    measure = pt.measures.line_loss(points=3, split=split)
    run = federate(pt.fedavg(LR), measure, executor=executor)
    expected = []
    for lam in (0.0, 0.5, 1.0):
        between = [
            {k: (1 - lam) * own[k] + lam * run.shared[k] for k in run.shared} for own in ended(executor)
        ]
        every = torch.cat([losses(w, i, split) for i, w in enumerate(between)])
        assert len(every) == DATA.ranges(split)[:, 1].sum()
        expected.append(float(every.mean()))
    assert found(run, "line_loss") == {
        "loss": pytest.approx(expected, rel=1e-6),
        "lambda": [0.0, 0.5, 1.0],
    }


def test_a_line_without_samples_has_no_loss() -> None:
    everyone = np.arange(CLIENTS)
    none = np.zeros((CLIENTS, 2), dtype=np.int64)
    data = FederatedData.make(DATA.x, DATA.y, DATA.train[everyone], none)
    run = pt.federate(
        model(),
        data,
        pt.fedavg(LR),
        rounds=1,
        measures=[pt.measures.line_loss(split="test")],
        baselines=False,
    )
    assert found(run, "line_loss") == {}


# ---- what is left for the shared part


@both_executors
@each("byzantine", [(), (1, 4)], ids=["honest", "some lie"])
@each("name", ["ffgg", "fedavg"])
def test_the_gradient_is_that_of_the_theory(name: str, byzantine: tuple[int, ...], executor: str) -> None:
    """F_m(θ) of the quadratic problem; for fedavg θ is a part of the model that it shares."""
    problem = pt.data.quadratic(clients=7, n=40, d_theta=5, d_w=3)
    rate = problem.constants.gamma_theta
    methods = {"ffgg": pt.ffgg("w", rate, pt.exact()), "fedavg": pt.fedavg(rate / 10)}
    run = pt.federate(
        problem.model(),
        problem.data,
        methods[name],
        rounds=3,
        loss=problem.loss,
        metric="loss",
        measures=[pt.measures.gradient_norm("w", pt.exact())],
        executor=executor,
        baselines=False,
        **({"attack": pt.attack.sign_flip(), "byzantine": byzantine} if byzantine else {}),
    )
    honest = [m for m in range(7) if m not in byzantine]
    gradients = problem.F(run.shared["theta"])[honest]
    assert found(run, "gradient_norm") == {
        "total": pytest.approx(float(gradients.mean(0).norm()), abs=1e-10),
        "mean": pytest.approx(float(gradients.norm(dim=1).mean()), abs=1e-10),
    }


class Normed(nn.Module):
    """With statistics, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


@both_executors
def test_statistics_are_no_gradients(executor: str) -> None:
    settings: dict[str, Any] = {"rounds": 2, "norm": "global", "baselines": False, "executor": executor}
    measures = [pt.measures.gradient_norm()]
    run = pt.federate(Normed().double(), DATA, pt.fedavg(LR), measures=measures, **settings)
    gradients = []
    for start, size in DATA.train:
        own = run.model().train()
        nn.functional.cross_entropy(
            own(DATA.x[start : start + size]), DATA.y[start : start + size]
        ).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None]))
    rows = torch.stack(gradients)
    assert found(run, "gradient_norm") == {
        "total": pytest.approx(float(rows.mean(0).norm()), rel=1e-9),
        "mean": pytest.approx(float(rows.norm(dim=1).mean()), rel=1e-9),
    }


COPIES = {
    "fedavg": pt.fedavg(LR),
    "ditto": pt.ditto(LR, 0.5),
    "fedavg_plus": pt.fedavg_plus(LR, 0.2),
    "apfl": pt.apfl(LR),
}


@both_executors
@each("name", COPIES)
def test_what_is_kept_as_a_copy_too_is_shared(name: str, executor: str) -> None:
    """Of such methods too the gradient is at the server's model, all of it."""
    run = federate(COPIES[name], pt.measures.gradient_norm(), rounds=2, executor=executor)
    gradients = []
    for i in range(CLIENTS):
        w = {k: v.clone().requires_grad_() for k, v in run.shared.items()}
        grads = torch.autograd.grad(losses(w, i, "train").mean(), list(w.values()))
        gradients.append(torch.cat([g.flatten() for g in grads]))
    rows = torch.stack(gradients)
    assert found(run, "gradient_norm") == {
        "total": pytest.approx(float(rows.mean(0).norm()), rel=1e-9),
        "mean": pytest.approx(float(rows.norm(dim=1).mean()), rel=1e-9),
    }


def test_the_gradient_of_ditto_is_that_of_fedavg() -> None:
    """Its server's model is fedavg's."""
    runs = [federate(method, pt.measures.gradient_norm()) for method in (pt.fedavg(LR), pt.ditto(LR, 0.5))]
    for k, v in runs[0].shared.items():
        torch.testing.assert_close(runs[1].shared[k], v, rtol=1e-12, atol=1e-12)
    assert found(runs[1], "gradient_norm") == pytest.approx(found(runs[0], "gradient_norm"), rel=1e-9)


def test_blocks_of_clients_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all clients at once may not fit."""
    every = (pt.measures.gradient_norm("output"), pt.measures.aggregation_change(), pt.measures.line_loss(3))
    whole = federate(pt.fedavg(LR), *every).metrics[-1]["measures"]
    monkeypatch.setattr(measuring, "STATE_BYTES", 1)
    single = federate(pt.fedavg(LR), *every).metrics[-1]["measures"]
    for name, values in whole.items():
        for key, value in values.items():
            assert single[name][key] == pytest.approx(value, rel=1e-9)
