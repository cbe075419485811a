"""Pieces of gradient inversion: distances between gradients, labels from a bias, how near what was found is.

Geiping et al., *Inverting Gradients* (2020); Zhu et al., *Deep Leakage from Gradients* (2019); Zhao et al.,
*iDLG* (2020); Wainakh et al., *User-Level Label Leakage from Gradient-Based Attacks* (2022).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.core.types import Tensors


def cosine_distance(g: Tensors, target: Tensors) -> Tensor:
    """Return 1 − ⟨g, t⟩ / (‖g‖ ‖t‖) over all entries: 0 where the directions are the same."""
    tiny = torch.finfo(next(iter(g.values())).dtype).tiny
    inner, square, of_target = _products(g, target)
    return 1 - inner / ((square * of_target).clamp(min=tiny)).sqrt()


def squared_distance(g: Tensors, target: Tensors) -> Tensor:
    """Return ‖g − t‖² / ‖t‖²."""
    tiny = torch.finfo(next(iter(g.values())).dtype).tiny
    inner, square, of_target = _products(g, target)
    return (square - 2 * inner + of_target) / of_target.clamp(min=tiny)


def _products(g: Tensors, target: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return ⟨g, t⟩, ‖g‖² and ‖t‖²."""
    pairs = [(v, target[k]) for k, v in g.items()]
    inner, square, of_target = (
        torch.stack([(a * b).sum() for a, b in each]).sum()
        for each in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
    )
    return inner, square, of_target


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours, over the last two axes of images."""
    down, right = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return down.abs().mean() + right.abs().mean()


def labels_of(g: Tensor, count: Tensor, most: int) -> Tensor:
    """Return `most` labels in the order in which the gradient of the last bias tells them; `count` are real.

    Of n samples, g_c = mean_i p_ic − n_c / n: what is negative is there, and each sample of a class takes
    away about m = (1 + 1/K) Σ_{g_c < 0} g_c / n. The most negative class is taken, m taken off, and so on.
    """
    classes = torch.arange(len(g), device=g.device)
    m = (1 + 1 / len(g)) * g.clamp(max=0).sum() / count.clamp(min=1)
    found = []
    for _ in range(most):
        label = g.argmin()
        found.append(label)
        g = g - m * (classes == label)
    return torch.stack(found)


def matched_errors(found: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the mean squared error of each real sample to the one found for it.

    What was found is dealt to the real samples, one to each, so that the sum of the errors is the least.
    """
    from scipy.optimize import linear_sum_assignment

    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (found, real))
    errors = np.stack([((a - row) ** 2).mean(1) for row in b])  # [real, found]
    rows, columns = linear_sum_assignment(np.nan_to_num(errors, nan=np.inf, posinf=1e300))
    matched: np.ndarray = errors[rows, columns]
    return matched
