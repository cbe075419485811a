"""A cohort cut into shares, each computed by a worker: another process of this machine, or of a cluster.

The driver keeps the server, the clients' states and the checkpoint. A worker keeps nothing that lasts: it is
a function of a stage, a program by its name, and a share. So a worker that dies costs the time of its share.
"""
