"""Loss between the local and the aggregated model: Kundu et al. (Fed+, 2022), Figure 3.

    f_k((1 − λ) w_k + λ w̃),   λ from 0 (as the client ended) to 1 (as the server aggregated)

A right end above the left one: the full step to the aggregate hurts the clients.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Measure, Phase, Problem
from partita.core.types import Batch, ClientState, Download, RoundContext, Tensors, Upload, Work
from partita.data.population import SPLITS
from partita.measures.ended import ended


class _Line(NamedTuple):
    rest: Tensors
    local: Tensors
    center: Tensors
    sums: Tensor
    weight: Tensor


@checked("measure ")
def line_loss(
    points: Annotated[int, Option("how many values of λ, both ends among them", low=2, high=1000)] = 11,
    split: Annotated[str, Option("the part of each client's data", choices=SPLITS)] = "train",
) -> Measure:
    """The cohort's loss on the way from each client's own model to the aggregated one.

    Use it to see whether aggregation helps or hurts the clients, and how far a step towards it should go.
    """
    lams = [i / (points - 1) for i in range(points)]

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:  # noqa: ARG001
        def start(download: Download, state: ClientState) -> _Line:
            last = ended(download)
            center = {k: download.shared[k] for k in last}
            rest = {k: v for k, v in {**download.shared, **state.personal}.items() if k not in last}
            device = next(iter({**last, **rest}.values())).device
            zero = torch.zeros((), dtype=torch.float64, device=device)
            return _Line(rest, last, center, zero.repeat(points), zero)

        def step(line: _Line, batch: Batch, lr: tuple[Tensor, ...]) -> _Line:  # noqa: ARG001
            scores = [problem.score({**line.rest, **_between(line, t)}, batch) for t in lams]
            sums = torch.stack([s.loss for s in scores]).double()
            return line._replace(sums=line.sums + sums, weight=line.weight + scores[0].loss_weight)

        def finish(line: _Line, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload({}, metrics={"loss": line.sums, "weight": line.weight}), ClientState({}, {})

        def work(now: RoundContext) -> Work:
            return Work(epochs=1, batch=now.pass_batch, split=split, shuffle=False)

        return LocalRule(start, (Phase(step, work=work),), finish)

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        weight = uploads.metrics["weight"].sum()
        return {"loss": (uploads.metrics["loss"].sum(0) / weight).tolist(), "lambda": lams} if weight else {}

    return Measure("line_loss", client, summarize, {"points": points, "split": split}, of_cohort=True)


def _between(line: _Line, t: float) -> Tensors:
    """Return (1 − λ) w_k + λ w̃; counters are the client's own."""
    return {
        k: torch.lerp(v, line.center[k], t) if v.is_floating_point() else v for k, v in line.local.items()
    }
