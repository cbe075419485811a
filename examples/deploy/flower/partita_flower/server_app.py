"""The server: Partita's own, on Flower's grid. It runs where partita[flower] is installed."""

from flwr.serverapp import ServerApp

from partita.cli.deploy.flower import main

app = ServerApp()
app.main()(main)
