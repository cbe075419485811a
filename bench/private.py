"""Rounds with and without what happens to uploads on their way: client steps per second, and the ratio.

    python bench/private.py logistic mnist_cnn leaf_cnn --device cuda
    python bench/private.py logistic --uploads gaussian topk

Whole runs, in turn, after one of each kind that warms up; without evaluations, baselines and pages. All draw
cohorts of a fixed size, so that they train the same number of clients.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import partita as pt
from partita.cli.bench.workloads import LR, WORKLOADS

UPLOADS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: pt.privacy.gaussian(noise=1.0, clip=0.5, quantile=0.5),
    "banded": lambda: pt.privacy.banded(noise=1.0, clip=0.5, bands=1),
    "topk": lambda: pt.transforms.topk(0.01, feedback=False),
    "quantize": lambda: pt.transforms.quantize(8),
    "half": lambda: pt.transforms.half(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=["logistic"], help=", ".join(WORKLOADS))
    parser.add_argument("--uploads", nargs="*", default=["gaussian"], choices=list(UPLOADS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--executor", default="vmap")
    options = parser.parse_args()
    print(f"{'workload':<14}{'uploads':<12}{'without':>12}{'with':>12}{'ratio':>8}")
    for row in options.rows:
        work = WORKLOADS[row].on(options.device)
        data = work.data()

        def speed(uploads: list[Any], rounds: int, work: Any = work, data: Any = data) -> float:
            run = pt.federate(
                work.model, data, pt.fedavg(lr=LR, weighting="uniform"), rounds=rounds, cohort=work.cohort,
                steps=work.steps, batch=work.batch, executor=options.executor, device=options.device,
                schedule=pt.schedule.synchronous(), uploads=uploads, baselines=False, evaluate_every=10**9,
                progress=False,
            )  # fmt: skip
            return float(run.summary()["client_steps_per_second"])

        for name in options.uploads:
            kinds: list[list[Any]] = [[], [UPLOADS[name]()]]
            for uploads in kinds:
                speed(uploads, 2)
            turns = [[speed(uploads, options.rounds) for uploads in kinds] for _ in range(options.turns)]
            plain, changed = (statistics.median(column) for column in zip(*turns))
            ratio = statistics.median(b / a for a, b in turns)
            print(f"{row:<14}{name:<12}{plain:>12,.0f}{changed:>12,.0f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
