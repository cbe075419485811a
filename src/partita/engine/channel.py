"""What lies between the clients and the server: what happens to uploads and downloads on their way.

    client   message → encode, one transform after another → what is sent
    server   what is sent → decode, in reverse order → accept → aggregate, or sum up and release

A simulation encodes and decodes inside the executor, as the last thing that a client's rule does: a stack of
clients does it as one, and all that follows sees what a server would see. Where compression has `feedback`,
clients keep what it has lost and add it to what they send next:

    sent = decode(encode(x + e)),   e ← x + e − sent

What releases is in `partita.engine.release`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita.core import check, codec, draws, tree
from partita.core.parts import Algorithm, LocalRule, Problem, Transform
from partita.core.types import (
    ClientState,
    Cohort,
    Download,
    Group,
    Message,
    ServerState,
    Tensors,
    Upload,
)
from partita.engine.devices.devices import Devices
from partita.engine.execute.cuda.replayed import Replayed

OWN = "uploads."
"""What begins the names, in `extra`, of what transforms send and of what they tell clients."""
RESIDUAL = "residual."
"""What begins the names, in a client's memory, of what compression has lost so far."""
SENT = "sent."
"""What begins the names, in `extra`, of what is sent, where an upload is not what arrives."""


# ---- an upload as a message


def message_of(upload: Upload, statistics: frozenset[str]) -> Message:
    """Return what a client sends by path; counters and BatchNorm's `statistics` are no directions."""
    numbers: Tensors = {}
    rest: Tensors = {}
    for part, tensors in (("delta", upload.delta), ("sums", upload.sums), ("extra", upload.extra)):
        for name, value in tensors.items():
            moves = part != "extra" and value.is_floating_point() and name not in statistics
            (numbers if moves else rest)[f"{part}.{name}"] = value
    return Message(numbers, rest)


def upload_of(message: Message, before: Upload) -> tuple[Upload, Tensors]:
    """Return the upload that a message was made of, in the order of its names, and what else was sent."""
    paths = {**message.rest, **message.numbers}
    delta, sums, extra = (
        {name: paths.pop(f"{part}.{name}") for name in tensors}
        for part, tensors in (("delta", before.delta), ("sums", before.sums), ("extra", before.extra))
    )
    return before._replace(delta=delta, sums=sums, extra=extra), paths


def own_name(number: int, name: str) -> str:
    """Return what `extra` calls something of the transform of this number."""
    return f"{OWN}{number}.{name}"


def told(number: int, extra: Tensors) -> Tensors:
    """Return what is the transform's of what travels beside the model, by its own names."""
    prefix = own_name(number, "")
    return {k.removeprefix(prefix): v for k, v in extra.items() if k.startswith(prefix)}


def without_own(tensors: Tensors) -> Tensors:
    """Return what is the method's own of what travels beside the model."""
    return {k: v for k, v in tensors.items() if not k.startswith(OWN)}


# ---- the way of one upload


class Way:
    """The transforms that an upload passes: `lossless` ones, then those that compress it."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = tuple(transforms)
        lossy = [i for i, t in enumerate(self.transforms) if t.lossy]
        self.lossless = lossy[0] if lossy else len(self.transforms)
        self.feedback = any(t.feedback for t in self.transforms)

    def encode(
        self, message: Message, publics: Sequence[Tensors], key: Tensor, numbers: range
    ) -> tuple[Message, list[Message]]:
        """Return what some of the transforms make of a message, and what each of them was given."""
        given = []
        for i in numbers:
            given.append(message)
            encode = self.transforms[i].encode
            if encode is not None:
                message = encode(message, publics[i], draws.branch(key, "upload", i))
        return message, given

    def decode(self, message: Message, given: Sequence[Message], key: Tensor) -> Message:
        """Return what the server makes of a message; of `given` only shapes and types are looked at."""
        for i in reversed(range(len(given))):
            decode = self.transforms[i].decode
            if decode is not None:
                message = decode(message, given[i], draws.branch(key, "upload", i))
        return message

    def __call__(
        self, message: Message, publics: Sequence[Tensors], key: Tensor, residual: Tensors
    ) -> tuple[Message, Tensors]:
        """Return what arrives at the server, and what compression has lost so far."""
        return self.passage(message, publics, key, residual)[1:]

    def passage(
        self, message: Message, publics: Sequence[Tensors], key: Tensor, residual: Tensors
    ) -> tuple[Message, Message, Tensors]:
        """Return what is sent, what arrives of it, and what compression has lost so far."""
        n = len(self.transforms)
        whole, given = self.encode(message, publics, key, range(self.lossless))
        if residual:
            whole = whole._replace(numbers={k: v + residual[k] for k, v in whole.numbers.items()})
        sent, then = self.encode(whole, publics, key, range(self.lossless, n))
        arrived = self.decode(sent, [*given, *then], key)
        return sent, arrived, {k: whole.numbers[k] - arrived.numbers[k] for k in residual}

    def layout(self, message: Message, publics: Sequence[Tensors]) -> codec.Entries:
        """Return the layout of the bytes of what is sent of such a message, which both sides know."""
        sent, given = self.encode(message, publics, _trial_key(message), range(len(self.transforms)))
        bits: dict[str, int] = {}
        below: dict[str, int] = {}
        for transform, before in zip(self.transforms, given):
            bits |= {} if transform.packed is None else transform.packed(before)
            below |= {} if transform.below is None else transform.below(before)
        return codec.layout_of(sent, bits, below)

    def size(self, message: Message, publics: Sequence[Tensors]) -> int:
        """Return the bytes of what is sent of such a message."""
        return codec.size(self.layout(message, publics))

    def tried(
        self, field: str, message: Message, publics: Sequence[Tensors]
    ) -> tuple[Message, list[set[str]]]:
        """Return what arrives of a message, and what of it each transform has added.

        Compression that finds nothing left to compress is refused.
        """
        key = _trial_key(message)
        sent, given = self.encode(message, publics, key, range(len(self.transforms)))
        arrived, steps = self.decode(sent, given, key), [*given, sent]
        for i, transform in enumerate(self.transforms):
            if transform.lossy and message.numbers and not given[i].numbers:
                last = self.transforms[i - 1].name
                reason = f"{last!r} leaves no numbers to compress"
                raise check.fail(
                    f"{field}[{i}]", transform.name, f"{transform.name!r} before {last!r}", reason
                )
        kept = set(arrived.rest) - set(message.rest)
        paths = [set(step.numbers) | set(step.rest) for step in steps]
        return arrived, [(after - before) & kept for before, after in itertools.pairwise(paths)]


def _refuse_idle(transforms: Sequence[Transform], message: Message) -> None:
    """Refuse compression of what a method sends beside the model: averages, which are no directions."""
    idle = next((i for i, t in enumerate(transforms) if t.lossy), None)
    if idle is not None and not message.numbers:
        sent = ", ".join(sorted(message.rest)[:3])
        reason = f"clients send {sent}, which travel as they are"
        raise check.fail(f"uploads[{idle}]", transforms[idle].name, "a method that sends changes", reason)


def _trial_key(message: Message) -> Tensor:
    device = next((x.device for part in message for x in part.values()), "cpu")
    return draws.key(0, "trial", device=device)


# ---- bound to a stage


@dataclass(frozen=True, eq=False)
class Channel:
    """The transforms of a stage, bound to what its clients send.

    uploads     what happens to uploads, and `downloads` to what clients receive
    statistics  the names of what is no direction: BatchNorm statistics
    like        what arrives of a client that holds the whole model, with what transforms send beside it
    added       by path, the number of the transform that has added what it sends beside the upload
    """

    uploads: Way
    downloads: Way
    statistics: frozenset[str]
    like: Upload
    added: dict[str, int]
    replayed: Replayed = field(default_factory=lambda: Replayed("what a server accepts"))

    @classmethod
    def of(
        cls,
        uploads: Sequence[Transform],
        downloads: Sequence[Transform],
        statistics: Sequence[str],
        like: Upload,
    ) -> Channel:
        """Try the transforms on what a client sends that has taken no step; if that is nothing, none acts."""
        uploads = uploads if any(like.payload) else ()
        way, names = Way(uploads), frozenset(statistics)
        publics = [{} if t.begin is None else t.begin(like)[0] for t in uploads]
        message = message_of(like, names)
        _refuse_idle(uploads, message)
        arrived, found = way.tried("uploads", message, publics) if uploads else (message, [])
        added = {path: number for number, paths in enumerate(found) for path in sorted(paths)}
        sent = {own_name(number, path): arrived.rest[path] for path, number in added.items()}
        like = like._replace(extra={**like.extra, **sent})
        return cls(way, Way(downloads), names, like, added)

    def _publics(self, like: Upload) -> list[Tensors]:
        """Return what transforms tell clients at first."""
        return [{} if t.begin is None else t.begin(like)[0] for t in self.uploads.transforms]

    # ---- the client's side

    def around(self, algorithm: Algorithm, decoded: bool = True) -> Algorithm:
        """Return the method whose clients send their uploads this way; who comes later sends nothing.

        decoded  whether an upload is what arrives at the server; else it is what is sent, all in `extra`
        """
        if not self.uploads.transforms:
            return algorithm
        later = algorithm.newcomer or algorithm.local
        return replace(algorithm, local=self._sending(algorithm.local, decoded), newcomer=_silent(later))

    def new_client(self, state: ClientState) -> ClientState:
        """Return the state of a client that was never seen, with nothing lost so far."""
        if not self.uploads.feedback:
            return state
        lost = tree.zeros_like(message_of(self.like, self.statistics).numbers)
        return state._replace(memory={**state.memory, **{RESIDUAL + k: v for k, v in lost.items()}})

    def _sending(
        self, build: Callable[[Problem], LocalRule], decoded: bool
    ) -> Callable[[Problem], LocalRule]:
        way, feedback = self.uploads, self.uploads.feedback

        def bind(problem: Problem) -> LocalRule:
            rule = build(problem)

            def finish(carry: Any, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
                upload, new = rule.finish(carry, _own(download), _without_residual(state))
                publics = [told(i, download.extra) for i in range(len(way.transforms))]
                message, residual = message_of(upload, self.statistics), _residual(state)
                assert download.key is not None
                if decoded:
                    arrived, lost = way(message, publics, download.key, residual)
                    upload = self._arrived(arrived, upload)
                else:
                    sent, _, lost = way.passage(message, publics, download.key, residual)
                    upload = _as_sent(sent, upload)
                memory = {**new.memory, **{RESIDUAL + k: v for k, v in lost.items()}}
                return upload, new._replace(memory=memory) if feedback else new

            return _with_own(rule)._replace(finish=finish)

        return bind

    def _arrived(self, message: Message, before: Upload) -> Upload:
        """Return the upload of what has arrived, with what transforms have sent beside it."""
        upload, beside = upload_of(message, before)
        sent = {own_name(self.added[path], path): value for path, value in beside.items()}
        return upload._replace(extra={**upload.extra, **sent})

    # ---- between two machines

    def packed(self, upload: Upload, devices: Devices, kind: int) -> bytes:
        """Return the bytes of an upload as it is sent (`around`) by a client of this class of devices."""
        layout = self.layout(devices, kind)
        sent = {k.removeprefix(SENT): v for k, v in upload.extra.items() if k.startswith(SENT)}
        parts: tuple[Tensors, Tensors] = ({}, {})
        for entry in layout:
            parts[0 if entry.number else 1][entry.path] = sent[entry.path]
        return codec.pack(Message(*parts), layout)

    def unpacked(self, data: bytes | memoryview, devices: Devices, kind: int, key: Tensor) -> Upload:
        """Return what arrives of these bytes, which may come from anybody; refuse what nobody has sent.

        key  that of the client's turn, `Download.key`
        """
        held = self._held(devices, kind)
        _, given = self._trial(held)
        sent = codec.unpack(data, self.layout(devices, kind), key.device)
        return self._arrived(self.uploads.decode(sent, given, key), held)

    def layout(self, devices: Devices, kind: int) -> codec.Entries:
        """Return the layout of the bytes that a client of this class sends."""
        return self.uploads.layout(
            message_of(self._held(devices, kind), self.statistics), self._publics(self.like)
        )

    def _held(self, devices: Devices, kind: int) -> Upload:
        """Return what the method itself makes of the turn of a client of this class."""
        own = self.like._replace(extra=without_own(self.like.extra))
        return own._replace(delta=devices.held(kind, own.delta), sums=devices.held(kind, own.sums))

    def _trial(self, held: Upload) -> tuple[Message, list[Message]]:
        message, way = message_of(held, self.statistics), self.uploads
        return way.encode(message, self._publics(self.like), _trial_key(message), range(len(way.transforms)))

    # ---- what it costs

    def bytes_up(self, devices: Devices, kind: int) -> int:
        """Return the bytes that a client of this class of devices uploads: those of what is really sent."""
        if not self.uploads.transforms:
            return devices.bytes_up(kind, self.like)
        return codec.size(self.layout(devices, kind))

    def bytes_down(self, devices: Devices, kind: int, server: ServerState) -> int:
        """Return the bytes that a client of this class downloads: its part, and its frozen blocks."""
        whole = devices.bytes_down(kind, server)
        if not self.downloads.transforms:
            return whole
        shared = devices.received(kind, server.shared)
        message = message_of(Upload(shared), self.statistics)
        return (
            whole - tree.nbytes(shared) + self.downloads.size(message, [{}] * len(self.downloads.transforms))
        )

    # ---- the server's side

    def accepted(self, uploads: Upload, extra: Tensors) -> Upload:
        """Return stacked uploads as the server takes them: what must hold of each is enforced.

        extra  what the server tells clients beside the model
        """
        accepts = any(t.accept is not None for t in self.uploads.transforms)
        caps = [t.weight_cap for t in self.uploads.transforms if t.weight_cap is not None]
        if caps and uploads.weight is not None:
            uploads = uploads._replace(weight=uploads.weight.clamp(max=min(caps)))
        if not accepts or not any(uploads.payload):
            return uploads
        enforced: Upload = self.replayed.function(self._enforced, uploads, extra)
        return enforced

    def _enforced(self, uploads: Upload, extra: Tensors) -> Upload:
        own = uploads._replace(extra=without_own(uploads.extra))
        beside = [told(i, uploads.extra) for i in range(len(self.uploads.transforms))]
        message = message_of(own, self.statistics)
        accepting = [(i, t.accept) for i, t in enumerate(self.uploads.transforms) if t.accept is not None]
        for i, accept in reversed(accepting):
            given = message._replace(rest={**message.rest, **beside[i]})
            public = told(i, extra)
            taken = torch.func.vmap(lambda m, accept=accept, public=public: accept(m, public))(given)
            beside[i] = {path: taken.rest[path] for path in beside[i]}
            rest = {k: v for k, v in taken.rest.items() if k not in beside[i]}
            message = Message(taken.numbers, rest)
        own, _ = upload_of(message, own)
        sent = {own_name(i, path): v for i, paths in enumerate(beside) for path, v in paths.items()}
        return own._replace(extra={**own.extra, **sent})

    def downloaded(self, cohort: Cohort) -> Cohort:
        """Return a cohort whose clients have received what the server has sent them."""
        if not self.downloads.transforms:
            return cohort
        return cohort._replace(groups=tuple(map(self._received, cohort.groups)))

    def _received(self, group: Group) -> Group:
        shared = group.download.shared
        if not shared:  # every client alone
            return group
        receive = torch.func.vmap(self._of_server) if group.stacked else self._of_server
        return group._replace(download=group.download._replace(shared=receive(shared)))

    def _of_server(self, shared: Tensors) -> Tensors:
        """Return what arrives at a client of the server's model; its transforms draw nothing."""
        sent, given, key = self._download(shared)
        return upload_of(self.downloads.decode(sent, given, key), Upload(shared))[0].delta

    def packed_download(self, shared: Tensors) -> bytes:
        """Return the bytes of the server's model on its way to clients."""
        return codec.pack(self._download(shared)[0], self._download_layout(shared))

    def unpacked_download(self, data: bytes | memoryview, like: Tensors) -> Tensors:
        """Return the model that arrives of these bytes, in the shapes of `like`."""
        _, given, key = self._download(like)  # of which shapes are looked at
        sent = codec.unpack(data, self._download_layout(like), key.device)
        return upload_of(self.downloads.decode(sent, given, key), Upload(like))[0].delta

    def _download(self, shared: Tensors) -> tuple[Message, list[Message], Tensor]:
        """Return what is sent of a model, what each transform was given, and a key."""
        message = message_of(Upload(shared), self.statistics)
        key = _trial_key(message)
        n = len(self.downloads.transforms)
        return *self.downloads.encode(message, [{}] * n, key, range(n)), key

    def _download_layout(self, shared: Tensors) -> codec.Entries:
        message = message_of(Upload(shared), self.statistics)
        return self.downloads.layout(message, [{}] * len(self.downloads.transforms))


def _as_sent(message: Message, before: Upload) -> Upload:
    """Return an upload that is what is sent, by paths behind a prefix."""
    sent = {f"{SENT}{path}": value for part in message for path, value in part.items()}
    return before._replace(delta={}, sums={}, extra=sent)


def _own(download: Download) -> Download:
    """Return what the method itself knows of a download."""
    return download._replace(extra=without_own(download.extra))


def _residual(state: ClientState) -> Tensors:
    return {k.removeprefix(RESIDUAL): v for k, v in state.memory.items() if k.startswith(RESIDUAL)}


def _without_residual(state: ClientState) -> ClientState:
    return state._replace(memory={k: v for k, v in state.memory.items() if not k.startswith(RESIDUAL)})


def _with_own(rule: LocalRule) -> LocalRule:
    """Return the rule, which sees what is the method's own."""

    def start(download: Download, state: ClientState) -> Any:
        return rule.start(_own(download), _without_residual(state))

    return rule._replace(start=start)


def _silent(build: Callable[[Problem], LocalRule]) -> Callable[[Problem], LocalRule]:
    """Return the rule of clients that send nothing, and so lose nothing."""

    def bind(problem: Problem) -> LocalRule:
        rule = build(problem)

        def finish(carry: Any, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
            upload, new = rule.finish(carry, _own(download), _without_residual(state))
            lost = {RESIDUAL + k: v for k, v in _residual(state).items()}
            return upload, new._replace(memory={**new.memory, **lost})

        return _with_own(rule)._replace(finish=finish)

    return bind
