"""`partita bench`: whole rounds of Partita against the textbook loop, measured in the same run."""

from partita.cli.bench.measure import Row, by_method, by_workload
from partita.cli.bench.workloads import METHODS, WORKLOADS, Workload

__all__ = ["METHODS", "WORKLOADS", "Row", "Workload", "by_method", "by_workload"]
