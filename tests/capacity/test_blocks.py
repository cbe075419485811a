"""Blocks of any model, and parts of it that keep tensors and names."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita import models
from partita.algorithms.partition import Names, personal_names, split
from partita.capacity.blocks import Part, block_names, check_sequence, part
from support import each

LM = {"length": 5, "width": 8, "depth": 3, "heads": 2, "hidden": 16}
IMAGES, IDS = torch.randn(2, 28, 28), torch.randint(0, 7, (2, 5))
MODELS: dict[str, tuple[Any, Tensor]] = {
    "logistic": (lambda: models.logistic(784, 4), IMAGES),
    "mlp": (lambda: models.mlp(784, 8, 8, 4), IMAGES),
    "leaf_cnn": (lambda: models.leaf_cnn(4), IMAGES),
    "mnist_cnn": (lambda: models.mnist_cnn(4, width=0.25), IMAGES),
    "cifar_cnn": (lambda: models.cifar_cnn(4, width=0.25), torch.randn(2, 3, 32, 32)),
    "resnet20": (lambda: models.resnet20(4, width=0.25), torch.randn(2, 3, 16, 16)),
    "resnet18": (lambda: models.resnet18(4, width=0.125), torch.randn(2, 16, 16)),
    "transformer": (lambda: models.transformer(7, **LM), IDS),
    "bilstm": (lambda: models.bilstm(7, embedding=4, hidden=4), IDS),
    "adapters": (lambda: models.add_adapters(models.transformer(7, **LM), "bottleneck", rank=3), IDS),
}
every_model = each("name", MODELS)


class Net(nn.Module):
    """No nn.Sequential: `trunk.first`, then `trunk.second`, then `head`, which was made before them."""

    def __init__(self, relu: bool = False) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(5, 3))
        self.trunk = nn.ModuleDict(
            {"first": nn.Linear(4, 6), "second": nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))}
        )
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk["first"](x)
        x = self.trunk["second"](torch.relu(x) if self.relu else x)
        out: Tensor = self.head(x)
        return out


NET = ("trunk.first", "trunk.second", "head")


def named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under the names that the library knows them by."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_lends(model: nn.Module, found: nn.Module, names: tuple[str, ...]) -> None:
    """The part has the tensors of these blocks and no others, under the model's names."""
    ids = {id(t) for n in names for t in named(model.get_submodule(n)).values()}
    expected = {n: t for n, t in named(model).items() if id(t) in ids}
    assert set(named(found)) == set(expected)
    assert all(named(found)[n] is t for n, t in expected.items())
    order = [n for n, _ in model.named_parameters() if n in expected]
    assert [n for n, _ in found.named_parameters()] == order


# ---- names


@every_model
def test_blocks_of_our_models_are_their_children(name: str) -> None:
    model = MODELS[name][0]()
    assert block_names(model) == tuple(n for n, _ in model.named_children())


def test_a_sequential_may_repeat_a_module() -> None:
    relu = nn.ReLU()
    assert block_names(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)) == ("0", "1", "2", "3")


def test_blocks_are_declared_by_the_user_or_by_the_model() -> None:
    assert block_names(Net(), NET) == NET
    assert block_names(Net(), list(NET)) == NET
    net = Net()
    net.blocks = list(NET)
    assert block_names(net) == NET
    # what the user says counts more than what the model is
    finer = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    assert block_names(finer, ["0.0", "0.1", "1"]) == ("0.0", "0.1", "1")
    assert block_names(part(Net(), NET[1:])) == NET[1:]


def test_a_frozen_parameter_may_be_outside_of_all_blocks() -> None:
    net = Net()
    net.scale = nn.Parameter(torch.ones(3), requires_grad=False)
    assert block_names(net, NET) == NET


def with_outsider(kind: str) -> nn.Module:
    net = Net()
    if kind == "parameter":
        net.scale = nn.Parameter(torch.ones(3))
    else:
        net.register_buffer("seen", torch.zeros(1))
    return net


def with_list() -> nn.Module:
    """`blocks` are no names here, as in many models."""
    net = Net()
    net.blocks = nn.ModuleList([nn.Linear(2, 2)])
    return net


@each(
    ("model", "declared", "message"),
    [
        (Net(), None, "blocks=None: expected the names of the submodules"),
        (Net(), None, "attribute `blocks`, too. Submodules of Net: 'head', 'trunk'"),
        (with_list(), None, "Submodules of Net: 'head', 'trunk', 'blocks'"),
        (models.quadratic(), None, "Submodules of ThetaW: none"),
        (nn.Sequential(), None, "blocks=[]: expected the names"),
        (Net(), (), "blocks=(): expected the names"),
        (Net(), "head", "blocks='head': expected the names"),
        (Net(), 3, "blocks=3: expected the names"),
        (Net(), ("trunk", "heat"), "blocks='heat': expected the names"),
        (Net(), ("trunk", "heat"), "(did you mean 'head'?)"),
        (Net(), ("", "head"), "blocks='': expected the names"),
        (Net(), (1, 2), "blocks=1: expected the names"),
        (models.quadratic(), ("theta",), "its submodules: none"),
        (Net(), ("trunk", "trunk.first", "head"), "blocks='trunk.first': expected each block once, and none"),
        (Net(), ("trunk", "trunk.first", "head"), "inside of another: 'trunk'"),
        (Net(), ("trunk", "head", "head"), "blocks='head': expected each block once"),
        (Net(), ("trunk",), "all of the model's tensors: head.1.weight, head.1.bias is in none of them"),
        (Net(), ("head",), "trunk.first.weight, trunk.first.bias, trunk.second.0.weight, ... is in none"),
        (with_outsider("parameter"), NET, "all of the model's tensors: scale is in none of them"),
        (with_outsider("buffer"), NET, "all of the model's tensors: seen is in none of them"),
    ],
)
def test_wrong_blocks(model: nn.Module, declared: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        block_names(model, declared)


def test_names_begin_alike_without_being_inside() -> None:
    model = nn.Sequential(OrderedDict(block1=nn.Linear(2, 2), block10=nn.Linear(2, 2)))
    assert block_names(model, ["block1", "block10"]) == ("block1", "block10")
    assert_lends(model, part(model, ["block1"]), ("block1",))


# ---- parts


@every_model
def test_two_parts_are_the_model(name: str) -> None:
    build, x = MODELS[name]
    model = build().eval()
    names = block_names(model)
    whole = model(x)
    for cut in range(len(names) + 1):
        frozen, trained = part(model, names[:cut]), part(model, names[cut:])
        assert_lends(model, frozen, names[:cut])
        assert_lends(model, trained, names[cut:])
        torch.testing.assert_close(trained(frozen(x)), whole)


def test_two_parts_of_declared_blocks_are_the_model() -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    for cut in range(4):
        frozen, trained = part(model, NET[:cut]), part(model, NET[cut:])
        assert_lends(model, frozen, NET[:cut])
        assert_lends(model, trained, NET[cut:])
        torch.testing.assert_close(trained(frozen(x)), model(x))


@every_model
def test_a_part_runs_on_tensors_of_the_whole_model(name: str) -> None:
    """As the executors do it: other values, by the model's names."""
    build, x = MODELS[name]
    model, other = build().eval(), copy.deepcopy(build()).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p))
    names = block_names(model)
    for cut in range(1, len(names)):
        y = x
        for some in (names[:cut], names[cut:]):
            piece = part(model, some)
            y = functional_call(piece, {n: named(other)[n] for n in named(piece)}, (y,))
        torch.testing.assert_close(y, other(x))


def test_a_tied_tensor_keeps_the_name_that_the_model_knows() -> None:
    model = models.transformer(7, **LM)
    head = part(model, ["head"])
    assert list(dict(head.named_parameters())) == [
        "embed.tokens.weight",
        "head.norm.weight",
        "head.norm.bias",
        "head.project.bias",
    ]
    assert head.get_parameter("head.project.weight") is model.get_parameter("embed.tokens.weight")
    assert {n.split(".")[0] for n, _ in part(model, ["embed"]).named_modules() if n} == {"embed"}
    twin = copy.deepcopy(head)
    assert twin.get_parameter("head.project.weight") is twin.get_parameter("embed.tokens.weight")
    assert twin.get_parameter("embed.tokens.weight") is not model.get_parameter("embed.tokens.weight")
    assert block_names(head) == ("head",)
    assert_lends(model, part(part(model, ["block2", "head"]), ["head"]), ("head",))


def test_a_module_that_is_used_twice() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(layer, nn.Tanh(), layer).eval()
    last = part(model, ["2"])
    assert list(named(last)) == list(named(model))
    assert next(iter(named(last))) == "0.0.weight"
    torch.testing.assert_close(part(model, ["0", "1", "2"])(torch.ones(2, 3)), model(torch.ones(2, 3)))
    torch.testing.assert_close(last(torch.ones(2, 3)), layer(torch.ones(2, 3)))


def test_a_part_leaves_the_model_alone() -> None:
    net = Net()
    net.head[1].register_buffer("scratch", torch.zeros(2), persistent=False)
    before = list(net.state_dict())
    part(net, NET)
    assert list(net.state_dict()) == before
    assert "head.1.scratch" not in before


def test_a_tensor_of_the_root_that_a_block_holds() -> None:
    net = Net()
    net.scale = net.head[1].bias  # the model's first name for it
    assert_lends(net, part(net, ["head"]), ("head",))
    assert "scale" in dict(part(net, ["head"]).named_parameters())


@every_model
def test_a_part_is_trained_in_place_and_its_copy_is_not(name: str) -> None:
    build, x = MODELS[name]
    model = build().eval()
    names = block_names(model)
    frozen, trained = part(model, names[:-1]), part(model, names[-1:])
    twin = copy.deepcopy(trained)
    y = frozen(x).detach()
    twin(y).square().sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    trained(y).square().sum().backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    assert reached == {n for n, _ in trained.named_parameters()}


@pytest.mark.parametrize("training", [True, False])
def test_a_part_is_in_the_models_mode(training: bool) -> None:
    found = part(Net().train(training), NET[:2])
    assert {m.training for m in found.modules()} == {training}
    assert {m.training for m in found.train(not training).modules()} == {not training}


def test_input_and_output_parts_stay() -> None:
    lm = models.transformer(7, **LM)
    inner = part(lm, ["block1", "block2", "head"])
    assert (inner.input_part, inner.output_part) == (("block1",), ("block2",))
    mine = split(inner, list(dict(inner.named_parameters())), "output").personal
    assert mine == split(lm, list(dict(lm.named_parameters())), "output").personal
    cnn = models.leaf_cnn(4)
    for cut in range(4):
        left = part(cnn, block_names(cnn)[cut:])
        names = list(dict(left.named_parameters()))
        assert personal_names(left, names, "output") == ("output.linear.weight", "output.linear.bias")
    assert part(cnn, ["conv1", "conv2"]).output_part == ("conv2",)


def test_parts_without_declared_ends_have_none() -> None:
    """`personal="output"` looks for the last layer then, as in the whole model."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    found = part(model, ["1"])
    assert not hasattr(found, "output_part")
    names = Names.of(found, lambda: torch.randn(2, 3))
    assert split(found, names, "output").personal == ("1.2.weight", "1.2.bias")
    net = Net()
    net.output_part = ("head.1",)
    assert part(net, NET[1:]).output_part == ("head.1",)
    assert part(net, NET[:1]).output_part == ("trunk.first",)
    net.output_part = ("trunk",)
    assert part(net, NET[:1]).output_part == ("trunk",)


def test_no_blocks_are_the_identity() -> None:
    found, x = part(Net(), ()), torch.randn(2, 4)
    assert found(x) is x
    assert isinstance(found, Part)
    assert not named(found)


@pytest.mark.parametrize("names", [["heat"], ["trunk", "trunk.first"]])
def test_a_part_of_wrong_names(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^blocks="):
        part(Net(), names)


# ---- whether they are applied one after another


@every_model
def test_our_models_are_sequences(name: str) -> None:
    build, x = MODELS[name]
    model = build()
    check_sequence(model, block_names(model), x)
    with pytest.raises(ValueError, match=r"^blocks=.*expected submodules that the model applies one after"):
        check_sequence(model, block_names(model)[:-1], x)


def test_what_lies_in_between_is_found() -> None:
    x = torch.randn(3, 4)
    check_sequence(Net(), NET, x)
    with pytest.raises(ValueError, match="the model gives something else: Tensor-likes are not close!"):
        check_sequence(Net(relu=True), NET, x)
    with pytest.raises(ValueError, match="'head' does not take what comes before it: mat1 and mat2"):
        check_sequence(Net(), ("trunk.first", "head", "trunk.second"), x)


class Doubled(nn.Sequential):
    """A subclass that does more than its children."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = 2 * super().forward(input)
        return out


def test_a_sequential_that_is_none() -> None:
    model = Doubled(nn.Linear(4, 2))
    with pytest.raises(ValueError, match="the model gives something else"):
        check_sequence(model, block_names(model), torch.randn(3, 4))


def test_outputs_that_are_no_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2, batch_first=True))
    check_sequence(model, ("0", "1"), torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=r"the model gives something else: .*'tuple'"):
        check_sequence(model, ("0",), torch.randn(2, 5, 4))


def test_checking_changes_nothing() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), Net())
    model[1].eval()
    model[2].trunk.eval()
    before = {n: t.clone() for n, t in named(model).items()}
    modes = [m.training for m in model.modules()]
    x = torch.randn(3, 4)
    given = x.clone()
    check_sequence(model, ("0", "1", "2"), x)
    assert torch.equal(x, given)
    assert all(torch.equal(t, before[n]) for n, t in named(model).items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
