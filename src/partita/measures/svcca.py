"""SVCCA: Raghu et al., *Singular Vector Canonical Correlation Analysis* (2017), as in EmbracingFL (2024).

    A_i      [points, features], what a layer of client i puts out for the same samples, columns centred
    Q_i      the left singular vectors of its k largest singular values
    ρ_ij     (1/k) Σ σ(Q_iᵀ Q_j), the mean canonical correlation of the two; 1: they span the same
    svcca    max ρ_ij over all pairs of clients

Lee et al., *Embracing Federated Learning* (2024), section 6.3 and Figures 1 and 3. CCA does not depend on the
basis, so orthonormal ones serve: the singular values of the product of two are the canonical correlations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Measure, Probe, Problem
from partita.core.types import ClientState, Download, Tensors, Upload
from partita.measures.probe import SAMPLES, described, probed, samples_or_count

POINTS = 4096  # of a layer's outputs that are looked at, if samples have positions
TOLERANCE = 1e-5  # a singular value below this part of ‖A‖_F is rounding of 32-bit numbers
ROWS = 128  # clients that are compared with all others at once


def similarity(a: Tensor, b: Tensor, k: int = 4) -> float:
    """Return SVCCA of two activation matrices [samples, features]: the mean canonical correlation, 0 to 1.

    Of outputs with positions, [samples, channels, height, width] or [samples, time, features], every position
    is a sample. Features may differ in number, samples may not. Directions without variance do not count:
    the mean is over min(rank a, rank b, k). Constant outputs are like constant ones only.

    >>> a = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 0.0]])
    >>> round(similarity(a, 2 * a + 1), 6), similarity(a, torch.ones(3, 5))
    (1.0, 0.0)
    """
    check.integer("k", k, low=1)
    p, q = (bases(points(x).flatten(0, 1), k).double() for x in (a, b))
    for field, basis in (("a", p), ("b", q)):
        if not bool(torch.isfinite(basis).all()):
            raise check.fail(field, "NaN or infinity", "finite numbers")
    if len(p) != len(q):
        raise check.fail("points of b", len(q), f"{len(p)}, as many as of a")
    return float(_mean_correlation(p.mT @ q, _rank(p), _rank(q)))


def points(output: Tensor) -> Tensor:
    """Return [samples, positions, features]; features are axis 1 of images, of all else the last axis."""
    if output.dim() < 3:
        return output.reshape(len(output), 1, -1)
    return output.flatten(2).mT if output.dim() > 3 else output


def bases(a: Tensor, k: int = 4) -> Tensor:
    """Return Q [..., samples, k] of a [..., samples, features]: the top singular directions, orthonormal.

    There are min(k, samples, features) columns. One whose singular value is at most TOLERANCE ‖a‖_F is zero.
    All are NaN where a has a number that is not finite.
    """
    x = a.double()
    largest = x.abs().amax((-2, -1), keepdim=True)
    usable = torch.isfinite(largest)
    x = torch.where(usable, x / torch.where(largest > 0, largest, 1.0), 0.0)
    size = torch.linalg.vector_norm(x, dim=(-2, -1))
    x = x - x.mean(-2, keepdim=True)
    s, u = _directions(x, min(k, *x.shape[-2:]))
    kept = (s > TOLERANCE * size.unsqueeze(-1)).unsqueeze(-2)
    q = torch.where(kept, u / torch.where(kept, s.unsqueeze(-2), 1.0), 0.0)
    return torch.where(usable, q, torch.nan).to(torch.promote_types(a.dtype, torch.float32))


def _directions(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest singular values, and the left singular vectors scaled by them.

    By the eigenvectors of the smaller one of XᵀX and XXᵀ, in double precision: for many clients at once far
    faster than a singular value decomposition.
    """
    if x.shape[-2] < x.shape[-1]:
        values, u = torch.linalg.eigh(x @ x.mT)
        s = values.flip(-1)[..., :k].clamp(min=0).sqrt()
        return s, u.flip(-1)[..., :k] * s.unsqueeze(-2)
    v = torch.linalg.eigh(x.mT @ x)[1].flip(-1)[..., :k]
    scaled = x @ v
    return torch.linalg.vector_norm(scaled, dim=-2), scaled


def _rank(q: Tensor) -> Tensor:
    """Count the columns that are not zero, which have length one."""
    return (q.square().sum(-2) > 0.5).sum(-1)


def _mean_correlation(product: Tensor, rank_p: Tensor, rank_q: Tensor) -> Tensor:
    """Return (1/r) Σ σ(PᵀQ), r = min(rank P, rank Q); with r = 0: whether both are constant."""
    correlations = torch.linalg.svdvals(product).clamp(max=1.0).sum(-1)
    r = torch.minimum(rank_p, rank_q)
    both = (rank_p == rank_q).to(correlations.dtype)
    return torch.where(r > 0, correlations / r.clamp(min=1), both)


def similarities(q: Tensor) -> Tensor:
    """Return ρ of all pairs i < j of clients, from their bases [clients, samples, k]."""
    q = q.double()
    clients, _, k = q.shape
    if clients < 2:
        return q.new_zeros(0)
    rank, flat = _rank(q), q.movedim(0, 1).flatten(1)  # [samples, clients · k]
    pairs = []
    for a in range(0, clients, ROWS):
        block = flat[:, a * k : (a + ROWS) * k]
        products = (block.mT @ flat).reshape(-1, k, clients, k).transpose(1, 2)
        i, j = torch.triu_indices(len(products), clients, a + 1, device=q.device)
        pairs.append(_mean_correlation(products[i, j], rank[a + i], rank[j]))
    return torch.cat(pairs)


def _names(field: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise check.fail(field, value, "names of submodules, each once")
    return tuple(names)


@checked("measure ")
def svcca(
    x: Annotated[
        int | Tensor | np.ndarray,
        Option(
            "samples that no client trains on, or how many to take of the clients' test samples",
            low=2,
            allowed=SAMPLES,
            check=samples_or_count,
            example=64,
        ),
    ],
    blocks: Annotated[
        Sequence[str] | None,
        Option(
            "the layers (None: the blocks of an nn.Sequential)",
            allowed="names of submodules such as ['conv1', 'block2.conv1']",
            check=_names,
        ),
    ] = None,
    k: Annotated[int, Option("singular directions of each layer", low=1)] = 4,
    over: Annotated[str, Option("which value of all pairs of clients", choices=("max", "mean"))] = "max",
) -> Measure:
    """How alike the clients' models are, layer by layer: SVCCA of what they put out for the same samples.

    1: the layers of two clients (with over="mean": of all) see the samples alike, up to a linear map. Every
    client is measured with its own model, as in an evaluation, and sends k numbers for each point. Of layers
    with positions (convolutions, sequences) every position is a point; of each sample as many are drawn as
    make at most 4096 points, the same for all clients and rounds.

    Use it to see which layers need to be shared: those that stay alike without it do not.
    """
    probe = Probe(x, blocks if blocks is None else tuple(blocks))

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:
        personalize = algorithm.personalize(problem)

        def start(download: Download, state: ClientState) -> Any:
            return personalize.start(probed(download)[1], state)

        def finish(carry: Any, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
            samples, received = probed(download)
            metrics = _bases(problem, personalize.model(carry, received, state), samples, probe, k)
            return Upload({}, metrics=metrics), ClientState({}, {})

        return LocalRule(start, personalize.phases, finish)

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        pairs = {name: similarities(_finite(q)) for name, q in uploads.metrics.items()}
        overall = torch.max if over == "max" else torch.mean
        return {name: float(overall(rho)) for name, rho in pairs.items() if len(rho)}

    options = {"x": described(x), "blocks": blocks, "k": k, "over": over}
    return Measure("svcca", client, summarize, options, own=True, probe=probe)


def _bases(problem: Problem, params: Tensors, x: Tensor, probe: Probe, k: int) -> Tensors:
    """Return Q of each block for one client; samples pass in parts, so that few outputs are held at once."""
    outputs_of: dict[str, list[Tensor]] = {}
    for first in range(0, len(x), probe.batch):
        outputs = problem.outputs(params, x[first : first + probe.batch], probe.blocks)
        for name, output in outputs.items():
            drawn = _drawn(points(output), first, max(1, POINTS // len(x)))
            outputs_of.setdefault(name, []).append(drawn.flatten(0, 1))
    return {name: bases(torch.cat(parts), k) for name, parts in outputs_of.items()}


def _drawn(output: Tensor, first: int, count: int) -> Tensor:
    """Return `count` positions of each sample [samples, positions, features], by its number alone."""
    samples, positions, features = output.shape
    if positions <= count:
        return output
    numbers = torch.arange(first, first + samples, device=output.device).unsqueeze(1)
    key = draws.key(0, "positions", numbers, device=output.device)
    order = draws.fold(key, torch.arange(positions, device=output.device)).argsort(1)[:, :count]
    return output.gather(1, order.unsqueeze(2).expand(-1, -1, features))


def _finite(q: Tensor) -> Tensor:
    """Return Q without the clients whose outputs were not finite."""
    return q[torch.isfinite(q).flatten(1).all(1)]
