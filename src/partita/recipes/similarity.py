"""Which layers of clients' models are alike: EmbracingFL, Lee et al. (2024), Figures 1 and 3.

Every client has its own model; after every round a part of it becomes the average over all clients: nothing,
the last half of the layers, the first half, or the first half of the channels of every layer. SVCCA compares
the outputs of a layer of any two clients for the same images; the table has the largest value of all pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from partita import measures, models
from partita.algorithms import fedavg, fedsim
from partita.algorithms.alone import local
from partita.core.options import checked
from partita.core.parts import Algorithm, LocalRule, Personalize, Problem
from partita.core.types import ClientState, Download, Partition, Tensors
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, under
from partita.recipes.tables import Runs, Table, mean_std
from partita.recipes.weak import BATCH, TAU, Options, cifar, share_of

SHOWN = {f"block{i}": f"conv {2 * i + 1}" for i in (1, 3, 5, 7, 9)}
HALF = 5  # blocks of the first half: the stem and four residual blocks


@checked()
def embracing_svcca(
    rounds: int = 10, lr: float = 0.1, images: int = 64, seed: int = 0, **options: Unpack[Options]
) -> Study:
    """Which layers stay alike across clients? Alone, and with half of the model averaged (Figures 1 and 3).

    rounds  rounds of 10 local steps; the paper uses 100
    lr      step size
    images  images on which the layers are compared
    """
    share_of(options["clients"])
    model = models.resnet20(10, width=options["width"], seed=seed)
    blocks = [f"{name}.*" for name, _ in model.named_children()]
    sgd: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
    methods = {
        "alone": local(lr, **sgd),
        "second-half": fedsim(blocks[:HALF], lr, **sgd),
        "first-half": fedsim(blocks[HALF:], lr, **sgd),
        "half-channels": half_channels(lr, model, 0.5, **sgd),
    }
    base = Experiment(
        model=model,
        data=cifar(options["clients"], seed),
        algorithm=methods["alone"],
        rounds=rounds,
        steps=TAU,
        batch=BATCH,
        seed=seed,
        norm="global",
        measures=[measures.svcca(images, list(SHOWN))],
        baselines=False,
        checkpoint_every=0,
    )
    return Study(under(base, methods), tables=lambda runs: [_table(runs)])


def half_channels(lr: float, model: nn.Module, share: float, **options: Any) -> Algorithm:
    """Average the first channels of every layer; clients keep the others (the paper's channel-wise)."""
    plain = fedavg(lr, **options)
    masks = _masks(model, share)

    def mixed(download: Download, state: ClientState) -> Tensors:
        received = download.shared
        return {k: torch.where(masks[k].to(v.device), received[k], v) for k, v in state.personal.items()}

    def rule(problem: Problem) -> LocalRule:
        sgd = plain.local(problem)
        return sgd._replace(start=lambda d, state: sgd.start(d, ClientState(mixed(d, state), {})))

    return replace(
        plain,
        name="half_channels",
        partition=lambda module, names: Partition(tuple(names), tuple(names)),  # noqa: ARG005
        local=rule,
        personalize=lambda problem: Personalize(mixed, (), lambda tensors, d, s: tensors),  # noqa: ARG005
        options={**plain.options, "share": share},
    )


def _masks(model: nn.Module, share: float) -> Tensors:
    """Return masks of the coordinates that a model of this width has."""
    whole, part = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())}
        for m in (model, model.at_width(share))  # type: ignore[operator]
    )
    return {k: _leading(v, part[k].shape) for k, v in whole.items()}


def _leading(whole: Tensor, shape: torch.Size) -> Tensor:
    mask = torch.zeros(whole.shape, dtype=torch.bool)
    mask[tuple(slice(0, n) for n in shape)] = True
    return mask


def _table(runs: Runs) -> Table:
    """Return the largest SVCCA of any two clients at the end, layer by layer."""
    rows = []
    for name, seeds in runs.items():
        last = [run.metrics[-1]["measures"]["svcca"] for run in seeds]
        rows.append((name, *(mean_std([svcca[block] for svcca in last]) for block in SHOWN)))
    columns = ("averaged", *(f"{block} ({conv})" for block, conv in SHOWN.items()))
    note = "The largest SVCCA of any two clients after the last round; 1: the layers put out the same."
    return Table("Similarity of layers across clients (Figures 1 and 3)", columns, rows, note)
