"""Errors on their way out: ours keep code and text, others say nothing about the inside."""

import logging

import pytest

from timeball.errors import NotFound
from timeball.protocols.flight.failures import details, internal, trailers


def test_ours_keep_code_and_text() -> None:
    error = NotFound("no topic 'x'")
    assert details(error) == "no topic 'x'. Detail: Failed"
    assert dict(trailers(error)) == {
        "grpc-status-details-bin": b"not_found",
        "x-arrow-status": "5",
        "x-arrow-status-detail-bin": b"Failed",
        "x-arrow-status-message-bin": b"no topic 'x'",
    }


def test_internal_says_nothing_and_logs_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert "secret" not in str(internal(ValueError("secret"), "send"))
    assert "secret" in caplog.text
