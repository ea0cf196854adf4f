"""Policy: the permissions of a caller for topics and consumer groups, decided here for every edge.

    a caller                    checks
    makes any request           `allow`: the permissions of its account (access.py); ANONYMOUS may do everything
    sends, now or for later     `find_destination`, then `ensure_topics`: a name that is not reserved, write
                                permission, a queue to write to; creates a missing topic where that is allowed
    returns a message           `ensure_return_topic`: creates the group's retry or dead letter topic if it is missing
    pulls, receives, pops       `find_readable_topic`: read permission; reading never creates a topic
    consumes as a group         `ensure_group`, `check_group`: consume_enable, and whether it may broadcast
    creates, deletes a topic    `check_managed`: a name that is not reserved

Each operation of service.py has a caller and makes these checks itself. Other requests (heartbeats, routes, queries of
tools) do not use service.py. Their edge has a table of the required permissions and calls `allow`.

The checks apply when a message is sent, not when it is delivered. An accepted message is delivered when it is due, even
if its topic was closed to writers or deleted since. Edges translate the errors into the codes of their protocol and add
no rules.

A client may write to %DLQ%<group> as to any topic, and to %RETRY%<group> while the group exists: if the request that
returns a message fails, RocketMQ's consumers send the message to these topics themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from timeball.broker.registry.groups import Groups, SubscriptionGroup
from timeball.broker.registry.topics import READ, WRITE, Topic, Topics, check_name, check_topic
from timeball.io.clock import Clock
from timeball.model import limits, rules
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.config import Settings
from timeball.model.errors import Forbidden, InvalidName, NotFound, OverLimit
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX


class Policy:
    """Checks requests against the existing topics and groups. Belongs to the event loop."""

    def __init__(self, topics: Topics, groups: Groups, settings: Settings, clock: Clock) -> None:
        self._topics, self._groups, self._settings = topics, groups, settings
        self._new_topics = NewTopics(topics, clock)
        self.closed = ""  # the reason why nothing new is accepted; empty while sends are accepted
        # The topics that clients may send to, cached because every message checks its topic. Valid for `_version`, a
        # version of `_topics`.
        self._destinations: dict[str, Topic] = {}
        self._version = -1

    # -- accounts --------------------------------------------------------------------------------------------

    @staticmethod
    def allow(caller: Caller, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden or Unauthorized unless the caller's account may do this now."""
        if caller is not ANONYMOUS:
            caller.check(verb, topic=topic, group=group)

    @staticmethod
    def allow_somewhere(caller: Caller, verb: Verb) -> None:
        """Raise Forbidden or Unauthorized unless the caller may do this for at least one topic."""
        if caller is not ANONYMOUS:
            caller.check_on_any_topic(verb)

    @staticmethod
    def allows(caller: Caller, verb: Verb, *, topic: str | None = None, group: str | None = None) -> bool:
        """Check whether the caller's account may do this now. Raises nothing."""
        return caller is ANONYMOUS or caller.may(verb, topic=topic, group=group)

    def cancellable(self, caller: Caller) -> Callable[[str], bool] | None:
        """Build the check whether the caller may cancel or move scheduled messages of a topic. None: of all topics.

        A request to cancel names messages, so their topics are known only after the look-up. The look-up hides messages
        of other topics from this caller. Raises Forbidden if the caller may not look up messages at all.
        """
        self.allow(caller, Verb.LOOK)
        if self.allows(caller, Verb.ADMIN):
            return None
        return lambda topic: caller.may(Verb.CANCEL, topic=topic)

    def visible(self, caller: Caller) -> Callable[[str], bool] | None:
        """Build the check whether the caller may see scheduled messages of a topic. None: of all topics."""
        return None if self.allows(caller, Verb.ADMIN) else lambda topic: caller.may(Verb.LOOK, topic=topic)

    # -- sending ---------------------------------------------------------------------------------------------

    def find_destination(self, name: str, caller: Caller) -> Topic | None:
        """Find a topic to send to, and check that the caller may. None if the first message would create the topic.

        Creates no topic. Raises InvalidName, Forbidden and NotFound.
        """
        if caller is not ANONYMOUS:
            caller.check(Verb.SEND, topic=name)
        # Consumers of a closed broker continue, so it still accepts retries and dead letters.
        if self.closed and not name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            raise Forbidden(self.closed)
        # Any change of a topic clears the whole cache, because topics change rarely and every message reads it.
        if self._version != self._topics.version:
            self._destinations.clear()
            self._version = self._topics.version
        topic = self._destinations.get(name)
        if topic is None:
            topic = self._look_up_destination(name)
            # A retry topic is not cached, because its group may be deleted.
            if topic is not None and not name.startswith(RETRY_PREFIX):
                self._destinations[name] = topic
        return topic

    def find_destinations(self, names: set[str], caller: Caller) -> dict[str, Topic] | None:
        """Find the topics to send to, by name. None if a first message would create one.

        Raises the errors of `find_destination`.
        """
        topics: dict[str, Topic] = {}
        for name in names:
            topic = self.find_destination(name, caller)
            if topic is None:
                return None
            topics[name] = topic
        return topics

    def ensure_topics(self, names: Iterable[str], caller: Caller, queues: int | None = None) -> None:
        """Check that the caller may send to all of these topics, and create the missing topics.

        `queues` is the number of queues that the client requests for a new topic, limited by the settings. Raises
        InvalidName, Forbidden, NotFound and OverLimit.
        """
        # Check all before creating one: a refused request must not leave new topics.
        missing = [name for name in names if self.find_destination(name, caller) is None]
        if not missing:
            return
        # Before the first topic is created, because this check may refuse.
        self._new_topics.check_and_count(missing, caller.name)
        for name in missing:
            self._topics.ensure(name, self._new_topic_queues(name, queues), made_by=caller.name)

    def ensure_return_topic(self, name: str, queues: int = 1) -> Topic:
        """Find or create the retry or dead letter topic to which a client returns a message.

        Raises Forbidden if the topic is closed to writers, and InvalidName, OverLimit.
        """
        topic = self._topics.ensure(name, max(1, queues))
        _check_writable(topic)
        return topic

    def _look_up_destination(self, name: str) -> Topic | None:
        """Check a topic and find it, without the cache of `find_destination`. Raises the same errors."""
        check_name(name, limits.TOPIC_BYTES_MAX, "topic")
        # Reserved names are forbidden even if such a topic exists, because only the broker writes to it.
        reason = rules.forbidden(name)
        if reason is not None:
            raise Forbidden(reason)
        topic = self._topics.find_topic(name)
        if name.startswith(RETRY_PREFIX):
            # Raises GroupNotFound, because no consumer would read messages for a group that never existed.
            self._groups.get(name.removeprefix(RETRY_PREFIX))
        elif (
            topic is None and not self._settings.auto_create_topics and self.system_topic_queues(name) is None
        ):
            raise self._not_found(name)
        if topic is not None:
            _check_writable(topic)
        return topic

    def check_known(self, name: str | None, *, has_messages: bool) -> None:
        """Raise NotFound if a query names a missing topic, so that a typing error does not look like an empty result.

        There is no error if the query found messages (`has_messages`), because messages of bulk writes and of deleted
        topics are pending without a topic.
        """
        if name is not None and not has_messages and self._topics.find_topic(name) is None:
            raise self._not_found(name)

    def _not_found(self, name: str) -> NotFound:
        """Build the error for a missing topic, with advice on how to create it."""
        hint = "; create it, or start with --auto-create-topics"
        if self._settings.auto_create_topics:
            hint = "; its first message makes it"
        # No hint, because neither an administrator nor a first message can create such a topic.
        if rules.conflict(name) is not None or name.startswith(RETRY_PREFIX):
            hint = ""
        return NotFound(f"topic {name[: limits.OWN_TOPIC_BYTES_MAX]!r} does not exist{hint}")

    def _new_topic_queues(self, name: str, requested: int | None) -> int:
        """Compute the number of queues of a topic that is created. `requested`: the number that the client requests."""
        if name.startswith(RETRY_PREFIX):
            # The group's configuration determines the queues of its retry topic.
            return max(1, self._groups.get(name.removeprefix(RETRY_PREFIX)).retry_queue_nums)
        queues_max = self._settings.queues_per_topic
        # The settings limit a client's request, because each queue costs index entries and polls.
        return self.system_topic_queues(name) or max(1, min(requested or queues_max, queues_max))

    def close(self, reason: str) -> None:
        """Refuse new messages from now on, except messages that consumers of this broker return."""
        self.closed = reason
        # Invalidates the caches of the edges, which contain topics that clients may send to.
        self._topics.version += 1

    def check_open(self) -> None:
        """Raise Forbidden if new messages are refused."""
        if self.closed:
            raise Forbidden(self.closed)

    # -- consuming -------------------------------------------------------------------------------------------

    def find_readable_topic(self, name: str, caller: Caller, verb: Verb = Verb.RECEIVE) -> Topic:
        """Find a topic for a reader. Checks that the caller has the permission `verb`. Raises NotFound, Forbidden."""
        self.allow(caller, verb, topic=name)
        topic = self._topics.find_topic(name)
        if topic is None:
            raise self._not_found(name)
        if not topic.perm & READ:
            raise Forbidden(
                f"topic {name!r} is not for reading: its permission is {topic.perm}, give it 4 or 6"
            )
        return topic

    def ensure_group(self, name: str, caller: Caller, *, broadcasting: bool = False) -> SubscriptionGroup:
        """Find or create the group that a caller consumes as. Raises Forbidden, InvalidName, OverLimit."""
        self.allow(caller, Verb.RECEIVE, group=name)
        group = self._groups.ensure(name)
        self.check_group(name)
        if broadcasting and not group.consume_broadcast_enable:
            raise Forbidden(
                f"consumer group {name!r} may not broadcast: switch consumeBroadcastEnable on, or share its queues out"
            )
        return group

    def check_group(self, name: str) -> None:
        """Raise Forbidden if this group exists and is switched off."""
        # A group that does not exist yet may consume: its first member creates it.
        group = self._groups.find_group(name)
        if group is not None and not group.consume_enable:
            raise Forbidden(f"consumer group {name!r} is switched off: switch its consumeEnable on")

    def register(self, name: str, caller: Caller) -> None:
        """Create a consumer group and its retry topic, whose route its clients request next.

        Raises Forbidden, InvalidName, OverLimit.
        """
        self.allow(caller, Verb.RECEIVE, group=name)
        # A client may name any number of groups, and each costs a retry topic. So the retry topics count as new topics.
        self._new_topics.check_and_count([RETRY_PREFIX + name], caller.name)
        group = self._groups.ensure(name)
        if self._topics.find_topic(RETRY_PREFIX + name) is None:
            self._topics.ensure(RETRY_PREFIX + name, max(1, group.retry_queue_nums), made_by=caller.name)

    # -- routes, and topics as operators manage them ------------------------------------------------------------

    def permission(self, topic: str, perm: int) -> int:
        """Compute a topic's permission bits as routes show them: without WRITE while new messages are refused."""
        return perm & ~WRITE if self.closed and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else perm

    def queues_to_write(self, topic: Topic) -> int:
        """Count the queues of a topic that clients may write to."""
        return topic.write_queues if self.permission(topic.name, topic.perm) & WRITE else 0

    def system_topic_queues(self, name: str) -> int | None:
        """Find the number of queues of a system topic, which any first message creates. None for other topics.

        System topics are the topics named like the cluster and the broker, to which tools send, and the topics of
        traces and replies, to which clients send. The route shows this number of queues before the topic exists, and
        the first send creates the topic with it.
        """
        if name in (self._settings.cluster_name, self._settings.broker_name):
            return self._settings.queues_per_topic
        return 1 if name in (rules.TRACE_TOPIC, rules.reply_topic(self._settings.cluster_name)) else None

    @property
    def has_template(self) -> bool:
        """True if routes show RocketMQ's template topic, which tells producers that a message creates its topic."""
        return self._settings.auto_create_topics

    def is_auto_created(self, name: str) -> bool:
        """Check whether any client's first message would create this topic if it is missing. Raises InvalidName."""
        check_topic(name)
        if self.system_topic_queues(name) is not None:
            return True
        # The registration of a group creates its retry topic, and the broker creates reserved topics.
        is_user_topic = rules.forbidden(name) is None and not name.startswith(RETRY_PREFIX)
        return is_user_topic and self._settings.auto_create_topics

    def will_be_created(self, name: str) -> bool:
        """Check whether a topic is missing but its first message would create it. A receive waits for this message."""
        return self._topics.find_topic(name) is None and self.is_auto_created(name)

    def check_managed(self, name: str, caller: Caller) -> None:
        """Raise InvalidName or Forbidden unless the caller may create, change or delete a topic of this name."""
        self.allow(caller, Verb.ADMIN)
        check_topic(name)
        reason = rules.conflict(name)
        if reason is not None:
            raise InvalidName(reason)

    def check_new_topics(self, names: Iterable[str], caller: Caller) -> None:
        """Check that an administrator may create these topics, as far as they are missing.

        Raises InvalidName, Forbidden and OverLimit.
        """
        # A set, because a name that occurs twice is only one new topic.
        for name in (distinct_names := set(names)):
            self.check_managed(name, caller)
        self._new_topics.check_and_count(distinct_names, caller.name)


def queues_to_read(topic: Topic) -> int:
    """Count the queues of a topic that clients may read."""
    return topic.read_queues if topic.perm & READ else 0


def _check_writable(topic: Topic) -> None:
    """Raise Forbidden if an operator has closed a topic to writers."""
    if not topic.perm & WRITE:
        raise Forbidden(
            f"topic {topic.name!r} is not to be written to: its permission is {topic.perm}, give it 2 or 6"
        )
    if not topic.write_queues:
        raise Forbidden(f"topic {topic.name!r} is not to be written to: its writeQueueNums is 0")


class NewTopics:
    """Limits the number of new topics: per request, per second, and per account in total.

    A message creates the topic that it names, and the topic stays in memory, in the log and in every snapshot. A client
    that uses a key as a topic name would fill the broker for all clients. Topics that the broker itself creates (retry
    and dead letter topics, the topic of a due message) are not counted, because an accepted message must be delivered.
    """

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics, self._clock = topics, clock
        # Token buckets by account: (tokens, time in ms at which they were computed).
        self._buckets: dict[str, tuple[float, int]] = {}

    def check_and_count(self, names: Iterable[str], account: str = "") -> None:
        """Count these topics, as far as they are missing, as new topics of an account.

        Raises OverLimit, and then counts none of them.
        """
        count = sum(self._topics.find_topic(name) is None for name in names)
        if count:
            self._admit(count, account)

    def _admit(self, count: int, account: str) -> None:
        """Count new topics of an account. Raises OverLimit beyond one of the three limits."""
        if count > limits.NEW_TOPICS_PER_REQUEST_MAX:
            raise OverLimit(
                f"{count} new topics in one request; at most {limits.NEW_TOPICS_PER_REQUEST_MAX}: "
                "is a topic named where a key is meant? Create many topics one by one"
            )
        # Deleted topics count too, because they stay in memory and in the log.
        if self._topics.made_by.get(account, 0) + count > limits.NEW_TOPICS_PER_ACCOUNT_MAX:
            who = f"account {account!r} has" if account else "clients have"
            raise OverLimit(
                f"{who} made {self._topics.made_by[account]} topics; at most {limits.NEW_TOPICS_PER_ACCOUNT_MAX}: "
                "send to topics that exist"
            )
        # The monotonic clock: a wall clock that is set back would block an account for hours.
        now_ms, tokens = self._clock.monotonic_ns() // 1_000_000, float(limits.NEW_TOPICS_BURST)
        if account in self._buckets:
            tokens_before, computed_ms = self._buckets[account]
            # The bucket fills with time up to the burst, and each new topic takes one token.
            tokens = min(
                tokens,
                tokens_before + (now_ms - computed_ms) * limits.NEW_TOPICS_PER_SECOND / limits.SECOND_MS,
            )
        if count > tokens:
            raise OverLimit(
                f"more than {limits.NEW_TOPICS_PER_SECOND} new topics a second; try again in a moment"
            )
        self._buckets[account] = (tokens - count, now_ms)
