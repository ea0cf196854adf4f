"""The output of commands, and errors as sentences and exit codes."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.cli.output import ExitCode, bars, explain
from timeball.model import errors


def test_the_longest_bar_is_as_wide_as_it_may_be() -> None:
    """And the others are in proportion."""
    lines = bars({"a": 10, "bb": 5, "c": 0}, width=10)
    assert [line.count("█") for line in lines] == [10, 5, 0]
    assert len({len(line) for line in lines}) == 1


def test_nothing_gives_no_lines() -> None:
    """An empty chart is no error."""
    assert bars({}) == []


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 10**12), min_size=1))
def test_whatever_is_there_shows(counts: dict[str, int]) -> None:
    """One scheduled message beside a million still has a bar, and nothing has none."""
    for line, count in zip(bars(counts), counts.values()):
        assert ("█" in line) == (count > 0)


def _all_errors(root: type[errors.TimeballError]) -> list[type[errors.TimeballError]]:
    """Those that can reach a command: an edge's own never leave it."""
    found = [each for child in root.__subclasses__() for each in _all_errors(child)]
    return [] if root.__module__.startswith("timeball.edges") else [root, *found]


@pytest.mark.parametrize(
    "kind", [k for k in _all_errors(errors.TimeballError) if k is not errors.TimeballError]
)
def test_every_error_of_ours_has_a_code_of_its_own_sort(kind: type[errors.TimeballError]) -> None:
    """A new error class may not end up as "a fault in Timeball"."""
    sentence, code = explain(kind("what happened, and what to do"))
    assert sentence == "what happened, and what to do"
    assert code in (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.SETUP, ExitCode.STORAGE)


def test_who_must_act_decides_the_code() -> None:
    """The caller, the operator, or whoever looks after the disk."""
    assert explain(errors.InvalidDelay("x"))[1] == 2
    assert explain(errors.Unavailable("x"))[1] == 3
    assert explain(errors.SetupError("x"))[1] == 4
    assert explain(errors.Corrupt("x"))[1] == 5
    assert explain(errors.OverLimit("disk full"))[1] == 5


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ExitCode.STORAGE), (errno.EADDRINUSE, ExitCode.SETUP), (errno.EACCES, ExitCode.SETUP)],
)
def test_the_systems_errors_name_the_file(number: int, code: ExitCode) -> None:
    """An OSError that nobody typed still says where."""
    sentence, found = explain(OSError(number, "went wrong", "the/file"))
    assert found == code
    assert "the/file" in sentence


def test_anything_else_is_our_fault_and_says_how_to_see_more() -> None:
    """No stack trace, but the way to one."""
    sentence, code = explain(ZeroDivisionError("division by zero"))
    assert code == ExitCode.FAULT
    assert "TIMEBALL_DEBUG=1" in sentence
    assert "\n" not in sentence


def test_only_the_first_line_of_an_error_is_shown() -> None:
    """A wire may have added its own lines of context."""
    assert explain(errors.Unavailable("no broker.\nclient debug context …"))[0] == "no broker"
