"""Certificates on a connection: who a peer is, the settings of gRPC, and why a connection was not made."""

from __future__ import annotations

import hashlib
import importlib
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.core import check
from partita.deploy.grpc import frames

PING, PONG = 10_000, 20_000  # milliseconds: pings of an idle link, and until one that is not answered ends it
HANDSHAKE, ALERT = 5.0, 1.0  # seconds for a handshake, and for what a server says after it
CLOSED = 3  # times that a server has to close a new connection until it is no accident
NEEDED = "the packages grpcio and cryptography (pip install 'partita[deploy]')"


@dataclass(frozen=True)
class Credentials:
    """What a side shows and trusts: files with its certificate and key, and the federation's authority."""

    authority: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return what is in the files: authority, certificate and key."""
        return self.authority.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()


def library(module: str) -> Any:
    """Load a module of the extra; say how to install it where it is missing."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would print about connections we say ourselves
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise check.fail("deploy", module, NEEDED, check.reason(error)) from error


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's public key (PEM), as a roster has it."""
    x509 = library("cryptography.x509")
    return _fingerprint(x509.load_pem_x509_certificate(certificate).public_key())


def key_fingerprint(public_key: bytes) -> str:
    """Return the SHA-256 of a public key in PEM or in the form of OpenSSH, as a roster has it.

    What is no such key is a ValueError.
    """
    serialization = library("cryptography.hazmat.primitives.serialization")
    unknown = library("cryptography.exceptions").UnsupportedAlgorithm
    is_pem = public_key.lstrip().startswith(b"-----BEGIN")
    load = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key
    try:
        return _fingerprint(load(public_key))
    except unknown as error:
        raise ValueError(str(error)) from None


def _fingerprint(key: Any) -> str:
    serialization = library("cryptography.hazmat.primitives.serialization")
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{hashlib.sha256(spki).hexdigest()}"


def address(field: str, text: str) -> tuple[str, int]:
    """Return host and port of 'HOST:PORT'; an address of IPv6 stands in brackets."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise check.fail(field, text, "HOST:PORT, such as '0.0.0.0:8443' or '[::1]:8443'")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, which nobody else can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def settings(**more: int) -> list[tuple[str, int]]:
    """Return gRPC's settings of both sides: small frames, and pings, so that a dead link is noticed."""
    return [
        ("grpc.max_receive_message_length", frames.LARGEST),
        ("grpc.max_send_message_length", frames.LARGEST),
        ("grpc.max_metadata_size", 1 << 14),
        ("grpc.keepalive_time_ms", PING),
        ("grpc.keepalive_timeout_ms", PONG),
        ("grpc.http2.ping_timeout_ms", PONG),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        *((f"grpc.{name}", value) for name, value in more.items()),
    ]


def refusal(host: str, port: int, credentials: Credentials) -> str:
    """Return why a server and this client do not accept each other, by handshakes of our own; '' if unknown.

    gRPC says the same of a server that is down and of one that refuses a certificate.
    """
    context = ssl.create_default_context(cafile=credentials.authority)
    context.load_cert_chain(credentials.certificate, credentials.key)
    context.set_alpn_protocols(["h2"])
    try:
        closed = [_closed(context, host, port) for _ in range(CLOSED)]
    except ssl.SSLCertVerificationError as error:
        return f"the server's certificate is not to be trusted: {error.verify_message}"
    except ssl.SSLEOFError:
        return ""  # the link broke
    except ssl.SSLError as error:
        words = (error.reason or str(error)).replace("_", " ").lower()
        if "alert" in words:
            return f"the server does not accept this client's certificate ({words})"
        return f"the server does not speak TLS as it should ({words})"
    except OSError:
        return ""
    if all(closed):
        return "the server does not accept this client's certificate: it closes the connection"
    return ""


def speaks_tls(host: str, port: int) -> bool:
    """Return whether a server makes a handshake of TLS, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        plain = socket.create_connection((host, port), timeout=HANDSHAKE)
        with plain, context.wrap_socket(plain):
            return True
    except OSError:  # those of TLS too
        return False


def _closed(context: ssl.SSLContext, host: str, port: int) -> bool:
    """Make a handshake; tell whether the server then closes the connection without a word.

    A server that accepts a client says its settings at once. With TLS 1.3 a client's certificate is looked at
    after the handshake, and gRPC says nothing about one that it does not accept.
    """
    plain = socket.create_connection((host, port), timeout=HANDSHAKE)
    with plain, context.wrap_socket(plain, server_hostname=host) as link:
        link.settimeout(ALERT)
        try:
            return not link.recv(1)
        except (TimeoutError, ssl.SSLWantReadError):
            return False
        except (ConnectionError, ssl.SSLEOFError):
            return True
