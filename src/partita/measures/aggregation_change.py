"""Change of weights at aggregation: Kundu et al., *Robustness and Personalization in Federated Learning: A
Unified Approach via Regularization* (Fed+, 2022), Figures 1 and 2.

    ‖w_k(begin of the next local work) − w_k(end of the last)‖₂

For fedavg this is the way to the aggregate, for Fed+ with λ = 0 and for clients alone it is zero. Its spikes
coincide with training that collapses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.core import tree
from partita.core.options import checked
from partita.core.parts import Algorithm, LocalRule, Measure, Problem
from partita.core.types import ClientState, Download, Upload
from partita.measures.ended import ended, received


@checked("measure ")
def aggregation_change() -> Measure:
    """How far the models of the cohort jump when the server has aggregated: mean and deviation.

    Use it when training collapses although each client alone does well.
    """

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:
        rule = algorithm.local(problem)

        def start(download: Download, state: ClientState) -> Tensor:
            last = ended(download)
            begins = getattr(rule.start(received(download), state), "params", download.shared)
            change = {k: begins[k] - v for k, v in last.items() if v.is_floating_point()}
            zero = torch.zeros((), device=next(iter(last.values())).device) if last else torch.zeros(())
            return tree.norm(change) if change else zero

        def finish(carry: Tensor, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload({}, metrics={"change": carry}), ClientState({}, {})

        return LocalRule(start, (), finish)

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        change = uploads.metrics["change"].double()
        return {"mean": float(change.mean()), "std": float(change.std(correction=0))}

    return Measure("aggregation_change", client, summarize, {}, of_cohort=True)
