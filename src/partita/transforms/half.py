"""Numbers of 16 bits.

    C(x)[c] = x[c] rounded to the nearest of the type, |C(x)[c] − x[c]| ≤ 2⁻¹¹ |x[c]| (bfloat16: 2⁻⁸)

Below 6e-5, float16 errs by 2⁻²⁵ at most.

What is beyond the type becomes infinite: the server sets it aside, and names whoever has sent it.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.core.options import Option
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.transforms.base import transform

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@transform
def half(
    dtype: Annotated[
        str,
        Option(
            "'float16': 11 bits of precision, up to 65504 and down to 6e-8; 'bfloat16': 8 bits of precision "
            "in the range of float32",
            choices=tuple(TYPES),
        ),
    ] = "float16",
) -> Transform:
    """Numbers are sent in 16 bits; those that have no more stay as they are.

    Use it for downloads, for uploads that are half as long, and for the values that topk has left.
    """

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        numbers = {
            path: x.to(TYPES[dtype]) if x.dtype.itemsize > 2 else x for path, x in message.numbers.items()
        }
        return Message(numbers, message.rest)

    def decode(message: Message, before: Message, key: Tensor) -> Message:  # noqa: ARG001
        numbers = {path: message.numbers[path].to(like.dtype) for path, like in before.numbers.items()}
        return Message(numbers, message.rest)

    return Transform("half", {"dtype": dtype}, encode, decode, lossy=True, entrywise=True)
