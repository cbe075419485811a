"""What an executor promises: a program, written for one client, run for many."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.plan import BoundProblem


class Executor(Protocol):
    """Runs a local rule for the clients of a group and returns stacks in their order."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]: ...

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Prepare what these clients will do next, while a device is at work."""
        ...

    def release(self, kept: Any = ()) -> None:
        """Use the memory of earlier results again: of these, only what is in `kept` is still read."""
        ...


class Runner(Executor, Protocol):
    """An executor whose data may be exchanged."""

    @property
    def bound(self) -> BoundProblem: ...

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Runner:
        """Return this executor bound to `data`; `counted` have the clients' labels, where `data` do not."""
        ...
