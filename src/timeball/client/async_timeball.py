"""AsyncTimeball: the methods of `Timeball` for a program with an event loop.

    async with AsyncTimeball("http://127.0.0.1:7480") as ball:
        await ball.send("orders", "close order 17 if unpaid", after="30m")

This is a thin layer over `Timeball`. Each call runs in one of the `calls_max` threads of the object, and the event loop
only waits for the result. A second client on asyncio would repeat the code of every request, answer and retry, and
Arrow's Flight client has no asynchronous calls. The cost of the threads was measured
(docs/client.md#asynctimeball).

When you cancel a call, the client stops waiting for it. The broker may still carry out the request, as after a lost
answer. Receives are an exception: the broker cancels them too. Messages that a cancelled receive had leased go to other
members at once, and no attempt is counted. The same holds for messages that the loop of `consume` has leased but not
yet handed out.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from timeball.client.attempts import OpenRead
from timeball.client.consumer import ConsumeLoop, Start, make_filter
from timeball.client.messages import Leased, Message
from timeball.client.schedules import Schedules
from timeball.client.selections import Selections
from timeball.client.timeball import ENDPOINT, Timeball
from timeball.model import wire
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After, delay_ms

CALLS_MAX = 64  # calls at the same time; further calls wait for a thread

if TYPE_CHECKING:
    import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B")
RunInThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


class AsyncMessage(Leased):
    """A received message, like `Message`, with awaitable methods for the answers."""

    __slots__ = ("_run",)

    def __init__(self, message: Message, run: RunInThread) -> None:
        super().__init__(message._row, message.received_ms, message._member)
        self._run = run

    async def ack(self) -> bool:
        """Acknowledge the message.

        Returns False when the lease had already ended. The message is then delivered again.
        """
        return bool(await self._run(self._ack))

    async def nack(self, after: After | None = None, *, reason: str = "", counted: bool = True) -> bool:
        """Give the message back as a failed attempt, to be delivered again later.

        Args:
            after: The delay until the next delivery. The default is the delay of the group's retry policy.
            reason: The reason, which the next delivery and the dead letter contain. At most 1,024 bytes are kept.
            counted: With False, this is no attempt: the message cannot be handled yet. The group limits how often.

        Returns:
            False when the lease had already ended.
        """
        after_ms = None if after is None else delay_ms(after)
        return bool(await self._run(lambda: self._nack(after_ms, reason, counted)))

    async def extend(self, lease: After) -> bool:
        """Extend the lease, so that it ends after the time `lease` from now.

        Returns False when it had already ended.
        """
        lease_ms = delay_ms(lease, "lease")
        return bool(await self._run(lambda: self._extend(lease_ms)))

    async def dead_letter(self, *, reason: str = "") -> bool:
        """Give the message up: move it to the group's dead letters at once.

        Args:
            reason: The reason, which the dead letter contains. At most 1,024 bytes are kept.

        Returns:
            False when the lease had already ended.
        """
        return bool(await self._run(lambda: self._dead_letter(reason)))


def _as_awaitable(
    method: Callable[Concatenate[B, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Turn a method into an awaitable one with the same name, signature and docstring.

    It belongs to a class whose `_ball` has the method, and whose `_run` runs a call in a thread.
    """

    @functools.wraps(method)
    async def call_in_thread(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._run(functools.partial(method, self._ball, *args, **kwargs))
        return result

    return call_in_thread  # type: ignore[return-value]  # the type of `wraps` names the first argument


class AsyncSchedules:
    """The methods of `Timeball.schedules`, awaitable."""

    def __init__(self, schedules: Schedules, run: RunInThread) -> None:
        """See `AsyncTimeball.schedules`. `run` runs a call in a thread."""
        self._ball, self._run = schedules, run

    put = _as_awaitable(Schedules.put)
    get = _as_awaitable(Schedules.get)
    all = _as_awaitable(Schedules.all)
    pause = _as_awaitable(Schedules.pause)
    resume = _as_awaitable(Schedules.resume)
    delete = _as_awaitable(Schedules.delete)
    run = _as_awaitable(Schedules.run)
    preview = _as_awaitable(Schedules.preview)
    history = _as_awaitable(Schedules.history)
    zones = _as_awaitable(Schedules.zones)


class AsyncSelections:
    """The methods of `Timeball.selections`, awaitable."""

    def __init__(self, selections: Selections, run: RunInThread) -> None:
        """See `AsyncTimeball.selections`. `run` runs a call in a thread."""
        self._ball, self._run = selections, run

    cancel = _as_awaitable(Selections.cancel)
    dry_run = _as_awaitable(Selections.dry_run)
    undo = _as_awaitable(Selections.undo)
    get = _as_awaitable(Selections.get)
    all = _as_awaitable(Selections.all)


class AsyncTimeball:
    """A connection to a broker. An asynchronous context manager that belongs to the event loop that uses it."""

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        *,
        flight: str | None = None,
        timeout_ms: int = 30_000,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls_roots: bytes | None = None,
        calls_max: int = CALLS_MAX,
    ) -> None:
        """Prepare a connection. The client dials at the first call.

        The arguments are those of `Timeball`, and one more.

        Args:
            calls_max: The largest number of calls that run at the same time, at least 1. Further calls wait. A long
                poll counts as a call.

        Raises:
            RequestError: As for `Timeball`, or `calls_max` is below 1.
        """
        if calls_max < 1:
            raise RequestError(f"calls_max={calls_max}: at least 1")
        self._ball = Timeball(
            endpoint,
            flight=flight,
            timeout_ms=timeout_ms,
            access_key=access_key,
            secret_key=secret_key,
            tls_roots=tls_roots,
        )
        self._calls_max = calls_max
        # Created at the first call, and again in a child process.
        self._threads: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._open_reads: set[OpenRead] = set()  # receives under way, which `close` cancels
        self._loops: set[ConsumeLoop] = set()  # unfinished loops of `consume`, which `close` ends

    async def close(self) -> None:
        """Cancel the receives that are under way, wait for the other calls, and close the connection."""
        self._is_closed = True
        for open_read in list(self._open_reads):
            open_read.cancel()
        threads, self._threads = self._threads, None

        def close() -> None:
            if threads is not None and self._pid == os.getpid():
                threads.shutdown(wait=True)
                # Loops that the program left by `break`. Python may close their iterators much later.
                for loop in list(self._loops):
                    loop.end()
            self._ball.close()

        await asyncio.to_thread(close)

    async def __aenter__(self) -> AsyncTimeball:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- methods of Timeball, awaitable -----------------------------------------------------------------

    send = _as_awaitable(Timeball.send)
    send_many = _as_awaitable(Timeball.send_many)
    get = _as_awaitable(Timeball.get)
    cancel = _as_awaitable(Timeball.cancel)
    reschedule = _as_awaitable(Timeball.reschedule)
    commit = _as_awaitable(Timeball.commit)
    offsets = _as_awaitable(Timeball.offsets)
    browse_batch = _as_awaitable(Timeball.browse_batch)
    read_queue = _as_awaitable(Timeball.read_queue)
    status = _as_awaitable(Timeball.status)
    topics = _as_awaitable(Timeball.topics)
    groups = _as_awaitable(Timeball.groups)
    dead_letters = _as_awaitable(Timeball.dead_letters)
    resend_dead_letters = _as_awaitable(Timeball.resend_dead_letters)
    delete_dead_letters = _as_awaitable(Timeball.delete_dead_letters)
    create_topic = _as_awaitable(Timeball.create_topic)
    queues = _as_awaitable(Timeball.queues)
    reserve = _as_awaitable(Timeball.reserve)
    attach = _as_awaitable(Timeball.attach)
    compact = _as_awaitable(Timeball.compact)
    lease_compaction = _as_awaitable(Timeball.lease_compaction)

    @property
    def schedules(self) -> AsyncSchedules:
        """The recurring schedules of the broker. See `Timeball.schedules`."""
        return AsyncSchedules(self._ball.schedules, self._run)

    @property
    def selections(self) -> AsyncSelections:
        """Bulk operations on the pending messages that meet a condition. See `Timeball.selections`."""
        return AsyncSelections(self._ball.selections, self._run)

    # ---- methods that return messages or wait for them --------------------------------------------------

    async def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 256,
        wait: After = "10s",
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> list[AsyncMessage]:
        """Receive the next messages of a topic as a member of a group.

        Arguments, limits and errors are those of `Timeball.pull`. If the call is cancelled, messages that it had leased
        go to other members at once.
        """
        message_filter, consumer = make_filter(tag, sql), self._ball._consumer
        messages = await self._receive(
            functools.partial(consumer.pull, topic, group, max_messages, wait, start, lease, message_filter),
            consumer.give_back,
        )
        return self._as_async(messages)

    async def ack(self, messages: Leased | Iterable[Leased]) -> int:
        """Acknowledge messages. Returns the number of messages whose lease had not ended. See `Timeball.ack`."""
        return await self._run(lambda: self._ball.ack(messages))

    async def consume(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 256,
        until_idle: After | None = None,
        stop: threading.Event | None = None,
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> AsyncIterator[AsyncMessage]:
        """Yield messages as they become visible. Arguments and errors are those of `Timeball.consume`.

        A loop that is cancelled gives back its last message as a failed attempt. It gives back the messages that it has
        not handed out, without counting an attempt. A loop that is left by `break` does both when its iterator
        (`contextlib.aclosing`) or the client is closed.
        """
        message_filter, consumer = make_filter(tag, sql), self._ball._consumer
        open_read = OpenRead()

        feed = consumer.open_feed(topic, group, max_messages, start, lease, message_filter, open_read)
        loop = ConsumeLoop(consumer, self._ball._clock, feed, lease=lease, idle=until_idle, stop=stop)
        self._open_reads.add(open_read)
        self._loops.add(loop)
        try:
            while not loop.is_over:
                message = loop.next()
                if message is None:
                    await self._run_to_end(loop.work, open_read.cancel)
                else:
                    yield AsyncMessage(message, self._run)
        finally:
            self._open_reads.discard(open_read)
            if not self._is_closed:  # else `close` ends it
                await self._run_to_end(loop.end, lambda: None)
                self._loops.discard(loop)

    async def browse(
        self,
        topic: str,
        group: str = "",
        *,
        max_messages: int = 256,
        wait: After = 0,
        start: Start = "earliest",
    ) -> list[AsyncMessage]:
        """Read the next visible messages of all queues by offset.

        Arguments and errors are those of `Timeball.browse`.
        """
        browse = functools.partial(
            self._ball.browse, topic, group, max_messages=max_messages, wait=wait, start=start
        )
        return self._as_async(await self._run(browse))

    async def read_log(
        self,
        from_seq: int,
        to_seq: int,
        *,
        kinds: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        coalesce_rows: int = wire.COALESCE_ROWS,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Yield rows of the log, batch by batch. Arguments and errors are those of `Timeball.read_log`."""
        read = functools.partial(
            self._ball.read_log, from_seq, to_seq, kinds=kinds, columns=columns, coalesce_rows=coalesce_rows
        )
        batches = iter(await self._run(read))
        while (batch := await self._run(lambda: next(batches, None))) is not None:
            yield batch

    # ---- internals --------------------------------------------------------------------------------------

    def _as_async(self, messages: list[Message]) -> list[AsyncMessage]:
        return [AsyncMessage(message, self._run) for message in messages]

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call in a thread. Raises RequestError after a fork, or if the client is closed."""
        self._ball._check()
        if self._is_closed:
            raise RequestError("this Timeball client is closed")
        # A child process has none of its parent's threads.
        if self._threads is None or self._pid != os.getpid():
            self._threads, self._pid = ThreadPoolExecutor(self._calls_max, "timeball-async"), os.getpid()
        # The call runs in the context of the caller, because a send carries the caller's current span.
        in_context = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._threads, in_context, call)

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._submit(call)

    async def _receive(self, pull: Callable[..., T], give_back: Callable[[T], None]) -> T:
        """Run a receive. If this task is cancelled, cancel the receive at the broker too.

        Messages that still arrive then are given back.
        """
        open_read = OpenRead()
        self._open_reads.add(open_read)
        try:
            receiving = self._submit(functools.partial(pull, open_read=open_read))
            try:
                return await asyncio.shield(receiving)
            except asyncio.CancelledError:
                open_read.cancel()
                await asyncio.wait([receiving])
                if receiving.exception() is None:
                    await self._run_to_end(lambda: give_back(receiving.result()), lambda: None)
                raise
        finally:
            self._open_reads.discard(open_read)

    async def _run_to_end(self, call: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        """Run a call to its end, even if this task is cancelled. The cancellation is raised after the call.

        `on_cancel` is called at once when the task is cancelled, and can shorten the call.
        """
        running = asyncio.ensure_future(self._run(call))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            on_cancel()
            await asyncio.wait([running])
            running.exception()  # marks the error as retrieved, because the cancellation is raised instead
            raise
