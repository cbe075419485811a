"""Traced steps see tensors of the same shapes in other layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.engine.execute.stack import STEPS_BEFORE_TRACE, Stack, Steps


def test_a_traced_step_takes_tensors_of_another_layout() -> None:
    """A view that was traced on contiguous tensors fails on transposed ones."""

    def step(x: Tensor) -> Tensor:
        return x.view(-1) * 2 if x.is_contiguous() else x.reshape(-1) * 2

    steps, x = Steps(), torch.arange(24.0).reshape(2, 3, 4)
    for _ in range(STEPS_BEFORE_TRACE + 1):
        steps(step, Stack([x], [True], None, 2))
    other = x.transpose(1, 2).contiguous().transpose(1, 2)
    (result,) = steps(step, Stack([other], [True], None, 2)).leaves
    assert torch.equal(result, 2 * x.reshape(2, -1))
