"""Tests of timeball.spark.jobs.marked. Both engines on the same tables: tests/spark/run/test_on_spark.py."""

from __future__ import annotations

import pytest

from timeball.model.errors import OutOfRange
from timeball.spark.jobs.marked import InProcessEngine


def test_tasks_run_in_order_until_one_fails() -> None:
    done: list[tuple[int, int]] = []

    def task(piece: tuple[int, int]) -> int:
        if piece == (3, 4):
            raise OutOfRange("no such rows")
        done.append(piece)
        return piece[1]

    engine = InProcessEngine()
    assert engine.is_alive() and engine.run("job", "work", task, []) == []
    assert engine.run("job", "work", task, [(1, 2), (2, 3)]) == [2, 3]
    with pytest.raises(OutOfRange):
        engine.run("job", "work", task, [(2, 3), (3, 4), (4, 5)])
    assert done == [(1, 2), (2, 3), (2, 3)]
    engine.cancel("job")
