"""A batch in pieces: the same gradient as at once, for any loss, and never more samples in the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from support import each

SIZES = (12, 7, 1, 0, 10)
SETTINGS = {"rounds": 2, "epochs": 2, "baselines": False, "progress": False, "seed": 2}


def data() -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)), rng.integers(0, 3, sum(SIZES))
    end = np.cumsum(SIZES)
    ranges = np.stack([end - SIZES, SIZES], axis=1)
    return pt.data.FederatedData.make(x, y, ranges, ranges)


def trained(method: pt.Algorithm, model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    return pt.federate(model, data(), method, **{**SETTINGS, **settings}).shared


def close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-12) -> None:
    assert one.keys() == other.keys()
    for k, x in one.items():
        torch.testing.assert_close(x, other[k], rtol=0, atol=atol)


def network() -> nn.Module:
    return pt.models.mlp(4, 5, 3, seed=1).double()


LOSSES = {
    "mean": None,
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "own": lambda output, target: (output.logsumexp(-1) - output[torch.arange(len(target)), target]).mean(),
}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@each("loss", LOSSES.values(), ids=LOSSES)
def test_pieces_give_the_gradient_of_the_whole(loss: Any, executor: str) -> None:
    """In pieces of one sample; of some, no label counts, and some clients have fewer than others."""
    options = {"loss": loss, "rounds": 1, "executor": executor}
    whole = trained(pt.fedavg(0.05), network(), batch=6, **options)
    close(trained(pt.fedavg(0.05, accumulate=6), network(), batch=1, **options), whole)


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


@each(
    "loss",
    [
        lambda output, target: nn.functional.cross_entropy(output, target, weight=WEIGHT),
        lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum"),
        lambda output, target, features: output.std() + nn.functional.cross_entropy(output, target),  # noqa: ARG005
    ],
    ids=["weights", "sum", "features"],
)
def test_a_loss_that_is_no_mean_over_its_pieces_is_refused(loss: Any) -> None:
    for executor in ("loop", "vmap"):
        with pytest.raises(ValueError, match=r"^accumulate=3: the loss of a batch is not the mean"):
            trained(pt.fedavg(0.1, accumulate=3), network(), loss=loss, batch=2, executor=executor)
    trained(pt.fedavg(0.1), network(), loss=loss, batch=6, executor="loop")


def test_clipping_acts_on_the_gradient_of_the_whole() -> None:
    options = {"momentum": 0.9, "max_grad_norm": 0.1}
    one = trained(pt.fedprox(0.3, 0.5, **options), network(), batch=6)
    close(trained(pt.fedprox(0.3, 0.5, accumulate=3, **options), network(), batch=2), one)


@pytest.mark.parametrize("hessian", ["exact", "hf"])
def test_products_with_the_hessian_come_in_pieces_too(hessian: str) -> None:
    one = trained(pt.perfedavg(0.2, 0.1, hessian), network(), batch=6)
    close(trained(pt.perfedavg(0.2, 0.1, hessian, accumulate=3), network(), batch=2), one)


def normed() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))
    return nn.Sequential(*layers).double()


def test_statistics_and_dropout_are_those_of_each_piece() -> None:
    loop, vmap = (
        trained(pt.fedavg(0.1, accumulate=3), normed(), norm="global", executor=e, batch=3)
        for e in ("loop", "vmap")
    )
    close(loop, vmap, 1e-9)


def test_statistics_see_one_piece_after_another() -> None:
    """Client 0 passes over 12 samples in pieces of 3, twice."""
    alone = pt.federate(
        normed(), data(), pt.local(0.1, accumulate=2), batch=3, **{**SETTINGS, "rounds": 1}, norm="global"
    )
    assert int(alone.client(0).personal["1.num_batches_tracked"]) == 8
    assert int(alone.client(1).personal["1.num_batches_tracked"]) == 6  # 7 samples: 3, 3 and 1


class Counting(nn.Module):
    """A model that notes how many samples it gets in training."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.inner, self.seen = network(), seen

    def __deepcopy__(self, memo: Any) -> Counting:
        return Counting(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x))
        return self.inner(x)


def test_no_more_samples_than_a_batch_pass_at_a_time() -> None:
    """Twice two passes over all samples, in steps of 6 and pieces of 2."""
    seen: list[int] = []
    pt.federate(Counting(seen), data(), pt.fedavg(0.1, accumulate=3), batch=2, executor="loop", **SETTINGS)
    passes = 4 * sum(-(-n // 2) for n in SIZES)
    assert max(seen[-passes:]) == 2  # those before are of the trial
    assert sum(seen[-passes:]) == 4 * sum(SIZES)


def test_without_batches_there_is_nothing_to_accumulate() -> None:
    with pytest.raises(pt.Refused) as error:
        pt.federate(network(), data(), pt.fedavg(0.1, accumulate=2), **SETTINGS)
    assert error.value.field == "accumulate"
    assert "batch=" in error.value.allowed


class Tagger(nn.Module):
    """A label for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_sequences_of_different_lengths_count_as_in_one_batch(executor: str) -> None:
    """Labels of −100 do not count; the second client has a sequence without any other."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 5, 3)), rng.integers(0, 4, (10, 5))
    y[np.arange(5) >= np.array([5, 2, 1, 4, 3, 5, 0, 2, 5, 1])[:, None]] = -100
    ranges = np.array([[0, 4], [4, 6]])
    sequences = pt.data.FederatedData.make(x, y, ranges, ranges)
    options = {"epochs": 1, "rounds": 1, "executor": executor, "baselines": False, "progress": False}
    whole, pieces = (
        pt.federate(Tagger(), sequences, pt.fedavg(0.5, accumulate=k), batch=4 // k, **options).shared
        for k in (1, 4)
    )
    close(whole, pieces)
