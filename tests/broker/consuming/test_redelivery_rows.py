"""Copies for redelivery: columns and single rows agree, and a copy keeps the message but not its old delay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming import redelivery_rows, retry
from timeball.broker.consuming.redelivery_rows import FIRST_POP_TIME, POP_CK
from timeball.model import limits
from timeball.model.message import (
    ORIGIN_GROUP,
    READ_SCHEMA,
    RETRY_TOPIC,
    Kind,
    build_rows,
    decode_properties,
    encode_properties,
)

GROUP, TOPIC, NOW_MS = "g", "orders", 1_700_000_000_000
NAMES = st.sampled_from(
    [
        "UNIQ_KEY",
        "a",
        "DELAY",
        "TIMER_DELIVER_MS",
        POP_CK,
        ORIGIN_GROUP,
        RETRY_TOPIC,
        FIRST_POP_TIME,
        "XDELAY",
    ]
)
TEXTS = st.builds(
    lambda properties, ends: encode_properties(properties) if ends else encode_properties(properties)[:-1],
    st.dictionaries(NAMES, st.text("xyz", max_size=3), max_size=5),
    st.booleans(),
)


def rows(count: int = 2, **columns: Any) -> pa.RecordBatch:
    """Messages as they are read (READ_SCHEMA), with the numbers from 7 on."""
    built = build_rows(
        count,
        **{"kind": 1, "topic": TOPIC, "body": [b"b"] * count, "reconsume_times": 0, "born_ms": 5, **columns},
    )
    return pa.RecordBatch.from_arrays(
        [pa.array(range(7, 7 + count), pa.int64()), *built.columns], schema=READ_SCHEMA
    )


def properties_by_columns(texts: list[str | None]) -> list[str]:
    """The properties of the copies of rows with these properties."""
    properties: list[str] = redelivery_rows.properties_for(
        pa.array(texts, pa.string()), GROUP, TOPIC, NOW_MS
    ).to_pylist()
    return properties


@given(st.lists(st.none() | TEXTS, max_size=6))
def test_properties_built_as_a_column_equal_those_built_one_by_one(texts: list[str | None]) -> None:
    adding = redelivery_rows.copy_properties(GROUP, TOPIC, NOW_MS)
    one_by_one = [decode_properties(redelivery_rows.merge_properties(text or "", adding)) for text in texts]
    assert [decode_properties(text) for text in properties_by_columns(texts)] == one_by_one


@given(TEXTS)
def test_a_copy_names_its_group_and_has_no_properties_of_earlier_delays(text: str) -> None:
    before, after = decode_properties(text), decode_properties(properties_by_columns([text])[0])
    assert after[ORIGIN_GROUP] == GROUP
    assert after[RETRY_TOPIC] == before.get(RETRY_TOPIC, TOPIC), "the first topic stays"
    assert after[FIRST_POP_TIME] == before.get(FIRST_POP_TIME, str(NOW_MS)), "and so does the first time"
    assert not {*retry.SPENT, POP_CK} & after.keys()
    for name in ("UNIQ_KEY", "a", "XDELAY"):
        assert after.get(name) == before.get(name)


def test_properties_of_a_copy_stay_within_the_limit_of_the_protocol() -> None:
    for room in range(0, 120, 7):
        name_and_ends = len("long") + 2
        text = encode_properties({"long": "x" * (limits.PROPERTIES_BYTES_MAX - name_and_ends - room)})
        (copied_text,) = properties_by_columns([text])
        assert len(copied_text) <= limits.PROPERTIES_BYTES_MAX
        after = decode_properties(copied_text)
        assert after["long"] == decode_properties(text)["long"], "the producer's property stays"
        assert room < 20 or after[ORIGIN_GROUP] == GROUP  # the name of the group needs less than 20 bytes


def copies(
    source: pa.RecordBatch, *, is_later: list[bool], topics: list[str], properties: list[str | None]
) -> list[dict[str, Any]]:
    """The rows that bring `source` back: some visible, some scheduled messages for NOW_MS + 99."""
    later = np.array(is_later)
    times = redelivery_rows.times_of(source) + 1
    made: list[dict[str, Any]] = redelivery_rows.build_copies(
        source,
        kind=np.where(later, int(Kind.SCHEDULED), int(Kind.MESSAGE)).astype(np.int8),
        topics=topics,
        properties=pa.array(properties, pa.string()),
        times=times,
        due_ms=pa.array(np.full(len(later), NOW_MS + 99), mask=~later) if later.any() else None,
        source_seq=pa.array(source.column("seq").to_numpy(), mask=~later) if later.any() else None,
        now_ms=NOW_MS,
        host="here",
    ).to_pylist()
    return made


def test_a_copy_has_all_other_columns_of_its_message() -> None:
    source = rows(
        tag="t", keys="k", unique_key="u", flag=3, sys_flag=4, born_host="h", queue_id=5, queue_offset=6
    )
    later, visible = copies(
        source, is_later=[True, False], topics=["a", "b"], properties=["p\x01q\x02", None]
    )
    for copy, message in zip((later, visible), source.to_pylist(), strict=True):
        for name in ("body", "tag", "keys", "unique_key", "flag", "sys_flag", "born_ms", "born_host"):
            assert copy[name] == message[name] is not None
        assert (copy["queue_id"], copy["queue_offset"], copy["reconsume_times"]) == (0, None, 1)
        assert (copy["store_ms"], copy["store_host"], copy["accepted_ms"]) == (NOW_MS, "here", None)
    assert (later["kind"], later["topic"], later["properties"]) == (Kind.SCHEDULED, "a", "p\x01q\x02")
    assert (later["due_ms"], later["source_seq"]) == (NOW_MS + 99, 7)
    assert (visible["kind"], visible["topic"], visible["properties"]) == (Kind.MESSAGE, "b", None)
    assert (visible["due_ms"], visible["source_seq"]) == (None, None)


def test_copies_that_are_all_visible_have_no_due_time() -> None:
    made = copies(rows(), is_later=[False, False], topics=["a", "a"], properties=[None, None])
    assert [(copy["kind"], copy["due_ms"], copy["source_seq"]) for copy in made] == [
        (Kind.MESSAGE, None, None)
    ] * 2


@given(st.lists(st.none() | st.integers(0, retry.INT_MAX), min_size=1, max_size=5))
def test_a_row_without_reconsume_times_has_zero_attempts(times: list[int | None]) -> None:
    attempts = redelivery_rows.times_of(rows(len(times), reconsume_times=pa.array(times, pa.int32())))
    assert attempts.tolist() == [count or 0 for count in times]


def test_the_retry_topic_of_a_retry_topic_is_the_topic_itself() -> None:
    assert redelivery_rows.pop_retry_topic(GROUP, TOPIC) == "%RETRY%g_orders"
    assert redelivery_rows.pop_retry_topic(GROUP, "%RETRY%g_orders") == "%RETRY%g_orders"


def test_the_copy_of_a_copy_keeps_the_first_topic_and_time_and_the_producers_properties() -> None:
    text = encode_properties(
        {"RETRY_TOPIC": "t", "1ST_POP_TIME": "5", "POP_CK": "x", "DELAY": "3", "own": "1"}
    )
    adding = [redelivery_rows.copy_properties(GROUP, TOPIC, 77)] * 2
    merged = redelivery_rows.merge_properties_of_each(pa.array([None, text], pa.string()), adding)
    assert [decode_properties(merged_text) for merged_text in merged.to_pylist()] == [
        {"RETRY_TOPIC": TOPIC, "1ST_POP_TIME": "77", "ORIGIN_GROUP": GROUP},
        {"RETRY_TOPIC": "t", "1ST_POP_TIME": "5", "ORIGIN_GROUP": GROUP, "own": "1"},
    ]


GROUPS = st.sampled_from(["a", "a_b", "ab", "b"])


@given(GROUPS, GROUPS, st.sampled_from(["", "x\x01y\x02", "x\x01y"]), st.booleans())
def test_a_copy_is_only_for_the_group_that_it_names(
    group: str, reader: str, before: str, has_end: bool
) -> None:
    """`before`: properties before that of the group. `has_end`: the text ends with a separator."""
    separator = "" if not before or before.endswith("\x02") else "\x02"
    text = f"{before}{separator}ORIGIN_GROUP\x01{group}" + ("\x02" if has_end else "")
    assert redelivery_rows.is_for_group(reader, text) == (group == reader)
    assert redelivery_rows.is_for_group(reader, before or None), "a row that names no group is for all groups"


@given(st.text(), st.integers(0, 3))
def test_a_reason_becomes_one_line_of_bounded_length_without_separators(text: str, times: int) -> None:
    reason = redelivery_rows.reason_text(text * (1 + 700 * times))
    assert len(reason.encode()) <= limits.NACK_REASON_BYTES_MAX
    assert reason.isprintable() and reason == " ".join(reason.split(" "))
    properties = redelivery_rows.nack_properties(text, 5) | {"own": "1"}
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\x01b\x02c", "a b c"),
        ("  ", ""),
        ("\ud800x", "x"),
        ("line\r\nline", "line line"),
        ("ü" * 600, "ü" * 512),  # 2 bytes each
    ],
)
def test_unprintable_characters_are_left_out_of_a_reason(text: str, reason: str) -> None:
    assert redelivery_rows.reason_text(text) == reason


def test_a_reason_stays_until_the_next_nack_replaces_it() -> None:
    first = redelivery_rows.merge_properties("", redelivery_rows.copy_properties(GROUP, TOPIC, 1))
    nack = redelivery_rows.copy_properties(GROUP, TOPIC, 1) | redelivery_rows.nack_properties("no stock", 5)
    nacked = redelivery_rows.merge_properties(first, nack)
    assert decode_properties(nacked).items() >= {("NACK_REASON", "no stock"), ("NACK_TIME", "5")}
    # The next lease ends without a nack, and then comes a nack without a reason.
    expired = redelivery_rows.merge_properties(nacked, redelivery_rows.copy_properties(GROUP, TOPIC, 2))
    properties = decode_properties(expired)
    assert properties["NACK_REASON"] == "no stock" and "NACK_TIME" not in properties
    silent = redelivery_rows.merge_properties(expired, nack | redelivery_rows.nack_properties("", 6))
    assert "NACK_REASON" not in decode_properties(silent)


def test_a_reason_that_the_sender_set_is_removed() -> None:
    text = encode_properties({"NACK_REASON": "made up", "NACK_TIME": "1"})
    (copied,) = properties_by_columns([text])
    assert not {"NACK_REASON", "NACK_TIME"} & decode_properties(copied).keys()


def test_a_reason_that_does_not_fit_is_left_out() -> None:
    text = encode_properties({"long": "x" * (limits.PROPERTIES_BYTES_MAX - 80)})
    nack = redelivery_rows.copy_properties(GROUP, TOPIC, 1) | redelivery_rows.nack_properties("y" * 100, 5)
    properties = decode_properties(redelivery_rows.merge_properties(text, nack))
    assert "NACK_REASON" not in properties and properties["ORIGIN_GROUP"] == GROUP
    (shown,) = redelivery_rows.with_reasons(pa.array([text], pa.string()), ["y" * 100]).to_pylist()
    assert shown == text
