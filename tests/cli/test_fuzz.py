"""Whatever a file or an option holds: it is read, or refused in one line. Nothing else is ever raised.

Every case follows from its number, which a failure prints. `make test-all` tries many more of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import partita as pt
from partita import cli
from partita.cli.common import Request
from partita.cli.options import RunOptions
from partita.core import check, early
from partita.core.options import declared, members, signature
from partita.engine.record import read
from partita.engine.store import durable
from partita.recipes import RECIPES, Experiment
from partita.recipes.expressions import MODULES
from partita.recipes.splits import splits
from partita.recipes.study import run_study
from partita.recipes.versus import separate, versus
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

MORE = pytest.param(1500, marks=pytest.mark.slow)


def quiet(text: str) -> None:
    del text


def experiment(seed: int = 0) -> Experiment:
    g = np.random.default_rng(0)
    x, y = g.normal(size=(24, 4)).astype("float32"), g.integers(0, 2, 24)
    data = pt.data.from_arrays(x, y, np.arange(24) % 3, seed=seed)
    rule = pt.fedalt("output", lr=0.1)
    return Experiment(
        pt.models.mlp(4, 3, 2), data, rule, rounds=2, steps=1, batch=4, seed=seed, baselines=False
    )


def study(seed: int) -> Any:
    return versus(experiment(seed))


@contextlib.contextmanager
def refused_or_done(case: object, ours: bool = False) -> Iterator[None]:
    """A ValueError or OSError of one line (`ours`: and not NumPy's), or none; else the case is named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            fine = isinstance(error, ValueError | OSError) and str(error) and "\n" not in str(error)
            if not fine or (ours and ": expected" not in str(error)):
                raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error


def command(*words: object) -> tuple[int, str]:
    """Exit code and what is told on the standard error stream."""
    sys.argv, before = ["partita", *map(str, words)], sys.argv
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            cli.main()
    except SystemExit as stop:
        return int(stop.code or 0), told.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("the command has not ended")


def check_command(case: object, *words: object) -> None:
    with refused_or_done(case):
        status, told = command(*words)
        assert status in (0, 2), (case, words, told)
        assert status == 0 or told.count("\n") == 1, (case, words, told)


# ---- damage


VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    2**70,
    "",
    "x",
    "[/b]",
    "../x",
    [],
    [1],
    {},
    {"a": 1},
    [None],
)


def edited(r: random.Random, found: Any) -> Any:
    """One place of a JSON value is another one, or gone."""
    places: list[tuple[Any, ...]] = [()]

    def walk(value: Any, place: tuple[Any, ...]) -> None:
        inside = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, child in inside:
            places.append((*place, key))
            walk(child, places[-1])

    walk(found, ())
    *way, last = r.choice(places) or (None,)
    if last is None:
        return r.choice(VALUES)
    at = found
    for key in way:
        at = at[key]
    if isinstance(at, dict) and r.random() < 0.4:
        del at[last]
    else:
        at[last] = r.choice(VALUES)
    return found


def torn(r: random.Random, content: bytes) -> bytes:
    """Bytes cut off, changed, lost or doubled."""
    i, j = sorted(r.randrange(len(content) + 1) for _ in range(2))
    noise = bytes(r.randrange(256) for _ in range(20))
    found = [content[:i], content[:i] + noise[:1] + content[i + 1 :], content[:i] + content[j:]]
    return r.choice([*found, content[:j] + content[i:], b"", noise])


def damaged(r: random.Random, path: Path) -> None:
    content = path.read_bytes()
    lines = content.splitlines()
    if r.random() < 0.3:
        path.write_bytes(torn(r, content))
    elif path.suffix == ".json":
        path.write_text(json.dumps(edited(r, json.loads(content))))
    elif path.suffix == ".jsonl":
        i = r.randrange(len(lines))
        lines[i] = json.dumps(edited(r, json.loads(lines[i]))).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        i, cells = (
            r.randrange(len(lines)),
            ["", "x", "nan", "inf", "1e999", "-1", "1" * 30, "1" * 400, '"', "[/b]"],
        )
        row = lines[i].decode().split(",")
        row[r.randrange(len(row))] = r.choice(cells)
        lines[i] = ",".join(row).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")


# ---- result files


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    run_study(study, [0], out=folder / "study", announce=quiet, executor="loop")
    experiment().run(out=folder / "run", executor="loop", report=False)
    return folder


@pytest.mark.parametrize("cases", [100, MORE])
def test_damaged_files_of_a_run(cases: int, home: Path, tmp_path: Path) -> None:
    for case in range(cases):
        r, work = random.Random(f"run {case}"), tmp_path / "run"
        shutil.copytree(home / "run", work)
        path = work / r.choice(["config.json", "summary.json", "clients.csv", "metrics.jsonl"])
        damaged(r, path)
        what = f"{case}: {path.name}"
        with refused_or_done(what):
            pt.load(work).summary()
        if case % 8 == 0:  # a page takes its time
            check_command(what, "report", work, "--out", tmp_path / "page.html", "--quiet")
        with refused_or_done(what):
            experiment().run(out=work, resume=True, executor="loop", report=False)
        shutil.rmtree(work)


@pytest.mark.parametrize("cases", [50, MORE])
def test_damaged_files_of_a_study(
    cases: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.recipes.study.write_page", lambda *_: None)  # of the report, below
    for case in range(cases):
        r, work = random.Random(f"study {case}"), tmp_path / "study"
        shutil.copytree(home / "study", work)
        place = r.choice([work, work, work / "fedalt" / "seed-0"])
        names = ["study.json"] if place == work else ["config.json", "summary.json", "clients.csv"]
        damaged(r, place / r.choice(names))
        if case % 8 == 0:
            check_command(case, "report", work, "--out", tmp_path / "page.html", "--quiet")
        with refused_or_done(case):
            run_study(study, [0], out=work, resume=True, announce=quiet, executor="loop")
        shutil.rmtree(work)


def test_damaged_words_about_divergence(tmp_path: Path) -> None:
    """Summaries of runs in which clients diverged say more than others."""
    with pytest.warns(UserWarning, match="diverged"):
        replace(experiment(), algorithm=pt.fedalt("output", lr=1e30)).run(
            out=tmp_path / "run", executor="loop", report=False, baselines=True
        )
    path = tmp_path / "run" / "summary.json"
    whole = path.read_text()
    assert json.loads(whole)["diverged"]["baselines"]
    for case in range(60):
        r, found = random.Random(f"diverged {case}"), json.loads(whole)
        found["diverged"] = edited(r, found["diverged"])
        path.write_text(json.dumps(found))
        with refused_or_done(case):
            str(pt.load(tmp_path / "run").summary())
    for wrong in ([], True, "x", 5):
        path.write_text(json.dumps({**json.loads(whole), "diverged": {"clients": 1, "baselines": wrong}}))
        check_command(wrong, "report", tmp_path / "run", "--out", tmp_path / "page.html", "--quiet")


@each("wrong", [{"variants": "abc"}, {"variants": ["../x"]}, {"variants": [1]}, {"seeds": ["0"]}])
def test_a_study_of_no_names_or_seeds(wrong: dict[str, Any], tmp_path: Path) -> None:
    about = {"variants": ["a"], "seeds": [0], **wrong}
    (tmp_path / "study.json").write_text(json.dumps(about))
    status, told = command("report", tmp_path)
    assert (status, told.count("\n")) == (2, 1)
    assert "variants and seeds, as a study writes them" in told


def test_a_summary_of_other_kinds_of_values(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    whole = json.loads(path.read_text())
    for key, value, allowed in (
        ("phases", 3, "an object"),
        ("algorithm", [], "a text"),
        ("seed", True, "a number"),
    ):
        path.write_text(json.dumps({**whole, key: value}))
        with pytest.raises(ValueError, match=f"expected {allowed} as {key}, as a run writes it"):
            read(tmp_path / "run")


def test_a_run_with_all_that_a_summary_can_hold_is_read(tmp_path: Path) -> None:
    run = pt.federate(
        pt.models.mlp(4, 3, 2),
        experiment().data,
        pt.fedavg(lr=0.1),
        rounds=3,
        steps=1,
        batch=4,
        attack=pt.attack.nonfinite(),
        byzantine=[0],
        capacity=pt.capacity.width({"wide": 1.0, "narrow": 0.7}),
        schedule=pt.schedule.synchronous(delays=pt.schedule.delays(upload=pt.schedule.exponential(2))),
        measures=[pt.measures.line_loss()],
        train_scores=True,
        out=tmp_path / "run",
    )
    summary = pt.load(tmp_path / "run").summary()
    assert all(
        summary[key] for key in ("byzantine", "classes", "clock", "excluded", "excluded_why", "phases")
    )
    assert summary == run.summary()


def fit(place: Path) -> None:
    """The manifest of a checkpoint for the files that are there now."""
    body = json.loads((place / "manifest.json").read_bytes())
    del body["sha256"]
    body["files"] = {name: durable._facts(place / name) for name in (durable.TENSORS, durable.STATE)}
    (place / "manifest.json").write_text(json.dumps({**body, "sha256": durable._digest(body)}))


def other_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "server/shared/hidden1.linear.weight": torch.zeros(1)}


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "no tensors": lambda place: (place / durable.TENSORS).write_bytes(b"somebody's notes"),
    "no state": lambda place: (place / durable.STATE).write_bytes(b"somebody's notes"),
    "a list": lambda place: (place / durable.STATE).write_bytes(b"[]"),
    "another state": lambda place: (place / durable.STATE).write_bytes(b'{"a": 0}'),
    "another model's": lambda place: save_file(
        other_tensor(load_file(place / durable.TENSORS)), place / durable.TENSORS
    ),
    "no model's": lambda place: save_file({"a": torch.zeros(1)}, place / durable.TENSORS),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.filterwarnings("ignore:checkpoint skipped")
def test_a_foreign_file_under_a_manifest_that_fits(what: str, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    for place in (tmp_path / "run" / "checkpoint").glob("0*"):
        FOREIGN[what](place)
        fit(place)
    with pytest.raises(ValueError, match=r"checkpoint|does not fit"):
        experiment().run(out=tmp_path / "run", resume=True, executor="loop", report=False)
    if what != "another model's":  # which is read as it is
        with pytest.raises(ValueError, match="checkpoint"):
            pt.load(tmp_path / "run")


# ---- archives


def archives() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For each dataset an archive of its form, and options to read it with."""
    g, n = np.random.default_rng(0), 40
    labels, owner, four = g.integers(0, 5, n), np.arange(n) % 4, np.array(list("abcd"))
    images, coloured = (g.integers(0, 255, (n, 4, *rest), dtype=np.uint8) for rest in ((4,), (4, 3)))
    table = g.normal(size=(n, 3)).astype(np.float32)
    dealt = {"clients": 3, "partition": pt.data.iid()}
    parts = {"y_train": labels, "y_test": labels[:9]}
    return {
        "femnist": (
            {"x": images, "y": labels, "writer": owner, "is_test": owner == 0, "writer_name": four},
            [{}, {"clients": 2}, {"min_samples": 5}],
        ),
        "mnist": ({"x_train": images, "x_test": images[:9], **parts, "writer_train": owner}, [{}, dealt]),
        "cifar10": (
            {"x_train": coloured, "x_test": coloured[:9], **parts},
            [{"clients": 3}, {"clients": 3, "test": "file"}],
        ),
        "free_spoken_digits": (
            {"x": table, "y": labels, "speaker": owner, "repetition": np.arange(n) % 8, "speaker_name": four},
            [{}],
        ),
        "shakespeare": (
            {
                "text": g.integers(97, 105, 600).astype(np.uint8),
                "offset": np.array([0, 200, 350, 600]),
                "role": np.array(["r0", "r1", "r2"]),
                "play": np.array([0, 0, 1]),
                "play_name": np.array(["p0", "p1"]),
                "alphabet": np.arange(97, 105).astype(np.uint8),
            },
            [{"min_characters": 10, "length": 10}],
        ),
        "imdb": (
            {"x": images.reshape(n, -1), "y": labels % 2, "movie": owner, "movie_imdb_id": four},
            [{"min_samples": 1}, dealt],
        ),
        "parkinsons_telemonitoring": ({"x": table, "y": table[:, :2], "subject": owner}, [{}]),
        "heart_disease": (
            {
                "x": table,
                "y": labels % 2,
                "hospital": owner,
                "hospital_name": four,
                "feature_name": np.array(["age", "chol", "sex"]),
            },
            [{}],
        ),
    }


def other(r: random.Random, a: np.ndarray) -> np.ndarray:
    """Another shape, dtype or length, or a value out of range."""
    changes: list[Callable[[], np.ndarray]] = [
        lambda: a[: r.randrange(len(a) + 1)],
        lambda: a.reshape(-1),
        lambda: a[..., None],
        lambda: a[None],
        lambda: a.astype(r.choice(["f4", "f8", "i1", "u8", "?", "U3", "c8", "S2"])),
        lambda: np.asarray(a.flat[0]),
        lambda: np.concatenate([a, a]),
        lambda: extreme(r, a),
        lambda: a[:0],
        lambda: np.swapaxes(a, 0, -1),
        lambda: np.full_like(a, a.flat[0]),
        lambda: np.array(["x"] * len(a)),
        lambda: -a,
    ]
    try:
        with np.errstate(all="ignore"):
            return r.choice(changes)()
    except (ValueError, TypeError, IndexError):  # not of this array
        return a[:1]


def extreme(r: random.Random, a: np.ndarray) -> np.ndarray:
    found = a.copy()
    ends = {"f": (np.nan, np.inf, 1e38)}
    if a.dtype.kind in "iu":
        ends[a.dtype.kind] = (np.iinfo(a.dtype).min, np.iinfo(a.dtype).max)  # type: ignore[assignment]
    found.flat[r.randrange(a.size)] = r.choice(ends.get(a.dtype.kind, (a.flat[0],)))
    return found


@each("name", archives())
def test_archives_of_the_right_form_are_read(name: str, tmp_path: Path) -> None:
    content, options = archives()[name]
    np.savez(tmp_path / f"{name}.npz", **content)
    for some in options:
        assert pt.data.real(name, folder=tmp_path, **some).clients > 1


@pytest.mark.parametrize("cases", [400, MORE])
def test_archives_of_other_forms(cases: int, tmp_path: Path) -> None:
    known = archives()
    for case in range(cases):
        r = random.Random(f"archive {case}")
        name = r.choice(list(known))
        content, options = known[name]
        content = dict(content)
        for key in r.sample(list(content), r.choice([1, 1, 2])):
            content[key] = other(r, content[key])
        path = tmp_path / f"{name}.npz"
        np.savez(path, **content)
        if r.random() < 0.1:
            path.write_bytes(torn(r, path.read_bytes()))
        with refused_or_done(f"{case}: {name}", ours=True):
            pt.data.real(name, folder=tmp_path, **r.choice(options))


@pytest.mark.parametrize("cases", [200, MORE])
def test_archives_of_users(cases: int, tmp_path: Path) -> None:
    g, n, path = np.random.default_rng(0), 20, tmp_path / "mine.npz"
    for case in range(cases):
        r = random.Random(f"npz {case}")
        content = {
            "x": g.normal(size=(n, 3)),
            "y": g.integers(0, 3, n),
            "client": np.arange(n) % 3,
            "t": np.arange(n) > 9,
        }
        for key in r.sample(list(content), r.choice([1, 2])):
            content[key] = other(r, content[key])
        np.savez(path, **content)
        if r.random() < 0.2:
            path.write_bytes(torn(r, path.read_bytes()))
        with refused_or_done(case):
            pt.data.from_npz(path, test=r.choice([None, "t", 0.3]))


@pytest.mark.parametrize("cases", [300, MORE])
def test_json_of_leaf(cases: int, tmp_path: Path) -> None:
    path = tmp_path / "leaf.json"
    for case in range(cases):
        r = random.Random(f"leaf {case}")
        x, y, options = [[1.0, 2.0], [3.0, 4.0]], [0, 1], {}
        if r.random() < 0.5:
            x, y, options = ["ab", "cd"], ["a", "b"], {"alphabet": "abcd"}  # type: ignore[list-item, assignment]
        users = {name: {"x": list(x), "y": list(y)} for name in "ab"}
        content = json.dumps(edited(r, {"users": ["a", "b"], "user_data": users})).encode()
        path.write_bytes(torn(r, content) if r.random() < 0.2 else content)
        shape: Any = r.choice([None, (2,), (1, 2), (3,), (), (2**40,), (-1,), "x", (1.5,), 2])
        with refused_or_done(case):
            pt.data.from_leaf(path, r.choice([None, path, 0.3]), shape=shape, **options)


# ---- options of the command line


KEYS = ("rounds", "cohort", "steps", "batch", "seed", "clients", "attack", "schedule", "measures", "capacity")
KEYS += (
    "algorithm",
    "algorithm.lr",
    "algorithm.server",
    "algorithm.personal",
    "algorithm.1.lr",
    "norm",
    "state",
    "",
    ".",
)
PIECES = (
    "fedalt",
    "linear(",
    "adam(1.0",
    ")",
    "(",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    "'",
    '"',
    "-",
    "**",
    "*",
    ":",
    ".",
)
PIECES += (
    "1",
    "0.1",
    "1e999",
    "None",
    "True",
    "lambda: 0",
    "x.y",
    "schedule.",
    "sign_flip",
    "é",
    " ",
    "\\",
    "\n",
    "[/b]",
    "f(x)(y)",
)
DEEP = ("-" * 9000 + "1", "linear(" * 3000, "(" * 150 + ")" * 150, "[" * 150 + "]" * 150, "a" + ".a" * 5000)
DEEP += (
    "linear(" + "-" * 5000 + "1)",
    "1" + "+1" * 5000,
    "9" * 5000,
    "not " * 3000 + "1",
    "f(" * 60 + ")" * 60,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(clients: int = 3, seed: int = 0) -> Experiment:
        del clients
        return experiment(seed)

    monkeypatch.setitem(RECIPES, "digits", recipe)
    monkeypatch.setattr(Experiment, "run", lambda *_, **__: (_ for _ in ()).throw(ValueError("it would run")))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cases", [100, MORE])
def test_settings_of_any_text(cases: int) -> None:
    for case in range(cases):
        r = random.Random(f"set {case}")
        value = r.choice(DEEP) if r.random() < 0.15 else "".join(r.choices(PIECES, k=r.randrange(1, 7)))
        text = f"{r.choice(KEYS)}={value}" if r.random() < 0.9 else value
        what = f"{case}: {text[:60]!r}"
        with refused_or_done(what):
            Request("digits", RunOptions(set_=[text])).build(0)
        with refused_or_done(what):
            versus(experiment(), separate(value))
        with refused_or_done(what):
            splits(experiment(), separate(value), method=value)
        if case % 20 == 0:
            check_command(what, "run", "digits", "--quiet", "--set", text)
            check_command(what, "compare", "digits", "--quiet", f"--algorithms={value}")
            check_command(what, "split", "digits", "--quiet", f"--method={value}", f"--parts={value}")


@pytest.mark.usefixtures("small")
@each("value", [2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**20, 10**400, -(10**20)])
def test_whole_numbers_of_any_size(value: int) -> None:
    for key in (
        "rounds",
        "cohort",
        "steps",
        "epochs",
        "batch",
        "seed",
        "clients",
        "evaluate_every",
        "checkpoint_every",
    ):
        check_command((key, value), "run", "digits", "--quiet", "--set", f"{key}={value}")
    for option in ("--seeds", "--seed"):
        check_command((option, value), "run", "digits", "--quiet", f"{option}={value}")
    check_command(value, "demo", "--quiet", f"--seed={value}")
    check_command(value, "split", "digits", "--quiet", f"--rounds={value}", f"--solver-steps={value}")


def test_as_many_seeds_as_can_be_counted() -> None:
    for seeds in (99999999999999, 0, -1):
        status, told = command("run", "digits", f"--seeds={seeds}")
        assert (status, told.count("\n")) == (2, 1)
        assert "a whole number from 1 up to" in told
    assert command("run", "digits", f"--seed={check.LARGEST}", "--seeds=2")[0] == 2


def whole(kind: Any) -> bool:
    return any("int" in str(k) for k in members(kind))


@each("part", MODULES)
def test_options_beyond_what_tensors_count_with(part: str) -> None:
    for name, make in MODULES[part].items():
        known = signature(make).parameters.values()
        needed = {p.name: declared(p.annotation)[1].example for p in known if p.default is p.empty}
        for p in known:
            if whole(declared(p.annotation)[0]):
                for value in (2**63, 10**400):
                    with refused_or_done((part, name, p.name, value)):
                        make(**{**needed, p.name: value})


@pytest.mark.parametrize("value", [2**40, 2**63 - 1])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_batch_as_large_as_can_be(executor: str, value: int) -> None:
    e = experiment()
    run = pt.federate(
        e.model, e.data, e.algorithm, rounds=1, steps=1, batch=value, seed=value, executor=executor
    )
    assert run.summary()["clients"] == 3
    with pytest.raises(ValueError, match=rf"batch=.*up to {check.LARGEST}"):
        pt.federate(e.model, e.data, e.algorithm, rounds=1, batch=2**63)


# ---- names in tables, memory, Ctrl-C


def test_names_with_markup_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def odd(seed: int = 0) -> Experiment:
        e = experiment(seed)

        def metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output.argmax(-1) == target).float().mean()

        metric.__name__ = "[/b]:smile:"
        names = pt.data.FederatedData.make(
            e.data.x, e.data.y, e.data.train, e.data.test, names=["[/a]", "[b]", ":dog:"]
        )
        return Experiment(
            e.model, names, e.algorithm, rounds=1, steps=1, batch=4, metric=pt.Metric(metric, True)
        )

    monkeypatch.setitem(RECIPES, "offices", odd)
    monkeypatch.setattr("partita.cli.run.PAGE", "[x].html")
    monkeypatch.setattr(pt.Run, "report", lambda _, path: path)
    monkeypatch.setattr(sys, "argv", ["partita", "demo", "--quiet"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr().out
    assert not stop.value.code
    assert all(name in shown for name in ("[/a]", "[b]", ":dog:", "[/b]:smile:", "[x].html"))


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(seed: int = 0) -> Experiment:
        del seed
        raise MemoryError

    monkeypatch.setitem(RECIPES, "digits", large)
    status, told = command("run", "digits")
    assert (status, told.count("\n")) == (2, 1)


LOADING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000): pass
sys.meta_path.insert(0, Finder())
sys.argv[0] = "/usr/bin/partita"
try:
    from partita.cli import main
except BaseException:  # as libraries do that import another if they can
    pass
print("went on")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of another kind")
def test_ctrl_c_while_it_loads() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_program_that_imports_partita_keeps_its_ctrl_c() -> None:
    assert not early.is_command()
    assert signal.getsignal(signal.SIGINT) is not early.stop


@each(
    ("line", "words"),
    [
        (("run", "digits", "--set", "capacity=width({[]: 1})"), "names or numbers as keys"),
        (("run", "digits", "--set", "capacity=width(**{})"), "without **"),
        (("compare", "digits", "--algorithms", "fedalt(**{})"), "a method's name, a call"),
    ],
)
def test_calls_that_are_no_calls(line: tuple[str, ...], words: str) -> None:
    status, told = command(*line)
    assert (status, told.count("\n")) == (2, 1)
    assert words in told
