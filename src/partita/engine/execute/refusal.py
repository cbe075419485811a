"""Why clients of a model cannot be stacked, in a sentence, and which of its layers it is."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import check, tree
from partita.core.types import Batch, Tensors
from partita.engine.model.problem import ModelProblem

_SLOW = r"batching rule for (\S+?)\. "  # torch would run the clients one after another
_MISSING = r"Batching rule not implemented for (\S+?)[.;]|yet support (aten::\S+?)\.|over (torch\.\w+) isn't"
_SENTENCES = {
    f"{_SLOW}|{_MISSING}": ("{} cannot run for several clients at once"),
    r"data-dependent control flow|calling \.item\(\)": (
        "the values of a tensor decide what happens (if, while, .item()), and may decide otherwise for each "
        "client; torch.where computes both ways"
    ),
    r"dynamic shape. Attempted to vmap over (aten::\w+)|(boolean mask)|torch\.(masked_select)": (
        "the shape of a result depends on the values of a tensor ({}), and may differ by client"
    ),
    r"inplace arithmetic|doesn't match the broadcast shape": (
        "values that differ by client are written into a tensor that all of them share; make that one from a "
        "tensor of the batch, as x.new_zeros(...) and torch.zeros_like(x) do"
    ),
    r"Cannot access data pointer": (
        "values are taken out of their tensors (.numpy(), .tolist(), a kernel of its own)"
    ),
}
"""What torch says of `vmap`, and what that means here."""
_BACKWARD = "_engine_run_backward"  # the function of torch from which the backward pass runs


@contextmanager
def refusing_slow_operations() -> Iterator[None]:
    """Let torch fail where it would run stacked clients one after another, and warn of nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=f".*{_SLOW}")
        yield


def explained(problem: ModelProblem, error: BaseException) -> str:
    """Say what an error in a pass of stacked clients means, and where in the model it was raised."""
    text = " ".join(str(error).split())
    for pattern, sentence in _SENTENCES.items():
        if match := re.search(pattern, text):
            operation = next((group for group in match.groups() if group), "")
            return _place(problem, error) + sentence.format(operation)
    return _place(problem, error) + check.named_reason(error)


def _place(problem: ModelProblem, error: BaseException) -> str:
    """Return the innermost layer that was at work when the error was raised."""
    names = {
        m: name for module in (problem.training, problem.evaluation) for name, m in module.named_modules()
    }
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code.co_name == _BACKWARD:
            return "in the backward pass, "
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Module) and layer in names:
            return f"in {_named(names[layer], layer)}, "
    return ""


def _named(name: str, layer: nn.Module) -> str:
    kind = type(layer).__name__
    return f"layer {name!r} ({kind})" if name else f"the model ({kind})"


# ---- layers that compute something else


def first_difference(problem: ModelProblem, outputs: Tensors, expected: Tensors, size: int, most: int) -> str:
    """Return the first layer of which a client in a stack gets other outputs than alone; '' if all agree.

    The client has `size` samples, and `most` with the padding.
    """
    for name, values in outputs.items():
        if name in expected and _apart(_real(values, size, most), expected[name]):
            layer = name.rpartition("#")[0]
            return _named(layer, problem.training.get_submodule(layer))
    return ""


def layer_outputs(problem: ModelProblem, params: Tensors, batch: Batch) -> Tensors:
    """Return what each call of each layer puts out in a training pass, in order, by name and number."""
    recorded: dict[str, Any] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            tensors = [x for x in tree.leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
            if tensors:
                recorded[f"{name}#{len(recorded)}"] = tensors[0].clone()

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in problem.training.named_modules():
            hooks.callback(layer.register_forward_hook(keep(name)).remove)
        problem.f(params, batch)({})
    return recorded


def _real(values: Tensor, size: int, most: int) -> Tensor:
    """Return the outputs for the real samples, which lie along one of the first axes."""
    axis = next((i for i, n in enumerate(values.shape[:2]) if n == most), None)
    return values if axis is None else values.narrow(axis, 0, size)


def _apart(values: Tensor, expected: Tensor) -> bool:
    if values.shape != expected.shape:  # samples lie elsewhere: nothing is shown
        return False
    return bool((values - expected).norm() > 1e-3 * (expected.norm() + 1e-3))
