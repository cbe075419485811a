"""Every method with every treatment of BatchNorm on all kinds of devices runs, or is refused, with why."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from algorithms.test_every_algorithm import RELATED
from partita import capacity
from partita.algorithms import METHODS
from partita.cli import catalogue
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.models.blocks import Blocks, layers, scalable, seeded
from support import each

pytestmark = pytest.mark.filterwarnings("ignore:capacity. narrow and wide models share")
TREATMENTS = [
    "personal",  # where a client keeps layers in shapes of its own
    pytest.param("global", marks=pytest.mark.slow),
    pytest.param("static", marks=pytest.mark.slow),
]
DEVICES = {
    "depth": capacity.depth({"strong": 0, "weak": 1}),
    "width": capacity.width({"strong": 1.0, "weak": 0.5}),
    "fjord": capacity.fjord({"strong": 1.0, "weak": 0.5}),
}


@functools.cache
def data() -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 4)).astype("float32")
    return pt.data.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(32) % 4, test=0.25, seed=0)


def norms(width: float = 1.0) -> Blocks:
    """Two blocks with BatchNorm and an output; half as wide with width 0.5."""

    def make(width: float) -> Blocks:
        a, b = int(8 * width), int(6 * width)
        with seeded(0):
            return Blocks(
                {
                    "stem": layers(linear=nn.Linear(4, a), norm=nn.BatchNorm1d(a), relu=nn.ReLU()),
                    "body": layers(linear=nn.Linear(a, b), norm=nn.BatchNorm1d(b), relu=nn.ReLU()),
                    "output": layers(linear=nn.Linear(b, 2)),
                }
            )

    return scalable(make(width), width, make)


def method(name: str) -> Algorithm:
    """As `partita show` writes it."""
    if name == "pipeline":
        return pt.pipeline(
            pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.ditto(lr=0.1, lam=0.1), rounds=1)
        )
    written = catalogue.call(name, METHODS[name])
    if name == "fedbuff":  # the usual buffer is for more clients
        written = "fedbuff(lr=0.1, server_lr=0.5, buffer=2)"
    assert written is not None
    return eval(f"pt.{written}", {"pt": pt})  # type: ignore[no-any-return]


def federate(name: str, model: nn.Module, **options: Any) -> pt.Run:
    work = {"steps": 1, "batch": 4, "baselines": False, "executor": "loop", "evaluate_every": 100}
    rounds = {} if name == "pipeline" else {"rounds": 1}
    return pt.federate(model, data(), method(name), **{**work, **rounds, **options})


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("norm", TREATMENTS)
@each("name", METHODS, slow=lambda name: name in RELATED)
def test_it_runs_or_is_refused(name: str, norm: str, devices: str) -> None:
    """What is personal must be there on all devices, and prototypes have one size; all else runs."""
    if name == "fedproto":
        with pytest.raises(ValueError, match=r"^capacity=.*the whole model for fedproto: the prototypes"):
            federate(name, norms(), norm=norm, capacity=DEVICES[devices])
        return
    if norm == "personal" and devices == "depth" and name != "local":
        with pytest.raises(ValueError, match=r"^norm='personal': .*a part that all devices train"):
            federate(name, norms(), norm=norm, capacity=DEVICES[devices])
        return
    run = federate(name, norms(), norm=norm, capacity=DEVICES[devices])
    assert all(bool(torch.isfinite(v).all()) for v in run.shared.values())
    for i in range(4):
        assert run.client(i).model()(data().x[:3]).shape == (3, 2)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@each("name", ["fedavg", "ditto", "pfedme", "apfl", "l2gd"])
def test_narrow_devices_alone_are_a_narrow_federation(name: str, executor: str) -> None:
    """With norm='personal': models, own layers and memories are those of a run of the narrow model."""
    whole, narrow = norms(), norms(0.5)
    with torch.no_grad():
        for key, value in narrow.state_dict().items():
            value.copy_(whole.state_dict()[key][tuple(slice(0, n) for n in value.shape)])
    options = {"norm": "personal", "executor": executor, "rounds": 3}
    weak = capacity.width({"strong": 1.0, "weak": 0.5}, ["weak"] * 4)
    with pytest.warns(UserWarning, match="no client holds all of"):
        found = federate(name, whole, capacity=weak, **options)
    expected = federate(name, narrow, **options)
    for i in range(4):
        ours, theirs = found.client(i), expected.client(i)
        for kind in ("personal", "memory"):
            for key, value in getattr(theirs, kind).items():
                held = getattr(ours, kind)[key][tuple(slice(0, n) for n in value.shape)]
                torch.testing.assert_close(held, value, atol=1e-6, rtol=1e-5)
        model = ours.model().state_dict()
        for key, value in theirs.model().state_dict().items():
            torch.testing.assert_close(model[key], value, atol=1e-6, rtol=1e-5)
