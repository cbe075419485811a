"""`partita deploy demo`."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from partita.cli import screen
from partita.cli.common import stoppable
from partita.cli.deploy.options import Quiet, experiment_of
from partita.cli.deploy.server import train
from partita.cli.options import path
from partita.core import check
from partita.deploy import example, keys, roster
from partita.deploy.grpc.tls import Credentials
from partita.engine.store.output import new_folder

FOLDER = Path("partita-deploy-demo")
LEAVE = (("scores = []", 'scores = ["validation", "test"]'), ("train_loss = false", "train_loss = true"))
ENDING = 20.0  # seconds that clients have to end by themselves


def demo(
    out: Annotated[
        Path,
        typer.Option(help="New or empty folder for keys, sites and the run.", parser=path, metavar="PATH"),
    ] = FOLDER,
    quiet: Quiet = False,
) -> None:
    """Run a server and five clients on this machine, over TLS, in under a minute.

    Five offices read handwritten digits, each sees four of the ten. Each is a process of its own with its own
    key, samples and personal output layer; the server sees neither samples nor output layers. All that a real
    deployment has is left in --out: keys, a site.toml for each client, experiment.py, their logs, and the run
    with its page.

    Example: `partita deploy demo --out demo`
    """
    new_folder("--out", out)
    port = _free_port()
    names = keys.make(out / "keys", example.OFFICES, port=port)
    for name in names:
        _allow_scores(out / "keys" / name / "site.toml")
    file = out / "experiment.py"
    file.write_text(inspect.getsource(example))
    server = out / "keys" / "server"
    own = Credentials(*[server / name for name in ("ca.crt", "server.crt", "server.key")])
    pinned = server / roster.FILE
    with stoppable(out / "run"), processes(file, out / "keys", names):
        run = train(
            experiment_of(str(file), None),
            pinned,
            f"127.0.0.1:{port}",
            own,
            out / "run",
            status=0,
            quiet=quiet,
        )
    console = screen.console()
    summary = run.summary()
    console.print(
        f"{summary['algorithm']}: {summary['clients']} clients, {summary['rounds']} rounds; test "
        f"{summary['metric']} of the personal models {summary['test']['personal']:.3f}\n"
        f"Every client in pictures: open [bold]{escape(str(out / 'run' / 'report.html'))}[/bold]\n"
        f"What each client has said: {escape(str(out / 'keys'))}/*/log.txt\n"
        f"Its own model: partita deploy export {escape(str(file))} "
        f"--site {escape(str(out / 'keys' / names[0] / 'site.toml'))} --to {names[0]}.safetensors",
        soft_wrap=True,
    )


def _allow_scores(site: Path) -> None:
    """Let scores leave a site, for the page of the demonstration."""
    text = site.read_text()
    for before, after in LEAVE:
        assert before in text
        text = text.replace(before, after)
    site.write_text(text)


def _free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def processes(file: Path, folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Start a process for each client; they end with the run, or are ended with this command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:
        try:
            for name in names:
                log = files.enter_context(open(folder / name / "log.txt", "wb"))
                command = [sys.executable, "-m", "partita.cli", "deploy", "client", str(file)]
                command += ["--site", str(folder / name / "site.toml"), "--give-up", "2min"]
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            yield
            for process in started:
                process.wait(ENDING)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in started:
                process.terminate()
            codes = [process.wait(ENDING) for process in started]
    if wrong := [name for name, code in zip(names, codes) if code]:
        raise check.fail("client", wrong[0], "", f"it did not end well: see {folder / wrong[0] / 'log.txt'}")
