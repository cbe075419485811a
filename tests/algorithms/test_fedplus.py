"""Fed+: Table 1 of Kundu et al. (2022), whose models the server aggregates, stragglers, statistics."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.parts import Algorithm
from support import each

LR, SIGMA = 0.3, 0.5
both_executors = each("executor", ["loop", "vmap"])
HYBRID = pt.psi.layerwise({"hidden*": pt.psi.avg(0.2), "*": pt.psi.comed(0.05)})
MEDIANS = {
    "geometric": pt.aggregate.geometric_median(),
    "coordinate": pt.aggregate.coordinate_median(),
    "smoothed geometric": pt.aggregate.smoothed_geometric_median(0.1),
}


def data(sizes: tuple[int, ...] = (9, 4, 1, 0, 14, 6, 8)) -> pt.data.FederatedData:
    """Clients with so many training samples each, and two of test."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(len(sizes)), np.array(sizes) + 2)
    y = rng.integers(0, 4, len(client))
    x = rng.normal(size=(4, 6))[y] + 0.7 * rng.normal(size=(len(sizes), 6))[client]
    last = np.r_[client[1:] != client[:-1], True] | np.r_[client[2:] != client[:-2], True, True]
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
    return pt.data.from_arrays(x, y, client, test=last, validation=0)


DATA = data()


def federate(algorithm: Algorithm, model: nn.Module | None = None, **settings: Any) -> pt.Run:
    work = {"rounds": 3, "cohort": 5, "epochs": 2, "batch": 4, "seed": 3, "executor": "vmap"}
    model = pt.models.mlp(6, 5, 4, seed=1) if model is None else model
    return pt.federate(model, DATA, algorithm, **{**work, "baselines": False, "progress": False, **settings})


def own(run: pt.Run) -> list[dict[str, Tensor]]:
    return [run.client(i).personal for i in range(DATA.clients)]


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], atol=atol, rtol=0)


# ---- Table 1


@both_executors
@each("psi", [pt.psi.avg(), pt.psi.geomed(), HYBRID, pt.psi.fixed()], ids=lambda p: p.name)
def test_local(psi: Any, executor: str) -> None:
    """λ = 0, σ = 0: every client alone, bit for bit; the server's model is nobody's."""
    options = {"momentum": 0.5, "weight_decay": 0.01, "max_grad_norm": 1.0}
    plus = federate(pt.fedplus(psi, LR, sigma=0.0, **options), executor=executor)
    alone = federate(pt.local(LR, **options), executor=executor)
    for a, b in zip(own(plus), own(alone)):
        assert_same_bits(a, b)


@both_executors
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fedavg(weighting: str, executor: str) -> None:
    """λ = 1, σ = 0, mean: the server's model is fedavg's, bit for bit."""
    plus = federate(pt.fedavg_plus(LR, 0.0, lam=1.0, weighting=weighting, momentum=0.5), executor=executor)
    average = federate(pt.fedavg(LR, weighting=weighting, momentum=0.5), executor=executor)
    assert_same_bits(plus.shared, average.shared)
    assert [r["test.global"] for r in plus.metrics] == [r["test.global"] for r in average.metrics]


@both_executors
@each("median", MEDIANS.values(), ids=MEDIANS)
def test_medians(median: Any, executor: str) -> None:
    """λ = 1, σ = 0 and a median: fedavg with that aggregator (RFA, coordinate median), bit for bit."""
    plus = federate(pt.fedplus(pt.psi.free(), LR, 0.0, lam=1.0, aggregate=median), executor=executor)
    robust = federate(pt.fedavg(LR, aggregate=median, weighting="uniform"), executor=executor)
    assert_same_bits(plus.shared, robust.shared)


@pytest.mark.parametrize("name", ["rfa", "coordinate_median_fedavg"])
def test_medians_by_name(name: str) -> None:
    median = MEDIANS["geometric" if name == "rfa" else "coordinate"]
    plus = pt.fedplus(pt.psi.avg(), LR, 0.0, lam=1.0, aggregate=median)
    robust = getattr(pt, name)(LR, weighting="uniform")
    assert_same_bits(federate(plus).shared, federate(robust).shared)


def test_the_penalty_brings_its_aggregator() -> None:
    """λ = 1, σ = 0: δ-smoothed medians, as fedavg with them."""
    robust = pt.fedavg(LR, aggregate=pt.aggregate.smoothed_geometric_median(0.2), weighting="uniform")
    plus = pt.fedgeomed_plus(LR, 0.0, delta=0.2, lam=1.0)
    assert_same_bits(federate(plus).shared, federate(robust).shared)


@both_executors
def test_fedprox(executor: str) -> None:
    """λ = 1, θ = 0: the κ-form with η is fedprox with ηκ (Proposition 1). To rounding only: the two write the
    same step as κ[w − ηg] + (1 − κ)w̃ and as w − ηκ(g + σ(w − w̃))."""
    plus = federate(pt.fedplus(pt.psi.fixed(), LR, SIGMA, lam=1.0), executor=executor)
    prox = federate(pt.fedprox(LR / (1 + LR * SIGMA), mu=SIGMA, weighting="uniform"), executor=executor)
    assert_close(plus.shared, prox.shared, atol=1e-6)
    average = federate(pt.fedavg(LR, weighting="uniform"), executor=executor)
    assert not torch.allclose(plus.shared["output.linear.weight"], average.shared["output.linear.weight"])


class Line(nn.Module):
    """x ↦ wᵀx in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_fedprox_by_hand() -> None:
    """The κ-form written out: two clients, full batches, w ← κ[w − η∇f(w)] + (1 − κ)w̃ from w = w̃."""
    rng = np.random.default_rng(0)
    x, y, client = rng.normal(size=(12, 2)), rng.normal(size=12), np.repeat([0, 1], 6)
    doubles = torch.from_numpy(x), torch.from_numpy(y)
    some = pt.data.from_arrays(*doubles, client, test=np.zeros(12, dtype=bool), validation=0)
    method = pt.fedplus(pt.psi.fixed(), LR, SIGMA, lam=1.0)
    settings = {"rounds": 3, "steps": 4, "loss": "mse", "executor": "loop", "baselines": False}
    run = pt.federate(Line(), some, method, **settings, progress=False)
    center, kappa = np.array([0.5, -1.0]), 1 / (1 + LR * SIGMA)
    for _ in range(3):
        models = []
        for k in (0, 1):
            w, a, b = center, x[client == k], y[client == k]
            for _ in range(4):
                w = kappa * (w - LR * 2 * a.T @ (a @ w - b) / 6) + (1 - kappa) * center
            models.append(w)
        center = (models[0] + models[1]) / 2
    np.testing.assert_allclose(run.shared["w"], center, rtol=0, atol=1e-13)


# ---- over="all"


@both_executors
@each("weighting", ["uniform", "samples"])
@each("psi", [pt.psi.avg(), pt.psi.geomed(), HYBRID], ids=lambda p: p.name)
def test_with_everyone_all_is_the_cohort(psi: Any, weighting: str, executor: str) -> None:
    runs = [
        federate(pt.fedplus(psi, LR, SIGMA, over=over, weighting=weighting), cohort=None, executor=executor)
        for over in ("cohort", "all")
    ]
    assert_same_bits(runs[0].shared, runs[1].shared)
    for a, b in zip(*map(own, runs)):
        assert_same_bits(a, b)


def test_the_mean_over_all_is_of_last_models() -> None:
    """Who is absent stays in the mean with what it last had; who was never there, with the first model."""
    run = federate(pt.fedavg_plus(LR, SIGMA, over="all"), cohort=2, rounds=2, seed=5)
    first = pt.models.mlp(6, 5, 4, seed=1).state_dict()
    seen = [
        i
        for i, w in enumerate(own(run))
        if not torch.equal(w["output.linear.bias"], first["output.linear.bias"])
    ]
    assert 2 <= len(seen) <= 4
    assert not {3} & set(seen)
    for k, value in run.shared.items():
        torch.testing.assert_close(value, torch.stack([w[k] for w in own(run)]).mean(0), atol=1e-6, rtol=0)


def test_all_with_a_server_optimizer_resumes(tmp_path: Path) -> None:
    """The table of models and the optimizer's moments are in the checkpoint, apart from each other."""
    method = pt.fedgeomed_plus(LR, SIGMA, over="all", server=pt.optim.adam(0.05), weighting="samples")
    straight = federate(method, rounds=4)

    class Stop(pt.callbacks.Callback):
        def round(self, event: pt.callbacks.Event) -> None:
            if event.round == 3:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        federate(method, rounds=4, out=tmp_path / "run", checkpoint_every=2, callbacks=[Stop()])
    resumed = federate(method, rounds=4, out=tmp_path / "run", checkpoint_every=2, resume=True)
    assert_same_bits(resumed.shared, straight.shared)
    for a, b in zip(own(resumed), own(straight)):
        assert_same_bits(a, b)


# ---- clients that differ in speed


def test_stragglers() -> None:
    """E_k: one number of steps for each client. Who takes none stays where it is, and still has its say."""
    steps = [5, 1, 0, 3, 0, 2, 4]
    run = federate(pt.fedavg_plus(LR, SIGMA), rounds=1, cohort=None, epochs=None, steps=steps)
    first = pt.models.mlp(6, 5, 4, seed=1).state_dict()
    moved = [not torch.equal(w["output.linear.bias"], first["output.linear.bias"]) for w in own(run)]
    assert moved == [bool(s) and n > 0 for s, n in zip(steps, DATA.sizes())]
    voters = [w for w, n in zip(own(run), DATA.sizes()) if n]
    for k, value in run.shared.items():
        torch.testing.assert_close(value, torch.stack([w[k] for w in voters]).mean(0), atol=1e-6, rtol=0)
    one = federate(pt.fedavg_plus(LR, SIGMA), rounds=1, cohort=None, epochs=None, steps=1)
    assert_same_bits(own(run)[1], own(one)[1])


# ---- what a client has


def test_a_client_is_evaluated_with_its_own_model() -> None:
    run = federate(pt.fedgeomed_plus(LR, SIGMA))
    for i, w in enumerate(own(run)):
        assert_same_bits(run.personalized(i), w)
    assert not torch.equal(own(run)[0]["output.linear.bias"], run.shared["output.linear.bias"])


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@both_executors
def test_statistics_go_on_from_the_clients_own(executor: str) -> None:
    """σ = 0, λ = 0: statistics and all are those of clients that train alone."""
    plus = federate(pt.fedcomed_plus(LR, 0.0), with_norm(), norm="global", executor=executor, batch=3)
    alone = federate(pt.local(LR), with_norm(), norm="global", executor=executor, batch=3)
    for a, b in zip(own(plus), own(alone)):
        assert_same_bits(a, b)
    moved = own(plus)[4]
    assert moved["1.num_batches_tracked"].dtype == torch.int64
    assert moved["1.num_batches_tracked"] > 0


@both_executors
def test_statistics_of_the_server_are_those_of_fedavg(executor: str) -> None:
    plus = federate(pt.fedavg_plus(LR, 0.0, lam=1.0), with_norm(), norm="global", executor=executor, batch=3)
    average = federate(
        pt.fedavg(LR, weighting="uniform"), with_norm(), norm="global", executor=executor, batch=3
    )
    assert_same_bits(plus.shared, average.shared)
    assert set(STATISTICS) <= set(plus.shared)


@both_executors
@pytest.mark.parametrize("over", ["cohort", "all"])
def test_statistics_are_never_pulled(over: str, executor: str) -> None:
    """They follow the forward pass alone: a strong pull leaves its mark on the weights only."""
    weak, strong = (
        federate(
            pt.fedplus(pt.psi.fixed(), LR, sigma, over=over),
            with_norm(),
            norm="global",
            executor=executor,
            rounds=1,
            epochs=1,
            batch=None,
        )
        for sigma in (0.0, 1e3)
    )
    for a, b in zip(own(weak), own(strong)):
        assert all(torch.equal(a[k], b[k]) for k in STATISTICS)
    assert not torch.equal(own(weak)[4]["0.weight"], own(strong)[4]["0.weight"])
    assert weak.shared["1.num_batches_tracked"].dtype == torch.int64


@both_executors
def test_personal_norm_layers(executor: str) -> None:
    """FedBN within Fed+: norm layers are neither sent nor pulled."""
    run = federate(pt.fedgeomed_plus(LR, SIGMA), with_norm(), norm="personal", executor=executor, batch=3)
    assert set(run.shared) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert set(own(run)[0]) == set(with_norm().state_dict())


# ---- options


def test_defaults_are_those_of_the_paper() -> None:
    for build in (pt.fedavg_plus, pt.fedgeomed_plus, pt.fedcomed_plus):
        found = inspect.signature(build).parameters
        defaults = {k: found[k].default for k in ("delta", "lam", "over", "weighting")}
        assert defaults == {"delta": 0.1, "lam": 0.0, "over": "cohort", "weighting": "uniform"}


@each(
    ("wrong", "message"),
    [
        ({"sigma": -1}, "sigma=-1: expected a number from 0"),
        ({"lam": 1.5}, "lam=1.5: expected a number from 0 up to 1"),
        ({"delta": 0}, "delta=0: expected a number above 0"),
        ({"over": "everyone"}, "over='everyone': expected one of 'cohort', 'all'"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pt.fedcomed_plus(**{"lr": 0.1, "sigma": 0.1, **wrong})


def test_a_penalty_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"psi='avg': expected a penalty such as partita.psi.avg\(0.1\)"):
        pt.fedplus("avg", lr=0.1, sigma=0.1)
