"""Requests to etcd's JSON gateway (v3), and the decoding of its answers. No I/O.

The gateway is gRPC as JSON over HTTP: bytes are in base64, 64-bit numbers are strings, and fields that are zero or
false are omitted. A stream (keepalive, watch) answers with one JSON document per line, each inside `result` or
`error`. Error codes are those of gRPC. etcd 3.4 and 3.6 write errors differently, but both with a `code` and a
`message`.

Answers are checked: one that has another form, or belongs to another request, raises BadAnswer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from timeball.cluster.coordination.store import (
    Comparison,
    Delete,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Read,
    RevisionIs,
)
from timeball.model.errors import UNDECODABLE, LeaseLost, SetupError

T = TypeVar("T")

TXN, GRANT, KEEPALIVE = "/v3/kv/txn", "/v3/lease/grant", "/v3/lease/keepalive"
REVOKE, TIME_TO_LIVE = "/v3/lease/revoke", "/v3/lease/timetolive"
WATCH, AUTHENTICATE = "/v3/watch", "/v3/auth/authenticate"

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED = 3, 5, 7
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNIMPLEMENTED, UNAUTHENTICATED = 8, 9, 12, 16


class BadAnswer(Exception):
    """The answer is not from etcd, or not to this request: ask another member."""


class Misdirected(BadAnswer):
    """The endpoint is not etcd or cannot be trusted. If this holds for all members, the operator must act."""


class TokenRefused(Exception):
    """The token is missing, unknown to this member, or older than a change of etcd's users: authenticate again."""


class AuthenticationOff(Exception):
    """The members use no authentication: continue without a token, as etcd's own clients do."""


# Texts by which etcd refuses a token with another code than UNAUTHENTICATED.
_TOKEN_WORDS = ("auth store is old", "revision in header is old", "user name is empty")


class _Header(msgspec.Struct):
    revision: int = 0


class _KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _Range(msgspec.Struct):
    kvs: list[_KeyValue] = []
    more: bool = False


class _Response(msgspec.Struct):
    response_range: _Range | None = None


class _Txn(msgspec.Struct):
    header: _Header
    succeeded: bool = False
    responses: list[_Response] = []


class _Lease(msgspec.Struct, rename={"id": "ID", "ttl": "TTL"}):
    header: _Header
    id: int = 0
    ttl: int = 0


class _Token(msgspec.Struct):
    token: str


class _WatchEvent(msgspec.Struct):
    header: _Header
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    events: list[Any] = []


class _Error(msgspec.Struct):
    """An error document.

    In 3.4, `error` and `message` are equal, and a stream names the code `grpc_code`.
    """

    code: int | None = None
    grpc_code: int | None = None
    message: str = ""
    error: str = ""


class _KeepAlive(msgspec.Struct):
    result: _Lease | None = None
    error: _Error | None = None


class _WatchLine(msgspec.Struct):
    result: _WatchEvent | None = None
    error: _Error | None = None


def txn_body(when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation]) -> bytes:
    """Encode a transaction."""
    return msgspec.json.encode(
        {
            "compare": [_encode_comparison(item) for item in when],
            "success": [_encode_operation(item) for item in then],
            "failure": [_encode_operation(item) for item in otherwise],
        }
    )


def read_txn(body: bytes, then: Sequence[Operation], otherwise: Sequence[Operation]) -> Outcome:
    """Decode the outcome of a transaction with these operations (`txn_body`). Raises BadAnswer."""
    answer = _decode(body, _Txn)
    operations = then if answer.succeeded else otherwise
    if answer.header.revision < 1:
        raise BadAnswer("a transaction without a revision")
    if len(answer.responses) != len(operations):
        raise BadAnswer(f"{len(answer.responses)} answers to {len(operations)} operations")
    reads = [
        _read_range(operation, response.response_range)
        for operation, response in zip(operations, answer.responses)
        if isinstance(operation, Read)
    ]
    return Outcome(answer.succeeded, answer.header.revision, reads)


def read_grant(body: bytes) -> tuple[int, int]:
    """Decode the id and the TTL in seconds of a new lease. Raises BadAnswer."""
    answer = _decode(body, _Lease)
    if answer.id == 0 or answer.ttl < 1:
        raise BadAnswer("a lease without an id or a time")
    return answer.id, answer.ttl


def read_renewal(body: bytes, lease_id: int) -> int:
    """Decode the TTL in seconds of a renewed lease. Raises LeaseLost, BadAnswer and the errors of `read_error`."""
    answer = _decode(body, _KeepAlive)
    if answer.error is not None:
        raise _to_exception(answer.error, 200)
    if answer.result is None or answer.result.id != lease_id:
        raise BadAnswer("the renewal of another lease")
    if answer.result.ttl < 1:  # etcd reports no error for a lease that has ended, only a TTL of 0
        raise _lease_lost(lease_id)
    return answer.result.ttl


def read_time_to_live(body: bytes) -> int | None:
    """Decode how many seconds of a lease are left. None when it has ended. Raises BadAnswer."""
    answer = _decode(body, _Lease)
    return answer.ttl if answer.ttl >= 0 else None


def authentication_body(user: str, password: str) -> bytes:
    """Encode the request for a token."""
    return msgspec.json.encode({"name": user, "password": password})


def lease_body(lease_id: int, *, ttl_s: int = 0) -> bytes:
    """Encode the request to grant, renew, revoke or inspect a lease. With id 0, etcd chooses the id of a new lease."""
    return msgspec.json.encode({"ID": lease_id, "TTL": ttl_s} if ttl_s else {"ID": lease_id})


def read_token(body: bytes) -> str:
    """Decode the token of an authentication. Raises BadAnswer."""
    return _decode(body, _Token).token


def watch_body(prefix: str) -> bytes:
    """Encode the request to watch the keys below a prefix, from the present revision on."""
    return msgspec.json.encode({"create_request": _encode_keys(prefix, is_prefix=True)})


def read_watch(line: bytes) -> int:
    """Decode the revision up to which a watch has reported. Raises BadAnswer and the errors of `read_error`."""
    answer = _decode(line, _WatchLine)
    if answer.error is not None:
        raise _to_exception(answer.error, 200)
    if answer.result is None or answer.result.canceled:
        raise BadAnswer(f"the watch ended: {answer.result.cancel_reason if answer.result else 'no result'}")
    return answer.result.header.revision


def read_error(body: bytes, status: int) -> Exception:
    """Convert an answer with a status other than 200 to an exception."""
    try:
        return _to_exception(_decode(body, _Error), status)
    except BadAnswer:
        return Misdirected(f"HTTP {status}, and no error of etcd's: {body[:100]!r}")


def _to_exception(error: _Error, status: int) -> Exception:
    """Choose the exception for an error of etcd: one type for each reaction of the caller.

    `status`: the HTTP status, for the text of an error without a code.
    """
    code = error.grpc_code if error.grpc_code is not None else error.code
    text = error.message or error.error
    if code is None:
        return Misdirected(f"HTTP {status}, and no error of etcd's")
    # Compare texts where etcd uses one code for several errors. etcd's own clients do the same.
    if code == UNAUTHENTICATED or any(words in text for words in _TOKEN_WORDS):
        return TokenRefused(text)
    if code == NOT_FOUND and "lease" in text:
        return LeaseLost("the lease of this node has ended in etcd: it no longer leads")
    if "authentication is not enabled" in text:
        return AuthenticationOff(text)
    if code in (PERMISSION_DENIED, UNIMPLEMENTED) or "authentication failed" in text:
        return SetupError(f"etcd refuses this node: {text}. Check its user, password and role (docs/etcd.md)")
    if "database space exceeded" in text:
        return SetupError(f"etcd takes no more writes: {text}. Compact and defragment it (docs/etcd.md)")
    if code in (INVALID_ARGUMENT, FAILED_PRECONDITION):
        return SetupError(f"etcd refuses a request: {text}. Check its version and limits (docs/etcd.md)")
    if text == "connection closed":
        # The gateway reports this error about its own connection to the member.
        return BadAnswer(f"{text} (is the member's certificate one for clientAuth, too? docs/etcd.md)")
    # Timeouts, no leader, too many requests, a member that stops: try another member, or later.
    return BadAnswer(text or f"code {code}")


def _lease_lost(lease_id: int) -> LeaseLost:
    return LeaseLost(f"lease {lease_id:x} of this node has ended in etcd: it no longer leads")


def _encode_comparison(comparison: Comparison) -> dict[str, Any]:
    """Encode a comparison as the gateway's JSON object."""
    if isinstance(comparison, RevisionIs):
        target = {"target": "MOD", "mod_revision": comparison.revision}
    else:
        target = {"target": "LEASE", "lease": comparison.lease_id}
    return {"key": comparison.key.encode(), "result": "EQUAL", **target}


def _encode_operation(operation: Operation) -> dict[str, Any]:
    """Encode an operation of a transaction as the gateway's JSON object."""
    if isinstance(operation, Put):
        put = {"key": operation.key.encode(), "value": operation.value, "lease": operation.lease_id}
        return {"request_put": put}
    if isinstance(operation, Delete):
        return {"request_delete_range": {"key": operation.key.encode()}}
    return {"request_range": _encode_keys(operation.key, is_prefix=operation.is_prefix)}


def _encode_keys(key: str, *, is_prefix: bool) -> dict[str, bytes]:
    """Encode one key, or the range of all keys with a prefix."""
    first = key.encode()
    # The range of all keys with this prefix ends before the prefix whose last byte is 1 higher. All prefixes of this
    # program end with "/", so there is no overflow.
    return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])} if is_prefix else {"key": first}


def _read_range(read: Read, answer: _Range | None) -> list[KeyValue]:
    """Check and convert the keys that answer a Read. Raises BadAnswer for a key that was not asked for."""
    if answer is None:
        return []
    key_values = [KeyValue(kv.key.decode(), kv.value, kv.mod_revision, kv.lease) for kv in answer.kvs]
    for key_value in key_values:
        if (
            not (key_value.key.startswith(read.key) if read.is_prefix else key_value.key == read.key)
            or key_value.revision < 1
        ):
            raise BadAnswer(f"{key_value.key} in place of {read.key}")
    if answer.more or (not read.is_prefix and len(key_values) > 1):
        raise BadAnswer(f"not all of {read.key}")
    return key_values


def _decode(body: bytes, answer_type: type[T]) -> T:
    """Decode an answer as this type. Raises BadAnswer."""
    try:
        return msgspec.json.decode(body, type=answer_type, strict=False)
    except UNDECODABLE as error:
        # Do not include the answer in the text: it may contain a secret.
        raise BadAnswer(f"not an answer of etcd's: {error}") from error
