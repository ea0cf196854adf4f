"""Tests of timeball.spark.source.scheduled_writer: the columns of a DataFrame become those of scheduled messages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from timeball.model import limits, rules
from timeball.model.errors import InvalidMessage
from timeball.model.message import TABLE_SCHEMA, decode_properties
from timeball.spark.source import scheduled_writer

NOW_MS = 1_800_000_000_000


def table(count: int = 1, **columns: object) -> pa.Table:
    """Make rows of a DataFrame with a topic, a body and these columns."""
    columns = {"topic": ["orders"] * count, "body": [b"x"] * count, **columns}
    return pa.table(
        {
            name: values if isinstance(values, pa.Array) else pa.array(values)
            for name, values in columns.items()
        }
    )


def schema(ddl: str) -> StructType:
    """Make the schema of a DataFrame from a list of names and types, such as "topic string,body binary"."""
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        LongType,
        MapType,
        StringType,
        TimestampNTZType,
        TimestampType,
    )

    types = {
        "string": StringType(),
        "binary": BinaryType(),
        "bigint": LongType(),
        "timestamp": TimestampType(),
        "timestamp_ntz": TimestampNTZType(),
        "map": MapType(StringType(), StringType()),
        "list": ArrayType(StringType()),
        "map_long": MapType(StringType(), LongType()),
    }
    built = StructType()
    for part in ddl.split(","):
        name, kind = part.split()
        built = built.add(name, types[kind])
    return built


def first_broken(*, as_stored: bool = False, **columns: object) -> str | None:
    """Find the text of the first rule that a row with these columns breaks. None for a valid row."""
    given = table(**columns)
    rows = scheduled_writer.to_table_columns(given, NOW_MS)
    index = scheduled_writer.find_broken_rules(given, rows, NOW_MS, as_stored=as_stored)[0]
    return None if index < 0 else rules.RULES[index].text


def test_columns_of_the_right_types_are_accepted() -> None:
    scheduled_writer.check_columns(
        schema("topic string,body binary,due timestamp,properties map,keys string")
    )
    scheduled_writer.check_columns(schema("body string,topic string,due_ms bigint,keys list"))


def test_the_documentation_has_the_types_of_each_column() -> None:
    page = (Path(__file__).parents[3] / "docs/pipeline/data-source.md").read_text()
    lines = (
        page.partition("| column | types | meaning |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    )
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines]
    types = {name: tuple(kinds.split(", ")) for names, kinds in rows for name in names.split(", ")}
    accepted = scheduled_writer._SPARK_TYPES
    assert {name: set(kinds) for name, kinds in types.items()} == {
        name: set(kinds) for name, kinds in accepted.items()
    }


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("topic string", "column body is missing"),
        ("topic string,body binary,colour string", "column colour: unknown"),
        ("topic string,body bigint", "column body: bigint, wanted binary or string"),
        ("topic string,body string,due timestamp_ntz", "names no instant"),
        ("topic string,body string,due timestamp,due_ms bigint", "due_ms and due"),
        ("topic string,body string,properties map_long", "column properties"),
    ],
)
def test_a_missing_unknown_or_mistyped_column_is_named_in_the_error(ddl: str, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        scheduled_writer.check_columns(schema(ddl))


def test_converted_rows_have_the_schema_of_the_table_and_default_values() -> None:
    rows = scheduled_writer.to_table_columns(table(2, queue_id=[3, None]), NOW_MS)
    assert rows.schema == TABLE_SCHEMA
    assert rows.column("due_ms").to_pylist() == [NOW_MS, NOW_MS]
    assert rows.column("queue_id").to_pylist() == [3, -1]
    assert rows.column("accepted_ms").to_pylist() == [NOW_MS, NOW_MS]


@given(st.integers(0, limits.INSTANT_MS_MAX * 1000))
def test_timestamps_are_rounded_up_to_milliseconds(due_us: int) -> None:
    rows = scheduled_writer.to_table_columns(table(due=pa.array([due_us], pa.timestamp("us", "UTC"))), NOW_MS)
    due_ms = rows.column("due_ms")[0].as_py()
    assert 0 <= due_ms * 1000 - due_us < 1000


def test_a_map_of_properties_becomes_the_text_of_the_log() -> None:
    column = pa.array([[("a", "1"), ("b", None)], [], None], pa.map_(pa.string(), pa.string()))
    rows = scheduled_writer.to_table_columns(table(3, properties=column), NOW_MS)
    texts = rows.column("properties").to_pylist()
    assert decode_properties(texts[0]) == {"a": "1", "b": ""}
    assert texts[1:] == ["", None]


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({}, None),
        ({"topic": pa.array([None], pa.string())}, "topic"),
        ({"topic": ["a b"]}, "topic"),
        ({"topic": ["ä"]}, "topic"),
        ({"topic": ["a\n"]}, "topic"),
        ({"topic": ["t" * limits.TOPIC_BYTES_MAX]}, None),
        ({"topic": ["t" * (limits.TOPIC_BYTES_MAX + 1)]}, "topic"),
        ({"body": pa.array([None], pa.binary())}, "body: missing"),
        ({"body": [b"x" * (limits.BODY_BYTES_MAX + 1)]}, "body: more"),
        ({"tag": ["ß" * 128]}, "tag"),
        ({"keys": [["k"] * limits.KEYS_PER_MESSAGE_MAX]}, None),
        (
            {"keys": [["k"] * (limits.KEYS_PER_MESSAGE_MAX + 1)]},
            f"keys: more than {limits.KEYS_PER_MESSAGE_MAX} of",
        ),
        (
            {"keys": [" ".join(["k"] * (limits.KEYS_PER_MESSAGE_MAX + 1))]},
            f"keys: more than {limits.KEYS_PER_MESSAGE_MAX} of",
        ),
        ({"unique_key": ["u" * 256]}, "unique_key"),
        ({"properties": ["p" * 32_768]}, "properties"),
        ({"queue_id": [limits.QUEUES_PER_TOPIC_MAX]}, "queue_id"),
        ({"due_ms": [-1]}, "due: before"),
        ({"due_ms": [0]}, "due: before"),
        ({"due_ms": [1_800_000_000]}, "due: before March 1973; give milliseconds"),
        ({"due_ms": [20_300_131]}, "due: before March 1973; give milliseconds"),
        ({"due_ms": [limits.DUE_MS_MIN]}, None),
        ({"due_ms": pa.array([None], pa.int64())}, "due: missing"),
        ({"due": pa.array([None], pa.timestamp("us", "UTC"))}, "due: missing"),
        ({"due_ms": [NOW_MS + limits.DELAY_MS_MAX]}, None),
        ({"due_ms": [NOW_MS + limits.DELAY_MS_MAX + 1]}, "due: more"),
    ],
)
def test_each_rule_is_broken_just_beyond_its_limit(columns: dict[str, object], rule: str | None) -> None:
    """`rule`: the begin of the broken rule's text, None for a valid row."""
    broken = first_broken(**columns)
    assert (broken is None) if rule is None else (broken is not None and broken.startswith(rule))


def test_rows_with_a_null_or_empty_unique_key_get_a_random_one() -> None:
    rows = scheduled_writer.to_table_columns(table(4, unique_key=["mine", None, "", None]), NOW_MS)
    keys = scheduled_writer.with_unique_keys(rows).column("unique_key").to_pylist()
    assert keys[0] == "mine"
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys[1:])
    assert len(set(keys)) == 4


def test_flags_are_kept_and_are_0_by_default() -> None:
    """A bit of sys_flag tells a consumer that the body is compressed."""
    given = table(2, flag=pa.array([7, None], pa.int32()), sys_flag=pa.array([None, 1], pa.int32()))
    rows = scheduled_writer.to_table_columns(given, NOW_MS)
    assert (rows.column("flag").to_pylist(), rows.column("sys_flag").to_pylist()) == ([7, 0], [0, 1])
    assert scheduled_writer.to_table_columns(table(), NOW_MS).column("sys_flag").to_pylist() == [0]


def test_rows_that_have_unique_keys_are_returned_unchanged() -> None:
    rows = scheduled_writer.to_table_columns(table(1, unique_key=["mine"]), NOW_MS)
    assert scheduled_writer.with_unique_keys(rows) is rows


def test_rows_are_numbered_in_the_stable_order_of_their_due_times() -> None:
    rows = scheduled_writer.to_table_columns(table(4, due_ms=[9, 3, 9, 3]), NOW_MS)
    order = scheduled_writer.due_order(rows)
    assert order.tolist() == [1, 3, 0, 2]
    numbered = scheduled_writer.numbered(rows.take(pa.array(order)), 100)
    assert numbered.column("seq").to_pylist() == [100, 101, 102, 103]
    assert numbered.schema == TABLE_SCHEMA
    assert np.all(np.diff(numbered.column("due_ms").to_numpy()) >= 0)


# ---- the checksum -----------------------------------------------------------------------------------------


def checksum(**columns: object) -> int:
    """Compute the checksum of rows with these columns."""
    count = max(len(column) for column in columns.values())  # type: ignore[arg-type]
    return scheduled_writer.checksum(scheduled_writer.to_table_columns(table(count, **columns), NOW_MS))


def test_the_checksum_does_not_depend_on_the_order_of_rows_their_division_or_due_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = checksum(body=["a", "b", "c"], tag=["t", None, ""])
    assert expected == checksum(body=["c", "b", "a"], tag=["", None, "t"])
    assert expected == checksum(body=["a"], tag=["t"]) + checksum(body=["b", "c"], tag=[None, ""])
    assert expected == checksum(body=["a", "b", "c"], tag=["t", None, ""], due_ms=[1, 2, 3])
    monkeypatch.setattr(scheduled_writer, "CHECKSUM_ROWS", 2)
    assert expected == checksum(body=["a", "b", "c"], tag=["t", None, ""])


@pytest.mark.parametrize("name", ["topic", "tag", "keys", "unique_key", "properties", "body"])
def test_the_checksum_depends_on_each_text_column(name: str) -> None:
    checksums = [checksum(**{name: ["a", value]}) for value in ("b", "c", None, "")]
    assert len(set(checksums)) == len(checksums)


@pytest.mark.parametrize("name", ["queue_id", "flag", "sys_flag"])
def test_the_checksum_depends_on_each_number_column(name: str) -> None:
    first, second = (pa.array(values, pa.int32()) for values in ([1, 2], [1, 3]))
    assert checksum(**{name: first}) != checksum(**{name: second})


# ---- rows that `send` refuses, too --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer", "%RETRY%g", "%DLQ%g"]
)
def test_topics_of_the_broker_are_refused(topic: str) -> None:
    assert "belongs to the broker" in (first_broken(topic=[topic]) or "")
    assert first_broken(topic=["schedule_topic_xxxx"]) is None, "the case matters"


def property_map(*pairs: tuple[str, str | None]) -> pa.Array:
    """Make a column with one map of properties."""
    return pa.array([list(pairs)], pa.map_(pa.string(), pa.string()))


@pytest.mark.parametrize(
    "pairs",
    [
        [("a", "b\x02TIMER_DELIVER_MS\x011")],
        [("ok", "1"), ("a\x01b", "")],
        [("a\x02", None)],
        [("", "nameless")],
    ],
)
def test_a_property_with_a_separator_or_without_a_name_is_refused(
    pairs: list[tuple[str, str | None]],
) -> None:
    assert "U+0001" in (first_broken(properties=property_map(*pairs)) or "")


def test_map_faults_marks_the_rows_with_a_bad_pair_also_of_a_slice() -> None:
    good, bad = [("a", "1"), ("b", None)], [("a", "\x01")]
    column = pa.array([good, bad, None, [], bad, good], pa.map_(pa.string(), pa.string()))
    for start in range(6):
        faults = rules.map_faults(column.slice(start))
        assert faults.tolist() == [False, True, False, False, True, False][start:]
    assert not rules.map_faults(pa.array(["a\x011\x02"])).any(), "RocketMQ's text form is no map"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"keys": ["customer 4"]}, "keys: a key has no blanks"),
        ({"keys": ["a\tb"]}, "keys: a key has no blanks"),
        ({"keys": [["a", "customer 4"]]}, "keys: a key has no blanks"),
        ({"keys": [["a", ""]]}, "keys: a key has no blanks"),
        ({"keys": [["a", None]]}, "keys: a key has no blanks"),
        ({"tag": ["red "]}, "tag: text without control characters"),
        ({"tag": ["red\n"]}, "tag: text without control characters"),
        ({"tag": ["red\x02KEYS\x01a"]}, "tag: the characters U+0001 and U+0002"),
        ({"unique_key": ["\u00a0a"]}, "unique_key: text without control characters"),
        # This row breaks two rules. The rule of the keys comes first.
        ({"keys": ["a b"], "queue_id": pa.array([-9], pa.int32())}, "keys: a key has no blanks"),
    ],
)
def test_a_key_tag_or_id_with_white_space_or_separators_is_refused(
    columns: dict[str, object], text: str
) -> None:
    assert (first_broken(**columns) or "").startswith(text)


def test_one_key_or_a_list_of_keys_is_accepted() -> None:
    for keys in (
        ["customer-4"],
        [""],
        pa.array([None], pa.string()),
        [["a", "b"]],
        pa.array([[]], pa.list_(pa.string())),
    ):
        assert first_broken(keys=keys) is None


def test_a_list_of_keys_is_joined_with_blanks() -> None:
    lists = pa.array([["x y"], ["a", "b"], None, []], pa.list_(pa.string()))
    rows = scheduled_writer.to_table_columns(table(4, keys=lists), NOW_MS)
    assert rows.column("keys").to_pylist() == ["x y", "a b", None, ""]
    never_null = pa.array([["a", "b"]], pa.list_(pa.field("element", pa.string(), nullable=False)))
    rows = scheduled_writer.to_table_columns(table(1, keys=never_null), NOW_MS)
    assert rows.column("keys").to_pylist() == ["a b"]


def test_key_faults_marks_lists_with_a_bad_key_also_of_a_slice() -> None:
    lists = pa.array([["x y"], ["a", "b"], None, []], pa.list_(pa.string()))
    for start in range(4):
        assert rules.key_faults(lists.slice(start)).tolist() == [True, False, False, False][start:]


def test_stored_texts_are_accepted_with_as_stored() -> None:
    stored = {"keys": ["a b"], "tag": [" red"], "unique_key": ["a "]}
    assert first_broken(**stored) is not None and first_broken(as_stored=True, **stored) is None
    # The log stores texts. Lists and maps are checked all the same.
    assert first_broken(as_stored=True, keys=[["a b"]]) is not None
    assert first_broken(as_stored=True, properties=property_map(("a", "\x02"))) is not None


@pytest.mark.parametrize("number", [-3, 1024, 2**31, 2**32, -(2**40), 2**63 - 1])
def test_queue_out_of_range_is_refused_without_overflow(number: int) -> None:
    assert "queue_id: not between" in (first_broken(queue_id=pa.array([number], pa.int64())) or "")


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64()])
def test_a_queue_number_may_have_any_integer_type(kind: pa.DataType) -> None:
    rows = scheduled_writer.to_table_columns(table(queue_id=pa.array([7], kind)), NOW_MS)
    assert rows.column("queue_id").to_pylist() == [7]


def test_a_repeated_column_is_named_in_the_error() -> None:
    with pytest.raises(InvalidMessage, match="column body: there twice"):
        scheduled_writer.check_columns(schema("topic string,body binary,body string"))
