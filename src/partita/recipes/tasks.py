"""The tasks of partial personalization: data, model and training, after Pillutla et al. (2022), appendix B.

| task | in the paper | here |
| --- | --- | --- |
| femnist | EMNIST, 1114 writers, ResNet-18 | 300 writers, ResNet-18 |
| shakespeare | StackOverflow, next word, 1000 users, transformer | next character, 266 roles, transformer |
| free_spoken_digits | LibriSpeech, 902 narrators, transformer + CTC | ten digits, 6 speakers, ResNet-20 |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

from torch import Tensor, nn

from partita import data, models, optim
from partita.core.options import Option, checked
from partita.core.parts import Optimizer, Rate
from partita.data import FederatedData
from partita.models import Blocks
from partita.recipes.sizes import SIZES, by_size

ADAPTERS = {"femnist": "residual", "shakespeare": "bottleneck", "free_spoken_digits": "residual"}


class TaskOptions(TypedDict, total=False):
    """The arguments of `task`, which are those of the recipes."""

    data: Annotated[str, Option("the task", choices=tuple(ADAPTERS), default="femnist")]
    size: Annotated[
        str,
        Option(
            "small: minutes on two cores, medium: minutes on a GPU, or as in the paper",
            choices=SIZES,
            default="small",
        ),
    ]
    data_seed: Annotated[
        int, Option("draws the clients and their splits, the same for all seeds of a study", low=0, default=0)
    ]
    clients: Annotated[int | None, Option("number of clients; default: that of the task", low=1)]
    validation: Annotated[
        float,
        Option(
            "the share of its training samples by which each client chooses between the global and its "
            "personal model (appendix C.3); 0: none, and nobody chooses",
            low=0,
            high=0.5,
            default=0.0,
        ),
    ]
    rounds: Annotated[int | None, Option("rounds of stage (a); default: those of the task", low=1)]
    personal_rounds: Annotated[int | None, Option("rounds of stage (b); default: those of the task", low=1)]
    epochs: Annotated[int | None, Option("epochs of stage (c); default: those of the task", low=1)]


@dataclass(frozen=True)
class Task:
    """One dataset with its model and the settings of the three stages of the paper's pipeline (Table 9).

    Stages: (a) a global model, (b) shared and personal parts, (c) fine-tuning of the personal parts.
    `lr` and `server` have a value for each stage that uses one; `adapters` is the kind of adapter.
    `ditto` and `pfedme` are the weights λ of these baselines, as tuned in the paper (appendix B.3).
    """

    data: FederatedData
    model: Blocks
    adapters: str
    rounds: tuple[int, int]
    epochs: int
    cohort: int
    batch: int
    lr: tuple[Rate, Rate, float]
    server: tuple[Optimizer, ...]
    max_grad_norm: float | None = None
    ditto: float = 0.1
    pfedme: float = 0.1


class Samples(NamedTuple):
    """Which samples of a data set a task has: of how many clients, drawn and split by a seed."""

    clients: int | None
    data_seed: int
    validation: float

    def of(self, name: str, clients: int | None, **options: Any) -> FederatedData:
        """Return them, for so many clients."""
        return data.real(name, clients=clients, seed=self.data_seed, validation=self.validation, **options)


def with_dropout(model: Blocks, p: float) -> Blocks:
    """Return a copy with dropout p in its output part, and nowhere else.

    It acts in the dropout layers of that part or, if it has none, before its last dense layer.
    """
    model = copy.deepcopy(model)
    part = [m for name in model.output_part for m in model.get_submodule(name).modules()]
    layers = [m for m in part if isinstance(m, nn.Dropout)]
    for layer in layers:
        layer.p = p
    if not layers:
        last = [m for m in part if isinstance(m, nn.Linear)][-1]
        last.add_module("dropout", nn.Dropout(p))
        last.register_forward_pre_hook(_drop_input)
    return model


def _drop_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (layer.get_submodule("dropout")(inputs[0]),)


@checked()
def task(seed: int = 0, **options: Unpack[TaskOptions]) -> Task:
    """Return a task; its number of clients, rounds and epochs may be replaced."""
    samples = Samples(options["clients"], options["data_seed"], options["validation"])
    made = TASKS[options["data"]](options["size"], seed, samples)
    first, second = made.rounds
    return replace(
        made,
        rounds=(options["rounds"] or first, options["personal_rounds"] or second),
        epochs=options["epochs"] or made.epochs,
        cohort=min(made.cohort, made.data.clients),
    )


def network(name: str, size: str, seed: int) -> Blocks:
    """Return the model of a task; smaller sizes have fewer channels."""
    if name == "femnist":
        return models.resnet18(62, width=by_size(size, 0.125, 0.5, 1.0), seed=seed)
    if name == "free_spoken_digits":
        width = by_size(size, 0.5, 1.0, 1.0)
        return models.resnet20(10, norm="group", width=width, channels=1, seed=seed)
    width, depth = by_size(size, (64, 2), (128, 4), (256, 4))
    return models.transformer(76, length=80, width=width, hidden=4 * width, depth=depth, seed=seed)


def _femnist(size: str, seed: int, samples: Samples) -> Task:
    """Characters by writer. Paper: 2000 + 500 rounds of 10 writers, lr 0.5 halved every 500, then 0.01.

    At size paper all writers take part, the smallest with one image to learn from and one to be tested on.
    """
    least = by_size(size, 100, 100, 0)
    clients = samples.clients or by_size(size, 30, 100, None)
    rates: tuple[Rate, ...] = (
        optim.constant(0.2),
        optim.halving(0.5, every=100),
        optim.halving(0.5, every=500),
    )
    return Task(
        data=samples.of("femnist", clients, min_samples=least),
        model=network("femnist", size, seed),
        adapters=ADAPTERS["femnist"],
        rounds=by_size(size, (50, 10), (400, 100), (2000, 500)),
        epochs=by_size(size, 2, 5, 5),
        cohort=10,
        batch=32,
        lr=(by_size(size, *rates), optim.constant(0.01), 0.01),
        server=(optim.sgd(), optim.sgd()),
    )


def _shakespeare(size: str, seed: int, samples: Samples) -> Task:
    """Characters by role. Paper: 1000 + 500 rounds of 50, FedAdam, clipped gradients, warm-up and decay.

    Its server rates are those of Adam with bias correction and ε = 1e-8.
    """
    clients = samples.clients or by_size(size, 30, 100, None)
    return Task(
        data=samples.of("shakespeare", clients, min_characters=5000),
        model=network("shakespeare", size, seed),
        adapters=ADAPTERS["shakespeare"],
        rounds=by_size(size, (50, 10), (300, 100), (1000, 500)),
        epochs=by_size(size, 2, 5, 5),
        cohort=by_size(size, 10, 20, 50),
        batch=by_size(size, 16, 32, 64),
        lr=(optim.linear(1.0, warmup=0.1), optim.linear(0.1, warmup=0.1), 0.1),
        server=(optim.adam(5e-4, eps=1e-8), optim.adam(5e-5, eps=1e-8)),
        max_grad_norm=0.1,
        ditto=1e-3,
        pfedme=1e-4,
    )


def _free_spoken_digits(size: str, seed: int, samples: Samples) -> Task:
    """Spoken digits by speaker: 6 clients, all of them in every round."""
    return Task(
        data=samples.of("free_spoken_digits", samples.clients),
        model=network("free_spoken_digits", size, seed),
        adapters=ADAPTERS["free_spoken_digits"],
        rounds=by_size(size, (15, 8), (60, 20), (200, 100)),
        epochs=by_size(size, 2, 5, 5),
        cohort=6,
        batch=32,
        lr=(optim.linear(0.1, warmup=0.1), optim.constant(0.01), 0.01),
        server=(optim.sgd(), optim.sgd()),
    )


TASKS: dict[str, Callable[[str, int, Samples], Task]] = {
    "femnist": _femnist,
    "shakespeare": _shakespeare,
    "free_spoken_digits": _free_spoken_digits,
}
