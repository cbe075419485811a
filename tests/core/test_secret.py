"""Numbers of a keyed hash: their distribution, and that each is a function of the secret and of its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from partita.core import draws
from partita.core.check import Refused
from partita.core.secret import Secret, seed_of

SECRET = Secret(3**160)


def test_they_are_normal() -> None:
    drawn = SECRET.normal64("release delta.w", (3, 0), (1000, 501))
    assert drawn.dtype == torch.float64
    assert drawn.shape == (1000, 501)
    x = drawn.numpy().reshape(-1)
    assert abs(x.mean()) < 4 / np.sqrt(x.size)
    assert x.var() == pytest.approx(1, abs=4 * np.sqrt(2 / x.size))
    assert stats.kstest(x, "norm").pvalue > 0.01
    assert 4.5 < np.abs(x).max() < 6
    half = x.size // 2  # pairs have the same radius
    assert abs(np.corrcoef(x[:half], x[half : 2 * half])[0, 1]) < 4 / np.sqrt(half)
    assert abs(np.corrcoef(x[:half] ** 2, x[half : 2 * half] ** 2)[0, 1]) < 4 / np.sqrt(half)


def test_they_are_a_function_of_the_secret_and_of_their_place() -> None:
    given = ("release w", (3, 0), (7,))
    drawn = SECRET.normal64(*given)
    assert torch.equal(drawn, Secret(3**160).normal64(*given))
    others = [
        Secret(3**160 + 1).normal64(*given),
        SECRET.normal64("release v", (3, 0), (7,)),
        SECRET.normal64("release w", (4, 0), (7,)),
        SECRET.normal64("release w", (3, 1), (7,)),
        SECRET.normal64("release ", (3, 0), (7,)),
    ]
    assert not any((drawn == other).any() for other in others)
    assert SECRET.normal64("release w", (3, 0), ()).shape == ()
    assert SECRET.normal64("release w", (3, 0), (0, 4)).shape == (0, 4)


def test_keys_and_generators_of_a_secret_are_of_the_hash() -> None:
    seed, low = 5, Secret(5)
    assert draws.number(seed, "cohort", 1) != draws.number(low, "cohort", 1)
    assert 0 < draws.number(low, "cohort", 1) < 1
    assert draws.generator(low, "poisson", 1).random() == draws.generator(low, "poisson", 1).random()
    found = {draws.generator(s, "poisson", r).random() for s in (seed, low, SECRET) for r in (1, 2)}
    assert len(found) == 6
    assert draws.key(SECRET, "release", 1, 0) != draws.key(SECRET, "release", 2, 0)


def test_a_number_of_few_bits_is_a_seed() -> None:
    assert not isinstance(seed_of(2**63 - 1), Secret)
    assert isinstance(seed_of(2**63), Secret)
    for number in (-1, 2**256):
        with pytest.raises(Refused) as refused:
            seed_of(number)
        assert refused.value.field == "secret"
