"""FedJAX: a client's steps are compiled by JAX; models are written in Haiku, with the shapes of ours."""

from __future__ import annotations

import time
from typing import Any

from adapters.job import Declined, Job, samples
from partita.cli.bench.workloads import LR

CNNS = {"mnist_cnn": ("VALID", 512), "leaf_cnn": ("SAME", 2048)}  # padding, width of the dense layer


def rounds(job: Job) -> list[float]:
    """Return the time at the end of each round."""
    if job.workload not in ("logistic", *CNNS):
        raise Declined(f"no {job.workload} is written in Haiku here")
    import fedjax
    import jax

    if jax.default_backend() != ("cpu" if job.device == "cpu" else "gpu"):
        raise Declined(f"its JAX computes on {jax.default_backend()}, not on {job.device}")
    model, times = _model(job), list[float]()
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=job.work.batch, num_epochs=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(_clients(job), job.work.cohort, seed=0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    for _ in range(job.rounds + 1):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter())
    return times


def _clients(job: Job) -> Any:
    import fedjax

    data = job.work.data()
    clients = {}
    for i in range(job.work.clients):
        x, y = samples(data, i)
        clients[str(i).encode()] = {"x": x.numpy(), "y": y.numpy()}
    return fedjax.InMemoryFederatedData(clients)


def _model(job: Job) -> Any:
    import fedjax
    import haiku as hk
    import numpy as np

    def forward(batch: Any) -> Any:
        return hk.Sequential([*_layers(job.workload), hk.Linear(job.work.classes)])(batch["x"])

    sample = {"x": np.zeros((1, *job.work.shape), np.float32), "y": np.zeros(1, np.int64)}
    return fedjax.create_model_from_haiku(
        hk.transform(forward),
        sample,
        lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores),
    )


def _layers(workload: str) -> list[Any]:
    """Return all layers but the last."""
    import haiku as hk
    import jax

    if workload not in CNNS:
        return [hk.Flatten()]
    padding, width = CNNS[workload]
    layers: list[Any] = [lambda x: x[..., None]]  # one channel, the last axis
    for channels in (32, 64):
        layers += [
            hk.Conv2D(channels, 5, padding=padding),
            jax.nn.relu,
            hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID"),
        ]
    return [*layers, hk.Flatten(), hk.Linear(width), jax.nn.relu]
