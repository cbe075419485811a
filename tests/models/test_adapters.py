"""Adapters start as the identity, sit under their own names, and say what is wrong."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from partita import models
from partita.models import add_adapters
from support import each

LM = {"length": 5, "width": 8, "depth": 2, "heads": 2, "hidden": 16}


def encoder(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


CASES = {
    "residual": (lambda: models.resnet18(4, width=0.125), "residual", torch.randn(2, 1, 12, 12)),
    "residual-batch": (lambda: models.resnet20(4, width=0.25), "residual", torch.randn(2, 3, 12, 12)),
    "residual-1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 6, 3)),
        "residual",
        torch.randn(2, 2, 9),
    ),
    "bottleneck": (lambda: models.transformer(7, **LM), "bottleneck", torch.randint(0, 7, (2, 5))),
    "encoder": (encoder, "bottleneck", torch.randn(2, 5, 8)),
    "encoder-layer": (lambda: encoder(1).layers[0], "bottleneck", torch.randn(2, 5, 8)),
    "lora": (lambda: models.transformer(7, **LM), "lora", torch.randint(0, 7, (2, 5))),
    "lora-mlp": (lambda: models.mlp(6, 5, 4, 3), "lora", torch.randn(2, 6)),
    "lora-encoder": (encoder, "lora", torch.randn(2, 5, 8)),
}


def adapter_names(model):
    return [k for k, _ in model.named_parameters() if "adapter" in k.split(".")]


def move(model, scale=1.0):
    """Move the adapters away from the identity."""
    with torch.no_grad():
        for name in adapter_names(model):
            p = model.get_parameter(name)
            p.add_(scale * torch.randn_like(p))


@each("case", CASES)
@each("training", [True, False])
def test_identity_at_start_and_only_then(case, training):
    build, kind, x = CASES[case]
    model = build().train(training)
    adapted = add_adapters(model, kind, rank=3)
    assert type(adapted) is type(model)
    assert all(m.training == training for m in adapted.modules())
    with torch.no_grad():  # without gradients nn.TransformerEncoder has a fast path, which must not be taken
        before = adapted(x)
        torch.testing.assert_close(before, model(x), atol=1e-5, rtol=1e-5)
        move(adapted)
        after = adapted(x)
    assert not torch.allclose(before, after, atol=1e-3)


@each("case", CASES)
def test_names(case):
    build, kind, _ = CASES[case]
    model = build()
    names = [k for k, _ in model.named_parameters()]
    adapted = add_adapters(model, kind, rank=3)
    new = adapter_names(adapted)
    assert new
    assert [k for k, _ in model.named_parameters()] == names  # the argument is untouched
    assert [k for k, _ in adapted.named_parameters() if k not in new] == names
    missing, unexpected = adapted.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert sorted(missing) == sorted(new)


@each("case", CASES)
def test_copies(case):
    build, kind, x = CASES[case]
    model = add_adapters(build(), kind, rank=3).eval()
    move(model)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), expected)
        move(copied)
        assert not torch.allclose(copied(x), expected, atol=1e-3)
    torch.testing.assert_close(model(x), expected)


def test_padded_encoder():
    """A padding mask makes nn.TransformerEncoder try nested tensors on its fast path."""
    model = encoder().eval()
    adapted = add_adapters(model, "bottleneck", rank=3)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        real = ~padding
        a = model(x, src_key_padding_mask=padding)[real]
        torch.testing.assert_close(adapted(x, src_key_padding_mask=padding)[real], a, atol=1e-5, rtol=1e-5)
        move(adapted)
        fast = adapted(x, src_key_padding_mask=padding)[real]
    plain = adapted.train()(x, src_key_padding_mask=padding)[real]
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(fast, a, atol=1e-3)


def test_equations():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 5)
    conv = nn.Conv2d(3, 4, 3)
    adapted = add_adapters(conv, "residual", where="*")
    move(adapted)
    a = adapted.get_parameter("adapter.weight").squeeze()
    torch.testing.assert_close(adapted(x), conv(x) + torch.einsum("oc,bchw->bohw", a, conv(x)))

    z, linear = torch.randn(2, 3), nn.Linear(3, 4)
    adapted = add_adapters(linear, "lora", rank=2, alpha=6.0, where="*")
    move(adapted)
    a, b = (adapted.get_parameter(f"adapter.{k}.weight") for k in ("lora_A", "lora_B"))
    torch.testing.assert_close(adapted(z), linear(z) + 3.0 * z @ a.T @ b.T)

    adapted = add_adapters(linear, "bottleneck", rank=2, where="*")
    move(adapted)
    h = linear(z)
    down, up = (adapted.get_submodule(f"adapter.{k}") for k in ("down", "up"))
    torch.testing.assert_close(adapted(z), h + up(nn.functional.gelu(down(h))))


def test_where():
    lm = models.transformer(7, **LM)
    names = adapter_names(add_adapters(lm, "lora", where=["*.query", "block1.*.value"]))
    assert {k.rsplit(".adapter.")[0] for k in names} == {
        "block0.attention.query",
        "block1.attention.query",
        "block1.attention.value",
    }
    names = adapter_names(add_adapters(lm, "bottleneck", where="block0.*"))
    assert {k.rsplit(".adapter.")[0] for k in names} == {"block0.attention", "block0.feedforward"}
    names = adapter_names(add_adapters(lm, "lora"))
    assert not any(k.startswith("head") for k in names)
    resnet = models.resnet18(width=0.125)
    names = adapter_names(add_adapters(resnet, "residual"))
    assert len(names) == 16
    assert not any("stem" in k or "shortcut" in k for k in names)
    names = adapter_names(add_adapters(resnet, "residual", where="*.shortcut.conv"))
    assert names == [f"block{i}.shortcut.conv.adapter.weight" for i in (3, 5, 7)]


def test_encoder_layers():
    names = adapter_names(add_adapters(encoder(1), "bottleneck"))
    assert {k.rsplit(".adapter.")[0] for k in names} == {"layers.0.self_attn", "layers.0.linear2"}
    decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapted = add_adapters(decoder, "bottleneck")
    names = adapter_names(adapted)
    assert {k.rsplit(".adapter.")[0] for k in names} == {"self_attn", "multihead_attn", "linear2"}
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    torch.testing.assert_close(adapted(x, memory), decoder(x, memory))


def test_type_and_parts_survive():
    model = models.transformer(7, **LM).double()
    adapted = add_adapters(model, "bottleneck")
    assert (adapted.input_part, adapted.output_part) == (("block0",), ("block1",))
    assert all(p.dtype is torch.float64 for p in adapted.parameters())
    assert adapted.get_parameter("head.project.weight") is adapted.get_parameter("embed.tokens.weight")


@each(
    ("build", "message"),
    [
        (
            lambda: add_adapters(models.mlp(4, 3, 2), "lorra"),
            "kind='lorra': expected one of 'residual', 'bottle",
        ),
        (lambda: add_adapters(models.mlp(4, 3, 2), "lora", rank=0), "rank=0: expected a whole number from 1"),
        (lambda: add_adapters(models.mlp(4, 3, 2), "lora", alpha=0), "alpha=0: expected a number above 0"),
        (lambda: add_adapters(models.transformer(), "bottleneck", alpha=1.0), "alpha=1.0: expected None"),
        (lambda: add_adapters(models.mlp(4, 3, 2), "residual"), "where=None: expected pattern(s) of layers"),
        (
            lambda: add_adapters(models.mlp(4, 3, 2), "bottleneck"),
            "this model has 'hidden1.linear', 'output.linea",
        ),
        (lambda: add_adapters(models.logistic(4, 3), "lora"), "which this model has 'output.linear'"),
        (
            lambda: add_adapters(models.mlp(4, 3, 2), "lora", where=["hid*", "fc"]),
            "where='fc': expected pattern",
        ),
        (lambda: add_adapters(models.mlp(4, 3, 2), "lora", where=[]), "where=[]: expected pattern"),
        (
            lambda: add_adapters(add_adapters(models.mlp(4, 3, 2), "lora"), "lora"),
            "without anything named 'adapter'",
        ),
    ],
)
def test_messages(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_adapters_of_a_model_in_16_bits_have_32() -> None:
    """They are computed in their own precision, and the frozen rest is not copied."""
    base = models.transformer(9, length=6, width=16, depth=2, heads=2, hidden=32).to(torch.bfloat16)
    base.requires_grad_(False)
    x = torch.randint(0, 9, (3, 6))
    for kind in ("lora", "bottleneck"):
        model = add_adapters(base, kind, rank=2)
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        assert all("adapter" in k for k in trained)
        assert model(x).dtype == torch.bfloat16
        assert torch.equal(model(x), base(x))
        frozen = dict(model.named_parameters())
        assert all(p.data_ptr() == frozen[k].data_ptr() for k, p in base.named_parameters())
        gradient = torch.autograd.grad(model(x).float().square().sum(), list(trained.values()))
        assert any(bool(g.abs().sum() > 0) for g in gradient)
