"""What a user calls: `federate` with all its arguments, `load`, and the `Run` that both return."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, get_type_hints

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from partita.algorithms.known import written
from partita.core import check, tree
from partita.core.compiled import uncompiled
from partita.core.device import arithmetic
from partita.core.frozen import lean_copy, note, refuse_changed
from partita.core.notebook import in_notebook, table
from partita.core.options import bind, readable
from partita.core.parts import Algorithm
from partita.core.types import ClientState, Inputs, Tensors, Work
from partita.data import FederatedData
from partita.data.population import SPLITS
from partita.engine.callbacks import Callback, ProgressBar, Trace
from partita.engine.evaluate import personal_model, scores
from partita.engine.fitting import refuse_misfits
from partita.engine.folder import RunFolder
from partita.engine.newcomers import (
    Arrival,
    Effort,
    arrival_summary,
    arrival_table,
    arrive,
    returned,
    usual_effort,
)
from partita.engine.record import MODELS, Record, read
from partita.engine.settings import Settings, declarations, newcomers
from partita.engine.setup import Setup
from partita.engine.state import Holdings, decode, has_global
from partita.engine.stopping import Interrupt
from partita.engine.store import Store, durable, open_store
from partita.engine.store.addresses import Addresses, are_addresses
from partita.engine.store.files import copy_folder, write_csv, write_json
from partita.engine.store.output import new_folder, new_page
from partita.engine.table import Column, Table
from partita.engine.threads import same_threads
from partita.engine.train import Outcome, train
from partita.engine.workers.crew import employed
from partita.report import write, write_page

LOG = logging.getLogger("partita")

P = ParamSpec("P")


@dataclass(frozen=True)
class Arguments(Settings):
    """All arguments of `federate`: the settings, behind what is trained on what and how."""

    model: nn.Module | Callable[[], nn.Module]
    data: FederatedData
    algorithm: Algorithm

    def prepared(self) -> Setup:
        """The run that they describe, all of them checked, before any work."""
        if not isinstance(self.data, FederatedData):
            raise check.fail(
                "data", self.data, "a FederatedData, made by partita.data.from_arrays(...) or the like"
            )
        if not isinstance(self.algorithm, Algorithm):
            elsewhere = written(self.algorithm) if isinstance(self.algorithm, str) else ""
            allowed = elsewhere or "a method such as partita.fedavg(lr=0.1)"
            raise check.fail("algorithm", self.algorithm, allowed)
        held_out = newcomers(self.newcomers, self.data.names, self.seed)
        absent = set(held_out)
        others = [i for i in range(self.data.clients) if i not in absent]
        data = self.data.subset(others) if held_out else self.data
        settings = replace(self.checked(data.clients, data.names), newcomers=held_out)
        for name, other in self.references.items():
            if tuple(other.names) != tuple(data.names):
                raise check.fail(f"baselines[{name!r}]", other, "a run on the same clients")
        with arithmetic(settings.precision, settings.deterministic):
            setup = Setup.of(self.model, data, self.algorithm, settings)
            setup = setup.expecting(self.data.subset(held_out)) if held_out else setup
            refuse_misfits(setup)
            return setup

    @property
    def references(self) -> Mapping[str, Record]:
        """Baselines that are there already."""
        return self.baselines if isinstance(self.baselines, Mapping) else {}


def _called_with(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Arguments], Run]], Callable[P, Run]]:
    """Give a function the arguments of a dataclass, and their meaning to its docstring."""

    def decorate(function: Callable[[Arguments], Run]) -> Callable[P, Run]:
        known, hints = inspect.signature(arguments), get_type_hints(arguments, include_extras=True)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Run:
            bound = bind(function.__name__, known, args, kwargs)
            return function(arguments(*bound.args, **bound.kwargs))

        declared = known.replace(
            parameters=[p.replace(annotation=hints[p.name]) for p in known.parameters.values()],
            return_annotation="Run",
        )
        function.__signature__ = declared  # type: ignore[attr-defined]
        call.__signature__ = readable(declared)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{_meanings()}"
        return call

    return decorate


def _meanings() -> str:
    """What each setting means, a paragraph each."""
    found = []
    for name, (_, option) in declarations(Settings).items():
        lines = textwrap.wrap(option.text, 95)
        found += [f"{name:<12}{lines[0]}" if len(name) < 12 else f"{name}\n{'':12}{lines[0]}"]
        found += [f"{'':12}{line}" for line in lines[1:]]
    return "\n".join(found)


@_called_with(Arguments)
@check.each_warning_once()
def federate(given: Arguments) -> Run:
    """Train a model among the clients of `data` with `algorithm`, and find out who gains.

    model       any nn.Module (its weights are the start), or a function that makes one under the seed
    data        the clients' samples: `partita.data.from_arrays(x, y, client)` and the like
    algorithm   the method: `partita.fedalt(personal="output", lr=0.1)` and the like
    """
    interrupt = Interrupt(deadline(given.max_time, given.out, given.checkpoint_every))
    setup = given.prepared()
    settings, folder = setup.settings, setup.settings.folder
    if folder is not None and settings.report and (folder / "config.json").exists():
        new_page("out", folder / "report.html")
    return trained(setup, interrupt, given.references)


def trained(
    setup: Setup, interrupt: Interrupt, references: Mapping[str, Record], before: Outcome | None = None
) -> Run:
    """Carry a run out, from its beginning, its checkpoint or the end of one `before`, and write its page."""
    settings, folder = setup.settings, setup.settings.folder
    shown = sys.stderr.isatty() or in_notebook() if settings.progress is None else settings.progress
    listeners = [*settings.callbacks, *([ProgressBar()] if shown else [])]
    if settings.profile and folder is not None:
        ends_early = getattr(settings.schedule, "until", None) is not None  # after fewer rounds than `rounds`
        listeners.append(Trace(folder / "trace.json", skip=0 if ends_early else 2))
    name = setup.algorithm.name
    try:
        known = folder if settings.resume and settings.device == "cpu" else None
        exactly = arithmetic(settings.precision, settings.deterministic)
        with same_threads(known), exactly, employed(setup) as setup:
            result = Run.of(train(setup, name, listeners, interrupt, references, before))
        if folder is not None and settings.report:
            write_page({name: [result]}, folder / "report.html")
        if folder is not None:
            LOG.info("%s: results in %s", name, folder)
        return result
    finally:
        for listener in listeners:
            listener.close()


def deadline(max_time: float | str | None, out: str | Path | None, checkpoint_every: Any = None) -> float:
    """When a run must end, on the clock of `time.monotonic`; refused where nothing would be kept of it."""
    if max_time is None:
        return math.inf
    seconds = check.duration("max_time", max_time)
    if out is None:
        raise check.fail("max_time", max_time, "out=, the folder for its checkpoint")
    if checkpoint_every == 0:
        raise check.fail("max_time", max_time, "checkpoints, and so no checkpoint_every=0")
    return time.monotonic() + seconds


# ---- what comes out

MEAN_BYTES = 1 << 26  # of personal parts that are averaged at once


class Client:
    """One client after a run: its tensors and its model.

    `personal` and `memory` are what it keeps. Where clients keep nothing (`ffgg`, state="reset"), `personal`
    is that part of the model that it is evaluated with.
    """

    def __init__(self, run: Models, number: int) -> None:
        self._run, self.number, self.name = run, number, run.clients[number]["client"]

    @property
    def trained(self) -> bool:
        """Whether it has trained what it keeps; False for a client that never had a turn, or no samples."""
        holdings = self._run.holdings
        if not holdings.keeps:
            return not (holdings.forgotten and holdings.own)
        return bool(self._run.touched[self.number])

    @property
    def personal(self) -> Tensors:
        """The tensors of its own part."""
        run = self._run
        if not run.holdings.own:
            return {}
        self._warn()
        if not run.holdings.keeps:
            return tree.pick(run.personalized(self.number), run.holdings.own)
        return self._state.personal

    @property
    def memory(self) -> Tensors:
        """What it remembers beside its part, such as a control variate; empty where clients keep nothing."""
        return self._state.memory if self._run.holdings.keeps else {}

    def model(self, which: str = "personal") -> nn.Module:
        """The model that this client is evaluated with, ready to use.

        which   'personal': its own; 'global': the one that all clients are compared with; 'better': whichever
                of the two is better on its validation samples, see `Run.better`
        """
        run = self._run
        if check.choice("which", which, ("personal", "global", "better")) == "better":
            which = run.better()[self.number]
        if which == "global":
            return run.filled(run.global_model())
        self._warn()
        return run.filled(run.personalized(self.number), run.narrow and run.narrow(self.number))

    def samples(self, split: str = "test") -> tuple[Inputs, Tensor]:
        """Return inputs and targets of this client as its models get them: with the mask of padded sequences.

        Several inputs are a dictionary, for `model(**inputs)`, or a tuple, for `model(*inputs)`.
        """
        data = self._run.data
        if data is None:
            allowed = f"data.masked_for(model).client({self.number}, {split!r}) of your data"
            raise check.fail("samples", split, allowed, "partita.load reads models, but no data")
        return data.client(self.number, split)

    @property
    def _state(self) -> ClientState:
        state: ClientState = tree.row(self._run.store.load([self.number]), 0)
        return state

    @property
    def _reason(self) -> str:
        """Why it has trained nothing that it keeps."""
        return self._run.untouched if self._run.holdings.keeps else "forgets its part (state='reset')"

    def _warn(self) -> None:
        if self._run.holdings.own and not self.trained:
            reason = self._reason
            check.warn(f"client {self.name!r} {reason}: its personal part is the one that all start with")

    def __repr__(self) -> str:
        own, memory = list(self._run.holdings.own), list(self.memory)
        turn = "" if self.trained else f", {self._reason}"
        return f"Client({self.name!r}, personal={own}, memory={memory}{turn})"

    def _repr_html_(self) -> str:
        row, holdings = self._run.clients[self.number], self._run.holdings
        samples = [f"{row[f'n_{split}']} {split}" for split in SPLITS if row.get(f"n_{split}")]
        facts = {
            "samples": ", ".join(samples),
            "personal part": ", ".join(holdings.own) or "none",
            **{
                f"{kind}: test {self._run.facts['metric']}": f"{row[kind]:.4f}"
                for kind in MODELS
                if row.get(kind) is not None
            },
        }
        return table(f"Client {self.name}", (), facts.items(), "" if self.trained else self._reason)


@dataclass(frozen=True, eq=False, repr=False)
class Models(Record):
    """The figures of some clients, and their models.

    `shared` are the server's tensors; `client(i)` has a client's own, and `holdings` say who holds what.
    """

    shared: Tensors
    base: Tensors
    store: Store
    module: nn.Module | None
    personalized: Callable[[int], Tensors]
    narrow: Callable[[int], nn.Module | None] | None
    holdings: Holdings
    reference: Callable[[], Tensors]
    data: FederatedData | None

    untouched: ClassVar[str] = "never had a turn"
    """Why a client has trained nothing."""

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

    def global_model(self) -> Tensors:
        """The tensors of the model that all clients are compared with: the server's, or fedavg's."""
        if "global" in (self.facts.get("baselines") or {}):
            if not (reference := self.reference()):
                allowed = "a run with out=, which keeps the model of its fedavg baseline"
                raise check.fail("which", "global", allowed)
            return reference
        if self.holdings.untrained:
            names = ", ".join(self.holdings.untrained[:3])
            raise check.fail("which", "global", f"'personal': the server has not trained {names}")
        return {**self.base, **self.shared}

    def filled(self, tensors: Tensors, module: nn.Module | None = None) -> nn.Module:
        """A copy of the model, or of the narrow one that a client holds, with these tensors."""
        module = module or self.module
        if module is None:
            raise check.fail("model", None, "partita.load(folder, model=...) with the model that was trained")
        if self.module is not None:
            refuse_changed(self.module)
        model = lean_copy(module, own=tensors)
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


@dataclass(frozen=True, eq=False, repr=False)
class Personalized(Models):
    """What `Run.personalize` returns: clients that came after training, their models and their scores.

    `scores("personal")` and `scores("global")`, `table`, `summary()` and `client(i)` are as those of a run.
    """

    untouched: ClassVar[str] = "has no training samples"

    @classmethod
    def of(cls, arrival: Arrival, config: dict[str, Any]) -> Personalized:
        """Return the figures and the models of clients that came."""
        stage, state = arrival.stage, arrival.state
        table = arrival_table(arrival)
        summary = arrival_summary(arrival, table)
        result = cls(
            metrics=[],
            clients=table,
            config=config,
            facts=summary,
            shared=state.server.shared,
            base=state.initial,
            store=state.store,
            module=stage.setup.model,
            personalized=functools.partial(personal_model, stage, state),
            narrow=None,
            holdings=Holdings.of(stage, state),
            reference=dict,
            data=stage.setup.data,
        )
        summary["hurt"] = {f"vs_{kind}": result.hurt(kind) for kind in ("global", "local")}
        return result

    def model(self, which: int | str) -> nn.Module:
        """The model of a client by its number or its name, ready to use."""
        return self.client(which).model()

    def write(self, folder: str | Path) -> Path:
        """Write clients.csv, summary.json and models/NUMBER.safetensors of each client to a new folder."""
        target = new_folder("folder", folder)
        columns = ("client", "n_train", "n_test", *MODELS)
        write_csv(target / "clients.csv", self.table.values(columns, finite=True), columns)
        write_json(target / "summary.json", self.facts)
        (target / "models").mkdir()
        for number, name in enumerate(self.names):
            tensors = {k: v.contiguous().cpu() for k, v in self.personalized(number).items()}
            save_file(tensors, target / "models" / f"{number}.safetensors", {"client": name})
        return target


@dataclass(frozen=True, eq=False, repr=False)
class Run(Models):
    """What `federate` returns and `partita.load` reads: the figures of a run, and its models.

    `shared` are the server's tensors; `client(i)` has a client's own, and `holdings` say who holds what.
    """

    write: Callable[[Path], None]
    outcome: Outcome | None

    @classmethod
    def of(cls, outcome: Outcome) -> Run:
        """Return the result of a finished run."""
        record, stage, state, *_ = outcome

        def write(target: Path) -> None:
            folder = stage.setup.settings.folder
            if folder is not None:
                copy_folder(folder, new_folder("folder", target, outside=folder))
                return
            files = RunFolder(new_folder("folder", target))
            files.write_config(record.config)
            files.write_rows(record.metrics)
            files.write_results(record)
            files.checkpoint(stage, state)

        return cls(
            **vars(record),
            shared=state.server.shared,
            base=state.initial,
            store=state.store,
            module=stage.setup.model,
            personalized=functools.partial(personal_model, stage, state),
            narrow=stage.setup.devices.narrow_model,
            write=write,
            holdings=Holdings.of(stage, state),
            reference=lambda: outcome.reference,
            data=stage.setup.data,
            outcome=outcome,
        )

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
        if self._server_has_learned_nothing:
            check.warn(
                f"the server's model is as it was given: {self.facts['algorithm']} has trained nothing of it"
            )
        return self.filled(tensors)

    @property
    def _server_has_learned_nothing(self) -> bool:
        """Whether the server's model is what the run began with; a later stage begins with a trained one."""
        if len(self.config.get("algorithm", {}).get("stages") or ()) > 1 or not self.shared:
            return False
        return all(torch.equal(v, self.base[k]) for k, v in self.shared.items() if k in self.base)

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

    def extend(self, rounds: int, *, callbacks: Sequence[Callback] = (), progress: bool | None = None) -> Run:
        """Train so many rounds more; the result has the same bits as one run of all these rounds.

        The baselines are extended, too; without a folder they are trained anew. Of a pipeline, the last stage
        goes on. A run with a folder goes on in it: the folder then holds the longer run. Refused where the
        step size depends on the number of rounds, as with `partita.optim.linear`.

        callbacks, progress   as in `federate`; the callbacks of the run so far are not called again

        Weights do not depend on when a run is evaluated, but rows do: by default a run is evaluated after
        each tenth of its rounds, so a run of 40 rounds and 40 more has more rows than one of 80. With
        `evaluate_every` both have the same.
        """
        check.integer("rounds", rounds, low=1)
        if self.outcome is None:
            total = self.facts["rounds"] + rounds
            allowed = f"partita.federate(..., rounds={total}, resume=True) with the folder as out="
            raise check.fail("rounds", rounds, allowed, "partita.load reads no data and no method")
        stage, state = self.outcome.stage, self.outcome.state
        refuse_changed(stage.setup.model)
        settings = stage.setup.settings
        if stage.setup.elsewhere is not None:
            allowed = "another run of the longer experiment, with resume=True, which its clients have too"
            raise check.fail("rounds", rounds, allowed, "the clients are elsewhere")
        if settings.until is not None or settings.keep == "best":
            reason = "the run ended with its best round, from which a longer run would not have gone on"
            raise check.fail("rounds", rounds, "a new run with more rounds or a larger patience", reason)
        done, until = state.server.version - state.stage_start, state.schedule.until
        if until is not None and not state.ended and done < (stage.plan.rounds or 0):
            reason = f"the schedule ends at the virtual time {until:g}, whatever the rounds"
            raise check.fail("rounds", rounds, "a new run with a later until=", reason)
        setup = stage.setup.longer(stage.number, done + rounds)
        settings = replace(setup.settings, callbacks=tuple(callbacks), progress=progress)
        setup, given = replace(setup, settings=settings), settings.baselines
        references = given if isinstance(given, Mapping) else {}
        return trained(setup, Interrupt(), references, self.outcome)

    def personalize(
        self,
        data: FederatedData | None = None,
        *,
        rounds: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch: int | None = None,
        seed: int | None = None,
    ) -> Personalized:
        """Give clients that were not there in training their models, by the method's own rule.

        The server's model stays. Methods with a personal part (fedalt, fedsim, finetune) solve for it with
        the shared part fixed, ditto, pfedme, apfl, l2gd and the fedplus family for the client's own model
        near the server's; ffgg, perfedavg and persafl do what they do in an evaluation. Of methods without
        personal models, such as fedavg, it is the server's. Clients without training samples get what a new
        client starts with.

        data     the new clients' samples, in the form of those of training (None: of those that `newcomers=`
                 has held out)
        rounds   turns of each client (None: as many as a client of the run had on average)
        steps, epochs, batch   the work of a turn (None: that of the run); `personal_steps` and the like of
                 the method come first
        seed     of its draws (None: that of the run)
        """
        outcome = self._live("data", data, "personalize")
        stage, state = outcome.stage, outcome.state
        settings, data = stage.setup.settings, stage.setup.newcomers if data is None else data
        if data is None:
            raise check.fail("data", None, "the samples of new clients, or a run with newcomers=")
        usual = usual_effort(stage, state)
        effort = Effort(
            usual.rounds if rounds is None else check.integer("rounds", rounds, low=1),
            _work(usual.work, steps, epochs, batch),
            usual.seed if seed is None else check.integer("seed", seed, low=0, high=check.LARGEST),
        )
        with arithmetic(settings.precision, settings.deterministic):
            return Personalized.of(arrive(stage, state, data, effort), self.config)

    def evaluate(self, data: FederatedData, model: str = "personal", split: str = "test") -> Table:
        """Score models on the samples of `data`: a table of client, samples, model and score.

        model   'personal': of a client that took part (it has the same name) its own model, of others the
                server's; 'global': the server's for all
        split   whose samples are scored: 'test', 'validation' or 'train'

        Where a method computes a client's model from training samples (perfedavg, ffgg), those of `data` are
        taken. `table.numbers("score")` is the column as an array.
        """
        check.choice("model", model, ("personal", "global"))
        check.choice("split", split, SPLITS)
        outcome = self._live("data", data, "evaluate")
        stage, state = outcome.stage, outcome.state
        settings, devices = stage.setup.settings, stage.setup.devices
        if model == "personal" and devices.narrow:
            reason = "devices of this run hold narrower models than the server's"
            raise check.fail("model", model, "'global'", reason)
        with arithmetic(settings.precision, settings.deterministic):
            stage, state, known = returned(stage, state, data)
            own = known & (model == "personal" and stage.has_personal)
            whole = has_global(stage, state)
            if not whole and not own.all():
                stranger = data.names[int(np.argmin(own))]
                reason = "the server has no whole model for clients that did not take part"
                allowed = "run.personalize(data), or clients of training"
                raise check.fail("data", stranger, allowed, reason)
            result = scores(stage, state, "global", split) if whole else np.full(data.clients, np.nan)
            if own.any():
                result = np.where(own, scores(stage, state, "personal", split), result)
        columns: dict[str, Column] = {
            "client": data.names,
            "samples": data.sizes(split),
            "model": ["personal" if k else "global" for k in own],
            "score": result,
        }
        return Table(data.clients, columns)

    def _live(self, field: str, value: object, what: str) -> Outcome:
        """Return what the run ended with; refuse where it was read without its method and its data."""
        if self.outcome is not None:
            refuse_changed(self.outcome.stage.setup.model)
            return self.outcome
        again = "partita.federate(..., out=folder, resume=True)"
        allowed = f"{again}.{what}(data): it reads a finished run and trains nothing"
        raise check.fail(field, value, allowed, "partita.load reads models, but no method")

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page that opens offline: curves, who gained and who lost and why, cost, settings."""
        return write({self.facts["algorithm"]: [self]}, path)

    def save(self, folder: str | Path) -> None:
        """Write the run to a new folder like that of `out=`, page included; `partita.load` reads it."""
        target = check.path("folder", folder)
        self.write(target)
        if not (target / "report.html").exists():
            write_page({self.facts["algorithm"]: [self]}, target / "report.html")


def load(folder: str | Path, model: nn.Module | None = None) -> Run:
    """Read a finished run from its folder.

    `model` (as it was trained) is needed for `client(i).model()` only.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise check.fail("model", model, "the nn.Module that was trained")
    record, folder = read(folder), Path(folder)
    found = durable.read(folder / "checkpoint")
    if found is None:
        raise check.fail("folder", str(folder), "the folder of a run (it has no checkpoint)")
    if found.round != record.facts["rounds"]:  # else older weights would pass for those that were scored
        raise check.fail("folder", str(folder), _older(found.round, record.facts["rounds"]))
    try:
        saved = decode(found.tensors, found.state)
        store = _states(saved, found.path, len(record.clients))
        base, shared, holdings = saved["initial"], saved["server"]["shared"], Holdings(**saved["holdings"])
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise check.fail("folder", str(folder), f"a checkpoint of the run ({reason})") from error

    def personalized(number: int) -> Tensors:
        if holdings.computed:
            raise _computed(record.facts["algorithm"], number, folder)
        return {**base, **shared, **tree.row(store.load([number]).personal, 0)}

    def write(target: Path) -> None:
        copy_folder(folder, new_folder("folder", target, outside=folder))

    def reference() -> Tensors:
        baseline = folder / "baselines" / "global"
        return load(baseline).shared if baseline.is_dir() else {}

    return Run(
        **vars(record),
        shared=shared,
        base=base,
        store=store,
        module=None if model is None else note(uncompiled(model)),
        personalized=personalized,
        narrow=None,
        write=write,
        holdings=holdings,
        reference=reference,
        data=None,
        outcome=None,
    )


def _older(there: int, wanted: int) -> str:
    """What a folder lacks whose models are not those of its figures."""
    return (
        f"a whole checkpoint of round {wanted}, of which its figures are: the newest is of round {there}. "
        f"partita.federate(..., resume=True) would train from there on; `partita report` needs only figures"
    )


def _work(work: Work, steps: int | None, epochs: int | None, batch: int | None) -> Work:
    """Return the work of a turn with what was asked for."""
    if steps is not None and epochs is not None:
        raise check.fail("steps", steps, "steps or epochs, not both")
    if steps is not None:
        work = replace(work, steps=check.integer("steps", steps, low=1), epochs=None)
    elif epochs is not None:
        work = replace(work, steps=None, epochs=check.integer("epochs", epochs, low=1))
    return work if batch is None else replace(work, batch=check.integer("batch", batch, low=1))


def _like(mean: Tensor, value: Tensor) -> Tensor:
    """A mean as the tensor that it stands for; counters stay whole."""
    return (mean if value.is_floating_point() else mean.round()).to(value.device, value.dtype)


def _states(saved: Mapping[str, Any], path: Path, clients: int) -> Store:
    """Open the clients' states of a checkpoint."""
    if are_addresses(saved["store"]):
        addresses = Addresses(clients)
        addresses.restore(saved["store"])
        return addresses
    states = path.parent / f"clients-{saved['stage']}"
    kind = "disk" if states.exists() else "memory"
    store = open_store(ClientState(**saved["new_client"]), clients, kind=kind, folder=states)
    store.restore(saved["store"])
    return store


def _computed(method: str, number: int, folder: Path) -> check.Refused:
    """Return the error of a client's model that is not in the folder; it says how to get the model."""
    reason = f"{method} computes a client's model from the client's data, which partita.load does not have"
    federate = f"partita.federate(..., out={str(folder)!r}, resume=True)"
    return check.fail("client", number, f"{federate}, which reads a finished run and trains nothing", reason)
