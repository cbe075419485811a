"""How a model is called on a batch, and which of its outputs is compared with the targets.

A model of a user may take one tensor, several, or several by name, and it may return one tensor or many:
those of transformers return an object with `logits`, and with their own loss if they get the labels too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from partita.core import check
from partita.core.criterion import IGNORED
from partita.core.inputs import call, functional
from partita.core.types import Batch, Inputs, Tensors

PREDICTIONS = ("logits", "out", "prediction_logits")  # of transformers, of torchvision's segmentation
LABELS = ("labels", "targets", "target")  # the argument that takes the targets
OUTPUT = "the name or the place of one of the model's outputs, or a function of them that returns a tensor"

Output = str | int | Callable[[Any], Tensor] | None


def check_choice(field: str, value: Any) -> Output:
    """Refuse what cannot choose among the outputs of a model."""
    if value is None or isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return check.takes(field, value, 1, OUTPUT)  # type: ignore[no-any-return]


def in_place(module: nn.Module, tensors: Tensors) -> AbstractContextManager[None]:
    """Give the module these tensors, as `functional_call` does, for more than one call.

    At the end, the dictionary holds what the module has put in their stead.
    """
    placed: AbstractContextManager[None] = _reparametrize_module(module, tensors, tie_weights=True)
    return placed


class Forward(NamedTuple):
    """How a model is called, and what of its outputs counts.

    output  the name or place of the prediction, a function that finds it, or None: `logits`, the first one
    labels  the name of the argument that takes the targets, of a model that returns its own loss; '': it does
            not
    """

    output: Output = None
    labels: str = ""

    def __call__(self, module: nn.Module, x: Inputs) -> Tensor:
        """Return the prediction for these inputs, of the tensors that are in place."""
        return self.prediction(module, call(module, x))

    def functional(self, module: nn.Module, tensors: Tensors | tuple[Tensors, ...], x: Inputs) -> Tensor:
        """Return the prediction for these inputs, with some tensors of the module exchanged."""
        return self.prediction(module, functional(module, tensors, x))

    def with_loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the prediction and the model's own loss; padding gets labels that do not count."""
        outputs = call(module, batch.x, **{self.labels: _counted(batch)})
        return self.prediction(module, outputs), own_loss(module, outputs)

    def prediction(self, module: nn.Module, outputs: Any) -> Tensor:
        """Return the output that is compared with the targets."""
        if isinstance(outputs, Tensor) and self.output is None:
            return outputs
        found = self._found(module, outputs)
        if isinstance(found, Tensor):
            return found
        when = "training" if module.training else "evaluation"
        raise check.fail(
            "output", self.output, f"{OUTPUT}, not a {type(found).__name__} (in {when}; {_listed(outputs)})"
        )

    def _found(self, module: nn.Module, outputs: Any) -> Any:
        if callable(self.output):
            return self.output(outputs)
        named = _named(outputs)
        if isinstance(self.output, str) and self.output in named:
            return named[self.output]
        if isinstance(self.output, int) and not isinstance(outputs, Tensor | Mapping):
            places = tuple(outputs)
            if -len(places) <= self.output < len(places):
                return places[self.output]
        if self.output is not None:
            raise check.fail("output", self.output, f"{OUTPUT}: {_listed(outputs)}")
        for name in PREDICTIONS:
            if isinstance(named.get(name), Tensor):
                return named[name]
        values = list(named.values()) if named else list(outputs) if isinstance(outputs, tuple | list) else []
        tensors = [value for value in values if isinstance(value, Tensor)]
        if tensors and (len(tensors) == 1 or not isinstance(outputs, Mapping)):
            return tensors[0]
        raise check.fail(
            "model",
            type(module).__name__,
            "outputs of which one is the prediction, and output= names it or is a function that finds it: "
            f"{_listed(outputs)}",
        )


def own_loss(module: nn.Module, outputs: Any) -> Tensor:
    """Return the loss among the outputs of a model that got the targets too."""
    loss = _named(outputs).get("loss")
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        reason = f"a model that returns its own loss, one number, for loss='model': {_listed(outputs)}"
        raise check.fail("model", type(module).__name__, reason)
    return loss


def labels_of(model: nn.Module) -> str:
    """Return the name of the argument that takes the targets; refuse a model without one."""
    arguments = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    name = next((name for name in LABELS if name in arguments), None)
    if name is None:
        takes = f"its forward takes none of {', '.join(LABELS)}, but {', '.join(arguments)}"
        allowed = (
            "loss=None and a function output= that puts into one tensor [samples, labels, classes] what the "
            "columns of y are compared with, as for start and end of an answer lambda o: "
            "torch.stack([o.start_logits, o.end_logits], 1); or a module around it that takes labels and "
            "returns a loss"
        )
        raise check.fail("loss", "model", allowed, f"{type(model).__name__} has no argument for y: {takes}")
    return name


def _counted(batch: Batch) -> Tensor:
    """Return the targets, with labels that do not count for the padding of a short batch."""
    y = batch.y
    if batch.mask is None:
        return y
    assert not y.is_floating_point(), "among numbers there is no target that does not count"
    real = batch.mask.view(-1, *[1] * (y.dim() - 1)) > 0
    return torch.where(real, y, IGNORED)


def _named(outputs: Any) -> Mapping[str, Any]:
    """Return the outputs by their names, as far as they have any."""
    if isinstance(outputs, Mapping):
        return outputs
    return outputs._asdict() if hasattr(outputs, "_asdict") else {}


def _listed(outputs: Any) -> str:
    """Say what a model returns."""
    if named := _named(outputs):
        return f"it returns {', '.join(f'{name!r}' for name in named)}"
    if isinstance(outputs, tuple | list):
        return f"it returns {len(outputs)} outputs: {', '.join(type(value).__name__ for value in outputs)}"
    return f"it returns a {type(outputs).__name__}"
