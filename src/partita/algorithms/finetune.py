"""Fine-tuning: stage (c) of the pipeline of Pillutla et al. (2022), appendix B.2.

    client:  v_i ← v_i − η (∇_v f_i(u, v_i) + λ (v_i − v))      u fixed; v is the global model's part
    server:  nothing changes

With everything personal it is full fine-tuning; with λ > 0 (`l2`) it is the paper's "Ditto" baseline.
The global model stays with the clients beside their own part, since the pull needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from partita import check
from partita.algorithms.base import Common, compose, method, rate, settings
from partita.local.sgd import finish, move, start
from partita.partition import Personal, personal_names
from partita.types import Algorithm, LocalRule, Partition, Phase, Problem, Rate


@method
def finetune(personal: Personal, lr: float | Rate, l2: float = 0.0, **options: Unpack[Common]) -> Algorithm:
    """Each client adapts its personal part; the shared model is fixed and nothing is sent back.

    Use it as the last stage of a pipeline, or alone on a model trained elsewhere.
    """
    common, eta = settings(options), rate("lr", lr)
    l2 = check.number("l2", l2, low=0.0)

    def partition(model: nn.Module, names: Sequence[str]) -> Partition:
        return Partition(shared=tuple(names), personal=personal_names(model, names, personal))

    def local(problem: Problem) -> LocalRule:
        step = move(problem, problem.partition.personal, optimizer=common.optimizer, pull=l2)
        return LocalRule(start(problem, common.optimizer), (Phase(step, (eta,)),), finish(problem, send=()))

    return compose(local, common, personal=personal, partition=partition)
