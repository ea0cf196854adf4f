"""The thread of a replica: takes events one by one, steps the protocol, and carries out the effects in their order.

It is also the broker's disk thread. While this replica leads, the log's writer passes each commit to `commit`, which
waits for the other disks. Meanwhile this thread itself reads the acknowledgements from the sockets, so that no second
thread has to be woken. Other calls of the broker on this thread wait meanwhile, as on a single broker.

The coordinator is called on the event loop (member.py). Its answers arrive through `tell`, and requests to it leave
through the hooks. The first disk error ends the replica (docs/decisions/0003-fail-stop.md). `ClockOffsets` measures the
clocks of the other replicas.
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

from timeball.broker.registry.groups import EPOCH_KEY, EpochFacts
from timeball.cluster.protocol import effects as do
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.events import Event
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import Begin, Bytes, Data, Hello, Message, Pong, Position
from timeball.cluster.protocol.replica import Replica, Role, Rules
from timeball.cluster.replica_log import READ_BYTES, ReplicaLog
from timeball.cluster.transport.connections import Address, Connections
from timeball.io.clock import Clock
from timeball.log import format as fmt
from timeball.log.disk_thread import Call, Disk, Extent
from timeball.model.errors import LEADS_NO_MORE, NotLeader, OverLimit, PeerError, StorageError
from timeball.model.message import meta_rows

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

TICK_MS = 50  # also the interval of a leader's PINGs
# A follower applies rows at this interval, so a takeover has at most this much log left to apply: 35 ms of work at
# 100,000 messages per second. Small commits applied together cost a third less than with one apply per tick.
APPLY_MS = 250
DISK_FULL_RETRY_MS = 2_000  # a replica whose disk is full looks for free space at this interval
EPOCH_ROW_BYTES = 64 << 10  # more than the row that opens an epoch needs
SUSPECT_MS = 1_000  # after a leader's connection ends, its port is probed for this long


class Hooks(Protocol):
    """Requests of the thread to the event loop. Each is called in the replica's thread and returns at once."""

    def propose(self, proposal: do.Propose) -> None:
        """Swap the record and report the outcome with a Proposed event."""

    def hold(self) -> None:
        """Create the holder's key."""

    def resign(self) -> None:
        """Remove the holder's key."""

    def apply(self, seq: int) -> None:
        """Apply the committed rows below `seq` to the follower's caches."""

    def serve(self, epoch: int) -> None:
        """Begin to serve: this replica leads."""

    def stop_serving(self, reason: str) -> None:
        """End the process: this replica does not lead any more."""

    def fail(self, error: BaseException) -> None:
        """End the process: the disk has failed, or an assertion of this program does not hold."""


class FileWork(Protocol):
    """The sender and receiver of data files (data_files.py).

    The replica's thread calls all methods, which return at once.
    """

    def received(self, node: str, message: Message) -> None:
        """Handle a message about a data file."""

    def closed(self, node: str) -> None:
        """Handle the end of a connection with a node."""


class ReplicaThread(Disk):
    """A running replica. Any thread may call `tell`, `send_soon`, `post`, `submit` and `shutdown`."""

    def __init__(
        self, rules: Rules, log: ReplicaLog, connections: Connections, clock: Clock, hooks: Hooks
    ) -> None:
        self._log, self._connections, self._clock, self._hooks = log, connections, clock, hooks
        connections.listener = self
        # Only this thread replaces the state. States are immutable, so other threads always read a consistent one.
        self.state = Replica(
            rules, promised=log.identity.promised, promised_to=log.identity.promised_to,
            members=log.identity.members, log=log.log(), first=log.first,
            now_ms=clock.boot_ms(), wall_ms=clock.wall_ms(),
        )  # fmt: skip
        self.committed = Position(0, 0, 0)
        self.clock_offsets = ClockOffsets()
        self.since_ms = clock.wall_ms()  # wall clock when the replica entered its role
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._incoming_events: SimpleQueue[Event] = SimpleQueue()
        self._outgoing_sends: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.file_work: FileWork | None = None  # None: this replica has no data files
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._has_ended = False  # shut down, or failed
        self._ticked_ms = 0  # boot clock at the last tick
        # Boot clock at the last look at the sockets. Any thread may read it: a disk that does not answer stops it.
        self.polled_ms = clock.boot_ms()
        # A follower applies every APPLY_MS. Applying each commit would cost as much as all other work of a follower.
        self._committed_seq = self._applied_seq = self._applied_ms = 0
        self._suspected_node, self._probe_until_ms = "", 0  # leader whose connection has ended
        # The reason why this replica acknowledges nothing, although it runs: its disk is full. "" if it has space.
        self.problem = ""
        self._checked_ms = 0  # when a full disk was last checked
        # The leader's node and HELLO, answered once the disk has space.
        self._waiting_hello: tuple[str, Hello] | None = None
        self._has_received = False  # a message has arrived since the last flush
        self._commit_error: BaseException | None = None  # error of a commit, which its caller got as well
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The epoch that this replica leads."""
        return self.state.epoch

    @property
    def leads(self) -> bool:
        """Whether this replica leads, as far as its thread knows. False once the thread has ended."""
        return self.state.role is Role.LEADER and not self._has_ended

    @property
    def connected(self) -> int:
        """The number of connections with other replicas."""
        return self._connections.count

    # -- from other threads ------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Queue an event for the protocol."""
        self._incoming_events.put(event)
        self._connections.wake()

    def send_soon(self, node: str, message: Message, *, answers: bool) -> None:
        """Send a message about data files, also while a commit waits. For `answers` see `Connections.send`."""
        self._outgoing_sends.put(partial(self._connections.send, node, message, answers=answers))
        self._connections.wake()

    def set_addresses(self, addresses: dict[str, Address]) -> None:
        """Set the replication addresses of the other nodes."""
        self._connections.addresses = addresses

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call that reports its own outcome and raises nothing."""
        self._calls.put(call)
        self._connections.wake()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call and return the future of its result. Raises RuntimeError when the thread has ended."""
        if self._has_ended:
            raise RuntimeError("the replica's thread has ended")
        call = Call(partial(fn, *args, **kwargs))
        self.post(call)
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run the queued calls, then end the thread. `cancel_futures` is ignored."""
        self._calls.put(None)
        self._connections.wake()
        if wait and self._thread.is_alive():
            self._thread.join()

    # -- the writer of a leader (log/disk_thread.py) -----------------------------------------------------------------

    def commit(self, extent: Extent) -> None:
        """Write, sync and replicate a commit, until it is committed. Raises NotLeader, and the errors of the disk."""
        assert threading.current_thread() is self._thread
        try:
            self._commit(extent)
        except NotLeader:
            raise
        except BaseException as error:  # the disk failed: `state` contains rows that are not on it, so stop
            self._commit_error = error
            raise

    def _commit(self, extent: Extent) -> None:
        """Pass a commit to the protocol, and poll until it is committed. Raises as `commit` does."""
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
                raise NotLeader(LEADS_NO_MORE)
            self._poll()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the queued calls and poll, until `shutdown` was called. After an error, refuse all calls until then."""
        try:
            while self._serve_calls():
                self._poll()
        except BaseException as error:  # every exception, because no caller waits for this thread
            logger.critical("replica stopped reason=%r", error)
            self._hooks.fail(error)
            # After a failed sync, a later one may succeed without the lost bytes. So all later calls are refused.
            self._refuse_calls(error)
        finally:
            self._has_ended = True
            self._connections.close()
            self._log.close()

    def _serve_calls(self) -> bool:
        """Run the queued calls. Returns False if `shutdown` was called.

        Raises the error of a commit that has failed, so that the replica stops. The commit's caller has it as well.
        """
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return True
            if call is None:
                return False
            call()
            if self._commit_error is not None:
                raise self._commit_error

    def _refuse_calls(self, error: BaseException) -> None:
        """Fail the submitted calls, until None is queued (`shutdown`)."""
        while (call := self._calls.get()) is not None:
            if isinstance(call, Call):
                call.future.set_exception(StorageError(f"the log has stopped: {error}"))

    def _poll(self) -> None:
        """Wait for input until the next tick at most. Then handle it, and the tick if it is due.

        The input: the sockets, and events and messages of other threads. Raises errors of the disk.
        """
        self.polled_ms = self._clock.boot_ms()
        has_work = not (self._incoming_events.empty() and self._outgoing_sends.empty())
        until_tick_ms = self._ticked_ms + TICK_MS - self.polled_ms
        self._connections.poll(0 if has_work else min(TICK_MS, until_tick_ms))
        while not self._incoming_events.empty():
            self._step(self._incoming_events.get_nowait())
        while not self._outgoing_sends.empty():
            self._outgoing_sends.get()()
        if self._has_received:
            self._has_received = False
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
            self._check_full_disk(now_ms)
            if self._suspected_node:
                self._probe_suspect()

    def opened(self, node: str) -> None:
        """Report a connection that was dialed to the protocol."""
        self._step(on.Connected(node))

    def received(self, node: str, message: Message) -> None:
        """Pass a message to the protocol, unless the disk lacks the space for it. Raises PeerError."""
        if isinstance(message, Data | Begin | Bytes):
            self._reserve_space(message)
        elif self.problem and isinstance(message, Hello) and message.is_elected:
            self._waiting_hello = (node, message)
            return
        self._has_received = True
        now_ms = wall_ms = 0
        if isinstance(message, Pong):
            now_ms, wall_ms = self._clock.boot_ms(), self._clock.wall_ms()
            self.clock_offsets.add(node, message.wall_ms, now_ms - message.boot_ms, wall_ms)
        self._step(on.Received(node, message, now_ms, wall_ms))

    def _reserve_space(self, message: Data | Begin | Bytes) -> None:
        """Reserve the space for a message, before the protocol counts its rows as written.

        On a full disk, sets `problem` and raises PeerError. That ends the connection, and the leader's next HELLO waits
        until there is space. A candidate's HELLO does not wait: a promise needs no space.
        """
        try:
            if isinstance(message, Begin):
                self._log.reserve(message.size_bytes, message.ordinal)
            else:
                self._log.reserve(len(message.frames))
        except OverLimit as error:
            self.problem, self._checked_ms = f"acknowledges nothing: {error}", self._clock.boot_ms()
            raise PeerError(str(error)) from error

    def _check_full_disk(self, now_ms: int) -> None:
        """Check every DISK_FULL_RETRY_MS whether a full disk has space again. Then answer the leader's HELLO."""
        if not self.problem or now_ms - self._checked_ms < DISK_FULL_RETRY_MS:
            return
        self._checked_ms = now_ms
        try:
            self._log.reserve(READ_BYTES)
        except OverLimit:
            return
        self.problem, hello, self._waiting_hello = "", self._waiting_hello, None
        logger.info("disk has space again")
        if hello is not None:
            self._step(on.Received(*hello))  # its node and message

    def closed(self, node: str, *, opened_here: bool) -> None:
        """Report to the protocol that a connection has ended.

        If it was the leader's connection, begin to probe the leader's port.
        """
        if self._waiting_hello is not None and self._waiting_hello[0] == node and not opened_here:
            self._waiting_hello = None
        was_source = self.state.source is not None and self.state.source.node == node
        self._step(on.Disconnected(node, opened_here))
        if self.file_work is not None:
            self.file_work.closed(node)
        if was_source and not opened_here:
            self._suspected_node, self._probe_until_ms = node, self._clock.boot_ms() + SUSPECT_MS
            self._probe_suspect()

    def _probe_suspect(self) -> None:
        """Report to the protocol that the leader has died, once its port refuses connections.

        A candidate then need not wait for the end of the leader's lease. The port is probed at each tick for
        SUSPECT_MS, because a process that ends closes its sockets one by one.
        """
        if self.state.source is not None or self._clock.boot_ms() > self._probe_until_ms:
            self._suspected_node = ""
        elif self._connections.refuses(self._suspected_node):
            node, self._suspected_node = self._suspected_node, ""
            self._step(on.LeaderDied(node))

    def _step(self, event: Event) -> None:
        """Step the protocol and carry out the effects. Events that effects cause are queued, and handled afterwards."""
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                previous_role = self.state.role
                self.state, effects = step(self.state, self._events.popleft())
                if self.state.role is not previous_role:
                    self.since_ms = self._clock.wall_ms()
                    logger.info(
                        "replica role=%s was=%s promised=%d",
                        self.state.role,
                        previous_role,
                        self.state.promised,
                    )
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._is_stepping = False

    def _carry_out(self, effect: do.Effect) -> None:
        """Carry out an effect. The effects of a commit are tested first, because they are the most frequent ones."""
        match effect:
            case do.Send(node, Pong(epoch, _, boot_ms)):
                # Set the wall time of the PONG anew: the protocol took it from the last tick, so it may be TICK_MS old.
                self._connections.send(node, Pong(epoch, self._clock.wall_ms(), boot_ms))
            case do.Send(node, message):
                self._connections.send(node, message)
            case do.Write(ordinal, position, frames):
                self._log.write(ordinal, position, frames)
            case do.Sync():
                self._log.sync()
            case do.BeginSegment(begin):
                self._log.begin_segment(begin)
            case do.CutLog(position):
                self._log.cut(position)
            case do.KeepPromise(epoch, to, members):
                self._log.keep_promise(epoch, to, members)
            case do.Commit(position):
                self.committed = position
            case do.Apply(seq):
                self._committed_seq = seq
            case do.Ship():
                self._ship(effect)
            case do.AppendEpoch(epoch):
                self._append_epoch(epoch)
            case _:
                self._carry_out_rare(effect)

    def _carry_out_rare(self, effect: do.Effect) -> None:
        """Carry out an effect that is not on the path of a commit."""
        match effect:
            case do.Propose():
                self._propose(effect)
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
                raise AssertionError(f"unknown effect: {effect}")

    def _propose(self, proposal: do.Propose) -> None:
        """Pass a swap on to the event loop. A candidate first reserves the space for the row that opens its epoch.

        Without that space, the swap is reported as failed.
        """
        if proposal.holder is do.Holder.TAKE:
            try:
                self._log.reserve(EPOCH_ROW_BYTES)
            except OverLimit as error:
                self.problem, self._checked_ms = f"cannot lead: {error}", self._clock.boot_ms()
                self._step(on.Proposed(0, proposal.record, False))
                return
        self._hooks.propose(proposal)

    def _ship(self, effect: do.Ship) -> None:
        """Read older frames from the segments and send them, after a BEGIN if they are the first of their segment.

        Then report a Shipped event, unless the frames answer a FETCH.
        """
        piece = self._log.read(effect.begin, self.state.log.end, effect.epoch)
        end = effect.begin
        if piece is not None:
            if piece.begin is not None:
                self._connections.send(effect.node, piece.begin, answers=effect.fetched)
            end, committed_seq = piece.end, self.state.committed_seq
            message = (
                Bytes(effect.epoch, piece.ordinal, piece.position, end.seq, piece.frames)
                if effect.fetched
                else Data(effect.epoch, piece.ordinal, piece.position, end.seq, committed_seq, piece.frames)
            )
            self._connections.send(effect.node, message)
        if not effect.fetched:
            self._step(on.Shipped(effect.node, end))

    def _append_epoch(self, epoch: int) -> None:
        """Pass the EPOCH row to the protocol as a commit of its own (an Appended event).

        The protocol's effects then write it.
        """
        seq, now_ms = max(self.state.log.seq, 1), self._clock.wall_ms()
        facts = EpochFacts(epoch, self.state.rules.replica, now_ms)
        rows = meta_rows([(EPOCH_KEY, msgspec.json.encode(facts))], now_ms)
        size_bytes = sum(map(len, fmt.encode_rows(rows))) + 2 * fmt.ALIGN
        begin, ordinal, position = self._log.place_commit(size_bytes, seq, now_ms, epoch)
        _, chunks = fmt.encode_frame(
            rows, first_seq=seq, span=1, append_ms=now_ms, epoch=epoch, position=position, synced_to=position
        )
        self._step(on.Appended(ordinal, position, seq + 1, b"".join(chunks), self._clock.boot_ms(), begin))


# ---- offsets of the other replicas' clocks -------------------------------------------------------------------
# The leader measures the offsets from its own clock with PING and PONG. A PONG contains the other node's wall clock at
# an unknown time between sending and receiving. The middle is assumed, so the error is at most half the round trip. The
# answer with the shortest round trip of the last `SAMPLES` counts.

SAMPLES = 16  # a leader sends 20 PINGs a second


class ClockOffsets:
    """Offsets in ms by node, positive when the node's clock is ahead.

    Belongs to one thread, but any thread may read `ms`.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        # node -> (round trip, offset) of its last answers
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, node: str, peer_wall_ms: int, round_trip_ms: int, wall_ms: int) -> None:
        """Add an answer that arrived at `wall_ms`, to a PING sent `round_trip_ms` earlier."""
        samples = self._samples.setdefault(node, deque(maxlen=SAMPLES))
        samples.append((round_trip_ms, peer_wall_ms - (wall_ms - round_trip_ms / 2)))
        _, self.ms[node] = min(samples)
