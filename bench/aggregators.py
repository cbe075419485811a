"""Aggregators of Partita against those of byzfl 0.0.11, in the same run.

One stack of float32 deltas, a row per client. Both are measured in turn, several times; the ratio of the
medians is what counts, since seconds depend on the machine and its load. byzfl's nearest-neighbour mixing
copies the stack once per client, so both sides are measured on a twentieth of the columns. Partita's mixing
is followed by an aggregator that takes the first row, so that nothing but the mixing is compared.

    python bench/aggregators.py
    python bench/aggregators.py krum nnm --columns 100000
    python bench/aggregators.py --rows 50 --json > bench.json
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from partita import aggregate
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors

INSTALL = "pip install --no-deps byzfl==0.0.11"
KEY = torch.tensor(0)


class Case(NamedTuple):
    """Ours and theirs for f faulty clients, how much faster ours should be, the share of the columns."""

    ours: Callable[[int], Aggregator]
    theirs: Callable[[Any, int], Callable[[Tensor], Tensor]] | None
    target: float | None
    columns: float = 1.0
    weighted: bool = False


def _first(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:  # noqa: ARG001
    return Combined({k: d[0] for k, d in deltas.items()})


FIRST = Aggregator("first", _first, {})
CASES = {
    "coordinate_median": Case(lambda f: aggregate.coordinate_median(), lambda b, f: b.Median(), 5),  # noqa: ARG005
    "trimmed_mean": Case(aggregate.trimmed_mean, lambda b, f: b.TrMean(f), 5),
    "krum": Case(aggregate.krum, lambda b, f: b.Krum(f), 4),
    # the same three steps of Weiszfeld's iteration as byzfl takes
    "geometric_median": Case(
        lambda f: aggregate.geometric_median(tolerance=0.0, iterations=3, nu=0.1),  # noqa: ARG005
        lambda b, f: b.GeometricMedian(nu=0.1, T=3),  # noqa: ARG005
        5,
    ),
    "nnm": Case(lambda f: aggregate.nnm(f, FIRST), lambda b, f: b.NNM(f), 10, columns=0.05),
    "multi_krum": Case(lambda f: aggregate.multi_krum(f, 10), lambda b, f: b.MultiKrum(f), None),
    "centered_clipping": Case(
        lambda f: aggregate.centered_clipping(100.0),  # noqa: ARG005
        lambda b, f: b.CenteredClipping(L=5, tau=100.0),  # noqa: ARG005
        None,
    ),
    "weighted_median": Case(lambda f: aggregate.coordinate_median(), None, None, weighted=True),  # noqa: ARG005
    "converged_geometric_median": Case(lambda f: aggregate.geometric_median(), None, None),  # noqa: ARG005
    "smoothed_geometric_median": Case(lambda f: aggregate.smoothed_geometric_median(10.0), None, None),  # noqa: ARG005
    "smoothed_coordinate_median": Case(lambda f: aggregate.smoothed_coordinate_median(1.0), None, None),  # noqa: ARG005
}


def load_byzfl() -> Any:
    """The library, or None. Its datasets and plots are no part of this: what they import may be missing."""
    if importlib.util.find_spec("byzfl") is None:
        return None
    for name in ("torchvision", "seaborn", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            sys.modules |= {name: MagicMock(), f"{name}.pyplot": MagicMock()}
    return importlib.import_module("byzfl")


def measure(case: Case, byzfl: Any, stack: Tensor, repeat: int) -> dict[str, object]:
    """Both in turn, after one call each that does not count; medians and their ratio."""
    f = len(stack) // 10
    x = stack[:, : max(1, int(stack.shape[1] * case.columns))].contiguous()
    weight = torch.arange(1, len(x) + 1).double() if case.weighted else torch.ones(len(x)).double()
    ours = case.ours(f)
    sides: list[Callable[[], object]] = [lambda: ours.combine({"x": x}, weight, KEY)]
    if byzfl is not None and case.theirs is not None:
        theirs = case.theirs(byzfl, f)
        sides.append(lambda: theirs(x))
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeat + 1):
        for side, times in zip(sides, seconds):
            begin = time.perf_counter()
            side()
            if turn:
                times.append(time.perf_counter() - begin)
    fast, *slow = (statistics.median(s) for s in seconds)
    row: dict[str, object] = {"rows": len(x), "columns": x.shape[1], "ours_s": round(fast, 4)}
    return row | {
        "byzfl_s": round(slow[0], 4) if slow else None,
        "ratio": round(slow[0] / fast, 1) if slow else None,
        "target": case.target,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Print one line per aggregator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rules", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--columns", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    byzfl = load_byzfl()
    if byzfl is None:
        print(f"byzfl is not installed, so only Partita is measured; to compare: {INSTALL}", file=sys.stderr)
    stack = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(0))
    if not options.json:
        print(f"{'rule':28} {'columns':>10} {'ours':>9} {'byzfl':>9} {'ratio':>7} {'target':>7}")
    for name in options.rules:
        row = {"rule": name, **measure(CASES[name], byzfl, stack, options.repeat)}
        print(json.dumps(row) if options.json else _line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    theirs = "—" if row["byzfl_s"] is None else f"{row['byzfl_s']:.3f} s"
    ratio = "—" if row["ratio"] is None else f"{row['ratio']}×"
    target = "—" if row["target"] is None else f"{row['target']:g}×"
    ours = f"{row['ours_s']:.3f} s"
    return f"{row['rule']:28} {row['columns']:>10,} {ours:>9} {theirs:>9} {ratio:>7} {target:>7}"


if __name__ == "__main__":
    main()
