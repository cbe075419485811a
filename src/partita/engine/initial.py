"""The model that a run starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.core import check, tree
from partita.core.compiled import uncompiled
from partita.core.frozen import lean_copy
from partita.core.types import Tensors
from partita.engine import digest as code
from partita.engine.model.probe import Trial
from partita.engine.model.seeding import kept, set_all


def own_copy(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a copy of a model, or of what a function returns under the run's seed; neither is changed.

    Frozen parameters are not copied: both have them in the same memory.
    """
    if isinstance(model, nn.Module):
        return _copied(model)
    if not callable(model):
        raise check.fail("model", model, "an nn.Module or a function that returns one")
    with kept(torch.device("cpu")):
        set_all(seed, torch.device("cpu"))
        torch.default_generator.manual_seed(seed)  # and not torch.manual_seed, which reseeds GPUs too
        try:
            instance = model()
        except TypeError as error:
            example = f"an instance such as {model.__name__}(...), or " if isinstance(model, type) else ""
            allowed = f"{example}a function that returns an nn.Module, without arguments ({error})"
            raise check.fail("model", model, allowed) from error
    if not isinstance(instance, nn.Module):
        raise check.fail("model", model, "a function that returns an nn.Module")
    return _copied(instance)


def _copied(model: nn.Module) -> nn.Module:
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise check.fail("model", name, "the module itself, before torch.jit.script or torch.jit.trace")
    try:
        return lean_copy(uncompiled(model))
    except Exception as error:  # any module may fail in its own way
        allowed = f"a model that copy.deepcopy can copy: {check.reason(error)}"
        raise check.fail("model", name, allowed) from error


class Origin(NamedTuple):
    """Digests of what a run starts from: a resumed run must have the same, and a baseline has the same.

    initial  of the initial weights and statistics that are trained
    fixed    of the tensors that are not trained, and so are in no checkpoint
    code     of what the model, the user's own loss and the user's own metric compute
    trial    what the three make of some samples (see `partita.engine.model.probe.tried`)
    """

    initial: str
    fixed: str
    code: dict[str, str | None]
    trial: Trial

    @staticmethod
    def of(model: nn.Module, names: tuple[str, ...], computed: dict[str, str | None], trial: Trial) -> Origin:
        """Return the origin of a model whose tensors with these names are trained."""
        tensors = model.state_dict(keep_vars=True).items()
        fixed = {k: v for k, v in tensors if k not in names and not v.requires_grad}
        initial = code.tensors_digest(tensors_of(model, names))
        return Origin(initial, code.tensors_digest(fixed), computed, trial)


def computed_by(model: nn.Module, loss: Any, metric: Any) -> dict[str, str | None]:
    """Return digests of the code of model, loss and metric; None for a loss or a metric given by name."""
    functions = {"loss": loss, "metric": metric}
    digests = {k: None if v is None or isinstance(v, str) else code.digest(v) for k, v in functions.items()}
    return {"model": code.structure_digest(model), **digests}


def tensors_of(model: nn.Module, names: tuple[str, ...]) -> Tensors:
    """Return the parameters and buffers of these names."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return tree.pick(tensors, names)
