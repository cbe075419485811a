"""What a model does beside computing its outputs, as far as a few passes show.

The passes show which buffers it changes, whether it draws random numbers by itself, whether it runs parts of
its forward pass again in the backward pass, and whether it remembers something between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from partita.core import check
from partita.core.criterion import Criterion
from partita.core.inputs import call, described
from partita.core.types import Batch, Inputs, Tensors
from partita.engine.model.checkpointing import Pass, computes_again
from partita.engine.model.forward import Forward, in_place
from partita.engine.model.functions import Functions
from partita.engine.model.normalize import MASK, MaskedBatchNorm, static
from partita.engine.model.seeding import changed, kept, set_all, state
from partita.engine.model.stackable import KEY, batch_buffers, stackable

STATISTICS = ("running_mean", "running_var")
Samples = Sequence[tuple[Inputs, Tensor]]


class Behaviour(NamedTuple):
    """What a model does beside computing its outputs."""

    buffers: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()  # the generators of the process that it draws from
    checkpoints: bool = False  # whether it calls torch.utils.checkpoint
    recomputes: bool = False
    remembers: bool = False
    functions: bool = False  # whether it calls what `partita.engine.model.functions` replaces

    @property
    def not_stackable(self) -> str:
        """Why clients cannot be stacked, as far as this shows; '' if they may be."""
        if self.draws:
            return (
                f"it draws random numbers of its own ({', '.join(self.draws)}) in a way that cannot be keyed "
                "by client, so that a pass for several clients would draw for all of them at once; draw by "
                "torch.rand, torch.randn, dropout and the like, without a generator"
            )
        if self.recomputes:
            return (
                "its backward pass runs parts of the forward pass again in a way of its own, which cannot be "
                "done for several clients at once; use torch.utils.checkpoint, or do without"
            )
        return "it remembers something of earlier passes" if self.remembers else ""


def observe(model: nn.Module, loss: Criterion, trials: Samples, forward: Forward) -> Behaviour:
    """Observe a model in passes on these batches, forwards and back, in training and in evaluation."""
    with kept(trials[0][1].device):
        behaviour = _observe(stackable(model), loss, trials, forward)
        if behaviour.recomputes:  # then nn.Dropout draws by itself, too: see `partita.engine.model.problem`
            behaviour = _observe(stackable(model, keyed=False), loss, trials, forward, keyed=False)
    return behaviour


def check_static(model: nn.Module, x: Inputs, device: torch.device) -> None:
    """Refuse norm="static" for a layer whose statistics go on where they should stay."""
    module = static(stackable(model).train())
    start, key = _buffers(module), torch.zeros((), dtype=torch.int64, device=device)
    tensors = _tensors(module, start, device)
    with kept(device), torch.no_grad(), in_place(module, tensors), Pass(module, key):
        call(module, x)
        moved = _different(module, start)
    for name in moved:
        layer, _, statistic = name.rpartition(".")
        if statistic in STATISTICS:
            kind = type(model.get_submodule(layer)).__name__
            raise check.fail(
                "norm",
                "static",
                f"'global' or 'personal': {layer or 'the model'} ({kind}) tracks its statistics by itself, "
                "without torch.nn.functional.batch_norm, so that they cannot be left alone and measured",
            )


def _observe(
    module: nn.Module, loss: Criterion, trials: Samples, forward: Forward, keyed: bool = True
) -> Behaviour:
    device = trials[0][1].device
    buffers: set[str] = set()
    draws: set[str] = set()
    outputs: list[Tensor] = []
    checkpoints = recomputes = functions = False
    start = _buffers(module)
    versions = {k: p._version for k, p in module.named_parameters()}
    called: set[nn.Module] = set()
    for norm in module.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.register_forward_pre_hook(lambda layer, _: called.add(layer) if layer.training else None)
    for i, (x, y) in enumerate([trials[0], *trials]):
        set_all(max(0, i - 1), device)  # the second pass has all that the first one had
        before = state(device)
        with torch.set_grad_enabled(i == 0), in_place(module.train(), _tensors(module, start, device)):
            key = y.new_zeros((), dtype=torch.int64)
            replaced = Functions(key)
            blocks = Pass(module, key, replaced if keyed else None, draws=True)
            with replaced if keyed else nullcontext(), blocks:
                output, own = _passed(module, forward, x, y)
                value = own if own is not None else loss.mean(output, y) if i < 2 else output
            _check_parameters(module, versions)
            buffers |= _moved(module, start)
            checkpoints = checkpoints or blocks.used
            if i == 0:
                recomputes = _recomputes(module, value)
        functions = functions or replaced.used
        outputs.append(output.detach())
        draws |= set(changed(before, device))
    for x, y in trials:
        before = state(device)
        key = y.new_zeros((), dtype=torch.int64)
        replaced = Functions(key)
        tensors, keys = _tensors(module, start, device), replaced if keyed else nullcontext()
        with torch.no_grad(), in_place(module.eval(), tensors), keys, Pass(module, key):
            _passed(module, forward, x, y)
        functions = functions or replaced.used
        draws |= set(changed(before, device))
    if draws:  # it may have left out a layer in each of the passes
        buffers |= {f"{k}.running_mean".lstrip(".") for k in _uncalled(module.train(), called)}
    remembers = _apart(*outputs[:2])
    return Behaviour(
        _whole(module, buffers), tuple(sorted(draws)), checkpoints, recomputes, remembers, functions
    )


def _passed(module: nn.Module, forward: Forward, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the prediction for a batch, and the model's own loss if it is used, or refuse the model."""
    try:
        if forward.labels:
            return forward.with_loss(module, Batch(x, y, None, y.new_zeros(())))
        return forward(module, x), None
    except check.Refused:
        raise
    except Exception as error:
        mode = "training" if module.training else "evaluation"
        allowed = f"a model that can take a batch of {described(x)} (in {mode})"
        raise check.fail("model", type(module).__name__, f"{allowed}: {check.reason(error)}") from error


def _uncalled(module: nn.Module, called: set[nn.Module]) -> list[str]:
    """Return the BatchNorm layers that would track, had they been called."""
    return [
        name
        for name, m in module.named_modules()
        if isinstance(m, MaskedBatchNorm) and m not in called and m.training and m.running_mean is not None
    ]


def _check_parameters(module: nn.Module, versions: dict[str, int]) -> None:
    """Refuse a forward pass that writes to a parameter: it would write to everybody's."""
    for name, p in module.named_parameters():
        if p._version != versions[name]:
            allowed = f"a forward pass that leaves its parameters alone: it writes to {name}"
            layer = module.get_submodule(name.rpartition(".")[0])
            hint = " (because of max_norm=: scale what the layer puts out instead)"
            max_norm = getattr(layer, "max_norm", None) is not None
            raise check.fail("model", type(module).__name__, allowed + (hint if max_norm else ""))


def _recomputes(module: nn.Module, value: Tensor) -> bool:
    """Return whether modules are called while the gradient is taken, but for those of checkpointed blocks.

    A model that has no gradient is refused.
    """
    moving = [p for p in module.parameters() if p.requires_grad]
    own, called = set(module.modules()), list[nn.Module]()

    def note(layer: nn.Module, inputs: Any) -> None:  # noqa: ARG001
        called.extend([layer] if layer in own and not computes_again() else [])

    hook = register_module_forward_pre_hook(note)
    try:
        torch.autograd.grad(value, moving, allow_unused=True)
    except Exception as error:
        allowed = f"a model whose gradient can be taken: {check.reason(error)}"
        raise check.fail("model", type(module).__name__, allowed) from error
    finally:
        hook.remove()
    return bool(called)


def _tensors(module: nn.Module, buffers: Tensors, device: torch.device) -> Tensors:
    """Return copies of the buffers, and those that a batch brings."""
    key = torch.zeros((), dtype=torch.int64, device=device)
    return {**{k: v.clone() for k, v in buffers.items()}, **batch_buffers(module, key, None)}


def _buffers(module: nn.Module) -> Tensors:
    return {k: v for k, v in module.named_buffers() if k.split(".")[-1] not in (KEY, MASK)}


def _moved(module: nn.Module, before: Tensors) -> set[str]:
    """Return the buffers that a training pass moves.

    A layer that moves one of its buffers and writes to another moves both: what it writes may be what was
    there, as where spectral_norm's v has come to rest and u has not.
    """
    moved = set(_different(module, before))
    layers = {name.rpartition(".")[0] for name in moved}
    written = {k for k in before if k.rpartition(".")[0] in layers and module.get_buffer(k)._version}
    return moved | written


def _different(module: nn.Module, before: Tensors) -> list[str]:
    """Return the buffers that are not what they were."""
    return [k for k, v in before.items() if not torch.equal(module.get_buffer(k), v)]


def _whole(module: nn.Module, names: set[str]) -> tuple[str, ...]:
    """Add all buffers of a BatchNorm that tracks: on a few samples, the mean of zeros stays zero."""
    for layer, norm in module.named_modules():
        if isinstance(norm, MaskedBatchNorm):
            its = {f"{layer}.{k}".lstrip(".") for k, _ in norm.named_buffers(recurse=False) if k != MASK}
            names = names | its if names & its else names
    return tuple(k for k in _buffers(module) if k in names)


def _apart(first: Tensor, second: Tensor) -> bool:
    """Return whether they differ by more than the order of sums would explain."""
    first, second = first.double(), second.double()
    if first.shape != second.shape or not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        return first.shape != second.shape
    return bool((first - second).norm() > 1e-3 * (first.norm() + 1e-3))
