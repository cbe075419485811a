"""Convolutions of stacked clients as products of matrices.

Stacked, a convolution is one with a group for each client:

    x [B, G·C, H, W],  w [G·O, C, h, w]   ->   y [B, G·O, H', W']

Libraries are slow at it where a group has much work. With the patches of all images as columns,

    P [G, C·h·w, B·H'·W'],   y = w P,   ∂w = ∂y Pᵀ,   ∂P = wᵀ ∂y,   ∂x = Σ over patches that see a place

it is three batched products, as fast as a device can be, at the price of h·w times the memory of x. Compiled,
patches are read on the way. Which form is better is measured (`partita.engine.execute.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
Pair = Sequence[int]
ALIGNMENT_BYTES = 16  # of rows, for tensor cores


class Unrolled(Interpreter):
    """Carries out a list of operations with every stacked convolution as products of matrices."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._cache: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        """Return the results; patches are kept from a convolution to its gradient, and no longer."""
        self._cache = {}
        try:
            return super().run(*args, **options)
        finally:
            self._cache = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation."""
        if target is _FORWARD and _stacked(args[0], args[1], args[3:]):
            return self._forward(args[0], args[1], args[2], args[4], args[8])
        if target is _BACKWARD and _stacked(args[1], args[2], args[4:]):
            return self._backward(args[0], args[1], args[2], args[5], args[9], args[10])
        return super().call_function(target, args, kwargs)

    def _patches(self, x: Tensor, kernel: Pair, padding: Pair, groups: int) -> Tensor:
        key = (id(x), *kernel, *padding, groups)
        if key not in self._cache:
            self._cache[key] = (x, patches(x, kernel, padding, groups))  # x too, so that no other gets its id
        return self._cache[key][1]

    def _forward(self, x: Tensor, w: Tensor, bias: Tensor | None, padding: Pair, groups: int) -> Tensor:
        kernel, out = w.shape[2:], w.shape[0] // groups
        height, width = (n + 2 * p - k + 1 for n, p, k in zip(x.shape[2:], padding, kernel))
        y = torch.bmm(_even(w.reshape(groups, out, -1), 2), self._patches(x, kernel, padding, groups))
        y = y.reshape(groups * out, len(x), height, width).transpose(0, 1)
        return (y if bias is None else y + bias[:, None, None]).contiguous()  # as views of it expect

    def _backward(
        self, g: Tensor, x: Tensor, w: Tensor, padding: Pair, groups: int, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        kernel, out = w.shape[2:], w.shape[0] // groups
        rows = g.transpose(0, 1).reshape(groups, out, -1)
        of_x = of_w = None
        if wanted[0]:
            columns = torch.bmm(w.reshape(groups, out, -1).transpose(1, 2), rows)
            of_x = gathered(columns, x.shape, kernel, padding)
        if wanted[1]:
            seen = self._patches(x, kernel, padding, groups)
            self._cache.pop((id(x), *kernel, *padding, groups), None)  # as a rule nobody needs them again
            of_w = torch.bmm(rows, seen.transpose(1, 2))[:, :, : w[0].numel()].reshape(w.shape)
        return of_x, of_w, g.sum((0, 2, 3)) if wanted[2] else None


def patches(x: Tensor, kernel: Pair, padding: Pair, groups: int) -> Tensor:
    """Return P: what every place of the result sees, [groups, channels · kernel, images · places]."""
    # a view of what is in memory: as a result of other operations it would be computed anew for every patch
    wide = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).contiguous()
    image, channel, row, _ = wide.stride()
    channels = x.shape[1] // groups
    places = [n - k + 1 for n, k in zip(wide.shape[2:], kernel)]
    seen = wide.as_strided(
        (groups, channels, *kernel, len(x), *places), (channels * channel, channel, row, 1, image, row, 1)
    )
    return _even(seen.reshape(groups, channels * kernel[0] * kernel[1], -1), 1)


def _even(x: Tensor, dim: int) -> Tensor:
    """Append zeros up to a multiple of the alignment, where tensor cores want rows to begin."""
    missing = _padded(x.shape[dim], x.element_size()) - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _padded(n: int, size: int) -> int:
    """Return the aligned number of entries of this size."""
    return -(-n * size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // size


def gathered(columns: Tensor, shape: Pair, kernel: Pair, padding: Pair) -> Tensor:
    """Return ∂x [B, G·C, H, W]: for each place the sum over all patches that saw it."""
    b, channels, height, width = shape
    down, right = (n + 2 * p - k + 1 for n, p, k in zip((height, width), padding, kernel))
    parts = columns.reshape(channels, *kernel, b, down, right)
    total: Tensor | None = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            # places of this part in the padded image: rows i to i + down, columns j to j + right
            edges = (j, width + 2 * padding[1] - right - j, i, height + 2 * padding[0] - down - i)
            part = F.pad(parts[:, i, j], edges)
            total = part if total is None else total + part
    assert total is not None
    inner = total[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width]
    return inner.transpose(0, 1).contiguous()


def patch_bytes(graph: GraphModule) -> int:
    """Return the bytes that the patches of all its convolutions take; 0 where none can be written so."""
    return sum(_patch_bytes(node) for node in graph.graph.nodes)


def _patch_bytes(node: Node) -> int:
    if node.op != "call_function" or node.target is not _FORWARD:
        return 0
    x, w, y = (a.meta.get("val") if isinstance(a, Node) else None for a in (node.args[0], node.args[1], node))
    if x is None or w is None or y is None or not _stacked(x, w, node.args[3:]):
        return 0
    groups = x.shape[1] // w.shape[1]
    rows = groups * _padded(w[0].numel(), x.element_size())
    return int(rows * y[:, 0].numel() * x.element_size())


def _stacked(x: Tensor, w: Tensor, options: Sequence[Any]) -> bool:
    """Return whether this is a plain two-dimensional convolution with several groups: no stride, no gaps."""
    stride, _, dilation, transposed, _, groups = options[:6]
    plain = all(s == 1 for s in (*stride, *dilation)) and not transposed
    return x.dim() == 4 and groups > 1 and plain and len(w) % groups == 0
