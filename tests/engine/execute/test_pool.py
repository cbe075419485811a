"""Clients side by side on several cores compute what they compute one after another."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.engine.execute import task
from partita.engine.execute.pool import Pool

SIZES = (9, 5, 1, 0, 6, 12)


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def data(*shape: int) -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    ends = np.cumsum(SIZES)
    x = rng.normal(size=(sum(SIZES), *shape)).astype("float32")
    train = np.stack([ends - SIZES, SIZES], axis=1)
    return pt.data.FederatedData.make(x, rng.integers(0, 4, len(x)), train, train)


def federate(executor: str, model: nn.Module, *shape: int, **options: object) -> pt.Run:
    method = pt.fedalt(personal="output", lr=0.05, momentum=0.5)
    given = {"rounds": 3, "cohort": 5, "epochs": 2, "batch": 4, "baselines": False, **options}
    return pt.federate(model, data(*shape), method, executor=executor, progress=False, **given)  # type: ignore[arg-type]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients came to the workers."""
    counts: list[int] = []
    parallel = Pool._parallel

    def counted(self: Pool, *given: object) -> object:
        counts.append(len(given[1]))  # type: ignore[arg-type]
        return parallel(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "_parallel", counted)
    return counts


@pytest.mark.parametrize(
    ("model", "shape", "norm"),
    [
        (pt.models.mlp(12, 8, 4), (12,), None),
        (pt.models.mnist_cnn(4, width=0.25, dropout=0.5), (28, 28), None),
        (nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), (12,), "personal"),
    ],
    ids=["mlp", "dropout", "norm"],
)
def test_the_same_as_the_loop(
    model: nn.Module, shape: tuple[int, ...], norm: str | None, used: list[int]
) -> None:
    pool, loop = (federate(e, model, *shape, norm=norm) for e in ("pool", "loop"))
    assert used
    for name, value in loop.shared.items():
        torch.testing.assert_close(pool.shared[name], value, atol=1e-5, rtol=1e-4)
    for i in range(len(SIZES)):
        for name, value in loop.client(i).personal.items():
            torch.testing.assert_close(pool.client(i).personal[name], value, atol=1e-5, rtol=1e-4)
    assert [r["test.personal"] for r in pool.metrics] == pytest.approx(
        [r["test.personal"] for r in loop.metrics]
    )


def test_the_same_bits_every_time() -> None:
    first, second = (federate("pool", pt.models.mlp(12, 8, 4), 12) for _ in range(2))
    assert all(torch.equal(first.shared[k], v) for k, v in second.shared.items())


def test_each_worker_has_one_core() -> None:
    from partita.engine.execute.pool import threads

    made = threads(3)
    assert {made.submit(torch.get_num_threads).result() for _ in range(12)} == {1}
    assert torch.get_num_threads() == 3


def test_cores_are_given_back() -> None:
    federate("pool", pt.models.mlp(12, 8, 4), 12)
    assert torch.get_num_threads() == 3


def test_a_single_client_has_all_cores(used: list[int]) -> None:
    federate("pool", pt.models.mlp(12, 8, 4), 12, cohort=1, evaluate_every=99)
    assert 1 not in used


def test_an_error_of_a_client_ends_the_round() -> None:
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(target))
        if len(calls) > 20:  # the trial comes before
            raise RuntimeError("no more")
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(RuntimeError, match="no more"):
        federate("pool", pt.models.mlp(12, 8, 4), 12, loss=loss, rounds=50)


def test_a_model_that_draws_from_the_process_runs_in_order(used: list[int]) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.output = nn.Linear(12, 5), nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.output(self.hidden(x + random.random() if self.training else x))
            return found

    federate("pool", Noisy(), 12)
    assert not used


@pytest.mark.usefixtures("measured")
def test_auto_compares_it_with_stacking() -> None:
    picks = federate("auto", pt.models.mlp(12, 8, 4), 12).config["executor"]["picks"]
    assert {pick["picked"] for pick in picks.values()} <= {"pool", "vmap"}
    assert all("pool" in pick["why"] for pick in picks.values())


class Viewing(nn.Module):
    """It needs the channels of images first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.output = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.conv(x).relu().view(len(x), -1))


NORMED = nn.Sequential(
    nn.Conv2d(3, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.5),
    nn.Linear(72, 4),
)


@pytest.mark.parametrize(("model", "last"), [(Viewing(), False), (NORMED, True)], ids=["view", "flatten"])
def test_channels_are_last_where_the_model_bears_it(
    model: nn.Module, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model and scores as by the reference, and tensors in the usual order."""
    found: list[bool] = []
    trial = task.takes_channels_last
    monkeypatch.setattr(task, "takes_channels_last", lambda *given: found.append(trial(*given)) or found[-1])
    loop, pool = (federate(kind, model, 3, 8, 8, norm="global") for kind in ("loop", "pool"))
    assert set(found) == {last}
    for k, v in loop.shared.items():
        torch.testing.assert_close(pool.shared[k], v, rtol=1e-5, atol=1e-6)
        assert pool.shared[k].is_contiguous()
    for a, b in zip(loop.metrics, pool.metrics):
        assert a["test.personal"] == b["test.personal"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)


def test_second_derivatives_of_images() -> None:
    """Forward derivatives of GroupNorm cannot have channels last; the gradients beside them do."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    method = pt.perfedavg(lr=0.05, alpha=0.01)
    given = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False, "progress": False}
    loop, pool = (pt.federate(model, data(3, 8, 8), method, executor=e, **given) for e in ("loop", "pool"))
    for k, v in loop.shared.items():
        torch.testing.assert_close(pool.shared[k], v, rtol=1e-5, atol=1e-6)
