"""The reference: one client after another, any module, exact batches, plain autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partita import tree
from partita.execute.base import Bench, Build, work_of
from partita.execute.plan import Moment, draw
from partita.types import Batch, ClientState, Download, Group, LocalRule, Upload


@dataclass(frozen=True)
class Loop:
    """See `partita.execute.base.Executor`."""

    bench: Bench
    name: str = "loop"

    def __call__(
        self, build: Build, clients: np.ndarray, group: Group, states: ClientState, moment: Moment
    ) -> tuple[Upload, ClientState]:
        """Each client's rule from start to finish."""
        rule = self.bench.bind(build)
        results = []
        for i in range(len(clients)):
            shared, extra, version = group.download
            if group.stacked:
                shared, extra = tree.row((shared, extra), i)
            download = Download(shared, extra, version)
            results.append(self._client(rule, clients[i : i + 1], download, tree.row(states, i), moment))
        uploads: Any = tree.stack([upload for upload, _ in results])
        return uploads, tree.stack([state for _, state in results])

    def _client(
        self, rule: LocalRule, client: np.ndarray, download: Download, state: ClientState, moment: Moment
    ) -> tuple[Upload, ClientState]:
        carry = rule.start(download, state)
        for number, phase in enumerate(rule.phases):
            plan = draw(self.bench.data, client, work_of(phase, moment), number, moment)
            lr = self.bench.rates(phase, moment)
            for s in range(int(plan.steps[0])):
                x, y = self.bench.data.gather(plan.rows[0, s, : int(plan.size[0, s])])
                carry = phase.step(carry, Batch(x, y, None, plan.keys[0, s]), lr)
        return rule.finish(carry, download, state)
