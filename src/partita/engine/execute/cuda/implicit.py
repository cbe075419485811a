"""Convolutions of stacked clients as products of matrices whose patches are never written.

Stacked, a convolution is one with a group for each client, here with stride s and padding p:

    x [B, G·C, H, W],  taps [G, h, w, O, C]
    y[b, o, u, v]    = Σ_{i, j, c} taps[i, j, o, c] x[b, c, s·u + i - p, s·v + j - p]
    ∂x[b, c, ·]      = Σ_{i, j, o} taps[i, j, o, c] ∂y[b, o, (· + p - (i, j)) / s],   where s divides
    ∂taps[i, j, o, c] = Σ_{b, u, v} ∂y[b, o, u, v] x[b, c, s·u + i - p, s·v + j - p]

`Unrolled` writes h·w times x for these three products; here kernels in Triton (`implicit_kernels`) read every
factor where it lies, and write the result alone. ∂taps is a sum over many places: programs sum chunks of
them, and the chunks are added in their order, so that results repeat.

The three are operations of torch, for compilers and recorded graphs. On a CPU they are torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
Pair = Sequence[int]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_OUT = 8  # channels of a client, below which most of a tensor core's tile were empty
PROGRAMS = 132 * 6  # of a gradient of weights, to keep a large device busy
PARTS_BYTES = 64 * 1024**2  # of its chunks, at most


class Implicit(Interpreter):
    """Carries out a list of operations with every stacked convolution as implicit products."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        """Return the results; weights are put in order once, and nothing is held when it is done."""
        self._taps = {}
        try:
            return super().run(*args, **options)
        finally:
            self._taps, self.env = {}, {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation."""
        if target is _FORWARD and _stacked(args[0], args[1], args[3:]):
            x, w, bias, stride, padding = args[:5]
            y = torch.ops.partita.stacked_convolution(x, self._ordered(w, args[8]), stride, padding)
            return y if bias is None else y + bias[:, None, None]
        if target is _BACKWARD and _stacked(args[1], args[2], args[4:]):
            return self._backward(args[0], args[1], args[2], args[4], args[5], args[9], args[10])
        return super().call_function(target, args, kwargs)

    def _ordered(self, w: Tensor, groups: int) -> Tensor:
        """Return weights as [G, h, w, O, C]: what a program reads at once lies together."""
        if id(w) not in self._taps:
            parts = w.reshape(groups, -1, *w.shape[1:]).permute(0, 3, 4, 1, 2)
            self._taps[id(w)] = (w, parts.contiguous())  # w too, so that no other gets its id
        return self._taps[id(w)][1]

    def _backward(
        self,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        stride: Pair,
        padding: Pair,
        groups: int,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        of_x = of_w = None
        if wanted[0]:
            taps = self._ordered(w, groups)
            of_x = torch.ops.partita.stacked_convolution_input(dy, taps, x.shape[2:], stride, padding)
        if wanted[1]:
            splits = weight_plan(dy, x, groups, w.shape[2:], stride)[1].splits  # in the list of operations
            parts = torch.ops.partita.stacked_convolution_weight(
                dy, x, groups, w.shape[2:], stride, padding, splits
            )
            of_w = parts.sum(0).permute(0, 3, 4, 1, 2).reshape(w.shape).to(w.dtype)
        return of_x, of_w, dy.sum((0, 2, 3)) if wanted[2] else None


def _stacked(x: Tensor, w: Tensor, options: Sequence[Any]) -> bool:
    """Return whether this is a two-dimensional convolution of several clients that the kernels know."""
    stride, _, dilation, transposed, _, groups = options[:6]
    plain = x.dim() == 4 and not transposed and all(n == 1 for n in dilation)
    known = tuple(stride) in ((1, 1), (2, 2)) and x.dtype == w.dtype and x.dtype in TYPES
    return plain and known and groups > 1 and len(w) % groups == 0 and len(w) >= MIN_OUT * groups


def implicit_count(graph: GraphModule) -> int:
    """Return how many convolutions of a list of operations can be implicit products."""
    return sum(_replaceable(node) for node in graph.graph.nodes)


def _replaceable(node: Node) -> bool:
    if node.op != "call_function" or node.target is not _FORWARD:
        return False
    x, w = (a.meta.get("val") if isinstance(a, Node) else None for a in node.args[:2])
    if x is None or w is None or not _stacked(x, w, node.args[3:]):
        return False
    # without tensor cores libraries are faster, and what 16 bits give has not been measured
    return x.dtype == torch.float32 and _precision(x) == "tf32"


@functools.cache
def missing(device: torch.device) -> str:
    """Return why a device cannot carry out the kernels; "" where it can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than Ampere"
    return "" if importlib.util.find_spec("triton") else "no Triton"


# ---- tiles


class Tile(NamedTuple):
    """Sizes of the tiles of y or ∂x, and how a program goes over what it sums."""

    out: int  # channels of the result
    places: int
    k: int  # of taps · channels at once; all channels where `rows`
    rows: int = 0  # of the result that one program goes down; 0: places one after the other
    stages: int = 3  # of loads under way
    warps: int = 4
    places_first: bool = False  # the result as [places, channels]: an order of the tensor cores
    unroll: bool = False


class WeightTile(NamedTuple):
    """Sizes of the tiles of ∂w."""

    m: int  # taps · channels of x
    n: int  # channels of ∂y, times rows of taps where `shifted`
    k: int  # places at once
    shifted: bool
    stages: int = 3
    warps: int = 4


def _power(n: int, low: int, high: int) -> int:
    """Return the power of two from n on, within bounds."""
    return min(high, max(low, 1 << (n - 1).bit_length()))


def tile(inputs: int, out: int, kernel: Pair, stride: int) -> Tile:
    """Return the sizes for a product with so many channels read and written."""
    by_rows = tuple(kernel) == (3, 3) and stride == 1 and inputs in (16, 32) and out <= 32
    if by_rows:  # 9 taps of 16 × 16 fit into registers
        return Tile(16, 128, 16, rows=8) if inputs == 16 else Tile(32, 128, 32, rows=16, stages=2)
    count = inputs * kernel[0] * kernel[1]
    k = next((n for n in (32, 16) if inputs % n == 0), _power(count, 16, 32))
    if inputs >= 64 and out >= 64:
        return Tile(64, 256, k, warps=8)
    return Tile(_power(out, 16, 64), 128, k, unroll=stride == 2 and inputs >= 32)


def weight_tile(inputs: int, out: int, kernel: Pair, stride: int) -> WeightTile:
    """Return the sizes for a gradient of weights."""
    shifted = stride == 1 and kernel[0] > 1 and inputs >= 16
    if tuple(kernel) == (3, 3) and inputs >= 32:  # as measured on an H200
        large = stride == 1 and inputs == 32
        return WeightTile(128, 128 if large else 64, 32, large, warps=8)
    m = inputs * kernel[1] * (1 if shifted else kernel[0])
    n = out * (kernel[0] if shifted else 1)
    return WeightTile(_power(m, 16, 64), _power(n, 16, 64), 32, shifted)


class Plan(NamedTuple):
    """How many blocks of ∂w there are, and how their places are divided."""

    blocks: int
    places: int
    chunk: int
    splits: int


def weight_plan(
    dy: Tensor, x: Tensor, groups: int, kernel: Pair, stride: Pair, sizes: WeightTile | None = None
) -> tuple[WeightTile, Plan]:
    """Return the sizes and the division, by shapes alone."""
    inputs, out = x.shape[1] // groups, dy.shape[1] // groups
    chosen = sizes or weight_tile(inputs, out, kernel, stride[0])
    m = inputs * kernel[1] * (1 if chosen.shifted else kernel[0])
    n = out * (kernel[0] if chosen.shifted else 1)
    blocks = -(-m // chosen.m) * -(-n // chosen.n)
    places = len(x) * (x.shape[2] if chosen.shifted else dy.shape[2]) * dy.shape[3]
    room = PARTS_BYTES // (4 * groups * inputs * out * kernel[0] * kernel[1])
    wanted = min(-(-PROGRAMS // (blocks * groups)), -(-places // (8 * chosen.k)), max(1, room))
    chunk = -(-places // (wanted * chosen.k)) * chosen.k
    return chosen, Plan(blocks, places, chunk, -(-places // chunk))


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"


# ---- launches


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def product(
    x: Tensor,
    taps: Tensor,
    size: Pair,
    stride: Pair,
    padding: Pair,
    gradient: bool,
    sizes: Tile | None = None,
) -> Tensor:
    """Return y, or ∂x where `x` is ∂y and `gradient` is asked for, of this height and width."""
    from partita.engine.execute.cuda import implicit_kernels as kernels

    groups, *kernel, a, b = taps.shape
    out, inputs = (b, a) if gradient else (a, b)
    by_out, by_in = (1, b) if gradient else (b, 1)
    step = stride[0]
    chosen = sizes or tile(inputs, out, kernel, step)
    y = x.new_empty(len(x), groups * out, *size)
    shape = {"IN": inputs, "OUT": out, "H": x.shape[2], "W": x.shape[3], "Y_H": size[0], "Y_W": size[1]}
    shape |= dict(zip(("X_CHANNEL", "X_ROW", "X_COLUMN"), x.stride()[1:]))
    shape |= {"TAP_OUT": by_out, "TAP_IN": by_in}
    options: dict[str, Any] = {"STAGES": chosen.stages, "PRECISION": _precision(x), "num_warps": chosen.warps}
    columns = -(-out // chosen.out)
    grid: tuple[int, ...]
    with _device(x):
        if chosen.rows:
            pads = {f"PAD_{n}": k - 1 - p if gradient else p for n, k, p in zip("HW", kernel, padding)}
            lines, segments = len(x) * size[1], -(-size[0] // chosen.rows)
            grid = (-(-lines // chosen.places) * segments * columns, groups)
            blocks = {"BLOCK_OUT": chosen.out, "BLOCK_PLACES": chosen.places, "BLOCK_IN": chosen.k}
            kernels.rows[grid](
                x, taps, y, lines, x.stride(0), y.stride(0), **shape, **pads, **blocks, **options,
                ROWS=chosen.rows, FLIP=gradient,
            )  # fmt: skip
            return y
        classes = step if gradient else 1
        places = len(x) * -(-size[0] // classes) * -(-size[1] // classes)
        grid = (-(-places // chosen.places) * columns, groups, classes * classes)
        blocks = {"BLOCK_OUT": chosen.out, "BLOCK_PLACES": chosen.places, "BLOCK_K": chosen.k}
        kernels.product[grid](
            x, taps, y, places, x.stride(0), y.stride(0), **shape, **blocks, **options,
            KH=kernel[0], KW=kernel[1], STRIDE=step, PAD_H=padding[0], PAD_W=padding[1], GRADIENT=gradient,
            PLACES_FIRST=chosen.places_first, UNROLL=chosen.unroll and classes == 1,
        )  # fmt: skip
    return y


def weight_parts(
    dy: Tensor,
    x: Tensor,
    groups: int,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    sizes: WeightTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return the parts of ∂taps [splits, G, h, w, O, C], to be added; as many as asked for."""
    from partita.engine.execute.cuda import implicit_kernels as kernels

    chosen, plan = weight_plan(dy, x, groups, kernel, stride, sizes)
    if splits is not None and splits != plan.splits:  # later ones may be empty
        plan = plan._replace(splits=splits, chunk=-(-plan.places // (splits * chosen.k)) * chosen.k)
    inputs, out = x.shape[1] // groups, dy.shape[1] // groups
    parts = x.new_empty(plan.splits, groups, *kernel, out, inputs, dtype=torch.float32)
    shape = {"IN": inputs, "OUT": out, "H": x.shape[2], "W": x.shape[3]}
    shape |= {"Y_H": dy.shape[2], "Y_W": dy.shape[3], "KH": kernel[0], "KW": kernel[1]}
    shape |= dict(zip(("X_CHANNEL", "X_ROW", "X_COLUMN"), x.stride()[1:]))
    shape |= dict(zip(("DY_CHANNEL", "DY_ROW", "DY_COLUMN"), dy.stride()[1:]))
    with _device(x):
        kernels.weight_gradient[(plan.blocks, plan.splits, groups)](
            x, dy, parts, plan.places, plan.chunk, groups, x.stride(0), dy.stride(0), **shape,
            STRIDE=stride[0], PAD_H=padding[0], PAD_W=padding[1], SHIFTED=chosen.shifted,
            BLOCK_M=chosen.m, BLOCK_N=chosen.n, BLOCK_K=chosen.k,
            STAGES=chosen.stages, PRECISION=_precision(x), num_warps=chosen.warps,
        )  # fmt: skip
    return parts


# ---- operations of torch


def _define(name: str, schema: str) -> str:
    torch.library.define(f"partita::{name}", schema)
    return f"partita::{name}"


FORWARD = _define("stacked_convolution", "(Tensor x, Tensor taps, int[] stride, int[] padding) -> Tensor")
INPUT = _define(
    "stacked_convolution_input",
    "(Tensor dy, Tensor taps, int[] size, int[] stride, int[] padding) -> Tensor",
)
WEIGHT = _define(
    "stacked_convolution_weight",
    "(Tensor dy, Tensor x, int groups, int[] kernel, int[] stride, int[] padding, int splits) -> Tensor",
)


def _height_width(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> list[int]:
    return [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], kernel, stride, padding)]


@torch.library.register_fake(FORWARD)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_forward(x: Tensor, taps: Tensor, stride: Pair, padding: Pair) -> Tensor:
    size = _height_width(x, taps.shape[1:3], stride, padding)
    return x.new_empty(len(x), taps.shape[0] * taps.shape[3], *size)


@torch.library.register_fake(INPUT)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_input(dy: Tensor, taps: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:  # noqa: ARG001
    return dy.new_empty(len(dy), taps.shape[0] * taps.shape[4], *size)


@torch.library.register_fake(WEIGHT)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_weight(
    dy: Tensor,
    x: Tensor,
    groups: int,
    kernel: Pair,
    stride: Pair,  # noqa: ARG001
    padding: Pair,  # noqa: ARG001
    splits: int,
) -> Tensor:
    shape = (splits, groups, *kernel, dy.shape[1] // groups, x.shape[1] // groups)
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.impl(FORWARD, "CUDA")
def _cuda_forward(x: Tensor, taps: Tensor, stride: Pair, padding: Pair) -> Tensor:
    size = _height_width(x, taps.shape[1:3], stride, padding)
    return product(x, taps.contiguous(), size, stride, padding, gradient=False)


@torch.library.impl(INPUT, "CUDA")
def _cuda_input(dy: Tensor, taps: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    return product(dy, taps.contiguous(), size, stride, padding, gradient=True)


@torch.library.impl(WEIGHT, "CUDA")
def _cuda_weight(
    dy: Tensor, x: Tensor, groups: int, kernel: Pair, stride: Pair, padding: Pair, splits: int
) -> Tensor:
    return weight_parts(dy, x, groups, kernel, stride, padding, splits=splits)


@torch.library.impl(FORWARD, "CPU")
def _cpu_forward(x: Tensor, taps: Tensor, stride: Pair, padding: Pair) -> Tensor:
    y = aten.convolution(x, _weights(taps), None, stride, padding, (1, 1), False, (0, 0), len(taps))
    return _plain(y)


@torch.library.impl(INPUT, "CPU")
def _cpu_input(dy: Tensor, taps: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    x = dy.new_empty(len(dy), taps.shape[0] * taps.shape[4], *size)
    return _plain(_gradients(dy, x, _weights(taps), stride, padding, len(taps), (True, False, False))[0])


@torch.library.impl(WEIGHT, "CPU")
def _cpu_weight(
    dy: Tensor, x: Tensor, groups: int, kernel: Pair, stride: Pair, padding: Pair, splits: int
) -> Tensor:
    w = x.new_empty(dy.shape[1], x.shape[1] // groups, *kernel)
    of_w = _gradients(dy, x, w, stride, padding, groups, (False, True, False))[1]
    whole = of_w.reshape(groups, -1, *of_w.shape[1:]).permute(0, 3, 4, 1, 2)
    parts = whole.new_zeros(splits, *whole.shape, dtype=torch.float32)
    parts[0] = whole
    return parts


def _weights(taps: Tensor) -> Tensor:
    """Return taps as torch wants them, [G·O, C, h, w]."""
    return taps.permute(0, 3, 4, 1, 2).flatten(0, 1)


def _plain(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _gradients(
    dy: Tensor, x: Tensor, w: Tensor, stride: Pair, padding: Pair, groups: int, wanted: Sequence[bool]
) -> Sequence[Tensor]:
    done: Sequence[Tensor] = aten.convolution_backward(
        dy, x, w, None, stride, padding, (1, 1), False, (0, 0), groups, wanted
    )
    return done
