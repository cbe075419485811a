"""Other packages on the same work: measured where they are installed, never required."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from partita.core import check


class Peer(NamedTuple):
    """Another package.

    label    its name in tables
    needs    the modules that it needs
    adapter  our module that has it run a job
    """

    label: str
    needs: tuple[str, ...]
    adapter: str

    @property
    def installed(self) -> bool:
        """Whether it can be imported; nothing of it is."""
        return all(find_spec(module) is not None for module in self.needs)


PEERS = {
    "pfl": Peer("pfl-research", ("pfl",), "adapters.pfl"),
    "fedjax": Peer("FedJAX", ("fedjax",), "adapters.fedjax"),
    "blazefl": Peer("BlazeFL", ("blazefl", "tqdm"), "adapters.blazefl"),
    "fluke": Peer("fluke", ("fluke",), "adapters.fluke"),
    "flwr": Peer("Flower", ("flwr", "ray"), "adapters.flwr"),
}


def choose(text: str) -> tuple[list[str], list[str]]:
    """Return the peers to measure, and those that were asked for but are not installed.

    `text` is "installed", "none" or names with commas between them.
    """
    if text == "none":
        return [], []
    names = list(PEERS) if text == "installed" else [_peer(word.strip()) for word in text.split(",")]
    installed = [name for name in dict.fromkeys(names) if PEERS[name].installed]
    return installed, [name for name in dict.fromkeys(names) if name not in installed]


def _peer(word: str) -> str:
    name: str = check.choice("--peers", word, ("installed", "none", *PEERS))
    if name not in PEERS:
        raise check.fail("--peers", word, "this word alone, or the names of peers")
    return name
