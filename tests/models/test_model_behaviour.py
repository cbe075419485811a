"""Shapes, seeds, blocks, messages."""

import copy
import re

import pytest
import torch
from torch import nn

from partita import models
from support import each

FACTORIES = {
    "logistic": lambda seed: models.logistic(12, 3, seed=seed),
    "mlp": lambda seed: models.mlp(12, 8, 3, seed=seed),
    "leaf_cnn": lambda seed: models.leaf_cnn(seed=seed),
    "mnist_cnn": lambda seed: models.mnist_cnn(seed=seed),
    "cifar_cnn": lambda seed: models.cifar_cnn(seed=seed),
    "resnet20": lambda seed: models.resnet20(width=0.25, seed=seed),
    "resnet18": lambda seed: models.resnet18(width=0.125, seed=seed),
    "transformer": lambda seed: models.transformer(20, width=8, depth=2, heads=2, hidden=8, seed=seed),
    "bilstm": lambda seed: models.bilstm(20, embedding=4, hidden=4, seed=seed),
    "bottleneck": lambda seed: models.add_adapters(
        models.transformer(20, width=8, depth=1, heads=2, hidden=8), "bottleneck", seed=seed
    ),
}


@each("name", FACTORIES)
def test_seed_decides_the_weights_and_nothing_else(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = FACTORIES[name](1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    b, c = FACTORIES[name](1).state_dict(), FACTORIES[name](2).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_seed_is_independent_of_the_default_device():
    with torch.device("meta"):
        weight = models.logistic(4, 2).get_parameter("output.linear.weight")
    assert torch.equal(weight, models.logistic(4, 2).get_parameter("output.linear.weight"))


@each(
    ("model", "shapes", "output"),
    [
        (models.logistic(784, 10), [(2, 784), (2, 28, 28), (2, 1, 28, 28)], (2, 10)),
        (models.mlp(784, 5, 5, 10), [(2, 784), (2, 28, 28)], (2, 10)),
        (models.leaf_cnn(), [(2, 28, 28), (2, 1, 28, 28)], (2, 62)),
        (models.mnist_cnn(), [(2, 28, 28), (2, 1, 28, 28)], (2, 10)),
        (models.cifar_cnn(), [(2, 3, 32, 32)], (2, 10)),
        (models.resnet20(width=0.25), [(2, 3, 32, 32)], (2, 10)),
        (models.resnet20(width=0.25, channels=1), [(2, 28, 28)], (2, 10)),
        (models.resnet18(width=0.125), [(2, 28, 28), (2, 1, 28, 28)], (2, 62)),
    ],
)
def test_shapes(model, shapes, output):
    model.eval()
    x = torch.randn(shapes[0])
    first = model(x)
    assert first.shape == output
    for shape in shapes[1:]:
        torch.testing.assert_close(model(x.reshape(shape)), first)


def test_images_are_channels_first():
    for model in (models.cifar_cnn(), models.resnet20()):
        with pytest.raises(
            ValueError, match=r"input=\[2, 32, 32, 3\]: expected \[batch, 3, .*channels first"
        ):
            model(torch.zeros(2, 32, 32, 3))
    with pytest.raises(ValueError, match=r"input=\[2, 32, 32\]: expected \[batch, 1, 28, 28\]"):
        models.leaf_cnn()(torch.zeros(2, 32, 32))


def test_transformer_is_causal_and_tied():
    model = models.transformer(20, length=6, width=8, depth=2, heads=2, hidden=8)
    x = torch.randint(0, 20, (3, 6))
    y = x.clone()
    y[:, 4:] = (y[:, 4:] + 1) % 20
    a, b = model(x), model(y)
    assert a.shape == (3, 6, 20)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert not torch.allclose(a[:, 4:], b[:, 4:])
    names = [name for name, _ in model.named_parameters()]
    assert "embed.tokens.weight" in names
    assert "head.project.weight" not in names
    for same in (model, copy.deepcopy(model)):
        assert same.get_parameter("head.project.weight") is same.get_parameter("embed.tokens.weight")
    # another tied weight through functional_call changes both the embedding and the scores
    zero = {"embed.tokens.weight": torch.zeros(20, 8)}
    assert not torch.func.functional_call(model, zero, (x,)).any()
    with pytest.raises(ValueError, match="at most 6 tokens"):
        model(torch.zeros(1, 7, dtype=torch.long))


def test_blocks():
    model = models.Blocks(
        {"flatten": nn.Flatten(), "a": nn.Linear(4, 3), "b": nn.ReLU(), "c": nn.Linear(3, 2)}
    )
    assert (model.input_part, model.output_part) == (("a",), ("c",))
    assert model[2:].input_part == ("c",)
    assert isinstance(model[2:], models.Blocks)
    assert copy.deepcopy(model).input_part == ("a",)
    with pytest.raises(ValueError, match=re.escape("input_part=('d',): expected names among 'flatten', 'a'")):
        models.Blocks(dict(model.named_children()), input_part=["d"])


@each(
    ("build", "message"),
    [
        (lambda: models.logistic(0, 2), "widths=0: expected a whole number from 1"),
        (lambda: models.mlp(3), "widths=(3,): expected at least"),
        (lambda: models.mlp(3, 2, seed=-1), "seed=-1: expected"),
        (lambda: models.leaf_cnn(2.5), "classes=2.5: expected"),
        (lambda: models.mnist_cnn(dropout=1.5), "dropout=1.5: expected"),
        (lambda: models.resnet20(norm="bath"), "norm='bath': expected one of 'batch', 'group' (did you mean"),
        (lambda: models.resnet20(width=0), "width=0: expected a number above 0"),
        (lambda: models.resnet18(channels=0), "channels=0: expected"),
        (lambda: models.transformer(heads=3), "heads=3: expected a divisor of width=256"),
        (lambda: models.bilstm(hidden="big"), "hidden='big': expected"),
    ],
)
def test_messages(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
