"""The loss that a model computes by itself when it gets the targets: what samples count for in it.

A few passes tell. Of labels, −100 does not count, so that padding needs nothing else. Among numbers there is
no such target: then the model's loss must be one that is known as a function of (output, target).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from partita.core.criterion import IGNORED, LOSSES, OWN, Criterion, places
from partita.core.inputs import each
from partita.core.types import Batch, Inputs, Tensors
from partita.data import FederatedData
from partita.engine.model.by_sample import NOT_BY_SAMPLE, TRIAL_CLIENTS, made_up, rows_of_several, values_of
from partita.engine.model.checkpointing import Pass
from partita.engine.model.forward import Forward, in_place
from partita.engine.model.pieces import amount
from partita.engine.model.seeding import set_all
from partita.engine.model.stackable import batch_buffers

OF_NUMBERS = ("mse", "binary_cross_entropy")
MOST_TARGETS = 3  # that are tried with the same samples
MOVED = 0.02  # deviation of what is added to parameters, for what is 0 at the start
CLOSE = 1e-5


def predicted(
    module: nn.Module,
    forward: Forward,
    x: Inputs,
    y: Tensor,
    params: Tensors | None = None,
    blocks: Pass | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the prediction for a batch without padding, and the model's own loss, if it is to be used."""
    key = torch.zeros((), dtype=torch.int64, device=y.device)
    tensors = {**(params or {}), **batch_buffers(module, key, None)}
    with in_place(module, tensors), blocks or Pass(module, key):
        if forward.labels:
            return forward.with_loss(module, Batch(x, y, None, key))
        return forward(module, x), None


def counted(module: nn.Module, forward: Forward, x: Inputs, y: Tensor, output: Tensor) -> Criterion:
    """Return the model's own loss with what each sample counts for in it: its labels, if it is a sequence.

    A causal model compares the output at a place with the next label, and so never looks at the first one:
    its loss stays the same if that one is taken away, or put where there was none. With trained prompts
    before the tokens, it has more outputs than labels, and the last prompt predicts the first one.
    """
    if y.is_floating_point() or y.dim() < 2 or output.dim() != y.dim() + 1:
        return OWN
    if output.shape[1] > y.shape[1]:
        return OWN._replace(weight=places, ahead=True)
    label = torch.where(y == IGNORED, 0, y).amax()
    first = torch.where(y[:, :1] == IGNORED, label, IGNORED)
    others = torch.cat([first, y[:, 1:]], 1)
    losses = [_evaluated(module, forward, x, labels)[1] for labels in (y, others)]
    like = LOSSES["next_token" if _same(losses[0], losses[1], 1e-6) else "cross_entropy"]
    return OWN._replace(weight=like.weight, ahead=like.ahead)


def recognized(module: nn.Module, forward: Forward, data: FederatedData) -> Criterion | None:
    """Return the built-in loss of numbers that the model's own one is; None if it is another.

    Both are compared in training and in evaluation, at the parameters that there are and at others, with
    targets of several clients and made-up ones; and the prediction must not depend on the targets.
    """
    candidates = [LOSSES[name] for name in OF_NUMBERS]
    plain, draw = forward._replace(labels=""), torch.Generator().manual_seed(0)
    trained: Tensors = {k: p for k, p in module.named_parameters() if p.requires_grad}
    moved = {k: p + MOVED * torch.randn(p.shape, generator=draw).to(p) for k, p in trained.items()}
    training = module.training
    try:
        for mode, params in ((True, trained), (False, moved)):
            module.train(mode)
            for x, y in _batches(data, draw):
                (output, loss), (alone, _) = (_drawn(module, f, x, y, params) for f in (forward, plain))
                candidates = [known for known in candidates if _same(loss, _value(known, output, y))]
                if not candidates or not _same(output, alone):
                    return None
    except Exception:  # any model may fail in its own way on what a run does not ask of it
        return None
    finally:
        module.train(training)
    return candidates[0]


def not_in_pieces(module: nn.Module, forward: Forward, loss: Criterion, data: FederatedData) -> str:
    """Return why the model's own loss on a batch is not the mean over its pieces; '' if it is."""
    for x, y in _batches(data, torch.Generator().manual_seed(0)):
        try:
            whole, mean = _whole_and_mean(module, forward, loss, x, y)
        except Exception:  # what was made up need not be possible
            continue
        if bool(torch.isfinite(whole)) and not _same(whole, mean, 1e-4):
            return NOT_BY_SAMPLE
    return ""


def _whole_and_mean(
    module: nn.Module, forward: Forward, loss: Criterion, x: Inputs, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the model's own loss on a batch, and the mean over two pieces of it."""
    values, counts = [], []
    for part in (slice(None), slice(0, len(y) // 3), slice(len(y) // 3, None)):
        piece = Batch(each(lambda t, part=part: t[part], x), y[part], None, y.new_zeros(()))  # type: ignore[misc]
        value = _evaluated(module, forward, piece.x, piece.y)[1]
        assert value is not None
        values.append(value)
        counts.append(amount(loss, piece, value))
    count = torch.stack(counts[1:])
    return values[0], torch.where(count > 0, count * torch.stack(values[1:]), 0.0).sum() / count.sum()


def _batches(data: FederatedData, draw: torch.Generator) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield a sample of each of several clients, with its targets and with made-up ones."""
    x, y = data.gather(rows_of_several(data, TRIAL_CLIENTS))
    yield x, y
    for _, target in zip(range(MOST_TARGETS), made_up(y, len(y), values_of(data.y), draw)):
        yield x, target


def _drawn(
    module: nn.Module, forward: Forward, x: Inputs, y: Tensor, params: Tensors
) -> tuple[Tensor, Tensor | None]:
    """Return prediction and loss of a pass that draws what every such pass draws, and changes nothing."""
    set_all(0, y.device)
    buffers = {k: v.clone() for k, v in module.named_buffers()}
    with torch.no_grad():
        return predicted(module, forward, x, y, {**params, **buffers})


def _evaluated(module: nn.Module, forward: Forward, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return prediction and loss in evaluation mode, without a gradient."""
    training = module.training
    try:
        with torch.no_grad():
            return predicted(module.eval(), forward, x, y)
    finally:
        module.train(training)


def _value(loss: Criterion, output: Tensor, y: Tensor) -> Tensor | None:
    try:
        return loss.mean(output, y)
    except Exception:  # the shapes are those of another loss
        return None


def _same(a: Tensor | None, b: Tensor | None, close: float = CLOSE) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(torch.isclose(a.double(), b.double(), rtol=close, atol=1e-2 * close).all())
