"""Clients stacked with `vmap` compute what they compute one after another, for any model and any client."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita import models
from partita.data import FederatedData
from partita.engine.execute import EXECUTORS, Runner, Task, trial
from partita.engine.execute.vmap import Vmap
from partita.engine.store import MemoryStore, Store
from support import Selected, each

RAGGED = (9, 5, 1, 0, 6)  # short batches, one sample, none
LM = {"length": 5, "width": 8, "depth": 2, "heads": 2, "hidden": 16}


def federated(x, y, sizes=RAGGED, tests=(2, 3, 0, 1, 2)) -> FederatedData:
    """Clients of these sizes in the rows of x and y; the third has no test samples."""
    ends, test_ends = np.cumsum(sizes), sum(sizes) + np.cumsum(tests)
    train = [(int(e) - s, s) for e, s in zip(ends, sizes)]
    test = [(int(e) - t, t) for e, t in zip(test_ends, tests)]
    return FederatedData.make(x, y, train, test)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def numbers(*shape: int, classes: int = 4, **options) -> FederatedData:
    g = generator()
    x = torch.randn(29, *shape, generator=g)
    return federated(x, torch.randint(0, classes, (29,), generator=g), **options)


def tokens(length: int = 5, classes: int = 0) -> FederatedData:
    g = generator()
    x = torch.randint(0, 7, (29, length), generator=g)
    return federated(x, torch.randint(0, classes, (29,), generator=g) if classes else x.roll(-1, 1))


def run(executor: str, model, data, method, **options):
    common = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False, "metric": "loss", "evaluate_every": 1}
    return pt.federate(model, data, method, executor=executor, **{**common, **options})


def assert_same(a, b, tolerance: float = 1e-5) -> None:
    """Server, clients, losses and scores of two runs."""

    def close(x, y, what) -> None:
        assert x.keys() == y.keys(), what
        for k in x:
            assert not any(t.requires_grad for t in (x[k], y[k])), f"{what} {k} drags its graph along"
            torch.testing.assert_close(
                x[k], y[k], atol=tolerance, rtol=tolerance, msg=lambda m, k=k: f"{what} {k}: {m}"
            )

    close(a.shared, b.shared, "shared")
    for i in range(len(a.clients)):
        close(a.client(i).personal, b.client(i).personal, f"client {i}")
    assert [r["round"] for r in a.metrics] == [r["round"] for r in b.metrics]
    for kind in ("train_loss", "test.global", "test.personal"):
        for r, s in zip(a.metrics, b.metrics):
            assert r[kind] == (None if s[kind] is None else pytest.approx(s[kind], rel=1e-4, abs=1e-5)), kind
    for kind in ("global", "personal"):
        np.testing.assert_allclose(a.scores(kind), b.scores(kind), rtol=1e-4, atol=1e-5)
    assert a.summary()["excluded"] == b.summary()["excluded"]


def loop_equals_vmap(model, data, method, tolerance: float = 1e-5, graph: bool = True, **options):
    """Both runs; a fallback to the loop would warn, and a warning of the library is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = ("loop", "vmap", "graph") if graph else ("loop", "vmap")
        loop, vmap, *recorded = (run(e, model, data, method, **options) for e in names)
    for other in (vmap, *recorded):
        assert_same(loop, other, tolerance)
    start = dict(model.named_parameters())
    assert any(not torch.equal(x, start[k]) for k, x in loop.shared.items() if k in start)
    return loop, vmap


# ---- every model of the library

ALT = pt.fedalt(personal="output", lr=0.05)
AVG = pt.fedavg(lr=0.02)
QUADRATIC = pt.data.quadratic(3, n=12, d_theta=4, d_w=3)
MODELS = {
    "quadratic": (
        QUADRATIC.model,
        lambda: QUADRATIC.data,
        pt.fedsim("w", lr=0.05),
        {"loss": QUADRATIC.loss, "metric": "loss", "batch": None},
    ),
    "logistic": (lambda: models.logistic(6, 4), lambda: numbers(6), pt.fedavg(lr=0.1), {}),
    "mlp": (lambda: models.mlp(6, 5, 4), lambda: numbers(2, 3), ALT, {"rounds": 3}),
    "leaf_cnn": (
        lambda: models.leaf_cnn(4),
        lambda: numbers(28, 28, sizes=(4, 3), tests=(1, 1)),
        pt.fedavg(lr=0.02),
        {"rounds": 1, "steps": 1, "epochs": None},
    ),
    "mnist_cnn": (lambda: models.mnist_cnn(4, dropout=0.5), lambda: numbers(28, 28), ALT, {"batch": 6}),
    "cifar_cnn": (
        lambda: models.cifar_cnn(4, dropout=0.5),
        lambda: numbers(3, 32, 32, sizes=(5, 3), tests=(1, 1)),
        ALT,
        {"rounds": 1},
    ),
    "resnet18": (
        lambda: models.resnet18(4, width=0.125),
        lambda: numbers(8, 8, sizes=(6, 3), tests=(1, 1)),
        pt.fedalt(personal="input", lr=0.02),
        {"graph": False},
    ),
    "resnet20": (
        lambda: models.resnet20(4, norm="group", width=0.25),
        lambda: numbers(3, 8, 8),
        pt.fedsim(personal="norm", lr=0.02),
        {"graph": False},
    ),
    "transformer": (lambda: models.transformer(7, **LM, dropout=0.2), tokens, ALT, {}),
    "bilstm": (
        lambda: models.bilstm(7, embedding=4, hidden=3, dropout=0.3),
        lambda: tokens(classes=2),
        ALT,
        {},
    ),
}


def test_no_model_is_forgotten() -> None:
    assert set(MODELS) == set(models.__all__) - {
        "Blocks",
        "add_adapters",
        "additive",
        "freeze",
        "split_units",
    }


DEEP = ("resnet18", "resnet20")
LONG = ("leaf_cnn", "cifar_cnn")  # to write down; their layers are those of mnist_cnn


@each("name", [name for name in MODELS if name not in DEEP])
def test_models(name) -> None:
    build, data, method, options = MODELS[name]
    recorded = Selected.slow or name not in LONG
    loop_equals_vmap(build(), data(), method, **{"graph": recorded, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_deep_models(name) -> None:
    build, data, method, options = MODELS[name]
    loop_equals_vmap(build(), data(), method, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_deep_models_are_recorded(name) -> None:
    """They take long to write down."""
    build, data, method, _ = MODELS[name]
    loop_equals_vmap(build(), data(), method)


@each(
    ("norm", "method"),
    [(norm, method) for norm in ("global", "personal") for method in (AVG, pt.fedalt("output", lr=0.02))],
    slow=lambda norm, method: (norm == "personal") == (method is AVG),
)
def test_batchnorm(norm, method) -> None:
    """Running statistics included: they are shared, or they stay with the client.

    In double precision: batches of one or two samples make such a deep model sensitive to rounding.
    """
    model = models.resnet20(4, norm="batch", width=0.25).double()
    images = numbers(3, 8, 8)
    images = replace(images, x=images.x.double())
    # it takes long to write such a deep model down
    loop, vmap = loop_equals_vmap(model, images, method, norm=norm, tolerance=1e-10, graph=False)
    at = vmap.shared if norm == "global" else vmap.client(0).personal
    statistics = {"stem.norm.running_mean", "stem.norm.running_var", "stem.norm.num_batches_tracked"}
    assert statistics <= at.keys()
    assert not torch.equal(at["stem.norm.running_mean"], model.stem.norm.running_mean)
    if norm == "personal":
        assert not any("norm" in k for k in vmap.shared)
        # one pass moves them in every round: fedalt's phase of the shared part leaves personal buffers alone
        seen = [vmap.client(i).personal["stem.norm.num_batches_tracked"].item() for i in range(5)]
        assert seen == [2 * 3, 2 * 2, 2 * 1, 0, 2 * 2]
    assert loop.summary()["scored"] == 4


def test_batchnorm_without_affine_and_with_a_cumulative_mean() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, affine=False, momentum=None)
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 4))
    loop_equals_vmap(model, numbers(6), pt.fedavg(lr=0.05), norm="global")


@pytest.mark.parametrize("norm", ["global", "personal", "static"])
def test_batchnorm_in_recorded_steps(norm) -> None:
    """With short batches, and clients that wait for others."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    model, images = nn.Sequential(*layers).double(), numbers(3, 8, 8)
    images = replace(images, x=images.x.double())
    loop_equals_vmap(model, images, pt.fedalt(personal="output", lr=0.02), norm=norm, tolerance=1e-10)


def test_batchnorm_without_running_statistics() -> None:
    """It normalizes test batches by themselves too, so their padding must not count either."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 4))
    loop_equals_vmap(model, numbers(6), pt.fedavg(lr=0.05))


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (lambda: models.add_adapters(models.resnet20(4, norm="group", width=0.25), "residual"), (3, 8, 8)),
        (lambda: models.add_adapters(models.transformer(7, **LM), "bottleneck", rank=3), None),
        (lambda: models.add_adapters(models.mlp(6, 5, 4), "lora", rank=2), (6,)),
    ],
    ids=["residual", "bottleneck", "lora"],
)
def test_adapters(model, data) -> None:
    model = model()
    method = pt.fedalt(personal="adapter", lr=0.05)
    loop, _ = loop_equals_vmap(
        model, tokens() if data is None else numbers(*data), method, graph=data == (6,)
    )
    own = loop.client(0).personal
    assert own
    assert all("adapter" in k.split(".") for k in own)
    assert not any("adapter" in k.split(".") for k in loop.shared)
    start = dict(model.named_parameters())
    assert any(not torch.equal(own[k], start[k]) for k in own)
    assert all(torch.equal(x, start[k]) for k, x in loop.client(3).personal.items())  # it has no data


# ---- modules of all kinds


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.mix(self.embed(x))))


def test_tied_weights() -> None:
    loop, _ = loop_equals_vmap(Tied(), tokens(), pt.fedalt(personal="mix.*", lr=0.1))
    assert set(loop.shared) == {"embed.weight"}
    model = loop.client(0).model()
    assert model.decode.weight is model.embed.weight
    assert torch.equal(model.decode.weight, loop.shared["embed.weight"])


def test_frozen_parameters() -> None:
    model = models.mlp(6, 5, 4)
    model.hidden1.requires_grad_(False)
    frozen = model.hidden1.linear.weight.clone()
    loop, vmap = loop_equals_vmap(model, numbers(6), pt.fedavg(lr=0.1))
    assert set(vmap.shared) == {"output.linear.weight", "output.linear.bias"}
    for r in (loop, vmap):
        assert torch.equal(r.model().hidden1.linear.weight, frozen)
        assert torch.equal(r.client(1).model().hidden1.linear.weight, frozen)


@pytest.mark.parametrize("drop", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
def test_dropout_of_values_and_channels(drop) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), drop, nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))
    loop, _ = loop_equals_vmap(model, numbers(1, 4, 4), pt.fedavg(lr=0.1))
    drop.p = 0.0
    without = run("loop", model, numbers(1, 4, 4), pt.fedavg(lr=0.1))
    assert not torch.allclose(loop.shared["4.weight"], without.shared["4.weight"])


def test_one_dropout_at_two_places() -> None:
    torch.manual_seed(0)
    drop = nn.Dropout(0.4)
    model = nn.Sequential(nn.Linear(6, 8), drop, nn.ReLU(), nn.Linear(8, 8), drop, nn.Linear(8, 4))
    loop_equals_vmap(model, numbers(6), pt.fedavg(lr=0.1))


def test_one_layer_at_two_places() -> None:
    torch.manual_seed(0)
    shared, norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
    model = nn.Sequential(shared, norm, nn.ReLU(), shared, norm, nn.Linear(6, 4))
    loop, _ = loop_equals_vmap(model, numbers(6), pt.fedavg(lr=0.05), norm="global")
    assert {k.split(".")[0] for k in loop.shared} == {"0", "1", "5"}
    assert loop.shared["1.num_batches_tracked"] > 2 * 2  # both places count


def test_constant_buffers_stay() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((6,), 2.0))
            self.linear = nn.Linear(6, 4)

        def forward(self, x):
            return self.linear(x * self.scale)

    loop, _ = loop_equals_vmap(Scaled(), numbers(6), pt.fedavg(lr=0.1))
    assert set(loop.shared) == {"linear.weight", "linear.bias"}


def test_double_precision() -> None:
    data = numbers(6)
    data = federated(data.x.double(), data.y)
    loop, _ = loop_equals_vmap(models.mlp(6, 5, 4).double(), data, ALT, tolerance=1e-12)
    assert loop.shared["hidden1.linear.weight"].dtype == torch.float64


def test_a_run_draws_nothing_from_the_global_generator() -> None:
    for executor in ("loop", "vmap"):
        before = torch.get_rng_state()
        run(executor, models.mnist_cnn(4), numbers(28, 28, sizes=(4, 2), tests=(1, 1)), ALT, rounds=1)
        assert torch.equal(torch.get_rng_state(), before)


# ---- losses


def smoothed(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.2)


def hinge(output, target):
    margin = 1 + output - output.gather(1, target[:, None])
    return F.relu(margin).sum(1).mean()


@each(
    ("loss", "batch"),
    [(loss, batch) for loss in (smoothed, hinge, nn.CrossEntropyLoss()) for batch in (4, None)],
    slow=lambda loss, batch: batch is None and loss is not hinge,
)
def test_a_users_loss(loss, batch) -> None:
    loop_equals_vmap(models.mlp(6, 5, 4), numbers(6), ALT, loss=loss, batch=batch)


def test_a_users_metric() -> None:
    def top2(output, target):
        return (output.topk(2).indices == target[:, None]).any(1).float().mean()

    loop, _ = loop_equals_vmap(
        models.mlp(6, 5, 4), numbers(6), ALT, metric=pt.Metric(top2, higher_is_better=True)
    )
    assert loop.summary()["metric"] == "top2"
    data = numbers(6)
    for i in (0, 1, 3, 4):
        x, y = data.client(i, "test")
        with torch.no_grad():
            assert loop.scores()[i] == pytest.approx(top2(loop.client(i).model()(x), y).item())


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_regression(shape) -> None:
    g = generator()
    x = torch.randn(29, 6, generator=g)
    data = federated(x, torch.randn(29, *shape, generator=g))
    loop, _ = loop_equals_vmap(models.mlp(6, 5, 2 if shape == (2,) else 1), data, ALT, metric=None)
    assert loop.summary()["metric"] == "mse"


def test_binary_logits() -> None:
    loop, _ = loop_equals_vmap(models.mlp(6, 5, 1), numbers(6, classes=2), ALT, metric="accuracy")
    x, y = numbers(6, classes=2).client(0, "test")
    with torch.no_grad():
        right = (loop.client(0).model()(x)[:, 0] > 0) == (y == 1)
    assert loop.scores()[0] == pytest.approx(right.float().mean().item())


def test_a_loss_that_vmap_cannot_trace_still_trains() -> None:
    """Its value decides the way: the loop runs it, and says why nothing is stacked."""

    def branching(output, target):
        return F.cross_entropy(output, target) if output.abs().max().item() < 1e9 else output.mean()

    plain = run("loop", models.mlp(6, 5, 4), numbers(6), ALT, loss=F.cross_entropy)
    assert_same(run("loop", models.mlp(6, 5, 4), numbers(6), ALT, loss=branching), plain)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        fallen = run("vmap", models.mlp(6, 5, 4), numbers(6), ALT, loss=branching)
    assert_same(fallen, plain)


def test_a_loss_that_mixes_samples_falls_back() -> None:
    with pytest.warns(UserWarning, match="not the mean of its values on the samples"):
        fallen = run("vmap", models.mlp(6, 5, 4), numbers(6), ALT, loss=_mixing, metric="accuracy")
    alone = run("loop", models.mlp(6, 5, 4), numbers(6), ALT, loss=_mixing, metric="accuracy")
    assert_same(fallen, alone, 0.0)


# ---- clients of all kinds


RAGGED_WORK: list[dict[str, Any]] = [
    {"epochs": 2, "batch": 4},
    {"steps": 5, "epochs": None, "batch": 4},
    {"steps": (1, 4, 0, 3, 2), "epochs": None, "batch": 3},
    {"steps": 2, "epochs": None, "batch": None},
    {"epochs": 1, "batch": 1},
    {"epochs": 1, "batch": 100},
]


@each(
    ("work", "cohort"),
    [(work, cohort) for work in RAGGED_WORK for cohort in (None, 3)],
    slow=lambda work, cohort: cohort is None and "steps" not in work,
)
def test_ragged_work(work, cohort) -> None:
    loop_equals_vmap(models.mlp(6, 5, 4), numbers(6), ALT, cohort=cohort, rounds=3, **work)


@each(
    "method",
    [
        pt.fedalt("output", lr=0.1, personal_steps=5, shared_steps=2),
        pt.fedavg(lr=0.1, momentum=0.9, weight_decay=0.01, max_grad_norm=0.5),
        pt.fedprox(lr=0.1, mu=1.0),
        pt.local(lr=0.1),
        pt.finetune("output", lr=0.1, personal_l2=0.1),
    ],
    ids=lambda m: m.name,
)
def test_methods_with_ragged_clients(method) -> None:
    model = models.mlp(6, 5, 4)
    loop, vmap = (run(e, model, numbers(6), method) for e in ("loop", "vmap"))
    assert_same(loop, vmap)


@each(
    "method",
    [
        pt.fedalt("all", lr=0.1),
        pt.fedsim("all", lr=0.1),
        pt.fedalt("none", lr=0.1),
        pt.finetune("none", lr=0.1),
    ],
    ids=["fedalt all", "fedsim all", "fedalt none", "finetune none"],
)
def test_one_of_the_parts_may_be_empty(method) -> None:
    model = models.logistic(6, 4)  # "output" is all of it
    loop, vmap = (run(e, model, numbers(6), method) for e in ("loop", "vmap"))
    assert_same(loop, vmap)


def test_state_reset() -> None:
    with pytest.warns(UserWarning, match="state='reset': clients forget"):
        loop, vmap = (run(e, models.mlp(6, 5, 4), numbers(6), ALT, state="reset") for e in ("loop", "vmap"))
    assert_same(loop, vmap)
    assert torch.equal(loop.client(0).personal["output.linear.bias"], loop.base["output.linear.bias"])


def test_one_client_in_all() -> None:
    g = generator()
    x, y = torch.randn(7, 6, generator=g), torch.randint(0, 4, (7,), generator=g)
    data = FederatedData.make(x, y, [(0, 5)], [(5, 2)])
    loop_equals_vmap(models.mlp(6, 5, 4), data, ALT)
    assert_same(*(run(e, models.mlp(6, 5, 4), data, ALT) for e in ("auto", "loop")))


def test_nobody_has_test_samples() -> None:
    loop, _ = loop_equals_vmap(models.mlp(6, 5, 4), numbers(6, tests=(0,) * 5), ALT)
    assert loop.summary()["test"] == {"local": None, "global": None, "personal": None}
    assert loop.summary()["scored"] == 0


def test_a_client_without_test_samples_has_no_score() -> None:
    loop, _ = loop_equals_vmap(models.mlp(6, 5, 4), numbers(6), ALT)
    assert [r["personal"] is None for r in loop.clients] == [False, False, True, False, False]
    assert np.isnan(loop.scores()[2])


# ---- chunks


@pytest.mark.parametrize("memory", [1, "3kB"])
def test_chunks_of_a_cohort(memory, monkeypatch) -> None:
    sizes = []
    chunk = Vmap._chunk

    def counted(self, rule, clients, *rest):
        sizes.append(len(clients))
        return chunk(self, rule, clients, *rest)

    monkeypatch.setattr(Vmap, "_chunk", counted)
    data = numbers(6)
    whole = run("vmap", models.mlp(6, 5, 4), data, ALT, rounds=3)
    assert max(sizes) == 5
    sizes.clear()
    cut = run("vmap", models.mlp(6, 5, 4), data, ALT, rounds=3, memory=memory)
    assert max(sizes) < 5
    assert memory != 1 or max(sizes) == 1
    assert_same(whole, cut, 1e-6)


# ---- what cannot be stacked


class Branching(nn.Module):
    """What it does depends on values, which `vmap` cannot ask of several clients."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.relu(self.hidden(x))
        return self.output(h if h.max() < 1e9 else h / 2)


class Centred(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = self.hidden(x)
        return self.output(torch.relu(h - h.mean(0)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching, r"in the model \(Branching\), the values of a tensor decide"),
        (Centred, "mixes the samples of a batch.*differ is that of layer 'output'"),
    ],
)
@pytest.mark.parametrize("executor", ["vmap", "auto"])
def test_falls_back_to_the_loop_and_says_why(model, reason, executor, tmp_path) -> None:
    torch.manual_seed(0)
    model, data = model(), numbers(6)
    with pytest.warns(UserWarning, match="cannot be stacked") as caught:
        fallen = run(executor, model, data, ALT, rounds=4, out=tmp_path / "run")
    told = [str(w.message) for w in caught if "cannot be stacked" in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith(f"executor={executor!r}: {type(model).__name__} cannot be stacked")
    _, why = told[0].split("Reason: ")
    assert re.search(reason, why), why
    assert_same(fallen, run("loop", model, data, ALT, rounds=4), 0.0)
    assert fallen.metrics[-1]["train_loss"] < fallen.metrics[0]["train_loss"]


# ---- auto


@pytest.mark.usefixtures("measured")
def test_auto_picks_and_says_why(tmp_path) -> None:
    out = tmp_path / "run"
    auto = run("auto", models.mlp(6, 5, 4), numbers(6), ALT, out=out)
    assert_same(auto, run("loop", models.mlp(6, 5, 4), numbers(6), ALT))
    said = json.loads((out / "config.json").read_text())["executor"]
    assert said["requested"] == "auto"
    assert set(said["picks"]) == {"training, stage 0", "personal on test, stage 0"}
    for pick in said["picks"].values():
        assert pick["picked"] in ("loop", "vmap")
        assert "measured on" in pick["why"]
        assert "loop" in pick["why"]
        assert "vmap" in pick["why"]


@pytest.mark.usefixtures("measured")
@each(
    ("step", "left", "most"),
    [(1e-4, 2, 5), (1.0, 2, 2), (1.0, 10**4, 5)],  # cohorts have 5 clients
    ids=["quick steps", "few slow steps", "many slow steps"],
)
def test_trials_of_auto_are_small_where_they_are_much_of_the_work(step, left, most, monkeypatch) -> None:
    tried = []

    def seconds(_executor, program, clients, _group, _states, context) -> float:
        if program.trains:
            tried.append(len(clients))
        return step * len(clients) * context.work.steps

    monkeypatch.setattr("partita.engine.execute.auto._seconds", seconds)
    monkeypatch.setattr("partita.engine.execute.auto.rounds_left", lambda _: left)
    picks = run("auto", models.mlp(6, 5, 4), numbers(6), ALT).config["executor"]["picks"]
    assert max(tried) == most
    assert f"measured on {most} clients" in picks["training, stage 0"]["why"]


@pytest.mark.usefixtures("measured")
def test_nothing_is_tried_where_slow_steps_are_few(monkeypatch) -> None:
    """Trials would take as long as 25 steps: they are for runs of 250 and more, and for quick steps."""

    def picks(rounds: int) -> dict[str, dict[str, str]]:
        found = run("auto", models.mlp(6, 5, 4), numbers(6), ALT, rounds=rounds, evaluate_every=100)
        return found.config["executor"]["picks"]

    tried, names = [], {"training, stage 0", "all programs"}
    examined = trial.not_stackable
    monkeypatch.setattr(
        "partita.engine.execute.task.not_stackable", lambda *given: tried.append(1) or examined(*given)
    )
    assert names & set(picks(2)) == {"training, stage 0"}  # quick steps
    assert tried
    monkeypatch.setattr("partita.engine.execute.task.SLOW_BYTES", 0)
    assert names & set(picks(60)) == {"training, stage 0"}  # many: 5 clients with 1.6 on average
    tried.clear()
    short = picks(2)["all programs"]
    assert short["picked"] in ("loop", "pool")
    assert "about 16 slow steps in all" in short["why"]
    assert not tried


def test_auto_picks_for_every_stage(tmp_path) -> None:
    out = tmp_path / "run"
    method = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(ALT, rounds=1))
    auto = run("auto", models.mlp(6, 5, 4), numbers(6), method, rounds=None, out=out)
    assert_same(auto, run("loop", models.mlp(6, 5, 4), numbers(6), method, rounds=None))
    picks = json.loads((out / "config.json").read_text())["executor"]["picks"]
    scored = {"global on test, stage 0", "personal on test, stage 1"}
    assert {"training, stage 0", "training, stage 1", *scored} <= set(picks)


def test_a_fallback_is_recorded_too(tmp_path) -> None:
    """config.json says what ran, whatever was asked for."""
    out = tmp_path / "run"
    with pytest.warns(UserWarning, match="cannot be stacked"):
        run("auto", Centred(), numbers(6), ALT, out=out)
    said = json.loads((out / "config.json").read_text())["executor"]
    assert "mixes the samples" in json.dumps(said)


def test_double_precision_decides_where_single_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roundings grow in some models (normalization over few samples, on a GPU) until gradients differ."""
    compare = trial._compare

    def rough(loop, stacked, params, x, y, sizes):
        return trial.DIFFERENT if x.dtype == torch.float32 else compare(loop, stacked, params, x, y, sizes)

    monkeypatch.setattr(trial, "_compare", rough)
    result = run("vmap", models.mlp(6, 5, 4), numbers(6), ALT)
    assert "fallback" not in result.config["executor"]["picks"]
    with pytest.warns(UserWarning, match="mixes the samples"):
        run("vmap", Centred(), numbers(6), ALT)


def _mixing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + output.std()


def test_executors_are_a_registry_and_take_a_function() -> None:
    """A factory of one's own gets the task, may use the ones that are there, and has the same result."""
    tasks = []

    def mine(task: Task) -> Runner:
        tasks.append(task)
        return EXECUTORS["loop"](task)

    one, other = (run(executor, models.mlp(6, 5, 4), numbers(6), ALT) for executor in (mine, "loop"))
    for name, x in other.shared.items():
        assert torch.equal(one.shared[name], x)
    assert [type(task.model).__name__ for task in tasks] == ["Blocks"]
    assert one.config["settings"]["executor"].startswith("test_executors_are_a_registry")
    assert set(EXECUTORS) == {"auto", "loop", "pool", "vmap", "graph", "compiled"}
    for wrong in (lambda: None, lambda _: None, "lop", 3):
        with pytest.raises(ValueError, match="executor"):
            run(wrong, models.mlp(6, 5, 4), numbers(6), ALT)


def test_an_executor_of_ones_own_is_written_down(tmp_path: Path) -> None:
    def mine(task: Task) -> Runner:
        return EXECUTORS["loop"](task)

    for executor, name in ((mine, "test_an_executor"), (EXECUTORS["loop"], "loop")):
        out = tmp_path / name
        run(executor, models.mlp(6, 5, 4), numbers(6), ALT, out=out, report=False)
        run(executor, models.mlp(6, 5, 4), numbers(6), ALT, out=out, report=False, resume=True)
        config = json.loads((out / "config.json").read_text())
        assert config["executor"]["requested"].startswith(name)
        assert config["settings"]["executor"] == config["executor"]["requested"]


def test_a_store_of_ones_own() -> None:
    made = []

    def mine(template: Any, clients: int, folder: Any, device: Any) -> Store:
        made.append((clients, folder))
        return MemoryStore(template, clients, device)

    one, other = (
        run("loop", models.mlp(6, 5, 4), numbers(6), ALT, store=store) for store in (mine, "memory")
    )
    for i in range(5):
        for name, x in other.client(i).personal.items():
            assert torch.equal(one.client(i).personal[name], x)
    assert made == [(5, None)]


@each("method", [pt.fedavg(lr=0.2), pt.fedalt("output", lr=0.2), pt.scaffold(lr=0.2)])
@each("work", [{"steps": 2, "batch": 8}, {"epochs": 1, "batch": 16}])
def test_cohorts_of_many_sizes_are_stacks_of_few(method, work, monkeypatch) -> None:
    """Rows that are there for the size alone change nothing, whoever they repeat; steps are traced once."""
    data = pt.data.digits(clients=60, partition=pt.data.dirichlet(0.5), seed=1)
    sizes: dict[str, set[int]] = {"cohorts": set(), "stacks": set()}
    chunk, call = Vmap._chunk, Vmap.__call__

    def seen(self, program, clients, *rest):
        if program.trains:
            sizes["stacks"].add(len(clients))
        return chunk(self, program, clients, *rest)

    def called(self, program, clients, *rest):
        if program.trains:
            sizes["cohorts"].add(len(clients))
        return call(self, program, clients, *rest)

    monkeypatch.setattr(Vmap, "_chunk", seen)
    monkeypatch.setattr(Vmap, "__call__", called)

    def run(executor: str):
        return pt.federate(
            pt.models.mlp(64, 8, 10, seed=0), data, method, rounds=15, cohort=20, executor=executor,
            schedule=pt.schedule.synchronous("poisson"), baselines=False, evaluate_every=15, seed=2, **work,
        )  # fmt: skip

    stacked = run("vmap")
    assert len(sizes["cohorts"]) >= 8
    assert len(sizes["stacks"]) <= 5
    alone = run("loop")
    for k, value in alone.shared.items():
        assert torch.allclose(stacked.shared[k], value, atol=1e-5), k
    for i in range(60):
        for k, value in alone.client(i).personal.items():
            assert torch.allclose(stacked.client(i).personal[k], value, atol=1e-5), (i, k)
    assert [row["reports"] for row in stacked.clients] == [row["reports"] for row in alone.clients]


def test_cohorts_of_a_fixed_size_are_stacked_as_they_are(monkeypatch) -> None:
    sizes, chunk = set(), Vmap._chunk

    def seen(self, program, clients, *rest):
        if program.trains:
            sizes.add(len(clients))
        return chunk(self, program, clients, *rest)

    monkeypatch.setattr(Vmap, "_chunk", seen)
    pt.federate(
        pt.models.logistic(64, 10), pt.data.digits(clients=30), pt.fedavg(lr=0.1), rounds=3, cohort=21,
        steps=2, batch=8, executor="vmap", baselines=False, evaluate_every=3,
    )  # fmt: skip
    assert sizes == {21}
