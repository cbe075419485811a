"""The result of a run: models, scores, who gained and who lost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from partita.core import check, tree
from partita.core.types import ClientState, Tensors
from partita.engine import snapshot
from partita.engine.federation import Federation
from partita.engine.monitor import Watch
from partita.engine.record import Record, read, write_page
from partita.engine.results import figures
from partita.engine.snapshot import Holdings
from partita.engine.store import Store, checkpoint, open_store
from partita.engine.store.files import copy_folder, write_json, write_jsonl
from partita.engine.store.places import new_folder

MEAN_BYTES = 1 << 26  # of personal parts that are averaged at once


class Client:
    """One client after a run: its tensors and its model.

    `personal` and `memory` are what it keeps. Where clients keep nothing (`ffgg`, state="reset"), `personal`
    is that part of the model that it is evaluated with.
    """

    def __init__(self, run: Run, number: int) -> None:
        self._run, self.number, self.name = run, number, run.clients[number]["client"]

    @property
    def trained(self) -> bool:
        """Whether it has trained what it keeps; False for a client that never had a turn."""
        return not self._run.holdings.keeps or bool(self._run.touched[self.number])

    @property
    def personal(self) -> Tensors:
        """The tensors of its own part."""
        run = self._run
        if not run.holdings.own:
            return {}
        if not run.holdings.keeps:
            return tree.pick(run.personalized(self.number), run.holdings.own)
        self._warn()
        return self._state.personal

    @property
    def memory(self) -> Tensors:
        """What it remembers beside its part, such as a control variate; empty where clients keep nothing."""
        return self._state.memory if self._run.holdings.keeps else {}

    def model(self) -> nn.Module:
        """The model that this client is evaluated with, ready to use."""
        run = self._run
        self._warn()
        return run.filled(run.personalized(self.number), run.narrow and run.narrow(self.number))

    @property
    def _state(self) -> ClientState:
        state: ClientState = tree.row(self._run.store.load([self.number]), 0)
        return state

    def _warn(self) -> None:
        if self._run.holdings.own and not self.trained:
            check.warn(
                f"client {self.name!r} never had a turn: its personal part is the one that all start with"
            )

    def __repr__(self) -> str:
        own, memory = list(self._run.holdings.own), list(self.memory)
        turn = "" if self.trained else ", never had a turn"
        return f"Client({self.name!r}, personal={own}, memory={memory}{turn})"


@dataclass(frozen=True, eq=False, repr=False)
class Run(Record):
    """What `federate` returns and `partita.load` reads: the figures of a run, and its models.

    `shared` are the server's tensors; `client(i)` has a client's own, and `holdings` say who holds what.
    """

    shared: Tensors
    base: Tensors
    store: Store
    module: nn.Module | None
    personalized: Callable[[int], Tensors]
    narrow: Callable[[int], nn.Module | None] | None
    write: Callable[[Path], None]
    holdings: Holdings

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
            holdings=Holdings.of(run),
        )

    @functools.cached_property
    def touched(self) -> np.ndarray:
        """For each client, whether a state of its own was kept."""
        found = np.zeros(len(self.clients), dtype=bool)
        found[self.store.touched] = True
        return found

    def client(self, which: int | str) -> Client:
        """A client by its number, 0 to clients − 1 in the order of `names`, or by its name."""
        if isinstance(which, str):
            return Client(self, self.names.index(check.choice("client", which, self.names)))
        return Client(self, check.integer("client", which, low=0, high=len(self.clients) - 1))

    def model(self, personal: str | None = None) -> nn.Module:
        """The server's model, where it has trained a whole one; `personal` says what to do where it has not.

        personal   'mean': the clients' personal parts, averaged over the honest clients that have trained one
                   and weighted by their samples, in place of the server's; 'initial': what the server has not
                   trained is as it was when clients began to train it, and the rest is the server's.
                   For a client of the run, `client(i).model()` is its model

        What the server's model is good for depends on the method. Of fedavg and its kin it is the result. Of
        ditto, pfedme and apfl it is the global model beside the clients' own; of l2gd and the fedplus family
        the centre of the clients' models; of perfedavg and persafl the model from which a client that comes
        later starts with a few steps on its own data. finetune leaves it as it was given.
        """
        if personal is not None:
            check.choice("personal", personal, ("mean", "initial"))
        tensors = {**self.base, **self.shared}
        if personal == "mean":
            tensors |= self._mean()
        elif personal is None and self.holdings.untrained:
            raise check.fail("personal", personal, self._whole())
        return self.filled(tensors)

    def _whole(self) -> str:
        """How to get a whole model where the server has none."""
        names = self.holdings.untrained
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        mean = "'mean' (the clients' parts averaged), " if not self.holdings.no_mean else ""
        return (
            f"{mean}'initial' (as clients began) or run.client(i).model(), the model of a client: the server "
            f"of {self.facts['algorithm']} has not trained {shown}"
        )

    def _mean(self) -> Tensors:
        """Σ n_i v_i / Σ n_i over the honest clients that have trained a part v_i on n_i samples."""
        if self.holdings.no_mean:
            allowed = (
                f"'initial', or run.client(i).model() for the model of a client: {self.holdings.no_mean}"
            )
            raise check.fail("personal", "mean", allowed)
        if not self.holdings.own:
            return {}
        weight = np.where(self.table.numbers("byzantine") > 0, 0.0, self.table.numbers("n_train"))
        there = np.flatnonzero(self.touched & (weight > 0))
        if not len(there):
            raise check.fail("personal", "mean", "'initial': no client has trained a personal part")
        total: Tensors = {}
        block = max(1, MEAN_BYTES // max(1, tree.nbytes(tree.pick(self.base, self.holdings.own))))
        for i in range(0, len(there), block):
            some = there[i : i + block]
            n = torch.from_numpy(weight[some] / weight[there].sum())
            for k, v in self.store.load(some).personal.items():
                part = torch.tensordot(n.to(v.device), v.double(), dims=1)
                total[k] = total[k] + part if k in total else part
        return {k: _like(v, self.base[k]) for k, v in total.items()}

    def filled(self, tensors: Tensors, module: nn.Module | None = None) -> nn.Module:
        """A copy of the model, or of the narrow one that a client holds, with these tensors."""
        module = module or self.module
        if module is None:
            raise check.fail("model", None, "partita.load(folder, model=...) with the model that was trained")
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
    try:
        store = _states(parts, found, len(record.clients))
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise check.fail("folder", str(folder), f"a checkpoint of the run ({reason})") from error
    shared, base = parts["shared"], parts["base"]
    holdings = Holdings.read(found.state, parts)

    def personalized(number: int) -> Tensors:
        if holdings.computed:
            raise _computed(record.facts["algorithm"], number, folder)
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
        holdings=holdings,
    )


def _older(there: int, wanted: int) -> str:
    """What a folder lacks whose models are not those of its figures."""
    return (
        f"a whole checkpoint of round {wanted}, of which its figures are: the newest is of round {there}. "
        f"partita.federate(..., resume=True) would train from there on; `partita report` needs only figures"
    )


def _like(mean: Tensor, value: Tensor) -> Tensor:
    """A mean as the tensor that it stands for; counters stay whole."""
    return (mean if value.is_floating_point() else mean.round()).to(value.device, value.dtype)


def _states(parts: Mapping[str, Tensors], found: checkpoint.Checkpoint, clients: int) -> Store:
    """The clients' states of a checkpoint."""
    template = ClientState(parts["personal"], parts["memory"])
    states = found.path.parent / f"clients-{found.state['stage']}"
    store = open_store(template, clients, kind="disk" if states.exists() else "memory", folder=states)
    store.restore(parts["store"])
    return store


def _computed(method: str, number: int, folder: Path) -> check.Refused:
    """Return the error of a client's model that is not in the folder; it says how to get the model."""
    reason = f"{method} computes a client's model from the client's data, which partita.load does not have"
    federate = f"partita.federate(..., out={str(folder)!r}, resume=True)"
    return check.fail("client", number, f"{federate}, which reads a finished run and trains nothing", reason)
