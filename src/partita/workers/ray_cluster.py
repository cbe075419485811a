"""Workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from partita.core.options import Option, checked


@checked()
@dataclass(frozen=True)
class RayCluster:
    """Ray actors, on this machine or on all machines of a cluster (`pip install 'partita[ray]'`).

    Without an address Ray starts on this machine, for this program alone: it listens on loopback, asks for a
    token that others cannot read, and shows no dashboard. Use it where one machine ends.
    """

    count: Annotated[
        int | None,
        Option("the number of workers (None: as many as the cluster has room for)", low=1, high=4096),
    ] = None
    address: Annotated[
        str | None,
        Option(
            "the cluster to join: 'auto', or host:port of its head (None: RAY_ADDRESS, or a new one here)"
        ),
    ] = None
    gpus: Annotated[
        float, Option("GPUs for each worker; 0.5 lets two share one (with device='cuda': 1)", low=0)
    ] = 0
    threads: Annotated[int, Option("cores for each worker, and threads that it computes with", low=1)] = 1
    dashboard: Annotated[
        bool, Option("whether a cluster that starts here also starts Ray's dashboard, on loopback")
    ] = False

    kind: ClassVar[str] = "ray"


ray = RayCluster
