"""Losses: the mean over a batch is the mean of the samples, and agrees with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from partita.core.criterion import LOSSES, Criterion, choose_loss, own
from partita.core.metrics import choose_metrics
from support import each

X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(1))


def criterion_of(
    metric: str, output: torch.Tensor, target: torch.Tensor, loss: str = "cross_entropy"
) -> Criterion:
    criterion = choose_metrics(metric, LOSSES[loss], False, output, target, target)[0].criterion
    assert criterion is not None
    return criterion


def test_cross_entropy_is_pytorchs() -> None:
    torch.testing.assert_close(LOSSES["cross_entropy"].mean(X, Y), F.cross_entropy(X, Y))
    torch.testing.assert_close(LOSSES["cross_entropy"].each(X, Y), F.cross_entropy(X, Y, reduction="none"))


def test_cross_entropy_of_sequences_skips_what_does_not_count() -> None:
    output, target = torch.randn(3, 4, 6), torch.randint(0, 6, (3, 4))
    target[0, 2:] = -100
    expected = torch.stack(
        [F.cross_entropy(output[i][target[i] != -100], target[i][target[i] != -100]) for i in range(3)]
    )
    torch.testing.assert_close(LOSSES["cross_entropy"].each(output, target), expected)
    accuracy = criterion_of("accuracy", output, target)
    right = F.one_hot(target.clamp(min=0), 6).float()
    assert accuracy.each(right, target).tolist() == [1.0, 1.0, 1.0]
    assert accuracy.mean(right, target) == 1.0
    target[1] = -100  # a sequence without labels is no sample
    assert accuracy.mean(right, target) == 1.0


def test_binary_and_squared() -> None:
    logit, y = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = F.binary_cross_entropy_with_logits(logit[:, 0], y.float())
    torch.testing.assert_close(LOSSES["binary_cross_entropy"].mean(logit, y), expected)
    accuracy = criterion_of("accuracy", logit, y, "binary_cross_entropy")
    assert accuracy.each(torch.where(y[:, None] > 0, 2.0, -2.0), y).mean() == 1.0
    target = torch.randn(6, 2)
    torch.testing.assert_close(
        LOSSES["mse"].mean(logit.expand(6, 2), target), F.mse_loss(logit.expand(6, 2), target)
    )
    mae = criterion_of("mae", logit, target[:, 0], "mse")
    torch.testing.assert_close(mae.mean(logit[:, 0], target[:, 0]), F.l1_loss(logit[:, 0], target[:, 0]))


def test_own_function_per_sample() -> None:
    criterion = own(F.cross_entropy)
    torch.testing.assert_close(criterion.each(X, Y), F.cross_entropy(X, Y, reduction="none"))
    assert criterion.name == "cross_entropy"


@each(
    ("output", "target", "loss", "metric"),
    [
        (X, Y, "cross_entropy", "accuracy"),
        (X[:, :1], Y % 2, "binary_cross_entropy", "accuracy"),
        (X[:, 0], Y % 2, "binary_cross_entropy", "accuracy"),
        (X[:, :1], torch.randn(7, 1), "mse", "mse"),
        (torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), "cross_entropy", "accuracy"),
    ],
)
def test_what_fits_the_targets(output: torch.Tensor, target: torch.Tensor, loss: str, metric: str) -> None:
    chosen = choose_loss(None, output, target)
    (default,) = choose_metrics(None, chosen, False, output, target, target)
    assert (chosen.name, default.name) == (loss, metric)


@pytest.mark.parametrize(("loss", "words"), [("mes", "did you mean 'mse'"), (3, "function of")])
def test_refusals(loss: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_loss(loss, X, Y)  # type: ignore[arg-type]
