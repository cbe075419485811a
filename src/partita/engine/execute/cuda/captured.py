"""One recorded step, and the memory that it reads and writes. See `partita.engine.execute.graph`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partita.core.device import put
from partita.core.parts import Phase
from partita.core.types import Batch
from partita.data import FederatedData
from partita.engine.execute.cuda.compiled import compiled, loaded_from_disk, note_compiled, was_compiled
from partita.engine.execute.cuda.implicit import Implicit, implicit_count, missing
from partita.engine.execute.cuda.recording import copy, record
from partita.engine.execute.cuda.unrolled import Unrolled, patch_bytes
from partita.engine.execute.plan import Plan
from partita.engine.execute.stack import Stack, Traced, kinds, tensors, trace
from partita.engine.model.finished import all_steps, unless

WARM_UP_RUNS = 3  # before a recording: libraries choose their kernels and take their memory
COMPILE_SECONDS, COMPILE_SECONDS_PER_OPERATION = 10.0, 0.015  # as measured
IMPLICIT_SECONDS = 1.0  # of a convolution and its gradients, as implicit products
CACHED_SHARE = 0.15  # of that time, where the same was compiled before
CAPTURED, IMPLICIT = "graph", "graph, implicit"
COMPILED = "graph, compiled"
UNROLLED, COMPILED_IMPLICIT = "graph, compiled, unrolled", "graph, compiled, implicit"
"""Forms of a step: its operations as they are, or with convolutions as products of matrices whose patches are
only read on the way; both fused; and fused with patches that are written out."""


class Shape(NamedTuple):
    """What a step is recorded for."""

    n: int  # clients
    width: int  # of their batches
    short: bool  # whether some batches are
    waits: bool  # whether some clients wait while others take more steps, or are rows of padding


class Captured:
    """One step, and the memory that it reads and writes."""

    def __init__(
        self, phase: Phase, carry: Stack, drawn: list[Plan], lr: Stack, data: FederatedData, shape: Shape
    ) -> None:
        self.shape, self.phase = shape, phase
        self.device = data.device
        self.data, self.own_data = data.fixed(), False
        self.lr = _roomy(lr, shape.n)
        self.plans = [self._plan(plan) for plan in drawn]
        self.limit = torch.zeros(shape.n, dtype=torch.int64, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.carry = _roomy(carry, shape.n)
        self.traced = self._trace()
        self.patches = patch_bytes(self.traced.graph)
        self.implicit = 0 if missing(self.device) else implicit_count(self.traced.graph)
        self.plain: Callable[..., Any] = _in_place(self.traced.graph, self.carry)
        self.form = CAPTURED
        self.loaded = False  # whether kernels were found on disk
        self.run_step = self.plain
        self.replay: Callable[[], None] = self._step

    def _plan(self, plan: Plan) -> Plan:
        """Return room for a plan of as many steps, up to the next power of two."""
        steps = 1 << max(0, int(plan.size.shape[1]) - 1).bit_length()
        n, width = self.shape.n, self.shape.width
        rows = torch.zeros(n, steps, width, dtype=torch.int64, device=self.device)
        real = torch.zeros(n, steps, width, dtype=torch.bool, device=self.device)
        keys = torch.zeros(n, steps, dtype=torch.int64, device=self.device)
        return plan._replace(rows=rows, real=real, keys=keys)

    def _trace(self) -> Traced:
        """Trace the operations, with a row for each client of all that comes to differ between them."""
        step = _until(self.phase)
        step = _only_active(step) if self.shape.waits else step
        while True:
            with all_steps():
                traced = trace(step, *self._inputs())
            if traced.spec != self.carry.spec:
                raise ValueError("a step that returns another structure than it was given")
            wider = any(new and not old for new, old in zip(traced.rows, self.carry.has_rows))
            if self._fits(traced) and not wider:
                return traced
            before = kinds(self.carry)
            self.carry = self._widened(traced)
            if kinds(self.carry) == before:
                raise ValueError("a step that changes shapes, or what is no tensor")

    def _fits(self, traced: Traced) -> bool:
        """Return whether results fit where they came from; a common value fits every row."""
        pairs = zip(traced.kinds, kinds(self.carry), traced.rows, self.carry.has_rows)
        return all(
            new == ((old[0][1:], old[1]) if before and not rows else old) for new, old, rows, before in pairs
        )

    def _widened(self, traced: Traced) -> Stack:
        """Return the carry with the rows, and in the type, that its tensors have after a step."""
        rows = [old or new for new, old in zip(traced.rows, self.carry.has_rows)]
        leaves = []
        for x, kind, new, old in zip(self.carry.leaves, traced.kinds, rows, self.carry.has_rows):
            if isinstance(x, Tensor) and isinstance(kind, tuple):
                wide = x.expand(self.shape.n, *x.shape).clone() if new and not old else x
                leaves.append(wide.to(kind[1]))
            else:
                leaves.append(x)
        return Stack(leaves, rows, self.carry.spec, self.shape.n)

    def _inputs(self) -> list[Stack]:
        """Return what the step takes at which the counter stands."""
        batches = tuple([self._batch(plan) for plan in self.plans])
        n = self.shape.n
        batch = Stack.of(batches if self.phase.batches > 1 else batches[0], n, rows=True)
        inputs = [self.carry, batch, self.lr.at(self.counter)]
        return [*inputs, Stack.of(self.counter < self.limit, n, rows=True)] if self.shape.waits else inputs

    def _batch(self, plan: Plan) -> Batch:
        def now(x: Tensor) -> Tensor:
            return x.index_select(1, self.counter).squeeze(1)

        x, y = self.data.gather(now(plan.rows))
        mask = now(plan.real).to(torch.float32) if self.shape.short else None
        return Batch(x, y, mask, now(plan.keys), plan.piece)

    # ---- recording

    @property
    def nbytes(self) -> int:
        """Bytes that it holds between its runs: tensors of clients, plans, samples, and little else."""
        plans = [x for plan in self.plans for x in (plan.rows, plan.real, plan.keys)]
        samples = self.data.nbytes if self.own_data else 0
        return samples + sum(x.nbytes for x in [*tensors(self.carry), *plans])

    @property
    def places(self) -> set[int]:
        """The addresses of the clients' tensors."""
        return {x.untyped_storage().data_ptr() for x in tensors(self.carry)}

    @torch.no_grad()
    def _step(self) -> None:
        self.run_step(*tensors(*self._inputs()))
        self.counter.add_(1)

    def record(self) -> None:
        """Record a step from the samples to the new tensors; what lies in its memory is lost."""
        self.replay = record(self._step, self.device, self.counter.zero_, WARM_UP_RUNS)

    def compile(self, form: str) -> None:
        """Record other operations: implicit products, inductor's kernels, or those of both."""
        inputs, graph, self.loaded = tensors(*self._inputs()), self.traced.graph, False
        operations: Callable[..., Any] = graph
        if form in (IMPLICIT, COMPILED_IMPLICIT):
            operations = Implicit(graph).run
        elif form == UNROLLED:
            operations = Unrolled(graph).run
        self.run_step = _in_place(operations, self.carry)
        if form != IMPLICIT:
            before = loaded_from_disk()
            with torch.no_grad():
                self.run_step = compiled(make_fx(self.run_step)(*inputs), inputs)
            self.loaded = loaded_from_disk() > before
        self.record()
        self.form = form
        note_compiled(graph, inputs, form)

    def plainly(self) -> None:
        """Record the operations as they are, not compiled."""
        self.run_step, self.form = self.plain, CAPTURED
        self.record()

    def cost(self, form: str) -> float:
        """Return about how many seconds compiling takes: kernels of convolutions, and fused ones."""
        graph, inputs = self.traced.graph, tensors(*self._inputs())

        def share(form: str) -> float:
            return CACHED_SHARE if was_compiled(graph, inputs, form) else 1.0

        products = IMPLICIT_SECONDS * self.implicit
        if form == IMPLICIT:
            return products * share(form)
        fused = COMPILE_SECONDS + COMPILE_SECONDS_PER_OPERATION * len(graph.graph.nodes)
        if form == COMPILED_IMPLICIT:  # which has the same kernels of convolutions
            return fused * share(form) + products * min(share(form), share(IMPLICIT))
        return fused * share(form)

    def seconds(self, times: int = 4) -> float:
        """Return how long a recorded step takes."""
        seconds = []
        for _ in range(3):
            _wait(self.device)
            begin = time.perf_counter()
            for _ in range(times):
                self.counter.zero_()
                self.replay()
            _wait(self.device)
            seconds.append((time.perf_counter() - begin) / times)
        self.counter.zero_()
        return min(seconds)

    # ---- running

    def run(self, carry: Stack, drawn: list[Plan], lr: Stack, data: FederatedData) -> Stack:
        """Take all steps of a phase; the result lies in the memory of the recorded step."""
        carry = _elsewhere(carry, self.places)
        if self._load(carry, drawn, lr, data):
            self.record()
            self._load(carry, drawn, lr, data)
        for _ in range(int(drawn[0].steps.max())):
            self.replay()
        return self.carry.between(0, carry.n)

    def _load(self, carry: Stack, drawn: list[Plan], lr: Stack, data: FederatedData) -> bool:
        """Put everything into its place; return whether something had to move, which voids the recording."""
        moved = self._load_data(data)
        self.counter.zero_()
        _copy(self.carry, carry)
        _copy(self.lr, lr)
        if self.shape.waits:
            self.limit[: carry.n].copy_(put(drawn[0].steps, self.device))
            self.limit[carry.n :].zero_()
        for i, plan in enumerate(drawn):
            steps, width = plan.rows.shape[1:]
            if steps > self.plans[i].rows.shape[1]:
                self.plans[i] = self._plan(plan)
                moved = True
            room = self.plans[i]
            if self.shape.short:  # rows that nobody counts must still be rows of these samples
                room.rows.zero_()
                room.real.zero_()
            room.rows[: carry.n, :steps, :width].copy_(plan.rows)
            room.keys[: carry.n, :steps].copy_(plan.keys)
            if self.shape.short:
                room.real[: carry.n, :steps, :width].copy_(plan.real)
        return moved

    def _load_data(self, data: FederatedData) -> bool:
        """Copy samples into place where they are others in every round, as those of weak devices are."""
        data = data.fixed()
        if data.same_memory(self.data):
            return False
        fits = self.own_data and self.data.fits(data)
        if not fits:
            self.data, self.own_data = data.room(), True
        self.data.fill(data)
        return not fits


# ---- tensors in their places


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _roomy(stack: Stack, n: int) -> Stack:
    """Return the stack with memory of its own for each tensor, and rows for n clients."""
    leaves = [
        (x.new_zeros(n, *x.shape[1:]) if r else x.clone()) if isinstance(x, Tensor) else x
        for x, r in zip(stack.leaves, stack.has_rows)
    ]
    for new, x, r in zip(leaves, stack.leaves, stack.has_rows):
        if isinstance(x, Tensor) and r:
            new[: stack.n] = x
            new[stack.n :] = x[:1]
    return Stack(leaves, stack.has_rows, stack.spec, n)


def _copy(room: Stack, stack: Stack) -> None:
    """Copy the values of a stack to where there is room for them."""
    pairs = [
        (to[: stack.n] if new else to, x if old or not new else x.expand(stack.n, *x.shape))
        for to, x, new, old in zip(room.leaves, stack.leaves, room.has_rows, stack.has_rows)
        if isinstance(x, Tensor) and to is not x
    ]
    copy(pairs)


def _elsewhere(stack: Stack, places: set[int]) -> Stack:
    """Copy what the phase before left in the memory of this step: a new recording overwrites it."""
    leaves = [
        x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places else x
        for x in stack.leaves
    ]
    return Stack(leaves, stack.has_rows, stack.spec, stack.n)


def _only_active(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step that leaves a client as it is once it has taken all its steps."""

    def run(carry: Any, batch: Any, lr: Any, active: Tensor) -> Any:
        return unless(~active, carry, step(carry, batch, lr))

    return run


def _until(phase: Phase) -> Callable[..., Any]:
    """The step of a phase; a client that is finished with it stays as it is."""
    step, until = phase.step, phase.until
    if until is None:
        return step
    return lambda carry, batch, lr: unless(until(carry), carry, step(carry, batch, lr))


def _in_place(operations: Callable[..., Any], carry: Stack) -> Callable[..., Any]:
    """Return the operations, followed by copies of the new values to where the old ones were."""
    count = sum(isinstance(x, Tensor) for x in carry.leaves)

    def run(*inputs: Tensor) -> list[Tensor]:
        new = [x for x in operations(*inputs) if isinstance(x, Tensor)]
        old = {x.untyped_storage().data_ptr() for x in inputs[:count]}
        moved = [
            y if y is x or y.untyped_storage().data_ptr() not in old else y.clone()
            for x, y in zip(inputs[:count], new)
        ]  # a tensor that was another one before is read before it is overwritten
        for x, y in zip(inputs[:count], moved):
            if y is not x:
                x.copy_(y)
        return []

    return run
