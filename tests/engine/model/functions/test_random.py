"""Draws of a model's own come from the key of its batch, with torch's shapes, types and distributions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import partita as pt
from partita.engine.model.functions import Functions
from partita.engine.model.probe import examine
from support import each

N = 20_000


def keyed(function: Callable[[], Tensor], key: int = 1) -> Tensor:
    """Return what a function draws under a key; the generators of the process stay as they are."""
    before = torch.get_rng_state()
    with Functions(torch.tensor(key)) as mode:
        result = function()
    assert mode.used
    assert torch.equal(torch.get_rng_state(), before), "it drew from torch's generator"
    return result


X = torch.linspace(0.1, 0.9, 12).view(3, 4)
CALLS: dict[str, Callable[[], Tensor]] = {
    "rand(3)": lambda: torch.rand(3),
    "rand(3, 2)": lambda: torch.rand(3, 2),
    "rand((3, 2))": lambda: torch.rand((3, 2)),
    "rand([3])": lambda: torch.rand([3]),
    "rand(size=)": lambda: torch.rand(size=(3, 2)),
    "rand([])": lambda: torch.rand([]),
    "rand(0)": lambda: torch.rand(0, 3),
    "rand(dtype=)": lambda: torch.rand(3, dtype=torch.float64),
    "rand(half)": lambda: torch.rand(3, dtype=torch.bfloat16, device="cpu"),
    "randn": lambda: torch.randn(X.shape, dtype=torch.float16),
    "randint(5, )": lambda: torch.randint(5, (2, 3)),
    "randint(1, 5, )": lambda: torch.randint(1, 5, (2, 3), dtype=torch.int32),
    "randint(high=)": lambda: torch.randint(high=5, size=(2,)),
    "randint(1, high=)": lambda: torch.randint(1, high=5, size=(2,)),
    "randint(low=, high=)": lambda: torch.randint(low=1, high=5, size=(2,)),
    "randint of NumPy": lambda: torch.randint(int(np.int64(1)), np.int64(5), (2,)),
    "randperm": lambda: torch.randperm(6),
    "randperm(dtype=)": lambda: torch.randperm(6, dtype=torch.int32),
    "rand_like": lambda: torch.rand_like(X),
    "rand_like(dtype=)": lambda: torch.rand_like(X, dtype=torch.float64),
    "rand_like(input=)": lambda: torch.rand_like(input=X),
    "randn_like": lambda: torch.randn_like(X, device="cpu"),
    "randint_like(5)": lambda: torch.randint_like(X, 5),
    "randint_like(1, 5)": lambda: torch.randint_like(X, 1, 5),
    "randint_like(low=, high=)": lambda: torch.randint_like(X, low=1, high=5),
    "normal(x, 2.0)": lambda: torch.normal(X, 2.0),
    "normal(0.0, x)": lambda: torch.normal(0.0, X),
    "normal(x, x)": lambda: torch.normal(mean=X[:, :1], std=X),
    "normal(0.0, 1.0, )": lambda: torch.normal(0.0, 1.0, (2, 3)),
    "normal(size=)": lambda: torch.normal(mean=0.0, std=1.0, size=(2, 3), dtype=torch.float64),
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli(p)": lambda: torch.bernoulli(X, 0.3),
    "x.bernoulli()": lambda: X.double().bernoulli(),
    "x.bernoulli(p=)": lambda: X.bernoulli(p=0.3),
    "bernoulli_()": lambda: torch.empty(3).bernoulli_(),
    "bernoulli_(p)": lambda: X.clone().bernoulli_(0.2),
    "bernoulli_(tensor)": lambda: torch.empty(3, 4, dtype=torch.float64).bernoulli_(X),
    "bernoulli_ of numbers": lambda: torch.empty(3, 4, dtype=torch.int64).bernoulli_(0.5),
    "uniform_": lambda: torch.empty_like(X).uniform_(-1, 1),
    "uniform_(from=, to=)": lambda: X.new_empty(3, 2).uniform_(**{"from": -1, "to": 1}),
    "normal_": lambda: X.new_empty((3, 2), dtype=torch.float64).normal_(1.0, 2.0),
    "normal_(mean=)": lambda: X.clone().normal_(mean=1.0, generator=None),
    "exponential_": lambda: torch.empty(3, dtype=torch.float16).exponential_(2.0),
    "multinomial": lambda: torch.multinomial(X, 2),
    "multinomial, again": lambda: X[0].multinomial(7, replacement=True),
    "multinomial(input=)": lambda: torch.multinomial(input=X, num_samples=2),
    "dropout": lambda: F.dropout(X, 0.3),
    "dropout(p=)": lambda: F.dropout(X.double(), p=0.3, training=True),
    "dropout of everything": lambda: F.dropout(X, 1.0),
    "dropout in place": lambda: F.dropout(X.clone(), 0.3, inplace=True),
    "torch.dropout": lambda: torch.dropout(X, 0.3, True),
    "torch.dropout(train=)": lambda: torch.dropout(X, p=0.3, train=True),
    "dropout1d": lambda: F.dropout1d(X, 0.3),
    "dropout2d": lambda: F.dropout2d(X[:, :, None, None].expand(3, 4, 2, 2), 0.3),
    "dropout3d": lambda: F.dropout3d(X[:, :, None, None].expand(3, 4, 2, 2), 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.3, training=True),
    "alpha_dropout in place": lambda: F.alpha_dropout(X.clone(), 0.3, training=True, inplace=True),
    "alpha_dropout of everything": lambda: F.alpha_dropout(X, 1.0, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X[..., None], 0.3, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "gumbel_softmax(hard=)": lambda: F.gumbel_softmax(X, hard=True),
    "rrelu": lambda: F.rrelu(X - 0.5, training=True),
    "rrelu in place": lambda: F.rrelu(X - 0.5, training=True, inplace=True),
    "nn.init": lambda: nn.init.xavier_uniform_(torch.empty(3, 2)),
    "Normal": lambda: torch.distributions.Normal(X, X).rsample(),
    "Categorical": lambda: torch.distributions.Categorical(X).sample(),
}


@each("call", CALLS.values(), ids=CALLS)
def test_shapes_and_types_are_torchs_and_numbers_those_of_the_key(call) -> None:
    expected, result = call(), keyed(call)
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert result.device == expected.device
    assert torch.equal(result, keyed(call))
    if expected.unique().numel() > 6 and result.is_floating_point():  # else they may happen to be the same
        assert not torch.equal(result, keyed(call, 2))


SHARED = (  # a tensor that all clients share is written over
    "bernoulli_(p)",
    "normal_(mean=)",
    "dropout in place",
    "alpha_dropout in place",
    "rrelu in place",
    "gumbel_softmax(hard=)",
)


@each("name", CALLS)
def test_stacked_numbers_are_those_of_each_client_alone(name) -> None:
    def one(key: Tensor) -> Tensor:
        with Functions(key):
            return CALLS[name]() + 0 * key

    if name in SHARED:
        with pytest.raises(RuntimeError, match=r"in-?place"):
            vmap(one, randomness="different")(torch.arange(3))
        return
    stacked = vmap(one, randomness="different")(torch.arange(3))
    for i in range(3):
        torch.testing.assert_close(stacked[i], one(torch.tensor(i)))


def test_what_is_written_over_in_a_stack_was_never_read() -> None:
    """Memory of torch.empty is of each client its own, and holds zeros until something is written."""

    def one(key: Tensor) -> tuple[Tensor, ...]:
        with Functions(key):
            return torch.empty(3), torch.empty_like(X), X.new_empty(2, dtype=torch.int32), torch.empty(2) > 0

    for values, shape in zip(vmap(one)(torch.arange(4)), ((3,), (3, 4), (2,), (2,)), strict=True):
        assert values.shape == (4, *shape)
        assert not values.any()


# ---- distributions: means within five standard errors

MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(N), 1 / 2, 1 / 12),
    "rand, bfloat16": (lambda: torch.rand(N, dtype=torch.bfloat16), 255 / 512, 1 / 12),
    "rand of two axes": (lambda: torch.rand(N // 10, 10), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(N), 0.0, 1.0),
    "randint": (lambda: torch.randint(2, 6, (N,)), 3.5, 15 / 12),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.8), 0.8, 0.16),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1.0, 16 / 12),
    "normal": (lambda: torch.normal(torch.full((N,), 2.0), 3.0), 2.0, 9.0),
    "normal_": (lambda: torch.empty(N).normal_(2.0, 3.0), 2.0, 9.0),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.25),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), N, True), 1.5, 0.75),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1.0, 0.25),
    "dropout of channels": (lambda: F.dropout2d(torch.ones(100, N // 100, 1, 1), 0.2), 1.0, 0.25),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(torch.tensor([1.0, 3.0]).log().expand(N, 2), hard=True)[:, 1],
        0.75,
        3 / 16,
    ),
    "rrelu": (lambda: F.rrelu(-torch.ones(N), 0.1, 0.5, training=True), -0.3, 0.16 / 12),
}


@each(("draw", "mean", "variance"), MOMENTS.values(), ids=MOMENTS)
def test_means_and_variances(draw, mean, variance) -> None:
    values = keyed(draw).double().flatten()
    assert abs(values.mean().item() - mean) < 5 * math.sqrt(variance / N)
    fourth = (values - mean).pow(4).mean().item()
    assert abs(values.var().item() - variance) < 5 * math.sqrt((fourth - variance**2) / N) + 1e-3


def test_types_with_few_digits_stay_below_one() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = keyed(lambda: torch.rand(1 << 14, dtype=dtype))  # noqa: B023
        assert values.min() >= 0
        assert values.max() < 1


def test_draws_without_replacement_by_their_weights() -> None:
    """All different, and the first by its weight, the second by its weight among the others."""
    weights = torch.tensor([1.0, 2.0, 5.0])
    pairs = keyed(lambda: torch.multinomial(weights.expand(N, 3), 2))
    assert bool((pairs[:, 0] != pairs[:, 1]).all())
    for first, second in ((0, 1), (2, 0), (1, 2)):
        p = (weights[first] / 8 * weights[second] / (8 - weights[first])).item()
        share = ((pairs == torch.tensor([first, second])).all(1)).double().mean().item()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / N)


def test_orders_are_orders() -> None:
    assert sorted(keyed(lambda: torch.randperm(50)).tolist()) == list(range(50))
    assert keyed(lambda: torch.randperm(50)).tolist() != list(range(50))


def test_alpha_dropout_keeps_mean_and_variance_as_torchs_does() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    dropped = keyed(lambda: F.alpha_dropout(x, 0.3, training=True))
    assert abs(dropped.mean().item()) < 0.05
    assert abs(dropped.var().item() - 1) < 0.1
    for value in (0.0, 1.5):
        ones = torch.full((N,), value)
        torch.manual_seed(0)
        theirs = F.alpha_dropout(ones, 0.3, training=True)
        mine = keyed(lambda: F.alpha_dropout(ones, 0.3, training=True))  # noqa: B023
        torch.testing.assert_close(mine.unique(), theirs.unique())


@each(
    ("function", "shape", "own"),
    [
        (F.dropout1d, (50, 7), (50, 1)),  # one sample, its channels
        (F.dropout1d, (6, 50, 7), (6, 50, 1)),
        (F.dropout2d, (6, 50, 3, 2), (6, 50, 1, 1)),
        (F.dropout3d, (50, 3, 2, 2), (50, 1, 1, 1)),
        (F.dropout3d, (6, 50, 3, 2, 2), (6, 50, 1, 1, 1)),
    ],
)
def test_whole_channels_are_dropped(function, shape, own) -> None:
    y = keyed(lambda: function(torch.ones(shape), 0.5))
    channel = y[tuple(slice(None) if n > 1 else slice(0, 1) for n in own)]
    assert channel.shape == own
    assert torch.equal(y, channel.expand(shape))
    assert channel.unique().tolist() == [0.0, 2.0]


def test_numbers_do_not_depend_on_how_long_the_axes_are() -> None:
    """So that padding, of samples or of sequences, leaves the numbers of the others as they are."""
    long = keyed(lambda: torch.rand(5, 6, 7))
    assert torch.equal(keyed(lambda: torch.rand(2, 6, 4)), long[:2, :, :4])
    assert torch.equal(keyed(lambda: torch.rand(5, 3, 7)), long[:, :3])
    assert long.unique().numel() == long.numel()


def test_gradients_as_torchs() -> None:
    """None through what is drawn, none to mean and spread of `torch.normal`; dropout scales them."""
    x = X.clone().requires_grad_()
    drawn = keyed(lambda: torch.normal(x, x))
    assert not drawn.requires_grad
    assert not keyed(lambda: torch.bernoulli(x)).requires_grad
    y = keyed(lambda: F.dropout(x, 0.5))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0] * x, y)


def test_each_call_and_each_key_has_numbers_of_its_own() -> None:
    def two() -> Tensor:
        return torch.stack([torch.rand(50), torch.rand(50)])

    a, b = keyed(two), keyed(two, 2)
    assert torch.cat([a, b]).unique().numel() == 200


def test_default_types_and_devices_count() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert keyed(lambda: torch.rand(2)).dtype == torch.float64
        assert keyed(lambda: torch.normal(0.0, 1.0, (2,))).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with Functions(torch.tensor(1)), torch.device("meta"):
        assert torch.rand(2).is_meta
    with torch.device("meta"), Functions(torch.tensor(1, device="meta")):
        assert torch.empty(2).is_meta


# ---- what is not here is left to torch, and its draws are noticed


G = torch.Generator()
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "random_": lambda h: h + 0.1 * torch.empty_like(h).random_(0, 3),
    "log_normal_": lambda h: h + torch.empty_like(h).log_normal_(),
    "geometric_": lambda h: h + torch.empty_like(h).geometric_(0.5),
    "cauchy_": lambda h: h + 0.1 * torch.empty_like(h).cauchy_(),
    "poisson": lambda h: h + torch.poisson(torch.ones_like(h)),
    "binomial": lambda h: h + torch.binomial(torch.ones_like(h), torch.full_like(h, 0.5)),
    "fractional pooling": lambda h: F.fractional_max_pool2d(h.view(-1, 1, 2, 4), 1, (1, 3)).flatten(1),
    "native": lambda h: torch.native_dropout(h, 0.5, True)[0],
    "init": lambda h: h + nn.init.kaiming_uniform_(torch.empty(2, 8))[0],
    "out": lambda h: h + torch.rand(8, out=torch.empty(8)),
}


class Noisy(nn.Module):
    """A small network with noise in the middle, in training only."""

    def __init__(self, noise: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.output, self.noise = nn.Linear(4, 8), nn.Linear(width, 3), noise

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        h = self.noise(h) if self.training else self.noise(h) * 0 + h[:, : self.output.in_features]
        return self.output(h)


def samples() -> pt.FederatedData:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(4), [7, 6, 5, 5])
    x, y = rng.normal(size=(len(client), 4)).astype(np.float32), rng.integers(0, 3, len(client))
    return pt.data.from_arrays(x, y, client, test=0.2, validation=0)


def federate(model: nn.Module, executor: str, **options) -> pt.Run:
    given = {"rounds": 1, "epochs": 1, "batch": 2, "baselines": False, "progress": False, "metric": "loss"}
    return pt.federate(model, samples(), pt.fedavg(lr=0.1), executor=executor, **{**given, **options})


@each("noise", OTHERS.values(), ids=OTHERS)
def test_other_draws_are_noticed(noise) -> None:
    model = Noisy(noise, 3 if noise is OTHERS["fractional pooling"] else 8)
    behaviour = examine(model, samples(), None, "loss").behaviour
    assert behaviour.draws == ("torch",)
    assert behaviour.not_stackable


def test_other_draws_are_not_stacked_and_keep_the_seed() -> None:
    model = Noisy(OTHERS["poisson"])
    with pytest.warns(UserWarning, match=r"cannot be stacked.*draws random numbers of its own \(torch\)"):
        first = federate(model, "vmap")
    torch.manual_seed(99)
    second = federate(model, "loop")
    for name, values in first.shared.items():
        assert torch.equal(values, second.shared[name])


def test_a_generator_of_the_user_is_noticed() -> None:
    model = Noisy(lambda h: h * torch.rand(8, generator=G))
    with pytest.warns(UserWarning, match=r"keeps something between passes \(a generator") as told:
        federate(model, "vmap")
    assert any("cannot be stacked" in str(w.message) for w in told)


def test_a_generator_that_begins_anew_is_not_stacked_unless_it_is_the_same() -> None:
    """Alone it would draw the same numbers for every client, and in a stack others for each."""

    def noise(h: Tensor) -> Tensor:
        return h * torch.rand(8, generator=torch.Generator().manual_seed(0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stacked, loop = federate(Noisy(noise), "vmap"), federate(Noisy(noise), "loop")
    for name, values in loop.shared.items():
        torch.testing.assert_close(stacked.shared[name], values)


# ---- runs


MIXED = Noisy(lambda h: F.dropout(h, 0.3) * (1 + 0.1 * torch.randn_like(h)) + h.new_empty(8).uniform_())


def test_clients_rounds_and_steps_draw_apart_and_executors_alike() -> None:
    drawn: list[Tensor] = []

    class Watched(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(5)
            if self.training and not torch._C._functorch.is_functorch_wrapped_tensor(noise):
                drawn.append(noise)
            return super().forward(x) + 0 * noise.sum()

    federate(Watched(lambda h: h), "loop", rounds=3)
    steps = torch.stack(drawn)
    trial = (steps[:, None] == steps[None]).all(-1).sum(1) > 1  # passes of the trial have the same key
    assert trial.sum() < 24
    assert (~trial).sum() == 3 * (3 + 3 + 2 + 2)
    loop, stacked = federate(MIXED, "loop", rounds=2), federate(MIXED, "vmap", rounds=2)
    for name, values in loop.shared.items():
        torch.testing.assert_close(stacked.shared[name], values)
    assert [row["train_loss"] for row in stacked.metrics] == pytest.approx(
        [row["train_loss"] for row in loop.metrics], rel=1e-5
    )


def test_a_traced_step_draws_as_the_others() -> None:
    """Steps of the same shapes are traced after some: keys come in as arguments, and so differ by step."""
    loop, stacked = (
        federate(MIXED, executor, rounds=5, steps=10, epochs=None) for executor in ("loop", "vmap")
    )
    for name, values in loop.shared.items():
        torch.testing.assert_close(stacked.shared[name], values, rtol=1e-4, atol=1e-5)
