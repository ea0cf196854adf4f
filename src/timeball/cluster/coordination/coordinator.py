"""Coordination of nodes outside of the log: the interface of a coordinator, a node's lease, and the directory.

Nodes agree through a coordinator on the leader of each group, the nodes, and shared secrets.
A node asks its coordinator a few times a second, but never for a message. Only one operation has to be correct: the
compare-and-swap of a group's record. Each change of leader adds 1 to the record's epoch, so an epoch has one leader,
and replicas refuse messages of an epoch below the one that they have promised. All other answers may be late or wrong.
This costs time, but loses no message:

    a read is outdated          the compare-and-swap that follows fails
    a change is not reported    the next poll, 1 s later, reads it
    a lease ends early          another node leads a higher epoch, and the replicas refuse the first one
    a lease ends late           the group is without a leader for longer
    an answer is lost           the swap is sent again; its earlier success is recognized by record and lease

`SingleNodeCoordinator` is for a node without a cluster: it needs no other process, and the node always leads.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import msgspec

from timeball.cluster.protocol.replica import Record, node_of
from timeball.cluster.transport.connections import Address, parse_address
from timeball.io.clock import Clock
from timeball.model.errors import LeaseLost, SetupError, Unavailable
from timeball.monitoring.figures import ReplicaFigures

logger = logging.getLogger(__name__)

# ---- the lease of this node ----------------------------------------------------------------------------------
# The lease is renewed four times per TTL, and requested anew when it has ended. The end of the lease is computed on
# this node: boot clock when the last successful renewal was *sent*, plus the granted TTL, minus a margin. The
# coordinator counts from when it received the renewal, so it ends the lease later.

RENEWALS_PER_TTL = 4  # two renewals may fail before a holder stops
# Pause after no answer: short, because the coordinator has already retried until its deadline.
RENEWAL_RETRY_S = 0.05
OPERATOR_RETRY_S = 1.0  # pause after an error that only an operator can correct


class HeldLease:
    """A lease and the node registered with it, kept while `run` runs. Belongs to the event loop.

    A failed renewal is repeated. Meanwhile this node may consider the lease ended, and a later renewal makes it valid
    again: when etcd elects a new leader of its own, it restarts all leases with their whole TTL.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, node: Node, ttl_ms: int) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._node, self._ttl_ms = node, ttl_ms
        self._lease: Lease | None = None
        self._is_registered = False
        self._last_failure = ""

    @property
    def lease(self) -> Lease | None:
        """The lease if it is valid now by this node's clock, else None."""
        lease = self._lease
        return lease if lease is not None and self._clock.boot_ms() < lease.ends_ms else None

    async def run(self) -> None:
        """Keep the lease valid until cancelled."""
        while True:  # noqa: ASYNC110 (time passes, no event comes)
            await asyncio.sleep(await self.renew_or_grant())

    async def renew_or_grant(self) -> float:
        """Renew or request the lease. Returns the seconds until the next call. An error is logged, not raised."""
        try:
            await self._renew()
        except (Unavailable, SetupError) as error:
            if not self._last_failure:
                logger.warning("lease not renewed reason=%s", error)
            self._last_failure = str(error)
            return OPERATOR_RETRY_S if isinstance(error, SetupError) else RENEWAL_RETRY_S
        if self._last_failure:
            logger.info("lease renewed again")
        self._last_failure = ""
        assert self._lease is not None
        # Use the granted TTL: with etcd's default timings it is 2 s when 1 s was requested.
        next_ms = self._lease.sent_ms + self._lease.ttl_ms // RENEWALS_PER_TTL
        return max(next_ms - self._clock.boot_ms(), 0) / 1_000

    async def release(self) -> None:
        """End the lease at once, unless it is over, so that other nodes need not wait for its end."""
        lease, self._lease = self.lease, None
        if lease is not None:
            await self._coordinator.revoke(lease)

    async def _renew(self) -> None:
        """Renew the lease, or request a new one, and register the node once with each lease.

        Raises Unavailable and SetupError.
        """
        if self._lease is not None:
            try:
                self._lease = await self._coordinator.renew(self._lease)
            except LeaseLost:
                logger.warning("lease lost lease=%d", self._lease.id)
                self._lease = None
        if self._lease is None:
            self._is_registered = False
            self._lease = await self._coordinator.grant(self._ttl_ms)
        if not self._is_registered:
            await self._coordinator.register(self._node, self._lease)
            self._is_registered = True


# ---- the interface of a coordinator --------------------------------------------------------------------------

# A holder stops relying on its lease this long before etcd may end it, to allow for clock drift and for the travel time
# of a request.
LEASE_MARGIN_MS = 200
NEVER_MS = 2**62

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


@dataclass(frozen=True)
class Lease:
    """A proof, limited in time, that a node is alive.

    `sent_ms` is the reading of the boot clock before the request that granted or renewed the lease.
    """

    id: int
    ttl_ms: int  # as granted, which may be more than was requested
    sent_ms: int

    @property
    def ends_ms(self) -> int:
        """The boot clock time from which the holder must not rely on the lease."""
        return self.sent_ms + self.ttl_ms - LEASE_MARGIN_MS


class Holder(NamedTuple):
    """The node that may consider itself the leader of a group. The entry disappears with its lease."""

    node: str
    lease_id: int
    revision: int


class OperatorRequest(msgspec.Struct, frozen=True):
    """An operator's request to the leader of a group: another set of replicas, or a hand-over."""

    replicas: tuple[str, ...] = ()
    hand_over_to: str = ""  # a node

    def describe(self) -> str:
        """Describe the request for error texts and the cluster's status."""
        if self.hand_over_to:
            return f"a hand-over to {self.hand_over_to}"
        return f"the set {', '.join(map(node_of, self.replicas))}"


class PendingRequest(NamedTuple):
    """A request that the leader has not carried out yet. It disappears with the lease of the command that wrote it."""

    request: OperatorRequest
    lease_id: int
    revision: int


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    group: str
    record: Record | None
    revision: int  # of the record, which a swap compares; 0 when there is no record
    holder: Holder | None
    as_of: int  # revision of the store at this time, for `wait_for_change`
    pending_request: PendingRequest | None = None

    @property
    def leader(self) -> str:
        """The node that leads as of this view, or "" when there is none."""
        if self.record is None or self.holder is None:
            return ""
        node = node_of(self.record.leader)
        return node if self.holder.node == node else ""


class AllGroups(NamedTuple):
    """All groups that have a record, by name, as they were when they were read."""

    views: dict[str, GroupView]
    as_of: int  # revision of the store at this time, also if there is no group


class Swap(NamedTuple):
    """The outcome of a compare-and-swap: whether it succeeded, and the group after it."""

    won: bool
    view: GroupView


class Node(msgspec.Struct, frozen=True):
    """A node as it is registered for others. Unknown fields, added by a newer version, are ignored."""

    name: Name
    addresses: dict[str, str] = {}  # edge -> host:port
    zone: str = ""
    version: str = ""
    replica: str = ""  # node and incarnation, at the node's start
    promised: int = 0  # the epoch that it had promised at its start
    group: str = ""  # the group of which it is a replica


class Coordinator(Protocol):
    """The shared state of a cluster, as one node reads and changes it.

    All methods but `close` raise Unavailable when no answer comes in time, and SetupError when the operator must act.
    After Unavailable a change may or may not have been made: read again.
    """

    async def grant(self, ttl_ms: int) -> Lease:
        """Request a new lease of this node."""

    async def renew(self, lease: Lease) -> Lease:
        """Renew a lease. Returns the lease with its new end. Raises LeaseLost."""

    async def revoke(self, lease: Lease) -> None:
        """End a lease and delete every key that is bound to it (registration, holder, report, request)."""

    async def read(self, group: str) -> GroupView:
        """Read a group's record, holder and request."""

    async def read_all(self) -> AllGroups:
        """Read all groups that have a record."""

    async def lead(
        self, group: str, revision: int, record: Record, lease: Lease, *, displaces: str = ""
    ) -> Swap:
        """Swap the record if it has this revision, and hold the group with the lease. Raises LeaseLost.

        The swap fails if the group has a holder, unless that is the node `displaces`, which is known to be dead.
        """

    async def change(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision (0: it does not exist), without changing the holder."""

    async def hand_over(self, group: str, revision: int, record: Record, lease: Lease) -> Swap:
        """Swap the record if it has this revision and the group is held with this lease, and remove the holder."""

    async def hold(self, group: str, lease: Lease) -> bool:
        """Hold a group with the lease if it has no holder. True if this lease holds it now. Raises LeaseLost."""

    async def resign(self, group: str, lease: Lease) -> None:
        """Release a group, if this lease holds it, so that others need not wait for the end of the lease."""

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision and the group has no holder."""

    async def put_request(self, group: str, revision: int, request: OperatorRequest, lease: Lease) -> Swap:
        """Write a request to the leader, if the record has this revision and no request exists. Raises LeaseLost."""

    async def remove_request(self, group: str, pending: PendingRequest) -> None:
        """Remove a request, unless another one has replaced it. Does nothing if it does not exist any more."""

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Publish the figures of this node's replica for operators, until the lease ends. Raises LeaseLost."""

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Read the figures that the nodes have published, by name."""

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait until something may have changed since `after` (the `as_of` of a read), or until the timeout.

        Then read.
        """

    async def register(self, node: Node, lease: Lease) -> None:
        """Publish this node for the others, until the lease ends. Raises LeaseLost."""

    async def nodes(self) -> dict[str, Node]:
        """Read the registered nodes, by name."""

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Read the secret of this name. If there is none, `proposal` becomes the secret, which never changes."""

    async def close(self) -> None:
        """Close connections and watches. Leases stay until they end or are revoked."""


# ---- a node without a cluster --------------------------------------------------------------------------------


class SingleNodeCoordinator:
    """The coordinator of a node without a cluster, which always leads any group."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self._node = Node(name)
        self._record = Record(epoch, name, (name,))
        self._lease = Lease(0, NEVER_MS, 0)

    async def grant(self, ttl_ms: int) -> Lease:
        """Grant a lease that never ends."""
        return self._lease

    async def renew(self, lease: Lease) -> Lease:
        """Renew nothing: the lease never ends."""
        return lease

    async def revoke(self, lease: Lease) -> None:
        """Do nothing."""

    async def read(self, group: str) -> GroupView:
        """Build a view of the group with this node as its leader."""
        return GroupView(group, self._record, 1, Holder(self._node.name, self._lease.id, 1), 1)

    async def read_all(self) -> AllGroups:
        """Report no group: without a cluster, groups have no names."""
        return AllGroups({}, 1)

    async def lead(
        self, group: str, revision: int, record: Record, lease: Lease, *, displaces: str = ""
    ) -> Swap:
        """Refuse: this node leads already."""
        return Swap(False, await self.read(group))

    async def change(self, group: str, revision: int, record: Record) -> Swap:
        """Refuse: there are no other replicas."""
        return Swap(False, await self.read(group))

    async def hand_over(self, group: str, revision: int, record: Record, lease: Lease) -> Swap:
        """Refuse: there is no other node."""
        return Swap(False, await self.read(group))

    async def hold(self, group: str, lease: Lease) -> bool:
        """Succeed: this node always holds the group."""
        return True

    async def resign(self, group: str, lease: Lease) -> None:
        """Do nothing."""

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Refuse: this node leads."""
        return Swap(False, await self.read(group))

    async def put_request(self, group: str, revision: int, request: OperatorRequest, lease: Lease) -> Swap:
        """Refuse: there is no other node."""
        return Swap(False, await self.read(group))

    async def remove_request(self, group: str, pending: PendingRequest) -> None:
        """Do nothing."""

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Do nothing: this node's metrics contain the figures."""

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Report nothing: there are no other nodes."""
        return {}

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait for the timeout: nothing changes."""
        await asyncio.sleep(timeout_s)

    async def register(self, node: Node, lease: Lease) -> None:
        """Store the node for `nodes`."""
        self._node = node

    async def nodes(self) -> dict[str, Node]:
        """List this node alone."""
        return {self._node.name: self._node}

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Take the proposal, because the node stores the secret in its log."""
        return proposal

    async def close(self) -> None:
        """Do nothing."""


# ---- the directory: groups and leaders, read at each change and at least once a second -----------------------


POLL_S = 1.0
RETRY_S = 0.1  # pause after a request without an answer


class Directory:
    """The groups and nodes as last read. Belongs to the event loop.

    Groups and nodes that have disappeared stay listed, so that a request for them is answered with "no leader now".
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.views: dict[str, GroupView] = {}
        self.nodes: dict[str, Node] = {}

    async def run(self) -> None:
        """Keep the directory up to date until cancelled: read again at each change, or after POLL_S."""
        while True:
            try:
                as_of = await self.read()
                await self._coordinator.wait_for_change(as_of, POLL_S)
            except (Unavailable, SetupError) as error:
                logger.warning("groups of the cluster not read reason=%s", error)
                await asyncio.sleep(RETRY_S)

    async def read(self) -> int:
        """Read once. Returns the revision for `wait_for_change`. Raises Unavailable and SetupError."""
        groups = await self._coordinator.read_all()
        self.nodes |= await self._coordinator.nodes()
        self.views |= groups.views
        return groups.as_of

    def hosts(self) -> set[str]:
        """Collect the host names and addresses of all known nodes, in lower case."""
        addresses = (address for node in self.nodes.values() for address in node.addresses.values())
        return {parse_address(address)[0].lower() for address in addresses}

    def leader(self, group: str) -> Node | None:
        """Find the node that leads a group. None while there is none."""
        view = self.views.get(group)
        return None if view is None else self.nodes.get(view.leader)

    def replicas(self, group: str, edge: str) -> list[str]:
        """List the addresses for an edge of a group's nodes, the leader first. Empty without a record."""
        view, leader = self.views.get(group), self.leader(group)
        if view is None or view.record is None:
            return []
        names = ([leader.name] if leader else []) + [node_of(replica) for replica in view.record.replicas]
        addresses = [
            self.nodes[name].addresses.get(edge) for name in dict.fromkeys(names) if name in self.nodes
        ]
        return [address for address in addresses if address]

    def address(self, group: str, edge: str) -> Address | None:
        """Find the address of a group's leader for an edge (such as "http"). None while there is no leader."""
        leader = self.leader(group)
        if leader is None or edge not in leader.addresses:
            return None
        return parse_address(leader.addresses[edge])
