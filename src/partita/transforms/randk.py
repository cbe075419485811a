"""Random-k sparsification: Stich, Cordonnier & Jaggi, *Sparsified SGD with Memory* (2018).

    C(x)[c] = x[c] for k entries c drawn without replacement, else 0      E‖x − C(x)‖² = (1 − k/d) ‖x‖²
    unbiased:  C(x)[c] = (d/k) x[c],  E[C(x)] = x                        E‖x − C(x)‖² = (d/k − 1) ‖x‖²

Both sides draw the entries from the same key, so that the values alone are sent.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.options import Option
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.transforms.base import (
    count,
    in_order_of,
    joined,
    parted,
    parts_of,
    transform,
    unused,
    working,
)


@transform
def randk(
    share: Annotated[
        float, Option("k/d, the part of the entries that is sent", low=0, open_low=True, high=1)
    ] = 0.01,
    feedback: Annotated[
        bool | None,
        Option(
            "whether clients keep what was not sent, and add it to what they send next (default: unless it "
            "is `unbiased`)"
        ),
    ] = None,
    unbiased: Annotated[
        bool, Option("whether the server multiplies what arrives by d/k, so that it is right on average")
    ] = False,
) -> Transform:
    """Each client sends entries drawn at random, others in each round.

    Use it as a baseline of topk, or with `unbiased=True` where clients keep no state: no indices are sent,
    but its entries are not the large ones.
    """
    if unbiased and feedback:
        reason = "what is multiplied by d/k is no contraction, so that what clients keep would grow"
        raise check.fail("transform feedback", feedback, "feedback=False, or unbiased=False", reason)
    feedback = not unbiased if feedback is None else feedback

    def groups(before: Message) -> dict[str, tuple[Tensors, int, int]]:
        """Return the parts of a message, d and k, where k < d."""
        parts = parts_of(before.numbers)
        sizes = {label: sum(x.numel() for x in part.values()) for label, part in parts.items()}
        counts = {label: count(share, d) for label, d in sizes.items()}
        return {k: (part, sizes[k], counts[k]) for k, part in parts.items() if counts[k] < sizes[k]}

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        numbers = dict(message.numbers)
        for label, (tensors, d, k) in groups(message).items():
            x = joined(tensors)
            values = x[drawn(draws.branch(key, label), d, k)]
            numbers = {path: y for path, y in numbers.items() if path not in tensors}
            # one entry that is not finite must not get lost among those that are not sent
            numbers[unused(message, f"{label}.values")] = torch.where(x.isfinite().all(), values, torch.nan)
        return Message(numbers, message.rest)

    def decode(message: Message, before: Message, key: Tensor) -> Message:
        numbers = dict(message.numbers)
        for label, (tensors, d, k) in groups(before).items():
            values = numbers.pop(unused(before, f"{label}.values"))
            if unbiased:
                values = values.to(working(values.dtype)) * (d / k)
            places = drawn(draws.branch(key, label), d, k)
            numbers |= parted(values.new_zeros(d).scatter(0, places, values), tensors)
        return Message(in_order_of(before.numbers, numbers), message.rest)

    options = {"share": share, "feedback": feedback, "unbiased": unbiased}
    expands = "unbiased=True multiplies what arrives by d/k" if unbiased else ""
    return Transform(
        "randk", options, encode, decode, draws=True, lossy=True, feedback=feedback, expands=expands
    )


def drawn(key: Tensor, d: int, k: int) -> Tensor:
    """Return k of d places, each set of them as likely as any other, in ascending order."""
    return draws.fold(key, torch.arange(d, device=key.device)).topk(k, sorted=False).indices.sort().values
