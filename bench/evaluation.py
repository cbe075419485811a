"""Is the evaluation of personalized models as fast as the forward passes of training?

Every client has an output layer of its own and as many test samples as training samples. Compared are samples
per second: of plain forward passes in training mode, client by client in its batches, and of evaluations in
a run, which load every client's parameters and score all its samples.

    python bench/evaluation.py
    python bench/evaluation.py logistic leaf_cnn --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

import partita as pt
from partita.cli.bench.measure import RoundTimes
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import METHODS, WORKLOADS, Workload
from partita.core.device import arithmetic
from partita.data import FederatedData


def passes(work: Workload, data: FederatedData, device: str, times: int) -> float:
    """Seconds of a forward pass in training mode over the samples of all clients, in batches."""
    model, there = work.model().to(device).train(), data.to(device)
    best = float("inf")
    for _ in range(times + 1):
        wait(device)
        begin = time.perf_counter()
        with arithmetic("tf32"):
            for start, n in there.train.tolist():
                for i in range(start, start + n, work.batch):
                    model(there.x[i : min(i + work.batch, start + n)])
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return best


def evaluations(work: Workload, data: FederatedData, device: str, times: int) -> tuple[float, str]:
    """Seconds of an evaluation of all clients, and what did it."""
    round_times = RoundTimes(device)
    run = pt.federate(
        work.model(),
        data,
        METHODS["fedalt"].algorithm(),
        rounds=times + 1,
        cohort=1,
        steps=1,
        batch=work.batch,
        device=device,
        evaluate_every=1,
        baselines=False,
        progress=False,
        callbacks=[round_times],
    )
    spent = [p["evaluation"] for p in round_times.phases]
    picks = run.config["executor"]["picks"]
    used = [pick["picked"] for role, pick in picks.items() if "personal" in role]
    return min(b - a for a, b in itertools.pairwise(spent)), ", ".join(used)


def main() -> None:
    """A line for each workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=["logistic", "mnist_cnn", "leaf_cnn", "resnet20"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    for name in options.workloads:
        work = WORKLOADS[name].on(options.device)
        work = work._replace(clients=work.cohort, cohort=1)
        pool = work.data()
        data = FederatedData.make(pool.x, pool.y, pool.train, pool.train)
        samples = int(data.train[:, 1].sum())
        with torch.no_grad():
            plain = passes(work, data, options.device, options.times)
        ours, used = evaluations(work, data, options.device, options.times)
        print(
            f"{name}: {samples / plain:,.0f} samples/s in forward passes, "
            f"{samples / ours:,.0f} in evaluations ({plain / ours:.2f} times, {used})",
            flush=True,
        )


if __name__ == "__main__":
    main()
