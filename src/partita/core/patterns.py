"""Names by patterns such as 'conv*'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase


def by_pattern(
    names: Iterable[str], patterns: Iterable[str], refuse: Callable[[str], ValueError]
) -> dict[str, list[str]]:
    """The names of each pattern that has any, the first that matches; `refuse` names one without."""
    found: dict[str, list[str]] = {}
    for name in names:
        first = next((p for p in patterns if fnmatchcase(name, p)), None)
        if first is None:
            raise refuse(name)
        found.setdefault(first, []).append(name)
    return found
