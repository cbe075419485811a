"""Top-k sparsification: Stich, Cordonnier & Jaggi, *Sparsified SGD with Memory* (2018).

    C(x)[c] = x[c] for the k entries c of largest |x[c]|, else 0          ‖x − C(x)‖² ≤ (1 − k/d) ‖x‖²

It shrinks what it sends, so that it converges with error feedback only (Karimireddy et al., 2019). k values
are sent, and where they belong: ⌈log₂ d⌉ bits for each. Of entries of the same magnitude the first are kept.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from partita.core.options import Option
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.transforms.base import count, in_order_of, joined, parted, parts_of, transform, unused

PER = ("model", "tensor")


@transform
def topk(
    share: Annotated[
        float, Option("k/d, the part of the entries that is sent", low=0, open_low=True, high=1)
    ] = 0.01,
    per: Annotated[
        str,
        Option(
            "among what entries are compared: all that a client sends of the 'model', or those of each "
            "'tensor', of which at least one is sent",
            choices=PER,
        ),
    ] = "model",
    feedback: Annotated[
        bool, Option("whether clients keep what was not sent, and add it to what they send next")
    ] = True,
) -> Transform:
    """Each client sends its largest entries and where they belong.

    Use it where uploads must be a hundred times smaller; `quantize` after it makes the values smaller, too.
    """

    def groups(before: Message) -> dict[str, tuple[Tensors, int, int]]:
        """Return the tensors that are compared with one another, d and k, where k < d."""
        tensors = (
            {k: {k: x} for k, x in before.numbers.items()} if per == "tensor" else parts_of(before.numbers)
        )
        sizes = {label: sum(x.numel() for x in group.values()) for label, group in tensors.items()}
        counts = {label: count(share, d) for label, d in sizes.items()}
        return {k: (group, sizes[k], counts[k]) for k, group in tensors.items() if counts[k] < sizes[k]}

    def names(before: Message, label: str) -> tuple[str, str]:
        return unused(before, f"{label}.values"), unused(before, f"{label}.indices")

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        numbers, rest = dict(message.numbers), dict(message.rest)
        for label, (tensors, _, k) in groups(message).items():
            values, indices = names(message, label)
            x = joined(tensors)
            rest[indices] = largest(x, k)
            numbers = {path: y for path, y in numbers.items() if path not in tensors}
            numbers[values] = x[rest[indices]]
        return Message(numbers, rest)

    def decode(message: Message, before: Message, key: Tensor) -> Message:  # noqa: ARG001
        numbers, rest = dict(message.numbers), dict(message.rest)
        for label, (tensors, d, _) in groups(before).items():
            values, indices = names(before, label)
            sent = numbers.pop(values)
            numbers |= parted(sent.new_zeros(d).scatter(0, rest.pop(indices), sent), tensors)
        return Message(in_order_of(before.numbers, numbers), rest)

    def packed(before: Message) -> dict[str, int]:
        return {path: (d - 1).bit_length() for path, d in below(before).items()}

    def below(before: Message) -> dict[str, int]:
        return {names(before, label)[1]: d for label, (_, d, _) in groups(before).items()}

    options = {"share": share, "per": per, "feedback": feedback}
    return Transform("topk", options, encode, decode, packed, lossy=True, feedback=feedback, below=below)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the places of the k entries of largest magnitude, in ascending order; NaN is the largest."""
    if x.dtype == torch.float64:
        return x.abs().sort(stable=True, descending=True).indices[:k].sort().values
    # the bits of a float32 without its sign grow with it; below them, the place tells equal ones apart
    from_last = len(x) - 1 - torch.arange(len(x), device=x.device)
    magnitude = bits_of(x.to(torch.float32).abs()).to(torch.int64)
    chosen = (magnitude << 32 | from_last).topk(k, sorted=False).values & 0xFFFFFFFF
    return (len(x) - 1 - chosen).sort().values


class _Bits(torch.autograd.Function):
    """The bits of float32 numbers as whole numbers: a view for which `vmap` has no rule before torch 2.13."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view(torch.int32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        return bits_of(x), in_dims[0]


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of float32 numbers as whole numbers."""
    bits: Tensor = _Bits.apply(x)  # type: ignore[no-untyped-call]
    return bits
