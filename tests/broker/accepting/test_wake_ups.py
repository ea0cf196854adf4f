"""The rows of wake-ups, and their property BASE, which keeps the due time and the version that a sender has set."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.accepting.wake_ups import bases_in, build_wake_ups, without_base
from timeball.broker.registry.selections import Woken
from timeball.model.message import (
    BASE,
    READ_SCHEMA,
    Kind,
    build_rows,
    decode_properties,
    encode_properties,
    with_seq,
)
from timeball.schedule.outcomes import Moved

# With and without a separator at the end, and a property of that name from a client.
TEXTS = [
    None,
    encode_properties({"a": "1"}),
    "a\x011",
    encode_properties({BASE: "x", "b": "2"}),
    f"a\x011\x02{BASE}\x017:8",
]


def scheduled(texts: list[str | None]) -> pa.RecordBatch:
    """Build scheduled messages with these properties: numbers from 10 on, due times from 100 ms on."""
    count = len(texts)
    rows = build_rows(
        count, kind=int(Kind.SCHEDULED), topic="a", queue_id=-1, properties=pa.array(texts, pa.string()),
        due_ms=np.arange(count) + 100, store_ms=5,
    )  # fmt: skip
    return with_seq(rows, 10)


def woken_rows(texts: list[str | None], woken: Woken) -> pa.RecordBatch:
    """Build the wake-ups of `scheduled` messages to 200 ms, as rows from 300 on, and remember them."""
    rows = scheduled(texts)
    count = rows.num_rows
    wake_ups = build_wake_ups(
        rows, np.full(count, 200), references=(rows.column("seq"), pa.nulls(count, pa.int64())),
        from_due_ms=np.arange(count) + 100, woken=woken, now_ms=50, host="host", encode=lambda rows, now_ms: rows,
    )  # fmt: skip
    moved = Moved()
    wake_ups.remember(300, moved, woken)
    assert moved.newest(10) == (200, 300)
    return wake_ups.rows


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5))
def test_a_wake_up_names_its_base_until_the_property_is_removed(texts: list[str | None]) -> None:
    woken, count = Woken(), len(texts)
    rows = woken_rows(texts, woken)
    assert rows.column("from_due_ms").to_pylist() == list(range(100, 100 + count))
    assert rows.column("accepted_ms").to_pylist() == [5] * count
    index, base_ms, base = bases_in(rows.column("properties"))
    assert index.tolist() == list(range(count))
    assert (base_ms.tolist(), base.tolist()) == (list(range(100, 100 + count)), list(range(10, 10 + count)))
    remembered = woken.bases(np.full(count, 200), np.arange(count) + 300)
    assert [column.tolist() for column in remembered] == [base_ms.tolist(), base.tolist()]
    delivered = without_base(with_seq(rows, 300))
    assert delivered.schema == READ_SCHEMA
    for text, after in zip(texts, delivered.column("properties").to_pylist(), strict=True):
        expected = decode_properties(text or "")
        expected.pop(BASE, None)
        assert decode_properties(after or "") == expected


def test_a_second_wake_up_keeps_the_base_of_the_first() -> None:
    woken = Woken()
    # Version 10, which is due at 100 ms, has the base due time 7 and the base version 3.
    woken.add(*(np.array([number]) for number in (10, 7, 3, 100)))
    assert bases_in(woken_rows([None], woken).column("properties"))[1:] == (np.array([7]), np.array([3]))


def test_texts_that_are_no_base_are_not_read() -> None:
    texts = [None, "", f"{BASE}\x01x", f"{BASE}\x011:", f"X{BASE}\x011:2", f"{BASE}\x01-1:2\x02"]
    assert bases_in(pa.array(texts, pa.string()))[0].tolist() == [5]
