"""Nodes that hang: one whose process is stopped, and one that takes the batches of a stream and answers none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.flight as flight


@contextmanager
def stopped_node() -> Iterator[str]:
    """The address of a node whose process is stopped: its system accepts connections, and no answer comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


class Unanswering(flight.FlightServerBase):
    """Opens each stream, reads its schema, and then does nothing until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.streams, self.go_on = 0, threading.Event()

    def do_exchange(
        self, _context: object, _descriptor: object, reader: flight.MetadataRecordBatchReader, _writer: object
    ) -> None:
        """Read the schema, which opens the stream, and wait."""
        assert reader.schema
        self.streams += 1
        self.go_on.wait()


@contextmanager
def unanswering_node() -> Iterator[Unanswering]:
    """An Unanswering node in this block. At the end its streams go on, so that it can stop."""
    with Unanswering() as node:
        yield node
        node.go_on.set()
