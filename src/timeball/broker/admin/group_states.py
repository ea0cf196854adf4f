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
    """Compute the lag of these groups by group and topic: the messages after their stored offsets."""
    lag_counts: Counts = {}
    offset_table, bounds_of = offsets.table, dict[str, list[tuple[int, int]]]()
    for group in groups:
        for name, stored_offsets in offset_table.get(group, {}).items():
            # Read once per topic: thousands of groups may share a few topics.
            if (bounds := bounds_of.get(name)) is None:
                topic = topics.find_topic(name)
                indexes = [] if topic is None else [queue.index for queue in topic.queues]
                bounds_of[name] = bounds = [(index.min_offset, index.max_offset) for index in indexes]
            if bounds:  # otherwise the topic was deleted, and its offsets are removed at the next save
                # Offsets of queues that the topic no longer has are ignored. Messages that have expired are no lag.
                lag_counts[group, name] = sum(
                    max(0, bounds[queue][1] - max(offset, bounds[queue][0]))
                    for queue, offset in stored_offsets.items()
                    if queue < len(bounds)
                )
    return lag_counts


def add_in_flight(counts: Counts, queues: Iterable[QueueLeases]) -> None:
    """Add to `counts` the messages of these queues that members hold: delivered, neither acknowledged nor nacked."""
    for queue in queues:
        if held_rows := queue.held_rows:
            # Messages from a group's retry topic count for their original topic.
            key = queue.group, topic_of(queue.group, queue.topic)
            counts[key] = counts.get(key, 0) + held_rows


class GroupStates:
    """Queries for the states of groups. Belongs to the event loop.

    Queries over many groups run in shares, between which the loop does other work. So two figures of one result may be
    from different times.
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
        """Compute the lag of all groups, by group and topic."""
        lag_counts: Counts = {}
        async for groups in shares(self._offsets.table):
            lag_counts |= lags(groups, topics=self._topics, offsets=self._offsets)
        return lag_counts

    async def in_flight(self) -> Counts:
        """Count the messages that the members of all groups hold, by group and topic."""
        counts = self._lease_counts.held()
        # Shares consist of queues, because one group may have many queues, those of all its topics.
        async for queues in shares(self._leases.all(), QUEUES_AT_ONCE):
            add_in_flight(counts, queues)
        return counts

    def expired(self) -> tuple[Counts, dict[tuple[str], int]]:
        """Count the messages that expired unread, by group and topic, and the expired dead letters, by group."""
        unread, dead_letters = Counts(), dict[tuple[str], int]()
        for group, facts in self._expired.groups().items():
            for topic, expired_topic in facts.topics.items():
                if topic == dead_letter_topic(group):
                    dead_letters[(group,)] = expired_topic.rows
                else:
                    unread[group, topic] = expired_topic.rows
        return unread, dead_letters

    async def one(self, group: str, caller: Caller) -> GroupState:
        """Find the state of one group. Raises Forbidden, GroupNotFound."""
        self._policy.allow(caller, Verb.LOOK)
        if self._policy.allows(caller, Verb.RECEIVE, group=group):
            for state in await self._build_group_states([group], await self.in_flight()):
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
        # Read first: a deleted group whose members still hold messages is also listed.
        in_flight, names = await self.in_flight(), list[str]()
        # Groups that were configured, have stored offsets, hold messages, or have lost messages.
        known = self._groups.names() | self._offsets.table.keys() | {name for name, _ in in_flight}
        known |= self._expired.groups().keys()
        async for share in shares(known if after is None else (name for name in known if name > after)):
            names += [name for name in share if self._policy.allows(caller, Verb.RECEIVE, group=name)]
        # One name more than the page has, to see whether there is a next page. A sort of all names would block the
        # loop too long.
        page_names = heapq.nsmallest(rows + 1, names)
        next_page = page_names[rows - 1] if len(page_names) > rows else None
        return GroupPage(await self._build_group_states(page_names[:rows], in_flight), next_page)

    async def _build_group_states(self, names: Sequence[str], in_flight: Counts) -> list[GroupState]:
        """Build the states of these groups. Groups without any data are left out."""
        requested, topics_of = set(names), defaultdict[str, set[str]](set)
        for name, topic in in_flight:
            if name in requested:
                topics_of[name].add(topic)
        group_states = list[GroupState]()
        async for share in shares(names):
            lag_counts = lags(share, topics=self._topics, offsets=self._offsets)
            for name, topic in lag_counts:
                topics_of[name].add(topic)
            for name in share:
                expired = self._expired.topics(name)
                expired_rows = {
                    topic: expired_topic.rows
                    for topic, expired_topic in expired.items()
                    if topic != dead_letter_topic(name)
                }
                states = [
                    TopicState(
                        topic,
                        lag_counts.get((name, topic), 0),
                        in_flight.get((name, topic), 0),
                        expired_rows.get(topic, 0),
                    )
                    for topic in sorted(topics_of[name] | expired_rows.keys())
                ]
                if states or expired or self._groups.find_group(name) is not None:
                    group_states.append(self._build_group_state(name, states))
        return group_states

    def _build_group_state(self, name: str, topics: list[TopicState]) -> GroupState:
        # None if the group was deleted but its offsets were kept.
        config = self._groups.find_group(name)
        # Dead letters do not count as messages of a topic that the group consumes.
        expired_dead_letters = self._expired.topics(name).get(dead_letter_topic(name))
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
            0 if expired_dead_letters is None else expired_dead_letters.rows,
            self._subscriptions.conflicts(name),
        )
