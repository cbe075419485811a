"""A trial of an augmentation before any work: it must be a pure function that keeps what a model takes."""

from __future__ import annotations

import torch

from partita.augment.base import Augmentation, augmented
from partita.core import check, inputs
from partita.core.inputs import each, tensors
from partita.core.parts import Share
from partita.data import FederatedData
from partita.engine.model.probe import first_samples

SAMPLES = 3
ALLOWED = "a pure function (x, key) -> x of one sample, in the same shapes and types"


def prepared(augment: Augmentation | None, data: FederatedData) -> FederatedData:
    """Return the data for a run with an augmentation; refuse one that cannot be used.

    Sequences have one width then, whoever is in a batch: what is drawn may depend on it.
    """
    if augment is None:
        return data
    data = data.fixed()
    x, y = first_samples(data)
    x = each(lambda t: t[:SAMPLES], x)
    key = torch.full((), 7, dtype=torch.int64, device=y.device)
    try:
        first, again = augmented(augment, x, key), augmented(augment, x, key)
    except check.Refused:
        raise
    except Exception as error:  # any function may fail in its own way
        reason = check.named_reason(error)
        hint = " (draw with partita.draws, from the key)" if "andom" in reason else ""
        raise check.fail(
            "augment", augment, f"{ALLOWED}; it fails when samples are stacked: {reason}{hint}"
        ) from error
    same = type(first) is type(x) and (not isinstance(x, dict) or list(first) == list(x))
    if not same or inputs.described(first) != inputs.described(x):
        got = (
            inputs.described(first)
            if isinstance(first, torch.Tensor | tuple | dict)
            else type(first).__name__
        )
        raise check.fail("augment", augment, f"{ALLOWED}: {inputs.described(x)}, not {got}")
    if not all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(again))):
        raise check.fail("augment", augment, f"{ALLOWED}; it gave two results for one key")
    return data


def refuse_with(augment: Augmentation | None, shares: tuple[Share, ...]) -> None:
    """Refuse an augmentation where devices do not see samples, but what frozen blocks made of them once."""
    if augment is not None and any(share.pieces for share in shares):
        reason = "devices that hold the end of the model keep what its frozen blocks make of each sample"
        raise check.fail("augment", augment, "no augmentation with this capacity", reason)
