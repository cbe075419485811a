"""A recurrent model that is cut in time: some of its words are read forwards only.

The layers of such a model are its words: T recurrences of the same weights. A weak device reads the first k
of each direction with the weights that it received and records the state (h_k, c_k); it trains the T − k
recurrences that follow, from that state. As it begins in the same state, it sees the same model as others.

The backward direction reads from the last word: its first k words are the last ones of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from partita.capacity.blocks import Part, part_as, still
from partita.core import check
from partita.core.parts import Share

STATES = ("recorded", "new")


@runtime_checkable
class Reader(Protocol):
    """A block that reads words one after another, and can begin in the middle."""

    def begin(self, x: Tensor, words: int) -> Tensor:
        """Return a row for each sample: all that is needed to go on after so many words of each direction."""
        ...

    def resume(self, record: Tensor, words: int) -> Tensor:
        """Return what the block puts out, from such a record."""
        ...


class Begun(Part):
    """The recurrent block up to a word, without gradients."""

    _share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        (name,) = self._names
        return self.get_submodule(name).begin(x, _count(x, self._share))  # type: ignore[operator,no-any-return]


class Resumed(Part):
    """The recurrent block from a word on, and the blocks after it."""

    _words = 0

    def forward(self, record: Tensor) -> Tensor:
        first, *others = self._names
        x = self.get_submodule(first).resume(record, self._words)  # type: ignore[operator]
        for name in others:
            x = self.get_submodule(name)(x)
        return x  # type: ignore[no-any-return]


class Dropped(nn.Module):
    """The words without the first ones."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x[:, _count(x, self.share) :]


def cut(share: Share, model: nn.Module, names: Sequence[str], x: Tensor, words: float, state: str) -> Share:
    """Return what a class holds that does not train this share of the words.

    names  the blocks that it trains
    x      a batch of samples
    state  "recorded", or "new": as if those words were not there
    """
    if not words:
        return share
    x = _passed(share, x)
    if x.dim() < 3 or not 0 < _count(x, words) < x.shape[1]:
        allowed = f"shares of the words that leave some to train: the block {names[0]!r} gets {list(x.shape)}"
        raise check.fail("capacity words", words, allowed)
    if state == "new":
        return share._replace(pieces=(*share.pieces, Dropped(words)))
    block = model.get_submodule(names[0])
    if not isinstance(block, Reader):
        allowed = "a first trained block that reads words one after another, as that of pt.models.bilstm"
        reason = f"{names[0]!r} is of {type(block).__name__}; state='new' leaves the words out for any block"
        raise check.fail("capacity words", words, allowed, reason)
    begun, resumed = part_as(Begun, model, names[:1]), part_as(Resumed, model, names)
    begun._share, resumed._words = words, _count(x, words)
    return share._replace(model=resumed, pieces=(*share.pieces, begun))


def _passed(share: Share, x: Tensor) -> Tensor:
    """Return samples behind the frozen pieces."""
    with torch.no_grad():
        for piece in share.pieces:
            x = still(piece)(x)
    return x


def _count(x: Tensor, share: float) -> int:
    return int(x.shape[1] * share)
