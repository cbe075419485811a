"""Stochastic quantization: Alistarh et al., *QSGD* (2017); the scale of a bucket is its largest magnitude.

    s = max |x[c]| over a bucket,  t = L (x[c]/s + 1) / 2,  L = 2ᵇ − 2 (1 for b = 1)
    level = ⌊t⌋ + 1 with probability t − ⌊t⌋, else ⌊t⌋               level ∈ {0, …, L}: b bits
    C(x)[c] = s (2 level/L − 1)                                      E[C(x)] = x,  |C(x)[c] − x[c]| < 2s/L

L is even but for one bit, so that 0 stays 0; two bits are −s, 0 and s, and one bit is −s and s alone.

An entry errs by a variance of (s/L)² at most, and the largest of a bucket of n not at all:

    E‖C(x) − x‖² ≤ (n − 1) (s/L)² ≤ (n − 1)/L² ‖x‖²

Rounded to the nearest level, no entry errs by more than it has, but for one bit. With feedback, either must
hold: n − 1 < L², or the nearest of two bits and more.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.options import Option
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.transforms.base import in_order_of, transform, unused, working


@transform
def quantize(
    bits: Annotated[int, Option("b, the bits of an entry", low=1, high=8)] = 8,
    bucket: Annotated[int, Option("entries of a tensor that have a scale together", low=1)] = 512,
    stochastic: Annotated[
        bool,
        Option(
            "whether entries are rounded at random, right on average, or to the nearest level (for downloads)"
        ),
    ] = True,
    feedback: Annotated[
        bool,
        Option(
            "whether clients keep what rounding has lost, and add it to what they send next: for 2 or 3 bits "
            "with `stochastic=False`"
        ),
    ] = False,
) -> Transform:
    """Each entry is sent as one of a few levels between −s and s, for a scale s of each bucket.

    Use it last: it leaves levels and scales, which nothing else compresses. With `stochastic=False` it draws
    nothing, as transforms of downloads must.
    """
    steps = max(1, 2**bits - 2)
    expands = expanding(bits, bucket, steps, stochastic)
    if feedback and expands:
        reason = f"what clients keep would grow: {expands}"
        raise check.fail("transform feedback", feedback, "feedback=False", reason)

    def names(before: Message, path: str) -> tuple[str, str]:
        return unused(before, f"{path}.levels"), unused(before, f"{path}.scales")

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        rest = dict(message.rest)
        for path, x in message.numbers.items():
            levels, scales = names(message, path)
            flat = x.reshape(-1).to(working(x.dtype))
            scale = scales_of(flat, bucket)
            rest[scales] = scale.to(x.dtype)  # exactly: it is one of the entries
            t = (_relative(flat, spread(scale, bucket, len(flat))) + 1) / 2 * steps
            low = t.floor()
            if stochastic:
                up = draws.uniforms(draws.branch(key, path), len(flat)) < t - low
            else:
                up = t - low >= 0.5
            rest[levels] = (low + up).to(torch.uint8)
        return Message({}, rest)

    def decode(message: Message, before: Message, key: Tensor) -> Message:  # noqa: ARG001
        numbers, rest = dict(message.numbers), dict(message.rest)
        for path, like in before.numbers.items():
            levels, scales = names(before, path)
            level, scale = rest.pop(levels), rest.pop(scales).to(working(like.dtype))
            sign = level.to(scale.dtype) * 2 / steps - 1
            values = spread(scale, bucket, like.numel()) * sign
            numbers[path] = values.to(like.dtype).reshape(like.shape)
        return Message(in_order_of(before.numbers, numbers), rest)

    def packed(before: Message) -> dict[str, int]:
        return {names(before, path)[0]: bits for path in before.numbers}

    def below(before: Message) -> dict[str, int]:
        return {names(before, path)[0]: steps + 1 for path in before.numbers}

    options = {"bits": bits, "bucket": bucket, "stochastic": stochastic, "feedback": feedback}
    return Transform(
        "quantize",
        options,
        encode,
        decode,
        packed,
        draws=stochastic,
        lossy=True,
        feedback=feedback,
        below=below,
        expands=expands,
    )


def expanding(bits: int, bucket: int, steps: int, stochastic: bool) -> str:
    """Return why rounding may lose more than the length of what is rounded ('': it does not)."""
    if bits == 1:
        return "one bit has no level for 0; use bits=2, stochastic=False"
    if not stochastic or bucket - 1 < steps**2:
        return ""
    return f"{bits} bits drawn at random need a bucket of at most {steps**2}, or stochastic=False"


def scales_of(flat: Tensor, bucket: int) -> Tensor:
    """Return the largest magnitude of each bucket; NaN where an entry is not finite."""
    if not len(flat):
        return flat
    bucket = min(bucket, len(flat))
    full = torch.nn.functional.pad(flat, (0, -len(flat) % bucket))
    scale = full.abs().reshape(-1, bucket).amax(1)
    return torch.where(scale.isfinite(), scale, torch.nan)


def spread(scale: Tensor, bucket: int, entries: int) -> Tensor:
    """Return the scale of each entry."""
    bucket = min(bucket, entries)
    return scale[:, None].expand(len(scale), bucket).reshape(-1)[:entries]


def _relative(flat: Tensor, scale: Tensor) -> Tensor:
    """Return entries from −1 to 1 of their scales; 0 where all are 0, or the scale is not finite."""
    usable = scale > 0
    return torch.where(usable, flat / torch.where(usable, scale, 1), 0)
