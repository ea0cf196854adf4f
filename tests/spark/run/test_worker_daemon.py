"""Tests of timeball.spark.run.worker_daemon."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from timeball.spark.jobs.marked import Piece
from timeball.spark.run.session import SparkEngine


def look(piece: Piece) -> tuple[int, bool]:
    """Get the process that forked this worker, and whether it had imported the modules of tasks."""
    return os.getppid(), "timeball.spark.jobs.archive" in sys.modules


@pytest.mark.spark
def test_all_workers_come_from_one_process_that_has_imported_for_them(engine: SparkEngine) -> None:
    result = set(engine.run("job", "a look", look, [(n, n + 1) for n in range(4)]))
    [(daemon, has_imported)] = result
    assert has_imported
    assert "timeball.spark.run.worker_daemon" in psutil.Process(daemon).cmdline()
