"""Clients that are finished before others: how a stack of clients ends early, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from partita.core import tree

_ALL_STEPS = ContextVar("all_steps", default=False)


@contextmanager
def all_steps() -> Iterator[None]:
    """Let nothing end early: what is recorded does the same however far clients are."""
    token = _ALL_STEPS.set(True)
    try:
        yield
    finally:
        _ALL_STEPS.reset(token)


def everyone(done: Tensor) -> bool:
    """Return whether all clients that are stacked behind this one are done, so that nothing would change."""
    if _ALL_STEPS.get():
        return False
    while is_functorch_wrapped_tensor(done):
        done = get_unwrapped(done)
    return bool(done.all())


def unless(done: Tensor, old: Any, new: Any) -> Any:
    """Return the new structure of a client, or the old one if the client was done."""
    return tree.map_tensors(lambda b, a: b if b is a else torch.where(done, a, b), new, old)
