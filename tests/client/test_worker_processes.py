"""Processes that run a worker: one that cannot start is tried again, and none is left behind."""

import logging

import pytest
from tests.client.handlers import Broken, Idle
from tests.node_fixture import eventually

from timeball.client import worker
from timeball.client.worker import Processes
from timeball.model.errors import RequestError


def test_worker_processes_start_once_and_end_after_a_stop() -> None:
    processes = Processes(2, Idle)
    processes.start()
    with pytest.raises(RequestError, match="started before"):
        processes.start()
    assert len(processes.pids) == 2
    processes.stop()
    processes.join()
    assert processes.pids == []


def test_a_worker_process_that_cannot_start_is_replaced_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "REPLACE_PAUSE_S", 0.0)
    processes = Processes(1, Broken)
    with caplog.at_level(logging.ERROR):
        processes.start()
        eventually(
            lambda: caplog.text.count("worker process ended") >= 2, "the process was started a second time"
        )
        processes.stop()
        processes.join()
    assert "exit=1" in caplog.text


def test_a_worker_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be sent to another process"):
        Processes(1, lambda: Idle())
