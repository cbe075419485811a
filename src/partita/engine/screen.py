"""Unusable uploads are set aside and named before anything is aggregated.

An upload is usable if it has the model's names, shapes and types and no others, if its entries are finite and
small enough to be squared, and if it claims no more weight than the server knows it has. What arrives as an
upload may be anything: it is read once, into tensors of the server's own, and whatever goes wrong then is a
reason to set it aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import tree
from partita.core.types import Tensors, Upload


def screen(uploads: Upload, why: Sequence[str], sent: Mapping[int, Any]) -> tuple[Upload, list[str]]:
    """The uploads with what some clients sent instead, and for each why it is set aside ('': it is not).

    uploads  what the clients computed, stacked
    why      why that is unusable, as `faults` says
    sent     by place in the stack: what arrived from that client in its stead, of any form
    """
    found = list(why)
    if not sent:
        return uploads, found
    fitting: dict[int, Upload] = {}
    for i, upload in sent.items():
        own, found[i] = taken(upload, uploads)
        found[i] = found[i] or _weight(own.weight, uploads, i)
        if not found[i]:
            fitting[i] = own
    arrived, places = _placed(uploads, fitting), list(fitting)
    for i, fault in zip(places, tree.faults(tree.rows(arrived, places), (), len(places))):
        found[i] = fault
    return arrived, found


def taken(upload: Any, expected: Upload) -> tuple[Upload, str]:
    """An upload in the form of a row of `expected`, or why it has another one: names, shapes, types.

    Its tensors are copies, without gradients and where the expected ones are; its weight is on the host.
    """
    try:
        if not isinstance(upload, Upload):
            return Upload({}), f"{_told(type(upload).__name__)}, not an upload"
        delta, wrong = _read(upload.delta, expected.delta)
        if not wrong:
            extra, wrong = _read(upload.extra, expected.extra)
        if not wrong:
            sums, wrong = _read(upload.sums, expected.sums)
        weight = upload.weight
        if not wrong and weight is not None:
            weight, wrong = _number(weight)
    except Exception as error:  # a mapping or a tensor of the sender's own making may raise anything
        return Upload({}), f"{_told(type(error).__name__)} when it was read"
    return (Upload({}), wrong) if wrong else (Upload(delta, weight, extra, sums), "")


def _read(given: Any, stack: Tensors) -> tuple[Tensors, str]:
    """Tensors of our own by name, or why they do not fit."""
    if not isinstance(given, Mapping):
        return {}, f"{_told(type(given).__name__)}, not named tensors"
    there = {k: given[k] for k in given}  # once: a mapping may say something else the next time
    unknown = [k for k in there if type(k) is not str or k not in stack]
    missing = [k for k in stack if k not in there]
    if missing or unknown:
        return {}, f"without {missing[0]}" if missing else f"unknown name {_told(unknown[0])}"
    found = {}
    for name, wanted in stack.items():
        x = there[name]
        if wrong := _shape(name, x, wanted):
            return {}, wrong
        found[name] = Tensor.detach(x).to(wanted.device, copy=True)
    return found, ""


def _shape(name: str, x: Any, wanted: Tensor) -> str:
    if type(x) not in (Tensor, nn.Parameter):  # another class may do anything when it is computed with
        return f"{name} of type {_told(type(x).__name__)}, not a tensor"
    if not _is_whole(x):
        return f"{name} without its numbers"
    if x.shape != wanted.shape[1:]:
        return f"{name} of shape {list(x.shape)}, not {list(wanted.shape[1:])}"
    return "" if x.dtype == wanted.dtype else f"{name} of type {x.dtype}, not {wanted.dtype}"


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor has all of its numbers: none is left out, or beyond the end of its memory."""
    if x.layout != torch.strided or x.is_nested or x.is_meta or x.is_quantized:
        return False
    last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    return not x.numel() or (last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _number(weight: Any) -> tuple[Tensor | None, str]:
    """One real number of any type, as float64."""
    if type(weight) not in (Tensor, nn.Parameter):
        return None, f"weight of type {_told(type(weight).__name__)}, not a tensor"
    if not _is_whole(weight) or weight.numel() != 1 or weight.is_complex():
        shape = "[...]" if weight.is_nested else list(weight.shape)
        return None, f"weight of shape {shape} and type {weight.dtype}"
    return torch.tensor(Tensor.item(weight), dtype=torch.float64), ""


def _weight(weight: Tensor | None, expected: Upload, place: int) -> str:
    """A client counts for as many samples as the server knows it has, or for fewer."""
    if weight is None or expected.weight is None:
        return ""
    return "" if 0 <= weight <= expected.weight[place].item() else f"weight {weight:g}"  # so is NaN


def _told(value: Any) -> str:
    """A few printable characters of what somebody else has named."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:60])


def _placed(uploads: Upload, sent: Mapping[int, Upload]) -> Upload:
    """The stack with these rows instead. A copy: what clients computed may be in use elsewhere."""
    if not sent:
        return uploads
    places = list(sent)

    def put(stack: Tensors, rows: list[Tensors]) -> Tensors:
        new = {}
        for k, x in stack.items():
            new[k] = x.clone()
            new[k][places] = torch.stack([row[k] for row in rows])
        return new

    payloads = zip(*[upload.payload for upload in sent.values()])
    delta, extra, sums = (put(stack, list(rows)) for stack, rows in zip(uploads.payload, payloads))
    weight = uploads.weight
    if weight is not None:
        weight = weight.clone()
        for i, upload in sent.items():
            weight[i] = weight[i] if upload.weight is None else upload.weight
    return uploads._replace(delta=delta, extra=extra, sums=sums, weight=weight)
