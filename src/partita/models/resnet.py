"""Residual networks (He et al. 2016) with batch or group normalization.

Every residual block is one block of the model: stem, block1, block2, ..., output. ReLUs are not in place, so
that gradients can be taken for many clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from partita.core import check
from partita.models.blocks import Blocks, Image, layers, scalable, seeded


def resnet20(
    classes: int = 10, *, norm: str = "batch", width: float = 1.0, channels: int = 3, seed: int = 0
) -> Blocks:
    """ResNet-20 for 32×32 images, as EmbracingFL counts it (Lee et al. 2024, Tables 1 and 10).

    A 3×3 stem with 16 channels, three stages of three residual blocks with 16, 32, 64 channels, mean over
    space, one dense layer. No biases in convolutions; the first block of *all three* stages has a 1×1
    projection with norm (He et al. have none in the first). 272,762 parameters; 257,994 are left without the
    stem and 3 blocks, 206,346 without the stem and 6.

    norm:  "batch" (the paper) or "group" (no statistics to share, see `resnet18` for the groups)
    width: keep the first ⌊width · C⌋ of each layer's C channels; 0.45 and 0.2 leave 52,874 and 10,006
    """
    model = _resnet((16, 32, 64), 3, True, classes, norm, width, channels, seed)
    return scalable(model, width, partial(resnet20, classes, norm=norm, channels=channels, seed=seed))


def resnet18(
    classes: int = 62, *, norm: str = "group", width: float = 1.0, channels: int = 1, seed: int = 0
) -> Blocks:
    """ResNet-18 for 28×28 characters (Pillutla et al. 2022, Appendix B.1.3 and Table 7).

    A 3×3 stem with 64 channels and no pooling after it, four stages of two residual blocks with 64, 128, 256,
    512 channels, mean over space, one dense layer: 11,199,486 parameters. Input part: the stem (704), output
    part: the dense layer (31,806).

    Group normalization has 8, 8, 16, 32 groups in the four stages, as in the authors' code: 8 channels to a
    group up to 64 channels, 16 beyond.
    """
    model = _resnet((64, 128, 256, 512), 2, False, classes, norm, width, channels, seed)
    return scalable(model, width, partial(resnet18, classes, norm=norm, channels=channels, seed=seed))


def _resnet(
    stages: Sequence[int],
    depth: int,
    project_first: bool,
    classes: int,
    norm: str,
    width: float,
    channels: int,
    seed: int,
) -> Blocks:
    """Build stages of `depth` residual blocks; each stage but the first halves height and width."""
    check.integer("classes", classes, low=1)
    check.choice("norm", norm, ("batch", "group"))
    check.number("width", width, low=0.0, open_low=True)
    check.integer("channels", channels, low=1)
    sizes = [max(1, math.floor(width * stage)) for stage in stages]
    with seeded(seed):
        stem = layers(
            image=Image(channels),
            conv=_conv(channels, sizes[0]),
            norm=_norm(norm, sizes[0]),
            relu=nn.ReLU(),
        )
        blocks: dict[str, nn.Module] = {"stem": stem}
        before = sizes[0]
        for stage, size in enumerate(sizes):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                project = i == 0 and (stage > 0 or project_first)
                blocks[f"block{len(blocks)}"] = Residual(before, size, stride, norm, project)
                before = size
        blocks["output"] = layers(pool=SpatialMean(), linear=nn.Linear(before, classes))
        return Blocks(blocks)


class Residual(nn.Module):
    """relu(F(x) + s(x)): F is conv 3×3, norm, relu, conv 3×3, norm; s the identity, or conv 1×1 and norm."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, project: bool) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = _conv(outputs, outputs)
        self.norm2 = _norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = layers(conv=_conv(inputs, outputs, 1, stride), norm=_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SpatialMean(nn.Module):
    """[B, C, H, W] → [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    wanted = max(1, channels // (8 if channels <= 64 else 16))
    # a narrow network may have channels that this number does not divide
    return nn.GroupNorm(max(g for g in range(1, wanted + 1) if channels % g == 0), channels)
