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

The store repeats a swap whose answer was lost. The repetition then fails, because the first attempt has succeeded.
This success is recognized by its traces: the record equals the proposed one (an epoch has one leader, so no other
node writes the same), and the holder's key, if it was put, has the lease that only this process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from timeball.cluster.coordination.coordinator import Asked, GroupView, Holder, Lease, Name, Node, Swap, Wish
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
from timeball.io.clock import Clock
from timeball.model.errors import SetupError
from timeball.monitoring.replica_figures import ReplicaFigures

T = TypeVar("T")


class _Held(msgspec.Struct, frozen=True):
    node: str


class KeyCoordinator:
    """The Coordinator of one node in one cluster, over any store."""

    def __init__(self, store: Store, clock: Clock, *, cluster: str, node: str) -> None:
        self._store, self._clock = store, clock
        self._prefix = f"tb/{_checked(cluster, 'cluster')}/"
        self._reports = f"tb/.reports/{cluster}/"
        self._node = _checked(node, "node")

    async def grant(self, ttl_ms: int) -> Lease:
        """Request a new lease of this node. The store may grant a longer one."""
        sent_ms = self._clock.boot_ms()
        lease_id, ttl_s = await self._store.grant(max(1, -(-ttl_ms // 1_000)))
        return Lease(lease_id, ttl_s * 1_000, sent_ms)

    async def renew(self, lease: Lease) -> Lease:
        """Renew a lease, and return it with its new end. Raises LeaseLost."""
        sent_ms = self._clock.boot_ms()
        ttl_s = await self._store.renew(lease.id)
        return Lease(lease.id, ttl_s * 1_000, sent_ms)

    async def revoke(self, lease: Lease) -> None:
        """End a lease and delete every key that is bound to it."""
        await self._store.revoke(lease.id)

    async def read(self, group: str) -> GroupView:
        """Read a group's record, holder and wish in one transaction."""
        outcome = await self._store.transact((), self._reads(group))
        return self._view(group, outcome)

    async def read_all(self) -> dict[str, GroupView]:
        """Read all groups that have a record, by name, in one transaction."""
        kinds = [self._keys(kind) for kind in ("state", "holder", "wish")]
        outcome = await self._store.transact((), [Read(keys, is_prefix=True) for keys in kinds])
        states, holders, wishes = (
            {kv.key.removeprefix(keys): kv for kv in found}
            for keys, found in zip(kinds, outcome.reads, strict=True)
        )
        return {
            group: _group_view(group, state, holders.get(group), wishes.get(group), outcome.revision)
            for group, state in states.items()
        }

    async def lead(
        self, group: str, revision: int, record: Record, lease: Lease, *, displaces: str = ""
    ) -> Swap:
        """Swap the record if it has this revision, and hold the group with the lease. Raises LeaseLost."""
        holder, held_revision = self._key("holder", group), 0
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
        holder = self._key("holder", group)
        return await self._swap(group, revision, record, [LeaseIs(holder, lease.id)], [Delete(holder)])

    async def force(self, group: str, revision: int, record: Record) -> Swap:
        """Swap the record if it has this revision and the group has no holder."""
        return await self._swap(group, revision, record, [RevisionIs(self._key("holder", group), 0)], [])

    async def ask(self, group: str, revision: int, wish: Wish, lease: Lease) -> Swap:
        """Write a wish for the leader, if the record has this revision and there is no other wish. Raises LeaseLost."""
        key, reads = self._key("wish", group), self._reads(group)
        outcome = await self._store.transact(
            [RevisionIs(self._key("state", group), revision), RevisionIs(key, 0)],
            [Put(key, msgspec.json.encode(wish), lease.id), *reads],
            reads,
        )
        view = self._view(group, outcome)
        return Swap(view.asked is not None and view.asked.lease_id == lease.id, view)

    async def settle(self, group: str, asked: Asked) -> None:
        """Remove a wish, unless it is gone or has been replaced."""
        key = self._key("wish", group)
        await self._store.transact([RevisionIs(key, asked.revision)], [Delete(key)])

    async def hold(self, group: str, lease: Lease) -> bool:
        """Hold a group with the lease if it has no holder. Return whether this lease holds it now. Raises LeaseLost."""
        holder = self._key("holder", group)
        outcome = await self._store.transact(
            [RevisionIs(holder, 0)], [self._put_holder(group, lease), Read(holder)], [Read(holder)]
        )
        return any(found.lease_id == lease.id for found in outcome.reads[0])

    async def resign(self, group: str, lease: Lease) -> None:
        """Stop holding a group, if it is held with this lease."""
        holder = self._key("holder", group)
        await self._store.transact([LeaseIs(holder, lease.id)], [Delete(holder)])

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait until something may have changed since a view's `as_of`, or until the timeout."""
        await self._store.wait(self._prefix, after, timeout_s)

    async def register(self, node: Node, lease: Lease) -> None:
        """Publish this node for the others, until the lease ends. Raises LeaseLost."""
        assert node.name == self._node
        await self._store.transact(
            (), [Put(self._key("nodes", node.name), msgspec.json.encode(node), lease.id)]
        )

    async def nodes(self) -> dict[str, Node]:
        """Read the registered nodes, by name."""
        prefix = self._keys("nodes")
        outcome = await self._store.transact((), [Read(prefix, is_prefix=True)])
        return {found.key.removeprefix(prefix): _decoded(found, Node) for found in outcome.reads[0]}

    async def report(self, figures: ReplicaFigures, lease: Lease) -> None:
        """Publish the figures of this node's replica for operators, until the lease ends. Raises LeaseLost."""
        await self._store.transact(
            (), [Put(self._reports + self._node, msgspec.json.encode(figures), lease.id)]
        )

    async def reports(self) -> dict[str, ReplicaFigures]:
        """Read the figures that the nodes have published, by name."""
        outcome = await self._store.transact((), [Read(self._reports, is_prefix=True)])
        return {
            found.key.removeprefix(self._reports): _decoded(found, ReplicaFigures)
            for found in outcome.reads[0]
        }

    async def secret(self, name: str, proposal: bytes) -> bytes:
        """Return the secret of this name. The first proposal becomes the secret and never changes."""
        assert 0 < len(proposal) <= VALUE_BYTES_MAX
        key = self._key("secret", name)
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
        state = self._key("state", group)
        reads = self._reads(group)
        outcome = await self._store.transact(
            [RevisionIs(state, revision), *when],
            [Put(state, msgspec.json.encode(record)), *then, *reads],
            reads,
        )
        view = self._view(group, outcome)
        return Swap(outcome.succeeded or view.record == record, view)

    def _reads(self, group: str) -> list[Read]:
        return [Read(self._key(kind, group)) for kind in ("state", "holder", "wish")]

    def _put_holder(self, group: str, lease: Lease) -> Put:
        return Put(self._key("holder", group), msgspec.json.encode(_Held(self._node)), lease.id)

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}/{_checked(name, kind)}"

    def _keys(self, kind: str) -> str:
        return f"{self._prefix}{kind}/"

    def _view(self, group: str, outcome: Outcome) -> GroupView:
        state, holder, wish = (found[0] if found else None for found in outcome.reads)
        return _group_view(group, state, holder, wish, outcome.revision)


def _group_view(
    group: str, state: KeyValue | None, holder: KeyValue | None, wish: KeyValue | None, as_of: int
) -> GroupView:
    return GroupView(
        group,
        None if state is None else _record(state),
        0 if state is None else state.revision,
        None if holder is None else Holder(_decoded(holder, _Held).node, holder.lease_id, holder.revision),
        as_of,
        None if wish is None else Asked(_decoded(wish, Wish), wish.lease_id, wish.revision),
    )


def _record(found: KeyValue) -> Record:
    # Refuse unknown fields, because the next swap would write the record without them.
    unknown = set(_decoded(found, dict[str, object])) - set(Record.__struct_fields__)
    if unknown:
        raise _unreadable(found, f"unknown {', '.join(sorted(unknown))}")
    return _decoded(found, Record)


def _decoded(found: KeyValue, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(found.value, type=kind)
    except msgspec.DecodeError as error:  # the base class of ValidationError
        raise _unreadable(found, str(error)) from error


def _unreadable(found: KeyValue, reason: str) -> SetupError:
    return SetupError(
        f"etcd key {found.key}: {reason}. A newer version of Timeball has written it (upgrade this node), or a person "
        "has (put back what was there)"
    )


def _checked(name: str, what: str) -> str:
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        raise SetupError(
            f"{what} name {name!r}: 1 to 64 letters, digits and _ . -, the first a letter or digit"
        ) from error
