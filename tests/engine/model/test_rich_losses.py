"""Losses that ask for more than (output, target), in whole runs: what they get, stacked and alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita as pt
import support
from partita.algorithms.local.sgd import together
from partita.core.terms import with_term
from partita.data import FederatedData
from partita.engine.execute.plan import class_counts

SIZES = (5, 4, 1, 0, 7, 6)


def data(dtype: type = np.float64, **changes: Any) -> FederatedData:
    rng = np.random.default_rng(0)
    sizes = np.array([n for n in SIZES for _ in range(2)])  # as many for testing
    start = np.cumsum(sizes) - sizes
    ranges = np.stack([start, sizes], axis=1)
    y = rng.integers(0, 3, sizes.sum())
    x = rng.normal(size=(3, 6))[y] + 0.5 * rng.normal(size=(len(y), 6))
    made = FederatedData.make(x.astype(dtype), y, ranges[::2], ranges[1::2])
    return made if not changes else FederatedData.make(**{"x": x, "y": y, **changes})


DATA = data()
AVG = pt.fedavg(0.2)


def everything(
    output: Tensor,
    target: Tensor,
    features: Tensor,
    inputs: Tensor,
    received_output: Tensor,
    previous_features: Tensor,
    class_counts: Tensor,
) -> Tensor:
    """Uses all that there is."""
    balanced = F.cross_entropy(output + (class_counts + 1).log(), target)
    near = (output - received_output).square().mean()
    away = F.cosine_similarity(features, previous_features).mean()
    return balanced + 0.5 * near + 0.2 * away + 0.1 * torch.tanh(features.sum(1) * inputs.sum(1)).mean()


def federate(loss: Any, method: Any = None, model: nn.Module | None = None, **settings: Any) -> pt.Run:
    fixed = {"rounds": 3, "cohort": 4, "epochs": 2, "batch": 3, "seed": 1, "executor": "vmap"}
    fixed |= {"baselines": False, "progress": False, "evaluate_every": 1}
    model = pt.models.mlp(6, 5, 3, seed=1).double() if model is None else model
    return pt.federate(
        model, settings.pop("data", DATA), method or pt.fedavg(0.2), loss=loss, **{**fixed, **settings}
    )


def assert_close(a: pt.Run, b: pt.Run, atol: float = 1e-9) -> None:
    one, other = support.tensors(a), support.tensors(b)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0)


METHODS = {
    "fedavg": pt.fedavg(0.2),
    "ditto": pt.ditto(0.2),
    "perfedavg": pt.perfedavg(0.2, alpha=0.1),  # several batches in a step, second derivatives
    "moon": pt.moon(0.2, accumulate=2),
}


@pytest.mark.filterwarnings("error:.*cannot be stacked")
@support.each("method", METHODS.values(), ids=METHODS)
def test_stacked_clients_get_what_each_gets_alone(method: Any) -> None:
    loop, vmap = (federate(everything, method, executor=e, rounds=2) for e in ("loop", "vmap"))
    assert_close(loop, vmap)
    for name in ("train_loss", "test.personal"):
        assert [r[name] for r in loop.metrics] == pytest.approx([r[name] for r in vmap.metrics])


# ---- what they get


def plain_run(rounds: int = 3) -> tuple[dict[str, Tensor], list[float]]:
    """fedavg on `everything`, written down with modules: full batches, all clients, one step a round."""
    server = pt.models.mlp(6, 5, 3, seed=1).double()
    previous = {i: server.state_dict() for i in range(len(SIZES))}
    previous = {i: {k: v.clone() for k, v in w.items()} for i, w in previous.items()}
    losses = []
    for _ in range(rounds):
        total, values = {k: torch.zeros_like(v) for k, v in server.state_dict().items()}, []
        for i, n in enumerate(SIZES):
            x, y = DATA.client(i)
            local, received, before = (pt.models.mlp(6, 5, 3).double() for _ in range(3))
            local.load_state_dict(server.state_dict())
            received.load_state_dict(server.state_dict())
            before.load_state_dict(previous[i])
            for _ in range(2 if n else 0):
                h, h_before = local.hidden1(x), before.hidden1(x).detach()
                counts = torch.bincount(y, minlength=3).double()
                loss = everything(local.output(h), y, h, x, received(x).detach(), h_before, counts)
                gradient = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for p, g in zip(local.parameters(), gradient):
                        p -= 0.2 * g
                values.append(n * loss.item() / 2)
            previous[i] = {k: v.clone() for k, v in local.state_dict().items()}
            total = {k: v + n / sum(SIZES) * local.state_dict()[k] for k, v in total.items()}
        server.load_state_dict(total)
        losses.append(sum(values) / sum(SIZES))
    return server.state_dict(), losses


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_is_the_one_that_is_written_down(executor: str) -> None:
    expected, losses = plain_run()
    run = federate(everything, cohort=None, batch=None, executor=executor)
    for name, value in run.shared.items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=0)
    assert [row["train_loss"] for row in run.metrics] == pytest.approx(losses)


def test_counts_are_those_of_each_clients_training_labels() -> None:
    found = class_counts(DATA, np.array([4, 0, 3]), 3)
    for row, client in zip(found, (4, 0, 3)):
        assert row.tolist() == np.bincount(DATA.client(client)[1], minlength=3).tolist()


def test_labels_that_are_no_class_are_not_counted() -> None:
    y = np.array([[0, 2, -100], [1, -100, -100], [2, 2, 2]])
    sequences = FederatedData.make(np.zeros((3, 2)), y, np.array([[0, 2], [2, 1]]))
    assert class_counts(sequences, np.arange(2), 3).tolist() == [[1, 1, 1], [0, 0, 3]]


def test_resumed_equals_straight(tmp_path: Any) -> None:
    """The previous model is part of what a checkpoint holds."""
    straight = federate(everything, rounds=4)
    federate(everything, rounds=2, out=tmp_path / "run")
    resumed = pt.load(tmp_path / "run", model=pt.models.mlp(6, 5, 3, seed=1).double())
    assert {f"previous.{k}" for k in straight.shared} == set(resumed.client(0).memory)
    again = federate(everything, rounds=4, out=tmp_path / "run", resume=True)
    for name, value in support.tensors(straight).items():
        assert torch.equal(support.tensors(again)[name], value), name


@support.each(
    "capacity",
    [
        pt.capacity.width({"strong": 1.0, "weak": 0.5}),
        pt.capacity.depth({"strong": 0, "weak": 1}),
        pt.capacity.heterofl({"strong": 1.0, "weak": 0.5}),
    ],
    ids=lambda c: c.name,
)
def test_weak_devices_have_their_own_part_of_everything(capacity: Any) -> None:
    def loss(output: Tensor, target: Tensor, features: Tensor, previous_features: Tensor) -> Tensor:
        apart = (features - previous_features).square().mean(1)
        return F.cross_entropy(output, target) + apart.mean()

    loss.__name__ = "cross_entropy"  # what the masked loss of heterofl takes
    runs = [
        federate(loss, pt.moon(0.2), executor=executor, capacity=capacity, rounds=2)
        for executor in ("loop", "vmap")
    ]
    assert_close(*runs)


def test_counts_reach_clients_whose_samples_pass_frozen_blocks() -> None:
    """Their executor has other data, of which it knows only what it needs; evaluation has the same counts."""
    seen: list[list[float]] = []

    def loss(output: Tensor, target: Tensor, class_counts: Tensor) -> Tensor:
        if len(target):
            seen.append(class_counts.tolist())
        return F.cross_entropy(output, target)

    federate(
        loss,
        capacity=pt.capacity.depth({"strong": 0, "weak": 1}, ["weak"] * 6),
        executor="loop",
        rounds=1,
        cohort=None,
    )
    counts = [row.tolist() for row in class_counts(DATA, np.arange(6), 3)]
    trained = [row for row in seen if row in counts]
    assert {tuple(row) for row in trained} >= {tuple(c) for c, n in zip(counts, SIZES) if n}
    assert [0.0, 0.0, 0.0] not in seen


# ---- where features are


class Deep(nn.Module):
    """An encoder, and a last layer that is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)
        self.encoder = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh()
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.classifier(input=self.encoder(x)), "other": x}


def lengths(output: Tensor, target: Tensor, features: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + features.square().sum(1).mean()


def test_features_are_what_the_last_layer_takes_or_a_submodule_returns() -> None:
    torch.manual_seed(0)
    model = Deep().double()
    settings = {"model": model, "norm": "global"}
    same = federate(lengths, **settings), federate(lengths, features="encoder", **settings)
    assert_close(*same)
    inner = federate(lengths, features="encoder.0", **settings)
    assert not torch.equal(inner.shared["encoder.0.weight"], same[0].shared["encoder.0.weight"])
    assert_close(federate(lengths, executor="loop", **settings), same[0])


def test_the_features_of_a_linear_model_are_its_inputs() -> None:
    def loss(output: Tensor, target: Tensor, features: Tensor, inputs: Tensor) -> Tensor:
        assert features.shape == inputs.shape
        return F.cross_entropy(output, target) + (features - inputs).square().sum()

    model = nn.Linear(6, 3).double()
    assert_close(federate(loss, model=model), federate("cross_entropy", model=model))


@support.each(
    ("settings", "message"),
    [
        ({"features": "encode"}, r"^features='encode': expected a submodule of Deep.*did you mean 'encoder'"),
        ({"features": 3}, r"^features=3"),
        ({"loss": lambda output, target, featres: output}, r"^loss=.*a loss may also ask for features"),  # noqa: ARG005
        ({"metric": "loss"}, r"^metric='loss': the loss asks for features"),
    ],
)
def test_mistakes_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federate(**{"loss": lengths, "model": Deep().double(), "norm": "global", **settings})


def test_a_submodule_that_is_none_is_refused_even_if_nobody_asks() -> None:
    with pytest.raises(ValueError, match=r"^features='nohere': expected a submodule of Deep"):
        federate("cross_entropy", model=Deep().double(), norm="global", features="nohere")
    federate("cross_entropy", model=Deep().double(), norm="global", features="encoder")


def test_counts_of_numbers_are_refused() -> None:
    def loss(output: Tensor, target: Tensor, class_counts: Tensor) -> Tensor:
        return F.mse_loss(output, target) + class_counts.sum()

    numbers = data(y=np.random.default_rng(0).normal(size=(46, 3)), train=np.array([[0, 23], [23, 23]]))
    with pytest.raises(ValueError, match=r"^shape of y, torch.float64=.*class_counts are asked for"):
        federate(loss, data=numbers, cohort=None)


def test_a_loss_that_mixes_samples_is_not_stacked() -> None:
    """As for one of (output, target): short batches would be something else."""

    def mixing(output: Tensor, target: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + (features - features.mean(0)).square().mean()

    with pytest.warns(UserWarning, match=r"cannot be stacked.*is not the mean of its values on the samples"):
        vmap = federate(mixing)
    assert_close(vmap, federate(mixing, executor="loop"), atol=0)


def test_scores_are_by_the_loss_of_the_run() -> None:
    """The term of a method is no part of them."""
    plain, moon = (federate("cross_entropy", m, metric="loss", rounds=1) for m in (AVG, pt.moon(0.2, mu=5.0)))
    assert [r["personal"] for r in moon.clients] == pytest.approx([r["personal"] for r in plain.clients])
    assert moon.metrics[0]["train_loss"] > plain.metrics[0]["train_loss"] + 1.0


def test_a_rule_may_bring_a_model_of_its_own() -> None:
    """`teacher_output` is that of the model that the rule puts into its batches as `teacher`."""
    seen: list[Tensor] = []

    def match(output: Tensor, teacher_output: Tensor) -> Tensor:
        seen.append((output - teacher_output).detach())
        return (output - teacher_output).square().mean(1)

    def taught(problem: Any) -> Any:
        rule = together(problem, lambda t, n: 0.1, pt.optim.sgd())  # noqa: ARG005

        def told(step: Callable[..., Any]) -> Callable[..., Any]:
            teacher = {k: 0.5 * v for k, v in problem.initial.items()}
            return lambda c, batch, lr: step(c, batch._replace(given={**batch.given, "teacher": teacher}), lr)

        return rule._replace(phases=tuple(p._replace(step=told(p.step)) for p in rule.phases))

    distilled = replace(pt.fedavg(0.1), local=taught, loss=lambda loss: with_term(loss, match))
    runs = [federate("cross_entropy", distilled, executor=executor) for executor in ("loop", "vmap")]
    assert_close(*runs)
    assert seen
