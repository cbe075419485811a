"""Whether a model minds how sequences are padded: clients that are stacked have more padding than alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.asks import COUNTS, FEATURES, INPUTS, PREVIOUS, RECEIVED
from partita.core.criterion import OWN, Criterion
from partita.core.parts import Algorithm
from partita.core.types import Inputs, Layout, Tensors
from partita.data import FederatedData
from partita.data.columns import Ragged, listed
from partita.engine.model.features import recording
from partita.engine.model.own_loss import predicted
from partita.engine.model.probe import ModelProfile
from partita.engine.model.seeding import kept as kept_generators

TOLERANCE = 1e-3  # of the largest output, up to which roundings explain a difference


def for_metrics(
    module: nn.Module, data: FederatedData, profile: ModelProfile
) -> tuple[FederatedData, Tensors]:
    """Return data for evaluations, and what metrics keep of one of their samples.

    Where a metric keeps something of every position, all batches are as wide as the longest sequence.
    """
    lengths = [column.length for column in listed(data.x) if isinstance(column, Ragged)]
    lengths += [] if data.lengths is None else [data.lengths]
    if not lengths:
        return data, profile.kept
    fixed = data.fixed()
    kept = _kept(module, fixed, profile, 0) or profile.kept
    shortest = [_kept(module, data, profile, int(column.argmin())) for column in lengths]
    same = all(rows[k].shape == row.shape for rows in shortest if rows for k, row in kept.items())
    known = all(shortest) or not any(row.dim() for row in kept.values())
    return data if same and known else fixed, kept


def _kept(module: nn.Module, data: FederatedData, profile: ModelProfile, row: int) -> Tensors:
    """Return what metrics keep of this sample alone, as zeros; nothing where the model cannot take it."""
    training = module.training
    try:
        with torch.no_grad(), kept_generators(data.device):
            x, y = data.gather(torch.tensor([row]))
            output = predicted(module.eval(), profile.forward, x, y)[0]
            rows = {metric.name: metric.keep(output, y)[0] for metric in profile.metrics}
    except Exception:  # a run will say why
        return {}
    finally:
        module.train(training)
    return {k: old.new_zeros(rows[k].shape) for k, old in profile.kept.items()}


class Seen(NamedTuple):
    """What a model makes of a batch: its outputs, and the features of the samples where they are wanted."""

    x: Inputs
    y: Tensor
    output: Tensor
    features: Tensor


def warn_about_padding(
    module: nn.Module, data: FederatedData, profile: ModelProfile, methods: Sequence[Algorithm] = ()
) -> None:
    """Warn of a model or a loss that makes something else of a sequence if there is more padding behind it.

    What a method adds to the loss is refused then.
    """
    sequences = [column for column in listed(data.x) if isinstance(column, Ragged)]
    if not sequences:
        return
    lengths = sequences[0].length
    short, long = int(lengths.argmin()), int(lengths.argmax())
    alone, padded = (_seen(module, data, profile, rows) for rows in ([short], [short, long]))
    if alone is None or padded is None:
        return
    if not _alike(alone.output, padded.output):
        check.warn(
            "the model's output for a sequence changes with the padding behind it, so that a client's result "
            "depends on who is in its batch and which executor runs it: let the model leave padding out (a "
            "dictionary such as {'input_ids': sequences} gives it an attention_mask, if it takes one)"
        )
    elif not _same_loss(profile.loss, profile.layout, alone, padded):
        check.warn(
            "the loss of a sequence changes with the padding behind it, so that a client's result depends on "
            "who is in its batch and which executor runs it: let the model pool over real positions, or let "
            "the loss leave padding out (it may ask for `inputs`)"
        )
    else:
        for method in methods:
            _refuse_padded_features(method, profile, alone, padded)


def _refuse_padded_features(method: Algorithm, profile: ModelProfile, alone: Seen, padded: Seen) -> None:
    """Refuse a method whose part of the loss counts padding: clients that are stacked have more of it."""
    layout = profile.layout
    if method.loss is None or layout is None or not layout.shape or profile.forward.labels:
        return
    if not _same_loss(method.loss(profile.loss), layout, alone, padded):
        shapes = " and ".join(str(list(seen.features.shape[1:])) for seen in (alone, padded))
        raise check.fail(
            "features",
            layout.module,
            "the name of a submodule that returns one vector for each sequence, the mean over its real "
            "positions: let the model pass its pooled features through an nn.Identity()",
            f"{method.name} would count the padding behind a sequence, whose features are of shape {shapes} "
            "with less and with more of it",
        )


def _seen(module: nn.Module, data: FederatedData, profile: ModelProfile, rows: list[int]) -> Seen | None:
    """Return what the model makes of these rows in evaluation mode; None where it cannot."""
    training = module.training
    try:
        with torch.no_grad(), recording(module, profile.layout) as features:
            x, y = data.gather(torch.tensor(rows))
            output = profile.forward(module.eval(), x)
            return Seen(x, y, output, features[0] if features else output)
    except Exception:  # a run will say why
        return None
    finally:
        module.train(training)


def _same_loss(loss: Criterion, layout: Layout | None, alone: Seen, padded: Seen) -> bool:
    """Return whether the first sample counts the same in both batches, as far as a trial can tell."""
    if loss.mean is OWN.mean:
        return True
    try:
        values = [
            loss.each(seen.output, seen.y, **_given(loss, layout, seen))[:1] for seen in (alone, padded)
        ]
    except Exception:  # a loss may ask for what only a run has, or fail in its own way
        return True
    finite = all(bool(torch.isfinite(value).all()) for value in values)
    return not finite or _alike(*values)


def _given(loss: Criterion, layout: Layout | None, seen: Seen) -> dict[str, Any]:
    """Return what a loss asks for; another model has other numbers at the same places."""
    known: dict[str, Any] = {FEATURES: seen.features, INPUTS: seen.x}
    for part, own in (("output", seen.output), (FEATURES, seen.features)):
        known |= {f"{RECEIVED}_{part}": own, f"{PREVIOUS}_{part}": 1 - own}
    if layout is not None and layout.classes:
        known[COUNTS] = seen.output.new_ones(layout.classes)
    return {name: known[name] for name in loss.asks}


def _alike(alone: Tensor, padded: Tensor) -> bool:
    """Return whether the first row of a batch begins with these numbers, but for roundings."""
    same, alone = padded[:1][tuple(slice(n) for n in alone.shape)].double(), alone.double()
    if same.shape != alone.shape:
        return False
    return bool(((same - alone).abs() <= TOLERANCE * alone.abs().max()).all())
