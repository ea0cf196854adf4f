"""The fold of selections over a message, its conditions, and the rows that keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.broker.registry import selections
from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.selections import (
    CONDITION_COLUMNS,
    Described,
    Selected,
    SelectionFacts,
    Selections,
    Woken,
)
from timeball.model import limits
from timeball.model.errors import NotFound, OverLimit
from timeball.model.message import encode_properties, pairs_of


def facts(seq: int, **fields: object) -> SelectionFacts:
    """A selection that was accepted by the row `seq`. It cancels all messages, unless `fields` say otherwise."""
    return SelectionFacts(seq=seq, at_ms=0, **fields)  # type: ignore[arg-type]


def described(*messages: tuple[int, int, str]) -> Described:
    """Messages as (due_ms, version, topic), without rows."""
    due_ms, seq, topic = zip(*messages, strict=True)
    seqs = np.array(seq, np.int64)
    return Described(np.array(due_ms, np.int64), seqs, seqs, pa.array(topic), None)


# A selection as (topic or "" for all, number of the event that undoes it or None).
_events = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 12) | st.none()), max_size=7)


@given(_events, st.integers(0, 130))
def test_the_owner_of_a_message_equals_that_of_a_walk_through_the_log(
    events: list[tuple[str, int | None]], version: int
) -> None:
    by_name = {
        str(index): facts(
            10 * index + 10, topics=[topic] if topic else [],
            undone_seq=10 * (index + 1 + undone) + 15 if undone is not None else 0,
        )
        for index, (topic, undone) in enumerate(events)
    }  # fmt: skip
    selected = Selected(by_name)
    owners = selected.states(described(*((5, version, topic) for topic in "ab"))).owner
    for topic, owner in zip("ab", owners.tolist(), strict=True):
        log = sorted(
            [(selection.seq, "accept", name) for name, selection in by_name.items()]
            + [
                (selection.undone_seq, "undo", name)
                for name, selection in by_name.items()
                if selection.is_undone
            ]
        )
        expected_owner: str | None = None
        for seq, event, name in log:
            if event == "undo":
                expected_owner = None if expected_owner == name else expected_owner
            elif expected_owner is None and version < seq and by_name[name].topics in ([], [topic]):
                expected_owner = name
        assert (selected.names[owner] if owner >= 0 else None) == expected_owner
    assert selected.end_seq <= max((selection.seq for selection in by_name.values()), default=0)


def test_a_selection_covers_only_messages_within_its_bounds_of_time_and_number() -> None:
    selected = Selected({"s": facts(100, from_ms=10, to_ms=20, absent=[(40, 10)])})
    messages = described(
        (9, 1, "a"), (10, 1, "a"), (19, 99, "a"), (20, 1, "a"), (15, 100, "a"), (15, 40, "a"), (15, 49, "a"),
        (15, 50, "a"), (15, 1, "%RETRY%g"), (15, 1, "%DLQ%g"),
    )  # fmt: skip
    assert (selected.states(messages).owner >= 0).tolist() == [
        False, True, True, False, False, False, False, True, False, False,
    ]  # fmt: skip
    assert selected.may_change(messages.due_ms, messages.seq)[1]
    assert not Selected({}).may_change(messages.due_ms, messages.seq).any()


def test_operations_apply_in_log_order_and_an_undo_removes_one() -> None:
    by_name = {
        "later": facts(10, action="shift", shift_ms=30),
        "moved": facts(20, action="move", to_topic="b", from_ms=35),  # sees the shifted due time
        "earlier": SelectionFacts(seq=30, at_ms=20, action="shift", shift_ms=-25, topics=["b"]),
        "held": facts(40, action="pause"),
    }
    messages = described((5, 1, "a"), (4, 1, "a"))
    states = Selected(by_name).states(messages)
    assert states.due_ms.tolist() == [20, 34]  # 10 would be before the operation
    assert states.mover.tolist() == [1, -1] and states.holder.tolist() == [3, 3]
    assert Selected(by_name).topics(messages.topic, states.mover).to_pylist() == ["b", "a"]
    # The undo of the shift does not change which messages belong to the move, although its condition no longer holds.
    by_name["later"] = facts(10, action="shift", shift_ms=30, undone_seq=50)
    states = Selected(by_name).states(messages)
    assert states.due_ms.tolist() == [5, 4] and states.mover.tolist() == [1, -1]
    by_name["released"] = SelectionFacts(seq=60, at_ms=3, action="release")
    states = Selected(by_name).states(messages)
    assert states.due_ms.tolist() == [3, 3] and states.holder.tolist() == [-1, -1]
    states, (is_member, before, after) = Selected(by_name).covered(messages, "moved")
    assert is_member.tolist() == [True, False]
    assert (before.due_ms.tolist(), before.mover.tolist(), after.mover.tolist()) == (
        [35, 34],
        [-1, -1],
        [1, -1],
    )


def test_a_wake_up_does_not_change_the_state_of_a_message() -> None:
    woken = Woken()
    selected = Selected({"s": facts(100, action="shift", shift_ms=30, to_ms=6)}, woken)
    # Each column: version of the wake-up, due time and version of the base, due time of the wake-up.
    woken.add(*(np.array([number]) for number in (200, 5, 1, 35)))
    woken.add(*(np.array([number, number + 1]) for number in (300, 5, 150, 35)))
    messages = described((5, 1, "a"), (35, 200, "a"), (35, 300, "a"), (36, 301, "a"), (5, 201, "a"))
    assert selected.states(messages).due_ms.tolist() == [35, 35, 5, 6, 5]
    assert selected.may_change(messages.due_ms, messages.seq).tolist() == [True, True, True, True, False]
    woken.forget_before(36)
    copied = woken.copied()
    woken.add(*(np.array([number]) for number in (400, 5, 1, 40)))
    assert len(woken) == 2
    assert np.concatenate(copied, axis=1).T.tolist() == [[301, 6, 151, 36]]


WAKE_UPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=25)),
        st.tuples(st.just("forget"), st.integers(0, 12)),
    ),
    max_size=15,
)


@given(WAKE_UPS)
@settings(max_examples=50)
def test_wake_ups_keep_their_bases_until_they_are_due(steps: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selections, "WOKEN_ROWS_MAX", 16)
        woken, now_ms, version = Woken(), 0, 100
        # By version: due time and version of the base, due time of the wake-up.
        kept = dict[int, tuple[int, int, int]]()
        copies = list[tuple[Any, Any]]()  # each copy, and its content when it was made
        for step, value in steps:
            if step == "add":
                versions = range(version, version + 2 * len(value), 2)
                version += 2 * len(value)
                wake_ups = {
                    number: (now_ms + due + 3 * base, base, now_ms + due)
                    for number, (due, base) in zip(versions, value)
                }
                kept |= wake_ups
                rows = [(number, *row) for number, row in wake_ups.items()]
                woken.add(*np.array(rows, np.int64).reshape(-1, 4).T)
            else:
                now_ms += value
                woken.forget_before(now_ms)
                kept = {
                    number: (base_ms, base, due_ms)
                    for number, (base_ms, base, due_ms) in kept.items()
                    if due_ms >= now_ms
                }
                if not kept:
                    assert (len(woken), woken.earlier_ms) == (0, 0)
            numbers = np.arange(90, version + 2)  # also numbers of no wake-up
            base_ms, base = woken.bases(np.full(len(numbers), -1), numbers)
            bases = zip(numbers.tolist(), base_ms.tolist(), base.tolist())
            assert [row for row in bases if row[0] in kept] == [(n, *row[:2]) for n, row in kept.items()]
            assert woken.earlier_ms >= max((row[0] - row[2] for row in kept.values()), default=0)
            copy = woken.copied()
            copies.append((copy, [part.tolist() for part in copy]))
            assert len(woken) == sum(part.shape[1] for part in copy) <= 2 * len(kept) + 2 * 16
            assert all(run.used_rows <= 16 for run in woken._runs)
        for copy, content in copies:
            assert [part.tolist() for part in copy] == content, "later changes do not affect a copy"


def test_one_call_of_forget_before_copies_few_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version copied all wake-ups each second, even ten million of which only one was due."""
    monkeypatch.setattr(selections, "WOKEN_ROWS_MAX", 100)
    woken, numbers = Woken(), np.arange(1_000)
    due_ms = numbers * 7_919 % 1_000
    woken.add(numbers, due_ms, numbers, due_ms)
    assert [run.used_rows for run in woken._runs] == [100] * 10
    for before_ms in range(0, 1_000, 10):
        runs = {id(run.rows): run for run in woken._runs}
        woken.forget_before(before_ms)
        copied = sum(run.used_rows for run in woken._runs if id(run.rows) not in runs)
        assert copied <= 100 and len(woken) >= 1_000 - before_ms
    assert len(woken) <= 4 * 10
    woken.forget_before(1_000)
    assert len(woken) == 0


def test_a_selection_that_was_undone_before_the_next_one_has_no_effect() -> None:
    assert Selected({"a": facts(10, undone_seq=20), "b": facts(30, undone_seq=40)}).is_empty
    assert Selected({"a": facts(10, undone_seq=35), "b": facts(30)}).names == ["a", "b"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("topic = 'a'", [True, True, False]),
        ("due_ms > 5", [False, True, True]),
        ("due_ms BETWEEN 5 AND 6", [True, True, False]),
        ("tag = 'red'", [True, False, False]),
        ("TAGS = 'red'", [True, False, False]),
        ("tag IS NULL", [False, True, False]),
        ("keys CONTAINS 'k2'", [False, True, False]),
        ("KEYS = 'k1'", [True, False, False]),
        ("campaign = 'spring'", [False, True, False]),
        ("campaign IS NULL", [True, False, True]),
        ("region = 'eu'", [True, False, False]),
        ("region IS NULL AND topic = 'b'", [False, False, True]),
        ("UNIQ_KEY = 'id-3'", [False, False, True]),
        ("price > 5 OR due_ms = 7", [False, True, True]),
        ("TRUE", [True, True, True]),
    ],
)
def test_a_condition_can_use_properties_and_columns_of_the_message(where: str, expected: list[bool]) -> None:
    rows = pa.record_batch(
        {
            "keys": ["k1", "k2 k3", None],
            "tag": ["red", None, "blue"],
            "unique_key": ["id-1", "id-2", "id-3"],
            # `topic` in a condition is the topic of the message, not its property. The last separator may be missing.
            "properties": pa.array(
                [encode_properties({"region": "eu", "topic": "b"}), "price\x017", None], pa.string()
            ),
        }
    ).select(CONDITION_COLUMNS)
    number = np.array([3, 11, 25])
    messages = Described(np.array([5, 6, 7]), np.array([3, 12, 25]), number, pa.array(["a", "a", "b"]), rows)
    selected = Selected({"s": facts(100, where=where, campaigns={"spring": [(10, 5)], "autumn": [(30, 5)]})})
    assert (selected.states(messages).owner >= 0).tolist() == expected


def test_a_selection_applies_until_it_is_over_and_only_then_makes_space_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SELECTIONS_MAX", 2)
    meta, written = MetaLog(), list[pa.RecordBatch]()
    selections = Selections(meta)
    meta.open(written.append, lambda: 7)
    assert selections.selected is selections.selected and selections.selected.is_empty
    selections.put("1", facts(1))
    first = selections.selected
    assert first.names == ["1"] and selections.selected is first
    selections.record_count("1", 10, 50)
    selections.ended("1", 3)
    assert selections.pending_rows == 7
    selections.put("2", facts(2))
    with pytest.raises(OverLimit):
        selections.put("3", facts(3))
    selections.put("1", facts(1, count=10, last_due_ms=50, undone_seq=9))
    assert selections.pending_rows == 0 and selections.active == ["2"]
    selections.mark_over(50)
    assert not selections.is_over("1")
    selections.mark_over(51)
    assert selections.is_over("1") and selections.selected.names == ["2"]
    selections.put("3", facts(3))
    assert list(selections.all()) == ["2", "3"]
    with pytest.raises(NotFound):
        selections.get("1")
    restored_log = MetaLog()
    restored = Selections(restored_log)
    for batch in written:
        restored_log.restore(pairs_of(batch))
    assert restored.all() == selections.all()
