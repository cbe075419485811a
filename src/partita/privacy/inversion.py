"""Pieces of gradient inversion: distances between gradients, labels from a bias, how near what was found is.

Geiping et al., *Inverting Gradients* (2020); Zhu et al., *Deep Leakage from Gradients* (2019); Zhao et al.,
*iDLG: Improved Deep Leakage from Gradients* (2020).
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


def labels_of(g: Tensor, likely: Tensor, count: Tensor, most: int) -> Tensor:
    """Return `most` labels, the most certain ones first, by the gradient of the last bias; `count` are real.

    Of n samples, g_c = s (mean_i p_ic − n_c / n), where s is the length of the upload, and p̄_c is about what
    is `likely`, the model's mean prediction of public samples. Classes that are not there have n_c = 0, so
    that s = max_c g_c / p̄_c. The class with the largest n_c / n is taken, loses 1 / n, and so on.
    """
    classes, tiny = torch.arange(len(g), device=g.device), torch.finfo(g.dtype).tiny
    scale = (g / likely.clamp(min=tiny)).max().clamp(min=tiny)
    share = likely - g / scale
    found = []
    for _ in range(most):
        label = share.argmax()
        found.append(label)
        share = share - (classes == label) / count.clamp(min=1)
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
