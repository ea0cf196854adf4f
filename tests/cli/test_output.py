"""The output of commands, and errors as sentences and exit codes."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from timeball.cli import output
from timeball.cli.output import (
    LINES_MAX,
    REPEAT_S,
    CountingHandler,
    ExitCode,
    JsonLines,
    TextLines,
    bars,
    explain,
)
from timeball.model import errors


def test_the_longest_bar_has_the_whole_width() -> None:
    """The other bars are in proportion to it, and all lines are equally long."""
    lines = bars({"a": 10, "bb": 5, "c": 0}, width=10)
    assert [line.count("█") for line in lines] == [10, 5, 0]
    assert len({len(line) for line in lines}) == 1


def test_a_chart_without_bars_has_no_lines() -> None:
    assert bars({}) == []


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 10**12), min_size=1))
def test_each_count_above_zero_has_a_visible_bar(counts: dict[str, int]) -> None:
    """One message beside a million has a bar, too. A count of 0 has none."""
    for line, count in zip(bars(counts), counts.values()):
        assert ("█" in line) == (count > 0)


def _all_errors(root: type[errors.TimeballError]) -> list[type[errors.TimeballError]]:
    """List a class of errors and its subclasses, without those of edges, which never reach a command."""
    subclasses = [each for child in root.__subclasses__() for each in _all_errors(child)]
    return [] if root.__module__.startswith("timeball.edges") else [root, *subclasses]


@pytest.mark.parametrize(
    "kind", [each for each in _all_errors(errors.TimeballError) if each is not errors.TimeballError]
)
def test_every_error_class_of_timeball_has_an_exit_code(kind: type[errors.TimeballError]) -> None:
    """A new class must not be reported as a fault in Timeball."""
    sentence, code = explain(kind("what happened, and what to do"))
    assert sentence == "what happened, and what to do"
    assert code in (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.SETUP, ExitCode.STORAGE)


def test_the_exit_code_follows_from_the_class_of_the_error() -> None:
    """2: the caller must act. 3 and 4: the operator. 5: the person who is responsible for the disk."""
    assert explain(errors.InvalidDelay("x"))[1] == 2
    assert explain(errors.Unavailable("x"))[1] == 3
    assert explain(errors.SetupError("x"))[1] == 4
    assert explain(errors.Corrupt("x"))[1] == 5
    assert explain(errors.OverLimit("disk full"))[1] == 5


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ExitCode.STORAGE), (errno.EADDRINUSE, ExitCode.SETUP), (errno.EACCES, ExitCode.SETUP)],
)
def test_an_error_of_the_operating_system_names_its_file(number: int, code: ExitCode) -> None:
    """The error is an OSError that was not converted to an error of Timeball."""
    sentence, exit_code = explain(OSError(number, "went wrong", "the/file"))
    assert exit_code == code
    assert "the/file" in sentence


def test_an_unexpected_error_is_a_fault_and_its_sentence_names_timeball_debug() -> None:
    """The sentence has no stack trace."""
    sentence, code = explain(ZeroDivisionError("division by zero"))
    assert code == ExitCode.FAULT
    assert "TIMEBALL_DEBUG=1" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("console", [output.out, output.err])
def test_a_name_between_colons_is_not_replaced_by_an_emoji(
    console: Callable[[], Console], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "http://[2001:db8:a:b::1]:7480/ has no topic shop:x:eu"
    console().print(text, markup=False)
    printed = capsys.readouterr()
    assert printed.out + printed.err == f"{text}\n"


def test_only_the_first_line_of_an_error_is_shown() -> None:
    """A remote call may have added lines of context."""
    assert explain(errors.Unavailable("no broker.\nclient debug context …"))[0] == "no broker"


BEGIN_S = 1_896_076_800.123  # 2030-01-31T08:00:00.123Z


def record(
    text: str, at_s: float = BEGIN_S, level: int = logging.WARNING, **more: object
) -> logging.LogRecord:
    """Build a log record of `timeball.log.writer` with this text and time."""
    built = logging.LogRecord("timeball.log.writer", level, __file__, 1, text, None, None, **more)  # type: ignore[arg-type]
    built.created = at_s
    return built


class Lines:
    """A log handler, and its output."""

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
        built = record("a fault")
        built.exc_info = sys.exc_info()
    lines.handler.handle(built)
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


def test_a_line_that_still_repeats_is_written_once_in_repeat_s(lines: Lines) -> None:
    for after_s in range(10 * int(REPEAT_S)):
        lines.handler.handle(record("no room", BEGIN_S + after_s))
    written = [line for line in lines() if "repeated" not in line]
    assert len(written) == 10


def test_counts_are_written_when_the_handler_is_closed(lines: Lines) -> None:
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


def test_remembered_lines_are_bounded_and_no_count_is_lost(lines: Lines) -> None:
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


def test_a_second_configuration_replaces_the_handler_and_the_level(root_logger: logging.Logger) -> None:
    first, second = io.StringIO(), io.StringIO()
    output.configure_logging("info", "text", first)
    output.configure_logging("error", "text", second)
    logging.getLogger("timeball").warning("not heard")
    logging.getLogger("timeball").error("heard")
    assert first.getvalue() == ""
    assert second.getvalue().endswith(" ERROR timeball: heard\n")
