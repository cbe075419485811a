"""Adapters: small modules inside a model that start as the identity, for a client to train and keep.

The model keeps its parameters under their old names, so weights trained without adapters fit; each adapter is
a child named `adapter` of the layer it follows, and only adapters have that word in their names
("block0.attention.adapter.down.weight"). Personalize them with `personal="adapter"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.frozen import lean_copy
from partita.models.blocks import seeded
from partita.models.transformer import Attention, FeedForward

Model = TypeVar("Model", bound=nn.Module)


def add_adapters(
    model: Model,
    kind: str,
    *,
    rank: int = 16,
    alpha: float | None = None,
    where: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Model:
    """Return a copy of any model with adapters; until they are trained it computes what the model computes.

    Frozen parameters are not copied, and adapters of a model in 16 bits have 32.

    kind="residual"    y + A∗y after a convolution: A is a 1×1 convolution without bias that starts at zero
                       (Rebuffi et al. 2017). Where: every convolution with a kernel above 1 except the
                       model's first. `resnet18` gets 1,392,640 parameters. Takes no rank.
    kind="bottleneck"  h + U gelu(D h + d) + u after a sub-layer, before its residual addition: D maps to
                       `rank` numbers, U and u start at zero (Houlsby et al. 2019). Where: attention and
                       feed-forward of each `transformer` block and of each nn.TransformerEncoderLayer or
                       DecoderLayer; in a model with none of these, the nn.Linear layers that `where` names.
                       `transformer` gets 67,712 parameters.
    kind="lora"        W x + (alpha/rank) B A x on nn.Linear: A maps to `rank` numbers, B starts at zero,
                       alpha is `rank` unless given (Hu et al. 2021). Where: every nn.Linear except the last,
                       and never inside nn.MultiheadAttention, which does not call its own. The tensors are
                       named as in peft: "*lora_A*" and "*lora_B*".

    where: pattern(s) of layer names, "block0.*" or ["*.query", "*.value"], in place of the default choice.
    To train nothing but adapters: `freeze(model, but="adapter")`.
    """
    check.choice("kind", kind, _KINDS)
    check.integer("rank", rank, low=1)
    if alpha is not None:
        check.number("alpha", alpha, low=0.0, open_low=True)
        if kind != "lora":
            raise check.fail("alpha", alpha, f"None for kind={kind!r}: only 'lora' is scaled")
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    if any("adapter" in name.split(".") for name in names):
        raise check.fail("model", type(model).__name__, "a model without anything named 'adapter'")
    model = lean_copy(model)
    with seeded(seed):
        for site in _select(_KINDS[kind](model), where, kind):
            adapter: nn.Module
            if kind == "residual":
                adapter = _pointwise(site.module, site.outputs)
            elif kind == "bottleneck":
                adapter = Bottleneck(site.outputs, rank)
            else:
                adapter = LowRank(site.inputs, site.outputs, rank, rank if alpha is None else alpha)
            dtype = site.like.dtype if site.like.dtype.itemsize >= 4 else torch.float32
            adapter.to(site.like.device, dtype).train(site.module.training)
            # a child and a hook: the layer stays what it is, with the names and the type it had
            site.module.add_module("adapter", adapter)
            site.module.register_forward_hook(site.hook)
    return model


class Bottleneck(nn.Module):
    """U gelu(D h + d) + u with U = 0, u = 0 at the start; 2·rank·width + rank + width parameters."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank)
        self.up = nn.Linear(rank, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.up(nn.functional.gelu(self.down(h)))
        return out


class LowRank(nn.Module):
    """(alpha/rank) B A x with B = 0 at the start; rank · (inputs + outputs) parameters, named as in peft."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        self.scale = alpha / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.lora_B(self.lora_A(x))
        return out


def _pointwise(conv: nn.Module, channels: int) -> nn.Module:
    """Return a 1×1 convolution of as many dimensions as `conv`, at zero."""
    kind = next(c for c in _CONVOLUTIONS if isinstance(conv, c))
    adapter = kind(channels, channels, 1, bias=False)
    nn.init.zeros_(adapter.weight)
    return adapter


# Module-level functions: a model with adapters can be copied and pickled.
def _add_to_output(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
    return output + _change(layer, output).to(output.dtype)


def _add_from_input(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + _change(layer, inputs[0]).to(output.dtype)


def _change(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what the adapter makes of x, computed in its own precision."""
    adapter = layer.get_submodule("adapter")
    change: Tensor = adapter(x.to(next(adapter.parameters()).dtype))
    return change


def _add_to_attention(layer: nn.Module, _: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_add_to_output(layer, _, output[0]), *output[1:])  # nn.MultiheadAttention also returns weights


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Site(NamedTuple):
    """A layer that can take an adapter; `default`: it gets one without being named.

    `like` has the device and type of its parameters.
    """

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    like: Tensor
    default: bool
    hook: Callable[..., Any] = _add_to_output


def _convolutions(model: nn.Module) -> list[_Site]:
    convolutions = [(name, m) for name, m in model.named_modules() if isinstance(m, _CONVOLUTIONS)]
    return [
        _Site(name, m, m.out_channels, m.out_channels, m.weight, max(m.kernel_size) > 1 and i > 0)
        for i, (name, m) in enumerate(convolutions)
    ]


def _sublayers(model: nn.Module) -> list[_Site]:
    sites = []
    for name, m in model.named_modules():
        if isinstance(m, Attention | FeedForward):
            sites.append(_Site(name, m, m.width, m.width, next(m.parameters()), True))
        if isinstance(m, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            width, like = m.linear2.out_features, m.linear2.weight
            for child, sub in m.named_children():
                path = f"{name}.{child}" if name else child
                if isinstance(sub, nn.MultiheadAttention):
                    sites.append(_Site(path, sub, width, width, like, True, _add_to_attention))
                elif sub is m.linear2:  # the last layer of the feed-forward part
                    sites.append(_Site(path, sub, width, width, like, True))
    return sites or [site._replace(default=False, hook=_add_to_output) for site in _linears(model)]


def _linears(model: nn.Module) -> list[_Site]:
    # nn.MultiheadAttention reads the weight of its projection and never calls it: a hook would not run
    silent = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m not in silent]
    return [
        _Site(name, m, m.in_features, m.out_features, m.weight, i < len(linears) - 1, _add_from_input)
        for i, (name, m) in enumerate(linears)
    ]


_KINDS: dict[str, Callable[[nn.Module], list[_Site]]] = {
    "residual": _convolutions,
    "bottleneck": _sublayers,
    "lora": _linears,
}


def _select(sites: list[_Site], where: str | Sequence[str] | None, kind: str) -> list[_Site]:
    """Return the sites that `where` asks for; every pattern must match one."""
    names = [site.name for site in sites]
    listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    allowed = f"pattern(s) of layers for {kind!r} adapters, of which this model has {listed or 'none'}"
    patterns = [where] if isinstance(where, str) else where
    if patterns is None:
        chosen = [site for site in sites if site.default]
    else:
        for pattern in patterns:
            if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
                raise check.fail("where", pattern, allowed)
        chosen = [site for site in sites if any(fnmatchcase(site.name, p) for p in patterns)]
    if not chosen:
        raise check.fail("where", where, allowed)
    return chosen
