"""How a local rule, written for one client, runs for many: one after another, or stacked.

`EXECUTORS` has them by name. `executor=` takes a name, or a function of a `Task` that returns an executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from partita.core import check
from partita.engine.execute.auto import Auto
from partita.engine.execute.base import Executor, Runner
from partita.engine.execute.graph import Graph
from partita.engine.execute.loop import Loop
from partita.engine.execute.plan import BoundProblem
from partita.engine.execute.task import Task, budget
from partita.engine.execute.vmap import Vmap

__all__ = ["EXECUTORS", "Auto", "Executor", "Runner", "Task", "Vmap", "budget", "make_executor"]

Factory = Callable[[Task], Runner]


def _loop(task: Task) -> Runner:
    return Loop(task.bind(replace(task.alone, half=task.half), task.data))  # images as they are given


def _pool(task: Task) -> Runner:
    return task.pool


def _vmap(task: Task) -> Runner:
    return task.stacked("vmap", lambda bound: _stack(task, bound))


def _graph(task: Task) -> Runner:
    return task.stacked("graph", lambda bound: _recorded(task, bound))


def _compiled(task: Task) -> Runner:
    return task.stacked("compiled", lambda bound: replace(_recorded(task, bound), always=True))


def _auto(task: Task) -> Runner:
    def measured(bound: BoundProblem) -> Runner:
        stack = _stack(task, bound)
        on_cpu = task.data.device.type == "cpu"
        candidates = (stack, task.pool) if on_cpu else (_recorded(task, bound), stack, task.loop)
        return Auto(candidates, task.choices, label=task.label)

    if task.too_short and not task.stacks:
        task.choices[f"{task.label}all programs"] = {"picked": task.pool.name, "why": task.too_short}
        return task.pool
    return task.stacked("auto", measured)


def _stack(task: Task, bound: BoundProblem) -> Vmap:
    sizes = frozenset(task.cohort_sizes)
    return Vmap(bound, task.room, task.model_bytes, task.sample_bytes, cohort_sizes=sizes)


def _recorded(task: Task, bound: BoundProblem) -> Graph:
    return Graph(
        bound,
        task.room,
        task.model_bytes,
        task.sample_bytes,
        choices=task.choices,
        label=task.label,
        cohort_sizes=frozenset(task.cohort_sizes),
        notify=task.notify,
    )


EXECUTORS: dict[str, Factory] = {
    "auto": _auto,
    "loop": _loop,
    "pool": _pool,
    "vmap": _vmap,
    "graph": _graph,
    "compiled": _compiled,
}


def make_executor(executor: str | Factory, task: Task) -> Runner:
    """Return the executor of this name, or the one that the user's function returns, for a task."""
    if isinstance(executor, str):
        return EXECUTORS[executor](task)
    runner = executor(task)
    members = ("name", "bound", "on", "prefetch", "__call__")
    missing = [name for name in members if not hasattr(runner, name)]
    if missing:
        allowed = f"a function that returns an executor: one that has {', '.join(missing)}, too"
        raise check.fail("executor", runner, allowed)
    return runner
