"""How long a weak device computes: EmbracingFL, Lee et al. (2024), Table 8.

The time of one batch of 32 images through ResNet-20, forwards and backwards, for what each class of devices
trains. The paper measured a phone (OnePlus 9 Pro); here it is the machine that runs the recipe, so compare
shares of the strong device's time and not milliseconds. They are of computation alone, as the paper's beside
them: a simulated device has neither network nor storage of its own from which to read the frozen pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from partita import models
from partita.core.options import Option, checked
from partita.engine.settings import device_of
from partita.recipes.sizes import by_size
from partita.recipes.study import Study
from partita.recipes.tables import Table
from partita.recipes.weak import BATCH, TASKS, WIDTHS

WARM = 3  # batches before the first that is timed
PAPER = {  # computation in milliseconds of strong, moderate and weak devices
    "depth": {"forward": (2095.4, 2095.4, 2095.4), "backward": (419_643.8, 197_265.0, 85_448.3)},
    "width": {"forward": (2010.7, 1431.0, 936.7), "backward": (421_047.5, 317_669.7, 187_580.4)},
}


class Times(NamedTuple):
    """Mean milliseconds of a batch."""

    forward: float
    backward: float


@checked()
def embracing_time(
    size: Annotated[
        str,
        Option("paper (all of ResNet-20), or small (a quarter of its width)", choices=("small", "paper")),
    ] = "paper",
    repeats: Annotated[int, Option("batches that are timed; the paper has 10", low=1)] = 10,
    width: Annotated[
        float | None, Option("width of ResNet-20 (default: 0.25 or 1 by size)", low=0, open_low=True)
    ] = None,
    device: Annotated[
        str, Option("what computes: 'auto', 'cpu' or 'cuda'", check=lambda _, v: device_of(v))
    ] = ("auto"),
    seed: int = 0,
) -> Study:
    """How long does a weak device compute? A batch forwards and backwards, by depth and by width (Table 8).

    Nothing is trained and no data are needed: the images are noise.
    """
    share = by_size(size, 0.25, 1.0) if width is None else width
    return Study({}, tables=lambda runs: [_table(_measured(repeats, share, device, seed), device)])  # noqa: ARG005


def _measured(repeats: int, width: float, device: str, seed: int) -> dict[str, list[Times]]:
    """Return the times of strong, moderate and weak devices."""
    x = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).to(device)
    whole = models.resnet20(10, width=width, seed=seed)
    deep = [(whole[:cut], whole[cut:]) for cut in TASKS["cifar10"].cuts.values()]
    narrow = [(nn.Sequential(), whole.at_width(share)) for share in WIDTHS.values()]
    return {
        kind: [
            _timed(frozen.to(device).eval(), trained.to(device).train(), x, repeats)
            for frozen, trained in parts
        ]
        for kind, parts in (("depth", deep), ("width", narrow))
    }


def _timed(frozen: nn.Module, trained: nn.Module, x: Tensor, repeats: int) -> Times:
    """Return the times of a batch: through all blocks forwards, through the trained ones backwards."""

    def forward() -> Tensor:
        with torch.no_grad():
            recorded = frozen(x)
        loss: Tensor = nn.functional.cross_entropy(trained(recorded), labels)
        return loss

    labels = torch.arange(len(x), device=x.device) % 10
    forwards = backwards = 0.0
    for i in range(WARM + repeats):
        trained.zero_grad()
        ahead, loss = _seconds(forward, x.device)
        back, _ = _seconds(loss.backward, x.device)
        if i >= WARM:
            forwards, backwards = forwards + ahead, backwards + back
    return Times(1000 * forwards / repeats, 1000 * backwards / repeats)


def _seconds(work: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    begun = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, result


def _table(times: dict[str, list[Times]], device: str) -> Table:
    rows = []
    for workload in ("forward", "backward"):
        for i, kind in enumerate(WIDTHS):
            cells: list[str] = []
            for way in ("depth", "width"):
                ours, theirs = [getattr(t, workload) for t in times[way]], PAPER[way][workload]
                cells += [f"{ours[i]:.2f}", f"{ours[i] / ours[0]:.2f}", f"{theirs[i] / theirs[0]:.2f}"]
            rows.append((workload, kind, *cells))
    columns = ("pass", "class", "depth, ms", "of strong", "paper's", "width, ms", "of strong", "paper's")
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu()
    note = (
        f"A batch of {BATCH} images on {machine}, in 32-bit numbers. "
        "The paper's shares are of the computation on a phone."
    )
    return Table("Time of a batch by class of devices (Table 8)", columns, rows, note)


def _cpu() -> str:
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''} of a CPU"
