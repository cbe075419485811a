"""What a user of Flower types and writes: pins, a site with a door, and the configuration of a run."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_flower import APP, key

from partita.cli.deploy import flower
from partita.core.check import Refused
from partita.deploy import keys as deployed
from partita.deploy import roster
from partita.deploy.flower import Door
from partita.deploy.site import SiteFile
from support import Command, each

EXPERIMENT = str(Path(__file__).parent / "small_experiment.py")
SITE = 'name = "a"\n[door]\nsocket = "door/s"\n'


def test_keys_that_are_there_are_pinned(tmp_path: Path, partita: Command) -> None:
    """In PEM as Flower stores them, and as ssh-keygen writes them; a certificate's key has one pin."""
    pem, pinned = key()
    (tmp_path / "north.pem").write_bytes(pem)
    words = ["ssh-keygen", "-i", "-m", "PKCS8", "-f", str(tmp_path / "north.pem")]
    (tmp_path / "south.pub").write_bytes(subprocess.run(words, capture_output=True, check=True).stdout)
    file = tmp_path / "roster.toml"
    done = partita("deploy", "pin", str(file), f"north={tmp_path / 'north.pem'}")
    assert done.returncode == 0, done.stderr
    assert roster.read(file) == {"north": pinned}
    again = partita("deploy", "pin", str(file), f"south={tmp_path / 'south.pub'}")
    assert again.returncode == 2
    assert "it is the key of north" in again.stderr
    assert roster.read(file) == {"north": pinned}
    (tmp_path / "east.pem").write_bytes(key()[0])
    assert partita("deploy", "pin", str(file), f"east={tmp_path / 'east.pem'}").returncode == 0
    assert list(roster.read(file)) == ["north", "east"]


@each("word", ["north", "north=missing.pub", "north={}", "../x={}"])
def test_pins_that_are_refused(tmp_path_factory: pytest.TempPathFactory, word: str) -> None:
    from partita.cli.deploy.pin import pin

    folder = tmp_path_factory.mktemp("pins")
    (folder / "text").write_text("no key")
    with pytest.raises(Refused):
        pin(folder / "roster.toml", [word.format(folder / "text")])
    assert not (folder / "roster.toml").exists()


def test_a_site_with_a_door(tmp_path: Path) -> None:
    """It needs no server and no keys."""
    path = tmp_path / "site.toml"
    path.write_text(SITE + 'group = "flower"\n')
    site = SiteFile.read(path)
    assert site.door is not None
    assert (site.door.socket, site.door.group) == (str(tmp_path / "door" / "s"), "flower")
    assert (site.server, site.credentials) == ("", None)
    assert site.folder == tmp_path / "state"


@each(
    "text, told",
    [
        (SITE.replace("[door]", 'server = "localhost:1"\n[door]'), "no server beside"),
        (SITE + "[keys]\n", "no keys beside"),
        (SITE.replace('socket = "door/s"', ""), "door.socket"),
        (SITE.replace("socket", "sokcet"), "did you mean 'socket'"),
        (SITE + "group = 3\n", "door.group"),
    ],
)
def test_sites_with_doors_that_are_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, told: str
) -> None:
    path = tmp_path_factory.mktemp("site") / "site.toml"
    path.write_text(text)
    with pytest.raises(Refused, match=told):
        SiteFile.read(path)


def test_a_client_with_a_door_calls_nobody(
    tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def run(door: Door, handler: Any) -> None:
        ran.append((str(door.path), handler.handler.sizes[0]))

    monkeypatch.setattr(Door, "run", run)
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    done = partita("deploy", "client", EXPERIMENT, "--site", str(path))
    assert done.returncode == 0, done.stderr
    assert ran == [(str(tmp_path / "door" / "s"), 455)]
    assert "answering at" in done.stderr


# ---- the configuration of a run

CONFIG: dict[str, Any] = {"experiment": EXPERIMENT, "roster": "roster.toml", "out": "run"}


def test_the_example_says_all_that_may_be_said() -> None:
    written = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert set(written["config"]) == {*flower.NEEDED, *flower.DEFAULTS}
    assert flower.configured(written["config"]) == written["config"]
    for component in written["components"].values():
        module, _, name = component.partition(":")
        text = (APP / module.replace(".", "/")).with_suffix(".py").read_text()
        assert f"\n{name} = " in text


@each(
    "changed, field",
    [
        ({"out": ""}, "out"),
        ({"roster": None}, "roster"),
        ({"resume": "yes"}, "resume"),
        ({"deadline": 5}, "deadline"),
        ({"rouns": 3}, "key"),
    ],
)
def test_configurations_that_are_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as error:
        flower.configured({**CONFIG, **changed})
    assert error.value.field == f"run config: {field}"


def test_a_run_follows_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed.make(tmp_path, ["a", "b"])
    seen: dict[str, Any] = {}

    def serve(experiment: Any, names: list[str], transport: Any, out: Path, **terms: Any) -> Any:
        seen.update(terms, rounds=experiment.rounds, names=names, out=out, largest=transport.largest)
        return SimpleNamespace(summary=dict)

    monkeypatch.setattr(flower, "serve", serve)
    given = {**CONFIG, "roster": str(tmp_path / "server" / "roster.toml"), "set": "rounds=9 seed=1"}
    given |= {"deadline": "10min", "quorum": "0.5", "resume": True}
    flower.main(object(), SimpleNamespace(run_config=given))
    assert (seen["rounds"], seen["names"], seen["out"]) == (9, ["a", "b"], Path("run"))
    assert (seen["deadline"], seen["quorum"], seen["patience"]) == (600.0, 0.5, 60.0)
    assert seen["resume"] is True
    assert 17_000 < seen["largest"] < 200_000
