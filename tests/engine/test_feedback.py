"""Error feedback: what was sent and what clients keep is what was meant, as in a plain loop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import partita as pt
from capacity import weak
from engine.passing import (
    CHAINS,
    CLIENTS,
    Linear,
    T,
    federate,
    gradient,
    linear_data,
    remembered,
)
from partita.core.types import Message, Tensors
from partita.engine import channel
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
