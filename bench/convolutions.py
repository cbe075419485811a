"""Convolutions of stacked clients on a GPU: torch's own, as products of patches, and as implicit products.

    python bench/convolutions.py --device cuda
    python bench/convolutions.py --device cuda --tune --models resnet20
    python bench/convolutions.py --device cuda --tile 16,128,16,8 --shapes 16-16

For every shape of some models' convolutions it prints the median time of the value, of the gradient of the
input, and of the gradient of the weights, then sums by model. `--tune` tries several sizes of tiles for each
shape, and prints the best. Errors are relative to results in float64, of fewer clients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.engine.execute.cuda import implicit
from partita.engine.execute.cuda.implicit import Tile, WeightTile
from partita.engine.execute.cuda.unrolled import Unrolled, gathered

aten = torch.ops.aten
CALLS, REPEATS, SETS = 8, 5, 3
PARTS = ("value", "input", "weight")
START = time.perf_counter()


class Shape(NamedTuple):
    """A convolution of `groups` clients, `count` times in its model."""

    model: str
    groups: int
    batch: int
    inputs: int
    out: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 1
    count: int = 1

    @property
    def name(self) -> str:
        """Return channels, size, kernel and stride."""
        stride = "/2" if self.stride == 2 else ""
        return f"{self.inputs}-{self.out}@{self.size} {self.kernel}x{self.kernel}{stride}"

    @property
    def first(self) -> bool:
        """Return whether nobody asks for the gradient of its input."""
        return self.inputs in (1, 3)


def _resnet20(*sizes: Any) -> Shape:
    return Shape("resnet20", 32, 32, *sizes)


def _resnet18(*sizes: Any) -> Shape:
    return Shape("resnet18/2", 12, 32, *sizes)


SHAPES = [
    _resnet20(3, 16, 32, 3),
    _resnet20(16, 16, 32, 3, 1, 1, 6),
    _resnet20(16, 16, 32, 1, 1, 0),
    _resnet20(16, 32, 32, 3, 2),
    _resnet20(16, 32, 32, 1, 2, 0),
    _resnet20(32, 32, 16, 3, 1, 1, 5),
    _resnet20(32, 64, 16, 3, 2),
    _resnet20(32, 64, 16, 1, 2, 0),
    _resnet20(64, 64, 8, 3, 1, 1, 5),
    Shape("leaf_cnn", 32, 20, 1, 32, 28, 5, 1, 2),
    Shape("leaf_cnn", 32, 20, 32, 64, 14, 5, 1, 2),
    Shape("mnist_cnn", 32, 32, 1, 32, 28, 5, 1, 0),
    Shape("mnist_cnn", 32, 32, 32, 64, 12, 5, 1, 0),
    _resnet18(1, 32, 28, 3),
    _resnet18(32, 32, 28, 3, 1, 1, 4),
    _resnet18(32, 64, 28, 3, 2),
    _resnet18(32, 64, 28, 1, 2, 0),
    _resnet18(64, 64, 14, 3, 1, 1, 3),
    _resnet18(64, 128, 14, 3, 2),
    _resnet18(64, 128, 14, 1, 2, 0),
    _resnet18(128, 128, 7, 3, 1, 1, 3),
    _resnet18(128, 256, 7, 3, 2),
    _resnet18(128, 256, 7, 1, 2, 0),
    _resnet18(256, 256, 4, 3, 1, 1, 3),
]


class Case:
    """Random tensors of a shape, and the three ways to compute with them."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.groups, self.kernel = shape.groups, (shape.kernel, shape.kernel)
        self.stride, self.padding = (shape.stride, shape.stride), (shape.padding, shape.padding)
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        edge = (shape.size + 2 * shape.padding - shape.kernel) // shape.stride + 1
        self.x = draw(shape.batch, self.groups * shape.inputs, shape.size, shape.size)
        self.w = draw(self.groups * shape.out, shape.inputs, *self.kernel)
        self.dy = draw(shape.batch, self.groups * shape.out, edge, edge)

    def _options(self) -> tuple[Any, ...]:
        return self.stride, self.padding, (1, 1), False, (0, 0), self.groups

    def library(self, part: str, double: bool = False) -> Tensor:
        """Compute as torch does."""
        x, w, dy = (t.double() if double else t for t in (self.x, self.w, self.dy))
        if part == "value":
            return aten.convolution(x, w, None, *self._options())
        wanted = (part == "input", part == "weight", False)
        results = aten.convolution_backward(dy, x, w, None, *self._options(), wanted)
        return results[PARTS.index(part) - 1]

    def patches(self, part: str) -> Tensor:
        """Compute with patches; the gradient of the weights reads those of the value."""
        unrolled = Unrolled(torch.fx.symbolic_trace(torch.nn.Identity()))
        if part == "value":
            return unrolled._forward(self.x, self.w, None, self.padding, self.groups)
        if part == "input":
            out = self.w.shape[0] // self.groups
            rows = self.dy.transpose(0, 1).reshape(self.groups, out, -1)
            columns = torch.bmm(self.w.reshape(self.groups, out, -1).transpose(1, 2), rows)
            return gathered(columns, self.x.shape, self.kernel, self.padding)
        wanted = (False, True, False)
        return unrolled._backward(self.dy, self.x, self.w, self.padding, self.groups, wanted)[1]

    def products(self, part: str, sizes: Any = None) -> Tensor:
        """Compute as implicit products, from weights as they are to gradients as they are expected."""
        if part == "weight":
            parts = implicit.weight_parts(
                self.dy, self.x, self.groups, self.kernel, self.stride, self.padding, sizes
            )
            return parts.sum(0).permute(0, 3, 4, 1, 2).reshape(self.w.shape).to(self.w.dtype)
        taps = self.w.reshape(self.groups, -1, *self.w.shape[1:]).permute(0, 3, 4, 1, 2).contiguous()
        gradient = part == "input"
        source, size = (self.dy, self.x.shape[2:]) if gradient else (self.x, self.dy.shape[2:])
        return implicit.product(source, taps, size, self.stride, self.padding, gradient, sizes)


def median_ms(run: Callable[[Case], Any], cases: list[Case]) -> float:
    """Return the median time of a call; calls are queued behind a pause, so that the host does not count."""
    for case in cases:
        run(case)
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # about 2 ms
        begin.record()
        for i in range(CALLS):
            run(cases[i % len(cases)])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def error(shape: Shape, part: str, device: torch.device, dtype: torch.dtype, sizes: Any = None) -> float:
    """Return the largest error of few clients, relative to the largest value; memory is poisoned before."""
    case = Case(shape._replace(groups=3, batch=5), device, dtype, seed=1)
    exact = case.library(part, double=True)
    torch.cuda.empty_cache()
    poison = torch.full((2**24,), float("nan"), device=device)
    del poison
    mine = case.products(part, sizes).double()
    return ((mine - exact).abs().max() / exact.abs().max()).item()


# ---- sizes to try


def tiles(shape: Shape, part: str) -> list[Any]:
    """Return the sizes to try, first those that would be taken."""
    kernel = (shape.kernel, shape.kernel)
    if part == "weight":
        return list(dict.fromkeys(_weight_tiles(shape, kernel)))
    inputs, out = (shape.inputs, shape.out) if part == "value" else (shape.out, shape.inputs)
    return list(dict.fromkeys(_tiles(inputs, out, kernel, shape.stride)))


def _tiles(inputs: int, out: int, kernel: tuple[int, int], stride: int) -> Iterator[Tile]:
    yield implicit.tile(inputs, out, kernel, stride)
    o, count = implicit._power(out, 16, 64), inputs * kernel[0] * kernel[1]
    k = next((n for n in (32, 16) if inputs % n == 0), implicit._power(count, 16, 32))
    yield Tile(o, 128, k)
    yield Tile(o, 128, k, places_first=True)
    yield Tile(o, 64, k)
    yield Tile(o, 256, k, warps=8)
    if o == 64:
        yield Tile(32, 128, k)
        yield Tile(128 if out >= 128 else 64, 128, k, warps=8)
    if count <= 9 * k:
        yield Tile(o, 128, k, unroll=True)
    if inputs % 64 == 0:
        yield Tile(o, 128, 64)
    if kernel == (3, 3) and stride == 1 and inputs in (16, 32, 64):
        yield Tile(min(o, 32), 128, inputs, rows=8)
        yield Tile(min(o, 32), 64, inputs, rows=8)
        yield Tile(min(o, 32), 128, inputs, rows=16, stages=2)
        yield Tile(min(o, 32), 128, inputs, rows=8, warps=8)


def _weight_tiles(shape: Shape, kernel: tuple[int, int]) -> Iterator[WeightTile]:
    yield implicit.weight_tile(shape.inputs, shape.out, kernel, shape.stride)
    m, n = shape.inputs * shape.kernel**2, shape.out
    for depth in (32, 64):
        yield WeightTile(implicit._power(m, 16, 64), implicit._power(n, 16, 64), depth, False)
    yield WeightTile(implicit._power(m, 16, 128), implicit._power(n, 16, 128), 32, False, warps=8)
    if shape.stride == 1 and shape.kernel > 1:
        m, n = shape.inputs * shape.kernel, shape.out * shape.kernel
        for depth in (32, 64):
            yield WeightTile(implicit._power(m, 16, 64), implicit._power(n, 16, 64), depth, True)
        yield WeightTile(implicit._power(m, 16, 128), implicit._power(n, 16, 64), 32, True)
        yield WeightTile(implicit._power(m, 16, 128), implicit._power(n, 16, 128), 32, True, warps=8)


def chosen(shape: Shape, part: str, options: argparse.Namespace) -> list[Any]:
    """Return the sizes to measure: None for those that would be taken."""
    if options.tune:
        return tiles(shape, part)
    given = options.weight_tile if part == "weight" else options.tile
    if not given:
        return [None]
    kind: Any = WeightTile if part == "weight" else Tile
    values = [int(v) for v in given.split(",")]
    fields = [
        bool(v) if f in ("shifted", "places_first", "unroll") else v for f, v in zip(kind._fields, values)
    ]
    return [kind(*fields)]


# ---- all of them


def parts_of(shape: Shape) -> list[str]:
    """Return what is computed of a convolution."""
    return [part for part in PARTS if not (shape.first and part == "input")]


def precompile(shapes: list[Shape], options: argparse.Namespace) -> None:
    """Fill the store of kernels from several processes; each compiles every n-th."""
    me, of = (int(v) for v in options.precompile.split("/"))
    device, number = torch.device(options.device), 0
    for shape in shapes:
        for part in parts_of(shape):
            for sizes in chosen(shape, part, options):
                number += 1
                if number % of == me and time.perf_counter() - START < options.limit / 2:
                    try:
                        # as large as it will be: sizes decide between versions of a kernel
                        Case(shape, device, options.dtype).products(part, sizes)
                        Case(shape._replace(groups=3, batch=5), device, options.dtype).products(part, sizes)
                    except Exception as reason:
                        print(f"compile {shape.name} {part} {sizes}: {_short(reason)}", flush=True)


def _short(reason: Exception) -> str:
    return " ".join(f"{type(reason).__name__}: {reason}".split())[:160]


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the times of a shape by part and form, and print them."""
    device = torch.device(options.device)
    cases = [Case(shape, device, options.dtype, seed) for seed in range(SETS)]
    times: dict[str, dict[str, float]] = {}
    for part in parts_of(shape):
        row = times.setdefault(part, {})
        runs: dict[str, Callable[[Case], Any]] = {"library": lambda case, part=part: case.library(part)}
        if shape.stride == 1:
            runs["patches"] = lambda case, part=part: case.patches(part)
        for form, run in runs.items() if not options.only_products else ():
            try:
                row[form] = median_ms(run, cases)
            except Exception as reason:
                print(f"  {shape.name} {part} {form}: {_short(reason)}", flush=True)
        tried = []
        for sizes in chosen(shape, part, options):
            if time.perf_counter() - START > options.limit:
                break
            try:
                wrong = error(shape, part, device, options.dtype, sizes)
                ms = median_ms(lambda case, part=part, sizes=sizes: case.products(part, sizes), cases)
            except Exception as reason:
                print(f"  {shape.name} {part} {sizes}: {_short(reason)}", flush=True)
                continue
            mark = "" if wrong < options.tolerance else "  WRONG"
            tried.append((ms, wrong, sizes))
            if options.tune or mark:
                print(
                    f"  {shape.name:18s} {part:6s} {ms:7.3f} ms  error {wrong:.0e}  {_label(sizes)}{mark}",
                    flush=True,
                )
        if tried:
            row["products"], row["error"], best = min(tried, key=lambda t: t[0])
            if options.tune:
                print(
                    f"  best {shape.name:18s} {part:6s} {row['products']:.3f} ms {_label(best)}", flush=True
                )
    return times


def _label(sizes: Any) -> str:
    if sizes is None:
        return "as chosen"
    return " ".join(f"{k}={int(v)}" for k, v in sizes._asdict().items() if v)


def table(measured: list[tuple[Shape, dict[str, dict[str, float]]]]) -> None:
    """Print all times in ms, and sums by model."""
    print(
        f"\n{'':11s}{'':20s}  ×  "
        + "".join(f"{part:>9s}: lib  patches products" for part in PARTS)
        + "  error"
    )
    sums: dict[str, list[float]] = {}
    for shape, times in measured:
        cells, worst = "", 0.0
        total = sums.setdefault(shape.model, [0.0, 0.0, 0.0])
        for part in PARTS:
            row = times.get(part, {})
            cells += "    " + "".join(
                f"{row[f]:9.3f}" if f in row else f"{'-':>9s}" for f in ("library", "patches", "products")
            )
            worst = max(worst, row.get("error", 0.0))
            library = row.get("library", 0.0)
            for i, form in enumerate(("library", "patches", "products")):
                total[i] += shape.count * row.get(form, library)
        print(f"{shape.model:11s}{shape.name:20s}{shape.count:3d}  {cells}  {worst:.0e}")
    for model, (library, patches, products) in sums.items():
        print(
            f"sum of {model:11s} library {library:8.2f} ms  patches {patches:8.2f}  products {products:8.2f}"
        )
    print(f"{time.perf_counter() - START:.0f} s", flush=True)


def main() -> None:
    """Measure the shapes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", default=[], help="of these models only")
    parser.add_argument("--shapes", nargs="*", default=[], help="with these texts in the name, as 16-16")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fp32", action="store_true", help="no TF32")
    parser.add_argument("--tune", action="store_true", help="try several sizes")
    parser.add_argument("--tile", help="out,places,k,rows,stages,warps,places_first,unroll")
    parser.add_argument("--weight-tile", help="m,n,k,shifted,stages,warps")
    parser.add_argument("--only-products", action="store_true", help="do not measure the other forms")
    parser.add_argument("--limit", type=float, default=95.0, help="seconds, after which shapes are left out")
    parser.add_argument("--workers", type=int, default=min(14, max(0, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--precompile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    options.tolerance = 2e-2 if options.dtype != torch.float32 else 1e-5 if options.fp32 else 4e-3
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not options.fp32
    shapes = [s for s in SHAPES if not options.models or s.model in options.models]
    shapes = [s for s in shapes if not options.shapes or any(text in s.name for text in options.shapes)]
    if reason := implicit.missing(torch.device(options.device)):
        raise SystemExit(f"there is nothing to measure: {reason}")
    if options.precompile:
        precompile(shapes, options)
        return
    if options.workers:
        of = options.workers
        command = [sys.executable, *sys.argv, "--precompile"]
        others = [subprocess.Popen([*command, f"{i}/{of}"]) for i in range(of)]
        for other in others:
            other.wait()
        print(f"compiled after {time.perf_counter() - START:.0f} s", flush=True)
    measured = []
    with torch.no_grad():
        for shape in shapes:
            if time.perf_counter() - START > options.limit:
                print(f"{shape.model} {shape.name} and later ones: no time left", flush=True)
                break
            times = measure(shape, options)
            measured.append((shape, times))
            line = ", ".join(
                f"{p} " + " ".join(f"{t:.3f}" for f, t in r.items() if f != "error") for p, r in times.items()
            )
            print(f"{shape.model} {shape.name}: {line}", flush=True)
    table(measured)


if __name__ == "__main__":
    main()
