"""A machine of a simulated group: a whole broker with its replica, on a simulated disk, clock and network.

It runs the production code on `CrashFiles`, a clock that only the simulation moves, an event loop that reads that
clock, simulated connections instead of sockets, and the store in memory instead of etcd. Nothing runs by itself. The
event loop turns when the machine is given a turn. Calls to other threads run in the loop's own thread. The replica
needs a separate thread, since a commit waits in it: it runs from one `poll` of its sockets to the next while the
simulation waits. So a seed gives the same run each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from random import Random
from typing import Any

from tests.cluster.memory_store import Memory, MemoryStore
from tests.cluster.simulated_wire import Wire
from tests.crash_files import CrashFiles, PowerCut

from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.coordinator import Node as ClusterNode
from timeball.cluster.member import REPLICATION, FollowerCaches, Member
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.messages import Message, Receiver, encode
from timeball.cluster.protocol.replica import Role, Rules
from timeball.cluster.replica_log import ReplicaLog
from timeball.cluster.replica_thread import ReplicaThread
from timeball.cluster.transport.connections import ANSWERS_FROM, Listener
from timeball.cluster.transport.data_files import DataFiles
from timeball.io.clock import ManualClock
from timeball.log.disk_thread import Disk, Leading
from timeball.model.config import Settings
from timeball.model.errors import LeaseLost, PeerError, TimeballError, Unavailable
from timeball.monitoring.figures import ReplicaFigures
from timeball.node.node import Node
from timeball.node.replicated_node import LentDisk

CLUSTER, GROUP, TTL_MS, QUORUM_MS = "tests", "g1", 1_000, 3_000
RETENTION_MS = 4_000
WAIT_S = 0.02  # between two looks at the store
HAND_OVER_S = 2.0


class Killed(BaseException):
    """The process has ended. Raised in the replica's thread at its next poll."""


class MachineLoop(asyncio.SelectorEventLoop):
    """An event loop on a machine's clock, which runs the work of other threads at once."""

    def __init__(self, clock: ManualClock) -> None:
        self._machine_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._machine_clock.boot_ms() / 1_000

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        """Run a call at once, except those for the replica's thread."""
        if isinstance(executor, Disk):
            return super().run_in_executor(executor, func, *args)
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:  # of any kind: the caller receives it
            future.set_exception(error)
        return future

    def turn(self) -> None:
        """Run one iteration: the calls that are ready or due."""
        self.call_soon(self.stop)
        self.run_forever()


class Baton:
    """Lets one thread run while the other waits."""

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = self.is_killed = False

    def wait(self) -> None:
        """Wait until the other thread passes the baton back, or ends."""
        self._back.acquire()

    def give(self) -> None:
        """Let the other thread run until it passes the baton back."""
        if not self.is_over:
            self._go.release()
            self.wait()

    def pass_back(self) -> None:
        """Wait for the next turn."""
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def end(self) -> None:
        """Take no more turns."""
        if not self.is_over:
            self.is_over = True
            self._back.release()


class SimulatedConnections:
    """Connections (transport/connections.py) over the simulated wire. Each message is encoded and decoded."""

    listener: Listener

    def __init__(self, machine: Machine) -> None:
        self._machine, self._wire, self._random = machine, machine.wire, machine.random
        self.addresses: dict[str, Any] = {}
        self.is_dialing = False

    @property
    def count(self) -> int:
        return sum(self._machine.name in pair for pair in self._wire.connections)

    def wake(self) -> None:
        pass  # the simulation gives the next turn

    def close(self) -> None:
        self._wire.die(self._machine.name, self._random)
        self._machine.baton.end()

    def send(self, node: str, message: Message, *, answers: bool | None = None) -> None:
        """See Connections."""
        is_answer = message.TYPE >= ANSWERS_FROM if answers is None else answers
        (received,) = Receiver().receive(b"".join(bytes(part) for part in encode(message)))
        self._wire.send(self._machine.name, node, received, is_answer=is_answer)

    def hang_up(self) -> None:
        self.is_dialing = False
        self._wire.hang_up(self._machine.name, self._random)

    def refuses(self, node: str) -> bool:
        return not self._machine.others[node].is_up

    def poll(self, timeout_ms: int) -> None:
        """Wait for a turn, then let some of the messages in transit arrive."""
        self._machine.baton.pass_back()
        name = self._machine.name
        for node in sorted(self.addresses) if self.is_dialing else ():
            if self._machine.others[node].is_up and self._wire.open(name, node):
                self.listener.opened(node)
        for _ in range(self._machine.deliveries()):
            waiting = [(pair, back) for pair, back in self._wire.waiting() if pair[0 if back else 1] == name]
            if not waiting:
                return
            self._receive(*self._random.choice(waiting))

    def _receive(self, pair: tuple[str, str], back: bool) -> None:
        """Take the next message of a direction, and pass it or the end of the connection to the listener."""
        message, sender = self._wire.take(pair, back=back), pair[1] if back else pair[0]
        if message is None:
            self.listener.closed(sender, opened_here=back)
            return
        try:
            self.listener.received(sender, message)
        except PeerError:
            if pair in self._wire.connections:
                self._wire.end(pair, self._random)
            self.listener.closed(sender, opened_here=back)


class MachineStore(MemoryStore):
    """The store of one machine, which may be cut off from it."""

    def __init__(self, memory: Memory, machine: Machine) -> None:
        super().__init__(memory)
        self._machine = machine

    async def _up(self) -> Memory:
        memory = await super()._up()
        if self._machine.is_without_store:
            raise Unavailable("cut off")
        return memory

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        # The waiters of several event loops cannot share an event.
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self.memory.newest(prefix) <= after and loop.time() < until_s:
            await asyncio.sleep(WAIT_S)


class Hooks(Member):
    """A member whose failed thread ends without being joined."""

    thread: ReplicaThread

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.thread.shutdown(wait=False)


class Machine:
    """One machine. `files` is its disk, `others` are all machines by name."""

    def __init__(self, name: str, memory: Memory, wire: Wire, random: Random, segment_bytes: int) -> None:
        self.name, self.memory, self.wire, self.random = name, memory, wire, random
        self.clock, self.files = ManualClock(), CrashFiles()
        self.others: dict[str, Machine] = {}
        self.is_up = self.is_paused = self.is_without_store = self.is_calm = self.is_blank = False
        self.ended: BaseException | None = None
        self.epochs: list[int] = []  # in which it served
        self.node: Node | None = None
        self.retaining_node: Node | None = None  # the node whose retention runs now
        self.unexpected_errors: list[str] = []
        self.settings = Settings(
            data=Path("in-memory"),
            queues_per_topic=2,
            compact_rows=0,
            retention_ms=RETENTION_MS,
        )
        object.__setattr__(
            self.settings, "segment_bytes", segment_bytes
        )  # perhaps less than a user may ask for

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. The power may be cut meanwhile."""
        assert not self.is_up
        self.baton, self.loop = Baton(), MachineLoop(self.clock)
        self.loop.set_exception_handler(self._record_unexpected)
        self.is_up, self.is_paused, self.ended, self.node = True, False, None, None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.thread: ReplicaThread | None = None
        try:
            self.loop.run_until_complete(self._start())
        except PowerCut:
            return
        self.baton.wait()

    async def _start(self) -> None:
        """Build the parts of a replica as replicated_node.py does, and start them."""
        self.log = ReplicaLog(self.files, self.name, GROUP, self.settings.segment_bytes)
        self.is_blank = False
        self.caches = FollowerCaches(self.files, self.log, self.settings)
        replica = self.log.identity.replica
        registration = ClusterNode(
            self.name, {REPLICATION: f"{self.name}:1"}, replica=replica, group=GROUP,
            promised=self.log.identity.promised,
        )  # fmt: skip
        store = MachineStore(self.memory, self)
        self.coordinator = Coordinator(store, self.clock, cluster=CLUSTER, node=self.name)
        self.member = Hooks(self.coordinator, self.clock, registration, GROUP, TTL_MS, self)
        thread = self.member.thread = ReplicaThread(
            Rules(replica, GROUP, quorum_ms=QUORUM_MS), self.log,
            SimulatedConnections(self), self.clock, self.member,  # type: ignore[arg-type]
        )  # fmt: skip
        self.data_files = thread.file_work = DataFiles(
            self.files, self.log, thread, self.clock, committed=lambda: self.caches.files,
            retention_ms=self.settings.retention_ms, on_failure=self.end,
        )  # fmt: skip
        self.data_files.begin()
        thread.start()
        self.thread = thread
        self.member.start(thread)

    def turn(self) -> None:
        """Let the process do the work that is due now."""
        if not self.is_up or self.is_paused:
            return
        self.loop.turn()
        self.baton.give()
        try:
            for _ in range(4):
                self.data_files.run_once(0)
        except (PowerCut, TimeballError) as error:
            self.end(error)
        self.loop.turn()

    def die(self) -> None:
        """End the process. The caller decides which bytes stay on the disk."""
        self.is_up, self.node = False, None
        cut, self.files.cut = self.files.cut, True  # so that no part of it continues
        if not self.files.trace:
            self.files.trace.append(("kill", self.name))
        if self.thread is not None:
            self.baton.is_killed = True
            while not self.baton.is_over:
                self.baton.give()
            self.thread.shutdown()
        for _ in range(100):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.loop.turn()
        self.loop.close()
        self.files.cut, self.files.crash_at = cut, None

    def deliveries(self) -> int:
        """Return how many messages arrive in a turn."""
        return 64 if self.is_calm else self.random.choice((0, 1, 2, 4, 8, 16))

    # -- duties (cluster/member.py), as replicated_node.py has them --------------------------------------------------

    def apply(self, seq: int) -> None:
        try:
            self.caches.apply(seq)
        except TimeballError as error:
            self.end(error)

    def serve(self, epoch: int) -> None:
        self._run(self._serve(epoch))

    def hand_over(self, node: str) -> None:
        if self.node is not None:
            self._run(self._give_way(self.node, node))

    def step_down(self, reason: str) -> None:
        self.end(LeaseLost(reason))

    def leader_changed(self) -> None:
        pass  # no clients are forwarded

    def figures(self) -> ReplicaFigures:
        assert self.thread is not None
        return ReplicaFigures(GROUP, self.replica, str(self.role), self.member.leader())

    def end(self, error: BaseException) -> None:
        self.ended = self.ended or error

    async def _serve(self, epoch: int) -> None:
        """Build the broker on the replica's log, as replicated_node.py does."""
        assert self.thread is not None
        opened = await asyncio.wrap_future(self.thread.submit(self.log.opened))
        hot = self.caches.finish(opened.segments.next_seq)
        await asyncio.wrap_future(self.data_files.complete())
        node = Node(
            self.settings,
            self.clock,
            self.files,
            Leading(LentDisk(self.thread), self.thread, self.data_files, self.member.confirm_lead),
        )
        await node.start(listen=False, hot=(opened, hot))
        node.when_failed(self.end)
        self.epochs.append(epoch)
        self.node = node

    async def _give_way(self, broker: Node, node: str) -> None:
        """Stop the broker, hand over, and end the process."""
        assert self.thread is not None
        self.node = None
        await broker.finish()
        self.thread.tell(on.HandOver(node))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while self.role is not Role.STOPPED:
                    await asyncio.sleep(WAIT_S)
        self.end(PeerError(f"handed over to {node}"))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task. An error of it ends the process."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_after_error)

    def _end_after_error(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    def _record_unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an error that nothing has handled, unless it comes from the simulated faults."""
        error = context.get("exception")
        is_over = self.files.cut or loop.is_closed()  # messages for an ended process do not count
        if not is_over and not isinstance(error, (TimeballError, PowerCut)):
            self.unexpected_errors.append(f"{context.get('message')}: {error!r}")

    # -- for the simulation ------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        assert self.thread is not None
        return self.thread.state.role

    @property
    def replica(self) -> str:
        """Return the replica that this disk is."""
        return self.log.identity.replica

    def content(self) -> dict[str, bytes]:
        """Read the segments on the disk by name, without trailing zeros and without spares."""
        names = [name for name in self.files.list_dir("log") if name.endswith(".log")]
        content_by_name = {
            name: bytes(self.files.map_readonly(f"log/{name}")).rstrip(b"\0") for name in names
        }
        return {name: content for name, content in content_by_name.items() if content}
