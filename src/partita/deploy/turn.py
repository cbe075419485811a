"""One turn of a client: the stage that it is of, the state that it begins from, and what it sends.

What runs is what runs in a simulation: the same stage of the same setup, bound to this client's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from partita.core import check, tree
from partita.core.device import arithmetic
from partita.core.parts import Program
from partita.core.types import ClientState, Cohort, Download, Group, ServerState, Tensors, Upload
from partita.data import FederatedData
from partita.data.population import Numbered, Population
from partita.deploy.agreed import digest_of, parts_of, setup_of, standing_for
from partita.deploy.heads import checked, kept_of, whole_number
from partita.deploy.states import States
from partita.deploy.wire import EMPTY, Body, Malformed, as_tensor, part_of, printable, within
from partita.engine.counters import Counters, Timer
from partita.engine.evaluate import scored
from partita.engine.loop import execute
from partita.engine.model.augmenting import prepared
from partita.engine.model.padding import for_metrics
from partita.engine.newcomers import Arrival, arrive, fitted, usual_effort
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage, bind
from partita.engine.state import State
from partita.engine.store.addresses import Address
from partita.recipes.experiment import Experiment

TRAIN_LOSS = "train_loss"


class Own:
    """The one state that a client has, as the store of a run."""

    def __init__(self, state: ClientState) -> None:
        self.state = state

    def load(self, clients: Sequence[int]) -> ClientState:
        """Return the state, whoever is asked for."""
        stacked: ClientState = tree.expand(self.state, len(clients))
        return stacked


class Bound(NamedTuple):
    """The experiment on this client's samples, among so many clients of whom it has this number."""

    setup: Setup
    number: int
    parts: dict[str, str]
    digest: str


class Turn(NamedTuple):
    """A turn of a client: the stage and the state of it, and the request."""

    bound: Bound
    stage: Stage
    state: State
    states: States
    head: dict[str, Any]

    def arrived(self, data: FederatedData) -> Arrival:
        """Return this client as one that comes later, with a part of its own by the method's rule."""
        turns = max(1, whole_number(self.head, "turns"))
        effort = usual_effort(self.stage, self.state)._replace(rounds=turns)
        return arrive(self.stage, self.state, data, effort)

    def come(self, data: FederatedData, allows: Callable[[str], bool]) -> tuple[dict[str, Any], Body]:
        """Come after training, and say how good the model is, as far as that may leave."""
        settings = self.stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            arrival = self.arrived(data)
            if not allows("test"):
                return {"kind": "arrived", "scores": {}}, EMPTY
            model = "personal" if arrival.stage.has_personal else "global"
            found = scored(arrival.stage, arrival.state, model)
        return {"kind": "arrived", "scores": {k: float(v[0]) for k, v in found.scores.items()}}, EMPTY

    def train(self, allows: Callable[[str], bool]) -> tuple[dict[str, Any], Body]:
        """Train; the new state is on disk before anybody hears of it."""
        stage, state, head, number = self.stage, self.state, self.head, self.bound.number
        event = whole_number(head, "event")
        new_address, kept = Address(stage.number, event, whole_number(head, "nonce")), kept_of(head)
        self.states.refuse_unknown(kept)
        download = Download(state.server.shared, state.server.extra, state.server.version)
        cohort = Cohort((number,), (Group((0,), download, event=event),), (0,), 0.0)
        settings = stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            uploads, new = execute(stage, state, cohort)
        if fault := tree.examined(Upload({}), (uploads.metrics, new), 1)[0]:
            return {"kind": "upload", "fault": fault}, EMPTY
        if stage.keeps_state:
            self.states.save(new_address, tree.row(new, 0))
        self.states.prune(kept, new_address)
        upload = tree.row(uploads._replace(client=None, weight=None), 0)
        if not allows(TRAIN_LOSS):  # as if there had been no step, of whose loss one could tell
            upload = upload._replace(metrics=tree.zeros_like(upload.metrics))
        body = Body.of(sent(stage, number, upload))
        stage.release(())
        return {"kind": "upload"}, body

    def score(self, allows: Callable[[str], bool]) -> tuple[dict[str, Any], Body]:
        """Score a model on this client's own samples, as far as the scores may leave."""
        head, stage = self.head, self.stage
        model = check.choice("model", head.get("model"), ("global", "personal"))
        split = check.choice("split", head.get("split"), ("train", "validation", "test"))
        if not allows(split):
            return {"kind": "scores", "scores": {}, "loss": None}, EMPTY
        settings = stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            found = scored(stage, self.state, model, split, bool(head.get("every_sample")))
        number = self.bound.number
        values = {name: float(column[number]) for name, column in found.scores.items()}
        return {"kind": "scores", "scores": values, "loss": float(found.loss[number])}, EMPTY


# ---- one experiment, one stage


def bound_to(
    experiment: Experiment, own: FederatedData, clients: int, number: int, largest: int, device: str
) -> Bound:
    """Return an experiment on the samples of one client; the others have some, nobody here knows which."""
    train = np.full(clients, largest)
    train[number] = own.train[0, 1]
    some = np.ones(clients, dtype=np.int64)  # of what is only looked at by the server
    population = Population.make(train, some, Numbered(clients), n_validation=some)
    data = standing_for(experiment.data, population)
    setup = setup_of(experiment, data, executor="loop", device=device)
    own = fitted(setup, own).to(device)
    own, kept = for_metrics(
        setup.model, prepared(setup.settings.augment, _at(own, number, clients)), setup.profile
    )
    parts = parts_of(setup)
    setup = replace(setup, data=own, profile=setup.profile._replace(kept=kept))
    return Bound(setup, number, parts, digest_of(parts))


def _at(own: FederatedData, number: int, clients: int) -> FederatedData:
    """Return the samples of one client as those of one among many, who have none here."""

    def among(ranges: np.ndarray) -> np.ndarray:
        everyone = np.zeros((clients, 2), dtype=np.int64)
        everyone[number] = ranges[0]
        return everyone

    return replace(
        own,
        train=among(own.train),
        validation=among(own.validation),
        test=among(own.test),
        names=Numbered(clients),
    )


def bind_stage(setup: Setup, number: int, states: States) -> Stage:
    """Bind a stage on this client's samples; its clients send what `Channel.packed` makes bytes of."""
    initial = setup.initial if number == 0 else checked(states.stage(number), setup.initial, "stage")
    choices: Choices = {}
    stage = bind(setup, number, initial, choices, lambda text: None)  # noqa: ARG005
    sending = stage.channel.around(stage.algorithm, decoded=False)
    training = Program("training", sending.local, trains=True)
    return replace(stage, programs={**stage.programs, "training": training})


def begun(setup: Setup, stage: Stage, states: States, address: Address) -> ClientState:
    """Return the state to begin from: that of an address, carried into this stage from the one it is of."""
    if not address.exists:
        return stage.new_client
    state = states.load(address)
    for number in range(address.stage + 1, stage.number):
        fresh = setup.new_client(setup.plans[number].algorithm, states.stage(number)).personal
        state = ClientState({k: state.personal.get(k, v) for k, v in fresh.items()}, {})
    new = stage.new_client
    if address.stage == stage.number:
        parts = [checked(own, like, "state") for own, like in zip(state, new)]
        return ClientState(*parts)
    return ClientState({k: state.personal.get(k, v) for k, v in new.personal.items()}, new.memory)


def received(stage: Stage, head: dict[str, Any], tensors: Tensors) -> ServerState:
    """Return the server as the client knows it: the model that came with a request, and what came beside."""
    shared, extra = part_of(tensors, "shared"), part_of(tensors, "extra")
    like = stage.server_rule.init(tree.pick(stage.initial, stage.partition.shared))
    version = whole_number(head, "version")
    if "sent" in tensors:
        shared = stage.channel.unpacked_download(tensors["sent"].numpy().tobytes(), like.shared)
    for found, expected, what in ((shared, like.shared, "shared"), (extra, like.extra, "extra")):
        if unknown := set(found) - set(expected):
            raise Malformed(f"{what} with {printable(min(unknown))}")
    return ServerState(
        {k: shared[k] for k in like.shared if k in shared},
        {},
        {k: extra[k] for k in like.extra if k in extra},
        version,
    )


def state_of(stage: Stage, server: ServerState, stage_start: int, own: ClientState) -> State:
    """Return where the run is, as far as this client knows."""
    return State(
        stage=stage.number,
        stage_start=stage_start,
        initial=stage.initial,
        new_client=stage.new_client,
        server=server,
        store=Own(own),  # type: ignore[arg-type]
        schedule=None,  # type: ignore[arg-type]
        counters=Counters(1),
        timer=Timer(stage.setup.settings.device),
        executor_choices={},
        rounds=(),
    )


def sent(stage: Stage, number: int, upload: Upload) -> Tensors:
    """Return what leaves the client: the bytes that transforms have made, or its part of the tensors."""
    devices = stage.setup.devices
    kind = int(devices.class_of[number])
    metrics = within("metrics", upload.metrics)
    if stage.channel.uploads.transforms:
        return {**metrics, "sent": as_tensor(stage.channel.packed(upload, devices, kind))}
    return {
        **metrics,
        **within("delta", devices.held(kind, upload.delta)),
        **within("extra", upload.extra),
        **within("sums", devices.held(kind, upload.sums)),
    }
