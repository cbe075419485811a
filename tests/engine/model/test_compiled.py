"""Models of torch.compile run as they would without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.data import FederatedData, from_arrays
from support import each


class Pooled(nn.Module):
    """The mean over real positions, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.drop, self.head = nn.Embedding(9, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        h = (torch.tanh(self.embedding(input_ids)) * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.head(self.drop(h))
        return logits


def made() -> FederatedData:
    rng = np.random.default_rng(0)
    x = [rng.integers(1, 9, n) for n in rng.integers(1, 9, 24)]
    return from_arrays({"input_ids": x}, np.arange(24) % 3, np.arange(24) % 4, test=0.2, validation=0)


def whole() -> nn.Module:
    model: nn.Module = torch.compile(Pooled())  # type: ignore[assignment]
    return model


def part() -> nn.Module:
    model = Pooled()
    model.head = torch.compile(model.head)  # type: ignore[assignment]
    return model


def in_place() -> nn.Module:
    model = Pooled()
    model.compile()
    return model


def its_forward() -> nn.Module:
    model = Pooled()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def federate(model: nn.Module | Callable[[], nn.Module], executor: str, out: Path | None = None) -> pt.Run:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        return pt.federate(
            model,
            made(),
            pt.fedalt(personal="head.*", lr=0.5),
            rounds=2,
            batch=4,
            executor=executor,
            out=out,
            baselines=False,
            progress=False,
        )


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@each("compiled", [whole, part, in_place, its_forward])
def test_a_compiled_model_runs_as_the_model_inside(
    compiled: Callable[[], nn.Module], executor: str, tmp_path: Path
) -> None:
    folder = tmp_path / compiled.__name__
    given, plain = compiled(), federate(Pooled(), executor)
    before = {k: v.clone() for k, v in given.state_dict().items()}
    run = federate(given, executor, folder)
    assert list(run.shared) == list(plain.shared)
    assert all(torch.equal(run.shared[k], v) for k, v in plain.shared.items())
    assert all(torch.equal(given.state_dict()[k], v) for k, v in before.items())
    for finished in (run, pt.load(folder, given)):
        model, expected = finished.client(1).model(), plain.client(1).model()
        assert type(model) is Pooled
        x, _ = run.client(1).samples()
        assert isinstance(x, dict)
        assert torch.equal(model(**x), expected(**x))


def test_a_function_may_return_a_compiled_model() -> None:
    runs = [federate(make, "vmap") for make in (Pooled, whole)]
    assert all(torch.equal(runs[1].shared[k], v) for k, v in runs[0].shared.items())
