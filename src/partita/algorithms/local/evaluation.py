"""Every client's score under a model, as a local rule: so it runs stacked like training does.

score_i = Σ_j w_ij metric(model_i(x_ij), y_ij) / Σ_j w_ij      over the client's samples of a split

with w_ij = 1, except where the metric is a loss that weights its classes. A metric that is no mean over
samples needs a row of each of them: then the client keeps the last rows, as many as the largest client has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core.parts import LocalRule, Personalize, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Tensors, Upload, Work

SUMS = ("metric", "weight", "loss", "loss_weight")
ROWS, REAL = "row ", "real"
"""What uploads call the rows that metrics keep, and which of them are of a sample."""


class Sums(NamedTuple):
    """The scores so far, beside what is needed to rebuild the model.

    sums   metric and loss, and what each is divided by
    rows   what is kept of the samples, by metric, and `real` which of the rows are of a sample
    """

    inner: Any
    shared: tuple[Tensors, Tensors]
    state: ClientState
    sums: Tensors
    rows: Tensors
    real: Tensor


def evaluation(
    personalize: Callable[[Problem], Personalize],
    split: str,
    kept: Tensors | None = None,
    samples: int = 0,
    drawn: int | None = None,
) -> Callable[[Problem], LocalRule]:
    """Personalize, then one pass over a split of the client's data.

    kept     what metrics keep of a sample: then the rows of up to so many `samples` are returned, too
    drawn    of each client, only so many drawn samples are looked at (None: all)
    """

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Sums:
            device = _device(download, state)
            zero = torch.zeros((), device=device)
            rows = {k: v.new_zeros(samples, *v.shape, device=device) for k, v in (kept or {}).items()}
            inner, shared = own.start(download, state), (download.shared, download.extra)
            real = torch.zeros(samples, dtype=torch.bool, device=device)
            return Sums(inner, shared, state, dict.fromkeys(SUMS, zero), rows, real)

        def step(carry: Sums, batch: Batch, lr: tuple[Tensor, ...]) -> Sums:  # noqa: ARG001
            params = own.model(carry.inner, Download(carry.shared[0], carry.shared[1], 0), carry.state)
            scores = problem.score(params, batch, keep=kept is not None)
            sums = {k: v + new for (k, v), new in zip(carry.sums.items(), scores[:4])}
            if kept is None:
                return carry._replace(sums=sums)
            mask = batch.mask
            real = torch.ones_like(carry.real[: len(batch.y)]) if mask is None else mask > 0
            rows = {k: _last(carry.rows[k], new) for k, new in scores.rows.items()}
            return carry._replace(sums=sums, rows=rows, real=_last(carry.real, real))

        def finish(carry: Sums, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            rows = {f"{ROWS}{k}": v for k, v in carry.rows.items()} | {REAL: carry.real}
            metrics = {**carry.sums, **(rows if kept is not None else {})}
            return Upload({}, metrics=metrics), ClientState({}, {})

        adapt = tuple(phase.within("inner") for phase in own.phases)
        return LocalRule(
            start, (*adapt, Phase(step, work=lambda now: _pass(split, drawn, now.pass_batch))), finish
        )

    return build


def _last(rows: Tensor, new: Tensor) -> Tensor:
    """Return the rows with new ones behind them, as many as before."""
    return torch.cat([rows[len(new) :], new.to(rows.dtype)])


def deployment(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], LocalRule]:
    """The model itself, as what would be uploaded."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)
        return LocalRule(own.start, own.phases, lambda c, d, s: (Upload(own.model(c, d, s)), s))

    return build


def global_model(problem: Problem) -> Personalize:
    """The server's model, the same for everyone."""
    del problem
    return Personalize(lambda download, state: download.shared, (), lambda params, d, s: params)  # noqa: ARG005


def _pass(split: str, drawn: int | None, batch: int) -> Work:
    if drawn is not None:
        return Work(steps=1, batch=drawn, split=split)
    return Work(epochs=1, batch=batch, split=split, shuffle=False)


def _device(download: Download, state: ClientState) -> torch.device:
    return next(iter({**download.shared, **state.personal}.values())).device
