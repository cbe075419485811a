"""What every model here is made of: blocks in a row, each with a name.

Three things need to know where a model begins and where it ends. `personal="input"` and `personal="output"`
keep the first or the last part with the client, a weak device trains the last blocks only, and similarity is
measured block by block. So a model is a sequence of named blocks, each of which owns parameters, and says
itself which of them count as its input and output part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from partita.core import check


class Blocks(nn.Sequential):
    """Named blocks, applied one after another.

    `input_part` and `output_part` name the blocks that are personal with `personal="input"` and `"output"`;
    by default the first and the last block that own parameters. A slice is a model again: `model[4:]` is what
    is left when the first four blocks are cut off, with the default parts.

    >>> model = Blocks({"hidden": nn.Linear(4, 8), "output": nn.Linear(8, 2)})
    >>> model.input_part, model.output_part
    (('hidden',), ('output',))
    """

    input_part: tuple[str, ...]
    output_part: tuple[str, ...]
    _made: tuple[Callable[..., Blocks], float] | None = None

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        *,
        input_part: Iterable[str] | None = None,
        output_part: Iterable[str] | None = None,
    ) -> None:
        super().__init__(OrderedDict(blocks))
        owners = [name for name, block in blocks.items() if next(block.parameters(), None) is not None]
        self.input_part = tuple(owners[:1] if input_part is None else input_part)
        self.output_part = tuple(owners[-1:] if output_part is None else output_part)
        for field, part in (("input_part", self.input_part), ("output_part", self.output_part)):
            if not set(part) <= set(blocks):
                raise check.fail(field, part, f"names among {', '.join(map(repr, blocks))}")

    def at_width(self, share: float) -> Blocks:
        """Return the model with the first channels only of every layer, this share of them."""
        if self._made is None:
            raise check.fail("width", share, "a model of this package that has a width, or build=...")
        make, width = self._made
        return make(width=share * width)


def scalable(model: Blocks, width: float, make: Callable[..., Blocks]) -> Blocks:
    """Let a model know its narrow forms: `make(width=...)` builds it at any width, and it has this one."""
    model._made = (make, width)
    return model


def layers(**children: nn.Module) -> nn.Sequential:
    """Return a block of named layers: layers(conv=..., relu=...) has the parameter conv.weight."""
    return nn.Sequential(OrderedDict(children))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed` alone, and leave everybody else's random numbers as they are.

    They are drawn on the CPU, so that they are the same whatever device is the default.
    """
    check.integer("seed", seed, low=0, high=2**63 - 1)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also reseed the generators of every accelerator, which are not forked here
        torch.default_generator.manual_seed(seed)
        yield


class Image(nn.Module):
    """A batch of images, channels first: [B, H, W] becomes [B, 1, H, W], and what does not fit is refused."""

    def __init__(self, channels: int, size: int | None = None) -> None:
        super().__init__()
        self.channels, self.size = channels, size

    def forward(self, x: Tensor) -> Tensor:
        image = x.unsqueeze(1) if x.dim() == 3 else x
        fits = image.dim() == 4 and image.shape[1] == self.channels
        if not fits or (self.size is not None and image.shape[2:] != (self.size, self.size)):
            size = "height, width" if self.size is None else f"{self.size}, {self.size}"
            raise check.fail("input", list(x.shape), f"[batch, {self.channels}, {size}], channels first")
        return image

    def extra_repr(self) -> str:
        return f"channels={self.channels}" + ("" if self.size is None else f", size={self.size}")
