"""A proxy that holds the broker's answers back and then cuts the connection: the client loses these answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class CuttingProxy:
    """Listens on its own port and passes bytes on, with a thread for each direction of each connection."""

    def __init__(self, scheme: str, broker_port: int) -> None:
        self._broker_port = broker_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self.endpoint = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Hold back all answers of the broker from now on."""
        self._passes.clear()

    def cut(self) -> None:
        """Close all connections: the answers that were held back are lost. Later connections are passed on."""
        cut_sockets, self._sockets = self._sockets, []
        for connection in cut_sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._passes.set()

    def close(self) -> None:
        """Accept no further connection, and close all."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        """Connect each client to the broker, until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                broker = socket.create_connection(("127.0.0.1", self._broker_port))
                self._sockets += [client, broker]
                for source, target, is_answer in ((client, broker, False), (broker, client, True)):
                    threading.Thread(
                        target=self._pass_on, args=(source, target, is_answer), daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        """Copy bytes from one socket to the other until one of them is closed, and then close both."""
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if is_answer:
                    self._passes.wait()
                target.sendall(data)
        for connection in (source, target):
            connection.close()


@contextlib.contextmanager
def cutting_proxy(endpoint: str) -> Iterator[CuttingProxy]:
    """A proxy before the broker at this endpoint, closed at the end of the block."""
    proxy = CuttingProxy(endpoint.partition("://")[0], int(endpoint.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
