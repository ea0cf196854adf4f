"""The coordinator's data as keys of a store. Values are JSON, except secrets, which are bytes.

    tb/<cluster>/state/<group>      no lease    {epoch, leader, replicas, generation}: only changed by compare-and-swap
    tb/<cluster>/holder/<group>     lease       {node}: the node that may consider itself the leader; if the key is
                                                missing, a replica may become a candidate
    tb/<cluster>/nodes/<node>       lease       {name, addresses, zone, version, replica, promised, group}
    tb/<cluster>/wish/<group>       lease       {replicas, hand_over_to}: a command's request to the leader
    tb/<cluster>/secret/<name>      no lease    bytes, written once
    tb/.reports/<cluster>/<node>    lease       {role, epoch, …}: a replica's figures, for operators

The kind comes before the name, so that one range read returns the records of all groups and nothing else. Reports
change once a second, so they have a prefix that no node watches. The dot excludes a conflict, because the name of a
cluster begins with a letter or a digit.

The store repeats a swap whose answer was lost. If the first attempt has succeeded, the repetition fails. The success is
recognized by its result: the record equals the proposed one (an epoch has one leader, so no other node writes the
same), and the holder's key, if it was put, has the lease that only this process has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from timeball.cluster.coordination.coordinator import (
    AllGroups,
    GroupView,
    Holder,
    Lease,
    Name,
    Node,
    OperatorRequest,
    PendingRequest,
    Swap,
)
from timeball.cluster.coordination.store import (
    VALUE_BYTES_MAX,
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
from timeball.cluster.protocol.replica import Record
from timeball.cluster.transport.connections import parse_address
from timeball.io.clock import Clock
from timeball.model.errors import UNDECODABLE, SetupError
from timeball.monitoring.figures import ReplicaFigures

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _HolderValue(msgspec.Struct, frozen=True):
    node: str


class KeyCoordinator:
    """The Coordinator of one node in one cluster, over any store."""

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
        """Swap the record if it has this revision, and hold the group with the lease. Raises LeaseLost."""
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

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Read the secret of this name. If there is none, `proposal` becomes the secret, which never changes."""
        assert 0 < len(proposal) <= VALUE_BYTES_MAX
        key = self._key_of("secret", name)
        outcome = await self._store.transact(
            [RevisionIs(key, 0)], [Put(key, proposal), Read(key)], [Read(key)]
        )
        return outcome.reads[0][0].value

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
        "person has (put back what was there)"
    )


def _check_name(name: str, kind: str) -> str:
    """Return a name that may be part of a key. Raises SetupError. `kind` is for the error text."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        raise SetupError(
            f"{kind} name {name!r}: 1 to 64 letters, digits and _ . -, the first a letter or digit"
        ) from error
