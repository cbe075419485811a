"""How long does a round take, and how much memory, as the cohort grows?

Logistic regression, 784 → 10, 20 local steps with batches of 20, all clients report in every round.

    python bench/cohort.py --device cuda
    python bench/cohort.py --cohorts 50 500 --memory 1GiB
"""

from __future__ import annotations

import argparse
import statistics

import torch

from partita.cli.bench.measure import rounds
from partita.cli.bench.workloads import METHODS, WORKLOADS


def measure(cohort: int, count: int, device: str, executor: str, memory: str | None) -> str:
    """Return a line: seconds of the median round, client steps per second, and memory of the GPU."""
    work = WORKLOADS["logistic"]._replace(clients=cohort, cohort=cohort, rounds=count)
    method = METHODS["fedavg"]._replace(settings=lambda clients: {"memory": memory})  # noqa: ARG005
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, run, _ = rounds(work, work.data(), method, device, executor, "tf32")
    seconds = statistics.median(times)
    held = f", {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if device == "cuda" else ""
    picks = "; ".join(f"{p['picked']} ({p['why']})" for p in run.config["executor"]["picks"].values())
    return f"{cohort:,} clients: {seconds:.4f} s, {cohort * work.steps / seconds:,.0f} steps/s{held}. {picks}"


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--memory", default=None, help="a budget such as 8GiB")
    options = parser.parse_args()
    for cohort in options.cohorts:
        print(measure(cohort, options.rounds, options.device, options.executor, options.memory), flush=True)


if __name__ == "__main__":
    main()
