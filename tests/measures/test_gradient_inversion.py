"""What a server reconstructs from an upload: against plain loops, and where it must find much or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core import draws
from partita.core.types import Message, Tensors
from partita.data import FederatedData
from partita.privacy.inversion import (
    cosine_distance,
    labels_of,
    matched_errors,
    squared_distance,
    total_variation,
)
from support import each

FEATURES, CLASSES = 12, 5
QUIET: dict[str, Any] = {"baselines": False, "progress": False}


def samples(clients: int = 4, each_has: int = 6, shape: tuple[int, ...] = (FEATURES,)) -> FederatedData:
    g = torch.Generator().manual_seed(0)
    n = clients * each_has * 2
    x = torch.randn(n, *shape, generator=g, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    client = np.repeat(np.arange(clients), each_has * 2)
    return pt.data.from_arrays(x, y, client, test=0.5, validation=0)


DATA = samples()


def linear() -> nn.Module:
    return pt.models.logistic(FEATURES, CLASSES, seed=1).double()


def mlp() -> nn.Module:
    return pt.models.mlp(FEATURES, 16, CLASSES, seed=1).double()


def attacked(
    model: nn.Module, method: pt.Algorithm | None = None, data: FederatedData = DATA, **settings: Any
) -> dict[str, float]:
    """What the attack finds in the last round; its options are those that it has."""
    known = ("samples", "clients", "labels", "sees", "match", "tv", "iterations", "starts", "rate", "lr")
    known += ("knows_personal", "skips_zeros", "public")
    options = {k: settings.pop(k) for k in known if k in settings}
    given: dict[str, Any] = {"rounds": 1, "steps": 1, "batch": 1, "executor": "vmap", **QUIET, **settings}
    method = method or pt.fedavg(lr=0.1)
    measure = pt.measures.gradient_inversion(**{"public": 8, "samples": 1, **options})
    run = pt.federate(model, data, method, measures=[measure], **given)
    found: dict[str, float] = run.metrics[-1]["measures"]["gradient_inversion"]
    return found


# ---- pieces


def test_distances_are_those_of_flat_vectors() -> None:
    g, t = ({"a": torch.randn(3, 2), "b": torch.randn(4)} for _ in range(2))
    flat_g, flat_t = (torch.cat([x.flatten() for x in v.values()]).numpy() for v in (g, t))
    cosine = 1 - flat_g @ flat_t / np.linalg.norm(flat_g) / np.linalg.norm(flat_t)
    assert float(cosine_distance(g, t)) == pytest.approx(cosine, rel=1e-5)
    squared = ((flat_g - flat_t) ** 2).sum() / (flat_t**2).sum()
    assert float(squared_distance(g, t)) == pytest.approx(squared, rel=1e-5)
    assert float(cosine_distance({"a": 3 * t["a"], "b": 3 * t["b"]}, t)) == pytest.approx(0, abs=1e-6)


def test_total_variation_is_that_of_neighbours() -> None:
    x = torch.randn(2, 3, 4, 5)
    down = np.abs(np.diff(x.numpy(), axis=2)).mean()
    right = np.abs(np.diff(x.numpy(), axis=3)).mean()
    assert float(total_variation(x)) == pytest.approx(down + right, rel=1e-5)


def test_what_was_found_is_dealt_to_the_real_samples() -> None:
    real = np.random.default_rng(0).normal(size=(4, 3, 2))
    found = real[[2, 0, 3, 1]] + 0.01
    np.testing.assert_allclose(matched_errors(found, real), 1e-4, rtol=1e-6)
    twice = np.stack([real[0], real[0], real[1], real[2]])  # the second one must go to another sample
    assert (matched_errors(twice, real) > 0.1).sum() == 1


@each("labels", [[3], [0, 3], [1, 1], [4, 2, 4, 0], [2, 2, 2, 1]])
def test_labels_are_told_by_the_gradient_of_the_bias(labels: list[int]) -> None:
    net, y = linear(), torch.tensor(labels)
    x, public = (0.5 * torch.randn(n, FEATURES, dtype=torch.float64) for n in (len(y), 64))
    g = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))[-1]
    likely = net(public).softmax(1).mean(0)
    found = labels_of(0.01 * g, likely, torch.tensor(len(y)), len(y))  # whatever the length of the upload
    assert sorted(found.tolist()) == sorted(labels)


# ---- the attack, by hand


def plain_attack(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, public: Tensor, n: int) -> Any:
    """Geiping's attack by torch's own autograd and Adam, without a line of ours."""
    names = list(model.parameters())
    target = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), names)
    low, high = public.min(), public.max()
    dummy = start.clone().requires_grad_()
    adam = torch.optim.Adam([dummy], lr=0.1 * float(public.std()))
    for i in range(n):
        for group in adam.param_groups:
            passed = sum(i + 1 > share * n for share in (3 / 8, 5 / 8, 7 / 8))
            group["lr"] = 0.1 * float(public.std()) * 0.1**passed
        g = torch.autograd.grad(nn.functional.cross_entropy(model(dummy), y), names, create_graph=True)
        inner = sum((a * b).sum() for a, b in zip(g, target))
        lengths = [sum((a * a).sum() for a in v).sqrt() for v in (g, target)]
        distance = 1 - inner / (lengths[0] * lengths[1])
        adam.zero_grad()
        distance.backward()
        adam.step()
        with torch.no_grad():
            dummy.clamp_(low, high)
    return float(((dummy.detach() - x) ** 2).mean()), float(distance.detach())


@each("executor", ["loop", "vmap"])
def test_the_search_is_that_of_a_plain_loop(executor: str) -> None:
    data = samples(clients=2, each_has=1)
    public = torch.randn(8, FEATURES, dtype=torch.float64)
    errors, distances = [], []
    for i in range(2):
        x, y = data.client(i)
        assert isinstance(x, Tensor)
        key = draws.branch(draws.key(0, "start", 0, i), "inversion")
        noise = draws.normal(draws.places(key, (1, 1, FEATURES)))[0].double()
        start = (public.mean(0) + public.std() * noise).clamp(public.min(), public.max())
        error, distance = plain_attack(mlp(), x, y, start, public, 40)
        errors.append(error)
        distances.append(distance)
    found = attacked(mlp(), data=data, executor=executor, iterations=40, starts=1, public=public)
    assert found["mse"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert found["match"] == pytest.approx(np.mean(distances), rel=1e-4, abs=1e-9)
    real = torch.cat([data.client(i)[0] for i in range(2)])  # type: ignore[misc]
    assert found["guess"] == pytest.approx(float(((real - public.mean(0)) ** 2).mean()), rel=1e-6)
    assert found["error"] == pytest.approx(found["mse"] / found["guess"], rel=1e-9)


def test_one_sample_is_in_the_gradient_of_a_linear_layer() -> None:
    """By hand x = ∂f/∂W_j / ∂f/∂b_j; the search comes to the same, whatever the length of the upload."""
    data = samples(clients=1, each_has=1)
    x, y = data.client(0)
    net = linear()
    weight, bias = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    j = int(bias.abs().argmax())
    torch.testing.assert_close(weight[j] / bias[j], x[0])  # type: ignore[index]
    found = attacked(net, data=data, public=samples(2).x[:16], iterations=600)
    assert found["error"] < 1e-3
    assert found["labels"] == found["recovered"] == 1.0


@each("settings", [{}, {"match": "squared", "lr": 0.1}, {"labels": "known"}])
def test_a_small_network_gives_a_sample_away(settings: dict[str, Any]) -> None:
    found = attacked(mlp(), clients=2, starts=2, public=DATA.x[:24], **settings)
    assert found["error"] < 0.05
    assert found["labels"] == 1.0


def test_executors_find_the_same() -> None:
    settings: dict[str, Any] = {"steps": 2, "batch": 2, "samples": 4, "iterations": 25, "clients": 3}
    one, other = (attacked(mlp(), executor=e, **settings) for e in ("loop", "vmap"))
    assert one == pytest.approx(other, rel=1e-6)


# ---- whose samples


@each(
    "work",
    [
        {"steps": 1, "batch": 1, "samples": 1},
        {"steps": 1, "batch": None, "samples": 6},
        {"steps": 5, "batch": 4, "samples": 6},  # more than once over all of them
        {"steps": None, "epochs": 2, "batch": 4, "samples": 6},
    ],
)
def test_errors_are_to_the_samples_behind_the_upload(
    work: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each client's batches were: from a transform that looks on, for there is no other way."""
    import importlib

    module = importlib.import_module("partita.measures.gradient_inversion")
    seen: list[Any] = []
    summarize = module._summarize
    monkeypatch.setattr(
        module, "_summarize", lambda uploads, n: (seen.append(uploads.metrics), summarize(uploads, n))[1]
    )
    data = samples(clients=3)
    settings = {k: v for k, v in work.items() if k != "samples"}
    attacked(
        linear(), data=data, iterations=1, clients=3, **{"rounds": 2, **settings}, samples=work["samples"]
    )
    for metrics in seen:
        for i in range(3):
            own, labels = data.client(i)
            count = int(metrics["count"][i])
            assert count == min(6, work["samples"])
            real = metrics["real"][i][:count]
            places = [(own == row).all(1).nonzero().item() for row in real]  # type: ignore[operator]
            assert len(set(places)) == count
            assert metrics["own"][i][:count].tolist() == labels[places].tolist()
    if work["batch"] == 1:  # the very sample: by hand from the upload, x = ΔW_j / Δb_j
        rounds = [pt.federate(linear(), data, pt.local(lr=0.1), rounds=1, steps=1, batch=1, **QUIET)]
        first = dict(linear().named_parameters())
        weight, bias = list(first)
        for i in range(3):
            moved = rounds[0].personalized(i)
            change = {k: (first[k] - moved[k]).detach() for k in first}
            j = int(change[bias].abs().argmax())
            x = change[weight][j] / change[bias][j]
            torch.testing.assert_close(seen[0]["real"][i][0], x, rtol=1e-6, atol=1e-6)


def test_late_uploads_are_attacked_at_what_their_clients_had_received() -> None:
    found = attacked(
        mlp(), pt.fedbuff(lr=0.5, buffer=2), rounds=6, clients=2, public=DATA.x[:24], evaluate_every=6,
        schedule=pt.schedule.asynchronous(4, delays=pt.schedule.delays(upload=pt.schedule.exponential(1.0))),
    )  # fmt: skip
    assert found["error"] < 0.05


@each("name", ["ditto", "fedalt"])
def test_only_samples_that_move_what_is_sent_count(name: str) -> None:
    """Both take a step on the model that they keep, too, on another sample."""
    methods = {"ditto": pt.ditto(lr=0.1, lam=0.1), "fedalt": pt.fedalt("input", lr=0.1)}
    found = attacked(
        mlp(), methods[name], clients=2, public=DATA.x[:24], labels="known", knows_personal=True,
        match="squared", lr=0.1,
    )  # fmt: skip
    assert found["match"] < 1e-2
    assert found["error"] < (0.1 if name == "ditto" else 1)


# ---- what hides samples, and what does not


def noise(sigma: float) -> pt.Transform:
    """Each client adds noise of its own to its upload."""

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        numbers = {
            k: v + sigma * draws.normal(draws.places(draws.branch(key, k), v.shape)).to(v.dtype)
            for k, v in message.numbers.items()
        }
        return message._replace(numbers=numbers)

    return pt.Transform("noise", {"sigma": sigma}, encode=encode, draws=True)


def clipped(bound: float) -> pt.Transform:
    """Each client shortens its upload to this length."""

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        factor = (bound / pt.tree.norm(message.numbers)).clamp(max=1.0)
        return message._replace(numbers={k: factor * v for k, v in message.numbers.items()})

    return pt.Transform("clipped", {"bound": bound}, encode=encode)


def test_clipping_alone_hides_nothing_and_noise_everything() -> None:
    settings: dict[str, Any] = {"clients": 4, "iterations": 200, "starts": 1, "public": DATA.x[:24]}
    plain = attacked(linear(), **settings)
    short = attacked(linear(), uploads=[clipped(1e-3)], **settings)
    hidden = attacked(linear(), uploads=[clipped(1e-3), noise(1e-3)], **settings)
    assert plain["error"] < 0.1
    assert short["error"] < 0.1
    assert hidden["error"] > 0.7
    assert hidden["recovered"] == 0.0
    assert hidden["labels"] < 1.0


def test_compression_is_attacked_as_it_arrives() -> None:
    settings: dict[str, Any] = {"clients": 4, "iterations": 150, "starts": 1, "public": DATA.x[:24]}
    settings["labels"] = "known"
    few = [pt.transforms.topk(0.05, feedback=False)]
    plain, sparse = attacked(linear(), **settings), attacked(linear(), uploads=few, **settings)
    assert sparse["error"] > 2 * plain["error"]
    some = [pt.transforms.randk(0.5, feedback=False)]
    naive, aware = (attacked(linear(), uploads=some, skips_zeros=k, **settings) for k in (False, True))
    assert aware["match"] < naive["match"]  # entries that were not sent are no zeros


def test_the_release_of_one_client_is_its_upload_and_of_many_tells_less() -> None:
    settings: dict[str, Any] = {"clients": 1, "iterations": 200, "starts": 1, "public": DATA.x[:24]}
    settings["labels"] = "known"
    upload = attacked(linear(), cohort=1, **settings)
    alone = attacked(linear(), cohort=1, sees="release", **settings)
    among = attacked(linear(), cohort=4, sees="release", **settings)
    assert alone == pytest.approx(upload, rel=1e-3, abs=1e-5)
    assert among["error"] > 3 * upload["error"]


def test_the_release_of_a_private_run_hides_what_its_uploads_show() -> None:
    """Noise is added by the server, which sees uploads that are clipped and nothing else."""
    settings: dict[str, Any] = {"clients": 4, "cohort": 4, "iterations": 200, "starts": 1}
    settings |= {"public": DATA.x[:24], "uploads": [pt.privacy.gaussian(noise=2.0, clip=0.05)]}
    settings |= {"schedule": pt.schedule.synchronous()}
    upload, release = (attacked(linear(), sees=sees, **settings) for sees in ("upload", "release"))
    assert upload["error"] < 0.1
    assert release["error"] > 0.7
    assert release["recovered"] == 0.0


def test_a_personal_part_hides_what_the_server_does_not_know() -> None:
    method = pt.fedalt("output", lr=0.1, personal_lr=2.0, personal_steps=20)
    settings: dict[str, Any] = {"rounds": 3, "labels": "known", "starts": 2, "public": DATA.x[:24]}
    settings |= {"samples": 6, "batch": None, "iterations": 100, "evaluate_every": 3}
    known, unknown = (attacked(mlp(), method, knows_personal=k, **settings) for k in (True, False))
    assert known["match"] < 0.5 * unknown["match"]


def test_images_may_be_smooth() -> None:
    data = samples(2, 2, (1, 6, 6))
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(48, CLASSES)).double()
    rough, smooth = (
        attacked(net, data=data, tv=tv, iterations=30, starts=1, public=data.x[:4]) for tv in (0.0, 10.0)
    )
    assert smooth["match"] > rough["match"]
    assert smooth["mse"] != rough["mse"]


def test_clients_in_small_blocks_are_attacked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"iterations": 10, "clients": 3}
    whole = attacked(mlp(), **settings)
    monkeypatch.setattr("partita.engine.measuring.STATE_BYTES", 1)
    assert attacked(mlp(), **settings) == pytest.approx(whole, rel=1e-6)


# ---- what is refused


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(x).mean(1))
        return out


def refused(text: str, model: nn.Module | None = None, *args: Any, **settings: Any) -> None:
    with pytest.raises(pt.Refused, match=text):
        attacked(model or mlp(), *args, **settings)


def test_nothing_is_found_where_nothing_is_sent() -> None:
    assert attacked(mlp(), pt.local(lr=0.1)) == {}


@pytest.mark.slow
def test_runs_in_lockstep_and_workers_find_what_a_run_alone_finds() -> None:
    given: dict[str, Any] = {"rounds": 1, "steps": 1, "batch": 1, "progress": False, "executor": "vmap"}
    given["measures"] = [pt.measures.gradient_inversion(iterations=8, public=8)]
    found = []
    for others in ({}, {"alone": True}):
        runs = pt.compare(mlp(), DATA, [pt.fedavg(lr=0.1)], seeds=2, **given, **others).records
        found += [[r.metrics[-1]["measures"]["gradient_inversion"]["mse"] for r in runs["fedavg"]]]
        assert all(r.metrics[-1]["measures"] == {"gradient_inversion": {}} for r in runs["local"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    run = pt.federate(mlp(), DATA, pt.fedavg(lr=0.1), workers=2, baselines=False, **given)
    assert run.metrics[-1]["measures"]["gradient_inversion"]["mse"] == pytest.approx(found[0][0], rel=1e-6)


def test_what_cannot_be_attacked_is_refused_before_any_work() -> None:
    refused("samples=1: an upload may be made of 4 samples; give at least 4", steps=2, batch=2)
    refused("samples=1: an upload may be made of 6 samples", steps=9, batch=1)
    refused("samples=1: an upload may be made of 6 samples", steps=None, epochs=1, batch=1)
    refused("lr=None: match='squared' compares lengths", match="squared")
    refused("clients of scaffold send more than the delta", None, pt.scaffold(lr=0.1))
    refused("clients of fedproto send no part of the model", None, pt.fedproto(lr=0.1))
    refused("clients of scaffold", None, pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1),
            pt.stage(pt.scaffold(lr=0.1), rounds=1)), rounds=None)  # fmt: skip
    refused("output.linear.bias is not sent", None, pt.fedalt("output", lr=0.1))
    refused("is no bias of classes", nn.Linear(FEATURES, CLASSES, bias=False).double())
    refused(r"samples of shape \[12\] have no neighbours", tv=0.1)
    refused("public=1", public=1)
    refused("labels='all'", labels="all")
    refused("devices hold a part of the model", pt.models.mlp(FEATURES, 16, 16, CLASSES).double(),
            capacity=pt.capacity.width({"strong": 1.0, "weak": 0.5}))  # fmt: skip
    x, y = torch.randint(0, 9, (24, 3)), torch.randint(0, CLASSES, (24,))
    words = pt.data.from_arrays(x, y, np.repeat([0, 1], 12), test=0.5)
    refused("tokens cannot be searched so", Tokens(), data=words, public=2)
    real = pt.data.from_arrays(torch.randn(24, 3), torch.randn(24, 1), np.repeat([0, 1], 12), test=0.5)
    refused("a class for each sample", nn.Linear(3, 1), data=real, public=2, loss="mse", metric="mse")
