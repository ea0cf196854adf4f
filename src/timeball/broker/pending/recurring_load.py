"""Count the occurrences of recurring schedules that are no messages yet, by topic and bucket.

An active schedule has one pending message. Its later occurrences follow from its rule, so they are computed, once for
all schedules with the same rule. `COST_MAX` bounds the work of a count. If the schedules have more occurrences in a
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

# The work of a count in units of about 3 us: 1 for each topic of each occurrence, RULE_COST for each computation of
# a rule's next occurrences, or COSTLY_RULE_COST if that may take milliseconds.
COST_MAX, RULE_COST, COSTLY_RULE_COST = 300_000, 20, 1_000
# The work of a step, and the texts read in one. Pages and counts of other callers need the same thread, and wait for
# one step only.
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
        self._codes_by_index: Codes = np.empty(0, np.int32)  # by the index of a text. -1: not read yet

    def steps(self, texts: Texts, indexes: Int64Array) -> Iterator[bool]:
        """Read the topics of the texts at these indexes that were not read before. Yields True after each part."""
        if texts is not self._texts:
            self._texts, self._codes_by_index = texts, np.empty(0, np.int32)
        added = max(0, len(texts) - len(self._codes_by_index))
        self._codes_by_index = np.append(self._codes_by_index, np.full(added, -1, np.int32))
        unread = indexes[self._codes_by_index[indexes] < 0]
        for begin in range(0, len(unread), STEP_TEXTS):
            part = unread[begin : begin + STEP_TEXTS]
            self._codes_by_index[part] = [self._codes.code(topic_of(texts[index])) for index in part.tolist()]
            yield True

    def codes(self, indexes: Int64Array) -> Int64Array:
        """Return the topic codes of the texts at these indexes. `steps` must have read them."""
        return self._codes_by_index[indexes].astype(np.int64)


@dataclass(slots=True)
class _RuleLoad:
    """The schedules with one rule, grouped by topic and due time, as parallel columns."""

    rule: Rule
    rule_cost: int  # the work of one computation of the rule
    topics: Int64Array  # codes
    due_ms: Int64Array  # of the pending occurrence, which is a message
    schedules: Int64Array  # the number of schedules in the group
    counted_ms: int  # the occurrences up to this time are counted


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
        """Count the occurrences of all active schedules in the window. Yields True after each part."""
        planned, window = self._planned, self._window
        slots = np.flatnonzero(planned.state == State.ACTIVE)
        if not len(slots):
            self.to_ms = window.to_ms
            return
        texts = planned.text[slots].astype(np.int64)
        yield from self._topics.steps(planned.texts, texts)
        columns = np.stack((planned.plan[slots], self._topics.codes(texts), planned.due_ms[slots]))
        # Group the schedules by rule, topic and due time. Not by `np.unique`, which would hold the interpreter for a
        # second with a million rows.
        rows = columns[:, np.lexsort(columns[::-1])]
        first = np.flatnonzero(np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0)))
        rows, schedules = rows[:, first], np.diff(np.append(first, len(slots)))
        begins = np.flatnonzero(np.diff(rows[0], prepend=-1))
        if len(begins) * RULE_COST > COST_MAX:
            return  # one computation of each rule would cost too much
        yield True
        open_loads = list[_RuleLoad]()
        for begin, end in zip(begins, [*begins[1:], len(schedules)], strict=True):
            text = rule_of(planned.plans[int(rows[0, begin])])
            try:
                rule = Rule.from_text(text)
            except InvalidDelay:  # its zone is no longer in the time zone database
                continue
            topics, due_ms = rows[1:, begin:end]
            counted_ms = max(window.from_ms - 1, int(due_ms.min()))
            rule_cost = COSTLY_RULE_COST if is_costly(text) else RULE_COST
            open_loads.append(_RuleLoad(rule, rule_cost, topics, due_ms, schedules[begin:end], counted_ms))
            if len(open_loads) % (STEP_COST // RULE_COST) == 0:
                yield True
        yield from self._count(open_loads)

    def _count(self, open_loads: list[_RuleLoad]) -> Iterator[bool]:
        """Count the occurrences of these rules, until all are counted or the work is used up."""
        window, counted_pairs = self._window, list[tuple[Int64Array, Int64Array]]()
        work_left, step_work_left = COST_MAX, STEP_COST
        # In rounds, in which each rule has an equal share, so that a rule for each second does not use up all work.
        while open_loads and work_left > (round_cost := sum(load.rule_cost for load in open_loads)):
            share, still_open = (work_left - round_cost) // len(open_loads), list[_RuleLoad]()
            for load in open_loads:
                limit = max(1, share // len(load.topics))
                instants = load.rule.instants(load.counted_ms, window.to_ms - 1, limit)
                counted_pairs.extend(self._pairs(load, instants))
                if len(instants) == limit:
                    load.counted_ms = int(instants[-1])
                    still_open.append(load)
                cost = load.rule_cost + len(instants) * len(load.topics)
                work_left, step_work_left = work_left - cost, step_work_left - cost
                if step_work_left < 0:
                    step_work_left = STEP_COST
                    yield True
            open_loads = still_open
        self._finish(counted_pairs, min((load.counted_ms + 1 for load in open_loads), default=window.to_ms))

    def _pairs(self, load: _RuleLoad, instants: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield the pairs and their numbers of occurrences for each group of schedules, of these times of the rule."""
        window = self._window
        bucket_of_instant = (instants - window.from_ms) // window.width_ms
        all_buckets, all_counts = np.unique(bucket_of_instant, return_counts=True)
        for topic, due_ms, schedules in zip(load.topics, load.due_ms, load.schedules, strict=True):
            buckets, counts = all_buckets, all_counts
            # The pending message of the group comes after some of these times, so they are no occurrences of it.
            if len(instants) and due_ms >= instants[0]:
                buckets, counts = np.unique(bucket_of_instant[instants > due_ms], return_counts=True)
            yield topic * window.buckets + buckets, counts * schedules

    def _finish(self, counted_pairs: list[tuple[Int64Array, Int64Array]], counted_to_ms: int) -> None:
        """Sum the pairs of the whole buckets before `counted_to_ms`."""
        # A bucket that is counted in part would seem to have fewer messages.
        window = self._window
        buckets = max(0, counted_to_ms - window.from_ms) // window.width_ms
        self.to_ms = window.from_ms + buckets * window.width_ms
        pairs = np.concatenate([self.pairs, *(pairs for pairs, _ in counted_pairs)])
        due = np.concatenate([self.due, *(due for _, due in counted_pairs)])
        is_counted = pairs % window.buckets < buckets
        self.pairs, index = np.unique(pairs[is_counted], return_inverse=True)
        self.due = np.bincount(index, due[is_counted], minlength=len(self.pairs)).astype(np.int64)
