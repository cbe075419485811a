"""Small convolutional networks for [B, C, H, W]; where there is one channel its axis may be missing."""

from __future__ import annotations

from functools import partial

from torch import nn

from partita.core import check
from partita.models.blocks import Blocks, Image, layers, scalable, seeded


def leaf_cnn(classes: int = 62, *, width: float = 1.0, seed: int = 0) -> Blocks:
    """The FEMNIST network of LEAF (Caldas et al. 2018), as in EmbracingFL (Lee et al. 2024, section 6.2).

    28×28×1 → conv 5×5, 32 → pool 2 → conv 5×5, 64 → pool 2 → dense 2048 → dense 62. Convolutions keep the
    size (padding 2). Blocks `conv1`, `conv2`, `dense1`, `output`: 6,603,710 parameters, of which 6,551,614
    are left without the convolutions and 127,038 in the last layer (Table 1). `width` scales all widths.
    """
    check.integer("classes", classes, low=1)
    a, b, c = _widths(width, 32, 64, 2048)
    with seeded(seed):
        model = Blocks(
            {
                "conv1": _conv(nn.Conv2d(1, a, 5, padding=2), size=28),
                "conv2": _conv(nn.Conv2d(a, b, 5, padding=2)),
                "dense1": layers(flatten=nn.Flatten(), linear=nn.Linear(b * 7 * 7, c), relu=nn.ReLU()),
                "output": layers(linear=nn.Linear(c, classes)),
            }
        )
    return scalable(model, width, partial(leaf_cnn, classes, seed=seed))


def mnist_cnn(classes: int = 10, *, width: float = 1.0, dropout: float = 0.25, seed: int = 0) -> Blocks:
    """The MNIST network of PersA-FL (Toghani et al. 2023, Appendix D): 2 convolutions, 2 dense layers.

    28×28×1 → conv 5×5, 32 → pool 2 → conv 5×5, 64 → pool 2 → dense 512 → dropout → dense 10: 582,026
    parameters in `conv1`, `conv2`, `dense1`, `output`. The paper gives the number of layers, pooling and
    dropout; widths and the dropout rate are ours. `width` scales all widths.
    """
    check.integer("classes", classes, low=1)
    check.number("dropout", dropout, low=0.0, high=1.0)
    a, b, c = _widths(width, 32, 64, 512)
    with seeded(seed):
        model = Blocks(
            {
                "conv1": _conv(nn.Conv2d(1, a, 5), size=28),
                "conv2": _conv(nn.Conv2d(a, b, 5)),
                "dense1": layers(flatten=nn.Flatten(), linear=nn.Linear(b * 4 * 4, c), relu=nn.ReLU()),
                "output": layers(dropout=nn.Dropout(dropout), linear=nn.Linear(c, classes)),
            }
        )
    return scalable(model, width, partial(mnist_cnn, classes, dropout=dropout, seed=seed))


def cifar_cnn(classes: int = 10, *, width: float = 1.0, dropout: float = 0.25, seed: int = 0) -> Blocks:
    """The CIFAR-10 network of PersA-FL (Toghani et al. 2023, Appendix D): 3 convolutions, 3 dense layers.

    32×32×3 → three times (conv 3×3 → pool 2) with 32, 64, 128 channels → dense 256 → dropout → dense 128 →
    dropout → dense 10: 651,978 parameters in `conv1`..`conv3`, `dense1`, `dense2`, `output`. The paper gives
    the number of layers, pooling and dropout; widths and the dropout rate are ours. `width` scales all
    widths.
    """
    check.integer("classes", classes, low=1)
    check.number("dropout", dropout, low=0.0, high=1.0)
    a, b, c, d, e = _widths(width, 32, 64, 128, 256, 128)
    with seeded(seed):
        model = Blocks(
            {
                "conv1": _conv(nn.Conv2d(3, a, 3, padding=1), size=32),
                "conv2": _conv(nn.Conv2d(a, b, 3, padding=1)),
                "conv3": _conv(nn.Conv2d(b, c, 3, padding=1)),
                "dense1": layers(flatten=nn.Flatten(), linear=nn.Linear(c * 4 * 4, d), relu=nn.ReLU()),
                "dense2": layers(dropout=nn.Dropout(dropout), linear=nn.Linear(d, e), relu=nn.ReLU()),
                "output": layers(dropout=nn.Dropout(dropout), linear=nn.Linear(e, classes)),
            }
        )
    return scalable(model, width, partial(cifar_cnn, classes, dropout=dropout, seed=seed))


def _widths(width: float, *full: int) -> list[int]:
    check.number("width", width, low=0, open_low=True)
    return [max(1, round(width * n)) for n in full]


def _conv(conv: nn.Conv2d, size: int | None = None) -> nn.Sequential:
    """Return convolution, ReLU and 2×2 pooling; the first block is told the image size to expect."""
    image = {} if size is None else {"image": Image(conv.in_channels, size)}
    return layers(**image, conv=conv, relu=nn.ReLU(), pool=nn.MaxPool2d(2))
