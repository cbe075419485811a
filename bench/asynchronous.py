"""Client steps per second of an asynchronous run against a synchronous one, in the same run.

Logistic regression, 1000 clients, 100 of them in flight at any time. Synchronously, 100 clients report at
once and train as one batch. Asynchronously, the server acts on every single arrival; clients in flight still
train in batches, ahead of their arrival. The delays are those of PersA-FL: an upload takes 4 to 6 times as
long as a download.

    python bench/asynchronous.py
    python bench/asynchronous.py --device cuda --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import partita as pt
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR, WORKLOADS

WORK = WORKLOADS["logistic"]._replace(cohort=100)
S = pt.schedule
DELAYS = {
    "equal": S.delays(download=1.0, upload=5.0),
    "uniform": S.delays(download=S.uniform(0.5, 1.5), upload=S.scaled(S.uniform(0.5, 1.5), S.uniform(4, 6))),
    "exponential": S.delays(
        download=S.exponential(1.0), upload=S.scaled(S.exponential(1.0), S.uniform(4, 6))
    ),
}


class Stopwatch(pt.callbacks.Callback):
    """Note the time after the warm-up and at the end of a run."""

    def __init__(self, device: str, warm: int) -> None:
        self.device, self.warm = device, warm
        self.began = self.ended = 0.0

    def round(self, event: pt.callbacks.Event) -> None:
        """Note the time, where it counts."""
        if event.round == self.warm:
            wait(self.device)
            self.began = time.perf_counter()
        elif event.round == event.rounds:
            wait(self.device)
            self.ended = time.perf_counter()


def speed(schedule: S.Schedule, uploads: int, device: str, executor: str, turns: int) -> float:
    """Return client steps per second, after a warm-up of a hundred uploads."""
    steps = turns // uploads
    stopwatch = Stopwatch(device, warm=100 // uploads)
    pt.federate(
        WORK.model(),
        WORK.data(),
        pt.fedavg(lr=LR),
        rounds=100 // uploads + steps,
        cohort=WORK.cohort,
        steps=WORK.steps,
        batch=WORK.batch,
        schedule=schedule,
        executor=executor,
        device=device,
        baselines=False,
        progress=False,
        evaluate_every=10**9,
        callbacks=[stopwatch],
    )
    return steps * uploads * WORK.steps / (stopwatch.ended - stopwatch.began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--turns", type=int, default=2000, help="client turns of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        common = (args.device, args.executor, args.turns)
        speeds.setdefault("synchronous", []).append(speed(S.synchronous(), WORK.cohort, *common))
        for name, delays in DELAYS.items():
            schedule = S.asynchronous(concurrency=100, delays=delays)
            speeds.setdefault(f"asynchronous, {name} delays", []).append(speed(schedule, 1, *common))
        schedule = S.asynchronous(concurrency=100, buffer=10, delays=DELAYS["exponential"])
        speeds.setdefault("asynchronous, exponential delays, buffer 10", []).append(
            speed(schedule, 10, *common)
        )
    median = {k: statistics.median(v) for k, v in speeds.items()}
    ratio = {k: v / median["synchronous"] for k, v in median.items()}
    if args.json:
        print(json.dumps({"client_steps_per_second": median, "ratio": ratio}))
        return
    for name, value in median.items():
        print(f"{name:48} {value:10,.0f} client steps/s   {ratio[name]:.2f}x of synchronous")


if __name__ == "__main__":
    main()
