"""Unusable uploads are set aside and named before anything is aggregated.

An upload is usable if it has the model's names and shapes and no others, if its entries are finite and small
enough to be squared in their own precision, and if it claims a weight that can be true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partita import tree
from partita.types import Tensors, Upload

NOT_FINITE = "not finite"
GREEDY = 1000.0
"""A claimed weight above so many times the median of the others is absurd."""


def usable(stacks: Any, clients: int) -> list[bool]:
    """For each client, whether everything it sends and keeps is finite."""
    floats = [x for x in tree.leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not floats:
        return [True] * clients
    # A sum is one cheap pass; it is finite unless an entry is not, or unless it overflows: look closer then.
    totals = torch.stack([x.reshape(clients, -1).sum(1).to(torch.float64) for x in floats])
    good: list[bool] = torch.isfinite(totals).all(0).tolist()
    if all(good):
        return good
    exact = torch.stack([torch.isfinite(x.reshape(clients, -1)).all(1) for x in floats])
    return list(exact.all(0).tolist())


def screen(uploads: Upload, good: list[bool], sent: Mapping[int, Upload]) -> tuple[Upload, list[str]]:
    """The uploads with what some clients sent instead, and for each why it is set aside ('': it is not).

    uploads  what the clients computed, stacked
    good     whether that is usable
    sent     by place in the stack: what arrived from that client in its stead, of any form
    """
    why = ["" if g else NOT_FINITE for g in good]
    if not sent:
        return uploads, why
    for i, upload in sent.items():
        why[i] = unfit(upload, uploads, [j for j in range(len(good)) if j not in sent])
    fitting = {i: upload for i, upload in sent.items() if not why[i]}
    arrived = _placed(uploads, fitting)
    sizes = usable((arrived.delta, arrived.extra), len(good))
    small = _squarable((arrived.delta, arrived.extra), len(good))
    for i in fitting:
        if not sizes[i]:
            why[i] = NOT_FINITE
        elif not small[i]:
            why[i] = "too large"
    return arrived, why


def unfit(upload: Upload, expected: Upload, others: list[int]) -> str:
    """Why an upload cannot be one of these, or nothing: names, shapes, weight."""
    for part, stack in ((upload.delta, expected.delta), (upload.extra, expected.extra)):
        if wrong := _names(part, stack) or _shapes(part, stack):
            return wrong
    return _weight(upload.weight, expected.weight, others)


def _names(given: Tensors, stack: Tensors) -> str:
    missing, unknown = [k for k in stack if k not in given], [k for k in given if k not in stack]
    if missing:
        return f"without {missing[0]}"
    return f"unknown name {unknown[0]}" if unknown else ""


def _shapes(given: Tensors, stack: Tensors) -> str:
    for name, x in given.items():
        wanted = stack[name]
        if not isinstance(x, Tensor) or x.shape != wanted.shape[1:]:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            return f"{name} of shape {found}, not {list(wanted.shape[1:])}"
        if x.is_floating_point() != wanted.is_floating_point() or x.is_complex():
            return f"{name} of type {x.dtype}, not {wanted.dtype}"
    return ""


def _weight(weight: Tensor | None, stack: Tensor | None, others: list[int]) -> str:
    if stack is None or weight is None:
        return ""
    if weight.numel() != 1 or weight.is_complex():
        return f"weight of shape {list(weight.shape)}"
    value, known = float(weight), stack[others]
    usual = float(known[known > 0].median()) if bool((known > 0).any()) else 1.0
    if not 0 <= value <= GREEDY * max(usual, 1.0):  # also where it is NaN
        return f"weight {value:g}"
    return ""


def _placed(uploads: Upload, sent: Mapping[int, Upload]) -> Upload:
    """The stack with these rows instead. A copy: what clients computed may be in use elsewhere."""
    if not sent:
        return uploads
    places = list(sent)

    def put(stack: Tensors, rows: list[Tensors]) -> Tensors:
        new = {}
        for k, x in stack.items():
            new[k] = x.clone()
            new[k][places] = torch.stack([row[k].to(x) for row in rows])
        return new

    delta = put(uploads.delta, [u.delta for u in sent.values()])
    extra = put(uploads.extra, [u.extra for u in sent.values()])
    weight = uploads.weight
    if weight is not None:
        weight = weight.clone()
        for i, upload in sent.items():
            weight[i] = weight[i] if upload.weight is None else upload.weight.to(weight).reshape(())
    return uploads._replace(delta=delta, extra=extra, weight=weight)


def _squarable(stacks: Any, clients: int) -> list[bool]:
    """For each client, whether the length of each of its tensors is a number of their precision."""
    floats = [x for x in tree.leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not floats:
        return [True] * clients
    squares = [x.reshape(clients, -1).square().sum(1).to(torch.float64) for x in floats]
    return list(torch.isfinite(torch.stack(squares)).all(0).tolist())
