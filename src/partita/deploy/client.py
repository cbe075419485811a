"""A client: pure in a request and in its own disk.

`Client.handle` takes the bytes of a request and returns those of the reply. A request says all that the
answer depends on, but for the client's samples and states: the event, the model, the address of the state to
begin from. So whatever is asked twice is answered twice alike, and a client that was killed goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save

from partita.core import check
from partita.core.device import arithmetic
from partita.core.types import Tensors
from partita.data import FederatedData
from partita.data.population import SPLITS
from partita.deploy.agreed import MOST_SAMPLES
from partita.deploy.folder import LAST, Hold, hold, new_file, run_of, runs_in, write_private
from partita.deploy.heads import address_of, checked, kept_of, whole_number
from partita.deploy.states import Missing, States
from partita.deploy.turn import Bound, Turn, begun, bind_stage, bound_to, received, state_of
from partita.deploy.wire import EMPTY, Body, Malformed, pack, part_of, printable, unpack
from partita.engine.evaluate import personal_model, scored
from partita.engine.stage import Stage
from partita.engine.state import State
from partita.engine.store.addresses import Address
from partita.recipes.experiment import Experiment

LOG = logging.getLogger("partita")

MOST_BYTES = 1 << 32
"""Of a request."""
MOST_CLIENTS = 1 << 20
"""Among whom a server may say that this one is."""
TRAIN_LOSS = "train_loss"


class Site(Protocol):
    """What the people at a client have decided."""

    def allows(self, number: str) -> bool:
        """Return whether a number may leave: 'train_loss', or the scores of 'train', 'validation', 'test'."""
        ...


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
        self._hold: Hold | None = None
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

    def hold(self) -> None:
        """Take the folder, until this process ends; refuse one that another process or client has."""
        if self._hold is None:
            self._hold = hold(self.folder, self.name)

    def runs(self, ended: bool = True) -> list[str]:
        """Return the numbers of the runs that have ended here, or of all that have begun, the newest last."""
        return runs_in(self.folder, LAST if ended else "")

    def model(self, run: str | None = None) -> Tensors:
        """Return the tensors of this client's own model, as a run has left it (None: the newest)."""
        with self._finished(run) as (stage, state, number):
            return personal_model(stage, state, number)

    def scores(self, split: str = "test", run: str | None = None) -> dict[str, float]:
        """Return how good this client's own model is on its own samples; nobody else is told."""
        check.choice("split", split, SPLITS)
        with self._finished(run) as (stage, state, number):
            found = scored(stage, state, "personal" if stage.has_personal else "global", split)
            return {name: float(column[number]) for name, column in found.scores.items()}

    def export(self, path: str | Path, run: str | None = None) -> Path:
        """Write this client's own model as safetensors, in a new file that its owner alone can read."""
        target, run = new_file("path", check.path("path", path)), run_of(self.folder, run)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.model(run).items()}
        write_private(target, save(tensors, {"client": self.name, "run": run}))
        return target

    @contextlib.contextmanager
    def _finished(self, run: str | None) -> Iterator[tuple[Stage, State, int]]:
        """Give stage and state as a run has left them, and the number of this client in these."""
        run = run_of(self.folder, run)
        states = States(self.folder, run)
        try:
            head, tensors = states.last()
            bound = self._bind(head)
            if head.get("digest") != bound.digest:
                raise check.fail("experiment", run, "that of the run, of which the folder is")
            address = address_of(head.get("address"))
            turn = self._turn(bound, states, head, tensors, whole_number(head, "stage"), address)
        except Missing as error:
            allowed = "a folder with all files of its run: take them from a copy, if you have one"
            raise check.fail("folder", str(states.folder), allowed, str(error)) from None
        settings = turn.stage.setup.settings
        with arithmetic(settings.precision, settings.deterministic):
            if head.get("kind") == "arrive":
                arrival = turn.arrived(self.data)
                yield arrival.stage, arrival.state, 0
            else:
                yield turn.stage, turn.state, bound.number

    def _answer(self, head: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Body]:
        kind = head.get("kind")
        if kind == "hello":
            return {"kind": "hello", "name": self.name, "sizes": self.sizes}, EMPTY
        bound = self._bind(head)
        if kind == "check":
            return {"kind": "check", "parts": bound.parts}, EMPTY
        if head.get("digest") != bound.digest:
            raise Malformed("another experiment")
        if kind != "score":  # which writes nothing
            self.hold()
        states = States(self.folder, str(head.get("run")))
        number, address = whole_number(head, "stage"), address_of(head.get("address"))
        if number >= len(bound.setup.plans):
            raise Malformed(f"stage {number} of {len(bound.setup.plans)}")
        if kind == "stage":
            states.save_stage(number, checked(part_of(tensors, "initial"), bound.setup.initial, "stage"))
            return {"kind": "stage"}, EMPTY
        if lacking := self._lacking(states, str(head.get("run")), number, address):
            return {"kind": "lacks", "stages": lacking}, EMPTY
        if kind in ("last", "arrive"):
            kept = kept_of(head)
            states.require(address)
            states.refuse_unknown(kept)
            states.save_last(head, tensors)
            states.prune(kept)
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
        key = tuple([whole_number(head, name) for name in names])
        clients, number, largest = key
        if not number < clients <= MOST_CLIENTS or largest > MOST_SAMPLES:
            raise Malformed(f"client {number} of {clients}, who have up to {largest} samples")
        if head.get("sizes") not in (None, self.sizes):
            raise check.fail("sizes", self.sizes, f"{head.get('sizes')}, as it had when it enrolled")
        if self._bound is None or self._bound[0] != key:
            self._stage = None
            self._bound = key, bound_to(self.experiment, self.data, clients, number, largest, self.device)
        return self._bound[1]

    def _lacking(self, states: States, run: str, number: int, address: Address) -> list[int]:
        """Return the stages whose first models are needed: this one, and those a state comes through."""
        through = range(address.stage + 1, number) if address.exists else range(0)
        bound = self._stage is not None and self._stage[0] == (run, number)
        return states.lacks([*through, *([] if bound or not number else [number])])

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
        key = (str(head.get("run")), number)
        if self._stage is None or self._stage[0] != key:
            self._stage = key, bind_stage(bound.setup, number, states)
        stage = self._stage[1]
        server = received(stage, head, tensors)
        state = state_of(
            stage, server, whole_number(head, "stage_start"), begun(bound.setup, stage, states, address)
        )
        return Turn(bound, stage, state, states, head)


def _own(data: FederatedData, name: str) -> FederatedData:
    """Return the samples of one client."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    if data.clients == 1:
        return data
    return data.subset([data.names.index(check.choice("name", name, list(data.names)))])


def _why(error: Exception) -> str:
    """Return what the server is told of an error: nothing of a user's own, which may tell of samples."""
    if isinstance(error, Malformed | Missing):
        return str(error)[:300]
    if isinstance(error, check.Refused):
        return f"{error.field} was refused there"[:300]
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error.strerror or ''}"[:300]
    return type(error).__name__
