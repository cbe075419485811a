"""Which layers of clients' models are alike: EmbracingFL, Lee et al. (2024), Figures 1 and 3.

Every client has its own model; after every round a part of it becomes the average over all clients: nothing
(Figure 1), the last half of the layers, the first half, or the first half of the channels of every layer
(Figure 3, ResNet-20 only). SVCCA compares the outputs of a layer of any two clients for the same samples that
nobody trains on; tables and charts have the largest value of all pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor, nn

from partita import measures
from partita.algorithms import fedavg, fedsim
from partita.algorithms.alone import local
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Personalize, Problem
from partita.core.types import ClientState, Download, Partition, Tensors
from partita.engine.divergence import learned_nothing
from partita.engine.record import Record, lookup
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, under
from partita.recipes.tables import Runs, Table, mean_std
from partita.recipes.weak import BATCH, POINTS, SGD, TAU, Options, TaskName, model_and_data, settled
from partita.report.charts import Chart, Panel, Series, curve

SHOWN = {  # the layers that are compared, and the paper's names of them
    "cifar10": {f"block{i}": f"conv {2 * i + 1}" for i in (1, 3, 5, 7, 9)},
    "femnist": {"conv1": "conv 1", "conv2": "conv 2", "dense1": "dense 1", "output": "dense 2"},
    "imdb": {"embedding": "embedding", "lstm": "LSTM", "output": "dense"},
}
MODELS = {"cifar10": "CIFAR-10 (ResNet-20)", "femnist": "FEMNIST (CNN)", "imdb": "IMDB (LSTM)"}
HALF = 5  # blocks of the first half: the stem and four residual blocks
ROUNDS = (10, 100)  # small and of the paper: 1000 local steps


@checked()
def embracing_svcca(
    task: TaskName = "cifar10",
    images: Annotated[int, Option("samples on which the layers are compared", low=2)] = 64,
    seed: int = 0,
    **options: Unpack[Options],
) -> Study:
    """Which layers stay alike across clients? Alone, and with half of the model averaged (Figures 1 and 3).

    On femnist and imdb every client is alone (Figure 1).
    """
    setup = settled(task, options, ROUNDS)
    model, source = model_and_data(setup, seed)
    shown = SHOWN[task]
    methods = {"alone": local(setup.lr, **SGD)}
    if task == "cifar10":
        blocks = [f"{name}.*" for name, _ in model.named_children()]
        averaged: dict[str, Any] = {**SGD, "weighting": setup.weighting}
        methods |= {
            "second-half": fedsim(blocks[:HALF], setup.lr, **averaged),
            "first-half": fedsim(blocks[HALF:], setup.lr, **averaged),
            "half-channels": half_channels(setup.lr, model, 0.5, **averaged),
        }
    base = Experiment(
        model=model,
        data=source,
        algorithm=methods["alone"],
        rounds=setup.rounds,
        steps=TAU,
        batch=BATCH,
        seed=seed,
        norm="global" if task == "cifar10" else None,  # the other models have no BatchNorm
        measures=[measures.svcca(images, list(shown))],
        evaluate_every=max(1, setup.rounds // POINTS),
        baselines=False,
        checkpoint_every=0,
    )
    return Study(
        under(base, methods),
        tables=lambda runs: [_table(runs, shown)],
        charts=lambda runs: [_alone(runs, task), *(_compared(runs) if task == "cifar10" else ())],
    )


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


def _table(runs: Runs, shown: Mapping[str, str]) -> Table:
    """Return the largest SVCCA of any two clients at the end, layer by layer."""
    rows = []
    for name, seeds in runs.items():
        last = [None if learned_nothing([run]) else run.metrics[-1] for run in seeds]
        rows.append((name, *(mean_std(lookup(row, "measures", "svcca", b) for row in last) for b in shown)))
    columns = ("averaged", *(f"{b} ({layer})" if b != layer else b for b, layer in shown.items()))
    note = (
        "The largest SVCCA of any two clients after the last round; 1: the layers put out the same. Of runs "
        "in which nothing was learned there is none."
    )
    return Table("Similarity of layers across clients (Figures 1 and 3)", columns, rows, note)


# ---- charts


def _alone(runs: Runs, task: str) -> Chart:
    """Return the similarity of each layer among clients that never average."""
    lines = [_line(layer, runs["alone"], block) for block, layer in SHOWN[task].items()]
    panel = Panel(MODELS[task], "local steps", "largest SVCCA", lines)
    note = "The paper has three panels; --set task=femnist and task=imdb make the two others."
    return Chart("Similarity of layers across clients that train alone (Figure 1)", [panel], note)


def _compared(runs: Runs) -> list[Chart]:
    """Return the charts of two ways each to average half of the model, a panel for each layer."""
    pairs = {
        "Similarity by layers and by channels (Figure 3a)": {
            "second-half": "layer-wise",
            "half-channels": "channel-wise",
        },
        "Similarity by the half that is averaged (Figure 3b)": {
            "first-half": "first half",
            "second-half": "second half",
        },
    }
    return [
        Chart(
            title,
            [
                Panel(
                    layer,
                    "local steps",
                    "largest SVCCA",
                    [_line(label, runs[name], block) for name, label in names.items()],
                )
                for block, layer in SHOWN["cifar10"].items()
            ],
        )
        for title, names in pairs.items()
    ]


def _line(label: str, seeds: Sequence[Record], block: str) -> Series:
    """Return the similarity of a layer over the local steps."""
    trained = [run for run in seeds if not learned_nothing([run])]
    line = curve(label, trained, lambda row: lookup(row, "measures", "svcca", block))
    return line._replace(x=[TAU * r for r in line.x])
