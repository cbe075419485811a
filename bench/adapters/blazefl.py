"""BlazeFL: the server's and the clients' side as two objects that pass each other packages."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adapters.job import ClassesSecond, Job, samples
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR


def rounds(job: Job) -> list[float]:
    """Return the time at the end of each round, by the faster of two trainers: in turn, or one on each core.

    Its trainer with processes is left out: it starts them anew in every round.
    """
    from blazefl.contrib import fedavg

    cores = torch.get_num_threads()
    trainers = [_rounds(job, fedavg.FedAvgBaseClientTrainer(**_common(job), epochs=1, lr=LR))]
    torch.set_num_threads(1)
    threads = fedavg.FedAvgThreadPoolClientTrainer(**_common(job), epochs=1, lr=LR, num_parallels=cores)
    trainers.append(_rounds(job, threads))
    torch.set_num_threads(cores)
    return min(trainers, key=lambda times: times[-1] - times[0])


def _rounds(job: Job, clients: Any) -> list[float]:
    from blazefl.contrib import fedavg

    server = fedavg.FedAvgBaseServerHandler(
        **_common(job), global_round=job.rounds + 1, sample_ratio=job.share
    )
    times = list[float]()
    while not server.if_stop():
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        wait(job.device)
        times.append(time.perf_counter())
    return times


def _common(job: Job) -> dict[str, Any]:
    return {
        "model_selector": Models(job),
        "model_name": job.workload,
        "dataset": Partitions(job),
        "device": job.device,
        "num_clients": job.work.clients,
        "batch_size": job.work.batch,
        "seed": 0,
    }


class Models:
    """Selector of BlazeFL that makes the workload's model."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def select_model(self, model_name: str) -> nn.Module:  # noqa: ARG002
        """Return the workload's model."""
        return ClassesSecond(self._job.work.model())


class Partitions:
    """Partitioned dataset of BlazeFL: the clients' samples, as far as training asks for them."""

    def __init__(self, job: Job) -> None:
        data = job.data()
        self._parts = [TensorDataset(*samples(data, i)) for i in range(job.work.clients)]

    def get_dataloader(
        self,
        type_: str,  # noqa: ARG002
        cid: int,
        batch_size: int,
        generator: torch.Generator,
    ) -> DataLoader[Any]:
        """Return the batches of a client in a new order."""
        return DataLoader(self._parts[cid], batch_size=batch_size, shuffle=True, generator=generator)
