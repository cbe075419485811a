"""Other packages for federated learning on the same work as Partita and the textbook loop, in the same run.

Each package that is installed trains by federated averaging with the cohort, steps, batches and models of
`partita bench`, in a process of its own. Packages that are not installed are named and left out; one that
fails shows its error in place of a number.

    python bench/peers.py
    python bench/peers.py logistic leaf_cnn --peers pfl,flwr --repeats 2
    python bench/peers.py --json > speed.jsonl && python bench/plot.py speed.jsonl --out speed.html
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from adapters import PEERS, choose
from adapters.job import Job
from adapters.process import Speed, Turns
from partita.cli import screen
from partita.cli.bench import WORKLOADS, Row, by_workload
from partita.cli.bench.command import DEVICES, json_line, resolved, table
from partita.core import check
from partita.report.words import shorten, units

REFERENCE = "textbook loop"
LONGEST = 60  # characters of an error in a table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or lines of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--peers", default="installed", help=f"installed, none, or of {','.join(PEERS)}")
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--executor", default="auto", help="how Partita runs its clients")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--repeats", type=int, default=3, help="how many times each is measured, in turn")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per workload")
    options = parser.parse_args(arguments)
    try:
        measure(options)
    except ValueError as error:
        parser.error(str(error))


def measure(options: argparse.Namespace) -> None:
    """Measure all packages on all workloads, in turn."""
    names = [check.choice("workload", name, WORKLOADS) for name in options.workloads or WORKLOADS]
    peers, missing = choose(options.peers)
    device, executor = resolved(options.device, options.executor)
    check.integer("--repeats", options.repeats, low=1)
    turns = {
        name: [
            Turns(peer, Job(name, device, options.precision, WORKLOADS[name].on(device).rounds))
            for peer in peers
        ]
        for name in names
    }

    def take_turn(name: str) -> None:
        for peer in turns[name]:
            _notify(f"{name}: {peer.name}")
            peer.measure()

    rows: dict[str, Row] = {}
    speeds: dict[str, dict[str, Speed]] = {}
    for row in by_workload(names, device, executor, options.precision, options.repeats, _notify, take_turn):
        rows[row.name], speeds[row.name] = row, {peer.name: peer.speed() for peer in turns[row.name]}
        if options.json:
            line = json.loads(json_line(row, device, options.precision, REFERENCE))
            line |= {"peers": {k: asdict(v) for k, v in speeds[row.name].items()}, "not_installed": missing}
            print(json.dumps(line), flush=True)
    if not options.json:
        screen.console().print(table(list(rows.values()), device, REFERENCE))
        _show(rows, speeds, peers, missing)


def _show(
    rows: dict[str, Row], speeds: dict[str, dict[str, Speed]], peers: list[str], missing: list[str]
) -> None:
    """Print the peers that were measured, and name those that are not installed."""
    if peers:
        shown = Table(title="other packages: client steps per second, and Partita's ratio", box=SIMPLE_HEAD)
        shown.add_column("")
        for name in peers:
            shown.add_column(PEERS[name].label, justify="right")
        for name, row in rows.items():
            shown.add_row(name, *(_cell(row, speeds[name][peer]) for peer in peers))
        screen.console().print(shown)
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}")


def _cell(row: Row, speed: Speed) -> str:
    if speed.steps is None:
        return escape(shorten(speed.error or "", LONGEST))
    return f"{units(speed.steps)}, {row.partita / speed.steps:.1f}×"


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
