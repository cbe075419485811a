"""Memory follows what moves: frozen tensors are shared by all copies, evaluations take what a step takes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pt
from partita.core.frozen import lean_copy

WIDTH, CLIENTS, SAMPLES = 300, 4, 12
LARGE = WIDTH * WIDTH  # numbers of a frozen weight; activations and adapters of all clients have fewer


def samples(features: int = 8) -> pt.FederatedData:
    g = torch.Generator().manual_seed(0)
    n = CLIENTS * SAMPLES
    x, y = torch.randn(n, features, generator=g), torch.randint(0, 3, (n,), generator=g)
    return pt.data.from_arrays(x, y, np.repeat(np.arange(CLIENTS), SAMPLES))


def adapted() -> nn.Module:
    """Return a network of which only adapters are trained, and these are small."""
    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )
    return pt.models.freeze(pt.models.add_adapters(base, "lora", rank=2), but="adapter")


def federate(model: Any, method: Any = None, data: Any = None, **options: Any) -> pt.Run:
    given: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False, "progress": False}
    return pt.federate(model, data or samples(), method or pt.fedavg(lr=0.1), **{**given, **options})


class Allocations(TorchDispatchMode):
    """Notes operations that return a new tensor of at least so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.large = numbers, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor) and t.numel() >= self.numbers:
                memory = t.untyped_storage()
                new = memory.data_ptr() not in known and memory.nbytes() >= 4 * t.numel()
                self.large += [str(func)] if new else []
        return result


@pytest.mark.parametrize("executor", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("method", [pt.fedavg(lr=0.1), pt.ditto(lr=0.1), pt.fedalt("*lora_B*", lr=0.1)])
@pytest.mark.usefixtures("brief_baselines")
def test_a_run_makes_nothing_of_the_size_of_a_frozen_tensor(executor: str, method: Any) -> None:
    """Training, its baselines, evaluations, and the models of all clients."""
    model = adapted()
    with Allocations(LARGE) as seen:
        run = federate(model, method, executor=executor, baselines=True)
        models = [run.client(i).model() for i in range(CLIENTS)]
    assert seen.large == []
    weight = dict(model.named_parameters())["2.weight"].data_ptr()
    assert all(dict(m.named_parameters())["2.weight"].data_ptr() == weight for m in models)
    parts = [dict(m.named_parameters())["2.adapter.lora_B.weight"] for m in models]
    assert len({p.data_ptr() for p in parts}) == CLIENTS


def test_the_watch_sees_copies() -> None:
    with Allocations(LARGE) as seen:
        copy.deepcopy(adapted())
    assert seen.large


def test_what_is_trained_is_never_shared() -> None:
    model = adapted()
    twin = lean_copy(model)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert (p.data_ptr() == q.data_ptr()) is not p.requires_grad, name
        assert p is not q
        assert p.requires_grad == q.requires_grad
    owning = dict(lean_copy(model, own=["2.weight"]).named_parameters())
    assert owning["2.weight"].data_ptr() != dict(model.named_parameters())["2.weight"].data_ptr()
    assert owning["0.weight"].data_ptr() == dict(model.named_parameters())["0.weight"].data_ptr()


def test_tied_and_frozen_tensors_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    twin = lean_copy(model)
    assert twin[0].weight is twin[1].weight
    owning = lean_copy(model, own=["1.weight"])  # by its second name
    assert owning[0].weight is owning[1].weight
    assert owning[0].weight.data_ptr() != model[0].weight.data_ptr()


@pytest.mark.parametrize("whose", ["clients", "users"])
def test_a_base_that_was_changed_in_place_is_noticed(whose: str) -> None:
    model = adapted()
    run = federate(model)
    run.client(0).model()
    changed = model if whose == "users" else run.client(1).model()
    with torch.no_grad():
        changed.get_parameter("2.weight").add_(0.1)
    with pytest.raises(pt.Refused, match="written into since training"):
        run.client(0).model()


def test_all_that_goes_on_with_a_changed_base_is_refused(tmp_path: Any) -> None:
    model = adapted()
    run = federate(model, pt.ditto(lr=0.1), out=tmp_path / "run")
    loaded = pt.load(tmp_path / "run", model=model)
    loaded.client(0).model()
    with torch.no_grad():
        model.get_parameter("2.weight").add_(0.1)
    for use in (
        lambda: loaded.client(0).model(),
        lambda: run.extend(1),
        lambda: run.personalize(samples()),
        lambda: run.evaluate(samples()),
    ):
        with pytest.raises(pt.Refused, match="written into since"):
            use()


def test_statistics_of_a_batch_are_of_batches_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = []
    for little in (1 << 10, 1 << 26):
        monkeypatch.setattr("partita.engine.stage.PASS_BYTES", little)
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 3))
        run = federate(model, data=few_to_train_on(), executor="loop", metric="loss", norm="global")
        scores.append(run.summary()["test"]["global"])
    assert scores[0] == scores[1]


def test_a_copy_may_be_changed() -> None:
    run = federate(adapted())
    mine = copy.deepcopy(run.client(0).model())
    with torch.no_grad():
        mine.get_parameter("2.weight").add_(0.1)
    run.client(0).model()


def test_another_base_is_refused_on_resume(tmp_path: Any) -> None:
    federate(adapted(), out=tmp_path / "run")
    other = adapted()
    with torch.no_grad():
        other.get_parameter("2.weight").add_(0.1)
    with pytest.raises(pt.Refused):
        federate(other, out=tmp_path / "run", resume=True, rounds=3)


class Narrow(nn.Module):
    """A frozen base of 16 bits, and adapters of 32 around it, as peft makes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40)).to(torch.bfloat16)
        self.base.requires_grad_(False)
        self.down, self.up, self.output = nn.Linear(8, 2), nn.Linear(2, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x.to(torch.bfloat16) + self.down(x).sum(1, keepdim=True).to(torch.bfloat16))
        found: Tensor = self.output(torch.tanh(hidden.float() + self.up(self.down(x))))
        return found


def test_a_base_of_16_bits_is_stacked_within_its_roundings() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be stacked")
        loop, stacked = (federate(Narrow(), executor=executor) for executor in ("loop", "vmap"))
    start = Narrow().state_dict()
    moved = torch.cat([(v - start[k]).flatten() for k, v in loop.shared.items()]).norm()
    apart = torch.cat([(v - stacked.shared[k]).flatten() for k, v in loop.shared.items()]).norm()
    assert apart < 0.05 * moved
    assert loop.client(0).model().base[0].weight.dtype == torch.bfloat16


# ---- batches of evaluations


def few_to_train_on() -> pt.FederatedData:
    """Return two clients with few samples to train on and many to test with."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(172, 8, generator=g), torch.randint(0, 3, (172,), generator=g)
    client = np.repeat([0, 1], 86)
    return pt.data.from_arrays(x, y, client, test=np.arange(172) % 86 >= 6, validation=0)


class Sizes(nn.Module):
    """Notes the samples of each pass, and keeps much for the backward pass."""

    def __init__(self, repeat: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.repeat, self.seen = nn.Linear(8, 8), repeat, list[tuple[bool, int]]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, len(x)))
        wide = torch.tanh(
            self.linear(x).repeat(1, self.repeat)
        )  # saved: 32 bytes times `repeat` for each sample
        return wide[:, :8]

    def __deepcopy__(self, memo: dict[int, Any]) -> Sizes:
        new = Sizes(self.repeat).train(self.training)
        new.linear, new.seen = copy.deepcopy(self.linear, memo), self.seen
        return new


@pytest.mark.parametrize(("repeat", "expected"), [(1, 80), (2**8, 7), (2**9, 4)])
def test_an_evaluation_takes_no_more_at_once_than_a_step_or_a_little_memory(
    repeat: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.engine.stage.PASS_BYTES", 1 << 16)
    monkeypatch.setattr("partita.engine.model.by_sample.TRIAL_BYTES", 1 << 12)
    model = Sizes(repeat)
    run = federate(model, executor="loop", rounds=1, data=few_to_train_on())
    assert max(size for training, size in model.seen if not training) == expected
    like = federate(Sizes(1), executor="loop", rounds=1, data=few_to_train_on())
    assert run.summary()["test"] == pytest.approx(like.summary()["test"])
