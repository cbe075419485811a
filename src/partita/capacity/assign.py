"""Which client is in which class of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partita.capacity.blocks import is_words
from partita.core import check, draws

Assign = Mapping[str, float] | Sequence[str] | Callable[[int], str] | None
ALLOWED = (
    "how many clients are in each class ({'strong': 16, 'weak': 112}), which share of them ({'strong': 0.25, "
    "'weak': 0.75}), a class for each client (['weak', 'strong', ...]), or a function of the client's number"
)


def check_assign(field: str, value: Any) -> Any:
    """Refuse what can never assign, before classes and clients are known."""
    if value is None or callable(value) or is_words(value):
        return value
    if not isinstance(value, Mapping) or not value:
        raise check.fail(field, value, ALLOWED)
    for name, amount in value.items():
        check.number(f"{field}[{name!r}]", amount, low=0)
    return value


def assigned(assign: Assign, classes: Sequence[str], clients: int, seed: int) -> list[int]:
    """Return for each client the number of its class (None: as many clients in each class)."""
    if assign is None:
        return _shuffled(_whole([clients / len(classes)] * len(classes)), clients, seed)
    if isinstance(assign, Mapping):
        return _drawn(assign, classes, clients, seed)
    names = [assign(i) for i in range(clients)] if callable(assign) else list(assign)
    if len(names) != clients:
        raise check.fail("assign", f"{len(names)} classes", f"one for each of the {clients} clients")
    return [classes.index(check.choice("assign", name, classes)) for name in names]


def _drawn(amounts: Mapping[str, float], classes: Sequence[str], clients: int, seed: int) -> list[int]:
    """Assign so many clients to each class at random: who it is depends on the seed alone."""
    for name in amounts:
        check.choice("assign", name, classes)
    wanted = [float(amounts.get(name, 0)) for name in classes]
    if abs(sum(wanted) - 1) < 1e-9 and clients > 1:  # shares
        counts = _whole([w * clients for w in wanted])
    elif sum(wanted) == clients and all(w == int(w) for w in wanted):
        counts = [int(w) for w in wanted]
    else:
        raise check.fail(
            "assign", dict(amounts), f"numbers of clients, {clients} in all, or shares, 1 in all"
        )
    return _shuffled(counts, clients, seed)


def _shuffled(counts: Sequence[int], clients: int, seed: int) -> list[int]:
    in_order = [number for number, count in enumerate(counts) for _ in range(count)]
    order = draws.generator(seed, "capacity").permutation(clients).tolist()
    return [in_order[i] for i in order]


def _whole(wanted: Sequence[float]) -> list[int]:
    """Return whole numbers with the same sum: rounded down, and one more for those that lost most."""
    counts = [int(w + 1e-9) for w in wanted]
    left = round(sum(wanted)) - sum(counts)
    most = sorted(range(len(wanted)), key=lambda i: counts[i] - wanted[i])
    for i in most[:left]:
        counts[i] += 1
    return counts
