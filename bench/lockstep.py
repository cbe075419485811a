"""Several runs of one study, one after another and in lockstep: seconds, and how much faster.

    python bench/lockstep.py logistic mnist_cnn leaf_cnn --runs 8 --device cuda
    python bench/lockstep.py logistic --runs 16 --rates --cohorts 5 10 50
    python bench/lockstep.py --two-cores
    python bench/lockstep.py --first-result

Whole runs as a study makes them, in turn, after one of each kind that warms up; without baselines and pages.
Seeds have initial weights of their own; with `--rates` the runs differ in their learning rates instead.
`--two-cores` is the table of a small machine: logistic regressions by cohort, 8 seeds and 16 rates.
`--first-result` times `partita run digits`, the start of the process and all, by executor.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import partita as pt
from partita.cli.bench.workloads import LR, WORKLOADS, Workload
from partita.engine.lockstep.runs import in_lockstep

DIGITS = Workload(
    "logistic regression, 64 → 10",
    lambda: pt.models.logistic(64, 10),
    (64,),
    10,
    cohort=10,
    steps=20,
    batch=20,
    rounds=10,
)
ROWS = {**WORKLOADS, "digits": DIGITS}


class Case(NamedTuple):
    """What is measured: runs that differ in their seeds, or in their rates."""

    row: str
    cohort: int
    runs: int
    rates: bool

    @property
    def name(self) -> str:
        what = "learning rates" if self.rates else "seeds"
        return f"{ROWS[self.row].about}, cohorts of {self.cohort}, {self.runs} {what}"


def two_cores() -> Iterator[Case]:
    """Yield the cases of the table of two cores."""
    for row, cohorts in (("logistic", (5, 10, 50)), ("digits", (10,))):
        for cohort in cohorts:
            yield Case(row, cohort, 8, rates=False)
            yield Case(row, cohort, 16, rates=True)


def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return how long some work takes, and what it returns."""
    begin = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def measured(case: Case, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the runs alone and together, the best of some turns."""
    work = ROWS[case.row].on(options.device)
    data = work.data()

    def run(number: int) -> pt.Run:
        rate = LR * 1.2**number if case.rates else LR
        return pt.federate(
            work.model, data, pt.fedavg(lr=rate), rounds=options.rounds, cohort=case.cohort,
            steps=work.steps, batch=work.batch, seed=0 if case.rates else number,
            executor=options.executor, device=options.device, baselines=False,
            evaluate_every=options.rounds, progress=False,
        )  # fmt: skip

    def alone() -> list[pt.Run]:
        return [run(i) for i in range(case.runs)]

    def together() -> list[pt.Run]:
        return in_lockstep([functools.partial(run, i) for i in range(case.runs)])

    alone(), together()
    best = {"alone": float("inf"), "together": float("inf")}
    for _ in range(options.turns):
        for name, how in (("alone", alone), ("together", together)):
            took, runs = seconds(how, options.device)
            best[name] = min(best[name], took)
            phases = {k: sum(r.facts["phases"][k] for r in runs) for k in runs[0].facts["phases"]}
            per_round = {k: round(1e3 * v / options.rounds / case.runs, 3) for k, v in phases.items()}
            if options.json:
                picks = runs[0].config["executor"]["picks"]
                row = {"row": case.row, "how": name, "seconds": took, "ms": per_round, "picks": picks}
                print(json.dumps(row), flush=True)
            else:
                print(f"  {case.name}, {name}: {took:.2f} s; ms a round and run: {per_round}", flush=True)
    return best["alone"], best["together"]


def table(found: Sequence[tuple[Case, float, float]]) -> None:
    """Print what was measured, as documents have it."""
    print("\n| what | alone | together | times |\n| --- | ---: | ---: | ---: |")
    for case, alone, together in found:
        print(f"| {case.name} | {alone:.1f} s | {together:.1f} s | {alone / together:.1f} |")


def first_result(executors: Sequence[str], turns: int) -> None:
    """Print how long `partita run digits` takes by each executor, in turn: the best, and the median."""
    times: dict[str, list[float]] = {name: [] for name in executors}
    for _ in range(turns):
        for name in executors:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-c", "from partita.cli import main; raise SystemExit(main())"]
                command += ["run", "digits", "--executor", name, "--out", str(Path(folder) / "run")]
                begin = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                times[name].append(time.perf_counter() - begin)
    print("\n| executor | seconds, best | median |\n| --- | ---: | ---: |")
    for name, took in times.items():
        print(f"| `{name}` | {min(took):.2f} | {sorted(took)[len(took) // 2]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=["logistic"], help=", ".join(ROWS))
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rates", action="store_true", help="learning rates instead of seeds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--cohorts", type=int, nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--two-cores", action="store_true", help="the table of a small machine")
    parser.add_argument("--first-result", action="store_true", help="`partita run digits` by executor")
    options = parser.parse_args()
    if options.first_result:
        first_result(["auto", "pool", "vmap", "loop"], max(3, options.turns))
        return
    chosen = list(two_cores()) if options.two_cores else [
        Case(row, cohort, options.runs, options.rates)
        for row in options.rows
        for cohort in options.cohorts or [ROWS[row].on(options.device).cohort]
    ]  # fmt: skip
    table([(case, *measured(case, options)) for case in chosen])


if __name__ == "__main__":
    main()
