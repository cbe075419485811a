"""MLflow: a run in a tracking store."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from partita.core import check
from partita.track.base import Tracker, keep, library, one_line, options, recall

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
FLUSH_SECONDS = 2.0
# MLflow's limits; 500 characters is what servers of all versions take
METRICS_AT_ONCE, PARAMS_AT_ONCE, KEY_LENGTH, VALUE_LENGTH = 1000, 100, 250, 500


class MLflow(Tracker):
    """Writes a run to MLflow; look at it with `mlflow ui`.

    uri         the tracking store or server (default: that of MLflow: MLFLOW_TRACKING_URI, or mlflow.db and
                mlruns/ in the current folder)
    experiment  the name of the experiment, which is created if there is none
    name        the name of the run (default: that of its output folder, or its method)

    Baselines are runs nested under the method's. The options are its parameters, the files of its output
    folder its artifacts. A resumed run goes on in the same run of MLflow and adds only the steps that are
    missing. It ends as FINISHED, FAILED or (Ctrl-C) KILLED.
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
        self._run = ""
        self._last: dict[str, int] = {}  # the last step that MLflow has of each metric
        self._pending: list[Any] = []
        self._flushed = 0.0
        self._baselines: list[str] = []

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Begin a new run, or go on with the one that the run's folder remembers."""
        run = self._known(recall(self.tool, config).get("run"))
        if run is None:
            tags = self._context.resolve_tags({"partita.what": what})
            run = self._client.create_run(self._experiment, tags=tags, run_name=self.label(self._name))
            keep(self.tool, config, {"run": run.info.run_id})
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run = run.info.run_id
        self._last = {key: self._last_step(key) for key in run.data.metrics}
        self._pending, self._flushed = [], time.monotonic()
        self._log_options(options(config), run.data.params)
        self._client.log_text(self._run, json.dumps(dict(config), indent=2, default=str), "config.json")
        if self.is_baseline:
            self._baselines.append(self._run)
        else:
            for baseline in self._baselines:
                self._client.set_tag(baseline, "mlflow.parentRunId", self._run)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Collect the numbers and send them every few seconds: a call can cost more than a round."""
        metric, now = self._library.entities.Metric, int(time.time() * 1000)
        for key, value in numbers.items():
            if step > self._last.get(key, -1):
                self._last[key] = step
                self._pending.append(metric(key, value, now, step))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def finish(self, status: str) -> None:
        """Send the rest, the files, and how the run ended."""
        try:
            self._flush()
            for path in self.artifacts():
                self._client.log_artifact(self._run, str(path))
        finally:
            self._client.set_terminated(self._run, STATUS[status])

    def close(self) -> None:
        """End the run; later baselines belong to another."""
        super().close()
        self._baselines = []

    def _flush(self) -> None:
        while self._pending:
            self._client.log_batch(self._run, metrics=self._pending[:METRICS_AT_ONCE])
            del self._pending[:METRICS_AT_ONCE]
        self._flushed = time.monotonic()

    def _log_options(self, options: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Send the options that MLflow does not know yet: it refuses to change the others."""
        texts = {re.sub(r"[^\w. -]", "_", k)[:KEY_LENGTH]: str(v) for k, v in options.items()}
        params = [
            self._library.entities.Param(k, v if len(v) <= VALUE_LENGTH else v[: VALUE_LENGTH - 1] + "…")
            for k, v in texts.items()
            if k not in known
        ]
        for i in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[i : i + PARAMS_AT_ONCE])

    def _last_step(self, key: str) -> int:
        return max(int(metric.step) for metric in self._client.get_metric_history(self._run, key))

    def _known(self, run: str | None) -> Any:
        """Return the run of this id if the store still has it."""
        if run is None:
            return None
        try:
            stored = self._client.get_run(run)
        except self._library.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return stored if stored.info.lifecycle_stage == "active" else None

    def _find(self, name: str) -> str:
        """Return the id of the experiment of this name, which is created if there is none."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except self._library.MlflowException:  # another process was faster
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)
