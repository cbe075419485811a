"""The aggregators by their definitions, in plain NumPy and one column or vector at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from partita.core.parts import Aggregator, Combined


def combine(aggregator: Aggregator, deltas: dict[str, Any], weight: Any = None, key: int = 0) -> Combined:
    """The aggregator on arrays or tensors; without weights all have weight one."""
    tensors = {k: torch.as_tensor(d) for k, d in deltas.items()}
    n = len(next(iter(tensors.values()))) if weight is None else len(weight)
    weights = (
        torch.ones(n, dtype=torch.float64) if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    )
    return aggregator.combine(tensors, weights, torch.tensor(key))


def vector(aggregator: Aggregator, x: Any, weight: Any = None, key: int = 0) -> np.ndarray:
    """The aggregate of the rows of a matrix. Cut in two names, which should not matter."""
    x = torch.as_tensor(x)
    half = x.shape[1] // 2
    done = combine(aggregator, {"a": x[:, :half], "b": x[:, half:]}, weight, key)
    return torch.cat([done.delta["a"], done.delta["b"]]).numpy()


def trimmed(x: np.ndarray, f: int, weight: np.ndarray) -> np.ndarray:
    out = []
    for column in x.T:
        kept = np.argsort(column, kind="stable")[f : len(x) - f]
        out.append((column[kept] * weight[kept]).sum() / weight[kept].sum())
    return np.array(out)


def weighted_median(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """For whole-number weights: the median with every client as often as its weight says."""
    return np.median(np.repeat(x, weight.astype(int), axis=0), axis=0)


def objective(z: np.ndarray, x: np.ndarray, weight: np.ndarray) -> float:
    """Of the geometric median."""
    return float((weight * np.linalg.norm(x - z, axis=1)).sum())


def weiszfeld(x: np.ndarray, weight: np.ndarray, nu: float, steps: int = 5000) -> np.ndarray:
    z = np.median(x, axis=0)
    for _ in range(steps):
        beta = weight / np.maximum(nu, np.linalg.norm(x - z, axis=1))
        z = beta @ x / beta.sum()
    return z


def krum_scores(x: np.ndarray, f: int) -> np.ndarray:
    n = len(x)
    scores = []
    for i in range(n):
        apart = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(apart[: n - f - 2]))
    return np.array(scores)


def clipped(x: np.ndarray, weight: np.ndarray, tau: float, steps: int, v: np.ndarray) -> np.ndarray:
    for _ in range(steps):
        moves = [(r - v) * min(1.0, tau / max(np.linalg.norm(r - v), 1e-300)) for r in x]
        v = v + np.average(moves, axis=0, weights=weight)
    return v


def neighbours(x: np.ndarray, f: int, weight: np.ndarray) -> np.ndarray:
    rows = []
    for r in x:
        near = np.argsort(((x - r) ** 2).sum(1), kind="stable")[: len(x) - f]
        rows.append(np.average(x[near], axis=0, weights=weight[near]))
    return np.array(rows)


def soft(x: np.ndarray, delta: float) -> np.ndarray:
    return np.sign(x) * np.maximum(0, np.abs(x) - delta)


def shrunk(x: np.ndarray, delta: float) -> np.ndarray:
    """The proximal map of δ‖·‖₂ on every row."""
    norm = np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
    return np.maximum(0, 1 - delta / norm) * x
