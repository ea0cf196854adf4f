"""A TCP proxy in front of the broker that records the bytes of clients, for golden files.

It records only the bytes that clients send. It forwards answers without recording them. The broker must have the
address of the proxy as its advertised address (`--advertise`). Otherwise clients would connect to the broker itself.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Recorder:
    """A proxy that listens at `address`. `forward_to` ("host:port") must be set before the first connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.forward_to = ""
        self._streams: list[bytearray] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def streams(self) -> list[bytes]:
        """Return the bytes that each connection has sent so far, in the order in which they were opened."""
        return [bytes(stream) for stream in self._streams]

    def close(self) -> None:
        """Close all connections, and wait until the threads have ended."""
        for connection in [self._listener, *self._open]:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side has already ended it
                pass
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # the listener is closed
                return
            host, _, port = self.forward_to.rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._open += [client, server]
            recorded = bytearray()
            self._streams.append(recorded)
            for source, target, copy in ((client, server, recorded), (server, client, None)):
                thread = threading.Thread(target=_forward, args=(source, target, copy), daemon=True)
                self._threads.append(thread)
                thread.start()


def _forward(source: socket.socket, target: socket.socket, copy: bytearray | None) -> None:
    """Forward bytes until one side ends its connection, then end both. Append the bytes to `copy`, too."""
    try:
        while data := source.recv(65536):
            if copy is not None:
                copy += data
            target.sendall(data)
    except OSError:  # one side has ended its connection
        pass
    for connection in (source, target):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has already ended
            pass


@contextmanager
def recording() -> Iterator[Recorder]:
    """Run a recorder during a block."""
    recorder = Recorder()
    try:
        yield recorder
    finally:
        recorder.close()
