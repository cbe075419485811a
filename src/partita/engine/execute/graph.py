"""A whole step of a chunk of clients as one CUDA graph, recorded once and replayed for every step and round.

The steps of a phase differ in their numbers only. What they read and write stays at the same place in memory:
the clients' tensors, the plan of the phase (which samples in which step), and a counter of steps that lives
on the device. A step looks its samples up by the counter, changes the tensors in place and counts on; the
host only says "again", and waits for nothing.

The operations of a step may also be compiled (inductor), which fuses what is memory-bound, and convolutions
may be products of matrices then. That takes from seconds to a minute, and is done where the work that is left
pays for it; the fastest form is kept.
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
from partita.engine.execute.cuda.captured import CAPTURED, COMPILED, UNROLLED, Captured, Shape
from partita.engine.execute.plan import Plan, count_steps, work_of
from partita.engine.execute.stack import Stack, flatten, join, signature, unflatten
from partita.engine.execute.vmap import Vmap, reordered

Picks = dict[str, dict[str, str]]
_AS = {CAPTURED: "", COMPILED: "compiled", UNROLLED: "with convolutions as products"}
FEW = 8  # chunks of a cohort, whose size is kept as it is
WORTH = 0.35  # of the time of a step that compiling saves, as a rule at least


def _silent(text: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Graph(Vmap):
    """See `partita.engine.execute.base.Executor`. Falls back to `Vmap`, with the reason in `choices`.

    `cohort_sizes` are the numbers of clients that come in every round; `always`: compile, whatever it takes.
    """

    name: str = "graph"
    choices: Picks = field(default_factory=dict)
    label: str = ""
    cohort_sizes: frozenset[int] = frozenset()
    always: bool = False
    tell: Callable[[str], None] = _silent
    made: dict[Any, Captured] = field(default_factory=dict)

    def _by_work(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        """Several chunks are of similar work, and have full batches as far as possible."""
        phases = self.bound.bind(program).phases
        if not phases or len(clients) <= self.chunk(program, clients, context):
            return np.arange(len(clients))
        work = work_of(phases[0], context)
        n = self.bound.data.ranges(work.split)[clients, 1]
        return np.lexsort((-n, -count_steps(n, clients, work)))

    def _chunk(
        self,
        program: Program,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        some: Tensor | slice,
        context: RoundContext,
    ) -> tuple[Upload, ClientState]:
        result = super()._chunk(program, clients, group, states, some, context)
        return _apart(result, {k for made in self.made.values() for k in made.places})

    def _phase(
        self, program: Program, phase: Phase, carry: Stack, found: list[Plan], context: RoundContext
    ) -> Stack:
        """Those who have steps to take; without samples there are none."""
        busy = np.flatnonzero(found[0].steps)
        if len(busy) in (0, carry.n):
            return self._steps(program, phase, carry, found, context)
        rest = np.flatnonzero(found[0].steps == 0)
        here, there = (put(some, found[0].rows.device) for some in (busy, rest))
        plans = [reordered(plan, busy, here) for plan in found]
        done = self._steps(program, phase, carry.take(here), plans, context.of(busy))
        return join([done, carry.take(there)]).take(torch.argsort(torch.cat([here, there])))

    def _steps(
        self, program: Program, phase: Phase, carry: Stack, found: list[Plan], context: RoundContext
    ) -> Stack:
        role = f"{self.label}steps of {program.name}, stage {context.stage}"
        fallen = self.choices.get(role, {}).get("picked") == "vmap"
        if not program.trains or fallen or not int(found[0].steps.max(initial=0)):
            return super()._phase(program, phase, carry, found, context)
        rates, rows = self.bound.rates(phase, context)
        lr = Stack.of(rates, carry.n, rows=rows)
        try:
            step = self._made(phase, carry, found, lr, context, role)
            return step.run(carry, found, lr, self.bound.data)
        except Exception as error:  # a rule that looks at values, what cannot be recorded, no memory
            reason = _reason(error)
        self.made.clear()  # their memory, now that the failed attempt is gone
        check.warn(f"executor='graph': steps are not recorded but stacked ({reason})")
        self.choices[role] = {"picked": "vmap", "why": reason}
        return super()._phase(program, phase, carry, found, context)

    def _made(
        self, phase: Phase, carry: Stack, found: list[Plan], lr: Stack, context: RoundContext, role: str
    ) -> Captured:
        """The recorded step for these shapes; a new one if there is none."""
        n, width = self._size(carry.n), self._width(phase, found, context)
        waits = carry.n < n or bool((found[0].steps != found[0].steps[0]).any())
        short = waits or any(bool((plan.size != width).any()) for plan in found)
        shape = Shape(n, width, short, waits)
        key = (phase.step, shape, signature(carry.between(0, 1), lr.between(0, 1)))
        if key not in self.made:
            made = Captured(phase, carry, found, lr, self.bound.data, shape)
            made.record()
            self._choose(made, found, context, role)
            self.made[key] = made
        self.made[key] = self.made.pop(key)  # the last one used comes last
        self._keep_some()
        return self.made[key]

    def _keep_some(self) -> None:
        """As many as fit twice the budget, the last ones used; what earlier ones hold may have grown."""
        while len(self.made) > 1 and sum(m.nbytes for m in self.made.values()) > 2 * self.budget:
            del self.made[next(iter(self.made))]

    def _size(self, n: int) -> int:
        """For how many clients a step is recorded: for so many, or a few more where their number changes."""
        usual = {-(-size // chunks) for size in self.cohort_sizes for chunks in range(1, FEW + 1)}
        if usual & {n, n + 1}:  # the chunks of a cohort differ by one
            return n if n in usual else n + 1
        power = 1 << (n - 1).bit_length()
        rule = power * 3 // 4 if 4 < n <= power * 3 // 4 else power
        if self.always:  # each size is compiled on its own
            rule = max(4, power)
        return min([rule, *[m for m in usual if m > n]])

    def _width(self, phase: Phase, found: list[Plan], context: RoundContext) -> int:
        """Samples in a batch: the same in every round, where batches have a size; else a power of two."""
        work = work_of(phase, context)
        if work.batch is None:
            return 1 << (int(found[0].rows.shape[-1]) - 1).bit_length()
        return min(work.batch, int(self.bound.data.ranges(work.split)[:, 1].max()))

    def _choose(self, made: Captured, found: list[Plan], context: RoundContext, role: str) -> None:
        """The fastest form that the work which is left pays for; the first step of a role decides for all."""
        if role in self.choices:
            self._make(made, self.choices[role]["picked"])
            return
        steps, seconds, why = _steps_left(found, context), {CAPTURED: made.seconds()}, []
        for form in self._forms(made):
            left, cost = min(seconds.values()) * steps, made.cost(form == UNROLLED)
            if not self.always and left * WORTH < cost:
                why.append(f"{left:.0f} s in all; to compile takes about {cost:.0f} s")
                break
            if reason := self._make(made, form):
                why.append(f"{form}: {reason}")
                break
            seconds[form] = made.seconds()
        times = [f"{x * 1e3:.2f} ms a step {_AS[form]}".rstrip() for form, x in seconds.items()]
        if self.always and len(seconds) > 1:
            del seconds[CAPTURED]
        best = min(seconds, key=lambda form: seconds[form])
        self._make(made, best)
        self.choices[role] = {"picked": best, "why": ", ".join(times + why)}

    def _forms(self, made: Captured) -> list[str]:
        """What may be tried. Runs that are to be the same bit for bit do not choose by the clock."""
        if torch.are_deterministic_algorithms_enabled():
            return [COMPILED] if self.always else []
        fits = 0 < made.patches <= self.budget  # in addition to what the chunk takes
        return [COMPILED, UNROLLED] if fits else [COMPILED]

    def _make(self, made: Captured, form: str) -> str:
        """Nothing, or why it stays as it was: without a compiler, for example."""
        if made.form == form:
            return ""
        if form == CAPTURED:
            made.plainly()
            return ""
        self.tell(f"compiling (about {made.cost(form == UNROLLED):.0f} s)")
        try:
            made.compile(unroll=form == UNROLLED)
        except Exception as error:
            made.plainly()
            check.warn(f"executor='graph': steps are not compiled ({_reason(error)})")
            return _reason(error)
        finally:
            self.tell("")
        return ""


def _steps_left(found: list[Plan], context: RoundContext) -> int:
    since = context.stage_round if isinstance(context.stage_round, int) else int(context.stage_round.min())
    return max(1, context.stage_rounds - since) * int(found[0].steps.max())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:200]}"


def _apart(result: tuple[Upload, ClientState], places: set[int]) -> tuple[Upload, ClientState]:
    """With memory of its own: the places are written again by the next chunk."""
    leaves: list[Any] = []
    spec = flatten(result, leaves)
    own = [
        x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places else x for x in leaves
    ]
    found: tuple[Upload, ClientState] = unflatten(spec, iter(own))
    return found
