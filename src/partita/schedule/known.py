"""What a server knows of its clients when it chooses some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Facts(NamedTuple):
    """What the run has seen of each client so far, as arrays over all clients: see `Known`."""

    samples: NDArray[np.int64]
    loss: NDArray[np.float64]
    seen: NDArray[np.int64]
    chosen: NDArray[np.int64]


class Answers(NamedTuple):
    """What clients answer that were asked for their loss, and how many local steps it took them."""

    loss: NDArray[np.float64]
    steps: NDArray[np.int64]


Losses = Callable[[NDArray[np.int64], int | None], NDArray[np.float64]]
"""(clients, samples) -> what these clients answer when they are asked for their loss."""

Ask = Callable[[NDArray[np.int64], int | None], Answers]
"""(clients, samples) -> their losses under the server's present model, on so many samples, or on all."""


@dataclass(frozen=True, eq=False)
class Known:
    """What the server knows when it chooses; arrays have an entry for each client of the run, by its number.

    round       server steps so far
    time        the virtual time
    candidates  who may be chosen: the numbers of the clients that are idle and available, in order
    samples     training samples
    loss        the training loss that the client last reported, a mean over its local steps (NaN: none yet)
    seen        the round in which it last reported (0: never)
    chosen      how often it was chosen before and has reported, was late or lost
    """

    round: int
    time: float
    candidates: NDArray[np.int64]
    samples: NDArray[np.int64]
    loss: NDArray[np.float64]
    seen: NDArray[np.int64]
    chosen: NDArray[np.int64]
    _ask: Losses

    def ask(
        self, clients: Sequence[int] | NDArray[np.int64], samples: int | None = None
    ) -> NDArray[np.float64]:
        """Ask clients for the loss of the present model on their training samples, or on so many of them.

        It costs what it would: each of them downloads the model and evaluates it, and the server waits for
        all answers. Who is chosen afterwards does not download it again. Who has left until then has no loss
        (NaN), and is not sent even if it is chosen. Only a synchronous server can wait.
        """
        return self._ask(np.asarray(clients, dtype=np.int64), samples)
