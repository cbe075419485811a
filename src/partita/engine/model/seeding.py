"""Random numbers that a model draws by itself, from the generators of the process.

`nn.Dropout` gets the key of its batch. Whatever else is random in a model (stochastic depth, dropout of
attention, `torch.rand` in a forward pass, Python's `random`, NumPy) draws from generators that belong to the
process: those are set from the same key for each pass, and put back afterwards. The key is a function of
(seed, round, client, step), and so the pass is too, whoever ran before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from partita.core import draws

T = TypeVar("T")
State = dict[str, Any]


def state(device: torch.device) -> State:
    """Return the states of the process's generators, by the name of what they belong to."""
    states: State = {
        "torch": torch.get_rng_state(),
        "Python's random": random.getstate(),
        "NumPy": np.random.get_state(legacy=False),
    }
    return {**states, "CUDA": _gpu_state(device)} if device.type == "cuda" else states


def changed(before: State, device: torch.device) -> list[str]:
    """Return the names of the generators that were drawn from since."""
    now = state(device)
    return [name for name, old in before.items() if not _same(old, now[name])]


def put_back(before: State, device: torch.device) -> None:
    """Set the generators to what they were."""
    torch.set_rng_state(before["torch"])
    random.setstate(before["Python's random"])
    np.random.set_state(before["NumPy"])
    if "CUDA" in before:
        torch.cuda.set_rng_state(before["CUDA"], device)


@contextmanager
def kept(device: torch.device) -> Iterator[State]:
    """Put the generators back at the end, whatever is drawn inside."""
    before = state(device)
    try:
        yield before
    finally:
        put_back(before, device)


@contextmanager
def seeded(key: Tensor) -> Iterator[None]:
    """Set all generators from a key, and put them back at the end."""
    with kept(key.device):
        set_all(int(key), key.device)
        yield


def set_all(seed: int, device: torch.device) -> None:
    """Set each generator from a number of its own: the same one would give two of them the same numbers."""
    numbers = draws.fold(np.full(4, seed, dtype=np.int64), np.arange(4)).tolist()
    torch.default_generator.manual_seed(numbers[0])  # and not torch.manual_seed, which reseeds GPUs too
    random.seed(numbers[1])
    np.random.seed(numbers[2] & 0xFFFFFFFF)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(numbers[3])


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, dict):  # NumPy's
        return all(_same(value, new[name]) for name, value in old.items())
    if isinstance(old, Tensor):
        return torch.equal(old, new)
    return np.array_equal(old, new) if isinstance(old, np.ndarray) else bool(old == new)


class OwnDraws:
    """Whether a model draws by itself, as the trial or a later pass has shown.

    A few samples may not show draws that depend on the data. Where clients train one after another, work that
    drew from torch's generators without a seed is done again with one, and so is all that follows: the result
    is what it would be had the trial shown it.
    """

    def __init__(self, seeded: bool = False) -> None:
        self.seeded = seeded

    def of(self, key: Tensor) -> AbstractContextManager[None]:
        """Return the context of a pass on the batch of this key: with a seed where the model draws."""
        return seeded(key) if self.seeded else nullcontext()

    def watched(self, work: Callable[[], T], again: Callable[[], T], device: torch.device) -> T:
        """Return what `work` returns or, if it drew without a seed, what `again` returns with one."""
        if self.seeded:
            return again()
        cpu, gpu = torch.get_rng_state(), _gpu_state(device)
        result = work()
        if torch.equal(cpu, torch.get_rng_state()) and torch.equal(gpu, _gpu_state(device)):
            return result
        torch.set_rng_state(cpu)
        if device.type == "cuda":
            torch.cuda.set_rng_state(gpu, device)
        self.seeded = True
        return again()


def _gpu_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
