"""Losses and metrics that are no mean over samples have the same values stacked as alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita import models
from partita.core.criterion import LOSSES, own
from partita.engine.model.by_sample import NOT_BY_SAMPLE
from support import each

WEIGHT = torch.tensor([0.05, 0.05, 0.05, 0.05, 0.05, 1.0, 1.0, 1.0, 1.0, 20.0])


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHT)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all labels of a batch that count, as language models have it."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(ignored: bool = True) -> pt.data.FederatedData:
    """Sequences of several lengths: the labels behind their ends are -100."""
    draw = np.random.default_rng(0)
    n, length = 70, 6
    x = draw.integers(0, 9, (n, length))
    y = (x * 3 + 1) % 9
    if ignored:
        y[np.arange(length) >= draw.integers(1, length + 1, n)[:, None]] = -100
    client = np.repeat(np.arange(6), (3, 5, 9, 13, 17, 23))
    return pt.data.from_arrays(x, y, client, test=0.2, seed=0)


class Tagger(nn.Module):
    def __init__(self, classes_last: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.classes_last = nn.Embedding(9, 8), nn.Linear(8, 9), classes_last

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(torch.tanh(self.embedding(x)))
        return output if self.classes_last else output.transpose(1, 2)


def digits(seed: int) -> pt.data.FederatedData:
    return pt.data.digits(clients=20, partition=pt.data.label_skew(classes=3), seed=seed)


def trained(model: Any, data: Any, executor: str, **options: Any) -> pt.Run:
    usual = {"rounds": 3, "batch": 16, "baselines": False, "progress": False}
    return pt.federate(model, data, pt.fedavg(lr=0.1), executor=executor, **{**usual, **options})


def movement(run: pt.Run, other: pt.Run, start: dict[str, Tensor]) -> float:
    """How far two runs are apart, beside how far the first one has moved."""
    apart = sum(float((run.shared[k] - other.shared[k]).square().sum()) for k in run.shared)
    moved = sum(float((run.shared[k] - start[k]).square().sum()) for k in run.shared)
    return (apart / moved) ** 0.5


@each(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHT),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, ignore_index=3),
        nn.CrossEntropyLoss(reduction="sum"),
        partial(F.cross_entropy, weight=WEIGHT),
    ],
    ids=["weight", "smoothed", "sum", "partial"],
)
def test_torchs_losses_are_stacked(loss: Any) -> None:
    model, data = models.mlp(64, 16, 10), digits(seed=0)
    rate = 0.01 if getattr(loss, "reduction", "") == "sum" else 0.1
    loop, vmap = (
        pt.federate(
            model, data, pt.fedavg(lr=rate), rounds=2, batch=16, executor=e, loss=loss, baselines=False
        )
        for e in ("loop", "vmap")
    )
    assert "fallback" not in vmap.config["executor"]["picks"]
    assert movement(loop, vmap, model.state_dict()) < 1e-5


@each("seed", range(4))
def test_a_function_with_class_weights_is_noticed_whatever_the_first_samples_are(seed: int) -> None:
    model, data = models.mlp(64, 10), digits(seed)
    with pytest.warns(UserWarning, match="its loss on a batch is not the mean"):
        run = trained(model, data, "vmap", loss=weighted, rounds=1, cohort=2)
    assert run.config["executor"]["picks"]["fallback"]["why"] == NOT_BY_SAMPLE


def test_a_mean_over_tokens() -> None:
    data = tokens()
    model = Tagger(classes_last=False)
    loop, vmap = (trained(model, data, e, loss=nn.CrossEntropyLoss()) for e in ("loop", "vmap"))
    assert "fallback" not in vmap.config["executor"]["picks"]
    assert movement(loop, vmap, model.state_dict()) < 1e-5
    same = Tagger(classes_last=True)
    same.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="its loss on a batch is not the mean"):
        fallen = trained(same, data, "vmap", loss=of_tokens)
    assert movement(loop, fallen, model.state_dict()) < 1e-5
    np.testing.assert_allclose(
        loop.scores("global"), fallen.scores("global"), rtol=1e-5
    )  # accuracy of both forms


def test_where_every_token_counts_a_function_of_tokens_is_stacked() -> None:
    run = trained(Tagger(classes_last=True), tokens(ignored=False), "vmap", loss=of_tokens)
    assert "fallback" not in run.config["executor"]["picks"]


@each(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHT[:5]),
        nn.CrossEntropyLoss(weight=WEIGHT[:5], label_smoothing=0.2),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(weight=WEIGHT[5:], reduction="sum"),
        nn.NLLLoss(weight=WEIGHT[3:8]),
        F.cross_entropy,
        partial(F.nll_loss, weight=WEIGHT[4:9], ignore_index=1),
    ],
)
@each("places", [(), (4,)])
def test_parts_of_torchs_losses(loss: Any, places: tuple[int, ...]) -> None:
    """Against torch on the real samples alone: value and gradient, padding of any kind."""
    draw = torch.Generator().manual_seed(0)
    output = F.log_softmax(torch.randn(9, 5, *places, generator=draw), 1)
    target = torch.randint(0, 5, (9, *places), generator=draw)
    if places:
        ignored = getattr(loss, "ignore_index", getattr(loss, "keywords", {}).get("ignore_index", -100))
        target[torch.rand(target.shape, generator=draw) < 0.4] = ignored
    mask = torch.tensor([1.0] * 6 + [0.0] * 3)
    criterion = own(loss)

    def padded(o: Tensor) -> Tensor:
        return criterion.of_batch(o, target, mask)

    expected = torch.func.grad_and_value(lambda o: loss(o, target[:6]))(output[:6])
    gradient, value = torch.func.grad_and_value(padded)(output)
    torch.testing.assert_close((gradient[:6], value), expected)
    assert not gradient[6:].any()
    stacked = torch.func.vmap(padded)(torch.stack([output, output]))
    torch.testing.assert_close(stacked, value.expand(2))


def test_a_weighted_loss_as_metric_is_its_value_on_the_client() -> None:
    """Σ w ℓ / Σ w over all test samples of a client, however they were cut into batches."""
    data, loss = digits(seed=1), nn.CrossEntropyLoss(weight=WEIGHT)
    for executor in ("loop", "vmap"):
        run = trained(models.mlp(64, 10), data, executor, loss=loss, metric="loss", rounds=1)
        found = run.scores("global")
        for i in (0, 7, 19):
            x, y = data.client(i, "test")
            assert found[i] == pytest.approx(loss(run.model()(x), y).item(), rel=1e-5)


def test_binary_cross_entropy_of_several_labels() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 4)).astype("float32")
    y = (x @ draw.normal(size=(4, 5)) > 0).astype("float32")
    data = pt.data.from_arrays(x, y, np.repeat(np.arange(4), (6, 11, 17, 26)), test=0.25, seed=0)
    output, target = torch.randn(6, 5), torch.randint(0, 2, (6, 5)).float()
    each = LOSSES["binary_cross_entropy"].each(output, target)
    expected = F.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)
    torch.testing.assert_close(each, expected)
    model = nn.Linear(4, 5)
    runs = [
        trained(model, data, e, loss="binary_cross_entropy", metric="loss", batch=4) for e in ("loop", "vmap")
    ]
    assert "fallback" not in runs[1].config["executor"]["picks"]
    assert movement(*runs, model.state_dict()) < 1e-5
    inputs, labels = data.client(3, "test")
    value = F.binary_cross_entropy_with_logits(runs[0].model()(inputs), labels)
    assert runs[0].scores("global")[3] == pytest.approx(value.item(), rel=1e-5)


# ---- metrics


def f1(output: Tensor, target: Tensor) -> Tensor:
    """Macro-averaged."""
    hit = F.one_hot(output.argmax(-1), 10)[..., :10].float()
    real = F.one_hot(target, 10).float()
    return (2 * (hit * real).sum(0) / (hit.sum(0) + real.sum(0)).clamp(min=1)).mean()


def balanced(output: Tensor, target: Tensor) -> Tensor:
    right = (output.argmax(-1) == target).float()
    real = F.one_hot(target, 10).float()
    return ((right[:, None] * real).sum(0) / real.sum(0).clamp(min=1)).sum() / (real.sum(0) > 0).sum()


def auc(output: Tensor, target: Tensor) -> Tensor:
    from sklearn.metrics import roc_auc_score

    scores = output.softmax(-1)[:, 1].detach().numpy()
    return torch.tensor(roc_auc_score((target == 1).numpy(), scores))


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).exp()


def of_clients(function: Any, run: pt.Run, data: pt.data.FederatedData) -> list[float]:
    """The metric on all test samples of each client."""
    pairs = [data.client(i, "test") for i in range(data.clients)]
    return [float(function(run.model()(x), y)) for x, y in pairs]


@pytest.mark.filterwarnings("ignore:Only one class")
@each("function", [f1, balanced, auc, perplexity])
@each("executor", ["loop", "vmap"])
def test_a_metric_that_is_no_mean_over_samples_sees_a_whole_client(function: Any, executor: str) -> None:
    data, metric = digits(0), pt.Metric(function, higher_is_better=True)
    run = trained(models.mlp(64, 10), data, executor, metric=metric, rounds=1)
    expected = of_clients(function, run, data)
    np.testing.assert_allclose(run.scores("global"), expected, rtol=1e-5)
    assert np.isfinite(run.summary()["test"]["global"])  # the mean is over those who have a score


def test_r2_is_that_of_a_client() -> None:
    def r2(output: Tensor, target: Tensor) -> Tensor:
        return 1 - (output - target).square().sum() / (target - target.mean()).square().sum()

    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    data = pt.data.from_arrays(x, x[:, :1], np.arange(40) % 4)
    run = trained(nn.Linear(3, 1), data, "loop", metric=pt.Metric(r2, higher_is_better=True))
    np.testing.assert_allclose(run.scores("global"), of_clients(r2, run, data), rtol=1e-4)


def brier(output: Tensor, target: Tensor) -> Tensor:
    return (output.softmax(-1) - F.one_hot(target, output.shape[-1])).square().sum(-1).mean()


@pytest.mark.parametrize("function", [brier, perplexity, partial(brier)])
def test_the_direction_of_an_unknown_metric_is_asked_for(function: Any) -> None:
    with pytest.raises(ValueError, match=r"says which way is better: partita\.Metric"):
        trained(models.mlp(64, 10), digits(0), "loop", metric=function)


def test_the_direction_is_what_was_said() -> None:
    run = trained(
        models.mlp(64, 10), digits(0), "auto", metric=pt.Metric(brier, higher_is_better=False), rounds=1
    )
    assert not run.higher_is_better
    assert run.summary()["metric"] == "brier"
    known = trained(models.mlp(64, 10), digits(0), "auto", metric=F.cross_entropy, rounds=1)
    assert not known.higher_is_better
    named = pt.Metric(brier, higher_is_better=False, name="Brier score")
    assert (
        trained(models.mlp(64, 10), digits(0), "auto", metric=named, rounds=1).summary()["metric"]
        == named.name
    )


@each(
    ("given", "field"),
    [
        ({"function": "f1", "higher_is_better": True}, "function"),
        ({"function": nn.MSELoss, "higher_is_better": False}, "function"),
        ({"function": brier, "higher_is_better": "yes"}, "higher_is_better"),
        ({"function": brier, "higher_is_better": True, "name": ""}, "name"),
    ],
)
def test_wrong_metrics(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}="):
        pt.Metric(**given)


class Counting:
    """As a metric of torchmetrics: it has a state, compares with anything, and says which way is better."""

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.seen = torch.zeros(()), 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right = self.right + (output.argmax(-1) == target).sum()
        self.seen += len(target)

    def compute(self) -> Tensor:
        return self.right / self.seen

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.update(output, target)
        return self.compute()

    def __eq__(self, other: object) -> bool:
        return True  # a metric that stands for the comparison: truthy

    def __hash__(self) -> int:
        return id(self)


def test_a_metric_with_a_state() -> None:
    data, model = digits(0), models.mlp(64, 10)
    ours = trained(model, data, "loop", metric="accuracy")
    for executor in ("loop", "pool", "vmap"):
        mine = trained(model, data, executor, metric=Counting())
        assert mine.summary()["metric"] == "Counting"
        assert mine.higher_is_better
        np.testing.assert_allclose(mine.scores("global"), ours.scores("global"), rtol=1e-6)


def probabilities(seed: int) -> pt.data.FederatedData:
    """Of two classes the second is so rare that the first samples of few clients have it."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(3000, 5)).astype(np.float32)
    y = ((x[:, 1] > 2.2) & (draw.random(3000) < 0.8)).astype(np.int64)
    return pt.data.from_arrays(x, y, np.sort(draw.integers(0, 15, 3000)), test=0.25, seed=seed)


@each("seed", range(6))
def test_a_weighted_loss_of_probabilities_is_noticed(seed: int) -> None:
    of_class = torch.tensor([1.0, 50.0])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight = of_class[target]
        return (weight * -output.gather(1, target[:, None])[:, 0].log()).sum() / weight.sum()

    model = nn.Sequential(nn.Linear(5, 2), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="is not the mean of its values on the samples"):
        trained(model, probabilities(seed), "vmap", loss=loss, rounds=1, batch=8)


def test_missing_labels_that_are_numbers_are_noticed() -> None:
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(4000, 5)).astype(np.float32), np.sort(draw.integers(0, 10, 4000))
    y = (x[:, 0] > 0).astype(np.float32)
    y[draw.random(4000) < 0.001] = -1  # so few that the first samples of the clients have none

    def loss(output: Tensor, target: Tensor) -> Tensor:
        there = (target >= 0).float()
        each = F.binary_cross_entropy_with_logits(output[:, 0], target.clamp(min=0), reduction="none")
        return (there * each).sum() / there.sum()

    data = pt.data.from_arrays(x, y, client, test=0.25, seed=0)
    with pytest.warns(UserWarning, match="is not the mean of its values on the samples"):
        trained(nn.Linear(5, 1), data, "vmap", loss=loss, metric="mse", rounds=1)


@pytest.mark.parametrize("batch", [7, 16, None])
def test_a_loss_that_only_runs_alone_trains_alone(batch: int | None) -> None:
    def brier(output: Tensor, target: Tensor) -> Tensor:
        return (torch.softmax(output, -1) - F.one_hot(target, 10)).square().sum(-1).mean()

    data = digits(seed=0)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        run = trained(models.mlp(64, 8, 10), data, "vmap", loss=brier, batch=batch, rounds=1)
    assert run.summary()["excluded"] == []


class Ghost(nn.Module):
    """Normalizes parts of a batch, each by itself: only batches of more than a part show it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.split(8)]) if self.training else self.norm(x)


class Centered(nn.Module):
    """The same without a layer of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return torch.cat([part - part.mean(0) * (len(part) >= 8) for part in x.split(8)])


@pytest.mark.parametrize("layer", [Ghost, Centered])
def test_layers_are_tried_with_batches_as_large_as_those_of_the_run(layer: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), layer(), nn.ReLU(), nn.Linear(8, 3))
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(200, 6)).astype(np.float32), draw.integers(0, 3, 200)
    data = pt.data.from_arrays(x, y, np.arange(200) % 4, test=0.2, seed=0)  # 40 for training
    start = {k: v.clone() for k, v in model.state_dict().items()}
    alone = trained(model, data, "loop", batch=20, norm="global", rounds=2)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        run = trained(model, data, "vmap", batch=20, norm="global", rounds=2)
    assert movement(alone, run, start) == 0


@each("ignored", [-100, -1, 255])
@each("kind", ["module", "partial", "lambda"])
def test_accuracy_does_not_count_what_the_loss_ignores(ignored: int, kind: str) -> None:
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(400, 6)).astype(np.float32), draw.integers(0, 8, 400)
    y = (x @ draw.normal(size=(6, 4))).argmax(1)
    y[draw.random(400) < 0.5] = ignored
    data = pt.data.from_arrays(x, y, client, test=0.4, seed=0)
    losses = {
        "module": nn.CrossEntropyLoss(ignore_index=ignored),
        "partial": partial(F.cross_entropy, ignore_index=ignored),
        "lambda": lambda o, t: F.cross_entropy(o, t, ignore_index=ignored),
    }
    run = trained(nn.Linear(6, 4), data, "loop", loss=losses[kind], batch=None)
    expected, counts = 0.0, 0
    for i in range(data.clients):
        test_x, test_y = data.client(i, "test")
        known = test_y != ignored
        right = (run.model()(test_x).argmax(-1) == test_y)[known].float().mean()
        expected, counts = expected + float(right) * len(test_y), counts + len(test_y)
    assert run.summary()["test"]["global"] == pytest.approx(expected / counts, abs=1e-6)


@pytest.mark.parametrize("ignored", [-100, -1, 0])
def test_accuracy_of_sequences_is_that_of_the_labels_that_count(ignored: int) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(1, 9, (60, 6))
    over = np.arange(6) >= draw.integers(1, 7, 60)[:, None]
    data = pt.data.from_arrays(x, np.where(over, ignored, x), np.arange(60) % 4, test=0.4, seed=0)
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    run = trained(Tagger(classes_last=False), data, "vmap", loss=loss, rounds=2)
    for i in range(data.clients):
        test_x, test_y = data.client(i, "test")
        right = run.model()(test_x).argmax(1) == test_y
        assert run.clients[i]["global"] == pytest.approx(
            float(right[test_y != ignored].float().mean()), abs=1e-6
        )


@each("classes_last", [True, False])
@each("length", [9, 6])
def test_the_axis_of_the_classes_is_found(classes_last: bool, length: int) -> None:
    x = np.random.default_rng(0).integers(0, 9, (60, length))  # 9 places of 9 classes: shapes do not tell
    data = pt.data.from_arrays(x, (x * 3 + 1) % 9, np.arange(60) % 4, test=0.4, seed=0)
    model = Tagger(classes_last)
    losses = [
        lambda o, t: F.cross_entropy(
            o.flatten(0, 1) if classes_last else o, t.flatten() if classes_last else t
        )
    ]
    losses += [] if classes_last else [nn.CrossEntropyLoss(reduction="sum")]
    for loss in losses:
        run = trained(model, data, "loop", loss=loss, rounds=1)
        pairs = [data.client(i, "test") for i in range(data.clients)]
        right = [run.model()(a).argmax(-1 if classes_last else 1) == b for a, b in pairs]
        expected = float(torch.cat(right).float().mean())
        assert run.summary()["test"]["global"] == pytest.approx(expected, abs=1e-6)


def test_the_loss_as_default_metric_is_that_of_a_client() -> None:
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 4
    data = pt.data.from_arrays(x, x[:, 0], client, test=0.4, seed=0)

    def rmse(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output[:, 0], target).sqrt()

    run = trained(nn.Linear(3, 1), data, "loop", loss=rmse)
    assert (run.summary()["metric"], run.higher_is_better) == ("rmse", False)
    np.testing.assert_allclose(run.scores("global"), of_clients(rmse, run, data), rtol=1e-5)
    assert trained(nn.Linear(3, 1), data, "loop", loss=rmse, metric="mse").summary()["metric"] == "mse"
