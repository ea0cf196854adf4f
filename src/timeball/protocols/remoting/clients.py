"""Who is connected, and as what: the groups that each connection has named in its last heartbeat.

A connection counts from its first heartbeat until it closes, says goodbye or has not beaten for 120 s. Nothing
here is saved: after a restart the clients beat again within 30 s. Each verb answers with the consumer groups
whose members or topics have changed, because somebody has to tell the other members (heartbeats.py); what
has not changed is not told, or every heartbeat would set all members of a group to work.

Subscriptions belong to the group, as in RocketMQ: the members of a group subscribe to the same topics, and the
newer version of a subscription wins. A group lives as long as one member does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from timeball.errors import OverLimit

if TYPE_CHECKING:
    from timeball.protocols.remoting.connection import Connection

EXPIRY_MS = 120_000  # RocketMQ's CHANNEL_EXPIRED_TIMEOUT; clients beat every 30 s
GROUPS_PER_CONNECTION_MAX = 1_024
SUBSCRIPTIONS_PER_GROUP_MAX = 1_024

BROADCASTING, CLUSTERING = "BROADCASTING", "CLUSTERING"
ACTIVELY, PASSIVELY, POP = "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group wants of one topic: an expression in the words of broker/filters."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"
    version: int = 0


@dataclass(frozen=True, slots=True)
class Consuming:
    """How one client consumes as a member of a group."""

    group: str
    consume_type: str = PASSIVELY
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: tuple[Subscription, ...] = ()


@dataclass(slots=True, eq=False)
class Member:
    """One connection's client."""

    connection: Connection
    client_id: str
    language: int
    version: int
    beaten_ms: int
    produces: set[str] = field(default_factory=set)
    consumes: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Group:
    """The members of a consumer group; how it consumes is what the last of them to beat has said."""

    how: Consuming
    members: dict[Connection, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)


class Clients:
    """See the module. Belongs to the event loop; times are monotonic milliseconds that the caller reads."""

    def __init__(self) -> None:
        self._members: dict[Connection, Member] = {}
        self._consumers: dict[str, Group] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}

    # -- what clients say ------------------------------------------------------------------------------------

    def knows(self, connection: Connection) -> bool:
        """Whether the connection has beaten and not gone."""
        return connection in self._members

    def beat(
        self,
        connection: Connection,
        client_id: str,
        *,
        produces: Iterable[str],
        consumes: Iterable[Consuming],
        now_ms: int,
        language: int = 0,
        version: int = 0,
    ) -> set[str]:
        """A heartbeat; returns the consumer groups that have changed by it. Raises OverLimit, changing nothing."""
        produces, consumes = set(produces), list(consumes)
        member = self._members.get(connection)
        _check(member, produces, consumes)
        changed: set[str] = set()
        if member is None:
            member = self._members[connection] = Member(connection, client_id, language, version, now_ms)
        elif member.client_id != client_id:
            member.client_id = client_id
            changed |= member.consumes
        member.beaten_ms, member.language, member.version = now_ms, language, version
        for name in produces:
            self._producers.setdefault(name, {})[connection] = member
        member.produces |= produces
        for how in consumes:
            if self._join(member, how):
                changed.add(how.group)
        return changed

    def leave(
        self, connection: Connection, *, producer_group: str | None, consumer_group: str | None
    ) -> set[str]:
        """The client gives up a group; returns the consumer groups that have changed by it."""
        member = self._members.get(connection)
        if member is None:
            return set()
        if producer_group:
            self._stop_producing(member, producer_group)
        changed = set()
        if consumer_group and consumer_group in member.consumes:
            self._stop_consuming(member, consumer_group)
            changed.add(consumer_group)
        return changed

    def gone(self, connection: Connection) -> set[str]:
        """The connection is no more; returns the consumer groups that have changed by it."""
        member = self._members.pop(connection, None)
        if member is None:
            return set()
        changed = set(member.consumes)
        for name in list(member.produces):
            self._stop_producing(member, name)
        for name in changed:
            self._stop_consuming(member, name)
        return changed

    def expired(self, now_ms: int) -> list[Member]:
        """Members that have not beaten for too long; the caller lets their connections go."""
        return [member for member in self._members.values() if now_ms - member.beaten_ms > EXPIRY_MS]

    # -- what others ask -------------------------------------------------------------------------------------

    def member(self, connection: Connection) -> Member | None:
        """The client of a connection."""
        return self._members.get(connection)

    def consumers(self, group: str) -> Group | None:
        """A consumer group that has members now."""
        return self._consumers.get(group)

    def consumer_ids(self, group: str) -> list[str]:
        """Client ids of a group's members, each once."""
        found = self._consumers.get(group)
        return list(dict.fromkeys(m.client_id for m in found.members.values())) if found else []

    def consumer_groups(self) -> list[str]:
        """Consumer groups that have members now."""
        return list(self._consumers)

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What a group that has members wants of a topic."""
        found = self._consumers.get(group)
        return found.subscriptions.get(topic) if found else None

    def groups_on(self, topic: str) -> list[str]:
        """Consumer groups with members that subscribe to a topic."""
        return [name for name, group in self._consumers.items() if topic in group.subscriptions]

    def producer(self, client_id: str) -> Member | None:
        """The producer that calls itself so, and could still hear us."""
        for member in self._members.values():
            if member.client_id == client_id and member.produces and member.connection.is_open:
                return member
        return None

    def producers(self, group: str) -> list[Connection]:
        """Connections of a producer group that could still hear us."""
        return [connection for connection in self._producers.get(group, {}) if connection.is_open]

    def producer_members(self, group: str) -> list[Member]:
        """The members of a producer group."""
        return list(self._producers.get(group, {}).values())

    def producer_groups(self) -> list[str]:
        """Producer groups that have members now."""
        return list(self._producers)

    # -- inside ----------------------------------------------------------------------------------------------

    def _join(self, member: Member, how: Consuming) -> bool:
        group = self._consumers.setdefault(how.group, Group(how))
        changed = member.connection not in group.members
        group.how, group.members[member.connection] = how, member
        member.consumes.add(how.group)
        wanted = {one.topic: one for one in how.subscriptions}
        changed = changed or wanted.keys() != group.subscriptions.keys()
        for topic, one in wanted.items():
            old = group.subscriptions.get(topic)
            if old is not None and old.version > one.version:
                wanted[topic] = old
        group.subscriptions = wanted
        return changed

    def _stop_consuming(self, member: Member, name: str) -> None:
        member.consumes.discard(name)
        group = self._consumers[name]
        del group.members[member.connection]
        if not group.members:
            del self._consumers[name]

    def _stop_producing(self, member: Member, name: str) -> None:
        member.produces.discard(name)
        members = self._producers.get(name, {})
        members.pop(member.connection, None)
        if not members:
            self._producers.pop(name, None)


def _check(member: Member | None, produces: set[str], consumes: list[Consuming]) -> None:
    """A client names a handful of groups; one that names thousands would have us keep them all."""
    before = (member.produces, member.consumes) if member is not None else (set(), set())
    wanted = len(before[0] | produces) + len(before[1] | {how.group for how in consumes})
    if wanted > GROUPS_PER_CONNECTION_MAX:
        raise OverLimit(f"{wanted} groups of one connection; at most {GROUPS_PER_CONNECTION_MAX}")
    for how in consumes:
        if len(how.subscriptions) > SUBSCRIPTIONS_PER_GROUP_MAX:
            raise OverLimit(
                f"{len(how.subscriptions)} subscriptions of group {how.group!r}; "
                f"at most {SUBSCRIPTIONS_PER_GROUP_MAX}"
            )
