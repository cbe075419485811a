"""Runs whose uploads and downloads pass transforms: of all methods and kinds, with all compressors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.parts import Algorithm, Transform
from partita.core.types import Tensors
from support import tensors

T = pt.transforms
CLIENTS = 8
CHAINS: dict[str, list[Transform]] = {
    "topk": [T.topk(0.1)],
    "topk by tensor": [T.topk(0.1, per="tensor", feedback=False)],
    "randk": [T.randk(0.1)],
    "unbiased randk": [T.randk(0.1, unbiased=True)],
    "quantize": [T.quantize(4)],
    "nearest": [T.quantize(2, stochastic=False, feedback=True)],
    "low rank": [T.low_rank(2)],
    "half": [T.half()],
    "topk, quantize": [T.topk(0.1), T.quantize(8)],
    "low rank, topk, half": [T.low_rank(2), T.topk(0.5), T.half("bfloat16")],
}

PRIVATE: dict[str, list[Transform]] = {
    "private": [pt.privacy.gaussian(noise=0.5, clip=0.2)],
    "private, topk": [pt.privacy.gaussian(noise=0.5, clip=0.2), T.topk(0.1)],
}
SHORT = "topk, quantize"
"""Of fast tests, where all are tried by slow ones."""
CLOSE = 1e-9
"""How far a stack may be from each client alone: in double precision no entry is so near to the next level
that the last bits of a product would round it to another one."""


@functools.cache
def data() -> pt.data.FederatedData:
    partition = pt.data.label_skew(classes=3)
    return in_double(pt.data.digits(clients=CLIENTS, partition=partition, validation=0, seed=1))


def in_double(samples: pt.data.FederatedData) -> pt.data.FederatedData:
    return replace(samples, x=samples.x.double())


def federate(algorithm: Algorithm | None = None, uploads: Sequence[Transform] = (), **changed: Any) -> pt.Run:
    settings: dict[str, Any] = {
        "rounds": 3, "cohort": 5, "steps": 2, "batch": 8, "seed": 3, "executor": "vmap",
        "baselines": False, "progress": False, "report": False, **changed,
    }  # fmt: skip
    model = (settings.pop("model", None) or pt.models.mlp(64, 16, 12, 10)).double()
    samples = settings.pop("samples", None) or data()
    return pt.federate(model, samples, algorithm or pt.fedavg(lr=0.1), uploads=uploads, **settings)


def remembered(run: pt.Run) -> Tensors:
    return {f"{i} {k}": v for i in range(len(run.clients)) for k, v in run.client(i).memory.items()}


def apart(a: pt.Run, b: pt.Run) -> float:
    ours, theirs = ({**tensors(run), **remembered(run)} for run in (a, b))
    assert list(ours) == list(theirs)
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def methods() -> dict[str, Algorithm]:
    return {
        "fedavg": pt.fedavg(lr=0.1, momentum=0.5),
        "fedalt": pt.fedalt("output", lr=0.1),
        "scaffold": pt.scaffold(lr=0.1),
        "ditto": pt.ditto(lr=0.1, lam=0.1),
        "apfl": pt.apfl(lr=0.1),
        "fedrod": pt.fedrod(lr=0.1),
        "fedadam": pt.fedadam(lr=0.1, server_lr=0.01),
        "l2gd": pt.l2gd(lr=0.1, lam=0.1, p=0.3),
        "fedplus": pt.fedavg_plus(lr=0.1, sigma=0.1),
    }


DELAYS = pt.schedule.delays(
    compute=pt.schedule.exponential(1.0), upload=pt.schedule.uniform(0.1, 0.5), dropout=0.1
)
KINDS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "depth": (pt.fedavg(lr=0.1), {"capacity": pt.capacity.depth({"strong": 0, "weak": 1})}),
    "width": (pt.fedavg(lr=0.1), {"capacity": pt.capacity.width({"strong": 1.0, "weak": 0.5})}),
    "fjord": (pt.fedavg(lr=0.1), {"capacity": pt.capacity.fjord({"strong": 1.0, "weak": 0.5})}),
    "scaffold, width": (pt.scaffold(lr=0.1), {"capacity": pt.capacity.width({"strong": 1.0, "weak": 0.5})}),
    "fedbuff": (
        pt.fedbuff(lr=0.1, buffer=3),
        {"schedule": pt.schedule.asynchronous(delays=DELAYS), "rounds": 8, "cohort": None},
    ),
    "fedasync": (
        pt.fedasync(lr=0.1),
        {"schedule": pt.schedule.asynchronous(delays=DELAYS), "rounds": 8, "cohort": None},
    ),
    "deadline": (
        pt.fedavg(lr=0.1),
        {"schedule": pt.schedule.synchronous(deadline=4.0, quorum=2, late="apply", delays=DELAYS)},
    ),
    "robust": (
        pt.fedavg(lr=0.1, aggregate=pt.aggregate.krum(2)),
        {"attack": pt.attack.sign_flip(), "byzantine": 0.25, "cohort": None},
    ),
    "pipeline": (
        pt.pipeline(
            pt.stage(pt.fedavg(lr=0.1), rounds=2),
            pt.stage(pt.fedalt("output", lr=0.1), rounds=2),
            pt.stage(pt.finetune(personal="all", lr=0.05), epochs=1),
        ),
        {"rounds": None},
    ),
}  # fmt: skip

UNIFORM = pt.fedavg(lr=0.1, weighting="uniform")
PRIVATE_KINDS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    **KINDS,
    "deadline, nobody waited for": (
        UNIFORM,
        {"schedule": pt.schedule.synchronous("poisson", deadline=1.5, delays=DELAYS)},
    ),
    "late": (
        UNIFORM,
        {"schedule": pt.schedule.synchronous("poisson", deadline=1.0, late="apply", delays=DELAYS)},
    ),
    "attack": (UNIFORM, {"attack": pt.attack.sign_flip(), "byzantine": 0.25}),
    "parts": (UNIFORM, {"memory": "50KiB"}),
}
PRIVATE_METHODS: dict[str, Algorithm] = {
    "apfl": pt.apfl(lr=0.1, weighting="uniform"),
    "pfedme": pt.pfedme(lr=0.1, lam=1.0, weighting="uniform"),
    "ffgg": pt.ffgg(personal="output", lr=0.1),
    "fedsim": pt.fedsim("output", lr=0.1, weighting="uniform"),
    "perfedavg": pt.perfedavg(lr=0.1, weighting="uniform"),
}
REFUSED_IN_PRIVATE = {"deadline": "quorum", "robust": "uploads"}
"""What depends on a single client, or is no sum, and the setting that is named."""


# ---- a model whose gradient is a line of NumPy


class Linear(nn.Module):
    """Logits x W."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3, generator=g, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def linear_data() -> pt.data.FederatedData:
    g = np.random.default_rng(0)
    x, y = torch.from_numpy(g.normal(size=(40, 6))), torch.from_numpy(g.integers(0, 3, 40))
    starts, sizes = [0, 5, 13, 20, 29], [5, 8, 7, 9, 6]
    return pt.data.FederatedData.make(x, y, list(zip(starts, sizes)), [(35, 5)] * 5)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    logits = x @ w
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y)
