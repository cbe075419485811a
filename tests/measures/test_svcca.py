"""Similarity of layers across clients: against the definition of SVCCA, and in runs against it by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import partita as pt
from partita.cli.catalogue import facts
from partita.core.metrics import LOSSES, METRICS
from partita.core.parts import Algorithm, LocalRule, Measure, Probe
from partita.core.types import ClientState, Download, Partition, Tensors, Upload
from partita.data import FederatedData
from partita.engine import measuring
from partita.engine.model.problem import ModelProblem, make_problem
from partita.measures.ended import ended
from partita.measures.probe import _unseen, probed
from partita.measures.svcca import _drawn, bases, points, similarities, similarity
from partita.models.blocks import Blocks, layers
from support import each

both_executors = each("executor", ["loop", "vmap"])
MODULE = import_module("partita.measures.svcca")  # the package's name for it is the measure
rng = np.random.default_rng(0)


def noise(*shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


# ---- the plain definition


def inverse_root(cov: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(cov)
    return np.asarray(vectors @ np.diag(values**-0.5) @ vectors.T)


def plain(a: Tensor, b: Tensor, k: int) -> float:
    """SVD of each, the top k directions, then CCA of the two by their covariances."""
    kept = []
    for x in (a.numpy(), b.numpy()):
        u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
        kept.append(u[:, :k] * s[:k])
    x, y = kept
    whitened = inverse_root(x.T @ x) @ (x.T @ y) @ inverse_root(y.T @ y)
    return float(np.linalg.svd(whitened, compute_uv=False).mean())


def mixed(samples: int, *features: int) -> list[Tensor]:
    """Matrices that have something in common."""
    common = noise(samples, 6) * torch.tensor([9.0, 5.0, 4.0, 2.0, 1.0, 0.5])
    return [common @ noise(6, f) + 0.7 * noise(samples, f) + 3 for f in features]


@each("k", [1, 2, 4, 7])
@each("shape", [(50, 8, 8), (300, 12, 9), (20, 40, 60), (20, 8, 60), (30, 30, 31)], ids=str)
def test_the_similarity_is_that_of_the_definition(shape: tuple[int, ...], k: int) -> None:
    a, b = mixed(*shape)
    found = similarity(a, b, k)
    assert found == pytest.approx(plain(a, b, k), abs=1e-6)
    assert found == pytest.approx(similarity(b, a, k), abs=1e-12)
    assert 0 < found < 1


@pytest.mark.parametrize("features", [7, 90], ids=["tall", "wide"])
def test_all_pairs_at_once_are_the_pairs(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = mixed(40, *[features] * 9)
    q = bases(torch.stack(clients))
    assert q.shape == (9, 40, 4)
    torch.testing.assert_close(q.mT @ q, torch.eye(4).double().expand(9, 4, 4))
    every = [plain(a, b, 4) for a, b in itertools.combinations(clients, 2)]
    assert similarities(q).tolist() == pytest.approx(every, abs=1e-6)
    monkeypatch.setattr(MODULE, "ROWS", 4)  # some clients at a time
    assert similarities(q).tolist() == pytest.approx(every, abs=1e-6)
    torch.testing.assert_close(torch.func.vmap(bases)(torch.stack(clients)), q)


def test_the_features_may_be_rotated_scaled_and_shifted() -> None:
    a, b = mixed(60, 10, 10)
    turned = torch.linalg.qr(noise(10, 10))[0]
    assert similarity(1e6 * a @ turned - 5, b) == pytest.approx(similarity(a, b), abs=1e-9)
    assert similarity(1e-9 * a, b @ turned) == pytest.approx(similarity(a, b), abs=1e-9)
    assert similarity(1e200 * (a - a.mean(0)), b) == pytest.approx(similarity(a, b), abs=1e-9)
    assert similarity(a.flip(1), a @ turned) == pytest.approx(1, abs=1e-9)


def test_noise_is_not_alike() -> None:
    assert similarity(noise(20000, 9), noise(20000, 9)) < 0.03


def test_samples_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="points of b=8: expected 7, as many as of a"):
        similarity(noise(7, 3), noise(8, 3))
    with pytest.raises(ValueError, match="k=0: expected a whole number from 1"):
        similarity(noise(7, 3), noise(7, 3), 0)
    with pytest.raises(ValueError, match="b='NaN or infinity': expected finite numbers"):
        similarity(noise(7, 3), torch.full((7, 3), torch.inf))


# ---- fewer directions than k


@each("shape", [(50, 8), (30, 45)], ids=["tall", "wide"])
@each("dtype", [torch.float32, torch.float64])
def test_directions_without_variance_do_not_count(shape: tuple[int, int], dtype: torch.dtype) -> None:
    samples, features = shape
    a, b = (noise(samples, r) @ noise(r, features) for r in (2, 3))
    small, large = a.to(dtype), b.to(dtype)
    x, y = (v - v.mean(0) for v in (a, b))
    p, q = (torch.linalg.svd(v, full_matrices=False)[0][:, :r] for v, r in ((x, 2), (y, 3)))
    expected = float(torch.linalg.svdvals(p.T @ q).mean())  # two of them
    assert similarity(small, large, 4) == pytest.approx(expected, abs=1e-5)
    assert similarity(large, small, 4) == pytest.approx(expected, abs=1e-5)
    inside = torch.cat([small, small @ noise(features, 3).to(dtype), large], dim=1)  # spans both
    assert similarity(small, inside, 9) == pytest.approx(1, abs=1e-5)
    assert (bases(small, 4)[:, 2:] == 0).all()


def test_few_features_and_few_samples() -> None:
    a, b = mixed(30, 2, 9)
    assert similarity(a, b, 4) == pytest.approx(
        float(torch.linalg.svdvals(bases(a, 2).T @ bases(b, 4)).mean()), abs=1e-9
    )
    two = noise(2, 9)  # centred they are one direction, of everyone the same
    assert similarity(two, noise(2, 5), 4) == pytest.approx(1, abs=1e-9)


def test_constant_outputs_are_like_constant_ones_only() -> None:
    dead, other = torch.zeros(40, 5), torch.full((40, 3), 2.5)
    rounding = (3 * torch.ones(40, 5) * (1 + 1e-7 * noise(40, 5))).float()
    alive = noise(40, 5)
    for constant in (dead, other, rounding):
        assert similarity(constant, alive) == 0
        assert similarity(constant, dead) == 1
        assert (bases(constant) == 0).all()


def test_what_is_not_finite_is_left_out() -> None:
    q = torch.stack([bases(x) for x in (noise(30, 5), torch.full((30, 5), torch.nan), noise(30, 5))])
    assert torch.isnan(q[1]).all()
    measure = pt.measures.svcca(2)
    found = measure.summarize(Upload({}, metrics={"a": q, "b": q[:2]}), torch.ones(3))
    assert found == {"a": pytest.approx(float(similarities(q[[0, 2]])))}


# ---- positions


def test_every_position_is_a_point() -> None:
    a, b = noise(6, 5, 3, 4), noise(6, 7, 3, 4)
    flat = [x.permute(0, 2, 3, 1).reshape(72, -1) for x in (a, b)]
    assert similarity(a, b) == pytest.approx(plain(flat[0], flat[1], 4), abs=1e-6)
    time = [noise(6, 9, f) for f in (4, 8)]
    assert similarity(time[0], time[1]) == pytest.approx(
        plain(time[0].reshape(54, 4), time[1].reshape(54, 8), 4), abs=1e-6
    )
    assert points(noise(6)).shape == (6, 1, 1)


def test_positions_are_drawn_by_the_sample_alone() -> None:
    places = torch.arange(10 * 64).view(10, 64, 1).expand(10, 64, 3)
    whole = _drawn(places, 0, 5)
    parts = [_drawn(places[a : a + 4], a, 5) for a in range(0, 10, 4)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == (10, 5, 3)
    own = [set(row[:, 0].tolist()) for row in whole]
    assert all(len(row) == 5 and min(row) // 64 == max(row) // 64 == i for i, row in enumerate(own))
    assert len({frozenset(p % 64 for p in row) for row in own}) == 10  # not the same ones everywhere
    assert torch.equal(_drawn(places, 0, 64), places)


# ---- outputs of submodules


class Odd(nn.Module):
    """A submodule that returns two things, one that is called twice, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = nn.GRU(3, 4, batch_first=True)
        self.twice, self.last, self.never = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(1, 1)
        self.drop = nn.Dropout(0.5)
        self.whole = Whole()

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.reader(x)
        mean = self.whole(seen)
        out: Tensor = self.last(self.drop(self.twice(torch.relu(self.twice(seen.mean(1)))))) + mean
        return out


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def problem(module: nn.Module, stacked: bool = False) -> ModelProblem:
    criteria = LOSSES["cross_entropy"], METRICS["accuracy"]
    return make_problem(module, Partition((), ()), *criteria, (), stacked=stacked)


def tensors(module: nn.Module) -> Tensors:
    return {k: v.detach().clone() for k, v in module.named_parameters()}


def test_outputs_are_those_of_the_named_submodules() -> None:
    module, x = Odd(), torch.randn(5, 6, 3)
    inside = problem(module)
    w = {k: v + 0.1 for k, v in tensors(module).items()}
    found = inside.outputs(w, x, ["twice", "reader", "last"])
    module.load_state_dict(w)
    seen = module.reader(x)[0]
    second = module.twice(torch.relu(module.twice(seen.mean(1))))
    assert list(found) == ["twice", "reader", "last"]
    for name, expected in (("reader", seen), ("twice", second), ("last", module.last(second))):
        torch.testing.assert_close(found[name], expected)
        assert not found[name].requires_grad
    assert inside.outputs(w, x, ()) == {}


def test_the_default_are_blocks_that_own_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    found = problem(module).outputs(tensors(module), torch.ones(7, 3))
    assert {k: v.shape for k, v in found.items()} == {"0": (7, 4), "2": (7, 2)}


def test_hooks_are_gone_whatever_happens() -> None:
    module = Odd()
    inside = problem(module)

    def hooks() -> int:
        return sum(len(m._forward_hooks) for m in inside.evaluation.modules())

    inside.outputs(tensors(module), torch.randn(5, 6, 3), ["twice"])
    assert hooks() == 0
    with pytest.raises(RuntimeError):
        inside.outputs(tensors(module), torch.randn(5, 6, 4), ["twice"])
    assert hooks() == 0


@each(
    ("blocks", "start", "end"),
    [
        (["twic"], "blocks='twic': expected a submodule of Odd, such as 'reader', 'twice'", "mean 'twice'?)"),
        ([""], "blocks='': expected a submodule of Odd", "'whole'"),
        (["never"], "blocks='never': expected a submodule that the model calls when it is evaluated", ""),
        (["whole"], "blocks='whole': expected a submodule that returns a row for each sample, not []", ""),
        (
            None,
            "blocks=None: expected the names of the submodules that the model applies",
            "'whole'",
        ),
    ],
    ids=["unknown", "empty", "not called", "no rows", "no blocks"],
)
def test_what_has_no_outputs_is_named(blocks: list[str] | None, start: str, end: str) -> None:
    module = Odd()
    with pytest.raises(ValueError) as error:
        problem(module).outputs(tensors(module), torch.randn(5, 6, 3), blocks)
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(end)


def test_stacked_clients_put_out_what_each_would() -> None:
    module = cnn(1)
    x = noise(5, 1, 6, 6)
    w = {k: torch.stack([v, v + 0.1 * noise(*v.shape), -v]) for k, v in tensors(module).items()}
    inside = problem(module, stacked=True)
    found = torch.func.vmap(lambda own: inside.outputs(own, x, ["conv1.conv", "output"]))(w)
    for i in range(3):
        alone = problem(module).outputs({k: v[i] for k, v in w.items()}, x, ["conv1.conv", "output"])
        for name, value in alone.items():
            torch.testing.assert_close(found[name][i], value)


# ---- in a run

CLIENTS, LR = 5, 0.2


def cnn(seed: int = 0) -> Blocks:
    torch.manual_seed(seed)
    model = Blocks(
        {
            "conv1": layers(conv=nn.Conv2d(1, 6, 3), relu=nn.ReLU()),
            "pool": nn.MaxPool2d(2),
            "conv2": layers(conv=nn.Conv2d(6, 7, 1), norm=nn.GroupNorm(1, 7)),
            "output": layers(flatten=nn.Flatten(), drop=nn.Dropout(0.2), linear=nn.Linear(28, 6)),
        }
    )
    return model.double()


def images(clients: int = CLIENTS) -> FederatedData:
    """Client i has 5 + 3i training samples, the last one none at all, and the test samples are common."""
    sizes = [*(5 + 3 * i for i in range(clients)), 0]
    ends = np.cumsum(sizes)
    draw = np.random.default_rng(3)
    y = draw.integers(0, 6, int(ends[-1]) + 40)
    x = draw.normal(size=(6, 1, 6, 6))[y] + draw.normal(size=(len(y), 1, 6, 6))
    train = np.stack([ends - sizes, sizes], axis=1)
    return FederatedData.make(x, y, train, [[int(ends[-1]), 40]] * len(train))


DATA = images()
X = noise(21, 1, 6, 6)


def federate(algorithm: Algorithm, *measures: Measure, **settings: Any) -> pt.Run:
    defaults: dict[str, Any] = {"rounds": 2, "steps": 6, "batch": 4, "baselines": False, "progress": False}
    return pt.federate(cnn(), DATA, algorithm, measures=measures, **{**defaults, **settings})


def found(run: pt.Run) -> dict[str, Any]:
    values: dict[str, Any] = run.metrics[-1]["measures"]["svcca"]
    return values


def by_hand(run: pt.Run, x: Tensor, k: int = 4, leave: tuple[int, ...] = ()) -> dict[str, list[float]]:
    """Of each block the similarities of all pairs, from the clients' models."""
    acts: list[Tensors] = []
    for i in range(CLIENTS):
        model = cnn()
        model.load_state_dict(run.personalized(i))
        conv1 = model.eval().conv1(x)
        conv2 = model.conv2(model.pool(conv1))
        out = {"conv1": conv1, "conv2": conv2, "output": model.output(conv2)}
        acts.append({n: points(v.detach()).flatten(0, 1) for n, v in out.items()})
    pairs = itertools.combinations([a for i, a in enumerate(acts) if i not in leave], 2)
    every = [{n: plain(a[n], b[n], k) for n in a} for a, b in pairs]
    return {n: [pair[n] for pair in every] for n in acts[0]}


METHODS = {
    "local": pt.local(LR),
    "fedalt": pt.fedalt("output", LR),
    "ditto": pt.ditto(LR, 0.5),
    "apfl": pt.apfl(LR),
    "perfedavg": pt.perfedavg(LR, 0.1),
}


@both_executors
@each("name", METHODS)
def test_a_run_measures_the_models_that_clients_are_evaluated_with(name: str, executor: str) -> None:
    run = federate(METHODS[name], pt.measures.svcca(X, k=3), executor=executor)
    expected = {block: max(every) for block, every in by_hand(run, X, k=3).items()}
    assert list(found(run)) == ["conv1", "conv2", "output"]
    assert found(run) == pytest.approx(expected, abs=1e-6)
    if name == "fedalt":
        assert found(run)["conv1"] == pytest.approx(1, abs=1e-9)
    assert found(run)["output"] < 0.995


@both_executors
def test_one_global_model_is_alike_everywhere(executor: str) -> None:
    for over in ("max", "mean"):
        run = federate(pt.fedavg(LR), pt.measures.svcca(X, over=over), executor=executor)
        assert [row["measures"]["svcca"] for row in run.metrics] == [
            pytest.approx({"conv1": 1, "conv2": 1, "output": 1}, abs=1e-9)
        ] * len(run.metrics)


@both_executors
def test_the_mean_of_some_layers(executor: str) -> None:
    run = federate(
        pt.local(LR), pt.measures.svcca(X, ["output", "conv2.conv"], over="mean"), executor=executor
    )
    assert list(found(run)) == ["output", "conv2.conv"]
    assert found(run)["output"] == pytest.approx(np.mean(by_hand(run, X)["output"]), abs=1e-6)
    single = federate(pt.local(LR), pt.measures.svcca(X, "output", over="mean"), executor=executor)
    assert found(single) == {"output": pytest.approx(found(run)["output"], abs=1e-12)}


def test_byzantine_clients_and_those_without_samples_take_no_part() -> None:
    lies: dict[str, Any] = {"attack": pt.attack.gaussian(10.0), "byzantine": [1, 3]}
    run = federate(pt.local(LR), pt.measures.svcca(X, over="mean"), **lies)
    expected = {b: np.mean(every) for b, every in by_hand(run, X, leave=(1, 3)).items()}
    assert found(run) == pytest.approx(expected, abs=1e-6)
    alone = federate(pt.local(LR), pt.measures.svcca(X), **{**lies, "byzantine": [1, 2, 3, 4, 5]})
    assert found(alone) == {}  # one client has no other


@both_executors
def test_clients_and_samples_in_parts(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = pt.measures.svcca(X)
    whole = found(federate(pt.local(LR), measure, executor=executor))
    monkeypatch.setattr(measuring, "STATE_BYTES", 1)
    assert measure.probe is not None
    few = measure._replace(probe=measure.probe._replace(batch=4))
    assert found(federate(pt.local(LR), few, executor=executor)) == pytest.approx(whole, abs=1e-9)


@both_executors
def test_large_layers_are_looked_at_in_part(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federate(pt.local(LR), pt.measures.svcca(X), executor=executor)
    monkeypatch.setattr(MODULE, "POINTS", 100)  # 4 of the 16 positions of conv1
    some = federate(pt.local(LR), pt.measures.svcca(X), executor=executor)
    assert found(some)["conv1"] == pytest.approx(found(run)["conv1"], abs=0.1)
    assert found(some)["conv1"] != pytest.approx(found(run)["conv1"], abs=1e-6)
    assert found(some)["conv2"] == pytest.approx(found(run)["conv2"], abs=1e-9)  # 4 positions


@both_executors
def test_statistics_of_a_client_are_its_own(executor: str) -> None:
    torch.manual_seed(0)
    body = {"conv": nn.Conv2d(1, 5, 3), "norm": nn.BatchNorm2d(5), "relu": nn.ReLU()}
    model = Blocks({"conv": layers(**body), "out": layers(flatten=nn.Flatten(), linear=nn.Linear(80, 6))})
    settings: dict[str, Any] = {"rounds": 2, "steps": 3, "batch": 4, "baselines": False, "norm": "personal"}
    measures = [pt.measures.svcca(X, ["conv.norm"], over="mean")]
    run = pt.federate(model.double(), DATA, pt.fedavg(LR), measures=measures, executor=executor, **settings)
    acts = []
    for i in range(CLIENTS):
        model.load_state_dict(run.personalized(i))
        out = model.eval().conv.norm(model.conv.conv(X)).detach()
        acts.append(points(out).flatten(0, 1))
    every = [plain(a, b, 4) for a, b in itertools.combinations(acts, 2)]
    assert max(every) < 1 - 1e-6
    assert found(run) == {"conv.norm": pytest.approx(np.mean(every), abs=1e-6)}


@both_executors
def test_a_probe_for_those_who_just_reported(executor: str) -> None:
    """What a measure of one's own may ask: the outputs of the models that clients ended with."""

    def client(problem: Any, algorithm: Algorithm) -> LocalRule:  # noqa: ARG001
        def finish(carry: Tensors, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
            x, _ = probed(download)
            return Upload({}, metrics=problem.outputs(carry, x, ["output"])), state

        return LocalRule(lambda download, state: ended(download), (), finish)  # noqa: ARG005

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        return {"outputs": uploads.metrics["output"].flatten().tolist()}

    measure = Measure("seen", client, summarize, {}, of_cohort=True, probe=Probe(X[:2]))
    run = federate(pt.fedavg(LR), measure, rounds=1, cohort=CLIENTS + 1, executor=executor)
    alone = federate(pt.local(LR), rounds=1, cohort=CLIENTS + 1, executor=executor)
    expected = []
    for i in range(CLIENTS):
        model = cnn()
        model.load_state_dict(alone.personalized(i))
        expected += model.eval()(X[:2]).flatten().tolist()
    assert run.metrics[-1]["measures"]["seen"]["outputs"] == pytest.approx(expected, abs=1e-9)


# ---- samples


def test_images_are_decoded_as_those_of_clients() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (60, 1, 6, 6), dtype=np.uint8), draw.integers(0, 6, 60)
    data = pt.data.from_arrays(x, y, draw.integers(0, 4, 60), test=0.3, seed=0)
    probe = draw.integers(0, 256, (9, 1, 6, 6), dtype=np.uint8)
    forms = [probe, torch.from_numpy(probe), probe / 255, (probe / 255).astype(np.float32)]
    runs = [
        pt.federate(
            cnn().float(), data, pt.local(LR), rounds=1, baselines=False, measures=[pt.measures.svcca(x)]
        )
        for x in forms
    ]
    for run in runs[1:]:
        assert found(run) == pytest.approx(found(runs[0]), abs=1e-5)


def test_a_number_takes_test_samples_that_nobody_trains_on() -> None:
    train, test = [[0, 10], [10, 10], [20, 5]], [[25, 10], [15, 12], [0, 0]]
    x = np.arange(40 * 5).reshape(40, 5).astype(np.float32)
    data = FederatedData.make(x, np.arange(40) % 3, train, test)
    free = {*range(25, 35)}
    draws = [set(_unseen(data, 6, seed).tolist()) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(d <= free and len(d) == 6 for d in draws)
    assert set(_unseen(data, 10, 0).tolist()) == free
    rows = _unseen(DATA, 12, 7)
    first, second = (
        federate(pt.local(LR), pt.measures.svcca(given), seed=7) for given in (12, DATA.x[rows].numpy())
    )
    assert found(first) == found(second)


# ---- rows, files, pages


def test_the_rows_the_files_and_the_page(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = federate(pt.fedalt("output", LR), pt.measures.svcca(X.numpy(), k=2), out=out, rounds=3)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["measures"] for row in rows] == [row["measures"] for row in run.metrics]
    assert all(set(row["measures"]["svcca"]) == {"conv1", "conv2", "output"} for row in rows)
    assert run.summary()["test"]["personal"] is not None
    (told,) = json.loads((out / "config.json").read_text())["measures"]
    assert told["x"].startswith("21 samples of shape [1, 6, 6], ")
    assert (told["name"], told["blocks"], told["k"], told["over"]) == ("svcca", None, 2, "max")
    page = (out / "report.html").read_text()
    assert all(f'data-figure="svcca.{block}"' in page for block in ("conv1", "conv2", "output"))
    again: dict[str, Any] = {"out": out, "rounds": 3, "resume": True}
    same = federate(pt.fedalt("output", LR), pt.measures.svcca(X, k=2), **again)
    assert same.metrics == run.metrics
    with pytest.raises(ValueError, match="holds a run that differs in its measures"):
        federate(pt.fedalt("output", LR), pt.measures.svcca(X + 1, k=2), **again)


def test_the_catalogue_says_how() -> None:
    (entry,) = facts("svcca")
    assert entry["paper"].startswith("SVCCA: Raghu et al.")
    assert "σ(Q_iᵀ Q_j)" in entry["equation"]
    assert entry["when"].startswith("Use it to see which layers")
    assert "pt.measures.svcca(x=64)" in entry["python"]
    assert entry["command"] == "partita run digits --set 'measures=[svcca(x=64)]'"


# ---- errors


ALLOWED = "a tensor or an array of at least 2 samples"
WRONG: dict[str, tuple[Callable[[], Measure], str]] = {
    "one sample": (lambda: pt.measures.svcca(X[:1]), "shape of measure x=[1, 1, 6, 6]: expected " + ALLOWED),
    "no samples": (
        lambda: pt.measures.svcca(1),
        f"measure x=1: expected a whole number from 2, or {ALLOWED}",
    ),
    "a list": (lambda: pt.measures.svcca([[1.0]]), "measure x=[[1.0]]: expected a whole number"),  # type: ignore[arg-type]
    "names twice": (lambda: pt.measures.svcca(X, ["a", "a"]), "measure blocks=['a', 'a']: expected names of"),
    "no names": (lambda: pt.measures.svcca(X, []), "measure blocks=[]: expected names of submodules"),
    "k": (lambda: pt.measures.svcca(X, k=0), "measure k=0: expected a whole number from 1"),
    "over": (lambda: pt.measures.svcca(X, over="min"), "measure over='min': expected one of 'max', 'mean'"),
    "unknown block": (
        lambda: pt.measures.svcca(X, ["conv3"]),
        "measure svcca: blocks='conv3': expected a submodule of Blocks, such as 'conv1', 'pool', 'conv2'",
    ),
    "a probe of another shape": (
        lambda: pt.measures.svcca(noise(4, 2, 6, 6)),
        "measure svcca: x='samples of shape [2, 6, 6], torch.float64': expected samples that the model takes",
    ),
    "a probe with NaN": (
        lambda: pt.measures.svcca(torch.cat([X, X[:1] * torch.nan])),
        "measure svcca: x[21] of the probe=nan: expected finite numbers",
    ),
    "a probe of words": (
        lambda: pt.measures.svcca(np.array([["a"], ["b"]])),
        "measure svcca: dtype of x='<U1': expected numbers",
    ),
    "too many": (
        lambda: pt.measures.svcca(41),
        "measure svcca: x=41: expected samples, or at most 40: so many",
    ),
}


@each("name", WRONG)
def test_what_cannot_be_measured_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    make, text = WRONG[name]
    with pytest.raises(ValueError) as error:
        federate(pt.local(LR), make(), out=tmp_path / "run")
    assert str(error.value).startswith(text)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_model_without_blocks_needs_names() -> None:
    data = pt.data.from_arrays(torch.randn(40, 6, 3), torch.randint(2, (40,)), torch.arange(40) % 4, test=0.3)
    settings: dict[str, Any] = {"rounds": 1, "steps": 2, "batch": 4, "baselines": False, "executor": "loop"}
    with pytest.raises(ValueError, match="measure svcca: blocks=None: expected the names of the submodules"):
        pt.federate(Odd(), data, pt.local(LR), measures=[pt.measures.svcca(5)], **settings)
    measures = [pt.measures.svcca(5, blocks=["reader", "last"])]
    run = pt.federate(Odd(), data, pt.local(LR), measures=measures, **settings)
    assert set(found(run)) == {"reader", "last"}


class Declared(nn.Module):
    """No nn.Sequential, but it says what its blocks are."""

    blocks = ("reader", "last")

    def __init__(self) -> None:
        super().__init__()
        self.last, self.reader = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reader(x))


def test_declared_blocks_are_the_default() -> None:
    """The same blocks that a weak device's cut goes by."""
    model, x = Declared(), torch.randn(6, 4)
    found = import_module("partita.engine.model.outputs").outputs(model, (dict(model.named_parameters()),), x)
    assert list(found) == ["reader", "last"]
    torch.testing.assert_close(found["last"], model(x))
