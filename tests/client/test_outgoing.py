"""Batches from the values of a program: columns, ids, sizes, and refusals before a send."""

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.client import outgoing
from timeball.client.outgoing import (
    ONE_SCHEMA,
    batches,
    complete,
    delay_column,
    due_column,
    from_dicts,
    one,
)
from timeball.client.rows import outgoing as outgoing_message
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import decode_properties

NOW_MS = 1_700_000_000_000
DUE_MS = 1_800_000_000_000


def single(body: object = b"x", **fields: object) -> dict[str, object]:
    given = {"tag": None, "keys": None, "properties": None, **fields}
    message = outgoing_message(
        "t",
        body,
        given["tag"],
        given["keys"],
        given["properties"],
        "id",
        None,
        DUE_MS,  # type: ignore[arg-type]
    )
    batch = one(message, NOW_MS)
    assert batch.schema == ONE_SCHEMA
    return batch.to_pylist()[0]  # type: ignore[no-any-return]


def test_a_single_message_becomes_a_batch_of_one_row() -> None:
    row = single("héllo", tag="a", keys=["k1", "k2"], properties={"x": "1", "y": ""})
    assert row["body"] == "héllo".encode()
    assert row["keys"] == "k1 k2" and row["tag"] == "a"
    assert decode_properties(str(row["properties"])) == {"x": "1", "y": ""}
    assert (row["topic"], row["unique_key"], row["born_ms"]) == ("t", "id", NOW_MS)
    assert (row["due_ms"], row["delay_ms"]) == (DUE_MS, None)
    assert single(bytearray(b"ab"))["body"] == single(memoryview(b"ab"))["body"] == b"ab"
    assert single(properties={})["properties"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"body": 5},
        {"body": None},
        {"tag": 5},
        {"tag": "\ud800"},
        {"keys": ["a b"]},
        {"keys": [""]},
        {"keys": [5]},
        {"properties": {"a": 5}},
        {"properties": {"": "x"}},
        {"properties": {"a": "x\x02b\x01c"}},
    ],
)
def test_messages_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidMessage):
        single(**fields)


def test_dicts_take_the_arguments_of_send() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    batch = complete(
        from_dicts(
            [
                {"topic": "t", "body": "a", "after": "1m", "message_id": "mine"},
                {"topic": "t", "body": b"b", "at": at, "properties": {"k": "v"}, "keys": ["x", "y"]},
                {"topic": "t", "body": b"c", "due_ms": 1_767_225_600_007, "queue_id": 3},
            ]
        ),
        None,
        NOW_MS,
        are_keys_joined=True,
    )
    columns = batch.to_pydict()
    assert columns["delay_ms"] == [60_000, None, None]
    assert columns["due_ms"] == [None, 1_767_225_600_000, 1_767_225_600_007]
    assert columns["body"] == [b"a", b"b", b"c"]
    assert columns["queue_id"] == [None, None, 3]
    assert columns["keys"] == [None, "x y", None]
    assert columns["unique_key"][0] == "mine" and len(columns["unique_key"][1]) == 32
    assert columns["born_ms"] == [NOW_MS] * 3
    assert "at" not in columns and "after" not in columns


def test_dicts_with_different_keys_have_one_schema() -> None:
    rows = [{"body": "a"}, {"body": "b", "tag": "x"}, {"body": "c", "after": "5s"}]
    schemas = {batch.schema.to_string() for batch in batches(rows, "t", 1, NOW_MS)}
    assert len(schemas) == 1


@pytest.mark.parametrize("name", ["after", "at", "delay_ms", "due_ms"])
def test_a_time_that_is_null_is_refused_and_the_row_named(name: str) -> None:
    """A missing time would mean immediate delivery. A dict without the name does mean that."""
    rows = [{"body": "a", "after": "1m"}, {"body": "b"}, {"body": "c", name: None}]
    with pytest.raises(InvalidDelay, match=f"{name} of row 2 is None"):
        list(batches(rows, "t", 1_000, NOW_MS))
    with pytest.raises(InvalidDelay, match=f"{name} of row 2 is None"):
        list(batches(iter(rows), "t", 2, NOW_MS))
    types = {"after": pa.duration("s"), "at": pa.timestamp("ms", "UTC")}
    column = pa.array([1_800_000_000_000, 1_800_000_000_000, None], pa.int64()).cast(
        types.get(name, pa.int64())
    )
    table = pa.table({"body": ["a", "b", "c"], name: column})
    with pytest.raises(InvalidDelay, match=f"{name} of row 2 is null"):
        list(batches(pa.concat_tables([table.slice(0, 1), table.slice(1)]), "t", 1_000, NOW_MS))


@pytest.mark.parametrize(
    ("unit", "values", "ms"),
    [
        ("s", [-5, 0, 253_402_300_799], [-5_000, 0, 253_402_300_799_000]),
        ("ms", [-5, 2**62], [-5, 2**62]),
        ("us", [-1, 1, 2**63 - 1, -(2**63)], [0, 1, 9_223_372_036_854_776, -9_223_372_036_854_775]),
        ("ns", [-1, 1, 2**63 - 1, -(2**63)], [0, 1, 9_223_372_036_855, -9_223_372_036_854]),
    ],
)
def test_columns_of_times_of_any_unit_and_size(unit: str, values: list[int], ms: list[int]) -> None:
    """Before 1970, and after 2262 and 9999: the broker refuses them. Arrow's cast and ceil_temporal overflow."""
    numbers = pa.array(values, pa.int64())
    assert due_column(numbers.cast(pa.timestamp(unit, "UTC"))).to_pylist() == ms
    assert delay_column(numbers.cast(pa.duration(unit))).to_pylist() == ms


def test_seconds_beyond_64_bits_of_milliseconds_are_refused() -> None:
    with pytest.raises(InvalidDelay, match="at of row 1 is beyond"):
        due_column(pa.array([5, 2**62], pa.timestamp("s", "UTC")))


def test_dicts_with_invalid_values_are_refused() -> None:
    with pytest.raises(InvalidDelay, match="two due times"):
        from_dicts([{"body": "a", "after": "1s", "at": 2**40}])
    with pytest.raises(InvalidDelay, match="two due times"):
        from_dicts([{"body": "a", "after": "1s", "delay_ms": 5}])
    with pytest.raises(InvalidMessage, match="column 'queue_id'"):
        from_dicts([{"body": "a", "queue_id": 1}, {"body": "a", "queue_id": "x"}])
    for wrong in ("text", {"body": "a"}):
        with pytest.raises(InvalidMessage, match="list of dicts"):
            list(batches(wrong, "t", 1, NOW_MS))  # type: ignore[arg-type]


@given(
    st.lists(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1)), min_size=1),  # noqa: DTZ001
    st.sampled_from(["us", "ns"]),
)
def test_timestamp_columns_are_never_early(instants: list[datetime], unit: str) -> None:
    column = pa.array([at.replace(tzinfo=UTC) for at in instants], pa.timestamp(unit, "Europe/Berlin"))
    due = due_column(column).to_pylist()
    for at, ms in zip(instants, due):
        micros = (at.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert 0 <= ms * 1_000 - micros < 1_000


def test_both_passes_of_a_repeated_hour_are_sent() -> None:
    """Python compares and hashes them as equal, so a set or a cache by datetime would lose one."""
    zone = ZoneInfo("Europe/Berlin")
    first, second = (datetime(2040, 10, 28, 2, 30, tzinfo=zone, fold=fold) for fold in (0, 1))
    assert len({first, second}) == 1
    for passes in ((first, second), (second, first)):
        batch = from_dicts([{"body": "a", "at": at} for at in passes])
        one, other = batch.column("due_ms").to_pylist()
        assert other - one == (3_600_000 if passes[0] is first else -3_600_000)


def test_a_datetime_without_a_zone_is_refused_beside_others() -> None:
    """pyarrow takes both in one array, and reads those without a time zone as UTC."""
    local = datetime(2040, 1, 1, 9)  # noqa: DTZ001
    zoned = local.replace(tzinfo=timezone(timedelta(hours=-5)))
    for pair in ((local, zoned), (zoned, local)):
        with pytest.raises(InvalidDelay, match="without a time zone"):
            from_dicts([{"body": "a", "at": at} for at in pair])
    with pytest.raises(InvalidDelay, match="whose noon"):
        due_column(pa.array([local, zoned]))


def test_timestamp_columns_need_a_zone() -> None:
    with pytest.raises(InvalidDelay, match="whose noon"):
        due_column(pa.array([0], pa.timestamp("ms")))
    with pytest.raises(InvalidDelay, match="timestamp with a time zone"):
        due_column(pa.array(["2030-01-01"]))


@pytest.mark.parametrize(
    ("column", "ms"),
    [
        (pa.array([timedelta(microseconds=1), None], pa.duration("us")), [1, None]),
        (pa.array([timedelta(seconds=2)], pa.duration("s")), [2_000]),
        (pa.array([timedelta(milliseconds=3)], pa.duration("ms")), [3]),
        (pa.array([1], pa.duration("ns")), [1]),
    ],
)
def test_durations_are_converted_to_milliseconds(column: pa.Array, ms: list[int | None]) -> None:
    assert delay_column(column).to_pylist() == ms


@pytest.mark.parametrize("column", [pa.array(["5m"]), pa.array([5]), pa.array([0.29])])
def test_a_delay_column_of_another_type_is_refused(column: pa.Array) -> None:
    with pytest.raises(InvalidDelay, match="column 'after'"):
        delay_column(column)


def test_tables_are_completed() -> None:
    table = pa.table(
        {
            "body": ["a", "b", "c"],
            "unique_key": ["x", None, "z"],
            "after": pa.array([1, 2, 3], pa.duration("s")),
        }
    )
    (batch,) = batches(table, "t", 10, NOW_MS)
    columns = batch.to_pydict()
    assert columns["topic"] == ["t"] * 3 and columns["delay_ms"] == [1_000, 2_000, 3_000]
    assert columns["unique_key"][::2] == ["x", "z"] and len(columns["unique_key"][1]) == 32
    with pytest.raises(InvalidDelay, match="'after' and 'delay_ms'"):
        list(batches(table.append_column("delay_ms", [[1, 2, 3]]), "t", 10, NOW_MS))


@given(st.integers(0, 50), st.integers(1, 20))
def test_rows_are_cut_and_none_is_lost(count: int, batch_rows: int) -> None:
    body = [b"%d" % i for i in range(count)]
    table = pa.table({"body": pa.array(body, pa.binary())})
    sources = [
        table,
        pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks()),
        table.to_reader(),
    ]
    for rows in [*sources, ({"body": one_body} for one_body in body)]:
        cut = list(batches(rows, "t", batch_rows, NOW_MS))
        assert all(0 < batch.num_rows <= batch_rows for batch in cut)
        assert [value for batch in cut for value in batch.column("body").to_pylist()] == body


def test_views_and_dictionaries_become_plain_columns() -> None:
    given = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"x", b"y"], pa.binary_view()),
            "tag": pa.array(["a", None], pa.string_view()),
            "keys": pa.array(["k", "k"]).dictionary_encode(),
        }
    )
    sent = complete(given, "t", 1)
    assert [str(sent.schema.field(name).type) for name in given.schema.names] == [
        "large_binary", "large_string", "string",
    ]  # fmt: skip
    assert sent.select(given.schema.names).to_pydict() == {
        "body": [b"x", b"y"],
        "tag": ["a", None],
        "keys": ["k"] * 2,
    }


def test_large_rows_are_cut_by_size() -> None:
    table = pa.table({"body": [bytes(outgoing.BATCH_BYTES // 4)] * 10})
    cut = list(batches(table, "t", 1_000, NOW_MS))
    assert sum(batch.num_rows for batch in cut) == 10
    assert max(batch.nbytes for batch in cut) <= outgoing.BATCH_BYTES
