"""Lags, leases and dead letters of consumer groups: figures for people, tools and metrics."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from timeball.access import Caller, Verb
from timeball.answers import GroupState, TopicState
from timeball.broker.components import Components
from timeball.broker.consuming.leases import Leases
from timeball.broker.dead_letters import DeadLetters
from timeball.broker.policy import Policy
from timeball.broker.registry.lease_counts import Counts, LeaseCounts, topic_of
from timeball.errors import GroupNotFound

GROUPS_AT_ONCE = 256  # before the loop gets its turn: thousands of groups take tenths of a second of it


def lags(parts: Components, groups: Iterable[str] | None = None) -> Counts:
    """Return how many messages stand behind the offsets that each group has stored, or each of these."""
    found: Counts = {}
    table, ends_of = parts.offsets.table, dict[str, list[int]]()
    for group in table if groups is None else groups:
        for name, offsets in table.get(group, {}).items():
            # Asked once a topic: groups by the thousand share a few.
            if (ends := ends_of.get(name)) is None:
                topic = parts.topics.find_topic(name)
                ends_of[name] = ends = [] if topic is None else [q.index.max_offset for q in topic.queues]
            if ends:  # else deleted, and its offsets with it at the next save
                # Offsets of queues that the topic no longer has count for nothing.
                found[group, name] = sum(
                    max(0, ends[queue] - offset) for queue, offset in offsets.items() if queue < len(ends)
                )
    return found


def in_flight(leases: Leases, in_log: LeaseCounts) -> Counts:
    """Return how many messages the members of each group hold: delivered, and neither answered nor given back."""
    found = in_log.held()
    for queue in leases.all():
        if queue.held_rows:
            key = queue.group, topic_of(queue.group, queue.topic)
            found[key] = found.get(key, 0) + queue.held_rows
    return found


class GroupStates:
    """The read-outs of groups. Belongs to the event loop."""

    def __init__(self, parts: Components, policy: Policy, leases: Leases, dead_letters: DeadLetters) -> None:
        self._parts, self._policy, self._leases, self._dead_letters = parts, policy, leases, dead_letters

    async def all(self, group: str | None, caller: Caller) -> list[GroupState]:
        """Return the groups that the caller may consume as, by name, or one of them; raise GroupNotFound.

        Each is as it was at one instant; between many of them the loop does other work.
        """
        self._policy.allow(caller, Verb.LOOK)
        parts = self._parts
        held = in_flight(self._leases, parts.lease_counts)
        topics_held = defaultdict[str, set[str]](set)
        for name, topic in held:
            topics_held[name].add(topic)
        # Groups that were configured, have stored offsets, or hold messages.
        known = {each.group_name for each in parts.groups.all()} | set(parts.offsets.table) | set(topics_held)
        wanted = sorted(known) if group is None else [group] if group in known else []
        names = [name for name in wanted if self._policy.allows(caller, Verb.RECEIVE, group=name)]
        found = list[GroupState]()
        for begin in range(0, len(names), GROUPS_AT_ONCE):
            if begin:
                await asyncio.sleep(0)
            some = names[begin : begin + GROUPS_AT_ONCE]
            behind = lags(parts, some)
            topics_of = {name: set(topics_held.get(name, ())) for name in some}
            for name, topic in behind:
                topics_of[name].add(topic)
            for name, topics in topics_of.items():
                states = [
                    TopicState(topic, behind.get((name, topic), 0), held.get((name, topic), 0))
                    for topic in sorted(topics)
                ]
                if states or parts.groups.find_group(name) is not None:
                    found.append(self._state(name, states))
        # The same for a group that there is not: the answer names no group of others.
        if group is not None and not found:
            raise GroupNotFound(f"consumer group {group!r} does not exist, or is not yours to look at")
        return found

    def _state(self, name: str, topics: list[TopicState]) -> GroupState:
        # None: offsets of a group that was deleted without them.
        config = self._parts.groups.find_group(name)
        return GroupState(
            name,
            sum(topic.lag for topic in topics),
            sum(topic.in_flight for topic in topics),
            self._dead_letters.count(name),
            1 + self._parts.groups.times_max(name),
            config is not None and config.consume_message_orderly,
            config is None or config.consume_enable,
            topics,
        )
