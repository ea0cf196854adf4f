"""One request: each kind of answer of a receiver, and each kind of forbidden address."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.edges.push.receiver import Reply, receiver_of

from timeball.edges.push import sender
from timeball.edges.push.codec import Answer
from timeball.edges.push.sender import HostResolver, Receiver
from timeball.model.addresses import Allowed
from timeball.model.errors import InvalidMessage

LOOPBACK = Allowed.parse("127.0.0.0/8,localhost")


async def refuse_look_up(host: str, port: int) -> Sequence[str]:
    """Fail: a URL with an address needs no look-up."""
    raise AssertionError(f"{host} is an address, which needs no look-up")


@asynccontextmanager
async def run_receiver(
    url: str, allowed: Allowed = LOOPBACK, look_up: sender.LookUp = refuse_look_up, **options: Any
) -> AsyncIterator[Receiver]:
    """Run a receiver for a URL during a block."""
    trust = options.pop("trust", None) or ssl.create_default_context()
    receiver = Receiver(url, allowed, look_up, trust, **{"connections": 4, "timeout_ms": 5_000, **options})
    try:
        yield receiver
    finally:
        await receiver.close()


def post(url: str, body: bytes = b"body", **options: Any) -> Answer:
    """Make one request, and return its answer."""

    async def post_once() -> Answer:
        async with run_receiver(url, **options) as receiver:
            return await receiver.post(body, [("x-a", "1"), ("content-type", "text/plain")], now_ms=0)

    return asyncio.run(post_once())


@pytest.mark.parametrize("body", [b"", b"body", bytes(range(256)) * 4_096, b"x" * 4 * 1024 * 1024])
def test_a_request_has_the_body_and_the_given_headers(body: bytes) -> None:
    with receiver_of() as receiver:
        assert post(receiver.url + "?a=%20b", body) == Answer("delivered", 200)
        (received,) = receiver.requests
    assert received.body == body and received.path == "/hook?a=%20b"
    assert set(received.headers) == {"host", "x-a", "content-type", "content-length", "user-agent", "accept"}
    assert received.headers["host"] == f"127.0.0.1:{receiver.port}"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "delivered"), (202, "delivered"), (299, "delivered"), (300, "redirect"), (304, "redirect"),
     (400, "client_error"), (410, "client_error"), (499, "client_error"), (500, "server_error"), (503, "server_error"),
     (600, "server_error")],
)  # fmt: skip
def test_the_status_determines_the_outcome(status: int, outcome: str) -> None:
    with receiver_of(lambda _: Reply(status)) as receiver:
        answer = post(receiver.url)
    assert (answer.outcome, answer.status, answer.is_gone) == (outcome, status, status == 410)


def test_a_redirect_is_not_followed() -> None:
    with receiver_of() as other:
        with receiver_of(lambda _: Reply(307, {"location": other.url})) as receiver:
            assert post(receiver.url).outcome == "redirect"
        assert other.requests == []


def test_retry_after_is_converted_to_milliseconds() -> None:
    with receiver_of(lambda _: Reply(429, {"retry-after": "120"})) as receiver:
        assert post(receiver.url).retry_after_ms == 120_000


@pytest.mark.parametrize(
    ("instead", "outcome"),
    [("reset", "broken"), ("close", "broken"), ("noise", "broken"), ("hang", "timeout"), ("endless", "delivered"),
     ("stuck", "delivered")],
)  # fmt: skip
def test_broken_and_endless_answers_have_an_outcome(instead: str, outcome: str) -> None:
    with receiver_of(lambda _: Reply(instead=instead)) as receiver:
        assert post(receiver.url, timeout_ms=1_000).outcome == outcome


@pytest.mark.parametrize(
    "headers",
    [{"x-large": "y" * 60_000}, {"retry-after": "Fri, 31 Jan 2031 09:00:10 +99999999999999"}],
)
def test_an_unusual_header_leaves_an_accepted_message_delivered(headers: dict[str, str]) -> None:
    with receiver_of(lambda _: Reply(200, headers)) as receiver:
        assert post(receiver.url) == Answer("delivered", 200)


def test_an_answer_with_a_too_large_head_is_broken() -> None:
    with receiver_of(lambda _: Reply(200, {"x-large": "y" * 70_000})) as receiver:
        assert post(receiver.url).outcome == "broken"


def test_a_port_without_a_listener_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert post(f"http://127.0.0.1:{port}/").outcome == "unreachable"


def test_a_connection_is_reused_unless_its_answer_was_long() -> None:
    with receiver_of(lambda request: Reply(body=request.body * 1_000)) as receiver:

        async def post_several() -> None:
            async with run_receiver(receiver.url, connections=1) as receiver_client:
                for body in (b"", b"x", b"y" * 1_000, b"z"):
                    assert (await receiver_client.post(body, [], 0)).outcome == "delivered"

        asyncio.run(post_several())
        assert len(receiver.requests) == 4


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with receiver_of() as receiver:
        assert post(receiver.url).outcome == "delivered"


# ---- allowed and forbidden addresses ----------------------------------------------------------------------------


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    looked_up: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        """Return an allowed address at the first look-up, and a forbidden one at later look-ups."""
        looked_up.append(host)
        return ["127.0.0.1"] if len(looked_up) == 1 else ["169.254.169.254"]

    with receiver_of() as receiver:
        url, allowed = f"http://a.example:{receiver.port}/", Allowed.parse("127.0.0.1")
        assert post(url, allowed=allowed, look_up=look_up).outcome == "delivered"
        assert looked_up == ["a.example"], "one look-up for the check and the connection"
        answer = post(url, allowed=allowed, look_up=look_up)
    assert answer.outcome == "forbidden_address" and "cloud metadata" in answer.detail
    assert len(receiver.requests) == 1


def test_a_name_is_checked_again_for_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "NAMES_KEPT_S", 0)
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def look_up(host: str, port: int) -> Sequence[str]:
        return next(answers)

    async def post_twice(url: str) -> list[str]:
        async with run_receiver(url, Allowed.parse("127.0.0.1"), look_up) as receiver_client:
            return [(await receiver_client.post(b"x", [], 0)).outcome for _ in range(2)]

    with receiver_of(lambda _: Reply(200, {"connection": "close"})) as receiver:
        outcomes = asyncio.run(post_twice(f"http://a.example:{receiver.port}/"))
    assert outcomes == ["delivered", "forbidden_address"]


def test_forbidden_addresses_of_a_name_are_skipped() -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["169.254.169.254", "::1", "127.0.0.1", "::ffff:127.0.0.1"]

    with receiver_of() as receiver:
        url = f"http://a.example:{receiver.port}/"
        answer = post(url, allowed=Allowed.parse("127.0.0.1"), look_up=look_up)
    assert answer.outcome == "delivered"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "fe80::1%lo", "::1", "0.0.0.0"])
def test_a_name_with_an_internal_address_is_refused(address: str) -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return [address]

    with receiver_of() as receiver:
        url = f"http://a.example:{receiver.port}/"
        assert post(url, allowed=Allowed.parse(""), look_up=look_up).outcome == "forbidden_address"
    assert receiver.requests == []


def test_an_address_in_the_url_is_checked_at_creation_and_at_connection() -> None:
    nothing = Allowed.parse("")
    with receiver_of() as receiver:
        with pytest.raises(InvalidMessage):
            post(receiver.url, allowed=nothing)

        async def post_after_change() -> Answer:
            async with run_receiver(receiver.url) as receiver_client:
                receiver_client._allowed = nothing
                return await receiver_client.post(b"x", [], 0)

        assert asyncio.run(post_after_change()).outcome == "forbidden_address"
    assert receiver.requests == []


def test_localhost_is_resolved_and_reached() -> None:
    async def post_with_resolver() -> Answer:
        resolver = HostResolver()
        try:
            async with run_receiver(
                f"http://localhost:{receiver.port}/", look_up=resolver.look_up
            ) as receiver_client:
                return await receiver_client.post(b"x", [], 0)
        finally:
            resolver.close()

    with receiver_of() as receiver:
        assert asyncio.run(post_with_resolver()).outcome == "delivered"


def test_a_host_name_in_capitals_is_accepted() -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        assert host == "a.example"
        return ["127.0.0.1"]

    with receiver_of() as receiver:
        url = f"http://A.Example:{receiver.port}/"
        assert post(url, allowed=Allowed.parse("a.example"), look_up=look_up).outcome == "delivered"


def test_an_unknown_host_name_is_unreachable() -> None:
    async def look_up(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    answer = post("http://a.example/", look_up=look_up)
    assert answer.outcome == "unreachable" and "a.example" in answer.detail


# ---- TLS ----------------------------------------------------------------------------------------------------------


def test_a_certificate_is_checked_against_the_name(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("a.example").configure_cert(server)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    with receiver_of() as receiver:
        receiver._server.socket = server.wrap_socket(receiver._server.socket, server_side=True)
        for url, its_trust, outcome in (
            (f"https://a.example:{receiver.port}/", trust, "delivered"),
            (f"https://b.example:{receiver.port}/", trust, "unreachable"),
            (f"https://a.example:{receiver.port}/", None, "unreachable"),
        ):
            assert post(url, look_up=look_up, trust=its_trust).outcome == outcome
