"""The model of the quadratic problems of FFGG (Mishchenko et al. 2023, section 5.1 and appendix E)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.core import check
from partita.models.blocks import seeded


def quadratic(d_theta: int = 100, d_w: int = 50, *, seed: int = 0) -> ThetaW:
    """A linear model of two parts, x = (a, b) ↦ aᵀθ + bᵀw, in float64: `personal="w"` splits it.

    d_theta + d_w parameters `theta` and `w`, drawn from N(0, 1). Its data and its loss come from
    `partita.data.quadratic`.
    """
    check.integer("d_theta", d_theta, low=1)
    check.integer("d_w", d_w, low=1)
    with seeded(seed):
        # theta first: a start at another d_w begins at the same θ
        return ThetaW(torch.randn(d_theta, dtype=torch.float64), torch.randn(d_w, dtype=torch.float64))


class ThetaW(nn.Module):
    """x ↦ x[:, :d_θ] θ + x[:, d_θ:] w: [B, d_θ + d_w] → [B]."""

    def __init__(self, theta: Tensor, w: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)
        self.w = nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.theta.shape[0]
        return x[:, :shared] @ self.theta + x[:, shared:] @ self.w

    def extra_repr(self) -> str:
        return f"d_theta={self.theta.shape[0]}, d_w={self.w.shape[0]}"
