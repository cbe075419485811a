"""MOON, FedProto and FedRoD beyond what every method is asked for, and against loops of modules in torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita as pt
from partita.algorithms.fedproto import PROTOTYPES, SAMPLES
from partita.core.types import Upload
from partita.data import FederatedData
from support import each

CLASSES, ROUNDS, STEPS, LR = 4, 4, 3, 0.1


def made(sizes: tuple[int, ...] = (6, 9, 4, 7), balanced: bool = False) -> FederatedData:
    """Images of 6 × 6 pixels, the classes of each client skewed or balanced; as many for testing."""
    rng = np.random.default_rng(0)
    both = [n for n in sizes for _ in range(2)]
    start = np.cumsum(both) - both
    ranges = np.stack([start, both], axis=1)
    client = np.repeat(np.arange(len(both)) // 2, both)
    y = (client + rng.integers(0, 2, len(client))) % CLASSES
    if balanced:
        y = np.concatenate([np.arange(n) % CLASSES for n in both])
    x = rng.normal(size=(CLASSES, 36))[y] + 0.8 * rng.normal(size=(len(y), 36))
    return FederatedData.make(x.reshape(-1, 1, 6, 6), y, ranges[::2], ranges[1::2])


DATA = made()


class Net(nn.Module):
    """A convolution, features that may be negative, and a last layer that is registered first."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.classifier = nn.Linear(5, CLASSES)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


def federate(method: Any, data: FederatedData = DATA, **settings: Any) -> pt.Run:
    fixed = {"rounds": ROUNDS, "epochs": STEPS, "executor": "vmap", "baselines": False, "progress": False}
    return pt.federate(settings.pop("model", Net()), data, method, **{**fixed, **settings})


def weights(data: FederatedData = DATA) -> list[float]:
    return (data.sizes() / data.sizes().sum()).tolist()


def mean(models: list[nn.Module]) -> dict[str, Tensor]:
    states = [m.state_dict() for m in models]
    return {k: sum(a * s[k] for a, s in zip(weights(), states)) for k in states[0]}  # type: ignore[misc]


def sgd(loss: Tensor, parameters: list[nn.Parameter], lr: float = LR) -> None:
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
        p.data -= lr * g


def assert_models(run: pt.Run, i: int, expected: dict[str, Tensor]) -> None:
    for name, value in run.personalized(i).items():
        torch.testing.assert_close(value, expected[name], atol=1e-9, rtol=0, msg=f"client {i}, {name}")


both_executors = each("executor", ["loop", "vmap"])


# ---- the methods as their authors' programs are written, with modules: full batches, everybody in each round


@both_executors
def test_moon(executor: str) -> None:
    server, previous = Net(), [Net() for _ in range(4)]
    cos = nn.CosineSimilarity(dim=-1)
    for _ in range(ROUNDS):
        models = [copy.deepcopy(server) for _ in range(4)]
        for i, net in enumerate(models):
            x, y = DATA.client(i)
            for _ in range(STEPS):
                z, z_glob, z_prev = (m.body(x) for m in (net, server, previous[i]))
                pairs = torch.stack([cos(z, z_glob.detach()), cos(z, z_prev.detach())], 1) / 0.3
                contrast = F.cross_entropy(pairs, torch.zeros(len(y), dtype=torch.int64))
                sgd(F.cross_entropy(net(x), y) + 2.0 * contrast, list(net.parameters()))
        previous = models
        server = copy.deepcopy(server)
        server.load_state_dict(mean(models))
    run = federate(pt.moon(LR, mu=2.0, tau=0.3), executor=executor)
    for name, value in run.shared.items():
        torch.testing.assert_close(value, server.state_dict()[name], atol=1e-9, rtol=0)


class Tagger(nn.Module):
    """A label for each position of a sequence, of features of that position alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        labels: Tensor = self.head(self.body(self.words(input_ids)).tanh())
        return labels


def test_moon_does_not_count_padding() -> None:
    """One client has short sequences, which are padded when it is stacked with another."""
    rng = np.random.default_rng(0)
    owner = np.repeat(["a", "b"], 20)
    ids = [rng.integers(1, 20, n) for n in np.where(owner == "a", 3, rng.integers(14, 20, 40))]
    data = pt.data.from_arrays({"input_ids": ids}, [i % 3 for i in ids], owner, test=0.25)
    work = {"model": Tagger(), "epochs": None, "steps": 2, "batch": 4}
    loop, vmap = (federate(pt.moon(lr=1.0, mu=5.0), data, executor=e, **work) for e in ("loop", "vmap"))
    for name, value in loop.shared.items():
        torch.testing.assert_close(vmap.shared[name], value, atol=1e-5, rtol=0)


class Mean(nn.Module):
    """The mean of the logits of real positions: `layer` takes positions, `pooled` returns sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.pooled = nn.Embedding(9, 5), nn.Linear(5, 3), nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        share = (attention_mask / attention_mask.sum(1, keepdim=True)).unsqueeze(-1)
        h = torch.tanh(self.embedding(input_ids))
        self.pooled((h * share).sum(1))
        logits: Tensor = (self.layer(h) * share).sum(1)
        return logits


def test_moon_of_sequences_with_one_label_takes_features_that_are_pooled() -> None:
    rng = np.random.default_rng(0)
    x = [rng.integers(1, 9, n) for n in rng.integers(1, 20, 24)]
    data = pt.data.from_arrays({"input_ids": x}, np.arange(24) % 3, np.arange(24) % 4, validation=0)
    given: dict[str, Any] = {"batch": 2, "epochs": 1}
    with pytest.raises(ValueError, match=r"features='layer': moon would count the padding .* nn.Identity"):
        federate(pt.moon(lr=1.0, mu=5.0), data, model=Mean(), **given)
    loop, vmap = (
        federate(pt.moon(lr=1.0, mu=5.0), data, model=Mean(), features="pooled", executor=executor, **given)
        for executor in ("loop", "vmap")
    )
    for name, value in loop.shared.items():
        torch.testing.assert_close(vmap.shared[name], value, atol=1e-5, rtol=0)


@both_executors
def test_fedproto(executor: str) -> None:
    models: list[Net] = [Net() for _ in range(4)]
    known: dict[int, Tensor] = {}
    for _ in range(ROUNDS):
        sent: dict[int, list[tuple[Tensor, int]]] = {}
        for i, net in enumerate(models):
            x, y = DATA.client(i)
            for _ in range(STEPS):
                h = net.body(x)
                goal = torch.stack([known.get(int(k), row.detach()) for k, row in zip(y, h)])
                sgd(F.cross_entropy(net(x), y) + 1.5 * F.mse_loss(h, goal), list(net.parameters()))
            for k in y.unique().tolist():
                own = net.body(x[y == k]).detach()
                sent.setdefault(k, []).append((own.mean(0), len(own)))
        known |= {k: sum(n * c for c, n in v) / sum(n for _, n in v) for k, v in sent.items()}  # type: ignore[misc]
    classifier = federate(pt.fedproto(LR, 1.5, predict="classifier"), executor=executor)
    nearest = federate(pt.fedproto(LR, 1.5), executor=executor)
    points = torch.stack([known[k] for k in range(CLASSES)])
    for i, net in enumerate(models):
        assert_models(classifier, i, net.state_dict())
        x, _ = DATA.client(i, "test")
        distances = torch.cdist(net.body(x), points)
        assert torch.equal(nearest.client(i).model()(x).argmax(1), distances.argmin(1))
        soft = torch.softmax(-distances.square(), 1)
        torch.testing.assert_close(torch.softmax(nearest.client(i).model()(x), 1), soft)


@both_executors
def test_fedrod(executor: str) -> None:
    server, heads = Net(), [nn.Linear(5, CLASSES).double() for _ in range(4)]
    for head in heads:
        head.load_state_dict({k: torch.zeros_like(v) for k, v in head.state_dict().items()})
    for _ in range(ROUNDS):
        models = [copy.deepcopy(server) for _ in range(4)]
        for i, net in enumerate(models):
            x, y = DATA.client(i)
            spread = torch.bincount(y, minlength=CLASSES).double().log()
            for _ in range(STEPS):
                rep = net.body(x)
                out = net.classifier(rep)
                personal = F.cross_entropy(out.detach() + heads[i](rep.detach()), y)
                sgd(F.cross_entropy(out + spread, y), list(net.parameters()))
                sgd(personal, list(heads[i].parameters()), 0.3)
        server = copy.deepcopy(server)
        server.load_state_dict(mean(models))
    run = federate(pt.fedrod(LR, personal_lr=0.3), executor=executor)
    for name, value in run.shared.items():
        torch.testing.assert_close(value, server.state_dict()[name], atol=1e-9, rtol=0)
    for i, head in enumerate(heads):
        x, _ = DATA.client(i, "test")
        rep = server.body(x)
        expected = server.classifier(rep) + head(rep)
        torch.testing.assert_close(run.client(i).model()(x), expected, atol=1e-9, rtol=0)


# ---- what they come down to


def test_fedrod_with_balanced_classes_is_fedavg_for_the_generic_model() -> None:
    data = made((8, 8, 12, 4), balanced=True)
    rod, average = (federate(m, data) for m in (pt.fedrod(LR), pt.fedavg(LR)))
    for name, value in rod.shared.items():
        torch.testing.assert_close(value, average.shared[name], atol=1e-12, rtol=0)
    assert any(not torch.equal(rod.personalized(0)[k], v) for k, v in average.shared.items())


def test_fedrod_begins_with_the_generic_model() -> None:
    """A client that was never seen predicts as the server does."""
    run = federate(pt.fedrod(LR), rounds=1, cohort=1)
    never = [i for i in range(4) if not run.client(i).trained]
    assert len(never) == 3
    for i in never:
        for name, value in run.personalized(i).items():
            assert torch.equal(value, run.shared[name])


def test_newcomers_of_fedrod_find_a_head_for_the_servers_model() -> None:
    run = federate(pt.fedrod(LR, personal_lr=0.3))
    after = run.personalize(made((5, 8)), rounds=5)
    for i in range(2):
        model = after.client(i).model().state_dict()
        for name, value in run.shared.items():
            assert torch.equal(model[name], value) == name.startswith("body")


def test_a_pipeline_goes_on_from_the_personal_head() -> None:
    """h + ψ_i is what the next stage begins with, and not ψ_i alone."""
    rod = pt.stage(pt.fedrod(LR), rounds=2)
    run = federate(pt.pipeline(rod, pt.stage(pt.finetune("classifier.*", 0.0), epochs=1)), rounds=None)
    alone = federate(pt.fedrod(LR), rounds=2)
    for i in range(4):
        assert_models(run, i, {**alone.shared, **alone.client(i).personal})


def test_a_class_without_a_prototype_is_never_predicted_by_one() -> None:
    run = federate(pt.fedproto(LR), rounds=1, cohort=1)
    (seen,) = [i for i in range(4) if run.client(i).trained]
    has = set(DATA.client(seen)[1].tolist())
    x = torch.cat([DATA.client(i, "test")[0] for i in range(4)])
    for i in range(4):
        assert set(run.client(i).model()(x).argmax(1).tolist()) <= has


# ---- hostile clients


def aggregated(extra: dict[str, Tensor], weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """What the server makes of these prototypes."""
    bind = pt.fedproto(LR, **options).aggregate
    return bind(None)(Upload({}, weight, extra), torch.tensor(0)).extra  # type: ignore[arg-type]


def test_nobody_counts_for_more_samples_than_it_has() -> None:
    honest, liar = torch.tensor([3.0, 1.0]), torch.tensor([1e30, -5.0])
    points = torch.stack([torch.ones(2, 3), torch.full((2, 3), 7.0)])
    extra = {PROTOTYPES: points, SAMPLES: torch.stack([honest, liar])}
    found = aggregated(extra, torch.tensor([4.0, 4.0]))
    torch.testing.assert_close(found[SAMPLES], torch.tensor([7.0, 1.0]))
    torch.testing.assert_close(found[PROTOTYPES][0], torch.full((3,), 3 * 1.0 + 4 * 7.0))
    torch.testing.assert_close(found[PROTOTYPES][1], torch.ones(3))


def test_an_aggregator_combines_the_prototypes_of_each_class() -> None:
    points = torch.tensor([1.0, 2.0, 900.0, 5.0]).view(4, 1, 1).expand(4, 2, 3).clone()
    samples = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    extra = {PROTOTYPES: points, SAMPLES: samples}
    found = aggregated(extra, samples.sum(1), aggregate=pt.aggregate.coordinate_median())
    mean = found[PROTOTYPES] / found[SAMPLES][:, None]
    torch.testing.assert_close(mean, torch.tensor([[2.0] * 3, [5.0] * 3]))


@each(
    "attack",
    [pt.attack.sign_flip(1e6), pt.attack.gaussian(1e3), pt.attack.nonfinite(), pt.attack.malformed()],
)
def test_attacks_meet_the_prototypes(attack: Any) -> None:
    method = pt.fedproto(LR, aggregate=pt.aggregate.coordinate_median(), weighting="uniform")
    run = federate(method, attack=attack, byzantine=[1])
    honest = [r for r in run.clients if not r["byzantine"]]
    assert all(r["personal"] is not None for r in honest)
    for i in (0, 2, 3):
        assert all(bool(torch.isfinite(v).all()) for v in run.personalized(i).values())
    assert run.summary()["excluded"] == (["1"] if attack.name in ("nonfinite", "malformed") else [])


# ---- what does not fit


class NotLinear(Net):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Conv1d(5, CLASSES, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x).unsqueeze(2)).squeeze(2)
        return logits


class WithoutBias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(5, CLASSES, bias=False).double()


@each(
    ("method", "settings", "message"),
    [
        (pt.fedrod(LR), {"model": NotLinear()}, r"^model='NotLinear': the last layer of NotLinear is Conv1d"),
        (
            pt.fedproto(LR),
            {"model": NotLinear()},
            r"^model='NotLinear': the last layer .*predict='prototypes'",
        ),
        (
            pt.fedproto(LR),
            {"model": WithoutBias()},
            r"^model='WithoutBias': expected a last layer with biases",
        ),
        (
            pt.fedproto(LR),
            {"features": "body"},
            r"^features='body': expected the features that the last layer",
        ),
        (pt.fedproto(LR, predict="classifier"), {"features": "body.0"}, r"^features='body.0': .*\[3, 4, 4\]"),
    ],
)
def test_models_that_do_not_fit_are_refused(method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federate(method, **settings)


def test_targets_that_are_no_classes_are_refused() -> None:
    numbers = FederatedData.make(DATA.x, np.zeros((len(DATA.y), CLASSES)), DATA.train, DATA.test)
    refused = {
        "class_counts are asked for": pt.fedrod(LR),
        "fedproto.*targets that are classes": pt.fedproto(LR),
    }
    for reason, method in refused.items():
        with pytest.raises(ValueError, match=reason):
            federate(method, numbers)


@each("model", [NotLinear(), WithoutBias()], ids=lambda m: type(m).__name__)
def test_other_last_layers_predict_by_themselves(model: nn.Module) -> None:
    runs = [
        federate(pt.fedproto(LR, predict="classifier"), model=model, features="body", executor=e)
        for e in ("loop", "vmap")
    ]
    for i in range(4):
        assert_models(runs[1], i, runs[0].personalized(i))


def test_clients_that_forget_have_no_previous_model() -> None:
    with pytest.warns(UserWarning, match="state='reset': moon relies on what clients remember"):
        federate(pt.moon(LR), state="reset", rounds=1)
