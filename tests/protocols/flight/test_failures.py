"""Errors on their way out: ours keep code and text, others say nothing about the inside."""

import logging

import pyarrow.flight as flight
import pytest

from timeball.errors import NotFound, TimeballError
from timeball.protocols.flight.failures import INTERNAL, answering, internal, to_flight


def test_ours_keep_code_and_text() -> None:
    error = to_flight(NotFound("no topic 'x'"))
    assert error.extra_info == b"not_found"
    assert "no topic 'x'" in str(error)


def test_others_are_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(flight.FlightServerError) as caught, answering("do_get"):
        raise KeyError("secret")
    assert "secret" not in str(caught.value) and INTERNAL in str(caught.value)
    assert caught.value.extra_info == TimeballError.code.encode()
    assert "do_get failed" in caplog.text and "secret" in caplog.text


def test_flight_errors_pass() -> None:
    original = flight.FlightCancelledError("gone")
    with pytest.raises(flight.FlightCancelledError) as caught, answering("do_get"):
        raise original
    assert caught.value is original


def test_internal_says_nothing_and_logs_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert str(internal(ValueError("secret"), "send")) == INTERNAL
    assert "secret" in caplog.text
