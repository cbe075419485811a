"""Rules whose loss asks for more than (output, target): each step finds it in its batch.

    received   the model as the client received it, with its own part where nothing is received
    previous   what the client had made of it at the end of its last round; before its first one, the model
               that the stage began with
    counts     the client's training samples of each class
    others     what the method sends beside the model, by its name

A rule knows nothing of it: what it is bound to hands it to the loss. The previous model is kept in the
client's memory, as far as it is shared; its own part is as the client has kept it anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from partita.core import tree
from partita.core.asks import COUNTS, FEATURES, INPUTS, PREVIOUS, RECEIVED, of_model
from partita.core.parts import LocalRule, Phase
from partita.core.types import Batch, ClientState, Download, Partition, Tensors, Upload

KEPT = f"{PREVIOUS}."
"""What the memory calls a tensor of the previous model: this and its name."""


class Informed(NamedTuple):
    """What passes from step to step: the rule's own, and what the loss is given."""

    inner: Any
    given: dict[str, Any]


def remembering(
    state: ClientState, asks: Collection[str], model: Tensors, partition: Partition
) -> ClientState:
    """Return the state of a new client, with a place for its previous model where a loss asks for that."""
    if not _asks_for(PREVIOUS, asks):
        return state
    kept = {KEPT + k: v for k, v in tree.pick(model, partition.shared).items()}
    return state._replace(memory={**state.memory, **kept})


def informed(rule: LocalRule, asks: Collection[str], keeps: bool) -> LocalRule:
    """Return the rule whose steps hand the loss what it asks for.

    `keeps` says that clients keep the states that it ends with.
    """
    if not asks:
        return rule

    def start(download: Download, state: ClientState) -> Informed:
        return Informed(rule.start(download, _own(state)), _given(asks, download, state))

    def finish(c: Informed, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, new = rule.finish(c.inner, download, _own(state))
        return upload, new if not keeps else _with_previous(new, upload, download, state)

    return LocalRule(start, tuple(map(_told, rule.phases)), finish)


def _asks_for(model: str, asks: Collection[str]) -> bool:
    return any((of_model(name) or ("",))[0] == model for name in asks)


def _own(state: ClientState) -> ClientState:
    """Return the state that the rule itself knows."""
    return state._replace(memory={k: v for k, v in state.memory.items() if not k.startswith(KEPT)})


def _given(asks: Collection[str], download: Download, state: ClientState) -> dict[str, Any]:
    received = {**state.personal, **download.shared}
    kept = {k.removeprefix(KEPT): v for k, v in state.memory.items() if k.startswith(KEPT)}
    models = {RECEIVED: received, PREVIOUS: {**received, **state.personal, **kept}}
    given: dict[str, Any] = {name: model for name, model in models.items() if _asks_for(name, asks)}
    if COUNTS in asks:
        given[COUNTS] = download.class_counts
    others = [k for k in asks if k not in (FEATURES, INPUTS, COUNTS) and of_model(k) is None]
    return given | {name: download.extra[name] for name in others}


def _with_previous(new: ClientState, upload: Upload, download: Download, before: ClientState) -> ClientState:
    """Remember the model that the client ended with: what it received, less what it sends."""
    kept = {}
    for name in [k.removeprefix(KEPT) for k in before.memory if k.startswith(KEPT)]:
        sent = upload.delta.get(name)
        old = before.memory[KEPT + name]
        kept[KEPT + name] = old if sent is None else download.shared[name] - sent
    return new._replace(memory={**new.memory, **kept})


def _told(phase: Phase) -> Phase:
    """Return the phase whose steps find what the loss asks for in their batches."""
    within, step = phase.within("inner"), phase.step

    def told(carry: Informed, batch: Any, lr: tuple[Tensor, ...]) -> Informed:
        if isinstance(batch, Batch):
            batch = batch._replace(given=carry.given)
        else:  # a step may see several
            batch = tuple(one._replace(given=carry.given) for one in batch)
        return carry._replace(inner=step(carry.inner, batch, lr))

    return within._replace(step=told)
