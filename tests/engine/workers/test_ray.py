"""Ray as it is started for a run: closed to others, and with the results of one process."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from engine.workers.dying import federate
from engine.workers.test_worker_runs import apart, compare_golden
from partita.engine.workers import crew as crews
from partita.engine.workers import ray_actors
from partita.workers import RayCluster
from support import each

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1 and ::1, as the kernel writes them."""


@pytest.fixture(scope="module", autouse=True)
def workers_stay() -> Iterator[None]:
    """Let one cluster serve all tests."""
    with crews.staying():
        yield


def listening() -> set[str]:
    """Return the addresses at which this process and those below it listen, as the kernel writes them."""
    sockets = {link for pid in below(os.getpid()) for link in links(Path(f"/proc/{pid}/fd"))}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def below(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def links(folder: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(path))
    return found


def test_a_run_on_ray() -> None:
    variables = dict(os.environ)
    method = pt.fedavg(lr=0.1, aggregate=pt.aggregate.trimmed_mean(1))
    alone, spread = federate(algorithm=method), federate(algorithm=method, workers="ray:2")
    assert apart(alone, spread) == 0.0  # every delta comes back
    assert apart(federate(rounds=1), federate(rounds=1, workers="ray:2")) <= 1e-6
    assert spread.config["executor"]["workers"]["kind"] == "ray"
    assert listening()
    assert listening() <= set(LOOPBACK)  # only this machine can reach it
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN_PATH" not in variables
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700


@pytest.mark.slow
def test_golden_runs_on_ray(tmp_path: Path) -> None:
    compare_golden(None, tmp_path, "ray:2")


def test_the_variables_are_as_before() -> None:
    before = dict(os.environ)
    with ray_actors._token():
        assert os.environ["RAY_AUTH_MODE"] == "token"
    assert dict(os.environ) == before


def test_a_token_that_others_can_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with pytest.warns(UserWarning, match="chmod 600"):
        ray_actors._warn_about_token(ray_actors.default_token())


ROOM: list[tuple[dict[str, float], RayCluster, float, int | None]] = [
    ({"CPU": 8}, pt.workers.ray(4), 0, 4),
    ({"CPU": 8}, pt.workers.ray(None), 0, 8),
    ({"CPU": 8}, pt.workers.ray(None, threads=3), 0, 2),
    ({"CPU": 8, "GPU": 2}, pt.workers.ray(None, gpus=0.5), 0.5, 4),
    ({"CPU": 2}, pt.workers.ray(4), 0, None),
    ({"CPU": 8}, pt.workers.ray(2, gpus=1), 1, None),
    ({"CPU": 1}, pt.workers.ray(None, threads=2), 0, None),
]


@each("resources, spec, gpus, count", ROOM)
def test_room(resources: dict[str, float], spec: RayCluster, gpus: float, count: int | None) -> None:
    if count is not None:
        assert ray_actors.room_for(resources, spec, gpus) == count
        return
    with pytest.raises(pt.Refused) as error:
        ray_actors.room_for(resources, spec, gpus)
    assert "the cluster has" in str(error.value)


@each("address", ["127.0.0.1:1", "nowhere"])
def test_an_address_where_nobody_listens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = ray_actors._imported()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    if address == "nowhere":
        monkeypatch.setattr(
            ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("no such cluster"))
        )
    with pytest.raises(pt.Refused) as error, ray_actors.connected(pt.workers.ray(1, address=address), "cpu"):
        pass
    assert error.value.field == "workers: address"
