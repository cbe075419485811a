"""Modules whose forward pass is a function of its inputs alone, so that many clients can be stacked.

Dropout draws from the batch's key instead of a global generator: the same mask for a client whether it runs
alone, in a stack, or in a captured graph. BatchNorm ignores the padding of short batches. Both receive what
they need as buffers, which `functional_call` sets for each client.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.core import draws
from partita.core.frozen import lean_copy
from partita.core.types import Tensors
from partita.engine.model.normalize import MASK, mask_padding

KEY = "batch_key"
CACHE = "_partita_context"
_LEADING: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 2,
    nn.Dropout2d: 2,
    nn.Dropout3d: 2,
}


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of a key; whole channels when `leading` axes are kept apart."""

    batch_key: Tensor

    def __init__(self, p: float, leading: int | None) -> None:
        super().__init__()
        self.p, self.leading = p, leading
        self._last_key: Tensor | None = None
        self._calls = 0
        self.register_buffer(KEY, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        shape = x.shape if self.leading is None else x.shape[: self.leading]
        key = draws.fold(self.batch_key, self._call())
        kept = draws.uniform(draws.places(key, shape)) >= self.p
        kept = kept.view(*shape, *[1] * (x.dim() - len(shape)))
        return x * kept.to(x.dtype) / (1.0 - self.p)

    def _call(self) -> int:
        """Count the calls of this module in this forward pass: each pass brings a new key tensor."""
        self._calls = self._calls + 1 if self._last_key is self.batch_key else 0
        self._last_key = self.batch_key
        return self._calls


def stackable(module: nn.Module, keyed: bool = True) -> nn.Module:
    """Return a copy of the module with masked BatchNorm, dense gradients and, if `keyed`, keyed dropout."""
    own = lean_copy(module)
    own.__dict__.pop(CACHE, None)  # the names of what is exchanged now
    return _swap(own, {}, keyed)


def batch_buffers(module: nn.Module, key: Tensor, mask: Tensor | None) -> Tensors:
    """Return the buffers that tell each dropout its key and each BatchNorm its mask."""
    buffers: Tensors = {name: draws.fold(key, i) for i, name in enumerate(_names(module, KEY))}
    if names := _names(module, MASK):
        buffers |= dict.fromkeys(names, torch.ones((), device=key.device) if mask is None else mask)
    return buffers


def _names(module: nn.Module, buffer: str) -> list[str]:
    cache = module.__dict__.setdefault(CACHE, {})
    if buffer not in cache:
        cache[buffer] = [n for n, _ in module.named_buffers() if n.split(".")[-1] == buffer]
    return list(cache[buffer])


def _swap(module: nn.Module, done: dict[nn.Module, nn.Module], keyed: bool) -> nn.Module:
    """Exchange the modules below; one that is used at several places stays one module."""
    if module not in done:
        if keyed and type(module) in _LEADING and isinstance(module, nn.modules.dropout._DropoutNd):
            new = KeyedDropout(module.p, _LEADING[type(module)])
            done[module] = new.train(module.training)
            return done[module]
        done[module] = module
        mask_padding(module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # the same gradient, as a tensor that can be added to others
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _swap(child, done, keyed)
    return done[module]
