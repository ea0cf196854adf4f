"""Batches from the values of a program: columns, ids, sizes, and refusals before a send."""

from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.client import outgoing
from timeball.client.outgoing import batches, complete, delay_column, due_column
from timeball.model.errors import InvalidDelay

NOW_MS = 1_700_000_000_000
DUE_MS = 1_800_000_000_000


@pytest.mark.parametrize("name", ["after", "at", "delay_ms", "due_ms"])
def test_a_table_with_a_null_time_is_refused_with_the_number_of_its_row(name: str) -> None:
    """A null could be read as immediate delivery, which is what a dict without the name means."""
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
def test_times_and_durations_of_any_unit_and_size_become_milliseconds_rounded_up(
    unit: str, values: list[int], ms: list[int]
) -> None:
    """Times before 1970 and after 9999 are converted too, for which Arrow's cast and ceil_temporal would overflow.

    The broker refuses them later.
    """
    numbers = pa.array(values, pa.int64())
    assert due_column(numbers.cast(pa.timestamp(unit, "UTC"))).to_pylist() == ms
    assert delay_column(numbers.cast(pa.duration(unit))).to_pylist() == ms


def test_seconds_that_do_not_fit_into_64_bits_as_milliseconds_are_refused() -> None:
    with pytest.raises(InvalidDelay, match="at of row 1 is beyond"):
        due_column(pa.array([5, 2**62], pa.timestamp("s", "UTC")))


@given(
    st.lists(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1)), min_size=1),  # noqa: DTZ001
    st.sampled_from(["us", "ns"]),
)
def test_a_timestamp_becomes_a_due_time_at_most_a_millisecond_later(
    instants: list[datetime], unit: str
) -> None:
    column = pa.array([at.replace(tzinfo=UTC) for at in instants], pa.timestamp(unit, "Europe/Berlin"))
    due = due_column(column).to_pylist()
    for at, due_ms in zip(instants, due, strict=True):
        at_us = (at.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert 0 <= due_ms * 1_000 - at_us < 1_000


def test_an_array_with_a_datetime_without_a_zone_is_refused() -> None:
    """pyarrow accepts datetimes with and without a zone in one array, and would take the latter as UTC."""
    local = datetime(2040, 1, 1, 9)  # noqa: DTZ001
    zoned = local.replace(tzinfo=timezone(timedelta(hours=-5)))
    with pytest.raises(InvalidDelay, match="whose noon"):
        due_column(pa.array([local, zoned]))


def test_an_at_column_that_is_no_timestamp_with_a_zone_is_refused() -> None:
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
def test_durations_become_milliseconds_rounded_up(column: pa.Array, ms: list[int | None]) -> None:
    assert delay_column(column).to_pylist() == ms


@pytest.mark.parametrize("column", [pa.array(["5m"]), pa.array([5]), pa.array([0.29])])
def test_an_after_column_that_is_no_duration_is_refused(column: pa.Array) -> None:
    with pytest.raises(InvalidDelay, match="column 'after'"):
        delay_column(column)


def test_a_table_gets_the_topic_ids_and_delays_that_it_lacks() -> None:
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


def test_a_table_with_two_columns_for_the_delay_is_refused() -> None:
    table = pa.table({"body": ["a"], "after": pa.array([1], pa.duration("s")), "delay_ms": [1]})
    with pytest.raises(InvalidDelay, match="'after' and 'delay_ms'"):
        list(batches(table, "t", 10, NOW_MS))


@given(st.integers(0, 50), st.integers(1, 20))
def test_rows_are_divided_into_batches_and_none_is_lost(count: int, batch_rows: int) -> None:
    body = [b"%d" % i for i in range(count)]
    table = pa.table({"body": pa.array(body, pa.binary())})
    sources = [
        table,
        pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks()),
        table.to_reader(),
    ]
    for rows in sources:
        results = list(batches(rows, "t", batch_rows, NOW_MS))
        assert all(0 < batch.num_rows <= batch_rows for batch in results)
        assert [value for batch in results for value in batch.column("body").to_pylist()] == body


def test_views_and_dictionaries_are_converted_to_plain_columns() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"x", b"y"], pa.binary_view()),
            "tag": pa.array(["a", None], pa.string_view()),
            "keys": pa.array(["k", "k"]).dictionary_encode(),
        }
    )
    sent = complete(batch, "t", 1)
    assert [str(sent.schema.field(name).type) for name in batch.schema.names] == [
        "large_binary", "large_string", "string",
    ]  # fmt: skip
    assert sent.select(batch.schema.names).to_pydict() == {
        "body": [b"x", b"y"],
        "tag": ["a", None],
        "keys": ["k"] * 2,
    }


def test_batches_with_large_rows_are_divided_by_size() -> None:
    table = pa.table({"body": [bytes(outgoing.BATCH_BYTES // 4)] * 10})
    parts = list(batches(table, "t", 1_000, NOW_MS))
    assert sum(batch.num_rows for batch in parts) == 10
    assert max(batch.nbytes for batch in parts) <= outgoing.BATCH_BYTES
