"""A real node on a free port, with its loop in a separate thread, for tests of edges and clients."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.bounds import BOUND_S

from timeball import Timeball
from timeball.broker.accepting import transacting
from timeball.broker.service import Broker
from timeball.edges.grpc.handlers import receipts
from timeball.edges.remoting.codec.implementation import Codec
from timeball.io.clock import Clock, ManualClock
from timeball.model.config import Settings
from timeball.model.message import Kind
from timeball.node.node import Node
from timeball.schedule import ticker
from timeball.schedule.loaded import LoadBounds

SEGMENT_BYTES = (
    16 * 1024 * 1024
)  # allocated in full by each node, twice: hundreds of tests must not fill a disk

T = TypeVar("T")


class Shortened:
    """Changes that last while a node with them runs."""

    def __init__(self, *changes: tuple[Any, str, Any]) -> None:
        self._changes, self._nodes, self._patch = changes, 0, pytest.MonkeyPatch()

    def begin(self) -> None:
        """Count one more node. The first one makes the changes."""
        if self._nodes == 0:
            for change in self._changes:
                self._patch.setattr(*change)
        self._nodes += 1

    def end(self) -> None:
        """Count one node less. The last one undoes the changes."""
        self._nodes -= 1
        if self._nodes == 0:
            self._patch.undo()


def _check_descriptor(descriptor: int) -> None:
    os.fstat(descriptor)  # a closed descriptor is still an error


# The power stays on: a node syncs twenty times from its start to its end, which is most of what its tests would wait
# for. Tests with CrashFiles and tests/io/test_files.py check that nothing is answered before its sync.
UNSYNCED = Shortened((os, "fdatasync", _check_descriptor), (os, "fsync", _check_descriptor))
# A stopped clock is read once in a second of real time. Here it is read often, so that tests need not wait.
LOOKS = Shortened((ticker, "CLOCK_READ_MS", 10), (transacting, "LOOK_S", 0.01), (receipts, "LOOK_S", 0.01))


class RunningNode:
    """A node that `start` starts and `stop` ends. It may be started again on the same folder and port."""

    def __init__(
        self,
        data: Path,
        clock: Clock | None = None,
        load_bounds: LoadBounds = LoadBounds(),  # noqa: B008  # frozen, so it can be shared
        codec: Codec | None = None,
        **settings: Any,
    ) -> None:
        self.settings = Settings(
            data=data,
            **{
                "port": 0,
                "name_server_port": 0,
                "remoting_port": 0,
                "grpc_port": 0,
                "http_port": 0,
                "segment_bytes": SEGMENT_BYTES,
                **settings,
            },
        )
        self._clock, self._load_bounds, self._codec = clock, load_bounds, codec
        self._shortened = [UNSYNCED, LOOKS] if isinstance(clock, ManualClock) else [UNSYNCED]
        self.node: Node

    def start(self) -> None:
        """Start the node, with its loop in a new thread."""
        for shortened in self._shortened:
            shortened.begin()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="node-loop", daemon=True)
        self._thread.start()
        self.node = Node(self.settings, self._clock, load_bounds=self._load_bounds, codec=self._codec)
        self.run(self.node.start())
        self.settings = replace(self.settings, port=self.node.port, http_port=self.node.http_port)

    def stop(self) -> None:
        """Stop the node and end its loop."""
        try:
            self.run(self.node.stop())
        finally:
            self.end_loop()

    def end_loop(self) -> None:
        """End the event loop of a node that has stopped. Callbacks that are still due do not run."""
        for shortened in self._shortened:
            shortened.end()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(BOUND_S)
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the node's loop. Returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(BOUND_S)

    def messages_since(self, first_seq: int) -> list[int]:
        """Return the sequence numbers of the rows from `first_seq` on, without the broker's own META rows."""
        reader, end_seq = self.broker.log.reader, self.broker.log.writer.next_seq
        eventually(lambda: reader.next_seq >= end_seq, "durable rows")
        kinds = [kind for kind in Kind if kind is not Kind.META]
        return [seq for batch in reader.rows(first_seq, end_seq, kinds) for seq in batch["seq"].to_pylist()]

    @property
    def broker(self) -> Broker:
        return self.node.broker

    @property
    def endpoint(self) -> str:
        return f"grpc://127.0.0.1:{self.settings.port}"

    @property
    def http_endpoint(self) -> str:
        scheme = "https" if self.settings.tls_cert else "http"
        return f"{scheme}://127.0.0.1:{self.settings.http_port}"

    def client(self, **options: Any) -> Timeball:
        """Return a client over HTTP and Flight."""
        flight = self.endpoint.replace("grpc:", "grpc+tls:") if self.settings.tls_cert else self.endpoint
        return Timeball(self.http_endpoint, flight=flight, **options)


@contextmanager
def running_node(data: Path, clock: Clock | None = None, **settings: Any) -> Iterator[RunningNode]:
    """Run a node for the length of a block."""
    running = RunningNode(data, clock, **settings)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def eventually(condition: Callable[[], object], description: str) -> None:
    """Wait for a condition that other threads bring about."""
    pause = threading.Event()
    for _ in range(BOUND_S * 100):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"did not happen in {BOUND_S} s: {description}")
