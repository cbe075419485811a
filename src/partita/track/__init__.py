"""Trackers: callbacks that send a run to TensorBoard, MLflow or Weights & Biases.

    pt.federate(..., callbacks=[pt.track.TensorBoard("runs/tensorboard")])
    partita run digits --track mlflow

The names are the same in all tools: `validation/global`, `validation/personal`, `train/loss`, ... of an
evaluation, `train/round_loss` of a round, `summary/...` at the end; a step is a round.
"""

from __future__ import annotations

import os
from pathlib import Path

from partita.core import check
from partita.track.base import Tracker
from partita.track.mlflow import MLflow
from partita.track.tensorboard import TensorBoard
from partita.track.wandb import WandB

TRACKERS = ("tensorboard", "mlflow", "wandb")

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "WandB", "tracker"]


def tracker(name: str, folder: Path | None) -> Tracker:
    """Return the tracker of `--track NAME`, for a run with the output folder `folder`.

    Everything else is taken from the tools' own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME,
    WANDB_MODE, WANDB_PROJECT, WANDB_DIR and so on.
    """
    check.choice("track", name, TRACKERS)
    if name == "tensorboard":
        return TensorBoard(None if folder is None else folder / "tensorboard")
    if name == "mlflow":
        return MLflow(experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME", "partita"))
    return WandB(project=os.environ.get("WANDB_PROJECT", "partita"))
