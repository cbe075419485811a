"""Time the forms of attention: forward and backward of 8 stacked clients, on a GPU also as a graph.

    python bench/attention_forms.py --device cuda
    python bench/attention_forms.py

`error` is the largest difference from the plain form in float64, relative to the largest number there, of the
attention and the three gradients. `replay` is a recorded step, as the executor 'graph' has it.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import timeit
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

forms = importlib.import_module("partita.engine.model.functions.attention")  # beside a function of that name

CLIENTS, WARM_UP, REPEATS = 8, 5, 20
SHAPES = [(64, 4, 16, 8), (64, 4, 80, 32), (64, 8, 256, 64), (16, 8, 1024, 64), (8, 32, 256, 128)]
KERNELS = {"cpu": (forms.CPU,), "cuda": (forms.EFFICIENT, forms.FLASH)}
ERROR = {torch.float32: 5e-3, torch.bfloat16: 5e-2}  # TF32 is allowed


class Stacked:
    """Stands for the mode of a pass of several clients."""

    @staticmethod
    def apart(*_: Tensor) -> bool:
        return True


def step(kernel: str, causal: bool) -> Any:
    """Return the attention and its gradients of stacked clients by one form."""

    def value(q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out = forms.attention(Stacked(), None, q, k, v, attn_mask=mask, is_causal=causal)
        return (out * w).sum(), out

    def run(*args: Any) -> tuple[Tensor, ...]:
        forms.FASTER_FROM.update(
            {name: {2: 0, 4: 0, 8: 0} if name == kernel else {} for name in forms.FASTER_FROM}
        )
        axes = tuple(0 if isinstance(x, Tensor) else None for x in args)
        gradients, out = vmap(grad(value, argnums=(0, 1, 2), has_aux=True), axes)(*args)
        return out, *gradients

    return run


def milliseconds(run: Any, device: str) -> float:
    """Return the median of the repeats."""
    for _ in range(WARM_UP if device == "cuda" else 1):
        run()
    if device == "cpu":
        return statistics.median(timeit.repeat(run, number=1, repeat=3)) * 1e3
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def peak(run: Any) -> float:
    """Return the MiB of a GPU that a step takes beside its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def recorded(run: Any) -> tuple[Any, Any]:
    """Return the replay of a recorded step, and where its results lie."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results


def error(mine: Any, exact: Any) -> float:
    return max(
        float((x.double() - y).abs().max() / y.abs().max()) if bool(x.isfinite().all()) else float("inf")
        for x, y in zip(mine, exact)
    )


def measure(kernel: str, causal: bool, args: list[Any], exact: Any, device: str) -> list[str]:
    """Return the columns of one row: times, memory, errors and what went wrong."""
    run = step(kernel, causal)

    def once() -> Any:
        return run(*args)

    try:
        eager_error = error(once(), exact)
        eager, memory = milliseconds(once, device), peak(once) if device == "cuda" else 0.0
    except Exception as reason:
        return ["-", "-", "-", "-", f"FAILS: {type(reason).__name__}: {str(reason).splitlines()[0][:80]}"]
    verdict = "ok" if eager_error <= ERROR[args[0].dtype] else "WRONG"
    columns = [f"{eager:.3f}", "-", f"{memory:.0f}", f"{eager_error:.1e}"]
    if device == "cpu":
        return [*columns, verdict]
    try:
        replay, results = recorded(once)
        kept = args[:4]
        before = [x.clone() for x in kept]
        for x in kept:  # a graph reads its inputs anew
            x.copy_(x.flip(0))
        replay()
        torch.cuda.synchronize()
        same = error(results, [x.double() for x in once()])
        for x, y in zip(kept, before):
            x.copy_(y)
        columns[1] = f"{milliseconds(replay, device):.3f}"
        verdict += "" if same <= 1e-2 else f", graph differs by {same:.1e}"
    except Exception as reason:
        torch.cuda.synchronize()
        verdict += f", no graph: {type(reason).__name__}: {str(reason).splitlines()[0][:80]}"
    return [*columns, verdict]


def main() -> None:
    """A line for each shape, type, mask and form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.backends.cuda.matmul.allow_tf32 = True
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {CLIENTS} clients")
    names = ("samples,heads,L,d", "type", "mask", "form", "eager ms", "replay ms", "MiB", "error", "")
    print("{:>17} {:>8} {:>7} {:>9} {:>9} {:>9} {:>7} {:>8} {}".format(*names))
    for samples, heads, length, width in SHAPES:
        shape = CLIENTS, samples // CLIENTS, heads, length, width
        generator = torch.Generator().manual_seed(0)
        exact_args = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]
        sizes = torch.randint(length // 2, length + 1, shape[:2], generator=generator).to(device)
        seen = (torch.arange(length, device=device) < sizes[..., None])[:, :, None, None]
        for mask_name, causal, mask in (("causal", True, None), ("padding", False, seen)):
            for dtype in (torch.float32, torch.bfloat16):
                args = [*[x.to(dtype) for x in exact_args], mask]
                exact = step(forms.PLAIN, causal)(*[x.double() for x in args[:4]], mask)
                for kernel in (forms.PLAIN, *KERNELS[device]):
                    fits = kernel != forms.FLASH or (dtype == torch.bfloat16 and mask is None)
                    if not fits:
                        continue
                    row = measure(kernel, causal, args, exact, device)
                    label = f"{samples},{heads},{length},{width}"
                    cells = (label, str(dtype)[6:], mask_name, kernel, *row)
                    print("{:>17} {:>8} {:>7} {:>9} {:>9} {:>9} {:>7} {:>8} {}".format(*cells), flush=True)


if __name__ == "__main__":
    main()
