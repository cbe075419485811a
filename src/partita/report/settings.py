"""What was asked for: the configuration as a table, versions, the executor's picks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partita.engine.record import personal_part
from partita.report.html import Safe, section, table, tag
from partita.report.rows import Runs
from partita.report.words import count, shorten

LONGEST, MOST_KEYS = 120, 40


def settings(runs: Runs) -> Safe:
    """A fold per label with everything needed to run it again; picks and versions in the open."""
    folds, picks, versions = list[Safe](), list[list[object]](), list[str]()
    parts = list[Safe]()
    for label, seeds in runs.items():
        config = seeds[0].config
        name = f"Settings of {label}" if len(runs) > 1 else "All settings"
        rows = [[key, value] for key, value in flat({k: v for k, v in config.items() if k != "versions"})]
        if rows:
            folds.append(tag("details", tag("summary", name), table(["setting", "value"], rows, (0, 1))))
        if part := personal_part(seeds[0].summary()):
            of = f" of {label}" if len(runs) > 1 else ""
            parts.append(tag("p", f"Personal part{of}: {part}."))
        picks += [[*([label] if len(runs) > 1 else []), *pick] for pick in _picks(config)]
        shown = ", ".join(f"{k} {v}" for k, v in _mapping(config.get("versions")).items())
        versions += [shown] if shown and shown not in versions else []
    nothing = None if folds else tag("p", "No configuration was recorded.")
    head = [*([""] if len(runs) > 1 else []), "work", "executor", "why it was picked"]
    chosen = table(head, picks, words=(0, 1, 2, 3)) if picks else None
    known = [tag("p", f"Versions: {shown}.", class_="how") for shown in versions]
    return section("settings", "Settings", nothing, *parts, chosen, *folds, *known)


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `algorithm.lr`, `0.1`; long values shortened, long lists of keys cut."""
    for i, (key, inner) in enumerate(value.items()):
        if i == MOST_KEYS:
            yield f"{prefix}…", f"and {count(len(value) - MOST_KEYS)} more"
            return
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", shorten(_shown(inner), LONGEST)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        # enough for any reader; a setting per client of a million would take a while
        return ", ".join(map(_shown, value[:MOST_KEYS])) + (", …" if len(value) > MOST_KEYS else "")
    return str(value)


def _picks(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for role, pick in _mapping(_mapping(config.get("executor")).get("picks")).items():
        yield str(role), str(_mapping(pick).get("picked", "")), str(_mapping(pick).get("why", ""))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
