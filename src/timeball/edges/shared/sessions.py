"""The connected clients of an edge (sessions), and the producer groups and the consumer groups of each.

A session begins with the client's first heartbeat or settings. It ends when the client unregisters, its connection
closes, or it has been silent for too long. Sessions are not saved: after a restart the clients register again.

Methods that change groups return the consumer groups whose members or topics have changed, so that the edge can notify
the other members. A heartbeat that changes nothing returns no group. Otherwise every heartbeat would make all members
of a group rebalance their queues.

Subscriptions belong to the group, as in RocketMQ: the members of a group subscribe to the same topics, and the newer
version of a subscription wins. A group exists as long as it has a member.

`EdgeContext` is passed to each handler of an edge: the edge's sessions, the broker, the settings and the ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from timeball.broker.service import Broker
from timeball.model.config import Settings
from timeball.model.errors import OverLimit

SESSIONS_MAX = 65_536
GROUPS_PER_SESSION_MAX = 1_024
SUBSCRIPTIONS_PER_GROUP_MAX = 1_024

BROADCASTING, CLUSTERING = "BROADCASTING", "CLUSTERING"
PASSIVELY = "CONSUME_PASSIVELY"

K = TypeVar("K")
S = TypeVar("S", bound="Session[Any]")


@dataclass(frozen=True, slots=True)
class Subscription:
    """A group's subscription to one topic. `expression` is a filter of the type `expression_type` (broker/filters)."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"
    version: int = 0


@dataclass(frozen=True, slots=True)
class Membership:
    """How one client consumes as a member of a group."""

    group: str
    consume_type: str = PASSIVELY
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: tuple[Subscription, ...] = ()


@dataclass(eq=False)
class Session(Generic[K]):
    """One client. `key` identifies it. An edge's subclass adds its connections."""

    key: K
    client_id: str  # chosen by the client. Several clients may choose the same
    heard_ms: int = field(default=0, kw_only=True)
    produces: set[str] = field(default_factory=set, kw_only=True)  # producer groups. Over gRPC: topics
    consumes: set[str] = field(default_factory=set, kw_only=True)  # consumer groups that it is a member of


@dataclass(slots=True, eq=False)
class Group(Generic[S]):
    """The members of a consumer group. `membership` is from the last heartbeat of any member."""

    membership: Membership
    by_key: dict[Any, S] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    # By topic: the queues that had messages when the group subscribed. In all other queues, the group starts at the
    # first message.
    nonempty_queues: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def members(self) -> list[S]:
        """The members, in the order in which they joined."""
        return list(self.by_key.values())


class Sessions(Generic[K, S]):
    """The sessions of one edge. Belongs to the event loop. `now_ms` is the caller's reading of the monotonic clock."""

    def __init__(self, expiry_ms: int) -> None:
        """`expiry_ms`: the time without a sign of life after which a session has expired."""
        self._expiry_ms = expiry_ms
        self._sessions: dict[K, S] = {}
        self._groups: dict[str, Group[S]] = {}
        self._producers: dict[str, dict[K, S]] = {}
        self.version = 0  # grows when a group's members, consumption mode or subscriptions change
        self.on_session_removed: list[Callable[[S], None]] = []  # called with each removed session

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: K) -> bool:
        return key in self._sessions

    # -- changes ---------------------------------------------------------------------------------------------

    def add(self, session: S, now_ms: int) -> None:
        """Register a session, or record that a registered one has been heard. Raises OverLimit at SESSIONS_MAX."""
        if session.key not in self._sessions and len(self._sessions) >= SESSIONS_MAX:
            raise OverLimit(f"{SESSIONS_MAX} clients are connected")
        self._sessions[session.key] = session
        session.heard_ms = now_ms

    def beat(
        self, session: S, client_id: str, produces: Iterable[str], consumes: Iterable[Membership], now_ms: int
    ) -> set[str]:
        """Apply a heartbeat, and return the consumer groups whose members, topics or client ids change.

        The producer groups and memberships are added to those that the session has already. Raises OverLimit
        before it changes anything.
        """
        produces, consumes = set(produces), list(consumes)
        _check_limits(session, produces, consumes)
        self.add(session, now_ms)
        changed_groups: set[str] = set()
        if session.client_id != client_id:
            session.client_id = client_id
            changed_groups |= session.consumes
        self.set_produces(session, session.produces | produces)
        return changed_groups.union(
            membership.group for membership in consumes if self._join(session, membership)
        )

    def set_produces(self, session: S, names: set[str]) -> None:
        """Replace the producer groups of a registered session (over gRPC: its topics)."""
        for name in session.produces - names:
            producers = self._producers[name]
            del producers[session.key]
            if not producers:
                del self._producers[name]
        for name in names - session.produces:
            self._producers.setdefault(name, {})[session.key] = session
        session.produces = names

    def leave(self, key: K, *, producer_group: str | None, consumer_group: str | None) -> set[str]:
        """Remove a client from a producer group and a consumer group (None: from none).

        Returns the consumer group if this changes it. An unknown client or group changes nothing.
        """
        session = self._sessions.get(key)
        if session is None:
            return set()
        if producer_group:
            self.set_produces(session, session.produces - {producer_group})
        if not consumer_group or consumer_group not in session.consumes:
            return set()
        self._stop_consuming(session, consumer_group)
        return {consumer_group}

    def remove(self, key: K) -> set[str]:
        """Remove a session that has ended, and return its consumer groups. Empty for an unknown session."""
        session = self._sessions.pop(key, None)
        if session is None:
            return set()
        changed_groups = set(session.consumes)
        self.set_produces(session, set())
        for group in changed_groups:
            self._stop_consuming(session, group)
        for callback in self.on_session_removed:
            callback(session)
        return changed_groups

    # -- look-ups --------------------------------------------------------------------------------------------

    def get(self, key: K) -> S | None:
        """Return the session with this key, or None."""
        return self._sessions.get(key)

    def all(self) -> list[S]:
        """Return every session."""
        return list(self._sessions.values())

    def expired(self, now_ms: int) -> list[S]:
        """Return the sessions that have been silent for longer than the expiry. The caller removes them."""
        return [session for session in self._sessions.values() if now_ms - session.heard_ms > self._expiry_ms]

    def group(self, name: str) -> Group[S] | None:
        """Return a consumer group, or None if it has no member."""
        return self._groups.get(name)

    def consumer_ids(self, group: str) -> list[str]:
        """Return the client ids of a group's members in the order in which they joined, without duplicates."""
        entry = self._groups.get(group)
        return list(dict.fromkeys(member.client_id for member in entry.members)) if entry else []

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return a group's subscription to a topic, or None if it has no member or does not subscribe."""
        entry = self._groups.get(group)
        return entry.subscriptions.get(topic) if entry else None

    def groups_on(self, topic: str) -> list[str]:
        """Return the consumer groups with members that subscribe to a topic."""
        return [name for name, group in self._groups.items() if topic in group.subscriptions]

    def producers(self, name: str) -> list[S]:
        """Return the sessions that are in this producer group (over gRPC: produce to this topic)."""
        return list(self._producers.get(name, {}).values())

    def producer_names(self) -> list[str]:
        """Return all producer groups that have a session (over gRPC: topics)."""
        return list(self._producers)

    # -- inside ----------------------------------------------------------------------------------------------

    def _join(self, session: S, membership: Membership) -> bool:
        """Apply a membership, and return whether the group's members or topics have changed."""
        group = self._groups.setdefault(membership.group, Group(membership))
        has_changed = session.key not in group.by_key
        # Most heartbeats repeat the last one.
        if has_changed or group.membership != membership:
            self.version += 1
        group.membership, group.by_key[session.key] = membership, session
        session.consumes.add(membership.group)
        subscriptions = {new.topic: new for new in membership.subscriptions}
        has_changed = has_changed or subscriptions.keys() != group.subscriptions.keys()
        # The newer version of each subscription wins.
        for topic, new in subscriptions.items():
            old = group.subscriptions.get(topic)
            if old is not None and old.version > new.version:
                subscriptions[topic] = old
        group.subscriptions = subscriptions
        return has_changed

    def _stop_consuming(self, session: S, group_name: str) -> None:
        """Remove a member from a consumer group. The last one ends the group."""
        session.consumes.discard(group_name)
        self.version += 1
        group = self._groups[group_name]
        del group.by_key[session.key]
        if not group.by_key:
            del self._groups[group_name]


def _check_limits(session: Session[Any], produces: set[str], consumes: list[Membership]) -> None:
    """Raise OverLimit if a client would have too many groups or subscriptions. An ordinary client has a few of each."""
    group_count = len(session.produces | produces) + len(
        session.consumes | {membership.group for membership in consumes}
    )
    if group_count > GROUPS_PER_SESSION_MAX:
        raise OverLimit(f"{group_count} groups of one connection; at most {GROUPS_PER_SESSION_MAX}")
    for membership in consumes:
        if len(membership.subscriptions) > SUBSCRIPTIONS_PER_GROUP_MAX:
            raise OverLimit(
                f"{len(membership.subscriptions)} subscriptions of group {membership.group!r}; "
                f"at most {SUBSCRIPTIONS_PER_GROUP_MAX}"
            )


@dataclass
class EdgeContext(Generic[K, S]):
    """Everything that the handlers of an edge share."""

    settings: Settings
    broker: Broker
    sessions: Sessions[K, S]
    # The edge sets the ports when it listens. -1: it does not listen.
    port: int = 0
    name_server_port: int = 0

    @property
    def broker_name(self) -> str:
        """The broker's name in routes and handles."""
        return self.settings.broker_name

    @property
    def cluster_name(self) -> str:
        """The cluster's name in routes."""
        return self.settings.cluster_name

    def start_watch(self, watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start an edge's background task that checks for silent clients. If the task fails, the broker fails."""

        def report_failure(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                # Without this task, silent clients would stay connected forever, and no log line would show why.
                self.broker.on_failure(error)

        task = asyncio.create_task(watch)
        task.add_done_callback(report_failure)
        return task

    def monotonic_ms(self) -> int:
        """Read the clock that measures a client's silence. Changes of the wall clock do not affect it."""
        return self.broker.clock.clock.monotonic_ns() // 1_000_000


@lru_cache(16)
def advertised(advertise: str) -> tuple[str, int | None]:
    """Split the value of `--advertise` into host and port (None: no port). An IPv6 address with a port has brackets."""
    host, _, port = advertise.rpartition(":")
    if not host or not port.isdigit() or (":" in host and not host.startswith("[")):
        return advertise.strip("[]"), None
    return host.strip("[]"), int(port)
