"""A trial of an augmentation before any work: it must be a pure function that keeps what a model takes."""

from __future__ import annotations

from typing import Any

import torch

from partita.augment.base import Augmentation, augmented, steps_of
from partita.core import check, inputs
from partita.core.inputs import each, tensors
from partita.core.parts import Share
from partita.core.types import Inputs
from partita.data import FederatedData, columns
from partita.data.columns import Ragged
from partita.data.padding import real_entries
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
    _warn_about_padding(augment, data, each(lambda t: t[0], x))
    return data


def _warn_about_padding(augment: Augmentation, data: FederatedData, x: Inputs) -> None:
    """Warn where a step along the axis of time is not told where the padding of sequences begins."""
    listed = data.x if isinstance(data.x, dict) else dict(enumerate(columns.listed(data.x)))
    by_name: dict[Any, Any] = {**listed, None: data.x}
    for name, step in steps_of(augment):
        column = by_name.get(name)  # None for a mask that is made
        if not isinstance(column, Ragged) or not hasattr(step, "within"):
            continue
        told = isinstance(x, dict) and real_entries(x, name) is not None
        if not told and step.axis % len(columns.sample_shape(column)) == 0:
            check.warn(
                f"augment: {step} reaches into the padding of short sequences, since no mask tells where it "
                "begins: give x as a dictionary such as {'input_ids': sequences}, to a model that takes an "
                "attention_mask"
            )


def refuse_with(augment: Augmentation | None, shares: tuple[Share, ...]) -> None:
    """Refuse an augmentation where devices do not see samples, but what frozen blocks made of them once."""
    if augment is not None and any(share.pieces for share in shares):
        reason = "devices that hold the end of the model keep what its frozen blocks make of each sample"
        raise check.fail("augment", augment, "no augmentation with this capacity", reason)
