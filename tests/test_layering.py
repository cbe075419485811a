"""The folders are the architecture: each imports only from those below it. `import partita` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import partita

SOURCE = Path(partita.__file__).parent
AXES = (
    "algorithms",
    "aggregate",
    "attack",
    "augment",
    "capacity",
    "measures",
    "optim",
    "schedule",
    "theory",
    "transforms",
    "privacy",
    "data",
    "models",
    "workers",
)
LAYERS = (("core",), AXES, ("engine",), ("report", "track"), ("api",), ("recipes",), ("deploy",), ("cli",))
"""From the ground up: a folder imports from its own layer and from those below it."""
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
    "optuna",
    "cloudpickle",
    "grpc",
    "cryptography",
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


def height(name: str) -> int:
    return next(i for i, folders in enumerate(LAYERS) if layer(name) in folders)


def test_the_finder_finds() -> None:
    text = "import partita.engine.store\nfrom partita import optim as s, data\n"
    text += "def f():\n  from ..data import x\n"
    assert imported(text, "partita.algorithms.local", True) == {
        "partita.engine.store",
        "partita.optim",
        "partita.data",
        "partita.algorithms.data",
    }
    assert imported("from . import plan", "partita.engine.execute", True) == {"partita.engine.execute"}
    assert imported("import partita as pt", "partita.algorithms.local.sgd", False) == {"partita"}


def test_the_folders_are_the_architecture() -> None:
    there = {p.name for p in SOURCE.iterdir() if p.name != "__pycache__"}
    folders = {folder for folders in LAYERS for folder in folders if folder != "api"}
    assert there == {*folders, "__init__.py", "api.py", "py.typed"}


def test_nothing_imports_from_above() -> None:
    wrong = []
    for name, path in modules().items():
        used = imported(path.read_text(), name, path.name == "__init__.py") if layer(name) else set()
        wrong += [f"{name} imports {m}" for m in sorted(used) if not layer(m) or height(m) > height(name)]
    assert wrong == []


def test_no_public_name_is_a_modules() -> None:
    """`import partita.local as x` must never give a function."""
    public = {name for name in partita.__all__ if not isinstance(getattr(partita, name), ModuleType)}
    assert public & {layer(name) for name in modules()} == set()


def test_import_loads_nothing_heavy() -> None:
    code = "import partita, sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(printed))
    assert {"torch", "numpy"} <= loaded
    assert loaded & {*HEAVY, "ray", "flwr"} == set()
