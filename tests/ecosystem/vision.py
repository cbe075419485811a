"""Models of torchvision and timm, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samples import CLASSES, Foreign, images


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        torch.manual_seed(0)
        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return build


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return build


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(32, 8, 2, 4, 16, 32, 0.1, 0.1, CLASSES)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    torch.manual_seed(0)
    return DenseNet(8, (2, 3, 2), 16, drop_rate=0.1, num_classes=CLASSES)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    return SwinTransformer([2, 2], 12, [2, 2], [2, 2], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.3)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    torch.manual_seed(0)
    blocks = [CNBlockConfig(12, 24, 2), CNBlockConfig(24, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.3, layer_scale=0.1, num_classes=CLASSES)


def _lraspp() -> nn.Module:
    from torchvision.models import segmentation

    torch.manual_seed(0)
    return segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, width_mult=0.25
    )


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    torch.manual_seed(0)
    return MlpMixer(
        CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, drop_rate=0.1, drop_path_rate=0.2
    )


VISION: dict[str, Foreign] = {
    # torchvision
    "resnet18": Foreign("torchvision", _torchvision("resnet18"), images(32), double=True),
    "mobilenet_v3_small": Foreign("torchvision", _torchvision("mobilenet_v3_small"), images(32), double=True),
    "efficientnet_b0": Foreign("torchvision", _torchvision("efficientnet_b0"), images(32), double=True),
    "densenet": Foreign("torchvision", _densenet, images(32), double=True),
    "squeezenet1_1": Foreign("torchvision", _torchvision("squeezenet1_1"), images(32)),
    "shufflenet_v2_x0_5": Foreign("torchvision", _torchvision("shufflenet_v2_x0_5"), images(32), double=True),
    "convnext": Foreign("torchvision", _convnext, images(32)),
    "regnet_x_400mf": Foreign("torchvision", _torchvision("regnet_x_400mf"), images(64), double=True),
    "googlenet": Foreign(
        "torchvision", _torchvision("googlenet", init_weights=False), images(32), double=True
    ),
    "vit": Foreign("torchvision", _vit, images(32)),
    "swin": Foreign("torchvision", _swin, images(32)),
    "lraspp": Foreign(
        "torchvision", _lraspp, images(32, dense=True), {"loss": nn.CrossEntropyLoss()}, double=True
    ),
    # timm
    "timm resnet18": Foreign("timm", _timm("resnet18"), images(32), double=True),
    "timm vit_tiny": Foreign(
        "timm",
        _timm(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            drop_path_rate=0.2,
        ),
        images(32),
    ),
    "timm convnext_atto": Foreign("timm", _timm("convnext_atto", drop_path_rate=0.2), images(32)),
    "timm mixer": Foreign("timm", _mixer, images(32)),
    "timm efficientnet_lite0": Foreign(
        "timm", _timm("efficientnet_lite0", drop_path_rate=0.2), images(64), double=True
    ),
    "timm swin_tiny": Foreign(
        "timm",
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=28,
            embed_dim=12,
            depths=(1, 1),
            num_heads=(2, 2),
            window_size=7,
        ),
        images(28),
    ),
    "timm deit3": Foreign(
        "timm",
        _timm("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        images(32),
    ),
}
