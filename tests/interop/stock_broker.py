"""A `timeball serve` process for stock clients, with its addresses, and requests of the tests to it.

The delay levels are few, short and all different, so that a message in the wrong level is noticed.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cli.processes import Running

from timeball import Timeball
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.frame import Command, Splitter, decode, encode

LEVELS_S = [1, 2, 3, 4, 5]
BROKER, CLUSTER = "timeball", "DefaultCluster"


class StockBroker:
    """Begin with `start`. After `kill` (SIGKILL) or `stop`, `start` continues with the same data and ports."""

    def __init__(self, data: Path, *options: str) -> None:
        self._data, self._options = data, options
        self._ports = ["--port", "0", "--name-server-port", "0", "--remoting-port", "0", "--grpc-port", "0"]

    def start(self) -> None:
        """Start the broker, and wait until it is ready. All ports are chosen at the first start."""
        levels = " ".join(f"{seconds}s" for seconds in LEVELS_S)
        self._process = Running(
            "serve",
            "--json",
            *self._ports,
            "--data",
            str(self._data),
            "--delay-levels",
            levels,
            "--delay-properties",
            "__STARTDELIVERTIME",  # for Aliyun's client
            *self._options,
        )
        ready = self._process.wait_line(event="ready")
        self.name_server, self.remoting = ready["name_server"], ready["remoting"]
        self.endpoint, self.grpc, self.http = ready["endpoint"], ready["grpc"], ready["http"]
        addresses = (self.endpoint, self.name_server, self.remoting, self.grpc, self.http)
        ports = [address.rpartition(":")[2] for address in addresses]
        options = ("--port", "--name-server-port", "--remoting-port", "--grpc-port", "--http-port")
        self._ports = [word for pair in zip(options, ports, strict=True) for word in pair]

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def stop(self) -> int:
        """Stop the broker as SIGTERM does. Return its exit code."""
        return self._process.end()

    def client(self) -> Timeball:
        """Return a Timeball client that sends and reads columns over the Flight port."""
        scheme = "https" if self.endpoint.startswith("grpc+tls") else "http"
        return Timeball(f"{scheme}://{self.http}", flight=self.endpoint)

    # ---- requests that do not use the stock clients

    def create_topic(self, topic: str, queues: int = 1) -> str:
        """Create a topic, and return its name."""
        with self.client() as ball:
            ball.create_topic(topic, queues)
        return topic

    def now_ms(self) -> int:
        """Return the time of the broker's clock in ms since 1970."""
        with self.client() as ball:
            return int(ball.status()["now_ms"])

    def bodies(self, topic: str) -> list[str]:
        """Return the bodies of all messages in the queues of a topic, none for a topic that does not exist."""
        with self.client() as ball:
            if topic not in ball.topics():
                return []
        return [row["body"].decode() for row in self.rows(topic)]

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return all rows in the queues of a topic, by queue and then by offset, with the columns of the log."""
        with self.client() as ball:
            return [
                row
                for queue, ends in ball.queues(topic).items()
                if ends.max > ends.min
                for batch in ball.read_queue(topic, queue, ends.min, ends.max - ends.min)
                for row in batch.to_pylist()
            ]

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets of a group in a topic by queue."""
        with self.client() as ball:
            return ball.offsets(group, topic)

    def request(self, code: RequestCode, *, body: bytes = b"", **ext: Any) -> Command:
        """Make a remoting request without a client, for a state that its client cannot bring about."""
        host, _, port = self.remoting.rpartition(":")
        command = Command(
            code=code, opaque=1, version=409, ext={k: str(v) for k, v in ext.items()}, body=body
        )
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(encode(command))
            splitter = Splitter()
            while not (frames := splitter.feed(connection.recv(65536))):
                pass
        return decode(frames[0])


@contextmanager
def stock_broker(data: Path, *options: str) -> Iterator[StockBroker]:
    """Run a broker with a data folder and options of `timeball serve`."""
    broker = StockBroker(data, *options)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
