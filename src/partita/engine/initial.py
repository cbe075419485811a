"""The model that a run starts from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.core import check, tree
from partita.core.types import Tensors
from partita.engine import digest as code
from partita.engine.model.probe import Trial
from partita.engine.model.seeding import kept, set_all


def own_copy(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A run never changes the model it was given; a function is called under the run's seed."""
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(model)
        except Exception as error:  # any module may fail in its own way
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            allowed = f"a model that copy.deepcopy can copy: {reason}"
            raise check.fail("model", type(model).__name__, allowed) from error
    if not callable(model):
        raise check.fail("model", model, "an nn.Module or a function that returns one")
    with kept(torch.device("cpu")):
        set_all(seed, torch.device("cpu"))
        torch.default_generator.manual_seed(seed)  # and not torch.manual_seed, which reseeds GPUs too
        try:
            made = model()
        except TypeError as error:
            instance = f"an instance such as {model.__name__}(...), or " if isinstance(model, type) else ""
            allowed = f"{instance}a function that returns an nn.Module, without arguments ({error})"
            raise check.fail("model", model, allowed) from error
    if not isinstance(made, nn.Module):
        raise check.fail("model", model, "a function that returns an nn.Module")
    return made


class Origin(NamedTuple):
    """What a run starts from, in digits: a resumed run must bring the same, and a baseline has the same.

    initial  of the weights and statistics that are trained, as they were at the start
    fixed    of what is trained by nobody and so is in no checkpoint
    code     of what the model, the user's own loss and the user's own metric compute
    trial    what the three make of some samples (see `partita.engine.model.probe.tried`)
    """

    initial: str
    fixed: str
    code: dict[str, str | None]
    trial: Trial

    @staticmethod
    def of(model: nn.Module, names: tuple[str, ...], computed: dict[str, str | None], trial: Trial) -> Origin:
        """Of a model whose tensors with these names are trained."""
        there = model.state_dict(keep_vars=True).items()
        fixed = {k: v for k, v in there if k not in names and not v.requires_grad}
        initial = code.tensors_digest(tensors_of(model, names))
        return Origin(initial, code.tensors_digest(fixed), computed, trial)


def computed_by(model: nn.Module, loss: Any, metric: Any) -> dict[str, str | None]:
    """What is computed, in digits; None for a loss or a metric that its name tells."""
    own = {"loss": loss, "metric": metric}
    found = {k: None if v is None or isinstance(v, str) else code.digest(v) for k, v in own.items()}
    return {"model": code.structure_digest(model), **found}


def tensors_of(model: nn.Module, names: tuple[str, ...]) -> Tensors:
    """Parameters and buffers by name."""
    there: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return tree.pick(there, names)
