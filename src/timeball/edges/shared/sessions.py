"""The connected clients of an edge: the names under which each produces, and the consumer groups that it belongs to.

A session begins when its client first makes itself known. It ends when the client says good-bye, its connection closes,
or it has been silent for too long. Sessions are not saved: after a restart the clients make themselves known again. The
methods return the consumer groups whose members or topics have changed, because the edge notifies the other members. A
heartbeat that changes nothing returns no group. Otherwise every heartbeat would make all members of a group divide
their queues again.

Subscriptions belong to the group, as in RocketMQ: the members of a group subscribe to the same topics, and the newer
version of a subscription wins. A group exists as long as it has a member.

The context is what each handler of an edge gets: the edge's sessions, the broker, and the names of broker and cluster.
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
    """A group's subscription to one topic: an expression of a type in broker/filters."""

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
    client_id: str  # chosen by the client. Several clients may have the same
    heard_ms: int = field(default=0, kw_only=True)
    produces: set[str] = field(default_factory=set, kw_only=True)  # producer groups; over gRPC topics
    consumes: set[str] = field(default_factory=set, kw_only=True)  # the groups it is a member of


@dataclass(slots=True, eq=False)
class Group(Generic[S]):
    """The members of a consumer group. `how` is from the member with the last heartbeat."""

    how: Membership
    by_key: dict[Any, S] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    # By topic: the queues that had messages when the group subscribed. Of other queues it must miss no message.
    filled: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def members(self) -> list[S]:
        """Return the members. The one that joined first is the first."""
        return list(self.by_key.values())


class Sessions(Generic[K, S]):
    """The sessions of one edge. Belongs to the event loop. Times are monotonic milliseconds that the caller reads."""

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
        self._sessions: dict[K, S] = {}
        self._groups: dict[str, Group[S]] = {}
        self._producers: dict[str, dict[K, S]] = {}
        self.version = 0  # counts changes of how groups consume and of their subscriptions
        self.on_gone: list[Callable[[S], None]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: K) -> bool:
        return key in self._sessions

    # -- what clients say ------------------------------------------------------------------------------------

    def add(self, session: S, now_ms: int) -> None:
        """Register a session as connected at this time. Raises OverLimit."""
        if session.key not in self._sessions and len(self._sessions) >= SESSIONS_MAX:
            raise OverLimit(f"{SESSIONS_MAX} clients are connected")
        self._sessions[session.key] = session
        session.heard_ms = now_ms

    def beat(
        self, session: S, client_id: str, produces: Iterable[str], consumes: Iterable[Membership], now_ms: int
    ) -> set[str]:
        """Register a heartbeat, and return the consumer groups that it changes. Raises OverLimit without a change."""
        produces, consumes = set(produces), list(consumes)
        _check(session, produces, consumes)
        self.add(session, now_ms)
        changed: set[str] = set()
        if session.client_id != client_id:
            session.client_id = client_id
            changed |= session.consumes
        self.set_produces(session, session.produces | produces)
        return changed.union(how.group for how in consumes if self._join(session, how))

    def set_produces(self, session: S, names: set[str]) -> None:
        """Replace the names under which a session produces."""
        for name in session.produces - names:
            producers = self._producers[name]
            del producers[session.key]
            if not producers:
                del self._producers[name]
        for name in names - session.produces:
            self._producers.setdefault(name, {})[session.key] = session
        session.produces = names

    def leave(self, key: K, *, producer_group: str | None, consumer_group: str | None) -> set[str]:
        """Remove a client from a group that it gives up, and return the consumer groups that this changes."""
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
        """Remove a session that has ended, and return the consumer groups that this changes."""
        session = self._sessions.pop(key, None)
        if session is None:
            return set()
        changed = set(session.consumes)
        self.set_produces(session, set())
        for name in changed:
            self._stop_consuming(session, name)
        for tell in self.on_gone:
            tell(session)
        return changed

    # -- what others ask -------------------------------------------------------------------------------------

    def get(self, key: K) -> S | None:
        """Return the session with this key."""
        return self._sessions.get(key)

    def all(self) -> list[S]:
        """Return every session."""
        return list(self._sessions.values())

    def expired(self, now_ms: int) -> list[S]:
        """Return sessions that have been silent for too long. The caller removes them."""
        return [one for one in self._sessions.values() if now_ms - one.heard_ms > self._expiry_ms]

    def group(self, name: str) -> Group[S] | None:
        """Return a consumer group that has members now."""
        return self._groups.get(name)

    def consumer_ids(self, group: str) -> list[str]:
        """Return the client ids of a group's members, each once."""
        found = self._groups.get(group)
        return list(dict.fromkeys(member.client_id for member in found.members)) if found else []

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return a group's subscription to a topic, or None without members or subscription."""
        found = self._groups.get(group)
        return found.subscriptions.get(topic) if found else None

    def groups_on(self, topic: str) -> list[str]:
        """Return the consumer groups with members that subscribe to a topic."""
        return [name for name, group in self._groups.items() if topic in group.subscriptions]

    def producers(self, name: str) -> list[S]:
        """Return the sessions that produce under this name."""
        return list(self._producers.get(name, {}).values())

    def produced(self) -> list[str]:
        """Return all names under which sessions produce now."""
        return list(self._producers)

    # -- inside ----------------------------------------------------------------------------------------------

    def _join(self, session: S, how: Membership) -> bool:
        group = self._groups.setdefault(how.group, Group(how))
        changed = session.key not in group.by_key
        if changed or group.how != how:  # heartbeats are frequent and mostly repeat the last one
            self.version += 1
        group.how, group.by_key[session.key] = how, session
        session.consumes.add(how.group)
        wanted = {one.topic: one for one in how.subscriptions}
        changed = changed or wanted.keys() != group.subscriptions.keys()
        for topic, one in wanted.items():
            old = group.subscriptions.get(topic)
            if old is not None and old.version > one.version:
                wanted[topic] = old
        group.subscriptions = wanted
        return changed

    def _stop_consuming(self, session: S, name: str) -> None:
        session.consumes.discard(name)
        self.version += 1
        group = self._groups[name]
        del group.by_key[session.key]
        if not group.by_key:
            del self._groups[name]


def _check(session: Session[Any], produces: set[str], consumes: list[Membership]) -> None:
    """Raise OverLimit for a client that names thousands of groups or topics. An ordinary one names a few."""
    wanted = len(session.produces | produces) + len(session.consumes | {how.group for how in consumes})
    if wanted > GROUPS_PER_SESSION_MAX:
        raise OverLimit(f"{wanted} groups of one connection; at most {GROUPS_PER_SESSION_MAX}")
    for how in consumes:
        if len(how.subscriptions) > SUBSCRIPTIONS_PER_GROUP_MAX:
            raise OverLimit(
                f"{len(how.subscriptions)} subscriptions of group {how.group!r}; "
                f"at most {SUBSCRIPTIONS_PER_GROUP_MAX}"
            )


@dataclass
class EdgeContext(Generic[K, S]):
    """Shared by the handlers of one edge. The ports are set once the edge listens. -1: it does not listen."""

    settings: Settings
    broker: Broker
    sessions: Sessions[K, S]
    port: int = 0
    name_server_port: int = 0

    @property
    def broker_name(self) -> str:
        """Return the broker's name in routes and handles."""
        return self.settings.broker_name

    @property
    def cluster_name(self) -> str:
        """Return the cluster's name in routes."""
        return self.settings.cluster_name

    def start_watch(self, watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that an edge runs every few seconds. If the task fails, the broker fails."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                # Without it, silent clients would stay forever, and no log line would show why.
                self.broker.on_failure(error)

        task = asyncio.create_task(watch)
        task.add_done_callback(ended)
        return task

    def monotonic_ms(self) -> int:
        """Return the time for measuring a client's silence. A change of the wall clock does not affect it."""
        return self.broker.clock.clock.monotonic_ns() // 1_000_000


@lru_cache(16)
def advertised(advertise: str) -> tuple[str, int | None]:
    """Return host and port of `--advertise` (None if it has no port). An IPv6 address with a port has brackets."""
    host, _, port = advertise.rpartition(":")
    if not host or not port.isdigit() or (":" in host and not host.startswith("[")):
        return advertise.strip("[]"), None
    return host.strip("[]"), int(port)
