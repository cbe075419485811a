"""Metrics: the score of a client, a function of all of its outputs and targets at once.

A metric keeps a row of each sample while the clients are scored, stacked as alone, and the client's score is
a function of its rows: what each sample contributes for those that are means over samples (accuracy, mse),
and what is needed of its output for all others (AUC, F1, R²). A score that is undefined for a client, such as
the AUC of one that has a single class, is NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from partita.core import check
from partita.core.criterion import (
    IGNORED,
    LOSSES,
    OWN,
    Criterion,
    Function,
    absolute_error,
    averaged,
    by_sample,
    following,
    name_of,
    next_token,
    prompted,
    squared_error,
    users_function,
)

Score = Callable[[Tensor, Tensor], float]
OfArrays = Callable[[np.ndarray, np.ndarray], float]
ON = ("outputs", "probabilities", "classes")
BINS = 15  # of the calibration error


class ClientMetric(NamedTuple):
    """How clients are scored.

    keep        (outputs, targets) -> a row for each sample: all that the score needs of it
    score       (rows, targets) of a client -> its score, NaN where it is undefined
    criterion   where the score follows from a mean over samples, that mean: then its sums are enough
    link        the score of that mean (None: the mean itself)
    is_loss     whether the score is the loss that evaluations sum up, of which samples keep no rows
    """

    name: str
    higher_is_better: bool
    keep: Function
    score: Score
    criterion: Criterion | None = None
    link: Callable[[np.ndarray], np.ndarray] | None = None
    is_loss: bool = False

    @property
    def needs_rows(self) -> bool:
        """Whether a client's score needs a row of each of its samples."""
        return self.criterion is None and not self.is_loss

    def of_sums(self, total: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return the score of each client from its sums: link(Σ_i each_i / Σ_i weight_i)."""
        mean = mean_of(total, weight)
        return mean if self.link is None else self.link(mean)


def mean_of(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return Σ_i each_i / Σ_i weight_i of each client; NaN where nothing was counted."""
    mean = np.full(np.shape(total), np.nan)
    np.divide(total, weight, out=mean, where=np.asarray(weight) > 0)
    return mean


@dataclass(frozen=True)
class Metric:
    """A metric of your own: a function of all outputs and targets of a client, and which way is better.

    function          (outputs, targets) -> a number; those of scikit-learn are called in their own order
                      (targets, predictions), with NumPy arrays
    higher_is_better  True for scores such as accuracy, False for errors such as Brier's
    name              what tables and files call it (None: the function's name)
    on                what the function gets of the model: its 'outputs' as they are (default), the
                      'probabilities' of the classes (that of class 1 where there are two), or the predicted
                      'classes'

    Where the positions of sequences have labels, the function gets a row for each position that counts, of
    all sequences of the client one after another: outputs [positions, classes] and targets [positions].

        pt.federate(..., metric=pt.Metric(sklearn.metrics.f1_score, higher_is_better=True, on="classes"))
    """

    function: Callable[[Any, Any], Any]
    higher_is_better: bool
    name: str | None = None
    on: str = "outputs"

    def __post_init__(self) -> None:
        call_it = f" (call it: {self.function.__name__}())" if isinstance(self.function, type) else ""
        check.takes("function", self.function, 2, f"a function of (outputs, targets){call_it}")
        check.boolean("higher_is_better", self.higher_is_better)
        check.choice("on", self.on, ON)
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise check.fail("name", self.name, "a name, or None for the function's own")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """Return the score of a client's outputs."""
        return self.function(outputs, targets)


class Form(NamedTuple):
    """How outputs belong to targets.

    classes  outputs for each target: one for each class; 1 for a logit or a number
    axis     where they are
    ignored  the label that does not count (None: all do)
    ahead    whether the outputs at a place are for the target of the next one
    prompts  places before the first target, whose outputs are those of trained prompts
    """

    classes: int
    axis: int = -1
    ignored: int | None = None
    ahead: bool = False
    prompts: int = 0

    def logits(self, output: Tensor, target: Tensor) -> Tensor:
        """Return outputs with the classes last, or one for each target."""
        return output.movedim(self.axis, -1) if self.classes > 1 else output.reshape(target.shape)

    def labels(self, target: Tensor) -> Tensor:
        """Return targets as numbers of classes."""
        return target.long() if self.classes > 1 else (target > 0.5).long()

    def counts(self, target: Tensor) -> Tensor:
        """Return which labels count: not the one that the loss ignores, and none that is no class."""
        counts = torch.ones_like(target, dtype=torch.bool) if self.ignored is None else target != self.ignored
        return counts & (target >= 0) & (target < self.classes) if self.classes > 1 else counts

    def predicted(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the class that the model predicts for each target."""
        logits = self.logits(output, target)
        return logits.argmax(-1) if self.classes > 1 else (logits > 0).long()

    def probabilities(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the probability of each class, two of them for one logit."""
        logits = self.logits(output, target)
        if self.classes > 1:
            return torch.softmax(logits, -1)
        positive = torch.sigmoid(logits)
        return torch.stack([1 - positive, positive], -1)

    def has_places(self, target: Tensor) -> bool:
        """Return whether targets are classes of the positions of sequences."""
        return self.classes > 1 and target.dim() == 2 and not target.is_floating_point()

    def counted(self, rows: Tensor, target: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and labels of the places that count, one after another."""
        counts = self.counts(target)
        return rows[counts].double().numpy(), self.labels(target)[counts].numpy()

    def over_places(self, name: str, value: Function) -> Criterion:
        """Return the mean of a value at each place, over the places that count."""

        def each(output: Tensor, target: Tensor) -> Tensor:
            counts = self.counts(target).reshape(len(target), -1)
            values = value(output, target).reshape(counts.shape)
            return torch.where(counts, values, 0.0).sum(1)

        def weight(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
            return self.counts(target).reshape(len(target), -1).sum(1).to(torch.float32)

        return averaged(name, each, weight)


# ---- means over samples


def _mean(
    criterion: Criterion,
    higher_is_better: bool = False,
    link: Callable[[np.ndarray], np.ndarray] | None = None,
) -> ClientMetric:
    """Return the metric of a mean over samples; its rows are what each contributes, and its weight."""

    def keep(output: Tensor, target: Tensor) -> Tensor:
        each = criterion.each(output, target)
        return each if criterion.weight is None else torch.stack([each, criterion.weight(output, target)], 1)

    def score(rows: Tensor, target: Tensor) -> float:  # noqa: ARG001
        total = rows.double().reshape(len(rows), -1).sum(0)
        weight = total[1] if criterion.weight is not None else torch.tensor(float(len(rows)))
        return float(metric.of_sums(np.asarray(total[0]), np.asarray(weight)))

    metric = ClientMetric(criterion.name, higher_is_better, keep, score, criterion, link)
    return metric


def _of_evaluations() -> ClientMetric:
    """Return the metric of a loss that only the model knows; what a sample adds to it is not known."""

    def keep(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
        return output.new_zeros(len(output), 0)

    return ClientMetric("loss", False, keep, lambda rows, target: np.nan, is_loss=True)  # noqa: ARG005


def _accuracy(form: Form) -> ClientMetric:
    def right(output: Tensor, target: Tensor) -> Tensor:
        return (form.predicted(output, target) == form.labels(target)).to(torch.float32)

    return _mean(form.over_places("accuracy", right), higher_is_better=True)


def accuracy_of_all(classes: int) -> ClientMetric:
    """Return accuracy where every label counts."""
    form = Form(classes)

    def right(output: Tensor, target: Tensor) -> Tensor:
        return by_sample((form.predicted(output, target) == form.labels(target)).to(torch.float32))

    return _mean(averaged("accuracy", right), higher_is_better=True)


def _surprise(form: Form) -> Function:
    """−log p(target) at each place."""

    def value(output: Tensor, target: Tensor) -> Tensor:
        logits = form.logits(output, target)
        if form.classes == 1:
            return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
        label = torch.where(form.counts(target), target, 0)
        return torch.logsumexp(logits, -1) - logits.gather(-1, label.unsqueeze(-1)).squeeze(-1)

    return value


def _log_loss(form: Form) -> ClientMetric:
    return _mean(form.over_places("log_loss", _surprise(form)))


def _perplexity(form: Form) -> ClientMetric:
    """exp of the mean of −log p(target) over all places."""
    return _mean(form.over_places("perplexity", _surprise(form)), link=np.exp)


def _brier(form: Form) -> ClientMetric:
    """(p − y)² for two classes, Σ_c (p_c − 1[y = c])² for more (Brier, 1950)."""

    def value(output: Tensor, target: Tensor) -> Tensor:
        p = form.probabilities(output, target)
        label = torch.where(form.counts(target), form.labels(target), 0)
        squares = (p - F.one_hot(label, p.shape[-1])).square().sum(-1)
        return squares / 2 if p.shape[-1] == 2 else squares

    return _mean(form.over_places("brier", value))


def _mse(form: Form) -> ClientMetric:  # noqa: ARG001
    return _mean(LOSSES["mse"])


def _mae(form: Form) -> ClientMetric:  # noqa: ARG001
    return _mean(averaged("mae", absolute_error))


def _rmse(form: Form) -> ClientMetric:  # noqa: ARG001
    return _mean(averaged("rmse", squared_error), link=np.sqrt)


# ---- functions of all samples


def _of_classes(name: str, score: OfArrays) -> Callable[[Form], ClientMetric]:
    """Return the maker of a metric of predicted classes."""

    def make(form: Form) -> ClientMetric:
        def of_client(rows: Tensor, target: Tensor) -> float:
            return score(*form.counted(rows, target))

        return ClientMetric(name, True, form.predicted, of_client)

    return make


def balanced_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over the classes that occur of the share that is predicted right."""
    present = np.unique(labels)
    return float(np.mean([(predicted[labels == c] == c).mean() for c in present])) if len(present) else np.nan


def f1(predicted: np.ndarray, labels: np.ndarray, positive: float = 1) -> float:
    """Return 2 TP / (2 TP + FP + FN); undefined for a client without the class, whatever is predicted.

    So the same clients count under every model.
    """
    right = np.sum((predicted == positive) & (labels == positive))
    total = np.sum(predicted == positive) + np.sum(labels == positive)
    return float(2 * right / total) if (labels == positive).any() else np.nan


def f1_macro(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean F1 over the classes that occur or are predicted, 0 for one that does not occur."""
    classes = np.union1d(predicted, labels)
    each = [f1(predicted, labels, c) if (labels == c).any() else 0.0 for c in classes]
    return float(np.mean(each)) if len(each) else np.nan


def _f1(form: Form) -> ClientMetric:
    if form.classes > 2:
        reason = f"F1 of one class, and the model tells {form.classes}"
        raise check.fail("metric", "f1", "'f1_macro' for more than two classes", reason)
    return _of_classes("f1", f1)(form)


def _of_scores(name: str, score: OfArrays) -> Callable[[Form], ClientMetric]:
    """Return the maker of a metric that ranks samples by how likely they are of class 1.

    With more than two classes it is the mean over the classes that the client has, each against the rest.
    """

    def make(form: Form) -> ClientMetric:
        def keep(output: Tensor, target: Tensor) -> Tensor:
            if form.classes == 1:
                return form.logits(output, target)
            logits = form.logits(output, target)
            return logits[..., 1] - logits[..., 0] if form.classes == 2 else torch.softmax(logits, -1)

        def of_client(rows: Tensor, target: Tensor) -> float:
            scores, labels = form.counted(rows, target)
            if scores.ndim == 1:
                return score(scores, labels == 1)
            each = [score(scores[:, c], labels == c) for c in np.unique(labels)]
            return float(np.mean(each)) if len(each) > 1 else np.nan

        return ClientMetric(name, True, keep, of_client)

    return make


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the share of pairs (positive, negative) that the scores order rightly; ties count half."""
    ours, others = scores[positive], np.sort(scores[~positive])
    if not len(ours) or not len(others):
        return np.nan
    below, up_to = (np.searchsorted(others, ours, side) for side in ("left", "right"))
    return float((below + up_to).sum() / (2 * len(ours) * len(others)))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return Σ_k (R_k − R_{k−1}) P_k over the thresholds k that the scores take."""
    if not positive.any() or positive.all():
        return np.nan
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    last = np.append(np.diff(scores[order]) != 0, True)  # equal scores are one threshold
    recall, precision = hits[last] / hits[-1], hits[last] / (np.flatnonzero(last) + 1)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def _calibration_error(form: Form) -> ClientMetric:
    """Σ_b n_b/n |accuracy_b − confidence_b| over 15 bins of the confidence (Guo et al., 2017)."""

    def keep(output: Tensor, target: Tensor) -> Tensor:
        confidence, predicted = form.probabilities(output, target).max(-1)
        return torch.stack([confidence, (predicted == form.labels(target)).to(confidence.dtype)], -1)

    def score(rows: Tensor, target: Tensor) -> float:
        values, _ = form.counted(rows, target)
        if not len(values):
            return np.nan
        bins = np.minimum((values[:, 0] * BINS).astype(int), BINS - 1)
        gaps = np.zeros(BINS)
        np.add.at(gaps, bins, values[:, 1] - values[:, 0])
        return float(np.abs(gaps).sum() / len(values))

    return ClientMetric("calibration_error", False, keep, score)


def _r2(form: Form) -> ClientMetric:  # noqa: ARG001
    """1 − Σ (y − ŷ)² / Σ (y − ȳ)², the mean over the columns of the targets."""

    def keep(output: Tensor, target: Tensor) -> Tensor:
        return output.reshape(target.shape)

    def score(rows: Tensor, target: Tensor) -> float:
        outputs, y = (t.double().reshape(len(t), -1).numpy() for t in (rows, target))
        total = ((y - y.mean(0)) ** 2).sum(0) if len(y) else np.zeros(1)
        if (total == 0).any():
            return np.nan
        return float(np.mean(1 - ((y - outputs) ** 2).sum(0) / total))

    return ClientMetric("r2", True, keep, score)


METRICS: Mapping[str, Callable[[Form], ClientMetric]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _of_classes("balanced_accuracy", balanced_accuracy),
    "f1": _f1,
    "f1_macro": _of_classes("f1_macro", f1_macro),
    "auc": _of_scores("auc", auc),
    "average_precision": _of_scores("average_precision", average_precision),
    "log_loss": _log_loss,
    "brier": _brier,
    "calibration_error": _calibration_error,
    "perplexity": _perplexity,
    "mse": _mse,
    "mae": _mae,
    "rmse": _rmse,
    "r2": _r2,
}
OF_NUMBERS = ("mse", "mae", "rmse", "r2")
SHARES = ("accuracy", "balanced_accuracy", "f1", "f1_macro", "auc", "average_precision")
"""Metrics between 0 and 1."""


# ---- a user's own


def _users(metric: Metric, form: Form) -> ClientMetric:
    """Return the metric of a user's function; what it raises for a client makes the score undefined there."""
    name = metric.name or name_of(metric.function)
    of_sklearn = str(getattr(_inner(metric.function), "__module__", "")).startswith("sklearn.")
    call = _fresh(metric.function) if hasattr(metric.function, "reset") else metric.function
    keeps: dict[str, Function] = {
        "outputs": lambda output, target: output,  # noqa: ARG005
        "classes": form.predicted,
        "probabilities": form.probabilities,
    }

    def score(rows: Tensor, target: Tensor) -> float:
        if form.has_places(target):
            counts = form.counts(target)
            rows = (form.logits(rows, target) if metric.on == "outputs" else rows)[counts]
            target = target[counts]
        if metric.on == "probabilities" and rows.shape[-1] == 2:
            rows = rows[..., 1]
        of_library = of_sklearn or hasattr(metric.function, "reset")  # they take one number for each target
        if of_library and rows.dim() == target.dim() + 1 and rows.shape[-1] == 1:
            rows = rows.squeeze(-1)
        if not of_sklearn:
            return as_number(name, call(rows, target))
        return as_number(name, call(target.numpy(), rows.numpy()))

    return ClientMetric(name, metric.higher_is_better, keeps[metric.on], score)


def as_number(name: str, value: Any) -> float:
    """Return what a metric has computed as a number."""
    try:
        number = torch.as_tensor(value)
        if number.dim() == 0:
            return float(number)
    except (TypeError, ValueError, RuntimeError):
        pass
    shape = list(value.shape) if hasattr(value, "shape") else type(value).__name__
    raise check.fail("metric", name, f"a function that returns one number for a client, not {shape}")


def _fresh(metric: Any) -> Callable[[Any, Any], Any]:
    """Return a function of an object that adds up what it sees (torchmetrics); each call resets it."""
    alone = threading.Lock()  # clients on several cores ask the same object

    def call(outputs: Tensor, targets: Tensor) -> Any:
        with alone:
            metric.reset()
            try:
                return metric(outputs, targets)
            finally:
                metric.reset()

    return call


def _inner(function: Any) -> Any:
    """Return the function that a partial one calls."""
    while isinstance(function, partial):
        function = function.func
    return function


def _direction(metric: Any) -> bool:
    """Return whether more is better, as the metric declares it; torch's losses are losses."""
    direction = getattr(metric, "higher_is_better", None)  # torchmetrics has it too
    if isinstance(direction, bool):
        return direction
    if str(getattr(_inner(metric), "__module__", "")).startswith("torch.nn."):
        return False
    allowed = "a metric that says which way is better: partita.Metric(f, higher_is_better=True) or False"
    raise check.fail("metric", name_of(metric), allowed)


# ---- which metric


def choose_metrics(
    metric: Any, loss: Criterion, loss_is_own: bool, output: Tensor, target: Tensor, labels: Tensor
) -> tuple[ClientMetric, ...]:
    """Return the metrics of a run, the one that decides first.

    metric  names, functions or a list of them; None: accuracy for classes, the loss for numbers
    loss    the loss, and `loss_is_own` whether it is a user's function
    output, target  of some samples, and `labels` all targets that there are
    """
    chosen = list(metric) if isinstance(metric, Sequence) and not isinstance(metric, str) else [metric]
    if not chosen:
        raise check.fail("metric", metric, "at least one metric, or None for the default")
    form = _form(loss, output, target)
    made = tuple(_chosen(each, loss, loss_is_own, form, labels) for each in chosen)
    names = [m.name for m in made]
    if len(set(names)) < len(names):
        raise check.fail("metric", names, "each metric once")
    return made


def _chosen(metric: Any, loss: Criterion, loss_is_own: bool, form: Form, labels: Tensor) -> ClientMetric:
    if metric is None:
        classes = loss.name in ("cross_entropy", "next_token", "binary_cross_entropy") or loss_is_own
        of_numbers = "mse" if loss.asks else "loss"  # a metric has outputs and targets only
        default = "accuracy" if classes and not labels.is_floating_point() else of_numbers
        return _named(default, loss, loss_is_own, form, labels, name=loss.name)
    if isinstance(metric, str):  # what is no text may answer == in its own way, as torchmetrics does
        name = check.choice("metric", metric, [*METRICS, "loss"])
        return _named(name, loss, loss_is_own, form, labels)
    if not isinstance(metric, Metric):
        function = users_function("metric", metric, [*METRICS, "loss"])
        metric = Metric(function, _direction(metric))
    made = _users(metric, form)
    return _of_next(made, form.prompts > 0) if form.ahead else made


def _named(
    metric: str, loss: Criterion, loss_is_own: bool, form: Form, labels: Tensor, name: str = "loss"
) -> ClientMetric:
    if metric == "loss" and loss.asks:
        reason = f"the loss asks for {', '.join(loss.asks)}, and a metric has outputs and targets"
        raise check.fail("metric", metric, f"one of {', '.join(map(repr, METRICS))}", reason)
    if metric == "loss":
        of_torch = loss.weight is not None or loss.adds_up
        if loss.mean is OWN.mean:
            return _of_evaluations()
        if loss_is_own and not of_torch:  # it may be no mean over samples, and takes sequences as they are
            return _users(Metric(loss.mean, higher_is_better=False, name=name), Form(classes=1))
        return _mean(loss._replace(name=name))
    low, high = float(labels.min()), float(labels.max())
    numbers = labels.is_floating_point() and (low < 0 or high > 1)
    if metric not in OF_NUMBERS and numbers:
        reason = f"targets run from {low:g} to {high:g}"
        raise check.fail("metric", metric, ", ".join(map(repr, OF_NUMBERS)), reason)
    if form.ahead:
        return _of_next(METRICS[metric](form), form.prompts > 0)
    if metric == "accuracy" and form.axis == -1 and (labels.is_floating_point() or _all_count(form, labels)):
        return accuracy_of_all(form.classes)
    return METRICS[metric](form)


def _of_next(metric: ClientMetric, prompts: bool) -> ClientMetric:
    """Return a metric of models whose output at a place is for the target of the next one."""
    criterion, moved = metric.criterion, prompted if prompts else next_token
    if criterion is not None:
        weight = None if criterion.weight is None else moved(criterion.weight)
        criterion = averaged(metric.name, moved(criterion.each), weight)
        return _mean(criterion, metric.higher_is_better, metric.link)
    of_target = (lambda target: target) if prompts else following
    return metric._replace(
        keep=moved(metric.keep), score=lambda rows, target: metric.score(rows, of_target(target))
    )


def _all_count(form: Form, labels: Tensor) -> bool:
    return bool(form.counts(labels).all())


def _form(loss: Criterion, output: Tensor, target: Tensor) -> Form:
    """Return how outputs belong to targets, as the loss takes them."""
    axis = _axis_of_classes(loss, output, target)
    classes = output.shape[axis] if output.dim() == target.dim() + 1 else 1
    named = loss in LOSSES.values()
    ignored = IGNORED if named and target.dim() > 1 else loss.ignored
    prompts = output.shape[1] - target.shape[1] if loss.ahead else 0
    return Form(max(1, classes), axis, ignored, loss.ahead, prompts)


def _axis_of_classes(loss: Criterion, output: Tensor, target: Tensor) -> int:
    """Return 1 or -1: torch's losses have the classes before the places of a sequence, ours behind them.

    Of a user's function the shapes tell; where both would do, outputs that are right on one axis have less
    loss on that one.
    """
    if output.dim() != target.dim() + 1 or output.dim() == 2 or loss in LOSSES.values():
        return -1
    if loss.ignored is not None:
        return 1
    shapes = {axis: output.movedim(axis, -1).shape[:-1] == target.shape for axis in (-1, 1)}
    if not all(shapes.values()):
        return 1 if shapes[1] else -1
    classes = target.clamp(0, output.shape[-1] - 1).long()
    logits = (20.0 * F.one_hot(classes, output.shape[-1]) - 10.0).to(output)
    try:
        last, first = (float(loss.mean(z, target)) for z in (logits, logits.movedim(-1, 1)))
    except Exception:  # a user's function may fail in its own way
        return -1
    return 1 if first < last else -1
