"""Lags, leases and dead letters of consumer groups: figures for users, tools and metrics."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from timeball.broker.consuming.dead_letters import DeadLetters
from timeball.broker.consuming.leases import Leases, QueueLeases
from timeball.broker.consuming.retry import dead_letter_topic
from timeball.broker.consuming.subscriptions import Subscriptions
from timeball.broker.policy import Policy
from timeball.broker.registry.expired import ExpiredMessages
from timeball.broker.registry.groups import Groups
from timeball.broker.registry.lease_counts import Counts, LeaseCounts, topic_of
from timeball.broker.registry.offsets import Offsets
from timeball.broker.registry.rates import shares
from timeball.broker.registry.topics import Topics
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.answers import GroupPage, GroupState, TopicState
from timeball.model.errors import GroupNotFound, OutOfRange

QUEUES_AT_ONCE = 1_024  # queues that are counted before the event loop gets control back


def lags(groups: Iterable[str], *, topics: Topics, offsets: Offsets) -> Counts:
    """Count the messages after the stored offsets of each of these groups, by group and topic."""
    found: Counts = {}
    table, bounds_of = offsets.table, dict[str, list[tuple[int, int]]]()
    for group in groups:
        for name, stored in table.get(group, {}).items():
            # Read once per topic: thousands of groups may share a few topics.
            if (bounds := bounds_of.get(name)) is None:
                topic = topics.find_topic(name)
                indexes = [] if topic is None else [queue.index for queue in topic.queues]
                bounds_of[name] = bounds = [(index.min_offset, index.max_offset) for index in indexes]
            if bounds:  # otherwise the topic was deleted; its offsets go at the next save
                # Offsets of queues that the topic no longer has are ignored. Messages that have expired are no lag.
                found[group, name] = sum(
                    max(0, bounds[queue][1] - max(offset, bounds[queue][0]))
                    for queue, offset in stored.items()
                    if queue < len(bounds)
                )
    return found


def add_in_flight(found: Counts, queues: Iterable[QueueLeases]) -> None:
    """Add the number of messages that members hold from these queues: delivered, not answered, not given back."""
    for queue in queues:
        if held := queue.held_rows:
            # Messages from a group's retry topic count for their original topic.
            key = queue.group, topic_of(queue.group, queue.topic)
            found[key] = found.get(key, 0) + held


class GroupStates:
    """Queries for the states of groups. Belongs to the event loop.

    Queries over many groups run in shares, between which the loop does other work. So each figure is from one moment,
    but two figures may be from different moments.
    """

    def __init__(
        self,
        policy: Policy,
        leases: Leases,
        dead_letters: DeadLetters,
        subscriptions: Subscriptions,
        *,
        topics: Topics,
        offsets: Offsets,
        groups: Groups,
        expired: ExpiredMessages,
        lease_counts: LeaseCounts,
    ) -> None:
        self._policy, self._leases, self._dead_letters = policy, leases, dead_letters
        self._topics, self._offsets, self._groups = topics, offsets, groups
        self._expired, self._lease_counts = expired, lease_counts
        self._subscriptions = subscriptions

    async def lags(self) -> Counts:
        """Count the lag of all groups, by group and topic."""
        found: Counts = {}
        async for groups in shares(self._offsets.table):
            found |= lags(groups, topics=self._topics, offsets=self._offsets)
        return found

    async def in_flight(self) -> Counts:
        """Count the messages that the members of all groups hold, by group and topic."""
        found = self._lease_counts.held()
        # Shares are counted in queues, because a group may have many: those of all its topics.
        async for queues in shares(self._leases.all(), QUEUES_AT_ONCE):
            add_in_flight(found, queues)
        return found

    def expired(self) -> tuple[Counts, dict[tuple[str], int]]:
        """Count the messages that expired unread, by group and topic, and the expired dead letters, by group."""
        unread, letters = Counts(), dict[tuple[str], int]()
        for group, facts in self._expired.groups().items():
            for topic, one in facts.topics.items():
                if topic == dead_letter_topic(group):
                    letters[(group,)] = one.rows
                else:
                    unread[group, topic] = one.rows
        return unread, letters

    async def one(self, group: str, caller: Caller) -> GroupState:
        """Return the state of a group. Raises Forbidden, GroupNotFound."""
        self._policy.allow(caller, Verb.LOOK)
        if self._policy.allows(caller, Verb.RECEIVE, group=group):
            for state in await self._states([group], await self.in_flight()):
                return state
        # The same answer as for a missing group, so that it does not reveal groups of other accounts.
        raise GroupNotFound(f"consumer group {group!r} does not exist, or is not yours to look at")

    async def page(self, rows: int, after: str | None, caller: Caller) -> GroupPage:
        """List up to `rows` groups after the name `after` that the caller may consume as, sorted by name.

        Raises Forbidden, OutOfRange.
        """
        self._policy.allow(caller, Verb.LOOK)
        if not 1 <= rows <= limits.LISTED_ROWS_MAX:
            raise OutOfRange(f"{rows} groups in a page: 1 to {limits.LISTED_ROWS_MAX}")
        # First, because a deleted group that still holds messages is also listed.
        held, names = await self.in_flight(), list[str]()
        # Groups that were configured, have stored offsets, hold messages, or have lost messages.
        known = self._groups.names() | self._offsets.table.keys() | {name for name, _ in held}
        known |= self._expired.groups().keys()
        async for some in shares(known if after is None else (name for name in known if name > after)):
            names += [name for name in some if self._policy.allows(caller, Verb.RECEIVE, group=name)]
        # One more than the page shows, to see whether there is a next page. Sorting all names would take too long in
        # one turn of the loop.
        shown = heapq.nsmallest(rows + 1, names)
        next_page = shown[rows - 1] if len(shown) > rows else None
        return GroupPage(await self._states(shown[:rows], held), next_page)

    async def _states(self, names: Sequence[str], held: Counts) -> list[GroupState]:
        """Build the states of these groups, without groups that have no data left."""
        wanted, topics_of = set(names), defaultdict[str, set[str]](set)
        for name, topic in held:
            if name in wanted:
                topics_of[name].add(topic)
        found = list[GroupState]()
        async for some in shares(names):
            behind = lags(some, topics=self._topics, offsets=self._offsets)
            for name, topic in behind:
                topics_of[name].add(topic)
            for name in some:
                expired = self._expired.topics(name)
                rows = {topic: one.rows for topic, one in expired.items() if topic != dead_letter_topic(name)}
                states = [
                    TopicState(
                        topic, behind.get((name, topic), 0), held.get((name, topic), 0), rows.get(topic, 0)
                    )
                    for topic in sorted(topics_of[name] | rows.keys())
                ]
                if states or expired or self._groups.find_group(name) is not None:
                    found.append(self._state(name, states))
        return found

    def _state(self, name: str, topics: list[TopicState]) -> GroupState:
        # None if the group was deleted but its offsets were kept.
        config = self._groups.find_group(name)
        # Dead letters do not count as messages of a topic that the group consumes.
        letters = self._expired.topics(name).get(dead_letter_topic(name))
        return GroupState(
            name,
            sum(topic.lag for topic in topics),
            sum(topic.in_flight for topic in topics),
            self._dead_letters.count(name),
            1 + self._groups.times_max(name),
            config is not None and config.consume_message_orderly,
            config is None or config.consume_enable,
            topics,
            sum(topic.expired for topic in topics),
            0 if letters is None else letters.rows,
            self._subscriptions.conflicts(name),
        )
