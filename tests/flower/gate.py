"""A gate before a SuperLink: it lets the paths of SuperNodes through, as the document says, and no others."""

from __future__ import annotations

import http.client
import http.server
import ssl
import threading
from pathlib import Path

OPEN = "/v1/fleet/"
MOST = 1 << 26
"""Bytes of a body."""


class Gate:
    """A server of HTTPS that hands what SuperNodes send to a SuperLink."""

    def __init__(self, keys: Path, port: int) -> None:
        inner = ssl.create_default_context(cafile=keys / "ca.crt")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length", 0))
                if not self.path.startswith(OPEN) or size > MOST:
                    self.close_connection = True
                    self.send_response(403)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                link = http.client.HTTPSConnection("127.0.0.1", port, context=inner)
                try:
                    link.request("POST", self.path, self.rfile.read(size), dict(self.headers.items()))
                    reply = link.getresponse()
                    body = reply.read()
                except OSError:  # the SuperLink has ended
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                link.close()

            def log_message(self, *words: object) -> None:
                pass

        outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        outer.load_cert_chain(keys / "server.crt", keys / "server.key")
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = outer.wrap_socket(self.server.socket, server_side=True)
        self.server.daemon_threads = True
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
