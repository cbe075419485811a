"""Whole rounds of Partita against the textbook loop, in the same run.

The textbook loop is what anyone would write: for each client load the state, make a torch.optim.SGD, take the
steps, add to the average. Same model, data, cohort, steps and step size. Both are measured in turn, several
times; the ratio of the medians is what counts, since seconds depend on the machine and its load.

    python bench/rounds.py                       all workloads on the CPU
    python bench/rounds.py logistic --device cuda
    python bench/rounds.py --json > bench.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt

LR = 0.05


class Workload(NamedTuple):
    """A model, the shape of its samples, and the work of a round."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    steps: int
    batch: int
    rounds: int


WORKLOADS = {
    "logistic": Workload(lambda: pt.models.logistic(784, 10), (784,), 10, 1000, 50, 20, 20, 10),
    "leaf_cnn": Workload(lambda: pt.models.leaf_cnn(62), (28, 28), 62, 100, 8, 10, 32, 2),
    "mnist_cnn": Workload(lambda: pt.models.mnist_cnn(10), (28, 28), 10, 100, 8, 10, 32, 2),
    "resnet20": Workload(lambda: pt.models.resnet20(10, norm="group"), (3, 32, 32), 10, 100, 4, 5, 32, 2),
}
LARGE = {  # on a GPU
    "leaf_cnn": {"cohort": 32},
    "mnist_cnn": {"cohort": 32},
    "resnet20": {"cohort": 32, "steps": 10},
}


def make_data(work: Workload, pool: int = 4096) -> pt.data.FederatedData:
    """Every client reads a window of a fixed random pool: exactly steps × batch samples each."""
    generator = torch.Generator().manual_seed(0)
    n = work.steps * work.batch
    x = torch.randn(pool + n, *work.shape, generator=generator)
    y = torch.randint(0, work.classes, (pool + n,), generator=generator)
    start = np.arange(work.clients) * 7919 % pool
    return pt.data.FederatedData.make(x, y, np.stack([start, np.full_like(start, n)], axis=1))


def textbook(work: Workload, data: pt.data.FederatedData, device: str, rounds: int) -> list[float]:
    """Seconds per round of the loop that anyone would write."""
    model = work.model().to(device)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        total: dict[str, Tensor] = {}
        chosen = torch.randperm(work.clients, generator=generator)[: work.cohort].tolist()
        for client in chosen:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            first, n = data.train[client]
            x, y = data.x[first : first + n], data.y[first : first + n]
            order = torch.randperm(int(n), generator=generator).to(device)
            for i in range(0, int(n), work.batch):
                index = order[i : i + work.batch]
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
            for k, v in model.state_dict().items():
                total[k] = total[k] + v * int(n) if k in total else v * int(n)
        state = {k: v / (int(n) * work.cohort) for k, v in total.items()}
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


class Marks(pt.callbacks.Callback):
    """When each round was over."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: list[float] = []

    def round(self, event: pt.callbacks.Event) -> None:  # noqa: ARG002
        """Note the time."""
        _wait(self.device)
        self.times.append(time.perf_counter())


def partita(
    work: Workload, data: pt.data.FederatedData, device: str, rounds: int, executor: str
) -> list[float]:
    """Seconds per round of Partita, everything included; the first round warms up and picks an executor."""
    marks = Marks(device)
    pt.federate(
        work.model(),
        data,
        pt.fedavg(lr=LR),
        rounds=rounds + 1,
        cohort=work.cohort,
        steps=work.steps,
        batch=work.batch,
        executor=executor,
        device=device,
        baselines=False,
        progress=False,
        callbacks=[marks],
    )
    return list(np.diff(marks.times))


def compare(name: str, device: str, executor: str, repeats: int) -> dict[str, object]:
    """Both in turn; medians and their ratio."""
    work = WORKLOADS[name]
    if device != "cpu":
        work = work._replace(**LARGE.get(name, {}))
    data = make_data(work)
    there = data.to(device)
    textbook(work, there, device, 1)
    theirs: list[float] = []
    ours: list[float] = []
    for _ in range(repeats):
        theirs += textbook(work, there, device, work.rounds)
        ours += partita(work, data, device, work.rounds, executor)
    steps = work.cohort * work.steps
    slow, fast = statistics.median(theirs), statistics.median(ours)
    return {
        "workload": name,
        "device": device,
        "executor": executor,
        "textbook_steps_per_second": round(steps / slow),
        "partita_steps_per_second": round(steps / fast),
        "ratio": round(slow / fast, 2),
        "threads": torch.get_num_threads(),
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Print one line per workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--executor", default="auto", choices=("auto", "loop", "pool", "vmap", "graph", "compiled")
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(f"{'workload':12} {'textbook':>12} {'partita':>12} {'ratio':>7}   (client steps per second)")
    for name in options.workloads:
        row = compare(name, options.device, options.executor, options.repeats)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            rates = f"{row['textbook_steps_per_second']:>12,} {row['partita_steps_per_second']:>12,}"
            print(f"{name:12} {rates} {row['ratio']:>6}×", flush=True)


if __name__ == "__main__":
    main()
