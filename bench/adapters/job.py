"""The job that a peer is given, in words that fit on a command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from partita.cli.bench.workloads import WORKLOADS, Workload
from partita.data import FederatedData


class Job(NamedTuple):
    """Whole rounds of a workload, one more than `rounds`: the first one warms up."""

    workload: str
    device: str
    precision: str
    rounds: int

    @property
    def work(self) -> Workload:
        """The workload for this device."""
        return WORKLOADS[self.workload].on(self.device)

    @property
    def share(self) -> float:
        """The share of clients in a round, such that rounding down gives the cohort."""
        return (self.work.cohort + 0.5) / self.work.clients

    def data(self) -> FederatedData:
        """Return the samples, on the device."""
        return self.work.data().to(self.device)


Adapter = Callable[[Job], Sequence[float]]
"""Returns the time at the end of each round, the first one included."""


class Declined(Exception):
    """The peer cannot do this work; the message says why."""


class ClassesSecond(nn.Module):
    """A model whose scores suit `nn.CrossEntropyLoss`: classes come second, tokens after them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        out: Tensor = self.model(x)
        return out.movedim(-1, 1)


def samples(data: FederatedData, client: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a client."""
    first, n = data.train[client].tolist()
    return data.x[first : first + n], data.y[first : first + n]
