"""Unusable uploads are set aside and named before anything is aggregated.

An upload is usable if it has the model's names and shapes and no others, if its entries are finite and small
enough to be squared, and if it claims no more weight than the server knows it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita import tree
from partita.types import Tensors, Upload

NOT_FINITE, TOO_LARGE = "not finite", "too large"


def faults(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """For each client, why what it computed is unusable ('': it is usable).

    What it sends must be finite and small enough to be squared, for aggregators take lengths and distances;
    what it `kept` must be finite.
    """
    return [""] * clients if sound(lengths(uploads, kept)) else examined(uploads, kept, clients)


def examined(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """What `faults` says, by a look at each client."""
    sent, rest = _rows((uploads.delta, uploads.extra), clients), _rows(kept, clients)
    numbers = _all_finite([*sent, *rest], clients)
    small = _all_finite([_length(x).square()[:, None] for x in sent], clients)
    return [NOT_FINITE if not n else "" if s else TOO_LARGE for n, s in zip(numbers, small)]


def lengths(uploads: Upload, kept: Any) -> list[Tensor]:
    """Of every tensor, all clients together: a cheap first look, see `sound`."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in _numbers((uploads.delta, uploads.extra, kept)):
        kinds.setdefault(x.dtype, []).append(x)
    return [torch.stack(torch._foreach_norm(some, dtype=_wide(kind))) for kind, some in kinds.items()]


def sound(found: Sequence[Tensor]) -> bool:
    """Whether nobody's upload has a fault. If not, somebody's may have: see `examined`."""
    return all(bool(torch.isfinite(x.square()).all()) for x in found)


def screen(uploads: Upload, why: Sequence[str], sent: Mapping[int, Any]) -> tuple[Upload, list[str]]:
    """The uploads with what some clients sent instead, and for each why it is set aside ('': it is not).

    uploads  what the clients computed, stacked
    why      why that is unusable, as `faults` says
    sent     by place in the stack: what arrived from that client in its stead, of any form
    """
    found = list(why)
    if not sent:
        return uploads, found
    for i, upload in sent.items():
        found[i] = unfit(upload, uploads, i)
    fitting = {i: upload for i, upload in sent.items() if not found[i]}
    arrived, places = _placed(uploads, fitting), list(fitting)
    for i, fault in zip(places, faults(tree.rows(arrived, places), (), len(places))):
        found[i] = fault
    return arrived, found


def unfit(upload: Any, expected: Upload, place: int) -> str:
    """Why something cannot be the upload of the client at this place, or nothing: names, shapes, weight."""
    if not isinstance(upload, Upload):
        return f"{type(upload).__name__}, not an upload"
    for part, stack in ((upload.delta, expected.delta), (upload.extra, expected.extra)):
        if wrong := _names(part, stack) or _shapes(part, stack):
            return wrong
    return _weight(upload.weight, None if expected.weight is None else float(expected.weight[place]))


def _names(given: Any, stack: Tensors) -> str:
    if not isinstance(given, Mapping):
        return f"{type(given).__name__}, not named tensors"
    missing, unknown = [k for k in stack if k not in given], [k for k in given if k not in stack]
    if missing:
        return f"without {missing[0]}"
    return f"unknown name {str(unknown[0])[:60]}" if unknown else ""


def _shapes(given: Mapping[str, Any], stack: Tensors) -> str:
    for name, wanted in stack.items():
        x, shape = given[name], list(wanted.shape[1:])
        if not isinstance(x, Tensor):
            return f"{name} of type {type(x).__name__}, not a tensor"
        if list(x.shape) != shape:
            return f"{name} of shape {list(x.shape)}, not {shape}"
        if x.is_floating_point() != wanted.is_floating_point() or x.is_complex():
            return f"{name} of type {x.dtype}, not {wanted.dtype}"
        if x.layout != torch.strided or x.is_meta or x.is_quantized:
            return f"{name} without its numbers"
    return ""


def _weight(weight: Any, known: float | None) -> str:
    """A client counts for as many samples as the server knows it has, or for fewer."""
    if known is None or weight is None:
        return ""
    if not isinstance(weight, Tensor):
        return f"weight of type {type(weight).__name__}, not a tensor"
    if weight.numel() != 1 or weight.is_complex() or weight.layout != torch.strided or weight.is_meta:
        return f"weight of shape {list(weight.shape)} and type {weight.dtype}"
    value = float(weight)
    return "" if 0 <= value <= known else f"weight {value:g}"  # so is NaN


def _placed(uploads: Upload, sent: Mapping[int, Upload]) -> Upload:
    """The stack with these rows instead. A copy: what clients computed may be in use elsewhere."""
    if not sent:
        return uploads
    places = list(sent)

    def put(stack: Tensors, rows: list[Tensors]) -> Tensors:
        new = {}
        for k, x in stack.items():
            new[k] = x.clone()
            new[k][places] = torch.stack([row[k].detach().to(x) for row in rows])
        return new

    delta = put(uploads.delta, [u.delta for u in sent.values()])
    extra = put(uploads.extra, [u.extra for u in sent.values()])
    weight = uploads.weight
    if weight is not None:
        weight = weight.clone()
        for i, upload in sent.items():
            weight[i] = weight[i] if upload.weight is None else upload.weight.to(weight).reshape(())
    return uploads._replace(delta=delta, extra=extra, weight=weight)


def _rows(stacks: Any, clients: int) -> list[Tensor]:
    """Each stack of numbers as a matrix, a row for each client."""
    return [x.reshape(clients, -1) for x in _numbers(stacks)]


def _numbers(stacks: Any) -> list[Tensor]:
    return [x for x in tree.leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _length(x: Tensor) -> Tensor:
    """Of each row, in single precision at least: its square is infinite if it is too long for its type."""
    length: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=_wide(x.dtype))
    return length


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if torch.finfo(kind).bits < 32 else kind


def _all_finite(rows: list[Tensor], clients: int) -> list[bool]:
    """For each client, whether every entry of its rows is finite."""
    good = [torch.isfinite(x).all(1) for x in rows]
    return [True] * clients if not good else torch.stack(good).all(0).tolist()
