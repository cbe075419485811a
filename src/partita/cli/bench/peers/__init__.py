"""Other packages on the same work: measured where they are installed, never required."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from partita.core import check


class Peer(NamedTuple):
    """A package, the modules that it needs, and our module that has it run a job."""

    about: str
    needs: tuple[str, ...]
    adapter: str

    @property
    def there(self) -> bool:
        """Whether it can be imported; nothing of it is."""
        return all(find_spec(module) is not None for module in self.needs)


PEERS = {
    "pfl": Peer("pfl-research", ("pfl",), "partita.cli.bench.peers.pfl"),
    "fedjax": Peer("FedJAX", ("fedjax",), "partita.cli.bench.peers.fedjax"),
    "blazefl": Peer("BlazeFL", ("blazefl", "tqdm"), "partita.cli.bench.peers.blazefl"),
    "fluke": Peer("fluke", ("fluke",), "partita.cli.bench.peers.fluke"),
    "flwr": Peer("Flower", ("flwr", "ray"), "partita.cli.bench.peers.flwr"),
}


def choose(text: str) -> tuple[list[str], list[str]]:
    """The peers to measure, and those that were meant but are not installed.

    `text` is "installed", "none" or names with commas between them.
    """
    if text == "none":
        return [], []
    words = [word.strip() for word in text.split(",")]
    names = list(PEERS) if text == "installed" else [_known(word) for word in words]
    there = [name for name in dict.fromkeys(names) if PEERS[name].there]
    return there, [name for name in dict.fromkeys(names) if name not in there]


def _known(word: str) -> str:
    found: str = check.choice("--peers", word, ("installed", "none", *PEERS))
    if found not in PEERS:
        raise check.fail("--peers", word, "alone, or the names of peers")
    return found
