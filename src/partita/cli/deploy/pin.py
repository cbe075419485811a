"""`partita deploy pin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import path
from partita.core import check
from partita.deploy import roster
from partita.deploy.grpc.tls import key_fingerprint


def pin(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="ROSTER", help="roster.toml: a new one, or one that is added to.", parser=path
        ),
    ],
    keys: Annotated[
        list[str], typer.Argument(metavar="NAME=FILE...", help="A client, and the file of its public key.")
    ],
) -> None:
    """Put clients on a roster whose keys are there already, such as those of the SuperNodes of Flower.

    The file of a key is in PEM or in the form of OpenSSH (.pub). Keys that `partita deploy keys` makes are on
    their roster already.

    Example: `partita deploy pin roster.toml north=north.pub south=south.pub`
    """
    known = roster.read(file) if file.exists() else {}
    for text in keys:
        name, equals, key = text.partition("=")
        roster.name("NAME", name)
        if not equals or not Path(key).is_file():
            raise check.fail("NAME=FILE", text, "a name and a file that exists, such as north=north.pub")
        if name in known:
            raise check.fail("NAME=FILE", text, f"a name that is new, or remove its line of {file}")
        try:
            pinned = key_fingerprint(Path(key).read_bytes())
        except ValueError as error:
            allowed = "a public key in PEM or in the form of OpenSSH"
            raise check.fail("NAME=FILE", text, allowed, check.reason(error)) from None
        for other in [client for client, has in known.items() if has == pinned]:
            raise check.fail("NAME=FILE", text, "a key for each client", f"it is the key of {other}")
        known[name] = pinned
    roster.write(file, known)
    typer.echo(f"{file}: {len(known)} clients")
