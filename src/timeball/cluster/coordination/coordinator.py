"""Coordination of nodes outside of the log: a node's lease, the coordinator, and the directory.

Nodes agree through a coordinator on the leader of each group, and on the nodes. A node asks its coordinator a few times
a second, but never for a message. Only one operation has to be correct: the compare-and-swap of a group's record. Each
change of leader adds 1 to the record's epoch, so an epoch has one leader, and replicas refuse messages of an epoch
below the one that they have promised. All other answers may be late or wrong.
This costs time, but loses no message:

    a read is outdated          the compare-and-swap that follows fails
    a change is not reported    the next poll, 1 s later, reads it
    a lease ends early          another node leads a higher epoch, and the replicas refuse the first one
    a lease ends late           the group is without a leader for longer
    an answer is lost           the swap is sent again; its earlier success is recognized by record and lease
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from timeball.cluster.coordination.store import (
    Comparison,
    Delete,
    KeyValue,
    LeaseIs,
    Operation,
    Outcome,
    Put,
    Read,
    RevisionIs,
    Store,
)
from timeball.cluster.protocol.replica import Record, node_of
from timeball.cluster.transport.connections import Address, parse_address
from timeball.io.clock import Clock
from timeball.model.errors import UNDECODABLE, LeaseLost, SetupError, Unavailable
from timeball.monitoring.figures import ReplicaFigures

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        """End the lease at once, unless it is over, so that other nodes need not wait for its end.

        Raises Unavailable, SetupError.
        """
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


# ---- values that the coordinator reads and writes --------------------------------------------------------------

# A holder stops relying on its lease this long before etcd may end it, to allow for clock drift and for the travel time
# of a request.
LEASE_MARGIN_MS = 200

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


# ---- the coordinator: its data are keys of a store ------------------------------------------------------------
# Values are JSON.
#
#     tb/<cluster>/state/<group>      no lease    {epoch, leader, replicas, generation}: changed by compare-and-swap
#     tb/<cluster>/holder/<group>     lease       {node}: the node that may consider itself the leader; if the key is
#                                                 missing, a replica may become a candidate
#     tb/<cluster>/nodes/<node>       lease       {name, addresses, zone, version, replica, promised, group}
#     tb/<cluster>/wish/<group>       lease       {replicas, hand_over_to}: a command's request to the leader
#     tb/.reports/<cluster>/<node>    lease       {role, epoch, …}: a replica's figures, for operators
#
# The kind comes before the name, so that one range read returns the records of all groups and nothing else. Reports
# change once a second, so they have a prefix that no node watches. The dot excludes a conflict, because the name of a
# cluster begins with a letter or a digit.
#
# The store repeats a swap whose answer was lost. If the first attempt has succeeded, the repetition fails. The success
# is recognized by its result: the record equals the proposed one (an epoch has one leader, so no other node writes the
# same), and the holder's key, if it was put, has the lease that only this process has.


class _HolderValue(msgspec.Struct, frozen=True):
    node: str


class Coordinator:
    """The shared state of a cluster, as one node reads and changes it, over any store.

    All methods but `close` raise Unavailable when no answer comes in time, and SetupError when the operator must act.
    After Unavailable a change may or may not have been made: read again.
    """

    def __init__(self, store: Store, clock: Clock, *, cluster: str, node: str) -> None:
        self._store, self._clock = store, clock
        self._prefix = f"tb/{_check_name(cluster, 'cluster')}/"
        self._reports = f"tb/.reports/{cluster}/"
        self._node = _check_name(node, "node")
        self._refused_addresses: set[tuple[str, str, str]] = set()  # node, edge and address, each logged once

    async def grant(self, ttl_ms: int) -> Lease:
        """Request a new lease of this node. The store may grant a longer one."""
        sent_ms = self._clock.boot_ms()
        lease_id, ttl_s = await self._store.grant(max(1, -(-ttl_ms // 1_000)))
        return Lease(lease_id, ttl_s * 1_000, sent_ms)

    async def renew(self, lease: Lease) -> Lease:
        """Renew a lease. Returns the lease with its new end. Raises LeaseLost."""
        sent_ms = self._clock.boot_ms()
        ttl_s = await self._store.renew(lease.id)
        return Lease(lease.id, ttl_s * 1_000, sent_ms)

    async def revoke(self, lease: Lease) -> None:
        """End a lease and delete every key that is bound to it."""
        await self._store.revoke(lease.id)

    async def read(self, group: str) -> GroupView:
        """Read a group's record, holder and request in one transaction."""
        outcome = await self._store.transact((), self._reads_of_group(group))
        return self._group_view_of(group, outcome)

    async def read_all(self) -> AllGroups:
        """Read all groups that have a record, in one transaction."""
        prefixes = [self._prefix_of(kind) for kind in ("state", "holder", "wish")]
        outcome = await self._store.transact((), [Read(prefix, is_prefix=True) for prefix in prefixes])
        states, holders, requests = (
            {key_value.key.removeprefix(prefix): key_value for key_value in key_values}
            for prefix, key_values in zip(prefixes, outcome.reads, strict=True)
        )
        views = {
            group: _group_view(group, state, holders.get(group), requests.get(group), outcome.revision)
            for group, state in states.items()
        }
        return AllGroups(views, outcome.revision)

    async def lead(
        self, group: str, revision: int, record: Record, lease: Lease, *, displaces: str = ""
    ) -> Swap:
        """Swap the record if it has this revision, and hold the group with the lease. Raises LeaseLost.

        The group must have no holder, or the holder `displaces`: a node that is known to be dead.
        """
        holder, held_revision = self._key_of("holder", group), 0
        if displaces:
            # Compare the revision of the dead node's key, so that a newer holder is not displaced.
            view = await self.read(group)
            if view.holder is not None and view.holder.node == displaces:
                held_revision = view.holder.revision
        swap = await self._swap(
            group, revision, record, [RevisionIs(holder, held_revision)], [self._put_holder(group, lease)]
        )
        is_held = swap.view.holder is not None and swap.view.holder[:2] == (self._node, lease.id)
        return Swap(swap.won and is_held, swap.view)

    async def change(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision (0: it does not exist), without changing the holder."""
        return await self._swap(group, revision, record, [], [])

    async def hand_over(self, group: str, revision: int, record: Record, lease: Lease) -> Swap:
        """Swap the record if it has this revision and the group is held with this lease, and remove the holder."""
        holder = self._key_of("holder", group)
        return await self._swap(group, revision, record, [LeaseIs(holder, lease.id)], [Delete(holder)])

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision and the group has no holder."""
        return await self._swap(group, revision, record, [RevisionIs(self._key_of("holder", group), 0)], [])

    async def put_request(self, group: str, revision: int, request: OperatorRequest, lease: Lease) -> Swap:
        """Write a request to the leader, if the record has this revision and no request exists. Raises LeaseLost."""
        key, reads = self._key_of("wish", group), self._reads_of_group(group)
        outcome = await self._store.transact(
            [RevisionIs(self._key_of("state", group), revision), RevisionIs(key, 0)],
            [Put(key, msgspec.json.encode(request), lease.id), *reads],
            reads,
        )
        view = self._group_view_of(group, outcome)
        return Swap(view.pending_request is not None and view.pending_request.lease_id == lease.id, view)

    async def remove_request(self, group: str, pending: PendingRequest) -> None:
        """Remove a request, unless another one has replaced it. Does nothing if it does not exist any more."""
        key = self._key_of("wish", group)
        await self._store.transact([RevisionIs(key, pending.revision)], [Delete(key)])

    async def hold(self, group: str, lease: Lease) -> bool:
        """Hold a group with the lease if it has no holder. True if this lease holds it now. Raises LeaseLost."""
        holder = self._key_of("holder", group)
        outcome = await self._store.transact(
            [RevisionIs(holder, 0)], [self._put_holder(group, lease), Read(holder)], [Read(holder)]
        )
        return any(key_value.lease_id == lease.id for key_value in outcome.reads[0])

    async def resign(self, group: str, lease: Lease) -> None:
        """Release a group, if this lease holds it."""
        holder = self._key_of("holder", group)
        await self._store.transact([LeaseIs(holder, lease.id)], [Delete(holder)])

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait until something may have changed since the `as_of` of a read, or until the timeout."""
        await self._store.wait(self._prefix, after, timeout_s)

    async def register(self, node: Node, lease: Lease) -> None:
        """Publish this node for the others, until the lease ends. Raises LeaseLost."""
        assert node.name == self._node
        await self._store.transact(
            (), [Put(self._key_of("nodes", node.name), msgspec.json.encode(node), lease.id)]
        )

    async def nodes(self) -> dict[str, Node]:
        """Read the registered nodes, by name. Addresses that cannot be parsed are left out."""
        prefix = self._prefix_of("nodes")
        outcome = await self._store.transact((), [Read(prefix, is_prefix=True)])
        return {
            key_value.key.removeprefix(prefix): self._check_addresses(_decode(key_value, Node))
            for key_value in outcome.reads[0]
        }

    def _check_addresses(self, node: Node) -> Node:
        """Leave out the addresses that cannot be parsed, so that one bad registration stops no other node."""
        addresses = dict[str, str]()
        for edge, address in node.addresses.items():
            try:
                parse_address(address)
                addresses[edge] = address
            except ValueError as error:
                if (node.name, edge, address) not in self._refused_addresses:
                    self._refused_addresses.add((node.name, edge, address))
                    logger.warning("address left out node=%s edge=%s reason=%s", node.name, edge, error)
        return msgspec.structs.replace(node, addresses=addresses)

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Publish the figures of this node's replica for operators, until the lease ends. Raises LeaseLost."""
        await self._store.transact(
            (), [Put(self._reports + self._node, msgspec.json.encode(figures), lease.id)]
        )

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Read the figures that the nodes have published, by name."""
        outcome = await self._store.transact((), [Read(self._reports, is_prefix=True)])
        return {
            key_value.key.removeprefix(self._reports): _decode(key_value, ReplicaFigures)
            for key_value in outcome.reads[0]
        }

    async def close(self) -> None:
        """Close connections and watches of the store."""
        await self._store.close()

    async def _swap(
        self, group: str, revision: int, record: Record, when: Sequence[Comparison], then: Sequence[Operation]
    ) -> Swap:
        """Write the record if its revision and `when` hold. Succeeds also if an earlier attempt has written it."""
        state = self._key_of("state", group)
        reads = self._reads_of_group(group)
        outcome = await self._store.transact(
            [RevisionIs(state, revision), *when],
            [Put(state, msgspec.json.encode(record)), *then, *reads],
            reads,
        )
        view = self._group_view_of(group, outcome)
        return Swap(outcome.succeeded or view.record == record, view)

    def _reads_of_group(self, group: str) -> list[Read]:
        return [Read(self._key_of(kind, group)) for kind in ("state", "holder", "wish")]

    def _put_holder(self, group: str, lease: Lease) -> Put:
        return Put(self._key_of("holder", group), msgspec.json.encode(_HolderValue(self._node)), lease.id)

    def _key_of(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}/{_check_name(name, kind)}"

    def _prefix_of(self, kind: str) -> str:
        return f"{self._prefix}{kind}/"

    def _group_view_of(self, group: str, outcome: Outcome) -> GroupView:
        state, holder, request = (key_values[0] if key_values else None for key_values in outcome.reads)
        return _group_view(group, state, holder, request, outcome.revision)


def _group_view(
    group: str, state: KeyValue | None, holder: KeyValue | None, request: KeyValue | None, as_of: int
) -> GroupView:
    """Build the view of a group from its three keys, each None if it does not exist. Raises SetupError."""
    return GroupView(
        group,
        None if state is None else _decode_record(state),
        0 if state is None else state.revision,
        None
        if holder is None
        else Holder(_decode(holder, _HolderValue).node, holder.lease_id, holder.revision),
        as_of,
        None
        if request is None
        else PendingRequest(_decode(request, OperatorRequest), request.lease_id, request.revision),
    )


def _decode_record(key_value: KeyValue) -> Record:
    """Decode a group's record. Raises SetupError, also for a field that this version does not know."""
    # Refuse unknown fields, because the next swap would write the record without them.
    unknown = set(_decode(key_value, dict[str, object])) - set(Record.__struct_fields__)
    if unknown:
        raise _unreadable_key(key_value, f"unknown {', '.join(sorted(unknown))}")
    return _decode(key_value, Record)


def _decode(key_value: KeyValue, value_type: type[T]) -> T:
    """Decode a value as this type. Raises SetupError."""
    try:
        return msgspec.json.decode(key_value.value, type=value_type)
    except UNDECODABLE as error:
        raise _unreadable_key(key_value, str(error)) from error


def _unreadable_key(key_value: KeyValue, reason: str) -> SetupError:
    """Build the error for a value that this version cannot read."""
    return SetupError(
        f"etcd key {key_value.key}: {reason}. A newer version of Timeball has written it (upgrade this node), or a "
        "person has (restore the value from before)"
    )


def _check_name(name: str, kind: str) -> str:
    """Return a name that may be part of a key. Raises SetupError. `kind` is for the error text."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        raise SetupError(
            f"{kind} name {name!r}: 1 to 64 letters, digits and _ . -, the first a letter or digit"
        ) from error


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
