"""Tests of timeball.spark.source.options."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.io.clock import ManualClock
from timeball.model.errors import SetupError
from timeball.spark.source.options import (
    APPLIES_TO_READS,
    BATCH_ONLY,
    SCHEMAS,
    STREAM_ONLY,
    Pace,
    ReadOptions,
    WriteOptions,
    check_batch,
    check_stream,
    describe,
    divide_rows,
    read_options,
    split_range,
    write_options,
)


def test_options_that_are_not_given_have_their_defaults() -> None:
    assert read_options({}) == ReadOptions()
    assert write_options({}) == WriteOptions()


def test_values_are_parsed() -> None:
    parsed = read_options(
        {
            "FROM_SEQ": "7",
            "to_seq": "9",
            "kinds": "scheduled, 3",
            "columns": "seq,body",
            "endpoint": "grpc://h:1",
        }
    )
    assert (parsed.from_seq, parsed.to_seq, parsed.kinds, parsed.columns) == (7, 9, (2, 3), ("seq", "body"))
    assert read_options({"from_seq": "Watermark"}).from_seq == "watermark"


def test_kafka_and_delta_names_are_aliases_of_options() -> None:
    kafka = {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 23, "1": -2}}'}
    parsed = read_options({**kafka, "endingOffsets": '{"orders": {"0": 30, "1": -1}}', "minPartitions": "4"})
    assert (parsed.read, parsed.topic, parsed.min_partitions) == ("queue", "orders", 4)
    assert (parsed.from_offset, parsed.to_offset) == ({0: 23}, {0: 30})
    assert read_options({"subscribe": "orders", "startingoffsets": "earliest"}).from_offset == "first"
    log = read_options(
        {"startingOffsets": "earliest", "endingOffsets": "latest", "maxOffsetsPerTrigger": "9"}
    )
    assert (log.from_seq, log.to_seq, log.max_rows_per_batch) == ("first", None, 9)
    assert read_options({"STARTINGOFFSETS": "17"}).from_seq == 17
    assert read_options({"read": "pending", "versionAsOf": "3"}).version == 3
    assert read_options({"read": "Queue", "topic": "t", "startingOffsets": "latest"}).from_offset == "latest"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_rows_per_bach": "5"}, "option max_rows_per_bach: unknown"),
        ({"path": "/somewhere"}, "option path: unknown"),
        ({"max_rows_per_batch": "0"}, "option max_rows_per_batch='0': at least 1"),
        ({"rows_per_partition": "many"}, "option rows_per_partition='many': a whole number"),
        ({"from_seq": "-1"}, "option from_seq='-1': a sequence number"),
        ({"from_seq": "yesterday"}, "option from_seq='yesterday': .*latest"),
        ({"kinds": "scheduled,wish"}, "option kinds='scheduled,wish': .*release"),
        ({"kinds": "0"}, "option kinds"),
        (
            {"read": "everything"},
            "option read='everything': one of log, queue, pending, ledger, events, history, ranges",
        ),
        ({"endpoint": "localhost:7400"}, "option endpoint='localhost:7400': grpc://host:port"),
        ({"columns": "seq,seq"}, "option columns"),
        ({"columns": "seq,colour"}, "option columns: no column 'colour' when read=log"),
        ({"read": "pending", "columns": "kind"}, "option columns: no column 'kind' when read=pending"),
        ({"version": "3"}, "option version: only with read=pending or ledger, not with read=log"),
        (
            {"read": "pending", "Kinds": "scheduled"},
            "option Kinds: only with read=log, not with read=pending",
        ),
        ({"read": "pending", "version": "3", "timestamp": "5"}, "options version and timestamp"),
        ({"read": "ranges", "columns": "seq"}, "option columns: no column 'seq' when read=ranges"),
        ({"read": "queue"}, "option topic: missing; read=queue needs it"),
        ({"read": "queue", "topic": "t", "from_offset": "0:7"}, "option from_offset='0:7': first, latest"),
        ({"startingOffsets": "soon"}, "option startingOffsets='soon': .*latest"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger='0': at least 1"),
        ({"maxRowsPerTrigger": "5", "max_rows_per_batch": "6"}, "max_rows_per_batch, which is given as well"),
        ({"versionAsOf": "3"}, "option versionAsOf: only with read=pending or ledger, not with read=log"),
        ({"subscribe": "t", "startingOffsets": '{"u": {"0": 5}}'}, "the topic that is read is 't'"),
        ({"subscribe": "t", "startingOffsets": '{"t": {"0": -1}}'}, "option startingOffsets"),
        ({"subscribe": "t", "startingOffsets": '{"t": 5}'}, "option startingOffsets"),
        ({"option.read": "queue", "provider": "timeball"}, "write CREATE TEMPORARY VIEW"),
        ({"timestamp": "2030-01-31T09:00:00"}, "option timestamp='2030-01-31T09:00:00': names no time zone"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        read_options(options)


def test_write_options_ignore_options_that_spark_adds() -> None:
    assert write_options({"checkpointLocation": "/c", "queryName": "q"}) == WriteOptions()
    with pytest.raises(SetupError, match="option on_invalid='ignore': one of fail, drop"):
        write_options({"on_invalid": "ignore"})
    with pytest.raises(SetupError, match="option from_seq: unknown"):
        write_options({"from_seq": "1"})


def test_options_of_streams_are_refused_for_batches_and_the_reverse() -> None:
    with pytest.raises(SetupError, match="option few_rows: only for streams"):
        check_batch(read_options({"few_rows": "5"}))
    with pytest.raises(SetupError, match="option to_seq: only for batch reads"):
        check_stream(read_options({"to_seq": "5"}))
    with pytest.raises(SetupError, match=r"option read=ledger: a batch source; use spark\.read"):
        check_stream(read_options({"read": "ledger"}))
    check_batch(read_options({"to_seq": "5"}))
    check_stream(read_options({"few_rows": "5"}))


def test_every_option_that_is_not_for_all_reads_says_for_which() -> None:
    assert set(APPLIES_TO_READS) <= set(ReadOptions.__struct_fields__)
    assert {name for fits in APPLIES_TO_READS.values() for name in fits} <= set(SCHEMAS)
    assert {*BATCH_ONLY, *STREAM_ONLY} <= set(APPLIES_TO_READS)


def test_every_option_is_described() -> None:
    assert set(describe()) == {*ReadOptions.__struct_fields__, *WriteOptions.__struct_fields__}


def test_a_few_rows_wait_for_their_time_and_many_do_not() -> None:
    clock = ManualClock()
    options = {"min_rows_per_batch": "100", "max_trigger_delay_ms": "1000", "few_rows": "10"}
    pace = Pace(read_options(options), clock)
    assert pace.is_worth_a_batch(100) and not pace.is_worth_a_batch(99)
    clock.advance(1_000)
    assert pace.is_worth_a_batch(10) and not pace.is_worth_a_batch(9)
    pace.begin_batch()
    assert not pace.is_worth_a_batch(10)


@given(st.integers(0, 1000), st.integers(-5, 1000), st.integers(1, 300))
def test_pieces_cover_the_range_once(begin: int, span: int, rows: int) -> None:
    parts = split_range(begin, begin + span, rows)
    covered = [seq for low, high in parts for seq in range(low, high)]
    assert covered == list(range(begin, begin + span))
    assert all(0 < high - low <= rows for low, high in parts)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 10**6)), st.integers(0, 10**6))
def test_shares_use_the_limit_and_no_part_gives_more_than_it_has(lag: dict[int, int], rows: int) -> None:
    taken = divide_rows(lag, rows)
    assert sum(taken.values()) == min(rows, sum(lag.values()))
    assert all(0 <= taken[queue] <= lag[queue] for queue in lag)


def test_shares_are_proportional_to_what_each_part_has() -> None:
    assert divide_rows({0: 900, 1: 100, 2: 0}, 100) == {0: 90, 1: 10, 2: 0}
    assert divide_rows({("g1", 0): 10, ("g2", 0): 30}, 4) == {("g1", 0): 1, ("g2", 0): 3}
