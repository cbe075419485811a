"""Which layers of clients' models are alike: EmbracingFL, Lee et al. (2024), Figures 1 and 3.

Every client has its own model; after every round a part of it becomes the average of all clients': nothing,
the last half of the layers, the first half, or the first half of the channels of every layer. SVCCA compares
what the layers of any two clients put out for the same images; the largest value of all pairs is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from partita import measures, models
from partita.algorithms import fedavg, fedsim
from partita.algorithms.alone import local
from partita.core.parts import Algorithm, LocalRule, Personalize, Problem
from partita.core.types import ClientState, Download, Partition, Tensors
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.recipes.weak import BATCH, TAU, cifar, share_of

Runs = Mapping[str, Sequence[Record]]
SHOWN = {f"block{i}": f"conv {2 * i + 1}" for i in (1, 3, 5, 7, 9)}
HALF = 5  # blocks of the first half: the stem and four residual blocks


def embracing_svcca(
    rounds: int = 10,
    width: float = 0.25,
    lr: float = 0.1,
    clients: int = 16,
    images: int = 64,
    seed: int = 0,
) -> Study:
    """Which layers stay alike across clients? Alone, and with a half of the model averaged (Figures 1 and 3).

    rounds   of 10 local steps; the paper has 100
    width    of ResNet-20; the paper's is 1
    lr       the step size
    clients  in all; the paper has 128
    images   that the layers are compared on
    """
    share_of(clients)
    model, source = models.resnet20(10, width=width, seed=seed), cifar(clients, seed)
    names = list(dict(model.named_children()))
    first, second = ([f"{n}.*" for n in some] for some in (names[:HALF], names[HALF:]))
    client: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
    rules = {
        "alone": local(lr, **client),
        "second-half": fedsim(first, lr, **client),
        "first-half": fedsim(second, lr, **client),
        "half-channels": half_channels(lr, model, 0.5, **client),
    }

    def variant(rule: Algorithm) -> Variant:
        return Variant(
            Experiment(
                model=model,
                data=source,
                algorithm=rule,
                rounds=rounds,
                steps=TAU,
                batch=BATCH,
                seed=seed,
                norm="global",
                measures=[measures.svcca(images, list(SHOWN))],
                baselines=False,
                checkpoint_every=0,
            )
        )

    return Study({k: variant(rule) for k, rule in rules.items()}, tables=lambda runs: [_table(runs)])


def half_channels(lr: float, model: nn.Module, share: float, **options: Any) -> Algorithm:
    """fedavg of the first channels of every layer; clients keep the others (the paper's channel-wise)."""
    usual = fedavg(lr, **options)
    masks = _masks(model, share)

    def mixed(download: Download, state: ClientState) -> Tensors:
        received = download.shared
        return {k: torch.where(masks[k].to(v.device), received[k], v) for k, v in state.personal.items()}

    def rule(problem: Problem) -> LocalRule:
        own = usual.local(problem)
        return own._replace(start=lambda d, state: own.start(d, ClientState(mixed(d, state), {})))

    return replace(
        usual,
        name="half_channels",
        partition=lambda module, names: Partition(tuple(names), tuple(names)),  # noqa: ARG005
        local=rule,
        personalize=lambda problem: Personalize(mixed, (), lambda tensors, d, s: tensors),  # noqa: ARG005
        options={**usual.options, "share": share},
    )


def _masks(model: nn.Module, share: float) -> Tensors:
    """Where a model of this width has its tensors."""
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
    """The largest SVCCA of any two clients at the end, layer by layer."""
    rows = []
    for name, seeds in runs.items():
        last = [run.metrics[-1]["measures"]["svcca"] for run in seeds]
        rows.append((name, *(mean_std([found[block] for found in last], 1, 2) for block in SHOWN)))
    columns = ("averaged", *(f"{block} ({conv})" for block, conv in SHOWN.items()))
    note = "The largest SVCCA of any two clients after the last round; 1: the layers put out the same."
    return Table("Similarity of layers across clients (Figures 1 and 3)", columns, rows, note)
