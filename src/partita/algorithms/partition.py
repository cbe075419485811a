"""Which part of a model is personal.

| personal= | what stays with the client |
| --- | --- |
| "input", "output" | the layer that a sample meets first / last (or what the model declares as such) |
| "adapter" | adapters of `partita.models.add_adapters` or of peft (LoRA, IA3, prompts) |
| "norm" | normalization layers and their statistics (FedBN) |
| "all", "none" | everything, nothing |
| "head.*", "*.bias" | names that match the pattern |
| callable | names for which it returns true |
| a list of these | their union |

"input" and "output" are found in a trial: a few samples pass through the model (see `order.py`). `Names` have
what that takes, since a partition is a function of a model and its names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from partita.algorithms.order import Use, uses
from partita.core import check
from partita.core.adapters import Adapters
from partita.core.inputs import described
from partita.core.types import Inputs, Partition

Personal = str | Sequence[str] | Callable[[str], bool]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
_PARTS = ("input", "output", "adapter", "norm")
_ADAPTERS_FROM = "add them with partita.models.add_adapters or peft.get_peft_model; frozen ones do not count"
_LESS = " (one factor of LoRA: '*lora_B*'; ditto keeps adapters of a client's own beside the shared ones)"
_WORDS = (*_PARTS, "all", "none")


class Names(tuple[str, ...]):
    """Names of a model's tensors, which also tell in which order a sample meets its parameters.

    >>> Names.of(nn.Linear(4, 2), lambda: torch.zeros(1, 4)).uses
    [Use(names=('weight', 'bias'), mixes=True, biases=())]
    """

    _trial: Callable[[], list[Use]]

    @classmethod
    def of(cls, model: nn.Module, samples: Callable[[], Inputs], names: Iterable[str] | None = None) -> Names:
        """These, or those of what is trained; `samples` are asked for once a word needs them."""
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        made = cls(trained if names is None else names)
        made._trial = lambda: _tried(model, samples())
        return made

    @functools.cached_property
    def uses(self) -> list[Use]:
        """What a sample meets, one after another."""
        return self._trial()


def _tried(model: nn.Module, x: Inputs) -> list[Use]:
    try:
        return uses(model, x)
    except Exception as error:  # any module may fail in its own way
        reason = check.reason(error)
        taken = f"a batch of {described(x)}"
        raise check.fail("model", type(model).__name__, f"a model that can take {taken}: {reason}") from error


def check_personal(field: str, personal: Any) -> Personal:
    """Refuse what can never be a split, before a model is there to compare it with."""
    words = [personal] if isinstance(personal, str) else personal
    if not callable(words) and not (
        isinstance(words, Sequence) and words and all(isinstance(w, str) and w for w in words)
    ):
        raise check.fail(field, personal, _allowed())
    return personal  # type: ignore[no-any-return]


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
    """The selected names are personal, all others shared; a word for a part must leave something to share."""
    mine = personal_names(model, names, personal)
    found = Partition(shared=tuple(n for n in names if n not in set(mine)), personal=mine)
    words = () if callable(personal) else [personal] if isinstance(personal, str) else personal
    parameters = {n for n, _ in model.named_parameters()}
    if parameters.isdisjoint(found.shared) and "all" not in words and set(words) & set(_PARTS):
        raise check.fail(
            "personal",
            personal,
            f"a part of the model: this one is all of its {_some(mine)}, and nothing would be shared; "
            f"choose less{_LESS if 'adapter' in words else ''}, or say 'all'",
        )
    return found


def keep_norms(model: nn.Module, partition: Partition, buffers: Sequence[str]) -> Partition:
    """FedBN: normalization layers, their statistics and all other buffers become personal too."""
    everything = tuple(dict.fromkeys((*partition.shared, *partition.personal)))
    mine = {n for n in everything if n in set(buffers) or _in_modules(n, _norm_layers(model))}
    return Partition(
        shared=tuple(n for n in partition.shared if n not in mine),
        personal=tuple(n for n in everything if n in mine or n in set(partition.personal)),
    )


def _select(model: nn.Module, names: Sequence[str], word: str) -> set[str]:
    if word == "none":
        return set()
    if word == "all":
        return set(names)
    if word in ("input", "output"):
        parts = getattr(model, f"{word}_part", None) or _outer_layer(model, names, word)
        found = {n for n in names if _in_modules(n, parts)}
        _refuse_ties(model, parts, found, word)
        if not found:
            raise check.fail(
                "personal",
                word,
                f"a layer that is trained: the {word} layer of this model ({', '.join(parts)}) is frozen; "
                f"name another part of the model's {_some(names)}",
            )
    elif word == "adapter":
        adapters = Adapters(model)
        found = {n for n in names if n in adapters}
    elif word == "norm":
        found = {n for n in names if _in_modules(n, _norm_layers(model))}
    else:
        found = {n for n in names if fnmatchcase(n, word)}
    if not found:
        hint = f" ({_ADAPTERS_FROM})" if word == "adapter" else ""
        raise check.fail(
            "personal",
            word,
            f"{_allowed()}{check.meant(word, _WORDS)}; it matches none of the model's {_some(names)}{hint}",
        )
    return found


def _outer_layer(model: nn.Module, names: Sequence[str], word: str) -> tuple[str, ...]:
    """What a sample meets first or last: names of a module, or of parameters that are no module's own.

    What only adds or scales (a class token, the embedding of positions), norms and adapters count only where
    there is nothing else.
    """
    if not isinstance(names, Names):
        raise check.fail(
            "personal",
            word,
            f"a model that declares its {word}_part, or names with a sample: "
            "partita.algorithms.partition.Names.of(model, lambda: x)",
        )
    norms, adapters = _norm_layers(model), Adapters(model)

    def plain(use: Use) -> tuple[str, ...]:
        return tuple(n for n in use.names if not _in_modules(n, norms) and n not in adapters)

    layers = [use._replace(names=plain(use)) for use in names.uses if plain(use)]
    met = [use for use in layers if use.mixes] or layers or names.uses
    if not met:
        raise check.fail(
            "personal",
            word,
            "names of the model's, or a pattern: no parameter was seen to act on a sample, so that its "
            f"{word} layer is not known",
        )
    return _layer(model, met[-1 if word == "output" else 0])


def last_layer(model: nn.Module, names: Sequence[str]) -> str | None:
    """The module that a sample meets last, whatever the model declares as its output part; None: several."""
    modules = dict(model.named_modules())
    parts = _outer_layer(model, names, "output")
    layers = {part if part in modules else _owner(part) for part in parts}
    inner = [k for layer in layers for k, _ in modules[layer].named_children() if k != "parametrizations"]
    return None if len(layers) > 1 or inner else layers.pop()


def _layer(model: nn.Module, use: Use) -> tuple[str, ...]:
    """The modules that own these parameters, if they are layers; else the parameters, with their biases.

    A module that holds layers, or the whole model, is no layer: only what was used at once is taken of it.
    """
    adapters = Adapters(model)
    every = [n for n, _ in model.named_parameters() if n not in adapters]
    found: dict[str, None] = {}
    for name in use.names:
        owner = _owner(name)
        inside = [n for n in every if _in_modules(n, (owner,))]
        if len(inside) < len(every) and all(_owner(n) == owner for n in inside):
            found[owner] = None
        else:
            found |= dict.fromkeys((name, *(n for n in use.biases if _owner(n) == owner)))
    return tuple(found)


def _owner(name: str) -> str:
    """The module of a parameter; the layer, where a weight is computed (`torch.nn.utils.parametrize`)."""
    layer, computed, _ = name.partition(".parametrizations.")
    return layer if computed else name.rpartition(".")[0]


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
    """Whether a name is of one of these modules, or is one of these names."""
    return any(m in ("", name) or name.startswith(m + ".") for m in modules)


def _allowed() -> str:
    return f"one of {', '.join(map(repr, _WORDS))}, a name pattern such as 'head.*', a list or a callable"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{len(names)} names ({shown}{', ...' if len(names) > 6 else ''})"
