"""Every sample of a split under a model: what metrics keep of it, in memory and in the run's folder.

Two models on the same samples of a client are a paired comparison; with these rows it can be made, for any
metric, also between runs of different methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from partita.core import check
from partita.core.types import Tensors

FILE = "samples.safetensors"


class Scored(NamedTuple):
    """How a model does for each client.

    scores  of each client, by metric; NaN where it has no sample, or where the metric is undefined for it
    loss    of each client
    rows    what the metrics keep of each sample, by metric, client after client
    """

    scores: dict[str, np.ndarray]
    loss: np.ndarray
    rows: Tensors

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        scores = {k: torch.from_numpy(v) for k, v in self.scores.items()}
        return {"scores": scores, "loss": torch.from_numpy(self.loss), "rows": self.rows}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Scored:
        """Return what a checkpoint holds."""
        scores = {k: v.numpy() for k, v in state["scores"].items()}
        return cls(scores, state["loss"].numpy(), dict(state["rows"]))


@dataclass(frozen=True, eq=False)
class Samples:
    """What is kept of every test sample of every client.

    sizes    how many each client has
    targets  of all of them, client after client
    rows     by model ('local', 'global', 'personal') and metric, a row of each
    """

    sizes: np.ndarray
    targets: Tensor
    rows: dict[str, Tensors] = field(default_factory=dict)

    def of(self, model: str, metric: str) -> Tensor | None:
        """Return the rows of a model; None where they were not kept."""
        return self.rows.get(model, {}).get(metric)

    def subset(self, kept: np.ndarray) -> Samples:
        """Return the samples of some clients; `kept` says for each whether it is one of them."""
        mask = torch.from_numpy(np.repeat(kept, self.sizes))
        rows = {model: {k: v[mask] for k, v in of.items()} for model, of in self.rows.items()}
        return Samples(self.sizes[kept], self.targets[mask], rows)

    def tensors(self) -> Tensors:
        """What the file holds: 'sizes', 'targets', and rows by 'MODEL/METRIC'."""
        rows = {f"{model}/{k}": v.clone() for model, kept in self.rows.items() for k, v in kept.items()}
        return {"sizes": torch.from_numpy(self.sizes), "targets": self.targets, **rows}

    @classmethod
    def read(cls, folder: Path) -> Samples | None:
        """Read the file of a run; None where there is none, as in runs whose samples would take too much."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
            sizes, targets = tensors.pop("sizes").numpy(), tensors.pop("targets")
        except (SafetensorError, KeyError, OSError) as error:
            raise check.fail("file", str(path), f"samples, as a run writes them ({error})") from None
        rows: dict[str, Tensors] = {}
        for name, value in tensors.items():
            model, _, metric = name.partition("/")
            if len(value) != len(targets) or int(sizes.sum()) != len(targets):
                raise check.fail("file", str(path), f"samples, as a run writes them ({name} has other rows)")
            rows.setdefault(model, {})[metric] = value
        return cls(sizes, targets, rows)
