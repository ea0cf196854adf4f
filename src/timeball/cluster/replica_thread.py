"""The thread of a replica: takes events one by one, steps the protocol, carries out the effects in their order.

It is the broker's disk thread as well: while this replica leads, the log's writer brings each commit here (`commit`),
and while that waits for the other disks the thread reads their acknowledgements itself, so that no second thread has to
be woken. Other calls of the broker on this thread wait meanwhile, as they do for a commit of a broker alone.

The coordinator is asked on the event loop (member.py): what it says comes in by `tell`, what it is asked for goes out
by the hooks. The first error of the disk ends the replica (docs/decisions/0003-fail-stop.md).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from timeball.broker.registry.epochs import EPOCH_KEY, EpochFacts
from timeball.clock import Clock
from timeball.cluster import effects as do
from timeball.cluster import events as on
from timeball.cluster.clock_offsets import ClockOffsets
from timeball.cluster.connections import Address, Connections
from timeball.cluster.events import Event
from timeball.cluster.machine import step
from timeball.cluster.messages import Begin, Bytes, Data, Message, Pong
from timeball.cluster.positions import Position
from timeball.cluster.replica import Replica, Role, Rules
from timeball.cluster.replica_log import ReplicaLog
from timeball.errors import NotLeader, StorageError
from timeball.log import format as fmt
from timeball.log.disk_thread import Disk
from timeball.log.replication import Extent
from timeball.message import meta_rows

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

TICK_MS = 50
# A takeover has at most so much left to apply: 35 ms of work at 100,000 messages a second. Small commits, applied
# together, cost a third less than once a tick.
APPLY_MS = 250
SUSPECT_MS = 1_000


class Hooks(Protocol):
    """Requests of the thread to the event loop; each is called in the replica's thread and returns at once."""

    def propose(self, proposal: do.Propose) -> None:
        """Swap the record, and answer with a Proposed event."""

    def hold(self) -> None:
        """Make the holder's key."""

    def resign(self) -> None:
        """Remove the holder's key."""

    def apply(self, seq: int) -> None:
        """Bring the follower's caches up to a row."""

    def serve(self, epoch: int) -> None:
        """Serve: this replica leads."""

    def stop_serving(self, reason: str) -> None:
        """End the process: this replica leads no more."""

    def fail(self, error: BaseException) -> None:
        """End the process: the disk has failed, or a rule of ours is broken."""


class FileWork(Protocol):
    """What sends and receives data files (data_files.py); each call is the replica's thread's and returns at once."""

    def received(self, node: str, message: Message) -> None:
        """Take a message about a data file."""

    def closed(self, node: str) -> None:
        """Know that a connection with a node has ended."""


class ReplicaThread(Disk):
    """A replica that runs. `tell`, `post`, `submit` and `shutdown` may be called in any thread."""

    def __init__(
        self, rules: Rules, log: ReplicaLog, connections: Connections, clock: Clock, hooks: Hooks
    ) -> None:
        self._log, self._connections, self._clock, self._hooks = log, connections, clock, hooks
        connections.listener = self
        # Replaced by this thread alone; readers of other threads see one whole state or the next.
        self.state = Replica(
            rules, promised=log.identity.promised, log=log.log(), first=log.first,
            now_ms=clock.boot_ms(), wall_ms=clock.wall_ms(),
        )  # fmt: skip
        self.committed = Position(0, 0, 0)
        self.clock_offsets = ClockOffsets()
        self.since_ms = clock.wall_ms()  # when it entered its role
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._told: SimpleQueue[Event] = SimpleQueue()
        self._to_send: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.file_work: FileWork | None = None  # None: this replica has no data files
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._is_over = False  # shut down, or failed
        self._ticked_ms = 0
        # A follower applies every APPLY_MS: commit by commit it would cost as much as all else that a follower does.
        self._committed_seq = self._applied_seq = self._applied_ms = 0
        self._suspect, self._suspect_until_ms = "", 0  # the node of a leader whose connection has ended
        self._received = False  # frames or more, since the last flush
        self._failed: BaseException | None = None  # a commit's, which its caller was told as well
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Return the epoch that this replica leads."""
        return self.state.epoch

    @property
    def connected(self) -> int:
        """Return how many connections with other replicas there are."""
        return self._connections.count

    # -- from other threads ------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Give the protocol an event."""
        self._told.put(event)
        self._connections.wake()

    def send_soon(self, node: str, message: Message, *, answers: bool) -> None:
        """Send a message that is not the protocol's, also while a commit waits. `answers`: see Connections.send."""
        self._to_send.put(partial(self._connections.send, node, message, answers=answers))
        self._connections.wake()

    def set_addresses(self, addresses: dict[str, Address]) -> None:
        """Know where the other nodes listen."""
        self._connections.addresses = addresses

    def post(self, call: Callable[[], None]) -> None:
        """Run a call that reports its own outcome, and raises nothing."""
        self._calls.put(call)
        self._connections.wake()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See Executor."""
        if self._is_over:
            raise RuntimeError("the replica's thread has ended")
        future: Future[R] = Future()
        self.post(partial(_run_call, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor; calls that wait are run first."""
        self._calls.put(None)
        self._connections.wake()
        if wait and self._thread.is_alive():
            self._thread.join()

    # -- the writer of a leader (log/replication.py) -----------------------------------------------------------------

    def commit(self, extent: Extent) -> None:
        """Write, sync and replicate a commit; return when it is committed. Raises NotLeader."""
        assert threading.current_thread() is self._thread
        try:
            self._commit(extent)
        except NotLeader:
            raise
        except BaseException as error:  # the state runs ahead of a disk that has failed, and must not go on
            self._failed = error
            raise

    def _commit(self, extent: Extent) -> None:
        first_seq = self.state.log.seq
        self._log.follow_writer(extent.file, first_seq)
        ordinal, begin = extent.file.ordinal, None
        if extent.begins:
            header = bytes(extent.file.mapped[: fmt.ALIGN])
            begin = Begin(self.epoch, ordinal, extent.file.size_bytes, first_seq, header)
        self._step(
            on.Appended(ordinal, extent.position, extent.end_seq, extent.frames, self._clock.boot_ms(), begin)
        )
        while self.committed.seq < extent.end_seq:
            if self.state.role is not Role.LEADER:
                raise NotLeader("this node leads no more; ask again, another one answers soon")
            self._poll()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_calls():
                self._poll()
        except BaseException as error:  # of any kind: no caller waits for this thread
            logger.critical("replica stopped reason=%r", error)
            self._hooks.fail(error)
            # What follows a failed sync would be taken for synced: the calls that come are refused.
            self._refuse_calls(error)
        finally:
            self._is_over = True
            self._connections.close()
            self._log.close()

    def _serve_calls(self) -> bool:
        """Run the calls that wait; return False when the last of them ended the thread."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return True
            if call is None:
                return False
            call()
            if self._failed is not None:
                raise self._failed

    def _refuse_calls(self, error: BaseException) -> None:
        while (call := self._calls.get()) is not None:
            if isinstance(call, partial) and call.func is _run_call:
                call.args[0].set_exception(StorageError(f"the log has stopped: {error}"))

    def _poll(self) -> None:
        """Take what sockets, the coordinator and the clock bring; wait for them until the next tick."""
        due_ms = self._ticked_ms + TICK_MS - self._clock.boot_ms()
        self._connections.poll(
            0 if not (self._told.empty() and self._to_send.empty()) else min(TICK_MS, due_ms)
        )
        while not self._told.empty():
            self._step(self._told.get_nowait())
        while not self._to_send.empty():
            self._to_send.get()()
        if self._received:
            self._received = False
            self._step(on.Flush())
        now_ms = self._clock.boot_ms()
        if now_ms - self._ticked_ms >= TICK_MS:
            self._ticked_ms = now_ms
            if self._log.first != self.state.first:
                self._step(on.Dropped(self._log.first))
            self._step(on.Tick(now_ms, self._clock.wall_ms()))
            if self._applied_seq < self._committed_seq and now_ms - self._applied_ms >= APPLY_MS:
                self._applied_seq, self._applied_ms = self._committed_seq, now_ms
                self._hooks.apply(self._applied_seq)
            if self._suspect:
                self._probe()

    def opened(self, node: str) -> None:
        """Tell the protocol of a connection that was dialed."""
        self._step(on.Connected(node))

    def received(self, node: str, message: Message) -> None:
        """Give the protocol a message; raises PeerError."""
        self._received = True
        now_ms = wall_ms = 0
        if isinstance(message, Pong):
            now_ms, wall_ms = self._clock.boot_ms(), self._clock.wall_ms()
            self.clock_offsets.add(node, message.wall_ms, now_ms - message.boot_ms, wall_ms)
        self._step(on.Received(node, message, now_ms, wall_ms))

    def closed(self, node: str, *, opened_here: bool) -> None:
        """Tell the protocol that a connection has ended; and if it was a leader's, whose process has, that too."""
        was_source = self.state.source is not None and self.state.source.node == node
        self._step(on.Disconnected(node, opened_here))
        if self.file_work is not None:
            self.file_work.closed(node)
        if was_source and not opened_here:
            self._suspect, self._suspect_until_ms = node, self._clock.boot_ms() + SUSPECT_MS
            self._probe()

    def _probe(self) -> None:
        """Tell the protocol when nothing listens any more where the last leader was: its lease need not be waited for.

        A process that ends closes its sockets one by one, so it is looked at more than once.
        """
        if self.state.source is not None or self._clock.boot_ms() > self._suspect_until_ms:
            self._suspect = ""
        elif self._connections.refuses(self._suspect):
            node, self._suspect = self._suspect, ""
            self._step(on.LeaderDied(node))

    def _step(self, event: Event) -> None:
        """Step the protocol; an event that comes while effects are carried out waits for their end."""
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                before = self.state.role
                self.state, effects = step(self.state, self._events.popleft())
                if self.state.role is not before:
                    self.since_ms = self._clock.wall_ms()
                    logger.info(
                        "replica role=%s was=%s promised=%d", self.state.role, before, self.state.promised
                    )
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._is_stepping = False

    def _carry_out(self, effect: do.Effect) -> None:
        match effect:
            case do.Send(node, Pong(epoch, _, boot_ms)):
                # The step knows the clock of the last tick, which is up to TICK_MS old.
                self._connections.send(node, Pong(epoch, self._clock.wall_ms(), boot_ms))
            case do.Send(node, message):
                self._connections.send(node, message)
            case do.Write(ordinal, position, frames):
                self._log.write(ordinal, position, frames)
            case do.Sync():
                self._log.sync()
            case do.BeginSegment(begin):
                self._log.begin_segment(begin)
            case do.CutLog(at):
                self._log.cut(at)
            case do.KeepPromise(epoch):
                self._log.keep_promise(epoch)
            case do.Commit(position):
                self.committed = position
            case do.Apply(seq):
                self._committed_seq = seq
            case do.Ship():
                self._ship(effect)
            case do.AppendEpoch(epoch):
                self._append_epoch(epoch)
            case _:
                self._carry_out_rest(effect)

    def _carry_out_rest(self, effect: do.Effect) -> None:
        """Carry out one effect that is not on the way of a commit."""
        match effect:
            case do.Propose():
                self._hooks.propose(effect)
            case do.Hold():
                self._hooks.hold()
            case do.Resign():
                self._hooks.resign()
            case do.Dial():
                self._connections.is_dialing = True
            case do.HangUp():
                self._connections.hang_up()
            case do.PassOn(node, message):
                if self.file_work is not None:
                    self.file_work.received(node, message)
            case do.Serve(epoch):
                self._hooks.serve(epoch)
            case do.StopServing(reason):
                self._hooks.stop_serving(reason)
            case _:
                raise AssertionError(f"an effect that is not known: {effect}")

    def _ship(self, effect: do.Ship) -> None:
        """Read older frames and send them."""
        piece = self._log.read(effect.begin, self.state.log.end, effect.epoch)
        end = effect.begin
        if piece is not None:
            if piece.begin is not None:
                self._connections.send(effect.node, piece.begin, answers=effect.fetched)
            place, end = (piece.ordinal, piece.position), piece.end
            self._connections.send(
                effect.node,
                Bytes(effect.epoch, *place, end.seq, piece.frames)
                if effect.fetched
                else Data(effect.epoch, *place, end.seq, self.state.committed_seq, piece.frames),
            )
        if not effect.fetched:
            self._step(on.Shipped(effect.node, end))

    def _append_epoch(self, epoch: int) -> None:
        """Append the row that opens an epoch."""
        seq, now_ms = max(self.state.log.seq, 1), self._clock.wall_ms()
        facts = EpochFacts(epoch, self.state.rules.replica, now_ms)
        rows = meta_rows([(EPOCH_KEY, msgspec.json.encode(facts))], now_ms)
        size_bytes = len(fmt.encode_rows(rows)) + 2 * fmt.ALIGN
        begin, ordinal, position = self._log.room_for(size_bytes, seq, now_ms, epoch)
        _, parts = fmt.encode_frame(
            rows, first_seq=seq, span=1, append_ms=now_ms, epoch=epoch, position=position, synced_to=position
        )
        self._step(on.Appended(ordinal, position, seq + 1, b"".join(parts), self._clock.boot_ms(), begin))


def _run_call(future: Future[R], call: Callable[[], R]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # of any kind: the caller is told
            future.set_exception(error)
