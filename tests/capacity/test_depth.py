"""Weak clients that train the last blocks only (EmbracingFL)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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
    in_double,
    mlp,
    of_blocks,
    resnet,
    rounds,
)
from partita.capacity import depth, width
from partita.data import FederatedData
from support import each

executors = each("executor", ["loop", "vmap"])
METHODS = {
    "fedavg": pt.fedavg(lr=0.1),
    "fedalt": pt.fedalt("output", lr=0.1),
    "scaffold": pt.scaffold(lr=0.1),
    "ditto": pt.ditto(lr=0.1, lam=0.5),
    "fedavgm": pt.fedavgm(lr=0.1),
}


# ---- all are strong


@executors
@each("method", METHODS)
def test_if_all_are_strong_nothing_changes(method, executor) -> None:
    options: dict[str, Any] = {"rounds": 2, "cohort": 4, "executor": executor}
    plain = federate(mlp(), digits(), METHODS[method], **options)
    for capacity in (depth({"strong": 0, "weak": 1}, ["strong"] * 6), width({"strong": 1.0})):
        run = federate(mlp(), digits(), METHODS[method], capacity=capacity, **options)
        assert_same(everything(run), everything(plain))
        bytes_ = [{k: row[k] for k in ("bytes_up", "bytes_down", "test.personal")} for row in run.metrics]
        assert bytes_ == [{k: row[k] for k in bytes_[0]} for row in plain.metrics]


@executors
@each("method", METHODS)
def test_strong_clients_do_the_same_beside_weak_ones(method, executor) -> None:
    options: dict[str, Any] = {"executor": executor}
    (plain,), _ = rounds(mlp(), digits(), METHODS[method], **options)
    (mixed,), _ = rounds(
        mlp(), digits(), METHODS[method], capacity=depth({"strong": 0, "weak": 1}, KINDS), **options
    )
    for i, kind in enumerate(KINDS):
        if kind == "strong":
            assert_close(mixed.upload(i), plain.upload(i), atol=1e-6)
        else:
            assert not of_blocks(mixed.upload(i), "hidden1")["hidden1.linear.weight"].any()
            assert of_blocks(plain.upload(i), "hidden1")["hidden1.linear.weight"].any()


# ---- what a weak client computes


def images(size: int) -> FederatedData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, size, size, generator=g), torch.randint(10, (40,), generator=g)
    return FederatedData.make(x, y, [(0, 10), (10, 17), (27, 9)], [(36, 4)] * 3)


def words(length: int, targets: tuple[int, ...], classes: int) -> FederatedData:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(11, (40, length), generator=g)
    y = torch.randint(classes, (40, *targets), generator=g)
    return FederatedData.make(x, y, [(0, 10), (10, 17), (27, 9)], [(36, 4)] * 3)


class Net(NamedTuple):
    """A model, where it is cut, and in how many blocks the frozen part comes at a time."""

    model: Callable[[], nn.Module]
    data: Callable[[], FederatedData]
    cut: int
    pieces: int | None = None


NETS = {
    "mlp": Net(mlp, lambda: digits((12, 70, 9)), 1),
    "mlp, the last block": Net(mlp, lambda: digits((12, 70, 9)), 2, 1),
    "mnist_cnn": Net(lambda: pt.models.mnist_cnn(width=0.125, dropout=0.0), lambda: images(28), 2, 1),
    "batch norm": Net(convs, lambda: digits((12, 70, 9)), 1),
    "resnet20": Net(resnet, lambda: digits((12, 70, 9)), 4, 2),
    "transformer": Net(
        lambda: pt.models.transformer(11, length=6, width=8, depth=2, heads=2, hidden=16),
        lambda: words(6, (6,), 11),
        1,
    ),
    "transformer, its last block": Net(
        lambda: pt.models.transformer(11, length=6, width=8, depth=2, heads=2, hidden=16),
        lambda: words(6, (6,), 11),
        2,
    ),
    "bilstm": Net(
        lambda: pt.models.bilstm(11, embedding=6, hidden=5, outputs=3, dropout=0.0),
        lambda: words(7, (), 3),
        1,
    ),
}


def trained(model: nn.Module, cut: int, steps: Any, lr: float, momentum: float) -> Tensors:
    """Plainly: SGD on the whole model, whose first blocks are frozen and in evaluation mode."""
    children = list(model.children())
    frozen = copy.deepcopy(nn.Sequential(*children[:cut])).requires_grad_(False).eval()
    own = copy.deepcopy(nn.Sequential(*children[cut:])).train()
    optimizer = torch.optim.SGD(own.parameters(), lr, momentum)
    for x, y in steps:
        optimizer.zero_grad()
        output = own(frozen(x))
        nn.functional.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    # under the names that the whole model has for them: a tensor of two blocks has the first one's
    names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
    before = nn.Sequential(*children[cut:])
    old = (*before.parameters(), *before.buffers())
    return {names[id(a)]: b.detach() for a, b in zip(old, (*own.parameters(), *own.buffers()))}


@executors
@each("name", NETS)
def test_a_weak_client_trains_the_whole_model_with_its_first_blocks_frozen(name, executor) -> None:
    net = NETS[name]
    model, data = (
        net.model().double(),
        in_double(net.data()),
    )  # single precision: BatchNorm amplifies roundings
    capacity = depth({"strong": 0, "weak": net.cut}, ["strong", "weak", "weak"], pieces=net.pieces)
    (round,), _ = rounds(
        model,
        data,
        pt.fedavg(lr=0.2, momentum=0.5),
        steps=3,
        capacity=capacity,
        executor=executor,
        norm="global",
    )
    for client, cut in enumerate((0, net.cut, net.cut)):
        upload = round.upload(client)
        after = trained(model, cut, batches(data, client, steps=3, batch=8), 0.2, 0.5)
        expected = {k: round.before[k] - after[k] if k in after else 0 * v for k, v in upload.items()}
        assert sum(k in after for k in upload) > 1
        assert max(v.abs().max().item() for k, v in expected.items() if "num" not in k) > 1e-3
        assert_close(upload, expected, atol=1e-9, rtol=1e-7)


@executors
def test_frozen_blocks_have_no_dropout(executor) -> None:
    """Neither in a round nor where a client's own statistics normalize them."""

    def model(p: float) -> nn.Module:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Dropout(p))
        return nn.Sequential(first, nn.Linear(12, 12), nn.Linear(12, 10))

    for norm in ("global", "static"):
        (still,), _ = rounds(
            model(0.0),
            digits(),
            pt.fedavg(lr=0.1),
            norm=norm,
            capacity=depth({"s": 0, "w": 1}, list("swwsww")),
        )
        (half,), _ = rounds(
            model(0.5),
            digits(),
            pt.fedavg(lr=0.1),
            norm=norm,
            executor=executor,
            capacity=depth({"s": 0, "w": 1}, list("swwsww")),
        )
        assert_close(half.upload(1), still.upload(1), atol=1e-6)
        assert (half.upload(0)["1.weight"] - still.upload(0)["1.weight"]).abs().max() > 1e-3


def test_trained_blocks_draw_their_dropout_anew_in_every_step() -> None:
    """A mask is drawn after the record: it is that of the step, as for a strong client."""

    def model(p: float) -> nn.Module:
        torch.manual_seed(0)
        last = nn.Sequential(nn.Dropout(p), nn.Linear(12, 10))
        return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), last)

    found = []
    for p, steps in ((0.0, 1), (0.5, 1), (0.5, 2)):
        (round,), _ = rounds(
            model(p),
            digits(),
            pt.fedavg(lr=0.1),
            steps=steps,
            batch=None,
            capacity=depth({"s": 0, "w": 1}, list("swwsww")),
        )
        found.append(round.upload(2)["1.1.weight"])
    assert (found[1] - found[0]).abs().max() > 1e-3
    assert (found[2] - 2 * found[1]).abs().max() > 1e-3


@executors
@each("norm", ["global", "static"])
def test_the_size_of_pieces_does_not_matter(norm, executor) -> None:
    """Also where all of a client's samples are normalized together, and they are more than pass at a time."""
    found = []
    for pieces in (1, 2):
        capacity = depth({"s": 0, "w": 2}, ["s", "w"], pieces=pieces)
        (round,), _ = rounds(
            convs(), digits((20, 90)), pt.fedavg(lr=0.1), norm=norm, capacity=capacity, executor=executor
        )
        found.append(round.upload(1))
    assert found[0]["output.linear.weight"].abs().max() > 1e-3
    assert_close(*found, atol=1e-6)


# ---- what the server makes of it


@pytest.mark.parametrize("method", [pt.fedavg(lr=0.1), pt.fedavg(lr=0.1, weighting="uniform")])
def test_each_tensor_is_averaged_over_those_who_train_it(method) -> None:
    """y over the strong, z over all, in NumPy; three classes."""
    kinds = ("strong", "middle", "weak", "strong", "weak", "middle")
    capacity = depth({"strong": 0, "middle": 1, "weak": 2}, kinds)
    (round,), run = rounds(mlp(), digits(), method, capacity=capacity, executor="vmap")
    n = np.array(SIZES) if method.options["weighting"] == "samples" else np.ones(6)
    holders = {
        "hidden1": ("strong",),
        "hidden2": ("strong", "middle"),
        "output": ("strong", "middle", "weak"),
    }
    for name, stack in round.uploads.delta.items():
        held = np.array([kind in holders[name.split(".")[0]] for kind in kinds])
        delta = np.tensordot((n * held) / (n * held).sum(), stack.double().numpy(), 1)
        assert np.abs(delta).max() > 1e-4
        np.testing.assert_allclose(run.shared[name], round.before[name].double().numpy() - delta, atol=1e-6)


OPTIMIZERS = {
    "sgd": pt.fedavg(lr=0.1),
    "momentum": pt.fedavgm(lr=0.1),
    "adam": pt.fedadam(lr=0.1, server_lr=0.01),
    "yogi": pt.fedyogi(lr=0.1, server_lr=0.01),
    "scaffold": pt.scaffold(lr=0.1, option=1),
    "median": pt.coordinate_median_fedavg(lr=0.1, server=pt.optim.sgd(1.0, 0.9)),
    "ditto": pt.ditto(lr=0.1, lam=0.5, server=pt.optim.sgd(1.0, 0.9)),
    "me": pt.persafl_me(lr=0.1, lam=1.0, server_lr=1.0, inner_lr=0.1, inner_steps=2),
    "l2gd": pt.l2gd(lr=0.1, lam=0.1, p=0.5),
    "fedplus": pt.fedavg_plus(lr=0.1, sigma=0.1, server=pt.optim.sgd(1.0, 0.9)),
}


@each("method", OPTIMIZERS)
def test_what_nobody_in_the_cohort_trains_stays(method) -> None:
    """To the bit, although the server's momentum would carry it on."""
    kinds = ("strong", *["weak"] * 5)
    schedule = {"schedule": pt.schedule.synchronous()} if method == "me" else {}
    found, run = rounds(
        mlp(),
        digits(),
        OPTIMIZERS[method],
        capacity=depth({"strong": 0, "weak": 1}, kinds),
        rounds=6,
        cohort=2,
        seed=1,
        executor="vmap",
        **schedule,
    )
    after = [*(r.before for r in found[1:]), run.shared]
    strong = [0 in r.clients for r in found]
    assert True in strong[:-1]
    assert False in strong[strong.index(True) :]  # there is momentum by then
    for round, new, there in zip(found, after, strong):
        same = [torch.equal(new[k], round.before[k]) for k in of_blocks(new, "hidden1")]
        assert all(same) if not there else method == "l2gd" or not any(same)
        if method != "l2gd":  # whose rounds may be of local steps only
            assert not torch.equal(new["output.linear.weight"], round.before["output.linear.weight"])


def test_statistics_of_frozen_blocks_are_averaged_over_the_strong() -> None:
    data = digits()
    (round,), run = rounds(
        convs(), data, pt.fedavg(lr=0.1), capacity=depth({"strong": 0, "weak": 1}, KINDS), norm="global"
    )
    n = np.array(SIZES)
    strong = np.array([kind == "strong" for kind in KINDS])
    for name, held in (("stem.norm.running_mean", strong), ("body.norm.running_var", strong | True)):
        stack = round.uploads.delta[name].double().numpy()
        expected = round.before[name].double().numpy() - np.tensordot(n * held / (n * held).sum(), stack, 1)
        np.testing.assert_allclose(run.shared[name], expected, atol=1e-6)
        assert not np.allclose(expected, round.before[name])
    assert not round.uploads.delta["stem.norm.running_mean"][1].any()


# ---- loop and vmap


@each("norm", ["global", "static"])
@each("sizes", [(30, 0, 90, 7, 65, 1), (30, 0, 0, 23, 0, 0)])
def test_loop_equals_vmap(norm, sizes) -> None:
    """With ragged clients, some without data; also where no weak one has any."""
    runs = [
        federate(
            convs(),
            digits(sizes),
            pt.fedavg(lr=0.1, momentum=0.5),
            rounds=2,
            steps=None,
            epochs=1,
            norm=norm,
            capacity=depth({"strong": 0, "weak": 1}, KINDS),
            executor=executor,
        )
        for executor in ("loop", "vmap")
    ]
    assert_close(*(run.shared for run in runs), atol=1e-4)
    assert all(torch.isfinite(v).all() for v in runs[0].shared.values())
    assert not torch.equal(runs[0].shared["output.linear.bias"], convs().output.linear.bias)


@executors
def test_who_else_takes_part_does_not_matter(executor) -> None:
    """A client's upload is its own, whoever is recorded with it."""
    capacity = depth({"strong": 0, "weak": 1}, KINDS)
    all_, _ = rounds(
        convs(), digits(), pt.fedavg(lr=0.1), capacity=capacity, norm="global", executor=executor
    )
    few, _ = rounds(
        convs(), digits(), pt.fedavg(lr=0.1), capacity=capacity, norm="global", executor=executor, cohort=3
    )
    for client in few[0].clients:
        assert_close(few[0].upload(client), all_[0].upload(client), atol=1e-6)


# ---- what it costs


def size(tensors: Tensors) -> int:
    return sum(v.numel() * v.element_size() for v in tensors.values())


def test_bytes_of_a_mixed_cohort() -> None:
    """The weak download everything, piece by piece, and send the blocks that they train."""
    y = 4 * (64 * 32 + 32)
    z = 4 * (32 * 16 + 16 + 16 * 10 + 10)
    run = federate(
        mlp(), digits(), pt.fedavg(lr=0.1), capacity=depth({"strong": 0, "weak": 1}, KINDS), rounds=3
    )
    assert run.metrics[-1]["bytes_down"] == 3 * 6 * (y + z)
    assert run.metrics[-1]["bytes_up"] == 3 * (2 * (y + z) + 4 * z)
    alt = federate(
        mlp(), digits(), pt.fedalt("output", lr=0.1), capacity=depth({"strong": 0, "weak": 1}, KINDS)
    )
    out = 4 * (16 * 10 + 10)
    assert alt.metrics[-1]["bytes_down"] == 6 * (y + z - out)
    assert alt.metrics[-1]["bytes_up"] == 2 * (y + z - out) + 4 * (z - out)


def test_bytes_of_statistics_and_of_control_variates() -> None:
    run = federate(
        convs(), digits(), pt.scaffold(lr=0.1), capacity=depth({"strong": 0, "weak": 2}, KINDS), norm="global"
    )
    stem, body, out = 4 * (8 * 9 + 2 * 8), 4 * (12 * 8 * 9 + 12 + 2 * 12), 4 * (12 * 10 + 10)
    stem_, body_ = 4 * 2 * 8 + 8, 4 * 2 * 12 + 8  # means, variances and an int64
    assert run.metrics[-1]["bytes_down"] == 2 * (2 * (stem + body + out) + stem_ + body_) + 4 * (
        stem + body + stem_ + body_ + 2 * out
    )
    assert run.metrics[-1]["bytes_up"] == 2 * (2 * (stem + body + out) + stem_ + body_) + 4 * 2 * out


# ---- what a client has in the end


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x)
    return found


@executors
@each("method", ["fedavg", "fedalt", "ditto", "local"])
def test_the_model_of_a_weak_client(method, executor, tmp_path) -> None:
    """The server's frozen blocks before its own: it has the score that the run reports, also once loaded."""
    methods = {**METHODS, "local": pt.local(lr=0.1)}
    data, model = digits(test=40), mlp()
    run = federate(
        model,
        data,
        methods[method],
        rounds=3,
        steps=5,
        capacity=depth({"strong": 0, "weak": 1}, KINDS),
        executor=executor,
        out=tmp_path / "run",
        report=False,
    )
    server = {**{k: v.detach() for k, v in model.named_parameters()}, **run.shared}
    loaded = pt.load(tmp_path / "run", model=mlp())
    for i, kind in enumerate(KINDS):
        own = run.client(i).model()
        x, y = data.client(i, "test")
        score = (output(own, x).argmax(1) == y).float().mean().item()
        assert score == pytest.approx(run.clients[i]["personal"], abs=1e-6)
        if kind == "weak":
            assert_same(of_blocks(dict(own.named_parameters()), "hidden1"), of_blocks(server, "hidden1"))
        if method != "fedavg":
            assert not torch.equal(own.get_parameter("output.linear.weight"), server["output.linear.weight"])
        if method == "ditto":  # whose weak clients keep no copy of what they do not train
            with pytest.raises(ValueError, match="resume=True"):
                loaded.client(i).model()
        else:
            assert torch.equal(output(loaded.client(i).model(), x), output(own, x))
