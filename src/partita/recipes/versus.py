"""Methods side by side on one experiment: the same data, initial weights, cohorts and work."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from partita import check
from partita.algorithms import METHODS, fedavg, local
from partita.recipes.experiment import Experiment, changed, literal
from partita.recipes.study import Study, Variant
from partita.schedule import synchronous
from partita.types import Algorithm

ALONE, GLOBAL = "local", "fedavg"


def versus(experiment: Experiment, methods: Sequence[str] = ()) -> Study:
    """The experiment under each of these methods, after the two that all are compared with.

    A method is a name, or a call with options: 'fedprox(mu=0.1)', 'fedalt(personal=input, lr=0.05)'; options
    that it shares with the experiment's own method are taken from there. Without any: the experiment's own.
    """
    chosen = dict(map(_method, methods)) if methods else {experiment.algorithm.name: {}}
    first = experiment.algorithm.stages[0].algorithm if experiment.algorithm.stages else experiment.algorithm
    common = ("lr", "momentum", "weight_decay", "max_grad_norm")
    same = {k: v for k, v in first.options.items() if k in common}
    whole = replace(experiment, baselines=False)
    variants = {
        ALONE: Variant(replace(whole, algorithm=local(**same), schedule=synchronous("turns"), state="keep")),
        GLOBAL: Variant(replace(whole, algorithm=fedavg(**same))),
    }
    for label, options in chosen.items():
        if options or label not in variants:
            rule = _changed(experiment.algorithm, label, options)
            compared = {"local": ALONE, "global": GLOBAL}
            variants[label] = Variant(replace(whole, algorithm=rule), baselines=compared)
    return Study(variants)


def _changed(algorithm: Algorithm, label: str, options: Mapping[str, Any]) -> Algorithm:
    name = re.split(r"[^a-z0-9_]", label)[0]
    if name == algorithm.name and not options:
        return algorithm
    return changed(algorithm, {"": name, **options})


def _method(text: str) -> tuple[str, dict[str, Any]]:
    """A label that can be a folder's name, and the options."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        node = None
    if isinstance(node, ast.Name):
        return check.choice("algorithm", node.id, METHODS), {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise check.fail("algorithm", text, "a method's name, or a call such as fedprox(mu=0.1)")
    name = check.choice("algorithm", node.func.id, METHODS)
    options = {word.arg: literal(word.value) for word in node.keywords if word.arg is not None}
    written = ",".join(f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords)
    return re.sub(r"[^\w.=,+-]", "", f"{name}-{written}"), options


def separate(text: str) -> list[str]:
    """'fedavg,fedprox(mu=0.1, lr=0.2)' at the commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]
