"""Tests of timeball.spark.jobs.bulk: the rules as Spark expressions, and due times of all types."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from tests.local_time_oracle import CHANGED_ZONES, changes, first_instant_us, local_times_around

from timeball.model import limits, rules
from timeball.model.errors import InvalidMessage
from timeball.model.message import decode_properties
from timeball.spark.jobs import bulk
from timeball.spark.jobs.bulk import Columns, check, screen
from timeball.spark.source import scheduled_writer

NOW_MS = 1_800_000_000_000
MAX_DUE_MS = NOW_MS + limits.DELAY_MS_MAX
KEYS, KEYS_BYTES = limits.KEYS_PER_MESSAGE_MAX, limits.KEYS_BYTES_MAX

# Values at the edges of every rule, for each column. The first value of each column breaks no rule.
EDGES: dict[str, list[object]] = {
    "topic": [
        "t",
        None,
        "",
        "SCHEDULE_TOPIC_XXXX",
        "%DLQ%g",
        "rmq_sys_x",
        "x%DLQ%",
        "a b",
        "ä",
        "a\n",
        "a\n\n",
        "t" * 127,
        "t" * 128,
        "%|a-Z_9",
    ],
    "body": [b"x", None, b"", b"x" * limits.BODY_BYTES_MAX, b"x" * (limits.BODY_BYTES_MAX + 1)],
    "due_ms": [NOW_MS, 0, -1, NOW_MS - 5, MAX_DUE_MS, MAX_DUE_MS + 1, limits.INSTANT_MS_MAX + 1, 2**62],
    "tag": [
        None,
        "",
        " t",
        "t ",
        "t\u2028",
        "a t",
        "t\x02a",
        "t\n",
        "t" * 255,
        "t" * 256,
        "ß" * 127,
        "ß" * 128,
    ],
    "keys": [
        None,
        "a b",
        " ".join("k" * KEYS),
        " ".join("k" * (KEYS + 1)),
        "k" * KEYS_BYTES,
        "k" * (KEYS_BYTES + 1),
        "customer-4",
        "a\tb",
        "a\x01b",
        "a\u00a0b",
        "a\u2028",
        " " * (KEYS - 1),
        " " * KEYS,
    ],
    "unique_key": [None, "", "u ", "u\x02", "\x7f", "u" * 255, "u" * 256],
    "properties": [None, "", "p" * 32_767, "p" * 32_768],
}
TYPES = {"body": pa.binary(), "due_ms": pa.int64()}
SAMPLE_ROWS = 400


def edge_rows() -> pa.Table:
    """Make rows with one edge value each, and rows with random edge values in all columns. Large values are rare."""
    rng = np.random.default_rng(1)
    names = list(EDGES)
    rows = [
        {name: EDGES[name][0] for name in names} | {name: value} for name in names for value in EDGES[name]
    ]
    small = {name: [v for v in EDGES[name] if not isinstance(v, bytes) or len(v) < 9] for name in names}
    for _ in range(SAMPLE_ROWS):
        rows.append({name: small[name][int(rng.integers(len(small[name])))] for name in names})
    return pa.table(
        {name: pa.array([row[name] for row in rows], TYPES.get(name, pa.string())) for name in names}
    )


COLUMNS = Columns(
    due="due_ms",
    topic="topic",
    keys="keys",
    tag="tag",
    unique_key="unique_key",
    properties="properties",
)


def reasons_in_the_sink(rows: pa.Table) -> list[str | None]:
    """Find for each row the text of the rule by which the sink refuses it."""
    broken = scheduled_writer.find_broken_rules(rows, scheduled_writer.to_table_columns(rows, NOW_MS), NOW_MS)
    return [None if index < 0 else rules.RULES[index].text for index in broken]


@pytest.mark.smoke
@pytest.mark.spark
def test_spark_expressions_and_sink_reject_the_same_rows(spark: SparkSession) -> None:
    """Both name the same rule, too. If they differed, the sink could refuse rows that the check had accepted."""
    rows = edge_rows()
    expected = reasons_in_the_sink(rows)
    result = screen(spark.createDataFrame(rows), COLUMNS, NOW_MS).select("reason").toArrow().to_pydict()
    assert result["reason"] == expected
    # All rules but those of the queue, of a missing time and of maps, and None for rows that break none.
    assert len(set(expected)) == len(rules.RULES) - 3 + 1


KEY_LISTS: list[list[str | None] | None] = [
    None, [], ["a"], ["a", "b"], [""], ["a", None], ["a", "customer 4"], ["a\u2003b"], ["a\n"],
    ["k"] * KEYS, ["k"] * (KEYS + 1), ["k" * KEYS_BYTES], ["k" * KEYS_BYTES, "k"],
]  # fmt: skip


@pytest.mark.spark
def test_lists_of_keys_are_judged_as_in_the_sink(spark: SparkSession) -> None:
    count = len(KEY_LISTS)
    rows = pa.table(
        {
            "topic": ["t"] * count, "body": pa.array([b"b"] * count), "due_ms": [NOW_MS] * count,
            "keys": pa.array(KEY_LISTS, pa.list_(pa.string())),
        }
    )  # fmt: skip
    expected = reasons_in_the_sink(rows)
    assert [text is None for text in expected] == [*[True] * 4, *[False] * 5, True, False, True, False]
    result = screen(spark.createDataFrame(rows), Columns(due="due_ms", topic="topic", keys="keys"), NOW_MS)
    assert result.select("reason").toArrow().to_pydict()["reason"] == expected
    # The sink gets the keys as lists, so a key with a blank remains one key.
    written = bulk.with_lists_of_keys(result.where("reason is null")).select("keys").toArrow()
    assert written.column("keys").to_pylist() == [
        None,
        None,
        ["a"],
        ["a", "b"],
        ["k"] * KEYS,
        ["k" * KEYS_BYTES],
    ]


PAIRS: list[list[tuple[str, str | None]] | None] = [
    None, [], [("a", "1")], [("a", None)], [("", "1")], [("a", "1"), ("b\x01c", "1")], [("a", "\x02TIMING\x011")],
]  # fmt: skip


@pytest.mark.spark
def test_maps_whose_pairs_cannot_be_properties_are_found_as_in_the_sink(spark: SparkSession) -> None:
    count = len(PAIRS)
    rows = pa.table(
        {
            "topic": ["t"] * count, "body": pa.array([b"b"] * count), "due_ms": [NOW_MS] * count,
            "properties": pa.array(PAIRS, pa.map_(pa.string(), pa.string())),
        }
    )  # fmt: skip
    expected = reasons_in_the_sink(rows)
    assert [text is None for text in expected] == [True, True, True, True, False, False, False]
    columns = Columns(due="due_ms", topic="topic", properties="properties")
    frame = spark.createDataFrame(rows)
    assert screen(frame, columns, NOW_MS).select("reason").toArrow().to_pydict()["reason"] == expected


@pytest.mark.spark
def test_a_column_that_is_there_twice_is_named(spark: SparkSession) -> None:
    frame = spark.sql("select 1 as a, 2 as A, 'b' as body, current_timestamp() as due")
    check(frame.schema, Columns(topic_name="t"))  # neither is used
    with pytest.raises(InvalidMessage, match="column A, a: there twice"):
        check(frame.schema, Columns(topic_name="t", body=None))
    with pytest.raises(InvalidMessage, match="column a: there twice"):
        check(frame.schema, Columns(topic_name="t", keys="a"))


@pytest.mark.spark
def test_differing_rule_is_detected(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of test_spark_expressions_and_sink_reject_the_same_rows."""
    real = bulk.breaks

    def off_by_one(rule: rules.Rule, now_ms: int) -> Column:
        return f.octet_length("tag") > 254 if rule.column == "tag" else real(rule, now_ms)

    monkeypatch.setattr(bulk, "breaks", off_by_one)
    with pytest.raises(AssertionError):
        test_spark_expressions_and_sink_reject_the_same_rows(spark)


def due_of(
    spark: SparkSession, values: list[str], zone: str | None = None
) -> list[tuple[int | None, str | None]]:
    """Compute (due_ms, reason) of rows whose due times are these SQL expressions of one type."""
    stacked = ", ".join(f"({number}, {value})" for number, value in enumerate(values))
    frame = spark.sql(f"select number, due, 'b' as body from values {stacked} as v(number, due)")
    result = screen(frame, Columns(topic_name="t", zone=zone), NOW_MS)
    rows = result.select("row.number", "due_ms", "reason").collect()
    return [(row["due_ms"], row["reason"]) for row in sorted(rows, key=lambda row: row["number"])]


def ms(text: str) -> int:
    """The milliseconds of an ISO time."""
    return round(dt.datetime.fromisoformat(text).timestamp() * 1000)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("zone", "instants"),
    [
        (None, {"1800000000123L": 1_800_000_000_123, "100000000000L": limits.DUE_MS_MIN}),
        (
            None,
            {
                "timestamp'2027-03-01 09:00:00.000001+01:00'": ms("2027-03-01T09:00:00.001+01:00"),
                "timestamp'2027-03-01 09:00:00.002+01:00'": ms("2027-03-01T09:00:00.002+01:00"),
            },
        ),
        (
            "Europe/Paris",
            {
                "timestamp_ntz'2027-03-01 09:00:00.5'": ms("2027-03-01T09:00:00.500+01:00"),
                "timestamp_ntz'2027-07-01 09:00:00'": ms("2027-07-01T09:00:00+02:00"),
                "timestamp_ntz'2027-03-28 02:30:00'": ms("2027-03-28T03:00:00+02:00"),  # in a gap
                "timestamp_ntz'2027-10-31 02:30:00'": ms("2027-10-31T02:30:00+02:00"),  # twice
            },
        ),
        ("Asia/Tokyo", {"date'2027-07-01'": ms("2027-07-01T00:00:00+09:00")}),
        (
            "Asia/Tokyo",
            {
                "'2027-03-01T09:00:00Z'": ms("2027-03-01T09:00:00+00:00"),
                "' 2027-03-01 09:00:00.25+05:30 '": ms("2027-03-01T09:00:00.250+05:30"),
                "'2027-03-01T09:00:00+01'": ms("2027-03-01T09:00:00+01:00"),
                "'2027-03-01T09:00:00'": ms("2027-03-01T09:00:00+09:00"),
                "'2027-03-01'": ms("2027-03-01T00:00:00+09:00"),
                "'2027-3-1 9:00'": ms("2027-03-01T09:00:00+09:00"),
                "'2027-03-01 09:00:00 UTC'": ms("2027-03-01T09:00:00+00:00"),
                "'2027-03-01T09:00Z'": ms("2027-03-01T09:00:00+00:00"),
                "'2027-3-1 9:00 UTC'": ms("2027-03-01T09:00:00+00:00"),
                "'2027-03-01 09:00-05:30'": ms("2027-03-01T09:00:00-05:30"),
                "'2027-03-01T09:00:00.0000001Z'": ms("2027-03-01T09:00:00.001+00:00"),
                "'2027-03-01T09:00:00.123000001'": ms("2027-03-01T09:00:00.124+09:00"),
                "'2027-03-01T09:00:00.123000000'": ms("2027-03-01T09:00:00.123+09:00"),
                "'1800000000123'": 1_800_000_000_123,
            },
        ),
    ],
)
def test_due_time_of_each_column_type(
    spark: SparkSession, zone: str | None, instants: dict[str, int]
) -> None:
    assert due_of(spark, list(instants), zone) == [(due, None) for due in instants.values()]


@pytest.mark.spark
def test_session_time_zone_has_no_effect(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        at = ms("2027-07-01T09:00:00+02:00")
        assert due_of(spark, ["timestamp_ntz'2027-07-01 09:00:00'"], "Europe/Paris") == [(at, None)]
        texts = ["'2027-07-01 09:00:00'", "'2027-07-01T07:00:00Z'"]
        assert due_of(spark, texts, "Europe/Paris") == [(at, None)] * 2
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")


@pytest.mark.spark
def test_text_without_due_time_is_rejected(spark: SparkSession) -> None:
    wrong = {
        "cast(null as string)": bulk.NO_DUE_TIME,
        "'tomorrow'": bulk.NO_DUE_TIME,
        "''": bulk.NO_DUE_TIME,
        "'2027-02-30T09:00:00Z'": bulk.NO_DUE_TIME,
        "'2027-03-01T09:00:00'": bulk.NO_ZONE,
        "'2027-03-01'": bulk.NO_ZONE,
        "'-5'": rules_text("1970"),
        "'1800000000'": rules_text("seconds"),
        "'20300131'": rules_text("a date such as"),
        "'2030'": rules_text("seconds"),
        "'9999999999999999999999'": bulk.NO_DUE_TIME,
    }
    assert [why for _, why in due_of(spark, list(wrong))] == list(wrong.values())
    for kind in ("timestamp", "bigint"):
        assert due_of(spark, [f"cast(null as {kind})"]) == [(None, bulk.NO_DUE_TIME)]


@pytest.mark.spark
def test_a_text_that_is_not_fully_understood_is_rejected(spark: SparkSession) -> None:
    """Spark's own cast to a time without zone skips the zone, and reads a year as its first day."""
    texts = [
        "2027-12-01 09:00 GMT", "2027-12-01 09:00 PST", "2027-12-01T09:00:00 Europe/Paris", "2027-12-01 09:00+2",
        "2027-12-01T09:00:00[Europe/Paris]", "2027-12-01T09:00:00 GMT+2", "2027-12-01T09:00:00+25:00", "2027-12",
        "2027-12-01T", "T09:00", "09:00", "2027-12-01 09:00 tomorrow", "2027-12-01Z", "1/12/2027", "2027-12-01 24:00",
        "now", "2027-12-01 09:00 AM", "+12027-12-01 09:00",
    ]  # fmt: skip
    result = due_of(spark, [f"'{text}'" for text in texts], "Europe/Paris")
    assert result == [(None, bulk.NO_DUE_TIME)] * len(texts)


@pytest.mark.spark
@pytest.mark.parametrize("zone", [*CHANGED_ZONES, "Europe/Paris", "Australia/Lord_Howe", "Factory", "ROC"])
def test_local_time_agrees_with_the_oracle(spark: SparkSession, zone: str) -> None:
    """Around each change of the coming years, as a time and as text; Java has other rules, or no such zone."""
    times = [local for at in changes(zone, 2026, 2029) for local in local_times_around(at, zone)]
    times += [dt.datetime.fromisoformat(text) for text in ("2026-12-01T08:00", "2027-07-01T08:00")]
    expected = [(-(-first_instant_us(local, zone) // 1_000), None) for local in times]
    assert due_of(spark, [f"timestamp_ntz'{local}'" for local in times], zone) == expected
    assert due_of(spark, [f"'{local}'" for local in times], zone) == expected


@pytest.mark.spark
def test_due_times_of_rare_types(spark: SparkSession) -> None:
    """Before 1970, beyond the nanoseconds of 64 bits (2262), and at both ends of Spark's calendar."""
    wrong = {
        "timestamp_ntz'1969-12-31 23:59:59.999'": rules_text("1970"),
        "timestamp_ntz'0001-01-01 00:00:00'": rules_text("1970"),
        "timestamp_ntz'-99999-01-01 00:00:00'": rules_text("1970"),
        "timestamp_ntz'2262-04-12 00:00:00'": rules_text("days ahead"),
        "timestamp_ntz'2500-01-01 00:00:00'": rules_text("days ahead"),
        "timestamp_ntz'9999-12-31 23:59:59.999999'": rules_text("days ahead"),
        "timestamp_ntz'+294247-01-10 04:00:54.775807'": rules_text("days ahead"),
    }
    assert [why for _, why in due_of(spark, list(wrong), "Europe/Paris")] == list(wrong.values())
    aware = {value.replace("_ntz", "").replace("'", "' ", 1).strip(): why for value, why in wrong.items()}
    assert [why for _, why in due_of(spark, list(aware))] == list(aware.values())
    texts = {
        "'1969-12-31T23:59:59Z'": rules_text("1970"),
        "'0001-01-01'": rules_text("1970"),
        "'2500-01-01'": rules_text("days ahead"),
        "'9999-12-31T23:59:59.9999999'": rules_text("days ahead"),
        "'9223372036854775807'": rules_text("days ahead"),
        "'-9223372036854775808'": rules_text("1970"),
        "'10000-01-01'": bulk.NO_DUE_TIME,
    }
    assert [why for _, why in due_of(spark, list(texts), "Europe/Paris")] == list(texts.values())


def rules_text(part: str) -> str:
    """The text of the only rule of due times that contains `part`."""
    (result,) = [rule.text for rule in rules.RULES if rule.column == "due_ms" and part in rule.text]
    return result


@pytest.mark.spark
def test_bodies_and_properties_from_columns(spark: SparkSession) -> None:
    frame = spark.sql(
        "select 1800000000000L as due, 'a' as k, 7 as n, map('x', 'y', 'z', null) as p, struct(1 as i) as s"
    )
    given = Columns(topic_name="t", body=None, keys="k", properties="p")
    row = screen(frame, given, NOW_MS).collect()[0]
    assert (row["body"], row["keys"]) == ('{"n":7,"s":{"i":1}}', "a")
    assert decode_properties(row["properties"]) == {"x": "y", "z": ""}
    assert screen(frame, Columns(topic_name="t", body="s"), NOW_MS).collect()[0]["body"] == '{"i":1}'
    assert screen(frame, Columns(topic_name="t", body="n"), NOW_MS).collect()[0]["body"] == "7"
    assert screen(frame, Columns(topic="k", body="n"), NOW_MS).select("topic", "row.s").collect()[0][0] == "a"


def check_columns(frame: DataFrame, **columns: str | None) -> None:
    """Check that the frame can be written with these `Columns`. They have a topic if no other is given."""
    bulk.check(frame.schema, Columns(**{"topic_name": "t", **columns}))


@pytest.mark.spark
def test_unusable_column_is_named_in_the_error(spark: SparkSession) -> None:
    frame = spark.sql(
        "select 1800000000000L as due, 'b' as body, timestamp_ntz'2027-01-01 00:00:00' as at, true as b"
    )
    wrong: list[tuple[dict[str, str | None], str]] = [
        ({"due": "when"}, "column when: there is none; there are due, body, at, b"),
        ({"due": "at"}, "column at: timestamp_ntz, a wall-clock time that names no instant"),
        ({"due": "b"}, "column b: boolean; wanted a timestamp"),
        ({"due": "at", "zone": "Paris"}, "zone 'Paris' is no time zone of the IANA's list"),
        ({"topic": "body"}, "either a topic or the column"),
        ({"topic_name": None}, "either a topic or the column"),
        ({"keys": "c"}, "column c: there is none"),
    ]
    for columns, said in wrong:
        with pytest.raises(InvalidMessage, match=said):
            check_columns(frame, **columns)
    check_columns(frame, due="at", zone="Europe/Paris")


@pytest.mark.spark
def test_columns_with_blanks_and_dots_in_their_names(spark: SparkSession) -> None:
    frame = spark.sql("select 1800000000000L as `due at`, 'b' as `a.b`, 'k' as `k``k`")
    row = screen(frame, Columns(topic_name="t", due="due at", body="a.b", keys="k`k"), NOW_MS).collect()[0]
    assert (row["due_ms"], row["body"], row["keys"], row["reason"]) == (NOW_MS, "b", "k", None)
