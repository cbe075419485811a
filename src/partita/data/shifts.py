"""Feature shifts: clients see the same kind of samples differently. Use them as `data.shift(rotation())`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import check, draws
from partita.data import arrays, columns
from partita.data.federated import SPLITS, FederatedData

Amounts = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Shift:
    """What happens to the rows of a client, whatever their split.

    amounts  (clients, generator)       -> how strongly each client is shifted
    apply    (x, y, amount, generator)  -> x of one client after the shift
    decode   whether uint8 images become float32 first, because the result is no image any more
    """

    name: str
    amounts: Callable[[int, np.random.Generator], Amounts]
    apply: Callable[[Tensor, Tensor, float, np.random.Generator], Tensor]
    options: Mapping[str, Any]
    decode: bool = False

    def __call__(self, data: FederatedData, seed: int = 0) -> FederatedData:
        check.integer("seed", seed, low=0)
        given = columns.in_memory(data.x, f"the shift {self.name}")
        if given.dtype in (torch.int32, torch.int64):
            raise check.fail(f"x of {self.name}", str(given.dtype), "images or real numbers, not ids")
        refuse_overlap(self.name, data)
        purpose = f"shift-{self.name}"
        x = (arrays.decode(given) if self.decode else given).clone()
        amounts = self.amounts(data.clients, draws.generator(seed, purpose))
        for i, amount in enumerate(amounts.tolist()):
            rows = rows_of(data, i)
            if len(rows):
                rng = draws.generator(seed, purpose, i)
                x.index_copy_(0, rows, self.apply(x.index_select(0, rows), data.y[rows], amount, rng))
        shifts = [*data.source.get("shift", []), {"name": self.name, **self.options, "seed": seed}]
        return replace(data, x=x, source={**data.source, "shift": shifts})

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def rotation(degrees: Sequence[float] = (0, 90, 180, 270)) -> Shift:
    """Turn images counterclockwise: those of client i by degrees[i mod k]."""
    if not isinstance(degrees, Sequence) or not degrees:
        raise check.fail("degrees", degrees, "a list of angles")
    angles = [check.number("degrees", d) for d in degrees]

    def amounts(clients: int, rng: np.random.Generator) -> Amounts:  # noqa: ARG001
        return np.resize(np.array(angles), clients)

    def apply(x: Tensor, y: Tensor, amount: float, rng: np.random.Generator) -> Tensor:  # noqa: ARG001
        if x.ndim < 3:
            raise check.fail("shape of x", list(x.shape), "images [rows, ..., height, width] for rotation")
        quarters, rest = divmod(amount, 90.0)
        if rest:
            from scipy import ndimage

            turned = ndimage.rotate(x.cpu().numpy(), amount, axes=(-2, -1), reshape=False, order=1)
            return torch.from_numpy(turned).to(x.device)
        if quarters % 2 and x.shape[-1] != x.shape[-2]:
            raise check.fail(
                "shape of x", list(x.shape), f"square images for a rotation by {amount:g} degrees"
            )
        return torch.rot90(x, int(quarters), dims=(-2, -1))

    return Shift("rotation", amounts, apply, {"degrees": angles})


def negative(fraction: float, centre: float = 0.5) -> Shift:
    """Replace x by 2·centre − x for a random fraction of the clients: bright and dark are exchanged.

    `centre` is 0.5 for images in [0, 1]; with 0, for standardised images, the negative is −x.
    """
    fraction = check.number("fraction", fraction, low=0, high=1)
    centre = check.number("centre", centre)

    def amounts(clients: int, rng: np.random.Generator) -> Amounts:
        return (rng.permutation(clients) < round(fraction * clients)).astype(np.float64)

    def apply(x: Tensor, y: Tensor, amount: float, rng: np.random.Generator) -> Tensor:  # noqa: ARG001
        if amount == 0:
            return x
        if x.dtype == torch.uint8:
            return 255 - x
        if centre == 0.5 and (x.min() < 0 or x.max() > 1):
            raise check.fail(
                "range of x",
                (float(x.min()), float(x.max())),
                "images in [0, 1] for a negative, or another centre",
            )
        return 2 * centre - x

    return Shift("negative", amounts, apply, {"fraction": fraction, "centre": centre}, decode=centre != 0.5)


def standard(mean: float, deviation: float) -> Shift:
    """Standardize x to (x − mean) / deviation for all clients; images are float32 in [0, 1] before."""
    mean = check.number("mean", mean)
    deviation = check.number("deviation", deviation, low=0, open_low=True)

    def amounts(clients: int, rng: np.random.Generator) -> Amounts:  # noqa: ARG001
        return np.ones(clients)

    def apply(x: Tensor, y: Tensor, amount: float, rng: np.random.Generator) -> Tensor:  # noqa: ARG001
        return (x - mean) / deviation

    return Shift("standard", amounts, apply, {"mean": mean, "deviation": deviation}, decode=True)


def noise(
    scale: float, kind: str = "gaussian", *, growing: bool = False, classes: int | None = None
) -> Shift:
    """Add ε, drawn once per sample: normal with deviation `scale`, or Laplacian with that scale.

    `growing`: client i of n has scale·(i + 1)/n. `classes`: only the samples of that many random labels of
    each client. Images are shifted in units of [0, 1] and become float32, since nothing is clipped.
    """
    scale = check.number("scale", scale, low=0)
    check.choice("kind", kind, ("gaussian", "laplace"))
    if classes is not None:
        check.integer("classes", classes, low=1)

    def amounts(clients: int, rng: np.random.Generator) -> Amounts:  # noqa: ARG001
        return scale * (np.arange(1, clients + 1) / clients if growing else np.ones(clients))

    def apply(x: Tensor, y: Tensor, amount: float, rng: np.random.Generator) -> Tensor:
        draw = rng.normal if kind == "gaussian" else rng.laplace
        epsilon = torch.from_numpy(np.asarray(draw(0.0, amount, tuple(x.shape)))).to(x)
        if classes is None:
            return x + epsilon
        if y.ndim > 1 or y.is_floating_point():
            raise check.fail("classes", classes, "None, since y is not one label per sample")
        present = torch.unique(y).cpu().numpy()
        noisy = torch.from_numpy(rng.permutation(present)[:classes]).to(y)
        return torch.where(torch.isin(y, noisy).reshape(-1, *[1] * (x.ndim - 1)), x + epsilon, x)

    options = {"scale": scale, "kind": kind, "growing": growing, "classes": classes}
    return Shift("noise", amounts, apply, options, decode=True)


def rows_of(data: FederatedData, client: int) -> Tensor:
    """Return the rows of all splits of a client, those for testing last.

    They come after as many others whatever is held out for validation, so that their draws are the same.
    """
    ranges = [data.ranges(split)[client].tolist() for split in SPLITS]
    return torch.cat([torch.arange(start, start + n) for start, n in ranges]).to(data.device)


def refuse_overlap(name: str, data: FederatedData) -> None:
    """Refuse data in which a row would have to change in two ways."""
    ranges = np.concatenate([data.ranges(split) for split in SPLITS])
    ranges = ranges[ranges[:, 1] > 0]
    ranges = ranges[np.argsort(ranges[:, 0])]
    if (ranges[:-1].sum(1) > ranges[1:, 0]).any():
        reason = f"some rows belong to several clients or splits, and {name} changes each client's rows"
        raise check.fail("shift", name, "data in which no row is shared", reason)
