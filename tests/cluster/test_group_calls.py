"""Calls to another group's leader over HTTP: a real node at the other end, and a coordinator in memory."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.certificates import certificate
from tests.cluster.worlds import led, world_of

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.revoking.group_questions import CancelHere, FindHere, GroupAnswer
from timeball.cluster.coordination.coordinator import Directory
from timeball.cluster.coordination.coordinator import Node as ClusterNode
from timeball.cluster.group_calls import GroupCalls
from timeball.io.clock import ManualClock, SystemClock
from timeball.io.security import load_client_tls
from timeball.model.access import ANONYMOUS, Access, Caller, parse
from timeball.model.config import Settings
from timeball.model.errors import Unavailable
from timeball.node.node import Node

SHORT_S = 0.2  # for an answer that does not come
ACCOUNTS = """
[[accounts]]
access_key = "shop"
secret_key = "shop's secret"
topics = { orders = "PUB" }

[[accounts]]
access_key = "other"
secret_key = "other secret"
"""
HOUR_MS = 3_600_000


class AskingNode:
    """A node of group g0, and the leader of g1 that it asks."""

    def __init__(self, calls: GroupCalls, directory: Directory, node: Node, within_s: float) -> None:
        self.calls, self.directory, self.node, self._within_s = calls, directory, node, within_s

    async def send(self, topic: str, key: str) -> None:
        """Schedule a message at the asked leader."""
        due_ms = SystemClock().wall_ms() + HOUR_MS
        row = {
            "topic": [topic],
            "body": [b"x"],
            "unique_key": [key],
            "due_ms": pa.array([due_ms], pa.int64()),
        }
        await self.node.broker.send(pa.record_batch(row))

    async def cancel(self, key: str, caller: Caller = ANONYMOUS) -> list[str] | None:
        """Cancel by a key at the other group. Returns the verdicts, or None if it does not answer."""
        answer = await self.calls.ask("g1", CancelHere(ids=[key]), caller, self._within_s)
        return None if answer is None else [verdict.verdict for verdict in answer.verdicts]


@asynccontextmanager
async def asking(
    tmp_path: Path,
    within_s: float = 30.0,
    group: str = "g1",
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> AsyncIterator[AskingNode]:
    """Start the leader of `group`, and yield a node that asks it. The directory always names it as the leader of g1."""
    async with world_of(None) as world:
        ports = dict.fromkeys(("port", "http_port"), 0) | dict.fromkeys(
            ("name_server_port", "remoting_port", "grpc_port"), -1
        )
        node = Node(Settings(data=tmp_path / "data", group=group, segment_bytes=1 << 20, **ports, **settings))
        directory = Directory(world.coordinator("z"))
        calls = GroupCalls("g0", directory, SystemClock(), tls)
        node.build_broker = partial(GroupedBroker, others=calls, account=lambda name: ANONYMOUS)
        await node.start()
        try:
            coordinator = world.coordinator("a")
            addresses = {"http": f"127.0.0.1:{node.http_port}", "grpc": "127.0.0.1:8081"}
            await coordinator.register(ClusterNode("a", addresses), await coordinator.grant(60_000))
            await led(coordinator, "a")
            await directory.read()
            directory.views["g0"] = directory.views["g1"]  # the own group, of which nothing is asked
            yield AskingNode(calls, directory, node, within_s)
        finally:
            await calls.close()
            await node.stop()


def test_the_leader_of_another_group_finds_and_cancels(tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(tmp_path) as asking_node:
            assert asking_node.calls.names() == ["g1"]
            assert asking_node.calls.grpc_address("g1") == ("127.0.0.1", 8081)
            await asking_node.send("orders", "k")
            answer = await asking_node.calls.ask("g1", FindHere(id="k"), ANONYMOUS)
            assert answer is not None
            (place,) = answer.places
            assert place.state == "waiting" and place.content is not None and place.content.body == b"x"
            assert await asking_node.cancel("k") == ["cancelled"]
            assert await asking_node.cancel("k") == ["already_cancelled"]
            answer = await asking_node.calls.ask(
                "g1", CancelHere(ids=[f"{number:0250}" for number in range(10_000)]), ANONYMOUS
            )
            assert answer is not None and len(answer.verdicts) == 10_000

    asyncio.run(run())


def test_the_other_group_checks_the_caller_s_account_and_permissions(tmp_path: Path) -> None:
    async def run() -> None:
        file = tmp_path / "access.toml"
        file.write_text(ACCOUNTS)
        file.chmod(0o600)
        own_access = Access(parse(ACCOUNTS.replace("other secret", "another secret").encode(), "here"))

        def caller(name: str, secret: str) -> Caller:
            """Return a caller that this node has authenticated."""
            return own_access.authenticate({"authorization": f"Bearer {name}:{secret}"}, 0)

        async with asking(tmp_path, access_file=str(file)) as asking_node:
            await asking_node.send("orders", "k")
            await asking_node.send("secrets", "s")
            shop = caller("shop", "shop's secret")
            assert await asking_node.cancel("s", shop) == ["not_found"], "it may not cancel there"
            assert await asking_node.cancel("k", shop) == ["cancelled"]
            assert await asking_node.cancel("s") is None, "no account"
            assert await asking_node.cancel("s", caller("other", "another secret")) is None, (
                "another secret there"
            )

    asyncio.run(run())


def test_a_leader_under_tls_is_asked_only_with_a_certificate_of_the_authority(tmp_path: Path) -> None:
    async def run() -> None:
        ours, theirs = (certificate(tmp_path / name) for name in ("ours", "theirs"))
        for roots, verdicts in ((ours.roots, ["not_found"]), (theirs.roots, None)):
            tls, within_s = load_client_tls(roots, "", ""), 30.0 if verdicts else SHORT_S
            data = tmp_path / f"data-{within_s}"
            async with asking(data, within_s, tls=tls, **ours.settings) as asking_node:
                assert await asking_node.cancel("k") == verdicts

    asyncio.run(run())


def test_a_leader_that_gives_no_answer_counts_as_silent_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with asking(tmp_path, SHORT_S) as asking_node:
            asking_node.directory.nodes.clear()
            assert await asking_node.cancel("k") is None and "no leader" in caplog.text
            assert await asking_node.cancel("k") is None and caplog.text.count("did not answer") == 1
            with socket.create_server(("127.0.0.1", 0)) as hung:  # takes connections, and answers nothing
                address = f"127.0.0.1:{hung.getsockname()[1]}"
                asking_node.directory.nodes["a"] = ClusterNode("a", {"http": address})
                assert await asking_node.cancel("k") is None
            assert await asking_node.cancel("k") is None, "nothing listens there"

    asyncio.run(run())


def test_a_question_waits_for_a_leader(tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(tmp_path) as asking_node:
            nodes = dict(asking_node.directory.nodes)
            asking_node.directory.nodes.clear()
            question = asyncio.create_task(asking_node.cancel("k"))
            await asyncio.sleep(0)
            asking_node.directory.nodes |= nodes
            assert await question == ["not_found"]

    asyncio.run(run())


def test_a_question_to_a_hanging_node_is_repeated_at_the_next_leader(tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(tmp_path) as asking_node:
            leader, is_connected = asking_node.directory.nodes["a"], asyncio.Event()

            async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                is_connected.set()
                await reader.read()
                writer.close()

            hung = await asyncio.start_server(hang, "127.0.0.1", 0)
            port = hung.sockets[0].getsockname()[1]
            asking_node.directory.nodes["a"] = ClusterNode("a", {"http": f"127.0.0.1:{port}"})
            question = asyncio.create_task(asking_node.cancel("k"))
            await is_connected.wait()
            asking_node.directory.nodes["a"] = leader
            assert await question == ["not_found"]
            hung.close()

    asyncio.run(run())


def test_a_question_is_repeated_after_a_broken_connection(tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(tmp_path) as asking_node:
            leader = asking_node.directory.nodes["a"]

            async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                asking_node.directory.nodes["a"] = leader
                writer.close()

            breaking = await asyncio.start_server(break_off, "127.0.0.1", 0)
            port = breaking.sockets[0].getsockname()[1]
            asking_node.directory.nodes["a"] = ClusterNode("a", {"http": f"127.0.0.1:{port}"})
            assert await asking_node.cancel("k") == ["not_found"]
            breaking.close()

    asyncio.run(run())


def test_an_answer_for_a_group_that_the_node_does_not_lead_counts_as_silence(tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(tmp_path, SHORT_S, group="g7") as asking_node:
            assert await asking_node.cancel("k") is None

    asyncio.run(run())


def test_before_etcd_was_read_no_group_is_known() -> None:
    async def run() -> None:
        async with world_of(None) as world:
            calls = GroupCalls("g1", Directory(world.coordinator("a")), ManualClock())
            with pytest.raises(Unavailable, match="not known yet"):
                calls.names()

    asyncio.run(run())


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{",
    ],
)
def test_an_invalid_answer_counts_as_silence(tmp_path: Path, reply: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def run() -> None:
        async with world_of(None) as world:
            directory = Directory(world.coordinator("z"))
            await led(world.coordinator("a"), "a")
            await directory.read()
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            directory.nodes["a"] = ClusterNode("a", {"http": f"127.0.0.1:{port}"})
            calls = GroupCalls("g0", directory, SystemClock())
            try:
                answer: GroupAnswer | None = await calls.ask("g1", FindHere(id="k"), ANONYMOUS, 30.0)
                assert answer is None
            finally:
                await calls.close()
                server.close()

    asyncio.run(run())
