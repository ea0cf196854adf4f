"""Lags, leases and dead letters of consumer groups: figures for people, tools and metrics."""

from __future__ import annotations

from timeball.access import Caller, Verb
from timeball.answers import GroupState, TopicState
from timeball.broker.components import Components
from timeball.broker.consuming.leases import Leases
from timeball.broker.dead_letters import DeadLetters
from timeball.broker.policy import Policy
from timeball.broker.registry.lease_counts import Counts, LeaseCounts, topic_of
from timeball.errors import GroupNotFound


def lags(parts: Components, group: str | None = None) -> Counts:
    """Return how many messages stand behind the offsets that each group has stored, or one of them."""
    found: Counts = {}
    table, ends_of = parts.offsets.table, dict[str, list[int]]()
    # Of one alone: thousands of groups take tenths of a second of the loop.
    for each, topics in table.items() if group is None else [(group, table.get(group, {}))]:
        for name, offsets in topics.items():
            # Asked once a topic: groups by the thousand share a few.
            if (ends := ends_of.get(name)) is None:
                topic = parts.topics.find_topic(name)
                ends_of[name] = ends = [] if topic is None else [q.index.max_offset for q in topic.queues]
            if ends:  # else deleted, and its offsets with it at the next save
                # Offsets of queues that the topic no longer has count for nothing.
                found[each, name] = sum(
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

    def all(self, group: str | None, caller: Caller) -> list[GroupState]:
        """Return the groups that the caller may consume as, by name, or one of them; raise GroupNotFound."""
        self._policy.allow(caller, Verb.LOOK)
        parts, behind, held = (
            self._parts,
            lags(self._parts, group),
            in_flight(self._leases, self._parts.lease_counts),
        )
        # Groups that were configured, have stored offsets, or hold messages.
        topics: dict[str, set[str]] = {each.group_name: set() for each in parts.groups.all()}
        for name, topic in (*behind, *held):
            if group is None or name == group:
                topics.setdefault(name, set()).add(topic)
        found = []
        for name, of_group in sorted(topics.items()):
            is_wanted = group is None or name == group
            if is_wanted and self._policy.allows(caller, Verb.RECEIVE, group=name):
                states = [
                    TopicState(topic, behind.get((name, topic), 0), held.get((name, topic), 0))
                    for topic in sorted(of_group)
                ]
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
