"""A disk runs calls in order and reports each outcome to its caller. Its thread loses no call at a shutdown."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
from tests.bounds import BOUND_S

from timeball.log.disk_thread import DiskThread, InlineDisk


class Power(BaseException):
    pass


def test_calls_run_in_their_order_in_one_thread() -> None:
    disk, seen = DiskThread(), []
    for at in range(100):
        call = lambda at=at: seen.append((at, threading.get_ident()))  # noqa: E731
        _ = disk.post(call) if at % 3 else disk.submit(call)
    disk.shutdown()
    assert [at for at, _ in seen] == list(range(100)), "a stop runs what waits"
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


def test_an_outcome_of_any_kind_reaches_its_caller() -> None:
    disk = DiskThread()

    def fail() -> None:
        raise Power

    assert disk.submit(pow, 2, 3, mod=5).result() == 3
    with pytest.raises(Power):
        disk.submit(fail).result()
    assert disk.submit(lambda: "on").result() == "on", "a failure ends no thread"
    disk.shutdown()


def test_shutdown_refuses_calls_and_may_cancel_queued_ones() -> None:
    disk, go, seen = DiskThread(), threading.Event(), []
    first = disk.submit(go.wait)
    while not first.running():
        pass
    waiting = disk.submit(seen.append, 1)
    disk.post(lambda: seen.append(2))
    disk.shutdown(wait=False, cancel_futures=True)
    go.set()
    disk.shutdown()
    assert first.result() and seen == []
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="shut down"):
        disk.submit(go.wait)
    disk.post(lambda: seen.append(3))
    assert seen == []


def test_call_is_not_referenced_after_it_has_run() -> None:
    class Held:
        pass

    disk, held = DiskThread(), Held()
    gone = weakref.ref(held)
    disk.submit(lambda held: None, held).result()
    disk.submit(lambda: None).result()
    del held
    gc.collect()
    assert gone() is None
    disk.shutdown()


def test_thread_ends_when_the_disk_is_garbage_collected() -> None:
    disk = DiskThread()
    thread = disk._thread
    assert disk.submit(lambda: 1).result() == 1 and thread.is_alive()
    del disk
    gc.collect()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_calls_without_a_thread_have_run_when_they_are_submitted() -> None:
    disk, seen = InlineDisk(), []

    def fail() -> None:
        raise Power

    disk.post(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    assert disk.submit(pow, 2, 3, mod=5).done()
    failed = disk.submit(fail)
    assert isinstance(failed.exception(), Power)
    disk.shutdown()
