"""What a loss asks for, handed to it: features, other models on the same batch, numbers of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from partita.core.asks import FEATURES, INPUTS, needs_features, of_model
from partita.core.criterion import Criterion
from partita.core.types import Batch, Inputs, Tensors
from partita.engine.model.features import recording
from partita.engine.model.forward import in_place
from partita.engine.model.stackable import batch_buffers

if TYPE_CHECKING:
    from partita.engine.model.problem import ModelProblem


def constants(problem: ModelProblem, criterion: Criterion, batch: Batch) -> Batch:
    """Return the batch with all that the loss asks for and that does not depend on the parameters."""
    if not criterion.asks:
        return batch
    found: dict[str, Any] = {}
    models: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name in criterion.asks:
        if name in batch.given:
            found[name] = batch.given[name]
        elif name not in (FEATURES, INPUTS):
            model, part = of_model(name) or (name, "")
            if model not in models:
                every = [k for k in criterion.asks if k.startswith(f"{model}_")]
                models[model] = seen(problem, batch.given[model], batch, needs_features(every))
            found[name] = models[model][int(part == FEATURES)]
    return batch._replace(given=found)


def seen(
    problem: ModelProblem, params: Tensors, batch: Batch, features: bool
) -> tuple[Tensor, Tensor | None]:
    """Return outputs, and features where they are wanted, in evaluation mode and without gradients."""
    module = problem.evaluation
    with torch.no_grad(), problem.draws.of(batch.key), problem.computing(batch.key):
        tensors = {**problem.arranged(params), **batch_buffers(module, batch.key, batch.mask)}
        with in_place(module, tensors):
            output, h = passed(problem, module, batch.x, features)
    return problem.widened(output), None if h is None else problem.widened(h)


def passed(
    problem: ModelProblem, module: nn.Module, x: Inputs, features: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the prediction of the tensors in place, and the features where they are wanted."""
    if not features:
        return problem.forward(module, x), None
    assert problem.layout is not None
    with recording(module, problem.layout) as recorded:
        output = problem.forward(module, x)
    return output, recorded[0]


def handed(criterion: Criterion, batch: Batch, output: Tensor, features: Tensor | None) -> dict[str, Any]:
    """Return what the loss asks for, by name, in the precision of the outputs."""
    own = {FEATURES: features, INPUTS: batch.x}
    return {k: _alike(own[k] if k in own else batch.given[k], output) for k in criterion.asks}


def _alike(value: Any, output: Tensor) -> Any:
    numbers = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(output.dtype) if numbers else value
