"""The tasks of partial personalization: data, model and training, after Pillutla et al. (2022), appendix B.

| task | the paper's | here |
| --- | --- | --- |
| femnist | EMNIST, 1114 writers, ResNet-18 | 272 writers with at least 100 images, the same |
| shakespeare | StackOverflow, next word, 1000 users, transformer | next character, 266 roles, the same |
| free_spoken_digits | LibriSpeech, 902 narrators, transformer + CTC | ten digits, 6 speakers, ResNet-20 |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from partita import data, models, optim
from partita.core import check
from partita.core.parts import Optimizer, Rate
from partita.data import FederatedData

SIZES = ("small", "medium", "paper")
ADAPTERS = {"femnist": "residual", "shakespeare": "bottleneck", "free_spoken_digits": "residual"}


@dataclass(frozen=True)
class Task:
    """One dataset with its model and the settings of the three stages of the paper's pipeline (Table 9).

    Stages: (a) a global model, (b) shared and personal parts, (c) fine-tuning of the personal parts.
    `lr` and `server_lr` have a value for each stage that uses one; `adapters` is the kind of adapter.
    """

    data: FederatedData
    model: nn.Module
    adapters: str
    rounds: tuple[int, int]
    epochs: int
    cohort: int
    batch: int
    lr: tuple[Rate, Rate, float]
    server: tuple[Optimizer, ...]
    max_grad_norm: float | None = None
    ditto: float = 0.1  # ℓ2 pull of the "Ditto" baseline

    def adapted(self, seed: int) -> nn.Module:
        """The model with adapters, the same ones for every client."""
        return models.add_adapters(self.model, self.adapters, seed=seed)


def with_dropout(model: nn.Module, p: float) -> nn.Module:
    """A copy that drops with probability p: in its dropout layers or, without any, before its last layer."""
    model = copy.deepcopy(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for layer in layers:
        layer.p = p
    if not layers:
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        last.add_module("dropout", nn.Dropout(p))
        last.register_forward_pre_hook(_drop_input)
    return model


def _drop_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (layer.get_submodule("dropout")(inputs[0]),)


def task(
    name: str,
    size: str = "small",
    seed: int = 0,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    personal_rounds: int | None = None,
    epochs: int | None = None,
) -> Task:
    """A task by its name; the other arguments replace its own number of clients, rounds and epochs."""
    check.choice("data", name, TASKS)
    check.choice("size", size, SIZES)
    found = TASKS[name](size, seed, clients)
    a, b = found.rounds
    wanted = {"rounds": rounds, "personal_rounds": personal_rounds, "epochs": epochs}
    for field, value in wanted.items():
        if value is not None:
            check.integer(field, value, low=1)
    return replace(
        found,
        rounds=(rounds or a, personal_rounds or b),
        epochs=epochs or found.epochs,
        cohort=min(found.cohort, found.data.clients),
    )


def network(name: str, size: str, seed: int) -> nn.Module:
    """The model of a task; smaller sizes have fewer channels."""
    i = SIZES.index(size)
    if name == "femnist":
        return models.resnet18(62, width=(0.125, 0.5, 1.0)[i], seed=seed)
    if name == "free_spoken_digits":
        return models.resnet20(10, norm="group", width=(0.5, 1.0, 1.0)[i], channels=1, seed=seed)
    width, depth = ((64, 2), (128, 4), (256, 4))[i]
    return models.transformer(76, length=80, width=width, hidden=4 * width, depth=depth, seed=seed)


def _femnist(size: str, seed: int, clients: int | None) -> Task:
    """Characters by writer. Paper: 2000 + 500 rounds of 10 writers, lr 0.5 halved every 500, then 0.01."""
    i = SIZES.index(size)
    return Task(
        data=data.real("femnist", min_samples=100, clients=clients or (30, 100, None)[i], seed=seed),
        model=network("femnist", size, seed),
        adapters=ADAPTERS["femnist"],
        rounds=((50, 10), (400, 100), (2000, 500))[i],
        epochs=(2, 5, 5)[i],
        cohort=10,
        batch=32,
        lr=(
            (optim.constant(0.2), optim.halving(0.5, every=100), optim.halving(0.5, every=500))[i],
            _LR,
            0.01,
        ),
        server=(optim.sgd(), optim.sgd()),
    )


def _shakespeare(size: str, seed: int, clients: int | None) -> Task:
    """Characters by role. Paper: 1000 + 500 rounds of 50, FedAdam, clipped gradients, warm-up and decay."""
    i = SIZES.index(size)
    return Task(
        data=data.real("shakespeare", min_characters=5000, clients=clients or (30, 100, None)[i], seed=seed),
        model=network("shakespeare", size, seed),
        adapters=ADAPTERS["shakespeare"],
        rounds=((50, 10), (300, 100), (1000, 500))[i],
        epochs=(2, 5, 5)[i],
        cohort=(10, 20, 50)[i],
        batch=(16, 32, 64)[i],
        lr=(optim.linear(1.0, warmup=0.1), optim.linear(0.1, warmup=0.1), 0.1),
        server=tuple(optim.adam(lr * (10, 10, 1)[i]) for lr in (5e-4, 5e-5)),
        max_grad_norm=0.1,
        ditto=1e-3,
    )


def _free_spoken_digits(size: str, seed: int, clients: int | None) -> Task:
    """Spoken digits by speaker: 6 clients, all of them in every round."""
    i = SIZES.index(size)
    return Task(
        data=data.real("free_spoken_digits", clients=clients, seed=seed),
        model=network("free_spoken_digits", size, seed),
        adapters=ADAPTERS["free_spoken_digits"],
        rounds=((15, 8), (60, 20), (200, 100))[i],
        epochs=(2, 5, 5)[i],
        cohort=6,
        batch=32,
        lr=(optim.linear(0.1, warmup=0.1), _LR, 0.01),
        server=(optim.sgd(), optim.sgd()),
    )


_LR = optim.constant(0.01)
TASKS: dict[str, Callable[[str, int, int | None], Task]] = {
    "femnist": _femnist,
    "shakespeare": _shakespeare,
    "free_spoken_digits": _free_spoken_digits,
}
