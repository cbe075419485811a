"""Who holds what at the end: the server's model, the mean of the clients' parts, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.core.parts import StagePlan
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Variant, run_study
from support import each

HEAD = ("output.linear.weight", "output.linear.bias")
AVG, ALT = pt.fedavg(lr=0.1), pt.fedalt("output", lr=0.1)
TUNE = pt.stage(pt.finetune("output", lr=0.1), epochs=1)


def data() -> pt.data.FederatedData:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    return pt.data.from_arrays(x, torch.arange(24) % 3, [0] * 10 + [1] * 8 + [2] * 6)


def model() -> nn.Module:
    return pt.models.mlp(6, 5, 3, seed=1)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def federate(method: pt.Algorithm, net: Any = model, **settings: Any) -> pt.Run:
    given = {"rounds": 2, "batch": 4, "baselines": False, "executor": "loop", **settings}
    return pt.federate(net, data(), method, **given)


def sizes(run: pt.Run) -> list[int]:
    return [row["n_train"] for row in run.clients]


def stages(*parts: Any) -> pt.Algorithm:
    return pt.pipeline(*(p if isinstance(p, StagePlan) else pt.stage(p, rounds=2) for p in parts))


@each(
    ("parts", "missing"),
    [
        ((AVG, TUNE), ()),
        ((TUNE,), ()),
        ((ALT, AVG), ()),
        ((AVG, ALT), HEAD),
        ((ALT, TUNE), HEAD),
        ((AVG, ALT, TUNE), HEAD),
        ((AVG, pt.local(lr=0.1)), ("hidden1.linear.weight", "hidden1.linear.bias", *HEAD)),
    ],
    ids=[
        "tuned",
        "tuned only",
        "whole at last",
        "split at last",
        "split, tuned",
        "all three",
        "alone at last",
    ],
)
def test_pipelines(parts: tuple[Any, ...], missing: tuple[str, ...]) -> None:
    """The server has a whole model if the last stage that sent anything has trained all of it."""
    run = federate(stages(*parts), rounds=None)
    assert tuple(run.holdings.untrained) == missing
    if missing:
        with pytest.raises(ValueError, match=f"has not trained {missing[0]}"):
            run.model()
    else:
        assert all(torch.equal(v, run.shared[k]) for k, v in run.model().state_dict().items())


def test_personal_norms_are_not_the_servers() -> None:
    run = federate(AVG, normed, norm="personal")
    with pytest.raises(
        ValueError, match=r"'mean'.*has not trained 1.weight, 1.bias, 1.running_mean and 2 more"
    ):
        run.model()
    found = run.model(personal="mean")[1]
    own, n = [run.client(i).personal for i in range(3)], sizes(run)
    for name in ("weight", "running_mean", "running_var"):
        expected = sum(k * c[f"1.{name}"] for k, c in zip(n, own)) / sum(n)
        torch.testing.assert_close(getattr(found, name), expected)
    counts = [int(c["1.num_batches_tracked"]) for c in own]
    mean = sum(k * c for k, c in zip(n, counts)) / sum(n)
    assert found.num_batches_tracked.dtype == torch.int64
    assert int(found.num_batches_tracked) == round(mean)


def test_measured_statistics_have_no_mean() -> None:
    assert federate(AVG, normed, norm="static").model()
    run = federate(pt.local(lr=0.1), normed, norm="static")
    with pytest.raises(ValueError, match=r"personal='mean': expected 'initial'.*norm='static'"):
        run.model(personal="mean")
    with pytest.raises(ValueError, match=r"^personal=None: expected 'initial'"):  # which offers no mean
        run.model()


def test_narrow_models_have_no_mean() -> None:
    capacity = pt.capacity.width({"whole": 1.0, "half": 0.5}, assign=["whole", "half", "half"])
    net = pt.models.mlp(6, 8, 3)
    assert federate(AVG, net, capacity=capacity).model()
    run = federate(pt.local(lr=0.1), net, capacity=capacity)
    with pytest.raises(ValueError, match=r"personal='mean': .*different sizes"):
        run.model(personal="mean")


def test_byzantine_clients_are_not_in_the_mean() -> None:
    run = federate(ALT, attack=pt.attack.sign_flip(), byzantine=[1])
    found = run.model(personal="mean").state_dict()
    a, _, b = sizes(run)
    for name in HEAD:
        expected = (a * run.client(0).personal[name] + b * run.client(2).personal[name]) / (a + b)
        torch.testing.assert_close(found[name], expected)


def test_clients_that_forget_have_the_part_they_are_evaluated_with() -> None:
    with pytest.warns(UserWarning, match="state='reset'"):
        run = federate(ALT, state="reset")
    for i in range(3):
        mine, evaluated = run.client(i), run.client(i).model().state_dict()
        assert set(mine.personal) == set(HEAD)
        assert all(torch.equal(v, evaluated[k]) for k, v in mine.personal.items())
    with pytest.raises(ValueError, match="keep no personal part"):
        run.model(personal="mean")


def test_a_variant_starts_from_a_whole_model() -> None:
    def build(seed: int) -> Study:
        first, then = (Experiment(model, data(), m, rounds=1, seed=seed) for m in (ALT, AVG))
        return Study({"split": Variant(first), "on": Variant(then, start="split")})

    with pytest.raises(ValueError, match=r"start='fedalt': .*whole model.*output.linear.weight"):
        run_study(build, [0], announce=lambda text: None)  # noqa: ARG005


def test_a_part_that_nobody_trained_is_not_handed_out_silently() -> None:
    with pytest.warns(UserWarning, match="state='reset'"):
        run = federate(ALT, state="reset")
    client = run.client(0)
    assert not client.trained
    for hand_out in (lambda: client.personal, client.model):
        with pytest.warns(UserWarning, match="forgets its part"):
            hand_out()
    assert "forgets" in repr(client)
    solved = federate(pt.ffgg("output", lr=0.1, solver=pt.gd(steps=2, lr=0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solved.client(0).personal  # solved for when it is asked for
        assert solved.client(0).trained


@each("method, untrained", [(TUNE.algorithm, True), (stages(AVG, TUNE), False), (AVG, False)])
@pytest.mark.filterwarnings("ignore:finetune")
def test_a_server_that_has_learned_nothing_says_so(method: pt.Algorithm, untrained: bool) -> None:
    run = federate(method)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.model()
    assert bool(told) == untrained
    assert all("as it was given" in str(w.message) for w in told)
