"""The questions that nodes agree on outside of the log: who leads a group, which nodes there are, one shared secret.

A coordinator is asked a few times a second, and never for a message. Of all it says only one thing has to be true: a
group's record is changed by compare-and-swap of the revision that was read, and each change of leader adds 1 to the
epoch. So an epoch has one leader, and the replicas refuse what comes from an epoch below the one they have promised.
Everything else may be late or wrong, and costs time but no message:

    a read is old               the compare-and-swap that follows fails
    a change is not told        the next poll, a second later, reads it
    a lease ends early          another node leads a higher epoch, and the replicas refuse the first one
    a lease ends late           the group is without a leader for longer
    an answer is lost           the swap is sent again; its own earlier success is known by record and lease

`Alone` is the coordinator of a node without a cluster: it needs nothing, and always leads.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import msgspec

from timeball.cluster.record import Record, node_of
from timeball.monitoring.replica_figures import ReplicaFigures

# What the holder's clock and a request's way may cost: a holder stops so long before etcd may let the lease go.
LEASE_MARGIN_MS = 200
NEVER_MS = 2**62

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


@dataclass(frozen=True)
class Lease:
    """A node's sign of life. `sent_ms` is the boot clock's reading before the request that granted or renewed it."""

    id: int
    ttl_ms: int  # as granted, which may be more than was asked for
    sent_ms: int

    @property
    def ends_ms(self) -> int:
        """Return the boot clock's reading from which the holder must not rely on it."""
        return self.sent_ms + self.ttl_ms - LEASE_MARGIN_MS


class Holder(NamedTuple):
    """The node that may think that it leads a group; gone with its lease."""

    node: str
    lease_id: int
    revision: int


class Wish(msgspec.Struct, frozen=True):
    """An operator's request to the leader of a group: another set of replicas, or to give way."""

    replicas: tuple[str, ...] = ()
    hand_over_to: str = ""  # a node

    def describe(self) -> str:
        """Return the wish in words."""
        if self.hand_over_to:
            return f"a hand-over to {self.hand_over_to}"
        return f"the set {', '.join(map(node_of, self.replicas))}"


class Asked(NamedTuple):
    """A wish that waits for the leader. It goes with the lease of the command that asks."""

    wish: Wish
    lease_id: int
    revision: int


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    group: str
    record: Record | None
    revision: int  # of the record, which a swap compares; 0 when there is none
    holder: Holder | None
    as_of: int  # for `wait_for_change`
    asked: Asked | None = None

    @property
    def leader(self) -> str:
        """Return the node that leads as far as is known; empty when there is none."""
        if self.record is None or self.holder is None:
            return ""
        node = node_of(self.record.leader)
        return node if self.holder.node == node else ""


class Swap(NamedTuple):
    """The outcome of a compare-and-swap: whether it was made, and the group after it."""

    won: bool
    view: GroupView


class Node(msgspec.Struct, frozen=True):
    """A node as others find it. Fields that a newer version has added are passed over."""

    name: Name
    addresses: dict[str, str] = {}  # edge -> host:port
    zone: str = ""
    version: str = ""
    replica: str = ""  # node and incarnation, at the node's start
    promised: int = 0  # the epoch that it had promised then
    group: str = ""  # whose log it keeps


class Coordinator(Protocol):
    """All methods but `close` raise Unavailable when no answer comes in time, SetupError when the operator must act.

    After Unavailable a change may have been made or not: read again.
    """

    async def grant(self, ttl_ms: int) -> Lease:
        """Return a new lease of this node."""

    async def renew(self, lease: Lease) -> Lease:
        """Return the lease with its new end; raise LeaseLost."""

    async def revoke(self, lease: Lease) -> None:
        """End a lease, and with it what the node has registered and holds."""

    async def read(self, group: str) -> GroupView:
        """Return a group's record and holder."""

    async def read_all(self) -> dict[str, GroupView]:
        """Return all groups that have a record, by name."""

    async def lead(
        self, group: str, revision: int, record: Record, lease: Lease, *, displaces: str = ""
    ) -> Swap:
        """Swap the record if it has this revision, and hold the group by the lease; raise LeaseLost.

        A group that has a holder is left to it, unless it is the node `displaces`, which is known to be dead.
        """

    async def change(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision (0: there is none), and leave the holder alone."""

    async def hand_over(self, group: str, revision: int, record: Record, lease: Lease) -> Swap:
        """Swap the record if it has this revision and the group is held by this lease, and give the group up."""

    async def hold(self, group: str, lease: Lease) -> bool:
        """Hold a group by the lease if it has no holder; return whether this lease holds it now; raise LeaseLost."""

    async def resign(self, group: str, lease: Lease) -> None:
        """Give up a group that is held by this lease, so that others need not wait for the lease's end."""

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision and the group has no holder."""

    async def ask(self, group: str, revision: int, wish: Wish, lease: Lease) -> Swap:
        """Ask the leader, if the record has this revision and nothing else is asked for; raise LeaseLost."""

    async def settle(self, group: str, asked: Asked) -> None:
        """Remove a wish, unless it is gone or is another one."""

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Tell operators of this node's replica for as long as the lease lives; raise LeaseLost."""

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Return what the nodes have reported, by name."""

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Return when something may have changed since a view's `as_of`, or after the timeout. Then read."""

    async def register(self, node: Node, lease: Lease) -> None:
        """Tell others of this node for as long as the lease lives; raise LeaseLost."""

    async def nodes(self) -> dict[str, Node]:
        """Return the registered nodes, by name."""

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Return the secret of this name; the first proposal is kept for ever."""

    async def close(self) -> None:
        """End connections and watches. Leases stay until they end or are revoked."""


class Alone:
    """A node without a cluster: it leads any group, for ever."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self._node = Node(name)
        self._record = Record(epoch, name, (name,))
        self._lease = Lease(0, NEVER_MS, 0)

    async def grant(self, ttl_ms: int) -> Lease:
        """Return a lease without an end."""
        return self._lease

    async def renew(self, lease: Lease) -> Lease:
        """Return the same lease."""
        return lease

    async def revoke(self, lease: Lease) -> None:
        """Do nothing."""

    async def read(self, group: str) -> GroupView:
        """Return a group that this node leads."""
        return GroupView(group, self._record, 1, Holder(self._node.name, self._lease.id, 1), 1)

    async def read_all(self) -> dict[str, GroupView]:
        """Return no group: a node alone has no names for them."""
        return {}

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
        """Return True: this node holds it."""
        return True

    async def resign(self, group: str, lease: Lease) -> None:
        """Do nothing."""

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Refuse: this node leads."""
        return Swap(False, await self.read(group))

    async def ask(self, group: str, revision: int, wish: Wish, lease: Lease) -> Swap:
        """Refuse: there is no other node."""
        return Swap(False, await self.read(group))

    async def settle(self, group: str, asked: Asked) -> None:
        """Do nothing."""

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Do nothing: this node's own metrics say it."""

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Return no report."""
        return {}

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait for the timeout: nothing changes."""
        await asyncio.sleep(timeout_s)

    async def register(self, node: Node, lease: Lease) -> None:
        """Keep the node for `nodes`."""
        self._node = node

    async def nodes(self) -> dict[str, Node]:
        """Return this node."""
        return {self._node.name: self._node}

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Return the proposal: the node's own log keeps it."""
        return proposal

    async def close(self) -> None:
        """Do nothing."""
