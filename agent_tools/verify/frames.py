"""Messages between the verifier and its workers: one JSON head, then the raw bytes of tensors.

    send(connection, {"do": "call", "entry": "forward", "args": [...]}, [b"...", b"..."])
    head, body = receive(connection, deadline, most=1 << 20)

A frame is 4 bytes length of the head, 8 bytes length of the body, both. What a worker sends is
read as data: bounded before it is read, and nothing in it is executed. Standard library only.
"""

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

HEAD_BYTES = 1 << 20
_LENGTHS = struct.Struct(">IQ")


class ClosedError(Exception):
    """The other side has gone, or does not speak this protocol."""


class LateError(Exception):
    """Nothing arrived before the deadline."""


def send(connection: socket.socket, head: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Send one frame; ClosedError where nobody reads any more."""
    text = json.dumps(head).encode()
    lengths = _LENGTHS.pack(len(text), sum(len(part) for part in parts))
    try:
        connection.sendall(lengths + text)
        for part in parts:
            connection.sendall(part)
    except TimeoutError as error:
        raise LateError from error
    except OSError as error:
        raise ClosedError(str(error)) from error


def receive(
    connection: socket.socket, deadline: float | None = None, *, most: int
) -> tuple[dict[str, Any], bytearray]:
    """The next frame, before ``deadline`` (of ``time.monotonic``), its body at most ``most``."""
    head_length, body_length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    if head_length > HEAD_BYTES or body_length > most:
        raise ClosedError(f"a frame of {head_length} and {body_length} bytes")
    try:
        head = json.loads(bytes(_exactly(connection, head_length, deadline)))
    except ValueError as error:
        raise ClosedError("a frame whose head is no JSON") from error
    if not isinstance(head, dict):
        raise ClosedError("a frame whose head is no object")
    return head, _exactly(connection, body_length, deadline)


def _exactly(connection: socket.socket, length: int, deadline: float | None) -> bytearray:
    held = bytearray(length)
    view, got = memoryview(held), 0
    while got < length:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([connection], [], [], left)[0]:
                raise LateError
        try:
            count = connection.recv_into(view[got:])
        except OSError as error:
            raise ClosedError(str(error)) from error
        if count == 0:
            raise ClosedError("the connection ended")
        got += count
    return held
