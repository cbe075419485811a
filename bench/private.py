"""Rounds with and without what happens to uploads on their way: client steps per second, and the ratio.

    python bench/private.py logistic mnist_cnn leaf_cnn --device cuda
    python bench/private.py logistic --uploads gaussian poisson private topk

Whole runs, in turn, after one of each kind that warms up; without evaluations, baselines and pages. All are
compared with plain runs whose cohorts have a fixed size. So have most of the others; `poisson` are plain runs
with cohorts by chance, `private` is the mechanism with these, as in a run without schedule=, and `banded16`
has noise that is taken back over up to 16 releases, with clients in a fixed order. Steps of a second count
how many clients there were. The clip is short: with noise of a usual one, a large model would diverge in a
few rounds (a length of z C √d / m in each), and what is not finite is set aside.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import partita as pt
from partita.cli.bench.workloads import LR, WORKLOADS

CLIP = {"noise": 1.0, "clip": 0.01}
ADAPTIVE = {**CLIP, "quantile": 0.5, "clip_lr": 0.01}
FIXED, CHANCE, CYCLIC = (pt.schedule.synchronous(order) for order in ("random", "poisson", "cyclic"))
UPLOADS: dict[str, tuple[Callable[[], list[Any]], pt.schedule.Schedule]] = {
    "gaussian": (lambda: [pt.privacy.gaussian(**ADAPTIVE)], FIXED),
    "poisson": (list, CHANCE),
    "private": (lambda: [pt.privacy.gaussian(**ADAPTIVE)], CHANCE),
    "banded": (lambda: [pt.privacy.banded(**CLIP, bands=1)], FIXED),
    "banded16": (lambda: [pt.privacy.banded(**CLIP)], CYCLIC),
    "topk": (lambda: [pt.transforms.topk(0.01, feedback=False)], FIXED),
    "quantize": (lambda: [pt.transforms.quantize(8)], FIXED),
    "half": (lambda: [pt.transforms.half()], FIXED),
}
PLAIN = (list, FIXED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=["logistic"], help=", ".join(WORKLOADS))
    parser.add_argument("--uploads", nargs="*", default=["gaussian"], choices=list(UPLOADS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--executor", default="vmap")
    options = parser.parse_args()
    print(f"{'workload':<14}{'uploads':<12}{'without':>12}{'with':>12}{'ratio':>8}")
    for row in options.rows:
        work = WORKLOADS[row].on(options.device)
        data = work.data()

        def speed(kind: tuple[Any, Any], rounds: int, work: Any = work, data: Any = data) -> float:
            uploads, schedule = kind
            run = pt.federate(
                work.model, data, pt.fedavg(lr=LR, weighting="uniform"), rounds=rounds, cohort=work.cohort,
                steps=work.steps, batch=work.batch, executor=options.executor, device=options.device,
                schedule=schedule, uploads=uploads(), baselines=False, evaluate_every=10**9,
                progress=False,
            )  # fmt: skip
            return float(run.summary()["client_steps_per_second"])

        for name in options.uploads:
            kinds = [PLAIN, UPLOADS[name]]
            for kind in kinds:
                speed(kind, 2)
            turns = [[speed(kind, options.rounds) for kind in kinds] for _ in range(options.turns)]
            plain, changed = (statistics.median(column) for column in zip(*turns))
            ratio = statistics.median(b / a for a, b in turns)
            print(f"{row:<14}{name:<12}{plain:>12,.0f}{changed:>12,.0f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
