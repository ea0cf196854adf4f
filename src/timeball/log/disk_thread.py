"""The disk thread of a broker, its substitute in tests, and the interfaces of the replication of its log and files.

The thread runs calls from a queue, one after the other. It replaces a ThreadPoolExecutor of one thread, which costs
more per call: a pool takes two locks, counts idle threads and makes a future with a lock of its own. For a commit of
one row these costs dominate.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from timeball.log.segment import SegmentFile

P = ParamSpec("P")
R = TypeVar("R")


class Disk(Executor):
    """An executor that runs calls in the order in which they were submitted."""

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call that reports its outcome itself and raises nothing. Unlike `submit`, it makes no future."""
        self.submit(call)


class DiskThread(Disk):
    """The disk thread of a broker. `shutdown` runs the queued calls first."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_shut_down = False
        # The queue's own method, so that a post from the log's writer runs no Python code in between.
        self.post = self._calls.put  # type: ignore[assignment, method-assign]
        # A daemon thread, because a start that fails must not keep its process alive. An orderly stop calls `shutdown`.
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="disk", daemon=True)
        self._thread.start()
        # A start that fails calls no `shutdown`: the thread then ends with the garbage collection of this object.
        weakref.finalize(self, self._calls.put, None)

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call. Returns the future of its result. Raises RuntimeError after `shutdown`."""
        if self._is_shut_down:
            raise RuntimeError("the disk thread has been shut down")
        call = Call(partial(fn, *args, **kwargs))
        self._calls.put(call)
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further submits, and end the thread after the queued calls (see Executor).

        `cancel_futures` drops the queued calls and cancels their futures. `wait` waits for the end of the thread.
        """
        self._is_shut_down = True
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if isinstance(call, Call):
                call.future.cancel()
        # None ends the thread, after all calls that were queued before.
        self._calls.put(None)
        if wait:
            self._thread.join()


def _run_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run queued calls until None is queued."""
    while (call := calls.get()) is not None:
        call()
        del call  # otherwise its objects would stay in memory until the next call


class InlineDisk(Disk):
    """Runs each call at once, in the thread that submits it: for a broker that one test uses.

    Its event loop waits for the disk instead of a switch to another thread and back, which costs more than the write.
    """

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call. Returns the future of its result, which is done."""
        call = Call(partial(fn, *args, **kwargs))
        call()
        return call.future

    def post(self, call: Callable[[], None]) -> None:
        """See Disk."""
        call()


class Call:
    """A call that runs in another thread, with a future for its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def __call__(self) -> None:
        """Run the call, unless its future was cancelled, and set the future's result or error."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self._call())
            except BaseException as error:  # of any kind: the caller receives it
                self.future.set_exception(error)


# ---- replication of the log ----------------------------------------------------------------------------------
# These are the operations that the writer needs from the other replicas (cluster/ implements them). The thread that
# writes a commit also replicates it. The commit is sent to the other replicas before it is written here, so that all
# disks work at the same time. `commit` returns when enough replicas have it. Only then the writer shows the rows to
# readers, acknowledges them and applies them, so they are as durable as the group guarantees.


class Extent(NamedTuple):
    """The bytes of one commit and their position in a segment. A commit never spans two segments."""

    file: SegmentFile  # the file of the segment, with reserved space for the frames
    position: int
    end_seq: int  # the sequence number after the last row
    frames: bytes
    begins: bool  # True for the first commit of a segment, whose header is on disk already


class Replication(Protocol):
    """Replicates commits. All methods belong to the disk thread."""

    @property
    def epoch(self) -> int:
        """The epoch of the frames that this leader writes."""

    def commit(self, extent: Extent) -> None:
        """Write, sync and replicate a commit. Returns when enough replicas have it.

        Raises NotLeader when this node will never commit it, and DiskFailed.

        After NotLeader the rows may or may not be in the next leader's log, so their senders get no answer.
        """


class FileReplication(Protocol):
    """Replicates the pending table's data files. Its methods may be called in any thread."""

    def ship(self, paths: Sequence[str]) -> Future[None]:
        """Send data files, already synced here, to the other replicas. Done when enough of them have all files on disk.

        Only then may a row of the log name the files. Otherwise the group could commit a row and lose the only disk
        that has its file. The future fails with NotLeader when this node no longer leads.
        """


# A call that returns if no other leader had committed a row when it began, and raises NotLeader otherwise. It is called
# after an answer was read from memory, if the request commits nothing (docs/decisions/0141-look-ups-are-fenced.md).
ConfirmLead = Callable[[], Awaitable[None]]


async def lead_alone() -> None:
    """Return at once: without replicas there is no other leader (a ConfirmLead)."""


class Leading(NamedTuple):
    """The parts of a replicated log for the broker, while this process leads the group."""

    disk: Disk  # the replica's thread, which outlives the broker
    replication: Replication
    files: FileReplication
    confirm_lead: ConfirmLead
