"""What arrives at the server: bytes from anybody become a row of uploads, or a reason to set it aside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from partita.core import check, tree
from partita.core.types import RoundContext, Tensors, Upload
from partita.deploy.wire import part_of, printable
from partita.engine.execute.plan import start_keys
from partita.engine.pending import Row
from partita.engine.screen import read_upload
from partita.engine.stage import Stage
from partita.engine.store.addresses import Address

PARTS = ("delta", "extra", "sums", "metrics", "sent")
OWN_REASONS = (tree.NOT_FINITE,)
"""What a client may say of itself: that what it keeps is no usable number."""
SLACK = 1 << 16
"""Bytes of a message beside its tensors."""


def most_bytes(stage: Stage) -> int:
    """Return how long an upload may be."""
    like = stage.upload_like
    parts = (*like.payload, like.metrics)
    names = sum(len(name) + 128 for part in parts for name in part)
    return 2 * tree.nbytes(parts) + 2 * names + SLACK


def like_of(stage: Stage) -> Upload:
    """Return what arrives of a client, with metrics in float64: a loss has the type of its model."""
    return stage.upload_like._replace(metrics=_wide(stage.upload_like.metrics))


def _wide(metrics: Tensors) -> Tensors:
    return {k: v.double() if v.is_floating_point() else v for k, v in metrics.items()}


def row_of(
    stage: Stage,
    client: int,
    context: RoundContext,
    address: Address,
    head: dict[str, Any],
    tensors: Tensors,
) -> Row:
    """Return what a client has sent as a row, screened as in a simulation."""
    upload, reason = read(stage, client, context, head, tensors)
    if reason:
        upload = tree.map_tensors(torch.zeros_like, like_of(stage))
    delta, extra, sums = upload.payload
    personal, memory = address.state()
    return Row(delta, extra, sums, upload.metrics, personal, memory, reason)


def set_aside(stage: Stage, address: Address, reason: str) -> Row:
    """Return the row of a client of whom nothing can be used."""
    like = tree.map_tensors(torch.zeros_like, like_of(stage))
    delta, extra, sums = like.payload
    return Row(delta, extra, sums, like.metrics, *address.state(), reason)


def read(
    stage: Stage, client: int, context: RoundContext, head: dict[str, Any], tensors: Tensors
) -> tuple[Upload, str]:
    """Return the upload of a client in the form of the stage's, or why it is unusable."""
    if head.get("fault"):
        own = head["fault"]
        return Upload({}), own if own in OWN_REASONS else "a fault of its own"
    unknown = [k for k in tensors if k.partition("/")[0] not in PARTS]
    if unknown:
        return Upload({}), f"unknown name {printable(unknown[0])}"
    like = like_of(stage)
    metrics, fault = read_upload(Upload(_wide(part_of(tensors, "metrics"))), _stacked(Upload(like.metrics)))
    if fault:
        return Upload({}), f"metrics: {fault}"
    try:
        found = _decoded(stage, client, context, tensors)
    except check.Refused as error:
        return Upload({}), f"what it sent: {error.field}={check.shortened(error.value)}"[:200]
    if isinstance(found, str):
        return Upload({}), found
    upload, fault = read_upload(found, _stacked(like))
    if fault:
        return Upload({}), fault
    upload = upload._replace(metrics=metrics.delta)
    return upload, tree.faults(_stacked(upload), _stacked(upload.metrics), 1)[0]


def _decoded(stage: Stage, client: int, context: RoundContext, tensors: Tensors) -> Upload | str:
    """Return what was sent as an upload of the whole model: bytes unpacked, parts of it in their places."""
    devices, like = stage.setup.devices, stage.upload_like
    kind, device = int(devices.class_of[client]), stage.setup.data.device
    if stage.channel.uploads.transforms:
        sent = tensors.get("sent")
        if sent is None or sent.dtype != torch.uint8 or sent.dim() != 1:
            return "without its bytes"
        key = start_keys(np.array([client]), context, device)[0]
        found = stage.channel.unpacked(sent.numpy().tobytes(), devices, kind, key)
    else:
        delta, extra, sums = (part_of(tensors, part) for part in ("delta", "extra", "sums"))
        found = Upload(delta, extra=extra, sums=sums)
    if devices.complete[kind]:
        return found
    parts = [(found.delta, like.delta), (found.sums, like.sums)]
    for own, whole in parts:
        held = devices.held(kind, whole)
        _, fault = read_upload(Upload(own), _stacked(Upload(held)))
        if fault:
            return fault
    delta, sums = (_placed(own, whole) for own, whole in parts)
    return found._replace(delta=delta, sums=sums)


def _placed(own: Tensors, whole: Tensors) -> Tensors:
    """Return tensors of the whole model, zero where a device holds nothing."""
    placed = {}
    for name, like in whole.items():
        placed[name] = torch.zeros_like(like)
        if name in own:
            placed[name][tuple(slice(0, n) for n in own[name].shape)] = own[name]
    return placed


def _stacked(rows: Any) -> Any:
    return tree.expand(rows, 1)


def scores_of(head: dict[str, Any], names: list[str]) -> tuple[dict[str, float], float]:
    """Return the scores that a client has sent, and its loss; NaN for what is no number."""
    found = head.get("scores")
    scores = found if isinstance(found, dict) else {}
    return {name: _number(scores.get(name)) for name in names}, _number(head.get("loss"))


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else float("nan")
