"""What the open control port means: foreign code at the clients, and what it can reach there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import BIN, HERE, Federation, until

from partita.deploy.states import write_private

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users"),
]

USER, GROUP_NUMBER = 65534, 1
SITE = """\
name = "a"
folder = "{folder}/states"
[door]
socket = "{folder}/door/s"
group = "daemon"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users can see into, in which a client has its states."""
    there = Path("/tmp") / f"partita-foreign-{os.getpid()}"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(mode=0o755)
    (there / "states").mkdir(mode=0o700)
    write_private(there / "states" / "state-1", b"personal parameters")
    yield there
    shutil.rmtree(there)


def commands(folder: Path) -> Path:
    """Make the commands of a SuperNode for a user who may not read where this Python is."""
    python = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    if not python.exists():
        pytest.skip(f"there is no {python} for another user")
    (folder / "bin").mkdir()
    for name in ("flower-supernode", "flower-superexec", "flwr-clientapp"):
        _, _, text = (BIN / name).read_text().partition("\n")
        file = folder / "bin" / name
        file.write_text(f"#!{python}\n{text}")
        file.chmod(0o755)
    return folder / "bin"


def test_foreign_code_reads_what_its_user_may_read(
    federation: Federation, folder: Path, tmp_path: Path
) -> None:
    """A run is started without any key. As the client's user it reads the states, as another it cannot."""
    federation.client("a", site=SITE.format(folder=folder))
    until((folder / "door" / "s").exists)
    federation.key("apart")
    said = federation.flwr("supernode", "register", str(federation.folder / "apart.pub"), "here")
    home, key = folder / "home", folder / "apart.key"
    home.mkdir()
    shutil.copy(federation.folder / "apart.key", key)
    shutil.copy(federation.keys / "ca.crt", folder / "ca.crt")
    (folder / "ca.crt").chmod(0o644)
    for path in (home, key):
        os.chown(path, USER, USER)
    options = {"user": USER, "group": USER, "extra_groups": [GROUP_NUMBER], "cwd": folder}
    options["commands"] = commands(folder)
    places = {"home": home, "key": key, "authority": folder / "ca.crt", "door": folder / "door" / "s"}
    apart = federation.node("apart", **options, **places)
    try:
        until(lambda: "SuperNode ID" in federation.log("node-apart"))
        out = tmp_path / "found.json"
        federation.begin_run(HERE / "foreign", folder=str(folder / "states"), out=str(out))
        federation.ends()
    finally:
        apart.terminate()
        apart.wait(30)
    found = json.loads(out.read_text())
    print(json.dumps(found, indent=1))
    other = found.pop(str(said["node-id"]))
    assert (other["user"], other["read"]) == (USER, "PermissionError")
    assert other["door"].endswith("bytes or more")  # whoever reaches the door can ask
    # The state, and whose folder it is.
    assert {(f["user"], f["read"]) for f in found.values()} == {(0, "2 files, 21 bytes")}
