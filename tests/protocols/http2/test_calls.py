"""What is known of a call by its headers."""

from __future__ import annotations

import pytest

from timeball.access import ANONYMOUS
from timeball.protocols.http2.calls import Call, seconds_of


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("2H", 7_200.0), ("3M", 180.0), ("30S", 30.0), ("50m", 0.05), ("2999000u", 2.999), ("99999999n", 0.099_999_999),
        ("0S", 0.0), ("", None), ("S", None), ("3", None), ("3s", None), ("123456789S", None), ("-1S", None),
        ("1.5S", None), ("\u0663S", None), ("3S ", None),
    ],
)  # fmt: skip
def test_a_timeout_is_digits_and_a_unit(timeout: str, seconds: float | None) -> None:
    assert seconds_of(timeout) == (None if seconds is None else pytest.approx(seconds))


def test_a_call_that_says_nothing_waits_for_ever_and_is_nobodys() -> None:
    call = Call({"te": "trailers"})
    assert (call.remaining_s, call.caller, call.peer) == (None, ANONYMOUS, "")
