"""The disk thread: calls in a queue, one after the other.

It does what a thread pool of one thread does and costs less a call: a pool takes two locks, counts idle threads and
makes a future with a lock of its own, and a commit of one row is made of such costs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Disk(Executor):
    """An executor that runs calls in the order in which they came."""

    def post(self, call: Callable[[], None]) -> None:
        """Run a call that reports its own outcome, and raises nothing."""
        self.submit(call)


class DiskThread(Disk):
    """The thread of a broker. `shutdown` lets calls that wait run first."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_shut = False
        # The queue's own method: between the log's writer and this thread stands nothing of ours.
        self.post = self._calls.put  # type: ignore[assignment, method-assign]
        # A daemon: a start that fails must not keep its process. An orderly stop waits for `shutdown`.
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="disk", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)  # a start that failed leaves no thread behind

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See Executor."""
        if self._is_shut:
            raise RuntimeError("the disk thread has been shut down")
        call = _Call(partial(fn, *args, **kwargs))
        self._calls.put(call)
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor."""
        self._is_shut = True
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if isinstance(call, _Call):
                call.future.cancel()
        self._calls.put(None)
        if wait:
            self._thread.join()


def _run(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # or what it holds would stay until the next one


class _Call:
    """A call whose outcome a caller waits for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def __call__(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self._call())
            except BaseException as error:  # of any kind: the caller is told
                self.future.set_exception(error)
