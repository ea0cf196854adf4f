"""The printed steps of the demo, its count of pending messages, and its reading of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.flights import show
from examples.flights.show import Steps, _held_at_rest, _waiting_rows
from tests.node_fixture import running_node

from timeball.io.clock import ManualClock


def test_each_step_is_printed_as_one_line_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    steps = Steps(clock, quiet=False)
    clock.advance(1_500)
    assert steps.done("one") == 1.5
    clock.advance(500)
    assert steps.done("two") == 0.5
    assert steps.total_s == 2.0
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.split(" ", 1)[1] for line in output.err.splitlines()] == ["one (1.5 s)", "two (0.5 s)"]


def test_quiet_steps_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json only errors go to standard error."""
    steps = Steps(ManualClock(), quiet=True)
    with steps.busy("at work"):
        steps.done("one")
    assert capsys.readouterr() == ("", "")


def test_a_skipped_step_is_printed_without_a_time_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Steps(ManualClock(), quiet=False).left_out("nothing is compacted")
    Steps(ManualClock(), quiet=True).left_out("nothing is compacted")
    assert capsys.readouterr().err == "– nothing is compacted\n"


def test_pending_messages_of_the_tail_and_of_the_table_are_counted(tmp_path: Path) -> None:
    with running_node(tmp_path / "d") as node, node.client() as ball:
        ball.send_many([{"body": "x", "after": "86400s"} for _ in range(7)], topic="t")
        assert _waiting_rows(ball) == 7
        ball.compact()
        ball.send_many([{"body": "x", "after": "3600s"} for _ in range(2)], topic="t")
        assert _waiting_rows(ball) == 9


def test_memory_at_rest_is_measured_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node runs in this process, which holds more than 10 MB and less than 100 GB."""
    monkeypatch.setattr(show, "REST_S", 0.0)
    monkeypatch.setattr(show, "LOOK_S", 0.0)
    with running_node(tmp_path / "d") as node, node.client() as ball:
        assert 10_000_000 < _held_at_rest(ball) < 100_000_000_000
