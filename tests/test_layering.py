"""Maths never imports machinery, machinery never imports surface, and `import partita` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import partita

SOURCE = Path(partita.__file__).parent
MATHS = (
    "algorithms",
    "local",
    "aggregate",
    "server",
    "partition",
    "order",
    "psi",
    "capacity",
    "attack",
    "measures",
)
MACHINERY = (
    "execute",
    "store",
    "schedule",
    "data",
    "federation",
    "federate",
    "watch",
    "run",
    "record",
    "results",
    "settings",
    "table",
    "initial",
    "code",
    "written",
    "begin",
    "measuring",
    "ahead",
    "snapshot",
    "cohorts",
    "cautions",
    "timing",
    "phases",
    "arithmetic",
    "threads",
    "divergence",
)
SURFACE = ("bench", "recipes", "report", "cli", "catalogue", "deploy")
GROUND = (
    "early",
    "types",
    "tree",
    "transfer",
    "draws",
    "check",
    "options",
    "stopping",
    "measure",
    "callbacks",
    "track",
    "models",
)
HEAVY = (
    "sklearn",
    "scipy",
    "typer",
    "rich",
    "plotly",
    "datasets",
    "pydantic",
    "tensorboard",
    "mlflow",
    "wandb",
)


def modules() -> dict[str, Path]:
    """Every module of the library by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("partita", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(text: str, name: str, is_package: bool) -> set[str]:
    """The modules of the library that a text imports, at its top or inside its functions."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            # a name of `partita` itself is one of its modules; deeper, the module it comes from says enough
            found |= {f"{source}.{a.name}" for a in node.names} if source == "partita" else {source}
    return {m for m in found if m.split(".")[0] == "partita"}


def layer(name: str) -> str:
    """The first name below `partita`; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def offences(importers: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for name, path in modules().items():
        if layer(name) in importers:
            used = imported(path.read_text(), name, path.name == "__init__.py")
            found += [f"{name} imports {m}" for m in sorted(used) if layer(m) in (*forbidden, "")]
    return found


def test_the_finder_finds() -> None:
    text = "import partita.store\nfrom partita import server as s, check\ndef f():\n  from ..data import x\n"
    assert imported(text, "partita.local.sgd", False) == {
        "partita.store",
        "partita.server",
        "partita.check",
        "partita.data",
    }
    assert imported("from . import plan", "partita.execute", True) == {"partita.execute"}
    assert imported("import partita as pt", "partita.local.sgd", False) == {"partita"}


def test_the_layers_are_there() -> None:
    there = {layer(name) for name in modules()}
    assert {"algorithms", "local", "aggregate", "server", "partition"} <= there
    assert set(MACHINERY) <= there


def test_maths_never_imports_machinery_or_surface() -> None:
    assert offences(MATHS, (*MACHINERY, *SURFACE)) == []


def test_machinery_never_imports_surface() -> None:
    assert offences(MACHINERY, SURFACE) == []


def test_the_ground_imports_no_layer_above_it() -> None:
    assert offences(GROUND, (*MATHS, *MACHINERY, *SURFACE)) == []


@pytest.mark.parametrize("name", ["types", "tree", "transfer", "draws", "check"])
def test_the_ground_stands_on_nothing(name: str) -> None:
    used = {layer(m) for m in imported((SOURCE / f"{name}.py").read_text(), f"partita.{name}", False)}
    assert used <= {"types", "tree", "transfer", "draws", "check"}


def test_import_loads_nothing_heavy() -> None:
    code = "import partita, sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(printed))
    assert {"torch", "numpy"} <= loaded
    assert loaded & {*HEAVY, "ray", "flwr"} == set()
