"""Administration of a broker: changes of topics and groups, the states of groups, and the reports of Spark jobs.

    JobReports       reads the status files of the Spark jobs and the result of the last audit
    Administration   creates, changes and deletes topics, groups and the offsets of groups. Each operation first checks
                     the caller's permission. Its changes are durable when it returns
    GroupStates      lags, leases and dead letters of groups: figures for users, tools and metrics

Deleting a topic also removes its messages. Scheduled messages for that topic stay pending. When they are due, they
create the topic again, as the first message to a new topic does.
"""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.dead_letters import DeadLetters
from timeball.broker.consuming.engine import Subscriptions
from timeball.broker.consuming.leases import Leases, QueueLeases
from timeball.broker.consuming.retention import count_unread
from timeball.broker.consuming.retry import dead_letter_topic
from timeball.broker.policy import Policy
from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.dead_letters import ExpiredMessages, Expiry
from timeball.broker.registry.groups import MAX_PER_KEY, Groups, Offsets, SubscriptionGroup
from timeball.broker.registry.rates import shares
from timeball.broker.registry.redeliveries import Counts, topic_of
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import (
    FilterType,
    Topic,
    TopicConfig,
    Topics,
    apply_attribute_changes,
    check_config,
)
from timeball.io.clock import SchedulerClock
from timeball.io.files import Files
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.answers import GroupPage, GroupState, TopicState
from timeball.model.errors import GroupNotFound, OutOfRange
from timeball.model.message import DLQ_PREFIX

logger = logging.getLogger(__name__)

# ---- reports of Spark jobs, and of the last audit ------------------------------------------------------------
#     pipeline/status/<job>.json    written by each job every few seconds (spark/run/runner.py)
#     pipeline/audit.json           written by `timeball audit`
#
# Jobs with another folder for their checkpoints, or with a table in an object store, write elsewhere and are not
# visible here. The files are for people: no decision of the broker depends on them.

STATUS, AUDIT = "pipeline/status", "pipeline/audit.json"
# Jobs write into this folder. If one of them fills it, reading it must not become slow.
FILES_MAX = 100
FILE_BYTES_MAX = 64 * 1024

Report = dict[str, object]


class Batch(msgspec.Struct, frozen=True):
    """The latest micro-batch of a job. `position` is its end: a sequence number (seq) or a due time in ms (due_ms)."""

    unit: Literal["seq", "due_ms"]
    position: int
    took_ms: int


class JobFigures(msgspec.Struct, frozen=True):
    """The fields of a job's report that metrics need."""

    # The lengths are limited, because any program may have written the file.
    job: Annotated[str, Meta(max_length=100)]
    state: Annotated[str, Meta(max_length=20)]
    updated_ms: int
    epochs: int = 0
    rows: int = 0
    last: Batch | None = None
    failures: int = 0


class JobState(NamedTuple):
    """A job's figures, and its lag behind the broker now.

    A lag is None if the job's kind of position has no such lag.
    """

    figures: JobFigures
    lag_rows: int | None
    lag_ms: int | None


class JobReports:
    """Reads the reports of jobs. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        files: Files,
        clock: SchedulerClock,
        reader: LogReader,
        attach_state: AttachState,
        reader_thread: Executor,
    ) -> None:
        self._policy = policy
        self._files, self._clock, self._reader = files, clock, reader
        self._attach_state, self._reader_thread = attach_state, reader_thread

    async def all(self, caller: Caller) -> tuple[list[Report], Report | None]:
        """Read the reports of the jobs, sorted by file name, and the report of the last audit. Raises Forbidden.

        None without an audit. Files that are missing, too large or no JSON are left out.
        """
        # Errors in them may contain topics and URIs that not every account may see.
        self._policy.allow(caller, Verb.ADMIN)
        return await in_thread(self._reader_thread, self._read_all)

    async def states(self) -> list[JobState]:
        """Read the states of the jobs for metrics, sorted by name. Invalid reports are left out."""
        return await in_thread(self._reader_thread, self._states, self._reader.next_seq, self._clock.now_ms())

    async def compaction_lag_ms(self) -> int:
        """Compute the age in ms of the oldest row that compaction has not read. 0 if there is none."""
        return await in_thread(
            self._reader_thread,
            self._age_of_row_ms,
            self._attach_state.watermark,
            self._reader.next_seq,
            self._clock.now_ms(),
        )

    def _states(self, next_seq: int, now_ms: int) -> list[JobState]:
        """Build the states of the jobs. `next_seq` is the end of the log (reader thread)."""
        states = []
        for report in self._read_all()[0]:
            try:
                figures = msgspec.convert(report, JobFigures)
            except msgspec.ValidationError as error:
                logger.warning("report of a job not understood reason=%s", error)
                continue
            last_batch = figures.last
            if last_batch is None:
                states.append(JobState(figures, None, None))
            elif last_batch.unit == "due_ms":
                states.append(JobState(figures, None, max(0, now_ms - last_batch.position)))
            else:
                # Relative to the current end of the log, so the lag of a dead job grows.
                lag_ms = self._age_of_row_ms(last_batch.position, next_seq, now_ms)
                states.append(JobState(figures, max(0, next_seq - last_batch.position), lag_ms))
        return states

    def _age_of_row_ms(self, seq: int, next_seq: int, now_ms: int) -> int:
        """Compute the age in ms of the first row in [seq, next_seq). 0 if there is none (reader thread)."""
        reader = self._reader
        first = max(seq, reader.first_seq)
        # One frame at a time. Reserved numbers have no rows.
        for rows in reader.coalesced(first, next_seq, None, 1, ["store_ms"]) if first < next_seq else ():
            if rows.num_rows:
                return max(0, now_ms - int(rows.column("store_ms")[0].as_py() or now_ms))
        return 0

    def _read_all(self) -> tuple[list[Report], Report | None]:
        """Read the reports of up to FILES_MAX jobs, and that of the last audit (reader thread)."""
        files = self._files
        # Jobs replace a file through a temporary file with another suffix, which is skipped here.
        names = (
            [name for name in files.list_dir(STATUS) if name.endswith(".json")]
            if files.exists(STATUS)
            else []
        )
        reports = [self._read(f"{STATUS}/{name}") for name in sorted(names)[:FILES_MAX]]
        return [report for report in reports if report is not None], self._read(AUDIT)

    def _read(self, name: str) -> Report | None:
        """Read one report. None if it is missing, too large or no JSON object."""
        files = self._files
        try:
            # Another process may remove the file, or write any content into it.
            if not files.exists(name) or files.size(name) > FILE_BYTES_MAX:
                return None
            return msgspec.json.decode(memoryview(files.map_readonly(name)), type=Report)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("report of a job not read file=%s reason=%s", name, error)
            return None


# ---- changes of topics and groups ----------------------------------------------------------------------------

# Counts the pending messages of a topic. The result is None if there are too many to count.
CountPending = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class TopicChange:
    """The requested configuration of a topic. `attributes`: changes of attributes, as for `apply_attribute_changes`."""

    name: str
    config: TopicConfig
    attributes: str = ""
    filter_type: FilterType | None = None


class TopicRemoved(NamedTuple):
    """Counts of the messages that were deleted with a topic, and of its scheduled messages that stay pending.

    `unread` sums over all groups with offsets in the topic. `dead_letters` is 0 unless the topic held the dead letters
    of a group. `pending` counts scheduled messages, which create the topic again when they are due. None: not counted.
    """

    unread: int
    dead_letters: int
    pending: int | None


class Administration:
    """The operations for administrators. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        waiters: Waiters,
        dead_letters: DeadLetters,
        count_pending: CountPending,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        tables: Tables,
    ) -> None:
        self._policy, self._waiters = policy, waiters
        self._clock, self._writer, self._tables = clock, writer, tables
        self._dead_letters, self._count_pending = dead_letters, count_pending

    # -- topics ------------------------------------------------------------------------------------------------

    async def configure_topics(self, changes: Sequence[TopicChange], caller: Caller) -> None:
        """Create topics or change their configuration.

        All changes are checked before the first one is made, so an invalid configuration changes nothing. If a topic is
        refused later, the topics before it stay changed. Durable on return. Raises InvalidName, Forbidden, OverLimit,
        OutOfRange, RequestError.
        """
        configs = [self._check_change(change, caller) for change in changes]
        # The limit of new topics also applies to administrators: a script can create as many as a client.
        self._policy.check_new_topics([change.name for change in changes], caller)
        try:
            for change, config in zip(changes, configs, strict=True):
                self._tables.topics.configure(
                    change.name, config, filter_type=change.filter_type, made_by=caller.name
                )
        finally:
            # Also after a refusal, because the topics before it stay changed.
            await self._writer.flushed()

    def _check_change(self, change: TopicChange, caller: Caller) -> TopicConfig:
        """Check a change of a topic, and build the new configuration. Raises as `configure_topics`."""
        self._policy.check_managed(change.name, caller)
        topic = self._tables.topics.find_topic(change.name)
        attributes = apply_attribute_changes(topic.config.attributes if topic else {}, change.attributes)
        config = msgspec.structs.replace(change.config, attributes=attributes)
        check_config(config)
        return config

    async def set_order(self, name: str, caller: Caller, *, order: bool) -> None:
        """Mark a topic as ordered or unordered. Does nothing if the topic does not exist. Raises Forbidden."""
        self._policy.allow(caller, Verb.ADMIN)
        topic = self._tables.topics.find_topic(name)
        if topic is not None and topic.config.order != order:
            self._tables.topics.configure(name, msgspec.structs.replace(topic.config, order=order))
            await self._writer.flushed()

    async def delete_topic(self, name: str, caller: Caller) -> TopicRemoved | None:
        """Delete a topic, its messages and the offsets in it. Returns counts, or None if the topic does not exist.

        Durable on return. Raises InvalidName, Forbidden.
        """
        self._policy.check_managed(name, caller)
        # Check before the count, which is expensive.
        if self._tables.topics.find_topic(name) is None:
            return None
        pending = await self._count_pending(name)
        topic = self._tables.topics.find_topic(name)
        if topic is None:  # another request deleted it during the count
            return None
        # Messages that now count as expired: unread messages and dead letters.
        expiries, dead_letters = self._count_unread(topic), 0
        if name.startswith(DLQ_PREFIX):
            group = name.removeprefix(DLQ_PREFIX)
            dead_letters = self._dead_letters.count(group)
            expiries += [Expiry(group, name, dead_letters, {})] if dead_letters else []
        # `expiries` includes the dead letters, which are not unread messages.
        removed = TopicRemoved(sum(expiry.rows for expiry in expiries) - dead_letters, dead_letters, pending)
        # A topic of the same name may be created again. Rows from this number on belong to the new one.
        self._tables.topics.delete(name, self._writer.next_seq)
        self._tables.offsets.forget_topic(name)
        if expiries:
            self._tables.expired.add(expiries, self._clock.now_ms())
        if name.startswith(DLQ_PREFIX):
            self._tables.resolved_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
            self._tables.repeated_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
        self._waiters.wake([name])  # so that waiting consumers learn that the topic was deleted
        await self._writer.flushed()
        if expiries or pending:
            logger.warning(
                "topic deleted topic=%s unread=%d dead_letters=%d pending=%s",
                name, removed.unread, dead_letters, "unknown" if pending is None else pending,
            )  # fmt: skip
        return removed

    def _count_unread(self, topic: Topic) -> list[Expiry]:
        """Count the messages of a topic that each group with offsets has not read."""
        offset_table, expiries = self._tables.offsets.table, list[Expiry]()
        for group in self._tables.offsets.groups_of(topic.name):
            if rows := count_unread(topic, offset_table[group][topic.name]):
                expiries.append(Expiry(group, topic.name, rows, {}))
        return expiries

    # -- groups ------------------------------------------------------------------------------------------------

    async def configure_groups(self, groups: Iterable[SubscriptionGroup], caller: Caller) -> None:
        """Create groups or replace their configurations, in order. Groups before a refused one stay changed.

        Durable on return. Raises Forbidden, InvalidName and OverLimit.
        """
        self._policy.allow(caller, Verb.ADMIN)
        try:
            for group in groups:
                self._tables.groups.update(group)
        finally:
            # Also after a refusal, because the groups before it stay changed.
            await self._writer.flushed()

    async def limit_keys(self, name: str, max_per_key: int, caller: Caller) -> None:
        """Set how many messages with the same key members of a group may hold, 0 for no limit. Durable on return.

        Creates the group if it does not exist. Raises Forbidden, InvalidName, OutOfRange and OverLimit.
        """
        self._policy.allow(caller, Verb.ADMIN)
        if not 0 <= max_per_key <= limits.POP_HELD_PER_QUEUE_MAX:
            raise OutOfRange(
                f"max_per_key {max_per_key}: 0 (no limit) to {limits.POP_HELD_PER_QUEUE_MAX} messages"
            )
        group = self._tables.groups.find_group(name) or SubscriptionGroup(name)
        attributes = {key: value for key, value in group.attributes.items() if key != MAX_PER_KEY}
        if max_per_key:
            attributes[MAX_PER_KEY] = str(max_per_key)
        await self.configure_groups([msgspec.structs.replace(group, attributes=attributes)], caller)

    async def delete_group(self, name: str, caller: Caller, *, with_offsets: bool) -> None:
        """Delete a group, and its stored offsets if `with_offsets` is true. Durable on return. Raises Forbidden.

        As in RocketMQ, the next heartbeat of a member creates the group again.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._tables.groups.remove(name)
        if with_offsets:
            self._tables.offsets.forget_group(name)
        # Retention ignores the offsets that stay, until the group is created again.
        self._tables.expired.note_deleted(name, keeps_offsets=bool(self._tables.offsets.topics_of(name)))
        await self._writer.flushed()


# ---- states of groups ----------------------------------------------------------------------------------------

QUEUES_AT_ONCE = 1_024  # queues that are counted before the event loop gets control back


def lags(groups: Iterable[str], *, topics: Topics, offsets: Offsets) -> Counts:
    """Compute the lag of these groups, by group and topic: the visible messages from their stored offsets on."""
    lag_counts: Counts = {}
    # topic -> (min_offset, max_offset) of each queue. Empty if the topic was deleted.
    offset_table, bounds_of = offsets.table, dict[str, list[tuple[int, int]]]()
    for group in groups:
        for name, stored_offsets in offset_table.get(group, {}).items():
            # Read once per topic: thousands of groups may share a few topics.
            if (bounds := bounds_of.get(name)) is None:
                topic = topics.find_topic(name)
                indexes = [] if topic is None else [queue.index for queue in topic.queues]
                bounds_of[name] = bounds = [(index.min_offset, index.max_offset) for index in indexes]
            if bounds:
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
    ) -> None:
        self._policy, self._leases, self._dead_letters = policy, leases, dead_letters
        self._topics, self._offsets, self._groups = topics, offsets, groups
        self._expired = expired
        self._subscriptions = subscriptions

    async def lags(self) -> Counts:
        """Compute the lag of all groups, by group and topic."""
        lag_counts: Counts = {}
        async for groups in shares(self._offsets.table):
            lag_counts |= lags(groups, topics=self._topics, offsets=self._offsets)
        return lag_counts

    async def in_flight(self) -> Counts:
        """Count the messages that the members of all groups hold, by group and topic."""
        counts = Counts()
        # Shares consist of queues, because one group may have many queues, in all its topics.
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
        raise GroupNotFound(f"consumer group {group!r} does not exist, or your account has no right on it")

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
        candidates = self._groups.names() | self._offsets.table.keys() | {name for name, _ in in_flight}
        candidates |= self._expired.groups().keys()
        async for share in shares(
            candidates if after is None else (name for name in candidates if name > after)
        ):
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
                        lag=lag_counts.get((name, topic), 0),
                        in_flight=in_flight.get((name, topic), 0),
                        expired=expired_rows.get(topic, 0),
                    )
                    for topic in sorted(topics_of[name] | expired_rows.keys())
                ]
                if states or expired or self._groups.find_group(name) is not None:
                    group_states.append(self._build_group_state(name, states))
        return group_states

    def _build_group_state(self, name: str, topics: list[TopicState]) -> GroupState:
        """Build the state of one group from the states of its topics."""
        # None if the group was deleted but its offsets were kept.
        config = self._groups.find_group(name)
        # Dead letters do not count as messages of a topic that the group consumes.
        expired_dead_letters = self._expired.topics(name).get(dead_letter_topic(name))
        return GroupState(
            group=name,
            lag=sum(topic.lag for topic in topics),
            in_flight=sum(topic.in_flight for topic in topics),
            dead_letters=self._dead_letters.count(name),
            attempts_max=1 + self._groups.times_max(name),
            in_order=config is not None and config.consume_message_orderly,
            enabled=config is None or config.consume_enable,
            topics=topics,
            expired=sum(topic.expired for topic in topics),
            expired_dead_letters=0 if expired_dead_letters is None else expired_dead_letters.rows,
            conflicts=self._subscriptions.conflicts(name),
            max_per_key=self._groups.max_per_key(name),
        )
