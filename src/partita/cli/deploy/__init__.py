"""`partita deploy`: an experiment among real clients, over a network."""

from __future__ import annotations

import typer

from partita.cli.deploy import check, client, demo, export, keys, pin, server

app = typer.Typer(
    help="Real clients: the experiment that was simulated, among machines that keep their own data. "
    "Begin with `partita deploy demo`; docs/deploy.md leads from keys to exported models.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def group() -> None:
    """Real clients: the experiment that was simulated, among machines that keep their own data."""


app.command("demo")(demo.demo)
app.command("keys")(keys.keys)
app.command("pin")(pin.pin)
app.command("check")(check.check_)
app.command("server")(server.server)
app.command("client")(client.client)
app.command("export")(export.export)
