"""Several runs of one study, one after another and in lockstep: seconds, and how much faster.

    python bench/lockstep.py logistic mnist_cnn leaf_cnn --runs 8 --device cuda
    python bench/lockstep.py logistic --runs 16 --rates

Whole runs as a study makes them, in turn, after one of each kind that warms up; without baselines and pages.
Seeds have initial weights of their own; with `--rates` the runs differ in their learning rates instead.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import partita as pt
from partita.cli.bench.workloads import LR, WORKLOADS
from partita.engine.lockstep.runs import in_lockstep


def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return how long some work takes, and what it returns."""
    begin = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=["logistic"], help=", ".join(WORKLOADS))
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rates", action="store_true", help="learning rates instead of seeds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--cohort", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for row in options.rows:
        work = WORKLOADS[row].on(options.device)
        data = work.data()

        def run(number: int, rounds: int, work: Any = work, data: Any = data) -> pt.Run:
            rate = LR * 1.2**number if options.rates else LR
            return pt.federate(
                work.model, data, pt.fedavg(lr=rate), rounds=rounds, cohort=options.cohort or work.cohort,
                steps=work.steps, batch=work.batch, seed=0 if options.rates else number,
                executor=options.executor, device=options.device, baselines=False, evaluate_every=rounds,
                progress=False,
            )  # fmt: skip

        def alone(rounds: int, run: Any = run) -> list[pt.Run]:
            return [run(i, rounds) for i in range(options.runs)]

        def together(rounds: int, run: Any = run) -> list[pt.Run]:
            return in_lockstep([functools.partial(run, i, rounds) for i in range(options.runs)])

        alone(options.rounds), together(options.rounds)
        times: dict[str, list[float]] = {"alone": [], "together": []}
        for _ in range(options.turns):
            for name, how in (("alone", alone), ("together", together)):
                took, runs = seconds(functools.partial(how, options.rounds), options.device)
                times[name].append(took)
                phases = {k: sum(r.facts["phases"][k] for r in runs) for k in runs[0].facts["phases"]}
                per_round = {k: round(1e3 * v / options.rounds / options.runs, 3) for k, v in phases.items()}
                if options.json:
                    picks = runs[0].config["executor"]["picks"]
                    print(
                        json.dumps(
                            {"row": row, "how": name, "seconds": took, "ms": per_round, "picks": picks}
                        )
                    )
                else:
                    print(f"  {row}, {name}: {took:.2f} s; ms a round and run: {per_round}", flush=True)
        best = {name: min(values) for name, values in times.items()}
        what = "rates" if options.rates else "seeds"
        print(
            f"{row}: {options.runs} {what} alone {best['alone']:.2f} s, together {best['together']:.2f} s: "
            f"{best['alone'] / best['together']:.2f} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
