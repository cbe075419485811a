"""What was asked for: the configuration as a table, versions, what the executor chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partita.engine.record import lookup, personal_part
from partita.report.html import Safe, note, section, table, tag
from partita.report.rows import Runs
from partita.report.words import count, shorten

LONGEST, MOST_KEYS = 120, 40


def settings(runs: Runs) -> Safe:
    """Return a fold per label with everything needed to run it again; choices and versions in the open."""
    several = len(runs) > 1
    parts, folds, choices, versions = list[Safe](), list[Safe](), list[list[str]](), dict[str, None]()
    for label, seeds in runs.items():
        config = seeds[0].config
        if part := personal_part(seeds[0].facts):
            parts.append(tag("p", f"Personal part{f' of {label}' if several else ''}: {part}."))
        if rows := list(flat({k: v for k, v in config.items() if k not in ("versions", "executor")})):
            name = f"Settings of {label}" if several else "All settings"
            folds.append(tag("details", tag("summary", name), table(["setting", "value"], rows, (0, 1))))
        for role, pick in _items(config, "executor", "picks"):
            choice = [str(lookup(pick, key) or "") for key in ("picked", "why")]
            choices.append([*[label] * several, role, *choice])
        if packages := ", ".join(f"{name} {version}" for name, version in _items(config, "versions")):
            versions[packages] = None
    head = [*[""] * several, "work", "executor", "why it was picked"]
    executors = [tag("details", tag("summary", "Executors"), table(head, choices, words=range(4)))]
    executors = executors if choices else []
    return section(
        "settings",
        "Settings",
        None if folds else tag("p", "No configuration was recorded."),
        *parts,
        *folds,
        tag("details", tag("summary", "Executors"), table(head, choices, words=range(4)))
        if choices
        else None,
        *(note(f"Versions: {packages}.") for packages in versions),
    )


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as `algorithm.lr`, `0.1`; long values shortened, long lists of keys cut."""
    for i, (key, inner) in enumerate(value.items()):
        if i == MOST_KEYS:
            yield f"{prefix}…", f"and {count(len(value) - MOST_KEYS)} more"
            return
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", shorten(_words(inner), LONGEST)


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        # enough for any reader; a setting per client of a million would take a while
        return ", ".join(map(_words, value[:MOST_KEYS])) + (", …" if len(value) > MOST_KEYS else "")
    return str(value)


def _items(config: Mapping[str, Any], *keys: str) -> list[tuple[str, Any]]:
    values = lookup(config, *keys)
    return [(str(key), value) for key, value in values.items()] if isinstance(values, Mapping) else []
