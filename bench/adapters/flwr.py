"""Flower's simulation: messages to clients that train in worker processes of Ray, one for each core."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from adapters.job import Job, samples
from partita.cli.bench.workloads import LR
from partita.core.device import arithmetic
from partita.data import FederatedData


def rounds(job: Job) -> list[float]:
    """Return the time at the end of each round."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # report nothing to anybody
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    times, replies = list[float](), list[int]()
    clients, server = ClientApp(), ServerApp()
    clients.train()(lambda message, context: _train(job, message, context))
    server.main()(lambda grid, _: _serve(job, grid, times, replies))
    resources = {"num_cpus": 1, "num_gpus": 0.0 if job.device == "cpu" else 1 / (os.cpu_count() or 1)}
    run_simulation(server, clients, job.work.clients, backend_config={"client_resources": resources})
    if replies != [job.work.cohort] * (job.rounds + 1):  # Flower goes on without clients that fail
        raise RuntimeError(f"only {min(replies, default=0)} of {job.work.cohort} clients replied")
    return times[1:]  # the first one is before the first round


def _serve(job: Job, grid: Any, times: list[float], replies: list[int]) -> None:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp.strategy import FedAvg

    def count(contents: list[Any], _: str) -> Any:
        replies.append(len(contents))
        return MetricRecord()

    strategy = FedAvg(
        fraction_train=job.share,
        min_train_nodes=job.work.cohort,  # a share of those that have arrived may be less at first
        fraction_evaluate=0.0,
        min_available_nodes=job.work.clients,
        train_metrics_aggr_fn=count,
    )
    strategy.start(
        grid,
        ArrayRecord(job.work.model().state_dict()),
        num_rounds=job.rounds + 1,
        evaluate_fn=lambda *_: times.append(time.perf_counter()),
    )


@cache
def _model_and_data(job: Job) -> tuple[nn.Module, FederatedData]:
    """Make once per worker process the model that all its clients use, and the samples."""
    return job.work.model().to(job.device), job.data()


def _train(job: Job, message: Any, context: Any) -> Any:
    """Train one client for a round, as in Flower's own examples."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    model, data = _model_and_data(job)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(data, context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with arithmetic(job.precision):
        order = torch.randperm(len(x)).to(job.device)
        for i in range(0, len(x), job.work.batch):
            index = order[i : i + job.work.batch]
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]).flatten(0, -2), y[index].flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
