"""Models of which a part is frozen, over the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt
from support import each


def trained(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_the_model_itself_stays_as_it_is() -> None:
    model = pt.models.mlp(4, 3, 2)
    names = trained(model)
    frozen = pt.models.freeze(model, "*.bias")
    assert trained(model) == names
    assert trained(frozen) == [name for name in names if not name.endswith("bias")]
    for name, p in model.named_parameters():
        assert frozen.get_parameter(name).data_ptr() == p.data_ptr()
    x = torch.randn(5, 4)
    assert torch.equal(model(x), frozen(x))


def test_what_is_frozen_stays_so() -> None:
    once = pt.models.freeze(pt.models.mlp(4, 3, 2), "*.weight")
    assert trained(pt.models.freeze(once, "hidden*")) == ["output.linear.bias"]


def test_tied_tensors_stay_tied() -> None:
    model = pt.models.freeze(
        pt.models.transformer(7, length=5, width=8, depth=1, heads=2, hidden=8), "head.*"
    )
    assert model.get_submodule("head.project").weight is model.get_submodule("embed.tokens").weight


@each("kind", ["lora", "bottleneck"])
def test_all_but_adapters(kind: str) -> None:
    lm = pt.models.transformer(7, length=5, width=8, depth=1, heads=2, hidden=8)
    model = pt.models.freeze(pt.models.add_adapters(lm, kind, rank=2), but="adapter")
    assert trained(model)
    assert all(".adapter." in name for name in trained(model))
    everything = pt.models.freeze(model, lambda name: "adapter" in name)
    assert not trained(everything)


@each(
    ("names", "words"),
    [
        ("adapter", r"names='adapter': expected a pattern .* it matches none of"),
        ("*lora_C*", r"names='\*lora_C\*'"),
        ([], r"names=\[\]"),
        (3, "names=3"),
        (lambda name: False, "accepts at least one"),  # noqa: ARG005
    ],
)
def test_refusals(names: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pt.models.freeze(pt.models.mlp(4, 3, 2), names)
