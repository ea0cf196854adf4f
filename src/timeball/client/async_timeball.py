"""AsyncTimeball: the verbs of `Timeball` for a program with an event loop.

    async with AsyncTimeball("grpc://127.0.0.1:7400") as ball:
        await ball.send("orders", "close order 17 if unpaid", after="30m")

A thin layer over the client with threads: each call runs in one of `calls_max` threads of this object, and the loop
only waits for its outcome. Arrow's Flight client offers nothing that an event loop could wait for, and a second client
on gRPC's own asyncio would be every request, answer and retry once more. What the threads cost was measured
(docs/client.md#cost-of-the-threads).

A call that is cancelled is no longer waited for. What it asked for may happen all the same, as after an answer that was
lost. A receive is an exception: it is cancelled at the broker, too, and what it had leased comes to other members at
once and uncounted; of the loop of `consume` that holds for all that it has not handed out.
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
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from timeball import wire
from timeball.client.calls import OpenRead
from timeball.client.consume_loop import ConsumeLoop
from timeball.client.consumer import Start, wanted
from timeball.client.dialing import check_process
from timeball.client.messages import Leased, Message
from timeball.client.timeball import ENDPOINT, Timeball
from timeball.errors import RequestError
from timeball.instants import After, delay_ms

CALLS_MAX = 64  # at once; further ones wait for a thread

P = ParamSpec("P")
T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


class AsyncMessage(Leased):
    """One visible message, as `Message` is, whose answers are awaited."""

    __slots__ = ("_run",)

    def __init__(self, message: Message, run: Run) -> None:
        super().__init__(message._batch, message._row, message.received_ms, message._member)
        self._run = run

    async def ack(self) -> bool:
        """Say that it is dealt with; false when its lease had ended, so that it comes again."""
        return bool(await self._run(self._ack))

    async def nack(self, after: After | None = None, *, reason: str = "") -> bool:
        """Give it back as an attempt that failed; it comes again `after` so long, or when the group's policy says.

        The next delivery and the dead letter show the `reason`.
        """
        after_ms = None if after is None else delay_ms(after)
        return bool(await self._run(lambda: self._nack(after_ms, reason)))

    async def extend(self, lease: After) -> bool:
        """Keep it for so long from now; false when its lease had ended."""
        lease_ms = delay_ms(lease, "lease")
        return bool(await self._run(lambda: self._extend(lease_ms)))

    async def dead_letter(self, *, reason: str = "") -> bool:
        """Give it up: it goes to the group's dead letters at once. False when its lease had ended."""
        return bool(await self._run(lambda: self._dead_letter(reason)))


def _awaited(
    verb: Callable[Concatenate[Timeball, P], T],
) -> Callable[Concatenate[AsyncTimeball, P], Coroutine[Any, Any, T]]:
    """Return a verb of `Timeball` as one that is awaited, with its name, signature and documentation."""

    @functools.wraps(verb)
    async def asked(self: AsyncTimeball, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(functools.partial(verb, self._ball, *args, **kwargs))

    return asked  # type: ignore[return-value]  # `wraps` says that it names its first argument


class AsyncTimeball:
    """A connection to a broker; an asynchronous context manager. Belongs to the event loop that uses it."""

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        *,
        timeout_ms: int = 30_000,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls_roots: bytes | None = None,
        calls_max: int = CALLS_MAX,
    ) -> None:
        """As for `Timeball`. `calls_max`: how many calls may be under way at once; long polls count."""
        if calls_max < 1:
            raise RequestError(f"calls_max={calls_max}: at least 1")
        self._ball = Timeball(
            endpoint, timeout_ms=timeout_ms, access_key=access_key, secret_key=secret_key, tls_roots=tls_roots
        )
        self._calls_max = calls_max
        self._threads: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._open_reads: set[OpenRead] = set()
        self._loops: set[ConsumeLoop] = set()

    async def close(self) -> None:
        """Cancel receives under way, wait for other calls, and let go of the connection."""
        self._is_closed = True
        for open_read in list(self._open_reads):
            open_read.cancel()
        threads, self._threads = self._threads, None

        def close() -> None:
            if threads is not None and self._pid == os.getpid():
                threads.shutdown(wait=True)
                for loop in list(self._loops):  # left by `break`, their iterators may be closed much later
                    loop.end()
            self._ball.close()

        await asyncio.to_thread(close)

    async def __aenter__(self) -> AsyncTimeball:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- verbs that are those of Timeball, awaited ------------------------------------------------------

    send = _awaited(Timeball.send)
    send_many = _awaited(Timeball.send_many)
    get = _awaited(Timeball.get)
    cancel = _awaited(Timeball.cancel)
    reschedule = _awaited(Timeball.reschedule)
    commit = _awaited(Timeball.commit)
    offsets = _awaited(Timeball.offsets)
    browse_batch = _awaited(Timeball.browse_batch)
    read_queue = _awaited(Timeball.read_queue)
    status = _awaited(Timeball.status)
    topics = _awaited(Timeball.topics)
    groups = _awaited(Timeball.groups)
    dead_letters = _awaited(Timeball.dead_letters)
    resend_dead_letters = _awaited(Timeball.resend_dead_letters)
    delete_dead_letters = _awaited(Timeball.delete_dead_letters)
    create_topic = _awaited(Timeball.create_topic)
    queues = _awaited(Timeball.queues)
    reserve = _awaited(Timeball.reserve)
    attach = _awaited(Timeball.attach)
    compact = _awaited(Timeball.compact)
    lease_compaction = _awaited(Timeball.lease_compaction)

    # ---- verbs that hand out messages or wait for them --------------------------------------------------

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
        """Return the next messages of a topic for a member of a group; see `Timeball.pull`.

        When it is cancelled, what it was about to get comes to other members at once.
        """
        only, consumer = wanted(tag, sql), self._ball._consumer
        messages = await self._receive(
            functools.partial(consumer.pull, topic, group, max_messages, wait, start, lease, only),
            lambda found: consumer.give_back(found, None),
        )
        return self._own(messages)

    async def pull_batch(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1_024,
        wait: After = "10s",
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> pa.RecordBatch:
        """Return the same as columns; see `Timeball.pull_batch`."""
        only, consumer = wanted(tag, sql), self._ball._consumer
        return await self._receive(
            functools.partial(consumer.pull_batch, topic, group, max_messages, wait, start, lease, only),
            lambda batch: consumer.give_back(batch, group),
        )

    async def ack(
        self, messages: Leased | Iterable[Leased] | pa.RecordBatch, group: str | None = None
    ) -> int:
        """Say that these are dealt with; returns how many of their leases had not ended before."""
        return await self._run(lambda: self._ball.ack(messages, group))

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
        """Yield messages as they become visible; see `Timeball.consume`.

        A loop that is cancelled gives back its last message, as an attempt that failed, and uncounted what it had not
        come to. One that is left by `break` does so when its iterator is closed (`contextlib.aclosing`), or the client.
        """
        only, consumer = wanted(tag, sql), self._ball._consumer
        open_read = OpenRead()

        def pull(wait_ms: int) -> list[Message]:
            wait = f"{wait_ms}ms"
            return consumer.pull(topic, group, max_messages, wait, start, lease, only, open_read)

        loop = ConsumeLoop(consumer, self._ball._clock, pull, lease=lease, idle=until_idle, stop=stop)
        self._open_reads.add(open_read)
        self._loops.add(loop)
        try:
            while not loop.is_over:
                message = loop.next()
                if message is None:
                    await self._uninterrupted(loop.work, open_read.cancel)
                else:
                    yield AsyncMessage(message, self._run)
        finally:
            self._open_reads.discard(open_read)
            if not self._is_closed:  # else `close` ends it
                await self._uninterrupted(loop.end, lambda: None)
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
        """Return the next visible messages of all queues, by offset; see `Timeball.browse`."""
        browse = functools.partial(
            self._ball.browse, topic, group, max_messages=max_messages, wait=wait, start=start
        )
        return self._own(await self._run(browse))

    async def read_log(
        self,
        from_seq: int,
        to_seq: int,
        *,
        kinds: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        coalesce_rows: int = wire.COALESCE_ROWS,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Yield rows of the log, batch by batch; see `Timeball.read_log`."""
        read = functools.partial(
            self._ball.read_log, from_seq, to_seq, kinds=kinds, columns=columns, coalesce_rows=coalesce_rows
        )
        batches = iter(await self._run(read))
        while (batch := await self._run(lambda: next(batches, None))) is not None:
            yield batch

    # ---- inside -----------------------------------------------------------------------------------------

    def _own(self, messages: list[Message]) -> list[AsyncMessage]:
        return [AsyncMessage(message, self._run) for message in messages]

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        check_process()
        if self._is_closed:
            raise RequestError("this Timeball client is closed")
        if self._threads is None or self._pid != os.getpid():  # a child has none of its parent's threads
            self._threads, self._pid = ThreadPoolExecutor(self._calls_max, "timeball-async"), os.getpid()
        # In the caller's context: its current span is what a send carries.
        in_context = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._threads, in_context, call)

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._submit(call)

    async def _receive(self, pull: Callable[..., T], give_back: Callable[[T], None]) -> T:
        """Return what a receive gets. When cancelled, cancel it at the broker and give back what came all the same."""
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
                    await self._uninterrupted(lambda: give_back(receiving.result()), lambda: None)
                raise
        finally:
            self._open_reads.discard(open_read)

    async def _uninterrupted(self, call: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        """Run a call to its end; when cancelled meanwhile, tell it by `on_cancel`, and raise that behind its end."""
        running = asyncio.ensure_future(self._run(call))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            on_cancel()
            await asyncio.wait([running])
            running.exception()  # the cancellation goes first
            raise
