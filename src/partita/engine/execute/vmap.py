"""Many clients as one batch: their tensors stacked, each step one `vmap`.

Ragged clients are handled here and nowhere else. Clients with many steps come first, so that those still
running are always the head of the stack; a batch that is short for some clients is padded and masked. A
cohort is cut into chunks that fit the memory budget. Where cohorts differ in size, such as those by chance, a
stack of small models has a few rows more, which repeat a client and are left out of what is returned: stacks
of many rounds then have the same size, and their steps are traced once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import tree
from partita.core.device import put
from partita.core.parts import Phase, Program
from partita.core.types import Batch, ClientState, Download, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.feed import Feed, Window
from partita.engine.execute.plan import BoundProblem, plans, work_of
from partita.engine.execute.stack import Stack, Steps, join, lifted, unless_rows

PASS_BYTES = 1 << 26  # of forward passes at a time on a CPU: larger blocks are new memory each time
PASS_CLIENTS = 4  # at least, whatever they take
SMALL_BYTES = 1 << 20  # of a client whose steps take longer to ask for than to compute


@dataclass(frozen=True)
class Vmap:
    """An executor that runs stacked clients as one.

    `budget` are the bytes that a chunk may take, `model_bytes` and `sample_bytes` what a client's tensors and
    each of its samples take on the way; `cohort_sizes` are the numbers of clients to expect in a round.
    """

    bound: BoundProblem
    budget: int
    model_bytes: int
    sample_bytes: int
    name: str = "vmap"
    cohort_sizes: frozenset[int] = frozenset()
    steps: Steps = field(default_factory=Steps)
    prefetched: dict[Any, Feed] = field(default_factory=dict)

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run the clients in chunks of similar work, and put the results back into their order."""
        order = self._by_work(program, clients, context)
        chunks = max(1, -(-len(order) // self.chunk(program, clients, context)))
        same = bool((order == np.arange(len(order))).all())
        if same and chunks == 1 and not self._repeated(program, clients, context):
            return self._chunk(program, clients, group, states, slice(None), context)
        parts = []
        for chunk in np.array_split(order, chunks):
            rows, more = self._rows(program, clients, chunk, context)
            places = put(rows, self.bound.data.device)
            part = self._chunk(program, clients[rows], group, states, places, context.of(rows))
            parts.append(tree.rows(part, slice(more, None)) if more else part)
        joined: tuple[Upload, ClientState] = tree.cat(parts)
        if same:
            return joined
        back = put(np.argsort(order), self.bound.data.device)
        uploads, states = tree.rows(joined, back)
        return uploads, states

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Prepare the samples of the clients that come next, while a device works on the present ones."""
        self.prefetched.clear()
        if 0 < len(clients) <= self.chunk(program, clients, context):
            order = self._by_work(program, clients, context)
            rows, _ = self._rows(program, clients, order, context)
            if len(rows) > len(clients) or not (order == np.arange(len(order))).all():
                clients, context = clients[rows], context.of(rows)
            for number, phase in enumerate(self.bound.bind(program).phases):
                drawn = plans(self.bound.data, clients, phase, number, context)
                feed = Feed(self.bound.data, drawn)
                self.prefetched[self._plan_key(clients, phase, number, context)] = feed.begin()

    def release(self, kept: Any = ()) -> None:
        """Do nothing: a stack is new memory each time."""

    def _plan_key(self, clients: np.ndarray, phase: Phase, number: int, context: RoundContext) -> Any:
        """Return all that a plan depends on."""
        now = context.round if isinstance(context.round, int) else tuple(context.round.tolist())
        work = work_of(phase, context)
        progress = None if context.progress is None else tuple(context.progress.tolist())
        seeds = context.seed if isinstance(context.seed, int) else context.seed.tobytes()
        moment = (seeds, now, work, progress)
        return id(self.bound.data), clients.tobytes(), phase.batches, number, moment

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Vmap:
        """Return this executor bound to `data`."""
        return replace(self, bound=self.bound.on(data, counted))

    def chunk(self, program: Program, clients: np.ndarray, context: RoundContext) -> int:
        """Return how many clients fit the budget, by the largest batch of the program's phases."""
        largest = self._largest(program, clients, context)
        fit = max(1, self.budget // (self.model_bytes + largest * self.sample_bytes))
        if program.trains or self.bound.data.device.type != "cpu":
            return fit
        return min(fit, max(PASS_CLIENTS, PASS_BYTES // max(1, largest * self.sample_bytes)))

    def _largest(self, program: Program, clients: np.ndarray, context: RoundContext) -> int:
        """Return the samples in the largest batch of the program's phases."""
        largest = 0
        for phase in self.bound.bind(program).phases:
            work, n = self.bound.work(phase, clients, context)
            most = int(n.max(initial=0))
            largest = max(largest, min(work.piece or work.batch or most, most))
        return largest

    def _repeated(self, program: Program, clients: np.ndarray, context: RoundContext) -> int:
        """Return how many rows more a stack has, so that few sizes occur: a multiple of about √n rows."""
        n = len(clients)
        if not program.trains or not n or n in self.cohort_sizes or not self.cohort_sizes:
            return 0
        largest = self._largest(program, clients, context)
        if self.model_bytes + largest * self.sample_bytes > SMALL_BYTES:
            return 0
        multiple = 1 << round(math.log2(n) / 2)
        rounded = -(-n // multiple) * multiple
        return min([rounded, *[size for size in self.cohort_sizes if size > n]]) - n

    def _rows(
        self, program: Program, clients: np.ndarray, chunk: np.ndarray, context: RoundContext
    ) -> tuple[np.ndarray, int]:
        """Return the rows of a stack by the places of its clients, and how many of them only repeat one."""
        more = self._repeated(program, clients[chunk], context)
        return np.concatenate([np.repeat(chunk[:1], more), chunk]), more

    def _by_work(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        return self.bound.by_work(program, clients, context)

    def _chunk(
        self,
        program: Program,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        places: Tensor | slice,
        context: RoundContext,
    ) -> tuple[Upload, ClientState]:
        rule, n = self.bound.bind(program), len(clients)
        version = group.download.version
        received = tree.rows(group.download[:2], places) if group.stacked else group.download[:2]
        shared = Stack.of(received, n, rows=group.stacked)
        if not group.stacked:
            shared = self._own_buffers(shared, received[0], n)
        state = Stack.of(tree.rows(states, places), n, rows=True)
        starts = Stack.of((version, *self.bound.starts(clients, context)), n, rows=True)
        lifting = self._lifted(program)
        carry = lifting(
            rule.start, lambda pair, start, s: rule.start(Download(*pair, *start), s), shared, starts, state
        )
        for number, phase in enumerate(rule.phases):
            feed = self.prefetched.pop(self._plan_key(clients, phase, number, context), None)
            data = self.bound.data
            feed = feed or Feed(data, plans(data, clients, phase, number, context))
            carry = self._phase(program, phase, carry, feed, context)
        uploads, new = lifting(
            rule.finish,
            lambda c, pair, start, s: rule.finish(c, Download(*pair, *start), s),
            *(carry, shared, starts, state),
        ).full()
        return uploads, new

    def _lifted(self, program: Program) -> Callable[..., Stack]:  # noqa: ARG002 (a subclass looks at it)
        """Return what lifts the beginning and the end of a program: (of, fn, *stacks) -> stack."""
        return lifted

    def _own_buffers(self, shared: Stack, received: object, n: int) -> Stack:
        """Give each client buffers of its own from the start: they change in place during a forward pass."""
        names = set(self.bound.problem.buffers)
        buffers = {id(v) for k, v in received.items() if k in names}  # type: ignore[attr-defined]
        rows = [id(x) in buffers for x in shared.leaves]
        leaves = [x.expand(n, *x.shape) if r else x for x, r in zip(shared.leaves, rows)]
        return Stack(leaves, rows, shared.spec, n)

    def _phase(
        self,
        program: Program,  # noqa: ARG002 (a subclass looks at it)
        phase: Phase,
        carry: Stack,
        feed: Feed,
        context: RoundContext,
    ) -> Stack:
        """Take all steps of a phase; a client leaves the stack after its last one."""
        steps = feed.plans[0].steps  # the same for each of the batches of a step
        rates, rows = self.bound.rates(phase, feed.plans[0], context)
        lr = Stack.of(rates, carry.n, rows=rows)
        order = np.argsort(-steps, kind="stable")
        sorted_already = bool((order == np.arange(len(order))).all())
        place = put(order, self.bound.data.device)
        if not sorted_already:
            carry, lr, feed, steps = carry.take(place), lr.take(place), feed.taken(order), steps[order]
        done: list[Stack] = []
        before: tuple[Batch | None, ...] = (None,) * phase.batches
        for s, window in feed.steps():
            active = int((steps > s).sum())
            if active < carry.n:
                done.append(carry.between(active, carry.n))
                carry = carry.between(0, active)
            finished = None if phase.until is None else self.steps(phase.until, carry).full()
            if finished is not None and bool(finished.all()):
                break
            batches = tuple([self._batch(window, i, s, active, last) for i, last in enumerate(before)])
            before = batches
            batch = Stack.of(batches if phase.batches > 1 else batches[0], active, rows=True)
            after = self.steps(phase.step, carry, batch, lr.at(s).between(0, active))
            carry = after if finished is None else unless_rows(finished, carry, after)
        if done:
            carry = join([carry, *reversed(done)])
        return carry if sorted_already else carry.take(torch.argsort(place))

    def _batch(self, window: Window, i: int, s: int, active: int, before: Batch | None) -> Batch:
        """Return the i-th batch of a step."""
        plan, s = window.plans[i], s - window.first
        if plan.whole and before is not None and len(before.key) == active:
            return before._replace(key=plan.keys[:active, s])  # the rows are there already
        size = plan.size[:active, s]
        width = int(size.max())
        x, y = window.data.gather(plan.rows[:active, s, :width])
        mask = None if (size == width).all() else plan.real[:active, s, :width].to(torch.float32)
        return Batch(x, y, mask, plan.keys[:active, s], plan.piece)
