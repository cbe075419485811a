"""Convolutions as implicit products against PyTorch's own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partita.engine.execute.cuda import implicit
from partita.engine.execute.cuda.implicit import Implicit, implicit_count
from support import each


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run: other tests may have asked for exact products."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def step(groups: int, stride: int, padding: tuple[int, int], bias: bool):
    """A convolution, what follows from it, and its gradients."""

    def run(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        def loss(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
            y = torch.conv2d(x, w, b if bias else None, stride=stride, padding=padding, groups=groups)
            return torch.conv2d(y.tanh(), v, groups=groups).square().sum()

        return torch.func.grad(loss, (0, 1, 2, 3) if bias else (0, 1, 3))(x, w, b, v)

    return run


def tensors(groups: int, channels: int, out: int, kernel: tuple[int, int]) -> list[Tensor]:
    """Inputs of a step."""
    g = torch.Generator().manual_seed(0)
    sizes = [
        (5, groups * channels, 9, 8),
        (groups * out, channels, *kernel),
        (groups * out,),
        (groups * 8, out, 2, 2),
    ]
    return [torch.randn(*size, generator=g) for size in sizes]


@each(
    ("stride", "padding", "kernel", "bias"),
    itertools.product([1, 2], [(0, 0), (1, 2)], [(3, 3), (1, 1), (2, 5)], [True, False]),
    slow=lambda stride, padding, kernel, bias: bias != (padding[0] == kernel[0] % 2),  # noqa: ARG005
)
def test_same_as_torch(stride, padding, kernel, bias) -> None:
    """Values and all gradients, with a second convolution behind the first."""
    inputs = tensors(3, 2, 8, kernel)
    run = step(3, stride, padding, bias)
    traced = make_fx(run)(*inputs)
    assert implicit_count(traced) == 2
    other = make_fx(Implicit(traced).run)(*inputs)
    targets = [str(node.target) for node in other.graph.nodes]
    assert not any("aten.convolution" in t for t in targets)
    assert sum("partita.stacked" in t for t in targets) == 6
    for mine, theirs in zip(other(*inputs), run(*inputs), strict=True):
        assert mine.is_contiguous() == theirs.is_contiguous()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def convolved(dtype: torch.dtype = torch.float32, out: int = 8, **options):
    x, w = torch.randn(2, 6, 8, 8, dtype=dtype), torch.randn(3 * out, 6 // options.get("groups", 3), 3, 3)
    return (lambda x, w: torch.conv2d(x, w, **{"groups": 3, **options})), x, w.to(dtype)


@each(
    "options",
    [{"groups": 1}, {"dilation": 2}, {"stride": 3}, {"dtype": torch.float64}, {"out": 2}],
)
def test_what_is_left_alone(options) -> None:
    """A single client, gaps, long steps, numbers that tensor cores do not know, or little to do."""
    run, x, w = convolved(**options)
    traced = make_fx(run)(x, w)
    assert implicit_count(traced) == 0
    assert torch.equal(Implicit(traced).run(x, w), traced(x, w))


def test_stacked_by_vmap() -> None:
    """What torch.func.vmap makes of clients' convolutions is replaced."""
    x, w = torch.randn(3, 4, 2, 8, 8), torch.randn(3, 8, 2, 3, 3)
    run = torch.func.vmap(torch.func.grad(lambda w, x: torch.conv2d(x, w, padding=1).square().sum()))
    traced = make_fx(run)(w, x)
    assert implicit_count(traced) == 1
    torch.testing.assert_close(Implicit(traced).run(w, x), run(w, x), rtol=1e-4, atol=1e-3)


def test_shapes_are_foretold() -> None:
    """What a compiler is told of the operations is true."""
    ops, x = torch.ops.partita, torch.randn(2, 6, 9, 8)
    taps, dy = torch.randn(3, 3, 2, 8, 2), torch.randn(2, 24, 5, 4)
    stride, padding = (2, 2), (1, 0)
    calls = [
        (ops.stacked_convolution, (x, taps, stride, padding)),
        (ops.stacked_convolution_input, (dy, taps, (9, 8), stride, padding)),
        (ops.stacked_convolution_weight, (dy, x, 3, (3, 2), stride, padding, 4)),
    ]
    for operation, arguments in calls:
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(operation.default, arguments, test_utils=tests)


@each(
    "groups, inputs, out, size, kernel, stride",
    [
        (32, 16, 16, 32, 3, 1),
        (12, 256, 256, 4, 3, 1),
        (2, 1, 32, 28, 5, 1),
        (3, 64, 128, 7, 1, 2),
    ],
)
def test_chunks_cover_all_places(groups, inputs, out, size, kernel, stride) -> None:
    """No place of a gradient of weights is left out, and no chunk is empty."""
    edge = (size + 2 * (kernel // 2) - kernel) // stride + 1
    x = torch.empty(7, groups * inputs, size, size, device="meta")
    dy = torch.empty(7, groups * out, edge, edge, device="meta")
    sizes, plan = implicit.weight_plan(dy, x, groups, (kernel, kernel), (stride, stride))
    assert plan.chunk % sizes.k == 0
    assert (plan.splits - 1) * plan.chunk < plan.places <= plan.splits * plan.chunk
    assert plan.splits * 4 * groups * inputs * out * kernel**2 <= max(
        implicit.PARTS_BYTES, 4 * groups * inputs * out * kernel**2
    )


def test_a_cpu_has_no_kernels() -> None:
    """The reason is told."""
    assert implicit.missing(torch.device("cpu")) == "no NVIDIA GPU"


INTERPRETED = """
import itertools, sys, torch
from triton.runtime import interpreter
from partita.engine.execute.cuda import implicit
from partita.engine.execute.cuda.implicit import Tile, WeightTile

torch.set_num_threads(1)
keep = interpreter._LangPatchScope.set_attr  # numbers as numpy wants them since 2.4
index = lambda t: int(t.handle.data.item())
change = lambda self, o, name, value: keep(self, o, name, index if name == "__index__" else value)
interpreter._LangPatchScope.set_attr = change

def close(mine, exact, about):
    error = (mine.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, (about, error)

def check(inputs, out, size, kernel, stride, padding, tiles=(None,), weights=(None,), apart=False):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2 * inputs, size[0] + 1, size[1] + 2, generator=g)[:, :, :-1, 1:-1]
    x = x if apart else x.contiguous(memory_format=torch.contiguous_format)
    w = torch.randn(2 * out, inputs, *kernel, generator=g)
    s, p = (stride, stride), padding
    options = (s, p, (1, 1), False, (0, 0), 2)
    y = torch.ops.aten.convolution(x.double(), w.double(), None, *options)
    dy = torch.randn(y.shape, generator=g)
    of_x, of_w, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), None, *options, (True, True, False))
    taps = w.reshape(2, out, inputs, *kernel).permute(0, 3, 4, 1, 2).contiguous()
    about = (inputs, out, size, kernel, stride, padding)
    for tile in tiles:
        close(implicit.product(x, taps, y.shape[2:], s, p, False, tile), y, (about, tile))
        close(implicit.product(dy, taps, x.shape[2:], s, p, True, tile), of_x, (about, tile, "input"))
    for tile, splits in itertools.product(weights, (None, 3)):
        parts = implicit.weight_parts(dy, x, 2, kernel, s, p, tile, splits)
        close(parts.sum(0).permute(0, 3, 4, 1, 2).reshape(w.shape), of_w, (about, tile))

check(16, 16, (9, 7), (3, 3), 1, (1, 1),
      (None, Tile(16, 32, 16), Tile(16, 32, 16, unroll=True), Tile(16, 32, 16, places_first=True),
       Tile(16, 32, 16, rows=4)),
      (None, WeightTile(64, 64, 32, True), WeightTile(64, 16, 16, False)))
check(16, 16, (6, 7), (3, 3), 1, (0, 2), apart=True)
check(1, 32, (7, 7), (5, 5), 1, (2, 2))
check(3, 16, (6, 6), (3, 3), 1, (1, 1))
check(32, 64, (6, 5), (5, 5), 1, (0, 2))
check(24, 40, (5, 5), (2, 4), 2, (0, 1))
check(16, 32, (8, 9), (3, 3), 2, (1, 1), apart=True)
check(16, 32, (8, 8), (1, 1), 2, (0, 0))
check(128, 64, (4, 4), (3, 3), 1, (1, 1))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton to interpret")
def test_kernels_interpreted() -> None:
    """Kernels as Triton's interpreter carries them out, for all kinds of sizes."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
