"""One small trial before any work: what the model returns, what it changes, whether it can be stacked."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partita.algorithms.partition import Names
from partita.core import check, tree
from partita.core.device import arithmetic
from partita.core.metrics import Criterion, Function, choose_loss, choose_metric
from partita.core.types import Batch, Tensors
from partita.data import FederatedData
from partita.engine.execute.behaviour import Behaviour, behaviour, check_static
from partita.engine.execute.by_sample import check_metric, not_by_sample, rows_of_several
from partita.engine.execute.fit import (
    check_classes,
    check_labels,
    check_output,
    check_parameters,
    check_shapes,
    refuse_broadcast,
)
from partita.engine.execute.problem import ModelProblem
from partita.engine.execute.seeding import kept, set_all
from partita.engine.execute.stack import Stack, lift
from partita.engine.execute.stackable import batch_buffers, stackable

SAMPLES, TRIALS, SUMS = 4, 3, 4
Trial = dict[str, list[float] | None]


class ModelProfile(NamedTuple):
    """What the trial found."""

    loss: Criterion
    metric: Criterion
    buffers: tuple[str, ...]
    sample_bytes: int
    own: Behaviour = Behaviour()


def examine(
    model: nn.Module, data: FederatedData, loss: str | Function | None, metric: str | Function | None
) -> ModelProfile:
    """A forward pass on a few samples of the largest client (of the next ones if its loss is not finite)."""
    check_parameters(model)
    largest = [c for c in np.argsort(-data.train[:, 1], kind="stable")[:TRIALS] if data.train[c, 1]]
    for client in largest:
        x, y = _samples(data, SAMPLES, int(client))
        module = stackable(model).train()
        output, saved = _forward(module, x)
        criterion = choose_loss(loss, output, y)
        check_shapes(criterion, output, y)
        check_labels(criterion, output, data)
        value = _value("loss", criterion, output, y)
        if bool(torch.isfinite(value)):
            break  # a single client with impossible numbers is set aside during the run, not here
    else:
        raise check.fail("loss", criterion.name, f"a finite value on the first samples, not {value.item()}")
    if not value.requires_grad:
        raise check.fail("loss", criterion.name, "a loss that depends on the model's parameters")
    refuse_broadcast(criterion, output.detach(), y)
    measure = choose_metric(metric, criterion, output.detach(), y, data.y)
    check_classes(measure, data)
    _value("metric", measure, output.detach(), y)
    own = behaviour(model, criterion, [_samples(data, SAMPLES, int(c)) for c in largest])
    if not measure.built_in:
        check_metric(measure, _evaluated(module, data), data, chosen=metric is not None)
    if own.remembers:
        check.warn(
            "the model gives other outputs for the same batch, parameters and random numbers: it keeps "
            "something between passes (a generator, a counter), so that a run depends on the order of "
            "execution; let it draw from torch's own generator, and keep numbers in buffers",
        )
    return ModelProfile(criterion, measure, own.buffers, saved // len(x), own)


def tried(profile: ModelProfile, model: nn.Module, data: FederatedData, seed: int) -> Trial:
    """What model, loss and metric make of some samples, in a few numbers: a changed one gives others.

    A resumed run must have the same ones, up to roundings, whatever its text looks like.
    """
    if profile.own.remembers:  # what it makes of them depends on what it has seen before
        return {}
    rows = rows_of_several(data)
    x, y = data.gather(rows)
    found = {}
    with arithmetic("fp32"), kept(x.device), torch.no_grad():
        for mode in ("training", "evaluation"):
            set_all(seed, x.device)
            module = stackable(model).train(mode == "training")
            given = batch_buffers(module, torch.zeros((), dtype=torch.int64, device=x.device), None)
            try:
                output = torch.func.functional_call(module, given, (x,))
                found[mode] = _in_short(output)
                of_batch = profile.loss if module.training else profile.metric
                found[f"{mode}.{'loss' if module.training else 'metric'}"] = _in_short(
                    torch.as_tensor(of_batch.mean(output, y))
                )
            except Exception:  # it may fail on what a run does not ask of it
                found[mode] = None
    return found


def _in_short(values: Tensor) -> list[float] | None:
    """A few weighted sums of all numbers, if they are numbers."""
    flat = values.detach().double().cpu().flatten()
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(SUMS, len(flat), generator=draw, dtype=torch.float64) if len(flat) > 1 else 1.0
    sums = (weights * flat).sum(-1) / len(flat) ** 0.5
    return sums.reshape(-1).tolist() if bool(torch.isfinite(sums).all()) else None


def refuse_own_statistics(model: nn.Module, data: FederatedData) -> None:
    """Refuse norm="static" where a layer does not let its statistics be."""
    check_static(model, _samples(data, SAMPLES, int(np.argmax(data.train[:, 1])))[0])


def names_of(model: nn.Module, data: FederatedData, buffers: tuple[str, ...] = ()) -> Names:
    """The names of what a run trains, with the same samples for a trial, should a partition need one."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    largest = int(np.argmax(data.train[:, 1]))
    return Names.of(model, lambda: _samples(data, SAMPLES, largest)[0], (*trained, *buffers))


def saved_bytes(model: nn.Module, data: FederatedData) -> int:
    """What a forward pass keeps for the backward pass, for each sample."""
    x, _ = _samples(data, SAMPLES, int(np.argmax(data.train[:, 1])))
    return _forward(stackable(model).train(), x)[1] // len(x)


DIFFERENT = (
    "its gradients differ when clients are stacked: a layer or the loss mixes the samples of a "
    "batch, or draws random numbers of its own"
)
COUNTS_PADDING = "its statistics differ when clients are stacked: a layer counts the padding of short batches"


def why_not_stackable(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, data: FederatedData, batch: int = 3
) -> str | None:
    """None when two stacked clients get the gradients that each would get alone, else the reason.

    They are tried with batches of this size, full ones and a padded one: a model may treat large batches in
    another way than small ones. Roundings grow in some models until single precision cannot tell: then double
    precision decides.
    """
    if not loop.loss.built_in:
        reason = not_by_sample(loop.loss, _evaluated(loop.evaluation, data, params), data)
        if reason is not None:
            return reason
    x, y = data.gather(_rows_of_two(data, batch))
    for sizes in ((batch, batch - max(1, batch // 3)), (batch, batch)):
        reason = _compare(loop, stacked, params, x, y, sizes)
        if reason in (DIFFERENT, COUNTS_PADDING) and _same_in_double(loop, stacked, params, x, y, sizes):
            reason = None
        if reason is not None:
            return reason
    return None


def _same_in_double(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, x: Tensor, y: Tensor, sizes: tuple[int, int]
) -> bool:
    def wide(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    try:
        params, x, y = tree.map_tensors(wide, (params, x, y))
        return _compare(loop, stacked, params, x, y, sizes) is None
    except Exception:  # constants of its own in single precision: nothing is shown
        return False


def _compare(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, x: Tensor, y: Tensor, sizes: tuple[int, int]
) -> str | None:
    """What differs between two stacked clients with so many samples and each of them alone, if any does."""
    key = torch.arange(2, device=x.device)
    short = torch.arange(x.shape[1], device=x.device) < torch.tensor(sizes, device=x.device)[:, None]
    both = Batch(x, y, None if bool(short.all()) else short.float(), key)
    own = tree.map_tensors(lambda t: t.expand(2, *t.shape).clone(), params)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss, gradient, buffers = lift(
                lambda p, b: stacked.grad(p, b, stacked.trainable),
                Stack.of(own, 2, True),
                Stack.of(both, 2, True),
            ).full()
            lift(stacked.score, Stack.of(own, 2, True), Stack.of(both, 2, True))
    except Exception as error:  # any module may fail in its own way; the loop runs them all
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    for warning in told:  # torch would run the clients one after another inside this operation
        slow = re.search(r"batching rule for (\S+?)\. ", str(warning.message))
        if slow:
            return f"{slow[1]} cannot run for several clients at once"
    for i, n in enumerate(sizes):
        alone, expected, after = loop.grad(params, Batch(x[i, :n], y[i, :n], None, key[i]), loop.trainable)
        if _differ(tree.row(gradient, i), expected) or _differ({"loss": loss[i]}, {"loss": alone}):
            return DIFFERENT
        if _differ(tree.row(buffers, i), after):
            return COUNTS_PADDING
    return None


def takes_channels_last(problem: ModelProblem, params: Tensors, data: FederatedData) -> bool:
    """Whether a model with convolutions computes the same with the channels of images last, on a CPU.

    Some cannot: a `view` of what a convolution puts out needs them first.
    """
    x, y = _samples(data, SAMPLES, int(np.argmax(data.train[:, 1])))
    able = x.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not able or all(v.dim() != 4 for v in params.values()):
        return False
    batch = Batch(x, y, None, torch.zeros((), dtype=torch.int64))
    try:
        first, last = (_computed(p, params, batch) for p in (problem, replace(problem, last=True)))
    except Exception:  # any module may fail in its own way
        return False
    return not any(_differ(found, expected) for found, expected in zip(last, first))


def _computed(problem: ModelProblem, params: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
    """Gradients and scores of a batch."""
    _, gradient, _ = problem.grad(params, batch, problem.trainable)
    return gradient, problem.score(params, batch)._asdict()


def _differ(found: Tensors, expected: Tensors) -> bool:
    found, expected = ({k: v.double() for k, v in x.items()} for x in (found, expected))
    return bool(tree.norm(tree.sub(found, expected)) > 1e-3 * (tree.norm(expected) + 1e-3))


def _samples(data: FederatedData, n: int, client: int) -> tuple[Tensor, Tensor]:
    start, size = data.train[client]
    return data.gather(torch.arange(int(start), int(start) + min(n, int(size)), device=data.x.device))


def _rows_of_two(data: FederatedData, count: int) -> Tensor:
    """So many rows of each of the two largest clients, some again; of one, if others have too few."""
    order = np.argsort(-data.train[:, 1], kind="stable")
    first, second = order[0], order[min(1, len(order) - 1)]
    chosen = data.train[[first, second if data.train[second, 1] >= 3 else first]]
    rows = np.stack([start + np.arange(count) % size for start, size in chosen])
    return torch.from_numpy(rows).to(data.x.device)


def _evaluated(module: nn.Module, data: FederatedData, params: Tensors | None = None) -> Tensor:
    """What the model puts out for samples of several clients, in evaluation mode."""
    x, _ = data.gather(rows_of_several(data))
    training = module.training
    try:
        with torch.no_grad():
            given = batch_buffers(module, torch.zeros((), dtype=torch.int64, device=x.device), None)
            output: Tensor = torch.func.functional_call(module.eval(), {**(params or {}), **given}, (x,))
            return output
    finally:
        module.train(training)


def _forward(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The output, and the bytes that autograd saved for the backward pass."""
    own = {p.data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    try:
        with saved_tensors_hooks(pack, lambda t: t), kept(x.device):
            given = batch_buffers(module, torch.zeros((), dtype=torch.int64, device=x.device), None)
            output = torch.func.functional_call(module, given, (x,))
    except Exception as error:
        taken = f"a batch of shape {list(x.shape)}, {x.dtype}{_hint(module, x)}"
        allowed = f"a model that can take {taken}: {_reason(error)}"
        raise check.fail("model", type(module).__name__, allowed) from error
    check_output(module, output)
    return output, sum(saved.values())


def _hint(module: nn.Module, x: Tensor) -> str:
    kind = next(module.parameters()).dtype
    if any(isinstance(m, nn.Embedding) for m in module.modules()):
        return " (ids of an embedding are int64; uint8 is taken as images)" if x.is_floating_point() else ""
    return f" (the model is {kind}: convert x, or the model)" if x.dtype != kind else ""


def _value(field: str, criterion: Criterion, output: Tensor, y: Tensor) -> Tensor:
    try:
        value = criterion.mean(output, y)
    except Exception as error:
        shapes = f"outputs of shape {list(output.shape)} with targets of shape {list(y.shape)}"
        raise check.fail(
            field,
            criterion.name,
            f"a function of (output, target): cannot compare {shapes}: {_reason(error)}",
        ) from error
    if field == "metric" and isinstance(value, int | float):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise check.fail(
            field, criterion.name, f"a function that returns one number for a batch, not {shape}"
        )
    return value


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
