"""Requests and answers of etcd's gateway as literal bytes: of version 3.4 recorded from Debian's, and of 3.6."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.cluster.coordination import etcd_codec as codec
from timeball.cluster.coordination.etcd_codec import AuthenticationOff, BadAnswer, Misdirected, TokenRefused
from timeball.cluster.coordination.store import Delete, KeyValue, LeaseIs, Outcome, Put, Read, RevisionIs
from timeball.model.errors import LeaseLost, SetupError

HEADER = (
    b'"header":{"cluster_id":"14841639068965178418","member_id":"10276657743932975437",'
    b'"revision":"7","raft_term":"2"}'
)


def test_a_transaction_is_encoded_as_etcd_reads_it() -> None:
    body = codec.txn_body(
        [RevisionIs("a", 0), LeaseIs("b", 2**62 + 1)],
        [Put("a", b"\xff\0", 5), Delete("b")],
        [Read("a/", is_prefix=True)],
    )
    assert json.loads(body) == {
        "compare": [
            {"key": "YQ==", "result": "EQUAL", "target": "MOD", "mod_revision": 0},
            {"key": "Yg==", "result": "EQUAL", "target": "LEASE", "lease": 2**62 + 1},
        ],
        "success": [
            {"request_put": {"key": "YQ==", "value": "/wA=", "lease": 5}},
            {"request_delete_range": {"key": "Yg=="}},
        ],
        "failure": [{"request_range": {"key": "YS8=", "range_end": "YTA="}}],
    }


def test_the_answer_to_a_transaction_is_decoded() -> None:
    body = (
        b"{" + HEADER + b',"succeeded":true,"responses":[{"response_put":{"header":{"revision":"7"}}},'
        b'{"response_range":{"header":{"revision":"7"},"kvs":[{"key":"YQ==","create_revision":"3","mod_revision":"7",'
        b'"version":"2","value":"/wA=","lease":"7587862094297604359"}],"count":"1"}}]}'
    )
    then = [Put("a", b""), Read("a")]
    assert codec.read_txn(body, then, []) == Outcome(
        True, 7, [[KeyValue("a", b"\xff\0", 7, 7587862094297604359)]]
    )
    # Not found, and the comparison failed: zero and false are left out.
    absent = b"{" + HEADER + b',"responses":[{"response_range":{"header":{"revision":"7"}}}]}'
    assert codec.read_txn(absent, then, [Read("a")]) == Outcome(False, 7, [[]])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"header":{},"succeeded":true,"responses":[{"response_range":{}}]}',  # no revision
        b"{" + HEADER + b',"succeeded":true}',  # fewer answers than operations
        b"{" + HEADER + b',"responses":[{"response_range":{}}]}',  # an answer to the other, empty list
        b"{"
        + HEADER
        + b',"succeeded":true,"responses":[{"response_range":{"kvs":[{"key":"Yg==","mod_revision":"1"}]}}]}',
        b"{" + HEADER + b',"succeeded":true,"responses":[{"response_range":{"kvs":[{"key":"YQ=="}]}}]}',
        b"{" + HEADER + b',"succeeded":true,"responses":[{"response_range":{"more":true}}]}',
        b"{"
        + HEADER
        + b',"succeeded":true,"responses":[{"response_range":{"kvs":[{"key":"!","mod_revision":"1"}]}}]}',
    ],
)
def test_an_invalid_answer_is_refused(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        codec.read_txn(body, [Read("a")], [])


def test_the_text_of_an_undecodable_answer_is_not_in_the_error() -> None:
    """The answer may contain a secret, and errors are logged."""
    with pytest.raises(BadAnswer) as caught:
        codec.read_txn(b'{"header":{"revision":"c2VjcmV0"}}', [], [])
    assert "c2VjcmV0" not in str(caught.value)


def test_requests_and_answers_about_leases_are_encoded_and_decoded() -> None:
    assert json.loads(codec.lease_body(0, ttl_s=2)) == {"ID": 0, "TTL": 2}
    assert json.loads(codec.lease_body(7)) == {"ID": 7}
    assert codec.read_grant(b"{" + HEADER + b',"ID":"7587862094297604359","TTL":"2"}') == (
        7587862094297604359,
        2,
    )
    renewed = b'{"result":{' + HEADER + b',"ID":"7587862094297604359","TTL":"2"}}\n'
    assert codec.read_renewal(renewed, 7587862094297604359) == 2
    with pytest.raises(BadAnswer):
        codec.read_renewal(renewed, 8)
    with pytest.raises(LeaseLost):  # gone: no TTL
        codec.read_renewal(b'{"result":{' + HEADER + b',"ID":"8"}}\n', 8)
    assert codec.read_time_to_live(b"{" + HEADER + b',"ID":"8","TTL":"1","grantedTTL":"2"}') == 1
    assert codec.read_time_to_live(b"{" + HEADER + b',"ID":"8","TTL":"-1"}') is None
    for body in (b"{" + HEADER + b',"ID":"8"}', b"{" + HEADER + b',"TTL":"2"}'):
        with pytest.raises(BadAnswer):
            codec.read_grant(body)


def test_a_watch_is_encoded_and_its_lines_are_decoded() -> None:
    assert json.loads(codec.watch_body("tb/c/")) == {
        "create_request": {"key": "dGIvYy8=", "range_end": "dGIvYzA="}
    }
    assert codec.read_watch(b'{"result":{' + HEADER + b',"created":true}}') == 7
    event = b',"events":[{"kv":{"key":"YQ==","create_revision":"7","mod_revision":"7","version":"1","value":"Yg=="}}]}}'
    assert codec.read_watch(b'{"result":{' + HEADER + event) == 7
    for ended in (b'{"result":{' + HEADER + b',"canceled":true,"cancel_reason":"compacted"}}', b"{}", b""):
        with pytest.raises(BadAnswer):
            codec.read_watch(ended)


def error(text: str, code: int, form: str) -> bytes:
    forms = {
        "3.4": {"error": text, "message": text, "code": code},
        "3.4 old": {"error": text, "code": code},
        "3.6": {"code": code, "message": text, "details": []},
    }
    return json.dumps(forms[form]).encode()


@pytest.mark.parametrize("form", ["3.4", "3.4 old", "3.6"])
@pytest.mark.parametrize(
    ("text", "code", "meaning"),
    [
        ("etcdserver: requested lease not found", 5, LeaseLost),
        ("etcdserver: invalid auth token", 16, TokenRefused),
        ("etcdserver: revision of auth store is old", 3, TokenRefused),
        ("etcdserver: user name is empty", 3, TokenRefused),
        ("etcdserver: authentication failed, invalid user ID or password", 3, SetupError),
        ("etcdserver: authentication is not enabled", 9, AuthenticationOff),
        ("etcdserver: permission denied", 7, SetupError),
        ("etcdserver: mvcc: database space exceeded", 8, SetupError),
        ("etcdserver: request is too large", 3, SetupError),
        ("etcdserver: too many requests", 8, BadAnswer),
        ("etcdserver: request timed out", 14, BadAnswer),
        ("etcdserver: no leader", 14, BadAnswer),
        ("context deadline exceeded", 4, BadAnswer),
        ("connection closed", 14, BadAnswer),
        ("something new", 2, BadAnswer),
    ],
)
def test_an_error_of_etcd_becomes_the_exception_for_the_caller_s_reaction(
    text: str, code: int, meaning: type[Exception], form: str
) -> None:
    decoded = codec.read_error(error(text, code, form), 500)
    assert type(decoded) is meaning
    assert text in str(decoded) or meaning is LeaseLost


def test_an_error_line_of_a_stream_is_raised() -> None:
    old = b'{"error":{"grpc_code":16,"http_code":401,"message":"etcdserver: invalid auth token"}}'
    new = b'{"error":{"code":16,"message":"etcdserver: invalid auth token","details":[]}}'
    for line in (old, new):
        with pytest.raises(TokenRefused):
            codec.read_renewal(line, 1)
        with pytest.raises(TokenRefused):
            codec.read_watch(line)


@pytest.mark.parametrize("body", [b"404 page not found\n", b"", b"{}", b"<html>", b'{"code":"x"}'])
def test_an_error_of_another_server_is_misdirected(body: bytes) -> None:
    assert type(codec.read_error(body, 404)) is Misdirected


def test_an_authentication_answer_is_decoded_to_a_token() -> None:
    assert json.loads(codec.authentication_body("u", "p")) == {"name": "u", "password": "p"}
    assert codec.read_token(b"{" + HEADER + b',"token":"KzlMPwIMqjQEEJjs.1"}') == "KzlMPwIMqjQEEJjs.1"
    for body in (b"{" + HEADER + b"}", b'{"x":' + b"[" * 3_000, b'{"token":"\xff"}'):
        with pytest.raises(BadAnswer):
            codec.read_token(body)


NAMES = (
    "header", "result", "error", "code", "message", "revision", "responses", "ID", "TTL", "response_range", "kvs",
    "key", "mod_revision", "succeeded",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_raise_only_the_documented_errors(body: bytes) -> None:
    calls = [
        lambda: codec.read_txn(body, [Read("a")], [Read("a/", is_prefix=True)]),
        lambda: codec.read_grant(body),
        lambda: codec.read_renewal(body, 1),
        lambda: codec.read_time_to_live(body),
        lambda: codec.read_watch(body),
        lambda: codec.read_token(body),
    ]
    for call in calls:
        try:
            call()
        except (BadAnswer, TokenRefused, AuthenticationOff, LeaseLost, SetupError):
            pass
    assert isinstance(codec.read_error(body, 500), Exception)
