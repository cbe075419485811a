"""The samples of one client: read where they are, by what site.toml says, and by nobody else."""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.core import check
from partita.data import FederatedData, from_leaf, from_npz
from partita.deploy.site import SiteFile
from partita.recipes.experiment import blamed

READERS: dict[str, Callable[..., FederatedData]] = {".npz": from_npz, ".json": from_leaf}


def samples_of(site: SiteFile, experiment: str) -> FederatedData:
    """Return the samples of a site: those of its file, or what the experiment's function `data` returns."""
    source, field = site.data, "site.toml: data"
    file = Path(source.file or experiment)
    reader = READERS.get(file.suffix)
    if reader is not None:
        _known(f"{field}.options", source.options, inspect.signature(reader).parameters)
        return _one(site.name, str(file), reader(file, **source.options))
    if file.suffix != ".py" or not file.is_file():
        allowed = "an .npz, a .json (LEAF) or a .py file that exists"
        raise check.fail(f"{field}.file", str(file), allowed)
    sys.path.insert(0, str(file.resolve().parent))
    with blamed(str(file)):
        make = runpy.run_path(str(file)).get(source.function)
    if not callable(make):
        allowed = f"a file with a function {source.function}(name) that returns a FederatedData"
        reason = "it says nothing of this client's samples"
        raise check.fail(f"{field}.file", str(file), allowed, reason)
    parameters = inspect.signature(make).parameters
    options = {"name": site.name, **source.options} if "name" in parameters else dict(source.options)
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        _known(f"{field}.options", options, parameters)
    with blamed(str(file)):
        made = make(**options)
    return _one(site.name, str(file), made)


def _known(field: str, options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse an option that the function does not take."""
    for name in options:
        check.choice(field, name, list(parameters))


def _one(name: str, file: str, data: Any) -> FederatedData:
    """Return the samples of this client alone."""
    if not isinstance(data, FederatedData):
        raise check.fail("site.toml: data", file, "a FederatedData, as partita.data.from_arrays(...) returns")
    if data.clients == 1:
        return data
    if name not in list(data.names):
        allowed = f"samples of one client, or of several of whom one is called {name!r}"
        raise check.fail("site.toml: data", file, allowed)
    return data.subset([list(data.names).index(name)])
