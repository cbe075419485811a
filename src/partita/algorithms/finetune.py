"""Fine-tuning.

    client:  v_i ← v_i − η (∇_v f_i(u, v_i) + μ (v_i − v⁰))     u fixed; v⁰ is the server's part
    server:  nothing changes

With everything personal it is full fine-tuning; with μ > 0 (`personal_l2`) also the paper's "Ditto" baseline.
After a stage that trained v_i with the clients, the server still has the v⁰ that all of them began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from partita.algorithms.base import Common, Lr, Part, PersonalL2, compose, method, settings
from partita.algorithms.local.sgd import personal_only
from partita.algorithms.partition import personal_names
from partita.core.parts import Algorithm, LocalRule, Problem
from partita.core.types import Partition
from partita.optim.rates import as_rate


@method(
    paper="Fine-tuning: stage (c) of the pipeline of Pillutla et al. (2022), appendix B.2",
    use="Use it as the last stage of a pipeline, or alone on a model trained elsewhere.",
)
def finetune(
    personal: Part,
    lr: Lr,
    personal_l2: PersonalL2 = 0.0,
    **options: Unpack[Common],
) -> Algorithm:
    """Each client adapts its personal part; the shared model is fixed and nothing is sent back.

    By its name (`compare --algorithms finetune`, `--set algorithm=finetune`) it is a pipeline: fedavg for the
    rounds of the run, with the same options, then five passes of every client over its data; the global score
    is that of fedavg. There, `personal` is taken from the recipe's own method, or all of the model.
    """
    common, eta = settings(options), as_rate(lr)

    def partition(model: nn.Module, names: Sequence[str]) -> Partition:
        return Partition(shared=tuple(names), personal=personal_names(model, names, personal))

    def local(problem: Problem) -> LocalRule:
        return personal_only(problem, eta, common.optimizer, personal_l2=personal_l2)

    return compose(local, common, partition=partition, synchronous_only="clients send nothing")
