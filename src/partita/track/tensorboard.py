"""TensorBoard: event files in a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.track.base import Tracker, library, options, slug

SCORES = ("test/local", "test/global", "test/personal", "hurt/vs_global", "hurt/vs_local")


class TensorBoard(Tracker):
    """Writes a run as TensorBoard's event files; look at them with `tensorboard --logdir FOLDER`.

    folder  the method is the run `folder/METHOD`, baselines are `folder/baseline-local` and so on: the same
            tags, so that the curves lie over each other (default: a new folder below runs/tensorboard)

    The options are the method's row of the HParams tab, with the scores of the summary. A resumed run
    replaces what was written after its checkpoint. The text `status` says how a run ended.
    """

    tool = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._library = library(self.tool, "torch.utils.tensorboard", "tensorboard")
        self._requested = None if folder is None else Path(folder)
        self._folder: Path | None = self._requested
        self._writer: Any = None
        self._hparams: tuple[Any, ...] = ()
        self._step = 0

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:
        """Begin an event file; TensorBoard ignores what an earlier one holds from the next round on."""
        if self._folder is None:
            self._folder = Path("runs", "tensorboard", time.strftime("%Y-%m-%d_%H-%M-%S"))
        self._writer = self._library.SummaryWriter(
            str(self._folder / slug(what)), purge_step=round + 1, flush_secs=2
        )
        self._step, self._hparams = round, ()
        if not self.is_baseline:
            values = {
                k: str(v) if isinstance(v, bool) or v is None else v for k, v in options(config).items()
            }
            self._hparams = self._library.summary.hparams(values, {f"summary/{k}": 0.0 for k in SCORES})
        text = json.dumps(dict(config), indent=2, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), round)
        for summary in self._hparams[:2]:  # the columns, and the run's values
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        """Write how the run ended, and close the file."""
        writer, self._writer = self._writer, None
        try:
            writer.add_text("status", status, self._step)
            # TensorBoard believes the first end it reads, and a run that failed may be resumed
            if status == "finished":
                for summary in self._hparams[2:]:
                    writer.file_writer.add_summary(summary)
        finally:
            writer.close()

    def close(self) -> None:
        """End the run; the next one has a folder of its own."""
        super().close()
        self._folder = self._requested
