"""Members that are missing, hang, are no etcd, or give invalid answers: another one is asked, within a time limit."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import EtcdCluster
from tests.ports import free_ports

from timeball.cluster.coordination import etcd
from timeball.cluster.coordination import etcd_codec as codec
from timeball.cluster.coordination.etcd import EtcdAccess, Members
from timeball.cluster.coordination.etcd_codec import BadAnswer
from timeball.model.errors import SetupError, TimeballError, Unavailable

READ = b'{"key":"eA=="}'
HEADER = b'{"header":{"revision":"1"}}'


@asynccontextmanager
async def members_of(
    *endpoints: str, attempt_s: float = 20, deadline_s: float = 60, **access: str
) -> AsyncIterator[Members]:
    """Yield the members with these endpoints."""
    members = Members(EtcdAccess(endpoints, **access), attempt_s=attempt_s, deadline_s=deadline_s)  # type: ignore[arg-type]
    try:
        yield members
    finally:
        await members.close()


Answer = Callable[[bytes, bytes], bytes | None]  # path and body of a request -> HTTP answer; None: close


@asynccontextmanager
async def server(answer: Answer, *, closes: bool = False) -> AsyncIterator[str]:
    """Serve answers. After b"" the client waits; None closes the connection, as does any answer with `closes`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    reply = answer(head, await reader.readexactly(length))
                    if reply is None:
                        return
                    writer.write(reply)
                    await writer.drain()
                    if closes:
                        return
            except (asyncio.IncompleteReadError, ConnectionError):
                pass

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    """Encode an HTTP answer."""
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def dead_endpoint() -> str:
    """Return an address at which nothing listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.xdist_group("etcd")
def test_after_dead_and_hanging_members_the_next_one_is_asked_and_preferred(etcd: EtcdCluster) -> None:
    async def scenario() -> None:
        heads: list[bytes] = []

        def hang(head: bytes, body: bytes) -> bytes:
            heads.append(head)
            return b""

        async with (
            server(hang) as hanging,
            members_of(dead_endpoint(), hanging, *etcd.endpoints, attempt_s=0.5) as members,
        ):
            for _ in range(3):
                assert b"revision" in await members.ask("/v3/kv/range", READ, bytes)
            assert members.preferred in etcd.endpoints and len(heads) == 1

    asyncio.run(scenario())


def test_the_time_limit_holds_if_an_attempt_ends_in_the_same_turn() -> None:
    async def scenario() -> None:
        def hold(head: bytes, body: bytes) -> bytes:
            time.sleep(2 * limit_s)  # the loop then finds both limits over
            return b""

        limit_s = 0.1
        async with (
            server(hold) as holding,
            members_of(holding, attempt_s=limit_s / 2, deadline_s=limit_s) as members,
            asyncio.timeout(BOUND_S),
        ):
            with pytest.raises(Unavailable, match="has not answered in"):
                await members.ask("/v3/kv/range", READ, bytes)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"\0\0\0",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        http(b"not json"),
        http(b"{}"),
        http(b'{"header":{"revision":"1"},"responses":[{}]}'),
        http(b'{"error":"etcdserver: no leader","code":14}', "503 Service Unavailable"),
        http(b"moved", "302 Found\r\nlocation: /elsewhere"),
        http(b"x" * (etcd.ANSWER_BYTES_MAX + 1)),
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_after_an_invalid_answer_the_next_member_is_asked(reply: bytes | None) -> None:
    async def scenario() -> None:
        async with server(lambda *_: reply, closes=True) as bad, server(lambda *_: http(HEADER)) as good:
            async with members_of(bad, good) as members:
                outcome = await members.ask(codec.TXN, b"{}", lambda body: codec.read_txn(body, [], []))
                assert outcome.revision == 1 and members.preferred == good

    asyncio.run(scenario())


def test_without_members_a_call_ends_at_its_deadline_and_names_each() -> None:
    async def scenario() -> None:
        endpoints = dead_endpoint(), dead_endpoint()
        async with members_of(*endpoints, deadline_s=1) as members:
            with pytest.raises(Unavailable) as caught:
                await members.ask("/v3/kv/range", READ, bytes)
            assert all(endpoint in str(caught.value) for endpoint in endpoints) and "1 s" in str(caught.value)

    asyncio.run(scenario())


def test_endpoints_that_are_not_etcd_are_a_set_up_error() -> None:
    async def error_of(*endpoints: str) -> TimeballError:
        async with members_of(*endpoints, deadline_s=1) as members:
            with pytest.raises(TimeballError) as caught:
                await members.ask("/v3/kv/range", READ, bytes)
            return caught.value

    async def scenario() -> None:
        async with server(lambda *_: http(b"404 page not found", "404 Not Found")) as one:
            alone, beside = await asyncio.gather(error_of(one), error_of(one, dead_endpoint()))
        assert type(alone) is SetupError and "endpoints and certificates" in str(alone)
        # One of two members: the other may come back.
        assert type(beside) is Unavailable and "404" in str(beside)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "endpoint", ["", "etcd1:2379", "ftp://a:1", "http://", "http://u:p@a:1", "http://a:1/v3"]
)
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(SetupError, match="endpoint"):
        Members(EtcdAccess([endpoint]), attempt_s=1, deadline_s=1)
    with pytest.raises(SetupError, match="no endpoint"):
        Members(EtcdAccess([]), attempt_s=1, deadline_s=1)


def test_a_password_is_not_shown() -> None:
    assert "letmein" not in repr(EtcdAccess(["http://a:1"], user="u", password="letmein"))


class Authenticating:
    """A member that requires a token. It refuses a request without one by an error, or by closing the connection."""

    def __init__(self, has_error: bool) -> None:
        self.has_error = has_error
        self.issued = 0
        self.tokens: set[bytes] = set()

    def __call__(self, head: bytes, body: bytes) -> bytes | None:
        if b"/v3/auth/authenticate" in head:
            if json.loads(body) != {"name": "u", "password": "p"}:
                text = "etcdserver: authentication failed, invalid user ID or password"
                return http(json.dumps({"message": text, "code": 3}).encode(), "400 Bad Request")
            self.issued += 1
            token = f"token.{self.issued}".encode()
            self.tokens.add(token)
            return http(b'{"header":{},"token":"' + token + b'"}')
        if any(b"authorization: " + token + b"\r\n" in head.lower() for token in self.tokens):
            return http(HEADER)
        text = '{"message":"etcdserver: invalid auth token","code":16}'
        return http(text.encode(), "401 Unauthorized") if self.has_error else None


@pytest.mark.parametrize("has_error", [True, False], ids=["by an error", "by closing"])
def test_a_token_is_requested_once_and_again_after_it_is_refused(has_error: bool) -> None:
    async def scenario() -> None:
        member = Authenticating(has_error)
        async with server(member) as endpoint, members_of(endpoint, user="u", password="p") as members:
            await asyncio.gather(*(members.ask("/v3/kv/range", READ, bytes) for _ in range(8)))
            assert member.issued == 1
            member.tokens.clear()  # as after a restart
            await asyncio.gather(*(members.ask("/v3/kv/range", READ, bytes) for _ in range(8)))
            assert member.issued == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("has_error", [True, False], ids=["by an error", "by closing"])
def test_refused_credentials_are_a_set_up_error(has_error: bool) -> None:
    async def scenario() -> None:
        async with server(Authenticating(has_error)) as endpoint:
            async with members_of(endpoint, user="u", password="wrong") as members:
                with pytest.raises(SetupError, match="user, password"):
                    await members.ask("/v3/kv/range", READ, bytes)
            async with members_of(endpoint, deadline_s=1) as members:
                with pytest.raises((SetupError, Unavailable), match=r"wants? a user"):
                    await members.ask("/v3/kv/range", READ, bytes)

    asyncio.run(scenario())


def hang(head: bytes, body: bytes) -> bytes:
    """Give no answer."""
    return b""


def test_no_call_fails_when_a_member_hangs_during_the_authentication() -> None:
    """Calls at the same time wait for one authentication, and then ask the next member together."""

    async def scenario() -> None:
        async with (
            server(hang) as hanging,
            server(Authenticating(True)) as good,
            members_of(hanging, good, attempt_s=0.2, deadline_s=2, user="u", password="p") as members,
        ):
            await asyncio.gather(*(members.ask("/v3/kv/range", READ, bytes) for _ in range(8)))
            assert members.preferred == good

    asyncio.run(scenario())


def test_after_a_call_without_an_answer_the_next_member_is_preferred() -> None:
    async def scenario() -> None:
        async with (
            server(hang) as hanging,
            server(lambda *_: http(HEADER)) as good,
            members_of(hanging, good, attempt_s=BOUND_S, deadline_s=0.05) as members,
        ):
            with pytest.raises(Unavailable):
                await members.ask("/v3/kv/range", READ, bytes)
            assert members.preferred == good

    asyncio.run(scenario())


@pytest.mark.xdist_group("etcd")
def test_a_configured_user_is_accepted_by_members_without_authentication(etcd: EtcdCluster) -> None:
    async def scenario() -> None:
        async with members_of(*etcd.endpoints, user="u", password="p") as members:
            assert b"revision" in await members.ask("/v3/kv/range", READ, bytes)

    asyncio.run(scenario())


def test_a_stream_raises_at_its_end_for_a_long_line_and_without_an_answer() -> None:
    async def scenario() -> None:
        chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        lines = chunked + b"3\r\na\nb\r\n2\r\nc\n\r\n0\r\n\r\n"
        async with server(lambda *_: lines) as endpoint, members_of(endpoint) as members:
            lines_read = []
            with pytest.raises(BadAnswer, match="ended"):
                async for line in members.follow(endpoint, codec.WATCH, b"{}", bytes):
                    lines_read.append(line)
            assert lines_read == [b"a", b"bc"]
        endless = chunked + f"{etcd.ANSWER_BYTES_MAX + 1:x}\r\n".encode() + b"x" * (etcd.ANSWER_BYTES_MAX + 1)
        async with server(lambda *_: endless) as endpoint, members_of(endpoint) as members:
            with pytest.raises(BadAnswer, match="line"):
                async for _ in members.follow(endpoint, codec.WATCH, b"{}", bytes):
                    pass
        async with server(lambda *_: b"") as endpoint, members_of(endpoint, attempt_s=0.1) as members:
            with pytest.raises(BadAnswer, match="in time"):
                async for _ in members.follow(endpoint, codec.WATCH, b"{}", bytes):
                    pass

    asyncio.run(scenario())
