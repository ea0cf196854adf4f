"""Log lines: what each says, in both formats, and that a line that repeats is counted instead."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from timeball.cli import log_lines
from timeball.cli.log_lines import LINES_MAX, REPEAT_S, CountingHandler, JsonLines, TextLines

BEGIN_S = 1_896_076_800.123  # 2030-01-31T08:00:00.123Z


def record(
    text: str, at_s: float = BEGIN_S, level: int = logging.WARNING, **more: object
) -> logging.LogRecord:
    made = logging.LogRecord("timeball.log.writer", level, __file__, 1, text, None, None, **more)  # type: ignore[arg-type]
    made.created = at_s
    return made


class Lines:
    """A handler, and what it has written."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = io.StringIO()
        self.handler = CountingHandler(self._stream)
        self.handler.setFormatter(formatter)

    def __call__(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def lines() -> Lines:
    return Lines(TextLines())


def test_a_line_has_time_level_logger_and_text(lines: Lines) -> None:
    lines.handler.handle(record("no room"))
    assert lines() == ["2030-01-31T08:00:00.123Z WARNING timeball.log.writer: no room"]


def test_json_is_one_document_a_line_stack_traces_included() -> None:
    lines = Lines(JsonLines())
    try:
        raise ValueError("bad\nbytes")
    except ValueError:
        made = record("a fault")
        made.exc_info = sys.exc_info()
    lines.handler.handle(made)
    (line,) = lines()
    document = json.loads(line)
    assert document.pop("exception").endswith("ValueError: bad\nbytes")
    assert document == {
        "time": "2030-01-31T08:00:00.123Z", "level": "WARNING", "logger": "timeball.log.writer", "message": "a fault",
    }  # fmt: skip


def test_repeats_are_counted_and_the_count_is_written_later(lines: Lines) -> None:
    for after_s in range(50):
        lines.handler.handle(record("no room", BEGIN_S + after_s))
    assert len(lines()) == 1
    lines.handler.handle(record("room again", BEGIN_S + REPEAT_S + 1))
    assert [line.partition(": ")[2] for line in lines()] == [
        "no room", "no room (repeated 49 times)", "room again",
    ]  # fmt: skip


def test_a_line_that_still_repeats_is_written_once_in_that_time(lines: Lines) -> None:
    for after_s in range(10 * int(REPEAT_S)):
        lines.handler.handle(record("no room", BEGIN_S + after_s))
    written = [line for line in lines() if "repeated" not in line]
    assert len(written) == 10


def test_counts_are_written_at_the_end(lines: Lines) -> None:
    for _ in range(3):
        lines.handler.handle(record("no room"))
    lines.handler.close()
    assert lines()[-1].endswith("no room (repeated 2 times)")


def test_json_counts_in_a_field_of_its_own() -> None:
    lines = Lines(JsonLines())
    for _ in range(3):
        lines.handler.handle(record("no room"))
    lines.handler.close()
    assert [json.loads(line).get("repeated") for line in lines()] == [None, 2]


def test_a_clock_that_is_set_back_silences_no_line(lines: Lines) -> None:
    lines.handler.handle(record("no room", BEGIN_S))
    lines.handler.handle(record("no room", BEGIN_S - 86_400))
    assert len(lines()) == 2


def test_what_is_remembered_is_bounded_and_no_count_is_lost(lines: Lines) -> None:
    lines.handler.handle(record("first"))
    lines.handler.handle(record("first"))
    for number in range(LINES_MAX):
        lines.handler.handle(record(f"line {number}"))
    assert [line for line in lines() if line.endswith("first (repeated 1 times)")]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, as it was before once the test is over."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_configured_again_there_is_one_handler(root_logger: logging.Logger) -> None:
    first, second = io.StringIO(), io.StringIO()
    log_lines.configure("info", "text", first)
    log_lines.configure("error", "text", second)
    logging.getLogger("timeball").warning("not heard")
    logging.getLogger("timeball").error("heard")
    assert first.getvalue() == ""
    assert second.getvalue().endswith(" ERROR timeball: heard\n")
