"""Layers made stackable: BatchNorm that ignores padding, dropout that draws from a key."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from partita.core import draws
from partita.engine.model.normalize import MASK, MaskedBatchNorm, Normalized
from partita.engine.model.stackable import KEY, KeyedDropout, batch_buffers, stackable
from support import each

SHAPES = {1: (3,), 2: (3, 4, 5), 3: (3, 2, 2, 2)}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def close(a, b, **options) -> None:
    torch.testing.assert_close(a, b, **{"atol": 1e-5, "rtol": 1e-5, **options})


def norm_layer(axes: int = 1, **options) -> nn.Module:
    """A BatchNorm that has seen something and has a weight and bias of its own."""
    torch.manual_seed(0)
    layer = NORMS[axes](3, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    layer(torch.randn(8, *SHAPES[axes]) * 3 + 1)
    return layer


def masked_pass(layer: MaskedBatchNorm, x, mask):
    """Output and statistics after a pass over a padded batch."""
    buffers = {k: v.clone() for k, v in layer.named_buffers() if k != MASK}
    y = functional_call(layer, {**buffers, MASK: mask}, (x,))
    return y, buffers


# ---- MaskedBatchNorm


@each("axes", [1, 2, 3])
@each("momentum", [0.1, 0.7, None])
@each("affine", [True, False])
def test_equals_batchnorm_on_the_real_samples(axes, momentum, affine) -> None:
    layer = norm_layer(axes, momentum=momentum, affine=affine)
    ours = stackable(layer)
    assert isinstance(ours, MaskedBatchNorm)
    x = torch.randn(6, *SHAPES[axes]) * 2 - 1
    x[4:] = 1e4  # the padding, which must not count
    y, buffers = masked_pass(ours, x, torch.tensor([1.0, 1, 1, 1, 0, 0]))
    close(y[:4], layer(x[:4]))
    for k in STATISTICS:
        close(buffers[k], getattr(layer, k))


def test_padding_anywhere_and_gradients() -> None:
    layer = norm_layer(2)
    ours = stackable(layer)
    x = torch.randn(5, 3, 4, 5)
    mask = torch.tensor([0.0, 1, 1, 0, 1])
    real, v = mask > 0, torch.randn(3, 3, 4, 5)

    def value(params, x):
        buffers = {k: b.clone() for k, b in ours.named_buffers() if k != MASK}
        y = functional_call(ours, {**params, **buffers, MASK: mask}, (x,))
        return (y[real] * v).sum()

    params = {k: p.detach() for k, p in ours.named_parameters()}
    got, got_x = grad(value, argnums=(0, 1))(params, x)
    own = x[real].clone().requires_grad_()
    expected = torch.autograd.grad((layer(own) * v).sum(), [*layer.parameters(), own])
    close(got["weight"], expected[0])
    close(got["bias"], expected[1])
    close(got_x[real], expected[2])
    assert not got_x[~real].any()


def test_statistics_are_no_part_of_the_graph() -> None:
    """Else every step would drag the graphs of all steps before along."""
    ours = stackable(norm_layer(1))
    x = torch.randn(3, 3, requires_grad=True)
    for mask in (torch.ones(()), torch.tensor([1.0, 1.0, 0.0])):
        _, buffers = masked_pass(ours, x, mask)
        assert not any(b.requires_grad for b in buffers.values())


def test_without_a_mask_it_is_batchnorm() -> None:
    layer = norm_layer(2)
    ours = stackable(layer)
    for _ in range(3):
        x = torch.randn(4, 3, 4, 5)
        assert torch.equal(ours(x), layer(x))
    for k in STATISTICS:
        assert torch.equal(getattr(ours, k), getattr(layer, k))
    x = torch.randn(4, 3, 4, 5)
    assert torch.equal(ours.eval()(x), layer.eval()(x))
    assert ours.num_batches_tracked == 4


def test_evaluation_uses_the_running_statistics() -> None:
    layer = norm_layer(1).eval()
    ours = stackable(layer)
    x = torch.randn(2, 3)
    y, buffers = masked_pass(ours, x, torch.tensor([1.0, 0.0]))
    close(y, layer(x))
    close(buffers["running_mean"], layer.running_mean)


def test_without_running_statistics() -> None:
    layer = norm_layer(1, track_running_stats=False)
    x = torch.randn(5, 3)
    for mode in (True, False):
        layer.train(mode)
        ours = stackable(layer)
        y = functional_call(ours, {MASK: torch.tensor([1.0, 1, 1, 0, 0])}, (x,))
        close(y[:3], layer(x[:3]))


def test_a_single_value_normalizes_to_zero() -> None:
    """PyTorch raises there; a client with one sample must work."""
    ours = stackable(norm_layer(1))
    y = ours(torch.randn(1, 3))
    close(y[0], ours.bias)
    assert all(torch.isfinite(getattr(ours, k)).all() for k in STATISTICS)


def test_alone_and_stacked_are_the_same() -> None:
    ours = stackable(norm_layer(1))
    params = dict(ours.named_parameters())
    x = torch.randn(3, 4, 3)
    masks = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])

    def one(x, mask, buffers):
        buffers = {k: v.clone() for k, v in buffers.items()}
        return functional_call(ours, {**params, **buffers, MASK: mask}, (x,)), buffers

    start = {k: getattr(ours, k).expand(3, *getattr(ours, k).shape) for k in STATISTICS}
    y, after = vmap(one)(x, masks, start)
    for i, n in enumerate((4, 2, 1)):
        alone = copy.deepcopy(ours)
        close(y[i, :n], alone(x[i, :n]))
        for k in STATISTICS:
            close(after[k][i], getattr(alone, k))


def test_names_and_tensors_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), norm_layer(1), nn.Dropout(0.5))
    ours = stackable(model)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert isinstance(model[1], nn.BatchNorm1d)
    assert isinstance(model[2], nn.Dropout)
    assert ours[0].weight is not model[0].weight


# ---- KeyedDropout


def keyed(layer: nn.Module, x, key: int | torch.Tensor = 3):
    """One pass under a key."""
    return functional_call(layer, batch_buffers(layer, torch.as_tensor(key), None), (x,))


@each("p", [0.1, 0.5, 0.8])
def test_rate_and_scale(p) -> None:
    y = keyed(stackable(nn.Dropout(p)), torch.ones(100, 200))
    kept = y != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / y.numel())
    close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    assert abs(y.mean().item() - 1) < 0.05
    by_row, by_column = kept.float().mean(1), kept.float().mean(0)
    assert by_row.std() < 2 * math.sqrt(p * (1 - p) / 200)
    assert by_column.std() < 2 * math.sqrt(p * (1 - p) / 100)


def test_ends_of_the_range() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(keyed(stackable(nn.Dropout(0.0)), x), x)
    assert not keyed(stackable(nn.Dropout(1.0)), x).any()


def test_evaluation_changes_nothing() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(keyed(stackable(nn.Dropout(0.5)).eval(), x), x)
    assert torch.equal(keyed(stackable(nn.Dropout(0.5).eval()), x), x)


@each(
    ("layer", "shape"),
    [
        (nn.Dropout1d(0.5), (6, 50, 3)),
        (nn.Dropout2d(0.5), (6, 50, 3, 4)),
        (nn.Dropout3d(0.5), (6, 50, 2, 2, 2)),
    ],
)
def test_whole_channels(layer, shape) -> None:
    y = keyed(stackable(layer), torch.ones(shape)).flatten(2)
    assert bool((y == y[:, :, :1]).all())
    share = (y[..., 0] != 0).float().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(300)


def test_the_mask_is_a_function_of_the_key() -> None:
    layer, x = stackable(nn.Dropout(0.5)), torch.ones(8, 16)
    before = torch.get_rng_state()
    first = keyed(layer, x, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(keyed(layer, x, 1), first)
    assert not torch.equal(keyed(layer, x, 2), first)
    assert torch.equal(keyed(layer, 3 * x, 1), 3 * first)


def test_the_mask_is_the_same_alone_stacked_and_padded() -> None:
    layer, x = stackable(nn.Dropout(0.5)), torch.ones(3, 4, 6)
    keys = draws.key(0, "test", torch.arange(3))
    stacked = vmap(lambda x, k: keyed(layer, x, k))(x, keys)
    for i in range(3):
        assert torch.equal(stacked[i], keyed(layer, x[i], keys[i]))
        assert torch.equal(stacked[i, :2], keyed(layer, x[i, :2], keys[i]))


def test_gradients_pass_through_the_mask() -> None:
    layer, x = stackable(nn.Dropout(0.25)), torch.randn(4, 5)
    got = grad(lambda x: keyed(layer, x).sum())(x)
    close(got, keyed(layer, torch.ones_like(x)))


def test_every_dropout_of_a_model_has_a_mask_of_its_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Identity(), nn.Dropout(0.5)))
    ours = stackable(model)
    given = batch_buffers(ours, torch.tensor(7), None)
    assert list(given) == ["0.batch_key", "1.1.batch_key"]
    x = torch.ones(10, 20)
    first = functional_call(ours[0], {KEY: given["0.batch_key"]}, (x,))
    second = functional_call(ours[1], {"1.batch_key": given["1.1.batch_key"]}, (x,))
    assert not torch.equal(first, second)


def test_one_dropout_under_two_names_is_keyed_in_both_places() -> None:
    drop = nn.Dropout(0.5)
    ours = stackable(nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop))
    assert [type(m) for m in ours if not isinstance(m, nn.Linear)] == [KeyedDropout, KeyedDropout]


def test_one_batchnorm_under_two_names_is_masked_in_both_places() -> None:
    norm = nn.BatchNorm1d(4)
    ours = stackable(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm))
    assert isinstance(ours[3], MaskedBatchNorm)
    assert ours[3].running_mean is ours[1].running_mean
    assert ours[3].weight is ours[1].weight


def test_a_dropout_that_is_called_twice_draws_twice() -> None:
    """`self.dropout` used at several places of a forward pass is the usual style."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.dropout(x), self.dropout(x)])

    ours = stackable(Twice())
    a, b = functional_call(ours, batch_buffers(ours, torch.tensor(1), None), (torch.ones(10, 20),))
    assert not torch.equal(a, b)
    again = functional_call(ours, batch_buffers(ours, torch.tensor(1), None), (torch.ones(10, 20),))
    assert torch.equal(again, torch.stack([a, b]))


# ---- the buffers of a batch


def test_the_mask_is_handed_to_every_norm() -> None:
    ours = stackable(nn.Sequential(norm_layer(1), nn.Linear(3, 3), norm_layer(1)))
    mask = torch.ones(4)
    assert all(m.dim() == 0 for m in batch_buffers(ours, torch.tensor(0), None).values())  # none is padded
    assert list(batch_buffers(ours, torch.tensor(0), mask)) == ["0.batch_mask", "2.batch_mask"]
    assert all(v is mask for v in batch_buffers(ours, torch.tensor(0), mask).values())


def test_other_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3), nn.AlphaDropout(0.1))
    assert [type(m) for m in stackable(model)] == [type(m) for m in model]


def masked_norm(
    x: torch.Tensor, share: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """As the formula says, derivatives left to autograd."""
    part = share[:, None, None] / x.shape[2]
    mean = (part * x).sum((0, 2))
    var = (part * (x - mean[:, None]).square()).sum((0, 2))
    return (x - mean[:, None]) * (weight / (var + 1e-5).sqrt())[:, None] + bias[:, None]


def test_derivatives_of_masked_batchnorm() -> None:
    """First ones, and second ones, which methods with Hessians take; a single sample, a part, all samples."""
    g = torch.Generator().manual_seed(0)
    x, q, d = (torch.randn(3, 5, 4, 6, generator=g, dtype=torch.float64) for _ in range(3))
    weight, bias = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double()
    share = mask / mask.sum(1, keepdim=True)
    q = q * mask[:, :, None, None]

    def ours(*given):
        return Normalized.apply(*given, 1e-5)[0]

    def both(norm):
        def f(x, share, weight, bias, q):
            return (norm(x, share, weight, bias) * q).tanh().sum()

        def second(x, share, weight, bias, q, d):
            gradient = torch.func.grad(f, (0, 2))
            _, pull = torch.func.vjp(lambda x, w: gradient(x, share, w, bias, q), x, weight)
            return pull((d, weight))

        def forward(x, share, weight, bias, q, d):
            gradient = torch.func.grad(f, (0, 2))
            along = lambda x, w, b: gradient(x, share, w, b, q)  # noqa: E731
            return torch.func.jvp(along, (x, weight, bias), (d, bias, weight))[1]

        first = torch.func.vmap(torch.func.grad(f, (0, 2, 3)))(x, share, weight, bias, q)
        given = (x, share, weight, bias, q, d)
        return (*first, *torch.func.vmap(second)(*given), *torch.func.vmap(forward)(*given))

    for mine, theirs in zip(both(ours), both(masked_norm), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_masked_batchnorm_in_double_precision() -> None:
    """The same as PyTorch's on the real samples, to the last digits."""
    torch.manual_seed(0)
    x, norm = torch.randn(5, 3, 4, dtype=torch.float64), nn.BatchNorm1d(3).double()
    masked = stackable(norm)
    masked.batch_mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(masked(x)[:3], norm(x[:3]), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(masked.running_var, norm.running_var, rtol=1e-13, atol=1e-13)
