"""Weights & Biases: a run in a project."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.core import check
from partita.track.base import Tracker, keep, library, one_line, recall, selected, slug

MODES = ("online", "offline", "disabled")


class WandB(Tracker):
    """Writes a run to Weights & Biases.

    project  the project
    name     the name of the run (default: that of its output folder, or its method)
    mode     'online', 'offline' (into files, for `wandb sync`) or 'disabled' (default: WANDB_MODE, or online)
    folder   where W&B keeps its files (default: WANDB_DIR, or ./wandb)

    The method and its baselines are runs of one group with the job types 'method' and 'baseline': the same
    names, so that the curves lie over each other. The summary's numbers are the run's summary, the files of
    its output folder an artifact. A resumed run goes on in the same run of W&B and adds only the steps that
    are missing; offline, W&B begins another folder with the same id (`wandb sync --append`), which repeats
    the rounds since the checkpoint. A run that did not reach its end has failed.
    """

    tool = "wandb"

    def __init__(
        self,
        project: str = "partita",
        name: str | None = None,
        mode: str | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        if mode is not None:
            check.choice("mode", mode, MODES)
        self._library = library(self.tool, "wandb")
        try:
            if (mode or os.environ.get("WANDB_MODE") or self._library.setup().settings.mode) == "online":
                self._library.login()
        except Exception as error:  # before any work: without an account there is no run
            raise check.fail(
                "track", self.tool, f"a login, or WANDB_MODE=offline; {one_line(error)}"
            ) from error
        self._project, self._name, self._mode = project, name, mode
        self._folder = None if folder is None else Path(folder)
        self._group: str | None = None
        self._run: Any = None

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Begin a new run, or go on with the one that the run's folder remembers."""
        remembered = recall(self.tool, config)
        if self._group is None:
            fresh = f"{slug(self._name or 'partita')}-{uuid.uuid4().hex[:8]}"
            self._group = remembered.get("group") or os.environ.get("WANDB_RUN_GROUP") or fresh
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        # a sweep's agent gives an id to the run it asked for: the method's
        fresh_id = uuid.uuid4().hex[:8] if self.is_baseline else None
        self._run = self._library.init(
            project=self._project,
            name=self.label(self._name),
            group=self._group,
            job_type="baseline" if self.is_baseline else "method",
            mode=self._mode,
            dir=None if self._folder is None else str(self._folder),
            id=remembered.get("run", fresh_id),
            resume="allow" if remembered else None,
            reinit="create_new",  # a run that the user has begun stays as it is
            config=selected(config),
        )
        keep(self.tool, config, {"run": self._run.id, "group": self._group})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of a round; W&B puts those of one step together."""
        if step >= self._run.starting_step:
            self._run.log(dict(numbers), step=step)

    def results(self, numbers: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        """Write the run's summary."""
        self._run.summary.update(dict(numbers))

    def finish(self, status: str) -> None:
        """Send the files, and whether the run reached its end."""
        run, self._run = self._run, None
        try:
            if files := self.artifacts():
                artifact = self._library.Artifact(slug(f"{self._what}-{run.id}"), type="partita-run")
                for path in files:
                    artifact.add_file(str(path))
                run.log_artifact(artifact)
        finally:
            run.finish(exit_code=0 if status == "finished" else 1)

    def close(self) -> None:
        """End the run; the next one is of another group."""
        super().close()
        self._group = None
