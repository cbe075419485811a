"""Reads the states of clients, and asks the door for something."""

import os
import socket
import struct
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say what this process can read, and what the door answers."""
    folder = Path(str(message.content["where"]["folder"]))
    try:
        files = [folder / name for name in os.listdir(folder)]
        read = f"{len(files)} files, {sum(len(path.read_bytes()) for path in files)} bytes"
    except OSError as error:
        read = type(error).__name__
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(10)
        try:
            door.connect(str(context.node_config["socket"]))
            door.sendall(struct.pack("<Q", 7) + b"nothing")
            door_says = f"{len(door.recv(1 << 16))} bytes or more"
        except OSError as error:
            door_says = type(error).__name__
    found = {"user": os.getuid(), "read": read, "door": door_says}
    return Message(RecordDict({"found": ConfigRecord(found)}), reply_to=message)
