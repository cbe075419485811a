"""What a peer is asked to do, in words that fit on a command line."""

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
        """The work on this device."""
        return WORKLOADS[self.workload].on(self.device)

    @property
    def share(self) -> float:
        """Of the clients in a round, so that rounding down gives the cohort whatever the numbers are."""
        return (self.work.cohort + 0.5) / self.work.clients

    def data(self) -> FederatedData:
        """The samples, on the device."""
        return self.work.data().to(self.device)


Adapter = Callable[[Job], Sequence[float]]
"""When each round was over, the one that warms up included."""


class Declined(Exception):
    """The peer cannot do this work, and why."""


class ClassesSecond(nn.Module):
    """A model whose scores suit `nn.CrossEntropyLoss`: classes come second, tokens after them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        out: Tensor = self.model(x)
        return out.movedim(-1, 1)


def samples(data: FederatedData, client: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a client."""
    first, n = data.train[client].tolist()
    return data.x[first : first + n], data.y[first : first + n]
