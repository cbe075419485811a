"""`partita deploy keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import path
from partita.core import check
from partita.deploy import keys as deployed

PORT = 8443


def keys(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="New folder for the keys, or one to which clients are added.", parser=path
        ),
    ],
    clients: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Names of the clients that get keys.")
    ] = None,
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
    renew: Annotated[
        str | None,
        typer.Option(
            metavar="server,A,B",
            help="Whose certificates to make anew, of the keys that they have: 'server', or clients.",
        ),
    ] = None,
) -> None:
    """Make the keys of a federation: an authority, a certificate for the server and one for each client.

    DIR/server goes to the server's machine, DIR/NAME to the machine of client NAME, and DIR/authority stays
    where it is: who has it can admit clients. All files can be read by their owner alone.

    The same command with other names adds clients. Keys are pinned by server/roster.toml: a certificate alone
    admits nobody. With --renew, certificates that will end are replaced, and nothing else.

    Example: `partita deploy keys keys --clients north,south,west --host fed.example.org`
    """
    if (clients is None) == (renew is None):
        raise check.fail(
            "--clients", clients, "either --clients for new keys, or --renew for new certificates"
        )
    if renew is not None:
        if host:
            allowed = "no --host: a certificate that is renewed keeps the names that it has"
            raise check.fail("--host", ",".join(host), allowed)
        for file in deployed.renew(folder, _names(renew), days=days):
            typer.echo(f"{file}      valid for {days} days: put it in the place of the one on its machine")
        typer.echo(
            "Keys and roster stay as they are. A server reads it when it starts: begin again with --resume."
        )
        return
    new = _names(clients or "")
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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
