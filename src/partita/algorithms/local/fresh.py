"""A personal part that nobody has kept: drawn anew each time.

    w⁰[c] = mean(w) + std(w) z[c],   z ~ N(0, 1)      w is the model's own tensor, c its entries

A tensor of equal entries stays what it is: a bias or the last layer of an adapter at zero, the weights of a
normalization layer at one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.core import draws
from partita.core.types import Tensors


def fresh(model: Tensors, names: Sequence[str], key: Tensor) -> Tensors:
    """w⁰ for these names of the model: another one for each key, whatever other names there are."""
    return {name: _like(model[name], draws.fold(key, zlib.crc32(name.encode()))) for name in names}


def _like(w: Tensor, key: Tensor) -> Tensor:
    z = draws.normal(draws.fold(key, torch.arange(w.numel(), device=w.device)))
    return w.mean() + w.std(correction=0) * z.reshape(w.shape).to(w.dtype)
