"""The defaults of a Call that has headers only."""

from __future__ import annotations

from timeball.edges.http2.exchange import Call
from timeball.model.access import ANONYMOUS


def test_a_call_with_headers_only_has_no_deadline_and_an_anonymous_caller() -> None:
    call = Call({"te": "trailers"})
    assert (call.remaining_s, call.caller, call.peer) == (None, ANONYMOUS, "")
