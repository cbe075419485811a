"""Features of mean 0 and deviation 1, and the hint where they are far from it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.core import check
from partita.data import FederatedData, standardize
from partita.data.scale import scale_hint
from support import each

RNG = np.random.default_rng(0)
CLIENT = np.repeat([0, 1, 2], [30, 50, 20])
SCALES = np.array([300.0, 1.0, 0.01], np.float32)
TABLE = (RNG.normal(size=(100, 3)) * SCALES + [500, 0, 1]).astype(np.float32)
Y = np.arange(100) % 2


def made(x: Any) -> FederatedData:
    return pt.data.from_arrays(x, Y, CLIENT, seed=1)


def trained(data: FederatedData) -> torch.Tensor:
    return torch.cat([data.client(i)[0] for i in range(data.clients)]).double()


def assert_standard(x: torch.Tensor, axes: tuple[int, ...] = (0,)) -> None:
    assert torch.allclose(x.mean(axes), torch.zeros(1).double(), atol=1e-5)
    assert torch.allclose(x.std(axes, correction=0), torch.ones(1).double(), atol=1e-4)


def test_pooled_statistics_are_those_of_all_training_samples() -> None:
    before, data = made(TABLE), standardize(made(TABLE))
    assert_standard(trained(data))
    mean, deviation = trained(before).mean(0), trained(before).std(0, correction=0)
    for split in ("validation", "test"):
        x, y = before.client(1, split)
        assert torch.allclose(data.client(1, split)[0].double(), (x - mean) / deviation, atol=1e-3)
        assert torch.equal(data.client(1, split)[1], y)
    assert data.x.dtype == torch.float32
    assert json.loads(json.dumps(data.source))["shift"] == [{"name": "standardize", "by": "pooled"}]


def test_statistics_of_each_client_remove_differences_between_them() -> None:
    data = standardize(made(TABLE + 1000 * CLIENT[:, None]), by="client")
    for i in range(3):
        assert_standard(data.client(i)[0].double())
    assert data.client(2, "test")[0].abs().max() < 10


@each("by", ["pooled", "client"])
def test_constant_features_stay_finite(by: str) -> None:
    x = TABLE.copy()
    x[:, 0] = 0.1  # no number of float32
    x[CLIENT == 1, 1] = 7.0
    data = standardize(made(x), by=by)
    assert data.x[:, 0].abs().max() < 1e-6
    assert data.x.abs().max() < 20
    one = FederatedData.make(TABLE, Y, [(0, 1), (1, 60), (70, 0)], [(61, 3), (64, 3), (80, 5)])
    assert torch.isfinite(standardize(one, by=by).x).all()


def test_a_feature_that_a_client_does_not_vary_has_the_deviation_of_all() -> None:
    x = np.array([[1.0], [1.0], [5.0], [0.0], [4.0], [2.0]], np.float32)
    data = FederatedData.make(x, np.zeros(6, int), [(0, 2), (3, 2), (0, 0)], [(2, 1), (5, 1), (0, 0)])
    deviation = np.std([1, 1, 0, 4])
    assert standardize(data, by="client").client(0, "test")[0].item() == pytest.approx(4 / deviation)


@each("shape, dtype, axes", [
    ((3, 4, 5), np.uint8, (0, 2, 3)),
    ((3, 4, 5), np.float32, (0, 2, 3)),
    ((4, 5), np.float32, (0,)),
    ((6,), np.float64, (0,)),
])  # fmt: skip
def test_images_have_statistics_of_each_channel(shape: Any, dtype: Any, axes: Any) -> None:
    x = RNG.integers(0, 256, (100, *shape)).astype(dtype)
    data = standardize(made(x))
    assert_standard(trained(data), axes)


def test_grey_images_have_one_mean() -> None:
    x = RNG.integers(0, 256, (100, 4, 5)).astype(np.uint8)
    data = standardize(made(x))
    assert data.x.dtype == torch.float32
    assert_standard(trained(data), (0, 1, 2))
    assert not torch.allclose(trained(data).mean(0), torch.zeros(4, 5).double(), atol=1e-3)


def test_what_cannot_be_scaled_is_refused() -> None:
    pool = FederatedData.make(TABLE, Y, [(0, 50), (20, 50)])
    assert torch.isfinite(standardize(pool).x).all()
    for data, given, field in (
        (made(TABLE), {"by": "row"}, "by"),
        (made(TABLE.astype(np.int64)), {}, "x of standardize"),
        (pool, {"by": "client"}, "shift"),
        (TABLE, {}, "data"),
        (made(TABLE), {"like": TABLE}, "like"),
        (made(TABLE), {"like": made(TABLE[:, :2])}, "data: a sample of x"),
        (made(TABLE), {"like": standardize(made(TABLE)), "by": "client"}, "by"),
        (standardize(made(TABLE)), {"like": made(TABLE)}, "data"),
    ):
        with pytest.raises(check.Refused) as refused:
            standardize(data, **given)  # type: ignore[arg-type]
        assert refused.value.field == field


@each("x, hinted", [
    (TABLE, True),
    (RNG.normal(size=(100, 40)) * 200, True),  # features of speech
    (RNG.integers(0, 256, (100, 64)).astype(np.float32), True),  # pixels that were not divided
    (RNG.normal(size=(100, 3)) * [5, 0.01, 0.01], True),
    (RNG.normal(size=(100, 3)) * 1e-5, True),
    (RNG.random((100, 8, 8)), False),
    (np.eye(100), False),
    (RNG.normal(size=(100, 5)), False),
    (RNG.standard_t(3, size=(100, 5)), False),
    (RNG.integers(0, 10_000, (100, 20)), False),
    (RNG.integers(0, 256, (100, 8, 8)).astype(np.uint8), False),
    (np.full((100, 2), 1e6), False),  # what never varies says nothing
])  # fmt: skip
def test_a_hint_names_standardize_where_scales_are_unusual(x: Any, hinted: bool) -> None:
    hint = scale_hint(made(x))
    assert (hint is not None) == hinted
    assert hint is None or "partita.data.standardize" in hint
    if hinted:
        assert scale_hint(standardize(made(x))) is None


@pytest.mark.usefixtures("brief_baselines")
def test_runs_give_the_hint_once() -> None:
    def run(data: FederatedData) -> None:
        pt.federate(
            pt.models.mlp(3, 4, 2), data, pt.fedavg(lr=1e-6), rounds=1, steps=1, batch=4, report=False
        )

    with pytest.warns(UserWarning, match="standardize") as said:
        run(made(TABLE))
    assert sum("standardize" in str(warning.message) for warning in said) == 1
    run(standardize(made(TABLE)))


# ---- clients that come later


@each("scaled", [False, True])
def test_later_clients_are_scaled_as_those_of_training(scaled: bool) -> None:
    data, later = made(TABLE), made(TABLE * 3 + 7)
    mean, deviation = trained(data).mean(0), trained(data).std(0, correction=0)
    like = standardize(data).subset([0, 2]).to("cpu") if scaled else data  # it goes along
    found = standardize(later, like=like)
    assert torch.allclose(found.x.double(), (later.x - mean) / deviation, rtol=1e-4, atol=1e-4)
    assert found.source["shift"] == [{"name": "standardize", "by": "pooled"}]


def test_later_clients_scaled_by_themselves_take_from_training_what_they_lack() -> None:
    data = standardize(made(TABLE), by="client")
    x = TABLE * 3 + 7
    x[CLIENT == 1, 1] = 5.0
    later = standardize(made(x), like=data)
    assert later.source["shift"][-1]["by"] == "client"
    assert_standard(later.client(0)[0].double())
    x[10:20, 1] = 9.0  # another client
    assert torch.equal(later.client(1)[0], standardize(made(x), like=data).client(1)[0])


def test_what_was_scaled_twice_is_undone_as_one() -> None:
    data = made(TABLE)
    twice = standardize(standardize(data))
    assert torch.allclose(standardize(data, like=twice).x, twice.x, atol=1e-4)


@each("by", ["pooled", "client"])
def test_another_scale_than_that_of_training_is_told(by: str, recwarn: pytest.WarningsRecorder) -> None:
    data = standardize(made(TABLE), by=by)
    options: dict[str, Any] = {"rounds": 1, "steps": 1, "executor": "vmap", "baselines": False}
    run = pt.federate(pt.models.mlp(3, 2, 2), data, pt.fedavg(lr=0.1), **options)
    later = made(TABLE + 1000)

    def told(new: FederatedData) -> bool:
        recwarn.clear()
        run.evaluate(new)
        run.personalize(new)
        return any("like=data" in str(warning.message) for warning in recwarn)

    assert told(later)
    assert told(standardize(later)) or by == "client"
    assert not told(standardize(later, like=data))
    assert not told(data)
