"""Attention in operations that can be stacked equals torch's own, and so do the modules that use it."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import partita as pt
from partita.engine.model.functions import Functions
from support import each

CLIENTS, B, H, T, S, D = 3, 2, 4, 5, 6, 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden_rows() -> Tensor:
    mask = drawn(T, S, seed=7) > -0.3
    mask[2] = False  # a place that sees nothing
    return mask


def hidden_numbers() -> Tensor:
    mask = drawn(T, S, seed=8)
    mask[1, :3] = -math.inf
    mask[3] = -math.inf
    return mask


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": hidden_rows()},
    "float": {"attn_mask": hidden_numbers()},
    "float of each head": {"attn_mask": drawn(B, H, T, S, seed=9)},
    "bool of each sample": {"attn_mask": drawn(B, 1, 1, S, seed=9) > -1},
    "shared heads": {"enable_gqa": True},
}


def inputs(case: dict) -> tuple[Tensor, Tensor, Tensor]:
    heads = 2 if case.get("enable_gqa") else H
    return (
        drawn(CLIENTS, B, H, T, D, seed=1),
        drawn(CLIENTS, B, heads, S, D, seed=2),
        drawn(CLIENTS, B, heads, S, D, seed=3),
    )


@each("case", CASES.values(), ids=CASES)
def test_stacked_is_torchs_own_with_its_gradient(case) -> None:
    weight = drawn(CLIENTS, B, H, T, D, seed=4)

    def value(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        result = F.scaled_dot_product_attention(q, k, v, **case)
        return (result * w).sum(), result

    def stacked(q: Tensor, k: Tensor, v: Tensor, w: Tensor, key: Tensor):
        with Functions(key) as mode:
            gradients, result = grad(value, argnums=(0, 1, 2), has_aux=True)(q, k, v, w)
        assert mode.used
        return gradients, result

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        gradients, result = vmap(stacked)(*inputs(case), weight, torch.arange(CLIENTS))
    for i in range(CLIENTS):
        own = [x[i].clone().requires_grad_() for x in inputs(case)]
        expected = F.scaled_dot_product_attention(*own, **case)
        torch.testing.assert_close(result[i], expected, rtol=1e-12, atol=1e-12)
        reference = torch.autograd.grad((expected * weight[i]).sum(), own)
        for mine, theirs in zip(gradients, reference, strict=True):
            torch.testing.assert_close(mine[i], theirs, rtol=1e-10, atol=1e-12)


def test_alone_it_is_torchs_own_to_the_bit_unless_it_draws() -> None:
    q, k, v = (x[0].float() for x in inputs({}))
    with Functions(torch.tensor(3)) as mode:
        alone = F.scaled_dot_product_attention(q, k, v)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert mode.used
    assert torch.equal(alone, F.scaled_dot_product_attention(q, k, v))
    assert not torch.allclose(dropped, alone)


def test_dropped_probabilities_are_the_same_alone_stacked_and_padded() -> None:
    q, k, v = inputs({})

    def one(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        with Functions(key):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    keys = torch.arange(CLIENTS) + 5
    before = torch.get_rng_state()
    stacked = vmap(one)(q, k, v, keys)
    for i in range(CLIENTS):
        torch.testing.assert_close(one(q[i], k[i], v[i], keys[i]), stacked[i])
        torch.testing.assert_close(one(q[i, :1], k[i, :1], v[i, :1], keys[i]), stacked[i, :1])
    assert torch.equal(torch.get_rng_state(), before)
    same = vmap(one, in_dims=(None, None, None, 0))(q[0], k[0], v[0], keys)
    assert not torch.allclose(same[0], same[1])


def test_second_derivatives_of_attention() -> None:
    """The kernel has none; inside `torch.func`, and so for products with a Hessian, it is taken apart."""
    q, k, v = (x[0] for x in inputs({}))

    def value(q: Tensor) -> Tensor:
        with Functions(torch.tensor(0)):
            return F.scaled_dot_product_attention(q, k, v).square().sum()

    def plain(q: Tensor) -> Tensor:
        return (torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v).square().sum()

    d = drawn(B, H, T, D, seed=11)
    mine, theirs = (torch.func.jvp(grad(f), (q,), (d,))[1] for f in (value, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


# ---- modules of torch


class Attends(nn.Module):
    """nn.MultiheadAttention with its weights."""

    def __init__(self, forward: dict, **options) -> None:
        super().__init__()
        self.attention, self.given = nn.MultiheadAttention(8, 2, batch_first=True, **options), forward

    def forward(self, x: Tensor) -> Tensor:
        result, weights = self.attention(x, x, x, **self.given)
        return result if weights is None else result * (1 + weights.flatten(1).square().sum(1)[:, None, None])


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(T).double())


class First(nn.Module):
    """Axes in the other order, the default of torch: samples second."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
MODULES = {
    "weights": lambda: Attends({}, dropout=0.3),
    "weights of each head": lambda: Attends({"average_attn_weights": False}),
    "mask": lambda: Attends({"need_weights": False, "attn_mask": HIDDEN}, dropout=0.3),
    "mask with weights": lambda: Attends({"attn_mask": HIDDEN}),
    "zero attention": lambda: Attends({"need_weights": False}, add_zero_attn=True),
    "bias of keys": lambda: Attends({}, add_bias_kv=True),
    "other widths": lambda: Attends({}, kdim=8, vdim=8, bias=False),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, norm_first=True),
    "encoder, samples second": First,
    "decoder": Decodes,
}


@each("make", MODULES.values(), ids=MODULES)
def test_modules_with_attention_alone_stacked_and_padded(make) -> None:
    """In training with keyed dropout, and in evaluation, where the fast path is not taken."""
    module = make().double()
    params = {k: drawn(CLIENTS, *p.shape, seed=i) * 0.3 for i, (k, p) in enumerate(module.named_parameters())}
    x, keys = drawn(CLIENTS, 4, T, 8, seed=20), torch.arange(CLIENTS)

    def one(params: dict[str, Tensor], x: Tensor, key: Tensor):
        def value(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            result = functional_call(module, params, (x,))
            return result[:2].square().sum(), result

        with Functions(key) as mode:
            gradient, result = grad(value, has_aux=True)(params)
        assert mode.used
        return gradient, result

    def alone(params: dict[str, Tensor], x: Tensor, key: Tensor) -> Tensor:
        with Functions(key), torch.no_grad():
            return functional_call(module, params, (x,))

    for training in (True, False):
        module.train(training)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*batching rule")
            gradient, result = vmap(one)(params, x, keys)
        for i in range(CLIENTS):
            own = {k: v[i].clone() for k, v in params.items()}
            for n in (4, 2):
                expected = alone(own, x[i, :n], keys[i])
                torch.testing.assert_close(result[i, :n], expected, rtol=1e-9, atol=1e-11)
            leaves = {k: v.requires_grad_() for k, v in own.items()}
            with Functions(keys[i]):
                value = functional_call(module, leaves, (x[i, :2],)).square().sum()
            for k, g in zip(leaves, torch.autograd.grad(value, list(leaves.values()))):
                torch.testing.assert_close(gradient[k][i], g, rtol=1e-8, atol=1e-10)
    first = {k: v[0] for k, v in params.items()}
    with torch.no_grad():  # by the fast path, where there is one
        torch.testing.assert_close(result[0], functional_call(module, first, (x[0],)), rtol=1e-6, atol=1e-6)


class Tagger(nn.Module):
    """An encoder as it is by default: in evaluation it would pack its sequences into a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(9, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        found: Tensor = self.output(
            self.encoder(self.embedding(input_ids), src_key_padding_mask=src_key_padding_mask)
        )
        return found


def test_an_encoder_with_a_mask_of_padding_is_stacked() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, n) for n in rng.integers(2, 9, 24)]
    data = pt.data.from_arrays(
        {"input_ids": texts}, [text % 3 for text in texts], np.repeat(list("abc"), 8), test=0.25
    )
    work = {"rounds": 2, "steps": 2, "batch": 3, "baselines": False, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be stacked")
        loop, stacked = (
            pt.federate(Tagger(), data, pt.fedavg(lr=0.1), executor=e, **work) for e in ("loop", "vmap")
        )
    for k, v in loop.shared.items():
        torch.testing.assert_close(stacked.shared[k], v, rtol=1e-4, atol=1e-6)
    assert [r["test.global.loss"] for r in stacked.metrics if "test.global.loss" in r] == pytest.approx(
        [r["test.global.loss"] for r in loop.metrics if "test.global.loss" in r], rel=1e-5
    )
