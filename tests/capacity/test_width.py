"""Weak clients that train a narrow model: the same width in each step (HeteroFL), or a random one (FjORD)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity.weak import (
    KINDS,
    SIZES,
    Tensors,
    assert_close,
    assert_same,
    batches,
    convs,
    digits,
    everything,
    federate,
    mlp,
    rounds,
)
from partita.capacity import fjord, heterofl, width
from partita.models.blocks import Blocks
from support import each

executors = each("executor", ["loop", "vmap"])
RATES = {"strong": 1.0, "weak": 0.5}
THREE = {"strong": 1.0, "middle": 0.5, "weak": 0.25}
THREE_KINDS = ("strong", "middle", "weak", "strong", "weak", "middle")


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in (*model.named_parameters(), *model.named_buffers())}


def inside(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def narrow(make: Callable[[], Blocks], tensors: Tensors, p: float) -> nn.Module:
    """Plainly: the model of this width, with the first numbers of each of these tensors."""
    whole = make()
    model = copy.deepcopy(whole if p == 1 else whole.at_width(p))
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(tensors[name][inside(tuple(value.shape))])
    return model


def after(model: nn.Module, steps: Any, lr: float) -> Tensors:
    """Plainly: the model's tensors after SGD."""
    model.train()
    for x, y in steps:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= lr * p.grad
    return {k: v.detach().clone() for k, v in (*model.named_parameters(), *model.named_buffers())}


def placed(before: Tensors, part: Tensors) -> Tensors:
    """received − computed in the shapes of the whole model, zero where a narrow one has nothing."""
    found = {k: torch.zeros_like(v) for k, v in before.items()}
    for k, v in part.items():
        found[k][inside(tuple(v.shape))] = before[k][inside(tuple(v.shape))] - v
    return found


# ---- a width for each class


@executors
@each("make", [mlp, convs])
def test_a_weak_client_trains_the_narrow_model(make, executor) -> None:
    data = digits()
    (round,), _ = rounds(
        make(),
        data,
        pt.fedavg(lr=0.2),
        steps=3,
        norm="global",
        capacity=width(THREE, THREE_KINDS),
        executor=executor,
    )
    for client, kind in enumerate(THREE_KINDS):
        model = narrow(make, round.before, THREE[kind])
        expected = placed(round.before, after(model, batches(data, client, steps=3, batch=8), 0.2))
        assert_close(round.upload(client), expected, atol=1e-5)
        assert expected["output.linear.bias"].abs().max() > 1e-3


def test_each_coordinate_is_averaged_over_its_holders() -> None:
    """Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i, in NumPy."""
    (round,), run = rounds(
        convs(), digits(), pt.fedavg(lr=0.1), capacity=width(THREE, THREE_KINDS), norm="global"
    )
    whole, n = convs(), np.array(SIZES, dtype=np.float64)
    parts = {kind: shapes(whole if p == 1 else whole.at_width(p)) for kind, p in THREE.items()}
    checked = 0
    for name, old in round.before.items():
        stack = round.uploads.delta[name].double().numpy()
        for place in product(*map(range, old.shape)):
            held = [all(a < b for a, b in zip(place, parts[kind][name])) for kind in THREE_KINDS]
            weight = n * held
            delta = (weight * stack[(slice(None), *place)]).sum() / weight.sum()
            if name.endswith("tracked"):
                continue
            assert run.shared[name][place].item() == pytest.approx(old[place].item() - delta, abs=1e-6)
            checked += weight.sum() < n.sum()
    assert checked > 500


@each(
    "method",
    [pt.fedavgm(lr=0.1), pt.fedadam(lr=0.1, server_lr=0.01), pt.scaffold(lr=0.1)],
    ids=lambda m: m.name,
)
def test_a_coordinate_that_nobody_in_the_cohort_holds_stays(method) -> None:
    """To the bit, although the server's momentum would carry it on."""
    found, run = rounds(
        mlp(),
        digits(),
        method,
        capacity=width(RATES, ("strong", *["weak"] * 5)),
        rounds=6,
        cohort=2,
        seed=1,
        executor="vmap",
    )
    strong = [0 in r.clients for r in found]
    assert False in strong[strong.index(True) :]
    for round, new, there in zip(found, [*(r.before for r in found[1:]), run.shared], strong):
        moved = new["hidden2.linear.weight"] != round.before["hidden2.linear.weight"]  # 16 × 32
        assert moved[:8, :16].any()
        assert moved[8:].any().item() is there
        assert moved[:, 16:].any().item() is there


@pytest.mark.parametrize("norm", ["global", "static"])
@pytest.mark.parametrize("capacity", [width, fjord])
def test_loop_equals_vmap(capacity, norm) -> None:
    """With ragged clients, one of them without data."""
    runs = [
        federate(
            convs(),
            digits((30, 0, 90, 23, 65, 1)),
            pt.fedavg(lr=0.1, momentum=0.5),
            rounds=2,
            steps=None,
            epochs=1,
            norm=norm,
            capacity=capacity(THREE, THREE_KINDS),
            executor=executor,
        )
        for executor in ("loop", "vmap")
    ]
    assert_close(*(run.shared for run in runs), atol=1e-4)
    assert not torch.equal(runs[0].shared["output.linear.bias"], convs().output.linear.bias)
    np.testing.assert_allclose(*(run.scores() for run in runs))


@pytest.mark.parametrize(
    "method", [pt.fedalt("output", lr=0.1), pt.scaffold(lr=0.1), pt.ditto(lr=0.1, lam=0.5)]
)
def test_what_clients_keep_has_the_shape_of_the_whole_model(method) -> None:
    """A narrow client's own numbers come first, the others stay as they were; loop equals vmap."""
    runs = [
        federate(mlp(), digits(), method, rounds=3, capacity=width(RATES, KINDS), executor=executor)
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs), atol=1e-5)
    name, begin = "output.linear.weight", mlp().output.linear.weight
    for i, kind in enumerate(KINDS):
        client = runs[0].client(i)
        if method.name == "scaffold":
            own, start = client.memory[name], torch.zeros_like(begin)
        else:
            own, start = client.personal[name], begin
        assert own.shape == begin.shape
        assert (own[:, :8] != start[:, :8]).any()
        if method.name != "ditto":  # where what is shared with the server is as it was received
            assert (own[:, 8:] != start[:, 8:]).any().item() is (kind == "strong")


def test_a_model_of_ones_own(recwarn) -> None:
    """`build` makes it at any width; what does not train is the narrow client's, too."""

    def build(p: float) -> nn.Module:
        a, b = round(32 * p), round(16 * p)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 10)
        )

    model = build(1.0)
    model[1].requires_grad_(False)
    data = digits()
    capacity = width(RATES, KINDS, build=build)
    (one,), run = rounds(model, data, pt.fedavg(lr=0.1, momentum=0.5), steps=1, capacity=capacity)
    small = build(0.5)
    with torch.no_grad():
        whole = dict(model.named_parameters())
        for name, p in small.named_parameters():
            p.copy_(whole[name][inside(tuple(p.shape))])
    small[1].requires_grad_(False)
    new = after(small, batches(data, 1, steps=1, batch=8), 0.1)
    expected = placed(one.before, {k: v for k, v in new.items() if not k.startswith("1.")})
    assert set(one.upload(1)) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    assert_close(one.upload(1), expected, atol=1e-5)
    assert torch.equal(run.client(1).model()[1].weight, model[1].weight[:16])
    assert not recwarn


# ---- a width for each step


def test_with_one_width_fjord_is_width() -> None:
    with pytest.warns(UserWarning, match="no client holds all of"):
        alone = [
            federate(convs(), digits(), pt.fedavg(lr=0.1), rounds=2, norm="global", capacity=c({"w": 0.5}))
            for c in (width, fjord)
        ]
    assert_same(*(run.shared for run in alone))


def drawn(upload: Tensors, before: Tensors, step: tuple[Tensor, Tensor], make: Callable[[], Blocks]) -> float:
    """The one width whose plain step is this upload."""
    found = []
    for p in THREE.values():
        expected = placed(before, after(narrow(make, before, p), [step], 0.1))
        if max((upload[k] - v).abs().max().item() for k, v in expected.items()) < 1e-5:
            found.append(p)
    assert len(found) == 1, found
    return found[0]


@executors
@each("make", [mlp, convs])
def test_a_step_is_that_of_the_narrow_model(make, executor) -> None:
    """Of one of the widths up to the client's own: outside of it nothing changes, statistics neither."""
    data = digits((20, 30) * 8)
    kinds = ["strong", "middle", "weak", "strong"] * 4
    (round,), _ = rounds(
        make(),
        data,
        pt.fedavg(lr=0.1),
        steps=1,
        norm="global",
        capacity=fjord(THREE, kinds),
        executor=executor,
    )
    seen: dict[str, set[float]] = {kind: set() for kind in THREE}
    for client, kind in enumerate(kinds):
        (step,) = batches(data, client, steps=1, batch=8)
        seen[kind].add(drawn(round.upload(client), round.before, step, make))
    assert seen == {"strong": {1.0, 0.5, 0.25}, "middle": {0.5, 0.25}, "weak": {0.25}}


def steps(seed: int, **options: Any) -> Iterator[Tensors]:
    """What the first client changes in each of its steps: the difference of one more step."""
    before: Tensors | None = None
    for n in range(1, 7):
        (round,), _ = rounds(
            mlp(), digits((20, 30)), pt.fedavg(lr=0.1), steps=n, seed=seed, capacity=fjord(THREE, **options)
        )
        upload = round.upload(0)
        yield upload if before is None else {k: upload[k] - before[k] for k in upload}
        before = upload


def support(change: Tensors) -> int:
    """How many of the 32 channels of the first layer were there."""
    rows = change["hidden1.linear.weight"].abs().amax(1) > 1e-6
    return max(n for n in (8, 16, 32) if rows[{8: 0, 16: 8, 32: 16}[n] : n].any())


def test_every_step_draws_anew() -> None:
    widths = [support(change) for change in steps(0, assign=["strong", "weak"])]
    assert len(set(widths)) > 1
    assert widths != [support(change) for change in steps(1, assign=["strong", "weak"])]


@executors
def test_widths_depend_on_round_client_and_step_alone(executor) -> None:
    """Not on who else takes part, nor on how clients are executed."""
    data, capacity = digits((20,) * 12), fjord(THREE, ["strong"] * 10 + ["middle", "weak"])
    all_, _ = rounds(mlp(), data, pt.fedavg(lr=0.1), capacity=capacity, rounds=2, executor="loop")
    few, _ = rounds(mlp(), data, pt.fedavg(lr=0.1), capacity=capacity, cohort=5, executor=executor)
    for client in few[0].clients:
        assert_close(few[0].upload(client), all_[0].upload(client), atol=1e-6)
    first, second = ([support(r.upload(i)) for i in range(10)] for r in all_)
    assert first != second
    assert len(set(first)) > 1


def test_widths_are_drawn_equally_often() -> None:
    """By the key of the step; χ² of 3000 draws of three widths."""
    from partita.core import draws
    from partita.engine.devices.ordered import ordered

    whole = {"a": torch.ones(4), "b": torch.ones(2)}
    masks = ordered([{"a": (1,), "b": (2,)}, {"a": (2,), "b": (2,)}], whole, [])
    keys = draws.fold(draws.key(0, "batches", 0, torch.arange(300))[:, None], torch.arange(10)).reshape(-1)
    ones = [int(masks(whole, key)["a"].sum()) for key in keys]
    assert set(ones) == {1, 2, 4}
    counts = np.bincount(ones, minlength=5)[[1, 2, 4]]
    assert ((counts - 1000) ** 2 / 1000).sum() < 14  # 0.1 % of fair draws are beyond
    assert list(masks.masks) == ["a"]


# ---- what it costs, and what a client has in the end


def test_bytes_are_those_of_the_slices() -> None:
    whole = 4 * (64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10)
    half = 4 * (64 * 16 + 16 + 16 * 8 + 8 + 8 * 10 + 10)
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=width(RATES, KINDS), rounds=3)
    assert run.metrics[-1]["bytes_down"] == run.metrics[-1]["bytes_up"] == 3 * (2 * whole + 4 * half)
    twice = federate(mlp(), digits(), pt.scaffold(lr=0.1), capacity=fjord(RATES, KINDS))
    assert twice.metrics[-1]["bytes_down"] == twice.metrics[-1]["bytes_up"] == 2 * (2 * whole + 4 * half)


@pytest.mark.parametrize(
    ("capacity", "norm", "executor"),
    [
        (heterofl, "global", "loop"),
        (heterofl, "static", "vmap"),
        (fjord, "static", "loop"),
        (fjord, "global", "vmap"),
        (fjord, "personal", "vmap"),
    ],
)
def test_the_model_of_a_weak_client_is_narrow(capacity, norm, executor) -> None:
    """It has the score that the run reports for it; the global score is the whole model's."""
    data = digits(test=40)
    run = federate(
        convs(),
        data,
        pt.fedalt("output", lr=0.1),
        rounds=3,
        norm=norm,
        capacity=capacity(RATES, KINDS),
        executor=executor,
    )
    for i, kind in enumerate(KINDS):
        model = run.client(i).model()
        assert model.stem.conv.weight.shape[0] == (8 if kind == "strong" else 4)
        x, y = data.client(i, "test")
        with torch.no_grad():
            score = (model(x).argmax(1) == y).float().mean().item()
        assert score == pytest.approx(run.clients[i]["personal"], abs=1e-6)


def test_a_narrow_client_is_scored_by_its_own_model() -> None:
    data = digits(test=40)
    run = federate(mlp(), data, pt.fedavg(lr=0.3), rounds=10, steps=5, capacity=width(RATES, KINDS))
    whole = run.model()
    scores = []
    for i, kind in enumerate(KINDS):
        x, y = data.client(i, "test")
        own = narrow(mlp, run.shared, RATES[kind])
        with torch.no_grad():
            both = [(m(x).argmax(1) == y).float().mean().item() for m in (own, whole)]
        assert run.clients[i]["personal"] == pytest.approx(both[0], abs=1e-6)
        assert run.clients[i]["global"] == pytest.approx(both[1], abs=1e-6)
        scores.append(both[0] == both[1])
    assert [s for s, kind in zip(scores, KINDS) if kind == "strong"] == [True, True]
    assert not all(scores)


def test_a_narrow_model_is_computed_when_asked(tmp_path) -> None:
    """From a folder alone it is not there; from the run that is resumed it is."""
    options: dict[str, Any] = {"capacity": width(RATES, KINDS), "out": tmp_path / "run", "report": False}
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), **options)
    with pytest.raises(ValueError, match="resume=True"):
        pt.load(tmp_path / "run", model=mlp()).client(1).model()
    again = federate(mlp(), digits(), pt.fedavg(lr=0.1), resume=True, **options)
    a, b = (dict(r.client(1).model().named_parameters()) for r in (run, again))
    assert a["hidden1.linear.weight"].shape == (16, 64)
    assert_same(a, b)


# ---- what is refused


def refused(match: str, capacity: Any, model: nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        federate(model or mlp(), digits(), pt.fedavg(lr=0.1), capacity=capacity(), **options)


def plain(a: int = 16, extra: bool = False) -> nn.Module:
    more = [nn.Linear(10, 10)] if extra else []
    return nn.Sequential(nn.Flatten(), nn.Linear(64, a), nn.ReLU(), nn.Linear(a, 10), *more)


def test_what_is_no_width_is_refused() -> None:
    for rates in ({}, 0.5, ["weak"], None):
        with pytest.raises(ValueError, match=r"capacity rates=.*: expected the width of each class"):
            width(rates)
    for value in (0, -0.5, 1.5, "half", float("nan")):
        with pytest.raises(ValueError, match=r"capacity rates\['weak'\]=.*0.* 1"):
            fjord({"strong": 1.0, "weak": value})


def test_a_model_that_does_not_know_its_narrow_forms_is_refused() -> None:
    refused(
        r"^capacity build=None: expected a function of the width that returns the model: Sequential does not "
        "know its narrow forms",
        lambda: width(RATES, KINDS),
        plain(),
    )
    refused(
        "^capacity build=.*: expected a function of the width that returns an nn.Module",
        lambda: width(RATES, KINDS, build=lambda p: p),
        plain(),
    )
    for made, name in ((plain(32), "1.weight"), (plain(8, extra=True), "4.weight")):
        refused(
            r"^capacity build='width 0.5': expected a model with the same names, of at most the same shapes: "
            rf"it differs in {name}",
            lambda made=made: width(RATES, KINDS, build=lambda _: made),
            plain(),
        )


def test_channels_that_are_normalized_together_cannot_be_masked() -> None:
    """Zeros would count in the mean of their group; a narrow model of its own is fine."""
    grouped = pt.models.resnet20(10, norm="group", width=0.5, channels=1)
    refused(
        r"^capacity='fjord': expected width\(...\) for this model: with some channels at zero it is not the "
        "narrow one, as where a layer looks at several channels at a time",
        lambda: fjord(RATES, KINDS),
        grouped,
    )
    federate(grouped, digits(), pt.fedavg(lr=0.1), steps=1, capacity=width(RATES, KINDS))


def test_nobody_holds_all_of_it() -> None:
    with pytest.warns(
        UserWarning,
        match="capacity: no client holds all of hidden1.linear.weight and others, which is not trained",
    ):
        run = federate(mlp(), digits(), pt.fedavgm(lr=0.1), rounds=2, capacity=width({"a": 0.5, "b": 0.25}))
    moved = run.shared["hidden1.linear.weight"] != mlp().hidden1.linear.weight
    assert moved[:16].any()
    assert not moved[16:].any()
