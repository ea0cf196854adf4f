"""A node steps down while its broker is being built. tests/cluster/test_grey_failures.py tests the rest."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.memory_store import Memory, MemoryStore
from tests.ports import free_ports

from timeball.cluster.coordination.keys import KeyCoordinator
from timeball.cluster.protocol.replica import Record
from timeball.io.clock import Clock, SystemClock
from timeball.model.config import Settings
from timeball.model.errors import LeaseLost
from timeball.node import replicated_node
from timeball.node.replicated_node import ReplicatedNode

CLUSTER, GROUP, NAME = "tests", "g1", "a"


class HangingNode(ReplicatedNode):
    """Its disk hangs as soon as it leads."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.answers = threading.Event()

    def serve(self, epoch: int) -> None:
        self.thread.post(lambda: self.answers.wait() and None)
        super().serve(epoch)


def test_it_ends_only_when_the_disk_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ends no process whose disk hangs, and its ports would stay open, without answers."""
    memory = Memory(SystemClock())

    def coordinator_of(settings: Settings, clock: Clock) -> KeyCoordinator:
        return KeyCoordinator(MemoryStore(memory), clock, cluster=settings.cluster, node=settings.node)

    async def scenario() -> None:
        monkeypatch.setattr(replicated_node, "create_coordinator", coordinator_of)
        port, http_port, replication_port = free_ports(3)
        settings = Settings(
            data=tmp_path, cluster=CLUSTER, node=NAME, group=GROUP, etcd=("http://127.0.0.1:1",), lease_ttl_ms=1_000,
            port=port, http_port=http_port, replication_port=replication_port, remoting_port=-1, grpc_port=-1,
            name_server_port=-1,
        )  # fmt: skip
        node = HangingNode(settings)
        await node.start()
        ended = asyncio.create_task(node.run_until_signal())
        try:
            record = Record(0, "", (node.thread.state.rules.replica,))
            await coordinator_of(settings, SystemClock()).change(GROUP, 0, record)
            async with asyncio.timeout(BOUND_S):
                while not node.figures().problem:
                    await asyncio.sleep(0.01)
                assert not ended.done()
                _, writer = await asyncio.open_connection("127.0.0.1", http_port)
                writer.close()
                while node._lead_task is None or not node._lead_task.done():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
                assert not ended.done()
                node.answers.set()
                cause = await ended
            assert isinstance(cause, LeaseLost) and "has not answered for" in str(cause)
        finally:
            node.answers.set()
            node._step_down_task = None  # as a process would end
            await node.stop()

    asyncio.run(scenario())
