"""`partita deploy keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import path
from partita.deploy import keys as deployed

PORT = 8443


def keys(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="New folder for the keys, or one to which clients are added.", parser=path
        ),
    ],
    clients: Annotated[str, typer.Option(metavar="A,B,C", help="Names of the clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or address by which clients reach the server; the first one is written to their "
            "site.toml. Repeatable. Default: localhost.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the server, for site.toml.")] = PORT,
    days: Annotated[int, typer.Option(help="Days that the certificates are valid.")] = deployed.DAYS,
) -> None:
    """Make the keys of a federation: an authority, a certificate for the server and one for each client.

    DIR/server goes to the server's machine, DIR/NAME to the machine of client NAME, and DIR/authority stays
    where it is: who has it can admit clients. All files can be read by their owner alone.

    The same command with other names adds clients. Keys are pinned by server/roster.toml: a certificate alone
    admits nobody.

    Example: `partita deploy keys keys --clients north,south,west --host fed.example.org`
    """
    new = [name.strip() for name in clients.split(",") if name.strip()]
    everyone = deployed.make(folder, new, host or (), port=port, days=days)
    typer.echo(f"{folder}/authority   stays here, offline if you can: it admits clients")
    typer.echo(
        f"{folder}/server      to the server's machine: keys, and the roster of {len(everyone)} clients"
    )
    for name in new:
        typer.echo(f"{folder}/{name}      to the machine of client {name}: keys, and site.toml to fill in")
    typer.echo(
        "Next: partita deploy check EXPERIMENT.py\n"
        f"      partita deploy server EXPERIMENT.py --roster {folder}/server/roster.toml "
        f"--listen 0.0.0.0:{port} --out runs/first\n"
        f"      partita deploy client EXPERIMENT.py --site {folder}/{new[0]}/site.toml"
    )
