"""Devices of different capacity where something is missing, tied, oddly named, or counted by others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity.weak import KINDS, digits, federate, mlp
from partita.capacity import depth, width
from partita.core.types import Upload
from partita.engine.devices import classes
from partita.engine.devices.holders import forged_by_holders, held_by
from support import each

WEAK = depth({"strong": 0, "weak": 1}, KINDS)


def test_a_personal_tensor_that_a_frozen_block_uses_too() -> None:
    """The piece would have to be the client's own: refused."""
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    second.weight = first.weight
    model = nn.Sequential(
        nn.Sequential(nn.Flatten(), first), nn.Sequential(nn.ReLU(), second), nn.Linear(64, 10)
    )
    with pytest.raises(ValueError, match=r"^personal='0.1.weight': .* give a part that all devices train"):
        federate(model, digits(), pt.fedalt("0.*", lr=0.1), capacity=WEAK)


class Flat(nn.Module):
    """Reshapes in a way that a batch of no samples does not bear."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_weak_clients_without_data(executor: str) -> None:
    sizes = (9, 8, 0, 7, 0, 0)
    kinds = ["strong", "strong", "weak", "strong", "weak", "weak"]
    model = nn.Sequential(nn.Sequential(Flat(), nn.Linear(64, 8)), nn.ReLU(), nn.Linear(8, 10))
    held = depth({"strong": 0, "weak": 2}, kinds)
    run = federate(model, digits(sizes), pt.fedavg(lr=0.1), capacity=held, executor=executor)
    assert torch.isfinite(run.client(4).model()(torch.ones(2, 64))).all()


def test_fine_tuning_of_what_weak_devices_do_not_hold() -> None:
    """They have nothing to tune, and keep what they received."""
    stages = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.finetune("input", lr=0.1), epochs=1)
    )
    run = federate(mlp(), digits(), stages, capacity=WEAK)
    weak, strong = (KINDS.index(kind) for kind in ("weak", "strong"))
    name = "hidden1.linear.weight"
    assert torch.equal(run.client(weak).personal[name], run.shared[name])
    assert not torch.equal(run.client(strong).personal[name], run.shared[name])


def test_names_with_a_slash() -> None:
    blocks = [("stage/1", nn.Sequential(nn.Flatten(), nn.Linear(64, 8))), ("head/1", nn.Linear(8, 10))]
    run = federate(nn.Sequential(OrderedDict(blocks)), digits(), pt.fedavg(lr=0.1), capacity=WEAK)
    assert {"stage/1.1.weight", "head/1.weight"} <= set(run.shared)


def test_one_client_and_no_word_about_classes() -> None:
    run = federate(mlp(), digits((12,)), pt.fedavg(lr=0.1), capacity=depth({"strong": 0, "weak": 1}))
    assert run.clients[0]["class"] in ("strong", "weak")


def test_a_short_last_batch_counts_by_its_samples() -> None:
    """257 samples are a batch of 256 and one of 1, whose variance says nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, size=(514, 4)).astype("float32")
    data = pt.data.from_arrays(x, rng.integers(0, 2, 514), np.zeros(514, dtype=int), test=0.5, validation=0)
    assert data.sizes()[0] == 257
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    run = federate(model, data, pt.fedavg(lr=1e-6), norm="static", steps=1, batch=8)
    own = data.client(0)[0]
    torch.testing.assert_close(run.shared["0.running_mean"], own.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.shared["0.running_var"], own.var(0), atol=0, rtol=0.02)


class Scale(nn.Module):
    """Statistics that are no BatchNorm."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.copy_(0.9 * self.scale + 0.1 * x.abs().mean().detach())
        return x / self.scale


def test_other_statistics_are_averaged_as_ever() -> None:
    model = nn.Sequential(nn.Flatten(), Scale(), nn.Linear(64, 10))
    runs = [
        federate(model, digits(), pt.fedavg(lr=0.1), norm=norm, rounds=2) for norm in ("static", "global")
    ]
    assert torch.equal(runs[0].shared["1.scale"], runs[1].shared["1.scale"])
    assert runs[0].shared["1.scale"].item() not in (0.0, 1.0)


def test_narrow_models_with_shared_statistics_are_warned_about() -> None:
    model: Any = pt.models.resnet20(4, width=0.25)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 3, 8, 8)).astype("float32")
    data = pt.data.from_arrays(x, rng.integers(0, 4, 48), np.repeat(np.arange(6), 8), test=0.25)
    with pytest.warns(
        UserWarning, match=r"^capacity: narrow and wide models share statistics .* use norm='static'$"
    ):
        federate(
            model,
            data,
            pt.fedavg(lr=0.1),
            capacity=width({"strong": 1.0, "weak": 0.5}, KINDS),
            norm="global",
            rounds=1,
            steps=1,
        )


@pytest.mark.parametrize("byzantine", [0, 1], ids=["strong", "weak"])
def test_attacks_know_who_holds_what(byzantine: int) -> None:
    """ipm(ε) sends −ε times the mean of the honest: of a part of the model, of those who hold it."""
    held = held_by({"y": (3,), "z": (2,)}, [{"y": (3,), "z": (2,)}, {"z": (2,)}])
    kinds = [0, 1, 0, 0, 1]
    rng = torch.Generator().manual_seed(0)
    y, z = torch.randn(5, 3, generator=rng), torch.randn(5, 2, generator=rng)
    y[[1, 4]] = 0.0  # weak clients hold none of it
    uploads = Upload({"y": y, "z": z}, weight=torch.ones(5), client=torch.arange(5))
    forge = pt.attack.ipm(0.5).forge
    assert forge is not None
    lies = forged_by_holders(forge, held, kinds)(uploads, (byzantine,), torch.tensor(0))[byzantine]
    others = [i for i in range(5) if i != byzantine]
    torch.testing.assert_close(lies.delta["z"], -0.5 * z[others].mean(0))
    strong = [i for i in others if kinds[i] == 0]
    torch.testing.assert_close(
        lies.delta["y"], -0.5 * y[strong].mean(0) if kinds[byzantine] == 0 else y[byzantine]
    )


@each("attack", ["alie", "gaussian", "ipm", "malformed", "mimic", "nonfinite", "sign_flip"])
@each("capacity", ["depth", "width"])
def test_every_attack_runs_among_weak_devices(attack: str, capacity: str) -> None:
    made: Any = {
        "gaussian": lambda: pt.attack.gaussian(1.0),
        "ipm": lambda: pt.attack.ipm(0.5),
    }.get(attack, getattr(pt.attack, attack))()
    held = WEAK if capacity == "depth" else width({"strong": 1.0, "weak": 0.5}, KINDS)
    method = pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median())
    run = federate(
        mlp(), digits(), method, capacity=held, attack=made, byzantine=[1], rounds=2, executor="vmap"
    )
    assert all(torch.isfinite(v).all() for v in run.shared.values())
    if attack in ("malformed", "nonfinite"):
        assert run.summary()["excluded"] == ["1"]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_records_fit_the_memory(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients come in parts whose records fit; the result is the same."""
    whole = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=WEAK, executor=executor)
    seen: list[int] = []
    usual = classes.ClassExecutor._together

    def together(self: Any, build: Any, clients: Any, *rest: Any) -> Any:
        seen.append(len(clients))
        return usual(self, build, clients, *rest)

    monkeypatch.setattr(classes.ClassExecutor, "_together", together)
    row = 4 * mlp()[1].linear.in_features  # type: ignore[union-attr, operator]
    largest = max(digits().sizes())
    few = federate(
        mlp(), digits(), pt.fedavg(lr=0.1), capacity=WEAK, executor=executor, memory=int(row * largest)
    )
    assert max(seen) < KINDS.count("weak")
    for k, v in whole.shared.items():
        torch.testing.assert_close(few.shared[k], v)


@pytest.mark.parametrize("how", ["static", "asynchronous"])
def test_records_on_disk_are_on_disk(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each client passes alone."""
    kinds: list[bool] = []
    usual = classes.recorded

    def spied(parts: Any, rows: int, disk: bool) -> Tensor:
        kinds.append(disk)
        return usual(parts, rows, disk)

    monkeypatch.setattr(classes, "recorded", spied)
    held = depth({"strong": 0, "weak": 1}, KINDS, record="disk")
    delays = pt.schedule.delays(upload=pt.schedule.exponential(1.0))
    late = pt.schedule.asynchronous(concurrency=4, delays=delays)
    options: dict[str, Any] = {"norm": "static"} if how == "static" else {"schedule": late, "rounds": 8}
    model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)), nn.Linear(8, 10))
    run = federate(model, digits(), pt.fedavg(lr=0.1), capacity=held, **{"norm": "global", **options})
    assert kinds
    assert all(kinds)
    memory = depth({"strong": 0, "weak": 1}, KINDS)
    other = federate(model, digits(), pt.fedavg(lr=0.1), capacity=memory, **{"norm": "global", **options})
    assert all(torch.equal(other.shared[k], v) for k, v in run.shared.items())


def test_what_a_class_sends_is_what_it_says() -> None:
    """SCAFFOLD sends twice as much as fedavg; who fine-tunes sends nothing."""
    plain, twice = (
        federate(mlp(), digits(), method, capacity=WEAK).summary()["classes"]
        for method in (pt.fedavg(lr=0.1), pt.scaffold(lr=0.1))
    )
    for kind in ("strong", "weak"):
        assert twice[kind]["bytes_up"] == 2 * plain[kind]["bytes_up"] > 0
    stages = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.finetune("output", lr=0.1), epochs=1)
    )
    assert federate(mlp(), digits(), stages, capacity=WEAK).summary()["classes"]["weak"]["bytes_up"] == 0
