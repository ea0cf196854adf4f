"""A node that leads no more: its work ends, and another node follows in the process.

tests/cluster/test_grey_failures.py tests the rest.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.broker.on_node import batch
from tests.cluster.memory_store import Memory, MemoryStore
from tests.ports import free_ports

from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.protocol.replica import Record
from timeball.io.clock import Clock, SystemClock
from timeball.io.cycle_collection import CYCLES
from timeball.model.answers import PageRequest
from timeball.model.config import Settings
from timeball.model.errors import LeaseLost, NotLeader
from timeball.node import replicated_node
from timeball.node.node import SWITCH_INTERVAL_S
from timeball.node.replicated_node import ReplicatedNode

CLUSTER, GROUP, NAME = "tests", "g1", "a"


class HangingNode(ReplicatedNode):
    """A node whose disk hangs as soon as it leads, until `disk_answers` is set."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.disk_answers = threading.Event()

    def serve(self, epoch: int) -> None:
        self.thread.post(lambda: self.disk_answers.wait() and None)
        super().serve(epoch)


@pytest.fixture
def coordinator_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings, Clock], Coordinator]:
    """Let all nodes have one coordinator in memory."""
    memory = Memory(SystemClock())

    def coordinator_of(settings: Settings, clock: Clock) -> Coordinator:
        return Coordinator(MemoryStore(memory), clock, cluster=settings.cluster, node=settings.node)

    monkeypatch.setattr(replicated_node, "create_coordinator", coordinator_of)
    # On a busy machine the work takes longer.
    monkeypatch.setattr(replicated_node, "ABANDON_S", BOUND_S)
    return coordinator_of


def settings_of(folder: Path) -> Settings:
    port, http_port, replication_port = free_ports(3)
    return Settings(
        data=folder, cluster=CLUSTER, node=NAME, group=GROUP, etcd=("http://127.0.0.1:1",), lease_ttl_ms=1_000,
        port=port, http_port=http_port, replication_port=replication_port, remoting_port=-1, grpc_port=-1,
        name_server_port=-1,
    )  # fmt: skip


def test_after_a_leader_is_deposed_another_node_can_lead_in_the_same_process(
    tmp_path: Path, coordinator_of: Any
) -> None:
    settings, threads, seqs = settings_of(tmp_path), threading.active_count(), list[int]()

    async def lead_once() -> None:
        """Start a node, let it lead and accept a message, and let another one lead instead."""
        node, operator = ReplicatedNode(settings), coordinator_of(settings, SystemClock())
        await node.start()
        ended = asyncio.create_task(node.run_until_signal())
        view = await operator.read(GROUP)
        epoch = 0 if view.record is None else view.record.epoch
        record = Record(epoch, "", (node.thread.state.rules.replica,))
        await operator.change(GROUP, view.revision, record)
        async with asyncio.timeout(BOUND_S):
            await node.serving.wait()
        assert node.broker_node is not None
        seqs.append((await node.broker_node.broker.send(batch(1))).first_seq)
        view = await operator.read(GROUP)
        await operator.change(GROUP, view.revision, Record(epoch + 2, "b/1", record.replicas))
        cause = await ended
        assert isinstance(cause, LeaseLost) and await node.abandon(cause)
        with pytest.raises(NotLeader):
            await node.broker_node.broker.send(batch(1))

    async def scenario() -> None:
        for _ in range(3):
            await lead_once()

    asyncio.run(scenario())
    assert len(set(seqs)) == 3 and seqs == sorted(seqs), "each continues the log of the one before"
    assert threading.active_count() <= threads, "their threads have ended"


@pytest.mark.parametrize("hands_over", [False, True])
def test_the_broker_of_a_former_leader_is_freed(
    tmp_path: Path, coordinator_of: Any, hands_over: bool
) -> None:
    settings = settings_of(tmp_path)

    async def lead_once() -> weakref.ref[Any]:
        """Let a node lead, with a limited topic and a page of pending messages, and let it end."""
        node, operator = ReplicatedNode(settings), coordinator_of(settings, SystemClock())
        await node.start()
        ended = asyncio.create_task(node.run_until_signal())
        record = Record(0, "", (node.thread.state.rules.replica,))
        await operator.change(GROUP, 0, record)
        async with asyncio.timeout(BOUND_S):
            await node.serving.wait()
        assert node.broker_node is not None
        broker = node.broker_node.broker
        await broker.create_topic("orders", 1, max_per_second=1)
        await broker.send(batch(20))
        await broker.listing.page(PageRequest(10))
        if hands_over:
            node.hand_over("")
        else:
            view = await operator.read(GROUP)
            await operator.change(GROUP, view.revision, Record(2, "b/1", record.replicas))
        assert await node.abandon(await ended)
        return weakref.ref(broker)

    async def scenario() -> None:
        broker = await lead_once()
        await asyncio.sleep(0)  # the loop forgets the tasks that have ended
        CYCLES.collect()  # also what another test has frozen
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        assert broker() is None

    asyncio.run(scenario())


def test_a_node_that_steps_down_listens_and_ends_only_when_its_disk_answers(
    tmp_path: Path, coordinator_of: Any
) -> None:
    """The system cannot end a process whose disk hangs. Its ports would stay open, without answers."""
    settings = settings_of(tmp_path)

    async def scenario() -> None:
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
                _, writer = await asyncio.open_connection("127.0.0.1", settings.http_port)
                writer.close()
                while node._lead_task is None or not node._lead_task.done():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
                assert not ended.done()
                node.disk_answers.set()
                cause = await ended
            assert isinstance(cause, LeaseLost) and "has not answered for" in str(cause)
        finally:
            node.disk_answers.set()
            node._step_down_task = None  # so that `stop` ends all parts, as the end of a process would
            await node.stop()

    asyncio.run(scenario())


def test_a_start_shortens_the_switch_interval_of_the_interpreter(tmp_path: Path, coordinator_of: Any) -> None:
    async def scenario() -> None:
        node = ReplicatedNode(settings_of(tmp_path))
        await node.start()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        await node.stop()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        asyncio.run(scenario())
    finally:
        sys.setswitchinterval(interval_s)
