"""The samples of a phase where they do not lie on the device that computes.

Which rows a phase reads is known before its first step (see `plan`). So its steps are cut into windows: the
rows of a window are read on the host and sent together, in a thread, while the device is at work on the
window before. A step finds the same samples as if all of them were there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from partita.core.device import Arrival, put
from partita.data import FederatedData
from partita.engine.execute.plan import Plan

WINDOW_BYTES = 1 << 25  # of samples that are sent together, unless a single step takes more

T = TypeVar("T")


class Window(NamedTuple):
    """Some steps of a phase, from the `first` one on, and data that have the rows of their plans."""

    first: int
    data: FederatedData
    plans: list[Plan]


class Feed:
    """The steps of a phase for some clients, in windows whose samples are on the device.

    Each walk over it begins with the first step; the first walk uses what was read before it.
    """

    def __init__(self, data: FederatedData, plans: list[Plan]) -> None:
        self.data, self.plans = data, plans
        self._first: Ahead[tuple[Window, Arrival]] | None = None

    def begin(self) -> Feed:
        """Read the first window ahead, if there is anything to read."""
        if self.data.elsewhere and self._steps:
            self._first = Ahead(lambda: self._read(0))
        return self

    def taken(self, order: np.ndarray) -> Feed:
        """Return the same for some of the clients, in this order."""
        return _Taken(self, order)

    def __iter__(self) -> Iterator[Window]:
        if not self.data.elsewhere or not self._steps:
            yield Window(0, self.data, self.plans)
            return
        ahead, self._first = self._first or Ahead(lambda: self._read(0)), None
        for first in range(0, self._steps, self._length):
            (window, arrival), following = ahead.result(), first + self._length
            if following < self._steps:
                ahead = Ahead(functools.partial(self._read, following))
            arrival.wait()
            yield window

    def steps(self) -> Iterator[tuple[int, Window]]:
        """Yield the number of each step, and the window that it is in."""
        for window in self:
            for s in range(window.plans[0].size.shape[1]):
                yield window.first + s, window

    @property
    def _steps(self) -> int:
        return int(self.plans[0].size.shape[1])

    @property
    def _length(self) -> int:
        """Steps of a window."""
        if all(plan.whole for plan in self.plans):  # the same rows in every step
            return self._steps
        rows = sum(plan.rows.shape[0] * plan.rows.shape[2] for plan in self.plans)
        return max(1, WINDOW_BYTES // max(1, rows * self.data.row_bytes))

    def _read(self, first: int) -> tuple[Window, Arrival]:
        """Read the rows of a window, and send them."""
        steps = slice(first, first + self._length)
        rows, plans, before = [self.plans[0].rows.new_zeros(1)], [], 1  # row 0 stands for padding
        for plan in self.plans:
            read = slice(0, 1) if plan.whole else steps
            real = plan.real[:, read]
            place = torch.where(real, before - 1 + real.reshape(-1).cumsum(0).reshape(real.shape), 0)
            rows.append(plan.rows[:, read][real])
            before += len(rows[-1])
            plans.append(_window(plan, steps, place))
        with Arrival(self.data.device) as arrival:
            data = self.data.sent(torch.cat(rows))
            here = [_here(plan, data.device) for plan in plans]
            arrival.expect([*data.tensors, *[t for plan in here for t in (plan.rows, plan.real)]])
        return Window(first, data, here), arrival


class _Taken(Feed):
    """A feed for some of its clients, in another order."""

    def __init__(self, feed: Feed, order: np.ndarray) -> None:
        super().__init__(feed.data, [reordered(plan, order) for plan in feed.plans])
        self._feed, self._order = feed, order

    def __iter__(self) -> Iterator[Window]:
        for window in self._feed:
            yield window._replace(plans=[reordered(plan, self._order) for plan in window.plans])


def _window(plan: Plan, steps: slice, place: Tensor) -> Plan:
    """Return the plan of some steps, whose rows are at these places."""
    size, keys, real = plan.size[:, steps], plan.keys[:, steps], plan.real[:, steps]
    taken = np.clip(plan.steps - steps.start, 0, size.shape[1])
    return plan._replace(rows=place.expand(real.shape), real=real, size=size, steps=taken, keys=keys)


def _here(plan: Plan, device: torch.device) -> Plan:
    """Return a plan on the device that computes."""
    rows, real = (put(values.contiguous().numpy(), device) for values in (plan.rows, plan.real))
    return plan._replace(rows=rows, real=real)


def reordered(plan: Plan, order: np.ndarray) -> Plan:
    """Return the plan of these clients, in this order."""
    place = {device: put(order, device) for device in {plan.rows.device, plan.keys.device}}
    return plan._replace(
        rows=plan.rows[place[plan.rows.device]],
        real=plan.real[place[plan.rows.device]],
        size=plan.size[order],
        steps=plan.steps[order],
        keys=plan.keys[place[plan.keys.device]],
        planned=plan.planned[order],
    )


class Ahead(Generic[T]):
    """What a function returns, computed in a thread of its own from now on."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait for it, and return it, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]
