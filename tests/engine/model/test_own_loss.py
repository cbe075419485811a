"""Models that compute their loss by themselves: what samples count for in it, and what it can be used for."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita as pt
from support import each

SIZES = (3, 7, 11, 5, 19)
CLASS_WEIGHT = torch.tensor([0.1, 1.0, 5.0])
LOSSES = {
    "squares": lambda net, z, y: F.mse_loss(z.squeeze(), y.squeeze()),  # noqa: ARG005, as in transformers
    "labels": lambda net, z, y: F.binary_cross_entropy_with_logits(z, y),  # noqa: ARG005
    "absolute": lambda net, z, y: F.l1_loss(z.squeeze(-1), y),  # noqa: ARG005
    "penalty": lambda net, z, y: F.mse_loss(z.squeeze(-1), y) + net.penalized.square().sum(),
    "classes": lambda net, z, y: F.cross_entropy(z, y),  # noqa: ARG005
    "weights": lambda net, z, y: F.cross_entropy(z, y, weight=CLASS_WEIGHT),  # noqa: ARG005
}


class Net(nn.Module):
    """Dropout, a loss of its own, and a parameter that is 0 at the start."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.penalized = kind, nn.Parameter(torch.zeros(1))
        outputs = 1 if kind in ("squares", "absolute", "penalty") else 3
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        hidden = F.dropout(self.body(x).tanh(), 0.2, self.training)
        logits = self.head(hidden) + self.penalized
        loss = None if labels is None else LOSSES[self.kind](self, logits, labels)
        return {"loss": loss, "logits": logits}


def data(kind: str) -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 4)).astype("float32")
    targets: dict[str, Any] = {"labels": (x[:, :3] > 0).astype("float32")}
    targets |= dict.fromkeys(("classes", "weights"), rng.integers(0, 3, len(x)))
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    return pt.data.from_arrays(x, targets.get(kind, 2 * x[:, 0] + 1), client, test=0.3)


def federate(kind: str, method: Any = None, **settings: Any) -> pt.Run:
    fixed = {"rounds": 3, "epochs": 1, "batch": 4, "loss": "model", "baselines": False, "progress": False}
    return pt.federate(Net(kind), data(kind), method or pt.fedavg(lr=0.1), **{**fixed, **settings})


def mean_loss(run: pt.Run, kind: str) -> float:
    """The model's own loss on the test samples of each client, one by one."""
    samples = data(kind)
    values = []
    for i in range(len(SIZES)):
        x, y = samples.client(i, "test")
        with torch.no_grad():
            net = run.client(i).model().eval()
            values += [float(net(x[j : j + 1], labels=y[j : j + 1])["loss"]) for j in range(len(y))]
    return float(np.mean(values))


@each("kind", ["squares", "labels", "absolute", "penalty", "classes"])
def test_the_loss_is_a_metric(kind: str) -> None:
    for metric in (None, "loss", ["mse" if kind != "classes" else "accuracy", "loss"]):
        run = federate(kind, metric=metric, executor="loop")
        if metric is None and kind == "classes":
            assert run.summary()["metric"] == "accuracy"
            continue
        scores = run.summary()
        found = scores["metrics"]["loss"]["test"] if isinstance(metric, list) else scores["test"]
        assert found["global"] == pytest.approx(mean_loss(run, kind), rel=1e-5)


@each("kind", ["squares", "labels", "absolute", "penalty", "classes", "weights"])
def test_stacked_clients_get_what_each_gets_alone(kind: str) -> None:
    """Numbers are stacked where the loss is known as a function of (output, target)."""
    loop = federate(kind, executor="loop", metric="loss")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        vmap = federate(kind, executor="vmap", metric="loss")
    alone = [str(w.message) for w in told if "cannot be stacked" in str(w.message)]
    assert bool(alone) == (kind in ("absolute", "penalty"))
    assert all("a function of (output, target)" in text for text in alone)
    for name, value in loop.shared.items():
        torch.testing.assert_close(vmap.shared[name], value, atol=1e-6, rtol=0)
    assert vmap.summary()["test"]["global"] == pytest.approx(loop.summary()["test"]["global"], rel=1e-5)


def test_clients_are_compared_by_a_loss_without_rows(tmp_path: Any) -> None:
    """Nobody knows what a sample adds to it: there are scores, and no interval of a single client."""
    run = federate("absolute", pt.ditto(lr=0.1), baselines=True, executor="loop", out=tmp_path / "run")
    scores = run.summary()
    assert scores["metric"] == "loss"
    assert set(scores["test"]) == {"local", "global", "personal"}
    assert not any(np.isnan(x) for x in scores["test"].values())
    assert scores["chance"] == {}
    assert pt.load(tmp_path / "run").summary()["test"] == scores["test"]
    run.report(tmp_path / "report.html")


def test_pieces_of_a_weighted_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^accumulate=2: the loss of a batch is not the mean"):
        federate("weights", pt.fedavg(lr=0.1, accumulate=2))
    for kind in ("classes", "squares", "absolute"):
        federate(kind, pt.fedavg(lr=0.1, accumulate=2), executor="loop")


class Answers(nn.Module):
    """Start and end of an answer, each with labels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 10)

    def forward(
        self, x: Tensor, start_positions: Tensor | None = None, end_positions: Tensor | None = None
    ) -> dict[str, Tensor]:
        del start_positions, end_positions
        scores = self.head(x)
        return {"start_logits": scores[:, :5], "end_logits": scores[:, 5:]}


def test_a_model_with_several_labels_is_told_what_to_do() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)).astype("float32"), rng.integers(0, 5, (30, 2))
    answers = pt.data.from_arrays(x, y, np.repeat(np.arange(3), 10), test=0.3)
    work = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False, "progress": False}
    with pytest.raises(ValueError, match=r"start_positions, end_positions; give loss=None .*output=.*stack"):
        pt.federate(Answers, answers, pt.fedavg(lr=0.1), loss="model", **work)
    run = pt.federate(
        Answers,
        answers,
        pt.fedavg(lr=0.1),
        output=lambda o: torch.stack([o["start_logits"], o["end_logits"]], 1),
        **work,
    )
    assert run.summary()["metric"] == "accuracy"
