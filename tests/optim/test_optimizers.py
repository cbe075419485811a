"""Server optimizers against Algorithm 2 of Reddi et al. (2021) in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita import optim
from support import each

SHAPES = {"a": (3, 2), "b": (), "c": (4,)}


def deltas(n: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{k: rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(n)]


def tensors(x: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v) for k, v in x.items()}


def run(optimizer, steps=None) -> dict[str, Tensor]:
    """x after all deltas, from ones."""
    x = {k: torch.ones(s, dtype=torch.float64) for k, s in SHAPES.items()}
    opt = optimizer.init(x)
    for d in steps or deltas():
        x, opt = optimizer.step(x, tensors(d), opt)
    return x


def adaptive(kind: str, lr: float, beta1: float, beta2: float, tau: float) -> dict[str, np.ndarray]:
    x = {k: np.ones(s) for k, s in SHAPES.items()}
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.full(s, tau**2) for k, s in SHAPES.items()}
    for d in deltas():
        for k in x:
            pseudo = -d[k]  # the paper's Δ_t points where x should go
            m[k] = beta1 * m[k] + (1 - beta1) * pseudo
            square = pseudo**2
            if kind == "adagrad":
                v[k] = v[k] + square
            elif kind == "yogi":
                v[k] = v[k] - (1 - beta2) * square * np.sign(v[k] - square)
            else:
                v[k] = beta2 * v[k] + (1 - beta2) * square
            x[k] = x[k] + lr * m[k] / (np.sqrt(v[k]) + tau)
    return x


@each(("beta1", "beta2", "tau"), [(0.9, 0.99, 1e-3), (0.0, 0.5, 0.1), (0.3, 0.999, 1.0)])
@each("kind", ["adagrad", "yogi", "adam"])
def test_adaptive(kind, beta1, beta2, tau) -> None:
    options = {"beta1": beta1, "tau": tau} | ({} if kind == "adagrad" else {"beta2": beta2})
    got = run(getattr(optim, kind)(0.3, **options))
    for k, x in adaptive(kind, 0.3, beta1, beta2, tau).items():
        np.testing.assert_allclose(got[k].numpy(), x, rtol=1e-12)


def test_defaults_are_the_papers() -> None:
    for kind, beta1, beta2 in (("adagrad", 0.0, 0.0), ("yogi", 0.9, 0.99), ("adam", 0.9, 0.99)):
        got = run(getattr(optim, kind)(0.1))
        for k, x in adaptive(kind, 0.1, beta1, beta2, 1e-3).items():
            np.testing.assert_allclose(got[k].numpy(), x, rtol=1e-12)


def test_plain_averaging() -> None:
    expected = {k: 1 - sum(d[k] for d in deltas()) for k in SHAPES}
    for k, x in run(optim.sgd()).items():
        np.testing.assert_allclose(x.numpy(), expected[k], rtol=1e-12)
    assert optim.sgd().init({"a": torch.ones(2)}) == {}


def test_momentum() -> None:
    x, m = dict.fromkeys(SHAPES, 1.0), dict.fromkeys(SHAPES, 0.0)
    for d in deltas():
        m = {k: 0.8 * m[k] + d[k] for k in SHAPES}
        x = {k: x[k] - 0.5 * m[k] for k in SHAPES}
    for k, got in run(optim.sgd(0.5, momentum=0.8)).items():
        np.testing.assert_allclose(got.numpy(), x[k], rtol=1e-12)


@each("optimizer", [optim.sgd(0.5, 0.9), optim.adam(0.1), optim.yogi(0.1), optim.adagrad(0.1)])
def test_old_state_is_untouched(optimizer) -> None:
    x = {k: torch.ones(s) for k, s in SHAPES.items()}
    opt = optimizer.init(x)
    before = {k: v.clone() for k, v in opt.items()}
    new, moments = optimizer.step(x, {k: torch.ones(s) for k, s in SHAPES.items()}, opt)
    assert all(torch.equal(opt[k], before[k]) for k in before)
    assert all(bool((v == 1).all()) for v in x.values())
    assert moments.keys() == opt.keys()
    assert all(v.shape == x[k].shape and v.dtype == x[k].dtype for k, v in new.items())


@each(
    ("make", "field"),
    [
        (lambda: optim.sgd(0.0), "server lr=0.0"),
        (lambda: optim.sgd(-1), "server lr=-1"),
        (lambda: optim.sgd("1"), "server lr='1'"),
        (lambda: optim.sgd(True), "server lr=True"),
        (lambda: optim.sgd(1.0, 1.5), "server momentum=1.5"),
        (lambda: optim.adam(float("nan")), "server lr=nan"),
        (lambda: optim.adam(0.1, beta1=-0.1), "server beta1=-0.1"),
        (lambda: optim.adam(0.1, beta2=2), "server beta2=2"),
        (lambda: optim.yogi(0.1, tau=0), "server tau=0"),
        (lambda: optim.adagrad(None), "server lr=None"),
        (lambda: pt.fedadam(lr=0.1, server_lr=-1), "server_lr=-1"),
        (lambda: pt.fedavg(lr=0.1, server="adam"), "server='adam'"),
    ],
)
def test_refusals(make, field) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(field)
    assert "expected" in str(error.value)


def test_a_method_that_is_a_server_optimizer_takes_no_other() -> None:
    with pytest.raises(pt.Refused, match="fedadam has no such argument"):
        pt.fedadam(lr=0.1, server_lr=0.1, server=optim.sgd())


def small() -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(36, 5, generator=g), torch.randint(0, 3, (36,), generator=g)
    return pt.data.from_arrays(x, y, [0] * 16 + [1] * 12 + [2] * 8)


def test_methods_and_server_option_are_the_same() -> None:
    runs = [
        pt.federate(pt.models.mlp(5, 3), small(), method, rounds=3, batch=4, executor="loop", baselines=False)
        for method in (pt.fedadam(0.1, server_lr=0.05), pt.fedavg(0.1, server=optim.adam(0.05)))
    ]
    assert all(torch.equal(x, runs[1].shared[k]) for k, x in runs[0].shared.items())


def test_statistics_are_averaged_whatever_the_optimizer() -> None:
    """Adam's step on a running variance could make it negative."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    one_round = {"rounds": 1, "steps": 2, "norm": "global", "executor": "loop", "baselines": False}
    plain, adam = (
        pt.federate(model, small(), m, **one_round) for m in (pt.fedavg(0.1), pt.fedadam(0.1, server_lr=1.0))
    )
    for k in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(plain.shared[k], adam.shared[k])
        assert plain.shared[k].dtype == model.state_dict()[k].dtype
    assert not torch.equal(plain.shared["0.weight"], adam.shared["0.weight"])
    assert plain.shared["1.num_batches_tracked"] == 2
