"""The penalties of Fed+: a proximal map is an argmin, an aggregator is the point that is charged least."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.func import vmap

import partita as pt
from partita.algorithms.psi import Penalty
from partita.engine.description import describe
from support import each

Scalar = Callable[[np.ndarray], float]
DELTA = 0.3
# Ψ/σ of each penalty, on a vector
VALUES: dict[str, tuple[Penalty, Scalar]] = {
    "avg": (pt.psi.avg(DELTA), lambda x: DELTA / 2 * (x**2).sum()),
    "geomed": (pt.psi.geomed(DELTA, tolerance=1e-12), lambda x: DELTA * np.linalg.norm(x)),
    "comed": (pt.psi.comed(DELTA, tolerance=1e-12), lambda x: DELTA * np.abs(x).sum()),
    "free": (pt.psi.free(), lambda x: 0.0),  # noqa: ARG005
}
every_penalty = each(("psi", "value"), VALUES.values(), ids=VALUES)
some_points = each("scale", [0.01, 0.3, 3.0])


def named(x: np.ndarray | Tensor) -> dict[str, Tensor]:
    """Five numbers as a matrix, a vector and a number."""
    t = torch.as_tensor(x)
    return {"a": t[..., :2].reshape(*t.shape[:-1], 1, 2), "b": t[..., 2:4], "c": t[..., 4]}


def flat(x: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([v.reshape(-1) for v in x.values()]).numpy()


def points(scale: float, n: int = 6) -> np.ndarray:
    return scale * np.random.default_rng(0).normal(size=(n, 5))


@every_penalty
@some_points
def test_prox_is_the_argmin(psi: Penalty, value: Scalar, scale: float) -> None:
    """No point around it, near or far, does better in Ψ(θ)/σ + ½‖x − θ‖²."""
    rng = np.random.default_rng(1)
    for x in points(scale):

        def charge(theta: np.ndarray, x: np.ndarray = x) -> float:
            return value(theta) + 0.5 * ((x - theta) ** 2).sum()

        found = flat(psi.prox(named(x)))
        best = charge(found)
        for size in (1e-4, 1e-2, 1.0):
            assert all(charge(found + size * d) >= best - 1e-12 for d in rng.normal(size=(50, 5)))
        assert best <= minimize(charge, 0.9 * x, method="Nelder-Mead", options={"maxiter": 4000}).fun + 1e-9


@each("psi", [p for p, _ in VALUES.values()], ids=VALUES)
@some_points
def test_moreau(psi: Penalty, scale: float) -> None:
    """x = prox_g(x) + prox_{g*}(x): the rest x − θ is the projection of x on the set that g* allows."""
    for x in points(scale):
        rest = x - flat(psi.prox(named(x)))
        if psi.name == "avg":  # g* = ‖·‖²/(2δ)
            np.testing.assert_allclose(rest, x * DELTA / (1 + DELTA), rtol=1e-12)
        elif psi.name == "geomed":  # g* is 0 within the ball of radius δ
            np.testing.assert_allclose(rest, x * min(1, DELTA / np.linalg.norm(x)), rtol=1e-12)
        elif psi.name == "comed":  # ... within the cube
            np.testing.assert_allclose(rest, np.clip(x, -DELTA, DELTA), rtol=1e-12)
        else:  # ... at 0 alone
            np.testing.assert_array_equal(rest, 0)


def test_the_soft_threshold_keeps_negative_entries() -> None:
    """(12) of the paper as printed gives 0 for all of them."""
    found = pt.psi.comed(0.5).prox({"w": torch.tensor([-2.0, -0.5, -0.1, 0.0, 0.4, 0.5, 2.0])})
    assert found["w"].tolist() == [-1.5, 0, 0, 0, 0, 0, 1.5]


@each("psi", [*(p for p, _ in VALUES.values()), pt.psi.fixed()], ids=lambda p: p.name)
def test_nothing_is_wrong_at_zero(psi: Penalty) -> None:
    zero = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
    found = psi.prox(zero)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in zero.items()}
    assert all((v == 0).all() for v in found.values())
    assert psi.prox({}) == {}


@each("psi", [*(p for p, _ in VALUES.values()), pt.psi.fixed()], ids=lambda p: p.name)
def test_stacked_equals_one_after_another(psi: Penalty) -> None:
    x = torch.as_tensor(points(0.3)).float()
    stacked = vmap(lambda v: psi.prox(named(v)))(x)
    for i, row in enumerate(x):
        for k, v in psi.prox(named(row)).items():
            torch.testing.assert_close(stacked[k][i], v)
            assert stacked[k].dtype == torch.float32


# ---- aggregators


def envelope(psi: Penalty, value: Scalar, w: np.ndarray, models: np.ndarray, weight: np.ndarray) -> float:
    """Σ_k α_k min_θ [Ψ(θ)/σ + ½‖w_k − w − θ‖²]."""
    total = 0.0
    for a, model in zip(weight, models):
        theta = flat(psi.prox(named(model - w)))
        total += a * (value(theta) + 0.5 * ((model - w - theta) ** 2).sum())
    return total


@each("name", ["avg", "geomed", "comed"])
@some_points
@each("weight", [np.ones(6), np.array([1.0, 0, 5, 2, 2, 3])], ids=["equal", "weighted"])
def test_the_aggregator_is_charged_least(name: str, scale: float, weight: np.ndarray) -> None:
    psi, value = VALUES[name]
    models = points(scale)
    delta, _ = psi.aggregator.combine(named(models), torch.as_tensor(weight), torch.tensor(0))
    found = flat(delta)
    best = envelope(psi, value, found, models, weight)
    rng = np.random.default_rng(2)
    for size in (1e-3, 0.1, 1.0):
        for d in rng.normal(size=(30, 5)):
            assert envelope(psi, value, found + size * d, models, weight) >= best - 1e-12


@pytest.mark.parametrize("psi", [pt.psi.free(), pt.psi.fixed()], ids=lambda p: p.name)
def test_the_extremes_aggregate_by_the_mean(psi: Penalty) -> None:
    assert psi.aggregator.name == "mean"
    x = {"a": torch.randn(3), "b": torch.randn(())}
    expected = x if psi.name == "free" else {k: torch.zeros_like(v) for k, v in x.items()}
    assert all(torch.equal(v, expected[k]) for k, v in psi.prox(x).items())


# ---- one for each layer


def test_layerwise_is_each_penalty_on_its_own_names() -> None:
    parts = {"a": pt.psi.avg(2.0), "?": pt.psi.geomed(0.2)}
    psi = pt.psi.layerwise(parts)
    x = named(points(0.5)[0])
    found = psi.prox(x)
    assert list(found) == list(x)
    rest = {k: x[k] for k in ("b", "c")}  # both together: one norm
    expected = parts["a"].prox({"a": x["a"]}) | parts["?"].prox(rest)
    assert all(torch.equal(found[k], expected[k]) for k in x)
    models, one = named(points(0.5)), torch.ones(6, dtype=torch.float64)
    delta, notes = psi.aggregator.combine(models, one, torch.tensor(0))
    together = {k: models[k] for k in ("b", "c")}
    middle = parts["?"].aggregator.combine(together, one, torch.tensor(0)).delta
    torch.testing.assert_close(delta["a"], models["a"].mean(0))
    assert all(torch.equal(delta[k], middle[k]) for k in ("b", "c"))
    assert "?.iterations" in notes


@each("wrong", [{}, {"*": 0.1}, {1: pt.psi.avg()}, pt.psi.avg(), None, "avg"])
def test_layerwise_takes_patterns_with_penalties(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^penalties=.*: expected name patterns with their penalties"):
        pt.psi.layerwise(wrong)


def test_a_name_without_a_penalty_is_refused_before_any_work() -> None:
    psi = pt.psi.layerwise({"hidden*": pt.psi.avg()})
    data = pt.data.digits(clients=4)
    with pytest.raises(ValueError, match=r"a pattern for output.linear.weight; '\*' at the end"):
        pt.federate(pt.models.mlp(64, 8, 10), data, pt.fedplus(psi, lr=0.1, sigma=0.1), rounds=1)


# ---- written down


def test_a_penalty_is_written_as_one_calls_it() -> None:
    psi = pt.psi.layerwise({"a*": pt.psi.avg(0.2), "*": pt.psi.free()})
    assert repr(psi) == "pt.psi.layerwise(penalties={'a*': pt.psi.avg(delta=0.2), '*': pt.psi.free()})"
    again = eval(repr(psi), {"pt": pt})
    assert repr(again) == repr(psi)


def test_a_penalty_in_config_json() -> None:
    psi = pt.psi.layerwise({"a*": pt.psi.avg(0.2), "*": pt.psi.comed()})
    written = describe(pt.fedplus(psi, lr=0.1, sigma=0.1))
    assert json.loads(json.dumps(written))["psi"] == {
        "name": "layerwise",
        "penalties": {
            "a*": {"name": "avg", "delta": 0.2},
            "*": {"name": "comed", "delta": 0.1, "tolerance": 1e-6, "iterations": 1000},
        },
    }
