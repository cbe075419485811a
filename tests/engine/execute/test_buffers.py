"""Memory for the results of training is used again, but never while somebody still reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import partita as pt
from partita.engine.execute.loop import Buffers
from support import tensors

CLIENTS, COHORT = 12, 6
DATA = pt.data.digits(clients=CLIENTS, partition=pt.data.label_skew(classes=3), seed=1)


def keeping(lr: float) -> pt.Algorithm:
    """A server that keeps what its last cohort has sent, and steps along the mean of both cohorts."""

    def aggregate(problem: pt.Problem) -> Callable[[pt.Upload, Tensor], pt.Upload]:  # noqa: ARG001
        return lambda uploads, key: pt.Upload(uploads.delta, uploads.weight)  # noqa: ARG005

    def server(problem: pt.Problem) -> pt.ServerRule:  # noqa: ARG001
        def init(shared: pt.Tensors) -> pt.ServerState:
            last = {f"last.{k}": torch.zeros(COHORT, *v.shape) for k, v in shared.items()}
            return pt.ServerState(shared, last, {}, 0)

        def step(s: pt.ServerState, upload: pt.Upload) -> pt.ServerState:
            both = {k: (v.mean(0) + s.opt[f"last.{k}"].mean(0)) / 2 for k, v in upload.delta.items()}
            last = {f"last.{k}": v for k, v in upload.delta.items()}
            return pt.ServerState(pt.tree.sub(s.shared, both), last, s.extra, s.version + 1)

        return pt.ServerRule(init, step)

    return replace(pt.fedavg(lr=lr), name="keeping", aggregate=aggregate, server=server)


def test_what_the_server_keeps_is_not_written_over() -> None:
    runs = [
        pt.federate(
            pt.models.mlp(64, 8, 10), DATA, keeping(0.1), rounds=4, cohort=COHORT, steps=2, batch=8,
            executor=executor, device="cpu", baselines=False, evaluate_every=4,
        )
        for executor in ("loop", "vmap")
    ]  # fmt: skip
    for name, value in tensors(runs[0]).items():
        torch.testing.assert_close(tensors(runs[1])[name], value, atol=1e-6, rtol=1e-5)


def test_released_memory_is_lent_again_unless_it_is_kept() -> None:
    buffers, row = Buffers(), torch.zeros(3)
    first, second = buffers.take(2, row), buffers.take(2, row)
    assert first.data_ptr() != second.data_ptr()
    buffers.release({"view of it": first[1]})
    third, fourth = buffers.take(2, row), buffers.take(2, row)
    assert third.data_ptr() == second.data_ptr()
    assert fourth.data_ptr() != first.data_ptr()
