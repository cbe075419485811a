"""Clipping and noise: beside plain forms in NumPy, by their variance, and with whatever else a run has."""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt
from partita.core import draws
from partita.core.check import Refused
from partita.core.types import Message
from partita.engine import loop
from partita.engine.callbacks import ProgressBar
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.release import Releases
from partita.privacy.banded import square_root
from partita.privacy.mechanism import Mechanism, clipped
from partita.report.cost import cost
from partita.report.words import precise
from support import each

QUIET = {"baselines": False, "evaluate_every": 10_000}
gaussian, banded = pt.privacy.gaussian, pt.privacy.banded


@functools.cache
def digits(clients: int = 12):
    return pt.data.digits(clients=clients)


def run(uploads, method=None, data=None, model=None, **options):
    """Return a short run of one layer of 650 numbers, or of another model."""
    given = {"rounds": 1, "steps": 2, "batch": 8, "seed": 3, **QUIET, **options}
    model = pt.models.logistic(64, 10) if model is None else model
    method = method or pt.fedavg(lr=0.2, weighting="uniform")
    return pt.federate(model, data or digits(), method, uploads=uploads, **given)


def flat(tensors) -> np.ndarray:
    return np.concatenate([x.double().numpy().reshape(-1) for x in tensors.values()])


def same(a, b) -> bool:
    return all(torch.equal(a.shared[k], v) for k, v in b.shared.items())


@pytest.fixture
def released(monkeypatch) -> list[tuple]:
    """What went into each release, and what came out: (server before, sums, server after)."""
    seen: list[tuple] = []
    step = Releases.step

    def spy(self, rule, server, upload):
        after = step(self, rule, server, upload)
        seen.append((server, upload, after))
        return after

    monkeypatch.setattr(Releases, "step", spy)
    return seen


# ---- clipping


class Zero(nn.Module):
    """A linear model from 0: client i, whose sample is the i-th unit vector, moves coordinate i alone."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(x)


def moved(lengths, uploads, weighting="uniform", samples=None, **options) -> np.ndarray:
    """Return how far the server has moved each coordinate, where client i moves its own by lengths[i]."""
    n = len(lengths)
    rows = np.repeat(np.arange(n), samples or [1] * n)
    y = np.asarray(lengths, dtype=np.float32)[rows, None] / 2
    test = np.zeros(len(rows), dtype=bool)
    data = pt.data.from_arrays(np.eye(n, dtype=np.float32)[rows], y, rows, test=test, validation=0)
    given = {"rounds": 1, "steps": 1, "batch": None, **QUIET, **options}
    method = pt.fedavg(lr=1.0, weighting=weighting, server=pt.optim.sgd(given.pop("server", 1.0)))
    found = pt.federate(Zero(n), data, method, loss="mse", metric="mse", uploads=uploads, **given)
    return flat(found.shared)


def test_each_client_is_clipped_by_itself() -> None:
    lengths = [0.1, 0.5, 1.0, 3.0, 100.0]
    assert moved(lengths, []) == pytest.approx(np.array(lengths) / 5)
    found = moved(lengths, [gaussian(noise=1e-9, clip=0.8)])
    assert found == pytest.approx(np.minimum(lengths, 0.8) / 5, rel=1e-5)


def test_clients_count_by_samples_up_to_a_cap() -> None:
    samples = [1, 2, 8]
    found = moved([0.5] * 3, [gaussian(noise=1e-9, clip=10.0, cap=4)], "samples", samples)
    weight = np.minimum(samples, 4) / 4
    assert found == pytest.approx(weight * 0.5 / weight.sum(), rel=1e-5)
    uncapped = moved([0.5] * 3, [gaussian(noise=1e-9, clip=10.0)], "samples", samples)
    assert uncapped == pytest.approx(np.array(samples) * 0.5 / 11, rel=1e-5)


METHODS = {
    "fedavg": lambda: pt.fedavg(lr=0.2, weighting="uniform"),
    "fedalt": lambda: pt.fedalt(personal="output", lr=0.2, weighting="uniform"),
    "ditto": lambda: pt.ditto(lr=0.2, lam=0.1, weighting="uniform"),
    "scaffold": lambda: pt.scaffold(lr=0.2, weighting="uniform"),
}


@each("method", METHODS)
def test_the_length_is_of_the_whole_upload_whatever_its_parts(method, monkeypatch) -> None:
    """The server moves by the mean of clipped uploads, in plain NumPy from those of another run."""
    clip, model, sent = 0.05, pt.models.mlp(64, 8, 10, seed=1), []
    start = {k: v.double().numpy().copy() for k, v in model.state_dict().items()}
    options = {"data": digits(6), "method": METHODS[method](), "executor": "loop"}
    private = run([gaussian(noise=1e-9, clip=clip)], model=model, **options)
    aggregate = loop._aggregate
    monkeypatch.setattr(loop, "_aggregate", lambda *args: (sent.append(args[2]), aggregate(*args))[1])
    plain = run([], model=pt.models.mlp(64, 8, 10, seed=1), **options)
    (uploads,) = sent
    parts = [v.double().numpy().reshape(6, -1) for v in (*uploads.delta.values(), *uploads.sums.values())]
    assert bool(uploads.sums) == (method == "scaffold")
    factor = np.minimum(1, clip / np.linalg.norm(np.concatenate(parts, 1), axis=1))
    assert factor.max() < 1
    for name, tensor in private.shared.items():
        step = np.tensordot(factor / 6, uploads.delta[name].double().numpy(), 1)
        assert tensor.double().numpy() == pytest.approx(start[name] - step, abs=1e-6)
    assert not same(private, plain)


def test_a_byzantine_client_moves_the_server_no_farther_than_an_honest_one() -> None:
    attack = pt.attack.gaussian(sigma=1e6)
    private = [gaussian(noise=1e-9, clip=0.01)]
    start = flat(dict(pt.models.logistic(64, 10).state_dict()))
    found = run(private, attack=attack, byzantine=[0, 5, 7])
    assert np.linalg.norm(flat(found.shared) - start) <= 0.01 * (1 + 1e-6)
    free = run([], attack=attack, byzantine=[0, 5, 7])
    assert np.linalg.norm(flat(free.shared) - start) > 1e4


def test_what_is_not_finite_is_set_aside_and_does_not_become_a_zero() -> None:
    found = run([gaussian(noise=1e-9, clip=0.01)], attack=pt.attack.nonfinite(), byzantine=[2])
    assert found.metrics[-1]["excluded"] == [digits().names[2]]
    assert all(x.isfinite().all() for x in found.shared.values())


def test_long_uploads_keep_their_direction() -> None:
    """The square of 1e25 is no float32."""
    numbers = {"a": torch.tensor([3e25, 0.0]), "b": torch.tensor([[4e25]])}
    found, below = clipped(numbers, torch.tensor(0.5, dtype=torch.float64))
    assert not below
    assert flat(found) == pytest.approx([0.3, 0.0, 0.4])


@each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_clipped_is_within_the_clip_in_any_type(dtype) -> None:
    """Rounded to the nearest number of 16 bits it could be longer; clipped again, it stays as it is."""
    clip = torch.tensor(0.3, dtype=torch.float64)
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        numbers = {
            "a": torch.randn(300, generator=g).to(dtype),
            "b": torch.randn(4, 5, generator=g).to(dtype),
        }
        found, below = clipped(numbers, clip)
        assert not below
        assert 0.98 * 0.3 < np.linalg.norm(flat(found)) <= 0.3
        again, below = clipped(found, clip)
        assert below
        assert all(torch.equal(again[k], x) for k, x in found.items())


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_sums_have_no_products_of_few_bits(monkeypatch) -> None:
    """With TF32 an upload might count for more than the clip; sums are the same, whatever is allowed."""
    totals, names, precision = Releases.totals, [], torch.get_float32_matmul_precision()

    def noted(self, uploads, key):
        with Operations() as operations:
            found = totals(self, uploads, key)
        names.extend(operations.names)
        for k, stack in uploads.delta.items():
            expected = np.tensordot(np.ones(len(stack)), stack.double().numpy(), 1)
            assert found.extra[f"delta.{k}"].double().numpy() == pytest.approx(expected, rel=1e-5, abs=1e-7)
        return found

    monkeypatch.setattr(Releases, "totals", noted)
    try:
        torch.set_float32_matmul_precision("high")
        run([gaussian(noise=1.0, clip=0.1, quantile=0.5)])
    finally:
        torch.set_float32_matmul_precision(precision)
    assert names
    assert not any(name.startswith(("mm", "mv", "bmm", "addm", "dot")) for name in names)


# ---- noise


def noises(seen, clip: float, z: float, expected: float) -> np.ndarray:
    """Return the noise of each release, which should be N(0, 1): what it moved beside its sum."""
    rows = []
    for server, upload, after in seen:
        moves = {k: (server.shared[k] - v).double() * expected for k, v in after.shared.items()}
        rows.append(flat({k: move - upload.extra[f"delta.{k}"] for k, move in moves.items()}))
    return np.stack(rows) / (clip * z)


def test_the_noise_has_its_variance_once_for_each_release(released) -> None:
    """520,000 numbers: their variance is known to 0.2 %."""
    n, rounds, z, clip = 8, 800, 1.3, 0.7
    method = pt.fedavg(lr=1e-30, weighting="uniform")
    run([gaussian(noise=z, clip=clip)], method, digits(n), rounds=rounds, cohort=4, steps=1)
    found = noises(released, clip, z, 4)  # the sum is divided by those who come on average
    assert found.shape == (rounds, 650)
    assert found.var() == pytest.approx(1, abs=0.01)
    assert abs(found.mean()) < 0.006
    assert abs(np.mean(found[1:] * found[:-1])) < 0.006  # new in each round
    kurtosis = np.mean(found**4) / found.var() ** 2
    assert kurtosis == pytest.approx(3, abs=0.05)


@pytest.mark.slow
def test_the_noise_of_ten_thousand_releases(released) -> None:
    run([gaussian(noise=2.0, clip=0.1)], pt.fedavg(lr=1e-30, weighting="uniform"), digits(4),
        rounds=10_000, cohort=2, steps=1)  # fmt: skip
    found = noises(released, 0.1, 2.0, 2)
    assert len(found) == 10_000
    assert found.var() == pytest.approx(1, abs=0.02)
    assert found.var(0).mean() == pytest.approx(1, abs=0.02)


def assigned(i: int) -> str:
    return "weak" if i % 2 else "strong"


KINDS = {
    "scaffold": (pt.scaffold(lr=0.1, weighting="uniform"), None),
    "depth": (pt.fedavg(lr=0.1, weighting="uniform"), pt.capacity.depth({"strong": 0, "weak": 1}, assigned)),
    "width": (
        pt.fedavg(lr=0.1, weighting="uniform"),
        pt.capacity.width({"strong": 1.0, "weak": 0.5}, assigned),
    ),
}


def halves(kind: str, name: str, x: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """Return the entries of a tensor of 64 → 16 → 10 in groups, and whether every device holds a group."""
    if kind == "depth":
        return [(x, name.startswith("output"))]
    if kind == "width" and name == "output.linear.weight":
        return [(x[..., :8], True), (x[..., 8:], False)]
    if kind == "width" and name.startswith("hidden1"):
        rows = x.movedim(1, 0)  # behind the releases
        return [(rows[:8], True), (rows[8:], False)]
    return [(x, True)]


@each("kind, releases", [(k, n) for n in (200, 10_000) for k in KINDS], slow=lambda _, n: n > 200)
def test_the_noise_of_controls_and_of_devices(kind, releases, monkeypatch) -> None:
    """What half of the clients hold has twice the noise; SCAFFOLD's controls are of the same release.

    Cohorts come by chance, three of eight clients on average, and releases are made without training. A
    variance of n numbers is known to √(2/n): where n is less than 125,000, 2 % are too little for certain.
    """
    method, capacity = KINDS[kind]
    z, clip, n, cohort = 1.5, 0.4, 8, 3
    seen, step = [], Releases.step

    def noted(self, rule, server, upload):
        seen.append((self, rule, server))
        return step(self, rule, server, upload)

    with monkeypatch.context() as patch:
        patch.setattr(Releases, "step", noted)
        run([gaussian(noise=z, clip=clip)], method, digits(n), pt.models.mlp(64, 16, 10), cohort=cohort,
            capacity=capacity)  # fmt: skip
    ((of_stage, rule, server),) = seen
    names, groups, controls = list(server.shared), {}, []
    for first in range(0, releases, 100):
        servers = [server._replace(version=t) for t in range(first, first + 100)]
        after = [of_stage.step(rule, s, of_stage.nothing()) for s in servers]
        for name in names:
            moves = torch.stack([server.shared[name] - s.shared[name] for s in after])
            for number, (x, everyone) in enumerate(halves(kind, name, moves)):
                divisor = cohort if everyone else cohort / 2
                group = x.double().numpy().reshape(-1) * divisor / (z * clip)
                groups.setdefault((name, number), []).append(group)
        if kind == "scaffold":
            moves = [torch.stack([s.extra[k] - server.extra[k] for s in after]) for k in names]
            controls.append(np.concatenate([x.double().numpy().reshape(-1) for x in moves]) * n / (z * clip))
    for place, parts in groups.items():
        found = np.concatenate(parts)
        wanted = max(0.02, 5 * np.sqrt(2 / found.size))  # of 200 releases a bias has 2,000 numbers
        assert found.var() == pytest.approx(1, abs=wanted), place
        assert abs(found.mean()) < 5 / np.sqrt(found.size), place
    if kind == "scaffold":
        found = np.concatenate(controls)
        assert found.var() == pytest.approx(1, abs=0.02)
        both = np.concatenate([np.concatenate(parts) for parts in groups.values()])
        assert len(found) == len(both)
        assert abs(np.corrcoef(found, both)[0, 1]) < 5 / np.sqrt(len(both))


def test_nobody_is_released_too(released) -> None:
    """Where nobody has come the server steps all the same, and no round is called abandoned."""
    found = run([gaussian(noise=1.0, clip=0.1)], rounds=40, cohort=1, data=digits(4))
    empty = [
        upload for _, upload, _ in released if not any(float(v.abs().max()) for v in upload.extra.values())
    ]
    assert len(released) == 40
    assert 5 < len(empty) < 25  # each of four clients by a chance of a quarter: 0.32 of 40 rounds
    assert found.summary()["clock"]["abandoned"] == 0


# ---- a clip that follows uploads


@each("quantile, expected", [(0.25, 0.2), (0.5, 0.5), (0.75, 1.0)])
def test_the_clip_finds_the_quantile(quantile, expected) -> None:
    """A quarter of the clients sends each of four lengths; the clip stays between two of them."""
    lengths = np.repeat([0.1, 0.3, 0.8, 1.2], 50).tolist()
    between = {0.2: (0.1, 0.3), 0.5: (0.3, 0.8), 1.0: (0.8, 1.2)}[expected]
    clips = []

    class Watch(pt.callbacks.Callback):
        def evaluation(self, what, row) -> None:  # noqa: ARG002
            clips.append(row["privacy"]["clip"])

    # the model stays where it is: with a rate of the server of 0, lengths are the same in each round
    n = len(lengths)
    y = np.asarray(lengths, dtype=np.float32)[:, None] / 2
    data = pt.data.from_arrays(
        np.eye(n, dtype=np.float32), y, np.arange(n), test=np.zeros(n, bool), validation=0
    )
    method = pt.fedavg(lr=1.0, weighting="uniform", server=pt.optim.sgd(1e-30))
    pt.federate(
        Zero(n), data, method, rounds=120, steps=1,
        batch=None, loss="mse", metric="mse", baselines=False, evaluate_every=1, callbacks=[Watch()],
        uploads=[gaussian(noise=1.0, clip=5.0, quantile=quantile, clip_lr=0.3)],
    )  # fmt: skip
    last = np.array(clips[60:])
    assert clips[0] < 5.0
    assert between[0] * 0.8 < np.median(last) < between[1] * 1.2


def test_the_clip_moves_as_in_the_paper(released) -> None:
    """C ← C exp(−η (β − γ)), beside NumPy with the noise that was drawn, where β is of those who report."""
    z, eta, gamma, n = 0.5, 0.2, 0.4, 40
    mechanism = [gaussian(noise=z, clip=0.05, quantile=gamma, clip_lr=eta)]
    run(mechanism, rounds=4, cohort=20, data=digits(n))
    clip, sigma = 0.05, max(20 / 20, z)
    for t, (before, upload, after) in enumerate(released):
        assert float(before.extra["uploads.0.clip"]) == pytest.approx(clip, rel=1e-9)
        key = draws.branch(draws.key(3, "release", t, 0), "below")
        below = float(upload.extra["extra.uploads.0.below"])
        clip *= np.exp(-eta * (below + sigma * float(draws.normal64(key))) / 20)
        assert float(after.extra["uploads.0.clip"]) == pytest.approx(clip, rel=1e-6)
    assert len(released) == 4


@each("quantile", [0.5, 0.9])
def test_sums_have_more_noise_where_lengths_are_released_too(quantile, released) -> None:
    """Of a client that reports, its length is no more than max(γ, 1 − γ) beside its upload."""
    z, n = 0.8, 8
    method = pt.fedavg(lr=1e-30, weighting="uniform")
    run(
        [gaussian(noise=z, clip=0.1, quantile=quantile, clip_lr=1e-9)], method, digits(n), rounds=300, steps=1
    )
    most = max(quantile, 1 - quantile)
    sigma = max(n / 20, 2 * most * z)
    expected = (z**-2 - (most / sigma) ** 2) ** -0.5
    scaled = [
        flat({k: before.shared[k] - v for k, v in after.shared.items()})
        * n
        / float(before.extra["uploads.0.clip"])
        for before, _, after in released
    ]
    assert np.std(scaled) == pytest.approx(expected, rel=0.01)


@each("quantile", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_client_changes_sums_and_lengths_by_no_more_than_is_paid_for(quantile, monkeypatch) -> None:
    """(|x_i|/(z_Δ C))² + (b_i/σ_b)² ≤ 1/z² whatever a client sends: what the account composes."""
    mechanisms = []
    release = Mechanism._release

    def spy(self, release_, bound):
        mechanisms.append((self, bound))
        return release(self, release_, bound)

    monkeypatch.setattr(Mechanism, "_release", spy)
    for z in (0.3, 4.0):
        run([gaussian(noise=z, clip=0.1, quantile=quantile)])
        mechanism, bound = mechanisms[-1]
        public = {"clip": torch.tensor(0.1, dtype=torch.float64)}
        for below in (-1e9, -0.5, 0.0, 0.7, 1e9):
            sent = Message({"delta.w": torch.full((5,), 3.0)}, {"below": torch.tensor(below)})
            arrived = mechanism._accept(sent, public)
            length = float(torch.linalg.vector_norm(arrived.numbers["delta.w"])) / 0.1
            paid = (length / bound.noise_of_sums) ** 2 + (
                float(arrived.rest["below"]) / bound.below_noise
            ) ** 2
            assert paid <= z**-2 * (1 + 1e-6)


AWAY = {
    "stragglers": lambda order: pt.schedule.synchronous(order, stragglers=0.9),
    "dropout": lambda order: pt.schedule.synchronous(order, delays=pt.schedule.delays(dropout=0.8)),
    "deadline": lambda order: pt.schedule.synchronous(
        order,
        delays=pt.schedule.delays(upload=pt.schedule.exponential(1.0), dropout=0.5),
        deadline=0.3,
    ),
}
"""Why nine of ten uploads do not arrive, or about so many."""


@each("away", AWAY)
@each("quantile", [0.2, 0.9])
@each("mechanism, order", [(gaussian, "poisson"), (banded, "cyclic")])
def test_the_clip_finds_the_quantile_of_those_who_report(mechanism, order, quantile, away) -> None:
    """Of uploads whose lengths are even on a logarithmic scale from 0.1 to 10, whoever is away."""
    n, clips = 200, []
    lengths = 10 ** np.linspace(-1, 1, n)
    np.random.default_rng(0).shuffle(lengths)

    class Watch(pt.callbacks.Callback):
        def evaluation(self, what, row) -> None:  # noqa: ARG002
            clips.append(row["privacy"]["clip"])

    y = np.asarray(lengths, dtype=np.float32)[:, None] / 2
    data = pt.data.from_arrays(
        np.eye(n, dtype=np.float32), y, np.arange(n), test=np.zeros(n, bool), validation=0
    )
    method = pt.fedavg(lr=1.0, weighting="uniform", server=pt.optim.sgd(1e-30))
    pt.federate(
        Zero(n), data, method, rounds=100, cohort=100, steps=1, batch=None, loss="mse", metric="mse",
        schedule=AWAY[away](order), baselines=False, evaluate_every=4, callbacks=[Watch()],
        uploads=[mechanism(noise=0.3, clip=1.0, quantile=quantile, clip_lr=0.5)],
    )  # fmt: skip
    found, expected = np.log10(clips[15:]), np.log10(np.quantile(lengths, quantile))
    assert np.median(found) == pytest.approx(expected, abs=0.15)
    assert np.abs(found - expected).max() < 0.5


# ---- noise that is taken back


def test_the_square_root() -> None:
    """C is banded, its columns have length 1, and with all bands C² has equal entries: C is a square root."""
    c = np.array(square_root(6))
    assert np.linalg.norm(c) == pytest.approx(1)
    full = np.array(square_root(200)) / square_root(200)[0]
    matrix = sum(np.diag(np.full(200 - j, full[j]), -j) for j in range(200))
    assert matrix @ matrix == pytest.approx(np.tril(np.ones((200, 200))), abs=1e-9)
    assert square_root(1) == (1.0,)


@pytest.mark.parametrize("bands", [2, 4])
def test_banded_noise_is_correlated_as_its_matrix_says(bands, released) -> None:
    """C applied to the noise of releases is white, and what sums up has less of it than independent noise."""
    n, z, clip, rounds = 12, 1.0, 0.5, 400
    method = pt.fedavg(lr=1e-30, weighting="uniform")
    run([banded(noise=z, clip=clip, bands=bands)], method, digits(n), rounds=rounds, cohort=3, steps=1)
    noise = noises(released, clip, z, 3)
    c = np.array(square_root(bands))
    white = sum(c[j] * np.pad(noise, ((j, 0), (0, 0)))[:rounds] for j in range(bands))
    assert white.var() == pytest.approx(1, abs=0.02)
    for lag in range(1, bands + 2):
        assert abs(np.mean(white[lag:] * white[:-lag])) < 0.01
    assert np.mean(noise[1:] * noise[:-1]) < -0.2
    assert np.var(np.cumsum(noise, 0)[-50:]) < 0.75 * rounds


def test_one_band_is_gaussian() -> None:
    schedule = pt.schedule.synchronous("cyclic")
    options = {"rounds": 5, "cohort": 4, "schedule": schedule}
    a = run([banded(noise=1.0, bands=1)], **options)
    assert same(a, run([gaussian(noise=1.0)], **options))


def test_bands_need_clients_that_rest() -> None:
    with pytest.raises(Refused) as refused:
        run([banded(noise=1.0, bands=4)], rounds=5, cohort=4)  # 12 clients: three cohorts
    assert refused.value.field == "privacy bands"
    with pytest.raises(Refused):
        run([banded(noise=1.0, bands=2)], rounds=5, cohort=4, schedule=pt.schedule.synchronous("poisson"))
    found = run([banded(noise=1.0)], rounds=5, cohort=4)
    assert found.config["uploads"][0]["bands"] == 3


# ---- with whatever else a run has


@each("executor", ["loop", "vmap", "pool", "auto"])
@each("mechanism", [gaussian(noise=0.5, clip=0.2, quantile=0.5), banded(noise=0.5, clip=0.2)])
@each("method", METHODS)
def test_stacked_equals_alone(executor, mechanism, method) -> None:
    options = {
        "method": METHODS[method](),
        "rounds": 4,
        "cohort": 4,
        "model": pt.models.mlp(64, 8, 10, seed=1),
    }
    alone = reference(mechanism.name, method)
    found = run([mechanism], executor=executor, **options)
    assert flat(found.shared) == pytest.approx(alone, abs=2e-5)


@functools.cache
def reference(name: str, method: str) -> np.ndarray:
    mechanism = {
        "gaussian": gaussian(noise=0.5, clip=0.2, quantile=0.5),
        "banded": banded(noise=0.5, clip=0.2),
    }
    options = {
        "method": METHODS[method](),
        "rounds": 4,
        "cohort": 4,
        "model": pt.models.mlp(64, 8, 10, seed=1),
    }
    return flat(run([mechanism[name]], executor="loop", **options).shared)


@pytest.mark.slow
def test_workers_release_what_one_process_does() -> None:
    options = {"rounds": 3, "cohort": 6, "executor": "vmap"}
    alone = run([gaussian(noise=0.5, clip=0.2, quantile=0.5)], **options)
    found = run([gaussian(noise=0.5, clip=0.2, quantile=0.5)], workers=2, **options)
    assert flat(found.shared) == pytest.approx(flat(alone.shared), abs=1e-5)


def test_runs_in_lockstep_have_the_releases_that_they_have_alone() -> None:
    def one(seed: int):
        model = pt.models.logistic(64, 10, seed=seed)
        return run([gaussian(noise=0.5, clip=0.2, quantile=0.5)], model=model, seed=seed, rounds=4, cohort=4,
                   executor="vmap", progress=False)  # fmt: skip

    alone = [one(seed) for seed in range(3)]
    together = in_lockstep([functools.partial(one, seed) for seed in range(3)])
    for a, b in zip(alone, together):
        assert flat(b.shared) == pytest.approx(flat(a.shared), abs=1e-5)
    assert not same(alone[0], alone[1])


@each("mechanism", [gaussian(noise=1.0, clip=0.2, quantile=0.5), banded(epsilon=20, clip=0.2)])
def test_a_resumed_run_repeats_no_release_and_loses_none(mechanism, tmp_path) -> None:
    """What is computed again after an interruption has the same noise: it is the same release."""

    class Interrupted(pt.callbacks.Callback):
        def round(self, event) -> None:
            if event.round == 5:
                raise KeyboardInterrupt

    options = {"rounds": 9, "cohort": 4, "checkpoint_every": 2}
    whole = run([mechanism], **options)
    with pytest.raises(KeyboardInterrupt):
        run([mechanism], out=tmp_path, callbacks=[Interrupted()], **options)
    resumed = run([mechanism], out=tmp_path, resume=True, **options)
    assert same(whole, resumed)
    assert resumed.summary()["privacy"] == whole.summary()["privacy"]


def test_a_longer_run_that_is_interrupted_goes_on_with_its_noise(tmp_path) -> None:
    """It was found for the first rounds; what the others cost is counted, and said."""

    class Interrupted(pt.callbacks.Callback):
        def round(self, event) -> None:
            if event.round == 9:
                raise KeyboardInterrupt

    def begun(rounds: int, **options):
        return run([gaussian(epsilon=5, delta=1e-3)], rounds=rounds, cohort=4, checkpoint_every=2, **options)

    whole = begun(6).extend(rounds=6)
    with pytest.raises(KeyboardInterrupt):
        begun(6, out=tmp_path).extend(rounds=6, callbacks=[Interrupted()])
    with pytest.warns(UserWarning, match="found for another number of rounds"):
        resumed = begun(12, out=tmp_path, resume=True)
    assert same(whole, resumed)
    assert resumed.summary()["privacy"] == whole.summary()["privacy"]
    assert resumed.summary()["privacy"]["epsilon"] > 5


def test_asynchronous_clients_are_counted_by_turns() -> None:
    schedule = pt.schedule.asynchronous(concurrency=4, buffer=2)
    found = run([gaussian(noise=4.0, clip=0.2)], rounds=12, schedule=schedule)
    most = max(row["reports"] for row in found.clients)
    assert 2 <= most < 12
    account = found.summary()["privacy"]
    assert account["epsilon"] == pytest.approx(pt.privacy.epsilon(4.0, most))


def test_a_target_is_reached_at_the_end_and_grows_until_then(tmp_path) -> None:
    data = digits(60)
    found = run(
        [gaussian(epsilon=3, delta=1e-4)], rounds=20, cohort=6, data=data, evaluate_every=5, out=tmp_path
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    spent = [row["privacy"]["epsilon"] for row in rows]
    assert spent == sorted(spent)
    assert 2.97 < spent[-1] <= 3
    z = rows[-1]["privacy"]["noise"]
    assert z == pytest.approx(pt.privacy.noise_for(3, 20, rate=0.1, delta=1e-4))
    assert spent[0] == pytest.approx(pt.privacy.epsilon(z, rows[0]["round"], rate=0.1, delta=1e-4))
    assert "(ε, δ) = (3, 0.0001)" in str(found.summary())
    longer = run([gaussian(epsilon=3, delta=1e-4)], rounds=20, cohort=6, data=data).extend(rounds=10)
    account = longer.summary()["privacy"]
    assert account["noise"] == z
    assert account["epsilon"] == pytest.approx(pt.privacy.epsilon(z, 30, rate=0.1, delta=1e-4))


def test_epsilon_is_in_the_progress_and_in_the_report() -> None:
    """That of the last evaluation, as it goes on; in the table of what the run has cost, that of its end."""
    notes = []

    class Bar(ProgressBar):
        def round(self, event) -> None:
            super().round(event)
            (task,) = self._progress.tasks
            notes.append(task.fields["note"])

    bar = Bar()
    found = run([gaussian(noise=2.0)], rounds=4, cohort=4, evaluate_every=2, callbacks=[bar])
    spent = [pt.privacy.epsilon(2.0, n, rate=1 / 3) for n in (2, 4)]
    assert "ε" not in notes[0]
    assert notes[2].endswith(f", ε {spent[0]:.2f}")
    shown = str(cost({"gaussian": [found.outcome.record]}))
    assert "privacy ε of each client" in shown
    assert precise(spent[1]) in shown


def test_stages_that_send_nothing_cost_nothing() -> None:
    stages = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=6), pt.stage(pt.finetune("output", lr=0.1), rounds=3)
    )
    model = pt.models.mlp(64, 8, 10)
    found = run([gaussian(noise=2.0)], stages, model=model, rounds=None, cohort=4)
    assert found.summary()["privacy"]["epsilon"] == pytest.approx(pt.privacy.epsilon(2.0, 6, rate=1 / 3))
    two = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=6), pt.stage(pt.fedalt("output", lr=0.1), rounds=4))
    found = run([gaussian(noise=2.0)], two, model=model, rounds=None, cohort=4)
    assert found.summary()["privacy"]["epsilon"] == pytest.approx(pt.privacy.epsilon(2.0, 10, rate=1 / 3))


def test_a_stage_that_begins_in_the_middle_of_an_order_may_have_more_turns() -> None:
    """Two rounds of finetune, then the last cohort of one order and the first of the next: two turns."""
    stages = pt.pipeline(
        pt.stage(pt.finetune("output", lr=0.1), rounds=2), pt.stage(pt.fedavg(lr=0.1), rounds=2)
    )
    schedule = pt.schedule.synchronous("turns")
    options = {"model": pt.models.mlp(64, 8, 10), "rounds": None, "cohort": 4, "schedule": schedule}
    account = run([gaussian(epsilon=2)], stages, **options).summary()["privacy"]
    assert account["epsilon"] == pytest.approx(pt.privacy.epsilon(account["noise"], 2))
    assert 1.98 < account["epsilon"] <= 2


@each("schedule", ["cyclic", "turns"])
def test_sums_are_divided_by_those_who_come_on_average(schedule) -> None:
    """Of 12 clients 8 come, then 4: 6 on average."""
    schedule = pt.schedule.synchronous(schedule)
    found = moved([0.5] * 12, [gaussian(noise=1e-9, clip=1.0)], rounds=2, cohort=8, schedule=schedule)
    assert found == pytest.approx(np.full(12, 0.5 / 6), rel=1e-5)


REPORTING = {
    "poisson": (pt.schedule.synchronous("poisson", stragglers=0.8), 6 * 0.2),
    "random": (pt.schedule.synchronous("random", stragglers=0.8), 2),  # ⌊0.8 · 6⌋ = 4 of 6 are not in time
    "cyclic": (pt.schedule.synchronous("cyclic", stragglers=0.5), 3),
    "dropout": (
        pt.schedule.synchronous("poisson", stragglers=0.5, delays=pt.schedule.delays(dropout=0.4)),
        6 * 0.5 * 0.6,
    ),
    "asynchronous": (
        pt.schedule.asynchronous(concurrency=6, buffer=4, delays=pt.schedule.delays(upload=1.0, dropout=0.5)),
        4,
    ),
}


@each("case", REPORTING)
def test_sums_are_divided_by_those_who_report_as_the_schedule_says(case) -> None:
    """The mean of many steps, in each of which all who report move their own coordinate by 1/2."""
    schedule, reporting = REPORTING[case]
    rounds, n = 150, 12
    moves = moved([0.5] * n, [gaussian(noise=1e-9, clip=1.0)], "uniform", rounds=rounds, cohort=6,
                  schedule=schedule, server=0.01)  # fmt: skip
    # everyone moves by about the same, since what is left to learn hardly changes with such a small step
    arrived = moves.sum() / (0.5 * 0.01) * reporting / rounds
    assert arrived == pytest.approx(reporting, rel=0.25)


def test_each_client_has_the_chance_that_it_drops_out_with() -> None:
    chances = np.array([0.0, 0.9, 0.5, 0.2])
    schedule = pt.schedule.synchronous("poisson", delays=pt.schedule.delays(dropout=chances))
    assert schedule.reporting(4, 2) == pytest.approx(0.5 * (1 - chances))
    assert pt.schedule.synchronous("turns").reporting(12, 8) == pytest.approx(0.5)
    partial = pt.schedule.synchronous("random", stragglers=0.8, late="partial")  # nobody is dropped
    assert partial.reporting(12, 6) == pytest.approx(0.5)


def test_real_clients_drop_out_when_they_do() -> None:
    schedule = pt.schedule.synchronous("poisson", delays=pt.schedule.delays(dropout=0.5))
    found = run([gaussian(noise=1.0)], rounds=1, cohort=6, schedule=schedule)
    setup = found.outcome.stage.setup
    assert setup.reporting(0) == pytest.approx(0.25)
    assert replace(setup, elsewhere=object()).reporting(0) == pytest.approx(0.5)


@each("stragglers", [0.9, 1.0])
def test_sums_of_less_than_one_client_are_those_of_one(stragglers, released) -> None:
    schedule = pt.schedule.synchronous("poisson", stragglers=stragglers)
    method = pt.fedavg(lr=1e-30, weighting="uniform")
    run([gaussian(noise=1.0, clip=0.1)], method, rounds=40, cohort=4, schedule=schedule)
    assert noises(released, 0.1, 1.0, 1).std() == pytest.approx(1, abs=0.03)


def test_who_reports_does_not_make_the_account_smaller() -> None:
    schedules = [pt.schedule.synchronous("poisson", stragglers=s) for s in (0.0, 0.8)]
    spent = [
        run([gaussian(noise=1.0)], rounds=4, cohort=4, schedule=s).summary()["privacy"] for s in schedules
    ]
    assert spent[0] == spent[1]


@each(
    "schedule, name",
    [
        (
            pt.schedule.synchronous("poisson", delays=pt.schedule.delays(upload=1.0), deadline=2.0),
            "deadline=",
        ),
        (pt.schedule.synchronous(available=pt.schedule.day_night(0.5)), "available="),
    ],
)
def test_sums_over_who_knows_how_many_are_warned_of(schedule, name) -> None:
    with pytest.warns(UserWarning, match=f"^{name}: gaussian divides sums") as warned:
        run([gaussian(noise=1.0)], schedule=schedule, rounds=2, cohort=4)
    assert len([w for w in warned if "divides sums" in str(w.message)]) == 1


def test_features_scaled_by_statistics_of_all_clients_are_warned_of() -> None:
    def said(data, uploads) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(uploads, pt.fedalt("output", lr=0.1), data, pt.models.mlp(64, 8, 10), baselines=True)
        return [str(w.message) for w in caught if "standardized" in str(w.message)]

    pooled = pt.data.standardize(digits())
    assert len(said(pooled, [gaussian(noise=1.0)])) == 1
    assert not said(pooled, [])
    assert not said(pt.data.standardize(digits(), by="client"), [gaussian(noise=1.0)])
    assert not said(digits(), [gaussian(noise=1.0)])


def test_noise_for_more_rounds_than_planned_is_for_the_turns_in_them() -> None:
    """Three cohorts take turns: six rounds more are two turns more."""
    (described,) = run([banded(epsilon=8, rounds=12)], rounds=6, cohort=4).config["uploads"]
    assert described["noise"] == pt.privacy.noise_for(8, 4)
    with pytest.raises(Refused):
        run([banded(epsilon=8, rounds=5)], rounds=6, cohort=4)


def test_a_longer_run_is_compared_with_baselines_of_the_same_noise(tmp_path) -> None:
    method, model = pt.fedalt("output", lr=0.1), pt.models.mlp(64, 8, 10)
    options = {"rounds": 3, "cohort": 4, "baselines": True, "out": tmp_path}
    found = run([gaussian(epsilon=8)], method, model=model, **options)
    longer = found.extend(rounds=2)
    assert longer.summary()["privacy"]["noise"] == found.summary()["privacy"]["noise"]
    baseline = json.loads((tmp_path / "baselines" / "global" / "summary.json").read_text())
    assert baseline["rounds"] == 5
    assert baseline["privacy"] == pytest.approx(longer.summary()["privacy"])


def test_compression_after_the_clip_stays_within_it() -> None:
    """Stochastic levels may be longer than what they stand for: the server clips what arrives."""
    chain = [gaussian(noise=1e-9, clip=0.05), pt.transforms.quantize(bits=2, bucket=2000)]
    start = flat(dict(pt.models.logistic(64, 10, seed=0).state_dict()))
    found = run(chain, model=pt.models.logistic(64, 10, seed=0))
    assert 0 < np.linalg.norm(flat(found.shared) - start) <= 0.05 * (1 + 1e-6)
    with pytest.raises(Refused):
        run(chain[::-1])


def test_a_baseline_has_noise_of_its_own(released) -> None:
    """Else it would cancel in the difference of the two models; that of the run is what it is without."""
    method = pt.fedalt("output", lr=0.1, weighting="uniform")
    options = {"method": method, "model": pt.models.mlp(64, 8, 10, seed=1), "rounds": 3, "cohort": 4}
    mechanism = [gaussian(noise=1.0, clip=0.1)]
    alone = run(mechanism, **options)
    of_run = noises(released, 0.1, 1.0, 4)
    released.clear()
    found = run(mechanism, **{**options, "baselines": True})
    assert same(alone, found)
    of_run_too = noises(released[3:], 0.1, 1.0, 4)
    assert np.array_equal(of_run, of_run_too)
    personal = found.summary()["parameters"]["personal"]
    of_baseline = noises(released[:3], 0.1, 1.0, 4)[:, :-personal]  # which shares the output, too
    assert of_baseline.var() == pytest.approx(1, abs=0.15)
    assert abs(np.corrcoef(of_run.reshape(-1), of_baseline.reshape(-1))[0, 1]) < 0.1


class Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@each(
    "case",
    [
        {"method": pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median())},
        {"method": pt.fedavg(lr=0.1, aggregate=pt.aggregate.multi_krum(1, 3))},
        {"method": pt.fedcomed_plus(lr=0.1, sigma=0.1, delta=0.1)},
        {"method": pt.fedproto(lr=0.1, lam=1.0)},
        {"method": pt.fedasync(lr=0.1, mixing=True)},
        {"model": Norms(), "norm": "global"},
        {"model": Norms(), "norm": "static"},
        {"schedule": pt.schedule.synchronous(choose=pt.schedule.power_of_choice(d=6)), "cohort": 3},
        {"schedule": pt.schedule.synchronous(deadline=1.0, delays=pt.schedule.delays(upload=1.0), quorum=2)},
        {"method": pt.ffgg_robust(personal="output", lr=0.1), "model": pt.models.mlp(64, 8, 10)},
        {"uploads": [gaussian(noise=1.0), gaussian(noise=1.0)]},
        {"uploads": [gaussian(epsilon=1.0, rounds=3)], "rounds": 5},
    ],
)
def test_what_is_not_covered_is_refused(case) -> None:
    with pytest.raises(Refused):
        run(**{"uploads": [gaussian(noise=1.0)], **case})


def test_personal_norms_are_no_release() -> None:
    found = run([gaussian(noise=1.0)], model=Norms(), norm="personal")
    assert "2.running_mean" not in found.shared


def test_a_baseline_that_shares_statistics_is_refused_by_its_name() -> None:
    method = pt.fedalt("output", lr=0.1)
    with pytest.raises(Refused) as refused:
        run([gaussian(noise=1.0)], method, model=Norms(), norm="personal", baselines=True)
    assert refused.value.field == "baselines"


def test_a_delta_that_exposes_a_client_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="exposed altogether"):
        run([gaussian(noise=1.0, delta=0.2)])
