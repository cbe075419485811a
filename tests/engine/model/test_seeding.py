"""Random numbers that a model draws by itself: `seed=` decides them, and the user's generators stay."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita.core import types
from partita.core.parts import Program
from partita.core.types import Batch, Group, Partition
from partita.data import FederatedData
from partita.engine.callbacks import Callback, Event
from partita.engine.execute import Task, make_executor
from partita.engine.execute.pool import Pool
from partita.engine.model.probe import examine
from support import each

SIZES = (9, 7, 6, 5, 4)


def data(shift: float = 0.0) -> FederatedData:
    """The last clients have samples that begin with a negative number, if there is a shift."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(sum(SIZES), 6, generator=g), torch.randint(0, 4, (sum(SIZES),), generator=g)
    ends = np.cumsum(SIZES)
    if shift:
        x[:, 0] = shift
        x[ends[2] :, 0] = -shift
    ranges = [(int(e) - n, n) for e, n in zip(ends, SIZES)]
    return FederatedData.make(x, y, ranges, ranges)


class Net(nn.Module):
    """A small network with something random in the middle."""

    def __init__(self, noise: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.output, self.noise = nn.Linear(6, 8), nn.Linear(8, 4), noise

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(self.noise(self, self.hidden(x).relu()))
        return found


def dropout(module: nn.Module, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, module.training)


def depth(module: nn.Module, h: Tensor) -> Tensor:
    """Stochastic depth: whole samples."""
    return h * (torch.rand(len(h), 1) > 0.5) if module.training else h


def attention(module: nn.Module, h: Tensor) -> Tensor:
    h = h.reshape(len(h), 4, 2)
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5 if module.training else 0.0).flatten(1)


def layerdrop(module: nn.Module, h: Tensor) -> Tensor:
    return h * 0.3 if module.training and random.random() < 0.5 else h


def numpy_noise(module: nn.Module, h: Tensor) -> Tensor:
    return h * float(np.random.rand()) if module.training else h


def always(module: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    """Dropout that goes on in evaluation."""
    return F.dropout(h, 0.5)


NOISE = {f.__name__: f for f in (dropout, depth, attention, layerdrop, numpy_noise, always)}
FROM = {"layerdrop": "Python's random", "numpy_noise": "NumPy"}
every_noise = each("noise", NOISE.values(), ids=NOISE)


def federate(
    model: Any,
    executor: str = "loop",
    samples: FederatedData | None = None,
    method: Any = None,
    **options: Any,
):
    given: dict[str, Any] = {"rounds": 3, "epochs": 1, "batch": 4, "baselines": False, "metric": "loss"}
    given |= {"evaluate_every": 1, "progress": False, "executor": executor, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be stacked")
        return pt.federate(
            model, data() if samples is None else samples, method or pt.fedalt("output.*", lr=0.2), **given
        )


def disturb(seed: int) -> None:
    """What else a user's process may have drawn."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def assert_same_bits(a: pt.Run, b: pt.Run) -> None:
    for k, v in a.shared.items():
        assert torch.equal(v, b.shared[k]), k
    for i in range(len(a.clients)):
        for k, v in a.client(i).personal.items():
            assert torch.equal(v, b.client(i).personal[k]), (i, k)
    for kind in ("train_loss", "test.personal"):
        assert [r[kind] for r in a.metrics] == [r[kind] for r in b.metrics]


@pytest.fixture
def cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@every_noise
def test_the_same_seed_gives_the_same_bits_and_another_one_others(noise) -> None:
    runs = []
    for seed, other in ((0, 1), (0, 2), (5, 1)):
        disturb(other)
        runs.append(federate(Net(noise), seed=seed))
    assert_same_bits(*runs[:2])
    assert not torch.equal(runs[0].shared["hidden.weight"], runs[2].shared["hidden.weight"])
    quiet = federate(Net(lambda module, h: h))  # noqa: ARG005
    assert not torch.equal(runs[0].shared["hidden.weight"], quiet.shared["hidden.weight"])


@every_noise
def test_the_generators_of_the_user_stay_as_they_are(noise) -> None:
    disturb(3)
    expected = torch.rand(3), random.random(), np.random.rand()
    model = Net(noise)
    disturb(3)
    federate(model, "auto", baselines=True)
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@every_noise
def test_draws_of_torch_are_stacked(noise, cores) -> None:  # noqa: ARG001
    """They come from the key of the batch, and so are the same in a stack, and in a thread."""
    if noise.__name__ in FROM:
        return
    model, torchs = Net(noise), {"rtol": 1e-4, "atol": 1e-6}
    loop = federate(model)
    assert_same_bits(federate(model, "pool"), loop)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be stacked")
        stacked = pt.federate(
            model,
            data(),
            pt.fedalt("output.*", lr=0.2),
            rounds=3,
            epochs=1,
            batch=4,
            baselines=False,
            executor="vmap",
            progress=False,
        )
    for k, v in loop.shared.items():
        torch.testing.assert_close(stacked.shared[k], v, **torchs)
        for i in range(len(loop.clients)):
            for name, own in loop.client(i).personal.items():
                torch.testing.assert_close(stacked.client(i).personal[name], own, **torchs)


@each("noise", [layerdrop, numpy_noise], ids=FROM)
def test_draws_of_others_are_not_stacked_and_have_no_threads(noise, cores, monkeypatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(Pool, "_parallel", None)
    model = Net(noise)
    loop = federate(model)
    for executor in ("vmap", "pool", "auto"):
        assert_same_bits(federate(model, executor), loop)
    whose = FROM[noise.__name__]
    with pytest.warns(UserWarning, match=rf"cannot be stacked.*draws random numbers of its own \({whose}\)"):
        pt.federate(
            model, data(), pt.fedavg(lr=0.1), rounds=1, steps=1, batch=4, executor="vmap", baselines=False
        )


def test_nothing_is_said_where_nothing_is_lost(recwarn) -> None:
    federate(Net(dropout), "loop")
    assert not recwarn.list


@pytest.mark.parametrize("noise", [dropout, layerdrop])
def test_resumed_equals_straight(noise, tmp_path: Path) -> None:
    class Stop(Callback):
        def round(self, event: Event) -> None:
            if event.round == 2:
                signal.raise_signal(signal.SIGINT)

    straight = federate(Net(noise), rounds=4)
    with pytest.raises(KeyboardInterrupt):
        federate(Net(noise), rounds=4, out=tmp_path / "run", checkpoint_every=1, callbacks=[Stop()])
    disturb(9)
    assert_same_bits(
        federate(Net(noise), rounds=4, out=tmp_path / "run", checkpoint_every=1, resume=True), straight
    )


def test_who_comes_first_does_not_matter() -> None:
    samples, model = data(), Net(layerdrop)
    profile = examine(model, samples, None, None)
    names = tuple(k for k, _ in model.named_parameters())
    params = {k: v.detach() for k, v in model.named_parameters()}
    loop = make_executor("loop", Task(model, samples, Partition(names, ()), profile, params))
    problem = loop.bound.problem
    method = pt.fedavg(lr=0.1)
    work = types.Work(steps=2, batch=4)
    context = types.RoundContext(seed=0, round=1, stage=0, stage_round=1, stage_rounds=2, work=work)
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        group = Group(tuple(range(5)), types.Download(params, {}, 1))
        upload, _ = loop(
            Program("training", method.local, trains=True),
            np.array(order),
            group,
            types.ClientState({}, {}),
            context,
        )
        found.append({c: upload.delta["hidden.weight"][i] for i, c in enumerate(order)})
    assert problem.draws.seeded
    for c in range(5):
        assert torch.equal(found[0][c], found[1][c])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("executor", ["loop", "pool"])
def test_draws_that_depend_on_the_data_are_found_on_the_way(executor, cores) -> None:  # noqa: ARG001
    """What the trial cannot see: a round that drew is done again, as if it had been known."""

    class Sometimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x).relu()
            if self.training and bool((x[:, 0] < 0).any()):
                h = F.dropout(h, 0.5)
            found: Tensor = self.output(h)
            return found

    samples = data(shift=1.0)
    assert examine(Sometimes(dropout), samples, None, None).behaviour.draws == ()
    runs, model = [], Sometimes(dropout)
    for other in (1, 2):
        disturb(other)
        before = torch.get_rng_state()
        runs.append(federate(model, executor, samples))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(*runs)
    assert_same_bits(runs[0], federate(model, "loop", samples))
    quiet = federate(Net(lambda module, h: h), samples=samples)  # noqa: ARG005
    assert not torch.equal(runs[0].shared["hidden.weight"], quiet.shared["hidden.weight"])


@each("noise", [dropout, depth, layerdrop, numpy_noise, always])
def test_every_look_at_a_batch_sees_the_same_draws(noise) -> None:
    """The gradient twice, and the Hessian against differences of gradients."""
    samples, model = data(), Net(noise).double()
    names = tuple(k for k, _ in model.named_parameters())
    params = {k: v.detach() for k, v in model.named_parameters()}
    samples = FederatedData.make(samples.x.double(), samples.y, samples.train, samples.test)
    profile = examine(model, samples, None, None)
    loop = make_executor("loop", Task(model, samples, Partition(names, ()), profile, params))
    problem = loop.bound.problem
    batch = Batch(*samples.gather(torch.arange(6)), None, torch.tensor(77))
    g = torch.Generator().manual_seed(1)
    d = {k: torch.randn(v.shape, generator=g, dtype=torch.float64) for k, v in params.items()}
    disturb(1)
    first = problem.grad(params, batch, names)
    disturb(2)
    second = problem.grad(params, batch, names)
    assert torch.equal(first[0], second[0])
    assert problem.score(params, batch)[1].tolist() == problem.score(params, batch)[1].tolist()
    eps = 1e-6
    ahead, behind = (
        problem.grad({k: v + s * eps * d[k] for k, v in params.items()}, batch, names)[1] for s in (1, -1)
    )
    for k, v in problem.hvp(params, batch, d).items():
        torch.testing.assert_close(v, (ahead[k] - behind[k]) / (2 * eps), rtol=1e-5, atol=1e-7)
    others = [problem.grad(params, batch._replace(key=torch.tensor(k)), names)[0] for k in range(10)]
    assert any(not torch.equal(first[0], other) for other in others)


def test_a_loss_that_draws_is_seeded_too() -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn_like(output), target)

    runs = []
    for other in (1, 2):
        disturb(other)
        runs.append(federate(pt.models.mlp(6, 8, 4), loss=noisy, metric="accuracy"))
    assert_same_bits(*runs)


def test_a_model_that_remembers_is_told() -> None:
    class Counts(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    with pytest.warns(UserWarning, match="keeps something between passes"):
        federate(Counts(lambda module, h: h))  # noqa: ARG005


def test_a_function_that_makes_a_model_is_called_under_the_seed() -> None:
    def make() -> nn.Module:
        model = pt.models.mlp(6, 8, 4)
        with torch.no_grad():
            model.output.linear.bias[0] = random.random()
            model.output.linear.bias[1] = float(np.random.rand())
        return model

    runs = []
    for other in (1, 2):
        disturb(other)
        runs.append(federate(make))
    assert_same_bits(*runs)


def test_the_statistics_of_a_layer_that_the_trial_left_out_are_tracked() -> None:
    class Drops(nn.Module):
        """Leaves its second block out, as in the trial, until something else is drawn."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.output = nn.Linear(6, 8), nn.Linear(8, 4)
            self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            h = self.second(h) if random.random() < 0.05 else h
            found: Tensor = self.output(h)
            return found

    run = federate(Drops(), norm="global", rounds=6)
    assert run.shared["second.1.running_mean"].any()


class Skips(nn.Module):
    """A block that is left out at random in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or torch.rand(()) > 0.5:
            x = x + self.a(x)
        return self.b(x)


def test_the_personal_part_of_a_model_that_skips_layers_is_that_of_the_seed() -> None:
    parts = []
    for other in range(8):
        disturb(other)
        before = torch.get_rng_state()
        run = federate(Skips, method=pt.fedsim(personal="input", lr=0.1), rounds=1)
        assert torch.equal(torch.get_rng_state(), before)
        parts.append(tuple(run.client(0).personal))
    assert set(parts) == {("a.weight", "a.bias")}


def test_a_step_in_which_all_that_moves_is_skipped_moves_nothing() -> None:
    run = federate(Skips, method=pt.fedalt(personal="input", lr=0.1), rounds=2)
    assert all(bool(torch.isfinite(v).all()) for v in run.shared.values())


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_dropout_keeps_its_keys_where_clients_come_later(executor: str) -> None:
    """A look at the model for the labels of newcomers must leave nothing in it."""
    data = pt.data.digits(clients=5, seed=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    def run(**settings: Any) -> pt.Run:
        return pt.federate(
            model, data, pt.fedavg(lr=0.1), rounds=2, steps=3, batch=8, seed=0, newcomers=[4],
            device="cpu", baselines=False, **settings,
        )  # fmt: skip

    loop, other = run(executor="loop"), run(executor=executor, shares=2)
    for name, value in loop.shared.items():
        assert torch.allclose(value, other.shared[name], atol=1e-6), name
