"""MLflow: a run in a tracking store."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from partita.core import check
from partita.track.base import (
    Tracker,
    files,
    is_baseline,
    keep,
    label,
    library,
    one_line,
    options,
    recall,
)

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
FLUSH_SECONDS = 2.0
# MLflow's limits; 500 characters is what servers of all versions take
METRICS_AT_ONCE, PARAMS_AT_ONCE, KEY, VALUE = 1000, 100, 250, 500


class MLflow(Tracker):
    """Writes a run to MLflow; look at it with `mlflow ui`.

    uri         the tracking store or server (None: what MLflow uses by itself: MLFLOW_TRACKING_URI, or
                mlflow.db and mlruns/ in the current folder)
    experiment  the experiment, made if there is none
    name        what the run is called (None: as its output folder, or its method)

    Baselines are runs nested under the method's. The options are its parameters, the files of its output
    folder its artifacts. A resumed run goes on in the same run of MLflow and adds only steps that are not
    there. It ends as FINISHED, FAILED or (Ctrl-C) KILLED.
    """

    tool = "mlflow"

    def __init__(self, uri: str | None = None, experiment: str = "partita", name: str | None = None) -> None:
        super().__init__()
        self._library = library(self.tool, "mlflow", "mlflow or mlflow-skinny")
        self._context = library(self.tool, "mlflow.tracking.context.registry", "mlflow or mlflow-skinny")
        self._uri = str(uri or self._library.get_tracking_uri())
        if re.match(r"(sqlite|mysql|postgresql|mssql)\b", self._uri):  # mlflow-skinny brings no database
            for package in ("sqlalchemy", "alembic"):
                if importlib.util.find_spec(package) is None:
                    needed = f"a server, or the package {package} (pip install 'partita[track]')"
                    raise check.fail("uri", self._uri, needed)
        self._name = name
        try:
            self._client = self._library.MlflowClient(tracking_uri=self._uri)
            self._experiment = self._find(experiment)
        except Exception as error:  # before any work: a store that cannot be used is refused
            raise check.fail("uri", self._uri, "", one_line(error)) from error
        self._run, self._config = "", dict[str, Any]()
        self._last: dict[str, int] = {}  # of each metric, the last step that is there
        self._pending: list[Any] = []
        self._flushed = 0.0
        self._baselines: list[str] = []

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        """A new run, or the one that the run's folder remembers."""
        found = self._known(recall(self.tool, config).get("run"))
        if found is None:
            tags = self._context.resolve_tags({"partita.what": what})
            name = label(self._name, what, config)
            found = self._client.create_run(self._experiment, tags=tags, run_name=name)
            keep(self.tool, config, {"run": found.info.run_id})
        else:
            self._client.update_run(found.info.run_id, status="RUNNING")
        self._run, self._config = found.info.run_id, dict(config)
        self._last = {key: self._last_step(key) for key in found.data.metrics}
        self._pending, self._flushed = [], time.monotonic()
        self._log_options(options(config), found.data.params)
        self._client.log_text(self._run, json.dumps(self._config, indent=2, default=str), "config.json")
        if is_baseline(what):
            self._baselines.append(self._run)
        else:
            for baseline in self._baselines:
                self._client.set_tag(baseline, "mlflow.parentRunId", self._run)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Kept for a context: a call per round would cost more than a round."""
        metric, now = self._library.entities.Metric, int(time.time() * 1000)
        for key, value in numbers.items():
            if step > self._last.get(key, -1):
                self._last[key] = step
                self._pending.append(metric(key, value, now, step))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def finish(self, status: str) -> None:
        """The rest, the files, and how it ended."""
        try:
            self._flush()
            for path in [] if self._run in self._baselines else files(self._config):
                self._client.log_artifact(self._run, str(path))
        finally:
            self._client.set_terminated(self._run, STATUS[status])

    def close(self) -> None:
        """Ends the run; baselines to come belong to another."""
        super().close()
        self._baselines = []

    def _flush(self) -> None:
        while self._pending:
            self._client.log_batch(self._run, metrics=self._pending[:METRICS_AT_ONCE])
            del self._pending[:METRICS_AT_ONCE]
        self._flushed = time.monotonic()

    def _log_options(self, given: Mapping[str, Any], there: Mapping[str, str]) -> None:
        """Parameters cannot change in MLflow: a resumed run adds what is new."""
        shown = {re.sub(r"[^\w. -]", "_", k)[:KEY]: str(v) for k, v in given.items()}
        cut = {k: v if len(v) <= VALUE else v[: VALUE - 1] + "…" for k, v in shown.items() if k not in there}
        params = [self._library.entities.Param(k, v) for k, v in cut.items()]
        for i in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[i : i + PARAMS_AT_ONCE])

    def _last_step(self, key: str) -> int:
        return max(int(metric.step) for metric in self._client.get_metric_history(self._run, key))

    def _known(self, run: str | None) -> Any:
        """The run of this name if the store still has it."""
        if run is None:
            return None
        try:
            found = self._client.get_run(run)
        except self._library.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return found if found.info.lifecycle_stage == "active" else None

    def _find(self, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(experiment))
            except self._library.MlflowException:  # another process was faster
                found = self._client.get_experiment_by_name(experiment)
                if found is None:
                    raise
        return str(found.experiment_id)
