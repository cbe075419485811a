"""MNIST dealt to parties some of which see negatives, and each of which may see noise on some digits."""

from __future__ import annotations

from os import PathLike

from partita.core import check
from partita.data import shifts
from partita.data.federated import FederatedData
from partita.data.partitioners import iid
from partita.data.real import real
from partita.data.validation import SHARE

MEAN, DEVIATION = 0.1307, 0.3081  # of all pixels of the training digits in [0, 1]


def mnist_shifted(
    clients: int = 10,
    *,
    negatives: float = 0.1,
    noise: float = 0.0,
    classes: int = 2,
    standard: bool = True,
    test: float = 0.5,
    validation: float = SHARE,
    folder: str | PathLike[str] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Deal all 70,000 digits equally to clients, as negatives to a share of them, and with noise.

    `noise` is the scale of Laplacian noise, in units of pixels in [0, 1], on the digits of `classes` classes,
    drawn for each client (0: no noise). `standard`: pixels have mean 0 and deviation 1, and the negative is
    −x; otherwise they are in [0, 1], and the negative is 1 − x. The folder is that of `real`.

    >>> mnist_shifted(10)  # MNIST-robust-N10
    >>> mnist_shifted(50, negatives=0.2, noise=1.0)  # MNIST-personal-N50

    Kundu, Yu, Wynter, Lim (2022), Robustness and personalization in federated learning: a unified approach
    via regularization. arXiv:2009.06303
    """
    check.number("noise", noise, low=0)
    check.integer("classes", classes, low=1, high=10)
    if not isinstance(standard, bool):
        raise check.fail("standard", standard, "True or False")
    negative = shifts.negative(check.number("negatives", negatives, low=0, high=1), 0.0 if standard else 0.5)
    split = {"test": test, "validation": validation, "seed": seed}
    data = real("mnist", folder=folder, clients=clients, partition=iid(), **split)
    if standard:
        data = data.shift(shifts.standard(MEAN, DEVIATION), seed)
    data = data.shift(negative, seed)
    scale = noise / (DEVIATION if standard else 1)
    return data.shift(shifts.noise(scale, "laplace", classes=classes), seed) if noise else data
