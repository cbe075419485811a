"""The promise on bad input, as one table: what is wrong is refused before any work.

Each case is tried by both doors. In Python it is a `Refused` with the field, its value and what is allowed.
From the command line it is one line that names the field, exit code 2 and nothing on the standard output.
Either way not one byte on disk changes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.check import MISSING, shortened
from partita.engine.store import durable
from small import arrays, data, federate, method, model, numbers, with_value
from support import Command, Stop, each, files_of

NAN, INF = float("nan"), float("inf")
F = nn.functional
S = pt.schedule


class Reshaped(nn.Module):
    """A linear layer whose output is changed."""

    def __init__(self, change: Callable[[Tensor], Any], outputs: int = 2) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, outputs), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x))


# ---- a case: a call with the folder that the run would write to, and the error that it must raise

Call = Callable[[Path], object]
Spoil = Callable[[Path], object]


class Case(NamedTuple):
    """A wrong input; OUT in texts is the folder, and `prepare` fills it before."""

    call: Call
    field: str
    value: object = ANY
    names: tuple[str, ...] = ()
    """What the error says is allowed, or why the value is not: bounds, choices, the nearest word."""
    prepare: Spoil | None = None

    def __str__(self) -> str:
        return f"{self.field}={'...' if self.value is ANY else shortened(self.value)} {self.names}"


def case(call: Call, field: str, value: object, *names: str, prepare: Spoil | None = None) -> Case:
    return Case(call, field, value, names, prepare)


def fed(**changed: Any) -> Call:
    return lambda out: federate(**{"out": out, **changed})


def settings(*names: str, others: dict[str, Any] | None = None, **wrong: Iterable[Any]) -> list[Case]:
    """Wrong values of settings of a run, each beside these other settings."""
    changes = [(field, value) for field, values in wrong.items() for value in values]
    return [Case(fed(**{**(others or {}), field: value}), field, value, names) for field, value in changes]


def options(
    build: Callable[..., object], *names: str, prefix: str = "", **wrong: Iterable[Any]
) -> list[Case]:
    """Wrong values of arguments of a function."""
    changes = [(field, value) for field, values in wrong.items() for value in values]
    return [
        Case(lambda _, f=field, v=value: build(**{f: v}), f"{prefix}{field}", value, names)
        for field, value in changes
    ]


def made(build: Callable[[], object], field: str, value: object, *names: str) -> Case:
    return Case(lambda _: build(), field, value, names)


def on(**changed: Any) -> Call:
    """The run on other arrays; what is no array is another argument of the run."""
    own = {k: v for k, v in changed.items() if k in ("x", "y", "client", "test", "names")}
    rest = {k: v for k, v in changed.items() if k not in own}
    return lambda out: federate(out, data=data(**own), **rest)


def split(**changed: Any) -> Call:
    given = {"clients": 3, "partition": pt.data.iid(), "x": arrays()["x"], "y": arrays()["y"], **changed}
    return lambda _: pt.data.split(**given)


def waiting(**delays: Any) -> Call:
    return fed(schedule=S.preferred(S.delays(**delays)))


def resumed(**changed: Any) -> Call:
    return lambda out: federate(out, resume=True, **changed)


def load(out: Path) -> object:
    return pt.load(out)


# ---- what happens to folders of runs

HALF, WHOLE, DISK = "half", "whole", "disk"
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run that was stopped in its third round, the same with states on disk, and a finished one."""
    root = tmp_path_factory.mktemp("runs")
    for name, options in {HALF: {}, DISK: {"store": "disk"}}.items():
        FOLDERS[name] = root / name
        with contextlib.suppress(KeyboardInterrupt):
            federate(root / name, callbacks=[Stop(3, KeyboardInterrupt)], **options)
    FOLDERS[WHOLE] = root / WHOLE
    federate(root / WHOLE)


def leave(_: Path) -> None:
    """Change nothing."""


def copy(kind: str, spoil: Spoil = leave) -> Spoil:
    def prepare(out: Path) -> None:
        shutil.copytree(FOLDERS[kind], out)
        spoil(out)

    return prepare


def wrote(name: str, text: str | bytes) -> Spoil:
    return lambda out: (out / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def edited(change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Spoil:
    def edit(out: Path) -> None:
        content = json.loads((out / name).read_text())
        change(content)
        (out / name).write_text(json.dumps(content))

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
    body = {"format": durable.FORMAT, "round": int(path.parent.name)}
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
        newest = durable.read(out / "checkpoint")
        assert newest is not None
        change(newest.state)
        no_checkpoint(out)
        durable.write(out / "checkpoint", newest.round, newest.tensors, newest.state)

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


def cut_archive(out: Path) -> None:
    archive(x=np.zeros(99), y=[1], client=[0])(out)
    cut(out / "data.npz")


def stored(out: Path, **keys: str) -> object:
    return pt.data.from_npz(out / "data.npz", **keys)


def leaf(out: Path) -> object:
    return pt.data.from_leaf(out / "leaf.json")


# ---- the table

WHOLE_NUMBER, FRACTION = "a whole number from 1", "from 0 up to 1"
BYZANTINE = {"attack": pt.attack.sign_flip(), "byzantine": ["bob"]}
ATTACK, MEASURES = "partita.attack.", "partita.measures."
SPLITS = ("'input'", "'output'", "'adapter'", "'norm'")
EXECUTORS = ("'auto'", "'loop'", "'pool'", "'vmap'", "'graph'", "'compiled'")
EACH_CLIENT = "each of the 3 clients"

RUN = [
    # numbers: text, booleans, arrays, nothing, fractions, NaN, too small, too large
    *settings(WHOLE_NUMBER, rounds=["3", True, INF, np.array([3]), torch.tensor(3), None, 0]),
    *settings(WHOLE_NUMBER, batch=[0, [4], NAN], steps=[-1], epochs=[1.5], evaluate_every=[0], memory=[0]),
    *settings("a whole number", "from 1 up to 3", cohort=[9, 0.5, 0]),
    *settings(EACH_CLIENT, steps=[[1, 2]]),
    case(fed(steps=[1, 2, "x"]), "steps", "x", "from 0"),
    case(fed(steps=2, epochs=1), "steps", 2, "epochs"),
    *settings("a whole number from 0", f"up to {2**63 - 1}", seed=[-1, None, 2**64]),
    *settings("above 0", evaluate_every=[0.0, NAN]),
    *settings("a whole number from 0", checkpoint_every=[1.5]),
    *settings("'500MB'", "'8GiB'", memory=["8 apples"]),
    # words
    *settings(*EXECUTORS, "mean 'vmap'", executor=["vmapp", "VMAP"]),
    *settings(*EXECUTORS, executor=[np.array(["loop", "vmap"])]),
    *settings("'auto'", "'cpu'", "'cuda'", device=["gpu", 3.5]),
    *settings("'auto'", "'memory'", "'disk'", "mean 'disk'", store=["dsk"]),
    *settings("'keep'", "'reset'", "mean 'keep'", state=["kept"]),
    *settings("'global'", "'static'", "'personal'", norm=["batch", True]),
    *settings("True", "False", baselines=["yes"], resume=["yes"], report=["report.html"]),
    *settings("partita.callbacks.Callback", callbacks=[print, [print]]),
    made(lambda: federate(None, resume=True), "resume", True, "out="),
    made(lambda: federate(None, store="disk"), "store", "disk", "'memory'", "'auto'", "out="),
    # Byzantine clients and their attack
    *settings(
        ATTACK,
        attack=["sign_flip", pt.attack.sign_flip, pt.aggregate.mean(), [pt.attack.alie()]],
        others=BYZANTINE,
    ),
    *settings("attack=", "a share", "numbers or names", byzantine=[(), 0.0], others=BYZANTINE),
    *settings("at least one of the 3 clients", byzantine=[0.1], others=BYZANTINE),
    *settings("attack=", ATTACK, byzantine=[[1], 0.5]),
    *settings(FRACTION, byzantine=[1.5, -0.1, NAN], others=BYZANTINE),
    *settings("at least one honest client", byzantine=[1.0, [0, "bob", 2]], others=BYZANTINE),
    *settings("a share", "numbers or names", byzantine=[True, 1, "ann", None], others=BYZANTINE),
    case(fed(**{**BYZANTINE, "byzantine": ["bop"]}), "byzantine", "bop", "mean 'bob'"),
    *[
        case(
            fed(**{**BYZANTINE, "byzantine": clients}),
            "byzantine",
            clients[0],
            "a whole number from 0 up to 2",
        )
        for clients in ([3], [-1], [True, False, False], [0.5])
    ],
    *options(pt.attack.sign_flip, "above 0", scale=[0, -1], prefix="attack "),
    *options(pt.attack.ipm, "above 0", epsilon=["x"], prefix="attack "),
    *options(pt.attack.alie, "from 0", z=[-1.0], prefix="attack "),
    *options(pt.attack.gaussian, "above 0", sigma=[NAN], prefix="attack "),
    *options(pt.attack.malformed, "'names'", "mean 'shape'", how=["shap"], prefix="attack "),
    *options(pt.attack.nonfinite, "'inf'", "mean 'nan'", value=["nans"], prefix="attack "),
    *options(pt.attack.mimic, "mimic has no such argument", z=[1], prefix="attack "),
    # measures
    *settings(
        MEASURES,
        measures=[pt.measures.line_loss, [pt.measures.line_loss], pt.measures.line_loss(), "line_loss", None],
    ),
    case(
        fed(measures=[pt.measures.line_loss(), pt.measures.line_loss(points=3)]),
        "measures",
        ["line_loss", "line_loss"],
        "once",
    ),
    *options(pt.measures.line_loss, "from 2", points=[1], prefix="measure "),
    *options(pt.measures.line_loss, "'train'", "mean 'test'", split=["tests"], prefix="measure "),
    *options(pt.measures.gradient_norm, *SPLITS, personal=[3], prefix="measure "),
    case(
        fed(measures=[pt.measures.gradient_norm(personal="input")]),
        "measure gradient_norm personal",
        "input",
        "shared by the method",
    ),
]

SCHEDULE = [
    *settings(
        "partita.schedule.synchronous()",
        schedule=["sync", S.synchronous, S.asynchronous, method(), S.Asynchronous, S.delays(upload=1)],
    ),
    made(lambda: pt.stage(method(), schedule="x"), "schedule", "x", "partita.schedule.synchronous()"),
    case(fed(schedule=S.asynchronous(concurrency=9)), "concurrency", 9, "from 1 up to 3"),
    case(fed(schedule=S.asynchronous(buffer=4)), "buffer", 4, "from 1 up to 3"),
    case(fed(schedule=S.asynchronous(concurrency=2, buffer=3, order="same")), "buffer", 3, "from 1 up to 2"),
    case(waiting(upload=[1.0, 2.0]), "delays upload", (1.0, 2.0), EACH_CLIENT),
    case(waiting(download=S.scaled(1.0, [1.0, 2.0])), "delays download factor", (1.0, 2.0), EACH_CLIENT),
    case(waiting(dropout=[0.1, 0.2]), "delays dropout", (0.1, 0.2), EACH_CLIENT),
    case(
        fed(schedule=S.asynchronous(), algorithm=pt.local(lr=0.1)),
        "schedule",
        "asynchronous",
        "synchronous",
        "local",
    ),
    case(
        fed(
            schedule=S.asynchronous(),
            algorithm=pt.pipeline(pt.fedavg(lr=0.1), pt.l2gd(lr=0.1, lam=1.0, p=0.5)),
        ),
        "schedule",
        "asynchronous",
        "synchronous",
        "l2gd",
    ),
    *options(S.asynchronous, WHOLE_NUMBER, concurrency=[0], buffer=[0, 1.5]),
    *options(S.asynchronous, "'constant'", "'inverse'", "mean 'sqrt'", staleness=["sqr"]),
    *options(S.asynchronous, "partita.schedule.polynomial", staleness=[0.5, S.polynomial, lambda: 1.0]),
    *options(S.asynchronous, "'random'", "'same'", order=["turns"]),
    *options(S.asynchronous, "from 0", max_staleness=[-1]),
    *options(S.asynchronous, "above 0", until=[0]),
    *options(S.asynchronous, "partita.schedule.delays(", delays=[2.0, S.exponential(1), S.delays]),
    *options(S.synchronous, "'random'", "'turns'", order=["same"]),
    *options(S.synchronous, "above 0", until=[INF]),
    made(lambda: S.synchronous(deadline=2), "deadline", 2.0, "delays="),
    *options(S.synchronous, "clients from 1", "a share from 0.0 up to 1.0", quorum=[0, 1.5, True]),
    *options(S.synchronous, "'drop'", "mean 'apply'", late=["aply"]),
    *options(S.synchronous, "synchronous has no such argument", "order, delays", buffer=[2]),
    *options(S.delays, "a number from 0", upload=[-1], compute=["fast"], speed=[None], prefix="delays "),
    *options(S.delays, "a delay such as", download=[S.gamma], prefix="delays "),
    *options(S.delays, "from 0 and below 1", dropout=[1.0], prefix="delays "),
    *options(S.delays, "mean 'upload'", uplaod=[1], prefix="delays "),
    *options(S.exponential, "from 0", mean=[-1], prefix="delay "),
    *options(S.gamma, "from 0", mean=[NAN], prefix="delay "),
    *options(partial(S.gamma, 1), "from 0.01", shape=[0], prefix="delay "),
    made(lambda: S.uniform(2, 1), "delay high", 1.0, "from low=2"),
    *options(partial(S.lognormal, 1), "from 0 up to 10", sigma=[99], prefix="delay "),
    *options(S.classes, "(share, factor)", "sum to 1", shares=[[(0.5, 1)], 3], prefix="delay "),
    *options(partial(S.scaled, 1), "from 0", factor=["x"], prefix="delay "),
    *[
        case(
            lambda out: S.trace(out / "delays.csv"),
            "delay path",
            "OUT/delays.csv",
            *names,
            prepare=None if text is None else folder_with("delays.csv", text),
        )
        for text, *names in (
            (None, "a readable file"),
            ("", "at least one number"),
            ("a\nb\n", "numbers from 0", "line 2"),
            ("1,2,3\n", "device,delay", "line 1"),
        )
    ],
]

MODEL = [
    *settings("an nn.Module", model=["mlp", None, model().state_dict(), lambda: 3]),
    *settings("an instance such as Linear(...)", model=[nn.Linear]),
    *settings("without arguments", model=[lambda n: n]),
    case(fed(model=nn.Flatten()), "model", "Flatten", "require gradients"),
    case(fed(model=model().requires_grad_(False)), "model", "Blocks", "require gradients"),
    case(fed(model=nn.LazyLinear(2)), "model", "LazyLinear", "call the model on a batch"),
    case(fed(model=pt.models.mlp(5, 2)), "model", "Blocks", "[4, 4]", "float32"),
    case(fed(model=model().double()), "model", "Blocks", "torch.float64", "convert x"),
    case(
        on(x=torch.zeros(24, 4, dtype=torch.uint8), model=nn.Embedding(3, 2)),
        "model",
        "Embedding",
        "int64",
        "uint8",
    ),
    case(fed(model=Reshaped(lambda o: {"a": o, "b": o})), "model", "Reshaped", "output=", "'a', 'b'"),
    case(fed(model=Reshaped(lambda o: o[:1])), "shape of outputs", [1, 2], "[4, classes]"),
    case(fed(model=Reshaped(lambda o: o * NAN)), "loss", "cross_entropy", "finite"),
    case(fed(model=Reshaped(lambda o: o.detach())), "loss", "cross_entropy", "the model's parameters"),
    # the loss and the metric
    *settings("a submodule of Blocks", features=["nohere"]),
    *settings("'mse'", "mean 'cross_entropy'", loss=["cross-entropy"]),
    *settings("(output, target)", "cross_entropy", "mse", loss=[3, lambda o: o.sum()]),
    *settings("CrossEntropyLoss()", loss=[nn.CrossEntropyLoss]),
    *[
        case(fed(loss=loss), "loss", "<lambda>", *names)
        for loss, *names in (
            (lambda o, t: F.cross_entropy(o, t, reduction="none"), "one number", "[4]"),
            (lambda _o, _t: "x", "one number", "str"),
            (lambda _o, _t: None, "one number", "NoneType"),
            (lambda o, _: o.sum() * NAN, "finite"),
            (lambda o, _: o.sum() / 0, "finite"),
            (lambda _o, _t: torch.tensor(1.0), "the model's parameters"),
            (lambda o, t: o @ t, "[4, 2]", "[4]"),
        )
    ],
    *settings("'mse'", "mean 'accuracy'", metric=["acc"]),
    *[
        case(fed(metric=pt.Metric(score, higher_is_better=True)), "metric", "<lambda>", "one number")
        for score in (lambda o, _: o[0], lambda _o, _t: "hi")
    ],
]

METHOD = [
    *settings("partita.fedavg(lr=0.1)", algorithm=[pt.fedavg, "fedavg", pt.stage(pt.fedavg(lr=0.1))]),
    *[
        case(fed(algorithm=pt.fedalt(personal, lr=0.1)), "personal", personal, *names)
        for personal, *names in (
            ("outputs", *SPLITS, "mean 'output'"),
            ("heads.*", "none of the model's 4 names"),
            ("adapter", "partita.models.add_adapters"),
            ("norm", "matches none"),
            (lambda _: False, "at least one of 4 names"),
        )
    ],
    case(fed(algorithm=pt.fedsim(["output", "hiden*"], lr=0.1)), "personal", "hiden*", "matches none"),
    *options(partial(pt.fedalt, lr=0.1), *SPLITS, personal=[3, []]),
    *options(pt.fedavg, "a number from 0", lr=["0.1", -1, NAN, np.array([0.1]), 10**400]),
    *options(pt.fedavg, "partita.optim.linear", lr=[lambda: 0.1, pt.optim.linear]),
    made(lambda: pt.fedavg(), "lr", MISSING, "fedavg(lr=...)"),
    made(lambda: pt.fedavg(0.1, lr=0.1), "fedavg", MISSING, "lr, ", "momentum"),
    *options(partial(pt.fedavg, lr=0.1), "mean 'momentum'", "weight_decay", momentun=[0.9]),
    *options(partial(pt.fedavg, lr=0.1), FRACTION, momentum=[1.5]),
    *options(partial(pt.fedavg, lr=0.1), "'uniform'", "mean 'samples'", weighting=["sample"]),
    *options(partial(pt.fedavg, lr=0.1), "partita.optim.adam", server=["adam"]),
    *options(partial(pt.fedavg, lr=0.1), "partita.aggregate.mean()", aggregate=[pt.aggregate.mean]),
    *options(partial(pt.fedprox, lr=0.1), "from 0", mu=[-1]),
    *options(partial(pt.fedbuff, lr=0.1), WHOLE_NUMBER, buffer=[0]),
    *options(partial(pt.fedbuff, lr=0.1), "mean 'sqrt'", staleness=["sqr"]),
    *options(partial(pt.fedasync, lr=0.1), "partita.schedule.polynomial", staleness=[S.polynomial]),
    *options(partial(S.hinge, b=4), "above 0", a=[0]),
    *options(partial(pt.persafl_me, lr=0.1), "from 1", inner_steps=[0]),
    made(lambda: pt.tuned("fedavg", lr=0.1), "algorithm", "fedavg", "partita.fedavg(lr=0.1)"),
    *options(partial(pt.tuned, pt.fedavg(lr=0.1), lr=0.1), WHOLE_NUMBER, steps=[0]),
    made(lambda: pt.pipeline(), "stages", (), "at least one"),
    made(lambda: pt.pipeline("fedavg"), "algorithm", "fedavg", "partita.fedavg(lr=0.1)"),
    *options(partial(pt.stage, pt.fedavg(lr=0.1)), WHOLE_NUMBER, rounds=[0]),
    case(
        fed(algorithm=pt.pipeline(pt.fedavg(lr=0.1), pt.fedalt("heads", lr=0.1))),
        "personal",
        "heads",
        "matches none",
    ),
    case(fed(algorithm=pt.pipeline(pt.stage(pt.fedavg(lr=0.1), cohort=9))), "cohort", 9, "up to 3"),
    case(fed(algorithm=pt.pipeline(pt.stage(pt.fedavg(lr=0.1), steps=(1, 2)))), "steps", (1, 2), EACH_CLIENT),
]

DATA = [
    *settings("a FederatedData", "partita.data.", data=[None, arrays()["x"], (arrays()["x"], arrays()["y"])]),
    case(fed(data=method(), algorithm=data()), "data", ANY, "a FederatedData"),
    case(fed(model=data(), data=model()), "data", ANY, "a FederatedData"),
    # arrays
    case(on(y=arrays()["y"][:20]), "rows of y", 20, "24"),
    case(on(client=[0] * 20), "ids in client", 20, "24"),
    *[
        case(on(client=client), "client", client, "a whole number or a string", "each row")
        for client in (np.zeros((24, 1), int), [0.5] * 24, [[1], [1, 2]] * 12, None)
    ],
    case(on(y=arrays()["y"][:, None]), "shape of y", [4, 1], "[4]"),
    case(on(y=arrays()["y"] + 3), "y of client 'ann' (train)", 4, "labels from 0 to 1"),
    case(on(y=with_value(arrays()["y"], 7)), "y of client 'bob' (train)", 7, "labels from 0 to 1"),
    case(on(y=with_value(arrays()["y"], -1)), "y of client 'bob' (train)", -1, "from -1 to 1"),
    case(
        on(y=with_value(arrays()["y"], 7), loss=F.cross_entropy),
        "y of client 'bob' (train)",
        7,
        "labels from 0 to 1",
    ),
    case(
        on(y=arrays()["y"] + 3, model=pt.models.mlp(4, 1)),
        "y of client 'ann' (train)",
        4,
        "labels 0 and 1",
        "'mse'",
    ),
    case(
        on(y=numbers() * 9, model=pt.models.mlp(4, 1), loss="binary_cross_entropy"),
        "y of client 'cy' (test)",
        ANY,
        "labels 0 and 1",
    ),
    case(
        on(y=numbers() * 9, model=pt.models.mlp(4, 1), metric="accuracy"),
        "metric",
        "accuracy",
        "'mse'",
        "'mae'",
    ),
    case(on(y=numbers()), "shape of outputs", [4, 2], "[4]", "'mse'"),
    case(on(y=numbers(2), model=pt.models.mlp(4, 1)), "shape of outputs", [4, 1], "[4, 2]"),
    case(
        on(y=numbers(), loss="cross_entropy"), "dtype of y", "torch.float32", "whole numbers", "cross_entropy"
    ),
    case(
        on(y=numbers(), model=pt.models.mlp(4, 1), loss=lambda o, t: (o - t).square().mean()),
        "shape of outputs",
        [4, 1],
        "[4]",
        "broadcasts",
    ),
    case(
        on(y=numbers(1), model=Reshaped(lambda o: o[:, 0]), loss=lambda o, t: (o - t).abs().mean()),
        "shape of outputs",
        [4],
        "[4, 1]",
        "broadcasts",
    ),
    case(on(x=with_value(arrays()["x"], NAN)), "x[10] of client 'bob'", NAN, "finite"),
    case(on(x=with_value(arrays()["x"], -INF)), "x[10] of client 'bob'", -INF, "finite"),
    case(on(y=with_value(numbers(), NAN)), "y[10] of client 'bob'", NAN, "finite"),
    case(on(x=[], y=[], client=[]), "rows of x", 0, "at least one"),
    case(on(x=["a"] * 24), "dtype of x", "<U1", "numbers", "encode text"),
    case(on(x=None), "dtype of x", "object", "numbers"),
    case(on(x=3), "x", "torch.int64 with 0 axes", "one row per sample"),
    case(on(x=torch.zeros(24, 4, dtype=torch.cfloat)), "x", "torch.complex64 with 2 axes", "real numbers"),
    case(on(x=arrays()["x"].to_sparse()), "x", "torch.sparse_coo", "dense"),
    *[case(on(test=test), "test", test, "below 1", "a boolean for each row") for test in (1.0, "0.2", True)],
    case(on(test=np.zeros(3, bool)), "test", "bool [3]", "a boolean", "24 rows"),
    case(on(test=np.zeros(24, int)), "test", "int64 [24]", "a boolean", "24 rows"),
    case(on(test=np.ones(24, bool)), "training samples", 0, "at least one"),
    *[case(on(names=names), "names", names, "3 names") for names in (["a", "b"], "abc", 3)],
    case(on(names=["a", "a", "b"]), "names", ("a", "a", "b"), "3 different names"),
    case(on(names=["a", "b", "\ud800"]), "names", "\ud800", "characters"),
    made(
        lambda: pt.data.FederatedData.make(arrays()["x"], arrays()["y"], [[0, 30]]),
        "train range of client '0'",
        (0, 30),
        "24 rows",
    ),
    made(
        lambda: pt.data.from_datasets({"a": (torch.zeros(2, 3), [0, 1]), "b": (torch.zeros(2, 4), [0, 1])}),
        "x of datasets['b']",
        "torch.float32 [4]",
        "torch.float32 [3]",
    ),
    *options(pt.data.from_datasets, "a mapping", datasets=[[1]]),
    made(lambda: data().client(3), "client", 3, "from 0 up to 2"),
    # partitioners and shifts
    *[
        case(split(partition=partition), "partition", partition, *names)
        for partition, *names in (
            ("iid", "iid()"),
            (pt.data.iid, "iid()"),
            (lambda _y, _n, _rng: None, "3 lists of rows"),
            (lambda _y, _n, _rng: [[0], [1], [99]], "from 0 to 23"),
            (lambda _y, _n, _rng: [[0], [1], [1]], "no row twice"),
        )
    ],
    case(split(clients=0), "clients", 0, WHOLE_NUMBER),
    case(split(clients=99), "clients", 99, "at most 24"),
    *options(pt.data.dirichlet, "above 0", alpha=[0]),
    *options(pt.data.power_law, "from 0", exponent=[-1]),
    case(split(partition=pt.data.label_skew(9)), "classes", 9, "at most 2"),
    case(
        split(y=numbers(), partition=pt.data.label_skew(1)),
        "y of label_skew",
        "float32 [24]",
        "whole number or word",
    ),
    *options(pt.data.natural, "a whole number or a string", ids=[[1, "a", None]]),
    case(split(partition=pt.data.natural([1, 2, 3])), "ids", "3 ids", "24 rows"),
    made(lambda: data().shift(pt.data.rotation), "shift", pt.data.rotation, "rotation()", "(data, seed)"),
    made(lambda: data().shift(pt.data.rotation()), "shape of x", [8, 4], "images"),
    *options(partial(pt.data.noise, 1), "'laplace'", "mean 'gaussian'", kind=["gauss"]),
    # files
    *[
        case(partial(stored, **keys), "path", "OUT/data.npz", *names, prepare=prepare)
        for prepare, keys, *names in (
            (archive(x=[1.0], y=[1]), {}, "'client'", "it has x, y"),
            (archive(x=[1.0], y=[1], client=[0]), {"client": "clients"}, "mean 'client'"),
            (archive(x=np.array([{}]), y=[1], client=[0]), {}, "key 'x'", "pickled"),
            (folder_with("data.npz"), {}, "not another kind of file"),
            (cut_archive, {}, "whole"),
            (leave, {}, "a file that exists"),
        )
    ],
    *options(pt.data.from_npz, "a path", path=[3]),
    *[
        case(
            leaf,
            "path",
            "OUT/leaf.json",
            "users",
            "user_data",
            *names,
            prepare=folder_with("leaf.json", text),
        )
        for text, *names in (
            ("{",),
            ("[]",),
            ("[" * 10**5,),
            ('{"users": ["a"], "user_data": {}}', "'a'"),
        )
    ],
    case(leaf, "path", "OUT/leaf.json", ".json file"),
    case(
        leaf,
        "x of user 'a'",
        "hi",
        "alphabet=",
        prepare=folder_with("leaf.json", '{"users": ["a"], "user_data": {"a": {"x": ["hi"], "y": [1]}}}'),
    ),
    made(lambda: pt.data.real("femnist"), "folder", ANY, "PARTITA_DATA", "partita data get femnist"),
    made(lambda: pt.data.real("femnits"), "name", "femnits", "mean 'femnist'"),
    case(lambda out: pt.data.real("femnist", folder=out), "folder", "OUT", "femnist.npz"),
    case(
        lambda out: pt.data.real("femnist", folder=out),
        "path",
        "OUT/femnist.npz",
        "a NumPy archive",
        prepare=folder_with("femnist.npz"),
    ),
    case(
        lambda out: pt.data.real("femnist", folder=out, min_sample=3), "min_sample", 3, "mean 'min_samples'"
    ),
]


def differs(part: str, change: str, call: Call, spoil: Spoil = leave) -> Case:
    """A run that is not the one in the folder."""
    return case(call, "resume", True, "OUT", part, change, prepare=copy(HALF, spoil))


def damaged(name: str, spoil: Spoil) -> Case:
    """Checkpoints that are not what was written."""
    return case(resumed(), "checkpoint", "OUT/checkpoint", name, prepare=copy(HALF, spoil))


def broken(file: str, allowed: str, spoil: Spoil) -> Case:
    """A file of a finished run."""
    return case(load, "file", f"OUT/{file}", allowed, prepare=copy(WHOLE, spoil))


NEW_PLACE = "a folder that can be made"
ROWS = "OUT/checkpoint/clients-0/rows.bin"
FOLDER = [
    # a new run
    case(fed(), "out", "OUT", NEW_PLACE, prepare=text_file),
    case(lambda out: federate(out / "run"), "out", "OUT/run", NEW_PLACE, prepare=text_file),
    made(lambda: federate(Path("/proc/nothing/run")), "out", "/proc/nothing/run", NEW_PLACE),
    *settings("the path of a folder", out=[3, ""]),
    *settings("null", out=["a\0b"]),
    case(fed(), "out", "OUT", "a new folder", "resume=True", prepare=copy(HALF)),
    case(fed(), "out", "OUT", "a new folder", "resume=True", prepare=copy(WHOLE)),
    case(fed(), "out", "OUT", "checkpoint/", "best.pt", prepare=folder_with("checkpoint/best.pt")),
    case(fed(), "out", "OUT", "checkpoint/", prepare=folder_with("checkpoint")),
    case(fed(), "out", "OUT", "checkpoint/", "(7)", prepare=folder_with("checkpoint/7")),
    case(
        resumed(), "out", "OUT", "metrics.jsonl", prepare=copy(HALF, lambda out: remove(out / "config.json"))
    ),
    # resuming another run
    differs("algorithm", "lr: 0.1 -> 0.2", resumed(algorithm=pt.fedalt("output", lr=0.2))),
    differs("algorithm", "name: 'fedalt' -> 'fedavg'", resumed(algorithm=pt.fedavg(lr=0.1))),
    case(resumed(rounds=1), "rounds", 1, "at least 2", prepare=copy(HALF)),
    differs("settings", "seed: 0 -> 1", resumed(seed=1)),
    differs("schedule", "name: 'synchronous' -> 'asynchronous'", resumed(schedule=S.asynchronous())),
    differs("schedule", "order: 'random' -> 'turns'", resumed(schedule=S.synchronous("turns"))),
    differs("data", "fingerprint: ", lambda out: federate(out, resume=True, data=data(test=0.5))),
    differs("model", "tensors: ", resumed(model=pt.models.mlp(4, 5, 2))),
    differs("loss", "'cross_entropy' -> '<lambda>'", resumed(loss=lambda o, t: F.cross_entropy(o, t))),
    # config.json of another version, or none at all
    *[
        case(
            resumed(),
            "file",
            "OUT/config.json",
            "a JSON object",
            prepare=copy(HALF, wrote("config.json", text)),
        )
        for text in ("hello", "", "[]", b"\xff\x00")
    ],
    differs("algorithm", "config.json", resumed(), edited(lambda c: c.pop("algorithm"))),
    differs("settings", "memory: ", resumed(), edited(lambda c: c["settings"].pop("memory"))),
    differs("settings", "turbo: 9 -> ", resumed(), edited(lambda c: c["settings"].update(turbo=9))),
    differs("executor", "None", resumed(), edited(lambda c: c.pop("executor"))),
    differs("version", "partita 9.9", resumed(), edited(lambda c: c["versions"].update(partita="9.9"))),
    # checkpoints that are damaged or another's
    damaged("tensors.safetensors has", every("tensors.safetensors", cut)),
    damaged("tensors.safetensors was altered", every("tensors.safetensors", flip)),
    damaged("tensors.safetensors", every("tensors.safetensors", remove)),
    damaged("state.json was altered", every("state.json", flip)),
    damaged("manifest.json", every("manifest.json", cut)),
    damaged("manifest.json", every("manifest.json", bare_manifest)),
    case(
        resumed(),
        "checkpoint",
        "OUT/checkpoint/00000002",
        "format 9",
        "reads 3",
        prepare=copy(HALF, every("manifest.json", newer_manifest)),
    ),
    differs("no checkpoint left", "another folder", resumed(), no_checkpoint),
    differs("checkpoint/00000002", "of this run", resumed(), rechecked(lambda s: s.pop("stage"))),
    differs("checkpoint/00000002", "of this run", resumed(), rechecked(lambda s: s.update(stage=7))),
    differs("checkpoint/00000002", "of this run", resumed(), foreign({"w": torch.zeros(2)}, {})),
    case(resumed(store="disk"), "rows.bin", ROWS, "bytes long", prepare=copy(DISK, rows_bin(cut))),
    case(resumed(store="disk"), "rows.bin", ROWS, "not a row file", prepare=copy(DISK, rows_bin(text_file))),
    # loading and saving
    case(load, "folder", "OUT", "a finished run"),
    case(load, "folder", "OUT", "a finished run", prepare=lambda out: out.mkdir()),
    case(load, "folder", "OUT", "a finished run", prepare=text_file),
    case(load, "folder", "OUT", "a finished run", "summary.json", prepare=copy(HALF)),
    *options(pt.load, "the path of a folder", folder=[3]),
    broken("summary.json", "a JSON object", lambda out: cut(out / "summary.json")),
    broken("summary.json", "a JSON object", wrote("summary.json", "[]")),
    broken("summary.json", "a summary", wrote("summary.json", "{}")),
    *[
        broken("clients.csv", "as a run writes", wrote("clients.csv", text))
        for text in ("", "hello\nyou\n", b"\xff\x00\n")
    ],
    broken("clients.csv", "column n_train", wrote("clients.csv", "client,n_train,n_test\nann,many,1\n")),
    broken("clients.csv", "as a run writes", lambda out: remove(out / "clients.csv")),
    broken("metrics.jsonl", "line 1 is not JSON", wrote("metrics.jsonl", "hello\n")),
    broken("metrics.jsonl", "line 1 is []", wrote("metrics.jsonl", "[]\n")),
    case(load, "folder", "OUT", "no checkpoint", prepare=copy(WHOLE, no_checkpoint)),
    case(
        load,
        "checkpoint",
        "OUT/checkpoint",
        "state.json was altered",
        prepare=copy(WHOLE, every("state.json", flip)),
    ),
    case(
        lambda out: pt.load(out, model=pt.models.mlp(4, 5, 2)).client(0).model(),
        "model",
        "Blocks",
        "the model of the run",
        "hidden1.linear.weight",
        prepare=copy(WHOLE),
    ),
    case(lambda out: pt.load(out).client(3), "client", 3, "from 0 up to 2", prepare=copy(WHOLE)),
    case(lambda out: pt.load(out).save(out), "folder", "OUT", "holds a run", prepare=copy(WHOLE)),
    case(
        lambda out: pt.load(out).save(out / "summary.json"),
        "folder",
        "OUT/summary.json",
        NEW_PLACE,
        prepare=copy(WHOLE),
    ),
]

SECTIONS = {
    "run": RUN,
    "schedule": SCHEDULE,
    "model": MODEL,
    "method": METHOD,
    "data": DATA,
    "folder": FOLDER,
}


# ---- both doors


def test_the_table_is_long() -> None:
    assert sum(map(len, SECTIONS.values())) >= 330


def test_what_the_cases_change_is_good(tmp_path: Path) -> None:
    assert federate(tmp_path / "run").summary()["rounds"] == 3
    half = tmp_path / "half"
    copy(HALF)(half)
    assert federate(half, resume=True).summary()["rounds"] == 3


@pytest.mark.filterwarnings("ignore:checkpoint skipped")
@pytest.mark.parametrize("section", SECTIONS)
def test_in_python(section: str, home: Path) -> None:
    @each("case", SECTIONS[section])
    def refused(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        out = tmp_path / "run"
        if case.prepare:
            case.prepare(out)
        before = files_of(tmp_path)
        with pytest.raises(pt.Refused) as raised:
            case.call(out)
        error = raised.value
        assert error.field == case.field
        assert case.value is ANY or shortened(error.value) == placed(shortened(case.value), out)
        assert [
            name for name in case.names if placed(name, out) not in f"{error.allowed} {error.reason}"
        ] == []
        assert "\n" not in str(error)
        assert str(error).startswith(case.field if error.value is MISSING else f"{case.field}=")
        assert files_of(tmp_path) == before

    refused(tmp_path=home, monkeypatch=ANY)


def placed(text: str, out: Path) -> str:
    return text.replace("OUT", str(out))


@pytest.mark.filterwarnings("ignore:checkpoint skipped")
@pytest.mark.parametrize("section", SECTIONS)
def test_from_the_command_line(section: str, home: Path, partita: Command) -> None:
    """The same in a user's file."""

    @each("number", range(len(SECTIONS[section])))
    def refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        case, out = SECTIONS[section][number], tmp_path / "run"
        if case.prepare:
            case.prepare(out)
        (tmp_path / "mine.py").write_text(
            f"from pathlib import Path\nfrom {__name__} import SECTIONS\n"
            f"def experiment():\n    return SECTIONS[{section!r}][{number}].call(Path({str(out)!r}))\n"
        )
        before = files_of(tmp_path)
        assert case.field in partita("run", "mine.py").refusal
        assert files_of(tmp_path) == before

    refused(tmp_path=home, monkeypatch=ANY)
