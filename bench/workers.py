"""What workers cost and gain: rounds by one process, by two workers and by `pool`, in turn.

    python bench/workers.py
    python bench/workers.py --workloads mnist_cnn --kinds processes --json
    python bench/workers.py --device cuda --workers 2

`overhead` is what a round takes beyond the longest work of a worker in it: cutting, sending, waiting, adding
up and the server's step. `speedup` is against one process with one thread, in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import partita as pt
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR, WORKLOADS
from partita.core.process import keep_freed_memory
from partita.engine.workers import crew as crews

KINDS = ("processes", "ray")


class Rounds(pt.callbacks.Callback):
    """Note when each round ended, and how long the busiest worker was at work until then."""

    def __init__(self, device: str) -> None:
        self.device, self.times, self.busy = device, list[float](), list[float]()

    def round(self, event: pt.callbacks.Event) -> None:  # noqa: ARG002
        """Note the time at the end of a round."""
        wait(self.device)
        self.times.append(time.perf_counter())
        self.busy.append(sum(crew.critical for crew in crews._open.values()))

    def seconds(self, warm: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each round after the first ones, and those beyond the work of workers."""
        rounds = [b - a for a, b in zip(self.times[warm:], self.times[warm + 1 :])]
        busy = [b - a for a, b in zip(self.busy[warm:], self.busy[warm + 1 :])]
        return rounds, [max(0.0, r - b) for r, b in zip(rounds, busy)]


def measure(name: str, device: str, rounds: int, threads: int, **settings: Any) -> dict[str, float]:
    """Return the median milliseconds of a round, and those of its overhead."""
    work = WORKLOADS[name].on(device)
    torch.set_num_threads(threads)
    clock, warm = Rounds(device), 2
    pt.federate(
        work.model(),
        work.data(),
        pt.fedavg(lr=LR),
        rounds=rounds + warm + 1,
        cohort=work.cohort,
        steps=work.steps,
        batch=work.batch,
        baselines=False,
        evaluate_every=10**6,
        device=device,
        callbacks=[clock],
        progress=False,
        **settings,
    )
    taken, overhead = clock.seconds(warm)
    return {"round": 1e3 * statistics.median(taken), "overhead": 1e3 * statistics.median(overhead)}


def main() -> None:
    """Print a line for each way to compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["logistic", "mnist_cnn", "leaf_cnn"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    keep_freed_memory()  # as the program `partita` and its workers do
    cores, found = torch.get_num_threads(), dict[str, dict[str, dict[str, float]]]()
    one: dict[str, Any] = {"executor": asked.executor}
    ways: dict[str, dict[str, Any]] = {"one process": {"threads": 1, **one}}
    if asked.device == "cpu":
        ways["pool"] = {"threads": cores, "executor": "pool"}
    spec = {
        "processes": pt.workers.processes(asked.workers, threads=1),
        "ray": pt.workers.ray(asked.workers, threads=1, gpus=0.5 if asked.device != "cpu" else 0),
    }
    for kind in asked.kinds:
        ways[f"{asked.workers} {kind}"] = {"threads": 1, "workers": spec[kind], **one}
    with crews.staying():
        for name in asked.workloads:
            rounds = asked.rounds or (30 if name == "logistic" else 4)
            rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(asked.repeats):  # in turn: all of them see the load of the machine
                for way, settings in ways.items():
                    rows[way].append(measure(name, asked.device, rounds, **settings))
            best = {w: {k: min(r[k] for r in of_one) for k in of_one[0]} for w, of_one in rows.items()}
            alone, pool = best["one process"]["round"], best.get("pool", {}).get("round")
            for way, row in best.items():
                row["speedup"] = alone / row["round"]
                against = f", {pool / row['round']:.2f} times pool" if pool and "workers" in ways[way] else ""
                extra = f"  overhead {row['overhead']:6.1f} ms" if "workers" in ways[way] else ""
                if not asked.json:
                    times = f"{row['round']:8.1f} ms a round  {row['speedup']:5.2f} times one process"
                    print(f"{name:10} {way:14} {times}{against}{extra}", flush=True)
            found[name] = best
    if asked.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
