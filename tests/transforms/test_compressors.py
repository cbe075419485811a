"""Each compressor against a plain form of its equation, and what the papers prove of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import partita as pt
from partita.core import codec, draws
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.engine.channel import Way
from reference import plain_compress as plain
from support import each

T = pt.transforms
KEY = draws.key(0, "test", 1)
SHAPES = {"delta.w": (7, 5), "delta.b": (5,), "delta.s": (), "delta.e": (0, 3), "sums.w": (7, 5)}


def message(dtype: torch.dtype = torch.float64, seed: int = 0, **shapes: tuple[int, ...]) -> Message:
    g = torch.Generator().manual_seed(seed)
    numbers = {k: torch.randn(v, generator=g, dtype=torch.float64) for k, v in (shapes or SHAPES).items()}
    rest = {"extra.count": torch.tensor([3, 4])}
    return Message({k: v.to(dtype) for k, v in numbers.items()}, rest)


def vector(x: Tensor) -> Message:
    return Message({"delta.w": x}, {})


def passed(transform: Transform, given: Message, key: Tensor = KEY) -> Message:
    """What arrives of a message that passes a transform alone."""
    assert transform.encode is not None
    assert transform.decode is not None
    return transform.decode(transform.encode(given, {}, key), given, key)


def arrives(transform: Transform, x: Tensor, key: Tensor = KEY) -> Tensor:
    return passed(transform, vector(x), key).numbers["delta.w"]


def length(tensors: Tensors) -> float:
    return math.sqrt(sum(float((x.double() ** 2).sum()) for x in tensors.values()))


ALL: dict[str, Transform] = {
    "topk": T.topk(0.2),
    "topk by tensor": T.topk(0.2, per="tensor"),
    "randk": T.randk(0.2),
    "randk, unbiased": T.randk(0.2, unbiased=True),
    "one bit": T.quantize(1),
    "two bits": T.quantize(2, bucket=8),
    "eight bits": T.quantize(8),
    "nearest": T.quantize(3, stochastic=False),
    "low rank": T.low_rank(2),
    "half": T.half(),
    "bfloat16": T.half("bfloat16"),
}
every = each("transform", ALL.values(), ids=list(ALL))


# ---- what all of them promise


@every
def test_all_names_shapes_and_types_come_back(transform: Transform) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        given = message(dtype)
        arrived = passed(transform, given)
        assert list(arrived.numbers) == list(given.numbers)
        assert {k: (v.shape, v.dtype) for k, v in arrived.numbers.items()} == {
            k: (v.shape, v.dtype) for k, v in given.numbers.items()
        }
        assert arrived.rest.keys() == given.rest.keys()
        assert torch.equal(arrived.rest["extra.count"], given.rest["extra.count"])


@every
def test_a_stack_of_clients_is_each_alone(transform: Transform) -> None:
    for dtype in (torch.float64, torch.float32):
        clients = [message(dtype, seed) for seed in range(4)]
        keys = torch.stack([draws.key(0, "test", i) for i in range(4)])
        stacked = Message({k: torch.stack([c.numbers[k] for c in clients]) for k in SHAPES}, {})
        together = torch.func.vmap(lambda m, key: passed(transform, m, key))(stacked, keys)
        for i, client in enumerate(clients):
            alone = passed(transform, client._replace(rest={}), keys[i])
            for k in SHAPES:
                if transform.name == "low_rank":  # products: their last bits depend on how many there are
                    near = 1e-5 if dtype == torch.float32 else 1e-12
                    torch.testing.assert_close(together.numbers[k][i], alone.numbers[k], rtol=0, atol=near)
                else:
                    assert torch.equal(together.numbers[k][i], alone.numbers[k])


@every
def test_other_keys_give_others_where_they_are_drawn(transform: Transform) -> None:
    given = message()
    first, again, other = (passed(transform, given, draws.key(0, "test", i)) for i in (0, 0, 1))
    same = [torch.equal(first.numbers[k], other.numbers[k]) for k in SHAPES]
    assert all(same) != transform.draws
    assert all(torch.equal(first.numbers[k], again.numbers[k]) for k in SHAPES)


@every
def test_what_is_not_finite_does_not_get_lost(transform: Transform) -> None:
    """The server is to refuse it, and whoever has sent it."""
    for value in (torch.nan, torch.inf, -torch.inf):
        given = message(torch.float32)
        given.numbers["delta.w"][3, 2] = value
        arrived = passed(transform, given).numbers["delta.w"]
        assert not arrived.isfinite().all()


@every
def test_nothing_but_zeros_stays_so(transform: Transform) -> None:
    zeros = Message({k: torch.zeros(v) for k, v in SHAPES.items()}, {})
    assert all((x == 0).all() for x in passed(transform, zeros).numbers.values())


@every
def test_the_bytes_are_those_of_the_message(transform: Transform) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given, way = message(dtype), Way([transform])
        assert transform.encode is not None
        assert transform.decode is not None
        sent = transform.encode(given, {}, KEY)
        layout = way.layout(given, [{}])
        data = codec.pack(sent, layout)
        assert len(data) == way.size(given, [{}])
        received = codec.unpack(data, layout)
        for part, other in zip(sent, received):
            assert part.keys() == other.keys()
            for k, v in part.items():
                assert torch.equal(v.to(other[k].dtype), other[k]), k
        arrived, expected = transform.decode(received, given, KEY), passed(transform, given)
        assert all(torch.equal(arrived.numbers[k], expected.numbers[k]) for k in SHAPES)


@every
def test_what_it_adds_has_no_name_that_is_taken(transform: Transform) -> None:
    taken = [
        f"{w}.{a}" for w in ("delta", "delta.w") for a in ("values", "indices", "levels", "scales", "left")
    ]
    given = message(torch.float64, 0, **{"delta.w": (6, 7)}, **dict.fromkeys(taken, (3,)))
    arrived = passed(transform, given)
    assert list(arrived.numbers) == list(given.numbers)
    assert set(arrived.rest) == set(given.rest)
    assert all(v.shape == given.numbers[k].shape for k, v in arrived.numbers.items())


# ---- top-k and random-k


@each("share", [0.01, 0.1, 0.33, 0.5, 0.99, 1.0])
def test_topk_is_its_equation(share: float) -> None:
    given = message()
    arrived = passed(T.topk(share), given).numbers
    for part in ("delta", "sums"):  # changes of the model, and of SCAFFOLD's controls, each by itself
        names = [k for k in SHAPES if k.startswith(part)]
        x, y = (np.concatenate([t[k].numpy().ravel() for k in names]) for t in (given.numbers, arrived))
        assert np.array_equal(y, plain.topk(x, share))
        assert np.count_nonzero(y) == plain.count(share, len(x))


@each("share", [0.01, 0.2, 0.5, 1.0])
def test_topk_of_each_tensor(share: float) -> None:
    given = message()
    for k, y in passed(T.topk(share, per="tensor"), given).numbers.items():
        if y.numel():
            x = given.numbers[k].numpy().ravel()
            assert np.array_equal(y.numpy().ravel(), plain.topk(x, share))


@each("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_topk_keeps_the_first_of_equal_entries(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 0.0, -2.0, 2.0, -0.0, 1.0], dtype=dtype)
    for k in range(1, 9):
        assert np.array_equal(
            arrives(T.topk(k / 8), x).double().numpy(), plain.topk(x.double().numpy(), k / 8)
        )


def test_topk_in_mixed_types() -> None:
    g = torch.Generator().manual_seed(0)
    given = Message(
        {"delta.a": torch.randn(50, generator=g).half(), "delta.b": torch.randn(50, generator=g)}, {}
    )
    arrived = passed(T.topk(0.3), given).numbers
    x, y = (np.concatenate([t[k].double().numpy() for k in given.numbers]) for t in (given.numbers, arrived))
    assert np.array_equal(y, plain.topk(x, 0.3))


def places(k: int, d: int, label: str = "delta") -> np.ndarray:
    """The places whose keys are the largest."""
    keys = draws.fold(draws.branch(KEY, label), torch.arange(d)).numpy()
    return np.sort(np.argsort(-keys)[:k])


@each("unbiased", [False, True])
def test_randk_is_its_equation(unbiased: bool) -> None:
    x = torch.randn(60, dtype=torch.float64)
    expected = plain.at(x.numpy(), places(12, 60), 5.0 if unbiased else 1.0)
    np.testing.assert_allclose(arrives(T.randk(0.2, unbiased=unbiased), x).numpy(), expected, rtol=1e-12)


def test_randk_draws_all_places_alike() -> None:
    """How often each place is sent in 4000 messages is within five deviations of 4000 k/d."""
    encode = torch.func.vmap(lambda key: arrives(T.randk(0.25), torch.ones(20), key))
    sent = encode(torch.stack([draws.key(0, "test", i) for i in range(4000)]))
    assert (sent.sum(1) == 5).all()
    assert ((sent.sum(0) - 1000).abs() < 5 * math.sqrt(4000 * 0.25 * 0.75)).all()


def test_share_of_everything_changes_no_bit() -> None:
    given = message()
    for transform in (T.topk(1.0), T.topk(1.0, per="tensor"), T.randk(1.0), T.randk(1.0, unbiased=True)):
        arrived = passed(transform, given)
        assert all(torch.equal(arrived.numbers[k], given.numbers[k]) for k in SHAPES)


# ---- quantization


@each(("bits", "bucket"), [(b, n) for b in range(1, 9) for n in (1, 7, 512)])
def test_quantize_is_its_equation(bits: int, bucket: int) -> None:
    x = torch.randn(40, dtype=torch.float64)
    x[21:28] = 0  # a bucket of its own for 7
    u = draws.uniforms(draws.branch(KEY, "delta.w"), 40).double().numpy()
    drawn = arrives(T.quantize(bits, bucket), x)
    np.testing.assert_allclose(drawn.numpy(), plain.quantize(x.numpy(), bits, bucket, u), atol=1e-12)
    nearest = arrives(T.quantize(bits, bucket, stochastic=False), x)
    np.testing.assert_allclose(nearest.numpy(), plain.quantize(x.numpy(), bits, bucket, None), atol=1e-12)


@each("bits", range(1, 9))
def test_levels_fit_their_bits_and_zero_stays(bits: int) -> None:
    transform = T.quantize(bits)
    assert transform.encode is not None
    x = torch.tensor([-1.0, 1.0, 0.3, 0.0, 1.0, -1.0])
    sent = transform.encode(vector(x), {}, KEY).rest["delta.w.levels"]
    assert sent.dtype == torch.uint8
    assert int(sent.max()) <= max(1, 2**bits - 2)
    arrived = arrives(transform, x)
    assert torch.equal(arrived[[0, 1, 4, 5]], x[[0, 1, 4, 5]])  # −s and s are levels
    assert bits == 1 or arrived[3] == 0


# ---- unbiased on average, and how far from what was meant


def sent_often(transform: Transform, x: Tensor, times: int = 4000) -> Tensor:
    keys = torch.stack([draws.key(0, "test", i) for i in range(times)])
    return torch.func.vmap(lambda key: arrives(transform, x, key))(keys)


@each(
    ("transform", "variance"),
    [
        (T.quantize(1), lambda x: x.abs().max() ** 2 - x**2),
        (T.quantize(2), lambda x: x.abs().max() ** 2 / 4),
        (T.quantize(3), lambda x: (x.abs().max() / 6) ** 2),
        (T.quantize(8), lambda x: (x.abs().max() / 254) ** 2),
        (T.randk(0.25, unbiased=True), lambda x: 3 * x**2),
    ],
    ids=["one bit", "two bits", "three bits", "eight bits", "randk"],
)
def test_unbiased(transform: Transform, variance) -> None:
    """Means of 4000 draws are within five of their deviations, whose bound is the paper's."""
    x = torch.randn(24, dtype=torch.float64)
    sent = sent_often(transform, x)
    bound = torch.as_tensor(variance(x)).expand_as(x)
    error = (sent.mean(0) - x).abs()
    assert (error <= 5 * (bound / 4000).sqrt() + 1e-9).all(), error / (bound / 4000).sqrt()
    assert float(((sent - x) ** 2).sum(1).mean()) <= 1.1 * float(bound.sum()) + 1e-12


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.floats(0.01, 1))
def test_topk_contracts(values: list[float], share: float) -> None:
    """‖x − C(x)‖² ≤ (1 − k/d) ‖x‖²."""
    x = torch.tensor(values, dtype=torch.float64)
    k = plain.count(share, len(x))
    lost, whole = float(((x - arrives(T.topk(share), x)) ** 2).sum()), float((x**2).sum())
    assert lost <= (1 - k / len(x)) * whole * (1 + 1e-9) + 1e-300


def test_randk_contracts_on_average() -> None:
    x = torch.randn(40, dtype=torch.float64)
    lost = ((x - sent_often(T.randk(0.25), x)) ** 2).sum(1) / (x**2).sum()
    assert float(lost.mean()) == pytest.approx(0.75, abs=5 * float(lost.std()) / math.sqrt(4000))


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60),
    st.integers(2, 8),
    st.sampled_from([1, 4, 512]),
)
def test_the_nearest_level_loses_no_more_than_there_is(values: list[float], bits: int, bucket: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    arrived = arrives(T.quantize(bits, bucket, stochastic=False), x)
    assert ((x - arrived).abs() <= x.abs() * (1 + 1e-12)).all()


# ---- low rank and 16 bits


@each(("rank", "iterations"), [(1, 1), (2, 1), (2, 2), (3, 4)])
def test_low_rank_is_its_equation(rank: int, iterations: int) -> None:
    m = torch.randn(12, 9, dtype=torch.float64)
    start = draws.normal(draws.places(draws.branch(KEY, "delta.w"), (9, rank))).double()
    expected = plain.low_rank(m.numpy(), start.numpy(), iterations)
    arrived = arrives(T.low_rank(rank, iterations), m)
    np.testing.assert_allclose(arrived.numpy(), expected, atol=1e-9)
    assert length({"": m - arrived}) <= length({"": m})


def test_low_rank_of_a_matrix_of_low_rank_is_all_of_it() -> None:
    for true in (1, 2):
        m = torch.randn(20, true, dtype=torch.float64) @ torch.randn(true, 15, dtype=torch.float64)
        torch.testing.assert_close(arrives(T.low_rank(2), m), m, atol=1e-12, rtol=0)


def test_more_iterations_come_nearer_to_the_best() -> None:
    m = torch.randn(40, 30, dtype=torch.float64) * torch.linspace(2, 0.2, 30, dtype=torch.float64)
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    best = length({"": m - u[:, :4] * s[:4] @ v[:4]})
    lost = [length({"": m - arrives(T.low_rank(4, i), m)}) for i in (1, 2, 20)]
    assert lost[0] > lost[1] > lost[2] >= best * (1 - 1e-12)
    assert lost[2] == pytest.approx(best, rel=1e-2)


def test_low_rank_leaves_what_would_not_get_smaller() -> None:
    """Vectors, and matrices for which r (n + m) numbers are no fewer: also where the rank is full."""
    given = message(torch.float64, 0, **{"delta.b": (5,), "delta.small": (3, 4), "delta.large": (30, 20)})
    full = passed(T.low_rank(20), given)
    assert all(torch.equal(full.numbers[k], v) for k, v in given.numbers.items())
    some = passed(T.low_rank(2), given)
    assert [torch.equal(some.numbers[k], v) for k, v in given.numbers.items()] == [True, True, False]


def test_low_rank_takes_a_kernel_as_a_matrix_of_its_first_axis() -> None:
    x = torch.randn(16, 4, 3, 3)
    key = draws.key(0, "test", 5)
    flat = arrives(T.low_rank(2), x.reshape(16, 36), key)
    assert torch.equal(arrives(T.low_rank(2), x, key), flat.reshape(x.shape))


def test_low_rank_of_very_large_and_very_small_entries() -> None:
    m = torch.outer(torch.randn(20), torch.randn(15))
    for scale in (1e-30, 1e15, 1e30):
        torch.testing.assert_close(arrives(T.low_rank(1), m * scale), m * scale, rtol=1e-4, atol=scale * 1e-5)


def test_half_is_the_nearest_number_of_its_type() -> None:
    x = torch.cat([torch.randn(500), torch.randn(100) * 1e-6, torch.tensor([1e6, -1e9, 65504.0, 65520.0])])
    with np.errstate(over="ignore"):
        expected = x.numpy().astype(np.float16).astype(np.float32)
    assert np.isinf(expected).sum() == 3  # which the server sets aside
    assert np.array_equal(arrives(T.half(), x).numpy(), expected)
    assert np.array_equal(arrives(T.half("bfloat16"), x).numpy(), plain.bfloat16(x.numpy()))
    small = x[:600]
    assert ((arrives(T.half(), small) - small).abs() <= small.abs() * 2**-11 + 2**-25).all()
    assert ((arrives(T.half("bfloat16"), small) - small).abs() <= small.abs() * 2**-8).all()


def test_half_leaves_sixteen_bits_as_they_are() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(50).to(dtype)
        for transform in (T.half(), T.half("bfloat16")):
            assert torch.equal(arrives(transform, x), x)


# ---- bytes


@each(
    ("transform", "size"),
    [
        (T.topk(0.01), 4 * 100 + (14 * 100 + 7) // 8),  # 14 bits say which of 10,000
        (T.randk(0.01), 4 * 100),
        (T.quantize(8), 10_000 + 4 * 20),
        (T.quantize(3, bucket=100), 3750 + 4 * 100),
        (T.quantize(1), 1250 + 4 * 20),
        (T.low_rank(2), 4 * 2 * 200),
        (T.half(), 20_000),
    ],
    ids=["topk", "randk", "eight bits", "three bits", "one bit", "low rank", "half"],
)
def test_bytes_by_hand(transform: Transform, size: int) -> None:
    assert Way([transform]).size(vector(torch.zeros(100, 100)), [{}]) == size


@each(
    ("chain", "size"),
    [
        ([T.topk(0.01), T.quantize(8)], 100 + 4 + 175),
        ([T.topk(0.01), T.half()], 200 + 175),
        ([T.low_rank(2), T.quantize(8)], 400 + 4 + 4),
        ([T.low_rank(2), T.topk(0.5)], 4 * 200 + (9 * 200) // 8),
        ([T.randk(0.01), T.quantize(8)], 104),
    ],
    ids=["topk, quantize", "topk, half", "low rank, quantize", "low rank, topk", "randk, quantize"],
)
def test_bytes_of_a_chain_by_hand(chain: list[Transform], size: int) -> None:
    assert Way(chain).size(vector(torch.zeros(100, 100)), [{}] * len(chain)) == size


# ---- refusals


@each(
    ("make", "field"),
    [
        (lambda: T.topk(0), "share"),
        (lambda: T.topk(1.1), "share"),
        (lambda: T.topk(per="layer"), "per"),
        (lambda: T.randk(0.1, unbiased=True, feedback=True), "feedback"),
        (lambda: T.quantize(0), "bits"),
        (lambda: T.quantize(9), "bits"),
        (lambda: T.quantize(8, bucket=0), "bucket"),
        (lambda: T.quantize(2, feedback=True), "feedback"),
        (lambda: T.quantize(1, stochastic=False, feedback=True), "feedback"),
        (lambda: T.low_rank(0), "rank"),
        (lambda: T.low_rank(2, 0), "iterations"),
        (lambda: T.half("float8"), "dtype"),
    ],
)
def test_wrong_options_are_refused(make, field: str) -> None:
    with pytest.raises(pt.Refused if hasattr(pt, "Refused") else ValueError) as caught:
        make()
    assert field in caught.value.field
