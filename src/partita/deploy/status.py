"""The status page of a server: read by a browser on the same machine, and by nobody else."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from partita.core import check
from partita.deploy.board import Board
from partita.engine.store.files import json_text

LOOPBACK = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """Serves a board on loopback from a thread, until it is closed. It only reads."""

    def __init__(self, board: Board, port: int = 0) -> None:
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), _handler(board))
        except (OSError, OverflowError) as error:
            raise check.fail("--status", port, "a port that is free, or 0 for any", str(error)) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _handler(board: Board) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5
        server_version, sys_version = "Partita", ""

        def do_GET(self) -> None:
            """Send the page, or its content as JSON."""
            name, port = self.headers.get("Host", ""), self.connection.getsockname()[1]
            if name not in (
                f"{LOOPBACK}:{port}",
                f"localhost:{port}",
            ):  # a page elsewhere, by a name of its own
                self._send(403, "text/plain", "open this page by its address, 127.0.0.1")
            elif self.path == "/":
                self._send(200, "text/html", board.page())
            elif self.path == "/status.json":
                self._send(200, "application/json", json_text(board.snapshot()))
            else:
                self._send(404, "text/plain", "there is / and /status.json")

        def _send(self, code: int, kind: str, content: str) -> None:
            body = content.encode()
            self.send_response(code)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing: who looks at the page is no event of a run."""

    return Handler
