"""The client: it takes the bytes of a request to the client process of this machine, and its reply back.

It needs flwr and nothing else: data, model and personal parameters are in the process behind the socket,
which `partita deploy client` runs, best as another user. The SuperNode says where that is:

    flower-supernode ... --node-config 'socket="/run/partita/north.sock"'
"""

import socket
import struct
import time

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

LENGTH = struct.Struct("<Q")
LARGEST = 1 << 32  # bytes of a reply
COMES_BACK = 20.0  # seconds in which a client process that has died may be there again
UNKNOWN = 0  # Flower's code for an error of no other kind

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Return the reply of the client process, or an error, after which the server asks again."""
    path = str(context.node_config.get("socket", ""))
    try:
        body = message.content["request"]["body"].data
        reply = asked(path, body, time.monotonic() + COMES_BACK)
    except (OSError, KeyError) as error:
        reason = f"no reply from the client process at {path!r} ({type(error).__name__}: {error})"
        return Message(Error(UNKNOWN, reason), reply_to=message)
    array = Array("uint8", (len(reply),), "partita", reply)
    return Message(RecordDict({"reply": ArrayRecord({"body": array})}), reply_to=message)


def asked(path: str, body: bytes, end: float) -> bytes:
    """Ask the client process until it answers; it may die meanwhile and come back."""
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(path)
                door.sendall(LENGTH.pack(len(body)))
                if body:  # else the answer may be there already, and the door closed
                    door.sendall(body)
                (length,) = LENGTH.unpack(received(door, LENGTH.size))
                if length > LARGEST:
                    raise OSError(f"a reply of {length} bytes")
                return received(door, length)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def received(door: socket.socket, length: int) -> bytes:
    """Return so many bytes of a connection."""
    pieces = []
    while length:
        piece = door.recv(min(1 << 20, length))
        if not piece:
            raise ConnectionError("the connection was closed")
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
