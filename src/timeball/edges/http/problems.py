"""The answer to a request, and problem documents (RFC 9457) for errors. No I/O.

This is separate from requests.py, so that the answers during a recovery (recovering.py) need no HTTP library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from timeball.edges.http.codec import JSON
from timeball.edges.shared.error_codes import Refused, codes_of, sentence
from timeball.model.errors import StorageError, TimeballError, Unauthorized

PROBLEM = "application/problem+json"


class Answer(NamedTuple):
    """The answer to a request. `value` is encoded as JSON, unless it is bytes.

    `size_bytes` is an estimate of the size, which counts towards the limit for unsent bytes.
    """

    status: int
    value: Any
    headers: tuple[tuple[bytes, bytes], ...] = ()
    media_type: str = JSON
    size_bytes: int = 0


def problem(status: int, code: str, detail: str, *, allow: str = "", **members: Any) -> Answer:
    """Build an answer with a problem document. `members` are additional members of the document.

    `allow` is the value of the header Allow.
    """
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
        **members,
    }
    return Answer(status, value, headers, PROBLEM)


def problem_of(error: BaseException) -> Answer:
    """Build the answer for an error. Of an internal fault, it only contains the name."""
    if isinstance(error, Refused):
        return problem(error.protocol_code, "bad_request", sentence(error))
    if not isinstance(error, TimeballError):
        return problem(500, "error", sentence(error))
    # The log has stopped: the request was correct, and another broker may accept it.
    status = 503 if isinstance(error, StorageError) else codes_of(error).http
    assert status != 401 or isinstance(error, Unauthorized)
    return problem(status, error.code, sentence(error))
