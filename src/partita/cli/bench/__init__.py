"""How fast are rounds here? Partita, the textbook loop and peers on the same machine, in the same run."""

from partita.cli.bench.compare import Row, by_method, by_workload
from partita.cli.bench.workloads import METHODS, WORKLOADS, Workload

__all__ = ["METHODS", "WORKLOADS", "Row", "Workload", "by_method", "by_workload"]
