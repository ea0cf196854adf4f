"""Accepted rows equal the sent rows, with a store time. A refusal names field and row, and refuses the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, column

from timeball.broker.accepting.admission import admit
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, OverLimit
from timeball.model.limits import DAY_MS
from timeball.model.message import LOG_SCHEMA, SEND_COLUMNS, Kind, codes_of
from timeball.schedule.delay_levels import LevelTable

NOW_MS = 1_700_000_000_000
MAX_MS = 40 * DAY_MS
TABLE = LevelTable.parse("1s 5s 1d")


def admitted(sent: pa.RecordBatch, delay_ms_max: int = MAX_MS) -> pa.RecordBatch:
    """Admit a batch, and check the schema and the number of its rows."""
    rows, _ = admit(sent, now_ms=NOW_MS, delay_ms_max=delay_ms_max, host="h", table=TABLE)
    assert rows.schema == LOG_SCHEMA
    assert rows.num_rows == sent.num_rows
    return rows


# ---- due times ----------------------------------------------------------------------------------------------


def test_rows_with_a_due_time_are_scheduled_and_others_are_visible() -> None:
    rows = admitted(batch(4, due_ms=[None, NOW_MS + 5, None, None], delay_ms=[None, None, 0, 7]))
    assert column(rows, "kind") == [Kind.MESSAGE, Kind.SCHEDULED, Kind.SCHEDULED, Kind.SCHEDULED]
    assert column(rows, "due_ms") == [None, NOW_MS + 5, NOW_MS, NOW_MS + 7]


INSTANTS = st.integers(0, NOW_MS + MAX_MS)
DELAYS = st.integers(0, MAX_MS)
WHEN = st.one_of(
    st.none().map(lambda _: (None, None)), st.tuples(INSTANTS, st.none()), st.tuples(st.none(), DELAYS)
)


@given(st.lists(WHEN, min_size=1, max_size=30), st.integers(0, 5))
def test_due_times_are_kept_and_delays_count_from_the_store_time(
    times: list[tuple[Any, Any]], skipped: int
) -> None:
    due, delay = [due_ms for due_ms, _ in times], [delay_ms for _, delay_ms in times]
    sent = batch(len(times), due_ms=due, delay_ms=delay).slice(min(skipped, len(times) - 1))
    expected = [
        due_ms if due_ms is not None else None if delay_ms is None else NOW_MS + delay_ms
        for due_ms, delay_ms in times
    ]
    assert column(admitted(sent), "due_ms") == expected[-sent.num_rows :]


def test_a_due_time_in_the_past_is_accepted_and_kept() -> None:
    assert column(admitted(batch(2, due_ms=[0, NOW_MS - 1])), "due_ms") == [0, NOW_MS - 1]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"delay_ms": [0, -1]}, r"delay_ms -1 of row 1: between 0 and"),
        ({"delay_ms": [MAX_MS + 1, 0]}, r"delay_ms \d+ of row 0"),
        (
            {"delay_ms": [0, (1 << 63) - 1]},
            r"delay_ms 9223372036854775807 of row 1",
        ),  # added to the present time, this exceeds 64 bits
        ({"delay_ms": [0, -(1 << 63)]}, r"of row 1"),
        ({"due_ms": [None, -1]}, r"due_ms -1 of row 1"),
        ({"due_ms": [NOW_MS + MAX_MS + 1, None]}, r"due_ms \d+ of row 0: between 0 and \d+"),
        ({"due_ms": [(1 << 63) - 1, 0]}, r"due_ms \d+ of row 0"),
        ({"due_ms": [1, NOW_MS], "delay_ms": [None, 5]}, r"row 1 has both"),
    ],
)
def test_an_invalid_due_time_is_refused_and_never_delivered_at_once(
    columns: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidDelay, match=text):
        admitted(batch(2, **columns))


def test_the_latest_allowed_due_time_is_accepted() -> None:
    assert column(admitted(batch(1, delay_ms=[MAX_MS])), "due_ms") == [NOW_MS + MAX_MS]
    assert column(admitted(batch(1, due_ms=[NOW_MS + MAX_MS])), "due_ms") == [NOW_MS + MAX_MS]


# ---- columns ------------------------------------------------------------------------------------------------


def test_missing_columns_get_their_defaults() -> None:
    rows = admitted(batch(2, born_ms=[None, 9], queue_id=pa.array([None, 3], pa.int32()))).to_pylist()
    defaults = {"store_ms": NOW_MS, "store_host": "h", "flag": 0, "sys_flag": 0, "reconsume_times": 0}
    for row in rows:
        assert {name: row[name] for name in defaults} == defaults
        null_columns = (
            "queue_offset",
            "accepted_ms",
            "source_seq",
            "tag",
            "keys",
            "unique_key",
            "properties",
        )
        assert all(row[name] is None for name in null_columns)
    assert [(row["born_ms"], row["born_host"], row["queue_id"]) for row in rows] == [
        (NOW_MS, "h", -1),
        (9, "h", 3),
    ]


TEXT = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
# U+0001 and U+0002 would end a property.
LABEL = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\1\2"), max_size=8)
MESSAGES = st.fixed_dictionaries(
    {"topic": st.from_regex(r"[%|a-zA-Z0-9_-]{1,8}", fullmatch=True), "body": st.binary(max_size=9)},
    optional={
        **dict.fromkeys(["properties", "born_host"], TEXT),
        **dict.fromkeys(["tag", "keys", "unique_key"], LABEL),
        "queue_id": st.integers(-1, limits.QUEUES_PER_TOPIC_MAX - 1),
        **dict.fromkeys(["flag", "sys_flag", "reconsume_times"], st.integers(-(1 << 31), (1 << 31) - 1)),
        "born_ms": st.integers(0, NOW_MS),
    },
)


@given(st.lists(MESSAGES, min_size=1, max_size=10), st.randoms())
def test_all_given_columns_are_stored(messages: list[dict[str, Any]], random: Any) -> None:
    names = [name for name in SEND_COLUMNS if any(name in message for message in messages)]
    random.shuffle(names)
    columns = {n: pa.array([message.get(n) for message in messages], SEND_COLUMNS[n]) for n in names}
    rows = admitted(pa.RecordBatch.from_pydict(columns)).to_pylist()
    for row, message in zip(rows, messages, strict=True):
        values = {name: value for name, value in message.items() if value is not None}
        assert {name: row[name] for name in values} == values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("body", pa.array(["text", "more"])),
        ("body", pa.array([b"ab", b"cd"], pa.large_binary())),
        ("topic", pa.array(["orders", "orders"]).dictionary_encode()),
        ("topic", pa.array(["orders", "orders"], pa.large_string())),
        ("born_ms", pa.array([1, 2], pa.int16())),
        ("due_ms", pa.array([1, 2], pa.uint64())),
        ("due_ms", pa.array([1.0, 2.0])),
        ("queue_id", pa.array([0, 1], pa.int64())),
        ("tag", pa.nulls(2)),
    ],
)
def test_compatible_column_types_are_cast(name: str, values: pa.Array) -> None:
    rows = admitted(with_column(name, values))
    expected = values.cast(SEND_COLUMNS[name])
    assert rows.column(name).equals(expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("due_ms", pa.array([1.5, 2.0])),
        ("due_ms", pa.array([float("nan"), 2.0])),
        ("due_ms", pa.array(["soon", "later"])),
        (
            "due_ms",
            pa.array([NOW_MS // 1_000] * 2, pa.timestamp("s")),
        ),  # read as milliseconds, this would be a time in 1970
        ("delay_ms", pa.array([3, 4], pa.duration("s"))),
        ("delay_ms", pa.array([1 << 63, 0], pa.uint64())),
        ("queue_id", pa.array([1 << 40, 0], pa.int64())),
        ("body", pa.array([1, 2])),
        ("topic", pa.array([b"\xff", b"a"])),
        ("tag", pa.array([["a"], ["b"]])),
    ],
)
def test_incompatible_column_types_are_refused_with_the_column_name(name: str, values: pa.Array) -> None:
    with pytest.raises(InvalidMessage, match=f"column '{name}' has type"):
        admitted(with_column(name, values))


def with_column(name: str, values: pa.Array) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {
        "topic": pa.array(["orders"] * 2),
        "body": pa.array([b""] * 2),
        name: values,
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def test_missing_unknown_and_empty_columns_are_refused_by_name() -> None:
    for name in ("topic", "body"):
        with pytest.raises(InvalidMessage, match=f"column '{name}' is missing"):
            admitted(batch(1).drop_columns([name]))
        with pytest.raises(InvalidMessage, match=f"column '{name}' has no value in row 1"):
            admitted(
                with_column(
                    name, pa.array([None if i else batch(1).column(name)[0].as_py() for i in range(2)])
                )
            )
    for unknown in ("seq", "kind", "Topic", "when"):
        with pytest.raises(InvalidMessage, match=f"column '{unknown}' is not one of"):
            admitted(batch(1, **{unknown: [1]}))


# ---- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes_max"),
    [
        ("tag", limits.TAG_BYTES_MAX), ("unique_key", limits.UNIQUE_KEY_BYTES_MAX),
        ("keys", limits.KEYS_BYTES_MAX), ("properties", limits.PROPERTIES_BYTES_MAX),
    ],
)  # fmt: skip
def test_texts_beyond_their_byte_limit_are_refused(name: str, bytes_max: int) -> None:
    admitted(batch(2, **{name: ["", "é" * (bytes_max // 2)]}))
    with pytest.raises(InvalidMessage, match=f"row 1: {name}: more than {bytes_max} bytes"):
        admitted(batch(2, **{name: [None, "é" * (bytes_max // 2 + 1)]}))


def test_bodies_beyond_the_limit_are_refused() -> None:
    admitted(batch(1, body=[bytes(limits.BODY_BYTES_MAX)]))
    with pytest.raises(InvalidMessage, match="row 0: body"):
        admitted(batch(1, body=[bytes(limits.BODY_BYTES_MAX + 1)]))


def test_too_many_keys_are_refused() -> None:
    admitted(batch(1, keys=[" ".join(["k"] * limits.KEYS_PER_MESSAGE_MAX)]))
    with pytest.raises(InvalidMessage, match=f"row 1: keys: more than {limits.KEYS_PER_MESSAGE_MAX}"):
        admitted(batch(2, keys=[None, " ".join(["k"] * (limits.KEYS_PER_MESSAGE_MAX + 1))]))


@pytest.mark.parametrize("queue_id", [-2, limits.QUEUES_PER_TOPIC_MAX])
def test_queue_numbers_beyond_the_limit_are_refused(queue_id: int) -> None:
    with pytest.raises(InvalidMessage, match="row 1: queue_id"):
        admitted(batch(2, queue_id=pa.array([None, queue_id], pa.int32())))


def test_requests_without_rows_or_with_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROWS_PER_REQUEST_MAX", 5)
    admitted(batch(5))
    for rows in (batch(6), batch(1).slice(1)):
        with pytest.raises(OverLimit, match="between 1 and 5: split it"):
            admitted(rows)


def test_requests_with_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", 10_000)
    admitted(batch(1, body=[bytes(9_000)]))
    with pytest.raises(OverLimit, match="split it"):
        admitted(batch(2, body=[bytes(6_000)] * 2))


def test_the_topics_of_a_batch_are_listed_once_in_their_order() -> None:
    rows = admitted(batch(4, topic=["a", "b", "a", "c"]))
    assert codes_of(rows.column("topic"))[1] == ["a", "b", "c"]
    assert np.asarray(rows.column("kind")).dtype == np.int8
