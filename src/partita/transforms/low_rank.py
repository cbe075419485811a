"""Low-rank compression: Vogels, Karimireddy & Jaggi, *PowerSGD* (2019), for each client by itself.

    P = M Q,  P̂ = orthonormal columns of P,  Q ← Mᵀ P̂      `iterations` times, from a random Q
    C(M) = P̂ Qᵀ = P̂ P̂ᵀ M,                                  ‖M − C(M)‖ ≤ ‖M‖

P̂ and Q are sent, r (n + m) numbers for the n m of a matrix. A tensor of more dimensions is a matrix with a
row for each place of its first axis. What is no matrix, and what would not get smaller, is sent as it is.

PowerSGD takes one step from the Q of the step before, in which workers add up their P and then their Q. A
client of a cohort takes part now and then, so that its last Q is old: it starts anew, with a second step in
place of the Q, and the server adds up what it makes of P̂ and Q.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.core import draws
from partita.core.options import Option
from partita.core.parts import Transform
from partita.core.types import Message, Tensors
from partita.transforms.base import in_order_of, transform, unused, working

DEPENDENT = 100
"""A column whose rest is below so many times the precision is made of rounding errors."""


@transform
def low_rank(
    rank: Annotated[int, Option("r, the columns of both factors", low=1)] = 2,
    iterations: Annotated[
        int, Option("steps towards the directions of most length; more take time, and no bytes", low=1)
    ] = 2,
    feedback: Annotated[
        bool, Option("whether clients keep what was not sent, and add it to what they send next")
    ] = True,
) -> Transform:
    """Each client sends two thin matrices in place of each matrix.

    Use it for models whose weight matrices are large; the factors can be compressed further.
    """

    def matrices(before: Message) -> dict[str, tuple[int, int, int]]:
        """Return rows, columns and rank of each tensor that gets smaller, by path."""
        shapes = {
            path: (len(x), x[0].numel()) for path, x in before.numbers.items() if x.dim() > 1 and x.numel()
        }
        ranks = {path: min(rank, *shape) for path, shape in shapes.items()}
        return {path: (n, m, ranks[path]) for path, (n, m) in shapes.items() if ranks[path] * (n + m) < n * m}

    def names(before: Message, path: str) -> tuple[str, str]:
        return unused(before, f"{path}.left"), unused(before, f"{path}.right")

    def encode(message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG001
        numbers = dict(message.numbers)
        for path, (n, m, r) in matrices(message).items():
            x = numbers.pop(path)
            matrix = x.reshape(n, m).to(working(x.dtype))
            start = draws.normal(draws.places(draws.branch(key, path), (m, r))).to(matrix.dtype)
            largest = matrix.abs().amax()  # lengths of what is divided by it are finite
            scaled = matrix / torch.where(largest == 0, 1, largest)
            left = orthonormal(scaled @ start)
            for _ in range(iterations - 1):
                left = orthonormal(scaled @ (scaled.T @ left))
            for name, factor in zip(names(message, path), (left, matrix.T @ left)):
                numbers[name] = factor.to(x.dtype)
        return Message(numbers, message.rest)

    def decode(message: Message, before: Message, key: Tensor) -> Message:  # noqa: ARG001
        numbers = dict(message.numbers)
        for path in matrices(before):
            like = before.numbers[path]
            left, right = (numbers.pop(name).to(working(like.dtype)) for name in names(before, path))
            numbers[path] = (left @ right.T).to(like.dtype).reshape(like.shape)
        return Message(in_order_of(before.numbers, numbers), message.rest)

    options = {"rank": rank, "iterations": iterations, "feedback": feedback}
    return Transform("low_rank", options, encode, decode, draws=True, lossy=True, feedback=feedback)


def orthonormal(p: Tensor) -> Tensor:
    """Return orthonormal columns that span those of p (Gram-Schmidt, twice); dependent ones become 0."""
    columns: list[Tensor] = []
    for column in p.unbind(1):
        rest = column
        for _ in range(2):  # the second time removes what rounding has left of the others
            for other in columns:
                rest = rest - other * (other @ rest)
        length, least = rest.norm(), DEPENDENT * torch.finfo(p.dtype).eps * column.norm()
        columns.append(torch.where(length <= least, 0, rest / length))  # NaN is not below anything: it stays
    return torch.stack(columns, 1)
