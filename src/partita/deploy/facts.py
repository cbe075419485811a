"""What a deployment of an experiment will do: what is sent, what stays, and how much of both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partita.core import tree
from partita.core.types import Tensors
from partita.data.population import Numbered, Population
from partita.deploy.agreed import digest_of, parts_of, setup_of, standing_for
from partita.deploy.uploads import SLACK, most_bytes
from partita.deploy.wire import within
from partita.engine.elsewhere import Nowhere
from partita.engine.execute import Task
from partita.engine.setup import Setup
from partita.engine.stage import Stage, bind
from partita.recipes.experiment import Experiment


class StageFacts(NamedTuple):
    """What a stage of the method sends and keeps: names and shapes, by the names of messages.

    sent      what a client sends after a turn: changes of parameters ('delta/fc.weight'), what the method
              sends beside them ('extra/...', 'sums/...'), and numbers about the turn ('metrics/...')
    received  what it is sent before: parameters ('shared/...'), and what the method needs beside them
    kept      what never leaves it: its personal parameters and its memory
    up, down  bytes that a client sends and receives in a turn; the most of all classes of devices
    """

    method: str
    sent: dict[str, list[int]]
    received: dict[str, list[int]]
    kept: dict[str, list[int]]
    up: int
    down: int
    state: int


class Facts(NamedTuple):
    """What follows from an experiment, whoever takes part.

    digest   of all that server and clients must have in common
    reply    bytes of the largest reply that a server has to take
    request  bytes of the largest request that a client has to take
    """

    digest: str
    parts: dict[str, str]
    stages: tuple[StageFacts, ...]
    reply: int
    request: int


def facts_of(experiment: Experiment, clients: int) -> Facts:
    """Return what a deployment among so many clients will do; refuse what cannot be deployed."""
    rows = max(1, int(experiment.data.sizes("train").max()))
    population = Population.make(np.full(clients, rows), names=Numbered(clients))
    data = standing_for(experiment.data, population)
    setup = setup_of(experiment, data, executor=_nowhere, device="cpu")
    bound = [bind(setup, i, setup.initial, {}, lambda text: None) for i in range(len(setup.plans))]  # noqa: ARG005
    parts, stages = parts_of(setup), tuple([_stage(setup, stage) for stage in bound])
    reply = max(most_bytes(stage) for stage in bound)
    request = 2 * tree.nbytes(setup.initial) + 2 * max(stage.down for stage in stages) + 16 * SLACK
    return Facts(digest_of(parts), parts, stages, reply + SLACK, request)


def _nowhere(task: Task) -> Nowhere:
    """Make an executor that refuses to compute."""
    return Nowhere(task.loop.bound)


def _stage(setup: Setup, stage: Stage) -> StageFacts:
    devices, channel = setup.devices, stage.channel
    server = stage.server_rule.init(tree.pick(stage.initial, stage.partition.shared))
    kinds = sorted(set(devices.class_of.tolist()))
    state = stage.new_client if stage.keeps_state else type(stage.new_client)({}, {})
    upload = stage.upload_like
    return StageFacts(
        stage.algorithm.name,
        _parts(delta=upload.delta, extra=upload.extra, sums=upload.sums, metrics=upload.metrics),
        _parts(shared=server.shared, extra=server.extra),
        {**_shapes(stage.new_client.personal), **_shapes(stage.new_client.memory, "memory of ")},
        max(channel.bytes_up(devices, kind) for kind in kinds),
        max(channel.bytes_down(devices, kind, server) for kind in kinds),
        tree.nbytes(state),
    )


def _parts(**parts: Tensors) -> dict[str, list[int]]:
    """Return the shapes of tensors as messages name them."""
    return {name: shape for part, own in parts.items() for name, shape in _shapes(within(part, own)).items()}


def _shapes(tensors: Tensors, prefix: str = "") -> dict[str, list[int]]:
    return {prefix + name: list(value.shape) for name, value in tensors.items()}
