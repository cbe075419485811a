"""Each attack against its paper's definition in NumPy, on uploads made by hand."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita.attack.alie import _largest
from partita.core import draws, tree
from partita.core.parts import Attack
from partita.core.sound import faults
from partita.core.types import Upload
from partita.engine.screen import screen
from support import each

KEY = draws.key(0, "attack", 3)
BYZANTINE = (1, 4)
SIZES = (5.0, 7.0, 9.0, 0.0, 6.0, 8.0)  # client 3 has no data


def uploads(weight: tuple[float, ...] = SIZES, seed: int = 0, dtype: torch.dtype = torch.float64) -> Upload:
    """A matrix, a number, counters, and something extra from each client; zeros from one without data."""
    g, n = torch.Generator().manual_seed(seed), len(weight)
    there = torch.tensor(weight) > 0

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=g).to(dtype) * there.reshape(n, *[1] * len(shape))

    delta = {"w": draw(3, 2), "b": draw(), "count": torch.arange(n) * 10}
    return Upload(
        delta,
        torch.tensor(weight, dtype=torch.float64),
        {"c": draw(4)},
        {"loss": torch.rand(n, generator=g)},
        client=torch.arange(n) + 100,
    )


def forge(attack: Attack, given: Upload, byzantine: tuple[int, ...] = BYZANTINE, key: Tensor = KEY) -> Any:
    assert attack.forge is not None
    return attack.forge(given, byzantine, key)


def numbers(given: Upload) -> dict[str, np.ndarray]:
    return {k: x.numpy() for k, x in {**given.delta, **given.extra}.items() if x.is_floating_point()}


def assert_sends(sent: Upload, expected: dict[str, np.ndarray], weight: float, **tolerance: float) -> None:
    found = {**sent.delta, **sent.extra}
    for name, x in expected.items():
        np.testing.assert_allclose(found[name].numpy(), x, err_msg=name, **{"rtol": 1e-12, **tolerance})
    assert sent.weight is not None
    assert float(sent.weight) == weight


HONEST = [0, 2, 5]  # no Byzantine clients, nobody without data


# ---- the definitions


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sign_flip(scale: float) -> None:
    given = uploads()
    sent = forge(pt.attack.sign_flip(scale), given)
    assert set(sent) == set(BYZANTINE)
    for i in BYZANTINE:
        assert_sends(sent[i], {k: -scale * x[i] for k, x in numbers(given).items()}, SIZES[i])
        assert int(sent[i].delta["count"]) == 10 * i  # counters stay what they were


@each("z", [0.0, 0.7, None])
def test_alie(z: float | None) -> None:
    given = uploads()
    n, m = 5, 2
    s = n // 2 + 1 - m  # honest clients that must be further away than the Byzantine clients
    shift = max(0.0, NormalDist().inv_cdf((n - m - s) / (n - m))) if z is None else z
    sent = forge(pt.attack.alie(z), given)
    for i in BYZANTINE:
        expected = {k: x[HONEST].mean(0) - shift * x[HONEST].std(0) for k, x in numbers(given).items()}
        assert_sends(sent[i], expected, SIZES[i])
        assert int(sent[i].delta["count"]) == 0  # as an honest client


def test_the_shift_of_alie_is_the_papers() -> None:
    """Baruch et al., section 3.3: of 50 workers 24 corrupted, s = 2; n and m as in their experiments."""
    assert _largest(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert _largest(51, 12) == pytest.approx(NormalDist().inv_cdf(25 / 39))
    for n in range(2, 40):
        shifts = [_largest(n, m) for m in range(1, n + 1)]
        assert shifts == sorted(shifts)  # the more Byzantine clients, the more they dare
        assert shifts[0] >= 0
        assert shifts[-1] == 3.0  # nobody left who would notice


@each("epsilon", [0.1, 0.5, 10.0])
def test_ipm(epsilon: float) -> None:
    given = uploads()
    sent = forge(pt.attack.ipm(epsilon), given)
    for i in BYZANTINE:
        expected = {k: -epsilon * x[HONEST].mean(0) for k, x in numbers(given).items()}
        assert_sends(sent[i], expected, SIZES[i])


@each("seed", range(8))
def test_mimic(seed: int) -> None:
    given = uploads(seed=seed)
    rows = np.concatenate([x[HONEST].reshape(len(HONEST), -1) for x in numbers(given).values()], 1)
    centred = rows - rows.mean(0)
    z = np.linalg.svd(centred)[2][0]
    chosen = HONEST[int(np.abs(centred @ z).argmax())]
    sent = forge(pt.attack.mimic(), given)
    for i in BYZANTINE:
        assert_sends(sent[i], {k: x[chosen] for k, x in numbers(given).items()}, SIZES[i])
        assert int(sent[i].delta["count"]) == 10 * chosen


def test_mimic_breaks_ties_by_order_not_by_rounding() -> None:
    """Two honest clients are equally far from their mean."""
    for seed in range(20):
        given = uploads((5.0, 7.0, 9.0), seed=seed)
        found = forge(pt.attack.mimic(), given, byzantine=(1,))
        assert_sends(found[1], {k: x[0] for k, x in numbers(given).items()}, 7.0)


def test_gaussian_has_its_mean_and_deviation() -> None:
    n, size = 3, 40_000
    given = Upload(
        {"w": torch.zeros(n, 200, 200)}, torch.ones(n, dtype=torch.float64), {"c": torch.zeros(n, 9)}
    )
    sent = forge(pt.attack.gaussian(2.0), given, (0, 2))
    for i in (0, 2):
        x = sent[i].delta["w"].double().numpy().ravel()
        assert abs(x.mean()) < 5 * 2.0 / size**0.5
        assert x.std() == pytest.approx(2.0, rel=0.02)
        within = [np.mean(np.abs(x) < 2.0 * k) for k in (1, 2, 3)]
        assert within == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.01)
    a, b = (sent[i].delta["w"].numpy().ravel() for i in (0, 2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03  # each has noise of its own
    first = sent[0].delta["w"].ravel()[:9]
    assert not torch.equal(first, sent[0].extra["c"])  # and each tensor


@each("word", ["nan", "inf", "-inf"])
def test_nonfinite(word: str) -> None:
    sent = forge(pt.attack.nonfinite(word), uploads())
    for i in BYZANTINE:
        expected = {"w": (3, 2), "b": (), "c": (4,)}
        assert_sends(sent[i], {k: np.full(shape, float(word)) for k, shape in expected.items()}, SIZES[i])
        assert int(sent[i].delta["count"]) == 10 * i


REASONS = {
    "names": "without w",
    "shape": "w of shape [7], not [3, 2]",
    "broadcast": "w of shape [1], not [3, 2]",
    "weight": "weight -1",
    "greed": "weight 1e+15",
}


@each("how", REASONS)
def test_malformed(how: str) -> None:
    given = uploads()
    sent = forge(pt.attack.malformed(how), given)
    arrived, why = screen(given, [""] * 6, sent)
    assert why == ["", REASONS[how], "", "", REASONS[how], ""]
    assert arrived is given


@each("how", ["names", "shape", "broadcast"])
@each("shape", [(), (1,), (1, 1), (4,)])
def test_malformed_whatever_the_shape(how: str, shape: tuple[int, ...]) -> None:
    given = Upload({"empty": torch.zeros(3, 0), "w": torch.ones(3, *shape)}, torch.ones(3))
    _, why = screen(given, [""] * 3, forge(pt.attack.malformed(how), given, (1,)))
    assert why[0] == why[2] == ""
    assert "w" in why[1]


@each("how", ["names", "shape", "broadcast"])
def test_nothing_sent_cannot_be_malformed(how: str) -> None:
    given = Upload({}, torch.ones(3))
    assert screen(given, [""] * 3, forge(pt.attack.malformed(how), given, (1,)))[1] == [""] * 3


# ---- labels


def poisoned(y: Any, classes: int) -> Tensor:
    attack = pt.attack.label_flip()
    assert attack.poison is not None
    assert attack.forge is None
    x = torch.zeros(len(y), 2)
    same, found = attack.poison(x, y, classes)
    assert same is x
    assert found.dtype == y.dtype
    return found


def test_label_flip_of_classes() -> None:
    y = torch.tensor([0, 1, 4, 9])
    assert poisoned(y, 10).tolist() == [9, 8, 5, 0]
    assert poisoned(y.to(torch.uint8), 10).tolist() == [9, 8, 5, 0]
    assert poisoned(torch.tensor([0, 1]), 2).tolist() == [1, 0]


def test_label_flip_of_sequences_leaves_what_does_not_count() -> None:
    y = torch.tensor([[0, 3, -100], [-100, 2, -100]])
    assert poisoned(y, 4).tolist() == [[3, 0, -100], [-100, 1, -100]]


def test_label_flip_of_numbers() -> None:
    assert poisoned(torch.tensor([[1.5], [-2.0]]), 0).tolist() == [[-1.5], [2.0]]
    assert poisoned(torch.tensor([1.0, 0.0, 1.0]), 0).tolist() == [0.0, 1.0, 0.0]  # yes or no


def test_label_flip_changes_training_samples_of_byzantine_clients_only() -> None:
    x, y = torch.arange(12.0).reshape(12, 1), torch.arange(12) % 3
    shared = pt.data.FederatedData.make(x, y, [[0, 4], [0, 4], [4, 4]], [[8, 2], [8, 2], [10, 2]])
    poison = pt.attack.label_flip().poison
    assert poison is not None
    found = shared.altered((1,), poison)
    assert torch.equal(found.client(1)[1], 2 - shared.client(1)[1])
    assert torch.equal(found.client(1)[0], shared.client(1)[0])
    for i, split in ((0, "train"), (2, "train"), (0, "test"), (1, "test"), (2, "test")):
        for a, b in zip(found.client(i, split), shared.client(i, split)):
            assert torch.equal(a, b)


# ---- all of them

EVERY = {
    "sign_flip": pt.attack.sign_flip(),
    "alie": pt.attack.alie(),
    "ipm": pt.attack.ipm(),
    "mimic": pt.attack.mimic(),
    "gaussian": pt.attack.gaussian(),
    "nonfinite": pt.attack.nonfinite(),
    "malformed": pt.attack.malformed(),
}
every_attack = each("attack", EVERY.values(), ids=EVERY)


def test_no_attack_is_forgotten() -> None:
    assert {*EVERY, "label_flip"} == set(pt.attack.__all__)
    assert all(EVERY[name].name == name for name in EVERY)


@every_attack
def test_honest_uploads_stay_untouched(attack: Attack) -> None:
    given, before = uploads(), uploads()
    sent = forge(attack, given)
    arrived, _ = screen(given, [""] * 6, sent)
    for upload in (given, arrived):
        rows = [0, 2, 3, 5] if upload is arrived else list(range(6))
        for part, old in ((upload.delta, before.delta), (upload.extra, before.extra)):
            assert all(torch.equal(part[k][rows], x[rows]) for k, x in old.items())
        assert upload.weight is not None
        assert before.weight is not None
        assert torch.equal(upload.weight[rows], before.weight[rows])


@every_attack
def test_what_is_sent_depends_on_the_key_and_the_uploads_only(attack: Attack) -> None:
    torch.manual_seed(1)
    first = forge(attack, uploads())
    torch.manual_seed(2)
    again, other = forge(attack, uploads()), forge(attack, uploads(), key=draws.key(0, "attack", 4))
    for i in BYZANTINE:
        for k, x in first[i].delta.items():
            torch.testing.assert_close(x, again[i].delta[k], rtol=0, atol=0, equal_nan=True)
    same = torch.equal(first[1].delta["b"].nan_to_num(), other[1].delta["b"].nan_to_num())
    assert same == (attack.name != "gaussian")


@every_attack
def test_the_order_of_the_cohort_does_not_matter(attack: Attack) -> None:
    given = uploads()
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    turned = tree.rows(given, order)
    straight, back = (
        forge(attack, given),
        forge(attack, turned, tuple(order.argsort()[list(BYZANTINE)].tolist())),
    )
    for i in BYZANTINE:
        there = back[int(order.argsort()[i])]
        for k, x in straight[i].delta.items():
            if x.is_floating_point():
                torch.testing.assert_close(x, there.delta[k], equal_nan=True, msg=k)


@every_attack
def test_clients_without_data_do_not_count_as_honest(attack: Attack) -> None:
    """With them or without, Byzantine clients send the same."""
    given = uploads()
    fewer = tree.rows(given, [0, 1, 2, 4, 5])
    straight, found = forge(attack, given), forge(attack, fewer, (1, 3))
    for i, j in ((1, 1), (4, 3)):
        for k, x in straight[i].delta.items():
            torch.testing.assert_close(x, found[j].delta[k], rtol=0, atol=0, equal_nan=True)


@every_attack
@each("value", [float("nan"), float("inf"), 1e200])
def test_an_honest_client_that_diverged_does_not_count_either(attack: Attack, value: float) -> None:
    given = uploads()
    given.delta["w"][5, 1, 1] = value
    straight, found = forge(attack, tree.rows(given, [0, 1, 2, 3, 4])), forge(attack, given)
    for i in BYZANTINE:
        for k, x in straight[i].delta.items():
            torch.testing.assert_close(x, found[i].delta[k], rtol=0, atol=0, equal_nan=True)


@every_attack
@each("value", [1.0, float("nan")])
def test_a_cohort_of_byzantine_clients_only(attack: Attack, value: float) -> None:
    given = uploads((5.0, 7.0))
    given.delta["w"][0, 0, 0] *= value
    sent = forge(attack, given, (0, 1))
    assert set(sent) == {0, 1}
    _, why = screen(given, faults(given, (), 2), sent)
    assert len(why) == 2


@every_attack
@each("dtype", [torch.float32, torch.float64])
def test_types_stay(attack: Attack, dtype: torch.dtype) -> None:
    given = uploads(dtype=dtype)
    if attack.name != "malformed":
        for i in BYZANTINE:
            found = forge(attack, given)[i]
            assert {k: x.dtype for k, x in found.delta.items()} == {
                k: x.dtype for k, x in given.delta.items()
            }
            assert {k: x.shape for k, x in found.delta.items()} == {
                k: x.shape[1:] for k, x in given.delta.items()
            }
