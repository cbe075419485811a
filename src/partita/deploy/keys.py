"""Keys of a federation: an authority, a certificate for the server and one for each client, and the roster.

DIR/authority/   ca.key, which makes further certificates and never leaves; ca.crt
DIR/server/      server.key, server.crt, ca.crt, roster.toml        for the server's machine
DIR/NAME/        client.key, client.crt, ca.crt, site.toml          for the machine of client NAME
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partita.core import check
from partita.deploy import roster, site
from partita.deploy.folder import make_private, write_private
from partita.deploy.grpc.tls import fingerprint, library
from partita.engine.store.files import sync_folder

LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY = "authority"
SERVER = "server"
DAYS = 825
"""Days that certificates are valid; those of the authority for ten years."""
TEN_YEARS = 3650
EARLIER = datetime.timedelta(hours=1)  # clocks differ


class Identity(NamedTuple):
    """A certificate and its private key."""

    certificate: Any
    key: Any

    def pem(self) -> bytes:
        """Return the certificate as text."""
        encoding = library("cryptography.hazmat.primitives.serialization").Encoding.PEM
        text: bytes = self.certificate.public_bytes(encoding)
        return text

    def key_pem(self) -> bytes:
        """Return the private key as text; it is not encrypted, so its file is its owner's alone."""
        s = library("cryptography.hazmat.primitives.serialization")
        text: bytes = self.key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        return text


def make(
    folder: Path, clients: Sequence[str], hosts: Sequence[str] = (), *, port: int = 8443, days: int = DAYS
) -> list[str]:
    """Make the keys of new clients, and with the first also those of authority and server.

    Nothing that is there is replaced, so that clients may join a federation later. Returns the names of
    all clients of the roster.
    """
    names = [roster.name("--clients", name) for name in clients]
    if len(set(names)) < len(names) or not names:
        raise check.fail("--clients", ",".join(clients), "names, each once, such as a,b,c")
    for reserved in {AUTHORITY, SERVER} & set(names):
        raise check.fail("--clients", reserved, "another name: a folder of this name holds other keys")
    check.integer("--days", days, low=1, high=TEN_YEARS)
    path = folder / SERVER / roster.FILE
    known = dict(roster.read(path)) if path.exists() else {}
    for name in names:
        if name in known or (folder / name).exists():
            advice = (
                f"a name that is new, or remove {folder / name} and its line of {path} to make another key"
            )
            raise check.fail("--clients", name, advice, "it has a key already")
    address = f"{hosts[0] if hosts else 'localhost'}:{port}"
    if (folder / AUTHORITY).exists():
        if hosts:
            allowed = "no --host: the server of this folder has its certificate already"
            raise check.fail("--host", ",".join(hosts), allowed)
        authority = _stored(folder / AUTHORITY)
        address = site.server_of_others(folder, known) or address
    else:
        authority = _authority()
        _write(folder / AUTHORITY / "ca.key", authority.key_pem())
        _write(folder / AUTHORITY / "ca.crt", authority.pem())
        server = _signed(authority, "server", days, [*hosts, *LOOPBACK], of_server=True)
        _write(folder / SERVER / "server.key", server.key_pem())
        _write(folder / SERVER / "server.crt", server.pem())
        _write(folder / SERVER / "ca.crt", authority.pem())
    for name in names:
        client = _signed(authority, name, days, [])
        _write(folder / name / "client.key", client.key_pem())
        _write(folder / name / "client.crt", client.pem())
        _write(folder / name / "ca.crt", authority.pem())
        _write(folder / name / site.FILE, site.template(name, address).encode())
        known[name] = fingerprint(client.pem())
    roster.write(path, known)
    return list(known)


def renew(folder: Path, names: Sequence[str], *, days: int = DAYS) -> list[Path]:
    """Make new certificates of the keys that the server or clients have, and return their files.

    Keys stay, and with them the roster and everybody else's files; each new file goes to its machine.
    """
    check.integer("--days", days, low=1, high=TEN_YEARS)
    if not (folder / AUTHORITY).exists():
        raise check.fail("DIR", str(folder), "the folder of `partita deploy keys` that has the authority")
    if not names:
        raise check.fail("--renew", "", f"'{SERVER}', or names of clients")
    authority = _stored(folder / AUTHORITY)
    files = [folder / name / ("server.crt" if name == SERVER else "client.crt") for name in names]
    renewed = [_renewed(authority, name, file, days) for name, file in zip(names, files)]
    for file, certificate in zip(files, renewed):
        write_private(file, Identity(certificate, None).pem())
    return files


def _renewed(authority: Identity, name: str, file: Path, days: int) -> Any:
    """Return a certificate that is like one of the authority's own, and valid from now."""
    x509, hashes = library("cryptography.x509"), library("cryptography.hazmat.primitives.hashes")
    if Path(name).name != name or not file.is_file():
        raise check.fail("--renew", name, f"'{SERVER}', or a client of this folder", f"there is no {file}")
    try:
        old = x509.load_pem_x509_certificate(file.read_bytes())
        old.verify_directly_issued_by(authority.certificate)
    except Exception as error:  # of the library, which has one of its own for a wrong signature
        reason = f"the authority has not signed it: {check.reason(error)}"
        raise check.fail("--renew", str(file), "a certificate of this folder", reason) from None
    builder = _builder(old.subject, authority.certificate.subject, old.public_key(), days)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    return builder.sign(authority.key, hashes.SHA256())


def _authority() -> Identity:
    """Make a self-signed authority that may sign certificates, but no further authority."""
    x509, hashes = library("cryptography.x509"), library("cryptography.hazmat.primitives.hashes")
    key = _key()
    name = _name("Partita federation")
    builder = _builder(name, name, key.public_key(), TEN_YEARS)
    uses = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        False,
    )
    signs = x509.KeyUsage(**uses, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(signs, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return Identity(builder.sign(key, hashes.SHA256()), key)


def _signed(
    authority: Identity, common: str, days: int, hosts: Sequence[str], of_server: bool = False
) -> Identity:
    """Make a key and a certificate of it for one purpose: to be a server, or to be a client."""
    x509, hashes = library("cryptography.x509"), library("cryptography.hazmat.primitives.hashes")
    key = _key()
    builder = _builder(_name(common), authority.certificate.subject, key.public_key(), days)
    purpose = (
        x509.oid.ExtendedKeyUsageOID.SERVER_AUTH if of_server else x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
    )
    names = [_host(x509, host) for host in hosts] or [x509.DNSName(f"{common}.client.invalid")]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(issuer, critical=False)
    return Identity(builder.sign(authority.key, hashes.SHA256()), key)


def _key() -> Any:
    ec = library("cryptography.hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP256R1())


def _name(common: str) -> Any:
    x509 = library("cryptography.x509")
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _builder(subject: Any, issuer: Any, key: Any, days: int) -> Any:
    x509, now = library("cryptography.x509"), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    until = now + datetime.timedelta(days=days)
    return builder.not_valid_before(now - EARLIER).not_valid_after(until)


def _host(x509: Any, host: str) -> Any:
    """Return a host as a certificate names it: an address or a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise check.fail("--host", host, "a host name or an address", check.reason(error)) from None


def _stored(folder: Path) -> Identity:
    """Read the authority of a federation."""
    x509 = library("cryptography.x509")
    s = library("cryptography.hazmat.primitives.serialization")
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        return Identity(certificate, s.load_pem_private_key((folder / "ca.key").read_bytes(), None))
    except (ValueError, TypeError) as error:
        raise check.fail("DIR", str(folder), "a folder of `partita deploy keys`", str(error)) from None


def _write(path: Path, content: bytes) -> None:
    """Write a new file that its owner alone may read, in a folder of the same kind; it is on disk then."""
    make_private(path.parent)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(path.parent)
