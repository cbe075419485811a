"""Small data and models for devices of different capacity, and runs whose uploads can be looked at."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core import tree
from partita.core.parts import Algorithm
from partita.core.types import ClientState, Cohort, RoundContext, Upload, Work
from partita.data import FederatedData
from partita.engine import loop
from partita.engine.execute.plan import draw
from partita.engine.stage import Stage
from partita.engine.state import State
from partita.models.blocks import Blocks, Image, layers, scalable, seeded
from partita.models.resnet import SpatialMean

Tensors = dict[str, Tensor]
SIZES = (30, 7, 90, 23, 65, 12)  # more than pass at a time, and less than a batch
KINDS = ("strong", "weak", "weak", "strong", "weak", "weak")


# ---- data and models


@functools.cache
def digits(sizes: tuple[int, ...] = SIZES, test: int = 5) -> FederatedData:
    """Real digits of 8 × 8: how many training samples each client has, and test samples."""
    source = pt.data.digits(clients=1)
    ends = np.cumsum(np.add(sizes, test))
    train = [(int(b) - test - n, n) for b, n in zip(ends, sizes)]
    return FederatedData.make(source.x, source.y, train, [(int(b) - test, test) for b in ends])


def in_double(data: FederatedData) -> FederatedData:
    """The same samples; token ids stay whole."""
    return replace(data, x=data.x.double() if data.x.is_floating_point() else data.x)


def mlp() -> Blocks:
    return pt.models.mlp(64, 32, 16, 10)


def convs() -> Blocks:
    """Two convolutions with BatchNorm, in three blocks. Smooth, so that roundings stay small."""

    def make(width: float) -> Blocks:
        a, b = (max(1, int(width * c)) for c in (8, 12))
        with seeded(0):
            return Blocks(
                {
                    "stem": layers(
                        image=Image(1),
                        conv=nn.Conv2d(1, a, 3, padding=1, bias=False),
                        norm=nn.BatchNorm2d(a),
                        silu=nn.SiLU(),
                    ),
                    "body": layers(
                        conv=nn.Conv2d(a, b, 3, 2, padding=1), norm=nn.BatchNorm2d(b), silu=nn.SiLU()
                    ),
                    "output": layers(pool=SpatialMean(), linear=nn.Linear(b, 10)),
                }
            )

    return seen(scalable(make(1.0), 1.0, make))


def resnet() -> Blocks:
    return seen(pt.models.resnet20(10, width=0.25, channels=1))


def seen(model: Blocks) -> Blocks:
    """With BatchNorm statistics that are not those of the start: what ignores them, or tracks them, shows."""
    g = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.2, generator=g)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5, generator=g)
    return model


# ---- runs


class Round(NamedTuple):
    """What the server had, who trained now, what each had received and when, and what it made of it."""

    before: Tensors
    clients: tuple[int, ...]
    received: dict[int, tuple[Tensors, int]]
    uploads: Upload
    states: ClientState

    def upload(self, client: int) -> Tensors:
        delta: Tensors = tree.row(self.uploads.delta, self.clients.index(client))
        return delta


def federate(model: nn.Module, data: FederatedData, method: Algorithm, **options: Any) -> pt.Run:
    """One round of two steps, unless told otherwise."""
    given = {"rounds": 1, "steps": 2, "batch": 8, "executor": "loop", "baselines": False, **options}
    return pt.federate(model, data, method, **given)


def rounds(
    model: nn.Module, data: FederatedData, method: Algorithm, **options: Any
) -> tuple[list[Round], pt.Run]:
    """The same, with what every client sent in each round."""
    found: list[Round] = []
    execute = loop.execute

    def spy(stage: Stage, state: State, cohort: Cohort) -> tuple[Upload, ClientState]:
        before = {k: v.clone() for k, v in {**state.initial, **state.server.shared}.items()}
        version = state.server.version
        received = {
            cohort.clients[i]: ({**before, **g.download.shared}, version if g.event is None else g.event)
            for g in cohort.groups
            for i in g.positions
        }
        done = execute(stage, state, cohort)
        found.append(Round(before, cohort.clients, received, *tree.map_tensors(torch.clone, done)))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "execute", spy)
        run = federate(model, data, method, **options)
    return found, run


def batches(data: FederatedData, client: int, round: int = 0, **work: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What a client sees in the steps of its first phase, under seed 0."""
    now = Work(**work)
    plan = draw(data, np.array([client]), now, 0, RoundContext(0, round, 0, round, 1, now))
    for rows, size in zip(plan.rows[0], plan.size[0]):
        yield data.gather(rows[: int(size)])


def everything(run: pt.Run) -> Tensors:
    """All tensors of a finished run."""
    found = dict(run.shared)
    for i in range(len(run.clients)):
        client = run.client(i)
        found |= {f"personal {i} {k}": v for k, v in client.personal.items()}
        found |= {f"memory {i} {k}": v for k, v in client.memory.items()}
    return found


def of_blocks(tensors: Tensors, *blocks: str) -> Tensors:
    """Those of some blocks."""
    return {k: v for k, v in tensors.items() if k.split(".")[0] in blocks}


def assert_same(a: Tensors, b: Tensors) -> None:
    """To the bit."""
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


def assert_close(a: Tensors, b: Tensors, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], atol=atol, rtol=rtol, msg=lambda text, k=k: f"{k}: {text}")
