"""The result of a run: models, scores, who gained and who lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from partita import check, snapshot, tree
from partita.federation import Federation
from partita.record import Record, read, write_page
from partita.results import figures
from partita.store import Store, checkpoint, open_store
from partita.store.files import copy_folder, write_json, write_jsonl
from partita.store.places import new_folder
from partita.types import ClientState, Tensors
from partita.watch import Watch


class Client:
    """One client after a run: its tensors and its model."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self.number, self.name = run, number, run.clients[number]["client"]
        state = tree.row(run.store.load([number]), 0)
        self.personal: Tensors = state.personal
        self.memory: Tensors = state.memory

    def model(self) -> nn.Module:
        """The model that this client is evaluated with, ready to use."""
        run = self._run
        return run.filled(run.personalized(self.number), run.narrow and run.narrow(self.number))

    def __repr__(self) -> str:
        return f"Client({self.name!r}, personal={list(self.personal)}, memory={list(self.memory)})"


@dataclass(frozen=True, eq=False, repr=False)
class Run(Record):
    """What `federate` returns and `partita.load` reads: the figures of a run, and its models.

    `shared` are the server's tensors; `client(i)` has a client's own.
    """

    shared: Tensors
    base: Tensors
    store: Store
    module: nn.Module | None
    personalized: Callable[[int], Tensors]
    narrow: Callable[[int], nn.Module | None] | None
    write: Callable[[Path], None]

    @classmethod
    def of(cls, run: Federation, watch: Watch, references: Mapping[str, Record]) -> Run:
        """The result of a finished run; also writes clients.csv and summary.json."""
        found = figures(run, watch, references)

        def write(folder: Path) -> None:
            if run.folder is not None:
                copy_folder(run.folder, new_folder("folder", folder, outside=run.folder))
                return
            new_folder("folder", folder)
            write_json(folder / "config.json", watch.config())
            write_jsonl(folder / "metrics.jsonl", watch.rows)
            watch.write_results(folder, found)
            checkpoint.write(folder / "checkpoint", run.server.version, watch.tensors(), watch.state())

        if run.folder is not None:
            watch.write_results(run.folder, found)
        return cls(
            **vars(found),
            shared=run.server.shared,
            base=run.base,
            store=run.store,
            module=run.model,
            personalized=run.personal_model,
            narrow=run.devices.narrow_model,
            write=write,
        )

    def client(self, which: int | str) -> Client:
        """A client by its number, 0 to clients − 1 in the order of `names`, or by its name."""
        if isinstance(which, str):
            return Client(self, self.names.index(check.choice("client", which, self.names)))
        return Client(self, check.integer("client", which, low=0, high=len(self.clients) - 1))

    def model(self) -> nn.Module:
        """The server's model; where a part of it is personal, that part is as at the start."""
        return self.filled({**self.base, **self.shared})

    def filled(self, tensors: Tensors, module: nn.Module | None = None) -> nn.Module:
        """A copy of the model, or of the narrow one that a client holds, with these tensors."""
        module = module or self.module
        if module is None:
            raise ValueError(
                "model=None: expected partita.load(folder, model=...) with the model that was trained"
            )
        model = copy.deepcopy(module)
        there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        wrong = [k for k, v in tensors.items() if k not in there or there[k].shape != v.shape]
        if wrong:
            raise check.fail(
                "model", type(model).__name__, f"the model of the run: it differs in {', '.join(wrong[:3])}"
            )
        with torch.no_grad():
            for name, value in tensors.items():
                there[name].copy_(value)
        return model.eval()

    def save(self, folder: str | Path) -> None:
        """The run as a new folder like that of `out=`, page included; `partita.load` reads it."""
        target = check.path("folder", folder)
        self.write(target)
        if not (target / "report.html").exists():
            write_page({self.facts["algorithm"]: [self]}, target / "report.html")


def load(folder: str | Path, model: nn.Module | None = None) -> Run:
    """A finished run from its folder. `model` (as it was trained) is needed for `client(i).model()` only."""
    if model is not None and not isinstance(model, nn.Module):
        raise check.fail("model", model, "the nn.Module that was trained")
    record, folder = read(folder), Path(folder)
    found = checkpoint.read(folder / "checkpoint")
    if found is None:
        raise check.fail("folder", str(folder), "the folder of a run (it has no checkpoint)")
    if found.round != record.facts["rounds"]:  # else older weights would pass for those that were scored
        raise check.fail("folder", str(folder), _older(found.round, record.facts["rounds"]))
    parts = snapshot.split(found.tensors)
    template = ClientState(parts["personal"], parts["memory"])
    states = folder / "checkpoint" / f"clients-{found.state['stage']}"
    store = open_store(
        template, len(record.clients), kind="disk" if states.exists() else "memory", folder=states
    )
    store.restore(parts["store"])
    shared, base = parts["shared"], parts["base"]

    def personalized(number: int) -> Tensors:
        if found.state.get("computed", False):
            raise ValueError(_computed(record.facts["algorithm"], number, folder))
        return {**base, **shared, **tree.row(store.load([number]).personal, 0)}

    def write(target: Path) -> None:
        copy_folder(folder, new_folder("folder", target, outside=folder))

    return Run(
        **vars(record),
        shared=shared,
        base=base,
        store=store,
        module=model,
        personalized=personalized,
        narrow=None,
        write=write,
    )


def _older(there: int, wanted: int) -> str:
    """What a folder lacks whose models are not those of its figures."""
    return (
        f"a whole checkpoint of round {wanted}, of which its figures are: the newest is of round {there}. "
        f"partita.federate(..., resume=True) would train from there on; `partita report` needs only figures"
    )


def _computed(method: str, number: int, folder: Path) -> str:
    """Why a client's model is not in the folder, and how to get it."""
    return (
        f"client({number}).model(): {method} computes it when asked, from the client's data, which "
        f"partita.load does not have: expected the run of partita.federate(..., out={str(folder)!r}, "
        "resume=True), which reads a finished run and trains nothing"
    )
