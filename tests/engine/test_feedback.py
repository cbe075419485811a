"""Error feedback: what was sent and what clients keep is what was meant, as in a plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity import weak
from engine.passing import (
    CHAINS,
    CLIENTS,
    Linear,
    T,
    data,
    federate,
    gradient,
    linear_data,
    remembered,
)
from partita.core.types import Message, Tensors
from partita.engine import channel, train
from partita.engine.loop import Round
from partita.engine.stage import Stage
from partita.engine.state import State
from reference import plain_compress as plain
from support import each


@each("feedback", [True, False])
@each(("executor", "cohort"), [("loop", 5), ("vmap", 5), ("loop", 2), ("vmap", 3)])
def test_fedavg_with_topk_is_the_plain_loop(executor: str, cohort: int, feedback: bool) -> None:
    """w ← w − Σ n_i C(Δ_i + e_i) / Σ n_i,  e_i ← Δ_i + e_i − C(Δ_i + e_i),  Δ_i = w − w_i."""
    samples, rounds, lr = linear_data(), 6, 0.5
    seen, run = weak.rounds(
        Linear(), samples, pt.fedavg(lr=lr), rounds=rounds, cohort=cohort, steps=3, batch=None,
        uploads=[T.topk(0.3, feedback=feedback)], executor=executor, seed=1,
    )  # fmt: skip
    w = Linear().weight.detach().numpy().copy()
    error, meant, sent = (np.zeros((5, w.size)) for _ in range(3))
    for now in seen:
        total = np.zeros(w.size)
        for client in now.clients:
            x, y = (v.numpy() for v in samples.client(client))
            own = w.copy()
            for _ in range(3):
                own -= lr * gradient(own, x, y)
            delta = (w - own).ravel()
            arrived = plain.topk(delta + error[client], 0.3)
            assert np.count_nonzero(arrived) == 5
            meant[client] += delta
            sent[client] += arrived
            if feedback:
                error[client] += delta - arrived
            np.testing.assert_allclose(now.upload(client)["weight"].numpy().ravel(), arrived, atol=1e-12)
            total += len(x) * arrived
        w -= (total / sum(samples.train[c, 1] for c in now.clients)).reshape(w.shape)
    np.testing.assert_allclose(run.shared["weight"].numpy(), w, atol=1e-12)
    if feedback:
        np.testing.assert_allclose(sent + error, meant, atol=1e-12)
        kept = np.stack([run.client(i).memory["residual.delta.weight"].numpy().ravel() for i in range(5)])
        np.testing.assert_allclose(kept, error, atol=1e-12)
    else:
        assert not remembered(run)


@each("name", [name for name, chain in CHAINS.items() if any(t.feedback for t in chain)])
def test_what_was_sent_and_what_is_kept_is_what_was_meant(name: str, monkeypatch) -> None:
    """Over rounds, for every chain with feedback, and for SCAFFOLD's controls as for the model."""
    meant, sent = dict[str, Tensor](), dict[str, Tensor]()
    way = channel.Way.__call__

    def noted(self, message: Message, publics, key: Tensor, residual: Tensors):
        arrived, lost = way(self, message, publics, key, residual)
        for k in residual:
            meant[k] = meant.get(k, 0) + message.numbers[k]
            sent[k] = sent.get(k, 0) + arrived.numbers[k]
        return arrived, lost

    monkeypatch.setattr(channel.Way, "__call__", noted)
    run = federate(pt.scaffold(lr=0.1), CHAINS[name], executor="loop", cohort=None, rounds=4)
    kept = remembered(run)
    assert {k.split(".")[0] for k in meant} == {"delta", "sums"}
    for k, value in meant.items():
        left = sum(kept[f"{i} residual.{k}"] for i in range(CLIENTS))
        torch.testing.assert_close(sent[k] + left, value, rtol=1e-4, atol=1e-4)


def test_feedback_makes_up_for_what_was_not_sent() -> None:
    """On a quadratic with clients of different optima, only feedback comes to the optimum of all."""
    found = {}
    for feedback in (True, False):
        _, run = weak.rounds(
            Linear(), linear_data(), pt.fedavg(lr=0.05), rounds=150, steps=1, batch=None,
            uploads=[T.topk(0.1, feedback=feedback)], executor="vmap",
        )  # fmt: skip
        found[feedback] = run.shared["weight"]
    _, dense = weak.rounds(
        Linear(), linear_data(), pt.fedavg(lr=0.05), rounds=150, steps=1, batch=None, executor="vmap"
    )
    far = {k: float((v - dense.shared["weight"]).norm()) for k, v in found.items()}
    assert far[True] < 0.5 * far[False]


# ---- clients whose upload did not count


AWAY: dict[str, dict[str, Any]] = {
    "stragglers": {"schedule": pt.schedule.synchronous(stragglers=0.5)},
    "dropout": {"schedule": pt.schedule.synchronous(delays=pt.schedule.delays(dropout=0.5))},
    "deadline": {
        "schedule": pt.schedule.synchronous(
            deadline=1.0, delays=pt.schedule.delays(upload=pt.schedule.exponential(1.5))
        )
    },
    "abandoned": {
        "schedule": pt.schedule.synchronous(
            deadline=1.0,
            quorum=5,
            delays=pt.schedule.delays(upload=pt.schedule.exponential(0.5), dropout=0.3),
        )
    },
}  # fmt: skip


def residuals(state: State) -> np.ndarray:
    """Return what each client keeps of what it has not sent."""
    memory = state.store.load(list(range(CLIENTS))).memory
    kept = [v.reshape(CLIENTS, -1) for k, v in memory.items() if k.startswith("residual.")]
    return torch.cat(kept, 1).numpy().copy()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Round, set[int]]]:
    """Each round, and whose residual has changed in it."""
    seen: list[tuple[Round, set[int]]] = []
    play = train.one_round

    def noted(stage: Stage, state: State) -> Round:
        before = residuals(state)
        found = play(stage, state)
        changed = np.flatnonzero((residuals(state) != before).any(1))
        seen.append((found, set(changed.tolist())))
        return found

    monkeypatch.setattr(train, "one_round", noted)
    return seen


@each("executor", ["loop", "vmap"])
@each("kind", AWAY)
def test_who_is_dropped_keeps_what_it_kept(kind: str, executor: str, rounds) -> None:
    """Only those whose upload counts have a new residual; in an abandoned round nobody has."""
    rounds.clear()
    federate(None, [T.topk(0.1)], executor=executor, cohort=6, rounds=8, **AWAY[kind])
    abandoned = [found.abandoned for found, _ in rounds]
    assert any(abandoned) == (kind == "abandoned")
    assert not all(abandoned)
    for found, changed in rounds:
        assert changed == (set() if found.abandoned else set(found.cohort.clients))
    assert any(0 < len(found.cohort.clients) < 6 for found, _ in rounds)  # the others were dropped


class Marked(nn.Module):
    """A model whose output is NaN for a sample that begins with 99."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pt.models.mlp(64, 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        marked = x.flatten(1)[:, :1] == 99
        return self.inner(x) + torch.where(marked, torch.nan, 0.0)


@each("executor", ["loop", "vmap"])
def test_who_is_set_aside_keeps_what_it_kept(executor: str, rounds) -> None:
    """An honest client, whose upload is no number in some rounds, sends what it has kept in the next ones."""
    rounds.clear()
    samples = data()
    x = samples.x.clone()
    start, n = samples.train[2]
    x[start : start + n // 8].view(-1, 64)[:, 0] = 99
    with pytest.warns(UserWarning, match="set aside"):
        federate(
            None, [T.topk(0.1)], executor=executor, model=Marked(), samples=replace(samples, x=x),
            cohort=None, steps=1, batch=4, rounds=8,
        )  # fmt: skip
    refused = [2 not in changed for _, changed in rounds]
    assert any(refused)
    assert not all(refused)
    for (found, changed), away in zip(rounds, refused):
        rejected = {c for c, reason in zip(found.cohort.clients, found.rejections) if reason}
        assert rejected == ({2} if away else set())
        assert changed == set(range(CLIENTS)) - rejected
