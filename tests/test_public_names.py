"""What `import partita as pt` shows: a screen of names, each with a line that says what it is."""

from __future__ import annotations

import inspect
import types

import partita as pt
from support import each


def test_a_screen_of_names_and_no_private_module() -> None:
    assert dir(pt) == sorted(pt.__all__)
    assert 20 <= len(pt.__all__) <= 130
    assert len(set(pt.__all__)) == len(pt.__all__)
    assert not [name for name in pt.__all__ if name.startswith("_") or name in ("check", "engine", "core")]


ALIASES = ("Lr", "Part", "Tensors", "EXECUTORS")  # types for annotations, and a dictionary


@each("name", [n for n in pt.__all__ if n not in ALIASES])
def test_every_name_says_what_it_is(name: str) -> None:
    text = inspect.getdoc(getattr(pt, name))
    assert text
    line = text.splitlines()[0]
    assert line.endswith((".", ":"))
    assert len(line) <= 110


@each("name", [n for n in pt.__all__ if isinstance(getattr(pt, n), types.ModuleType)])
def test_modules_show_their_own_names_only(name: str) -> None:
    module = getattr(pt, name)
    for inner in getattr(module, "__all__", ()):
        assert inspect.getdoc(getattr(module, inner)) or not callable(getattr(module, inner)), inner


@each("name", [n for n in pt.__all__ if inspect.isfunction(getattr(pt, n))])
def test_arguments_are_typed(name: str) -> None:
    """So that an editor completes and checks them."""
    signature = inspect.signature(getattr(pt, name))
    untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not untyped
    assert signature.return_annotation is not signature.empty
