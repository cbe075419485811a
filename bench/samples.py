"""How much slower is a run whose samples do not fit the memory budget?

Images of the size of CIFAR's lie in a file. The same run trains on them with all in the memory of the device,
and with rows that are read from the file and sent ahead of the steps, in turn, so that both see the load of
the machine. Compared are the medians of rounds; where a GPU computes, the file is read into pinned memory.

    python bench/samples.py
    python bench/samples.py cnn --device cuda --executors vmap graph --images 400000 --cohort 100
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import partita as pt
from partita.engine.callbacks import Callback, Event

MODELS = {"cnn": pt.models.cifar_cnn, "linear": lambda: pt.models.logistic(3072, 10)}
PLACES = ("device", "host")


class Rounds(Callback):
    """The seconds of each round."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self._before = device, list[float](), time.perf_counter()

    def round(self, event: Event) -> None:  # noqa: ARG002
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now


def written(folder: Path, images: int) -> np.ndarray:
    """Return random images that lie in a file, mapped into memory."""
    draw = np.random.default_rng(0)
    path = folder / "images.npy"
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(images, 3, 32, 32))
    for start in range(0, images, 4096):
        part = file[start : start + 4096]
        part[:] = draw.integers(0, 256, part.shape, dtype=np.uint8)
    del file
    mapped: np.ndarray = np.load(path, mmap_mode="r")
    return mapped


def seconds(
    model: nn.Module, data: pt.FederatedData, executor: str, place: str, options: argparse.Namespace
) -> list[float]:
    """Return the seconds of the rounds of a run."""
    times = Rounds(options.device)
    pt.federate(
        model,
        data,
        pt.fedavg(lr=0.01),
        rounds=options.rounds,
        cohort=options.cohort,
        steps=options.steps,
        batch=options.batch,
        executor=executor,
        device=options.device,
        data_on=place,
        evaluate_every=options.rounds,
        baselines=False,
        progress=False,
        callbacks=[times],
    )
    return times.seconds[2:-1]  # the first ones trace and record, the last is evaluated


def main() -> None:
    """A line for each model and executor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--executors", nargs="+", default=["loop", "vmap"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        x = written(Path(folder), options.images)
        owner = np.arange(options.images) % options.clients
        data = pt.data.from_arrays(x, np.arange(options.images) % 10, owner, test=0.01, validation=0)
        for name in options.models:
            torch.manual_seed(0)
            model = MODELS[name]()
            for executor in options.executors:
                rounds: dict[str, list[float]] = {place: [] for place in PLACES}
                for _ in range(options.turns):
                    for place in PLACES:
                        rounds[place] += seconds(model, data, executor, place, options)
                here, there = (statistics.median(rounds[place]) for place in PLACES)
                print(
                    f"{name}, {executor}: a round {here * 1e3:.1f} ms with all samples on the device, "
                    f"{there * 1e3:.1f} ms from the file: {here / there:.2f} times as fast"
                )


if __name__ == "__main__":
    main()
