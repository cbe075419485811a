"""Whether it pays that several runs train as one batch: `executor="auto"` measures their first rounds.

After a round that warms up, a round of all together is compared with a round of one run alone, times their
number. Runs stay apart where two rounds say that they are no faster as one batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

LOG = logging.getLogger("partita")

LEAST_SPEEDUP = 1.05  # of all runs as one batch, below which they stay apart
ROUNDS_ALONE = 3  # of one run at most, whose results nobody uses: one warms up
TRIAL_SHARE = 0.1  # of the work, above which nothing is measured

Choices = MutableMapping[str, dict[str, str]]


class Paying:
    """Decides for one stage of several runs. The choice is one of the run's: see config.json.

    role     what the choice is called
    settled  why it is as it is; '' as long as nobody knows
    apart    whether each run goes on alone, as far as is known
    alone    what the executors of a run alone have picked
    """

    def __init__(self, role: str, choices: Choices, *, measures: bool) -> None:
        self.role, self.apart = role, choices.get(role, {}).get("picked") == "apart"
        self.settled = choices.get(role, {}).get("why", "") if measures else "not measured"
        self.alone: dict[str, dict[str, str]] = {}
        self._warm = False
        self._seconds: list[tuple[float, float]] = []

    @property
    def apart_for_good(self) -> bool:
        """Whether it is known that runs are no faster as one batch."""
        return bool(self.settled) and self.apart

    def seconds(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return how long work takes, as long as anybody wants to know, and what it returns."""
        if self.settled:
            return 0.0, work()
        _wait()
        begin = time.perf_counter()
        result = work()
        _wait()
        return time.perf_counter() - begin, result

    def see(
        self, together: float, runs: int, rounds_left: int, choices: Sequence[Choices], one: Callable[[], Any]
    ) -> None:
        """Learn what a round of all has taken; `one` computes what a run alone would, the first of them.

        `choices` are those of all runs, of executors and of this.
        """
        if self.settled:
            return
        if not self._warm and TRIAL_SHARE * rounds_left * runs < ROUNDS_ALONE:
            self._settle(choices, f"{rounds_left} rounds of {runs} runs: too few to measure")
        elif not self._warm:
            self._warm = True
        else:
            alone = self._alone(choices[0], one)
            self._seconds.append((together, alone * runs))
            together, apart = (min(times) for times in zip(*self._seconds))
            self.apart = together * LEAST_SPEEDUP > apart
            if not self.apart or len(self._seconds) == ROUNDS_ALONE - 1:
                text = f"a round of {runs} runs takes {together * 1e3:.1f} ms as one batch"
                self._settle(choices, f"{text}, {apart * 1e3:.1f} ms one after another")

    def _alone(self, choices: Choices, one: Callable[[], Any]) -> float:
        """Return how long the first run takes alone, by the executors that it picks when it is alone."""
        before = dict(choices)
        choices.clear()
        choices.update(self.alone)
        try:
            if not self.alone:
                one()  # it picks them, and warms up
            seconds, _ = self.seconds(one)
            self.alone = dict(choices)
        finally:
            choices.clear()
            choices.update(before)
        return seconds

    def _settle(self, choices: Sequence[Choices], reason: str) -> None:
        self.settled = reason
        for each in choices:
            if self.apart:
                each.update(self.alone)
            each[self.role] = {"picked": "apart" if self.apart else "together", "why": reason}
        LOG.info("%s %s: %s", self.role, "apart" if self.apart else "together", reason)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
