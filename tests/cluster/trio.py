"""Three replicas in one process: their threads, real sockets and folders, and one coordinator in memory.

A leading replica appends through a real LogWriter. A replica that must end is closed, as its process would end, and
stays closed until the test starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tests.bounds import BOUND_S
from tests.cluster.memory_store import Memory, MemoryStore
from tests.log.small_log import batch
from tests.ports import free_ports

from timeball.cluster.coordination.coordinator import Coordinator, Node
from timeball.cluster.member import REPLICATION, Member
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.replica import Record, Role, Rules
from timeball.cluster.replica_log import ReplicaLog
from timeball.cluster.replica_thread import ReplicaThread
from timeball.cluster.transport.connections import Connections, listen
from timeball.cluster.transport.data_files import CommittedFiles, DataFiles
from timeball.io.clock import SystemClock
from timeball.io.files import Files, RealFiles
from timeball.log.segment import Segments
from timeball.log.writer import LogWriter
from timeball.monitoring.figures import ReplicaFigures

CLUSTER, GROUP, TTL_MS = "tests", "g1", 1_000
SEGMENT_BYTES = 16 * 1024
HOUR_MS = 3_600_000
CLOCK = SystemClock()
T = TypeVar("T")


class Replica:
    """One node, and the ProcessHooks of its member. Its folder and port stay when it is closed."""

    def __init__(self, name: str, files: Files, memory: Memory, *, acks_all: bool, quorum_ms: int) -> None:
        self.name, self.files, self._memory = name, files, memory
        self._acks_all, self._quorum_ms = acks_all, quorum_ms
        (self.port,) = free_ports(1)  # not a port of another test that runs meanwhile
        self.is_up = False
        self.epochs: list[int] = []  # in which it served
        self.applied = 0
        self.ended: list[BaseException] = []
        self.stepped_down = ""  # the reason
        self.writer: LogWriter | None = None
        self.segments: Segments
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the log and start the threads and the member, as a process would."""
        assert not self.is_up
        self.is_up, self.ended, self.writer, self.applied, self.stepped_down = True, [], None, 0, ""
        self.log = ReplicaLog(self.files, self.name, GROUP, SEGMENT_BYTES)
        replica = self.log.identity.replica
        listening = listen("127.0.0.1", self.port)
        addresses = {REPLICATION: f"127.0.0.1:{self.port}", "flight": f"127.0.0.1:{self.port + 1}"}
        coordinator = Coordinator(MemoryStore(self._memory), CLOCK, cluster=CLUSTER, node=self.name)
        self.member = Member(
            coordinator, CLOCK, Node(self.name, addresses, replica=replica, group=GROUP), GROUP, TTL_MS, self
        )
        rules = Rules(replica, GROUP, self._acks_all, quorum_ms=self._quorum_ms)
        self.thread = ReplicaThread(
            rules, self.log, Connections(GROUP, listening, CLOCK.boot_ms), CLOCK, self.member
        )
        self._data_files = self.thread.file_work = DataFiles(
            self.files, self.log, self.thread, CLOCK, committed=lambda: CommittedFiles(self.applied),
            retention_ms=HOUR_MS, on_failure=self.end,
        )  # fmt: skip
        self._data_files.start()
        self.thread.start()
        self.member.start(self.thread)

    async def crash(self) -> None:
        """End as a killed process does: its sockets close, and its lease lasts until its time is over."""
        if self.is_up:
            self.is_up = False
            for task in self.member._tasks:
                task.cancel()
            await asyncio.gather(*self.member._tasks, return_exceptions=True)
            await asyncio.to_thread(self.thread.shutdown)
            await asyncio.to_thread(self._data_files.stop)
            if self.writer is not None:
                self.writer.next_segment.close_file()
                self.writer._encoder.shutdown()

    async def close(self) -> None:
        """End in order, and end the lease."""
        if self.is_up:
            await self.member.close()
            await self.crash()

    # -- ProcessHooks ------------------------------------------------------------------------------------------------

    def apply(self, seq: int) -> None:
        self.applied = seq

    def serve(self, epoch: int) -> None:
        self._serving = asyncio.get_running_loop().create_task(self._serve(epoch))

    def hand_over(self, node: str) -> None:
        self.thread.tell(on.HandOver(node))

    def step_down(self, reason: str) -> None:
        self.stepped_down = reason

    def leader_changed(self) -> None:
        pass  # no clients are forwarded

    def figures(self) -> ReplicaFigures:
        return ReplicaFigures(GROUP, self.replica, str(self.role), self.member.leader())

    def end(self, error: BaseException) -> None:
        self.ended.append(error)

    async def _serve(self, epoch: int) -> None:
        """Open a writer on the replica's log, in place of a broker."""
        opened = await asyncio.wrap_future(self.thread.submit(self.log.opened))
        self.segments = opened.segments
        self.writer = LogWriter(
            self.files, opened.segments, opened.file, CLOCK, self.thread,
            segment_bytes=SEGMENT_BYTES, replication=self.thread, on_failure=self.end,
        )  # fmt: skip
        self.epochs.append(epoch)

    # -- for tests ---------------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        return self.thread.state.role

    @property
    def replica(self) -> str:
        return self.log.identity.replica

    def append(self, first: int, rows: int = 3) -> asyncio.Future[int]:
        """Append messages, of which the first has this number. Returns the future of the commit."""
        assert self.writer is not None
        return self.writer.append(batch(first, rows))[1]

    def content(self) -> dict[str, bytes]:
        """Read the segment files by name, without the zeros at their ends and without spares."""
        names = [name for name in self.files.list_dir("log") if name.endswith(".log")]
        segments = {name: bytes(self.files.map_readonly(f"log/{name}")).rstrip(b"\0") for name in names}
        return {name: content for name, content in segments.items() if content}


class Trio:
    """All replicas of the group."""

    def __init__(self, memory: Memory, replicas: list[Replica]) -> None:
        self.memory = memory
        self.replicas = {replica.name: replica for replica in replicas}
        self.coordinator = Coordinator(MemoryStore(memory), CLOCK, cluster=CLUSTER, node="tests")

    async def begin(self) -> None:
        """Start all replicas, and write the first record."""
        for replica in self.replicas.values():
            await replica.start()
        record = Record(0, "", tuple(replica.replica for replica in self.replicas.values()))
        await self.coordinator.change(GROUP, 0, record)

    async def leader(self, above: int = 0) -> Replica:
        """Wait until a replica serves in an epoch above `above`."""

        def leader_or_none() -> Replica | None:
            leaders = [
                replica for replica in self.replicas.values() if replica.is_up and replica.role is Role.LEADER
            ]
            return next(
                (replica for replica in leaders if replica.epochs and replica.epochs[-1] > above), None
            )

        leader = await self.wait_until(leader_or_none, f"a leader above epoch {above}")
        assert leader is not None
        return leader

    def others(self, excluded: Replica) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica is not excluded]

    async def wait_for_record(self) -> None:
        """Wait until the record names the replicas that run."""
        running = {replica.replica for replica in self.replicas.values()}
        async with asyncio.timeout(BOUND_S):
            while set((await self.record()).replicas) != running:
                await asyncio.sleep(0.01)

    async def record(self) -> Record:
        record = (await self.coordinator.read(GROUP)).record
        assert record is not None
        return record

    async def wait_for_equal_logs(self) -> None:
        """Wait until all logs have the same bytes."""

        def are_equal() -> bool:
            first, *others = [replica.content() for replica in self.replicas.values()]
            return all(content == first for content in others)

        await self.wait_until(are_equal, "equal logs")

    async def wait_until(self, condition: Callable[[], T], description: str) -> T:
        """Wait until the condition, which other threads make true, is true. Returns its value."""
        deadline_ms = CLOCK.boot_ms() + BOUND_S * 1_000
        while not (value := condition()):
            roles = {
                name: (replica.role, replica.ended)
                for name, replica in self.replicas.items()
                if replica.is_up
            }
            assert CLOCK.boot_ms() < deadline_ms, f"not true in time: {description} {roles}"
            await asyncio.sleep(0.005)
        return value


@asynccontextmanager
async def running_trio(
    folder: Path, *, acks_all: bool = False, quorum_ms: int = 60_000, files: dict[str, Files] | None = None
) -> AsyncIterator[Trio]:
    """Run three replicas for the length of the block. `files`: their disks, by default folders below `folder`."""
    memory = Memory(CLOCK)
    replicas = [
        Replica(name, disk, memory, acks_all=acks_all, quorum_ms=quorum_ms)
        for name, disk in (files or {name: RealFiles(folder / name) for name in "abc"}).items()
    ]
    trio = Trio(memory, replicas)
    try:
        await trio.begin()
        yield trio
    finally:
        for replica in replicas:
            await replica.close()
