"""Layers whose weights are normalized: u and v of spectral_norm belong to each client while it trains."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.data import FederatedData, from_arrays
from support import each

CLIENTS, ROUNDS, STEPS, LR = 3, 3, 2, 0.2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(27, 6)).astype(np.float32)
Y, CLIENT = RNG.integers(0, 3, 27), np.arange(27) % CLIENTS
Norm = Callable[[nn.Module], nn.Module]


def made() -> FederatedData:
    return from_arrays(X, Y, CLIENT, test=0, validation=0)


def model(norm: Norm) -> nn.Module:
    torch.manual_seed(0)
    body = [norm(nn.Conv1d(1, 4, 3)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(16, 3))]
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *body)


def plain_rounds(norm: Norm) -> dict[str, Tensor]:
    """Federated averaging of whole state dictionaries, with torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = model(norm).state_dict()
        for _ in range(ROUNDS):
            ends = []
            for client in range(CLIENTS):
                own = model(norm)
                own.load_state_dict(copy.deepcopy(now))
                optimizer = torch.optim.SGD(own.parameters(), lr=LR)
                for _ in range(STEPS):
                    x, y = (torch.from_numpy(values[client == CLIENT]) for values in (X, Y))
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(own(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                ends.append(own.state_dict())
            now = {k: torch.stack([end[k] for end in ends]).mean(0) for k in now}
    return now


@pytest.mark.parametrize("executor", ["loop", "pool", "vmap", "graph", "auto"])
@each("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.weight_norm])
def test_runs_equal_averaging_in_torch(norm: Any, executor: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be stacked")
        run = pt.federate(
            model(norm),
            made(),
            pt.fedavg(LR),
            rounds=ROUNDS,
            steps=STEPS,
            executor=executor,
            norm="global",
            baselines=False,
            progress=False,
        )
    expected = plain_rounds(norm)
    assert set(run.shared) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(run.shared[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.client(0).model().state_dict(), dict(run.shared), rtol=0, atol=0)
