"""The commands of docs/deploy.md as they stand there, with kills between, on one machine."""

from __future__ import annotations

import re
import runpy
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cable import until
from machines import HERE, Machines
from safetensors.torch import load_file

import partita as pt
from partita.recipes import find
from partita.recipes.experiment import build

pytestmark = pytest.mark.slow

PAGE = (HERE.parents[1] / "docs" / "deploy.md").read_text()
NAMES = ("north", "south", "west")


def command(begin: str) -> list[str]:
    """The words of the first command of the page that begins so."""
    found = re.search(rf"^{re.escape(begin)}.*$", PAGE, re.MULTILINE)
    assert found, begin
    return shlex.split(found[0])


class Here(Machines):
    """The commands of the page in one folder; what they say of machines is this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (code,) = re.findall(r"```python\n(import numpy.*?)```", PAGE, re.DOTALL)
        (folder / "experiment.py").write_text(code)

    def begin(
        self, log: str, words: list[str], fault: str = "none", number: int = 0
    ) -> subprocess.Popen[bytes]:
        words = [word.replace("0.0.0.0:8443", f"127.0.0.1:{self.port}") for word in words]
        assert words.pop(0) == "partita"
        return self.run(log, [*self.actor(log, fault, number), *words])

    def does(self, log: str, words: list[str]) -> str:
        self.ends(self.begin(log, words), log)
        return self.text(log)

    def client(self, name: str, **fault: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
        words = [word.replace("north", name) for word in command("partita deploy client")]
        return self.begin(name, words, **fault)  # type: ignore[arg-type]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    there = Here(tmp_path)
    yield there
    there.close()


def test_a_new_user_gets_the_models_of_the_simulation(here: Here) -> None:
    """Keys, check, server and clients; one client and the server are killed; each exports its model."""
    (here.folder / "keys").rename(here.folder / "unused")
    here.does("keys", command("partita deploy keys keys --clients north"))
    for name in NAMES:
        site = here.folder / "keys" / name / "site.toml"
        site.write_text(site.read_text().replace("fed.example.org:8443", f"127.0.0.1:{here.port}"))
    assert "A round of 3" in here.does("check", command("partita deploy check"))
    clients = [here.client("north"), here.client("west", fault="hold", number=3)]
    killed = here.client("south", fault="after", number=1)
    server = here.begin("server", [*command("partita deploy server"), "--enrolment", "3min"])
    here.ends(killed, "south", -signal.SIGKILL)
    clients.append(here.client("south"))
    until(here.held("west").exists)
    server.kill()
    server.wait()
    here.held("west").unlink()
    (resumed,) = re.findall(r"^partita deploy server .*--resume$", PAGE, re.MULTILINE)
    here.does("server", shlex.split(resumed))
    assert [process.wait(60) for process in clients] == [0, 0, 0]
    found = {}
    for name in NAMES:
        words = [word.replace("north", name) for word in command("partita deploy export")]
        assert "own test samples" in here.does("export", words)
        found[name] = load_file(here.folder / "model.safetensors")
        (here.folder / "model.safetensors").unlink()
    for name, own in simulated(here.folder).items():
        assert set(found[name]) == set(own)
        for key, value in own.items():
            assert torch.equal(found[name][key], value), (name, key)


def simulated(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Each client's own model, of a simulation with the samples of all three."""
    parts: dict[str, list[np.ndarray]] = {"x": [], "y": [], "client": [], "validation": [], "test": []}
    data = runpy.run_path(str(folder / "experiment.py"))["data"]
    for name in NAMES:
        own = data(name)
        for split in ("train", "validation", "test"):
            x, y = own.client(0, split)
            whose = np.full(len(y), name)
            rows = (x.numpy(), y.numpy(), whose, whose == (name if split == "validation" else ""))
            for part, values in zip(parts, (*rows, whose == (name if split == "test" else ""))):
                parts[part].append(values)
    together = pt.data.from_arrays(**{part: np.concatenate(values) for part, values in parts.items()})
    made = replace(build(find(str(folder / "experiment.py")), {}), data=together)
    run = made.run(executor="loop", baselines=False, progress=False)
    return {name: run.client(i).model("personal").state_dict() for i, name in enumerate(NAMES)}
