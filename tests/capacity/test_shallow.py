"""Weak clients with the first blocks and the head: the shape of InclusiveFL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from capacity.weak import KINDS, assert_close, convs, digits, everything, federate, mlp, rounds
from partita.capacity import depth, shallow
from support import each

CUTS = {"strong": 0, "weak": 1}
WEAK = shallow(CUTS, KINDS)


def weak_of(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    held = shallow(**{"cuts": CUTS, **options})
    return next(share.model for share in held.shares(model, x, 1) if share.name == "weak")


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in model.named_parameters()}


# ---- what it holds


def test_a_transformer_needs_nothing_between() -> None:
    net = pt.models.transformer(20, length=8, width=8, depth=4, heads=2, hidden=16).eval()
    x = torch.randint(0, 20, (3, 8))
    names = [name for name, _ in net.named_children()]
    weak = weak_of(net, x, cuts={"strong": 0, "weak": 2}).eval()
    y = x
    for name in (*names[:-3], names[-1]):
        y = net.get_submodule(name)(y)
    torch.testing.assert_close(weak(x), y)
    whole = shapes(net)
    assert all(whole[k] == v for k, v in shapes(weak).items())
    assert not any(k.startswith((f"{names[-3]}.", f"{names[-2]}.")) for k in shapes(weak))


@each(
    "model, x, cut, head",
    [
        (pt.models.resnet20(10), torch.randn(2, 3, 32, 32), 6, (10, 16)),  # fewer features: the first columns
        (pt.models.leaf_cnn(), torch.randn(2, 1, 28, 28), 1, (62, 64)),  # images to a dense layer: averaged
        (pt.models.bilstm(20, embedding=4, hidden=3), torch.randint(0, 20, (2, 6)), 1, (1, 4)),  # words, too
        (pt.models.mlp(64, 32, 16, 10), torch.randn(2, 64), 1, (10, 16)),  # more features: averaged in pairs
    ],
)
def test_a_head_takes_the_features_of_any_model(model: nn.Module, x: Any, cut: int, head: Any) -> None:
    weak = weak_of(model, x, cuts={"strong": 0, "weak": cut})
    assert weak.eval()(x).shape == model.eval()(x).shape
    held, whole = shapes(weak), shapes(model)
    assert held["output.linear.weight"] == head
    assert all(whole[k] == v for k, v in held.items() if k != "output.linear.weight")
    kept = len([*model.children()]) - 1 - cut
    assert {k.split(".")[0] for k in held} == {n for n, _ in model.named_children()} - {
        n for n, _ in [*model.named_children()][kept:-1]
    }


def test_features_are_averaged_in_neighbours() -> None:
    net, x = mlp().eval(), torch.randn(4, 64)
    features = torch.relu(net.hidden1.linear(x)).view(4, 16, 2).mean(2)
    torch.testing.assert_close(weak_of(net, x).eval()(x), net.output(features))


# ---- training


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_weak_client_trains_its_own_model(executor: str) -> None:
    """Plainly: the first block, the mean over space, the first columns of the head; one batch."""
    data = digits((12, 7, 9, 8, 6, 10))
    (round,), run = rounds(
        convs(),
        data,
        pt.fedavg(lr=0.3),
        capacity=WEAK,
        steps=1,
        batch=12,
        norm="static",
        executor=executor,
    )
    for client, kind in enumerate(KINDS):
        if kind == "strong":
            continue
        net = convs()
        net.load_state_dict(round.before, strict=False)
        x, y = data.client(client)
        net.train()
        features = net.stem(x).mean((2, 3))
        weight = net.output.linear.weight[:, :8]
        loss = nn.functional.cross_entropy(features @ weight.T + net.output.linear.bias, y)
        loss.backward()
        upload = round.upload(client)
        for name, p in net.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else 0.3 * p.grad
            torch.testing.assert_close(upload[name], expected, rtol=1e-4, atol=1e-6)
    share = torch.tensor([12.0, 7.0, 9.0, 8.0, 6.0, 10.0])
    strong = torch.tensor([kind == "strong" for kind in KINDS])
    sent = torch.stack([round.upload(i)["output.linear.weight"] for i in range(len(KINDS))])
    mean = torch.einsum("i,iab->ab", share / share.sum(), sent)
    of_strong = torch.einsum("i,iab->ab", share * strong / share[strong].sum(), sent)
    moved = round.before["output.linear.weight"] - run.shared["output.linear.weight"]
    torch.testing.assert_close(moved[:, :8], mean[:, :8])
    torch.testing.assert_close(moved[:, 8:], of_strong[:, 8:])


@each("model", [mlp, convs])
def test_stacked_as_alone(model: Any) -> None:
    runs = [
        federate(model(), digits(), pt.fedavg(lr=0.1), capacity=WEAK, norm="static", executor=executor)
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs))


def test_if_nobody_is_weak_nothing_changes() -> None:
    runs = [
        federate(mlp(), digits(), pt.fedavg(lr=0.2), capacity=held)
        for held in (None, shallow({"strong": 0, "weak": 0}, KINDS))
    ]
    assert_close(*map(everything, runs))


@each("norm", ["static", "global"])
def test_a_weak_client_is_judged_by_its_own_model(norm: str) -> None:
    data = digits(test=40)
    run = federate(convs(), data, pt.fedalt("output", lr=0.1), rounds=3, capacity=WEAK, norm=norm)
    for i, kind in enumerate(KINDS):
        model = run.client(i).model()
        assert hasattr(model, "body") == (kind == "strong")
        x, y = data.client(i, "test")
        with torch.no_grad():
            score = (model(x).argmax(1) == y).float().mean().item()
        assert score == pytest.approx(run.clients[i]["personal"], abs=1e-6)


def test_it_can_be_compared_with_the_last_blocks() -> None:
    """With the same devices: both take less than the whole, and the global model is the whole one."""
    for held in (WEAK, depth(CUTS, KINDS)):
        run = federate(mlp(), digits(), pt.fedavg(lr=0.2), rounds=3, capacity=held)
        assert run.summary()["classes"]["weak"]["capacity"] < 1
        assert run.model().eval()(digits().x[:2]).shape == (2, 10)


# ---- errors


def test_a_cut_between_a_layer_and_its_activation_is_refused() -> None:
    """It would save nothing, and the layer would go on without its activation."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    for cut, block in ((1, "3"), (3, "1")):
        with pytest.raises(
            ValueError, match=rf"capacity cuts\['weak'\]={cut}: .*one of \[2\].*'{block}', has no"
        ):
            weak_of(net, torch.zeros(2, 4), cuts={"strong": 0, "weak": cut})
    weak = weak_of(net, torch.zeros(2, 4), cuts={"strong": 0, "weak": 2})
    x = torch.randn(3, 4)
    torch.testing.assert_close(weak(x), net[4](net[1](net[0](x))))


def test_errors() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match=r"capacity cuts\['weak'\]=2: .*one of the 2 blocks before the head"):
        shallow({"strong": 0, "weak": 2}).shares(mlp(), x, 1)
    with pytest.raises(ValueError, match="capacity head"):
        shallow(CUTS, head=0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 2, 1))
    with pytest.raises(ValueError, match=r"capacity head.*begins with nn.Linear"):
        shallow({"weak": 2}).shares(net, torch.zeros(2, 4), 1)
    with pytest.raises(ValueError, match="personal"):
        federate(mlp(), digits(), pt.fedalt("hidden2.*", lr=0.1), capacity=WEAK)
