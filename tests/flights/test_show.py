"""The steps of the demo: what is printed when, and how memory at rest is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.flights import show
from examples.flights.show import Steps, _held_at_rest, _waiting_rows
from tests.node_fixture import running_node

from timeball.io.clock import ManualClock


def test_each_step_is_one_line_with_the_seconds_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds of a step, and of all, are those of the clock."""
    clock = ManualClock()
    steps = Steps(clock, quiet=False)
    clock.advance(1_500)
    assert steps.done("one") == 1.5
    clock.advance(500)
    assert steps.done("two") == 0.5
    assert steps.total_s == 2.0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(" ", 1)[1] for line in shown.err.splitlines()] == ["one (1.5 s)", "two (0.5 s)"]


def test_quiet_steps_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json stderr is for errors."""
    steps = Steps(ManualClock(), quiet=True)
    with steps.busy("at work"):
        steps.done("one")
    assert capsys.readouterr() == ("", "")


def test_skipped_benchmarks_are_reported_and_take_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    Steps(ManualClock(), quiet=False).left_out("nothing is compacted")
    Steps(ManualClock(), quiet=True).left_out("nothing is compacted")
    assert capsys.readouterr().err == "– nothing is compacted\n"


def test_pending_messages_are_counted_wherever_they_are(tmp_path: Path) -> None:
    """In the tail, near its instant, in the table."""
    with running_node(tmp_path / "d") as node, node.client() as ball:
        ball.send_many([{"body": "x", "after": "86400s"} for _ in range(7)], topic="t")
        assert _waiting_rows(ball) == 7
        ball.compact()
        ball.send_many([{"body": "x", "after": "3600s"} for _ in range(2)], topic="t")
        assert _waiting_rows(ball) == 9


def test_memory_at_rest_is_what_the_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, of this process here: more than Python needs, less than the machine has."""
    monkeypatch.setattr(show, "REST_S", 0.0)
    monkeypatch.setattr(show, "LOOK_S", 0.0)
    with running_node(tmp_path / "d") as node, node.client() as ball:
        assert 10_000_000 < _held_at_rest(ball) < 100_000_000_000
