"""What a user may not have meant: warnings before a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from partita.core import check
from partita.engine.initial import tensors_of

if TYPE_CHECKING:
    from partita.engine.federation import Federation

NEAR_GUESS = 0.1  # of the way from a guess to no error


def warn_about_buffers(run: Federation) -> None:
    """A model with statistics, and nothing said about them."""
    if run.profile.buffers and run.settings.norm is None:
        shown = ", ".join(run.profile.buffers[:3])
        check.warn(
            f"the model keeps statistics while it trains ({shown}, ...) and norm= was not chosen: they "
            "are averaged like the layers they belong to (norm='global'); norm='static' measures them before "
            "each evaluation, norm='personal' keeps normalization layers with each client",
        )


def warn_about_time(run: Federation) -> None:
    """A stage whose time is up before it has begun."""
    if run.schedule.done(run.server):
        check.warn(
            f"until={run.schedule.until:g}: stage {run.stage + 1} ends before anyone can report, so that the "
            "server takes no step; use a later time, shorter delays or a smaller dropout",
        )


def warn_about_nothing(run: Federation, abandoned: int) -> None:
    """A run that ends with the weights that it began with."""
    if abandoned and abandoned == run.server.version:
        check.warn(
            f"all {abandoned} rounds were abandoned, for want of usable uploads: the model is as it was; use "
            "a smaller quorum or dropout, or a longer deadline",
        )


def warn_about_untrained(run: Federation) -> None:
    """Fine-tuning of a model that knows nothing yet, if that can be told: it is no better than a guess.

    Without classes to guess, the model of a function is taken for one that nobody has trained.
    """
    if run.given.name != "finetune" or run.given.stages or run.server.version:
        return
    y, shown = run.source.y, ""
    if run.profile.metric.name == "accuracy" and not y.is_floating_point() and y.dim() == 1:
        scores, weight = run.scores("global"), run.test_weight
        there = (weight > 0) & ~np.isnan(scores)
        guess = float(np.unique(y.cpu().numpy(), return_counts=True)[1].max()) / len(y)
        score = float(np.average(scores[there], weights=weight[there])) if there.any() else 1.0
        shown = f" has an accuracy of {score:.4f}, where always the commonest label has {guess:.4f}: it"
        untrained = score < guess + NEAR_GUESS * (1 - guess)
    else:
        untrained = not run.given_model
    if untrained:
        check.warn(
            f"finetune: the model{shown} seems to be untrained, and fine-tuning only moves the personal part "
            "of each client; train it first: partita.pipeline(partita.fedavg(lr=...), "
            "partita.stage(partita.finetune(...), epochs=5))",
        )


def warn_about_reset(run: Federation) -> None:
    """A method whose clients remember, and clients that forget."""
    last = run.stages[-1]
    keeps = last.algorithm.stateful  # else it makes its part anew, for evaluation too
    for part in run.stages:
        partition = run.partition_of(part.algorithm)
        new = part.algorithm.init_client(tensors_of(run.model, run.names), partition)
        if part.state == "reset" and new.memory and not partition.personal:
            check.warn(
                f"state='reset': {part.algorithm.name} relies on what clients remember, and they forget; "
                "use state='keep', or another method",
            )
    if last.state == "reset" and keeps and run.partition_of(last.algorithm).personal:
        check.warn(
            "state='reset': clients forget their personal part, so they are evaluated with its start; "
            "end with a stage partita.stage(partita.finetune(...), epochs=...) to give them one",
        )
