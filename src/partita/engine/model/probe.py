"""One small trial before any work: what the model returns, what it changes, what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partita.algorithms.partition import Names
from partita.core import check
from partita.core.asks import COUNTS, needs_features
from partita.core.criterion import (
    LOSSES,
    OWN,
    Criterion,
    Function,
    averaged,
    by_sample,
    choose_loss,
)
from partita.core.device import arithmetic
from partita.core.inputs import described, samples
from partita.core.metrics import ClientMetric, as_number, choose_metrics
from partita.core.types import Inputs, Layout, Tensors
from partita.data import FederatedData
from partita.engine.model.behaviour import Behaviour, check_static, observe
from partita.engine.model.by_sample import TrialSize, not_by_sample, rows_of_several
from partita.engine.model.checkpointing import Pass
from partita.engine.model.features import assumed, layout_of, place_of, recording, supposing
from partita.engine.model.fit import (
    check_labels,
    check_parameters,
    check_shapes,
    refuse_broadcast,
)
from partita.engine.model.forward import Forward, Output, labels_of
from partita.engine.model.own_loss import counted, not_in_pieces, predicted, recognized
from partita.engine.model.seeding import kept, set_all
from partita.engine.model.stackable import stackable

TRIAL_SAMPLES, TRIAL_CLIENTS = 4, 3
LENGTH = averaged("length", lambda output, target: by_sample(output.float().square()))  # noqa: ARG005
"""What stands for a loss that asks for more than (output, target), where only the model is looked at."""
FINGERPRINT_SUMS, FINGERPRINT_NUMBERS = 4, 1 << 20
Trial = dict[str, list[float] | None]


class ModelProfile(NamedTuple):
    """What a trial has shown of a model, its loss and its metrics, the one that decides first.

    `sample_bytes` is what autograd saves of a sample, `output_bytes` what comes out, `kept` what the metrics
    keep of it: rows by their names.
    `forward` is how the model is called, and which of its outputs is the prediction; `layout` where its
    features are, if a loss asks for more than (output, target).
    """

    loss: Criterion
    metrics: tuple[ClientMetric, ...]
    buffers: tuple[str, ...]
    sample_bytes: int
    kept: Tensors
    behaviour: Behaviour = Behaviour()
    forward: Forward = Forward()
    layout: Layout | None = None
    output_bytes: int = 0

    @property
    def trial(self) -> TrialSize:
        """How many samples a trial has."""
        return TrialSize.of(self.sample_bytes, self.output_bytes)

    @property
    def pass_bytes(self) -> int:
        """Bytes of a sample on its way through the model and the loss, which makes another of its output."""
        return self.sample_bytes + 2 * self.output_bytes

    @property
    def metric(self) -> ClientMetric:
        """The metric that decides."""
        return self.metrics[0]


def examine(
    model: nn.Module,
    data: FederatedData,
    loss: str | Function | None,
    metric: Any,
    choice: Output = None,
    asks: Sequence[str] = (),
    features: str | None = None,
) -> ModelProfile:
    """Return the profile of a model, by passes on a few samples of the largest clients.

    One client with a finite loss is enough; the model is refused where it does not fit the data.

    choice    the user's among the model's outputs
    asks      what losses ask for beside (output, target), and `features` the submodule that puts them out
    """
    check_parameters(model)
    needed, place = needs_features(asks), None
    if needed or features is not None:  # a name of no submodule is refused, even if nobody asks for features
        place = place_of(model, names_of(model, data), features)
    place = place if needed else None
    forward = Forward(choice, labels_of(model) if loss == OWN.name else "")
    order = np.argsort(-data.train[:, 1], kind="stable")
    largest = [c for c in order[:TRIAL_CLIENTS].tolist() if data.train[c, 1]]
    for client in largest:
        x, y = _samples(data, client)
        module = stackable(model).train()
        with recording(module, place) as seen:
            output, saved, own_loss = _forward(module, forward, x, y)
        layout = layout_of(model, place, x, y, output, seen) if asks else None
        if layout is not None and COUNTS in asks and not layout.classes:
            reason = f"{COUNTS} are asked for, and outputs are of shape {list(output.shape)}"
            raise check.fail(
                f"shape of y, {y.dtype}", list(y.shape), "labels, with an output for each", reason
            )
        criterion = choose_loss(loss, output, y)
        check_shapes(criterion, output, y)
        check_labels(criterion, output, data)
        supposed = supposing(criterion, layout, x, y, output, seen)
        value = _value(supposed, output, y) if own_loss is None else own_loss
        if bool(torch.isfinite(value)):
            break  # a single client with impossible numbers is set aside during the run, not here
    else:
        raise check.fail("loss", criterion.name, f"a finite value on the first samples, not {value.item()}")
    if not value.requires_grad:
        raise check.fail("loss", criterion.name, "a loss that depends on the model's parameters")
    refuse_broadcast(supposed, output.detach(), y)
    known = recognized(module, forward, data) if criterion is OWN and y.is_floating_point() else None
    if known is not None:
        criterion, forward = known, forward._replace(labels="")
    elif criterion is OWN:
        criterion = counted(module, forward, x, y, output)
    own, output_bytes = criterion not in LOSSES.values(), output.nbytes // samples(x)
    sample_bytes = saved // samples(x)
    trial = TrialSize.of(sample_bytes, output_bytes)
    metrics = choose_metrics(metric, criterion, own, output.detach(), y, data.y)
    kept = _try_metrics(metrics, evaluated(module, data, forward, trial), data)
    tried = LENGTH if criterion.asks else criterion
    behaviour = observe(model, tried, [_samples(data, client) for client in largest], forward)
    if behaviour.remembers:
        check.warn(
            "the model gives other outputs for the same batch, parameters and random numbers: it keeps "
            "something between passes (a generator, a counter), so that a run depends on the order of "
            "execution; let it draw from torch's own generator, and keep numbers in buffers",
        )
    return ModelProfile(
        loss=criterion,
        metrics=metrics,
        buffers=behaviour.buffers,
        sample_bytes=sample_bytes,
        kept=kept,
        behaviour=behaviour,
        forward=forward,
        layout=layout,
        output_bytes=output_bytes,
    )


def _try_metrics(metrics: Sequence[ClientMetric], output: Tensor, data: FederatedData) -> Tensors:
    """Return a row that each metric keeps, after a trial on samples of several clients."""
    target = data.gather(rows_of_several(data, len(output)))[1]
    kept: Tensors = {}
    for metric in metrics:
        try:
            rows = metric.keep(output, target)
            as_number(metric.name, metric.score(rows.cpu(), target.cpu()))
        except check.Refused:
            raise
        except Exception as error:
            shapes = f"outputs of shape {list(output.shape)} with targets of shape {list(target.shape)}"
            reason = f"cannot compare {shapes}: {check.reason(error)}"
            raise check.fail(
                "metric", metric.name, "a function of all (outputs, targets) of a client", reason
            ) from error
        kept[metric.name] = torch.zeros_like(rows[0])
    return kept


def only_whole_batches(profile: ModelProfile, model: nn.Module, data: FederatedData) -> str:
    """Return why the loss of a batch cannot be taken piece by piece; '' if it is the mean over its pieces."""
    loss, forward, layout = profile.loss, profile.forward, profile.layout
    module = stackable(model).eval()
    if forward.labels:
        with kept(data.device):
            return not_in_pieces(module, forward, loss, data)
    if loss in LOSSES.values() or loss.weight is not None or loss.adds_up:
        return ""
    batches, _ = _trial_batches(data, profile.trial)
    outputs, features = [], []
    with torch.no_grad(), kept(data.device):
        for x, y in batches:
            with recording(module, layout) as seen:
                outputs.append(predicted(module, forward, x, y)[0])
            features += seen
    output = torch.cat(outputs)
    given = None
    if layout is not None:
        x, y = data.gather(rows_of_several(data, len(output)))
        given = assumed(layout, x, y, output, [torch.cat(features)] if features else [])
    return not_by_sample(loss, output, data, given)


def tried(profile: ModelProfile, model: nn.Module, data: FederatedData, seed: int) -> Trial:
    """Return what model, loss and metric make of some samples, in a few numbers: a fingerprint of the three.

    A resumed run must have the same numbers, up to roundings, whatever its source text looks like.
    """
    if profile.behaviour.remembers:  # what it makes of them depends on what it has seen before
        return {}
    batches, target = _trial_batches(data.fixed(), profile.trial)  # outputs of one width
    numbers: Trial = {}
    with arithmetic("fp32"), kept(data.device), torch.no_grad():
        for mode in ("training", "evaluation"):
            module = stackable(model).train(mode == "training")
            try:
                outputs, losses = zip(*[_passed(profile, module, x, y, seed) for x, y in batches])
                output = torch.cat(outputs)
                numbers[mode] = _fingerprint(output)
                if module.training:
                    numbers["training.loss"] = _fingerprint(torch.stack(losses).mean())
                else:
                    rows = profile.metric.keep(output, target).cpu()
                    score = profile.metric.score(rows, target.cpu())
                    numbers["evaluation.metric"] = _fingerprint(torch.tensor(score))
            except Exception:  # it may fail on what a run does not ask of it
                numbers[mode] = None
    return numbers


def _passed(
    profile: ModelProfile, module: nn.Module, x: Inputs, y: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the prediction for a batch, and its loss in training, with draws of this seed."""
    set_all(seed, y.device)
    with recording(module, profile.layout) as seen:
        output, own = predicted(module, profile.forward, x, y)
    if own is not None or not module.training:
        return output, output.new_zeros(()) if own is None else own
    loss = supposing(profile.loss, profile.layout, x, y, output, seen)
    return output, torch.as_tensor(loss.mean(output, y))


def _trial_batches(data: FederatedData, trial: TrialSize) -> tuple[list[tuple[Inputs, Tensor]], Tensor]:
    """Return samples of several clients, as many at a time as fit, and the targets of all."""
    rows = rows_of_several(data, trial.samples)
    return [data.gather(part) for part in torch.split(rows, trial.at_once)], data.gather(rows)[1]


def _fingerprint(values: Tensor) -> list[float] | None:
    """Return a few weighted sums of the numbers, or of some of very many; None where they are not finite."""
    flat = values.detach().flatten()
    flat = flat[:: -(-len(flat) // FINGERPRINT_NUMBERS) or 1].double().cpu()
    draw = torch.Generator().manual_seed(0)
    shape = (FINGERPRINT_SUMS, len(flat))
    weights = torch.randn(shape, generator=draw, dtype=torch.float64) if len(flat) > 1 else 1.0
    sums = (weights * flat).sum(-1) / len(flat) ** 0.5
    return sums.reshape(-1).tolist() if bool(torch.isfinite(sums).all()) else None


def refuse_own_statistics(model: nn.Module, data: FederatedData) -> None:
    """Refuse norm="static" where a layer does not leave its statistics as they are."""
    check_static(model, first_samples(data)[0], data.device)


def names_of(model: nn.Module, data: FederatedData, buffers: tuple[str, ...] = ()) -> Names:
    """Return the names of what a run trains, with samples for a trial, should a partition need one."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    return Names.of(model, lambda: first_samples(data)[0], (*trained, *buffers))


def saved_bytes(model: nn.Module, data: FederatedData, forward: Forward) -> int:
    """Return the bytes of each sample that a forward pass keeps for the backward pass."""
    x, y = first_samples(data)
    return _forward(stackable(model).train(), forward, x, y)[1] // samples(x)


def _samples(data: FederatedData, client: int) -> tuple[Inputs, Tensor]:
    start, size = data.train[client].tolist()
    return data.gather(torch.arange(start, start + min(TRIAL_SAMPLES, size), device=data.device))


def first_samples(data: FederatedData) -> tuple[Inputs, Tensor]:
    """Return a few training samples of the largest client."""
    return _samples(data, int(np.argmax(data.train[:, 1])))


def evaluated(
    module: nn.Module, data: FederatedData, forward: Forward, trial: TrialSize, params: Tensors | None = None
) -> Tensor:
    """Return what the model predicts for samples of several clients, in evaluation mode."""
    batches, _ = _trial_batches(data, trial)
    training = module.training
    try:
        with torch.no_grad():
            module.eval()
            outputs = [predicted(module, forward, x, y, params)[0] for x, y in batches]
            return torch.cat(outputs)
    finally:
        module.train(training)


def _forward(module: nn.Module, forward: Forward, x: Inputs, y: Tensor) -> tuple[Tensor, int, Tensor | None]:
    """Return the prediction, the bytes that autograd saved for the backward pass, and a loss of its own."""
    parameters = {p.data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in parameters:
            saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    key = torch.zeros((), dtype=torch.int64, device=y.device)
    blocks = Pass(module, key, counts=True)
    try:
        with saved_tensors_hooks(pack, lambda t: t), kept(y.device):
            output, own = predicted(module, forward, x, y, blocks=blocks)
    except check.Refused:
        raise
    except Exception as error:
        allowed = f"a model that can take a batch of {described(x)}{_hint(module, x)}: {check.reason(error)}"
        raise check.fail("model", type(module).__name__, allowed) from error
    return output, sum(saved.values()) + blocks.inputs_bytes + blocks.block_bytes, own


def _hint(module: nn.Module, x: Inputs) -> str:
    if not isinstance(x, Tensor):
        return ""
    kind = next(module.parameters()).dtype
    if any(isinstance(m, nn.Embedding) for m in module.modules()):
        return " (ids of an embedding are int64; uint8 is taken as images)" if x.is_floating_point() else ""
    return f" (the model is {kind}: convert x, or the model)" if x.dtype != kind else ""


def _value(criterion: Criterion, output: Tensor, y: Tensor) -> Tensor:
    try:
        value = criterion.mean(output, y)
    except Exception as error:
        shapes = f"outputs of shape {list(output.shape)} with targets of shape {list(y.shape)}"
        raise check.fail(
            "loss",
            criterion.name,
            f"a function of (output, target): cannot compare {shapes}: {check.reason(error)}",
        ) from error
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise check.fail(
            "loss", criterion.name, f"a function that returns one number for a batch, not {shape}"
        )
    return value
