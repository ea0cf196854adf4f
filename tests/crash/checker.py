"""A total-queue checker: compares the acknowledged operations with the final state, and lists every contradiction.

It does not know how the rows were produced. It has tests of its own (test_checker.py), because a checker that
finds nothing makes every harness pass. Its words:

    lost          acknowledged, never cancelled, and not in its queue, or given up, and not among the dead letters
    doubled       in its queue, among the dead letters, or settled in the log, more than once
    early         visible before its due time, or its record says so
    resurrected   delivered although a cancel was acknowledged
    corrupted     delivered with another body, due time or topic
    unexpected    delivered although it was never sent, or a dead letter that no consumer gave up
    moved         seen by a consumer before the crash, and now at another position
    gap           the offsets of a queue are not dense, or not in the order of the log
    misjudged     a cancel got a false verdict
    unsettled     in the log, due, and neither released nor cancelled
    offset        a group's stored offset is after the end of its queue, or before the saved one
    topic         a topic created and acknowledged is gone, or has fewer queues
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

CANCELLED = ("cancelled", "already_cancelled")


class Place(NamedTuple):
    """The position of a visible row."""

    topic: str
    queue_id: int
    queue_offset: int


class Row(NamedTuple):
    """One visible row. `source_seq`: the scheduled message it keeps."""

    place: Place
    key: str
    body: bytes
    due_ms: int | None
    store_ms: int
    seq: int
    source_seq: int | None


class Fault(NamedTuple):
    """One contradiction."""

    kind: str
    text: str


@dataclass(slots=True)
class Sent:
    """One sent message. `due_ms` is None without a delay. `acked`: it was acknowledged."""

    key: str
    topic: str
    body: bytes
    due_ms: int | None
    acked: bool = False
    is_at_least: bool = False  # the delay of a level begins with the broker's clock: it is due then or later
    maybe_due: set[int] = field(default_factory=set)  # requested moves without an answer
    former_ms: set[int] = field(default_factory=set)  # due times before shifts, which a late release may show
    maybe_topics: set[str] = field(default_factory=set)  # of requested moves by selections

    def move(self, due_ms: int) -> None:
        """Record an answered move: the message is due then, unless another move is in flight."""
        self.maybe_due.discard(due_ms)
        if self.maybe_due:
            self.maybe_due |= {due_ms, self.due_ms or 0}
        self.due_ms = due_ms


@dataclass(slots=True)
class Observed:
    """The knowledge of clients: only answers before the power cut."""

    sent: dict[str, Sent] = field(default_factory=dict)
    cancel_asked: set[str] = field(default_factory=set)
    dead_asked: dict[str, str] = field(default_factory=dict)  # keys given up, and the topics of dead letters
    dead: set[str] = field(default_factory=set)  # those of `dead_asked` that were answered
    verdicts: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[Place, Row] = field(default_factory=dict)
    early: list[Fault] = field(default_factory=list)
    saved_offsets: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)  # (group, topic)
    topics: dict[str, int] = field(default_factory=dict)
    campaigns: dict[str, list[str]] = field(default_factory=dict)  # the keys of each
    paused_ms: dict[str, int] = field(default_factory=dict)  # of those whose pause was answered
    # Key of a message that a selection has paused -> when the pause was answered.
    held_ms: dict[str, int] = field(default_factory=dict)

    def see(self, row: Row, now_ms: int) -> None:
        """Record that a consumer received this row at `now_ms`."""
        if row.due_ms is not None and row.due_ms > now_ms:
            self.early.append(Fault("early", f"{row.key} due {row.due_ms} was visible at {now_ms}"))
        self.seen[row.place] = row

    def is_cancelled(self, key: str) -> bool:
        """Check whether an answer says that the message is cancelled."""
        return any(verdict in CANCELLED for verdict in self.verdicts.get(key, []))


@dataclass(slots=True)
class Outcome:
    """The final state, when everything is due."""

    rows: list[Row] = field(default_factory=list)
    # (topic, queue) -> first and end offset
    ranges: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    offsets: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)  # (group, topic) -> by queue
    waited: list[Row] = field(default_factory=list)  # rows in the queues of delay levels
    dead: list[Row] = field(default_factory=list)  # rows in the topics of dead letters
    scheduled_rows: set[int] = field(default_factory=set)  # sequence numbers of those in the log
    settled: list[int] = field(default_factory=list)  # source_seq of each release and cancel in the log


def check(observed: Observed, outcome: Outcome) -> list[Fault]:
    """List every contradiction. Empty if all is correct."""
    return [
        *observed.early,
        *_deliveries(observed, outcome),
        *_rows(observed, outcome),
        *_dead_letters(observed, outcome),
        *_queues(outcome),
        *_seen(observed, outcome),
        *_verdicts(observed, outcome),
        *_log(outcome),
        *_offsets(observed, outcome),
    ]


def _deliveries(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """Compare each sent message with its deliveries."""
    places: dict[str, set[Place]] = {}
    for row in [*observed.seen.values(), *outcome.rows]:
        # A row that a consumer saw and retention has removed since counts as delivered.
        places.setdefault(row.key, set()).add(row.place)
    for key, sent in observed.sent.items():
        count = len(places.get(key, ()))
        if count > 1:
            yield Fault("doubled", f"{key} stands at {sorted(places[key])}")
        if count and observed.is_cancelled(key):
            yield Fault("resurrected", f"{key} was cancelled and stands at {sorted(places[key])}")
        if not count and sent.acked and key not in observed.cancel_asked:
            yield Fault("lost", f"{key}, due {sent.due_ms}, topic {sent.topic}")


def _rows(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """Compare each delivered row with its send."""
    for row in outcome.rows:
        sent = observed.sent.get(row.key)
        if sent is None:
            yield Fault("unexpected", f"{row.key} at {row.place}")
            continue
        # The row may have another due time than the send: a later one of a delay level, one of a move without an
        # answer, or one from before a shift if the message was not released too early after it.
        is_allowed_due = (
            (sent.is_at_least and (row.due_ms or 0) >= (sent.due_ms or 0))
            or row.due_ms in sent.maybe_due
            or (row.due_ms in sent.former_ms and row.store_ms >= min({sent.due_ms or 0} | sent.maybe_due))
        )
        due_ms = row.due_ms if is_allowed_due else sent.due_ms
        topic = row.place.topic if row.place.topic in sent.maybe_topics else sent.topic
        if (row.body, row.due_ms, row.place.topic) != (sent.body, due_ms, topic):
            yield Fault("corrupted", f"{row.key} at {row.place}: {len(row.body)} bytes, due {row.due_ms}")
        if row.due_ms is not None and row.store_ms < row.due_ms:
            yield Fault("early", f"{row.key} due {row.due_ms} was released at {row.store_ms}")


def _dead_letters(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """A message is a dead letter at most once, and exactly once if its consumer got the answer."""
    topics = set(observed.dead_asked.values())
    counts = Counter((row.place.topic, row.key) for row in outcome.dead)
    for (topic, key), count in counts.items():
        if count > 1:
            yield Fault("doubled", f"{key} stands {count} times in {topic}")
        if topic in topics and observed.dead_asked.get(key) != topic:
            yield Fault("unexpected", f"{key} stands in {topic}")
    for key in observed.dead:
        if not counts[observed.dead_asked[key], key]:
            yield Fault("lost", f"{key} was given up, and is not in {observed.dead_asked[key]}")


def _queues(outcome: Outcome) -> Iterator[Fault]:
    """Offsets are dense over the kept rows, and ascend with the log."""
    by_queue: dict[tuple[str, int], list[Row]] = {queue: [] for queue in outcome.ranges}
    for row in [*outcome.rows, *outcome.waited, *outcome.dead]:
        by_queue.setdefault((row.place.topic, row.place.queue_id), []).append(row)
    for queue, rows in by_queue.items():
        low, high = outcome.ranges.get(queue, (0, 0))
        offsets = [row.place.queue_offset for row in rows]
        if offsets != list(range(low, high)):
            yield Fault("gap", f"{queue} keeps {low} to {high} and gave {offsets}")
        if any(row.seq >= following.seq for row, following in pairwise(rows)):
            yield Fault("gap", f"{queue} is not in the order of the log: {[row.seq for row in rows]}")


def _seen(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """A received row stays at its position until retention removes it."""
    now = {row.place: row for row in outcome.rows}
    for place, row in observed.seen.items():
        low, _ = outcome.ranges.get(place[:2], (0, 0))
        if place.queue_offset >= low and now.get(place) != row:
            yield Fault("moved", f"{place} was {row.key} and is {now.get(place)}")


def _verdicts(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """A released message is delivered, an acknowledged one is found, and a message is cancelled once."""
    delivered = {row.key for row in [*outcome.rows, *observed.seen.values()]}
    for key, verdicts in observed.verdicts.items():
        sent = observed.sent.get(key)
        if "released" in verdicts and key not in delivered:
            yield Fault("misjudged", f"{key} was called released and is not there")
        if "not_found" in verdicts and sent is not None and sent.acked and sent.due_ms is not None:
            yield Fault("misjudged", f"{key} was called not found although it was acknowledged")
        if verdicts.count("cancelled") > 1:
            yield Fault("misjudged", f"{key} was called cancelled twice")


def _log(outcome: Outcome) -> Iterator[Fault]:
    """Each scheduled message in the log is settled once."""
    counts = Counter(outcome.settled)
    for seq, count in counts.items():
        if count > 1:
            yield Fault("doubled", f"scheduled message {seq} was settled {count} times")
    for seq in sorted(outcome.scheduled_rows - counts.keys()):
        yield Fault("unsettled", f"scheduled message {seq}")


def _offsets(observed: Observed, outcome: Outcome) -> Iterator[Fault]:
    """Stored offsets are within their queues, and not before the saved ones."""
    for (group, topic), offsets in outcome.offsets.items():
        for queue, offset in offsets.items():
            if offset > outcome.ranges.get((topic, queue), (0, 0))[1]:
                yield Fault("offset", f"{group} stands at {offset} of {topic} {queue}, beyond its end")
    for who, offsets in observed.saved_offsets.items():
        for queue, offset in offsets.items():
            if outcome.offsets.get(who, {}).get(queue, 0) < offset:
                yield Fault("offset", f"{who} had saved {offset} of queue {queue}")
    for topic, queues in observed.topics.items():
        count = sum(1 for name, _ in outcome.ranges if name == topic)
        if count < queues:
            yield Fault("topic", f"{topic} was created with {queues} queues and has {count}")
