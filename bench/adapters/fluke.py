"""fluke: one process, clients that keep their models and train in turn."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from adapters.job import ClassesSecond, Job, samples
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR


def rounds(job: Job) -> list[float]:
    """Return the time at the end of each round."""
    from fluke import FlukeENV
    from fluke.algorithms import CentralizedFL
    from fluke.server import Server

    settings = FlukeENV()
    settings.set_seed(0)
    settings.set_device(job.device)
    settings.set_inmemory(True)
    settings.set_eval_cfg(server=False)
    clients, observer = _clients(job), Observer(job.device)
    server = Server(ClassesSecond(job.work.model()), None, clients, weighted=True)
    federation = CentralizedFL(len(clients), None, {}, clients, server)
    federation.attach(observer)
    federation.run(job.rounds + 1, job.share)
    return observer.times


class Observer:
    """Observer of fluke that notes when each round ended."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times: list[float] = []

    def end_round(self, round: int) -> None:  # noqa: ARG002
        """Note the time at the end of a round."""
        wait(self._device)
        self.times.append(time.perf_counter())


def _clients(job: Job) -> list[Any]:
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader

    work, data = job.work, job.data()
    sgd = OptimizerConfigurator({"name": "SGD", "lr": LR})
    loaders = [
        FastDataLoader(*samples(data, i), num_labels=work.classes, batch_size=work.batch, shuffle=True)
        for i in range(work.clients)
    ]
    return [
        Client(i, loader, None, sgd, nn.CrossEntropyLoss(), local_epochs=1)
        for i, loader in enumerate(loaders)
    ]
