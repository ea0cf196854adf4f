"""The part of a replica outside its thread: its connection with the coordinator, and the caches of a follower.

`Member` runs on the event loop. It keeps the lease, reads the record, and carries out swaps. It passes the
coordinator's answers to the replica's thread as events. The thread's requests arrive through the hooks, and are sent to
the coordinator one after the other, in their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from timeball.broker.recovery import Applying, lacks_rows, newest_starting_point, starting_point
from timeball.broker.registry.tables import Tables
from timeball.cluster.coordination.coordinator import Coordinator, GroupView, HeldLease, Node
from timeball.cluster.operations import RequestStep, next_request_step
from timeball.cluster.protocol import effects as do
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.leading import confirmed_ms
from timeball.cluster.protocol.replica import Role
from timeball.cluster.replica_log import ReplicaLog
from timeball.cluster.replica_thread import ReplicaThread
from timeball.cluster.transport.connections import Address, parse_address
from timeball.cluster.transport.data_files import CommittedFiles
from timeball.io.clock import Clock
from timeball.io.files import Files
from timeball.log import checkpoint
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.model.config import Settings
from timeball.model.errors import LEADS_NO_MORE, LeaseLost, NotLeader, SetupError, Unavailable
from timeball.monitoring.figures import ReplicaFigures

logger = logging.getLogger(__name__)

REPLICATION = "replication"  # key of the address that other replicas dial, among a node's addresses
POLL_S = 1.0  # the record is read, and a stalled replica resigns, at least this often
RETRY_S = 0.1  # pause after a request without an answer, or while there is no lease
REPORT_S = 1.0  # figures are reported at most this often
CONFIRM_POLL_S = 0.01  # interval at which the answers to a leader's PINGs are checked
STALL_TTLS = 2  # a leader or candidate steps down when its thread has not run for this many leases
CHECKS_PER_STALL = 8  # in this time, so many checks whether the thread has run


class ProcessHooks(Protocol):
    """Requests of a member to its process. All methods are called on the event loop."""

    def apply(self, seq: int) -> None:
        """Apply the committed rows below `seq` to the follower's caches."""

    def serve(self, epoch: int) -> None:
        """Begin to serve: this replica leads."""

    def hand_over(self, node: str) -> None:
        """Stop serving, hand the lead over to this node, and end the process, unless a hand-over is under way."""

    def step_down(self, reason: str) -> None:
        """Stop serving without the replica's thread, which does not run. End the process once it runs again."""

    def leader_changed(self) -> None:
        """Learn that `Member.leader` may have changed."""

    def figures(self) -> ReplicaFigures:
        """Collect the replica's figures."""

    def end(self, error: BaseException) -> None:
        """End the process: the replica does not lead any more, or its disk has failed."""


class Member:
    """The connection of one replica with the coordinator, and the hooks of its thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        node: Node,
        group: str,
        ttl_ms: int,
        process: ProcessHooks,
    ) -> None:
        self._coordinator, self._node, self._group, self._process = coordinator, node, group, process
        self._lease_keeper = HeldLease(coordinator, clock, node, ttl_ms)
        self._clock = clock
        self._stall_ms = STALL_TTLS * ttl_ms  # a thread that has not run for this long has stalled
        self._is_etcd_restored = False  # since this replica leads
        self._has_stepped_down = False  # the lease keeps the node registered, but no longer lets it lead
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[do.Effect] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread: ReplicaThread
        self.view: GroupView | None = None  # as last read
        self.nodes: dict[str, Node] = {}  # as last read, including nodes whose registration has ended

    def start(self, thread: ReplicaThread) -> None:
        """Start the duties, which use this running thread."""
        self._thread = thread
        self._tasks = [
            asyncio.create_task(self._run_guarded(duty))
            for duty in (
                self._renew_lease, self._watch_thread, self._watch_record, self._handle_requests,
                self._report_figures,
            )
        ]  # fmt: skip

    async def close(self) -> None:
        """End the duties, and end the lease at once, so that other nodes need not wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._lease_keeper.release()
        except (Unavailable, SetupError) as error:
            logger.warning("lease not ended, it runs out reason=%s", error)
        await self._coordinator.close()

    def leader(self) -> str:
        """Find the node that leads, by the last read record. "" when there is none."""
        return self.view.leader if self.view is not None else ""

    def address(self, edge: str) -> Address | None:
        """Find the leader's address for an edge (such as "http"). None while no other node leads."""
        leader = self.nodes.get(self.leader())
        if leader is None or leader.name == self._node.name or edge not in leader.addresses:
            return None
        return parse_address(leader.addresses[edge])

    # -- look-ups of a leader ----------------------------------------------------------------------------------------
    # A leader whose process was stopped may wake when another one leads. So an answer from its memory is checked after
    # the memory was read. The lease is checked first, because that needs no message.

    async def confirm_lead(self) -> None:
        """Return if no other leader had committed a row when this call began. Raises NotLeader if one may have.

        Waits for a majority to answer a PING, about the interval of PINGs, if this node's lease does not hold the
        group.
        """
        if self._holds_group():
            return
        called_ms = self._clock.boot_ms()
        while (state := self._thread.state).lead and self._thread.leads and not self._has_stepped_down:
            # The PING must have been sent after this call. Its answer alone proves nothing: it may have waited in the
            # socket while this process was stopped.
            if confirmed_ms(state) > called_ms:
                return
            await asyncio.sleep(CONFIRM_POLL_S)
        raise NotLeader(LEADS_NO_MORE)

    def _holds_group(self) -> bool:
        """Check that the lease that holds the group is valid, so that etcd lets no other replica lead.

        After a pause, this node may have a new lease, which does not hold the group. A node that hands over names
        another leader itself.
        """
        lease, view, lead = self._lease_keeper.lease, self.view, self._thread.state.lead
        return (
            lease is not None
            and view is not None
            and view.record is not None
            and view.holder is not None
            and view.holder.lease_id == lease.id
            and lead is not None
            and view.record.epoch == lead.epoch
            and not lead.hand_over_node
            and self._thread.leads
            and not (self._has_stepped_down or self._is_etcd_restored)
        )

    # -- hooks: called in the replica's thread -----------------------------------------------------------------------

    def propose(self, proposal: do.Propose) -> None:
        """Swap the record and report the outcome with a Proposed event."""
        self._request(proposal)

    def hold(self) -> None:
        """Create the holder's key."""
        self._request(do.Hold())

    def resign(self) -> None:
        """Remove the holder's key."""
        self._request(do.Resign())

    def apply(self, seq: int) -> None:
        """Apply the committed rows below `seq` to the follower's caches."""
        self._call_in_loop(self._process.apply, seq)

    def serve(self, epoch: int) -> None:
        """Begin to serve: this replica leads."""
        self._call_in_loop(self._process.serve, epoch)

    def stop_serving(self, reason: str) -> None:
        """End the process: this replica leads no more."""
        logger.warning("replica leads no more reason=%s", reason)
        self._call_in_loop(self._process.end, LeaseLost(f"this node leads no more: {reason}"))

    def fail(self, error: BaseException) -> None:
        """End the process: the disk has failed, or an assertion of this program does not hold."""
        self._call_in_loop(self._process.end, error)

    def _request(self, effect: do.Effect) -> None:
        self._call_in_loop(self._requests.put_nowait, effect)

    def _call_in_loop(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # -- duties ------------------------------------------------------------------------------------------------------

    async def _run_guarded(self, duty: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a duty, and end the process if it raises an error."""
        try:
            await duty()
        except Exception as error:
            # No caller awaits the task, so an error in a duty would go unnoticed. It must end the replica.
            self._process.end(error)

    async def _renew_lease(self) -> None:
        """Keep the lease, and report each new end to the protocol. Runs until it is cancelled."""
        while True:
            pause_s = await self._lease_keeper.renew_or_grant()
            if self._lease_keeper.lease is not None and not self._has_stepped_down:
                self._thread.tell(on.LeaseExtended(self._lease_keeper.lease.ends_ms))
            await asyncio.sleep(pause_s)

    async def _watch_thread(self) -> None:
        """Step down when the thread has not run for STALL_TTLS leases, unless this replica is a learner or a follower.

        Then its disk does not answer. The other replicas cannot notice that, because this event loop keeps the lease,
        and with it the holder's key. No acknowledged row depends on this check.
        """
        while True:
            await asyncio.sleep(self._stall_ms / CHECKS_PER_STALL / 1_000)
            waited_ms = self._clock.boot_ms() - self._thread.polled_ms
            if waited_ms > self._stall_ms and self._thread.state.role not in (Role.LEARNER, Role.FOLLOWER):
                break
        self._has_stepped_down = True
        self._process.step_down(f"its disk has not answered for {waited_ms / 1_000:.1f} s")
        # Resign repeatedly, until the process ends: a request that is still in flight may take the group again, and
        # etcd may extend a lease that seemed to be over.
        while True:
            pause_s = RETRY_S
            if (lease := self._lease_keeper.lease) is not None:
                try:
                    await self._coordinator.resign(self._group, lease)
                    pause_s = POLL_S
                except (Unavailable, SetupError) as error:
                    logger.warning("group not resigned reason=%s", error)
            await asyncio.sleep(pause_s)

    async def _watch_record(self) -> None:
        """Read the record and the nodes at each change, and at least every POLL_S, and pass them on.

        Runs until it is cancelled. Raises LeaseLost after a restore of etcd, unless this replica leads.
        """
        before: GroupView | None = None
        while True:
            try:
                sent_ms = self._clock.boot_ms()
                view = await self._coordinator.read(self._group)
                etcd_ms = self._clock.boot_ms() - sent_ms
                self._update_nodes(await self._coordinator.nodes())
                self._set_view(view)
            except (Unavailable, SetupError) as error:
                logger.warning("record not read reason=%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if before is not None and was_etcd_restored(before, view):
                self._handle_restored_etcd(before, view)
            before = view
            self._report_record(view, etcd_ms)
            try:
                await self._handle_operator_request(view)
                await self._coordinator.wait_for_change(view.as_of, POLL_S)
            except (Unavailable, SetupError):
                await asyncio.sleep(RETRY_S)

    def _handle_restored_etcd(self, before: GroupView, now: GroupView) -> None:
        """Handle a restore of etcd from an old copy. Raises LeaseLost unless this replica leads.

        An old revision may now belong to another record, so a swap could replace a record that this replica has never
        read. A leader continues while the other replicas answer it, but swaps nothing. Any other replica restarts.
        """
        if self._thread.state.role is not Role.LEADER:
            raise LeaseLost(
                f"etcd was restored from a copy: its revision was {before.as_of} and is {now.as_of}, the epoch of the "
                f"record was {_epoch_of(before)} and is {_epoch_of(now)}"
            )
        logger.warning("etcd restored from a copy revision=%d now=%d", before.as_of, now.as_of)
        self._is_etcd_restored = True

    async def _handle_operator_request(self, view: GroupView) -> None:
        """Take the next step for an operator's request, if this replica leads."""
        match next_request_step(view, self._thread.state):
            case RequestStep.SETTLE if view.pending_request is not None:
                await self._coordinator.remove_request(self._group, view.pending_request)
            case RequestStep.WANT if view.pending_request is not None:
                self._thread.tell(on.ReplicasWanted(view.pending_request.request.replicas))
            case RequestStep.FORGET if view.record is not None:
                self._thread.tell(on.ReplicasWanted(view.record.replicas))
            case RequestStep.HAND_OVER if view.pending_request is not None:
                self._process.hand_over(view.pending_request.request.hand_over_to)

    async def _report_figures(self) -> None:
        """Publish the replica's figures when they have changed. Runs until it is cancelled."""
        last_report: tuple[int, ReplicaFigures] | None = None  # with the id of its lease
        last_error = ""
        while True:
            lease, figures = self._lease_keeper.lease, self._process.figures()
            if lease is not None and last_report != (lease.id, figures):
                try:
                    await self._coordinator.report(figures, lease)
                    last_report, last_error = (lease.id, figures), ""
                except (Unavailable, SetupError) as error:
                    if not last_error:  # logged once for each failure
                        logger.warning("figures not reported reason=%s", error)
                    last_error = str(error)
            await asyncio.sleep(REPORT_S)

    def _update_nodes(self, nodes: dict[str, Node]) -> None:
        """Store the registered nodes, and pass their replication addresses to the replica's thread."""
        # Keep dialing nodes whose lease has ended: they come back at the same address, or register another one.
        self.nodes |= {name: node for name, node in nodes.items() if node.group in ("", self._group)}
        addresses = {
            name: parse_address(node.addresses[REPLICATION])
            for name, node in self.nodes.items()
            if name != self._node.name and node.group == self._group and REPLICATION in node.addresses
        }
        self._thread.set_addresses(addresses)

    async def _handle_requests(self) -> None:
        """Carry out the requests of the replica's thread, one after the other. Runs until it is cancelled."""
        while True:
            effect = await self._requests.get()
            try:
                await self._carry_out(effect)
            except (Unavailable, SetupError) as error:
                logger.warning("not asked of the coordinator what=%s reason=%s", type(effect).__name__, error)
                if isinstance(effect, do.Propose):
                    # The swap may have been made. The next read of the record will show it.
                    self._thread.tell(on.Proposed(0, effect.record, None))

    async def _carry_out(self, effect: do.Effect) -> None:
        """Carry out one request. Without a lease, Hold and Resign do nothing. Raises Unavailable, SetupError."""
        lease = self._lease_keeper.lease
        match effect:
            case do.Propose():
                await self._swap(effect)
            case do.Hold() if lease is not None:
                await self._coordinator.hold(self._group, lease)
            case do.Resign() if lease is not None:
                await self._coordinator.resign(self._group, lease)

    async def _swap(self, proposal: do.Propose) -> None:
        """Carry out the swap of a Propose effect, and report its outcome. Raises Unavailable, SetupError."""
        lease, record = self._lease_keeper.lease, proposal.record
        try:
            if self._is_etcd_restored:
                raise LeaseLost("the revision of the proposal is of another etcd")
            if proposal.holder is do.Holder.KEEP:
                swap = await self._coordinator.change(self._group, proposal.revision, record)
            elif lease is None:
                raise LeaseLost("no lease to hold the group by")
            elif proposal.holder is do.Holder.TAKE:
                swap = await self._coordinator.lead(
                    self._group, proposal.revision, record, lease, displaces=proposal.displaces
                )
            else:
                swap = await self._coordinator.hand_over(self._group, proposal.revision, record, lease)
        except LeaseLost:
            self._thread.tell(on.Proposed(0, record, False))
            return
        self._set_view(swap.view)
        self._thread.tell(on.Proposed(swap.view.revision, record, swap.won))
        if not swap.won:
            # Pass the record on at once. A hand-over in it may name this replica, which has only a short time to begin
            # (`hand_over_ms`) and must not wait for the next read.
            self._report_record(swap.view)

    def _set_view(self, view: GroupView) -> None:
        """Store a view of the group, and inform the process if the view names another leader."""
        leader, self.view = self.leader(), view
        if self.leader() not in ("", leader):
            self._process.leader_changed()

    def _report_record(self, view: GroupView, etcd_ms: int | None = None) -> None:
        """Pass a record that was read to the protocol (a Seen event). `etcd_ms`: the round trip of the request."""
        if view.record is not None and not self._is_etcd_restored:
            holder = None if view.holder is None else view.holder.node
            self._thread.tell(on.Seen(view.revision, view.record, holder, etcd_ms))


def was_etcd_restored(before: GroupView, now: GroupView) -> bool:
    """Check whether etcd was restored from an old copy between two reads of a group.

    Then etcd's revision went back. After a restore with `--bump-revision`, etcd's revision grows, and only the record's
    revision, epoch or generation went back. A record that is missing in one of the two reads proves nothing, because an
    operator may have removed it.
    """
    if now.as_of < before.as_of:
        return True
    if before.record is None or now.record is None:
        return False
    return (
        now.revision < before.revision
        or now.record.epoch < before.record.epoch
        or now.record.generation < before.record.generation
    )


def _epoch_of(view: GroupView) -> int | None:
    return None if view.record is None else view.record.epoch


# ---- the caches of a follower --------------------------------------------------------------------------------
# The broker's caches apply committed rows in a separate thread, so that a takeover need not replay the log. The first
# call loads the queues and tables of the last checkpoint or snapshot. From then on the caches follow the log
# (broker/recovery.py). When the leader's retention has deleted the first rows before a learner joined, the learner
# applies nothing until a snapshot with their state is committed.


class FollowerCaches:
    """The caches of one follower.

    The methods block and belong to one thread at a time. Any thread may read `files`.
    """

    def __init__(self, files: Files, log: ReplicaLog, settings: Settings) -> None:
        self._files, self._log, self._settings = files, log, settings
        self._applying: Applying | None = None
        self._attach_seq = -1  # row of the last attach whose files are in `files`
        self.files = CommittedFiles()  # replaced as a whole, never changed, so other threads may read it

    @property
    def applied_seq(self) -> int:
        """The sequence number after the last row applied."""
        return 0 if self._applying is None else self._applying.applied_seq

    def apply(self, to_seq: int) -> None:
        """Apply the committed rows below `to_seq`. Raises Corrupt and errors of the disk.

        Does nothing if the log lacks its first rows and no snapshot with their state is below `to_seq`.
        """
        segments = self._log.segments
        assert segments is not None, "rows are committed"
        if self._applying is None:
            # Only a snapshot below `to_seq` is committed. A later one may still be cut from the log.
            start = newest_starting_point(checkpoint.load(self._files), segments, to_seq)
            if lacks_rows(start, segments):
                return
            self._applying = self._load(start, to_seq)
        self._applying.apply(to_seq)
        self._publish(self._applying)

    def finish(self, to_seq: int) -> Applying:
        """Apply the last rows, those below `to_seq`. Returns the caches. Raises Corrupt when rows are missing."""
        self.apply(to_seq)
        if self._applying is None:
            assert self._log.segments is not None
            starting_point(None, self._log.segments, to_seq)  # raises an error that names the missing file
        assert self._applying is not None
        return self._applying

    def _load(self, start: Checkpoint, to_seq: int) -> Applying:
        """Build the caches at a checkpoint or snapshot, with the scheduled messages of the tail."""
        assert self._log.segments is not None
        tables = Tables(self._files, self._settings.queues_per_topic)
        applying = Applying(start, LogReader(self._log.segments), tables)
        applying.read_tail()
        snapshot = checkpoint.last_snapshot(self._log.segments, to_seq)
        if snapshot is not None:
            applying.log_from_seq = snapshot.facts.log_from_seq
        return applying

    def _publish(self, applying: Applying) -> None:
        """Replace `files` by the data files that the applied rows name."""
        entries = self.files.entries
        if applying.ledger.attach_seq != self._attach_seq:
            self._attach_seq, entries = applying.ledger.attach_seq, dict(applying.files)
        self.files = CommittedFiles(applying.applied_seq, entries, applying.log_from_seq)
