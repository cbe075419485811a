"""How much is left to learn for the shared part of a split, in numbers that compare across splits.

Mishchenko et al. (2023), section 4.3, judge a split by ‖F_m(θ)‖: what client m still asks of the shared part
θ once it has fitted its own part w. Another split has another θ, of another size, so the bare norm says
little. Here it is divided by what the same parameters are asked for where nothing is personal:

    left(t) = mean_m ‖∇₁f_m(θᵗ, w_m*(θᵗ))‖ / mean_m ‖∇₁f_m(xᵗ)‖      ∇₁: by the names of θ in both

xᵗ is the whole model of fedavg after the same rounds t, so with nothing personal it is 1. It is asked for
twice. At the start, where θ is untrained (and x⁰ is the same model), it says what fitting w alone leaves for
θ to learn: near zero, θ would never move, and a smaller personal part does. At the end it says how much of
the clients' disagreement about θ is left; there θ has learned too, so a small value is no reproach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from partita.algorithms.local.solvers import Solver
from partita.core import tree
from partita.core.parts import Algorithm, LocalRule, Measure, Phase, Problem
from partita.core.types import ClientState, Download, RoundContext, Tensors, Upload, Work
from partita.engine.record import number
from partita.measures import gradient_norm

TIMES = {"end": "gradient_norm", "start": "gradient_norm_start"}
Names = Mapping[str, Sequence[str]]


def gradient_left(model: nn.Module, solver: Solver, parts: Names | None = None) -> tuple[Measure, ...]:
    """Measures of a run that begins with this model, made after its last round: at its end and at its start.

    `parts` are names of parameters by label, whose norms are wanted apart.
    """
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    initial = {k: v.detach().clone() for k, v in there.items()}
    at_start = _measure(TIMES["start"], solver, parts or {}, lambda rule: _at(initial, rule))
    return _measure(TIMES["end"], solver, parts or {}, lambda rule: rule), at_start


def left(row: Mapping[str, Any], reference: Mapping[str, Any], label: str | None) -> dict[str, float] | None:
    """From the last rows of a split's run and of fedavg's: `norm_start`, `norm_end` as they are, and `start`,
    `end` by those of the same parameters under fedavg (the split's `label` there; None: all of them)."""
    found: dict[str, float] = {}
    for time, name in TIMES.items():
        ours = number(row.get("measures", {}).get(name, {}).get(_key(None)))
        theirs = number(reference.get("measures", {}).get(name, {}).get(_key(label)))
        if ours is None or not theirs:
            return None
        found |= {f"norm_{time}": ours, time: ours / theirs}
    return found


def _key(label: str | None) -> str:
    return "mean" if label is None else f"mean/{label}"


def _measure(name: str, solver: Solver, parts: Names, change: Callable[[LocalRule], LocalRule]) -> Measure:
    """Means of the clients' norms, after the last round only: everyone takes part, which is much work."""
    given = gradient_norm(solver=solver)

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:
        rule = change(given.client(problem, algorithm))
        wanted = {_key(label): names for label, names in parts.items()}
        return LocalRule(rule.start, tuple(map(_at_the_end, rule.phases)), _norms(rule, wanted))

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        metrics = dict(uploads.metrics)
        done = metrics.pop("steps").any()
        return {k: float(v.mean()) for k, v in metrics.items()} if done else {}

    return Measure(name, client, summarize, given.options)


def _at_the_end(phase: Phase) -> Phase:
    def work(now: RoundContext) -> Work:
        if now.stage_round < now.stage_rounds:
            return Work(steps=0)
        return now.work if phase.work is None else phase.work(now)

    return phase._replace(work=work)


def _norms(
    rule: LocalRule, wanted: Names
) -> Callable[[Any, Download, ClientState], tuple[Upload, ClientState]]:
    """Numbers in place of gradients: those of all clients would not fit."""

    def finish(carry: Any, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, state = rule.finish(carry, download, state)
        gradient = {k: v.double() for k, v in upload.delta.items()}
        norms = {key: tree.norm(tree.pick(gradient, names)) for key, names in wanted.items() if names}
        whole = {_key(None): upload.metrics["norm"]} if gradient else {}
        return Upload({}, metrics={**whole, **norms, "steps": upload.metrics["steps"]}), state

    return finish


def _at(initial: Tensors, rule: LocalRule) -> LocalRule:
    """The rule as if the server had never moved."""

    def first(download: Download) -> Download:
        shared = {k: initial[k].to(v.device, v.dtype) for k, v in download.shared.items()}
        return download._replace(shared=shared)

    return LocalRule(
        lambda download, state: rule.start(first(download), state),
        rule.phases,
        lambda carry, download, state: rule.finish(carry, first(download), state),
    )
