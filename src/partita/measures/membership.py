"""Membership inference on clients by a threshold on the loss of the server's model.

    s_i = −(mean loss of the server's model on the training samples of client i)

Those of clients that took part are compared with those of clients that `newcomers=` has held out: the attack
of Yeom et al., *Privacy Risk in Machine Learning* (2018), on clients in place of samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.core.options import checked
from partita.core.parts import Algorithm, LocalRule, Measure, Phase, Problem, Watched
from partita.core.types import Batch, ClientState, Download, RoundContext, Tensors, Upload, Work
from partita.privacy.membership import advantage, auc, true_positives

LEAST = 2  # members, and newcomers
SHARES = {"tpr_at_10": 0.1, "tpr_at_1": 0.01}


class _Sum(NamedTuple):
    model: Tensors
    loss: Tensor
    weight: Tensor


@checked("measure ")
def membership() -> Measure:
    """How well the loss of the server's model tells who took part: area under the curve, 0.5 knows nothing.

    It needs `newcomers=`, a share of the clients that is held out by chance. Whoever sees the model and has
    the samples of a client can do this test; `partita.membership` does a stronger one, with shadow runs.

    Use it to see whether a model gives away who has trained it, and what noise or fewer rounds change.
    """

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:  # noqa: ARG001
        def start(download: Download, state: ClientState) -> _Sum:
            model = {**state.personal, **download.shared}
            zero = torch.zeros((), dtype=torch.float64, device=next(iter(model.values())).device)
            return _Sum(model, zero, zero)

        def step(total: _Sum, batch: Batch, lr: tuple[Tensor, ...]) -> _Sum:  # noqa: ARG001
            scores = problem.score(total.model, batch)
            return total._replace(loss=total.loss + scores.loss, weight=total.weight + scores.loss_weight)

        def finish(total: _Sum, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload({}, metrics={"loss": total.loss, "weight": total.weight}), ClientState({}, {})

        def work(now: RoundContext) -> Work:
            return Work(epochs=1, batch=now.pass_batch, shuffle=False)

        return LocalRule(start, (Phase(step, work=work),), finish)

    return Measure("membership", client, _summarize, {}, newcomers=True, fits=_fits)


def _fits(watched: Watched) -> None:
    """Refuse a run without held-out clients, and one whose server has no whole model."""
    field, name = "measure membership", watched.algorithm.name
    if not any(watched.like.payload):
        return  # nothing leaves a client
    if watched.newcomers < LEAST:
        reason = "members are compared with clients that took no part"
        raise check.fail(
            f"{field} newcomers", watched.newcomers, f"newcomers=0.5, or {LEAST} at least", reason
        )
    if not set(watched.params) <= set(watched.problem.partition.shared):
        reason = f"clients of {name} keep a part of the model, which whoever attacks has to find first"
        raise check.fail(field, name, "partita.membership(model, data, method), which finds it", reason)


def _summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
    found = {k: v.double().cpu().numpy() for k, v in uploads.metrics.items()}
    usable = (found["weight"] > 0) & np.isfinite(found["loss"])
    loss = found["loss"][usable] / found["weight"][usable]
    newcomer = found["newcomer"][usable] > 0
    members, others = -loss[~newcomer], -loss[newcomer]
    if not len(members) or not len(others):
        return {}
    area, over = auc(members, others), advantage(members, others)
    shares = {k: true_positives(members, others, fpr) for k, fpr in SHARES.items()}
    return {
        "auc": area.value,
        "auc_low": area.low,
        "auc_high": area.high,
        "advantage": over.value,
        **{k: v for k, v in shares.items() if v is not None},
        "member_loss": float(-members.mean()),
        "newcomer_loss": float(-others.mean()),
    }
