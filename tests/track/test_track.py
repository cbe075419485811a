"""Trackers write what the run measured: real libraries, their real files read back."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from partita.engine.callbacks import Callback, Event
from partita.track import MLflow, TensorBoard, Tracker, WandB, tracker
from partita.track import base as track
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

ROUNDS, CLIENTS = 4, 6
FILES = {"config.json", "metrics.jsonl", "clients.csv", "summary.json"}  # and report.html where plotly is
data = pt.data.digits(CLIENTS, pt.data.label_skew(classes=3), seed=0)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No tool asks anything outside this machine, or writes outside of the test's folders."""
    home = tmp_path_factory.mktemp("tools")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)  # where MLflow keeps artifacts
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("DO_NOT_TRACK", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(home))
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
            patch.delenv(name, raising=False)
        yield
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MLflow's own kind of local store; making its tables takes a few seconds."""
    pytest.importorskip("mlflow")
    for package in ("sqlalchemy", "alembic"):
        pytest.importorskip(package, reason=f"mlflow-skinny needs {package} for a local store")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def federate(*callbacks: Callback, out: Path | None = None, **changed: Any) -> pt.Run:
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 3, "steps": 1, "batch": 8, "executor": "loop"}
    given |= {
        "evaluate_every": 2,
        "patience": 1,
        "checkpoint_every": 1,
        "out": out,
        "callbacks": callbacks,
        **changed,
    }
    return pt.federate(pt.models.mlp(64, 8, 10), data, pt.fedalt("output", lr=0.1), **given)


class Stop(Callback):
    """An error, or Ctrl-C, in a round of the method."""

    def __init__(self, error: type[BaseException], round: int = 3) -> None:
        self.error, self.at = error, round

    def round(self, event: Event) -> None:
        if event.what == "fedalt" and event.round == self.at:
            raise self.error


class Losses(Callback):
    """What a tracker is told of every round."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, float]]] = {}

    def round(self, event: Event) -> None:
        assert event.train_loss is not None
        self.of.setdefault(event.what, []).append((event.round, event.train_loss))


def close(points: list[tuple[int, float]]) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in points]


def expected(run: pt.Run, column: str) -> list[tuple[int, Any]]:
    return close([(row["round"], row[column]) for row in run.metrics])


COLUMNS = {
    "validation/global": "validation.global",
    "validation/personal": "validation.personal",
    "validation/loss": "validation.loss",
    "train/loss": "train_loss",
    "bytes/up": "bytes_up",
    "bytes/down": "bytes_down",
    "seconds": "seconds",
    "staleness": "staleness",
}


def check_curves(curves: dict[str, list[tuple[int, float]]], run: pt.Run, losses: Losses) -> None:
    """Every column of metrics.jsonl, the loss of every round, and the summary at the last one."""
    for name, column in COLUMNS.items():
        assert curves[name] == expected(run, column), name
    assert curves["train/round_loss"] == close(losses.of["fedalt"])
    for name, value in scores(run).items():
        assert curves[name] == [(ROUNDS, pytest.approx(value))], name


def scores(run: pt.Run) -> dict[str, float]:
    facts = run.summary()
    found = {f"summary/test/{k}": facts["test"][k] for k in ("local", "global", "personal")}
    found |= {f"summary/hurt/{k}": facts["hurt"][k] for k in ("vs_local", "vs_global")}
    found |= {f"summary/{k}": facts[k] for k in ("seconds", "client_steps_per_second", "clients")}
    return found | {"summary/bytes/up": facts["bytes_up"], "summary/excluded": 0}


# ---- reading back


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def tensorboard_curves(found: Any) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def texts(found: Any, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(f"{tag}/text_summary")]


def mlflow_runs(uri: str, experiment: str) -> tuple[Any, dict[str, Any]]:
    """The client, and an experiment's runs by what they are."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    found = {run.data.tags["partita.what"]: run for run in runs}
    assert len(found) == len(runs)
    return client, found


def mlflow_curves(client: Any, run: Any) -> dict[str, list[tuple[int, float]]]:
    history = {k: client.get_metric_history(run.info.run_id, k) for k in run.data.metrics}
    return {k: sorted((m.step, m.value) for m in found) for k, found in history.items()}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB) after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    blob, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(blob):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", blob, at)
        parts += blob[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_run(path: Path) -> dict[str, Any]:
    """A run as W&B would show it."""
    found: dict[str, Any] = {"config": {}, "curves": {}, "summary": {}, "files": set(), "exit": None}
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found |= {"id": run.run_id, "name": run.display_name, "group": run.run_group, "job": run.job_type}
            found["project"] = run.project
            found["config"] |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "history":
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for key, value in items.items():
                if not key.startswith("_"):
                    found["curves"].setdefault(key, []).append((record.history.step.num, value))
        elif kind == "summary":
            updates = record.summary.update
            found["summary"] |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in updates}
        elif kind == "artifact":
            found["files"] |= {entry.path for entry in record.artifact.manifest.contents}
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            found["files"] |= {e.path for e in record.request.log_artifact.artifact.manifest.contents}
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def wandb_runs(folder: Path) -> list[dict[str, Any]]:
    sys.modules["wandb"].teardown()  # waits until the files are complete
    paths = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    return [wandb_run(path) for path in paths]


# ---- TensorBoard


def test_tensorboard_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    losses = Losses()
    run = federate(losses, TensorBoard(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"fedalt", "baseline-local", "baseline-global"}
    found = events(tmp_path / "fedalt")
    check_curves(tensorboard_curves(found), run, losses)
    ((step, text),) = texts(found, "config")
    assert step == 0
    assert json.loads(text)["settings"]["rounds"] == ROUNDS
    assert texts(found, "status") == [(ROUNDS, "finished")]
    assert "_hparams_/session_start_info" in found.summary_metadata  # the method is a row of that tab
    found = events(tmp_path / "baseline-local")
    assert "_hparams_/session_start_info" not in found.summary_metadata
    alone = tensorboard_curves(found)
    last = run.summary()["baselines"]["local"]["rounds"]  # it has converged long before the most that it may
    assert alone["summary/test/local"] == [(last, pytest.approx(run.summary()["test"]["local"]))]


def test_tensorboard_shows_the_options_with_the_scores(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    federate(TensorBoard(tmp_path), baselines=False)
    contents = events(tmp_path / "fedalt").PluginTagToContent("hparams")
    parts = {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}
    values = parts["_hparams_/session_start_info"].session_start_info.hparams
    assert values["algorithm.lr"].number_value == 0.1
    assert values["algorithm.name"].string_value == "fedalt"
    assert values["settings.baselines"].string_value == "False"
    assert not [k for k in values if k.startswith(("model.tensors", "out"))]
    shown = {m.name.tag for m in parts["_hparams_/experiment"].experiment.metric_infos}
    assert {"summary/test/personal", "summary/hurt/vs_local"} <= shown
    assert parts["_hparams_/session_end_info"].session_end_info.status == 1  # success


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    losses, out = Losses(), tmp_path / "run"
    same: dict[str, Any] = {"out": out, "resume": True, "checkpoint_every": 2, "baselines": False}
    for round, error, status in ((2, KeyboardInterrupt, "stopped"), (3, InterruptedError, "failed")):
        with pytest.raises(error):
            federate(tracker("tensorboard", out), Stop(error, round), **same)
        assert texts(events(out / "tensorboard" / "fedalt"), "status")[-1] == (round, status)
        time.sleep(1.1)  # files are read in the order of the second in which they were made
    run = federate(tracker("tensorboard", out), losses, **same)
    found = events(out / "tensorboard" / "fedalt")
    curves = tensorboard_curves(found)
    assert [step for step, _ in curves["train/round_loss"]] == [1, 2, 3, 4]
    assert curves["train/round_loss"][-len(losses.of["fedalt"]) :] == close(losses.of["fedalt"])
    assert curves["validation/personal"] == expected(run, "validation.personal")
    assert texts(found, "status")[-1] == (ROUNDS, "finished")


def test_tensorboard_makes_a_folder_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    federate(tracker("tensorboard", None), baselines=False)
    (path,) = tmp_path.glob("runs/tensorboard/*/fedalt/events.*")
    assert path.stat().st_size > 0


# ---- MLflow


def test_mlflow_holds_the_run(store: str, tmp_path: Path) -> None:
    losses, out = Losses(), tmp_path / "mine"
    run = federate(losses, MLflow(store, "whole"), out=out)
    client, runs = mlflow_runs(store, "whole")
    assert set(runs) == {"fedalt", "baseline local", "baseline global"}
    found = runs["fedalt"]
    check_curves(mlflow_curves(client, found), run, losses)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "mine"
    assert {k: found.data.params[k] for k in ("algorithm.lr", "algorithm.name", "settings.rounds")} == {
        "algorithm.lr": "0.1",
        "algorithm.name": "fedalt",
        "settings.rounds": str(ROUNDS),
    }
    kept = {item.path: item for item in client.list_artifacts(found.info.run_id)}
    assert set(kept) >= FILES
    assert ("report.html" in kept) == (out / "report.html").exists()
    local = client.download_artifacts(found.info.run_id, "summary.json", str(tmp_path))
    assert json.loads(Path(local).read_text()) == json.loads((out / "summary.json").read_text())
    for what in ("baseline local", "baseline global"):
        assert runs[what].data.tags["mlflow.parentRunId"] == found.info.run_id
        assert runs[what].info.status == "FINISHED"
    alone = runs["baseline local"].data.metrics
    assert alone["summary/test/local"] == pytest.approx(run.summary()["test"]["local"])


def check_resumed(uri: str, experiment: str, **same: Any) -> None:
    same |= {"resume": True, "checkpoint_every": 2}
    for round, error, status in ((2, KeyboardInterrupt, "KILLED"), (3, InterruptedError, "FAILED")):
        with pytest.raises(error):
            federate(MLflow(uri, experiment), Stop(error, round), **same)
        _, runs = mlflow_runs(uri, experiment)
        assert runs.pop("fedalt").info.status == status
        assert {run.info.status for run in runs.values()} <= {"FINISHED"}
    run = federate(MLflow(uri, experiment), **same)
    federate(MLflow(uri, experiment), **same)  # over already
    client, runs = mlflow_runs(uri, experiment)
    assert len(runs) == (3 if same.get("baselines", True) else 1)
    assert runs["fedalt"].info.status == "FINISHED"
    curves = mlflow_curves(client, runs["fedalt"])
    assert [step for step, _ in curves["train/round_loss"]] == [1, 2, 3, 4]
    assert curves["validation/personal"] == expected(run, "validation.personal")
    assert len(curves["summary/test/personal"]) == 1


def test_mlflow_goes_on_with_the_run(store: str, tmp_path: Path) -> None:
    check_resumed(store, "resumed", out=tmp_path / "run")


def test_mlflow_in_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_resumed(uri, "files", out=tmp_path / "run", baselines=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    if not hasattr(mlflow.environment_variables, "MLFLOW_ALLOW_FILE_STORE"):
        return  # an older one, which refuses no plain files
    with pytest.raises(ValueError, match="maintenance mode") as refused:
        MLflow((tmp_path / "other").as_uri())
    assert "\n" not in str(refused.value)


def test_mlflow_begins_anew_where_its_store_has_no_such_run(store: str, tmp_path: Path) -> None:
    federate(out=tmp_path, baselines=False)
    (tmp_path / "track-mlflow.json").write_text('{"run": "0123456789abcdef0123456789abcdef"}')
    federate(MLflow(store, "anew", name="named"), out=tmp_path, baselines=False, resume=True)
    _, runs = mlflow_runs(store, "anew")
    assert runs["fedalt"].info.run_name == "named"
    assert json.loads((tmp_path / "track-mlflow.json").read_text()) == {"run": runs["fedalt"].info.run_id}


def test_mlflow_takes_long_and_odd_options(store: str) -> None:
    follower = MLflow(store, "options")
    follower.start("fedavg", 0, 1)
    many = {f"option {i}": i for i in range(120)}
    follower.config("fedavg", {"steps": [7] * 2000, "data": {"a/b:c=é": None}, **many})
    follower.log({f"metric {i}": i for i in range(1500)}, 1)
    follower.close()
    _, runs = mlflow_runs(store, "options")
    params = runs["fedavg"].data.params
    assert len(params["steps"]) == 500
    assert params["data.a_b_c_é"] == "None"
    assert len(params) == 122
    assert len(runs["fedavg"].data.metrics) == 1500


def test_mlflow_follows_its_variables(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by variable")
    federate(tracker("mlflow", None), baselines=False)
    client, runs = mlflow_runs(store, "by variable")
    assert runs["fedalt"].info.run_name == "fedalt"
    assert [item.path for item in client.list_artifacts(runs["fedalt"].info.run_id)] == ["config.json"]


def test_a_local_store_without_a_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ValueError, match=r"^uri='sqlite:///x.db': .*sqlalchemy \(pip install 'partita\[track"
    ):
        MLflow("sqlite:///x.db")


# ---- Weights & Biases


def test_wandb_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    losses, out = Losses(), tmp_path / "mine"
    run = federate(losses, WandB("chamber", mode="offline", folder=tmp_path / "w"), out=out)
    *others, found = wandb_runs(tmp_path / "w")
    for name, column in COLUMNS.items():
        assert found["curves"][name] == expected(run, column), name
    assert found["curves"]["train/round_loss"] == close(losses.of["fedalt"])
    assert {k: found["summary"][k] for k in scores(run)} == pytest.approx(scores(run))
    assert found["config"]["algorithm"]["lr"] == 0.1
    assert "tensors" not in found["config"]["model"]
    assert found["files"] >= FILES
    assert (found["project"], found["name"], found["job"], found["exit"]) == ("chamber", "mine", "method", 0)
    assert {r["name"]: (r["job"], r["exit"]) for r in others} == {
        "baseline local": ("baseline", 0),
        "baseline global": ("baseline", 0),
    }
    assert {r["group"] for r in others} == {found["group"]}


def test_wandb_goes_on_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb").teardown()  # W&B reads its variables once
    monkeypatch.setenv("WANDB_PROJECT", "by variable")
    out = tmp_path / "run"
    # W&B names folders by the second and the run's id: two parts of a run within a second would be one
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "before"))
    with pytest.raises(InterruptedError):
        federate(tracker("wandb", out), Stop(InterruptedError), out=out, baselines=False)
    (first,) = wandb_runs(tmp_path / "before")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "after"))
    federate(tracker("wandb", out), out=out, baselines=False, resume=True)
    (second,) = wandb_runs(tmp_path / "after")
    assert (first["id"], first["group"]) == (second["id"], second["group"])
    assert (first["exit"], second["exit"]) == (1, 0)
    assert [step for step, _ in second["curves"]["train/round_loss"]][-1] == ROUNDS
    assert first["project"] == "by variable"


def test_wandb_without_an_account_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb").teardown()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody to ask
    with pytest.raises(ValueError, match=r"(?i)WANDB_MODE=offline; (No API key|api_key not) configured"):
        tracker("wandb", None)
    sys.modules["wandb"].teardown()
    with pytest.raises(ValueError, match="did you mean 'offline'"):
        WandB(mode="ofline")


# ---- what goes wrong


class Flaky(Tracker):
    """A tool that fails where it is told to."""

    tool = "flaky"

    def __init__(self, *fails: str) -> None:
        super().__init__()
        self.fails, self.done = fails, list[str]()

    def _do(self, action: str) -> None:
        self.done.append(action)
        if action in self.fails or action.split()[0] in self.fails:
            raise ConnectionError("no\nway")

    def open(self, what: str, round: int, config: Any) -> None:  # noqa: ARG002
        self._do(f"open {what}")

    def log(self, numbers: Any, step: int) -> None:  # noqa: ARG002
        self._do(f"log {step}")

    def finish(self, status: str) -> None:
        self._do(f"finish {status}")


def test_a_tool_that_fails_is_a_warning_once() -> None:
    flaky = Flaky("log", "open fedalt", "finish")
    with pytest.warns(UserWarning, match=r"^flaky: no way; the run goes on without it") as seen:
        run = federate(flaky)
    assert len([warning for warning in seen if warning.category is UserWarning]) == 1
    assert flaky.done == [
        *("open baseline global", "log 1", "finish finished"),
        *("open baseline local", "log 1", "finish finished"),
        "open fedalt",
    ]
    assert run.summary()["test"] == federate().summary()["test"]


def test_a_tool_that_cannot_begin_is_an_error() -> None:
    flaky = Flaky("open")
    with pytest.raises(ValueError, match=r"^track='flaky': no way$"):
        federate(flaky)
    assert flaky.done == ["open baseline global"]


def test_a_run_ends_as_it_ended() -> None:
    for error, status in ((KeyboardInterrupt, "stopped"), (OSError, "failed")):
        flaky = Flaky()
        with pytest.raises(error):
            federate(flaky, Stop(error))
        assert flaky.done[-1] == f"finish {status}"
        assert flaky.done.count("finish finished") == 2  # the baselines
    federate(flaky, baselines=False)  # the same tracker, another run
    assert flaky.done[-1] == "finish finished"


@each("make", [TensorBoard, MLflow, WandB])
def test_a_missing_library_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.utils.tensorboard", "tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"^track='\w+': expected the package .*pip install 'partita\[track"):
        make()


def test_the_words_of_the_command_line() -> None:
    with pytest.raises(ValueError, match=r"track='tensorbord': .*did you mean 'tensorboard'"):
        tracker("tensorbord", None)


def test_a_failure_of_mlflow_loses_no_training(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = MLflow(store, "failing")
    monkeypatch.setattr("partita.track.mlflow.FLUSH_SECONDS", -1.0)

    def broken(*_: Any, metrics: Any = (), **__: Any) -> None:
        if metrics:
            raise OSError("the server is gone")

    monkeypatch.setattr(follower._client, "log_batch", broken)
    with pytest.warns(UserWarning, match="the server is gone") as seen:
        federate(follower, out=tmp_path / "run", baselines=False)
    assert len(seen) == 1
    assert (tmp_path / "run" / "summary.json").exists()
    _, runs = mlflow_runs(store, "failing")
    assert runs["fedalt"].info.status == "FINISHED"


# ---- names


def test_options_are_flat() -> None:
    config = {
        "what": "pipeline",
        "out": "runs/a",
        "algorithm": {"name": "pipeline", "stages": [{"lr": 0.1}, {"lr": 0.2, "personal": ["a", "b"]}]},
        "model": {"class": "MLP", "tensors": {"w": [2, 3]}},
        "executor": {"picks": {"train": {"why": "measured"}}},
    }
    assert track.options(config) == {
        "algorithm.name": "pipeline",
        "algorithm.stages.0.lr": 0.1,
        "algorithm.stages.1.lr": 0.2,
        "algorithm.stages.1.personal": '["a", "b"]',
        "model.class": "MLP",
    }


def test_numbers_have_the_names_of_tools() -> None:
    row = {"train_loss": None, "test.global": 0.5, "excluded": ["x", "y"], "metric": "accuracy", "good": True}
    assert track.numbers(row) == {"test/global": 0.5, "excluded": 2.0}
    assert track.numbers({"bytes_up": 3, "test": {"local": float("inf")}}) == {
        "bytes/up": 3.0,
        "test/local": float("inf"),
        "excluded": 0.0,
    }


def test_nested_numbers_have_a_path() -> None:
    row = {
        "measures": {"gradient_norm": {"total": 0.5, "mean": 2}, "line_loss": {"loss": [1.0], "lambda": [0]}},
        "aggregation": {"iterations": 7, "chosen": [1, 2], "hidden*.f": 1, "inner.moved": 0.25},
    }
    assert track.numbers(row) == {
        "measures/gradient_norm/total": 0.5,
        "measures/gradient_norm/mean": 2.0,
        "aggregation/iterations": 7.0,
        "aggregation/hidden_/f": 1.0,
        "aggregation/inner/moved": 0.25,
        "excluded": 0.0,
    }
    byzantine = {"clients": 2, "attack": "alie", "test": {"local": None}}
    facts = {"excluded": ["x"], "excluded_why": {"x": "too large"}, "byzantine": byzantine}
    assert track.numbers(facts) == {"excluded": 1.0, "byzantine/clients": 2.0}
    assert track.numbers({"byzantine": None}) == {"excluded": 0.0}


def test_tensorboard_holds_the_measures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    measures = [pt.measures.aggregation_change(), pt.measures.line_loss(points=3)]
    run = federate(TensorBoard(tmp_path), baselines=False, measures=measures)
    curves = tensorboard_curves(events(tmp_path / "fedalt"))
    found = [(row["round"], row["measures"]["aggregation_change"]["mean"]) for row in run.metrics]
    assert curves["measures/aggregation_change/mean"] == [(r, pytest.approx(v)) for r, v in found]
    assert not [name for name in curves if "line_loss" in name]


def test_a_torn_note_is_none(tmp_path: Path) -> None:
    config = {"out": str(tmp_path)}
    assert track.recall("mlflow", config) == {}
    (tmp_path / "track-mlflow.json").write_text('{"run"')
    assert track.recall("mlflow", config) == {}
    track.keep("mlflow", config, {"run": "1"})
    assert track.recall("mlflow", config) == {"run": "1"}
    assert track.recall("mlflow", {"out": None}) == {}
    assert os.listdir(tmp_path) == ["track-mlflow.json"]
