"""What a request says, read with care: it may come from anybody."""

from __future__ import annotations

from typing import Any

from partita.core import check
from partita.core.types import Tensors
from partita.deploy.wire import Malformed, printable
from partita.engine.store.addresses import Address

MOST_KEPT = 8
"""States of one client that the last checkpoints of a run may need."""


def checked(tensors: Tensors, like: Tensors, what: str) -> Tensors:
    """Return tensors in the order of others, of whose names, shapes and types they must be."""
    for name, expected in like.items():
        value = tensors.get(name)
        if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
            raise Malformed(f"a {what} without {printable(name)} as this experiment has it")
    return {name: tensors[name].to(expected.device) for name, expected in like.items()}


def whole_number(head: dict[str, Any], name: str) -> int:
    """Return a whole number from 0 of a head."""
    value = head.get(name)
    if type(value) is not int or not 0 <= value <= check.LARGEST:
        raise Malformed(f"{name} is no whole number")
    return value


def kept_of(head: dict[str, Any]) -> list[Address]:
    """Return the states that the run may go back to."""
    listed = head.get("kept")
    kept = [address_of(value) for value in (listed if isinstance(listed, list) else [])]
    if len(kept) > MOST_KEPT:
        raise Malformed(f"{len(kept)} states to keep, where a run goes back to {MOST_KEPT} at most")
    return kept


def address_of(value: Any) -> Address:
    """Return an address, of three whole numbers; None is that of a client without a state."""
    if value is None:
        return Address()
    if not isinstance(value, list) or len(value) != 3 or not all(type(v) is int and v >= 0 for v in value):
        raise Malformed("an address is three whole numbers")
    return Address(*value)
