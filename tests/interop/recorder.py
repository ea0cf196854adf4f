"""A TCP proxy in front of the broker that records the bytes of clients, for golden files.

It records only bytes to the broker, and passes answers on. The broker must tell its clients the proxy's address
(`--advertise`). Otherwise they soon connect past it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Recorder:
    """Listens at once; forwards to `forward_to`, which may be named later."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.forward_to = ""
        self._streams: list[bytearray] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def streams(self) -> list[bytes]:
        """What each connection has sent so far, in the order they were opened."""
        return [bytes(stream) for stream in self._streams]

    def close(self) -> None:
        for connection in [self._listener, *self._open]:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # already ended from the other side
                pass
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            host, _, port = self.forward_to.rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._open += [client, server]
            kept = bytearray()
            self._streams.append(kept)
            for source, target, tee in ((client, server, kept), (server, client, None)):
                thread = threading.Thread(target=_pump, args=(source, target, tee), daemon=True)
                self._threads.append(thread)
                thread.start()


def _pump(source: socket.socket, target: socket.socket, tee: bytearray | None) -> None:
    try:
        while data := source.recv(65536):
            if tee is not None:
                tee += data
            target.sendall(data)
    except OSError:  # one side is gone, so the other goes too
        pass
    for connection in (source, target):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # gone before
            pass


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    try:
        yield recorder
    finally:
        recorder.close()
