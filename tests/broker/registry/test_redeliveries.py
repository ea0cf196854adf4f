"""Counts of leases: equal to a model's, through every order of changes, and through a checkpoint."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from timeball.broker.registry.lease_counts import LeaseCounts, keys_of, spans, were_nacked

from timeball.broker.consuming.redelivery_rows import added, given_back
from timeball.broker.registry import lease_counts
from timeball.model.message import LOG_SCHEMA, Kind, build_rows, encode_properties, with_seq

GROUPS = [("g", "orders"), ("g", "bills"), ("h", "orders")]
NUMBERS = st.lists(st.integers(1, 60), max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(GROUPS), st.integers(1, 5), st.integers(0, 3)),
        st.tuples(st.sampled_from(["end", "nack", "hold"]), NUMBERS),
        st.tuples(st.just("restore")),
    ),
    max_size=40,
)


def numbers(found: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(found, dtype=np.int64)


@given(STEPS)
def test_counts_are_those_of_a_model(steps: list[tuple[object, ...]]) -> None:
    counts, model, next_number = LeaseCounts(), dict[int, tuple[tuple[str, str], bool]](), 1
    for name, *what in steps:
        if name == "add":
            key, rows, gap = what
            first = next_number + gap
            counts.add(*key, numbers(list(range(first, first + rows))))
            model |= dict.fromkeys(range(first, first + rows), (key, False))
            next_number = first + rows
        elif name == "restore":
            facts, counts = counts.facts(), LeaseCounts()
            counts.restore(facts)
        else:
            (named,) = what
            if name == "end":
                counts.end(numbers(named))
                for n in named:
                    model.pop(n, None)
            else:
                counts.change(numbers(named), np.full(len(named), name == "nack"))
                model |= {n: (model[n][0], name == "nack") for n in named if n in model}
        for found, is_nacked in ((counts.held(), False), (counts.nacked(), True)):
            of = [key for key, was in model.values() if was is is_nacked]
            assert found == {key: of.count(key) for key in of}
        assert counts.waiting_rows == len(model)


@given(NUMBERS, st.booleans())
def test_a_few_are_counted_as_many_are(named: list[int], was_nacked: bool) -> None:
    few, many = LeaseCounts(), LeaseCounts()
    for counts in (few, many):
        counts.add(*GROUPS[0], np.arange(1, 61))
        counts.change(np.arange(1, 31), np.full(30, was_nacked))
    for number in named:
        few.end(numbers([number]))
    many.end(numbers(named * (lease_counts.FEW + 1)))  # those that stand there twice end once
    assert (few.facts(), few.waiting_rows) == (many.facts(), many.waiting_rows)


def test_the_last_change_of_a_number_counts() -> None:
    counts = LeaseCounts()
    counts.add("g", "orders", numbers([7]))
    counts.change(numbers([7, 7]), np.array([True, False]))
    assert counts.held() == {("g", "orders"): 1} and counts.nacked() == {}


def test_ended_leases_take_no_room_for_ever() -> None:
    counts = LeaseCounts()
    for first in range(0, 200_000, 100):
        counts.add("g", "orders", np.arange(first, first + 100))
        counts.end(np.arange(first, first + 100))
    assert len(counts._number) <= 2 * lease_counts.SWEEP_ROWS_MIN


def test_neighbours_are_one_span() -> None:
    assert spans(numbers([3, 4, 5, 9, 11, 12]), numbers([0] * 6)) == {0: [(3, 3), (9, 1), (11, 2)]}
    assert spans(numbers([0, 1, 2, 3, 4, 5]), numbers([7, 7, 0, 7, 0, 0])) == {
        0: [(2, 1), (4, 2)],
        7: [(0, 2), (3, 1)],
    }
    assert spans(numbers([]), numbers([])) == {}


def scheduled_rows(texts: list[str | None], topics: list[str]) -> pa.RecordBatch:
    rows = build_rows(
        len(texts), kind=int(Kind.SCHEDULED), topic=topics, properties=pa.array(texts, pa.string()),
        due_ms=np.arange(len(texts)), source_seq=np.arange(len(texts)),
    )  # fmt: skip
    return with_seq(rows, 10)


def test_a_scheduled_message_names_its_group_and_topic() -> None:
    own = encode_properties({"a": "ORIGIN_GROUP", **added("g", "orders", 1)})
    other = encode_properties({**added("g", "first", 1), "z": "1"})
    rows = scheduled_rows(
        [own, own, other, "", None],
        ["%RETRY%g_orders", "%DLQ%g", "%RETRY%g_a_b", "%RETRY%g_orders", "%RETRY%g_orders"],
    )
    assert keys_of(rows) == [("g", "orders"), ("g", "orders"), ("g", "a_b"), None, None]


def test_a_row_says_whether_its_message_was_given_back() -> None:
    texts = [
        encode_properties({"own": "1", **given_back("no stock", 5)}), encode_properties({"own": "NACK_TIME"}), None,
    ]  # fmt: skip
    assert were_nacked(scheduled_rows(texts, ["t"] * 3)).tolist() == [True, False, False]


def test_rows_of_the_log_are_applied_in_its_order() -> None:
    text = encode_properties(added("g", "orders", 1))
    back = encode_properties({**added("g", "orders", 1), **given_back("", 5)})

    def row(kind: Kind, source_seq: int, properties: str | None = None) -> pa.RecordBatch:
        return build_rows(
            1, kind=int(kind), topic="%RETRY%g_orders", due_ms=5, source_seq=source_seq, properties=properties
        )

    rows = [
        row(Kind.SCHEDULED, 1, text), row(Kind.SCHEDULED, 2, text), row(Kind.SCHEDULED, 3, text),
        row(Kind.MOVED, 10, back), row(Kind.MOVED, 11, back), row(Kind.MOVED, 11, text), row(Kind.CANCEL, 12),
    ]  # fmt: skip
    counts = LeaseCounts()
    counts.replay(with_seq(pa.Table.from_batches(rows, LOG_SCHEMA).combine_chunks().to_batches()[0], 10))
    assert (counts.held(), counts.nacked()) == ({("g", "orders"): 1}, {("g", "orders"): 1})
