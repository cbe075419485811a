"""The clients of a run as its server knows them: whom it has asked for what, and what has come of it.

Each request has a random number of its own. A wrong reply to a request that is waited for is a fault of its
client at once; a reply to any other request is ignored. Nothing that comes is believed: what a client counts
for, and how many steps it takes, follows from the samples that it was enrolled with.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file

from partita.core.types import Download, Group, ServerState, Tensors
from partita.data import Population
from partita.data.population import SPLITS
from partita.deploy.answers import Answers
from partita.deploy.clocks import live
from partita.deploy.folder import write_private
from partita.deploy.replies import Request, ignored, read_reply, unused
from partita.deploy.transport import Arrival, Transport
from partita.deploy.uploads import SLACK, most_bytes, row_of, scores_of, set_aside
from partita.deploy.wire import Body, as_tensor, segments, within
from partita.engine.newcomers import usual_effort
from partita.engine.record import read_json
from partita.engine.samples import Scored
from partita.engine.stage import Stage
from partita.engine.state import State
from partita.engine.stopping import Interrupt, at_once
from partita.engine.store.addresses import Address, Addresses
from partita.engine.store.files import json_text, write_tensors
from partita.schedule import Running, Schedule, StageSpec
from partita.schedule.clock import Flight

LOG = logging.getLogger("partita")

RUN_FILE, TOLD_FILE = "run.json", "told.json"
NONCES = 1 << 62
SILENT = "no answer in time"
MOST_BODIES = 8
"""Models that are kept as they are sent, for the clients that are still to receive them."""
GRACE_SECONDS = 5.0
"""That a round may still take when a signal has asked the server to end."""
MOST_ASKED_AGAIN = 2
"""How often a client is sent what it lacks, and asked again, before that is a fault."""


class Terms(NamedTuple):
    """How long the server waits, in seconds, and for how many.

    deadline  for the cohort of a synchronous round (None: until all have answered)
    quorum    uploads without which a round is abandoned, or which share of its cohort (None: as the
              schedule says)
    patience  for scores, for a client that has gone while it was at work asynchronously, and at the end for
              clients that are away to come for their models
    """

    deadline: float | None = None
    quorum: int | float | None = None
    patience: float = 60.0


class Fleet:
    """The clients of a run. It is what `Elsewhere` and a real clock ask for.

    transport   carries requests and replies
    population  the clients, with the samples that each was enrolled with
    run         the number of the run, 128 random bits
    folder      where the models are kept that stages begin with
    interrupt   says whether the run is to end
    admitted    returns the names of those who may take part now
    """

    def __init__(
        self,
        transport: Transport,
        population: Population,
        run: str,
        terms: Terms,
        folder: Path | None,
        interrupt: Interrupt,
        admitted: Callable[[], Collection[str]],
    ) -> None:
        self._interrupt, self._interrupted = interrupt, math.inf
        self.transport, self.population, self.run, self.terms = transport, population, run, terms
        self.folder, self.digest = folder, ""
        self.numbers = {name: i for i, name in enumerate(population.names)}
        self.admitted = admitted
        self._away: dict[str, float] = {}  # who is away, and since when
        self._dismissed: frozenset[int] = frozenset()
        self._silent: tuple[int, set[int]] = -1, set()
        self.requests: dict[str, Request] = {}
        self.secret: int | None = None
        self.ignored = self.bytes_up = self.bytes_down = 0
        self.newcomers: dict[str, dict[str, Any]] = {}
        self.stage: Stage
        self.state: State
        self.answers = Answers()
        self._initials: dict[int, Body] = {}
        self._bodies: dict[tuple[int, int, bool], Body] = {}

    # ---- what the engine asks for

    def begin(self, schedule: Schedule, spec: StageSpec) -> Running:
        """Start a schedule on real time; with privacy, nobody else may know who takes part."""
        if self.secret is not None:
            spec = spec._replace(seed=self.secret)
        return live(schedule, spec, self, self.terms.deadline, self.terms.quorum)

    def enter(self, stage: Stage, state: State) -> None:
        """Take part in a stage that begins, or that a resumed run goes on with."""
        self.stage, self.state = stage, state
        self.answers.clear()
        self._bodies.clear()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(self.folder / RUN_FILE, self._described())
        if stage.number and self.folder is not None:
            write_tensors(self.folder / f"{stage.number}.safetensors", state.initial)
        elif stage.number:
            self._initials[stage.number] = Body.of(within("initial", state.initial))

    def _described(self) -> bytes:
        """Return the number of the run, and who takes part with how many samples."""
        sizes = zip(*[self.population.sizes(split).tolist() for split in SPLITS])
        clients = {name: list(n) for name, n in zip(self.population.names, sizes)}
        return json_text({"run": self.run, "secret": self.secret, "clients": clients}, indent=2).encode()

    def scored(self, stage: Stage, state: State, model: str, split: str, every_sample: bool) -> Scored:
        """Ask the clients that are there how a model does on their samples; NaN for those who do not say."""
        metrics, data = stage.setup.profile.metrics, stage.setup.data
        names = [m.name for m in (metrics if every_sample else metrics[:1])]
        scores, loss = {name: np.full(data.clients, np.nan) for name in names}, np.full(data.clients, np.nan)

        def take(client: int, head: dict[str, Any]) -> None:
            found, loss[client] = scores_of(head, names)
            for name, value in found.items():
                scores[name][client] = value

        asked = {"model": model, "split": split, "every_sample": every_sample}
        if self._silent[0] != state.server.version:
            self._silent = state.server.version, set()
        silent = self._silent[
            1
        ]  # who has not answered another question about this version: one wait is enough
        clients = [c for c in np.flatnonzero(data.ranges(split)[:, 1] > 0).tolist() if c not in silent]
        self._welcome()
        wrong = self.survey("score", clients, lambda c: self._about(state, c, asked, model == "global"), take)
        silent |= {client for client, reason in wrong.items() if reason == SILENT}
        return Scored(scores, loss, {})

    # ---- what a real clock asks for

    def ask(self, flight: Flight, server: ServerState) -> None:
        """Ask a client to train on this model."""
        stage, state, client = self.stage, self.state, flight.client
        self.answers.pop(client, None)
        event = flight.event.number
        new = Address(stage.number, event, secrets.randbelow(NONCES))
        group = Group((0,), Download(server.shared, server.extra, server.version), event=event)
        context = state.context(stage, group)

        def take(head: dict[str, Any], tensors: Tensors, fault: str) -> None:
            if not fault and head.get("event") != event:
                fault = "a reply to another event"
            row = (
                set_aside(stage, new, fault) if fault else row_of(stage, client, context, new, head, tensors)
            )
            if row.rejection:
                LOG.warning("client %s: %s", self.population.names[client], row.rejection)
            self.answers[client] = row

        head = {"event": event, "nonce": new.nonce, **self._place(client, server.version)}
        self._send("train", client, head, self._model(client, server, exact=False), most_bytes(stage), take)

    def give_up(self, clients: Iterable[int]) -> None:
        """Wait no more for the uploads of these clients."""
        given_up = set(clients)
        self.answers.drop(given_up)
        waiting = [r for r in self.requests.values() if r.client in given_up and r.head["kind"] == "train"]
        for request in waiting:
            LOG.info("client %s: no answer in time", request.name)
        self._cancel({request.question for request in waiting})

    def hand_over(self, clients: Iterable[int]) -> None:
        """Give the loop what these clients have answered, as what waits to be used."""
        for client in clients:
            self.state.pending[client] = self.answers.pop(client)

    def gone(self, client: int) -> bool:
        """Return whether a client that was asked is not waited for: it is away for long, or for good."""
        since = self._away.get(self.population.names[client])
        asked = [r.asked for r in self.requests.values() if r.client == client and r.head["kind"] == "train"]
        lately = since is None or time.monotonic() - max(since, *asked, 0.0) <= self.terms.patience
        return not lately or client in self.dismissed()

    def dismissed(self) -> frozenset[int]:
        """Return the clients that may not take part any more: their names are not on the roster now."""
        return frozenset([self.numbers[name] for name in self.numbers.keys() - self.admitted()])

    def wait(self, seconds: float) -> None:
        """Take what has come; wait for the first reply, at most so long.

        A signal ends the run after this round; but a server does not wait long for a client then.
        """
        if self._interrupt.requested:
            self._interrupted = min(self._interrupted, time.monotonic())
            if time.monotonic() > self._interrupted + GRACE_SECONDS:
                at_once(self._interrupt.requested)
        for arrival in self.transport.receive(max(0.0, seconds)):
            self._take(arrival)
        self._look()

    def _look(self) -> None:
        """Note who is away since when, and say who may not take part any more."""
        now, away = time.monotonic(), self.numbers.keys() - self.transport.present()
        self._away = {name: self._away.get(name, now) for name in away}
        dismissed = self.dismissed()
        for client in sorted(dismissed - self._dismissed):
            text = "client %s: not on the roster any more, and left out from now on"
            LOG.warning(text, self.population.names[client])
        self._dismissed = dismissed

    # ---- all at once

    def survey(
        self,
        kind: str,
        clients: Iterable[int],
        ask: Callable[[int], tuple[dict[str, Any], Body]],
        take: Callable[[int, dict[str, Any]], None],
        patience: float | None = None,
        absent: Collection[int] = (),
    ) -> dict[int, str]:
        """Ask clients that are there, and some `absent` ones; wait for all of them as long as patience lasts.

        Return who has not answered well, and why.
        """
        names, there = self.population.names, self.transport.present()
        wrong = dict.fromkeys(clients, "not connected")
        end = time.monotonic() + (self.terms.patience if patience is None else patience)

        def taker(client: int) -> Callable[[dict[str, Any], Tensors, str], None]:
            def taken(reply: dict[str, Any], tensors: Tensors, fault: str) -> None:  # noqa: ARG001
                waited.discard(client)
                del wrong[client]
                if fault:
                    wrong[client] = fault
                    LOG.warning("client %s: %s: %s", names[client], kind, fault)
                else:
                    take(client, reply)

            return taken

        waited = {c for c in wrong if names[c] in there or c in absent} - self.dismissed()
        asked = {self._send(kind, c, *ask(c), SLACK, taker(c)) for c in sorted(waited)}
        left = math.inf
        while waited - self.dismissed() and left > 0:  # what has come already is taken, however late it is
            left = end - time.monotonic()
            self.wait(min(1.0, left))
        self._cancel(asked)
        there = self.transport.present()
        return wrong | {c: SILENT for c in waited if names[c] in there}

    # ---- the end

    def finish(self) -> None:
        """Let all clients keep what their own models are made of, and so new ones; wait for who is away.

        Who has it already, of a run that ended before, is not waited for.
        """
        names, version = self.population.names, self.state.server.version
        told = self._told(version)
        end = time.monotonic() + self.terms.patience
        self._welcome()
        wrong = self.survey(
            "last",
            range(len(names)),
            lambda c: self._about(self.state, c, {}, True),
            unused,
            absent=[c for c, name in enumerate(names) if name not in told],
        )
        while self._are_coming() and (left := end - time.monotonic()) > 0:
            self.wait(min(1.0, left))
        told |= {name for c, name in enumerate(names) if c not in wrong}
        if self.folder is not None:
            content = {"version": version, "clients": sorted(told)}
            write_private(self.folder / TOLD_FILE, json_text(content, indent=2).encode())
        for client in sorted(wrong.keys() - self.dismissed()):
            if names[client] not in told:
                text = "client %s has not got its model (%s): start it, then the server again with --resume"
                LOG.warning(text, names[client], wrong[client])

    def _told(self, version: int) -> set[str]:
        """Return the names of those who have kept the model of this version as the last."""
        file = None if self.folder is None else self.folder / TOLD_FILE
        found = {} if file is None or not file.is_file() else read_json(file)
        return set(found["clients"]) if found.get("version") == version else set()

    def _about(
        self, state: State, client: int, head: Mapping[str, Any], whole: bool
    ) -> tuple[dict[str, Any], Body]:
        """Return a request about the server's model as it is now."""
        server = state.server
        return {**head, **self._place(client, server.version)}, self._model(client, server, whole=whole)

    # ---- clients that come while the run goes on

    def _welcome(self) -> None:
        """Send the model as it is to clients that have come later: the method's rule gives them their own."""
        server, state = self.state.server, self.state
        strangers = self.transport.present() - self.numbers.keys()
        for name in sorted(
            n for n in strangers if self.newcomers.get(n, {}).get("version") != server.version
        ):
            self.newcomers[name] = {**self.newcomers.get(name, {}), "version": server.version}
            turns = usual_effort(self.stage, state).rounds
            place = {"stage": self.stage.number, "stage_start": state.stage_start, "version": server.version}
            body = Body.of({**within("shared", server.shared), **within("extra", server.extra)})
            head = {**place, "turns": turns, **self._common(0)}
            self._dispatch("arrive", -1, name, head, body, SLACK, functools.partial(self._arrived, name))

    def _are_coming(self) -> bool:
        return any(request.head["kind"] == "arrive" for request in self.requests.values())

    def _arrived(self, name: str, head: dict[str, Any], tensors: Tensors, fault: str) -> None:  # noqa: ARG002
        """Note what a client has said that came later."""
        names = [m.name for m in self.stage.setup.profile.metrics]
        scores, _ = scores_of(head, names)
        self.newcomers[name] |= {"fault": fault} if fault else {"scores": scores, "fault": ""}
        LOG.info("new client %s: %s", name, fault or scores)

    # ---- single requests

    def _place(self, client: int, version: int) -> dict[str, Any]:
        """Return where the run is, and which state of the client it goes on from."""
        stage, state = self.stage, self.state
        head = {"stage": stage.number, "stage_start": state.stage_start, "version": version}
        if not isinstance(state.store, Addresses):
            return head
        address = state.store.of(client)
        kept = dict.fromkeys([*self.answers.needed(client), *state.store.needed(client)])
        return {**head, "address": list(address) if address.exists else None, "kept": [list(a) for a in kept]}

    def _model(self, client: int, server: ServerState, *, whole: bool = False, exact: bool = True) -> Body:
        """Return a model as this client receives it: all of it, or the part that its device holds.

        exact  whether it is the server's; else it has passed the transforms of downloads, as in training
        """
        stage, devices = self.stage, self.stage.setup.devices
        kind, packed = int(devices.class_of[client]), not exact and bool(stage.channel.downloads.transforms)
        both = set(stage.partition.shared) & set(stage.partition.personal)  # own copies of what it lacks
        whole = whole or packed or devices.complete[kind] or bool(both)
        key = (server.version, -1 if whole else kind, packed)
        if key not in self._bodies:
            while len(self._bodies) >= MOST_BODIES:
                del self._bodies[next(iter(self._bodies))]
            shared, extra = server.shared, server.extra
            if not whole:
                shared, extra = devices.received(kind, shared), devices.held(kind, extra)
            model = within("shared", shared)
            if packed:
                model = {"sent": as_tensor(stage.channel.packed_download(shared))}
            self._bodies[key] = Body.of({**model, **within("extra", extra)})
        return self._bodies[key]

    def _send(
        self,
        kind: str,
        client: int,
        head: Mapping[str, Any],
        body: Body,
        limit: int,
        taken: Callable[[dict[str, Any], Tensors, str], None],
    ) -> str:
        """Send a client of the run a request, and return its number."""
        sizes = [int(self.population.sizes(split)[client]) for split in SPLITS]
        head = {**head, **self._common(client), "sizes": sizes}
        return self._dispatch(kind, client, self.population.names[client], head, body, limit, taken)

    def _common(self, client: int) -> dict[str, Any]:
        """Return what requests say of the run, and of a client's place in it."""
        population = self.population
        largest = int(population.n_train.max())
        return {"digest": self.digest, "clients": population.clients, "number": client, "largest": largest}

    def _dispatch(
        self,
        kind: str,
        client: int,
        name: str,
        head: Mapping[str, Any],
        body: Body,
        limit: int,
        taken: Callable[[dict[str, Any], Tensors, str], None],
        question: str = "",
        again: int = 0,
    ) -> str:
        number = secrets.token_hex(16)
        head = {**head, "kind": kind, "id": number, "run": self.run}
        message = segments(head, body)
        self.requests[number] = Request(
            client, name, head, body, limit, taken, question or number, again=again
        )
        self.bytes_down += sum(map(len, message))
        self.transport.send(name, number, *message)
        return number

    def _cancel(self, questions: Collection[str]) -> None:
        """Wait no more for the replies to these requests, and to what was sent for them since."""
        for number, request in list(self.requests.items()):
            if request.question in questions:
                del self.requests[number]
                self.transport.cancel(request.name, number)

    # ---- replies

    def _take(self, arrival: Arrival) -> None:
        """Take a reply: to a request that is waited for, else it is ignored."""
        self.bytes_up += len(arrival.body)
        request = self.requests.get(arrival.request)
        if request is None or request.name != arrival.name:
            self.ignored += 1
            return
        del self.requests[arrival.request]
        head, tensors, fault = read_reply(arrival, request)
        if not fault and head["kind"] == "lacks":
            fault = self._sent_again(request, head.get("stages"))
            if not fault:
                return
        request.taken(head, tensors, fault)

    def _sent_again(self, request: Request, stages: Any) -> str:
        """Send a client the models that stages begin with, and what it was asked; or say what is wrong."""
        numbers = stages if isinstance(stages, list) else []
        known = {n for n in numbers if type(n) is int and 1 <= n <= self.stage.number}
        if not known or len(known) != len(numbers):
            return "it lacks what nobody has"
        if request.again >= MOST_ASKED_AGAIN:
            return "it goes on lacking what it was sent"
        client, name, head, question = request.client, request.name, request.head, request.question
        for number in sorted(known):
            body, about = self._initial(number), {**head, "stage": number}
            self._dispatch("stage", client, name, about, body, SLACK, ignored, question)
        self._dispatch(
            head["kind"],
            client,
            name,
            head,
            request.body,
            request.limit,
            request.taken,
            question,
            request.again + 1,
        )
        return ""

    def _initial(self, number: int) -> Body:
        """Return the model that a stage has begun with, as it is sent."""
        if number not in self._initials:
            assert self.folder is not None
            tensors = load_file(self.folder / f"{number}.safetensors")
            self._initials[number] = Body.of(within("initial", tensors))
        return self._initials[number]
