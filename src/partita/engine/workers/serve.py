"""The program of a worker that the driver has spawned: it answers calls until the driver is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from partita.core.process import keep_freed_memory
from partita.engine.workers.host import Host
from partita.engine.workers.messages import Samples, sendable
from partita.engine.workers.wire import Channel, Outbox, Placed, Region, unpack


def serve(handle: int, lifeline: int, threads: int) -> None:
    """Answer the calls that come over a socket. When the lifeline is cut, the driver is gone: end at once."""
    keep_freed_memory()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    channel = Channel(socket.socket(fileno=handle))
    with contextlib.suppress(EOFError, OSError):
        _answer(channel, Host(threads))


def _end_with(lifeline: int) -> None:
    """Wait until the driver's end of a pipe is closed, by its exit or by its death."""
    os.read(lifeline, 1)
    os._exit(0)


def _answer(channel: Channel, host: Host) -> None:
    channel.send("ready")
    common_region = own_region = None
    common = None
    outbox = Outbox()
    while True:
        (kind, *content), handles = channel.receive()
        if kind == "samples":
            key, placed = content
            x, y = unpack(placed.packed(Region.received(handles)))
            host.take_samples(Samples(key, x, y))
        elif kind == "facts":
            channel.send(host.facts())
        elif kind == "stage":
            host.take_stage(content[0])
        elif kind == "common":
            common_region = Region.received(handles, common_region)
            common = content[0].packed(common_region)
        else:
            call, placed = content
            own_region = Region.received(handles, own_region)
            assert common is not None
            reply, result = host.compute(call, common, placed.packed(own_region))
            try:
                placed = outbox.place(result)
            except OSError as error:  # no room for it in memory or on the disk
                reply, placed = reply._replace(error=sendable(error)), Placed(b"", [])
            channel.send((reply, placed), outbox.new_handle())
