"""Whether the measures of a run can look at what they are to look at, in each of its stages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita.core import draws, tree
from partita.core.parts import Algorithm, Phase, Watched
from partita.core.types import Batch, Download, Inputs, Partition, RoundContext, Tensors
from partita.engine.account import upload_like
from partita.engine.execute.plan import most_seen
from partita.engine.execute.task import Task
from partita.engine.model.problem import ModelProblem
from partita.engine.settings import stage_work
from partita.engine.setup import Setup


def refuse_misfits(setup: Setup) -> None:
    """Refuse, before any work, measures that cannot look at one of the stages."""
    asking = [m.fits for m in setup.settings.measures if m.fits is not None]
    for number in range(len(setup.plans)) if asking else ():
        watched = _watched(setup, number)
        for fits in asking:
            fits(watched)


def _watched(setup: Setup, number: int) -> Watched:
    """Return what a measure is to look at in a stage."""
    data, plan, newcomers = setup.data, setup.plans[number], setup.newcomers
    algorithm, initial = plan.algorithm, setup.initial
    partition = setup.partition_of(algorithm)
    task = Task(setup.model, data, partition, setup.profile, initial, method_loss=algorithm.loss)
    problem = task.alone
    start = int(data.train[data.train[:, 1] > 0][0, 0])
    x, y = data.gather(torch.arange(start, start + 1))
    context = RoundContext(0, 0, number, 0, plan.rounds or 1, stage_work(plan))
    phases = _sending_phases(algorithm, problem, initial, partition, x, y)
    return Watched(
        algorithm=algorithm,
        problem=problem,
        like=upload_like(algorithm, problem, initial, partition, setup.settings.device),
        x=x,
        y=y,
        params=initial,
        seen=most_seen(phases, setup.measurable, data, context),
        newcomers=0 if newcomers is None else int((newcomers.train[:, 1] > 0).sum()),
        alike=setup.devices.alike,
    )


def _sending_phases(
    algorithm: Algorithm, problem: ModelProblem, initial: Tensors, partition: Partition, x: Inputs, y: Tensor
) -> list[Phase]:
    """Return the phases of a client's work that move what it sends, by a step of each on some samples.

    Where a step cannot be taken, as with a loss that asks for other models, all count.
    """
    shared, key = tree.pick(initial, partition.shared), draws.key(0, "start", 0, device=y.device)
    download = Download(shared, algorithm.server(problem).init(shared).extra, 0, key)
    state = algorithm.init_client(initial, partition)
    rule, batch = algorithm.local(replace(problem, owns_gradients=False)), Batch(x, y, None, key)

    def moves(phase: Phase) -> bool:
        carry, lr = rule.start(download, state), torch.full((), 0.1, device=y.device)
        batches = batch if phase.batches == 1 else (batch,) * phase.batches
        after = phase.step(carry, batches, (lr,) * len(phase.lr))
        before, sent = (rule.finish(c, download, state)[0].delta for c in (carry, after))
        return any(not torch.equal(sent[k], v) for k, v in before.items())

    try:
        return [phase for phase in rule.phases if moves(phase)]
    except Exception:  # any rule may need more than this
        return list(rule.phases)
