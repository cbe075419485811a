"""Keys, the roster and site.toml: what they promise, and how each mistake is refused."""

from __future__ import annotations

import datetime
import hashlib
import re
import shutil
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cable import Echo, Net, replies
from cryptography import x509

from partita.core.check import Refused
from partita.deploy import keys as deployed
from partita.deploy import roster
from partita.deploy.grpc import tls
from partita.deploy.site import SiteFile
from support import each

P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")
"""How a public key on the curve P-256 begins; its point of 65 bytes follows."""


def test_a_roster_pins_the_hash_of_each_public_key(keys: Path) -> None:
    pinned = roster.read(keys / "server" / roster.FILE)
    assert list(pinned) == ["a", "b", "c"]
    for name, key in pinned.items():
        der = ssl.PEM_cert_to_DER_cert((keys / name / "client.crt").read_text())
        begin = der.index(P256)
        assert key == "sha256:" + hashlib.sha256(der[begin : begin + len(P256) + 65]).hexdigest()
    assert len(set(pinned.values())) == 3


def test_nobody_else_reads_keys(keys: Path) -> None:
    files = [p for p in keys.rglob("*") if p.is_file()]
    assert len(files) == 2 + 4 + 3 * 4
    for path in keys.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700), path
    held = {p.name for p in (keys / "a").iterdir()}
    assert held == {"ca.crt", "client.crt", "client.key", "site.toml"}  # and no key of the authority


def handshake(server: tls.Credentials, client: tls.Credentials, host: str) -> str:
    """Return the name in the certificate that a server sees, by Python's own TLS."""
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server.authority)
    ours.load_cert_chain(server.certificate, server.key)
    ours.verify_mode = ssl.CERT_REQUIRED
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    theirs = ssl.create_default_context(cafile=client.authority)
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    theirs.load_cert_chain(client.certificate, client.key)
    here, there = socket.socketpair()
    seen: list[object] = []

    def serve() -> None:
        try:
            with ours.wrap_socket(here, server_side=True) as link:
                seen.append(dict(pair[0] for pair in link.getpeercert()["subject"]))  # type: ignore[index, misc]
                link.sendall(b"x")
        except OSError as error:
            seen.append(error)
            here.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with theirs.wrap_socket(there, server_hostname=host) as link:
            link.recv(1)
    finally:
        there.close()
        thread.join(30)
    name = seen[0]
    if isinstance(name, OSError):
        raise name
    assert isinstance(name, dict)
    return str(name["commonName"])


def credentials(folder: Path, kind: str = "client") -> tls.Credentials:
    return tls.Credentials(folder / "ca.crt", folder / f"{kind}.crt", folder / f"{kind}.key")


def test_certificates_are_good_for_one_purpose(tmp_path: Path) -> None:
    """Strict checks by another implementation: authority, purpose, host."""
    deployed.make(tmp_path, ["a"], ["fed.example.org", "192.0.2.7"])
    server, client = credentials(tmp_path / "server", "server"), credentials(tmp_path / "a")
    for host in ("fed.example.org", "192.0.2.7", "localhost", "127.0.0.1"):
        assert handshake(server, client, host) == "a"
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        handshake(server, client, "other.example.org")
    with pytest.raises(ssl.SSLError):
        handshake(server, tls.Credentials(client.authority, server.certificate, server.key), "localhost")
    with pytest.raises(ssl.SSLError):
        handshake(tls.Credentials(server.authority, client.certificate, client.key), client, "localhost")
    assert 'server = "fed.example.org:8443"' in (tmp_path / "a" / "site.toml").read_text()


def test_clients_join_later(tmp_path: Path) -> None:
    deployed.make(tmp_path, ["a"], ["fed.example.org"], port=9000)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != roster.FILE}
    assert deployed.make(tmp_path, ["b"]) == ["a", "b"]
    assert {p: p.read_bytes() for p in before} == before
    server, client = credentials(tmp_path / "server", "server"), credentials(tmp_path / "b")
    assert handshake(server, client, "localhost") == "b"
    assert list(roster.read(tmp_path / "server" / roster.FILE)) == ["a", "b"]
    assert SiteFile.read(tmp_path / "b" / "site.toml").server == "fed.example.org:9000"
    with pytest.raises(Refused, match="it has a key already"):
        deployed.make(tmp_path, ["c", "b"])
    with pytest.raises(Refused, match="--host"):
        deployed.make(tmp_path, ["c"], ["another.example.org"])
    assert not (tmp_path / "c").exists()


def test_certificates_are_renewed_and_nothing_else(net: Net, tmp_path: Path) -> None:
    """An old and a new certificate of one key are the same to everybody, in a federation that goes on."""
    own = tmp_path / "keys"
    deployed.make(own, ["a", "b"], ["fed.example.org"], days=1)
    before = {p: p.read_bytes() for p in own.rglob("*") if p.is_file()}
    files = deployed.renew(own, ["server", "b"])
    assert files == [own / "server" / "server.crt", own / "b" / "client.crt"]
    assert {p for p in before if p.read_bytes() != before[p]} == set(files)
    for file in files:
        old, new = (x509.load_pem_x509_certificate(text) for text in (before[file], file.read_bytes()))
        assert new.not_valid_after_utc - old.not_valid_after_utc > datetime.timedelta(days=820)
        assert tls.fingerprint(file.read_bytes()) == tls.fingerprint(before[file])
        assert new.serial_number != old.serial_number
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    server = credentials(own / "server", "server")
    for host in ("fed.example.org", "localhost", "127.0.0.1"):
        for name in "ab":
            assert handshake(server, credentials(own / name), host) == name
    net.keys = own
    transport = net.server()
    for name in "ab":
        net.client(name, transport.port, Echo())
        transport.send(name, "one", name.encode())
    assert sorted(replies(transport, 2)) == [("a", "one", b"a"), ("b", "one", b"b")]


@each("name", ["", "..", "z", "../a", "roster.toml"])
def test_certificates_that_are_none_are_not_renewed(keys: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="--renew"):
        deployed.renew(keys, [name])
    deployed.make(tmp_path / "others", ["a"])
    copy = tmp_path / "keys"
    shutil.copytree(keys, copy)
    (copy / "a" / "client.crt").write_bytes((tmp_path / "others" / "a" / "client.crt").read_bytes())
    with pytest.raises(Refused, match="the authority has not signed it"):
        deployed.renew(copy, ["a"])


@each("name", ["", "..", "a/b", ".a", "-a", "a b", "ä", "a" * 65, "server", "authority", "a\n"])
def test_names_that_name_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="--clients"):
        deployed.make(tmp_path / "keys", ["good", name])
    assert not (tmp_path / "keys").exists()


@each("clients", [[], ["a", "a"]])
def test_clients_that_are_none(tmp_path: Path, clients: list[str]) -> None:
    with pytest.raises(Refused, match="--clients"):
        deployed.make(tmp_path / "keys", clients)


KEY = "sha256:" + "0" * 64


@each(
    "text, told",
    [
        ("", "[clients]"),
        ("clients = 3", "[clients]"),
        ("[clients]", "[clients]"),
        ("[client]\na = 'b'", "did you mean 'clients'"),
        ("[clients]\na = 3", "64 hexadecimal digits"),
        (f"[clients]\na = '{KEY}0'", "64 hexadecimal digits"),
        (f"[clients]\n'../a' = '{KEY}'", "at most 64 letters"),
        (f"[clients]\na = '{KEY}'\nb = '{KEY}'", "a key for each client"),
        ("[clients]\na = x", "line 2"),
        (f"[clients]\na = {{ key = '{KEY}', sample = [1, 2, 3] }}", "did you mean 'samples'"),
        (f"[clients]\na = {{ key = '{KEY}', samples = [1, 2] }}", "for training, validation, test"),
        (f"[clients]\na = {{ key = '{KEY}', samples = [1, 2, -3] }}", "for training, validation, test"),
        (f"[clients]\na = {{ key = '{KEY}', samples = 3 }}", "for training, validation, test"),
        ("[clients]\na = { samples = [1, 2, 3] }", "64 hexadecimal digits"),
        ("\ufeff[", "TOML"),
    ],
)
def test_rosters_that_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(Refused, match=re.escape(told)):
        roster.read(path)


def test_a_roster_may_say_how_many_samples_there_are(tmp_path: Path) -> None:
    """What is written by hand stays when clients are added."""
    deployed.make(tmp_path, ["a", "b"])
    path = tmp_path / "server" / roster.FILE
    pinned = roster.read(path)
    path.write_text(f'[clients]\na = {{ key = "{pinned["a"]}", samples = [4, 0, 2] }}\nb = "{pinned["b"]}"\n')
    assert roster.read(path) == pinned
    deployed.make(tmp_path, ["c"])
    assert list(roster.read(path)) == ["a", "b", "c"]
    assert roster.samples(path) == {"a": [4, 0, 2]}


def test_a_roster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a file that exists"):
        roster.read(tmp_path / "roster.toml")


SITE = 'name = "a"\nserver = "localhost:8443"\n'


@pytest.fixture
def home(keys: Path, tmp_path: Path) -> Path:
    """A client's folder, to be changed."""
    for file in (keys / "a").iterdir():
        copy = tmp_path / file.name
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o600)
    return tmp_path / "site.toml"


def test_a_site_as_it_is_written(home: Path) -> None:
    site = SiteFile.read(home)
    assert (site.name, site.server, site.folder) == ("a", "localhost:8443", home.parent / "state")
    assert site.credentials == credentials(home.parent)
    assert (site.data.file, site.data.function, site.data.options) == (None, "data", {})
    assert not any(map(site.leave.allows, ("train_loss", "train", "validation", "test")))


def test_a_site_with_all_it_may_say(home: Path) -> None:
    more = 'folder = "/srv/state"\n[data]\nfile = "x.npz"\noptions = { path = "p", year = 3 }\n'
    home.write_text(SITE + more + '[leave]\nscores = ["test"]\ntrain_loss = true\n')
    site = SiteFile.read(home)
    assert site.folder == Path("/srv/state")
    assert site.data.file == str(home.parent / "x.npz")
    assert site.data.options == {"path": "p", "year": 3}
    allowed = {x: site.leave.allows(x) for x in ("train_loss", "train", "validation", "test", "other")}
    assert allowed == {"train_loss": True, "train": False, "validation": False, "test": True, "other": False}


@each(
    "text, told",
    [
        ("", "name"),
        ('name = "a"', "server"),
        ('name = "a"\nserver = "here"', "HOST:PORT"),
        ('name = "../a"\nserver = "h:1"', "at most 64 letters"),
        (SITE + 'fodler = "x"', "did you mean 'folder'"),
        (SITE + 'folder = ""', "a text that is not empty"),
        (SITE + "folder = 3", "a text"),
        (SITE + "keys = 3", "[keys]"),
        (SITE + '[keys]\nautority = "x"', "did you mean 'authority'"),
        (SITE + '[keys]\nkey = "missing.key"', "a file that exists"),
        (SITE + "[leave]\nscores = true", "a list of some of"),
        (SITE + '[leave]\nscores = ["tset"]', "a list of some of"),
        (SITE + "[leave]\ntrain_loss = 1", "true or false"),
        (SITE + "[data]\noptions = 3", "a table"),
        (SITE + "[data]\nfile = 3", "a text"),
        ("name = x", "line 1"),
    ],
)
def test_sites_that_are_refused(home: Path, text: str, told: str) -> None:
    home.write_text(text)
    with pytest.raises(Refused, match=re.escape(told)):
        SiteFile.read(home)


def test_a_key_that_others_can_read(home: Path) -> None:
    (home.parent / "client.key").chmod(0o640)
    with pytest.raises(Refused, match="chmod 600"):
        SiteFile.read(home)
