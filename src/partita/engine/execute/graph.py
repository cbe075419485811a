"""A whole step of a chunk of clients as one CUDA graph, recorded once and replayed for every step and round.

The steps of a phase differ in their numbers only. What they read and write stays at the same place in memory:
the clients' tensors, the plan of the phase (which samples in which step), and a counter of steps that lives
on the device. A step looks its samples up by the counter, changes the tensors in place and counts on; the
host only asks for the next step, and waits for nothing.

Convolutions may be products of matrices (`cuda/implicit.py`), whose few kernels take seconds to compile. The
operations of a step may also be compiled as a whole (inductor), which fuses what is memory-bound, with either
form of products (`cuda/unrolled.py` is the other); that takes up to a minute. Each is done where the work
that is left pays for it, cheap ones first; the fastest form is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.core.device import put
from partita.core.parts import Phase, Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.cuda.captured import (
    CAPTURED,
    COMPILED,
    COMPILED_IMPLICIT,
    IMPLICIT,
    UNROLLED,
    Captured,
    Shape,
)
from partita.engine.execute.cuda.replayed import Replayed
from partita.engine.execute.feed import Feed
from partita.engine.execute.plan import Plan, count_steps, rounds_left, work_of
from partita.engine.execute.stack import Stack, flatten, join, lifted, signature, unflatten
from partita.engine.execute.vmap import SMALL_BYTES, Vmap

FORM_LABELS = {
    CAPTURED: "",
    IMPLICIT: "with implicit products",
    COMPILED: "compiled",
    UNROLLED: "compiled, with convolutions as products",
    COMPILED_IMPLICIT: "compiled, with convolutions as implicit products",
}
EXACT_CHUNKS = 8  # of a cohort, up to which the size of a chunk is recorded as it is
COMPILED_SAVING = 0.35  # of a step's time that compiling saves, as a rule at least


def silent(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True)
class Graph(Vmap):
    """An executor that replays recorded steps. It falls back to `Vmap`, with the reason in `choices`.

    `always` compiles, whatever it takes; `notify` hears of what takes a while.
    """

    name: str = "graph"
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    label: str = ""
    always: bool = False
    notify: Callable[[str], None] = silent
    recordings: dict[Any, Captured] = field(default_factory=dict)
    ends: Replayed = field(default_factory=lambda: Replayed("how clients begin and end"))

    def _lifted(self, program: Program) -> Callable[..., Stack]:
        return self.ends if program.trains else lifted

    def _by_work(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        """Order several chunks so that each has similar work, and full batches as far as possible."""
        phases = self.bound.bind(program).phases
        if not phases or len(clients) <= self.chunk(program, clients, context):
            return np.arange(len(clients))
        work, n = self.bound.work(phases[0], clients, context)
        return np.lexsort((-n, -count_steps(n, clients, work, context)))

    def _chunk(
        self,
        program: Program,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        places: Tensor | slice,
        context: RoundContext,
    ) -> tuple[Upload, ClientState]:
        result = super()._chunk(program, clients, group, states, places, context)
        return _apart(result, {k for recording in self.recordings.values() for k in recording.places})

    def _phase(
        self, program: Program, phase: Phase, carry: Stack, feed: Feed, context: RoundContext
    ) -> Stack:
        """Take the steps of the clients that have any; one without samples has none."""
        busy = np.flatnonzero(feed.plans[0].steps)
        if len(busy) in (0, carry.n):
            return self._steps(program, phase, carry, feed, context)
        idle = np.flatnonzero(feed.plans[0].steps == 0)
        busy_rows, idle_rows = (put(places, self.bound.data.device) for places in (busy, idle))
        done = self._steps(program, phase, carry.take(busy_rows), feed.taken(busy), context.of(busy))
        return join([done, carry.take(idle_rows)]).take(torch.argsort(torch.cat([busy_rows, idle_rows])))

    def _steps(
        self, program: Program, phase: Phase, carry: Stack, feed: Feed, context: RoundContext
    ) -> Stack:
        """Replay recorded steps; stack them where they cannot be recorded."""
        drawn = feed.plans
        role = f"{self.label}steps of {program.name}, stage {context.stage}"
        falls_back = self.choices.get(role, {}).get("picked") == "vmap"
        if not program.trains or falls_back or not int(drawn[0].steps.max(initial=0)):
            return super()._phase(program, phase, carry, feed, context)
        rates, rows = self.bound.rates(phase, drawn[0], context)
        lr = Stack.of(tuple([_roomy(rate, rows) for rate in rates]), carry.n, rows=rows)
        try:
            now = carry
            for window in feed:
                recording = self._recording(phase, now, drawn, lr, window.data, context, role)
                now = recording.run(now, window.plans, _from_step(lr, window.first), window.data)
            return now
        except Exception as error:  # a rule that looks at values, what cannot be recorded, no memory
            reason = check.named_reason(error)
        self.recordings.clear()  # their memory, now that the failed attempt is gone
        check.warn(f"executor='graph': steps are not recorded but stacked ({reason})")
        self.choices[role] = {"picked": "vmap", "why": reason}
        return super()._phase(program, phase, carry, feed, context)

    def _recording(
        self,
        phase: Phase,
        carry: Stack,
        drawn: list[Plan],
        lr: Stack,
        data: FederatedData,
        context: RoundContext,
        role: str,
    ) -> Captured:
        """Return the recorded step for these shapes; record one if there is none."""
        n, width = self._size(carry.n), self._width(phase, drawn, context)
        waits = carry.n < n or bool((drawn[0].steps != drawn[0].steps[0]).any())
        short = waits or any(bool((plan.size != width).any()) for plan in drawn)
        shape = Shape(n, width, short, waits)
        key = (phase.step, shape, signature(carry.between(0, 1), lr.between(0, 1)))
        if key not in self.recordings:
            recording = Captured(phase, carry, drawn, lr, data, shape)
            recording.record()
            steps_left = max(1, rounds_left(context)) * int(drawn[0].steps.max())
            self._choose(recording, steps_left, role)
            self.recordings[key] = recording
        self.recordings[key] = self.recordings.pop(key)  # the last one used comes last
        self._drop_oldest()
        return self.recordings[key]

    def _drop_oldest(self) -> None:
        """Keep the last ones used, as many as fit twice the budget; what earlier ones hold may have grown."""
        kept = self.recordings
        while len(kept) > 1 and sum(recording.nbytes for recording in kept.values()) > 2 * self.budget:
            del kept[next(iter(kept))]

    def _size(self, n: int) -> int:
        """Return for how many clients a step is recorded: n, or a few more where their number changes."""
        sizes = {-(-size // chunks) for size in self.cohort_sizes for chunks in range(1, EXACT_CHUNKS + 1)}
        if sizes & {n, n + 1}:  # the chunks of a cohort differ by one
            return n if n in sizes else n + 1
        rounded = rounded_up(n)
        if (
            self.always or self.model_bytes <= SMALL_BYTES
        ):  # each size is compiled on its own, or rows cost little
            rounded = max(4, 1 << (n - 1).bit_length())
        return min([rounded, *[size for size in sizes if size > n]])

    def _width(self, phase: Phase, drawn: list[Plan], context: RoundContext) -> int:
        """Return the samples in a batch: the same in every round where batches have a size, else 2^k."""
        work = work_of(phase, context)
        if work.batch is None:
            return 1 << (int(drawn[0].rows.shape[-1]) - 1).bit_length()
        return min(work.batch, int(self.bound.data.ranges(work.split)[:, 1].max()))

    def _choose(self, recording: Captured, steps_left: int, role: str) -> None:
        """Pick the fastest form that the remaining work pays for; a role's first step decides for all."""
        if role in self.choices:
            self._switch(recording, self.choices[role]["picked"])
            return
        seconds, reasons, labels = {CAPTURED: recording.seconds()}, [], dict(FORM_LABELS)
        for form in self._forms(recording):
            left, cost = min(seconds.values()) * steps_left, recording.cost(form)
            if not self.always and left * COMPILED_SAVING < cost:
                reasons.append(f"{left:.0f} s in all; {form} takes about {cost:.0f} s to compile")
                continue
            if reason := self._switch(recording, form):
                reasons.append(f"{form}: {reason}")
                continue
            seconds[form] = recording.seconds()
            labels[form] += " (loaded from disk)" if recording.loaded else ""
        times = [f"{x * 1e3:.2f} ms a step {labels[form]}".rstrip() for form, x in seconds.items()]
        if self.always and len(seconds) > 1:
            del seconds[CAPTURED]
        best = min(seconds, key=lambda form: seconds[form])
        self._switch(recording, best)
        self.choices[role] = {"picked": best, "why": ", ".join(times + reasons)}

    def _forms(self, recording: Captured) -> list[str]:
        """Return the forms to try. A deterministic run does not choose by the clock."""
        if torch.are_deterministic_algorithms_enabled():
            return [COMPILED] if self.always else []
        if recording.implicit:  # faster than with patches wherever it was measured
            compiled = [COMPILED_IMPLICIT, COMPILED]
            return compiled if self.always else [IMPLICIT, *compiled]
        fits = 0 < recording.patches <= self.budget  # in addition to what the chunk takes
        return [COMPILED, UNROLLED] if fits else [COMPILED]

    def _switch(self, recording: Captured, form: str) -> str:
        """Bring a step into this form; return the reason where that fails, as without a compiler."""
        if recording.form == form:
            return ""
        if form == CAPTURED:
            recording.plainly()
            return ""
        self.notify(f"compiling {form} (about {recording.cost(form):.0f} s)")
        try:
            recording.compile(form)
        except Exception as error:
            recording.plainly()
            check.warn(f"executor='graph': steps are not compiled ({check.named_reason(error)})")
            return check.named_reason(error)
        finally:
            self.notify("")
        return ""


def rounded_up(n: int) -> int:
    """Return the next of 1, 2, 4, 6, 8, 12, 16, 24, ...: what changes has one of few sizes."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if 4 < n <= power * 3 // 4 else power


def _roomy(rate: Tensor, rows: bool) -> Tensor:
    """Return a rate that goes by step with room for more steps, up to the next power of two."""
    if rate.dim() == int(rows):
        return rate
    steps = rate.shape[-1]
    return torch.nn.functional.pad(rate, (0, (1 << max(0, steps - 1).bit_length()) - steps))


def _from_step(lr: Stack, first: int) -> Stack:
    """Return rates that begin with a later step, where they go by step."""
    leaves = [rate.roll(-first, -1) if rate.dim() > r else rate for rate, r in zip(lr.leaves, lr.has_rows)]
    return Stack(leaves, lr.has_rows, lr.spec, lr.n) if first else lr


def _apart(result: tuple[Upload, ClientState], places: set[int]) -> tuple[Upload, ClientState]:
    """Copy what lies in these places: the next chunk overwrites them."""
    leaves: list[Any] = []
    spec = flatten(result, leaves)
    copied = [
        x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places else x for x in leaves
    ]
    apart: tuple[Upload, ClientState] = unflatten(spec, iter(copied))
    return apart
