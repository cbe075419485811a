"""Scaled dot-product attention in operations that can be stacked over clients.

    softmax(Q Kᵀ / √d + M) V      with the mask M, and dropout of the probabilities

torch's own function is one kernel, which on a CPU has no form for several clients at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions


def attention(
    mode: Functions,
    func: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the attention of stacked clients, or of one whose draws must be the same as in a stack."""
    if not mode.apart(query, key, value) and not dropout_p:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores, unseen = _masked(scores, attn_mask, is_causal)
    weights = torch.softmax(scores, -1)
    if unseen is not None:
        weights = torch.where(unseen, 0.0, weights)
    if dropout_p:
        with mode:
            weights = F.dropout(weights, dropout_p)
    return weights @ value


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Return the scores under the mask, and the places that see nothing, whose attention is zero."""
    if causal:
        length, width = scores.shape[-2:]
        seen = torch.ones(length, width, dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill(~seen, -math.inf), None
    if mask is None:
        return scores, None
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    unseen = hidden.all(-1, keepdim=True)
    scores = torch.where(hidden, -math.inf, scores if mask.dtype == torch.bool else scores + mask)
    return torch.where(unseen, 0.0, scores), unseen
