"""Which part of a model is personal.

| personal= | what stays with the client |
| --- | --- |
| "input", "output" | the first / last layer (or what the model declares as such) |
| "adapter" | adapters added with `partita.models.add_adapters` |
| "norm" | normalization layers and their statistics (FedBN) |
| "all", "none" | everything, nothing |
| "head.*", "*.bias" | names that match the pattern |
| callable | names for which it returns true |
| a list of these | their union |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from partita import check
from partita.types import Partition

Personal = str | Sequence[str] | Callable[[str], bool]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
_WORDS = ("input", "output", "adapter", "norm", "all", "none")


def check_personal(personal: object) -> None:
    """Refuses what can never be a split, before a model is there to compare it with."""
    words = [personal] if isinstance(personal, str) else personal
    if not callable(words) and not (
        isinstance(words, Sequence) and words and all(isinstance(w, str) and w for w in words)
    ):
        raise check.fail("personal", personal, _allowed())


def personal_names(model: nn.Module, names: Sequence[str], personal: Personal) -> tuple[str, ...]:
    """The names that `personal` selects, in the order of `names`; refuses what matches nothing."""
    if callable(personal):
        chosen = {n for n in names if personal(n)}
        if not chosen:
            raise check.fail("personal", personal, f"a callable that accepts at least one of {_some(names)}")
    else:
        words = [personal] if isinstance(personal, str) else list(personal)
        chosen = set().union(*(_select(model, names, word) for word in words))
    return tuple(n for n in names if n in chosen)


def split(model: nn.Module, names: Sequence[str], personal: Personal) -> Partition:
    """The selected names are personal, all others shared."""
    mine = personal_names(model, names, personal)
    return Partition(shared=tuple(n for n in names if n not in set(mine)), personal=mine)


def keep_norms(model: nn.Module, partition: Partition, buffers: Sequence[str]) -> Partition:
    """FedBN: normalization layers, their statistics and all other buffers become personal too."""
    everything = tuple(dict.fromkeys((*partition.shared, *partition.personal)))
    mine = {n for n in everything if n in set(buffers) or _in_modules(n, _norm_layers(model))}
    return Partition(
        shared=tuple(n for n in partition.shared if n not in mine),
        personal=tuple(n for n in everything if n in mine or n in set(partition.personal)),
    )


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


def _select(model: nn.Module, names: Sequence[str], word: str) -> set[str]:
    if word == "none":
        return set()
    if word == "all":
        return set(names)
    if word in ("input", "output"):
        parts = getattr(model, f"{word}_part", None) or _outer_layer(model, last=word == "output")
        found = {n for n in names if _in_modules(n, parts)}
        _refuse_ties(model, parts, found, word)
    elif word == "adapter":
        found = {n for n in names if "adapter" in n.split(".")}
    elif word == "norm":
        found = {n for n in names if _in_modules(n, _norm_layers(model))}
    else:
        found = {n for n in names if fnmatchcase(n, word)}
    if not found:
        hint = " (add them with partita.models.add_adapters)" if word == "adapter" else ""
        raise check.fail(
            "personal",
            word,
            f"{_allowed()}{check.meant(word, _WORDS)}; it matches none of the model's {_some(names)}{hint}",
        )
    return found


def _outer_layer(model: nn.Module, last: bool) -> tuple[str, ...]:
    """The first or last module that owns parameters; norms and adapters only when there is nothing else."""
    owners = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    layers = [n for n, m in owners if not isinstance(m, _NORMS) and "adapter" not in n.split(".")]
    layers = layers or [n for n, _ in owners]
    return (layers[-1 if last else 0],) if layers else ()


def _refuse_ties(model: nn.Module, parts: Sequence[str], found: set[str], word: str) -> None:
    """A tensor of the layer that also belongs to another layer has one name only, and not the layer's."""
    names = {id(p): n for n, p in model.named_parameters()}
    for alias, p in model.named_parameters(remove_duplicate=False):
        own = names[id(p)]
        if alias != own and _in_modules(alias, parts) and own not in found and p.requires_grad:
            raise check.fail(
                "personal",
                word,
                f"a part that shares no tensor with another: {alias} is the same tensor as {own}; "
                "name the tensors that shall be personal",
            )


def _norm_layers(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, m in model.named_modules() if isinstance(m, _NORMS))


def _in_modules(name: str, modules: Sequence[str]) -> bool:
    return any(m == "" or name.startswith(m + ".") for m in modules)


def _allowed() -> str:
    return f"one of {', '.join(map(repr, _WORDS))}, a name pattern such as 'head.*', a list or a callable"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{len(names)} names ({shown}{', ...' if len(names) > 6 else ''})"
