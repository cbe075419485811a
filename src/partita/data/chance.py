"""Samples that come out otherwise each time they are read: a random transform, which a run would see once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check

FEW = 3  # datasets that are looked at, and samples of each


def warn_about_chance(field: str, reads: Sequence[Callable[[], Any]]) -> None:
    """Warn if what one of these functions reads is drawn at random; they are called twice each.

    The user's random states are afterwards what they were.
    """
    before = _states()
    try:
        drawn = any(map(_drawn, reads))
    except Exception:  # what can be read only once
        drawn = False
    finally:
        _restore(before)
    if drawn:
        check.warn(
            f"{field}: the same sample is drawn anew each time it is read (a random transform?). The data "
            "are read once, so that each sample keeps one draw for the whole run; leave the transform "
            "out, and use augment=, such as federate(..., augment=partita.augment.flip()), which draws anew"
        )


def _drawn(read: Callable[[], Any]) -> bool:
    """Return whether two readings differ, or draw from the common random states, whatever comes out.

    Who seeds them for each sample leaves the same states behind each time.
    """
    start = _states()
    first, after = read(), _states()
    second, end = read(), _states()
    return not _same(first, second) or (after != start and end != after)


def _states() -> tuple[Any, ...]:
    """Return the states of the generators that everybody shares, comparable."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if started else []
    return (
        random.getstate(),
        (kind, bytes(np.asarray(keys)), *rest),
        tuple(bytes(state.numpy()) for state in (torch.get_rng_state(), *gpus)),
    )


def _restore(states: tuple[Any, ...]) -> None:
    python, (kind, keys, *rest), (cpu, *gpus) = states
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes(cpu))
    if gpus:
        torch.cuda.set_rng_state_all([_bytes(state) for state in gpus])


def _bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _same(a: Any, b: Any) -> bool:
    """Return whether two samples, or lists of them, have the same entries."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.tobytes() == y.tobytes()
