"""How much is left to learn for the shared part of a split, in numbers that compare across splits.

Mishchenko et al. (2023), section 4.3, judge a split by ‖F_m(θ)‖: the gradient that client m has for the
shared part θ once it has fitted its own part w. Another split has another θ, of another size, so the bare
norm says little. Here it is divided by the gradient of the same parameters where nothing is personal:

    left(t) = mean_m ‖∇₁f_m(θᵗ, w_m*(θᵗ))‖ / mean_m ‖∇₁f_m(xᵗ)‖      ∇₁: by the names of θ in both

xᵗ is the whole model of fedavg after the same rounds t, so with nothing personal it is 1. It is measured
twice. At the start, where θ is untrained (and x⁰ is the same model), it says what fitting w alone leaves for
θ to learn: near zero, θ would never move, and a smaller personal part suffices. At the end it says how much
of the clients' disagreement about θ is left; θ has learned by then, so that a small value is no flaw.
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
    """Return measures of a run that begins with this model: at its end and at its start.

    Both are taken after the last round. `parts` are names of parameters by label, for norms of their own.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    initial = {k: v.detach().clone() for k, v in tensors.items()}
    at_start = _measure(TIMES["start"], solver, parts or {}, lambda rule: _at(initial, rule))
    return _measure(TIMES["end"], solver, parts or {}, lambda rule: rule), at_start


def left(row: Mapping[str, Any], reference: Mapping[str, Any], label: str | None) -> dict[str, float] | None:
    """Return the norms from the last rows of a split's run and of fedavg's.

    `norm_start` and `norm_end` are bare, `start` and `end` relative to those of the same parameters under
    fedavg: of the split's `label` there, or of all where it is None.
    """
    values: dict[str, float] = {}
    for time, name in TIMES.items():
        ours = number(row.get("measures", {}).get(name, {}).get(_key(None)))
        theirs = number(reference.get("measures", {}).get(name, {}).get(_key(label)))
        if ours is None or not theirs:
            return None
        values |= {f"norm_{time}": ours, time: ours / theirs}
    return values


def _key(label: str | None) -> str:
    return "mean" if label is None else f"mean/{label}"


def _measure(name: str, solver: Solver, parts: Names, change: Callable[[LocalRule], LocalRule]) -> Measure:
    """Average the clients' norms, after the last round only: all clients take part, which is much work."""
    norm = gradient_norm(solver=solver)

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:
        rule = change(norm.client(problem, algorithm))
        wanted = {_key(label): names for label, names in parts.items()}
        return LocalRule(rule.start, tuple(map(_at_the_end, rule.phases)), _norms(rule, wanted))

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        metrics = dict(uploads.metrics)
        done = metrics.pop("steps").any()
        return {k: float(v.mean()) for k, v in metrics.items()} if done else {}

    return Measure(name, client, summarize, norm.options)


def _at_the_end(phase: Phase) -> Phase:
    def work(now: RoundContext) -> Work:
        if now.stage_round < now.stage_rounds:
            return Work(steps=0)
        return now.work if phase.work is None else phase.work(now)

    return phase._replace(work=work)


def _norms(
    rule: LocalRule, wanted: Names
) -> Callable[[Any, Download, ClientState], tuple[Upload, ClientState]]:
    """Upload norms in place of gradients: those of all clients would not fit into memory."""

    def finish(carry: Any, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, state = rule.finish(carry, download, state)
        gradient = {k: v.double() for k, v in upload.delta.items()}
        norms = {key: tree.norm(tree.pick(gradient, names)) for key, names in wanted.items() if names}
        whole = {_key(None): upload.metrics["norm"]} if gradient else {}
        return Upload({}, metrics={**whole, **norms, "steps": upload.metrics["steps"]}), state

    return finish


def _at(initial: Tensors, rule: LocalRule) -> LocalRule:
    """Return the rule as if the server had never moved."""

    def first(download: Download) -> Download:
        shared = {k: initial[k].to(v.device, v.dtype) for k, v in download.shared.items()}
        return download._replace(shared=shared)

    return LocalRule(
        lambda download, state: rule.start(first(download), state),
        rule.phases,
        lambda carry, download, state: rule.finish(carry, first(download), state),
    )
