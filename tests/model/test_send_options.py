"""Options of a send: which values are valid, and how they are stored."""

from __future__ import annotations

import pytest

from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.send_options import (
    UniqueKey,
    check_expiry,
    expiry_properties,
    unique_key,
    unique_key_in,
    with_unique_key,
)

AT_MS = limits.DUE_MS_MIN


def test_a_unique_key_is_stored_with_its_prefix_among_the_keys() -> None:
    assert with_unique_key(None, unique_key("a")) == "unique:a"
    assert with_unique_key("k1 k2", unique_key("a", "keep")) == "k1 k2 unique:a"
    assert unique_key_in({"TIMEBALL_UNIQUE_KEY": "a", "x": "y"}) == UniqueKey("unique:a", None)
    assert unique_key_in({"x": "y"}) is None
    with pytest.raises(InvalidMessage, match="give both"):
        unique_key_in({"TIMEBALL_ON_PENDING": "keep"})


def test_expiry_properties_have_a_time_or_a_duration_after_the_due_time() -> None:
    assert expiry_properties(AT_MS, None, None) == {"TIMEBALL_EXPIRES_MS": str(AT_MS)}
    properties = {"TIMEBALL_EXPIRES_AFTER_MS": "7", "TIMEBALL_ON_EXPIRY": "move"}
    assert expiry_properties(None, 7, "move") == properties


@pytest.mark.parametrize("text", ["", "-1", "1.5", "soon", "\u0661", "9" * 30])
def test_an_expiry_that_is_no_number_of_ms_is_refused(text: str) -> None:
    for name in ("TIMEBALL_EXPIRES_MS", "TIMEBALL_EXPIRES_AFTER_MS"):
        with pytest.raises(InvalidDelay):
            check_expiry({name: text})


@pytest.mark.parametrize(
    "values",
    [
        (None, None, "move"),
        (AT_MS, 1, None),
        (AT_MS - 1, None, None),
        (None, limits.DELAY_MS_MAX + 1, None),
        (AT_MS, None, "drop"),
    ],
)
def test_an_invalid_expiry_is_refused(values: tuple[int | None, int | None, str | None]) -> None:
    with pytest.raises(InvalidDelay):
        expiry_properties(*values)  # type: ignore[arg-type]


def test_an_expiry_before_the_due_time_is_refused() -> None:
    expiry_properties(AT_MS, None, None, AT_MS)
    with pytest.raises(InvalidDelay, match="is due later"):
        expiry_properties(AT_MS, None, None, AT_MS + 1)
