"""Uploads that do not fit: what a client of another version, or a careless forger, sends.

    names      a tensor is missing, and one is there that nobody asked for
    shape      a tensor has one entry too many
    broadcast  a tensor has one entry, which arithmetic would stretch silently
    weight     the client claims −1 samples
    greed      the client claims 10¹⁵ samples

The server sets such uploads aside and names them, whatever the aggregator.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.attack.base import attack, each_sends
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Tensors, Upload

KINDS = ("names", "shape", "broadcast", "weight", "greed")


@attack
def malformed(how: Annotated[str, Option("what is wrong with it", choices=KINDS)] = "shape") -> Attack:
    """Each Byzantine client sends an upload that does not fit the model, or claims a false weight.

    Use it to see that a run goes on as if those clients were not there.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        honest = each_sends(uploads, byzantine, lambda i, name, x: x)  # noqa: ARG005
        return {i: _spoil(upload, how) for i, upload in honest.items()}

    return Attack("malformed", forge, None, {"how": how})


def _spoil(upload: Upload, how: str) -> Upload:
    if how in ("weight", "greed"):
        return upload._replace(weight=torch.tensor(-1.0 if how == "weight" else 1e15, dtype=torch.float64))
    if upload.delta:
        return upload._replace(delta=_spoilt(upload.delta, how))
    return upload._replace(extra=_spoilt(upload.extra, how))  # a method that sends no part of its model


def _spoilt(sent: Tensors, how: str) -> Tensors:
    """Return tensors with a wrong name or shape, if there are any."""
    name = next((k for k, v in sent.items() if v.numel()), None)
    if name is None:
        return sent
    x = sent[name]
    if how == "names":
        return {**{k: v for k, v in sent.items() if k != name}, f"{name}.other": x}
    wrong = x.reshape(-1)[:1] if how == "broadcast" else torch.cat([x.reshape(-1), x.reshape(-1)[:1]])
    if how == "broadcast" and wrong.shape == x.shape:  # a tensor of one entry: one more axis
        wrong = wrong.unsqueeze(0)
    return {**sent, name: wrong}
