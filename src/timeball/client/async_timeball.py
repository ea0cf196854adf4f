"""AsyncTimeball: the methods of `Timeball` for a program with an event loop.

    async with AsyncTimeball("http://127.0.0.1:7480") as ball:
        await ball.send("orders", "close order 17 if unpaid", after="30m")

The methods are those of `Timeball`, whose calls run as coroutines on the connections of the event loop (network.py).
They need no threads. Columns are an exception: Arrow's Flight client has no asynchronous calls, so these methods run in
threads of the loop's executor.

When you cancel a call, the client stops waiting for it, and its connection is closed. The broker may still carry out
the request, as after a lost answer. Receives are an exception: the broker cancels them too. Messages that a cancelled
receive had leased go to other members at once, and no attempt is counted. The same holds for messages that the loop of
`consume` has leased but not yet handed out.

In a child process after a fork, the client opens new connections for the event loop of the child. The loop that ran in
the parent process must not go on in the child.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from timeball.client.attempts import OpenRead
from timeball.client.consumer import ConsumeLoop, Consumer, Start, make_filter
from timeball.client.http_calls import HttpCalls
from timeball.client.loop_network import LAST_BYTES_S, LoopNetwork
from timeball.client.messages import Leased
from timeball.client.reader import Reader
from timeball.client.schedules import Schedules
from timeball.client.selections import Selections
from timeball.client.timeball import ENDPOINT, Timeball
from timeball.model import wire
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After, delay_ms

CALLS_MAX = 64  # calls at the same time; further calls wait for a connection

if TYPE_CHECKING:
    import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B")


class AsyncMessage(Leased):
    """A received message, like `Message`, with awaitable methods for the answers."""

    __slots__ = ()

    async def ack(self) -> bool:
        """Acknowledge the message.

        Returns False when the lease had already ended. The message is then delivered again.
        """
        return await self._ack()

    async def nack(self, after: After | None = None, *, reason: str = "", counted: bool = True) -> bool:
        """Give the message back as a failed attempt, to be delivered again later.

        Args:
            after: The delay until the next delivery, as long as that of a send may be, or at most 12 h in a group that
                consumes in order. The default is the delay of the group's retry policy.
            reason: The reason, which the next delivery and the dead letter contain. At most 1,024 bytes are kept.
            counted: With False, this is no attempt: the message cannot be handled yet. The group limits how often.

        Returns:
            False when the lease had already ended.
        """
        return await self._nack(None if after is None else delay_ms(after), reason, counted)

    async def extend(self, lease: After) -> bool:
        """Extend the lease, so that it ends after the time `lease` from now.

        Returns False when it had already ended.
        """
        return await self._extend(delay_ms(lease, "lease"))

    async def dead_letter(self, *, reason: str = "") -> bool:
        """Give the message up: move it to the group's dead letters at once.

        Args:
            reason: The reason, which the dead letter contains. At most 1,024 bytes are kept.

        Returns:
            False when the lease had already ended.
        """
        return await self._dead_letter(reason)


def _as_awaitable(
    method: Callable[Concatenate[B, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Turn a method into an awaitable one with the same name, signature and docstring.

    The awaitable method calls it on `_driven` of its object, where each method returns a coroutine.
    """

    @functools.wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return await cast(Coroutine[Any, Any, T], method(self._driven, *args, **kwargs))

    return call  # type: ignore[return-value]  # the type of `wraps` names the first argument


def _in_thread(
    method: Callable[Concatenate[Timeball, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Turn a method for columns into an awaitable one with the same name, signature and docstring."""

    @functools.wraps(method)
    async def call(self: AsyncTimeball, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run_in_thread(functools.partial(method, self._ball, *args, **kwargs))

    return call  # type: ignore[return-value]  # the type of `wraps` names the first argument


class _Driven(Timeball):
    """A Timeball whose methods for operations return coroutines."""

    def __init__(self, ball: AsyncTimeball, http: HttpCalls | None) -> None:
        """Take the calls of operations from `http`, None without an address of HTTP. `ball` sends columns."""
        Reader.__init__(self, http, None, ball._ball._clock)
        self._async_ball = ball
        if http is not None:
            self._group_member = Consumer(http, self._clock, AsyncMessage)

    @property
    def _operations(self) -> HttpCalls:
        return self._http or self._async_ball._ball._operations  # which raises without an address of HTTP

    def _send_columns(self, *args: Any) -> Any:
        return self._async_ball._run_in_thread(lambda: self._async_ball._ball._send_columns(*args))


class AsyncSchedules:
    """The methods of `Timeball.schedules`, awaitable."""

    def __init__(self, schedules: Schedules) -> None:
        """See `AsyncTimeball.schedules`. The methods of `schedules` return coroutines."""
        self._driven = schedules

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

    def __init__(self, selections: Selections) -> None:
        """See `AsyncTimeball.selections`. The methods of `selections` return coroutines."""
        self._driven = selections

    cancel = _as_awaitable(Selections.cancel)
    shift = _as_awaitable(Selections.shift)
    pause = _as_awaitable(Selections.pause)
    resume = _as_awaitable(Selections.resume)
    release = _as_awaitable(Selections.release)
    move = _as_awaitable(Selections.move)
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
            calls_max: The largest number of calls that run at the same time, at least 1. Further calls wait. Long polls
                and streams do not count.

        Raises:
            RequestError: As for `Timeball`, or `calls_max` is below 1.
        """
        if calls_max < 1:
            raise RequestError(f"calls_max={calls_max}: at least 1")
        self._ball = Timeball(  # connects for columns only
            endpoint,
            flight=flight,
            timeout_ms=timeout_ms,
            access_key=access_key,
            secret_key=secret_key,
            tls_roots=tls_roots,
        )
        self._network, self._calls = LoopNetwork(calls_max), None
        if (http := self._ball._http) is not None:
            self._calls = HttpCalls(endpoint, timeout_ms, http._who, network=self._network)
        self._driven = _Driven(self, self._calls)
        self._pid, self._is_closed = os.getpid(), False
        self._open_reads: set[OpenRead] = set()  # receives under way, which `close` cancels
        self._tasks: set[asyncio.Task[Any]] = set()  # parts of receives and loops, which `close` waits for
        self._loops: set[ConsumeLoop] = set()  # unfinished loops of `consume`, which `close` ends

    async def close(self) -> None:
        """Cancel the receives that are under way, wait for the other calls, and close the connections."""
        if self._is_closed:
            return
        self._enter()
        self._is_closed = True
        try:
            for open_read in list(self._open_reads):
                open_read.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
            # Loops that the program left by `break`. Python may close their iterators much later.
            for loop in list(self._loops):
                await loop.end()
            await self._network.wait_for_calls()
        finally:
            if self._calls is not None:
                self._calls.close()
            self._ball.close()
            await self._network.close()

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
    commit = _in_thread(Timeball.commit)
    offsets = _as_awaitable(Timeball.offsets)
    browse_batch = _in_thread(Timeball.browse_batch)
    read_queue = _in_thread(Timeball.read_queue)
    status = _as_awaitable(Timeball.status)
    topics = _as_awaitable(Timeball.topics)
    groups = _as_awaitable(Timeball.groups)
    dead_letters = _as_awaitable(Timeball.dead_letters)
    resend_dead_letters = _as_awaitable(Timeball.resend_dead_letters)
    delete_dead_letters = _as_awaitable(Timeball.delete_dead_letters)
    limit_group = _as_awaitable(Timeball.limit_group)
    create_topic = _as_awaitable(Timeball.create_topic)
    queues = _as_awaitable(Timeball.queues)
    reserve = _in_thread(Timeball.reserve)
    attach = _in_thread(Timeball.attach)
    compact = _in_thread(Timeball.compact)
    lease_compaction = _in_thread(Timeball.lease_compaction)

    @property
    def schedules(self) -> AsyncSchedules:
        """The recurring schedules of the broker. See `Timeball.schedules`."""
        return AsyncSchedules(self._driven.schedules)

    @property
    def selections(self) -> AsyncSelections:
        """Bulk operations on the pending messages that meet a condition. See `Timeball.selections`."""
        return AsyncSelections(self._driven.selections)

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
        self._enter()
        message_filter, consumer, open_read = make_filter(tag, sql), self._driven._consumer, OpenRead()
        pulling = consumer.pull_async(
            topic, group, max_messages, wait, start, lease, message_filter, open_read
        )
        self._open_reads.add(open_read)
        try:
            return cast(
                list[AsyncMessage], await self._run_apart(pulling, open_read, consumer.give_back_async)
            )
        finally:
            self._open_reads.discard(open_read)

    ack = _as_awaitable(Timeball.ack)

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
        self._enter()
        consumer, open_read = self._driven._consumer, OpenRead()
        feed = consumer.prepare_feed(
            topic, group, max_messages, start, lease, make_filter(tag, sql), open_read
        )
        loop = ConsumeLoop(consumer, self._ball._clock, feed, lease=lease, idle=until_idle, stop=stop)
        self._open_reads.add(open_read)
        self._loops.add(loop)
        # If the loop is cancelled twice, its `work` is still under way in a task. Then `end` must wait for it.
        turn = asyncio.Lock()
        try:
            while (message := loop.next()) is not None or not loop.is_over:
                if message is None:
                    await self._run_apart(_in_turn(turn, loop.work()), open_read)
                else:
                    yield cast(AsyncMessage, message)
        finally:
            self._open_reads.discard(open_read)
            if not self._is_closed:  # else `close` ends it
                self._loops.discard(loop)
                await self._run_apart(_in_turn(turn, loop.end()))

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
        messages = await self._run_in_thread(
            lambda: self._ball.browse(topic, group, max_messages=max_messages, wait=wait, start=start)
        )
        return [AsyncMessage(message._row, message.received_ms) for message in messages]

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
        reader = await self._run_in_thread(
            lambda: self._ball.read_log(
                from_seq, to_seq, kinds=kinds, columns=columns, coalesce_rows=coalesce_rows
            )
        )
        batches = iter(reader)
        while (batch := await self._run_in_thread(lambda: next(batches, None))) is not None:
            yield batch

    # ---- internals --------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Begin a call. Raises RequestError if the client is closed or no event loop runs.

        In a child process, forgets the receives and the loops of the parent.
        """
        self._network.enter()
        if self._is_closed:
            raise RequestError("this Timeball client is closed")
        if self._pid != os.getpid():
            self._pid, self._open_reads, self._tasks, self._loops = os.getpid(), set(), set(), set()

    async def _run_in_thread(self, call: Callable[[], T]) -> T:
        """Run a call for columns in a thread. Raises RequestError after a fork, or if the client is closed."""
        self._ball._check()
        async with self._network.slot():
            return await asyncio.to_thread(call)

    async def _run_apart(
        self,
        coroutine: Coroutine[Any, Any, T],
        open_read: OpenRead | None = None,
        give_back: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run a part of a receive in a separate task, which goes on to its end if the calling task is cancelled.

        Then `open_read` is cancelled, so that the end comes soon, and `give_back` receives the result, if there is one.
        """
        task = self._create_task(coroutine)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # In a separate task as well, because a cancel scope of anyio cancels again at each step of the loop.
            await asyncio.shield(self._create_task(_end_apart(task, open_read, give_back)))
            raise

    def _create_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Create a task that `close` waits for."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _end_apart(
    task: asyncio.Task[T],
    open_read: OpenRead | None,
    give_back: Callable[[T], Coroutine[Any, Any, None]] | None,
) -> None:
    """End a task of `_run_apart` whose caller was cancelled, and give back its result."""
    if open_read is not None:
        # Messages that the broker was sending can still be received for a moment.
        open_read.cancel()
        await asyncio.wait([task], timeout=2 * LAST_BYTES_S if open_read.has_begun else 0)
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None and give_back is not None:
        await give_back(task.result())


async def _in_turn(turn: asyncio.Lock, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a part of a loop (`work` or `end`) when the earlier part has ended."""
    async with turn:
        await coroutine
