"""Positions of resolved dead letters: any order gives the same spans, and all others remain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.dead_letters import (
    ExpiredMessages,
    ExpiredTopic,
    Expiry,
    RepeatedDeadLetters,
    ResolvedDeadLetters,
    Run,
    join_spans,
    subtract_spans,
)
from timeball.broker.registry.meta import MetaLog
from timeball.model import limits
from timeball.model.errors import OverLimit


def new_table() -> ResolvedDeadLetters:
    """An empty table, whose rows are not stored."""
    log = MetaLog()
    table = ResolvedDeadLetters(log)
    log.open(lambda _: None, lambda: 0)
    return table


@given(st.lists(st.sets(st.integers(0, 30), max_size=6), max_size=6), st.integers(0, 30), st.integers(0, 31))
def test_open_spans_are_the_positions_that_are_not_resolved(
    steps: list[set[int]], begin: int, end: int
) -> None:
    table, resolved = new_table(), set[int]()
    for step in steps:
        table.build_change("g", [(2, offset) for offset in step], {}).apply()
        resolved |= step
    open_offsets = [at for low, high in table.open_spans("g", 2, begin, end) for at in range(low, high)]
    assert open_offsets == [offset for offset in range(begin, end) if offset not in resolved]
    assert table.spans("g", 2) == join_spans((offset, offset + 1) for offset in resolved)
    assert table.spans("g", 0) == table.spans("other", 2) == []


def test_resolved_positions_that_the_log_no_longer_contains_are_forgotten() -> None:
    table = new_table()
    table.build_change("g", [(0, 1), (0, 5)], {}).apply()
    table.build_change("g", [(0, 9)], {0: 4}).apply()  # the log contains queue 0 from offset 4 on
    assert table.spans("g", 0) == [(5, 6), (9, 10)]
    table.forget("g")
    assert table.spans("g", 0) == []


def test_more_resolved_spans_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEAD_LETTER_SPANS_MAX", 2)
    with pytest.raises(OverLimit, match="oldest"):
        new_table().build_change("g", [(0, 1), (0, 3), (0, 5)], {})


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30), max_size=6))
def test_repeated_rows_are_found_until_they_are_dropped(positions: set[int], dropped: set[int]) -> None:
    rows = StateRows()
    repeated = rows.opened(RepeatedDeadLetters)
    # The dead letter at offset n is repeated by row 100 + n, and has 10 bytes.
    runs = [Run(begin, 100 + begin, end - begin, 10 * (end - begin), begin) for begin, end in
            join_spans((at, at + 1) for at in positions)]  # fmt: skip
    repeated.build_change({"g": []}, [("g", 2, run) for run in reversed(runs)]).apply()
    change = repeated.build_change({"g": [(2, at) for at in dropped], "other": [(0, 1)]})
    rows.appended.append(change.rows)
    change.apply()
    for table in (repeated, rows.opened(RepeatedDeadLetters)):
        seqs = {offset: table.find_seq("g", 2, offset) for offset in range(32)}
        assert {offset: seq for offset, seq in seqs.items() if seq is not None} == {
            offset: 100 + offset for offset in positions - dropped
        }
        assert table.size_bytes == 10 * len(positions - dropped)
        assert [run.died_ms for _, _, run in table.by_age()] == sorted(
            run.died_ms for run in table.runs("g", 2)
        )
    repeated.forget("g")
    assert repeated.runs("g", 2) == [] and repeated.find_seq("g", 2, 0) is None


def test_subtract_spans_leaves_the_positions_that_are_not_removed() -> None:
    assert list(subtract_spans((2, 9), [(0, 3), (4, 5), (8, 20)])) == [(3, 4), (5, 8)]
    assert list(subtract_spans((2, 9), [])) == [(2, 9)]


def test_counts_of_expired_messages_add_up_and_survive_a_restart() -> None:
    rows = StateRows()
    expired = rows.opened(ExpiredMessages)
    expired.add([Expiry("g", "a", 3, {0: 3}), Expiry("g", "b", 1, {})], 10)
    expired.build_change([Expiry("g", "a", 2, {1: 2})], 20).apply()
    assert expired.topics("g")["a"] == ExpiredTopic(5, 20, {0: 3, 1: 2})
    expired.add([Expiry("g", "a", 1, {0: 4})], 30)
    again = rows.opened(ExpiredMessages)
    assert again.groups() == expired.groups()
    assert again.counted_to("g", "a") == {0: 4, 1: 2} and again.counted_to("g", "none") == {}
    assert again.topics("other") == {} and not again.is_deleted("g")


def test_a_deleted_group_is_remembered_while_its_offsets_stay() -> None:
    rows = StateRows()
    expired = rows.opened(ExpiredMessages)
    expired.note_deleted("never", keeps_offsets=False)
    assert rows.count == 0
    expired.add([Expiry("g", "a", 3, {})], 10)
    expired.note_deleted("g", keeps_offsets=True)
    assert rows.opened(ExpiredMessages).is_deleted("g") and expired.topics("g") == {}
    expired.note_deleted("g", keeps_offsets=False)
    assert not expired.is_deleted("g") and rows.opened(ExpiredMessages).groups() == {}


def test_beyond_the_limit_the_oldest_counts_of_expired_messages_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "EXPIRED_TOPICS_MAX", 2)
    expired = StateRows().opened(ExpiredMessages)
    for at_ms, topic in enumerate(["a", "b", "c"]):
        expired.add([Expiry("g", topic, 1, {})], at_ms)
    assert expired.topics("g").keys() == {"b", "c"}
