"""Models of which a part is not trained: it is neither sent nor personal, and has no optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from partita.core import check
from partita.core.adapters import Adapters

Model = TypeVar("Model", bound=nn.Module)
Names = str | Sequence[str] | Callable[[str], bool]

ALLOWED = "a pattern of names such as '*lora_A*', 'adapter', a list of these, or a function of a name"


def freeze(model: Model, names: Names = "*", *, but: Names | None = None) -> Model:
    """Return a model whose parameters of these names are not trained, over the same memory.

    names  pattern(s) of parameters, 'adapter' for all of those, or a function of a name; all by default
    but    what is left as it is among them

        freeze(model, but="adapter")     # LoRA: the base stays as it was trained before
        freeze(model, "*lora_A*")        # FFA-LoRA: of the two factors only B is trained
    """
    parameters = dict(model.named_parameters())
    frozen = _chosen("names", names, model, list(parameters))
    frozen -= set() if but is None else _chosen("but", but, model, list(parameters))
    memo: dict[int, Any] = {id(t): t for t in model.buffers()}
    for name, p in parameters.items():
        memo[id(p)] = nn.Parameter(p.data, p.requires_grad and name not in frozen)
    return copy.deepcopy(model, memo)


def _chosen(field: str, names: Names, model: nn.Module, parameters: list[str]) -> set[str]:
    """Return the parameters that are named; refuse what names none."""
    if callable(names):
        chosen = {name for name in parameters if names(name)}
        if not chosen:
            raise check.fail(field, names, f"a function that accepts at least one of {_some(parameters)}")
        return chosen
    words = [names] if isinstance(names, str) else names
    if not isinstance(words, Sequence) or not words or not all(isinstance(w, str) and w for w in words):
        raise check.fail(field, names, ALLOWED)
    adapters, chosen = Adapters(model), set[str]()
    for word in words:
        found = {n for n in parameters if (n in adapters if word == "adapter" else fnmatchcase(n, word))}
        if not found:
            raise check.fail(field, word, f"{ALLOWED}; it matches none of {_some(parameters)}")
        chosen |= found
    return chosen


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
