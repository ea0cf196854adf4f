"""What is known of a call by its headers."""

from __future__ import annotations

from timeball.edges.http2.calls import Call
from timeball.model.access import ANONYMOUS


def test_a_call_that_says_nothing_waits_for_ever_and_is_nobodys() -> None:
    call = Call({"te": "trailers"})
    assert (call.remaining_s, call.caller, call.peer) == (None, ANONYMOUS, "")
