"""A model, its loss and its metric as functions of named tensors: what a local rule may ask.

There are two forms of the same problem: the reference differentiates any module with plain autograd, the
stacked one with `torch.func`, so that `vmap` can run it for many clients. Where a model computes blocks again
instead of keeping their activations, the stacked form is plain autograd too, below `vmap`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    get_inplace_requires_grad_allowed,
    get_unwrapped,
    maybe_current_level,
    set_inplace_requires_grad_allowed,
)
from torch.func import grad_and_value

from partita.augment.base import Augmentation, augmented
from partita.core import tree
from partita.core.asks import FEATURES
from partita.core.criterion import Criterion
from partita.core.frozen import left_behind
from partita.core.inputs import functional
from partita.core.inputs import tensors as tensors_in
from partita.core.metrics import ClientMetric
from partita.core.types import Batch, Inputs, Layout, Partition, Scores, Tensors
from partita.engine.model.checkpointing import Pass
from partita.engine.model.finished import everyone, unless
from partita.engine.model.forward import Forward, in_place
from partita.engine.model.functions import Functions
from partita.engine.model.given import constants, handed, passed, seen
from partita.engine.model.normalize import of_one_batch, static, tracked
from partita.engine.model.outputs import outputs
from partita.engine.model.pieces import accumulated, amount, pieces
from partita.engine.model.seeding import OwnDraws
from partita.engine.model.stackable import batch_buffers, stackable

_FORWARD = threading.RLock()
"""Forward derivatives have levels that belong to the process, not to a thread: one at a time."""


class Change(Protocol):
    """Something that a step does to the model before it looks at the batch, such as ordered dropout."""

    def __call__(self, tensors: Tensors, key: Tensor) -> Tensors:
        """Return the tensors that it changes."""
        ...

    def kept(self, name: str, new: Tensor, old: Tensor, key: Tensor) -> Tensor:
        """Return a buffer after the pass."""
        ...


@dataclass(frozen=True, eq=False)
class ModelProblem:
    """f and its gradient by one of the two forms; see `partita.core.parts.Problem`."""

    trainable: tuple[str, ...]
    buffers: tuple[str, ...]
    partition: Partition
    loss: Criterion
    metrics: tuple[ClientMetric, ...]
    training: nn.Module
    evaluation: nn.Module
    differentiate: Callable[[ModelProblem, Tensors, Batch, Tensors], tuple[Tensor, Tensors, Tensors]]
    owns_gradients: bool
    forward: Forward = field(default_factory=Forward)
    initial: Tensors = field(default_factory=dict)
    clients: int = 1
    change: Change | None = None
    measuring: nn.Module = field(default_factory=nn.Identity)
    half: bool = False
    last: bool = False  # images have their channels last, which convolutions on a CPU like
    checkpoints: bool = False  # the model calls torch.utils.checkpoint
    keeps: bool = False  # all the same, no block is computed again
    recomputes: bool = False  # parts of the forward pass run again in the backward pass, in another way
    draws: OwnDraws = field(default_factory=OwnDraws)
    functions: bool = False  # whether the model calls what `partita.engine.model.functions` replaces
    objective: Criterion | None = None  # what the method makes of the loss; None: nothing
    layout: Layout | None = None
    augment: Augmentation | None = None

    @property
    def minimized(self) -> Criterion:
        """What training passes compute; scores are by the loss of the run."""
        return self.loss if self.objective is None else self.objective

    @property
    def asks(self) -> tuple[str, ...]:
        """What losses ask for beside (output, target), in training and in evaluation."""
        return tuple(dict.fromkeys((*self.loss.asks, *self.minimized.asks)))

    @property
    def plain(self) -> ModelProblem:
        """The same problem with the loss of the run."""
        return replace(self, objective=None)

    def grad(self, params: Tensors, batch: Batch, wrt: Sequence[str]) -> tuple[Tensor, Tensors, Tensors]:
        """Return f, ∇f with respect to the named tensors, and the buffers after the pass."""
        if len(parts := pieces(batch)) > 1:
            return accumulated(lambda at, part: self.grad(at, part, wrt), self.minimized, params, parts)
        batch = constants(self, self.minimized, self.augmented(batch))
        with self.draws.of(batch.key):
            return self.differentiate(self, params, batch, tree.pick(params, wrt))

    def hvp(self, params: Tensors, batch: Batch, direction: Tensors) -> Tensors:
        """Return ∇²f(params) d = d/dt ∇f(params + t d) at t = 0: forward over reverse, without a Hessian."""
        if len(parts := pieces(batch)) > 1:
            zero = next(iter(direction.values())).new_zeros(())
            products = accumulated(
                lambda at, part: (zero, self.hvp(at, part, direction), {}), self.minimized, params, parts
            )
            return products[1]
        batch = constants(self, self.minimized, self.augmented(batch))
        # forward derivatives of some layers want channels first, and those of blocks all activations
        plain = replace(self, last=False, keeps=True)
        point = tree.pick(params, direction)
        if self.recomputes:  # what `torch.func` cannot do
            with self.draws.of(batch.key):
                return _twice(plain, params, batch, point, direction)
        f = plain.f(params, batch)
        gradient = torch.func.grad(lambda moving: f(moving)[0])
        try:
            with _FORWARD, self.draws.of(batch.key):
                product: Tensors = torch.func.jvp(gradient, (point,), (direction,))[1]
        except NotImplementedError:  # an operation without forward derivatives: reverse over reverse
            f = plain.f(params, batch)  # dropout counts its calls: begin anew
            with self.draws.of(batch.key):
                product = torch.func.vjp(gradient, point)[1](direction)[0]
        return product

    def smooth_grad(self, params: Tensors, batch: Batch, wrt: Sequence[str]) -> Tensors:
        """Return ∇f on the batch in a form that `torch.func` can differentiate again, by inputs too."""
        batch = constants(self, self.minimized, batch)
        plain = replace(self, last=False, keeps=True)  # as for products with the Hessian
        with self.draws.of(batch.key):
            f = plain.f(params, batch)
            gradient: Tensors = torch.func.grad(lambda moving: f(moving)[0])(tree.pick(params, wrt))
        return gradient

    def augmented(self, batch: Batch) -> Batch:
        """Return the batch as training sees it."""
        return (
            batch if self.augment is None else batch._replace(x=augmented(self.augment, batch.x, batch.key))
        )

    def repeat(self, step: Callable[[Any], tuple[Any, Tensor | None]], carry: Any, steps: int) -> Any:
        """carry ← step(carry), up to `steps` times or until all clients are done."""
        for _ in range(steps):
            new, done = step(carry)
            if done is not None and everyone(done):
                break
            carry = new if done is None else unless(done, carry, new)
        return carry

    def f(self, params: Tensors, batch: Batch) -> Callable[[Tensors], tuple[Tensor, Tensors]]:
        """Return f on the batch, and the buffers after the pass, as a function of some parameters."""
        place = self.placed(params, batch)

        def value(moving: Tensors) -> tuple[Tensor, Tensors]:
            tensors = place(moving)
            with in_place(self.training, tensors):
                loss = self.value(batch)
            return loss, self.after(params, tensors, batch)

        return value

    def placed(self, params: Tensors, batch: Batch) -> Callable[[Tensors], Tensors]:
        """Return all tensors of the module for a pass on this batch, as a function of some parameters."""
        of_batch = batch_buffers(self.training, batch.key, batch.mask)

        def place(moving: Tensors) -> Tensors:
            # one dictionary: a module that assigns a new buffer finds its way back through it
            tensors = {**params, **moving, **{k: params[k].clone() for k in self.buffers}, **of_batch}
            if self.change is not None:
                tensors |= self.change(tensors, batch.key)
            if self.last:
                tensors |= _channels_last(tensors)
            return tensors

        return place

    def value(self, batch: Batch) -> Tensor:
        """Return f on the batch, of the tensors that are in place."""
        criterion = self.minimized
        with self.computing(batch.key):
            if self.forward.labels:
                return self.forward.with_loss(self.training, batch)[1].float()
            output, features = passed(self, self.training, batch.x, FEATURES in criterion.asks)
        output = self.widened(output)
        return criterion.of_batch(output, batch.y, batch.mask, handed(criterion, batch, output, features))

    @contextmanager
    def computing(self, key: Tensor) -> Iterator[None]:
        """Compute a pass on the batch of this key, in bfloat16 where the run does."""
        half = torch.autocast(key.device.type, torch.bfloat16, self.half, cache_enabled=False)
        with half, self._functions(key):
            yield

    def widened(self, output: Tensor) -> Tensor:
        """Return what came out of such a pass in the precision of losses."""
        return output.float() if self.half else output

    @contextmanager
    def _functions(self, key: Tensor) -> Iterator[None]:
        """Pass the batch of this key through the model, with what it calls replaced."""
        with Functions(key) if self.functions else nullcontext() as functions:
            if not self.checkpoints:
                yield
                return
            blocks = Pass(self.training, key, functions, self.keeps, self.draws.seeded)
            with blocks, _requiring_gradients():  # transformers ask for gradients of what enters a block
                yield

    def after(self, params: Tensors, tensors: Tensors, batch: Batch) -> Tensors:
        """Return the buffers after the pass; those of channels that took no part stay as they were."""
        buffers = tree.pick(tensors, self.buffers)
        if self.change is None:
            return buffers
        return {k: self.change.kept(k, v, params[k], batch.key) for k, v in buffers.items()}

    def twin(self) -> ModelProblem:
        """Return the same problem for another thread: modules are not shared, the tensors in them are."""
        training, evaluation, measuring = map(_share, (self.training, self.evaluation, self.measuring))
        return replace(self, training=training, evaluation=evaluation, measuring=measuring)

    @property
    def tracked(self) -> tuple[tuple[str, str], ...]:
        """The names of BatchNorm's means and variances, as far as training would change them."""
        return tuple(pair for pair in tracked(self.measuring) if pair[0] in self.buffers)

    def statistics(self, params: Tensors, batch: Batch) -> Tensors:
        """Return mean and variance of what each BatchNorm layer gets to see in this batch."""
        names = [name for pair in self.tracked for name in pair]
        with torch.no_grad(), self.draws.of(batch.key):
            buffers = {k: params[k].clone() for k in self.buffers} | tree.zeros_like(tree.pick(params, names))
            tensors = {**params, **buffers, **batch_buffers(self.measuring, batch.key, batch.mask)}
            with self._functions(batch.key):
                functional(self.measuring, tensors, batch.x)
        return tree.pick(tensors, names)

    def score(self, params: Tensors, batch: Batch, keep: bool = False) -> Scores:
        """Return metric and loss, summed over the real samples of a batch; if asked, a row of each sample."""
        criterion = self.metrics[0].criterion
        with torch.no_grad(), self.draws.of(batch.key):
            of_batch = batch_buffers(self.evaluation, batch.key, batch.mask)
            batch = constants(self, self.loss, batch)
            params = self.arranged(params)
            with self._functions(batch.key):
                output, loss = self._evaluated({**params, **of_batch}, batch)
            metric = loss if criterion is None else criterion.sums(output, batch.y, batch.mask)
            rows = {m.name: m.keep(output, batch.y) for m in self.metrics} if keep else {}
        return Scores(*metric, *loss, rows)

    def _evaluated(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the prediction for a batch, and the sums of its loss."""
        if not self.forward.labels:
            with in_place(self.evaluation, tensors):
                output, features = passed(self, self.evaluation, batch.x, FEATURES in self.loss.asks)
            given = handed(self.loss, batch, output, features)
            return output, self.loss.sums(output, batch.y, batch.mask, given)
        with in_place(self.evaluation, tensors):
            output, mean = self.forward.with_loss(self.evaluation, batch)
        count = amount(self.loss, batch, mean)
        return output, (torch.where(count > 0, mean * count, 0.0), count)

    def arranged(self, params: Tensors) -> Tensors:
        """Return the tensors of a model with the channels of its kernels where images have theirs."""
        return {**params, **_channels_last(params)} if self.last else params

    def features(self, params: Tensors, batch: Batch) -> Tensor:
        """Return the features of a batch, a row of each sample, in evaluation mode."""
        features = seen(self, params, batch, features=True)[1]
        assert features is not None
        return features

    def outputs(self, params: Tensors, x: Inputs, names: Sequence[str] | None = None) -> Tensors:
        """Return what the named submodules (None: the model's blocks) put out for these samples."""
        key = torch.zeros((), dtype=torch.int64, device=tensors_in(x)[0].device)
        with self.draws.of(key), self._functions(key):
            return outputs(self.evaluation, (params, batch_buffers(self.evaluation, key, None)), x, names)


def make_problem(
    module: nn.Module,
    partition: Partition,
    loss: Criterion,
    metrics: tuple[ClientMetric, ...],
    buffers: tuple[str, ...],
    *,
    forward: Forward | None = None,
    initial: Tensors | None = None,
    stacked: bool = False,
    clients: int = 1,
    change: Change | None = None,
    tracks: bool = True,
    checkpoints: bool = False,
    recomputes: bool = False,
    functions: bool = False,
    objective: Criterion | None = None,
    layout: Layout | None = None,
    augment: Augmentation | None = None,
) -> ModelProblem:
    """Return the problem for one client at a time, or for `stacked` clients under `vmap`.

    Unless it `tracks`, a training pass leaves BatchNorm's statistics as they are.
    """
    # keyed dropout counts its calls, and so what is called again, too; torch puts its own generators back
    training = stackable(module, keyed=not recomputes).requires_grad_(False).train()
    evaluation = _share(training).eval()
    measuring = of_one_batch(_share(training))
    if not tracks:
        static(training)
    return ModelProblem(
        trainable=tuple(n for n, p in module.named_parameters() if p.requires_grad),
        buffers=buffers,
        partition=partition,
        loss=loss,
        metrics=metrics,
        training=training,
        evaluation=evaluation,
        differentiate=(_below if checkpoints else _functional) if stacked else _autograd,
        owns_gradients=not stacked,
        forward=forward or Forward(),
        initial=initial or {},
        clients=clients,
        change=change,
        measuring=measuring,
        checkpoints=checkpoints,
        recomputes=recomputes,
        functions=functions,
        objective=objective,
        layout=layout,
        augment=augment,
    )


def _channels_last(tensors: Tensors) -> Tensors:
    """Return the kernels in that order: what a convolution puts out has the order of its kernel.

    They are clones, because `contiguous` would leave the strides of a kernel with one channel as they are.
    """
    kernels = {k: v for k, v in tensors.items() if v.dim() == 4 and v.is_floating_point()}
    return {k: v.clone(memory_format=torch.channels_last) for k, v in kernels.items()}


def _share(module: nn.Module) -> nn.Module:
    """Return a copy of the module's structure over the same tensors."""
    memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, {**left_behind(module), **memo})


def _autograd(
    problem: ModelProblem, params: Tensors, batch: Batch, moving: Tensors
) -> tuple[Tensor, Tensors, Tensors]:
    """Return f, its gradient and the buffers; the tensors stay in place until the gradient is taken."""
    leaves = {k: v.detach().requires_grad_() for k, v in moving.items()}
    value, raw, buffers = _differentiated(problem, params, batch, leaves, leaves, lambda value: value)
    return value, dict(zip(leaves, _owned(raw, list(leaves.values())))), buffers


def _below(
    problem: ModelProblem, params: Tensors, batch: Batch, moving: Tensors
) -> tuple[Tensor, Tensors, Tensors]:
    """Return f, its gradient and the buffers by plain autograd below `vmap`, of all clients at once.

    Blocks that are computed again meet `vmap` still in force; `torch.func` has no way for them.
    """
    level = maybe_current_level()
    if level is None:  # clients that do not differ yet
        return _autograd(problem, params, batch, moving)
    clients = get_unwrapped(batch.key).shape[0]

    def rows(x: Tensor) -> Tensor:
        return _remove_batch_dim(x, level, clients, 0)

    with _requiring_gradients():
        leaves = {k: rows(v).detach().requires_grad_() for k, v in moving.items()}
    stacked = {k: _add_batch_dim(v, 0, level) for k, v in leaves.items()}
    value, raw, buffers = _differentiated(
        problem, params, batch, stacked, leaves, lambda value: rows(value).sum()
    )
    gradient = dict(zip(leaves, _owned(raw, list(leaves.values()))))
    return value, {k: _add_batch_dim(g, 0, level) for k, g in gradient.items()}, buffers


@contextmanager
def _requiring_gradients() -> Iterator[None]:
    """Let tensors below `vmap` require gradients."""
    before = get_inplace_requires_grad_allowed()
    set_inplace_requires_grad_allowed(True)
    try:
        yield
    finally:
        set_inplace_requires_grad_allowed(before)


def _differentiated(
    problem: ModelProblem,
    params: Tensors,
    batch: Batch,
    moving: Tensors,
    leaves: Tensors,
    number: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Sequence[Tensor | None], Tensors]:
    """Return f at `moving`, the gradient of its number with respect to the leaves, and the buffers."""
    tensors = problem.placed(params, batch)(moving)
    again = problem.checkpoints or problem.recomputes
    with in_place(problem.training, tensors):
        with torch.enable_grad():
            value = problem.value(batch)
            total = number(value)
        # what is called again in the backward pass moves its statistics again
        once = {k: problem.training.get_buffer(k).clone() for k in problem.buffers if again}
        raw = _gradient(total, list(leaves.values()))
    buffers = problem.after(params, {**tensors, **once}, batch)
    return value.detach(), raw, {k: v.detach() for k, v in buffers.items()}


def _twice(
    problem: ModelProblem, params: Tensors, batch: Batch, point: Tensors, direction: Tensors
) -> Tensors:
    """Return ∇²f d by plain autograd, reverse over reverse."""
    leaves = {k: v.detach().requires_grad_() for k, v in point.items()}
    with in_place(problem.training, problem.placed(params, batch)(leaves)), torch.enable_grad():
        first = _gradient(problem.value(batch), list(leaves.values()), create_graph=True)
        pairs = [(g * d).sum() for g, d in zip(first, direction.values()) if g is not None]
        along = torch.stack(pairs).sum() if pairs else torch.zeros(())
        product = _gradient(along, list(leaves.values()))
    return dict(zip(leaves, _owned(product, list(leaves.values()))))


def _gradient(value: Tensor, leaves: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor | None]:
    """Return the gradient, with None for what the value does not depend on, as where layers are skipped."""
    if not leaves or not value.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(value, leaves, allow_unused=True, create_graph=create_graph)


def _owned(gradient: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients with memory of their own: autograd may return one tensor for two, or a view."""
    seen: set[int] = set()
    owned = []
    for raw, leaf in zip(gradient, leaves):
        g = torch.zeros_like(leaf) if raw is None else raw
        g = g if g.layout == torch.strided else g.to_dense()
        memory = g.untyped_storage()
        whole = g.is_contiguous() and memory.nbytes() == g.numel() * g.element_size()
        if not whole or memory.data_ptr() in seen:
            g = g.clone(memory_format=torch.contiguous_format)
        seen.add(g.untyped_storage().data_ptr())
        owned.append(g)
    return owned


def _functional(
    problem: ModelProblem, params: Tensors, batch: Batch, moving: Tensors
) -> tuple[Tensor, Tensors, Tensors]:
    """Return f, its gradient and the buffers in a form that `vmap` can transform."""
    f = problem.f(params, batch)
    if not moving:
        value, buffers = f({})
        return value, {}, buffers
    gradient, (value, buffers) = grad_and_value(f, has_aux=True)(moving)
    return value, gradient, buffers
