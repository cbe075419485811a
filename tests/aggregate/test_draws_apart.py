"""An aggregator or attack that is called several times in a round draws anew each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import partita as pt
from partita import aggregate as agg
from partita import capacity
from partita.core import draws
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors, Upload
from partita.engine.devices.holders import forged_by_holders, held_by, over_holders

KEY = draws.key(0, "aggregation", 3)
WHOLE, LAST = {"a": (4, 3), "b": (3,), "d": (2, 2)}, {"d": (2, 2)}
NARROW = {"a": (2, 3), "b": (2,), "d": (1, 2)}
KINDS = [0, 1, 0, 1, 0, 0]


def noisy() -> tuple[Aggregator, list[int]]:
    """The mean and some noise, such as a private server adds; with the keys that it was called with."""
    keys: list[int] = []

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:  # noqa: ARG001
        keys.append(int(key))
        found = {}
        for j, (name, d) in enumerate(deltas.items()):
            entries = torch.arange(d[0].numel(), device=d.device)
            noise = draws.normal(draws.fold(draws.fold(key, j), entries))
            found[name] = d.double().mean(0).to(d.dtype) + noise.view(d.shape[1:]).to(d.dtype)
        return Combined(found)

    return Aggregator("noisy", combine, {}), keys


def nothing(extra: bool = False, clients: int = 6) -> Upload:
    zeros = {k: torch.zeros(clients, *s) for k, s in WHOLE.items()}
    weight = torch.ones(clients, dtype=torch.float64)
    return Upload(zeros, weight, zeros if extra else {}, client=torch.arange(clients))


def by(rule: Aggregator):
    def aggregate(uploads: Upload, key: Tensor) -> Upload:
        assert uploads.weight is not None
        return Upload(rule.combine(uploads.delta, uploads.weight, key).delta)

    return aggregate


@pytest.mark.parametrize("classes", [[WHOLE, LAST], [WHOLE, NARROW]], ids=["depth", "width"])
def test_parts_that_others_hold_have_noise_of_their_own(classes) -> None:
    """No number that was drawn for one part of the model is drawn for another one."""
    rule, keys = noisy()
    held = held_by(WHOLE, classes)
    got = over_holders(by(rule), held, KINDS)(nothing(), KEY).delta
    drawn = torch.cat([x.reshape(-1) for x in got.values()])
    assert len(keys) == len(set(keys)) == len(held) == 2
    assert len(drawn.unique()) == len(drawn) == 19


def test_what_all_hold_has_the_key_of_the_model() -> None:
    """One call for all of it: the same bits as without classes."""
    rule, keys = noisy()
    got = over_holders(by(rule), held_by(WHOLE, [WHOLE, WHOLE]), KINDS)(nothing(), KEY).delta
    alone = by(rule)(nothing(), KEY).delta
    assert keys == [int(KEY)] * 2
    assert all(torch.equal(got[k], alone[k]) for k in WHOLE)


@pytest.mark.parametrize("classes", [[WHOLE, LAST], [WHOLE, NARROW]], ids=["depth", "width"])
def test_a_byzantine_client_sends_other_noise_for_each_part(classes) -> None:
    forge = pt.attack.gaussian(1.0).forge
    assert forge is not None
    sent = forged_by_holders(forge, held_by(WHOLE, classes), KINDS)(nothing(), (0, 2), KEY)
    numbers = torch.cat([x.reshape(-1) for i in (0, 2) for x in sent[i].delta.values()])
    assert len(numbers.unique()) == len(numbers) == 38


def test_a_byzantine_client_sends_other_noise_for_controls_of_the_same_name() -> None:
    """SCAFFOLD's controls have the names of the model's tensors."""
    forge = pt.attack.gaussian(1.0).forge
    assert forge is not None
    sent = forge(nothing(extra=True), (1,), KEY)[1]
    assert sent.delta.keys() == sent.extra.keys()
    assert not any(torch.equal(sent.delta[k], sent.extra[k]) for k in WHOLE)
    plain = forge(nothing(), (1,), KEY)[1].delta  # what has no controls is as it ever was
    assert all(torch.equal(sent.delta[k], plain[k]) for k in WHOLE)


def test_layers_have_draws_of_their_own() -> None:
    rule, keys = noisy()
    x, weight = nothing().delta, torch.ones(6)
    both = agg.layerwise({"a": rule, "*": rule}).combine(x, weight, KEY).delta
    assert len(set(keys)) == 2
    assert not torch.equal(both["a"][0], both["b"])
    only = agg.layerwise({"*": rule}).combine(x, weight, KEY).delta
    assert all(torch.equal(only[k], v) for k, v in rule.combine(x, weight, KEY).delta.items())


def test_layers_of_layers_have_draws_of_their_own() -> None:
    rule, keys = noisy()
    inner = agg.layerwise({"a": rule, "*": rule})
    agg.layerwise({"[ab]": inner, "*": inner}).combine(nothing().delta, torch.ones(6), KEY)
    assert len(set(keys)) == len(keys) == 3


def test_the_inner_aggregator_does_not_draw_what_the_buckets_have_drawn() -> None:
    rule, keys = noisy()
    agg.bucketing(2, agg.bucketing(2, rule)).combine(nothing().delta, torch.ones(6), KEY)
    agg.bucketing(2, rule).combine(nothing().delta, torch.ones(6), KEY)
    agg.nnm(1, rule).combine(nothing().delta, torch.ones(6), KEY)  # which draws nothing itself
    assert len(set(keys)) == 3
    assert keys[2] == int(KEY)


def test_all_tensors_of_one_call_are_in_the_same_buckets() -> None:
    rule = agg.bucketing(2, agg.coordinate_median())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    got = rule.combine({"u": x, "v": x}, torch.ones(6), KEY).delta
    assert torch.equal(got["u"], got["v"])


RUNS = {
    "fedavg": (pt.fedavg, None, 1),
    "scaffold": (pt.scaffold, None, 2),
    "fedavg, depth": (pt.fedavg, capacity.depth({"strong": 0, "weak": 1}), 2),
    "scaffold, width": (pt.scaffold, capacity.width({"strong": 1.0, "weak": 0.5}), 4),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_key_comes_twice_in_a_run(name: str) -> None:
    method, weak, calls = RUNS[name]
    rule, keys = noisy()
    data = pt.data.digits(clients=6, test=0.4, seed=0)
    work = {"rounds": 3, "steps": 1, "batch": 8, "baselines": False}
    pt.federate(pt.models.mlp(64, 4, 10), data, method(lr=0.1, aggregate=rule), capacity=weak, **work)
    assert len(set(keys)) == len(keys) == 3 * calls
    assert {int(draws.key(0, "aggregation", r)) for r in range(3)} <= set(keys) or weak is not None
