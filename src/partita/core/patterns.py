"""Names by patterns such as 'conv*'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase


def by_pattern(
    names: Iterable[str], patterns: Iterable[str], refuse: Callable[[str], ValueError]
) -> dict[str, list[str]]:
    """Return the names by the first pattern that matches; `refuse` makes the error for one without."""
    matches: dict[str, list[str]] = {}
    for name in names:
        first = next((p for p in patterns if fnmatchcase(name, p)), None)
        if first is None:
            raise refuse(name)
        matches.setdefault(first, []).append(name)
    return matches
