"""Metrics of a client agree with scikit-learn and torchmetrics, and are undefined where they should be."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor

from partita.core.criterion import LOSSES, own
from partita.core.metrics import METRICS, ClientMetric, Form, Metric, choose_metrics
from support import each

N = 60
DRAW = torch.Generator().manual_seed(0)
OUTPUT = {
    1: torch.randn(N, 1, generator=DRAW),
    2: torch.randn(N, 2, generator=DRAW),
    4: torch.randn(N, 4, generator=DRAW),
}
LABELS = {k: torch.randint(0, max(2, k), (N,), generator=DRAW) for k in OUTPUT}


def scored(metric: ClientMetric, output: Tensor, target: Tensor) -> float:
    return metric.score(metric.keep(output, target), target)


def chosen(metric: Any, output: Tensor, target: Tensor, loss: Any = None) -> tuple[ClientMetric, ...]:
    criterion = loss or LOSSES["cross_entropy" if output.shape[-1] > 1 else "binary_cross_entropy"]
    return choose_metrics(metric, criterion, criterion not in LOSSES.values(), output, target, target)


def probabilities(output: Tensor) -> np.ndarray:
    return (
        (torch.sigmoid(output[:, 0]) if output.shape[1] == 1 else torch.softmax(output, 1)).double().numpy()
    )


def classes(output: Tensor) -> np.ndarray:
    return ((output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)).numpy()


def positive(output: Tensor) -> np.ndarray:
    p = probabilities(output)
    return p[:, 1] if p.ndim == 2 else p


@each("k", [1, 2, 4])
def test_classes_as_scikit_learn(k: int) -> None:
    output, target = OUTPUT[k], LABELS[k]
    y, predicted, p = target.numpy(), classes(output), probabilities(output)
    expected = {
        "accuracy": sk.accuracy_score(y, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "f1_macro": sk.f1_score(y, predicted, average="macro"),
        "log_loss": sk.log_loss(y, p),
    }
    if k < 4:
        expected["f1"] = sk.f1_score(y, predicted)
        expected["auc"] = sk.roc_auc_score(y, positive(output))
        expected["average_precision"] = sk.average_precision_score(y, positive(output))
        expected["brier"] = sk.brier_score_loss(y, positive(output))
    else:
        expected["auc"] = sk.roc_auc_score(y, p, multi_class="ovr")
        expected["average_precision"] = sk.average_precision_score(np.eye(4)[y], p, average="macro")
        expected["brier"] = np.mean(np.sum((p - np.eye(4)[y]) ** 2, axis=1))
    expected["perplexity"] = math.exp(expected["log_loss"])
    for name, value in expected.items():
        (metric,) = chosen(name, output, target)
        assert scored(metric, output, target) == pytest.approx(value, rel=1e-5), name


def test_the_calibration_error_is_torchmetrics() -> None:
    theirs = torchmetrics.CalibrationError(task="multiclass", num_classes=4, n_bins=15)
    (ours,) = chosen("calibration_error", OUTPUT[4], LABELS[4])
    value = scored(ours, OUTPUT[4], LABELS[4])
    assert value == pytest.approx(float(theirs(torch.softmax(OUTPUT[4], 1), LABELS[4])), rel=1e-5)


def test_numbers_as_scikit_learn() -> None:
    output, target = torch.randn(N, 1, generator=DRAW), torch.randn(N, generator=DRAW)
    y, predicted = target.double().numpy(), output[:, 0].double().numpy()
    expected = {
        "mse": sk.mean_squared_error(y, predicted),
        "mae": sk.mean_absolute_error(y, predicted),
        "rmse": sk.mean_squared_error(y, predicted) ** 0.5,
        "r2": sk.r2_score(y, predicted),
    }
    for name, value in expected.items():
        (metric,) = chosen(name, output, target, LOSSES["mse"])
        assert scored(metric, output, target) == pytest.approx(value, rel=1e-5), name


def test_ties_count_half() -> None:
    output, target = torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 1, 0, 1])
    (auc,) = chosen("auc", output, target)
    assert scored(auc, output, target) == 0.5
    (ap,) = chosen("average_precision", output, target)
    assert scored(ap, output, target) == pytest.approx(
        sk.average_precision_score(target.numpy(), output[:, 0].numpy())
    )


@each("name", ["auc", "average_precision"])
def test_one_class_is_undefined(name: str) -> None:
    for k, output in OUTPUT.items():
        (metric,) = chosen(name, output, LABELS[k])
        assert math.isnan(scored(metric, output, torch.zeros_like(LABELS[k])))


def test_undefined_elsewhere() -> None:
    (f1,) = chosen("f1", OUTPUT[1], LABELS[1])
    assert math.isnan(scored(f1, -OUTPUT[1].abs(), torch.zeros_like(LABELS[1])))
    assert math.isnan(scored(f1, OUTPUT[1].abs(), torch.zeros_like(LABELS[1])))  # whatever is predicted
    (r2,) = chosen("r2", OUTPUT[1], torch.ones(N), LOSSES["mse"])
    assert math.isnan(scored(r2, OUTPUT[1], torch.ones(N)))


@each("name", ["accuracy", "log_loss", "perplexity", "brier", "mse", "mae", "rmse"])
def test_the_score_of_sums_is_that_of_rows(name: str) -> None:
    number = name in ("mse", "mae", "rmse")
    output, target = (OUTPUT[1], torch.randn(N)) if number else (OUTPUT[4], LABELS[4])
    (metric,) = chosen(name, output, target, LOSSES["mse"] if number else None)
    assert metric.criterion is not None
    total, weight = metric.criterion.sums(output, target, None)
    by_sums = metric.of_sums(np.asarray(total.double()), np.asarray(weight.double()))
    assert float(by_sums) == pytest.approx(scored(metric, output, target), rel=1e-5)


def test_sequences_skip_labels_that_do_not_count() -> None:
    output, target = torch.randn(5, 4, 6, generator=DRAW), torch.randint(0, 6, (5, 4), generator=DRAW)
    target[0, 2:], target[1] = -100, -100
    real = target != -100
    for name in ("balanced_accuracy", "f1_macro", "log_loss", "perplexity"):
        (metric,) = chosen(name, output, target)
        (plain,) = chosen(name, output[real], target[real])
        value = scored(metric, output, target)
        assert value == pytest.approx(scored(plain, output[real], target[real]), rel=1e-5), name
        # torch's own loss has the classes before the places
        (moved,) = chosen(name, output.movedim(-1, 1), target, own(F.cross_entropy))
        assert scored(moved, output.movedim(-1, 1), target) == pytest.approx(value, rel=1e-5), name


# ---- a user's own


def test_functions_of_scikit_learn_are_called_in_their_order() -> None:
    output, target = OUTPUT[2], LABELS[2]
    for metric, expected in (
        (Metric(sk.recall_score, True, on="classes"), sk.recall_score(target.numpy(), classes(output))),
        (Metric(sk.roc_auc_score, True, on="probabilities"), sk.roc_auc_score(target, positive(output))),
        (
            Metric(partial(sk.fbeta_score, beta=2.0), True, on="classes"),
            sk.fbeta_score(target.numpy(), classes(output), beta=2.0),
        ),
    ):
        (made,) = chosen(metric, output, target)
        assert scored(made, output, target) == pytest.approx(expected)


@each("ahead", [False, True])
def test_functions_of_sequences_get_the_positions_that_count(ahead: bool) -> None:
    g = torch.Generator().manual_seed(0)
    output, target = torch.randn(6, 5, 3, generator=g), torch.randint(0, 3, (6, 5), generator=g)
    target[torch.arange(5) >= torch.tensor([1, 5, 2, 4, 3, 5])[:, None]] = -100
    loss = "next_token" if ahead else "cross_entropy"
    (named,) = chosen("accuracy", output, target, LOSSES[loss])
    (f1,) = chosen("f1_macro", output, target, LOSSES[loss])
    for metric, expected in (
        (Metric(lambda o, t: (o.argmax(-1) == t).float().mean(), True), named),
        (Metric(sk.accuracy_score, True, on="classes"), named),
        (torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro"), named),
        (Metric(lambda p, t: (p.argmax(-1) == t).float().mean(), True, on="probabilities"), named),
        (Metric(partial(sk.f1_score, average="macro"), True, on="classes"), f1),
    ):
        (made,) = chosen(metric, output, target, LOSSES[loss])
        assert scored(made, output, target) == pytest.approx(scored(expected, output, target), rel=1e-5)
    if not ahead:  # torch's own loss has the classes before the places
        (moved,) = chosen(Metric(accuracy, True), output.movedim(-1, 1), target, own(F.cross_entropy))
        assert scored(moved, output.movedim(-1, 1), target) == pytest.approx(scored(named, output, target))


def test_a_users_loss_gets_sequences_as_they_are() -> None:
    def whole(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    output, target = torch.randn(4, 5, 3), torch.tensor([[0, 1, 2, -100, -100]] * 4)
    (made,) = chosen("loss", output, target, own(whole))
    assert scored(made, output, target) == pytest.approx(float(whole(output, target)))


def test_an_object_of_torchmetrics_forgets_between_clients() -> None:
    (f1,) = chosen(
        torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"), OUTPUT[4], LABELS[4]
    )
    first = scored(f1, OUTPUT[4], LABELS[4])
    scored(f1, -OUTPUT[4], LABELS[4])
    assert scored(f1, OUTPUT[4], LABELS[4]) == first
    assert f1.higher_is_better


def test_numbers_of_torchmetrics_take_a_column() -> None:
    output, target = torch.randn(N, 1, generator=DRAW), torch.randn(N, generator=DRAW)
    (mse,) = chosen(torchmetrics.MeanSquaredError(), output, target, LOSSES["mse"])
    assert scored(mse, output, target) == pytest.approx(float(F.mse_loss(output[:, 0], target)), rel=1e-5)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def test_a_direction_is_declared_and_not_guessed_by_a_name() -> None:
    with pytest.raises(ValueError, match="higher_is_better") as refused:
        chosen(accuracy, OUTPUT[4], LABELS[4])
    assert refused.value.field == "metric"  # type: ignore[attr-defined]
    (metric,) = chosen(Metric(accuracy, higher_is_better=True), OUTPUT[4], LABELS[4])
    assert metric.higher_is_better
    (loss,) = chosen(torch.nn.MSELoss(), OUTPUT[1], torch.randn(N, 1), LOSSES["mse"])
    assert not loss.higher_is_better  # torch's losses are losses


@each(
    ("metric", "output", "target"),
    [
        ("f1", OUTPUT[4], LABELS[4]),  # of one class, and there are four
        ("acuracy", OUTPUT[4], LABELS[4]),
        (["auc", "auc"], OUTPUT[4], LABELS[4]),
        ([], OUTPUT[4], LABELS[4]),
        ("auc", OUTPUT[1], torch.linspace(-3, 3, N)),  # numbers are no classes
        (Metric(torch.outer, higher_is_better=True, on="classes"), OUTPUT[4], LABELS[4]),  # no number
    ],
)
def test_refusals(metric: Any, output: Tensor, target: Tensor) -> None:
    def score() -> float:
        made = chosen(metric, output, target, LOSSES["mse"] if target.is_floating_point() else None)
        return scored(made[0], output, target)

    with pytest.raises(ValueError, match="metric") as refused:
        score()
    assert refused.value.field == "metric"  # type: ignore[attr-defined]


def test_every_metric_has_a_maker() -> None:
    for name, make in METRICS.items():
        assert make(Form(2)).name == name
