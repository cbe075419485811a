"""Check that pyproject.toml is true: what the source imports, how old that may be, what an index shows."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from support import each

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "partita"
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = DECLARED["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs", "ecosystem"}
"""Extras that run at pinned versions only: nobody installs their oldest ones beside Partita."""
APART = "flower"
"""The extra of one version, in an environment of its own, whose pins no other extra has to bear."""
DISTRIBUTIONS = {"sklearn": "scikit-learn", "mlflow": "mlflow-skinny", "grpc": "grpcio"}
"""Distributions whose name is not that of their module."""


class Import(NamedTuple):
    """A module that a file imports, at its top or only when a function is called."""

    module: str
    at_top: bool
    text: str


def by_name(function: ast.expr) -> bool:
    """Tell whether a call of this imports a module."""
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name in ("import_module", "_import_module", "library")


def imports(node: ast.AST, at_top: bool = True) -> Iterator[Import]:
    """Yield each absolute import of a file, also by name: import_module("a.b"), library("x", "a.b")."""
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and not child.level:
            names = [child.module or ""]
        elif isinstance(child, ast.Call) and by_name(child.func):
            last = child.args[1 if len(child.args) > 1 else 0]
            names = [last.value] if isinstance(last, ast.Constant) else []
        yield from (Import(name.split(".")[0], at_top, ast.unparse(child)) for name in names)
        is_later = isinstance(child, ast.FunctionDef) or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        )
        yield from imports(child, at_top and not is_later)


BY_TORCH = {"triton"}
"""What builds of torch for CUDA bring along: kernels are imported where it is found, and nowhere else."""


@functools.cache
def foreign() -> dict[str, list[tuple[str, Import]]]:
    """The imports of the source that neither Python nor Partita has, by distribution."""
    found: dict[str, list[tuple[str, Import]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for one in imports(ast.parse(path.read_text())):
            if one.module != "partita" and one.module not in sys.stdlib_module_names:
                distribution = DISTRIBUTIONS.get(one.module, one.module.replace("_", "-"))
                found.setdefault(distribution, []).append((str(path.relative_to(ROOT)), one))
    return found


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    """What Partita and these extras ask for; an extra of Partita itself counts as what it contains."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    parsed = [Requirement(text) for text in texts]
    assert all(set(r.extras) <= set(EXTRAS) for r in parsed if r.name == "partita")
    return {canonicalize_name(r.name): r.specifier for r in parsed if r.name != "partita"}


def pins(name: str) -> dict[str, Version]:
    """The versions of a file of constraints."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_finder_finds() -> None:
    text = "import a.b\nfrom c import d\nfrom . import e\nif TYPE_CHECKING:\n  import f\n"
    text += "def g():\n  import h\n  return library('i', 'j.k'), importlib.import_module('l.m')\n"
    assert {(one.module, one.at_top) for one in imports(ast.parse(text))} == {
        ("a", True),
        ("c", True),
        ("f", False),
        ("h", False),
        ("j", False),
        ("l", False),
    }


def test_every_import_is_declared() -> None:
    """A core dependency may be imported anywhere, one of an extra only when it is used."""
    core, users = requirements(), requirements(*EXTRAS.keys() - {"dev", "docs"})
    used = {name: where for name, where in foreign().items() if name not in BY_TORCH}
    assert {"torch", "numpy", "scikit-learn", "plotly", "mlflow-skinny", "wandb", "ray", "optuna"} <= set(
        used
    )
    assert {name: where for name, where in used.items() if name not in users} == {}
    at_top = {name: [w for w in where if w[1].at_top] for name, where in used.items() if name not in core}
    assert {name: where for name, where in at_top.items() if where} == {}


def test_nothing_is_declared_for_nothing() -> None:
    by_others = {"sqlalchemy", "alembic", "tensorboard"}  # needed by mlflow-skinny's store and by torch
    users = requirements(*EXTRAS.keys() - FOR_DEVELOPERS)
    assert set(users) - set(foreign()) == by_others
    assert not BY_TORCH & set(users)


def test_bounds_are_from_below_and_tested() -> None:
    everything = requirements(*EXTRAS.keys() - {APART})
    assert {n: str(s) for n, s in everything.items() if [one.operator for one in s] != [">="]} == {}
    users = requirements(*EXTRAS.keys() - FOR_DEVELOPERS - {APART})
    lowest = pins("constraints-lowest.txt")
    bounds = {name: Version(next(iter(specifier)).version) for name, specifier in users.items()}
    assert {name: lowest.get(name) for name in bounds} == bounds


def test_the_pinned_versions_are_admitted() -> None:
    wanted, pinned = requirements(*EXTRAS.keys() - {"ecosystem", APART}), pins("constraints.txt")
    assert {name for name, specifier in wanted.items() if pinned.get(name) not in specifier} == set()


def test_flower_is_the_version_that_is_tested() -> None:
    """It has no stable interface: one version is admitted, and no other extra brings it along."""
    wanted, pinned = requirements(APART), pins("constraints-flower.txt")
    assert EXTRAS[APART] == [f"flwr=={pinned['flwr']}"]
    assert {name for name, specifier in wanted.items() if pinned.get(name) not in specifier} == set()
    assert "flwr" not in requirements(*EXTRAS.keys() - {APART})
    assert pinned["torch"] == pins("constraints.txt")["torch"]


def test_supported_pythons_are_named() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert DECLARED["tool"]["mypy"]["python_version"] == named[0]


def built(repository: str = "") -> ProjectMetadata:
    """What a build says of the project, with a public repository or none."""
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    metadata.hatch.metadata.config["hooks"]["custom"]["repository"] = repository
    return metadata


def links(markdown: str) -> tuple[list[str], list[str]]:
    """Where the links and the pictures of a text lead."""
    tokens = [
        t for top in MarkdownIt("commonmark").enable("table").parse(markdown) for t in top.children or ()
    ]
    return (
        [str(t.attrs["href"]) for t in tokens if t.type == "link_open"],
        [str(t.attrs["src"]) for t in tokens if t.type == "image"],
    )


@each("repository", ["", "https://host.example/partita/", "https://host.example/partita"])
def test_an_index_shows_no_relative_link(repository: str) -> None:
    metadata = built(repository)
    pages, pictures = links(metadata.core.readme)
    own_pages, own_pictures = links((ROOT / "README.md").read_text())
    assert len(own_pages) > 10
    assert len(own_pictures) == 2
    address, tag = "https://host.example/partita", f"v{PROJECT['version']}"
    relative = [page for page in own_pages if not page.startswith(("https://", "#"))]
    assert {p for p in pages if not p.startswith(("https://", "#"))} == set()
    if repository:
        assert {f"{address}/blob/{tag}/{path}" for path in relative} <= set(pages)
        assert pictures == [f"{address}/raw/{tag}/{path}" for path in own_pictures]
        assert metadata.core.urls["Source"] == address
        assert all(url.startswith(address) for url in metadata.core.urls.values())
    else:
        assert pictures == []
        assert metadata.core.urls == {}
    assert metadata.core.readme_content_type == "text/markdown"
    assert metadata.core.readme.count("```") == (ROOT / "README.md").read_text().count("```")


def test_an_index_accepts_the_fields() -> None:
    """Hatchling refuses classifiers that no index knows, and a license that is no SPDX expression."""
    metadata = built()
    metadata.validate_fields()
    assert metadata.core.license_expression == "Apache-2.0"
    assert not [c for c in metadata.core.classifiers if c.startswith("License ::")]  # as PEP 639 demands


def test_the_wheel_holds_every_file_of_the_package() -> None:
    packed = {f.distribution_path for f in WheelBuilder(str(ROOT)).recurse_included_files()}
    there = [p for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert packed == {str(p.relative_to(ROOT / "src")) for p in there}
    assert {"partita/py.typed", "partita/report/script.js", "partita/report/style.css"} <= packed
