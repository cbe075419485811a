"""Whether a model minds how sequences are padded: clients that are stacked have more padding than alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.types import Tensors
from partita.data import FederatedData
from partita.data.columns import Ragged, listed
from partita.engine.model.forward import Forward

TOLERANCE = 1e-3  # of the largest output, up to which roundings explain a difference


def for_metrics(data: FederatedData, kept: Tensors) -> FederatedData:
    """Return data whose batches all have one width, where a metric keeps something of every position."""
    longest = None if data.lengths is None else data.y.shape[1]
    return data.fixed() if any(row.dim() and row.shape[0] == longest for row in kept.values()) else data


def warn_about_padding(module: nn.Module, data: FederatedData, forward: Forward) -> None:
    """Warn of a model that makes something else of a sequence if there is more padding behind it."""
    sequences = [column for column in listed(data.x) if isinstance(column, Ragged)]
    if not sequences:
        return
    lengths = sequences[0].length
    short, long = int(lengths.argmin()), int(lengths.argmax())
    alone, padded = (_predicted(module, data, forward, rows) for rows in ([short], [short, long]))
    if alone is None or padded is None:
        return
    same = padded[:1][tuple(slice(n) for n in alone.shape)]
    if same.shape == alone.shape and bool(((same - alone).abs() <= TOLERANCE * alone.abs().max()).all()):
        return
    check.warn(
        "the model's output for a sequence changes with the padding behind it, so that a client's result "
        "depends on who is in its batch and which executor runs it: let the model leave padding out (a "
        "dictionary such as {'input_ids': sequences} gives it an attention_mask, if it takes one)"
    )


def _predicted(module: nn.Module, data: FederatedData, forward: Forward, rows: list[int]) -> Tensor | None:
    """Return what the model predicts for these rows in evaluation mode; None where it cannot."""
    training = module.training
    try:
        with torch.no_grad():
            return forward(module.eval(), data.gather(torch.tensor(rows))[0]).double()
    except Exception:  # a run will say why
        return None
    finally:
        module.train(training)
