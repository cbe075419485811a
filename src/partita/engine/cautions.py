"""Warnings about what a user may not have meant."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np

from partita.core import check
from partita.core.options import called
from partita.core.parts import Algorithm, ServerRule, StagePlan, Transform
from partita.core.types import ClientState, Partition, ServerState
from partita.data import FederatedData
from partita.data.scale import is_pooled, scale_hint
from partita.engine.lockstep.meeting import once
from partita.schedule import Running, Schedule

NEAR_GUESS = 0.1  # of the way from a guess to no error
MOST_UNSOLVED = 0.5  # of the local steps
MOST_ADDED_UP = 4.0
"""Deltas of clients that do not know of each other, added up in full: with 4 most runs are worse than with 2,
and with 8 all diverge (docs/methods/asynchronous.md)."""


def warn_about_buffers(buffers: Sequence[str], norm: str | None) -> None:
    """Warn of a model with statistics where nothing was said about them."""
    if buffers and norm is None:
        check.warn(
            f"the model keeps statistics while it trains ({', '.join(buffers[:3])}, ...) and norm= was not "
            "chosen: they are averaged like the layers they belong to (norm='global'); norm='static' "
            "measures them before each evaluation, norm='personal' keeps normalization layers with each "
            "client",
        )


def warn_about_scale(data: FederatedData) -> None:
    """Warn of features that a usual learning rate does not suit."""
    known, hint = once(("scale", id(data)), lambda: (weakref.ref(data), scale_hint(data)))
    if known() is not data:  # other data that lie where those lay
        hint = scale_hint(data)
    if hint:
        check.warn(hint)


def warn_about_reset(
    plans: Sequence[StagePlan], splits: Sequence[Partition], new_clients: Sequence[ClientState]
) -> None:
    """Warn of a method whose clients remember, where clients forget."""
    for plan, partition, new in zip(plans, splits, new_clients):
        if plan.state == "reset" and new.memory and not partition.personal:
            check.warn(
                f"state='reset': {plan.algorithm.name} relies on what clients remember, and they forget; "
                "use state='keep', or another method",
            )
    # a method without state makes its part anew, for evaluation too
    if plans[-1].state == "reset" and plans[-1].algorithm.stateful and splits[-1].personal:
        check.warn(
            "state='reset': clients forget their personal part, so they are evaluated with its start; "
            "end with a stage partita.stage(partita.finetune(...), epochs=...) to give them one",
        )


def warn_about_time(schedule: Running, server: ServerState, stage: int) -> None:
    """Warn of a stage whose time is up before it has begun."""
    if schedule.done(server) and schedule.until is None:
        check.warn(f"available=: nobody is ever available in stage {stage + 1}, which ends before it begins")
    elif schedule.done(server):
        check.warn(
            f"until={schedule.until:g}: stage {stage + 1} ends before anyone can report, so that the server "
            "takes no step; use a later time, shorter delays or a smaller dropout",
        )


def warn_about_scaling(transform: Transform, data: FederatedData) -> None:
    """Warn of features that were scaled by statistics of all clients, which nothing has hidden."""
    if is_pooled(data):
        check.warn(
            "the data were standardized with one mean and deviation for all clients: if these are of the "
            f"clients' own samples, {transform.name} does not cover them; use "
            "partita.data.standardize(data, by='client'), or numbers that are known without these clients"
        )


def warn_about_reporters(transform: Transform, schedule: Schedule, elsewhere: bool) -> None:
    """Warn of sums over clients of whom nobody knows beforehand how many will report."""
    asynchronous = getattr(schedule, "buffer", None) is not None  # which waits for as many as it counts
    if asynchronous or (getattr(schedule, "tells_who_reports", True) and not elsewhere):
        return
    late = getattr(schedule, "deadline", None) is not None
    why = "deadline=" if late else "available=" if getattr(schedule, "available", None) else "real clients"
    check.warn(
        f"{why}: {transform.name} divides sums by how many clients are asked, which tells nothing of who "
        "reports; of those who are late or away the server takes smaller steps. If many are, use a larger "
        "step in proportion, such as server=partita.optim.sgd(2.0) where half of them report"
    )


def warn_about_server_step(algorithm: Algorithm, rule: ServerRule, schedule: Running) -> None:
    """Warn of an asynchronous server that adds up too many deltas of the same model: β s(τ) C / K.

    With momentum m, each of them counts 1/(1 − m) times in the end. Adaptive servers divide by the size of
    what they add up, single gradients (ffgg) have a step size of their own, and mixing is no sum.
    """
    server, steps = rule.optimizer, getattr(schedule, "steps_in_flight", 1.0)
    if steps <= 1 or algorithm.mixes or algorithm.sends_gradients or server is None or server.name != "sgd":
        return
    lr, kept = server.options["lr"], min(server.options["momentum"], 0.999)
    rate = 1.0 if lr is None else lr
    total = rate / (1 - kept) * steps * schedule.discount(int(steps) - 1)
    if total > MOST_ADDED_UP:
        name = next((k for k in ("server_lr", "beta") if k in algorithm.options), "the step of server=")
        check.warn(
            f"the deltas of {steps:g} server steps come from clients that do not know of each other, and "
            f"{total:.3g} times their mean is added up, where a synchronous round takes it once; if training "
            f"diverges, lower {name} from {rate:g} to about {rate / total:.2g}, or use a larger buffer",
        )


def warn_about_choice(algorithm: Algorithm, schedule: Running, data: FederatedData) -> None:
    """Warn of large clients that count twice: they are chosen more often, and weigh more when they are."""
    choice = getattr(getattr(schedule, "options", None), "choose", None)
    sizes = data.train[:, 1]
    twice = getattr(choice, "by_samples", False) and algorithm.options.get("weighting") == "samples"
    if twice and len(np.unique(sizes[sizes > 0])) > 1:
        check.warn(
            f"{called(type(choice))}: clients are drawn by their samples, and {algorithm.name} weights them "
            f"by samples, so that large ones count twice; use {algorithm.name}(weighting='uniform')",
        )


def warn_about_partial_work(schedule: Running, most_steps: Callable[[], int]) -> None:
    """Warn of stragglers with partial work where nobody takes more than one step in any phase."""
    if getattr(getattr(schedule, "options", None), "late", "") == "partial" and most_steps() <= 1:
        check.warn(
            "late='partial': no client has more than one step to take in a round, so that stragglers do as "
            "much as the others; use more steps or epochs, a smaller batch, or late='drop'",
        )


def warn_about_abandoned(abandoned: int, rounds: int, schedule: Running) -> None:
    """Warn of a run that ends with the weights that it began with."""
    if abandoned and abandoned == rounds:
        some = getattr(getattr(schedule, "options", None), "stragglers", 0)
        advice = "fewer stragglers" if some else "a smaller quorum or dropout, or a longer deadline"
        check.warn(
            f"all {abandoned} rounds were abandoned, for want of usable uploads: the model is as it was; use "
            f"{advice}",
        )


def warn_about_unsolved(unsolved: float | None, nu: float | None) -> None:
    """Warn of an accuracy that most inner problems did not reach."""
    if unsolved is not None and nu is not None and unsolved > MOST_UNSOLVED:
        check.warn(
            f"nu={nu:g} was not reached in {unsolved:.0%} of the local steps, which took all of their inner "
            "steps; use more inner_steps, another inner_lr, or a larger nu",
        )


def warn_about_untrained(
    data: FederatedData, metric: str, given_model: bool, scores: Callable[[], np.ndarray], weight: np.ndarray
) -> None:
    """Warn of fine-tuning a model that knows nothing yet, if that can be told: it is no better than a guess.

    Without classes to guess, a model that was made by a function is taken for an untrained one.
    """
    y, accuracy = data.y, ""
    if metric == "accuracy" and not y.is_floating_point() and y.dim() == 1:
        score = scores()
        counted = (weight > 0) & ~np.isnan(score)
        guess = float(np.unique(y.cpu().numpy(), return_counts=True)[1].max()) / len(y)
        mean = float(np.average(score[counted], weights=weight[counted])) if counted.any() else 1.0
        accuracy = f" has an accuracy of {mean:.4f}, where always the commonest label has {guess:.4f}: it"
        untrained = mean < guess + NEAR_GUESS * (1 - guess)
    else:
        untrained = not given_model
    if untrained:
        check.warn(
            f"finetune: the model{accuracy} seems to be untrained, and fine-tuning only moves the personal "
            "part of each client; train it first: partita.pipeline(partita.fedavg(lr=...), "
            "partita.stage(partita.finetune(...), epochs=5))",
        )
