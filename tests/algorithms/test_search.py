"""Every number among the options of every method says where to search, and has a default to begin with."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.algorithms import METHODS
from partita.algorithms.by_name import by_name
from partita.core.options import Option, Range, declared, members, signature
from partita.recipes import find
from partita.recipes.experiment import build, changed
from partita.recipes.versus import separate, versus
from support import each

BY_NAME = [name for name in METHODS if name != "pipeline"]
NUMBERS = [
    (name, p.name, *declared(p.annotation), p.default)
    for name in BY_NAME
    for p in signature(METHODS[name]).parameters.values()
    if {float, int} & {*members(declared(p.annotation)[0])}
]


@each("method, name, kind, option, default", NUMBERS)
def test_every_number_declares_its_range(
    method: str, name: str, kind: Any, option: Option, default: Any
) -> None:
    search = option.search
    assert search is not None, f"{method}({name}) has no range"
    ends = (search.low, search.high) if isinstance(search, Range) else (min(search), max(search))
    for end in ends:  # all of the range is allowed
        value = int(end) if float not in members(kind) else end
        METHODS[method](**{**needed(method), name: value})
    if isinstance(search, Range) and not search.asked and default is not inspect.Parameter.empty:
        given = METHODS[method](**needed(method)).options
        start = given[option.like] if option.like else given[name]
        assert start is None or start in search, f"{method}({name}={start}) begins outside of {search}"


def needed(method: str) -> dict[str, Any]:
    """Return an example of each argument without a default."""
    parameters = signature(METHODS[method]).parameters.values()
    return {
        p.name: declared(p.annotation)[1].example
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }


def test_every_method_runs_by_name_alone() -> None:
    """From a recipe of a method without a personal part or a penalty."""
    small = build(find("digits"), {"clients": 12, "rounds": 3, "steps": 2, "batch": 8})
    plain = changed(small.algorithm, {"": "fedavg"})

    @each("name", BY_NAME)
    def runs(name: str) -> None:
        algorithm = changed(plain, {"": name})
        run = pt.federate(small.model, small.data, algorithm, rounds=3, steps=2, batch=8, baselines=False)
        assert not run.summary().get("diverged")
        assert np.isfinite(run.scores()).all()

    runs()
    study = versus(small, separate("ditto,pfedme,fedavg_plus"))
    assert list(study.variants) == ["local", "fedavg", "ditto", "pfedme", "fedavg_plus"]


@each(
    ("short", "long"),
    [
        (pt.pfedme(lr=0.2), pt.pfedme(lr=0.2, lam=5.0, inner_lr=0.2, inner_steps=5)),
        (pt.persafl_me(lr=0.2), pt.persafl_me(lr=0.2, lam=5.0, inner_lr=0.2, inner_steps=5)),
    ],
    ids=["pfedme", "persafl_me"],
)
def test_what_is_left_out_follows_lr(short: pt.Algorithm, long: pt.Algorithm) -> None:
    data = pt.data.digits(clients=3, partition=pt.data.iid(), seed=0)
    model = pt.models.mlp(64, 8, 10)
    runs = [
        pt.federate(model, data, m, rounds=3, steps=2, batch=8, baselines=False, executor="vmap")
        for m in (short, long)
    ]
    assert all((runs[0].shared[k] == v).all() for k, v in runs[1].shared.items())
    assert np.array_equal(runs[0].scores(), runs[1].scores())


def test_only_what_is_no_number_has_an_example_by_name() -> None:
    assert by_name("fedalt", lr=0.1).options["personal"] == "output"
    assert by_name("fedplus", lr=0.1).options["psi"].name == "avg"
    with pytest.raises(pt.Refused) as refused:
        by_name("fedalt")
    assert refused.value.field == "lr"


@each(
    ("arguments", "field"),
    [
        ({"low": 1, "high": 1}, "high"),
        ({"low": 0, "high": 1, "log": True}, "low"),
        ({"low": 2, "high": 1}, "high"),
    ],
)
def test_a_range_that_is_none_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(pt.Refused) as refused:
        pt.Range(**arguments)
    assert refused.value.field == field
