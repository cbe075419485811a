"""The promise on bad input, as one table: what is wrong is refused before any work.

Each case is tried by both doors. In Python it is a ValueError of one line that begins with the field and its
value and goes on with what is allowed. From the command line it is that line, exit code 2 and nothing on the
standard output. Either way not one byte on disk changes. What follows the tables is what must work instead.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita import cli
from partita.core import parts
from partita.engine.callbacks import Callback, Event
from partita.engine.store import durable

NAN, INF = float("nan"), float("inf")
F = nn.functional


# ---- a good run, of which each case changes one thing


def arrays(**changed: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=g), torch.randint(0, 2, (24,), generator=g)
    return {"x": x, "y": y, "client": np.repeat(["ann", "bob", "cy"], 8), **changed}


def data(**changed: Any) -> pt.data.FederatedData:
    return pt.data.from_arrays(**arrays(**changed))


def numbers(*shape: int) -> Tensor:
    return torch.randn(24, *shape, generator=torch.Generator().manual_seed(1))


def with_value(x: Tensor, value: float) -> Tensor:
    """A value of bob's is another one."""
    x = x.clone()
    x[10] = value
    return x


def method() -> parts.Algorithm:
    return pt.fedalt("output", lr=0.1)


def model() -> nn.Module:
    return pt.models.mlp(4, 3, 2)


def federate(out: Path | None, **changed: Any) -> pt.Run:
    given: dict[str, Any] = {"model": model(), "data": data(), "algorithm": method(), "rounds": 3, "batch": 4}
    given |= {"baselines": False, "executor": "loop", "checkpoint_every": 1, "out": out, **changed}
    return pt.federate(given.pop("model"), given.pop("data"), given.pop("algorithm"), **given)


class Reshaped(nn.Module):
    """A linear layer whose output is changed."""

    def __init__(self, change: Callable[[Tensor], Any], outputs: int = 2) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, outputs), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x))


def frozen() -> nn.Module:
    return model().requires_grad_(False)


# ---- how a case is called: a function of the folder that the run would write to

Call = Callable[[Path], object]
Spoil = Callable[[Path], object]


def fed(**changed: Any) -> Call:
    return lambda out: federate(**{"out": out, **changed})


def scored(function: Callable[[Tensor, Tensor], Any]) -> pt.Metric:
    return pt.Metric(function, higher_is_better=True)


def lies(**changed: Any) -> Call:
    """The run with a liar."""
    return fed(**{"attack": pt.attack.sign_flip(), "byzantine": ["bob"], **changed})


def at(schedule: object, **changed: Any) -> Call:
    """The run under a schedule."""
    return fed(schedule=schedule, **changed)


def waiting(**delays: Any) -> Call:
    """The run with delays."""
    return at(pt.schedule.preferred(pt.schedule.delays(**delays)))


def traced(out: Path) -> object:
    return pt.schedule.trace(out / "delays.csv")


def on(**changed: Any) -> Call:
    """The run on other arrays; what is no array is another argument of the run."""
    own = {k: v for k, v in changed.items() if k in ("x", "y", "client", "test", "names")}
    rest = {k: v for k, v in changed.items() if k not in own}
    return lambda out: federate(out, data=data(**own), **rest)


def split(**changed: Any) -> Call:
    given = {"clients": 3, "partition": pt.data.iid(), "x": arrays()["x"], "y": arrays()["y"], **changed}
    return lambda _: pt.data.split(**given)


def resumed(**changed: Any) -> Call:
    return lambda out: federate(out, resume=True, **changed)


def load(out: Path) -> object:
    return pt.load(out)


class Wrong(NamedTuple):
    """A wrong input. `prepare` fills the folder before."""

    id: str
    call: Call
    says: str  # the message begins with it: the field and its value; OUT is the folder
    allowed: str  # and goes on with it
    prepare: Spoil | None = None


# ---- what happens to folders of runs

HALF, WHOLE, DISK = "half", "whole", "disk"
FOLDERS: dict[str, Path] = {}


class Stop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, event: Event) -> None:
        if event.round == self.after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run that was stopped in its third round, the same with states on disk, and a finished one."""
    root = tmp_path_factory.mktemp("runs")
    for name, options in {HALF: {}, DISK: {"store": "disk"}}.items():
        FOLDERS[name] = root / name
        with contextlib.suppress(KeyboardInterrupt):
            federate(root / name, callbacks=[Stop(3)], **options)
    FOLDERS[WHOLE] = root / WHOLE
    federate(root / WHOLE)


def leave(_: Path) -> None:
    """As it is."""


def copy(kind: str, spoil: Spoil = leave) -> Spoil:
    def prepare(out: Path) -> None:
        shutil.copytree(FOLDERS[kind], out)
        spoil(out)

    return prepare


def wrote(name: str, text: str | bytes) -> Spoil:
    return lambda out: (out / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def edited(change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Spoil:
    def edit(out: Path) -> None:
        found = json.loads((out / name).read_text())
        change(found)
        (out / name).write_text(json.dumps(found))

    return edit


def every(name: str, harm: Spoil) -> Spoil:
    """Harm this file of every checkpoint."""
    return lambda out: [harm(p / name) for p in (out / "checkpoint").iterdir() if p.name.isdecimal()]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def no_checkpoint(out: Path) -> None:
    shutil.rmtree(out / "checkpoint")


def newer_manifest(path: Path) -> None:
    body = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"} | {"format": 9}
    path.write_text(json.dumps({**body, "sha256": durable._digest(body)}))


def bare_manifest(path: Path) -> None:
    body = {"format": 2, "round": int(path.parent.name)}
    path.write_text(json.dumps({**body, "sha256": durable._digest(body)}))


def foreign(tensors: dict[str, Tensor], state: Any) -> Spoil:
    """A whole checkpoint of something else."""

    def replace(out: Path) -> None:
        no_checkpoint(out)
        durable.write(out / "checkpoint", 2, tensors, state)

    return replace


def rechecked(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """The newest checkpoint with another state and a right checksum."""

    def replace(out: Path) -> None:
        found = durable.read(out / "checkpoint")
        assert found is not None
        change(found.state)
        no_checkpoint(out)
        durable.write(out / "checkpoint", found.round, found.tensors, found.state)

    return replace


def rows_bin(harm: Spoil) -> Spoil:
    return lambda out: harm(out / "checkpoint" / "clients-0" / "rows.bin")


def text_file(path: Path) -> None:
    path.write_text("mine")


def folder_with(name: str, text: str = "mine") -> Spoil:
    def prepare(out: Path) -> None:
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(text)

    return prepare


def archive(**stored: Any) -> Spoil:
    def prepare(out: Path) -> None:
        out.mkdir()
        np.savez(out / "data.npz", **stored)

    return prepare


def leaf(out: Path) -> object:
    return pt.data.from_leaf(out / "leaf.json")


# ---- the table

# Short forms, so that a case is a line.


def make(id: str, build: Callable[[], object], says: str, allowed: str) -> Wrong:
    return Wrong(id, lambda _: build(), says, allowed)


def by(id: str, algorithm: object, says: str, allowed: str) -> Wrong:
    return Wrong(id, fed(algorithm=algorithm), says, allowed)


def another(id: str, shown: str, call: Call, spoil: Spoil = leave) -> Wrong:
    """Not the run that is in the folder."""
    says = f"resume=True: OUT holds a run that differs in its {shown}"
    return Wrong(id, call, says, "give the same", copy(HALF, spoil))


def no_config(id: str, text: str | bytes) -> Wrong:
    prepare = copy(HALF, wrote("config.json", text))
    return Wrong(id, resumed(), "file='OUT/config.json': ", "a JSON object", prepare)


def damaged(id: str, allowed: str, spoil: Spoil) -> Wrong:
    """Checkpoints that are not what was written."""
    return Wrong(id, resumed(), "checkpoint='OUT/checkpoint': ", allowed, copy(HALF, spoil))


def strange(id: str, spoil: Spoil, says: str = "resume: OUT/checkpoint/00000002 ") -> Wrong:
    """Whole checkpoints of something else."""
    allowed = "expected a checkpoint of this run" if says.startswith("resume") else "of a run"
    return Wrong(id, resumed(), says, allowed, copy(HALF, spoil))


def broken(id: str, name: str, allowed: str, spoil: Spoil) -> Wrong:
    """A file of a finished run."""
    return Wrong(id, load, f"file='OUT/{name}': ", allowed, copy(WHOLE, spoil))


def stored(id: str, allowed: str, prepare: Spoil, **options: Any) -> Wrong:
    def call(out: Path) -> object:
        return pt.data.from_npz(out / "data.npz", **options)

    return Wrong(id, call, "path='OUT/data.npz': ", allowed, prepare)


def leaf_of(id: str, text: str, allowed: str, says: str = "path='OUT/leaf.json': ") -> Wrong:
    return Wrong(id, leaf, says, allowed, folder_with("leaf.json", text))


WHOLE_NUMBER = "a whole number from 1"
METHOD = "a method such as partita.fedavg(lr=0.1)"
FEDERATED = "a FederatedData, made by partita.data."
SPLITS = "one of 'input', 'output', 'adapter', 'norm'"
ATTACK = "an attack such as partita.attack.sign_flip()"
LIARS = "a share such as 0.25, or a list of numbers or names"
MEASURES = "a list such as [partita.measures.gradient_norm()]"
SCHEDULE = "a schedule such as partita.schedule.synchronous()"
DELAYS = "partita.schedule.delays(download=..., upload=...)"
S = pt.schedule

TABLE = [
    # numbers of a run: text, booleans, arrays, nothing, fractions, NaN, too small, too large
    Wrong("rounds is text", fed(rounds="3"), "rounds='3': ", WHOLE_NUMBER),
    Wrong("rounds is a boolean", fed(rounds=True), "rounds=True: ", WHOLE_NUMBER),
    Wrong("rounds is infinite", fed(rounds=INF), "rounds=inf: ", WHOLE_NUMBER),
    Wrong("rounds is an array", fed(rounds=np.array([3])), "rounds=array([3]): ", WHOLE_NUMBER),
    Wrong("rounds is a tensor", fed(rounds=torch.tensor(3)), "rounds=tensor(3): ", WHOLE_NUMBER),
    Wrong("no rounds", fed(rounds=None), "rounds=None: ", WHOLE_NUMBER),
    Wrong("no round", fed(rounds=0), "rounds=0: ", WHOLE_NUMBER),
    Wrong("cohort of more than there are", fed(cohort=9), "cohort=9: ", "from 1 up to 3"),
    Wrong("cohort is a share", fed(cohort=0.5), "cohort=0.5: ", "a whole number from 1 up to 3"),
    Wrong("cohort of no one", fed(cohort=0), "cohort=0: ", "from 1 up to 3"),
    Wrong("batch of none", fed(batch=0), "batch=0: ", WHOLE_NUMBER),
    Wrong("batch is a list", fed(batch=[4]), "batch=[4]: ", WHOLE_NUMBER),
    Wrong("batch is NaN", fed(batch=NAN), "batch=nan: ", WHOLE_NUMBER),
    Wrong("negative steps", fed(steps=-1), "steps=-1: ", WHOLE_NUMBER),
    Wrong(
        "steps for two of three clients", fed(steps=[1, 2]), "steps=[1, 2]: ", "one for each of the 3 clients"
    ),
    Wrong("steps are words", fed(steps=[1, 2, "x"]), "steps='x': ", "a whole number from 0"),
    Wrong("steps and epochs", fed(steps=2, epochs=1), "steps=2: ", "steps or epochs, not both"),
    Wrong("epochs is a fraction", fed(epochs=1.5), "epochs=1.5: ", WHOLE_NUMBER),
    Wrong("negative seed", fed(seed=-1), "seed=-1: ", "a whole number from 0"),
    Wrong("no seed", fed(seed=None), "seed=None: ", "a whole number from 0"),
    Wrong("seed beyond 63 bits", fed(seed=2**64), f"seed={2**64}: ", "up to 9223372036854775807"),
    Wrong("evaluation every 0 rounds", fed(evaluate_every=0), "evaluate_every=0: ", WHOLE_NUMBER),
    Wrong("checkpoint every 1.5", fed(checkpoint_every=1.5), "checkpoint_every=1.5: ", "a whole number"),
    Wrong("memory in apples", fed(memory="8 apples"), "memory='8 apples': ", "'500MB' or '8GiB'"),
    Wrong("no memory at all", fed(memory=0), "memory=0: ", WHOLE_NUMBER),
    # words of a run
    Wrong("executor misspelt", fed(executor="vmapp"), "executor='vmapp': ", "(did you mean 'vmap'?)"),
    Wrong("executor shouted", fed(executor="VMAP"), "executor='VMAP': ", "(did you mean 'vmap'?)"),
    Wrong(
        "executors",
        fed(executor=np.array(["loop", "vmap"])),
        "executor=array(",
        "'auto', 'loop', 'pool', 'vmap', 'graph', 'compiled'",
    ),
    Wrong("device misspelt", fed(device="gpu"), "device='gpu': ", "'auto', 'cpu' or 'cuda'"),
    Wrong("device is a number", fed(device=3.5), "device=3.5: ", "'auto', 'cpu' or 'cuda'"),
    Wrong("store misspelt", fed(store="dsk"), "store='dsk': ", "(did you mean 'disk'?)"),
    Wrong("state misspelt", fed(state="kept"), "state='kept': ", "(did you mean 'keep'?)"),
    Wrong("norm is a layer", fed(norm="batch"), "norm='batch': ", "'global', 'static', 'personal'"),
    Wrong("norm is a boolean", fed(norm=True), "norm=True: ", "'global', 'static', 'personal'"),
    Wrong("baselines is a word", fed(baselines="yes"), "baselines='yes': ", "True"),
    Wrong("schedule is a word", fed(schedule="sync"), "schedule='sync': ", "partita.schedule.synchronous()"),
    Wrong(
        "schedule not called",
        fed(schedule=pt.schedule.synchronous),
        "schedule=<function synchronous",
        "partita.schedule.synchronous()",
    ),
    # who reports when, and how long that takes
    Wrong("schedule is a method", fed(schedule=method()), "schedule=Algorithm(", SCHEDULE),
    Wrong("schedule is a class", fed(schedule=S.Asynchronous), "schedule=<class ", SCHEDULE),
    Wrong("schedule is only delays", fed(schedule=S.delays(upload=1)), "schedule=Delays(", SCHEDULE),
    Wrong(
        "asynchronous not called",
        fed(schedule=S.asynchronous),
        "schedule=<function asynchronous",
        "partita.schedule.synchronous()",
    ),
    Wrong(
        "more at work than there are", at(S.asynchronous(concurrency=9)), "concurrency=9: ", "from 1 up to 3"
    ),
    Wrong("a buffer that is never full", at(S.asynchronous(buffer=4)), "buffer=4: ", "from 1 up to 3"),
    Wrong(
        "a buffer that the same clients never fill",
        at(S.asynchronous(concurrency=2, buffer=3, order="same")),
        "buffer=3: ",
        "from 1 up to 2",
    ),
    Wrong(
        "delays for two of three",
        waiting(upload=[1.0, 2.0]),
        "delays upload=(1.0, 2.0): ",
        "one number for each of the 3 clients",
    ),
    Wrong(
        "factors for two of three",
        waiting(download=S.scaled(1.0, [1.0, 2.0])),
        "delays download factor=(1.0, 2.0): ",
        "one number for each of the 3 clients",
    ),
    Wrong(
        "dropout for two of three",
        waiting(dropout=[0.1, 0.2]),
        "delays dropout=(0.1, 0.2): ",
        "one for each of the 3 clients",
    ),
    Wrong(
        "a method that keeps step",
        fed(schedule=S.asynchronous(), algorithm=pt.local(lr=0.1)),
        "schedule='asynchronous': ",
        "synchronous() for local: clients send nothing",
    ),
    Wrong(
        "a stage that keeps step",
        fed(
            schedule=S.asynchronous(),
            algorithm=pt.pipeline(pt.fedavg(lr=0.1), pt.l2gd(lr=0.1, lam=1.0, p=0.5)),
        ),
        "schedule='asynchronous': ",
        "synchronous() for l2gd: all clients toss one coin",
    ),
    Wrong("evaluation every 0 of time", fed(evaluate_every=0.0), "evaluate_every=0.0: ", "a number above 0"),
    Wrong("evaluation every NaN", fed(evaluate_every=NAN), "evaluate_every=nan: ", "a number above 0"),
    make("nobody at work", lambda: S.asynchronous(concurrency=0), "concurrency=0: ", WHOLE_NUMBER),
    make("a schedule's buffer of none", lambda: S.asynchronous(buffer=0), "buffer=0: ", WHOLE_NUMBER),
    make("half an upload", lambda: S.asynchronous(buffer=1.5), "buffer=1.5: ", WHOLE_NUMBER),
    make("staleness misspelt", lambda: S.asynchronous(staleness="sqr"), "staleness='sqr': ", "mean 'sqrt'?)"),
    make(
        "staleness is a number",
        lambda: S.asynchronous(staleness=0.5),
        "staleness=0.5: ",
        "a staleness such as partita.schedule.polynomial(0.5)",
    ),
    make(
        "staleness not called",
        lambda: S.asynchronous(staleness=pt.schedule.polynomial),
        "staleness=<function polynomial",
        "a staleness such as partita.schedule.polynomial(0.5)",
    ),
    make(
        "staleness of nothing",
        lambda: S.synchronous(staleness=lambda: 1.0),
        "staleness=<function ",
        "a staleness such as",
    ),
    make("no such order", lambda: S.asynchronous(order="turns"), "order='turns': ", "'random', 'same'"),
    make("no order in step", lambda: S.synchronous(order="same"), "order='same': ", "'random', 'turns'"),
    make("negative age", lambda: S.asynchronous(max_staleness=-1), "max_staleness=-1: ", "from 0"),
    make("until before the beginning", lambda: S.asynchronous(until=0), "until=0: ", "a number above 0"),
    make("until the end of time", lambda: S.synchronous(until=INF), "until=inf: ", "a number above 0"),
    make("delays is a number", lambda: S.asynchronous(delays=2.0), "delays=2.0: ", DELAYS),
    make("delays is one delay", lambda: S.preferred(S.exponential(1)), "delays=Exponential(", DELAYS),
    make("delays not called", lambda: S.synchronous(delays=S.delays), "delays=<function delays", DELAYS),
    make(
        "a deadline of nothing", lambda: S.synchronous(deadline=2), "deadline=2.0: ", "None without delays="
    ),
    make("a quorum of none", lambda: S.synchronous(quorum=0), "quorum=0: ", "a number of clients from 1"),
    make("a quorum beyond all", lambda: S.synchronous(quorum=1.5), "quorum=1.5: ", "a share from 0.0 up to"),
    make("quorum is a boolean", lambda: S.synchronous(quorum=True), "quorum=True: ", "a number of clients"),
    make("late misspelt", lambda: S.synchronous(late="aply"), "late='aply': ", "(did you mean 'apply'?)"),
    make("an option of the other", lambda: S.synchronous(buffer=2), "synchronous: ", "its arguments are"),
    make("a negative delay", lambda: S.delays(upload=-1), "delays upload=-1: ", "a number from 0"),
    make("a delay is a word", lambda: S.delays(compute="fast"), "delays compute='fast': ", "a number from 0"),
    make("a delay not called", lambda: S.delays(S.gamma), "delays download=<function gamma", "or a delay"),
    make("no delay", lambda: S.delays(speed=None), "delays speed=None: ", "a number from 0"),
    make("all are lost", lambda: S.delays(dropout=1.0), "delays dropout=1.0: ", "from 0 and below 1"),
    make("a delay misspelt", lambda: S.delays(uplaod=1), "delays: ", "(did you mean 'upload'?)"),
    make("a mean below 0", lambda: S.exponential(-1), "delay mean=-1: ", "a number from 0"),
    make("a mean of NaN", lambda: S.gamma(NAN), "delay mean=nan: ", "a number from 0"),
    make("ends exchanged", lambda: S.uniform(2, 1), "delay high=1.0: ", "a number from low=2"),
    make("too wide a spread", lambda: S.lognormal(1, sigma=99), "delay sigma=99: ", "from 0 up to 10"),
    make("no shape", lambda: S.gamma(1, shape=0), "delay shape=0: ", "a number from 0.01"),
    make("shares below 1", lambda: S.classes([(0.5, 1)]), "delay shares=[(0.5, 1)]: ", "shares sum to 1"),
    make("shares of nothing", lambda: S.classes(3), "delay shares=3: ", "pairs (share, factor) such as"),
    make("a scale is a word", lambda: S.scaled(1, "x"), "delay factor='x': ", "a number from 0"),
    Wrong("no trace", traced, "delay path='OUT/delays.csv': ", "a readable file ("),
    Wrong(
        "an empty trace",
        traced,
        "delay path='OUT/delays.csv': ",
        "at least one number",
        folder_with("delays.csv", ""),
    ),
    Wrong(
        "a trace of words",
        traced,
        "delay path='OUT/delays.csv': ",
        "numbers from 0 (line 2: 'b')",
        folder_with("delays.csv", "a\nb\n"),
    ),
    Wrong(
        "a trace of three columns",
        traced,
        "delay path='OUT/delays.csv': ",
        "one delay, or device,delay, in every line (line 1)",
        folder_with("delays.csv", "1,2,3\n"),
    ),
    make("a stage's schedule", lambda: pt.stage(method(), schedule="x"), "schedule='x': ", SCHEDULE),
    Wrong(
        "callbacks is a function",
        fed(callbacks=print),
        "callbacks=<built-in function print>: ",
        "a list of partita.callbacks.Callback",
    ),
    Wrong(
        "a callback that is none",
        fed(callbacks=[print]),
        "callbacks=[<built-in function print>]: ",
        "a list of partita.callbacks.Callback",
    ),
    # who lies, how, and what is followed
    Wrong("attack is a word", lies(attack="sign_flip"), "attack='sign_flip': ", ATTACK),
    Wrong("attack not called", lies(attack=pt.attack.sign_flip), "attack=<function sign_flip", ATTACK),
    Wrong("attack is an aggregator", lies(attack=pt.aggregate.mean()), "attack=Aggregator(", ATTACK),
    Wrong("attacks", lies(attack=[pt.attack.alie()]), "attack=[Attack(", ATTACK),
    Wrong(
        "nobody lies",
        lies(byzantine=()),
        "byzantine=(): ",
        "attack= needs Byzantine clients; give a share such as 0.25",
    ),
    Wrong(
        "a share of nobody",
        lies(byzantine=0.0),
        "byzantine=0.0: ",
        "attack= needs Byzantine clients; give a share such as 0.25",
    ),
    Wrong("too small a share", lies(byzantine=0.1), "byzantine=0.1: ", "a share of at least one of the"),
    Wrong("liars without an attack", fed(byzantine=[1]), "byzantine=[1]: ", "give attack=, such as"),
    Wrong("a share without an attack", fed(byzantine=0.5), "byzantine=0.5: ", "give attack=, such as"),
    Wrong("a share above 1", lies(byzantine=1.5), "byzantine=1.5: ", "a number from 0 up to 1"),
    Wrong("a negative share", lies(byzantine=-0.1), "byzantine=-0.1: ", "a number from 0 up to 1"),
    Wrong("a share that is NaN", lies(byzantine=NAN), "byzantine=nan: ", "a number from 0 up to 1"),
    Wrong("everyone lies", lies(byzantine=1.0), "byzantine=1.0: ", "at least one honest client"),
    Wrong("all are named", lies(byzantine=[0, "bob", 2]), "byzantine=[0, 'bob', 2]: ", "at least one honest"),
    Wrong("byzantine is a boolean", lies(byzantine=True), "byzantine=True: ", LIARS),
    Wrong("byzantine is a number", lies(byzantine=1), "byzantine=1: ", LIARS),
    Wrong("byzantine is a name", lies(byzantine="ann"), "byzantine='ann': ", LIARS),
    Wrong("byzantine is nothing", lies(byzantine=None), "byzantine=None: ", LIARS),
    Wrong("a liar misspelt", lies(byzantine=["bop"]), "byzantine='bop': ", "(did you mean 'bob'?)"),
    Wrong("a liar that is nobody", lies(byzantine=[3]), "byzantine=3: ", "a whole number from 0 up to 2"),
    Wrong("a liar counted from the end", lies(byzantine=[-1]), "byzantine=-1: ", "from 0 up to 2"),
    Wrong(
        "liars as a mask", lies(byzantine=[True, False, False]), "byzantine=True: ", "a whole number from 0"
    ),
    Wrong("half a liar", lies(byzantine=[0.5]), "byzantine=0.5: ", "a whole number from 0 up to 2"),
    make("scale of nothing", lambda: pt.attack.sign_flip(scale=0), "attack scale=0: ", "a number above 0"),
    make("negative scale", lambda: pt.attack.sign_flip(scale=-1), "attack scale=-1: ", "a number above 0"),
    make("epsilon is a word", lambda: pt.attack.ipm(epsilon="x"), "attack epsilon='x': ", "a number above 0"),
    make("negative z", lambda: pt.attack.alie(z=-1.0), "attack z=-1.0: ", "a number from 0"),
    make("sigma is NaN", lambda: pt.attack.gaussian(NAN), "attack sigma=nan: ", "a number above 0"),
    make("malformed misspelt", lambda: pt.attack.malformed("shap"), "attack how='shap': ", "mean 'shape'?)"),
    make("no such value", lambda: pt.attack.nonfinite("nans"), "attack value='nans': ", "mean 'nan'?)"),
    make("an option too many", lambda: pt.attack.mimic(z=1), "mimic: ", "its arguments are"),
    Wrong(
        "measures not called", fed(measures=pt.measures.line_loss), "measures=<function line_loss", MEASURES
    ),
    Wrong("one not called", fed(measures=[pt.measures.line_loss]), "measures=[<function line_loss", MEASURES),
    Wrong("a measure, not a list", fed(measures=pt.measures.line_loss()), "measures=Measure(", MEASURES),
    Wrong("measures is a word", fed(measures="line_loss"), "measures='line_loss': ", MEASURES),
    Wrong("measures is nothing", fed(measures=None), "measures=None: ", MEASURES),
    Wrong(
        "a measure twice",
        fed(measures=[pt.measures.line_loss(), pt.measures.line_loss(points=3)]),
        "measures=['line_loss', 'line_loss']: ",
        "each measure once",
    ),
    make("a single point", lambda: pt.measures.line_loss(points=1), "measure points=1: ", "from 2"),
    make(
        "no such split",
        lambda: pt.measures.line_loss(split="tests"),
        "measure split='tests': ",
        "mean 'test'?)",
    ),
    make("no such part", lambda: pt.measures.gradient_norm(personal=3), "personal=3: ", SPLITS),
    Wrong(
        "a measure of another split",
        fed(measures=[pt.measures.gradient_norm(personal="input")]),
        "measure gradient_norm personal='input': ",
        "a split whose shared part is shared by the method too",
    ),
    Wrong("resume is a word", fed(resume="yes"), "resume='yes': ", "True or False"),
    Wrong("report is a path", fed(report="report.html"), "report='report.html': ", "True or False"),
    make(
        "resume from nowhere",
        lambda: federate(None, resume=True),
        "resume=True: ",
        "the folder of the run",
    ),
    make(
        "states on disk without a folder",
        lambda: federate(None, store="disk"),
        "store='disk': ",
        "a folder out= for the clients' states",
    ),
    # the model
    Wrong("model is a class", fed(model=nn.Linear), "model=<class ", "an instance such as Linear(...)"),
    Wrong("model is a word", fed(model="mlp"), "model='mlp': ", "an nn.Module"),
    Wrong("no model", fed(model=None), "model=None: ", "an nn.Module"),
    Wrong("model is a state", fed(model=model().state_dict()), "model=OrderedDict(", "an nn.Module"),
    Wrong("model function makes none", fed(model=lambda: 3), "model=<function ", "that returns an nn.Module"),
    Wrong("model function takes", fed(model=lambda n: n), "model=<function ", "without arguments"),
    Wrong("no parameters", fed(model=nn.Flatten()), "model='Flatten': ", "parameters that require gradients"),
    Wrong("frozen", fed(model=frozen()), "model='Blocks': ", "parameters that require gradients"),
    Wrong("lazy", fed(model=nn.LazyLinear(2)), "model='LazyLinear': ", "call the model on a batch first"),
    Wrong(
        "model for other data",
        fed(model=pt.models.mlp(5, 2)),
        "model='Blocks': ",
        "can take a batch of shape [4, 4], torch.float32",
    ),
    Wrong(
        "model of another precision",
        fed(model=model().double()),
        "model='Blocks': ",
        "(the model is torch.float64: convert x, or the model)",
    ),
    Wrong(
        "images where ids belong",
        on(x=torch.zeros(24, 4, dtype=torch.uint8), model=nn.Embedding(3, 2)),
        "model='Embedding': ",
        "ids of an embedding are int64; uint8 is taken as images",
    ),
    Wrong(
        "two outputs", fed(model=Reshaped(lambda o: (o, o))), "model='Reshaped': ", "that returns one tensor"
    ),
    Wrong("too few classes", on(y=arrays()["y"] + 3), "y of client 'ann' (train)=4: ", "labels from 0 to 1"),
    Wrong(
        "outputs without the batch",
        fed(model=Reshaped(lambda o: o[:1])),
        "shape of outputs=[1, 2]: ",
        "[4, classes]",
    ),
    Wrong(
        "outputs of NaN", fed(model=Reshaped(lambda o: o * NAN)), "loss='cross_entropy': ", "a finite value"
    ),
    Wrong(
        "outputs without gradient",
        fed(model=Reshaped(lambda o: o.detach())),
        "loss='cross_entropy': ",
        "depends on the model's parameters",
    ),
    # the loss and the metric
    Wrong(
        "loss misspelt", fed(loss="cross-entropy"), "loss='cross-entropy': ", "did you mean 'cross_entropy'?"
    ),
    Wrong("loss is a number", fed(loss=3), "loss=3: ", "a function of (output, target) or one of"),
    Wrong("loss is a class", fed(loss=nn.CrossEntropyLoss), "loss=<class ", "(call it: CrossEntropyLoss())"),
    Wrong("loss of one argument", fed(loss=lambda o: o.sum()), "loss=<function ", "of (output, target)"),
    Wrong(
        "loss is a vector",
        fed(loss=lambda o, t: F.cross_entropy(o, t, reduction="none")),
        "loss='<lambda>': ",
        "returns one number for a batch, not [4]",
    ),
    Wrong(
        "loss is text", fed(loss=lambda _o, _t: "x"), "loss='<lambda>': ", "one number for a batch, not str"
    ),
    Wrong(
        "no loss", fed(loss=lambda _o, _t: None), "loss='<lambda>': ", "one number for a batch, not NoneType"
    ),
    Wrong("loss is NaN", fed(loss=lambda o, _: o.sum() * NAN), "loss='<lambda>': ", "a finite value"),
    Wrong("loss is infinite", fed(loss=lambda o, _: o.sum() / 0), "loss='<lambda>': ", "a finite value"),
    Wrong(
        "loss is constant",
        fed(loss=lambda _o, _t: torch.tensor(1.0)),
        "loss='<lambda>': ",
        "depends on the model's parameters",
    ),
    Wrong(
        "loss that fails",
        fed(loss=lambda o, t: o @ t),
        "loss='<lambda>': ",
        "cannot compare outputs of shape [4, 2] with targets of shape [4]",
    ),
    Wrong("metric misspelt", fed(metric="acc"), "metric='acc': ", "(did you mean 'accuracy'?)"),
    Wrong(
        "metric is a vector",
        fed(metric=scored(lambda o, _: o[0])),
        "metric='<lambda>': ",
        "one number for a batch",
    ),
    Wrong(
        "metric is text",
        fed(metric=scored(lambda _o, _t: "hi")),
        "metric='<lambda>': ",
        "one number for a batch",
    ),
    # the method
    Wrong("method not called", fed(algorithm=pt.fedavg), "algorithm=<function fedavg", METHOD),
    Wrong("method is a word", fed(algorithm="fedavg"), "algorithm='fedavg': ", METHOD),
    Wrong("method is a stage", fed(algorithm=pt.stage(pt.fedavg(lr=0.1))), "algorithm=StagePlan(", METHOD),
    by(
        "no personal part of that name",
        pt.fedalt("outputs", lr=0.1),
        "personal='outputs': ",
        "(did you mean 'output'?)",
    ),
    by(
        "a pattern of nothing",
        pt.fedalt("heads.*", lr=0.1),
        "personal='heads.*': ",
        "it matches none of the model's 4 names",
    ),
    by(
        "adapters that are not there",
        pt.fedalt("adapter", lr=0.1),
        "personal='adapter': ",
        "partita.models.add_adapters",
    ),
    by("norms that are not there", pt.fedalt("norm", lr=0.1), "personal='norm': ", "matches none"),
    by(
        "a callable that picks nothing",
        pt.fedalt(lambda _: False, lr=0.1),
        "personal=<function ",
        "accepts at least one of 4 names",
    ),
    by(
        "one of two names is wrong",
        pt.fedsim(["output", "hiden*"], lr=0.1),
        "personal='hiden*': ",
        "matches none",
    ),
    make("personal is a number", lambda: pt.fedalt(3, lr=0.1), "personal=3: ", SPLITS),
    make("personal is empty", lambda: pt.fedalt([], lr=0.1), "personal=[]: ", SPLITS),
    make("lr is text", lambda: pt.fedavg(lr="0.1"), "lr='0.1': ", "a number from 0"),
    make("lr is negative", lambda: pt.fedavg(lr=-1), "lr=-1: ", "a number from 0"),
    make("lr is NaN", lambda: pt.fedavg(lr=NAN), "lr=nan: ", "a number from 0"),
    make("lr is an array", lambda: pt.fedavg(lr=np.array([0.1])), "lr=array([0.1]): ", "a number from 0"),
    make("lr beyond all numbers", lambda: pt.fedavg(lr=10**400), "lr=1000", "a number from 0"),
    make("no lr", lambda: pt.fedavg(), "fedavg: ", "lr"),
    make(
        "an option misspelt", lambda: pt.fedavg(lr=0.1, momentun=0.9), "fedavg: ", "did you mean 'momentum'?"
    ),
    make("momentum above 1", lambda: pt.fedavg(lr=0.1, momentum=1.5), "momentum=1.5: ", "from 0 up to 1"),
    make(
        "weighting misspelt",
        lambda: pt.fedavg(lr=0.1, weighting="sample"),
        "weighting='sample': ",
        "(did you mean 'samples'?)",
    ),
    make(
        "server is a word",
        lambda: pt.fedavg(lr=0.1, server="adam"),
        "server='adam': ",
        "partita.optim.adam(lr=0.01)",
    ),
    make(
        "aggregator not called",
        lambda: pt.fedavg(lr=0.1, aggregate=pt.aggregate.mean),
        "aggregate=<function mean",
        "partita.aggregate.mean()",
    ),
    make("mu is negative", lambda: pt.fedprox(lr=0.1, mu=-1), "mu=-1: ", "a number from 0"),
    make("a buffer of none", lambda: pt.fedbuff(lr=0.1, buffer=0), "buffer=0: ", WHOLE_NUMBER),
    make(
        "a staleness misspelt",
        lambda: pt.fedbuff(lr=0.1, staleness="sqr"),
        "staleness='sqr': ",
        "(did you mean 'sqrt'?)",
    ),
    make(
        "a staleness not called",
        lambda: pt.fedasync(lr=0.1, staleness=pt.schedule.polynomial),
        "staleness=<function polynomial",
        "partita.schedule.polynomial(0.5)",
    ),
    make("a hinge that never falls", lambda: pt.schedule.hinge(0, 4), "a=0: ", "a number above 0"),
    make(
        "inner steps without end",
        lambda: pt.persafl_me(lr=0.1, lam=5.0, inner_lr=0.05),
        "inner_steps=None: ",
        "or None with nu=",
    ),
    make("a tuned word", lambda: pt.tuned("fedavg", lr=0.1), "algorithm='fedavg': ", METHOD),
    make(
        "tuned by no steps", lambda: pt.tuned(pt.fedavg(lr=0.1), lr=0.1, steps=0), "steps=0: ", WHOLE_NUMBER
    ),
    make("no stages", lambda: pt.pipeline(), "stages=(): ", "at least one stage"),
    make("a stage is a word", lambda: pt.pipeline("fedavg"), "algorithm='fedavg': ", METHOD),
    make("a stage of no rounds", lambda: pt.stage(pt.fedavg(lr=0.1), rounds=0), "rounds=0: ", WHOLE_NUMBER),
    by(
        "a wrong split in the last stage",
        pt.pipeline(pt.fedavg(lr=0.1), pt.fedalt("heads", lr=0.1)),
        "personal='heads': ",
        "matches none",
    ),
    by(
        "a late cohort of more than there are",
        pt.pipeline(pt.stage(pt.fedavg(lr=0.1), cohort=9)),
        "cohort=9: ",
        "up to 3",
    ),
    by(
        "steps of a stage for two of three",
        pt.pipeline(pt.stage(pt.fedavg(lr=0.1), steps=(1, 2))),
        "steps=(1, 2): ",
        "one for each of the 3 clients",
    ),
    make("lr is a function of nothing", lambda: pt.fedavg(lr=lambda: 0.1), "lr=<function ", "a rate such as"),
    make(
        "lr is a rate not called",
        lambda: pt.fedavg(lr=pt.optim.linear),
        "lr=<function linear",
        "a rate such as partita.optim.linear(0.1)",
    ),
    # data as an argument, and swapped arguments
    Wrong("no data", fed(data=None), "data=None: ", FEDERATED),
    Wrong("data is a tensor", fed(data=arrays()["x"]), "data=tensor([[", FEDERATED),
    Wrong("data is a pair", fed(data=(arrays()["x"], arrays()["y"])), "data=(tensor(", FEDERATED),
    Wrong("data and method swapped", fed(data=method(), algorithm=data()), "data=Algorithm(", FEDERATED),
    Wrong("model and data swapped", fed(model=data(), data=model()), "data=Blocks(", FEDERATED),
    # arrays
    Wrong("y is shorter than x", on(y=arrays()["y"][:20]), "rows of y=20: ", "24, as many as x"),
    Wrong("client is shorter than x", on(client=[0] * 20), "ids in client=20: ", "24, one for each row of x"),
    Wrong("client is a column", on(client=np.zeros((24, 1), int)), "client=array([[0]", "for each row"),
    Wrong("client is a fraction", on(client=[0.5] * 24), "client=[0.5", "a whole number or a string"),
    Wrong("client is ragged", on(client=[[1], [1, 2]] * 12), "client=[[1], [1, 2]", "for each row"),
    Wrong("no client", on(client=None), "client=None: ", "a whole number or a string for each row"),
    Wrong(
        "labels in a column", on(y=arrays()["y"][:, None]), "shape of y=[4, 1]: ", "[4], a label for each row"
    ),
    Wrong(
        "a label too large", on(y=with_value(arrays()["y"], 7)), "y of client 'bob' (t", "labels from 0 to 1"
    ),
    Wrong(
        "a negative label", on(y=with_value(arrays()["y"], -1)), "y of client 'bob' (t", "labels run from -1"
    ),
    Wrong(
        "a label too large for torch's loss",
        on(y=with_value(arrays()["y"], 7), loss=F.cross_entropy),
        "y of client 'bob' (t",
        "labels from 0 to 1",
    ),
    Wrong(
        "many classes and one output",
        on(y=arrays()["y"] + 3, model=pt.models.mlp(4, 1)),
        "y of client 'ann' (train)=4: ",
        "labels 0 and 1, an output for each class",
    ),
    Wrong(
        "probabilities above 1",
        on(y=numbers() * 9, model=pt.models.mlp(4, 1), loss="binary_cross_entropy"),
        "y of client ",
        "labels 0 and 1",
    ),
    Wrong(
        "accuracy of numbers",
        on(y=numbers() * 9, model=pt.models.mlp(4, 1), metric="accuracy"),
        "metric='accuracy': ",
        "'mse' or 'mae'",
    ),
    Wrong(
        "numbers for many outputs",
        on(y=numbers()),
        "shape of outputs=[4, 2]: ",
        "[4]: loss='mse' cannot compare",
    ),
    Wrong(
        "two numbers for one output",
        on(y=numbers(2), model=pt.models.mlp(4, 1)),
        "shape of outputs=[4, 1]: ",
        "[4, 2]",
    ),
    Wrong(
        "numbers where labels belong",
        on(y=numbers(), loss="cross_entropy"),
        "dtype of y='torch.float32': ",
        "whole numbers with loss='cross_entropy'",
    ),
    Wrong(
        "numbers that would broadcast",
        on(y=numbers(), model=pt.models.mlp(4, 1), loss=lambda o, t: (o - t).square().mean()),
        "shape of outputs=[4, 1]: ",
        "broadcasts one against the other",
    ),
    Wrong(
        "a column that would broadcast",
        on(y=numbers(1), model=Reshaped(lambda o: o[:, 0]), loss=lambda o, t: (o - t).abs().mean()),
        "shape of outputs=[4]: ",
        "broadcasts one against the other",
    ),
    Wrong("NaN in x", on(x=with_value(arrays()["x"], NAN)), "x[10] of client 'bob'=nan: ", "finite numbers"),
    Wrong(
        "infinity in x",
        on(x=with_value(arrays()["x"], -INF)),
        "x[10] of client 'bob'=-inf: ",
        "finite numbers",
    ),
    Wrong("NaN in y", on(y=with_value(numbers(), NAN)), "y[10] of client 'bob'=nan: ", "finite numbers"),
    Wrong("no rows", on(x=[], y=[], client=[]), "rows of x=0: ", "at least one sample"),
    Wrong("x is text", on(x=["a"] * 24), "dtype of x='<U1': ", "numbers (encode text as integers first)"),
    Wrong("no x", on(x=None), "dtype of x='object': ", "numbers"),
    Wrong("x is ragged", on(x=[[1], [1, 2]] * 12), "x=[[1], [1, 2]", "rows of one shape"),
    Wrong("x is one number", on(x=3), "x='torch.int64 with 0 axes': ", "one row per sample"),
    Wrong("x is complex", on(x=torch.zeros(24, 4, dtype=torch.cfloat)), "x='torch.complex64", "real numbers"),
    Wrong("x is sparse", on(x=arrays()["x"].to_sparse()), "x='torch.sparse_coo': ", "a dense tensor"),
    Wrong("all for testing", on(test=1.0), "test=1.0: ", "a fraction below 1"),
    Wrong("test is text", on(test="0.2"), "test='0.2': ", "a fraction below 1"),
    Wrong("test is a boolean", on(test=True), "test=True: ", "or a boolean for each row"),
    Wrong("test mask too short", on(test=np.zeros(3, bool)), "test='bool [3]': ", "each of the 24 rows"),
    Wrong(
        "test mask of numbers",
        on(test=np.zeros(24, int)),
        "test='int64 [24]': ",
        "a boolean for each of the 24",
    ),
    Wrong("test mask of everything", on(test=np.ones(24, bool)), "training samples=0: ", "at least one"),
    Wrong("two names for three", on(names=["a", "b"]), "names=['a', 'b']: ", "3 names, one for each client"),
    Wrong(
        "names that are the same", on(names=["a", "a", "b"]), "names=('a', 'a', 'b'): ", "3 different names"
    ),
    Wrong("names is a word", on(names="abc"), "names='abc': ", "3 names, one for each client"),
    Wrong("names is a number", on(names=3), "names=3: ", "3 names, one for each client"),
    Wrong(
        "half a character", on(names=["a", "b", "\ud800"]), "names='\\ud800': ", "names of whole characters"
    ),
    make(
        "ranges outside",
        lambda: pt.data.FederatedData.make(arrays()["x"], arrays()["y"], [[0, 30]]),
        "train range of client '0'=(0, 30): ",
        "within 24 rows",
    ),
    make(
        "datasets of other shapes",
        lambda: pt.data.from_datasets({"a": (torch.zeros(2, 3), [0, 1]), "b": (torch.zeros(2, 4), [0, 1])}),
        "x of datasets['b']='torch.float32 [4]': ",
        "torch.float32 [3]",
    ),
    make(
        "datasets is a list",
        lambda: pt.data.from_datasets([1]),
        "datasets=[1]: ",
        "a mapping from client names",
    ),
    make("a client out of range", lambda: data().client(3), "client=3: ", "from 0 up to 2"),
    # partitioners and shifts
    Wrong("partition is a word", split(partition="iid"), "partition='iid': ", "iid(), dirichlet(alpha), ..."),
    Wrong(
        "partition not called",
        split(partition=pt.data.iid),
        "partition=<function iid",
        "iid(), dirichlet(alpha), ...",
    ),
    Wrong(
        "partition returns nothing",
        split(partition=lambda _y, _n, _rng: None),
        "partition=<function ",
        "returns 3 lists of rows",
    ),
    Wrong(
        "partition of rows that are not there",
        split(partition=lambda _y, _n, _rng: [[0], [1], [99]]),
        "partition=<function ",
        "row numbers from 0 to 23",
    ),
    Wrong(
        "partition gives a row twice",
        split(partition=lambda _y, _n, _rng: [[0], [1], [1]]),
        "partition=<function ",
        "no row twice",
    ),
    Wrong("no clients", split(clients=0), "clients=0: ", WHOLE_NUMBER),
    Wrong("more clients than rows", split(clients=99), "clients=99: ", "at most 24 for 24 rows"),
    make("alpha of 0", lambda: pt.data.dirichlet(0), "alpha=0: ", "a number above 0"),
    Wrong("more classes than labels", split(partition=pt.data.label_skew(9)), "classes=9: ", "at most 2"),
    Wrong(
        "classes of numbers",
        split(y=numbers(), partition=pt.data.label_skew(1)),
        "y of label_skew='float32 [24]': ",
        "one whole number or word per row",
    ),
    make("a law of negative power", lambda: pt.data.power_law(-1), "exponent=-1: ", "from 0"),
    make(
        "ids of all kinds",
        lambda: pt.data.natural([1, "a", None]),
        "ids=[1, 'a', None]: ",
        "a whole number or a string",
    ),
    Wrong(
        "ids for three rows",
        split(partition=pt.data.natural([1, 2, 3])),
        "ids='3 ids': ",
        "each of the 24 rows",
    ),
    make(
        "shift not called",
        lambda: data().shift(pt.data.rotation),
        "shift=<function rotation",
        "rotation(), negative(), noise()",
    ),
    make("rotation of no images", lambda: data().shift(pt.data.rotation()), "shape of x=[8, 4]: ", "images"),
    make("noise misspelt", lambda: pt.data.noise(1, "gauss"), "kind='gauss': ", "(did you mean 'gaussian'?)"),
    # files of data
    stored("archive without clients", "no key 'client'; it has x, y", archive(x=[1.0], y=[1])),
    stored(
        "archive key misspelt",
        "(did you mean 'client'?)",
        archive(x=[1.0], y=[1], client=[0]),
        client="clients",
    ),
    stored(
        "archive of pickles", "key 'x' is damaged or pickled", archive(x=np.array([{}]), y=[1], client=[0])
    ),
    stored("archive that is text", "not another kind of file", folder_with("data.npz")),
    stored(
        "archive that is cut",
        "that is whole",
        lambda out: (archive(x=np.zeros(99), y=[1], client=[0])(out), cut(out / "data.npz")),
    ),
    stored("archive that is not there", "a file that exists", leave),
    make("path is a number", lambda: pt.data.from_npz(3), "path=3: ", "a path"),
    leaf_of("leaf is cut", "{", "LEAF's users and user_data"),
    leaf_of("leaf is a list", "[]", "LEAF's users and user_data"),
    leaf_of("leaf is too deep", "[" * 10**5, "LEAF's users and user_data"),
    leaf_of("leaf without a user's data", '{"users": ["a"], "user_data": {}}', "KeyError: 'a'"),
    Wrong(
        "leaf of text",
        leaf,
        "x of user 'a'='hi': ",
        "text needs alphabet=",
        folder_with("leaf.json", '{"users": ["a"], "user_data": {"a": {"x": ["hi"], "y": [1]}}}'),
    ),
    Wrong("leaf that is not there", leaf, "path='OUT/leaf.json': ", "a .json file, or a folder of them"),
    make(
        "PARTITA_DATA is not set",
        lambda: pt.data.real("femnist"),
        "folder=None: ",
        "the environment variable PARTITA_DATA",
    ),
    make("no such dataset", lambda: pt.data.real("femnits"), "name='femnits': ", "(did you mean 'femnist'?)"),
    Wrong(
        "its file is not there",
        lambda out: pt.data.real("femnist", folder=out),
        "folder='OUT': ",
        "a folder with a file femnist.npz",
    ),
    Wrong(
        "its file is broken",
        lambda out: pt.data.real("femnist", folder=out),
        "path='OUT/femnist.npz': ",
        "a NumPy archive",
        folder_with("femnist.npz"),
    ),
    Wrong(
        "it has no such option",
        lambda out: pt.data.real("femnist", folder=out, min_sample=3),
        "min_sample=3: ",
        "(did you mean 'min_samples'?)",
    ),
    # the folder of a run
    Wrong(
        "out is a file",
        fed(),
        "out='OUT': ",
        "a folder that can be made and written",
        text_file,
    ),
    Wrong(
        "out below a file",
        lambda out: federate(out / "run"),
        "out='OUT/run': ",
        "a folder that can be made",
        text_file,
    ),
    make(
        "out where nothing can be made",
        lambda: federate(Path("/proc/nothing/run")),
        "out='/proc/nothing/run': ",
        "a folder that can be made",
    ),
    Wrong("out is a number", fed(out=3), "out=3: ", "the path of a folder"),
    Wrong("out is empty", fed(out=""), "out='': ", "the path of a folder"),
    Wrong("out with a null", fed(out="a\0b"), "out='a\\x00b': ", "null"),
    Wrong("out holds a run", fed(), "out='OUT': ", "a new folder, or resume=True", copy(HALF)),
    Wrong("out holds a finished run", fed(), "out='OUT': ", "a new folder, or resume=True", copy(WHOLE)),
    Wrong(
        "out/checkpoint is another's",
        fed(),
        "out='OUT': ",
        "without a checkpoint/ of something else (best.pt)",
        folder_with("checkpoint/best.pt"),
    ),
    Wrong(
        "out/checkpoint is a file",
        fed(),
        "out='OUT': ",
        "without a checkpoint/ of something else",
        folder_with("checkpoint"),
    ),
    Wrong(
        "out/checkpoint has a numbered file",
        fed(),
        "out='OUT': ",
        "without a checkpoint/ of something else (7)",
        folder_with("checkpoint/7"),
    ),
    Wrong(
        "checkpoints without config.json",
        resumed(),
        "out='OUT': ",
        "a new or an empty folder: this one holds 'metrics.jsonl'",
        copy(HALF, lambda out: remove(out / "config.json")),
    ),
    # resuming what is another run
    another("another lr", "algorithm (lr: 0.1 -> 0.2)", resumed(algorithm=pt.fedalt("output", lr=0.2))),
    another("another method", "algorithm (name: 'fedalt' -> 'fedavg'", resumed(algorithm=pt.fedavg(lr=0.1))),
    another("another number of rounds", "settings (rounds: 3 -> 9)", resumed(rounds=9)),
    another("another seed", "settings (seed: 0 -> 1)", resumed(seed=1)),
    another(
        "another schedule",
        "schedule (name: 'synchronous' -> 'asynchronous'",
        resumed(schedule=S.asynchronous()),
    ),
    another(
        "another order", "schedule (order: 'random' -> 'turns')", resumed(schedule=S.synchronous("turns"))
    ),
    Wrong(
        "other data",
        lambda out: federate(out, resume=True, data=data(test=0.5)),
        "resume=True: OUT holds a run that differs in its data (fingerprint: ",
        "give the same",
        copy(HALF),
    ),
    another("another model", "model (tensors: ", resumed(model=pt.models.mlp(4, 5, 2))),
    another(
        "another loss",
        "loss ('cross_entropy' -> '<lambda>')",
        resumed(loss=lambda o, t: F.cross_entropy(o, t)),
    ),
    # config.json of another version, or none at all
    no_config("config is text", "hello"),
    no_config("config is empty", ""),
    no_config("config is a list", "[]"),
    no_config("config is binary", b"\xff\x00"),
    Wrong(
        "config without its method",
        resumed(),
        "resume=True: config.json in OUT has no algorithm",
        "give another folder out=",
        copy(HALF, edited(lambda c: c.pop("algorithm"))),
    ),
    another(
        "config lacks a setting",
        "settings (memory: ",
        resumed(),
        edited(lambda c: c["settings"].pop("memory")),
    ),
    another(
        "config has a setting more",
        "settings (turbo: 9 -> ",
        resumed(),
        edited(lambda c: c["settings"].update(turbo=9)),
    ),
    another(
        "config without picks",
        "executor",
        resumed(),
        edited(lambda c: c.pop("executor")),
    ),
    Wrong(
        "config of another Partita",
        resumed(),
        "resume=True: OUT holds a run of partita 9.9",
        "give the same",
        copy(HALF, edited(lambda c: c["versions"].update(partita="9.9"))),
    ),
    # checkpoints that are damaged or another's
    damaged("tensors are cut", "tensors.safetensors has", every("tensors.safetensors", cut)),
    damaged(
        "tensors have a flipped bit", "tensors.safetensors was altered", every("tensors.safetensors", flip)
    ),
    damaged("tensors are gone", "tensors.safetensors", every("tensors.safetensors", remove)),
    damaged("state has a flipped bit", "state.json was altered", every("state.json", flip)),
    damaged("manifests are cut", "manifest.json is not a manifest", every("manifest.json", cut)),
    damaged(
        "manifests say nothing", "manifest.json is not a manifest", every("manifest.json", bare_manifest)
    ),
    Wrong(
        "a newer format",
        resumed(),
        "checkpoint='OUT/checkpoint/",
        "format 9, this version of Partita reads 2",
        copy(HALF, every("manifest.json", newer_manifest)),
    ),
    Wrong(
        "no checkpoint left",
        resumed(),
        "resume=True: ",
        "OUT has no checkpoint left; give another folder out=",
        copy(HALF, no_checkpoint),
    ),
    strange(
        "a tensor of something else", foreign({"w": torch.zeros(2)}, {}), "tensor of the checkpoint='w': "
    ),
    strange(
        "a part of something else", foreign({"a/w": torch.zeros(2)}, {}), "tensor of the checkpoint='a/w': "
    ),
    strange("a state without its stage", rechecked(lambda s: s.pop("stage"))),
    strange("a stage that is not there", rechecked(lambda s: s.update(stage=7))),
    Wrong(
        "clients' file is cut",
        resumed(store="disk"),
        "rows.bin='OUT/checkpoint/clients-0/rows.bin': ",
        "bytes long, expected",
        copy(DISK, rows_bin(cut)),
    ),
    Wrong(
        "clients' file is another's",
        resumed(store="disk"),
        "rows.bin='OUT/checkpoint/clients-0/rows.bin': ",
        "not a row file of this version",
        copy(DISK, rows_bin(text_file)),
    ),
    # loading
    Wrong("load from nowhere", load, "folder='OUT': ", "the folder of a finished run"),
    Wrong(
        "load an empty folder",
        load,
        "folder='OUT': ",
        "the folder of a finished run",
        lambda out: out.mkdir(),
    ),
    Wrong("load a file", load, "folder='OUT': ", "the folder of a finished run", text_file),
    make("load a number", lambda: pt.load(3), "folder=3: ", "the path of a folder"),
    Wrong("load a run that has not ended", load, "folder='OUT': ", "(it has no summary.json)", copy(HALF)),
    broken("summary is cut", "summary.json", "a JSON object", lambda out: cut(out / "summary.json")),
    broken("summary is a list", "summary.json", "a JSON object", wrote("summary.json", "[]")),
    broken(
        "summary says nothing",
        "summary.json",
        "a summary, as a run writes it",
        wrote("summary.json", "{}"),
    ),
    broken("clients.csv is empty", "clients.csv", "as a run writes", wrote("clients.csv", "")),
    broken(
        "clients.csv is text",
        "clients.csv",
        "as a run writes",
        wrote("clients.csv", "hello\nyou\n"),
    ),
    broken(
        "clients.csv has a word for a number",
        "clients.csv",
        "numbers in column n_train",
        wrote("clients.csv", "client,n_train,n_test\nann,many,1\n"),
    ),
    broken(
        "clients.csv is binary",
        "clients.csv",
        "as a run writes",
        wrote("clients.csv", b"\xff\x00\n"),
    ),
    broken(
        "clients.csv is gone",
        "clients.csv",
        "as a run writes",
        lambda out: remove(out / "clients.csv"),
    ),
    Wrong(
        "metrics.jsonl is text",
        load,
        "file='OUT/metrics.jsonl': line 1 ",
        "a JSON object per line",
        copy(WHOLE, wrote("metrics.jsonl", "hello\n")),
    ),
    Wrong(
        "metrics.jsonl is a list",
        load,
        "file='OUT/metrics.jsonl': line 1 ",
        "a JSON object per line",
        copy(WHOLE, wrote("metrics.jsonl", "[]\n")),
    ),
    Wrong(
        "load without a checkpoint",
        load,
        "folder='OUT': ",
        "it has no checkpoint",
        copy(WHOLE, no_checkpoint),
    ),
    Wrong(
        "load a damaged checkpoint",
        load,
        "checkpoint='OUT/checkpoint': ",
        "was altered",
        copy(WHOLE, every("state.json", flip)),
    ),
    Wrong(
        "load with another model",
        lambda out: pt.load(out, model=pt.models.mlp(4, 5, 2)).client(0).model(),
        "model='Blocks': ",
        "the model of the run",
        copy(WHOLE),
    ),
    Wrong(
        "a client that the run has not",
        lambda out: pt.load(out).client(3),
        "client=3: ",
        "from 0 up to 2",
        copy(WHOLE),
    ),
    Wrong(
        "save where a run is",
        lambda out: pt.load(out).save(out),
        "folder='OUT': ",
        "this one holds a run already",
        copy(WHOLE),
    ),
    Wrong(
        "save onto a file",
        lambda out: pt.load(out).save(out / "summary.json"),
        "folder='OUT/summary.json': ",
        "a folder that can be made",
        copy(WHOLE),
    ),
]

CASES = {case.id: case for case in TABLE}


# ---- both doors


class Done(NamedTuple):
    code: int
    out: str
    lines: list[str]  # of the standard error stream, without warnings


Command = Callable[..., Done]


@pytest.fixture
def partita(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command sets its own
        monkeypatch.setattr(sys, "argv", ["partita", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("partita: warning: ")]
        return Done(int(stop.value.code or 0), out, lines)

    return call


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PARTITA_DATA", raising=False)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes | None]:
    """All that is there, byte for byte."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def params(table: list[Any]) -> list[Any]:
    return [pytest.param(case, id=case.id) for case in table]


def test_the_table_is_long_and_no_case_is_there_twice() -> None:
    assert len(CASES) == len(TABLE)
    assert len({command.id for command in COMMANDS}) == len(COMMANDS)
    assert len(TABLE) + len(COMMANDS) >= 250


def test_what_the_cases_change_is_good(tmp_path: Path) -> None:
    assert federate(tmp_path / "run").summary()["rounds"] == 3
    half = tmp_path / "half"
    copy(HALF)(half)
    assert federate(half, resume=True).summary()["rounds"] == 3


@pytest.mark.filterwarnings("ignore:checkpoint skipped")
@pytest.mark.parametrize("case", params(TABLE))
def test_in_python(case: Wrong, home: Path) -> None:
    out = home / "run"
    if case.prepare:
        case.prepare(out)
    before = everything(home)
    with pytest.raises(ValueError) as error:
        case.call(out)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(case.says.replace("OUT", str(out)))
    assert case.allowed.replace("OUT", str(out)) in text
    assert everything(home) == before


@pytest.mark.filterwarnings("ignore:checkpoint skipped")
@pytest.mark.parametrize("case", params(TABLE))
def test_from_the_command_line(case: Wrong, home: Path, partita: Command) -> None:
    """The same in a user's file."""
    out = home / "run"
    if case.prepare:
        case.prepare(out)
    (home / "mine.py").write_text(
        f"from pathlib import Path\nfrom {__name__} import CASES\n"
        f"def experiment():\n    return CASES[{case.id!r}].call(Path({str(out)!r}))\n"
    )
    before = everything(home)
    refused(
        partita("run", "mine.py"), case.says.replace("OUT", str(out)), case.allowed.replace("OUT", str(out))
    )
    assert everything(home) == before


def refused(done: Done, *words: str) -> None:
    """Exit code 2, one line for people, nothing else."""
    assert done.code == 2
    assert done.out == ""
    assert len(done.lines) == 1, done.lines
    assert done.lines[0].startswith("partita: ")
    assert "Traceback" not in done.lines[0]
    for word in words:
        assert word in done.lines[0]


# ---- what only the command line can get wrong


class Mistyped(NamedTuple):
    """Arguments, and what the line says. With a `file`, that is the text of mine.py."""

    id: str
    arguments: str
    words: tuple[str, ...]
    file: str = ""


RECIPE = """
import partita as pt
from partita.recipes import Experiment

def experiment(clients=4):
    stages = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1))
    return Experiment(pt.models.mlp(64, 10), pt.data.digits(clients), stages)
"""
RETURNS = "def experiment():\n    "


def sets(id: str, setting: str, *words: str) -> Mistyped:
    return Mistyped(id, f"run digits --out run --set {setting}", words)


def recipe(id: str, text: str, *words: str) -> Mistyped:
    return Mistyped(id, "run mine.py --out run", words, text)


COMMANDS = [
    Mistyped("no such recipe", "run digit", ("recipe='digit': ", "(did you mean 'digits'?)")),
    Mistyped("no such file", "run yours.py", ("recipe='yours.py': ", "a Python file that exists")),
    Mistyped("no such command", "rnu digits", ("rnu")),
    Mistyped("no recipe", "run", ("recipe",)),
    Mistyped("no such option", "run digits --sed 1", ("--sed", "--seed")),
    Mistyped("an option without its value", "run digits --device", ("--device",)),
    Mistyped("one argument more", "demo digits", ("digits",)),
    Mistyped("seed is a word", "run digits --seed one", ("--seed", "integer")),
    Mistyped("seed is negative", "run digits --seed -1", ("seed=-1: ", "a whole number from 0")),
    Mistyped("device misspelt", "run digits --device cudaa", ("device='cudaa': ", "'auto', 'cpu' or 'cuda'")),
    Mistyped("executor misspelt", "demo --executor lop", ("executor='lop': ", "(did you mean 'loop'?)")),
    Mistyped("memory in apples", "run digits --memory 8apples", ("memory='8apples': ", "'8GiB'")),
    Mistyped("out in /proc", "run digits --out /proc/nothing", ("/proc/nothing", "No such file")),
    Mistyped(
        "resume without out",
        "run digits --set rounds=1 --set baselines=False --resume",
        ("resume=True: ", "out"),
    ),
    sets("no value", "rounds", "--set='rounds': ", "key=value, such as rounds=100"),
    sets("no key", "=3", "--set='=3': ", "key=value"),
    sets("an empty value", "rounds=", "rounds='': ", WHOLE_NUMBER),
    sets("no such key", "roundz=3", "--set='roundz': ", "(did you mean 'rounds'?)"),
    sets("a word for a number", "rounds=many", "rounds='many': ", WHOLE_NUMBER),
    sets("a fraction for a whole number", "rounds=2.5", "rounds=2.5: ", WHOLE_NUMBER),
    sets("a word for a truth", "baselines=maybe", "baselines='maybe': ", "True"),
    sets("a list for a number", "batch=[4]", "batch=[4]: ", WHOLE_NUMBER),
    sets("epochs beside steps", "epochs=2", "steps=5: ", "steps or epochs, not both"),
    sets("cohort of more than there are", "cohort=99", "cohort=99: ", "up to 40"),
    sets("a share without an attack", "byzantine=0.2", "byzantine=0.2: ", "give attack="),
    sets("a share above 1", "byzantine=1.5", "byzantine=1.5: ", "a number from 0 up to 1"),
    sets("a liar that is nobody", "byzantine=[99]", "byzantine=99: ", "from 0 up to 39"),
    sets("no such attack", "attack=sign_flp", "attack='sign_flp': ", "(did you mean 'sign_flip'?)"),
    sets(
        "an attack without liars",
        "attack=sign_flip",
        "byzantine=(): ",
        "attack= needs Byzantine clients; give a share such as 0.25",
    ),
    sets("attack is a number", "attack=2", "attack=2: ", "partita.attack.sign_flip()"),
    sets("attacks", "attack=[alie()]", "attack=[Attack(", "partita.attack.sign_flip()"),
    sets("a wrong option of an attack", "attack=ipm(epsilon=0)", "attack: epsilon=0: ", "above 0"),
    sets("no such schedule", "schedule=asynchronos", "schedule='asynchronos': ", "mean 'asynchronous'?)"),
    sets("schedule is a number", "schedule=2", "schedule=2: ", SCHEDULE),
    sets("schedules", "schedule=[synchronous()]", "schedule=[Synchronous(", SCHEDULE),
    sets("schedule is a delay", "schedule=gamma(1)", "schedule='gamma': ", "one of 'asynchronous', 'sync"),
    sets("a wrong option of a schedule", "schedule=asynchronous(buffer=0)", "schedule: buffer=0: ", "from 1"),
    sets(
        "a schedule's option misspelt",
        "schedule=preferred(untl=1)",
        "schedule: preferred: ",
        "mean 'until'?)",
    ),
    sets("too many at work", "schedule=asynchronous(99)", "concurrency=99: ", "from 1 up to 40"),
    sets("no such delay", "schedule=preferred(delays(gama(1)))", "schedule: function='gama': ", "'gamma'?)"),
    sets("a wrong delay", "schedule=preferred(delays(gamma(-1)))", "schedule: gamma mean=-1: ", "from 0"),
    sets(
        "no such file of delays",
        "schedule=preferred(delays(trace('x')))",
        "delay path='x': ",
        "a readable file",
    ),
    sets("no such staleness", "schedule=asynchronous(staleness='sqt')", "staleness='sqt': ", "mean 'sqrt'?)"),
    sets(
        "a part of Python", "schedule=preferred(delays(open('x')))", "schedule: function='open': ", "one of"
    ),
    sets("evaluation every -2.5", "evaluate_every=-2.5", "evaluate_every=-2.5: ", "a number above 0"),
    Mistyped(
        "compared methods that keep step",
        "compare digits --algorithms fedbuff,l2gd(lam=1,p=0.5) --out run --set schedule=asynchronous",
        ("schedule='asynchronous': ", "synchronous() for l2gd: all clients toss one coin"),
    ),
    sets("no such measure", "measures=[line_los()]", "measures='line_los': ", "(did you mean 'line_loss'?)"),
    sets("measures is a number", "measures=3", "measures=3: ", "partita.measures."),
    sets(
        "a measure twice",
        "measures=[line_loss(),line_loss()]",
        "measures=['line_loss', ",
        "each measure once",
    ),
    sets("loss misspelt", "loss=mes", "loss='mes': ", "(did you mean 'mse'?)"),
    sets("no such method", "algorithm=fedalt2", "algorithm='fedalt2': ", "(did you mean 'fedalt'?)"),
    sets("no such option of the method", "algorithm.lrr=1", "'lrr': ", "(did you mean 'lr'?)"),
    sets("lr is a word", "algorithm.lr=fast", "lr='fast': ", "a number from 0"),
    sets("server is a word", "algorithm.server=adam", "server='adam': ", "partita.optim.adam(lr=0.01)"),
    sets("personal is a number", "algorithm.personal=3", "personal=3: ", SPLITS),
    sets(
        "personal misspelt", "algorithm.personal=outputs", "personal='outputs': ", "(did you mean 'output'?)"
    ),
    sets("a method that needs more", "algorithm=fedprox", "fedprox: ", "'mu'"),
    sets("a recipe's argument", "clients=0", "clients=0: ", WHOLE_NUMBER),
    sets("a recipe's argument is too large", "classes=99", "classes=99: ", "at most 10"),
    sets("a recipe's argument is a word", "test=some", "test='some': ", "a fraction below 1"),
    Mistyped(
        "no such stage", "run mine.py --set algorithm.3.lr=1", ("--set='algorithm.3.lr': ", "STAGE"), RECIPE
    ),
    Mistyped(
        "no stage", "run mine.py --set algorithm.lr=1", ("--set='algorithm.lr': ", "algorithm.0.lr"), RECIPE
    ),
    Mistyped(
        "no such option of a stage",
        "run mine.py --set algorithm.0.lrr=1",
        ("'lrr': ", "(did you mean 'lr'?)"),
        RECIPE,
    ),
    recipe(
        "no experiment", "x = 1", "recipe='mine.py': ", "a function experiment() that returns an Experiment"
    ),
    recipe("experiment is a number", "experiment = 3", "recipe='mine.py': ", "a function experiment()"),
    recipe("experiment returns a number", RETURNS + "return 3", "recipe=", "a function that returns a"),
    recipe("a syntax error", "def experiment(:", "recipe='mine.py': ", "line 1"),
    recipe("no Python at all", "\0", "recipe='mine.py': ", "Python"),
    recipe("an import that fails", "import nowhere", "recipe='mine.py': ", "nowhere"),
    recipe("an error in the file", "1 / 0", "recipe='mine.py': ", "division by zero"),
    recipe("an error in experiment", RETURNS + "1 / 0", "recipe=", "division by zero"),
    recipe("an argument that is missing", "def experiment(a): ...", "recipe=", "'a'"),
    recipe("an error of two lines", RETURNS + "raise ValueError('a\\nb')", "a b"),
    recipe("an error without a word", RETURNS + "raise ValueError", "ValueError"),
    recipe("a file that is missing", RETURNS + "open('nowhere')", "No such file", "nowhere"),
]


@pytest.mark.parametrize("case", params(COMMANDS))
def test_mistyped(case: Mistyped, home: Path, partita: Command) -> None:
    if case.file:
        (home / "mine.py").write_text(case.file)
    before = everything(home)
    refused(partita(*case.arguments.split()), *case.words)
    assert everything(home) == before


# ---- a full disk: what and where, and the run goes on when there is room again


@pytest.fixture(scope="module")
def straight() -> dict[str, dict[str, Tensor]]:
    """What a run ends with when nothing happens to it."""
    return {store: tensors(federate(None)) for store in ("memory", "disk")}


def tensors(run: pt.Run) -> dict[str, Tensor]:
    own = {f"{i} {k}": x for i in range(3) for k, x in run.client(i).personal.items()}
    return {**run.shared, **own}


def assert_goes_on(out: Path, store: str, expected: dict[str, Tensor]) -> None:
    found = tensors(federate(out, store=store, resume=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], x) for k, x in expected.items())
    assert pt.load(out).summary()["rounds"] == 3


def fail_at(patch: pytest.MonkeyPatch, last: int) -> list[int]:
    """From the n-th call on that waits for the disk or writes to it, there is no space; counts the calls."""
    calls = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **options)

        return call

    patch.setattr(durable, "save_file", wrap(durable.save_file))
    for name in ("fsync", "pwrite", "replace"):
        patch.setattr(os, name, wrap(getattr(os, name)))
    return calls


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_no_space_at_any_moment(
    store: str, home: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, dict[str, Tensor]]
) -> None:
    with monkeypatch.context() as patch:
        calls = fail_at(patch, 10**6)
        federate(home / "whole", store=store)
    assert calls[0] > 30
    for last in range(0, calls[0], 6):
        out = home / f"run{last}"
        with monkeypatch.context() as patch:
            fail_at(patch, last)
            with pytest.raises(OSError, match="No space left on device") as error:
                federate(out, store=store)
        assert error.value.errno == errno.ENOSPC
        assert str(out) in str(error.value)
        assert not [p for p in out.rglob("*") if p.suffix == ".tmp"]
        assert_goes_on(out, store, straight[store])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB, where one may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if (
        os.name != "posix"
        or not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(
    small_disk: Path, home: Path, partita: Command, straight: dict[str, dict[str, Tensor]]
) -> None:
    out = small_disk / "run"
    (home / "mine.py").write_text(
        f"from {__name__} import federate\nfrom pathlib import Path\n"
        f"def experiment():\n    return federate(Path({str(out)!r}), resume=True)\n"
    )
    ballast = small_disk / "ballast"
    with contextlib.suppress(KeyboardInterrupt):
        federate(out, callbacks=[Stop(2)])
    before = everything(out / "checkpoint")
    with contextlib.suppress(OSError), open(ballast, "wb") as f:
        while f.write(bytes(4096)):
            f.flush()
    refused(partita("run", "mine.py"), "No space left on device", str(out))
    assert before.items() <= everything(out / "checkpoint").items()
    ballast.unlink()
    assert_goes_on(out, "auto", straight["memory"])


def test_a_copy_that_does_not_fit_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pt.load(FOLDERS[WHOLE])
    full, calls = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), iter(range(100))

    def copystat(*_: Any, **__: Any) -> None:
        if next(calls) == 5:
            raise full

    monkeypatch.setattr(shutil, "copystat", copystat)
    with pytest.raises(OSError, match=rf"cannot copy .* to {home / 'copy'}: .*No space left"):
        run.save(home / "copy")
    assert [p for p in home.rglob("*") if p.is_file()] == []


# ---- what must work


@pytest.fixture(params=["loop", "vmap"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_clients_without_samples_or_with_one(executor: str) -> None:
    """No sample at all; one to train and none to test; one to test and none to train; some of both."""
    x, y = arrays()["x"], arrays()["y"]
    train, test = [[0, 0], [0, 1], [0, 0], [1, 9], [10, 5]], [[0, 0], [0, 0], [15, 1], [16, 4], [20, 4]]
    mixed = pt.data.FederatedData.make(x, y, train, test, names=["none", "one", "tested", "dora", "emil"])
    run = federate(None, data=mixed, executor=executor)
    assert run.summary()["excluded"] == []
    assert [row["personal"] is None for row in run.clients] == [True, True, False, False, False]
    assert all(torch.isfinite(t).all() for t in tensors(run).values())


def test_an_empty_cohort_trains_nothing(executor: str) -> None:
    """Rounds in which no one who reports has data leave the model as it was."""
    mixed = pt.data.FederatedData.make(arrays()["x"], arrays()["y"], [[0, 24], [0, 0], [0, 0]])
    run = federate(None, data=mixed, cohort=1, executor=executor, rounds=6, algorithm=pt.fedavg(lr=0.1))
    assert all(torch.isfinite(t).all() for t in run.shared.values())


def test_no_one_has_test_data(executor: str, tmp_path: Path) -> None:
    run = federate(tmp_path / "run", data=data(test=0.0), executor=executor)
    assert run.summary()["test"] == {"local": None, "global": None, "personal": None}
    assert pt.load(tmp_path / "run").clients[0]["personal"] is None


def test_a_class_that_no_one_has(executor: str) -> None:
    run = federate(None, model=pt.models.mlp(4, 9), algorithm=pt.fedavg(lr=0.1), executor=executor)
    assert run.summary()["test"]["personal"] is not None


def test_a_batch_larger_than_any_client(executor: str) -> None:
    large, whole = (federate(None, batch=b, executor=executor).shared for b in (10**6, None))
    assert all(torch.allclose(large[k], whole[k]) for k in whole)


def test_a_client_whose_loss_is_not_finite_is_named(executor: str, tmp_path: Path) -> None:
    far = data(x=with_value(arrays()["x"], 1e38), y=numbers(1))
    net = pt.models.mlp(4, 3, 1)
    federate(tmp_path / "run", data=far, model=net, batch=None, executor=executor, rounds=2)
    run = pt.load(tmp_path / "run")
    assert run.summary()["excluded"] == ["bob"]
    assert [row["excluded"] for row in run.metrics] == [["bob"], ["bob"]]
    assert all(torch.isfinite(t).all() for t in tensors(run).values())


ODD_NAMES = [
    "a b",
    "  ",
    "émile 漢字 🎻",
    "a/b\\c",
    'x,"y";z',
    "two\nlines",
    "back\rhome",
    "\r\n",
    "",
    "=1+1",
    "\0",
    "None",
]


def test_clients_with_odd_names(tmp_path: Path) -> None:
    out = tmp_path / "run"
    odd = pt.data.from_arrays(**arrays(client=np.arange(24) % len(ODD_NAMES), names=ODD_NAMES))
    run = federate(out, data=odd)
    assert run.names == ODD_NAMES
    assert pt.load(out).names == ODD_NAMES
    with open(out / "clients.csv", newline="", encoding="utf-8") as f:
        formulas = {"\r\n": "'\r\n", "=1+1": "'=1+1"}  # a quote makes them harmless in a spreadsheet
        assert [row["client"] for row in csv.DictReader(f)] == [formulas.get(n, n) for n in ODD_NAMES]
    run.save(tmp_path / "copy")
    assert pt.load(tmp_path / "copy").client(5).name == "two\nlines"


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [cut, flip, remove])
def test_one_damaged_checkpoint_is_passed_over(
    file: str, harm: Spoil, home: Path, straight: dict[str, dict[str, Tensor]]
) -> None:
    copy(HALF)(home / "run")
    newest = max(p for p in (home / "run" / "checkpoint").iterdir() if p.name.isdecimal())
    harm(newest / file)
    with pytest.warns(UserWarning, match=rf"checkpoint skipped: .*{newest.name}"):
        assert_goes_on(home / "run", "auto", straight["memory"])


def test_damaged_metrics_are_written_again(home: Path, straight: dict[str, dict[str, Tensor]]) -> None:
    """They are in the checkpoint too."""
    copy(HALF, wrote("metrics.jsonl", "hello\nyou"))(home / "run")
    assert_goes_on(home / "run", "auto", straight["memory"])
    assert [row["round"] for row in pt.load(home / "run").metrics] == [1, 2, 3]
