"""What is written when a message comes back: where it goes, what it keeps, and whose it is."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.admission import SEND_COLUMNS
from timeball.broker.popping import copies
from timeball.message import LOG_SCHEMA, build_rows, decode_properties, encode_properties


def rows(times: list[int], properties: str | None = None) -> pa.RecordBatch:
    n = len(times)
    return build_rows(
        n, topic="t", body=[b"b"] * n, tag="tag", keys="k", unique_key="u", born_ms=5, born_host="h", flag=3,
        sys_flag=1, properties=[properties] * n, reconsume_times=pa.array(times, pa.int32()),
    )  # fmt: skip


def test_a_copy_goes_to_the_groups_retry_topic_and_keeps_what_the_message_was() -> None:
    made = copies.build(rows([0]), group="g", topic="t", pop_ms=[77], times_max=16)
    (copy,) = made.to_pylist()
    properties = decode_properties(copy.pop("properties"))
    assert copy == {
        "topic": "%RETRY%g_t", "queue_id": 0, "reconsume_times": 1, "body": b"b", "tag": "tag", "keys": "k",
        "unique_key": "u", "born_ms": 5, "born_host": "h", "flag": 3, "sys_flag": 1,
    }  # fmt: skip
    assert properties == {"RETRY_TOPIC": "t", "1ST_POP_TIME": "77", "ORIGIN_GROUP": "g"}
    assert all(SEND_COLUMNS[f.name] == f.type for f in made.schema)
    assert set(LOG_SCHEMA.names) >= set(made.schema.names)


def test_later_copies_keep_the_first_topic_and_time_and_stay_in_their_retry_topic() -> None:
    text = encode_properties(
        {"RETRY_TOPIC": "t", "1ST_POP_TIME": "5", "POP_CK": "x", "DELAY": "3", "own": "1"}
    )
    made = copies.build(rows([4], text), group="g", topic="%RETRY%g_t", pop_ms=[77], times_max=16)
    assert made.column("topic").to_pylist() == ["%RETRY%g_t"]
    assert decode_properties(made.column("properties")[0].as_py()) == {
        "RETRY_TOPIC": "t", "1ST_POP_TIME": "5", "ORIGIN_GROUP": "g", "own": "1",
    }  # fmt: skip


@pytest.mark.parametrize(("times", "dead"), [(0, False), (15, False), (16, True), (99, True)])
def test_after_the_last_try_it_is_a_dead_letter(times: int, dead: bool) -> None:
    made = copies.build(rows([times]), group="g", topic="t", pop_ms=[1], times_max=16)
    assert made.column("topic").to_pylist() == ["%DLQ%g" if dead else "%RETRY%g_t"]
    assert made.column("reconsume_times").to_pylist() == [times + 1]


def test_rows_are_judged_one_by_one_or_all_given_up() -> None:
    made = copies.build(rows([16, 0]), group="g", topic="t", pop_ms=[1, 2], times_max=16, due_ms=[7, 8])
    assert made.column("topic").to_pylist() == ["%DLQ%g", "%RETRY%g_t"]
    assert made.column("due_ms").to_pylist() == [7, 8]
    made = copies.build(rows([0, 0]), group="g", topic="t", pop_ms=[1, 2], times_max=16, dead=True)
    assert set(made.column("topic").to_pylist()) == {"%DLQ%g"}


NAMES = st.sampled_from(["a", "a_b", "ab", "b"])


@given(NAMES, NAMES, st.sampled_from(["", "x\x01y\x02", "x\x01y"]), st.booleans())
def test_a_copy_is_of_the_group_that_it_names(group: str, other: str, before: str, ended: bool) -> None:
    own = f"{before}{'' if not before or before.endswith(chr(2)) else chr(2)}ORIGIN_GROUP\x01{group}"
    own += "\x02" if ended else ""
    assert copies.is_of(other, own) == (group == other)
    assert copies.is_of(other, before or None)  # says nothing: it is for whoever reads it
