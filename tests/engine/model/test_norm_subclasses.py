"""Subclasses of BatchNorm are treated as BatchNorm is: padding, and the three choices of `norm=`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita.data import FederatedData
from partita.engine.model.normalize import MaskedBatchNorm
from partita.engine.model.stackable import stackable
from support import each

SIZES = (13, 9, 1, 6)
NORMS = ("global", "static", "personal")


class NormAct(nn.BatchNorm2d):
    """PyTorch's forward pass written out again, with dropout and an activation behind: timm's layer."""

    def __init__(self, channels: int, p: float = 0.0, act: nn.Module | None = None, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop, self.act = nn.Dropout(p), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )
        found: Tensor = self.act(self.drop(x))
        return found


class Scaled(nn.BatchNorm2d):
    """Asks its parent, and goes on."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x).relu()


class Stubborn(nn.BatchNorm2d):
    """Passes its statistics on, whatever `track_running_stats` says."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        found = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return 2.0 * found.relu()


class Shifted(nn.BatchNorm2d):
    """Another weight than its own."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.batch_norm(
            x,
            self.running_mean if self.track_running_stats or not self.training else None,
            self.running_var if self.track_running_stats or not self.training else None,
            self.weight + 1.0,
            self.bias,
            self.training,
        ).relu()


class ByHand(nn.BatchNorm2d):
    """Nobody can tell it to leave its statistics alone."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.training:
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var, 0.1)
        return (x - mean[:, None, None]) / (var[:, None, None] + self.eps).sqrt()


class Frozen(nn.BatchNorm2d):
    """Goes by its statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x.relu()


# a subclass, and the same out of PyTorch's own layers
ALIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "NormAct": (lambda: NormAct(6), lambda: nn.Sequential(nn.BatchNorm2d(6), nn.ReLU())),
    "Scaled": (lambda: Scaled(6), lambda: nn.Sequential(nn.BatchNorm2d(6), Times())),
    "Stubborn": (lambda: Stubborn(6), lambda: nn.Sequential(nn.BatchNorm2d(6), Times())),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(6), lambda: nn.BatchNorm2d(6)),
}
every_subclass = each("kind", ALIKE)


def data() -> FederatedData:
    g = torch.Generator().manual_seed(0)
    n, ends = sum(SIZES), np.cumsum(SIZES)
    ranges = [(int(e) - n, n) for e, n in zip(ends, SIZES)]
    x, y = torch.randn(n, 3, 6, 6, generator=g), torch.randint(0, 4, (n,), generator=g)
    return FederatedData.make(x, y, ranges, ranges)


def net(norm: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), norm(), nn.Conv2d(6, 6, 3), norm(), nn.Flatten(), nn.Linear(24, 4)
    )


def federate(model: nn.Module, norm: str, executor: str = "loop", **options: Any) -> pt.Run:
    given = {"rounds": 3, "epochs": 1, "batch": 5, "baselines": False, "evaluate_every": 1, "metric": "loss"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a fallback
        return pt.federate(
            model,
            data(),
            pt.fedavg(lr=0.05),
            norm=norm,
            executor=executor,
            progress=False,
            **{**given, **options},
        )


def tensors(run: pt.Run) -> list[Tensor]:
    """The server's and the clients', in their order: names differ between a layer and a sequence of two."""
    return [*run.shared.values(), *[v for i in range(len(SIZES)) for v in run.client(i).personal.values()]]


def scores(run: pt.Run) -> list[Any]:
    return [row[k] for row in run.metrics for k in ("train_loss", "test.global", "test.personal")]


@each(
    ("kind", "norm"),
    [(kind, norm) for kind in ALIKE for norm in NORMS],
    slow=lambda kind, norm: kind != "NormAct" and norm != "global",
)
def test_a_subclass_is_treated_as_batchnorm(kind, norm) -> None:
    """To the bit alone, and as close as stacks come to it; clients have short batches, and one sample."""
    subclass, plain = (federate(net(layer), norm) for layer in ALIKE[kind])
    for a, b in zip(tensors(subclass), tensors(plain), strict=True):
        assert torch.equal(a, b)
    assert scores(subclass) == scores(plain)
    stacked = federate(net(ALIKE[kind][0]), norm, "vmap")
    for a, b in zip(tensors(subclass), tensors(stacked), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        [x for x in scores(stacked) if x is not None],
        [x for x in scores(subclass) if x is not None],
        rtol=1e-4,
    )


@every_subclass
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_static_tracks_nothing_and_measures(kind, executor) -> None:
    model = net(ALIKE[kind][0])
    run = federate(model, "static", executor)
    assert run.shared["1.num_batches_tracked"] == 0
    x = torch.cat([data().client(i)[0] for i in range(len(SIZES))])
    inside = run.model()[0](x).detach()
    torch.testing.assert_close(run.shared["1.running_mean"], inside.mean((0, 2, 3)), atol=1e-5, rtol=1e-5)
    assert not torch.equal(run.shared["1.running_mean"], model[1].running_mean)


def test_personal_keeps_all_of_the_layer() -> None:
    own = federate(net(lambda: NormAct(6, act=nn.PReLU())), "personal").client(0).personal
    assert {"1.weight", "1.bias", "1.act.weight", "1.running_mean", "1.running_var"} <= set(own)


@pytest.mark.parametrize("norm", ["global", "static"])
def test_dropout_inside_of_a_layer_is_keyed_and_off_while_statistics_are_measured(norm) -> None:
    loop, stacked = (federate(net(lambda: NormAct(6, 0.5)), norm, executor) for executor in ("loop", "vmap"))
    for a, b in zip(tensors(loop), tensors(stacked), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@each("momentum", [0.3, None])
@each("layer", [NormAct, Scaled, Shifted])
def test_padding_does_not_count(layer, momentum) -> None:
    torch.manual_seed(0)
    norm = layer(3, momentum=momentum)
    ours = stackable(norm)
    assert isinstance(ours, layer)
    assert isinstance(ours, MaskedBatchNorm)
    assert list(ours.state_dict()) == list(norm.state_dict())
    x = torch.randn(5, 3, 4, 4)
    x[3:] = 1e4
    ours.batch_mask = torch.tensor([1.0, 1, 1, 0, 0])
    torch.testing.assert_close(ours(x)[:3], norm(x[:3]), atol=1e-5, rtol=1e-5)
    for k, v in norm.named_buffers():
        torch.testing.assert_close(ours.get_buffer(k), v, atol=1e-5, rtol=1e-5)


def test_a_layer_inside_of_a_layer_answers_for_itself() -> None:
    """As in a BatchNorm that has another one for a part of the batch."""

    class Outer(Scaled):
        def __init__(self, channels: int) -> None:
            super().__init__(channels, affine=False)
            self.inner = nn.BatchNorm2d(channels, momentum=0.9)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner(3 * x)

    torch.manual_seed(0)
    norm = Outer(3)
    ours, x = stackable(norm), torch.randn(4, 3, 2, 2) + 1
    assert torch.equal(ours(x), norm(x))
    for k, v in norm.named_buffers():
        assert torch.equal(ours.get_buffer(k), v), k


def test_what_cannot_be_left_alone_is_refused_with_its_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sequential(ByHand(6)), nn.Flatten(), nn.Linear(96, 4))
    with pytest.raises(ValueError, match=r"^norm='static': expected 'global' or 'personal': 1\.0 \(ByHand\)"):
        federate(model, "static")
    tracking = nn.InstanceNorm2d(6, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), tracking, nn.Flatten(), nn.Linear(96, 4))
    with pytest.raises(ValueError, match=r"^norm='static': .*: 1 \(InstanceNorm2d\)"):
        federate(model, "static")


def test_a_layer_that_counts_padding_by_itself_is_not_stacked() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), ByHand(6), nn.Flatten(), nn.Linear(96, 4))
    with pytest.warns(UserWarning, match="cannot be stacked"):
        pt.federate(
            model, data(), pt.fedavg(lr=0.1), rounds=1, steps=1, batch=4, norm="global", executor="vmap"
        )


class Freezing(nn.Sequential):
    """Keeps its BatchNorm layers in evaluation mode, the usual way to do it."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@pytest.mark.parametrize("norm", ["global", "static"])
@pytest.mark.parametrize("frozen", ["by the layer", "by the model"])
def test_frozen_statistics_stay(norm, frozen) -> None:
    layer = Frozen(6) if frozen == "by the layer" else nn.BatchNorm2d(6)
    layer.running_mean += 0.5
    layers = (nn.Conv2d(3, 6, 3), layer, nn.Conv2d(6, 6, 3), Scaled(6), nn.Flatten(), nn.Linear(24, 4))
    model = nn.Sequential(*layers) if frozen == "by the layer" else Freezing(*layers)
    expected = layer.running_mean.clone()
    if frozen == "by the layer":  # another layer goes on
        run = federate(model, norm)
        assert "3.running_mean" in run.shared
    else:
        run = federate(model, norm)
        assert "3.running_mean" not in run.shared
    assert torch.equal(run.model()[1].running_mean, expected)
    assert "1.running_mean" not in run.shared


def test_a_mean_that_is_zero_on_the_first_samples_is_tracked() -> None:
    """Behind weights that are zero at the start, it does not move in the trial."""
    model = net(lambda: nn.BatchNorm2d(6))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    run = federate(model, "global")
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= set(run.shared)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_personal_statistics_without_parameters(executor: str) -> None:
    """The personal part holds buffers alone: clients have no distance from each other."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10))
    data = pt.data.digits(clients=4, seed=0)
    run = pt.federate(
        model, data, pt.fedavg(lr=0.1), norm="personal", rounds=1, batch=8, executor=executor,
        baselines=False, progress=False,
    )  # fmt: skip
    assert set(run.client(0).personal) == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert [row["distance"] for row in run.clients] == [None] * 4


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    layer = nn.Linear(64, 10)
    layer.kept = layer.weight * 2  # as the old torch.nn.utils.weight_norm leaves it
    for model in (layer, lambda: layer):
        with pytest.raises(ValueError, match=r"a model that copy\.deepcopy can copy"):
            pt.federate(model, pt.data.digits(clients=4, seed=0), pt.fedavg(lr=0.1), rounds=1, progress=False)
    traced = torch.jit.trace(nn.Linear(64, 10), torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"the module itself, before torch\.jit\.script"):
        pt.federate(traced, pt.data.digits(clients=4, seed=0), pt.fedavg(lr=0.1), rounds=1, progress=False)
