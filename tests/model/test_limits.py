"""The bounds fit the field widths they claim to follow from, and each other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from timeball.model import limits


def test_the_last_instant_is_the_last_second_that_a_datetime_has() -> None:
    last = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=limits.INSTANT_MS_MAX)
    assert last == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_the_latest_instant_plus_the_longest_delay_fits_into_64_bits() -> None:
    assert limits.INSTANT_MS_MAX + limits.DELAY_MS_MAX < 2**63


def test_the_longest_delay_is_ten_years() -> None:
    ten_years = datetime(2034, 1, 1, tzinfo=UTC) - datetime(2024, 1, 1, tzinfo=UTC)
    assert timedelta(milliseconds=limits.DELAY_MS_MAX) == ten_years


def test_one_message_fits_into_a_frame_and_a_frame_into_its_length_field() -> None:
    largest = (
        limits.BODY_BYTES_MAX
        + limits.PROPERTIES_BYTES_MAX
        + limits.KEYS_BYTES_MAX
        + limits.TAG_BYTES_MAX
        + limits.TOPIC_BYTES_MAX
        + limits.UNIQUE_KEY_BYTES_MAX
    )
    assert largest * 2 < limits.FRAME_BYTES_MAX < 2**31


def test_a_request_fits_into_one_frame() -> None:
    assert limits.ROWS_PER_REQUEST_MAX <= limits.FRAME_ROWS_MAX
    assert limits.FRAME_BYTES_MAX <= limits.APPEND_BYTES_IN_FLIGHT_MAX


def test_as_many_keys_as_a_message_may_have_fit_with_their_separators() -> None:
    assert limits.KEYS_PER_MESSAGE_MAX * 2 <= limits.KEYS_BYTES_MAX


@pytest.mark.parametrize("name", ["orders", "%RETRY%group-1", "a_b|c", "T" * limits.TOPIC_BYTES_MAX])
def test_names_that_rocketmq_allows_are_allowed(name: str) -> None:
    assert limits.NAME.match(name)


@pytest.mark.parametrize("name", ["", "a.b", "../a", "a/b", "a b", "é", "a\x00", "a\x01b"])
def test_paths_separators_and_other_characters_are_refused_as_names(name: str) -> None:
    assert not limits.NAME.match(name)


def test_a_name_with_a_line_break_at_the_end_is_refused() -> None:
    assert not limits.NAME.fullmatch("orders\n")


def test_the_ids_and_keys_of_a_trace_of_a_hundred_messages_fit_into_the_keys() -> None:
    """A 4.x client sends 100 contexts together. Each has an id of 32 digits and the keys of its message."""
    names = [f"{n:032X} order-{n} customer-{n}" for n in range(100)]
    assert len(" ".join(names).split()) <= limits.KEYS_PER_MESSAGE_MAX
    assert len(" ".join(names).encode()) <= limits.KEYS_BYTES_MAX
