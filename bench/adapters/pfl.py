"""Apple's pfl-research: one process, one model that is lent to the users of a cohort in turn."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters.job import Job, samples
from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR


def rounds(job: Job) -> list[float]:
    """Return the time at the end of each round."""
    os.environ["PFL_PYTORCH_DEVICE"] = job.device  # read when the framework is chosen
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.hyperparam import NNTrainHyperParams

    work, callback = job.work, RoundCallback(job.device)
    users = _users(job)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds + 1,
            evaluation_frequency=job.rounds + 2,  # so only before the first round, which does not count
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=_model(job),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch
        ),
        callbacks=[callback],
    )
    return callback.times


class RoundCallback:
    """Callback of pfl that notes when each round ended."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times: list[float] = []

    def on_train_begin(self, *, model: Any) -> Any:  # noqa: ARG002
        """Do nothing."""
        from pfl.metrics import Metrics

        return Metrics()

    def after_central_iteration(
        self,
        aggregate_metrics: Any,  # noqa: ARG002
        model: Any,  # noqa: ARG002
        *,
        central_iteration: int,  # noqa: ARG002
    ) -> tuple[bool, Any]:
        """Note the time, and go on."""
        from pfl.metrics import Metrics

        wait(self._device)
        self.times.append(time.perf_counter())
        return False, Metrics()

    def on_train_end(self, *, model: Any) -> None:
        """Do nothing."""


def _users(job: Job) -> Any:
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler

    data = job.data()
    ids = list(range(job.work.clients))
    users = {i: Dataset(samples(data, i), user_id=str(i)) for i in ids}
    return FederatedDataset(users.__getitem__, get_user_sampler("random", ids))


def _model(job: Job) -> Any:
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    net: Any = job.work.model()
    net.loss = lambda x, y: _loss(net, x, y)
    net.metrics = lambda x, y: {"loss": Weighted(_loss(net, x, y).item() * len(x), len(x))}
    return PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))


def _loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())
