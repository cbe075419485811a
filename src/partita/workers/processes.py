"""Processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from partita.core.options import Option, checked


@checked()
@dataclass(frozen=True)
class Processes:
    """So many processes on this machine, spawned for a run; with `device="cuda"`, one GPU for each.

    Use them for several GPUs, or for the cores of one machine.
    """

    count: Annotated[int, Option("the number of workers", low=1, high=4096, example=4)]
    threads: Annotated[
        int | None,
        Option(
            "threads that each computes with (None: the threads of this process, divided among them)", low=1
        ),
    ] = None

    kind: ClassVar[str] = "processes"


processes = Processes
