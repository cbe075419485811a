"""`partita deploy` as a user meets it: what each command says, and how each mistake is refused."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
from cable import Net, until
from typer.main import get_command

from partita import cli
from partita.cli.deploy import server
from partita.core.check import Refused
from partita.deploy import keys as deployed
from partita.deploy.agreed import digest_of, parts_of, setup_of
from partita.deploy.facts import facts_of
from partita.deploy.samples import samples_of
from partita.deploy.site import SiteFile
from partita.recipes import find
from partita.recipes.experiment import build
from support import Command, each

HERE = Path(__file__).parent
EXPERIMENT = str(HERE / "small_experiment.py")
DEPLOY = HERE.parents[1] / "examples" / "deploy"


def test_keys_say_what_goes_where(tmp_path: Path, partita: Command) -> None:
    folder = tmp_path / "keys"
    done = partita("deploy", "keys", str(folder), "--clients", "north, south", "--host", "fed.example.org")
    assert done.returncode == 0, done.stderr
    for words in ("authority", "the roster of 2 clients", f"{folder}/south", "partita deploy server"):
        assert words in done.stdout
    assert 'server = "fed.example.org:8443"' in (folder / "north" / "site.toml").read_text()
    renewed = partita("deploy", "keys", str(folder), "--renew", "server", "--days", "30")
    assert renewed.returncode == 0, renewed.stderr
    assert f"{folder}/server/server.crt      valid for 30 days" in renewed.stdout
    for words in ((), ("--clients", "east", "--renew", "server")):
        assert "either --clients" in partita("deploy", "keys", str(folder), *words).stderr
    again = partita("deploy", "keys", str(folder), "--clients", "north")
    assert again.returncode == 2
    assert "it has a key already" in again.stderr


def test_check_says_what_is_sent_and_what_stays(keys: Path, partita: Command) -> None:
    roster = str(keys / "server" / "roster.toml")
    done = partita("deploy", "check", EXPERIMENT, "--roster", roster)
    assert done.returncode == 0, done.stderr
    for words in (
        "a change of it is sent",
        "stays at the client",
        "A round of 3: 49.9 kB",
        "16.6 kB",
        "digest",
    ):
        assert words in " ".join(done.stdout.split()), words
    found = json.loads(partita("deploy", "check", EXPERIMENT, "--json").stdout)
    (stage,) = found["stages"]
    shared = {"hidden1.linear.weight", "hidden1.linear.bias"}
    assert set(stage["sent"]) == {f"delta/{name}" for name in shared} | {"metrics/loss", "metrics/steps"}
    assert set(stage["received"]) == {f"shared/{name}" for name in shared}
    assert set(stage["kept"]) == {"output.linear.weight", "output.linear.bias"}
    assert stage["up"] == stage["down"] == 4 * (64 * 64 + 64)
    assert stage["state"] == 4 * (64 * 10 + 10)


def test_check_lists_what_a_method_sends_of_its_own(partita: Command, tmp_path: Path) -> None:
    """FedProto sends no parameter, and yet prototypes and how many samples of each class there are."""
    file = tmp_path / "prototypes.py"
    text = Path(EXPERIMENT).read_text()
    file.write_text(text.replace("pt.fedavg(lr=0.1)", "pt.fedproto(lr=0.1)"))
    done = partita("deploy", "check", str(file), "--set", "method=fedavg")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "is sent" in line]
    for name in ("prototypes", "prototype_samples", "loss", "steps"):
        assert any(f" {name} " in row for row in rows), (name, done.stdout)


def test_the_digest_is_that_of_a_run() -> None:
    """It does not depend on the number of clients or of samples, and on all that decides what is computed."""
    made = build(find(EXPERIMENT), {})
    digest = facts_of(made, 3).digest
    assert digest == facts_of(made, 7).digest
    assert digest == digest_of(parts_of(setup_of(made, made.data)))
    for other in ({"method": "ditto"}, {"seed": 1}, {"width": 32}, {"algorithm.lr": 0.2}, {"steps": 6}):
        assert facts_of(build(find(EXPERIMENT), other), 3).digest != digest, other
    for exact in ({"precision": "fp32"}, {"deterministic": True}):  # they decide bits, too
        assert digest_of(parts_of(setup_of(made, made.data, **exact))) != digest, exact


def test_what_cannot_be_deployed_is_refused(partita: Command) -> None:
    done = partita("deploy", "check", EXPERIMENT, "--set", "attack=sign_flip", "--set", "byzantine=1")
    assert done.returncode == 2
    assert "real clients" in done.stderr


@each(
    "words, told",
    [
        ("--listen 127.0.0.1:0 --quorum 0", "--quorum"),
        ("--listen 127.0.0.1:0 --quorum many", "a share of the cohort"),
        ("--listen 127.0.0.1:0 --deadline soon", "--deadline"),
        ("--listen 127.0.0.1", "HOST:PORT"),
        ("--listen 0.0.0.0:0 --insecure-loopback", "without TLS nobody else may connect"),
        ("--listen 127.0.0.1:0 --status 70000", "--status"),
        ("--listen 192.0.2.1:8443", "an address of this machine that is free"),
    ],
)
def test_a_server_that_is_refused(
    keys: Path, tmp_path: Path, partita: Command, words: str, told: str
) -> None:
    roster = str(keys / "server" / "roster.toml")
    out = tmp_path / "run"
    done = partita("deploy", "server", EXPERIMENT, "--roster", roster, "--out", str(out), *words.split())
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert not out.exists()


def test_a_server_without_its_keys(keys: Path, tmp_path: Path, partita: Command) -> None:
    roster = tmp_path / "roster.toml"
    roster.write_text((keys / "server" / "roster.toml").read_text())
    words = ("deploy", "server", EXPERIMENT, "--roster", str(roster), "--out", str(tmp_path / "run"))
    done = partita(*words)
    assert done.returncode == 2
    assert "ca.crt is not beside it" in done.stderr


def test_a_client_whose_samples_do_not_fit(tmp_path: Path, partita: Command) -> None:
    """It is refused before it calls anybody."""
    deployed.make(tmp_path, ["a"])
    np.savez(tmp_path / "a" / "x.npz", x=np.zeros((9, 3), "float32"), y=np.arange(9) % 3, client=np.zeros(9))
    site = tmp_path / "a" / "site.toml"
    site.write_text(site.read_text().replace('# file = "samples.npz"', 'file = "x.npz"'))
    done = partita("deploy", "client", EXPERIMENT, "--site", str(site))
    assert done.returncode == 2
    assert "a sample of x" in done.stderr


def test_a_client_that_the_server_refuses_may_be_started_again(
    keys: Path, tmp_path: Path, partita: Command
) -> None:
    """Its exit code is not that of a mistake on this machine, after which systemd leaves it alone."""
    net = Net(keys)
    deployed.make(tmp_path, ["a"], port=net.server().port)
    done = partita("deploy", "client", EXPERIMENT, "--site", str(tmp_path / "a" / "site.toml"))
    net.close()
    assert done.returncode == 3, done.stderr
    assert "not to be trusted" in done.stderr
    assert "RestartPreventExitStatus=2\n" in (DEPLOY / "partita-client.service").read_text()


# ---- samples of a site


def site_of(tmp_path: Path, text: str) -> SiteFile:
    deployed.make(tmp_path / "keys", ["a"])
    path = tmp_path / "keys" / "a" / "site.toml"
    path.write_text(f'name = "a"\nserver = "localhost:1"\n[data]\n{text}\n')
    return SiteFile.read(path)


def test_samples_of_the_experiments_own_function(tmp_path: Path) -> None:
    own = samples_of(site_of(tmp_path, ""), EXPERIMENT)
    expected = runpy.run_path(EXPERIMENT)["data"]("a")
    assert own.clients == 1
    assert own.x.equal(expected.x)


def test_samples_of_a_file(tmp_path: Path) -> None:
    site = site_of(tmp_path, 'file = "x.npz"\noptions = { test = 0.5 }')
    x, y = np.arange(20, dtype="float32").reshape(10, 2), np.arange(10) % 2
    np.savez(tmp_path / "keys" / "a" / "x.npz", x=x, y=y, client=np.zeros(10))
    own = samples_of(site, EXPERIMENT)
    assert int(own.sizes("test").sum()) == 5
    np.savez(tmp_path / "keys" / "a" / "x.npz", x=x, y=y, client=np.repeat(["a", "b"], 5))
    assert samples_of(site, EXPERIMENT).names == ("a",)
    np.savez(tmp_path / "keys" / "a" / "x.npz", x=x, y=y, client=np.repeat(["b", "c"], 5))
    with pytest.raises(Refused, match="one is called 'a'"):
        samples_of(site, EXPERIMENT)


@each(
    "text, code, told",
    [
        ('file = "x.csv"', "", "an .npz, a .json (LEAF) or a .py file"),
        ('file = "missing.py"', "", "a .py file that exists"),
        ('file = "x.py"', "", "a file with a function data(name)"),
        ('file = "x.py"\nfunction = "other"', "def data(): ...", "a file with a function other(name)"),
        ('file = "x.py"\noptions = { pth = 1 }', "def data(path): ...", "did you mean 'path'"),
        ('file = "x.py"', "def data(): return 3", "a FederatedData"),
        ('file = "x.py"', "def data():\n  return 1 / 0", "ZeroDivisionError"),
        ('file = "x.npz"\noptions = { tset = 1 }', "", "did you mean 'test'"),
    ],
)
def test_samples_that_are_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, code: str, told: str
) -> None:
    folder = tmp_path_factory.mktemp("site")
    site = site_of(folder, text)
    if "missing" not in text:
        (folder / "keys" / "a" / "x.py").write_text(code)
    with pytest.raises(Refused, match=re.escape(told)):
        samples_of(site, EXPERIMENT)


# ---- examples


def test_the_example_can_be_deployed(tmp_path: Path) -> None:
    file = str(DEPLOY / "experiment.py")
    made = build(find(file), {})
    assert facts_of(made, 5).stages[0].method == "fedalt"
    own = samples_of(site_of(tmp_path, "options = { made_up = 50 }"), file)
    np.savez(tmp_path / "a.npz", x=own.x.numpy(), y=own.y.numpy())
    (tmp_path / "keys" / "a" / "site.toml").write_text(
        f'name = "a"\nserver = "localhost:1"\n[data]\noptions = {{ folder = "{tmp_path}" }}\n'
    )
    again = samples_of(SiteFile.read(tmp_path / "keys" / "a" / "site.toml"), file)
    assert again.rows == own.rows == 50


@each("unit", ["partita-server.service", "partita-client.service", "Containerfile"])
def test_examples_call_commands_that_are_there(unit: str) -> None:
    text = (DEPLOY / unit).read_text().replace("\\\n#", "")
    found = re.findall(r"(?:bin/partita deploy|partita) +((?:server|client) .*)", text)
    assert found
    group = get_command(cli.app)
    context = group.make_context("partita", ["deploy"], resilient_parsing=True)
    sub = group.get_command(context, "deploy")  # type: ignore[attr-defined]
    for words in found:
        name, *arguments = shlex.split(words.partition(" $$(")[0].rstrip("'"))
        command = sub.get_command(context, name)
        command.make_context(name, arguments)


def test_a_server_follows_its_roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a change that is none, such as a file that is half written."""
    monkeypatch.setattr(server, "LOOK", 0.01)
    deployed.make(tmp_path, ["a"])
    file = tmp_path / "server" / "roster.toml"
    seen: list[list[str]] = []
    follower = server.Follower(file, lambda clients: seen.append(list(clients)))
    file.write_text("[clients")
    deployed.make(tmp_path / "more", ["b", "c"])
    file.write_text((tmp_path / "more" / "server" / "roster.toml").read_text())
    until(lambda: seen)
    follower.close()
    assert seen[-1] == ["b", "c"]
