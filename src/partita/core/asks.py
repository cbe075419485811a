"""What a loss may ask for beside (output, target), by the names of its arguments.

| argument | what it is |
| --- | --- |
| `features` | what the model's last layer takes, or what the submodule of `features=` puts out |
| `inputs` | the inputs of the batch |
| `received_output`, `received_features` | the same batch through the model as the client received it |
| `previous_output`, `previous_features` | through the client's model at the end of its last round |
| `class_counts` | how many training samples of each class the client has |

Only `output` and `features` have a gradient: other models are constants, in evaluation mode. A model that a
rule puts into `Batch.given` under another name is asked for in the same way (`teacher_output`), and so are
the tensors that a method sends beside the model (`Download.extra`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.inputs import each as each_input

FEATURES, INPUTS, COUNTS = "features", "inputs", "class_counts"
RECEIVED, PREVIOUS = "received", "previous"
OF_MODELS = ("output", FEATURES)
KNOWN = (
    FEATURES,
    INPUTS,
    *[f"{model}_{part}" for model in (RECEIVED, PREVIOUS) for part in OF_MODELS],
    COUNTS,
)
"""All that a user's loss may ask for."""
NEARLY = 0.85  # the likeness of two names of which one is taken for the other, misspelt


def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)


def arguments(function: Any) -> tuple[inspect.Parameter, ...]:
    """Return the arguments of a function, or of the forward pass of a module, that have names."""
    try:
        parameters = _signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return ()
    return tuple(p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def asked_by(function: Any) -> tuple[str, ...]:
    """Return what a user's function asks for beside its first two arguments, whatever those are called."""
    return tuple(p.name for p in arguments(function)[2:] if p.name in KNOWN)


def takes_asked(field: str, value: Any, allowed: str) -> Callable[..., Tensor]:
    """Return a function of (output, target) and of what else a loss may ask for; refuse any other."""
    asked = asked_by(value) if callable(value) and not isinstance(value, type) else ()
    if meant := _misspelt(value):
        name, known = meant
        reason = f"nothing is handed over as {name!r}, its default would always hold"
        raise check.fail(field, value, f"{known!r}, or another name for an option of your own", reason)
    if not asked:
        more = f"; a loss may also ask for {', '.join(KNOWN)}"
        return check.takes(field, value, 2, allowed + more)  # type: ignore[no-any-return]
    try:
        _signature(value).bind(None, None, **dict.fromkeys(asked))
    except TypeError as error:
        first = "output and target first, and beside them only"
        raise check.fail(field, value, f"{first} {', '.join(KNOWN)} ({error})") from None
    return value  # type: ignore[no-any-return]


def _misspelt(function: Any) -> tuple[str, str] | None:
    """Return an optional argument of a loss that is nearly one that it may ask for, and that one."""
    if not callable(function) or isinstance(function, type):
        return None
    given = function.keywords if isinstance(function, partial) else {}
    options = [p.name for p in arguments(function)[2:] if p.default is not p.empty]
    for name in options:
        close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=NEARLY)
        if close and name not in KNOWN and name not in given:
            return name, close[0]
    return None


def of_model(asked: str) -> tuple[str, str] | None:
    """Return the model and the part of it that a name asks for, such as ('received', 'features')."""
    model, _, part = asked.rpartition("_")
    return (model, part) if model and part in OF_MODELS else None


def needs_features(asks: Iterable[str]) -> bool:
    """Return whether the features of some model are asked for."""
    return any(name == FEATURES or name.endswith(f"_{FEATURES}") for name in asks)


def of_samples(name: str) -> bool:
    """Return whether what is asked for has a row of each sample."""
    return name in (FEATURES, INPUTS) or of_model(name) is not None


def by_sample(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what a function of a batch gives for each of its samples alone."""

    def each(output: Tensor, target: Tensor, **given: Any) -> Tensor:
        rows = {k: v for k, v in given.items() if of_samples(k)}
        common = {k: v for k, v in given.items() if k not in rows}
        alone = output.unsqueeze(1), target.unsqueeze(1), {k: each_input(_alone, v) for k, v in rows.items()}

        def one(output: Tensor, target: Tensor, rows: Mapping[str, Any]) -> Tensor:
            return function(output, target, **rows, **common)

        try:
            return torch.func.vmap(one)(*alone)
        except (RuntimeError, ValueError):  # what vmap cannot trace, such as .item(), sample by sample
            return _one_by_one(one, *alone)

    return each


def _alone(rows: Tensor) -> Tensor:
    return rows.unsqueeze(1)


def _one_by_one(
    one: Callable[..., Tensor], output: Tensor, target: Tensor, rows: Mapping[str, Any]
) -> Tensor:
    values = []
    for i, (z, y) in enumerate(zip(output, target)):
        mine = {k: each_input(lambda t: t[i], v) for k, v in rows.items()}  # noqa: B023
        values.append(torch.as_tensor(one(z, y, mine), device=output.device))
    return torch.stack(values)
