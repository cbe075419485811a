"""Synthetic problems of the literature, in which each client draws its samples from a model of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.data.build import assemble, numbered
from partita.data.federated import FederatedData
from partita.data.validation import SHARE

Numbers = NDArray[np.float64]


def synthetic(
    zeta: float,
    beta: float,
    clients: int = 30,
    *,
    features: int = 60,
    classes: int = 10,
    test: float = 0.2,
    validation: float = SHARE,
    seed: int = 0,
) -> FederatedData:
    """Draw labels y = argmax(Wx + b) with W and b of each client, and sizes that follow a power law.

    Client k draws u ~ N(0, ζ) and all entries of W and b from N(u, 1); it draws B ~ N(0, β), its mean v with
    entries from N(B, 1), and x ~ N(v, Σ) with Σ_jj = j^(−1.2). Its size is ⌊z⌋ + 50 with ln z ~ N(4, 2). As
    in the authors' program, the second number is the deviation, not the variance, except in Σ. The shift u
    is the same for every class, so that ζ changes W and b but not which class is largest. The first clients
    stay the same when `clients` grows.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020), Federated optimization in heterogeneous networks.
    """
    zeta, beta = check.number("zeta", zeta, low=0), check.number("beta", beta, low=0)
    check.integer("clients", clients, low=1)
    check.integer("features", features, low=1)
    check.integer("classes", classes, low=2)
    check.integer("seed", seed, low=0)
    deviation = np.arange(1, features + 1) ** -0.6

    def draw(client: int) -> tuple[Numbers, NDArray[Any]]:
        rng = draws.generator(seed, "synthetic", client)
        u, centre = rng.normal(0, zeta), rng.normal(0, beta)
        weight, bias = rng.normal(u, 1, (features, classes)), rng.normal(u, 1, classes)
        mean = rng.normal(centre, 1, features)
        rows = int(rng.lognormal(4, 2)) + 50
        x = rng.normal(mean, deviation, (rows, features))
        return x, (x @ weight + bias).argmax(1)

    source = {"name": "synthetic", "zeta": zeta, "beta": beta, "clients": clients}
    source |= {"features": features, "classes": classes}
    return _gather([draw(i) for i in range(clients)], test, validation, seed, source)


def synthetic_regression(
    clients: int = 10,
    *,
    features: int = 1000,
    samples: int = 100,
    test: float = 0.5,
    validation: float = SHARE,
    seed: int = 0,
) -> FederatedData:
    """Draw targets y = w·x + v, v ~ N(0, 2), with weights w of each client; the last one is an outlier.

    The weights are w̄ plus Laplacian noise of scale 0.5, with one w̄ ~ N(0, 5 I) for all clients and another,
    w̄ ~ N(0, 50 I), for the last one. Client k draws one number μ ~ N(0, 0.5), the mean of all its features,
    and x ~ N(μ, Σ) with Σ_jj = (j mod 50)^(−1.1), where multiples of 50 count as 50: as printed, they would
    divide by zero. Second numbers are variances.

    Kundu, Yu, Wynter, Lim (2022), Robustness and personalization in federated learning: a unified approach
    via regularization. arXiv:2009.06303
    """
    check.integer("clients", clients, low=1)
    check.integer("features", features, low=1)
    check.integer("samples", samples, low=1)
    check.integer("seed", seed, low=0)
    deviation = (np.arange(features) % 50 + 1.0) ** -0.55
    common = draws.generator(seed, "regression-common").normal(0, 5**0.5, features)
    outlying = draws.generator(seed, "regression-outlier").normal(0, 50**0.5, features)

    def draw(client: int) -> tuple[Numbers, Numbers]:
        rng = draws.generator(seed, "regression", client)
        weight = (outlying if client == clients - 1 else common) + rng.laplace(0, 0.5, features)
        mean = rng.normal(0, 0.5**0.5)
        x = rng.normal(mean, deviation, (samples, features))
        # [n, 1] as the output of a linear layer: [n] would broadcast in a loss
        return x, (x @ weight + rng.normal(0, 2**0.5, samples)).reshape(-1, 1)

    source = {"name": "synthetic_regression", "clients": clients, "features": features, "samples": samples}
    return _gather([draw(i) for i in range(clients)], test, validation, seed, source)


def _gather(
    parts: list[tuple[Numbers, NDArray[Any]]],
    test: float,
    validation: float,
    seed: int,
    source: dict[str, Any],
) -> FederatedData:
    """Return the samples of all clients in single precision; labels stay whole numbers."""
    x, y = (np.concatenate(side) for side in zip(*parts, strict=True))
    owner = np.repeat(np.arange(len(parts)), [len(p[0]) for p in parts])
    y = y.astype(np.float32) if y.dtype.kind == "f" else y
    names, given = numbered(len(parts)), {"test": test, "validation": validation}
    return assemble(x.astype(np.float32), y, owner, names, **given, seed=seed, source=source)
