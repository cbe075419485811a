"""A client: pure in a request and in its own disk.

`Client.handle` takes the bytes of a request and returns those of the reply. A request says all that the
answer depends on, but for the client's samples and states: the event, the model, the address of the state to
begin from. So whatever is asked twice is answered twice alike, and a client that was killed goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import save

from partita.core import check, tree
from partita.core.device import arithmetic
from partita.core.parts import Program
from partita.core.types import ClientState, Cohort, Download, Group, ServerState, Tensors, Upload
from partita.data import FederatedData
from partita.data.population import Numbered, Population
from partita.deploy.agreed import digest_of, parts_of, setup_of, standing_for
from partita.deploy.states import Missing, States, runs_in, write_private
from partita.deploy.wire import EMPTY, Body, Malformed, pack, part_of, printable, unpack, within
from partita.engine.counters import Counters, Timer
from partita.engine.evaluate import personal_model, scored
from partita.engine.loop import execute
from partita.engine.model.augmenting import prepared
from partita.engine.model.padding import for_metrics
from partita.engine.newcomers import Arrival, arrive, fitted, usual_effort
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage, bind
from partita.engine.state import State
from partita.engine.store.addresses import Address
from partita.recipes.experiment import Experiment

LOG = logging.getLogger("partita")

MOST_BYTES = 1 << 32
"""Of a request."""
MOST_CLIENTS = 1 << 24
TRAIN_LOSS = "train_loss"


class Site(Protocol):
    """What the people at a client have decided."""

    def allows(self, number: str) -> bool:
        """Return whether a number may leave: 'train_loss', or the scores of 'train', 'validation', 'test'."""
        ...


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


class Client:
    """One client of an experiment, with samples and a folder of its own.

    experiment  as the file of the experiment returns it; its data show the form of a sample
    data        this client's samples: data of one client, or of several of whom one has its name
    folder      where it keeps its states
    site        which numbers may leave (None: the loss of training, and all scores)
    """

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        data: FederatedData,
        folder: str | Path,
        *,
        site: Site | None = None,
        device: str = "cpu",
    ) -> None:
        self.experiment, self.name, self.folder = experiment, name, check.path("folder", folder)
        self.data, self.device = _own(data, name), device
        self._allows: Callable[[str], bool] = (lambda number: True) if site is None else site.allows  # noqa: ARG005
        self._lock = threading.Lock()
        self._bound: tuple[tuple[int, ...], Bound] | None = None
        self._stage: tuple[tuple[str, int], Stage] | None = None

    @property
    def sizes(self) -> list[int]:
        """How many samples it has for training, validation and test."""
        return [int(self.data.sizes(split).sum()) for split in ("train", "validation", "test")]

    def handle(self, body: bytes) -> bytes:
        """Return the reply to a request; what goes wrong is a reply, too."""
        with self._lock:
            head: dict[str, Any] = {}
            try:
                head, tensors = unpack(body, MOST_BYTES)
                reply, own = self._answer(head, tensors)
            except Exception as error:
                LOG.warning("client %s: %s: %s", self.name, type(error).__name__, error)
                reply, own = {"kind": "error", "why": _why(error)}, EMPTY
            return pack({**{k: head.get(k) for k in ("id", "run", "event")}, **reply}, own)

    def model(self) -> Tensors:
        """Return the tensors of this client's own model, as its last run has left it."""
        runs = runs_in(self.folder)
        try:
            head, tensors = States(self.folder, runs[-1]).last()
        except (IndexError, Missing):
            allowed = "the folder of a client that was there when its run ended"
            raise check.fail("folder", str(self.folder), allowed) from None
        bound, states = self._bind(head), States(self.folder, runs[-1])
        if head.get("digest") != bound.digest:
            raise check.fail("experiment", runs[-1], "that of the run, of which the folder is")
        address = Address(*_address(head.get("address")))
        turn = self._turn(bound, states, head, tensors, _integer(head, "stage"), address)
        settings = turn.stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            if head.get("kind") == "arrive":
                arrival = turn.arrived(self.data)
                return personal_model(arrival.stage, arrival.state, 0)
            return personal_model(turn.stage, turn.state, bound.number)

    def export(self, path: str | Path) -> Path:
        """Write this client's own model as safetensors, in a file that its owner alone can read."""
        target = check.path("path", path)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.model().items()}
        write_private(target, save(tensors, {"client": self.name}))
        return target

    def _answer(self, head: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Body]:
        kind = head.get("kind")
        if kind == "hello":
            return {"kind": "hello", "name": self.name, "sizes": self.sizes}, EMPTY
        bound = self._bind(head)
        if kind == "check":
            return {"kind": "check", "parts": bound.parts}, EMPTY
        if head.get("digest") != bound.digest:
            raise Malformed("another experiment")
        states = States(self.folder, str(head.get("run")))
        if kind == "stage":
            states.save_stage(_integer(head, "stage"), part_of(tensors, "initial"))
            return {"kind": "stage"}, EMPTY
        number = _integer(head, "stage")
        address = Address(*_address(head.get("address")))
        first = address.stage + 1 if address.exists else number
        if lacking := states.lacks(n for n in range(max(1, first), number + 1)):
            return {"kind": "lacks", "stages": lacking}, EMPTY
        if kind in ("last", "arrive"):
            states.save_last(head, tensors)
            states.prune(*_kept(head))
        if kind == "last":
            return {"kind": "last"}, EMPTY
        turn = self._turn(bound, states, head, tensors, number, address)
        if kind == "arrive":
            return turn.come(self.data, self._allows)
        if kind == "train":
            return turn.train(self._allows)
        if kind == "score":
            return turn.score(self._allows)
        raise Malformed(f"a request of kind {printable(kind)}")

    # ---- what a request is answered with

    def _bind(self, head: dict[str, Any]) -> Bound:
        """Return the experiment among so many clients, made once."""
        names = ("clients", "number", "largest")
        key = tuple([_integer(head, name) for name in names])
        clients, number, largest = key
        if not number < clients <= MOST_CLIENTS:
            raise Malformed(f"client {number} of {clients}")
        if head.get("sizes") not in (None, self.sizes):
            raise check.fail("sizes", self.sizes, f"{head.get('sizes')}, as it had when it enrolled")
        if self._bound is None or self._bound[0] != key:
            self._stage = None
            self._bound = key, bound_to(self.experiment, self.data, clients, number, largest, self.device)
        return self._bound[1]

    def _turn(
        self,
        bound: Bound,
        states: States,
        head: dict[str, Any],
        tensors: Tensors,
        number: int,
        address: Address,
    ) -> Turn:
        """Return what a request asks for: its stage, with the state and the model to begin from."""
        if number >= len(bound.setup.plans):
            raise Malformed(f"stage {number} of {len(bound.setup.plans)}")
        key = (str(head.get("run")), number)
        if self._stage is None or self._stage[0] != key:
            self._stage = key, bind_stage(bound.setup, number, states)
        stage = self._stage[1]
        server = received(stage, head, tensors)
        state = state_of(
            stage, server, _integer(head, "stage_start"), begun(bound.setup, stage, states, address)
        )
        return Turn(bound, stage, state, states, head)


class Turn(NamedTuple):
    """A turn of a client: the stage and the state of it, and the request."""

    bound: Bound
    stage: Stage
    state: State
    states: States
    head: dict[str, Any]

    def arrived(self, data: FederatedData) -> Arrival:
        """Return this client as one that comes later, with a part of its own by the method's rule."""
        turns = max(1, _integer(self.head, "turns"))
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
        event, nonce = _integer(head, "event"), _integer(head, "nonce")
        download = Download(state.server.shared, state.server.extra, state.server.version)
        cohort = Cohort((number,), (Group((0,), download, event=event),), (0,), 0.0)
        settings = stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            uploads, new = execute(stage, state, cohort)
        if fault := tree.examined(Upload({}), (uploads.metrics, new), 1)[0]:
            return {"kind": "upload", "fault": fault}, EMPTY
        if stage.keeps_state:
            self.states.save(Address(stage.number, event, nonce), tree.row(new, 0))
        self.states.prune(*_kept(head))
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


def _own(data: FederatedData, name: str) -> FederatedData:
    """Return the samples of one client."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    if data.clients == 1:
        return data
    return data.subset([data.names.index(check.choice("name", name, list(data.names)))])


# ---- one experiment, one stage


def bound_to(
    experiment: Experiment, own: FederatedData, clients: int, number: int, largest: int, device: str
) -> Bound:
    """Return an experiment on the samples of one client; the others have some, nobody here knows which."""
    train = np.full(clients, largest)
    train[number] = own.train[0, 1]
    population = Population.make(train, names=Numbered(clients))
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
    initial = setup.initial if number == 0 else _checked(states.stage(number), setup.initial, "stage")
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
        parts = [_checked(own, like, "state") for own, like in zip(state, new)]
        return ClientState(*parts)
    return ClientState({k: state.personal.get(k, v) for k, v in new.personal.items()}, new.memory)


def received(stage: Stage, head: dict[str, Any], tensors: Tensors) -> ServerState:
    """Return the server as the client knows it: the model that came with a request, and what came beside."""
    shared, extra = part_of(tensors, "shared"), part_of(tensors, "extra")
    like = stage.server_rule.init(tree.pick(stage.initial, stage.partition.shared))
    version = _integer(head, "version")
    if "sent" in tensors:
        shared = stage.channel.unpacked_download(tensors["sent"].numpy().tobytes(), like.shared, version)
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
        packed = stage.channel.packed(upload, devices, kind)
        return {**metrics, "sent": torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
    return {
        **metrics,
        **within("delta", devices.held(kind, upload.delta)),
        **within("extra", upload.extra),
        **within("sums", devices.held(kind, upload.sums)),
    }


# ---- what comes from outside


def _checked(tensors: Tensors, like: Tensors, what: str) -> Tensors:
    """Return tensors in the order of others, of whose names, shapes and types they must be."""
    for name, expected in like.items():
        value = tensors.get(name)
        if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
            raise Malformed(f"a {what} without {printable(name)} as this experiment has it")
    return {name: tensors[name].to(expected.device) for name, expected in like.items()}


def _integer(head: dict[str, Any], name: str) -> int:
    """Return a whole number from 0 of a head."""
    value = head.get(name)
    if type(value) is not int or not 0 <= value <= check.LARGEST:
        raise Malformed(f"{name} is no whole number")
    return value


def _kept(head: dict[str, Any]) -> tuple[list[Address], int]:
    """Return the states that the run may go back to, and the event before which no other is needed."""
    listed = head.get("kept")
    kept = [Address(*_address(value)) for value in (listed if isinstance(listed, list) else [])]
    return kept, max([address.event for address in kept], default=0)


def _address(value: Any) -> list[int]:
    """Return the three numbers of an address; None is that of nobody's state."""
    if value is None:
        return list(Address())
    if not isinstance(value, list) or len(value) != 3 or not all(type(v) is int and v >= 0 for v in value):
        raise Malformed("an address is three whole numbers")
    return value


def _why(error: Exception) -> str:
    """Return what the server is told of an error: nothing of a user's own, which may tell of samples."""
    if isinstance(error, Malformed | Missing):
        return str(error)[:300]
    if isinstance(error, check.Refused):
        return f"{error.field} was refused there"[:300]
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error.strerror or ''}"[:300]
    return type(error).__name__
