"""What stacked clients call in another form equals torch's own."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from partita.engine.model.functions import Functions
from support import each

SIZES = {"one": 1, "two": 2, "pair": (2, 3), "of one": (1, 1), "as it is": (None, 2), "list": [1, 1]}


@each("size", SIZES.values(), ids=SIZES)
@each("last", [False, True])
def test_adaptive_means(size, last) -> None:
    pool = nn.AdaptiveAvgPool2d(size)
    x = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)

    def placed(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else x

    def one(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        def value(x: Tensor) -> tuple[Tensor, Tensor]:
            result = pool(placed(x))
            return result.square().sum(), result

        with Functions(key):
            return grad(value, has_aux=True)(x)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        gradient, result = vmap(one)(x, torch.arange(3))
    for i in range(3):
        own = x[i].clone().requires_grad_()
        expected = pool(own)
        torch.testing.assert_close(result[i], expected)
        torch.testing.assert_close(gradient[i], torch.autograd.grad(expected.square().sum(), own)[0])


WRITING = {
    "value": lambda x, i: (2 * x).scatter_(-1, i, 1.0),
    "of another": lambda x, i: (2 * x).scatter_(1, i, x[:, 1:2]),
    "by name": lambda x, i: (2 * x).scatter_(dim=1, index=i, src=x[:, :1]),
    "bilinear": lambda x, i: F.bilinear(x, x[:, :2], x[:3, :, None] * x[0, :2], x[0, :3]),  # noqa: ARG005
    "weight norm": lambda x, i: torch._weight_norm(x, x[:, :1] + 2, 0),  # noqa: ARG005
    "weight norm of columns": lambda x, i: torch._weight_norm(x, x[:1] + 2, 1),  # noqa: ARG005
    "weight norm of all": lambda x, i: torch._weight_norm(x, x[0, 0] + 2, -1),  # noqa: ARG005
}


@each("function", WRITING.values(), ids=WRITING)
def test_writing_by_index_and_bilinear_forms(function) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    index = torch.arange(12).view(3, 4, 1) % 5

    def one(x: Tensor, index: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        def value(x: Tensor) -> tuple[Tensor, Tensor]:
            result = function(x, index)
            return result.square().sum(), result

        with Functions(key) as mode:
            gradient = grad(value, has_aux=True)(x)
        assert mode.used
        return gradient

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        gradient, result = vmap(one)(x, index, torch.arange(3))
    for i in range(3):
        own = x[i].clone().requires_grad_()
        expected = function(own, index[i])
        torch.testing.assert_close(result[i], expected)
        torch.testing.assert_close(gradient[i], torch.autograd.grad(expected.square().sum(), own)[0])


def test_only_the_order_that_needs_it_is_noted() -> None:
    x = torch.randn(2, 4, 5, 6)
    for given, used in ((x, False), (x.to(memory_format=torch.channels_last), True)):
        with Functions(torch.tensor(0)) as mode:
            nn.AdaptiveAvgPool2d(1)(given)
        assert mode.used is used
