"""Which part of a model should be personal? Candidate splits side by side on one experiment."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from partita.algorithms import METHODS
from partita.algorithms.local.solvers import gd
from partita.algorithms.partition import keep_norms, personal_names
from partita.core import check
from partita.core.parts import Algorithm
from partita.core.types import Partition
from partita.engine.initial import own_copy
from partita.engine.model.probe import names_of
from partita.models import add_adapters
from partita.optim.rates import as_rate
from partita.recipes.advice import ALL, NONE, advice, figures, table
from partita.recipes.experiment import Experiment
from partita.recipes.expressions import expression
from partita.recipes.gradient_left import Names, gradient_left
from partita.recipes.study import Study
from partita.recipes.tables import Runs, Table
from partita.recipes.versus import ALONE, GLOBAL, versus

DEFAULT = ("input", "output", "adapter", "norm")
LARGEST_RANK = 16  # of adapters that are added
MOST_ROUNDS = 100_000  # in which a rate is looked up


@dataclass(frozen=True)
class Candidate:
    """A part that may become personal.

    part   as it is written: 'output', 'head.*', 'input+norm'
    label  the name of its variant
    names  its parameters
    rest   the parameters that are shared beside it
    model  the model with adapters, where the experiment's own has none
    """

    part: str
    label: str
    names: frozenset[str]
    rest: tuple[str, ...] = ()
    model: nn.Module | None = None

    @property
    def words(self) -> list[str]:
        """The value of the method's option `personal`."""
        return _words(self.part)


def candidates(experiment: Experiment, parts: Sequence[str] = ()) -> tuple[list[Candidate], list[str]]:
    """Return the splits to try, and remarks on those that are left out or stand for several.

    The default is DEFAULT, as far as the model has those parts. 'none' and 'all' are never among them: these
    two extremes are the study's baselines.
    """
    model = own_copy(experiment.model, experiment.seed)
    chosen: list[Candidate] = []
    remarks: list[str] = []
    by_names = {frozenset[str](): f"{NONE!r} (one global model)", _trainable(model): f"{ALL!r} (each alone)"}
    for part in dict.fromkeys(parts or DEFAULT):
        try:
            candidate, remark = _candidate(experiment, model, part, chosen)
        except ValueError as error:
            if parts:
                raise
            remarks.append(_left_out(part, error))
            continue
        if candidate.names not in by_names:
            by_names[candidate.names] = part
            chosen.append(candidate)
            remarks += [remark] if remark else []
        elif part not in (NONE, ALL):
            same = by_names[candidate.names]
            remarks.append(f"{part}: the same parameters as {same}, which stands for both")
    return chosen, remarks


def splits(
    experiment: Experiment,
    parts: Sequence[str] = (),
    *,
    method: str = "fedalt",
    rounds: int | None = None,
    solver_steps: int = 20,
) -> Study:
    """Return the experiment under one method for each split, after the extremes: all and nothing personal.

    parts         as the option `personal` of a method; 'input+norm' are both together
    method        one with a personal part, perhaps with options: 'fedsim', 'ffgg(solver=gd(10, 0.1))'; others
                  are those of the experiment's own method
    rounds        default: those of the experiment
    solver_steps  gradient steps with which a client fits its part when ‖F_m(θ)‖ is measured
    """
    check.integer("solver_steps", solver_steps, low=1)
    if rounds is not None:
        check.integer("rounds", rounds, low=1)
    chosen, _ = candidates(experiment, parts)
    _with_part(method, [NONE])  # refused even if no candidate is left
    variants = dict(versus(experiment, [GLOBAL]).variants)
    for candidate in chosen:
        *_, variant = versus(experiment, [_with_part(method, candidate.words)]).variants.values()
        model = candidate.model or variant.experiment.model
        variants[candidate.label] = replace(variant, experiment=replace(variant.experiment, model=model))
    shared = {c.label: c.rest for c in chosen}
    for label, variant in variants.items():
        short = replace(variant.experiment, rounds=rounds or variant.experiment.rounds, measures=())
        if label != ALONE:  # which has nothing to share
            short = _measured(short, solver_steps, shared if label == GLOBAL else {})
        variants[label] = replace(variant, experiment=short)

    def tables(runs: Runs) -> list[Table]:
        rows = figures(runs, names(chosen))
        return [table(runs, rows, advice(runs, rows))]

    return Study(variants, tables)


def names(chosen: Iterable[Candidate]) -> dict[str, str]:
    """Return the parts by the labels of their runs, from nothing to everything."""
    return {GLOBAL: NONE, **{c.label: c.part for c in chosen}, ALONE: ALL}


# ---- candidates


def _candidate(
    experiment: Experiment, model: nn.Module, part: str, others: Iterable[Candidate]
) -> tuple[Candidate, str]:
    words, remark, adapted = _words(part), "", None
    if "adapter" in words and not any("adapter" in n.split(".") for n in _trainable(model)):
        adapted, remark = _with_adapters(model, experiment.seed)
    whole = adapted or model
    names = names_of(whole, experiment.data)
    personal = personal_names(whole, names, words)
    partition = Partition(tuple(n for n in names if n not in set(personal)), personal)
    if experiment.norm == "personal":
        partition = keep_norms(whole, partition, ())
    taken = {ALONE, GLOBAL, *(c.label for c in others)}
    return Candidate(part, _label(part, taken), frozenset(personal), partition.shared, adapted), remark


def _words(part: str) -> list[str]:
    words = [word.strip() for word in part.split("+")]
    if not all(words):
        raise check.fail("parts", part, "parts such as output, head.* or input+norm")
    return words


def _label(part: str, taken: set[str]) -> str:
    """Return a name that can be a folder's and is not taken."""
    label = re.sub(r"[^\w.=+-]+", "_", part)
    label = f"_{label}" if label.startswith(".") else label
    return next(x for x in (label, *(f"{label}-{i}" for i in range(2, len(taken) + 3))) if x not in taken)


def _trainable(model: nn.Module) -> frozenset[str]:
    return frozenset(n for n, p in model.named_parameters() if p.requires_grad)


def _with_adapters(model: nn.Module, seed: int) -> tuple[nn.Module, str]:
    """Return the model with adapters of the first kind that suits it, and a remark."""
    rank = _rank(model)
    for kind in ("residual", "bottleneck", "lora"):
        try:
            adapted = add_adapters(model, kind, rank=rank, seed=seed)
        except ValueError:
            continue
        size = "" if kind == "residual" else f" of rank {rank}"
        return adapted, f"adapter: the model has none; {kind!r} adapters{size} were added for this split"
    allowed = "a part of this model: it has no adapters and no layer to add them to"
    raise check.fail("parts", "adapter", allowed)


def _rank(model: nn.Module) -> int:
    """Return a quarter of the narrowest linear layer but the last: smaller than what it adapts."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)][:-1]
    widths = [min(m.in_features, m.out_features) for m in linear]
    return max(1, min([LARGEST_RANK, *(w // 4 for w in widths)]))


def _left_out(part: str, error: ValueError) -> str:
    if part in ("adapter", "norm"):
        more = " and none to add them to" if part == "adapter" else ""
        return f"{part}: left out, the model has no such layers{more}"
    return f"{part}: left out ({error})"


# ---- variants


def _with_part(method: str, words: list[str]) -> str:
    """Return the method as `versus` reads it, with this personal part."""
    node = expression("method", method.strip())
    call = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise check.fail("method", method, "a method's name, or a call such as fedalt(personal_lr=0.1)")
    able = [name for name, m in METHODS.items() if "personal" in inspect.signature(m).parameters]
    if call.func.id in METHODS and call.func.id not in able:
        raise check.fail("method", method, f"one with a personal part: {', '.join(able)}")
    check.choice("method", call.func.id, able)
    if any(word.arg == "personal" for word in call.keywords):
        raise check.fail("method", method, "a method without personal=, which the parts decide")
    personal = ast.keyword("personal", ast.List([ast.Constant(w) for w in words], ast.Load()))
    return ast.unparse(ast.Call(call.func, [], [*call.keywords, personal]))


def _measured(experiment: Experiment, solver_steps: int, parts: Names) -> Experiment:
    """Return the experiment with ‖F_m(θ)‖ as its only measure: others may not suit every split."""
    model = own_copy(experiment.model, experiment.seed)
    solver = gd(solver_steps, _largest_rate(experiment.algorithm, experiment.rounds or 1))
    return replace(experiment, measures=gradient_left(model, solver, parts))


def _largest_rate(algorithm: Algorithm, rounds: int) -> float:
    """Return the largest rate of the personal part: one that has fallen to zero would fit nothing."""
    options = algorithm.options
    lr = options.get("personal_lr")
    rate = as_rate(options["lr"] if lr is None else lr)
    return max(rate(t, rounds) for t in range(0, rounds, 1 + rounds // MOST_ROUNDS))
