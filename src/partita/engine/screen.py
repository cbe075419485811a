"""Screening: unusable uploads are set aside and named before anything is aggregated.

An upload is usable if it has the model's names, shapes and types and no others, if its entries are finite and
small enough to be squared, and if it claims no more weight than the server knows it has. What arrives as an
upload may be anything: it is read once, into tensors of the server's own, and whatever goes wrong then is a
reason to set it aside. So a Byzantine client cannot end a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import tree
from partita.core.types import Tensors, Upload


def screen(uploads: Upload, rejections: Sequence[str], sent: Mapping[int, Any]) -> tuple[Upload, list[str]]:
    """Return the uploads that arrived, stacked, and for each the reason to set it aside ('': usable).

    uploads     what the clients computed, stacked
    rejections  why that is unusable, as `faults` says
    sent        by place in the stack: what Byzantine clients sent instead, of any form
    """
    reasons = list(rejections)
    if not sent:
        return uploads, reasons
    fitting: dict[int, Upload] = {}
    for i, upload in sent.items():
        copy, reasons[i] = read_upload(upload, uploads)
        reasons[i] = reasons[i] or _weight_fault(copy.weight, uploads, i)
        if not reasons[i]:
            fitting[i] = copy
    arrived, places = _with_rows(uploads, fitting), list(fitting)
    for i, fault in zip(places, tree.faults(tree.rows(arrived, places), (), len(places))):
        reasons[i] = fault
    return arrived, reasons


def read_upload(upload: Any, expected: Upload) -> tuple[Upload, str]:
    """Return an upload in the form of a row of `expected`, or what does not fit: names, shapes, types.

    Its tensors are copies, without gradients and where the expected ones are; its weight is on the host.
    """
    try:
        if not isinstance(upload, Upload):
            return Upload({}), f"{_printable(type(upload).__name__)}, not an upload"
        delta, fault = _read(upload.delta, expected.delta)
        if not fault:
            extra, fault = _read(upload.extra, expected.extra)
        if not fault:
            sums, fault = _read(upload.sums, expected.sums)
        weight = upload.weight
        if not fault and weight is not None:
            weight, fault = _number(weight)
    except Exception as error:  # a mapping or a tensor of the sender's own making may raise anything
        return Upload({}), f"{_printable(type(error).__name__)} when it was read"
    return (Upload({}), fault) if fault else (Upload(delta, weight, extra, sums), "")


def _read(mapping: Any, stacks: Tensors) -> tuple[Tensors, str]:
    """Return copies of named tensors, or why they do not fit."""
    if not isinstance(mapping, Mapping):
        return {}, f"{_printable(type(mapping).__name__)}, not named tensors"
    tensors = {k: mapping[k] for k in mapping}  # once: a mapping may say something else the next time
    unknown = [k for k in tensors if type(k) is not str or k not in stacks]
    missing = [k for k in stacks if k not in tensors]
    if missing or unknown:
        return {}, f"without {missing[0]}" if missing else f"unknown name {_printable(unknown[0])}"
    copies = {}
    for name, stack in stacks.items():
        if fault := _tensor_fault(name, tensors[name], stack):
            return {}, fault
        copies[name] = Tensor.detach(tensors[name]).to(stack.device, copy=True)
    return copies, ""


def _tensor_fault(name: str, x: Any, stack: Tensor) -> str:
    """Return why a tensor is no row of `stack`; empty if it is one."""
    if type(x) not in (Tensor, nn.Parameter):  # another class may do anything when it is computed with
        return f"{name} of type {_printable(type(x).__name__)}, not a tensor"
    if not _is_whole(x):
        return f"{name} without its numbers"
    if x.shape != stack.shape[1:]:
        return f"{name} of shape {list(x.shape)}, not {list(stack.shape[1:])}"
    return "" if x.dtype == stack.dtype else f"{name} of type {x.dtype}, not {stack.dtype}"


def _is_whole(x: Tensor) -> bool:
    """Return whether a tensor has all of its numbers: none left out, or beyond the end of its memory."""
    if x.layout != torch.strided or x.is_nested or x.is_meta or x.is_quantized:
        return False
    last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    return not x.numel() or (last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _number(weight: Any) -> tuple[Tensor | None, str]:
    """Return one real number of any type as float64, or why it is none."""
    if type(weight) not in (Tensor, nn.Parameter):
        return None, f"weight of type {_printable(type(weight).__name__)}, not a tensor"
    if not _is_whole(weight) or weight.numel() != 1 or weight.is_complex():
        shape = "[...]" if weight.is_nested else list(weight.shape)
        return None, f"weight of shape {shape} and type {weight.dtype}"
    return torch.tensor(Tensor.item(weight), dtype=torch.float64), ""


def _weight_fault(weight: Tensor | None, expected: Upload, place: int) -> str:
    """Refuse a weight above the number of samples that the server knows the client has."""
    if weight is None or expected.weight is None:
        return ""
    return "" if 0 <= weight <= expected.weight[place].item() else f"weight {weight:g}"  # so is NaN


def _printable(value: Any) -> str:
    """Return a few printable characters of a name that came from outside."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:60])


def _with_rows(uploads: Upload, sent: Mapping[int, Upload]) -> Upload:
    """Return a copy of the stack with these rows: what clients computed may be in use elsewhere."""
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
