"""A log with small segments over any `Files`, and rows for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from tests.bounds import BOUND_S
from tests.crash_files import CrashFiles

from timeball.io.clock import ManualClock
from timeball.io.files import Files
from timeball.log.disk_thread import Disk, DiskThread
from timeball.log.reader import LogReader
from timeball.log.recovery import OpenedLog, open_log
from timeball.log.segment import Segments
from timeball.log.writer import LogWriter
from timeball.model.config import Durability
from timeball.model.message import Kind, build_rows

SEGMENT_BYTES = 16 * 1024  # a handful of small frames


class AtOnce(Disk):
    """A disk that runs each call in the caller's thread, so that the order of calls is always the same."""

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:
        """Run the call, and return the future of its outcome, which is done."""
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        # A thread would pass on any exception, and a PowerCut is no Exception.
        except BaseException as error:
            future.set_exception(error)
        return future


class HeldDisk(Disk):
    """A disk that holds its calls until the test runs them, such as a slow disk."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], object], Future[object]]] = []

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:
        """Hold the call, and return the future of its outcome."""
        future: Future[object] = Future()
        self.held.append((lambda: fn(*args, **kwargs), future))
        return future

    def run_held(self, count: int | None = None) -> None:
        """Run the next `count` held calls, or all that are held now."""
        calls, self.held = self.held[:count], self.held[len(self.held[:count]) :]
        for call, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            # A thread would pass on any exception.
            except BaseException as error:
                future.set_exception(error)


@dataclass
class Log:
    """An open log. `failures` are the errors that its writer reported."""

    writer: LogWriter
    reader: LogReader
    segments: Segments
    clock: ManualClock
    cut_bytes: int
    failures: list[BaseException] = field(default_factory=list)

    async def append(self, *batches: pa.RecordBatch) -> list[int]:
        """Append batches in one iteration of the loop, and wait until they are durable.

        Returns their first sequence numbers.
        """
        return list(await asyncio.gather(*[self.writer.append(batch)[1] for batch in batches]))


@asynccontextmanager
async def opened(
    files: Files,
    *,
    disk: Disk | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    durability: Durability = "sync",
    durable_before_seq: int = 0,
) -> AsyncIterator[Log]:
    """Open the log below `files` with recovery, for the length of the block. Without a `disk`, with a disk thread."""
    clock = ManualClock()
    recovered = reopened(files, segment_bytes=segment_bytes, durable_before_seq=durable_before_seq)
    threads = disk or DiskThread()
    failures: list[BaseException] = []
    writer = LogWriter(
        files, recovered.segments, recovered.file, clock, threads,
        segment_bytes=segment_bytes, durability=durability, on_failure=failures.append,
    )  # fmt: skip
    try:
        yield Log(
            writer, LogReader(recovered.segments), recovered.segments, clock, recovered.cut_bytes, failures
        )
    finally:
        await until(writer.close(), disk)
        threads.shutdown()


async def until(work: Awaitable[None], disk: Executor | None) -> None:
    """Wait for `work`, and run the calls of a HeldDisk meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done() and isinstance(disk, HeldDisk):
        await asyncio.sleep(0)
        disk.run_held()
    await asyncio.wait_for(task, BOUND_S)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition is true. Fails after a generous time limit."""
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.001)


def reopened(files: Files, *, segment_bytes: int = SEGMENT_BYTES, durable_before_seq: int = 0) -> OpenedLog:
    """Run recovery on these files."""
    return open_log(
        files, segment_bytes=segment_bytes, now_ms=ManualClock().wall, durable_before_seq=durable_before_seq
    )


def batch(first: int, count: int = 3, *, body_bytes: int = 20) -> pa.RecordBatch:
    """Build `count` distinct messages: row n of the batch is message `first` + n."""
    numbers = range(first, first + count)
    return build_rows(
        count,
        kind=int(Kind.MESSAGE),
        topic="orders",
        queue_id=[number % 4 for number in numbers],
        queue_offset=[number // 4 for number in numbers],
        unique_key=[f"id-{number}" for number in numbers],
        keys=[f"order-{number} customer-{number % 5}" if number % 2 else None for number in numbers],
        body=[f"{number}:".encode().ljust(body_bytes, b".") for number in numbers],
        born_ms=list(numbers),
        store_ms=1_700_000_000_000,
    )


def bodies(rows: Iterable[pa.RecordBatch]) -> list[bytes]:
    """List the bodies of all rows of these batches."""
    return [body for part in rows for body in part.column("body").to_pylist()]


def read_all(segments: Segments) -> dict[int, bytes]:
    """Read the bodies of all kept rows by sequence number."""
    reader = LogReader(segments)
    body_of: dict[int, bytes] = {}
    for rows in reader.rows(reader.first_seq, reader.next_seq):
        for seq, body in zip(rows.column("seq").to_pylist(), rows.column("body").to_pylist(), strict=True):
            assert seq not in body_of
            body_of[seq] = body
    return body_of


def fill(files: Files, commits: int, *, rows: int = 3) -> list[bytes]:
    """Write a log of `commits` commits of `rows` messages each, and close it. Returns all bodies, from seq 1 on."""

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            for commit in range(commits):
                await log.append(batch(1 + commit * rows, rows))

    asyncio.run(write())
    return bodies([batch(1, commits * rows)])


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine within a time limit."""
    asyncio.run(asyncio.wait_for(work, 2 * BOUND_S))


async def run_loop(count: int = 5) -> None:
    """Let the event loop run `count` iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


def syncs(files: CrashFiles, name: str = "") -> int:
    """Count the syncs of files whose name contains `name`."""
    return sum(call == "sync" and name in file_name for call, file_name in files.trace)
