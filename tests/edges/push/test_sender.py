"""One request: every way in which a receiver may answer or not, and every address that is not to be connected to."""

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
from timeball.edges.push.sender import Answer, Names, Receiver
from timeball.model.addresses import Allowed
from timeball.model.errors import InvalidMessage

LOOPBACK = Allowed.parse("127.0.0.0/8,localhost")


async def nobody(host: str, port: int) -> Sequence[str]:
    raise AssertionError(f"{host} is an address: nothing to resolve")


@asynccontextmanager
async def sending(
    url: str, allowed: Allowed = LOOPBACK, look_up: sender.LookUp = nobody, **options: Any
) -> AsyncIterator[Receiver]:
    trust = options.pop("trust", None) or ssl.create_default_context()
    receiver = Receiver(url, allowed, look_up, trust, **{"connections": 4, "timeout_ms": 5_000, **options})
    try:
        yield receiver
    finally:
        await receiver.close()


def post(url: str, body: bytes = b"body", **options: Any) -> Answer:
    async def once() -> Answer:
        async with sending(url, **options) as receiver:
            return await receiver.post(body, [("x-a", "1"), ("content-type", "text/plain")], now_ms=0)

    return asyncio.run(once())


@pytest.mark.parametrize("body", [b"", b"body", bytes(range(256)) * 4_096, b"x" * 4 * 1024 * 1024])
def test_a_request_is_body_and_headers_and_little_else(body: bytes) -> None:
    with receiver_of() as receiver:
        assert post(receiver.url + "?a=%20b", body) == Answer("delivered", 200)
        (got,) = receiver.requests
    assert got.body == body and got.path == "/hook?a=%20b"
    assert set(got.headers) == {"host", "x-a", "content-type", "content-length", "user-agent", "accept"}
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "delivered"), (202, "delivered"), (299, "delivered"), (300, "redirect"), (304, "redirect"),
     (400, "client_error"), (410, "client_error"), (499, "client_error"), (500, "server_error"), (503, "server_error"),
     (600, "server_error")],
)  # fmt: skip
def test_a_status_says_how_it_went(status: int, outcome: str) -> None:
    with receiver_of(lambda _: Reply(status)) as receiver:
        answer = post(receiver.url)
    assert (answer.outcome, answer.status, answer.is_gone) == (outcome, status, status == 410)


def test_a_redirect_is_not_followed() -> None:
    with receiver_of() as other:
        with receiver_of(lambda _: Reply(307, {"location": other.url})) as receiver:
            assert post(receiver.url).outcome == "redirect"
        assert other.requests == []


def test_retry_after_is_read() -> None:
    with receiver_of(lambda _: Reply(429, {"retry-after": "120"})) as receiver:
        assert post(receiver.url).retry_after_ms == 120_000


@pytest.mark.parametrize(
    ("instead", "outcome"),
    [("reset", "broken"), ("close", "broken"), ("noise", "broken"), ("hang", "timeout"), ("endless", "delivered"),
     ("stuck", "delivered")],
)  # fmt: skip
def test_what_is_no_answer_and_what_does_not_end(instead: str, outcome: str) -> None:
    with receiver_of(lambda _: Reply(instead=instead)) as receiver:
        assert post(receiver.url, timeout_ms=1_000).outcome == outcome


def test_a_head_that_is_too_large_is_no_answer() -> None:
    with receiver_of(lambda _: Reply(200, {"x-large": "y" * 20_000})) as receiver:
        assert post(receiver.url).outcome == "broken"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert post(f"http://127.0.0.1:{port}/").outcome == "unreachable"


def test_a_connection_is_used_again_and_one_with_a_long_answer_is_not() -> None:
    with receiver_of(lambda request: Reply(body=request.body * 1_000)) as receiver:

        async def several() -> None:
            async with sending(receiver.url, connections=1) as one:
                for body in (b"", b"x", b"y" * 1_000, b"z"):
                    assert (await one.post(body, [], 0)).outcome == "delivered"

        asyncio.run(several())
        assert len(receiver.requests) == 4


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with receiver_of() as receiver:
        assert post(receiver.url).outcome == "delivered"


# ---- where it may go --------------------------------------------------------------------------------------------


def test_a_name_is_resolved_and_checked_once_and_that_address_is_connected_to() -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        """First the address that passes the check, then the one that would not."""
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    with receiver_of() as receiver:
        url, allowed = f"http://a.example:{receiver.port}/", Allowed.parse("127.0.0.1")
        assert post(url, allowed=allowed, look_up=rebinding).outcome == "delivered"
        assert asked == ["a.example"]
        answer = post(url, allowed=allowed, look_up=rebinding)
    assert answer.outcome == "forbidden_address" and "cloud metadata" in answer.words
    assert len(receiver.requests) == 1


def test_a_name_that_changes_its_answer_is_checked_again_with_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "NAMES_KEPT_S", 0)
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return next(answers)

    async def twice(url: str) -> list[str]:
        async with sending(url, Allowed.parse("127.0.0.1"), rebinding) as one:
            return [(await one.post(b"x", [], 0)).outcome for _ in range(2)]

    with receiver_of(lambda _: Reply(200, {"connection": "close"})) as receiver:
        found = asyncio.run(twice(f"http://a.example:{receiver.port}/"))
    assert found == ["delivered", "forbidden_address"]


def test_of_several_addresses_those_that_may_not_be_connected_to_are_left_out() -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return ["169.254.169.254", "::1", "127.0.0.1", "::ffff:127.0.0.1"]

    with receiver_of() as receiver:
        url = f"http://a.example:{receiver.port}/"
        answer = post(url, allowed=Allowed.parse("127.0.0.1"), look_up=mixed)
    assert answer.outcome == "delivered"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "fe80::1%lo", "::1", "0.0.0.0"])
def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    async def inside(host: str, port: int) -> Sequence[str]:
        return [address]

    with receiver_of() as receiver:
        url = f"http://a.example:{receiver.port}/"
        assert post(url, allowed=Allowed.parse(""), look_up=inside).outcome == "forbidden_address"
    assert receiver.requests == []


def test_an_address_in_the_url_is_checked_when_it_is_put_and_when_it_is_connected_to() -> None:
    nothing = Allowed.parse("")
    with receiver_of() as receiver:
        with pytest.raises(InvalidMessage):
            post(receiver.url, allowed=nothing)

        async def late() -> Answer:
            async with sending(receiver.url) as one:
                one._allowed = nothing
                return await one.post(b"x", [], 0)

        assert asyncio.run(late()).outcome == "forbidden_address"
    assert receiver.requests == []


def test_localhost_by_its_name() -> None:
    async def real() -> Answer:
        names = Names()
        try:
            async with sending(f"http://localhost:{receiver.port}/", look_up=names.look_up) as one:
                return await one.post(b"x", [], 0)
        finally:
            names.close()

    with receiver_of() as receiver:
        assert asyncio.run(real()).outcome == "delivered"


def test_a_name_in_capitals_is_the_same_name() -> None:
    async def here(host: str, port: int) -> Sequence[str]:
        assert host == "a.example"
        return ["127.0.0.1"]

    with receiver_of() as receiver:
        url = f"http://A.Example:{receiver.port}/"
        assert post(url, allowed=Allowed.parse("a.example"), look_up=here).outcome == "delivered"


def test_a_name_that_there_is_not() -> None:
    async def none(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    answer = post("http://a.example/", look_up=none)
    assert answer.outcome == "unreachable" and "a.example" in answer.words


# ---- TLS ----------------------------------------------------------------------------------------------------------


def test_a_certificate_is_checked_against_the_name(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("a.example").configure_cert(server)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    with receiver_of() as receiver:
        receiver._server.socket = server.wrap_socket(receiver._server.socket, server_side=True)
        for url, its_trust, outcome in (
            (f"https://a.example:{receiver.port}/", trust, "delivered"),
            (f"https://b.example:{receiver.port}/", trust, "unreachable"),
            (f"https://a.example:{receiver.port}/", None, "unreachable"),
        ):
            assert post(url, look_up=here, trust=its_trust).outcome == outcome
