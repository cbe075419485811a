"""A wrong argument carries what was wrong with it."""

from __future__ import annotations

import pickle

import pytest

import partita as pt
from partita.core import check
from support import each


@each(
    ("call", "field", "value", "allowed"),
    [
        (lambda: pt.fedavg(lr=-1), "lr", -1, "a number from 0, or a rate such as"),
        (lambda: pt.fedprox(lr=0.1, mu="a"), "mu", "a", "a number from 0"),
        (lambda: pt.fedavg(lr=0.1, weighting="equal"), "weighting", "equal", "one of 'samples', 'uniform'"),
        (lambda: federate(rounds=0), "rounds", 0, "a whole number from 1"),
        (lambda: federate(cohort=9), "cohort", 9, "a whole number from 1 up to 4"),
        (lambda: federate(evaluate_every=0), "evaluate_every", 0, "or virtual time such as 2.5"),
        (lambda: federate(executor="lop"), "executor", "lop", "(did you mean 'loop'?)"),
    ],
)
def test_field_value_and_what_is_allowed(call, field: str, value: object, allowed: str) -> None:
    with pytest.raises(pt.Refused) as refused:
        call()
    assert (refused.value.field, refused.value.value) == (field, value)
    assert allowed in refused.value.allowed
    assert str(refused.value) == f"{field}={value!r}: expected {refused.value.allowed}"


def federate(**settings):
    data = pt.data.digits(clients=4, seed=0)
    return pt.federate(pt.models.mlp(64, 10), data, pt.fedavg(lr=0.1), **{"rounds": 1, **settings})


def test_an_unknown_argument_gets_a_suggestion() -> None:
    with pytest.raises(pt.Refused) as refused:
        federate(cohorts=3)
    assert (refused.value.field, refused.value.value) == ("cohorts", 3)
    assert "federate has no such argument (did you mean 'cohort'?)" in refused.value.reason
    assert {"model", "rounds", "cohort"} <= set(refused.value.allowed.removeprefix("one of ").split(", "))


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(pt.Refused) as refused:
        pt.fedprox(mu=0.1)
    assert (refused.value.field, refused.value.value) == ("lr", check.MISSING)
    assert refused.value.allowed == "fedprox(lr=...)"
    assert str(refused.value).startswith("lr: fedprox needs this argument")


@each(
    ("allowed", "reason", "text"),
    [
        ("a share", "", "byzantine=(): expected a share"),
        ("a share", "attack= needs some", "byzantine=(): attack= needs some; give a share"),
        ("", "nobody is there", "byzantine=(): nobody is there"),
    ],
)
def test_the_text_says_what_was_given_why_not_and_what_to_give(allowed: str, reason: str, text: str) -> None:
    error = check.fail("byzantine", (), allowed, reason)
    assert str(error) == text
    assert str(error.within("attack")) == f"attack: {text}"


@each("value", [3, "a", None, lambda: 0, [object()], check.MISSING])
def test_it_travels_between_processes(value: object) -> None:
    error = check.fail("field", value, "something else", "a reason")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, copy.allowed) == (str(error), "field", "something else")
    assert copy.reason == "a reason"
