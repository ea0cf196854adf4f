"""Policy: what a caller may do to a topic or a group, decided here for every edge.

    a caller                    asks
    makes any request           `allow`: what its account may do (access.py); ANONYMOUS may do everything
    sends, now or for later     `destination`, then `admit`: a name that is not the broker's own, write permission, a
                                queue to write to; a topic that is missing is made where that is allowed
    hands a message back        `returning`: the group's own topic, made when it is missing
    pulls, receives, pops       `readable`: read permission. Reading never makes a topic
    consumes as a group         `joined`, `check_group`: consume_enable, and whether it may broadcast
    creates, deletes a topic    `check_managed`: no name of the broker's own

Each verb of service.py takes a caller and asks. Requests that are no verb of it (heartbeats, routes, what tools ask)
stand in their edge's table with what they need, and the edge has `allow` decide.

Admission asks, delivery does not: a message that was accepted is delivered when it is due, also into a topic that has
been closed to writers or deleted since. Edges translate the errors into their protocol's codes and add no rule.

A client may write to %DLQ%<group> as to any topic, and to %RETRY%<group> while the group exists: that is how RocketMQ's
consumers hand messages back when they cannot do it by the request for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from timeball import limits
from timeball import reserved_topics as reserved
from timeball.access import ANONYMOUS, Caller, Verb
from timeball.broker.registry.groups import Groups, SubscriptionGroup
from timeball.broker.registry.topic import READ, WRITE
from timeball.broker.registry.topics import Topic, Topics, check_name, check_topic
from timeball.clock import Clock
from timeball.config import Settings
from timeball.errors import Forbidden, InvalidName, NotFound, OverLimit
from timeball.message import DLQ_PREFIX, RETRY_PREFIX


class Policy:
    """The rules, over the topics and groups there are. Belongs to the event loop."""

    def __init__(self, topics: Topics, groups: Groups, settings: Settings, clock: Clock) -> None:
        self._topics, self._groups, self._settings = topics, groups, settings
        self._new = NewTopics(topics, clock)
        self.closed = ""  # why nothing new is accepted; empty while it is
        # Topics that may be sent to, at this version of the topics: asked for with every message.
        self._destinations: dict[str, Topic] = {}
        self._version = -1

    # -- accounts --------------------------------------------------------------------------------------------

    @staticmethod
    def allow(caller: Caller, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden, or Unauthorized, unless the caller's account may do this now."""
        if caller is not ANONYMOUS:
            caller.check(verb, topic=topic, group=group)

    @staticmethod
    def allow_somewhere(caller: Caller, verb: Verb) -> None:
        """Raise Forbidden, or Unauthorized, unless there may be a topic to which the caller may do this."""
        if caller is not ANONYMOUS:
            caller.check_somewhere(verb)

    @staticmethod
    def allows(caller: Caller, verb: Verb, *, topic: str | None = None, group: str | None = None) -> bool:
        """Return whether the caller's account may do this now."""
        return caller is ANONYMOUS or caller.may(verb, topic=topic, group=group)

    def cancellable(self, caller: Caller) -> Callable[[str], bool] | None:
        """Return which topics' promises the caller may take back or move; None: those of all.

        A cancel names promises, and only they say which topics are meant: others are not there for this caller.
        """
        self.allow(caller, Verb.LOOK)
        if self.allows(caller, Verb.ADMIN):
            return None
        return lambda topic: caller.may(Verb.CANCEL, topic=topic)

    def visible(self, caller: Caller) -> Callable[[str], bool] | None:
        """Return which topics' promises the caller may look at; None: those of all."""
        return None if self.allows(caller, Verb.ADMIN) else lambda topic: caller.may(Verb.LOOK, topic=topic)

    # -- sending ---------------------------------------------------------------------------------------------

    def destination(self, name: str, caller: Caller) -> Topic | None:
        """Return the topic a caller may send to, None for one that its first message makes.

        Raises InvalidName, Forbidden and NotFound; makes nothing.
        """
        if caller is not ANONYMOUS:
            caller.check(Verb.SEND, topic=name)
        if self.closed and not name.startswith((RETRY_PREFIX, DLQ_PREFIX)):  # its consumers go on
            raise Forbidden(self.closed)
        # Any change of any topic clears all: topics change rarely, and sends ask here for every message.
        if self._version != self._topics.version:
            self._destinations.clear()
            self._version = self._topics.version
        topic = self._destinations.get(name)
        if topic is None:
            topic = self._checked(name)
            if topic is not None and not name.startswith(RETRY_PREFIX):  # of which the group may go
                self._destinations[name] = topic
        return topic

    def destinations(self, names: set[str], caller: Caller) -> dict[str, Topic] | None:
        """Return what `destination` does for each name; None when the first message to one of them makes it."""
        topics: dict[str, Topic] = {}
        for name in names:
            topic = self.destination(name, caller)
            if topic is None:
                return None
            topics[name] = topic
        return topics

    def admit(self, names: Iterable[str], caller: Caller, queues: int | None = None) -> None:
        """Make those of these topics that are missing, once the caller may send to all of them.

        `queues`: as many as the client would like of a new topic; it gets at most what the settings say.
        Raises InvalidName, Forbidden, NotFound and OverLimit.
        """
        # All are checked before one is made: a request that is refused must not leave topics behind.
        missing = [name for name in names if self.destination(name, caller) is None]
        if not missing:
            return
        self._new.admit(missing, caller.name)
        for name in missing:
            self._topics.ensure(name, self._queues_of_new(name, queues), made_by=caller.name)

    def returning(self, name: str, queues: int = 1) -> Topic:
        """Return a group's retry or dead letter topic that a client's message goes back to; raises Forbidden."""
        topic = self._topics.ensure(name, max(1, queues))
        _check_writable(topic)
        return topic

    def _checked(self, name: str) -> Topic | None:
        """`destination`, asked for the first time."""
        check_name(name, limits.TOPIC_BYTES_MAX, "topic")
        # Reserved names are forbidden even when such a topic exists: the broker itself writes to it.
        reason = reserved.forbidden(name)
        if reason is not None:
            raise Forbidden(reason)
        topic = self._topics.find_topic(name)
        if name.startswith(RETRY_PREFIX):
            # Raises GroupNotFound: no consumer would ever read a message for a group that never was.
            self._groups.get(name.removeprefix(RETRY_PREFIX))
        elif topic is None and not self._settings.auto_create_topics and self.standing_queues(name) is None:
            raise self._missing(name)
        if topic is not None:
            _check_writable(topic)
        return topic

    def check_known(self, name: str | None, *, has_messages: bool) -> None:
        """Raise NotFound for a topic that a read-out names and that does not exist; a typing error must not look empty.

        `has_messages`: the read-out shows some. Messages of bulk writes and of deleted topics wait without a topic.
        """
        if name is not None and not has_messages and self._topics.find_topic(name) is None:
            raise self._missing(name)

    def _missing(self, name: str) -> NotFound:
        then = "; create it, or start with --auto-create-topics"
        if self._settings.auto_create_topics:
            then = "; its first message makes it"
        # No hint: neither an operator nor a first message can make such a topic.
        if reserved.conflict(name) is not None or name.startswith(RETRY_PREFIX):
            then = ""
        return NotFound(f"topic {name[: limits.OWN_TOPIC_BYTES_MAX]!r} does not exist{then}")

    def _queues_of_new(self, name: str, wanted: int | None) -> int:
        if name.startswith(RETRY_PREFIX):
            return max(1, self._groups.get(name.removeprefix(RETRY_PREFIX)).retry_queue_nums)
        most = self._settings.queues_per_topic
        # A client's wish is held within the settings: each queue costs index entries and polls.
        return self.standing_queues(name) or max(1, min(wanted or most, most))

    def close(self, reason: str) -> None:
        """Accept nothing new from now on, but what consumers of this broker hand back."""
        self.closed = reason
        self._topics.version += 1  # edges remember which topics may be sent to for as long as it stays

    def check_open(self) -> None:
        """Raise Forbidden when nothing new is accepted."""
        if self.closed:
            raise Forbidden(self.closed)

    # -- consuming -------------------------------------------------------------------------------------------

    def readable(self, name: str, caller: Caller, verb: Verb = Verb.RECEIVE) -> Topic:
        """Return the topic a caller may read, or look at; raises NotFound, Forbidden. Never makes one."""
        self.allow(caller, verb, topic=name)
        topic = self._topics.find_topic(name)
        if topic is None:
            raise self._missing(name)
        if not topic.perm & READ:
            raise Forbidden(
                f"topic {name!r} is not for reading: its permission is {topic.perm}, give it 4 or 6"
            )
        return topic

    def joined(self, name: str, caller: Caller, *, broadcasting: bool = False) -> SubscriptionGroup:
        """Return the group a caller consumes as, made by its first member; raises Forbidden, InvalidName, OverLimit."""
        self.allow(caller, Verb.RECEIVE, group=name)
        group = self._groups.ensure(name)
        self.check_group(name)
        if broadcasting and not group.consume_broadcast_enable:
            raise Forbidden(
                f"consumer group {name!r} may not broadcast: switch consumeBroadcastEnable on, or share its queues out"
            )
        return group

    def check_group(self, name: str) -> None:
        """Raise Forbidden when this group exists and is switched off."""
        # One that does not exist yet may consume: its first member makes it.
        group = self._groups.find_group(name)
        if group is not None and not group.consume_enable:
            raise Forbidden(f"consumer group {name!r} is switched off: switch its consumeEnable on")

    def register(self, name: str, caller: Caller) -> None:
        """Make a consumer group and its retry topic: its clients ask for that topic's route next."""
        self.allow(caller, Verb.RECEIVE, group=name)
        # A client may name any number of groups, and each costs a retry topic; so they count as new topics do.
        self._new.admit([RETRY_PREFIX + name], caller.name)
        group = self._groups.ensure(name)
        if self._topics.find_topic(RETRY_PREFIX + name) is None:
            self._topics.ensure(RETRY_PREFIX + name, max(1, group.retry_queue_nums), made_by=caller.name)

    # -- routes, and topics as operators manage them ------------------------------------------------------------

    def permission(self, topic: str, perm: int) -> int:
        """Return a topic's permission as routes show it: without WRITE while nothing new is accepted."""
        return perm & ~WRITE if self.closed and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else perm

    def queues_to_write(self, topic: Topic) -> int:
        """Return how many of its queues clients may write to."""
        return topic.write_queues if self.permission(topic.name, topic.perm) & WRITE else 0

    def standing_queues(self, name: str) -> int | None:
        """Return how many queues a topic has that no operator has to make; None for other topics.

        Tools send to the topics that are called like the cluster and the broker, clients to the traces' and replies'.
        The route says this number before there is such a topic, and the first send makes it with as many.
        """
        if name in (self._settings.cluster_name, self._settings.broker_name):
            return self._settings.queues_per_topic
        return (
            1 if name in (reserved.TRACE_TOPIC, reserved.reply_topic(self._settings.cluster_name)) else None
        )

    @property
    def has_template(self) -> bool:
        """Return whether producers see RocketMQ's template topic, which says that a message makes its topic."""
        return self._settings.auto_create_topics

    def may_be_made(self, name: str) -> bool:
        """Return whether any client's first message would make this topic, if it is missing; raises InvalidName."""
        check_topic(name)
        if self.standing_queues(name) is not None:
            return True
        # Retry topics are made by the group's registration, and reserved ones by the broker.
        is_users = reserved.forbidden(name) is None and not name.startswith(RETRY_PREFIX)
        return is_users and self._settings.auto_create_topics

    def is_awaited(self, name: str) -> bool:
        """Return whether a topic is missing and its first message would make it: a receive waits for that one."""
        return self._topics.find_topic(name) is None and self.may_be_made(name)

    def check_managed(self, name: str, caller: Caller) -> None:
        """Raise InvalidName or Forbidden unless the caller may create, change or delete a topic of this name."""
        self.allow(caller, Verb.ADMIN)
        check_topic(name)
        reason = reserved.conflict(name)
        if reason is not None:
            raise InvalidName(reason)

    def admit_managed(self, names: Iterable[str], caller: Caller) -> None:
        """Let an operator make those of these topics that are missing, or raise Forbidden or OverLimit for all."""
        for name in (wanted := set(names)):
            self.check_managed(name, caller)
        self._new.admit(wanted, caller.name)


def queues_to_read(topic: Topic) -> int:
    """Return how many of its queues clients may read."""
    return topic.read_queues if topic.perm & READ else 0


def _check_writable(topic: Topic) -> None:
    if not topic.perm & WRITE:
        raise Forbidden(
            f"topic {topic.name!r} is not to be written to: its permission is {topic.perm}, give it 2 or 6"
        )
    if not topic.write_queues:
        raise Forbidden(f"topic {topic.name!r} is not to be written to: its writeQueueNums is 0")


class NewTopics:
    """Bounds how many topics clients make: in one request, in a second, and each account in all.

    A message makes the topic it names, and a topic stays: in memory, in the log, in every snapshot. A client that puts
    a key in the place of a topic would fill the broker for all others. Topics that the broker makes by itself (retry
    and dead letter topics, the topic of a due promise) are not counted: an accepted message must have a place to go.
    """

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics, self._clock = topics, clock
        self._allowance: dict[str, tuple[float, int]] = {}  # by account: topics it might make, at this time

    def admit(self, names: Iterable[str], account: str = "") -> None:
        """Let an account make those of these topics that are missing, or raise OverLimit for all."""
        count = sum(self._topics.find_topic(name) is None for name in names)
        if count:
            self._admit(count, account)

    def _admit(self, count: int, account: str) -> None:
        if count > limits.NEW_TOPICS_PER_REQUEST_MAX:
            raise OverLimit(
                f"{count} new topics in one request; at most {limits.NEW_TOPICS_PER_REQUEST_MAX}: "
                "is a topic named where a key is meant? Create many topics one by one"
            )
        # Deleted ones count too: they stay in memory and in the log.
        if self._topics.made_by.get(account, 0) + count > limits.NEW_TOPICS_PER_ACCOUNT_MAX:
            who = f"account {account!r} has" if account else "clients have"
            raise OverLimit(
                f"{who} made {self._topics.made_by[account]} topics; at most {limits.NEW_TOPICS_PER_ACCOUNT_MAX}: "
                "send to topics that exist"
            )
        # A clock that cannot be set: a wall clock set back would stop an account for hours.
        now_ms, left = self._clock.monotonic_ns() // 1_000_000, float(limits.NEW_TOPICS_BURST)
        if account in self._allowance:
            before, at_ms = self._allowance[account]
            # A token bucket: it fills by the second up to the burst, and each new topic takes one.
            left = min(left, before + (now_ms - at_ms) * limits.NEW_TOPICS_PER_SECOND / limits.SECOND_MS)
        if count > left:
            raise OverLimit(
                f"more than {limits.NEW_TOPICS_PER_SECOND} new topics a second; try again in a moment"
            )
        self._allowance[account] = (left - count, now_ms)
