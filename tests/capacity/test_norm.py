"""Statistics of BatchNorm: averaged, kept, or measured when they are needed (norm="static")."""

from __future__ import annotations

import copy
import itertools
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
    rounds,
)
from partita.capacity import depth, fjord, width
from partita.data import FederatedData
from support import each

executors = each("executor", ["loop", "vmap"])
CAPACITIES: dict[str, Any] = {
    "none": None,
    "depth": depth({"strong": 0, "weak": 1}, KINDS),
    "width": width({"strong": 1.0, "weak": 0.5}, KINDS),
    "fjord": fjord({"strong": 1.0, "weak": 0.5}, KINDS),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def parameters(tensors: Tensors) -> Tensors:
    return {k: v for k, v in tensors.items() if not k.endswith(STATISTICS)}


def statistics(tensors: Tensors) -> Tensors:
    return {k: v for k, v in tensors.items() if k.endswith(STATISTICS[:2])}


def measured(model: nn.Module, x: Tensor) -> dict[str, np.ndarray]:
    """Plainly: mean and variance of what each BatchNorm gets, over batches of 256, each by its samples."""
    model = copy.deepcopy(model).train()
    seen: dict[str, list[np.ndarray]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor]) -> None:
            assert module.training
            values = given[0].detach().double().numpy().transpose(1, 0, 2, 3)
            values = values.reshape(len(values), -1)
            seen.setdefault(f"{name}.running_mean", []).append(values.mean(1))
            square = values.var(1, ddof=1) + values.mean(1) ** 2
            seen.setdefault(f"{name}.running_var", []).append(square)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(look(name))
    with torch.no_grad():
        for batch in x.split(256):
            model(batch)
    n = [len(batch) for batch in x.split(256)]
    return centred({k: np.average(v, axis=0, weights=n) for k, v in seen.items()})


def centred(moments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """σ² = E[x²] − μ²."""
    means = {k.replace("_mean", "_var"): v for k, v in moments.items() if k.endswith("_mean")}
    return {k: v - means[k] ** 2 if k in means else v for k, v in moments.items()}


def mean_over(run: pt.Run, data: FederatedData, clients: list[int]) -> dict[str, np.ndarray]:
    """Plainly: each client's own statistics under its own model, by samples."""
    return together(
        [measured(run.client(i).model(), data.client(i)[0]) for i in clients], data.sizes()[clients]
    )


def together(found: list[dict[str, np.ndarray]], n: Any) -> dict[str, np.ndarray]:
    """Of several clients as one."""
    square = [
        {k: v + (f[k.replace("_var", "_mean")] ** 2 if k.endswith("_var") else 0) for k, v in f.items()}
        for f in found
    ]
    return centred({k: np.average([f[k] for f in square], axis=0, weights=n) for k in square[0]})


# ---- static: training


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_training_does_not_depend_on_when_one_evaluates(capacity) -> None:
    found = [
        federate(
            convs(),
            digits(),
            pt.fedavgm(lr=0.1),
            rounds=4,
            cohort=3,
            norm="static",
            capacity=CAPACITIES[capacity],
            executor="vmap",
            evaluate_every=every,
        ).shared
        for every in (1, 100)
    ]
    assert_same(*found)
    assert not torch.equal(found[0]["output.linear.bias"], convs().output.linear.bias)


def test_stale_clients_do_not_depend_on_when_one_evaluates() -> None:
    """They received the statistics that were there then, and train without looking at them."""
    schedule = pt.schedule.asynchronous(
        concurrency=3, delays=pt.schedule.delays(compute=pt.schedule.exponential(1.0))
    )
    found = [
        federate(
            convs(),
            digits(),
            pt.fedavg(lr=0.1),
            rounds=8,
            norm="static",
            capacity=CAPACITIES["depth"],
            schedule=schedule,
            evaluate_every=every,
        )
        for every in (1, 100)
    ]
    assert found[0].summary()["clock"]["staleness"]["max"] > 0
    assert_same(*(run.shared for run in found))


@executors
@each("capacity", CAPACITIES)
def test_nothing_is_tracked_and_nothing_averaged(capacity, executor) -> None:
    """What clients send of their statistics is zero."""
    found, run = rounds(
        convs(),
        digits(),
        pt.fedavg(lr=0.1),
        rounds=2,
        norm="static",
        capacity=CAPACITIES[capacity],
        executor=executor,
        evaluate_every=2,
    )
    for k, v in found[1].uploads.delta.items():
        assert v.any().item() is not k.endswith(STATISTICS), k
    assert_same(statistics(found[1].before), statistics(dict(convs().named_buffers())))
    assert run.shared["stem.norm.num_batches_tracked"] == 0


def test_a_batch_is_normalized_by_itself() -> None:
    """A strong client's steps, plainly: PyTorch's BatchNorm in training mode."""
    data = digits()
    (round,), _ = rounds(convs(), data, pt.fedavg(lr=0.1), norm="static", capacity=CAPACITIES["depth"])
    model = convs().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(data, 0, steps=2, batch=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    expected = {k: round.before[k] - v.detach() for k, v in after.items()}
    assert_close(parameters(round.upload(0)), expected, atol=1e-6)


@executors
def test_frozen_blocks_are_normalized_by_all_samples_of_the_client(executor) -> None:
    """With full batches, as in the whole model in training mode whose first block has no gradients."""
    data = digits()
    (round,), _ = rounds(
        convs(),
        data,
        pt.fedavg(lr=0.1),
        batch=None,
        norm="static",
        capacity=CAPACITIES["depth"],
        executor=executor,
    )
    for client in (1, 2):
        model = convs().train()
        model.stem.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        x, y = data.client(client)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        after = dict(model.named_parameters())
        expected = {k: round.before[k] - v.detach() for k, v in after.items()}
        assert not expected["stem.conv.weight"].any()
        assert_close(parameters(round.upload(client)), expected, atol=1e-5)


# ---- static: evaluation


@executors
@each("capacity", ["none", "depth"])
@each("method", [pt.fedavg(lr=0.1), pt.fedalt("output", lr=0.1)], ids=lambda m: m.name)
def test_statistics_are_measured_on_the_training_samples_of_all(method, capacity, executor) -> None:
    """Of batches of 256 each; a client without data has none, nor does one that lies."""
    data = digits((300, 7, 90, 23, 0, 12))
    lies = {"attack": pt.attack.sign_flip(), "byzantine": [3]}
    run = federate(
        convs(),
        data,
        method,
        rounds=2,
        cohort=3,
        norm="static",
        capacity=CAPACITIES[capacity],
        executor=executor,
        **lies,
    )
    expected = mean_over(run, data, [0, 1, 2, 5])
    assert set(expected) == set(statistics(run.shared))
    for k, v in expected.items():
        np.testing.assert_allclose(run.shared[k], v, atol=1e-5, err_msg=k)


@executors
@pytest.mark.parametrize("capacity", ["width", "fjord"])
def test_narrow_models_have_statistics_of_their_own(capacity, executor) -> None:
    """Those of the clients of their class, with the model of their class."""
    data = digits()
    run = federate(
        convs(), data, pt.fedavg(lr=0.1), norm="static", capacity=CAPACITIES[capacity], executor=executor
    )
    weak = [i for i, kind in enumerate(KINDS) if kind == "weak"]
    expected = mean_over(run, data, weak)
    own = dict(run.client(1).model().named_buffers())
    for k, v in expected.items():
        np.testing.assert_allclose(own[k], v, atol=1e-5, err_msg=k)
    # the server's are those of the whole model, over everyone
    whole = [measured(run.model(), data.client(i)[0]) for i in range(len(SIZES))]
    for k, mean in together(whole, SIZES).items():
        np.testing.assert_allclose(run.shared[k], mean, atol=1e-5, err_msg=k)
    name = "body.norm.running_mean"
    assert np.abs(own[name].numpy() - run.shared[name][: len(own[name])].numpy()).max() > 1e-3


@pytest.mark.parametrize("method", [pt.local(lr=0.1), pt.ditto(lr=0.1, lam=0.5), pt.fedalt("norm", lr=0.1)])
def test_statistics_that_clients_keep_are_measured_as_well(method) -> None:
    run = federate(convs(), digits(), method, norm="static")
    start = statistics(dict(convs().named_buffers()))
    own = statistics(dict(run.client(2).model().named_buffers()))
    assert all(not torch.equal(own[k], v) for k, v in start.items())


# ---- the three choices


@each("norm", ["global", "static", "personal"])
@each("method", [pt.fedavgm(lr=0.1), pt.fedalt("output", lr=0.1)], ids=lambda m: m.name)
def test_loop_equals_vmap(method, norm) -> None:
    runs = [
        federate(convs(), digits(), method, rounds=2, cohort=4, norm=norm, executor=executor)
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs), atol=1e-5)
    np.testing.assert_allclose(*(run.scores() for run in runs), atol=1e-6)


def test_the_choices_differ() -> None:
    runs = {
        norm: federate(convs(), digits(), pt.fedavg(lr=0.1), rounds=2, norm=norm)
        for norm in ("global", "static", "personal")
    }
    assert not set(runs["personal"].client(0).personal) & set(runs["personal"].shared)
    assert set(statistics(runs["personal"].client(0).personal)) == set(statistics(runs["global"].shared))
    assert "stem.norm.weight" in runs["personal"].client(0).personal
    means = [run.client(0).model().stem.norm.running_mean for run in runs.values()]
    for a, b in itertools.combinations(means, 2):
        assert not torch.equal(a, b)


def test_a_model_with_statistics_and_nothing_chosen() -> None:
    for capacity in (None, CAPACITIES["depth"]):
        with pytest.warns(
            UserWarning, match=r"keeps statistics while it trains .* norm= was not chosen"
        ) as told:
            silent = federate(convs(), digits(), pt.fedavg(lr=0.1), capacity=capacity)
        assert len(told) == 1
        chosen = federate(convs(), digits(), pt.fedavg(lr=0.1), capacity=capacity, norm="global")
        assert_same(silent.shared, chosen.shared)


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^norm='batch': expected one of 'global', 'static', 'personal'"):
        federate(convs(), digits(), pt.fedavg(lr=0.1), norm="batch")
