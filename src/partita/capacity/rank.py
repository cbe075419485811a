"""Clients that train adapters of a smaller rank: LoRA of different ranks, after Cho et al. (2024), HetLoRA.

    y = W x + s B[:, :r_i] A[:r_i] x        a client of rank r_i, in a model of rank r
    Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i         for every coordinate c

The first r_i of the r rows of A and columns of B are a model of their own: that of rank r whose other ones
are zero. So all clients share one scale, s = α/r of the whole model, whatever rank they hold. HetLoRA
averages over all clients, with zeros where one holds nothing, and weights them by the norm of their adapters;
here each row and column is averaged over those who train it, as with `width`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any

from torch import nn

from partita.capacity.assign import assigned
from partita.capacity.depth import Assigned, by_class
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share
from partita.core.types import Inputs

RANKS = "{'strong': 8, 'weak': 2}"
AXES = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
"""Which axis of a factor counts ranks, by the names that it has here and in peft."""


def _ranks(field: str, value: Any) -> dict[str, int]:
    value = by_class(field, value, f"the rank of each class's adapters, such as {RANKS}")
    return {str(k): check.integer(f"{field}[{k!r}]", r, low=1) for k, r in value.items()}


@checked("capacity ")
def rank(
    ranks: Annotated[
        Mapping[str, int],
        Option(
            "the rank of each class's LoRA adapters, at most that of the model's",
            allowed=RANKS,
            check=_ranks,
            example={"strong": 8, "weak": 2},
        ),
    ],
    assign: Assigned = None,
) -> Capacity:
    """Weak clients train adapters of a smaller rank: the first rows of A and columns of B (HetLoRA).

    Use it where devices hold the base model but cannot train, or send, adapters of the full rank.
    """

    def shares(model: nn.Module, x: Inputs, batch: int = 1) -> tuple[Share, ...]:  # noqa: ARG001
        full = _rank_of(model)
        for name, r in ranks.items():
            if r > full:
                raise check.fail(f"capacity ranks[{name!r}]", r, f"at most {full}, the rank of the adapters")
        models = {r: model if r == full else _narrow(model, r) for r in set(ranks.values())}
        return tuple(Share(name, models[r]) for name, r in ranks.items())

    classes, options = tuple(ranks), {"ranks": dict(ranks), "assign": assign}
    return Capacity("rank", classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options)


def _factors(model: nn.Module) -> dict[str, int]:
    """Return the axis of ranks of each factor, by its name."""
    axes = {
        name: next((AXES[part] for part in name.split(".") if part in AXES), None)
        for name, p in model.named_parameters()
        if p.dim() > 1
    }
    return {name: axis for name, axis in axes.items() if axis is not None}


def _rank_of(model: nn.Module) -> int:
    """Return the largest rank of a model's adapters; refuse one without any."""
    sizes = [model.get_parameter(name).shape[axis] for name, axis in _factors(model).items()]
    if not sizes:
        allowed = "a model with LoRA adapters: pt.models.add_adapters(model, 'lora', rank=8), or peft's"
        raise check.fail("capacity", "rank", f"{allowed}; {type(model).__name__} has none")
    return max(sizes)


def _narrow(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with adapters of at most this rank; all other tensors are the same ones."""
    axes = _factors(model)
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for name, axis in axes.items():
        p = model.get_parameter(name)
        first = p.detach().narrow(axis, 0, min(rank, p.shape[axis])).clone()
        memo[id(p)] = nn.Parameter(first, p.requires_grad)
    narrow = copy.deepcopy(model, memo)
    for name in axes:
        layer = narrow.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
    _declare(narrow, rank)
    return narrow


def _declare(model: nn.Module, rank: int) -> None:
    """Say the rank to a model of peft, so that it saves what it can load: with the scale of the whole one."""
    for config in {id(c): c for c in getattr(model, "peft_config", {}).values()}.values():
        power = 0.5 if getattr(config, "use_rslora", False) else 1.0
        ranks, alphas = (dict(getattr(config, f"{kind}_pattern", {}) or {}) for kind in ("rank", "alpha"))
        for pattern in {**ranks, **alphas}:
            r = ranks.get(pattern, config.r)
            alphas[pattern] = alphas.get(pattern, config.lora_alpha) * (min(r, rank) / r) ** power
            ranks[pattern] = min(r, rank)
        config.rank_pattern, config.alpha_pattern = ranks, alphas
        config.lora_alpha = config.lora_alpha * (min(config.r, rank) / config.r) ** power
        config.r = min(config.r, rank)
    for layer in model.modules():
        if isinstance(held := getattr(layer, "r", None), dict):  # of peft, by the names of adapters
            held.update({name: min(r, rank) for name, r in held.items()})
