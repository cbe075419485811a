"""Who computes beside this process: other processes of this machine, or those of a Ray cluster."""

from partita.workers.processes import Processes, processes
from partita.workers.ray_cluster import RayCluster, ray
from partita.workers.words import Workers, requested

__all__ = ["Processes", "RayCluster", "Workers", "processes", "ray", "requested"]
