"""A disk runs calls in order and reports each outcome to its caller. Its thread loses no call at a shutdown."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
from tests.bounds import BOUND_S

from timeball.log.disk_thread import DiskThread, InlineDisk


class Failure(BaseException):
    """An exception that is no Exception."""


def test_calls_run_in_their_order_in_one_other_thread_and_before_a_shutdown() -> None:
    disk, calls = DiskThread(), []
    for number in range(100):
        call = lambda number=number: calls.append((number, threading.get_ident()))  # noqa: E731
        _ = disk.post(call) if number % 3 else disk.submit(call)
    disk.shutdown()
    assert [number for number, _ in calls] == list(range(100))
    threads = {thread for _, thread in calls}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_results_and_exceptions_of_any_kind_reach_the_caller() -> None:
    disk = DiskThread()

    def fail() -> None:
        raise Failure

    assert disk.submit(pow, 2, 3, mod=5).result() == 3
    with pytest.raises(Failure):
        disk.submit(fail).result()
    assert disk.submit(lambda: "next").result() == "next", "the thread continues after a failure"
    disk.shutdown()


def test_shutdown_refuses_calls_and_may_cancel_queued_ones() -> None:
    disk, may_end, calls_run = DiskThread(), threading.Event(), []
    running = disk.submit(may_end.wait)
    while not running.running():
        pass
    queued = disk.submit(calls_run.append, "queued by submit")
    disk.post(lambda: calls_run.append("queued by post"))
    disk.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    disk.shutdown()
    assert running.result()
    with pytest.raises(CancelledError):
        queued.result()
    with pytest.raises(RuntimeError, match="shut down"):
        disk.submit(may_end.wait)
    disk.post(lambda: calls_run.append("posted after the shutdown"))
    assert calls_run == []


def test_call_is_not_referenced_after_it_has_run() -> None:
    class Argument:
        pass

    disk, argument = DiskThread(), Argument()
    reference = weakref.ref(argument)
    disk.submit(lambda argument: None, argument).result()
    disk.submit(lambda: None).result()
    del argument
    gc.collect()
    assert reference() is None
    disk.shutdown()


def test_thread_ends_when_the_disk_is_garbage_collected() -> None:
    disk = DiskThread()
    thread = disk._thread
    assert disk.submit(lambda: 1).result() == 1 and thread.is_alive()
    del disk
    gc.collect()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_an_inline_disk_runs_each_call_at_once_in_the_thread_of_its_caller() -> None:
    disk, threads = InlineDisk(), []

    def fail() -> None:
        raise Failure

    disk.post(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]
    assert disk.submit(pow, 2, 3, mod=5).done()
    failed = disk.submit(fail)
    assert isinstance(failed.exception(), Failure)
    disk.shutdown()
