"""The model that a run starts from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from partita import check, tree
from partita.types import Tensors


def own_copy(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A run never changes the model it was given; a function is called under the run's seed."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if not callable(model):
        raise check.fail("model", model, "an nn.Module or a function that returns one")
    with torch.random.fork_rng(devices=[]):
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


def digest(model: nn.Module, names: tuple[str, ...]) -> str:
    """Of what is trained by nobody and so is in no checkpoint: a resumed run must bring the same."""
    found = hashlib.sha256()
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in names and not value.requires_grad:
            found.update(name.encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def tensors_of(model: nn.Module, names: tuple[str, ...]) -> Tensors:
    """Parameters and buffers by name."""
    there: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return tree.pick(there, names)
