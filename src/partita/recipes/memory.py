"""Parameters and memory of partly personal models: Pillutla et al. (2022), Tables 5, 7 and 10.

memory = 3·size(u) + 2·size(v) + size(backprop)

Nothing is trained. Our residual adapters and the paper's models are the same, so the counts agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from partita import models
from partita.algorithms.partition import split
from partita.capacity.client_memory import client_memory
from partita.core import check
from partita.data import FederatedData
from partita.engine.model.probe import examine
from partita.recipes.sizes import SIZES
from partita.recipes.study import Study
from partita.recipes.tables import Table
from partita.recipes.tasks import ADAPTERS, network

PARTS = ("input", "output", "adapter")


class Case(NamedTuple):
    """A model, samples for it, and the paper's figures: parameters of the parts, and megabytes."""

    name: str
    model: nn.Module
    adapters: str
    x: Tensor
    parameters: tuple[str, str, str] = ("-", "-", "-")
    megabytes: tuple[str, ...] = ("-",) * 5


def partial_memory(size: str = "paper", seed: int = 0) -> Study:
    """How much smaller is a partly personal model? Parameters, and memory of training on a client's device.

    Nothing is trained and no data are needed.

    size   paper (the paper's networks), or medium or small (those of the other recipes)
    """
    check.choice("size", size, SIZES)
    return Study({}, tables=lambda runs: memory_tables(size, seed))  # noqa: ARG005


def memory_tables(size: str, seed: int) -> list[Table]:
    """Return both tables; a cell is ours / the paper's."""
    counts: list[tuple[str, ...]] = []
    memory: list[tuple[str, ...]] = []
    for case in _cases(size, seed):
        adapted = models.add_adapters(case.model, case.adapters, seed=seed)
        needed = [_memory(case.model, "none", case.x)]
        for part, theirs in zip(PARTS, case.parameters):
            model = adapted if part == "adapter" else case.model
            u, v = _sizes(model, part)
            counts.append((case.name, part, f"{v:,}", theirs, f"{u:,}", f"{100 * v / (u + v):.2f}"))
            needed.append(_memory(model, part, case.x))
        needed.append(_memory(case.model, "full", case.x))
        cells = [f"{ours / 1e6:.0f} / {theirs}" for ours, theirs in zip(needed, case.megabytes)]
        memory.append((case.name, *cells, _saved(needed[1:4], needed[4])))
    return [
        Table(
            "Personal and shared parameters (Tables 5, 7)",
            ("network", "personal part", "personal", "the paper's", "shared", "personal, %"),
            counts,
        ),
        Table(
            "Memory of training on a client's device, MB: ours / the paper's (Table 10)",
            ("network", "no personalization", *PARTS, "full", "partial saves, %"),
            memory,
            "3·size(u) + 2·size(v) + what the forward pass keeps for the backward pass of one sample; "
            "1 MB is 10⁶ bytes, a parameter has 4.",
        ),
    ]


def _cases(size: str, seed: int) -> list[Case]:
    def case(name: str, task: str, x: Tensor) -> Case:
        return Case(name, network(task, size, seed), ADAPTERS[task], x)

    text = torch.zeros(4, 80, dtype=torch.int64)
    letters = case("EMNIST ResNet-18", "femnist", torch.zeros(4, 28, 28))
    ours = [
        case("Shakespeare transformer", "shakespeare", text),
        case("spoken digits ResNet-20", "free_spoken_digits", torch.zeros(4, 32, 32)),
    ]
    if size != "paper":
        return [letters, *ours]
    letters = letters._replace(
        parameters=("0.7K", "0.03M", "1.4M"), megabytes=("142", "142", "142", "159", "232")
    )
    words = Case(
        "StackOverflow transformer",
        models.transformer(seed=seed),
        "bottleneck",
        text[:, :20],
        parameters=("0.8M", "0.8M", "0.07M"),
        megabytes=("71", "67", "67", "72", "116"),
    )
    return [letters, words, *ours]


def _sizes(model: nn.Module, part: str) -> tuple[int, int]:
    """Return the numbers of parameters of u and of v."""
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    u, v = (sum(sizes[n] for n in names) for names in split(model, list(sizes), part))
    return u, v


def _memory(model: nn.Module, part: str, x: Tensor) -> int:
    """Return the bytes; full personalization holds a whole personal model beside the shared one."""
    u, v = _sizes(model, "none" if part == "full" else part)
    backprop = examine(
        model, FederatedData.make(x, _targets(model, x), [(0, len(x))]), None, None
    ).sample_bytes
    return client_memory(4 * u, 4 * (u if part == "full" else v), backprop)


def _targets(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(-1)  # type: ignore[no-any-return]


def _saved(partial: list[int], full: int) -> str:
    low, high = 1 - max(partial) / full, 1 - min(partial) / full
    return f"{100 * low:.0f} to {100 * high:.0f}"
