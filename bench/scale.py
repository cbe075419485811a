"""Does the cost of a round follow the cohort, and not the number of clients?

The same run with 10,000 and with 1,000,000 clients: every client keeps 10 kB of personal parameters on disk,
and a thousand clients report in each round. Each run is a process of its own, and the sizes take turns.
Compared are seconds per round (the median, and the mean, which has checkpoints in it), those that a core was
at work for it, and the most memory that the process held.

    python bench/scale.py
    python bench/scale.py --clients 10000 100000 --cohort 1000 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import partita as pt

HIDDEN, CLASSES, FEATURES, SAMPLES = 255, 10, 32, 20  # 10 kB: an output layer of 256 × 10 numbers


def make_data(clients: int, pool: int = 4096) -> pt.data.FederatedData:
    """Return data of which every client reads a window of a fixed random pool."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(pool + SAMPLES, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (pool + SAMPLES,), generator=generator)
    start = np.arange(clients) * 7919 % pool
    return pt.data.FederatedData.make(x, y, np.stack([start, np.full_like(start, SAMPLES)], axis=1))


def peak() -> int:
    """Return the most bytes that this process has held so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Usage(pt.callbacks.Callback):
    """Note the time, the work and the memory at the end of each round."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.work: list[float] = []
        self.memory = 0

    def round(self, event: pt.callbacks.Event) -> None:  # noqa: ARG002
        """Note all three."""
        self.times.append(time.perf_counter())
        self.work.append(time.process_time())
        self.memory = peak()


def measure(clients: int, cohort: int, rounds: int, device: str) -> dict[str, float]:
    """Return the seconds per round and of the whole run, and the peak of memory."""
    usage = Usage()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        pt.federate(
            pt.models.mlp(FEATURES, HIDDEN, CLASSES),
            make_data(clients),
            pt.fedalt(personal="output", lr=0.05),
            rounds=rounds + 1,
            cohort=cohort,
            steps=2,
            batch=10,
            executor="vmap",  # not what a measurement in the first round happens to pick
            device=device,
            store="disk",
            evaluate_every=rounds + 1,
            checkpoint_every=20,
            baselines=False,
            progress=False,
            report=False,
            callbacks=[usage],
            out=f"{folder}/run",
        )
        whole = time.perf_counter() - begin
    return {
        "clients": clients,
        "median": statistics.median(np.diff(usage.times)),
        "mean": statistics.mean(np.diff(usage.times)),
        "work": statistics.median(np.diff(usage.work)),
        "memory": usage.memory,
        "memory_at_the_end": peak(),
        "seconds": whole,
    }


def main() -> None:
    """Print a line for each run, and the ratios of the last size to the first, by medians of the repeats."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.clients[0], options.cohort, options.rounds, options.device)))
        return
    rows = []
    for clients in options.clients * options.repeats:
        rest = ["--cohort", options.cohort, "--rounds", options.rounds, "--device", options.device, "--one"]
        command = [sys.executable, __file__, "--clients", clients, *rest]
        told = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(told.splitlines()[-1]))
        shown = {k: f"{v:,.3f}" if isinstance(v, float) else f"{v:,}" for k, v in rows[-1].items()}
        print("  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
    for name in ("median", "mean", "work", "memory", "memory_at_the_end"):
        first, last = (
            statistics.median([row[name] for row in rows if row["clients"] == options.clients[i]])
            for i in (0, -1)
        )
        print(f"{name}: {first:,.4g} and {last:,.4g}, {last / first:.2f} of the first")


if __name__ == "__main__":
    main()
