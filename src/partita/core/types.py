"""The nouns of Partita.

Everything that travels between clients and server is a dictionary of named tensors. Inside a local rule a
noun describes ONE client; the machinery stacks many of them along a new first axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

Tensors = dict[str, Tensor]
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model takes: a tensor, or several with a row of each sample, in order or by argument names."""


class Partition(NamedTuple):
    """Which names are communicated and which stay with the client. They may overlap."""

    shared: tuple[str, ...]
    personal: tuple[str, ...]


class Download(NamedTuple):
    """What a client receives.

    `key` seeds whatever is random when a client begins: a function of (seed, round, client). `class_counts`
    are the client's training samples of each class, where a loss asks for them. The machinery sets both.
    """

    shared: Tensors
    extra: Tensors
    version: int
    key: Tensor | None = None
    class_counts: Tensor | None = None


class ClientState(NamedTuple):
    """What a client keeps between rounds; empty for stateless clients.

    An entry of `memory` of a tensor's shape, under its name or that name after words and dots
    (`shared.fc.weight`), is about that tensor: a device that holds a part of the one holds that part of both.
    """

    personal: Tensors
    memory: Tensors


class Upload(NamedTuple):
    """What a client sends: delta = (what it received) − (what it computed), shared names only.

    The machinery sets `weight` from the client's sample count and `client` from its number; a rule leaves
    both alone. `sums` are changes, by the names of shared tensors, whose sum over clients the server divides
    by the number of all (SCAFFOLD's c_i): where not all hold a tensor, its sum is scaled so that it is
    divided by those who do. `extra` is whatever else the method sends, in the same shapes from every client.
    When the server sees what clients sent, `metrics` and `client` are on the host, whatever device computes
    (`partita.core.device.put` takes numbers there).
    """

    delta: Tensors
    weight: Tensor | None = None
    extra: Tensors = {}  # noqa: RUF012
    sums: Tensors = {}  # noqa: RUF012
    metrics: Tensors = {}  # noqa: RUF012
    client: Tensor | None = None

    @property
    def payload(self) -> tuple[Tensors, Tensors, Tensors]:
        """What takes bytes to send, and is screened: delta, extra and sums."""
        return self.delta, self.extra, self.sums


class Message(NamedTuple):
    """What a client uploads, on its way: its tensors by path, such as 'delta.fc.weight' or 'sums.fc.weight'.

    `numbers` are those that transforms may change: directions, of which the server takes means or sums.
    `rest` travels as it is: counters, BatchNorm statistics, what a method sends beside ('extra.NAME'), and
    what transforms have packed, such as the indices and the levels of 'delta.fc.weight'.
    """

    numbers: Tensors
    rest: Tensors


class ServerState(NamedTuple):
    """What the server knows. `version` counts its steps."""

    shared: Tensors
    opt: Tensors
    extra: Tensors
    version: int


class Batch(NamedTuple):
    """One minibatch of one client.

    `mask` marks the real samples where a short batch was padded (None: all are real). `key` seeds whatever
    is random in the forward pass, so that dropout depends on (seed, round, client, step) alone. `piece` is
    how many samples pass through the model at a time, where that is not the whole batch. `given` is what the
    loss asks for: tensors and other models, by name (see `partita.core.asks`).
    """

    x: Inputs
    y: Tensor
    mask: Tensor | None
    key: Tensor
    piece: int | None = None
    given: Mapping[str, Any] = {}


class Scores(NamedTuple):
    """Σ_i w_i m_i and Σ_i w_i over the samples of a batch, for the metric and for the loss.

    Every sample counts once, w_i = 1, except in a loss that weights its classes or ignores some labels. Where
    the metric is no mean over samples, its sums are those of the loss, and `rows` are what metrics need: for
    each, by its name, a row of every sample.
    """

    metric: Tensor
    metric_weight: Tensor
    loss: Tensor
    loss_weight: Tensor
    rows: Tensors = {}  # noqa: RUF012


class Layout(NamedTuple):
    """Where the features of a model are, and what is behind them.

    module   the submodule
    enters   whether features are what it takes; else they are what it puts out
    shape    of the features of a sample
    classes  K, for targets that are classes (0: they are not)
    head     the names of W and b where the last layer is W h + b of the features h; () where it is not
    """

    module: str
    enters: bool
    shape: tuple[int, ...]
    classes: int
    head: tuple[str, ...] = ()


class Group(NamedTuple):
    """Clients that run the same program on the same shapes.

    `positions` are their places in the cohort. `stacked` says that the download has one row per client
    (clients that hold different versions); otherwise all of them read the same one. `event` is what their
    draws depend on (None: the round). `statistics` are those of BatchNorm, by class of devices, where the
    models of narrow devices have their own (norm="static"): evaluations look at them. `progress` says how
    much of its work each client does, from 0 (one pass, or one step) to 1 (all; also where it is empty).
    """

    positions: tuple[int, ...]
    download: Download
    stacked: bool = False
    event: int | None = None
    statistics: Mapping[int, Tensors] = {}
    progress: tuple[float, ...] = ()


class Cohort(NamedTuple):
    """Who reports now, and what each of them had downloaded.

    staleness  server steps since each of them downloaded
    time       of the virtual clock, now
    delays     virtual time that each of them took, from its request to the arrival of its upload
    late       who was too late, so that its upload is dropped
    lost       whose upload never arrives
    activity   virtual time that clients were at work since the last cohort, all of them together
    bytes_down sent to clients since then, also to those who will never report
    quorum     usable uploads without which the round is abandoned: the server takes no step
    asked      how many clients were asked for their loss before some of them were chosen
    """

    clients: tuple[int, ...]
    groups: tuple[Group, ...]
    staleness: tuple[int, ...]
    time: float
    delays: tuple[float, ...] = ()
    late: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    activity: float = 0.0
    bytes_down: int = 0
    quorum: int = 1
    asked: int = 0


@dataclass(frozen=True)
class Work:
    """How much a client computes in one phase.

    Exactly one of `steps` (a number, or one per client) and `epochs`; `batch=None` is the full batch.
    `split` is the part of the client's data, `shuffle` whether each pass draws a new order. `piece` is how
    many samples of a batch pass through the model at a time (None: all of them).
    """

    steps: int | tuple[int, ...] | None = None
    epochs: int | None = None
    batch: int | None = None
    split: str = "train"
    shuffle: bool = True
    piece: int | None = None


PASS_BATCH = 256
"""Samples of a batch that passes through a model without a gradient, unless memory is short."""


class RoundContext(NamedTuple):
    """Where in a run something is executed: all that draws and rates depend on, but for the client.

    Clients that received the model at different times have a row each in `round` and `stage_round`, and those
    of a cohort with stragglers one in `progress` (see `Group`; None: all do all of their work). An evaluation
    takes its samples in batches of `pass_batch`. Clients of several runs (`partita.engine.lockstep`) have a
    row each in `seed`, too, and in `run` and `number`: which run they are of, and which client of it.
    """

    seed: int | np.ndarray
    round: int | Tensor
    stage: int
    stage_round: int | Tensor
    stage_rounds: int
    work: Work
    progress: Tensor | None = None
    pass_batch: int = PASS_BATCH
    run: np.ndarray | None = None
    number: np.ndarray | None = None

    @property
    def own_seed(self) -> int:
        """The seed of the run; refused where clients are of several."""
        if not isinstance(self.seed, int):
            raise LookupError("the rule draws by the seed of the run, and each run has another")
        return self.seed

    def of(self, rows: Any) -> RoundContext:
        """The moment of some of the clients."""
        context = self if self.progress is None else self._replace(progress=self.progress[rows])
        if self.run is not None and self.number is not None and not isinstance(self.seed, int):
            context = context._replace(seed=self.seed[rows], run=self.run[rows], number=self.number[rows])
        if isinstance(self.round, int):
            return context
        assert isinstance(self.stage_round, Tensor)
        return context._replace(round=self.round[rows], stage_round=self.stage_round[rows])
