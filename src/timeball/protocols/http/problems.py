"""An answer, and the problem document (RFC 9457) that says why there is no better one. No I/O.

Apart from requests.py, so that the answers of a recovery (recovering.py) need no library of HTTP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from timeball.errors import StorageError, TimeballError, Unauthorized
from timeball.protocols.error_codes import Refused, codes_of, sentence
from timeball.protocols.http.codec import JSON

PROBLEM = "application/problem+json"


class Answer(NamedTuple):
    """A status, and what becomes the JSON beneath it, or bytes as they are; `size_bytes` counts while it is written."""

    status: int
    value: Any
    headers: tuple[tuple[bytes, bytes], ...] = ()
    media_type: str = JSON
    size_bytes: int = 0


def problem(status: int, code: str, detail: str, *, allow: str = "", **more: Any) -> Answer:
    """Return a problem document; `more`: members that say something about this problem alone."""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"allow", allow.encode()),) if allow else ()
    if status == 401:
        headers = ((b"www-authenticate", b'Bearer realm="timeball"'),)
    elif status in (429, 503):
        headers = ((b"retry-after", b"1"),)
    value = {
        "type": f"urn:timeball:{code}",
        "title": code,
        "status": status,
        "code": code,
        "detail": detail,
        **more,
    }
    return Answer(status, value, headers, PROBLEM)


def problem_of(error: BaseException) -> Answer:
    """Return the problem document of an error; a fault of ours is named, and its text kept for the broker's log."""
    if isinstance(error, Refused):
        return problem(error.protocol_code, "bad_request", sentence(error))
    if not isinstance(error, TimeballError):
        return problem(500, "error", sentence(error))
    # The log has stopped: the request was right, and another broker may take it.
    status = 503 if isinstance(error, StorageError) else codes_of(error).http
    assert status != 401 or isinstance(error, Unauthorized)
    return problem(status, error.code, sentence(error))
