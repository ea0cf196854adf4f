"""Count the occurrences of recurring schedules that are no messages yet, by topic and bucket.

An active schedule has one pending message. Its later occurrences follow from its rule, so they are computed, each rule
once for all schedules that have it. `COST_MAX` bounds the work of a count. If the schedules have more occurrences in a
window, the count ends earlier: at the time up to which the occurrences of every schedule are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from timeball.broker.pending.snapshot import Codes, TopicCodes
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import is_costly
from timeball.broker.registry.schedule_columns import Planned, Texts
from timeball.broker.registry.schedules import State, rule_of, topic_of
from timeball.model.errors import InvalidDelay
from timeball.model.message import Int64Array

# The work of a count: 1 for each topic of each occurrence, and for each look at a rule LOOK, or COSTLY_LOOK if it may
# take milliseconds. A unit takes about 3 us.
COST_MAX, LOOK, COSTLY_LOOK = 300_000, 20, 1_000
# The work of a step. Pages and counts of other callers need the same thread, and wait for one step only.
STEP_COST, STEP_TEXTS = 5_000, 20_000


@dataclass(frozen=True, slots=True)
class Window:
    """A time range that is divided into buckets of equal width."""

    from_ms: int
    to_ms: int
    width_ms: int

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return (self.to_ms - self.from_ms) // self.width_ms


class TopicsOfTexts:
    """The topics of schedules as codes, by the indexes of their texts. Belongs to the background thread."""

    def __init__(self, codes: TopicCodes) -> None:
        self._codes, self._texts = codes, Texts()
        self._known: Codes = np.empty(0, np.int32)  # -1: not read yet

    def steps(self, texts: Texts, indexes: Int64Array) -> Iterator[bool]:
        """Read the topics of these texts, as far as they are not known. Yields True after each part."""
        if texts is not self._texts:
            self._texts, self._known = texts, np.empty(0, np.int32)
        added = max(0, len(texts) - len(self._known))
        self._known = np.append(self._known, np.full(added, -1, np.int32))
        unknown = indexes[self._known[indexes] < 0]
        for begin in range(0, len(unknown), STEP_TEXTS):
            part = unknown[begin : begin + STEP_TEXTS]
            self._known[part] = [self._codes.code(topic_of(texts[index])) for index in part.tolist()]
            yield True

    def codes(self, indexes: Int64Array) -> Int64Array:
        """Return the topics of texts that were read."""
        return self._known[indexes].astype(np.int64)


@dataclass(slots=True)
class _RuleLoad:
    """The schedules with one rule, as parallel columns, and how far their occurrences are counted."""

    rule: Rule
    look: int  # the work of a look at the rule
    topics: Int64Array  # codes
    due_ms: Int64Array  # of the pending occurrence, which is a message
    schedules: Int64Array  # their number
    counted_ms: int


class RecurringCounting:
    """One count. Belongs to the background thread.

    The result is complete after all `steps`. `pairs` and `due` are parallel columns, sorted by pair. A pair encodes a
    topic and a bucket: the topic's code times the number of buckets, plus the bucket. `to_ms`: the end of the last
    bucket that is counted.
    """

    def __init__(self, planned: Planned, window: Window, topics: TopicsOfTexts) -> None:
        self._planned, self._window, self._topics = planned, window, topics
        self.pairs: Int64Array = np.empty(0, np.int64)
        self.due: Int64Array = np.empty(0, np.int64)
        self.to_ms = window.from_ms

    def steps(self) -> Iterator[bool]:
        """Count. Yields True after each part."""
        planned, window = self._planned, self._window
        slots = np.flatnonzero(planned.state == State.ACTIVE)
        if not len(slots):
            self.to_ms = window.to_ms
            return
        texts = planned.text[slots].astype(np.int64)
        yield from self._topics.steps(planned.texts, texts)
        columns = np.stack((planned.plan[slots], self._topics.codes(texts), planned.due_ms[slots]))
        # Schedules with equal rules nearly always have equal rows here. Sorted without `np.unique`, which would hold
        # the interpreter for a second for a million rows of columns.
        rows = columns[:, np.lexsort(columns[::-1])]
        first = np.flatnonzero(np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0)))
        rows, schedules = rows[:, first], np.diff(np.append(first, len(slots)))
        begins = np.flatnonzero(np.diff(rows[0], prepend=-1))
        if len(begins) * LOOK > COST_MAX:
            return  # so many rules that none is looked at
        yield True
        open_loads = list[_RuleLoad]()
        for begin, end in zip(begins, [*begins[1:], len(schedules)], strict=True):
            text = rule_of(planned.plans[int(rows[0, begin])])
            try:
                rule = Rule.from_text(text)
            except InvalidDelay:  # its zone has left the time zone database
                continue
            topics, due_ms = rows[1:, begin:end]
            counted_ms = max(window.from_ms - 1, int(due_ms.min()))
            look = COSTLY_LOOK if is_costly(text) else LOOK
            open_loads.append(_RuleLoad(rule, look, topics, due_ms, schedules[begin:end], counted_ms))
            if len(open_loads) % (STEP_COST // LOOK) == 0:
                yield True
        yield from self._count(open_loads)

    def _count(self, open_loads: list[_RuleLoad]) -> Iterator[bool]:
        window, found = self._window, list[tuple[Int64Array, Int64Array]]()
        left, step_left = COST_MAX, STEP_COST
        # In rounds, so that a rule for each second does not use up the work of all others.
        while open_loads and left > (looks := sum(load.look for load in open_loads)):
            share, still_open = (left - looks) // len(open_loads), list[_RuleLoad]()
            for load in open_loads:
                limit = max(1, share // len(load.topics))
                instants = load.rule.instants(load.counted_ms, window.to_ms - 1, limit)
                found.extend(self._pairs(load, instants))
                if len(instants) == limit:
                    load.counted_ms = int(instants[-1])
                    still_open.append(load)
                cost = load.look + len(instants) * len(load.topics)
                left, step_left = left - cost, step_left - cost
                if step_left < 0:
                    step_left = STEP_COST
                    yield True
            open_loads = still_open
        self._finish(found, min((load.counted_ms + 1 for load in open_loads), default=window.to_ms))

    def _pairs(self, load: _RuleLoad, instants: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        window = self._window
        in_buckets = (instants - window.from_ms) // window.width_ms
        buckets, counts = np.unique(in_buckets, return_counts=True)
        for topic, due_ms, schedules in zip(load.topics, load.due_ms, load.schedules, strict=True):
            of_topic = buckets, counts
            if len(instants) and due_ms >= instants[0]:  # behind it are other schedules of the rule
                of_topic = np.unique(in_buckets[instants > due_ms], return_counts=True)
            yield topic * window.buckets + of_topic[0], of_topic[1] * schedules

    def _finish(self, found: list[tuple[Int64Array, Int64Array]], counted_to_ms: int) -> None:
        # In whole buckets, because a part of a bucket would be taken for its load.
        window = self._window
        buckets = max(0, counted_to_ms - window.from_ms) // window.width_ms
        self.to_ms = window.from_ms + buckets * window.width_ms
        pairs = np.concatenate([self.pairs, *(pairs for pairs, _ in found)])
        due = np.concatenate([self.due, *(due for _, due in found)])
        is_counted = pairs % window.buckets < buckets
        self.pairs, index = np.unique(pairs[is_counted], return_inverse=True)
        self.due = np.bincount(index, due[is_counted], minlength=len(self.pairs)).astype(np.int64)
