"""The models have the parameters that the papers count."""

import torch
from torch import nn

from partita import models
from support import each


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def part(model: models.Blocks, names: tuple[str, ...]) -> int:
    return sum(count(model.get_submodule(name)) for name in names)


@each(
    ("model", "total"),
    [
        (models.logistic(784, 10), 7_850),
        (models.mlp(64, 64, 10), 4_810),
        (models.leaf_cnn(), 6_603_710),
        (models.mnist_cnn(), 582_026),
        (models.cifar_cnn(), 651_978),
        (models.resnet20(), 272_762),
        (models.resnet20(norm="group"), 272_762),
        (models.resnet18(), 11_199_486),
        (models.transformer(), 5_731_604),
        (models.bilstm(), 3_611_137),
    ],
)
def test_total(model, total):
    assert count(model) == total


def test_embracing_cuts():
    """EmbracingFL, Table 1: what is left when the first blocks are cut off."""
    assert [count(models.resnet20()[cut:]) for cut in (0, 4, 7)] == [272_762, 257_994, 206_346]
    assert [count(models.leaf_cnn()[cut:]) for cut in (0, 2, 3)] == [6_603_710, 6_551_614, 127_038]
    assert [count(models.bilstm()[cut:]) for cut in (0, 1)] == [3_611_137, 1_051_137]


@each(("width", "left"), [(1.0, 272_762), (0.45, 52_874), (0.2, 10_006)])
def test_embracing_widths(width, left):
    """EmbracingFL, Table 10: 55 % and 80 % of the channels dropped."""
    assert count(models.resnet20(width=width)) == left


def test_partial_personalization_parts():
    """Pillutla et al., Tables 5 and 7: 0.7K, 0.03M of 11.2M; 0.8M of 5.7M with 4.9M shared."""
    resnet = models.resnet18()
    assert (part(resnet, resnet.input_part), part(resnet, resnet.output_part)) == (704, 31_806)
    lm = models.transformer()
    assert (lm.input_part, lm.output_part) == (("block0",), ("block3",))
    assert part(lm, lm.input_part) == part(lm, lm.output_part) == 788_736
    assert round((count(lm) - 788_736) / 1e6, 1) == 4.9


@each(
    ("model", "kind", "added"),
    [
        (models.resnet18(), "residual", 1_392_640),  # the paper's 1.4M
        (models.transformer(), "bottleneck", 67_712),  # the paper's 0.07M
        (models.mlp(64, 32, 10), "lora", 16 * (64 + 32)),
    ],
)
def test_adapters(model, kind, added):
    assert count(models.add_adapters(model, kind)) - count(model) == added


@each("width", [1.0, 0.45, 0.2, 0.01])
def test_group_norm_divides_every_width(width):
    model = models.resnet20(norm="group", width=width)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_group_norm_groups():
    norms = [m for m in models.resnet18().modules() if isinstance(m, nn.GroupNorm)]
    assert {(m.num_channels, m.num_groups) for m in norms} == {(64, 8), (128, 8), (256, 16), (512, 32)}
