"""A broker for tests: it runs in a thread of the test's process, in a temporary folder, on free ports.

It is the broker that `timeball serve --clock manual` runs, with all its interfaces. Only the clock differs: time stands
still until the test advances it (broker/virtual_time.py).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import msgspec

from timeball.model import limits, time_parsing
from timeball.model.answers import PageRequest
from timeball.model.bodies import readable_body
from timeball.model.config import Settings
from timeball.model.errors import NotFound, SetupError
from timeball.model.message import decode_properties
from timeball.model.time_parsing import After, At

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball import AsyncTimeball, Timeball
    from timeball.broker.consuming.requests import Receipt, ReceiveRequest
    from timeball.broker.virtual_time import VirtualTime
    from timeball.node.node import Node

T = TypeVar("T")

logger = logging.getLogger(__name__)

GROUP = "test"  # the consumer group of `handle`, unless the test names another one
_LEASE_MS = limits.INVISIBLE_MS_MAX  # a handler acknowledges before the clock moves on
# Free ports, and nothing that only a long run or a power cut needs: no retention, and no sync of each commit.
_SETTINGS = {
    "port": 0, "http_port": 0, "name_server_port": 0, "remoting_port": 0, "grpc_port": 0,
    "segment_bytes": 4 * 1024 * 1024, "durability": "async", "clock": "manual", "retention_ms": 36_500 * limits.DAY_MS,
    "ack_save_ms": 1_000,
}  # fmt: skip


class ScheduledMessage(msgspec.Struct, frozen=True):
    """A pending message. Times are milliseconds since 1970 on the broker's clock."""

    topic: str
    due_ms: int
    id: str | None
    keys: tuple[str, ...]
    tag: str | None

    @property
    def due(self) -> datetime:
        """The due time in UTC."""
        return datetime.fromtimestamp(self.due_ms / 1_000, UTC)


class ReleasedMessage(ScheduledMessage, frozen=True):
    """A message that is in its queue. `attempts` is the number of earlier attempts of a group, as in a `Message`."""

    body: bytes
    properties: dict[str, str]
    attempts: int = 0


Handler = Callable[[ReleasedMessage], object]


class _Delivered(NamedTuple):
    """A message that the broker has leased to a handler. `receipt`: for its answer."""

    handler: Handler
    message: ReleasedMessage
    receipt: Receipt


class VirtualClock:
    """The clock of a `TestBroker`."""

    def __init__(self, broker: TestBroker) -> None:
        self._broker = broker

    @property
    def now_ms(self) -> int:
        """The time in milliseconds since 1970."""
        return self._broker._virtual_time.now_ms

    @property
    def now(self) -> datetime:
        """The time in UTC."""
        return datetime.fromtimestamp(self.now_ms / 1_000, UTC)

    def advance(self, after: After) -> list[ReleasedMessage]:
        """Move the clock by `after`, as "40d" or a timedelta, and return the messages that were released, in order.

        The clock stops at each due time, each end of a lease and each retry on the way. There it releases messages,
        runs pushes, and calls the handlers of `TestBroker.handle`. Raises InvalidDelay and OutOfRange.
        """
        return self._broker._advance(self.now_ms + time_parsing.delay_ms(after))

    def advance_to(self, at: At) -> list[ReleasedMessage]:
        """Move the clock to the time `at`, as `advance` does. Raises InvalidDelay, and OutOfRange for a past time."""
        return self._broker._advance(time_parsing.due_ms(at))


class TestBroker:
    """A broker with a virtual clock. Use it as a context manager, or call `start` and `stop`."""

    __test__ = False  # pytest must not take this class for a test because of its name

    def __init__(self, *, start: At | None = None, data: Path | None = None, **settings: Any) -> None:
        """Prepare a broker, which `start` starts.

        Args:
            start: The time at which its clock begins, in the forms of `Timeball.send`. The default is the real time.
            data: Its folder, which is kept. The default is a temporary folder.
            **settings: Other settings of the broker, such as `idempotency_ms=60_000`.

        Raises:
            InvalidDelay: `start` is not a time.
        """
        self._start_ms = None if start is None else time_parsing.due_ms(start, "start")
        self._data, self._settings = data, settings
        self._handlers: list[tuple[ReceiveRequest, Handler]] = []
        self._released: list[ReleasedMessage] = []
        self._resources = ExitStack()
        self._started: Node | None = None
        self.clock = VirtualClock(self)

    # -- start and stop ------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the broker, and return this object.

        Raises SetupError if it runs already, if the extra `timeball[broker]` is not installed, or for a wrong setting.
        """
        if self._started is not None:
            raise SetupError("this TestBroker runs already")
        try:
            self._start()
        except BaseException as error:  # of any kind: neither the thread nor the folder may stay
            self.stop()
            if isinstance(error, ModuleNotFoundError):
                raise SetupError(f"{error}: a TestBroker needs the extra timeball[broker]") from error
            raise
        return self

    def _start(self) -> None:
        """Start the event loop in a thread, and the broker in it. `stop` releases both, also after an error."""
        from timeball.io.clock import ManualClock, SystemClock
        from timeball.io.files import RealFiles
        from timeball.log.disk_thread import InlineDisk
        from timeball.node.node import Node
        from timeball.schedule.loaded import LoadBounds

        files = None  # those of `data`, which the node opens itself
        if (folder := self._data) is None:
            folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
            files = RealFiles(folder, syncs=False)
        real = SystemClock()
        start_ms = real.wall_ms() if self._start_ms is None else self._start_ms
        clock = ManualClock(start_ms, real.boot_ms(), real.monotonic_ns() // 1_000_000)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="timeball-test-broker", daemon=True)
        thread.start()
        self._resources.callback(self._end_loop, thread)
        settings = Settings(data=folder, **{**_SETTINGS, **self._settings})
        # Bodies stay in memory until they are due, as in a broker those of the next seconds.
        bounds = LoadBounds(ahead_ms=limits.DELAY_MS_MAX) if settings.strategy == "hour_log" else LoadBounds()
        self._started = node = Node(settings, clock, files, load_bounds=bounds, executor=InlineDisk())
        self._run(node.start())
        self._resources.callback(lambda: self._run(node.stop()))

    def stop(self) -> None:
        """Close the clients, stop the broker and remove a temporary folder."""
        try:
            self._resources.close()
        finally:
            self._started = None

    @property
    def _node(self) -> Node:
        if self._started is None:
            raise SetupError("this TestBroker does not run: use it as a context manager, or call start")
        return self._started

    @property
    def _virtual_time(self) -> VirtualTime:
        virtual_time = self._node.broker.virtual_time
        assert virtual_time is not None
        return virtual_time

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _end_loop(self, thread: threading.Thread) -> None:
        """End the event loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the broker's event loop. Returns its result. Raises SetupError if no broker runs."""
        if self._started is None:
            coroutine.close()  # otherwise Python warns that it was never awaited
        self._node  # noqa: B018  # raises if the broker does not run
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # -- addresses and clients -------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The address for `Timeball` and `AsyncTimeball`, and the base URL of the HTTP API."""
        return f"http://127.0.0.1:{self._node.http_port}"

    @property
    def flight(self) -> str:
        """The address of Flight, for columns."""
        return f"grpc://127.0.0.1:{self._node.port}"

    @property
    def ports(self) -> dict[str, int]:
        """The ports by interface: flight, http, grpc, remoting, name_server."""
        edges = self._node.edges
        return {} if edges is None else dict(edges.ports)

    def client(self) -> Timeball:
        """Connect a client over HTTP, which `stop` closes."""
        from timeball import Timeball

        return self._resources.enter_context(Timeball(self.endpoint))

    def async_client(self) -> AsyncTimeball:
        """Make a client for asyncio over HTTP. Use it by `async with`, which closes it."""
        from timeball import AsyncTimeball

        return AsyncTimeball(self.endpoint)

    # -- handlers and time -----------------------------------------------------------------------------------------

    def handle(self, topic: str, handler: Handler, *, group: str = GROUP) -> None:
        """Call `handler` for each message of a topic while the clock advances, in the thread of the test.

        A handler that returns acknowledges the message. A handler that raises gives it back: the message is
        delivered again by the group's retry policy, and becomes a dead letter after its last attempt. `timeball.Retry`
        and `timeball.Dead` have the same effect as in the handler of a `Worker`. Other exceptions are logged.
        """
        from timeball.broker.consuming.requests import ReceiveRequest

        request = ReceiveRequest(group, topic, rows=1, invisible_ms=_LEASE_MS, counts_times=True)
        self._handlers.append((request, handler))

    def _advance(self, target_ms: int) -> list[ReleasedMessage]:
        """Move the clock to `target_ms`, and call handlers on the way. Returns the released messages, in order."""
        first = len(self._released)
        delivered = self._run(self._advance_to_handler(target_ms))
        while delivered is not None:
            failure = _run_handler(delivered)
            # A handler may have advanced the clock further.
            target_ms = max(target_ms, self.clock.now_ms)
            delivered = self._run(self._settle_and_advance(delivered.receipt, failure, target_ms))
        return self._released[first:]

    # The coroutines below run on the broker's event loop, and a handler runs in the thread of the test. A switch
    # between the threads and back costs as much as a step of the clock, so they switch only to call a handler.

    async def _settle_and_advance(
        self, receipt: Receipt, failure: Exception | None, target_ms: int
    ) -> _Delivered | None:
        """Answer for a message as a Worker does after its handler has raised `failure`, and advance further."""
        from timeball.client.messages import reason_of
        from timeball.client.worker import Dead, Retry

        consuming = self._node.broker.consuming
        if failure is None:
            await consuming.acknowledge([receipt])
        elif isinstance(failure, Dead):
            await consuming.dead_letter(receipt, reason_of(failure))
        elif isinstance(failure, Retry):
            cause = failure.__cause__
            await consuming.nack(receipt, failure.after_ms, "" if cause is None else reason_of(cause))
        else:
            await consuming.nack(receipt, None, reason_of(failure))
        return await self._advance_to_handler(target_ms)

    async def _advance_to_handler(self, target_ms: int) -> _Delivered | None:
        """Advance until a handler has a message, which is returned, or to `target_ms`: then the result is None."""
        is_last = False
        # Before the first step, because a handler may have scheduled a message or a retry that is due now.
        while (delivered := await self._receive_next()) is None and not is_last:
            step = await self._virtual_time.step(target_ms)
            is_last = step.is_last
            for rows in step.released:
                self._released += _messages_of(rows)
        return delivered

    async def _receive_next(self) -> _Delivered | None:
        """Receive the next message for a handler. None if no handler has one."""
        consuming = self._node.broker.consuming
        for request, handler in self._handlers:
            try:
                # This check is cheaper than a receive, and most times there is no message.
                if not await consuming.wait_for_rows(request, 0):
                    continue
                received = await consuming.receive(request, 0)
            except NotFound:
                continue  # the first message creates the topic
            if received.receipts:
                (message,) = _messages_of(received.rows)
                # A message that is delivered again has the retry topic of the group.
                message = msgspec.structs.replace(message, topic=request.topic)
                return _Delivered(handler, message, received.receipts[0])
        return None

    # -- questions of a test ------------------------------------------------------------------------------------------

    def released(self, topic: str | None = None) -> list[ReleasedMessage]:
        """List the messages that advances have released so far, in order, of one topic if it is named."""
        return [message for message in self._released if topic in (None, message.topic)]

    def pending(self, topic: str | None = None, key: str | None = None) -> list[ScheduledMessage]:
        """List the pending messages in the order of their due times, of a topic and with a key if these are named."""
        return self._run(self._list_pending(topic, key))

    async def _list_pending(self, topic: str | None, key: str | None) -> list[ScheduledMessage]:
        """Read all pages of the pending messages."""
        messages: list[ScheduledMessage] = []
        page_begin = None
        while True:
            request = PageRequest(limits.LISTED_ROWS_MAX, topic, key, after=page_begin)
            try:
                page = await self._node.broker.listing.page(request)
            except NotFound:
                return messages  # no message has named the topic yet
            messages += [
                ScheduledMessage(
                    message.topic, message.due_ms, message.unique_key, _split_keys(message.keys), message.tag
                )
                for message in page.messages
            ]
            page_begin = page.next_page
            if page_begin is None:
                return messages

    def assert_scheduled(
        self, topic: str, *, key: str | None = None, at: At | None = None, after: After | None = None
    ) -> ScheduledMessage:
        """Return the only pending message of a topic, with this key and due time if they are named.

        `after` counts from the present time of the clock. Raises AssertionError, which lists the pending messages.
        """
        matching = pending = self.pending(topic, key)
        delay_ms, due_ms = time_parsing.when(after, at)
        if delay_ms is not None:
            due_ms = self.clock.now_ms + delay_ms
        if due_ms is not None:
            matching = [message for message in pending if message.due_ms == due_ms]
        if len(matching) != 1:
            wanted = [f"topic {topic!r}"]
            wanted += [] if key is None else [f"key {key!r}"]
            wanted += [] if due_ms is None else [f"due {_show(due_ms)}"]
            listed = "".join(
                f"\n  {_show(message.due_ms)}, keys {', '.join(message.keys)}" for message in pending
            )
            raise AssertionError(
                f"{len(matching)} messages are scheduled with {', '.join(wanted)}; pending are:{listed or ' none'}"
            )
        return matching[0]


def _run_handler(delivered: _Delivered) -> Exception | None:
    """Run the handler of a message. Returns the exception that it raised, or None. Logs all but Dead and Retry."""
    from timeball.client.worker import Dead, Retry

    try:
        delivered.handler(delivered.message)
    except (Dead, Retry) as answer:
        return answer
    except Exception as error:  # a handler may fail in any way, as a consumer's does
        message = delivered.message
        logger.exception(
            "handler failed id=%s topic=%s attempts=%d", message.id, message.topic, message.attempts
        )
        return error
    return None


def _show(time_ms: int) -> str:
    """Format a time for the text of a failed assertion, as ISO 8601 in UTC."""
    return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)).isoformat()


def _split_keys(keys: str | None) -> tuple[str, ...]:
    return tuple((keys or "").split())


def _messages_of(rows: pa.RecordBatch) -> list[ReleasedMessage]:
    """Convert rows (READ_SCHEMA) to messages. The due time of a message without a delay is 0."""
    names = (
        "topic",
        "due_ms",
        "unique_key",
        "keys",
        "tag",
        "body",
        "properties",
        "reconsume_times",
        "sys_flag",
    )
    columns = [rows.column(name).to_pylist() for name in names]
    return [
        ReleasedMessage(
            topic, due_ms or 0, unique_key, _split_keys(keys), tag,
            readable_body(body or b"", sys_flag), decode_properties(properties or ""), attempts or 0,
        )
        for topic, due_ms, unique_key, keys, tag, body, properties, attempts, sys_flag in zip(*columns, strict=True)
    ]  # fmt: skip
