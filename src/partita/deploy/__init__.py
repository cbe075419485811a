"""Real clients: the experiment that was simulated, among clients that hold their own samples and states."""

from partita.deploy.client import Client, Site
from partita.deploy.local import Local
from partita.deploy.server import serve
from partita.deploy.transport import Arrival, Handler, Transport

__all__ = ["Arrival", "Client", "Handler", "Local", "Site", "Transport", "serve"]
