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


# ---- a penalty by its proximal map

KINDS = {
    "avg": pt.psi.avg(DELTA),
    "geomed": pt.psi.geomed(DELTA, tolerance=1e-12),
    "comed": pt.psi.comed(DELTA, tolerance=1e-12),
    "free": pt.psi.free(),
    "fixed": pt.psi.fixed(),
    "layerwise": pt.psi.layerwise({"a": pt.psi.avg(0.2), "*": pt.psi.comed(DELTA, tolerance=1e-12)}),
}


@each("kind", KINDS)
@some_points
def test_the_map_alone_gives_the_aggregator(kind: str, scale: float) -> None:
    """Equation 13 with the map of a built-in penalty ends where its own aggregator does."""
    known = KINDS[kind]
    given = pt.psi.penalty(lambda x: known.prox(x), tolerance=1e-12, iterations=100_000)
    deltas, weight = named(points(scale)), torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0, 1.0])
    ours, theirs = (flat(p.aggregator.combine(deltas, weight, torch.tensor(0)).delta) for p in (given, known))
    np.testing.assert_allclose(ours, theirs, atol=1e-8 * max(1, scale))


@each("kind", ["avg", "geomed", "comed", "layerwise"])
@each("far", [1.0, 100.0, 1e4, 1e6])
def test_the_map_alone_is_as_robust_as_the_built_in_medians(kind: str, far: float) -> None:
    """A third of the clients is far away: steps of δ, or a share of the spread, are not enough."""
    known = KINDS[kind]
    deltas = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).double()
    deltas[:3] += far
    stacked, weight = {"a": deltas[:, :2], "b": deltas[:, 2:]}, torch.ones(9).double()
    given = pt.psi.penalty(lambda x: known.prox(x))  # with the default tolerance and iterations
    ours, theirs = (p.aggregator.combine(stacked, weight, torch.tensor(0)) for p in (given, known))
    for name, value in theirs.delta.items():
        torch.testing.assert_close(ours.delta[name], value, rtol=1e-9, atol=1e-4 * DELTA)
    assert ours.notes["iterations"] < 100


def test_an_aggregate_that_is_not_found_is_warned_of() -> None:
    deltas, weight = {"a": torch.randn(9, 5, generator=torch.Generator().manual_seed(0))}, torch.ones(9)
    with pytest.warns(UserWarning, match="after iterations=3 the aggregate is not found to tolerance=1e-06"):
        pt.psi.penalty(KINDS["geomed"].prox, iterations=3).aggregator.combine(deltas, weight, torch.tensor(0))


def one_sided(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """prox of Ψ/σ = δ Σ max(0, θ): only what is above the others is charged."""
    return {k: torch.where(v > DELTA, v - DELTA, v.clamp(max=0)) for k, v in x.items()}


def above(theta: dict[str, Tensor]) -> Tensor:
    return DELTA * torch.stack([v.clamp(min=0).sum() for v in theta.values()]).sum()


def test_the_aggregator_of_a_penalty_that_is_not_symmetric() -> None:
    """The models themselves, not the deltas, decide the sign: argmin_w Σ_k Ψ̂(w_k − w) by another solver.

    Above costs and below is free, so that the aggregate lies above all models but for at most δ.
    """
    models, now = points(1.0), np.random.default_rng(5).normal(size=5)
    psi = pt.psi.penalty(one_sided, above, tolerance=1e-13, iterations=100_000)
    weight = torch.ones(len(models))
    delta = flat(psi.aggregator.combine(named(now - models), weight, torch.tensor(0)).delta)
    center = now - delta

    def charge(w: np.ndarray) -> float:
        x = torch.from_numpy(models - w)
        theta = one_sided({"x": x})["x"]
        return float(above({"x": theta}) + 0.5 * ((x - theta) ** 2).sum())

    best = minimize(charge, models.max(0), method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10}).fun
    assert charge(center) <= best + 1e-8
    assert charge(2 * models.mean(0) - center) > best + 0.1  # where the other sign would end


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_penalty_of_one_s_own_runs(executor: str) -> None:
    """As geomed with the same δ, where it is given by geomed's map."""
    data, model = pt.data.digits(clients=5), pt.models.mlp(64, 4, 10)
    common = {"rounds": 3, "steps": 2, "batch": 8, "executor": executor, "baselines": False}
    known = pt.psi.geomed(0.05)
    one, other = (
        pt.federate(model, data, pt.fedplus(psi, lr=0.2, sigma=0.5), **common).shared
        for psi in (known, pt.psi.penalty(known.prox))
    )
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_a_penalty_of_one_s_own_is_described_and_checked() -> None:
    assert describe(pt.psi.penalty(one_sided)) != describe(pt.psi.penalty(lambda x: x))
    for wrong in (0.1, lambda: 1):
        with pytest.raises(pt.Refused) as refused:
            pt.psi.penalty(wrong)  # type: ignore[arg-type]
        assert refused.value.field == "prox"


@every_penalty
def test_the_value_is_what_the_map_minimizes(psi: Penalty, value: Scalar) -> None:
    assert psi.value is not None
    for x in points(1.0):
        assert float(psi.value(named(x))) == pytest.approx(value(x))
