"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Seed = Annotated[int, typer.Option(help="Everything random depends on it.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; without it nothing is written.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Executor = Annotated[str, typer.Option(help="auto (measures and picks), vmap (clients stacked) or loop.")]
Memory = Annotated[str | None, typer.Option(help="Budget for stacking clients, such as 8GiB.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
