"""Random numbers as functions of keys: the right bits, the right distribution, whoever else draws."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from partita.core import draws
from support import each

FULL = (1 << 64) - 1
INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood (2014): the next output of the generator in this state, as a signed integer."""
    z = (state + 0x9E3779B97F4A7C15) & FULL
    z = ((z ^ (z >> 30)) * MIX1) & FULL
    z = ((z ^ (z >> 27)) * MIX2) & FULL
    return signed(z ^ (z >> 31))


def state_for(output: int) -> int:
    """The state whose output this is: every step of SplitMix64 can be undone."""
    z = undo_shift(output & FULL, 31)
    z = undo_shift((z * pow(MIX2, -1, 1 << 64)) & FULL, 27)
    z = undo_shift((z * pow(MIX1, -1, 1 << 64)) & FULL, 30)
    return signed((z - 0x9E3779B97F4A7C15) & FULL)


def undo_shift(z: int, by: int) -> int:
    x = z
    for _ in range(64 // by):
        x = z ^ (x >> by)
    return x


def signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def keys(n: int) -> Tensor:
    return draws.key(0, "test", torch.arange(n))


def test_first_output_of_seed_zero() -> None:
    assert draws.bits(torch.tensor(0)).item() == signed(0xE220A8397B1DCDAF)


@given(INT64)
def test_bits_are_splitmix64(state: int) -> None:
    assert draws.bits(torch.tensor(state)).item() == splitmix64(state)
    assert state_for(splitmix64(state)) == state


@given(INT64, INT64)
def test_fold(key: int, part: int) -> None:
    expected = splitmix64(signed((key * 0x9E3779B1 + part) & FULL))
    assert draws.fold(torch.tensor(key), torch.tensor(part)).item() == expected


def test_every_bit_is_fair() -> None:
    n = 20_000
    found = draws.bits(torch.arange(n))
    share = torch.stack([(found >> i) & 1 for i in range(64)]).double().mean(1)
    assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(n)
    assert len(found.unique()) == n


def test_uniform_moments() -> None:
    n = 100_000
    u = draws.uniform(keys(n)).double()
    assert u.dtype == torch.float64
    assert draws.uniform(keys(1)).dtype == torch.float32
    assert abs(u.mean().item() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var().item() - 1 / 12) < 0.002
    counts = torch.histc(u, bins=50, min=0, max=1)
    assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 100  # chi-square with 49 degrees: 1 in 50,000
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(n)


@each("output", [0, FULL, FULL ^ ((1 << 40) - 1)])
def test_uniform_never_reaches_its_ends(output: int) -> None:
    key = torch.tensor(state_for(output))
    assert draws.bits(key).item() == signed(output)
    assert 0.0 < draws.uniform(key).item() < 1.0


def test_normal_moments() -> None:
    n = 100_000
    x = draws.normal(keys(n)).double()
    assert torch.isfinite(x).all()
    assert abs(x.mean().item()) < 5 / math.sqrt(n)
    assert abs(x.var().item() - 1) < 0.03
    assert abs((x**3).mean().item()) < 0.06
    assert abs((x**4).mean().item() - 3) < 0.2
    assert abs((x.abs() < 1).double().mean().item() - 0.6827) < 0.01
    assert draws.normal(keys(1)).dtype == torch.float32


def test_normal64_has_the_tails() -> None:
    """Beyond 5, where a float32 of 23 bits ends at 5.8, there are as many numbers as there should be."""
    x = draws.normal64(keys(4_000_000))
    assert x.dtype == torch.float64
    assert abs(x.mean().item()) < 0.002
    assert abs(x.var().item() - 1) < 0.003
    for bound in (2.0, 3.0, 4.0):
        share = (x.abs() > bound).double().mean().item()
        assert share == pytest.approx(math.erfc(bound / math.sqrt(2)), rel=0.2)
    assert 4.5 < x.abs().max() < 8.6
    smallest = torch.tensor([-(1 << 63)])  # whatever the bits, no number is infinite
    assert draws.normal64(smallest).isfinite().all()


@each("draw", [draws.bits, draws.uniform, draws.normal, draws.normal64])
def test_a_draw_does_not_depend_on_its_neighbours(draw) -> None:
    k = keys(24)
    alone = torch.stack([draw(one) for one in k])
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(k), alone)
    assert torch.equal(draw(k[shuffled]), alone[shuffled])
    assert torch.equal(draw(k.view(2, 3, 4)), alone.view(2, 3, 4))
    assert torch.equal(torch.func.vmap(draw)(k), alone)


def test_key_broadcasts_over_its_parts() -> None:
    grid = draws.key(3, "p", torch.arange(4)[:, None], torch.arange(5))
    assert grid.shape == (4, 5)
    assert grid.dtype == torch.int64
    assert grid[2, 3] == draws.key(3, "p", 2, 3)
    assert len(grid.unique()) == 20


def test_key_depends_on_seed_purpose_parts_and_their_order() -> None:
    made = [
        draws.key(0, "p", 1, 2),
        draws.key(1, "p", 1, 2),
        draws.key(0, "q", 1, 2),
        draws.key(0, "p", 2, 1),
        draws.key(0, "p", 1, 3),
        draws.key(0, "p", 1),
        draws.key(0, "p", 1, 2, 0),
    ]
    assert len({k.item() for k in made}) == len(made)
    assert draws.key(0, "p", 1, 2).item() == made[0].item()


@given(st.integers(0, 2**63 - 1), st.text(max_size=20), st.lists(INT64, max_size=3))
def test_a_key_of_whole_numbers_is_that_of_tensors(seed: int, purpose: str, parts: list[int]) -> None:
    k = torch.tensor(zlib.crc32(purpose.encode()))
    for part in (seed, *parts):
        k = draws.fold(k, torch.tensor(part))
    assert draws.key(seed, purpose, *parts).item() == k.item()
    assert draws.key(seed, purpose, *map(torch.tensor, parts)).item() == k.item()


# ---- numbers on the host


@given(st.integers(0, 2**63 - 1), st.text(max_size=20), st.lists(st.integers(0, 2**63 - 1), max_size=3))
def test_a_number_has_the_bits_of_its_key(seed: int, purpose: str, parts: list[int]) -> None:
    found = draws.number(seed, purpose, *parts)
    key = draws.key(seed, purpose, *parts)
    high = (draws.bits(key).item() & FULL) >> 12
    assert found == (high + 0.5) / 2**52
    assert abs(found - draws.uniform(key).item()) <= 2.0**-23  # the same number, with more bits


@each("output", [0, FULL, FULL ^ ((1 << 40) - 1)])
def test_a_number_never_reaches_its_ends(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_mixed", lambda _: output)
    assert 0.0 < draws.number(0, "x") < 1.0
    assert int(draws.number(0, "x") * 1000) in range(1000)


def test_numbers_are_uniform() -> None:
    n = 20_000
    found = np.array([draws.number(0, "x", i // 100, i % 100) for i in range(n)])
    assert stats.kstest(found, stats.uniform.cdf).pvalue > 1e-3
    assert len(set(found)) == n
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / math.sqrt(n)


def test_a_number_depends_on_seed_purpose_parts_and_their_order() -> None:
    made = [(0, "p", 1, 2), (1, "p", 1, 2), (0, "q", 1, 2), (0, "p", 2, 1), (0, "p", 1), (0, "p", 1, 2, 0)]
    assert len({draws.number(*m) for m in made}) == len(made)
    assert draws.number(*made[0]) == draws.number(*made[0])


def test_generator_depends_on_seed_purpose_and_parts_alone() -> None:
    def first(*args) -> tuple[int, ...]:
        return tuple(draws.generator(*args).integers(0, 2**62, 3).tolist())

    expected = first(0, "cohort", 5)
    np.random.seed(0)
    draws.generator(0, "cohort", 5).random(100)
    assert first(0, "cohort", 5) == expected
    others = [(1, "cohort", 5), (0, "partition", 5), (0, "cohort", 6), (0, "cohort"), (0, "cohort", 5, 1)]
    assert len({expected, *(first(*o) for o in others)}) == 1 + len(others)


def test_draws_leave_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    draws.normal(keys(10))
    draws.generator(0, "x").random()
    assert torch.equal(torch.get_rng_state(), before)


@each("parts", [(), (3,), (np.arange(5),), (7, np.array([0, -1, 2**62])), (np.arange(3), 4)])
def test_keys_of_the_host_are_those_of_a_device(parts: tuple) -> None:
    on_device = [torch.as_tensor(p) if isinstance(p, np.ndarray) else p for p in parts]
    expected = draws.key(5, "batches", *on_device).reshape(-1)
    assert draws.keys(5, "batches", *parts).tolist() == expected.tolist()


def test_several_numbers_of_one_key() -> None:
    """Uniform, none alike, and as many as asked for: more do not change those before them."""
    key = draws.key(0, "test")
    many = draws.uniforms(key, 20_001)
    assert many.shape == (20_001,)
    assert many.dtype == torch.float32
    assert torch.equal(draws.uniforms(key, 7), many[:7])
    assert 0 < float(many.min()) < float(many.max()) < 1
    assert stats.kstest(many.double().numpy(), "uniform").pvalue > 1e-3
    even, odd = many[0::2][:10_000].double().numpy(), many[1::2].double().numpy()
    assert abs(np.corrcoef(even, odd)[0, 1]) < 5 / math.sqrt(10_000)
    assert len(draws.uniforms(key, 0)) == 0
    both = torch.func.vmap(lambda k: draws.uniforms(k, 5))(torch.stack([key, key + 1]))
    assert torch.equal(both[1], draws.uniforms(key + 1, 5))
