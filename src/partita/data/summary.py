"""Federated data in a few words, and in a few digits that tell them from others."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from partita.data import arrays, columns
from partita.data.columns import Ragged
from partita.data.population import SPLITS, Numbered

if TYPE_CHECKING:
    from partita.data.federated import FederatedData

_NAMED = 8  # classes that are named when data are printed
_SAMPLED, _BLOCK = 4 << 20, 512  # of x: bytes that a fingerprint takes as they are, words that it adds up
KINDS = {torch.uint8: "uint8 (given as float32 in [0, 1])", torch.int32: "int32 (given as int64)"}


def described(data: FederatedData) -> tuple[str, dict[str, str]]:
    """Return what it is, and a line for each split, the inputs and the targets."""
    title = f"FederatedData of {data.clients} clients"
    title += f" ({data.source['name']})" if "name" in data.source else ""
    rows: dict[str, str] = {}
    for split in SPLITS:
        n = data.sizes(split)
        none = f"; {(n == 0).sum()} clients have none" if (n == 0).any() else ""
        if split != "validation" or n.any():
            counts = f"min {n.min()}, median {np.median(n):g}, max {n.max()}"
            rows[split] = f"{n.sum()} samples, per client {counts}{none}"
    for name, column in columns.named(data.x):
        kind = KINDS.get(column.dtype, str(column.dtype).removeprefix("torch."))
        shape = ", ".join(map(str, columns.sample_shape(column)))
        longest = f", n up to {column.longest}" if isinstance(column, Ragged) else ""
        rows[name] = f"{kind}, each [{shape}]{longest}"
    shape = f", each {list(data.y.shape[1:])}" if data.y.ndim > 1 else ""
    shape = f", each [n], n up to {data.y.shape[1]}" if data.lengths is not None else shape
    if len(data.y) == 0:
        rows["y"] = "no samples"
    elif data.y.is_floating_point():
        rows["y"] = f"numbers from {data.y.min():g} to {data.y.max():g}{shape}"
    else:
        names = [f"{i} {name}" for i, name in enumerate(data.source.get("classes", []))]
        named = f": {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}" if names else ""
        values = torch.unique(data.y[data.y != arrays.IGNORED]).tolist() or [arrays.IGNORED]
        rows["y"] = f"{len(values)} classes, {values[0]} to {values[-1]}{shape}{named}"
    return title, rows


def fingerprint(data: FederatedData) -> str:
    """Return 16 hexadecimal digits, the same for the same data, wherever they are kept.

    They tell the shapes, ranges, names, labels and all of x (sums of its blocks, and a sample as it is).
    """
    parts = columns.listed(data.x)
    sampled = min(data.rows, max(1, _SAMPLED // max(1, data.row_bytes)))
    rows = torch.linspace(0, data.rows - 1, sampled, dtype=torch.float64).round().to(torch.int64)
    digest = hashlib.sha256()
    head: list[Any] = [[str(c.dtype), [data.rows, *columns.sample_shape(c)]] for c in (*parts, data.y)]
    head += list(data.x) if isinstance(data.x, dict) else []
    digest.update(json.dumps(head).encode())
    held_out = [data.validation] if data.validation[:, 1].any() else []
    for part in (data.train, *held_out, data.test):
        digest.update(np.ascontiguousarray(part, dtype="<i8").data)
    digest.update(_bytes(data.y))
    for column in parts:
        sequences = isinstance(column, Ragged)
        if isinstance(column, Ragged):
            digest.update(_bytes(column.length))
        else:
            digest.update(_bytes(columns.read(column, rows.to(columns.home(column)))))
        if sequences or sampled < data.rows:
            for _, block in columns.blocks(column, 8 * _BLOCK):
                digest.update(_bytes(_sums(block)))
    if data.names != Numbered(data.clients):
        digest.update(json.dumps(list(data.names)).encode())
    return digest.hexdigest()[:16]


def _sums(values: Tensor) -> Tensor:
    """Return the bits of blocks of 4 kB, added up as whole numbers: as fast as memory is read."""
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)) if len(flat) % 8 else flat
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    return torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:]])


def _bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().numpy().tobytes()
