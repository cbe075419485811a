"""Who took part: the figures against scipy and plain loops, and runs that tell or do not tell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import partita as pt
from partita.data import FederatedData
from partita.privacy.membership import (
    advantage,
    auc,
    auc_interval,
    calibrated,
    decided,
    halves,
    most_true_positives,
    ratios,
    true_positives,
)
from partita.recipes.membership import Membership
from support import each

rng = np.random.default_rng(0)
QUIET: dict[str, Any] = {"baselines": False, "progress": False}


def clients(count: int, samples: int = 4, features: int = 20, seed: int = 0) -> FederatedData:
    """Clients with few samples whose labels are chance: nothing to learn but the samples themselves."""
    g = torch.Generator().manual_seed(seed)
    n = count * (samples + 1)
    x, y = torch.randn(n, features, generator=g), torch.randint(0, 2, (n,), generator=g)
    return pt.data.from_arrays(x, y, np.repeat(np.arange(count), samples + 1), test=1 / (samples + 1))


def model(features: int = 20) -> nn.Module:
    return pt.models.mlp(features, 16, 2, seed=0)


def cross_entropy(run: pt.Run, x: Any, y: Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(run.model()(x), y))


# ---- figures


def test_the_ratio_is_that_of_two_normal_distributions() -> None:
    score, inside, outside = rng.normal(size=7), rng.normal(1, 2, (5, 7)), rng.normal(size=(6, 7))
    s_in, s_out = (math.sqrt(((x - x.mean(0)) ** 2).sum() / ((len(x) - 1) * 7)) for x in (inside, outside))
    expected = stats.norm.logpdf(score, inside.mean(0), s_in) - stats.norm.logpdf(
        score, outside.mean(0), s_out
    )
    np.testing.assert_allclose(ratios(score, inside, outside), expected, rtol=1e-12)
    np.testing.assert_allclose(calibrated(score, outside), score - outside.mean(0), rtol=1e-12)


def test_equal_scores_say_nothing() -> None:
    same = np.tile(rng.normal(size=7), (4, 1)) * (1 + 1e-16)
    assert not ratios(same[0], same, same).any()
    assert not calibrated(same[0], same).any()


@each("step", [0.1, 1.0])  # with ties, and with many
def test_the_area_is_the_share_of_pairs(step: float) -> None:
    a, b = (np.round(x / step) * step for x in (rng.normal(0.5, 1, 13), rng.normal(0, 1, 8)))
    pairs = [(x > y) + (x == y) / 2 for x in a for y in b]
    assert auc(a, b).value == pytest.approx(np.mean(pairs), rel=1e-12)
    assert auc(a, b).value == pytest.approx(stats.mannwhitneyu(a, b).statistic / (13 * 8), rel=1e-12)


def test_the_interval_of_an_area_covers() -> None:
    """Of 400 draws of 15 and 15 clients, about 95 % of the intervals have the true area within."""
    draws, true = np.random.default_rng(1), stats.norm.cdf(1 / math.sqrt(2))
    areas = [auc(draws.normal(1, 1, 15), draws.normal(0, 1, 15)) for _ in range(400)]
    assert 0.92 <= np.mean([a.low <= true <= a.high for a in areas]) <= 0.985
    assert np.mean([a.low for a in areas]) < 0.65 < 0.85 < np.mean([a.high for a in areas])


def test_a_perfect_test_of_few_clients_has_an_interval() -> None:
    low, high = auc_interval(1.0, 5, 5)
    assert high == 1.0
    assert 0.5 < low < 0.9
    assert auc_interval(1.0, 500, 500)[0] > 0.98


def test_shares_found_at_a_share_of_false_ones() -> None:
    members, others = np.array([5.0, 3.0, 2.5, 1.0]), np.arange(10) / 4  # others up to 2.25
    assert true_positives(members, others, 0.1) == 0.75  # above 2.0, the second of the others
    assert true_positives(members, others, 0.5) == 0.75
    assert true_positives(members, others, 1.0) == 1.0
    assert true_positives(members, others, 0.05) is None  # ten clients cannot show it
    a, b = rng.normal(1, 1, 50), rng.normal(0, 1, 100)
    best = max((a > t).mean() for t in (*b, -np.inf) if (b > t).mean() <= 0.1)
    assert true_positives(a, b, 0.1) == best


def test_the_advantage_knows_nothing_of_equal_clients() -> None:
    same = np.zeros(6)
    found = advantage(same, np.zeros(4))
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.low < 0 < found.high
    assert advantage(same + 1, np.zeros(4)).value == 1.0
    assert advantage(np.array([4.0, 1]), np.array([3.0, 0])).value == pytest.approx(0.0)
    draws = np.random.default_rng(2)
    mean = np.mean([advantage(draws.normal(size=9), draws.normal(size=12)).value for _ in range(2000)])
    assert abs(mean) < 0.02  # a threshold that was chosen by the answer would have about 0.3


def test_the_bound_is_that_of_differential_privacy() -> None:
    for epsilon, delta in ((0.5, 0.0), (2.0, 1e-5)):
        for fpr in (0.0, 0.01, 0.1, 0.6):
            tpr = most_true_positives(fpr, epsilon, delta)
            assert tpr <= math.exp(epsilon) * fpr + delta + 1e-12
            assert 1 - fpr <= math.exp(epsilon) * (1 - tpr) + delta + 1e-12
    assert most_true_positives(0.1, 1e6) == 1.0
    assert most_true_positives(0.1, 0.0) == pytest.approx(0.1)
    # the Gaussian mechanism with sensitivity 1 and deviation 1 keeps to the bound of its δ(ε)
    delta = stats.norm.cdf(0.5 - 1.0) - math.e * stats.norm.cdf(-0.5 - 1.0)
    for t in np.linspace(-3, 3, 31):
        assert stats.norm.sf(t - 1) <= most_true_positives(stats.norm.sf(t), 1.0, delta) + 1e-9


def test_everyone_is_in_half_of_the_runs_and_of_the_shadows() -> None:
    member = halves(9, 8, seed=3)
    assert (member.sum(0) == 4).all()
    assert set(member.sum(1)) == {4, 5}
    assert (halves(9, 8, seed=3) == member).all()
    assert (halves(9, 8, seed=4) != member).any()


def test_each_run_is_attacked_with_the_shadows_of_other_pairs() -> None:
    score, member = rng.normal(size=(6, 5)), halves(5, 6, seed=0)
    found = decided(score, member)
    for r in range(6):
        others = [k for k in range(6) if k not in (r, r ^ 1)]
        for i in range(5):
            out = [score[k, i] for k in others if not member[k, i]]
            assert len(out) == 2
            assert found["calibrated"][r, i] == pytest.approx(score[r, i] - np.mean(out), rel=1e-9)
        inside, outside = (
            np.stack([[score[k, i] for k in others if member[k, i] == there] for i in range(5)], 1)
            for there in (True, False)
        )
        np.testing.assert_allclose(found["ratio"][r], ratios(score[r], inside, outside), rtol=1e-12)


def test_shadows_do_not_tell_who_is_a_member() -> None:
    """Scores that are chance: were a run's own pair among its shadows, the ratio would be below 0.5."""
    draws, areas = np.random.default_rng(5), []
    for trial in range(60):
        member = halves(20, 6, seed=trial)
        ratio = decided(draws.normal(size=(6, 20)), member)["ratio"]
        areas.append(auc(ratio[member], ratio[~member]).value)
    assert abs(np.mean(areas) - 0.5) < 0.025


# ---- the measure


def measured(lr: float, rounds: int, **settings: Any) -> dict[str, float]:
    run = pt.federate(
        model(), clients(40), pt.fedavg(lr=lr), rounds=rounds, steps=10, newcomers=0.5,
        measures=[pt.measures.membership()], seed=1, **QUIET, **settings,
    )  # fmt: skip
    found: dict[str, float] = run.metrics[-1]["measures"]["membership"]
    return found


@each("executor", ["loop", "vmap"])
def test_a_model_that_overfits_tells_its_clients(executor: str) -> None:
    found = measured(0.5, 10, executor=executor)
    assert found["auc"] > 0.8
    assert found["auc_low"] > 0.6
    assert found["advantage"] > 0.3
    assert found["tpr_at_10"] > 0.2
    assert "tpr_at_1" not in found  # twenty held-out clients cannot show it
    assert found["member_loss"] < found["newcomer_loss"]


def test_executors_find_the_same() -> None:
    assert measured(0.5, 4, executor="loop") == pytest.approx(measured(0.5, 4, executor="vmap"), rel=1e-4)


def test_a_model_that_learned_nothing_tells_nothing() -> None:
    found = measured(1e-12, 1)
    assert found["auc_low"] < 0.5 < found["auc_high"]


def test_the_measure_is_the_loss_of_the_servers_model() -> None:
    data = clients(12)
    run = pt.federate(
        model(), data, pt.fedavg(lr=0.3), rounds=3, steps=5, newcomers=[0, 5, 7], cohort=4,
        measures=[pt.measures.membership()], **QUIET,
    )  # fmt: skip
    loss = []
    for i in range(12):
        x, y = data.client(i)
        loss.append(cross_entropy(run, x, y))
    out = np.isin(np.arange(12), [0, 5, 7])
    found = run.metrics[-1]["measures"]["membership"]
    expected = auc(-np.array(loss)[~out], -np.array(loss)[out])
    assert found["newcomer_loss"] == pytest.approx(np.mean(np.array(loss)[out]), rel=1e-5)
    assert found["member_loss"] == pytest.approx(np.mean(np.array(loss)[~out]), rel=1e-5)
    assert (found["auc"], found["auc_low"]) == pytest.approx((expected.value, expected.low))


def test_nothing_is_found_where_nothing_is_sent() -> None:
    run = pt.federate(
        model(), clients(8), pt.local(lr=0.1), rounds=1, newcomers=0.5,
        measures=[pt.measures.membership()], **QUIET,
    )  # fmt: skip
    assert run.metrics[-1]["measures"] == {"membership": {}}


def test_runs_that_cannot_be_tested_are_refused() -> None:
    given: dict[str, Any] = {"rounds": 1, "measures": [pt.measures.membership()], **QUIET}
    with pytest.raises(pt.Refused, match="newcomers=0: members are compared with clients that took no part"):
        pt.federate(model(), clients(8), pt.fedavg(lr=0.1), **given)
    with pytest.raises(pt.Refused, match="clients of fedalt keep a part of the model"):
        pt.federate(model(), clients(8), pt.fedalt("output", lr=0.1), newcomers=0.5, **given)


# ---- shadow runs


@pytest.fixture(scope="module")
def overfit() -> Membership:
    return pt.membership(
        model(), clients(24), pt.fedavg(lr=0.3), rounds=8, steps=10, runs=6, seed=1, progress=False
    )


def test_shadow_runs_tell_more(overfit: Membership) -> None:
    assert overfit.auc("loss").value > 0.6
    assert overfit.auc("ratio").value > 0.85
    assert overfit.auc("ratio").low > 0.6
    assert overfit.advantage("ratio") > 0.5
    assert overfit.true_positives(0.1) > overfit.true_positives(0.1, "loss")  # type: ignore[operator]
    assert [row["test"] for row in overfit.table()] == ["loss", "calibrated", "ratio"]
    assert "ratio" in str(overfit)
    assert "epsilon" not in str(overfit)


def test_scores_are_the_losses_of_the_released_models(overfit: Membership) -> None:
    """The same runs by hand: who took part by `halves`, and a loop over clients."""
    data = clients(24)
    member = halves(24, 6, seed=1)
    assert (overfit.member == member).all()
    for r in (0, 3):
        own = data.subset(np.flatnonzero(member[r]).tolist())
        run = pt.federate(model(), own, pt.fedavg(lr=0.3), rounds=8, steps=10, seed=1 + r, **QUIET)
        for i in (0, 11, 23):
            x, y = data.client(i)
            loss = cross_entropy(run, x, y)
            assert -overfit.score[r, i] == pytest.approx(loss, rel=1e-3)


def test_runs_alone_are_those_together(overfit: Membership) -> None:
    alone = pt.membership(
        model(),
        clients(24),
        pt.fedavg(lr=0.3),
        rounds=8,
        steps=10,
        runs=6,
        seed=1,
        alone=True,
        progress=False,
    )
    np.testing.assert_allclose(alone.score, overfit.score, rtol=1e-3, atol=1e-5)


def test_a_useless_run_tells_nothing() -> None:
    """A model of zero step size is the same in all runs: every ratio is 0, and the area exactly a half."""
    found = pt.membership(
        model(), clients(12), pt.fedavg(lr=1e-30), rounds=1, steps=1, runs=6, progress=False
    )
    for test in ("calibrated", "ratio"):
        assert found.auc(test).value == 0.5
        assert found.advantage(test) == pytest.approx(0, abs=1e-12)
    assert found.auc("loss").low < 0.5 < found.auc("loss").high


def test_personal_parts_are_found_by_the_attacker() -> None:
    found = pt.membership(
        model(), clients(16), pt.fedalt("output", lr=0.3), rounds=6, steps=8, runs=6, progress=False
    )
    assert np.isfinite(found.score).all()
    assert found.auc("ratio").value > 0.6


def test_the_bound_of_a_run_is_shown(overfit: Membership) -> None:
    private = Membership(
        overfit.names, overfit.score, overfit.member, overfit.found, {"epsilon": 1.0, "delta": 0.01}
    )
    assert private.bound(0.1) == pytest.approx(min(math.e * 0.1 + 0.01, 1 - (0.99 - 0.1) / math.e))
    assert "most by ε = 1" in str(private)
    assert private.bound(0.1, epsilon=0.0, delta=0.0) == pytest.approx(0.1)
    with pytest.raises(pt.Refused, match="no account of their privacy"):
        overfit.bound(0.1)


def test_private_runs_say_what_bounds_the_test() -> None:
    """ε of their account, and its δ; with so much noise nobody is found, and the bound says so."""
    uploads = [pt.privacy.gaussian(noise=40.0, delta=0.01, clip=0.1)]
    method = pt.fedavg(lr=0.1, weighting="uniform")
    found = pt.membership(
        model(), clients(16), method, rounds=2, steps=2, cohort=4, runs=6, uploads=uploads, progress=False
    )
    spent = pt.privacy.epsilon(40.0, 2, rate=0.5, delta=0.01)  # four of the eight that take part
    assert found.privacy == pytest.approx({"epsilon": spent, "delta": 0.01, "noise": 40.0, "clip": 0.1})
    assert found.bound(0.1) == pytest.approx(math.exp(spent) * 0.1 + 0.01)
    assert found.auc("ratio").low < 0.6


def test_what_cannot_be_tested_is_refused() -> None:
    def refused(text: str, data: FederatedData | None = None, **given: Any) -> None:
        with pytest.raises(pt.Refused, match=text):
            pt.membership(model(), data or clients(8), pt.fedavg(lr=0.1), rounds=1, **given)

    refused("an even number", runs=7)
    refused("runs=2", runs=2)
    refused("half of the clients are held out", newcomers=0.5)
    refused("at least 8 with samples", clients(6))
    refused("cohort=7", cohort=7)
    with pytest.raises(pt.Refused, match="method such as"):
        pt.membership(model(), clients(8), "fedavg", rounds=1)  # type: ignore[arg-type]
