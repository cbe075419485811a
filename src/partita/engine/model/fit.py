"""Checks that the model, its outputs and the targets fit each other, before any work."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.criterion import IGNORED, LOSSES, Criterion
from partita.core.inputs import tensors
from partita.data import FederatedData
from partita.engine.model.by_sample import (
    NOT_BY_SAMPLE,
    SAMPLES_PER_CLIENT,
    TRIAL_CLIENTS,
    rows_of_several,
)

_BINARY = LOSSES["binary_cross_entropy"]
_OF_CLASSES = (LOSSES["cross_entropy"], LOSSES["next_token"])


def check_parameters(model: nn.Module) -> None:
    """Refuse a model with nothing to train, or with parameters that are not real numbers of 32 or 64 bits."""
    name = type(model).__name__
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise check.fail("model", name, "layers that know their sizes: call the model on a batch first")
    if not any(p.requires_grad for p in model.parameters()):
        raise check.fail("model", name, "a module with parameters that require gradients")
    check_real(model, [k for k, p in model.named_parameters() if p.requires_grad])
    for field, p in model.named_parameters():
        if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
            raise check.fail(
                f"dtype of {field}",
                str(p.dtype),
                "torch.float32 or torch.float64 for what is trained: small steps, and means over clients, "
                "are lost in 16 bits. Pass model.float(); precision='bf16' computes in 16 bits all the same, "
                "and x may be stored in them",
            )


def check_real(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse complex numbers in what is trained or tracked: distances, norms and averages are of real ones.

    A complex constant, which no client changes and nobody sends, is allowed.
    """
    kinds = {k: t.dtype for k, t in (*model.named_parameters(), *model.named_buffers())}
    wrong = next((k for k in names if kinds[k].is_complex), None)
    if wrong is not None:
        advice = "hold real and imaginary part, and put them together by torch.view_as_complex in forward"
        raise check.fail(
            f"model {wrong}", str(kinds[wrong]), f"parameters and statistics of real numbers: {advice}"
        )


def check_shapes(loss: Criterion, output: Tensor, y: Tensor) -> None:
    """Refuse outputs without a row for each label, or a number for each number, with a built-in loss."""
    if loss not in LOSSES.values():
        return
    outputs, targets = list(output.shape), list(y.shape)
    if loss in _OF_CLASSES and y.is_floating_point():
        allowed = f"whole numbers with loss={loss.name!r}: they are labels"
        raise check.fail("dtype of y", str(y.dtype), allowed)
    if loss.ahead and y.dim() != 2:
        allowed = f"[samples, positions] with loss={loss.name!r}: the tokens of each sequence"
        raise check.fail("shape of y", targets, allowed)
    column = targets[1:] == [1] and outputs[:1] == targets[:1]
    if column and not y.is_floating_point() and output.dim() == 2 and output.shape[-1] > 1:
        raise check.fail("shape of y", targets, f"{targets[:1]}, a label for each row of outputs {outputs}")
    if loss in _OF_CLASSES:
        fits, allowed = (
            outputs[:-1] == targets and bool(outputs),
            f"[{', '.join(map(str, targets))}, classes]",
        )
    else:
        fits, allowed = output.numel() == y.numel(), str(targets)
    if not fits:
        shapes = f"outputs of shape {outputs} with targets of shape {targets}"
        raise check.fail(
            "shape of outputs", outputs, f"{allowed}: loss={loss.name!r} cannot compare {shapes}"
        )


def refuse_broadcast(loss: Criterion, output: Tensor, y: Tensor) -> None:
    """Refuse a user's loss that broadcasts: [n, 1] − [n] is [n, n], and the model would learn nothing."""
    if loss in LOSSES.values() or output.shape == y.shape or output.numel() != y.numel():
        return
    # a loss that pairs them rightly finds the same in both shapes; perfect outputs show best that it does not
    for trial in (output, y.to(output.dtype).reshape(output.shape)):
        try:
            value, paired = float(loss.mean(trial, y)), float(loss.mean(trial.reshape(y.shape), y))
        except Exception:  # it needs the shapes that it was given
            return
        if abs(value - paired) > 1e-4 * (1 + abs(value)):
            reason = f"the shape of the targets (loss={loss.name!r} broadcasts one against the other)"
            raise check.fail("shape of outputs", list(output.shape), f"{list(y.shape)}, {reason}")


def check_labels(loss: Criterion, output: Tensor, data: FederatedData) -> None:
    """Refuse labels that have no output."""
    check_classes(loss, data)
    if loss.name not in [known.name for known in _OF_CLASSES] or data.y.is_floating_point():
        return
    of_torch = loss not in _OF_CLASSES  # torch's function of this name has the classes on axis 1
    classes = output.shape[1 if of_torch and output.dim() > 1 else -1]
    ignored = loss.ignored if of_torch else -100 if data.y.dim() > 1 else None  # labels that do not count
    labels = data.y if ignored is None else data.y[data.y != ignored]
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high >= classes:
        reason = f"labels run from {low} to {high}, but the model has {classes} outputs"
        wrong = high if high >= classes else low
        raise _label(data, wrong, f"labels from 0 to {classes - 1}: {reason}")


def check_classes(criterion: Criterion, data: FederatedData) -> None:
    """Refuse targets other than 0 and 1 where one output is compared with these."""
    low, high = data.y.min().item(), data.y.max().item()
    if criterion is _BINARY and (low < 0 or high > 1):
        reason = f"labels run from {low:g} to {high:g}, but the model has one output"
        allowed = "labels 0 and 1, an output for each class, or for numbers to predict: loss='mse'"
        raise _label(data, high if high > 1 else low, f"{allowed}; {reason}")


def warn_about_copies(loss: Criterion, data: FederatedData) -> None:
    """Warn of labels of positions that are the inputs themselves: a model that copies them is right."""
    if loss is not LOSSES["cross_entropy"] or data.y.dim() != 2:
        return
    x, y = data.gather(rows_of_several(data, TRIAL_CLIENTS * SAMPLES_PER_CLIENT))
    counts = y != IGNORED
    same = [t for t in tensors(x) if t.shape == y.shape and torch.equal(t[counts].long(), y[counts])]
    if same and bool(counts.any()):
        check.warn(
            "the labels of a sequence are its inputs, and loss='cross_entropy' compares each output with the "
            "label at its own position: the model learns to copy what it reads. To predict the next token, "
            "use loss='next_token', or loss='model' for a language model that computes its own loss",
        )


def check_pieces(accumulate: int, reason: str) -> None:
    """Refuse a step in pieces where the loss of a batch is not the mean over them; warn if nobody knows."""
    if reason == NOT_BY_SAMPLE:
        told = "the loss of a batch is not the mean over its pieces, and a step not that of a large batch"
        allowed = "1, or a loss by name, one of torch's as it is, or one that is a mean over samples"
        raise check.fail("accumulate", accumulate, allowed, told)
    if reason:
        check.warn(f"accumulate={accumulate}: a step may differ from that of one large batch: {reason}")


def _label(data: FederatedData, label: float, allowed: str) -> ValueError:
    row = int((data.y == label).reshape(len(data.y), -1).any(1).nonzero()[0])
    return check.fail(f"y of {data.owner(row)}", label, allowed)
