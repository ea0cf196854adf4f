"""Sizes and durations: a number without a unit is refused everywhere, by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.in_process import run_here

from timeball.cli.units import (
    parse_duration_ms,
    parse_property,
    parse_setting_ms,
    parse_size_bytes,
    show_bytes,
    show_ms,
)
from timeball.model.errors import RequestError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("268435456", 268_435_456),
        ("256MiB", 268_435_456),
        ("256 mib", 268_435_456),
        ("1.5KiB", 1_536),
        ("1GB", 1_000_000_000),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_a_size_is_read(text: str, size_bytes: int) -> None:
    """Both families of units, any case, with and without a blank."""
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1M", "1 xB", "0.3B", "1e6", "1 MiB 2"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    """Also "1M", which means two different numbers to two people."""
    with pytest.raises(RequestError):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("0", 0),
        ("250ms", 250),
        ("90s", 90_000),
        ("1.5s", 1_500),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("72H", 259_200_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("PT30M", 1_800_000),
    ],
)
def test_a_duration_is_read(text: str, duration_ms: int) -> None:
    """Only 0 needs no unit."""
    assert parse_duration_ms(text) == parse_setting_ms(text) == duration_ms


@pytest.mark.parametrize("text", ["250", " 5 ", "007"])
def test_a_number_without_a_unit_is_milliseconds_only_where_the_name_says_so(text: str) -> None:
    with pytest.raises(RequestError, match=rf"^{text.strip()}: add a unit, as in 500ms or 10s$"):
        parse_duration_ms(text)
    assert parse_setting_ms(text) == int(text)


@pytest.mark.parametrize("text", ["", "h", "1x", "-5s", "1h-30m", "10 minutes", "1.5"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    """Nothing is guessed."""
    for parse in (parse_duration_ms, parse_setting_ms):
        with pytest.raises(RequestError):
            parse(text)


@given(st.integers(min_value=0, max_value=10**13))
def test_a_duration_survives_being_shown(duration_ms: int) -> None:
    """What help and errors print can be typed in again."""
    assert parse_duration_ms(show_ms(duration_ms)) == duration_ms


@given(st.integers(min_value=0, max_value=1023), st.sampled_from([0, 10, 20, 30]))
def test_a_size_in_one_unit_survives_being_shown(count: int, shift: int) -> None:
    """What help prints can be typed in again."""
    assert parse_size_bytes(show_bytes(count << shift)) == count << shift


def test_a_property_has_a_name_and_a_value() -> None:
    """The value may contain the separator."""
    assert parse_property("region=eu=west") == ("region", "eu=west")
    for text in ("region", "=eu", ""):
        with pytest.raises(RequestError):
            parse_property(text)


@pytest.mark.parametrize(
    "words",
    [
        ["pull", "orders", "--wait", "30"],
        ["status", "--watch", "--every", "10"],
        ["cluster", "drain", "--group", "g1", "--to", "g2", "--wait", "60"],
        ["cluster", "init", "--nodes", "a,b,c", "--wait", "60"],
        ["replay", "--from", "2030-01-01T00:00:00Z", "--until", "2030-01-02T00:00:00Z", "--shift", "7"],
        ["kafka", "--in", "a", "--status-every", "10"],
        ["forecast", "--within", "5"],
        ["forecast", "--extra-over", "5"],
        ["schedule", "orders", "x", "--after", "30"],
        ["reschedule", "a", "--after", "30"],
    ],
    ids=" ".join,
)
def test_a_number_without_a_unit_is_refused(words: list[str]) -> None:
    """It was milliseconds here, and seconds to most people."""
    refused = run_here(*words)
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert refused.returncode == 2
    assert words[-2] in told
    assert f"{words[-1]}: add a unit, as in 500ms or 10s" in told
