"""What a run over many GPUs would gain, computed from measured bytes and times, and a check by simulation.

    python bench/scaling.py table                          # rounds per second for 1 to 1000 GPUs
    python bench/scaling.py draw --out docs/images/scaling.svg
    python bench/scaling.py simulate --workers 2 4 8       # real workers that sleep instead of computing
    python bench/scaling.py measure --out costs.json       # what the driver of this machine costs
    python bench/scaling.py shares --device cuda           # what shares of 1, 2, 4, ... clients cost
    python bench/scaling.py table --costs costs.json

A cohort of n clients is cut into W shares, one for each GPU. The seconds of a round add up:

    T(W) = max(m c, floor) + p + B / link + W s + R,     m = ⌈n / W⌉

c and floor are a GPU's, p is the copy of a result that each worker makes, B the bytes that cross the driver's
link, s the driver's work for a share and R that for a round. `Costs` has all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import simulated
from drawing import speedup as drawing
from partita.cli.bench.measure import rounds as measured_rounds
from partita.cli.bench.workloads import METHODS, WORKLOADS
from partita.core import check
from partita.core.process import cores, keep_freed_memory
from partita.engine.store.output import new_page
from partita.engine.workers import crew as crews
from partita.report import write_whole

NODE = 8  # GPUs of a machine; the driver is on the first one
GBIT = 1e9 / 8  # bytes per second
COHORT = 1000
GPUS = (1, 2, 4, 8, 16, 64, 256, 1000)
LINKS = (25.0, 100.0)  # Gbit/s
DEFAULT = ("logistic", "leaf_cnn", "resnet20")
TITLES = {
    "logistic": "logistic regression",
    "leaf_cnn": "CNN of LEAF",
    "resnet20": "ResNet-20",
    "transformer": "transformer",
}
SECONDS = 1.0  # that a simulation of short rounds is timed
SIMULATED = 16  # clients whose deltas all come back in a simulation
WAYS = {
    "sums": "each share sends the sum of its deltas",
    "deltas": "each share sends all of its deltas",
    "states": "sums, and each client has a personal model, which travels in both directions",
}


# ---- the model


class Costs(NamedTuple):
    """What a workload costs on GPUs, and its rounds on a driver.

    client   seconds of a client's local work, in a share of many
    floor    seconds that a share takes at least, however small
    model    bytes of the model, and so of a delta and of a sum of deltas
    message  seconds of the driver for a share, without its tensors: pack, send, receive
    sum      seconds of the driver for the sum of a share: copy it, add it up
    row      seconds of the driver for a delta: copy it to its place, screen it, average it
    state    seconds of the driver for a client state of the model's size: out and back
    place    seconds of a worker to place a sum where the driver reads it
    place_row
             seconds of a worker to place a delta or a state, among others
    fixed    seconds of the driver for a round: place the model, take the server's step
    each     seconds of the driver for each client of a cohort: draw it, cut, keep its metrics
    host     seconds of a worker's core for a share: unpack, screen, add up, pack. They are part of what was
             measured on GPUs, and count where clients sleep
    """

    client: float
    floor: float
    model: int
    message: float = 0.0
    sum: float = 0.0
    row: float = 0.0
    state: float = 0.0
    place: float = 0.0
    place_row: float = 0.0
    fixed: float = 0.0
    each: float = 0.0
    host: float = 0.0


def terms(costs: Costs, gpus: int, clients: int, link: float, way: str = "sums") -> dict[str, float]:
    """Return the seconds of a round by what they are spent on; `link` is in bytes per second.

    Up to `NODE` GPUs are beside the driver and share memory with it. All other machines receive the model
    once each from the driver, and each of their shares sends its result to the driver.
    """
    shares = min(gpus, clients)
    most = -(-clients // shares)
    work = most * costs.client
    elsewhere = max(0, shares - NODE)
    rows = clients * elsewhere / shares  # clients whose deltas and states cross the link
    machines = -(-shares // NODE) - 1
    up = elsewhere if way != "deltas" else rows
    crossing = costs.model * (machines + up + (2 * rows if way == "states" else 0))
    placed = most if way != "sums" else 0
    own = clients * (costs.row if way == "deltas" else costs.state if way == "states" else 0.0)
    return {
        "local work": work if work >= costs.floor else 0.0,
        "launches": costs.floor if work < costs.floor else 0.0,
        "copies": (costs.place if way != "deltas" else 0.0) + placed * costs.place_row,
        "link": crossing / link,
        "driver": shares * (costs.message + (costs.sum if way != "deltas" else 0.0)) + own,
        "round": costs.fixed + clients * costs.each,
    }


def seconds(costs: Costs, gpus: int, clients: int, link: float, way: str = "sums") -> float:
    """Return T(W)."""
    return sum(terms(costs, gpus, clients, link, way).values())


def bottleneck(costs: Costs, gpus: int, clients: int, link: float, way: str = "sums") -> str:
    """Return what most of a round's seconds are spent on."""
    found = terms(costs, gpus, clients, link, way)
    return max(found, key=lambda name: found[name])


def speedup(costs: Costs, gpus: int, clients: int, link: float, way: str = "sums") -> float:
    """Return T(1) / T(W)."""
    return seconds(costs, 1, clients, link, way) / seconds(costs, gpus, clients, link, way)


def best(costs: Costs, clients: int, link: float, way: str = "sums", most: int = 1000) -> int:
    """Return the number of GPUs, up to `most`, with the shortest round."""
    return min(range(1, most + 1), key=lambda gpus: seconds(costs, gpus, clients, link, way))


# ---- costs: of GPUs from docs/performance.md, of the driver from `measure`

STEPS_PER_SECOND = {"logistic": 1_670_476, "leaf_cnn": 8_656, "resnet20": 1_559, "transformer": 1_964}
"""Client steps per second of whole rounds on an H200: "Measured" in docs/performance.md. That of logistic
regression is of cohorts of 1,000, the others are of cohorts of 32 and 16."""

FLOORS = {"logistic": 0.0045, "leaf_cnn": 10 / 467, "resnet20": 10 / 97, "transformer": 10 / 97}
"""Seconds of the smallest share, from the same page: those of a round of 100 clients of logistic regression,
else the steps of one client in the textbook loop, which launches kernel by kernel. Recorded steps of a few
clients take less, so that these are upper bounds."""

DRIVER = Path(__file__).with_name("scaling_costs.json")
"""What `measure` found on two cores of an AMD EPYC, of which one copied 9.0 GB/s."""


def known_costs(name: str, changes: Mapping[str, Mapping[str, Any]]) -> Costs:
    """Return what is known of a workload, with what a file says instead."""
    of_gpu = {"client": WORKLOADS[name].on("cuda").steps / STEPS_PER_SECOND[name], "floor": FLOORS[name]}
    found: dict[str, Any] = {**of_gpu, **read_costs(DRIVER)[name], **changes.get(name, {})}
    return Costs(**{k: found[k] for k in Costs._fields if k in found})


def read_costs(path: Path | None) -> dict[str, dict[str, Any]]:
    """Read a file of costs: by workload, any fields of `Costs`; others are ignored."""
    if path is None:
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    unknown = [name for name in found if name not in STEPS_PER_SECOND]
    if unknown:
        raise check.fail("--costs", unknown[0], f"workloads: {', '.join(STEPS_PER_SECOND)}")
    return dict(found)


# ---- commands


def table(options: argparse.Namespace) -> None:
    """Print what so many GPUs would give: rounds per second, speedup, efficiency, what takes most time."""
    costs = {name: known_costs(name, options.changes) for name in options.workloads}
    for way in options.ways:
        for link in options.links:
            print(f"\nCohorts of {options.cohort:,}, {link:g} Gbit/s: {WAYS[way]}\n")
            print(f"| GPUs | {' | '.join(TITLES[name] for name in costs)} |")
            print("| ---: |" + " --- |" * len(costs))
            for gpus in options.gpus:
                cells = [cell(c, gpus, options.cohort, link * GBIT, way) for c in costs.values()]
                print(f"| {gpus:,} | {' | '.join(cells)} |")
            found = [best(c, options.cohort, link * GBIT, way, max(options.gpus)) for c in costs.values()]
            print(f"| fastest | {' | '.join(f'{gpus} GPUs' for gpus in found)} |")


def cell(costs: Costs, gpus: int, cohort: int, link: float, way: str) -> str:
    """Return for example '2.7/s, 3.2×, 79 %, local work'."""
    gain, most = speedup(costs, gpus, cohort, link, way), bottleneck(costs, gpus, cohort, link, way)
    speed = 1 / seconds(costs, gpus, cohort, link, way)
    return f"{_digits(speed)}/s, {_digits(gain)}×, {_digits(100 * gain / gpus)} %, {most}"


def _digits(x: float) -> str:
    """Return a number with two digits, or those before the point."""
    return f"{x:,.0f}" if x >= 9.95 else f"{x:.2g}"


def draw(options: argparse.Namespace) -> None:
    """Draw the speedup over the number of GPUs."""
    target = new_page("--out", options.out or "scaling.svg")
    most, link, way = max(options.gpus), options.links[-1] * GBIT, options.ways[0]
    gpus = sorted({round(most ** (i / 60)) for i in range(61)})
    curves = {}
    for name in options.workloads:
        costs = known_costs(name, options.changes)
        curves[TITLES[name]] = [speedup(costs, count, options.cohort, link, way) for count in gpus]
    write_whole(target, drawing.svg(gpus, curves))
    print(f"wrote {target}")


def measure(options: argparse.Namespace) -> None:
    """Print or write what the driver of this machine costs, as JSON."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with crews.staying():
        few, many = (simulated.rounds("logistic", 1, n, "sums", 0.0, 0.0, 30)[1] for n in (16, COHORT))
        each = max(0.0, (many - few) / (COHORT - 16))
        for name in options.workloads:
            pieces = simulated.pieces(name)
            overhead = simulated.rounds(name, 1, 2, "sums", 0.0, 0.0, 20)[1]
            fixed = max(0.0, overhead - pieces.place - pieces.message - pieces.take)
            taken, overhead = simulated.rounds(name, 2, 2, "sums", 0.0, 0.0, 20)  # one client for each
            found[name] = {**pieces._asdict(), "fixed": fixed, "each": each, "host": taken - overhead}
            found[name] = {k: v if k == "model" else float(f"{v:.3g}") for k, v in found[name].items()}
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    speed = simulated.copied_bytes_per_second()
    print(f"a core copies {speed / 1e9:.1f} GB/s", file=sys.stderr)


def simulate(options: argparse.Namespace) -> None:
    """Print what the model predicts for processes of this machine, and what they take."""
    if "states" in options.ways:
        raise check.fail("--ways", "states", "sums or deltas: simulated clients keep no state")
    torch.set_num_threads(1)
    print("| workload | what comes back | workers | asleep | beside, predicted | beside, measured | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for workers in options.workers:
        with crews.staying():
            for name in options.workloads:
                for way in options.ways:
                    costs = known_costs(name, options.changes)
                    line = compared(name, costs, workers, options.cohort, way, options.rounds)
                    print(f"| {TITLES[name]} | {way} | {workers} | {line} |", flush=True)


def compared(name: str, costs: Costs, workers: int, clients: int, way: str, least: int) -> str:
    """Simulate a few rounds, and return their seconds beside those that the model predicts.

    Where sums come back, each client stands for all clients of its share, so that the sums have their size
    and this machine is not busy with a thousand deltas; else `SIMULATED` clients stand for all.
    """
    cohort = max(2, workers) if way == "sums" else SIMULATED
    costs = standing_for(costs, clients, cohort, workers)
    predicted = here(costs, workers, cohort, way, cores())
    count = max(least, math.ceil(SECONDS / predicted))
    measured, _ = simulated.rounds(name, workers, cohort, way, costs.client, costs.floor, count)
    asleep = max(costs.floor, -(-cohort // workers) * costs.client)
    times = [f"{1e3 * t:,.1f} ms" for t in (asleep, predicted - asleep, measured - asleep)]
    return " | ".join([*times, f"{measured / predicted:.2f}"])


def standing_for(costs: Costs, clients: int, cohort: int, workers: int) -> Costs:
    """Return costs with which a share of a small cohort takes as long as one of all clients."""
    most, fewer = -(-clients // workers), -(-cohort // workers)
    return costs._replace(client=costs.client * most / fewer)


def here(costs: Costs, workers: int, cohort: int, way: str, processors: int) -> float:
    """Return the seconds of a round whose workers share memory and a few cores with the driver.

    There is no link. What workers do themselves, beside sleeping, waits for a core.
    """
    found, crowd = terms(costs, workers, cohort, float("inf"), way), max(1.0, workers / processors)
    return sum(found.values()) - found["copies"] + crowd * (found["copies"] + costs.host)


def shares(options: argparse.Namespace) -> None:
    """Print the seconds of a round in one process by the number of clients: those that a share would take."""
    print("| workload | clients | ms a round | client steps per second |")
    print("| --- | ---: | ---: | ---: |")
    for name in options.workloads:
        for clients in options.clients:
            changes = {"cohort": clients, "clients": clients, "rounds": options.rounds}
            work = WORKLOADS[name].on(options.device)._replace(**changes)
            how = options.device, options.executor, "tf32"
            taken = statistics.median(measured_rounds(work, work.data(), METHODS["fedavg"], *how)[0])
            speed = clients * work.steps / taken
            print(f"| {TITLES[name]} | {clients} | {1e3 * taken:.2f} | {speed:,.0f} |", flush=True)


COMMANDS = {"table": table, "draw": draw, "measure": measure, "simulate": simulate, "shares": shares}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--workloads", nargs="+", default=list(DEFAULT), choices=list(STEPS_PER_SECOND))
    parser.add_argument("--ways", nargs="+", default=["sums", "deltas"], choices=list(WAYS))
    parser.add_argument("--cohort", type=int, default=COHORT)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--links", type=float, nargs="+", default=list(LINKS), help="Gbit/s of the driver")
    parser.add_argument("--costs", type=Path, help="a JSON file: by workload, fields of Costs")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="to be timed")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--executor", default="graph")
    parser.add_argument("--out", type=Path, help="the file that draw or measure writes")
    options = parser.parse_args(arguments)
    try:
        options.changes = read_costs(options.costs)
        COMMANDS[options.command](options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    keep_freed_memory()  # as the program `partita` and its workers do
    main()
