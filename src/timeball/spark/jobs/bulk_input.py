"""Convert any DataFrame to the columns of scheduled messages, and mark rows that break a rule, as Spark expressions.

The rules are rules.RULES. The `shape` of each rule becomes a Spark expression. So Spark finds, counts and separates
invalid rows without a Python function, before anything is written. The writer checks all rows once more, in Arrow.

A due time must be an exact point in time. So a wall-clock time without a time zone is refused unless the caller gives
the zone. The types of the due column are:

    timestamp               a point in time
    bigint, int             milliseconds since 1970
    timestamp_ntz, date     a wall-clock time in `zone`, midnight for a date; InvalidMessage without `zone`
    string                  any of these as text; a text without an offset needs `zone`, else its row is rejected

A text must match one of the patterns completely, because Spark's own cast would ignore a zone at its end. Wall-clock
times are resolved by local_time.py on Arrow batches. The time zone rules of Java are never used.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import StructType

from timeball.model import limits, rules
from timeball.model import reserved_topics as reserved
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.local_time import load_zone
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, int64

REASON = "reason"
ROW = "row"  # column with the original row, for the table of rejects
NO_DUE_TIME = "due: missing, or no instant"
NO_ZONE = "due: no offset from UTC in the text, and no time zone given for it"
_NUMBER = r"\A-?\d+\z"
_DATE, _TIME_OF_DAY = r"\d{4}-\d\d?-\d\d?", r"[T ]\d\d?:\d\d(:\d\d([.]\d{1,9})?)?"
_LOCAL = rf"\A{_DATE}({_TIME_OF_DAY})?\z"
_WITH_OFFSET = rf"\A{_DATE}{_TIME_OF_DAY} ?([Zz]|UTC|[+-]\d\d(:?\d\d)?)\z"
# A text with digits after the microseconds that are not all zero. Spark ignores them.
_DIGITS_BELOW_MICROS = r"[.]\d{6}\d*[1-9]"
_BAD_FORM = "_bad_form_of_"  # prefix of columns that mark values in a bad form
_AS_JSON = ("struct", "array", "map")


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the DataFrame's columns from which scheduled messages are made."""

    due: str = "due"
    topic: str | None = None  # the column with the topic; either this or `topic_name` is given
    topic_name: str | None = None  # one topic for all rows
    body: str | None = "body"  # None: all columns without another purpose become one JSON object
    keys: str | None = None
    tag: str | None = None
    unique_key: str | None = None
    properties: str | None = None
    zone: str | None = None  # the time zone of wall-clock times in `due`

    @property
    def taken(self) -> list[str]:
        """The names of the columns that have a purpose."""
        named = (self.due, self.topic, self.body, self.keys, self.tag, self.unique_key, self.properties)
        return [name for name in named if name is not None]


def screen(frame: DataFrame, columns: Columns, now_ms: int) -> DataFrame:
    """Convert the rows to the columns (row, topic, body, due_ms, …, reason). Raises the errors of `check`.

    `reason` is the first rule that a row breaks at the time `now_ms`. It is null for valid rows.
    """
    check(frame.schema, columns)
    screened = frame.select(
        f.struct("*").alias(ROW),
        (f.lit(columns.topic_name) if columns.topic is None else _text(frame, columns.topic)).alias("topic"),
        _body(frame, columns).alias("body"),
        _due_ms(frame, columns).alias("due_ms"),
        _no_zone(frame, columns).alias("_no_zone"),
        *[
            convert(frame, column).alias(name)
            for name, convert in _STORED.items()
            if (column := getattr(columns, name)) is not None
        ],
        *[
            _bad_form(frame, name, column).alias(_BAD_FORM + name)
            for name in rules.FORM_RULES
            if (column := getattr(columns, name)) is not None
        ],
    )
    form_marks = [name for name in screened.columns if name.startswith(_BAD_FORM)]
    return screened.withColumn(REASON, reason(screened, now_ms)).drop("_no_zone", *form_marks)


def with_lists_of_keys(screened: DataFrame) -> DataFrame:
    """Convert the keys of `screen` from one text to a list, the form in which the data source accepts several keys."""
    if "keys" not in screened.columns:
        return screened
    return screened.withColumn("keys", f.when(f.col("keys") != "", f.split("keys", " ")))


def check(schema: StructType, columns: Columns) -> None:
    """Check the columns. Raises InvalidMessage if one is missing, ambiguous or of an unusable type.

    Also raises it for an unknown or missing zone, for a missing topic, and if no column is left for the body.
    """
    names = schema.fieldNames()
    for name in columns.taken:
        if name not in names:
            raise InvalidMessage(f"column {name}: there is none; there are {', '.join(names)}")
    used_names = names if columns.body is None else columns.taken
    lower_names = [name.lower() for name in names]  # for Spark, upper and lower case are the same
    if ambiguous := sorted({name for name in used_names if lower_names.count(name.lower()) > 1}):
        raise InvalidMessage(f"column {', '.join(ambiguous)}: there twice; drop or rename one of them")
    if (columns.topic is None) == (columns.topic_name is None):
        raise InvalidMessage("name either a topic or the column that holds it")
    if columns.body is None and not set(names) - set(columns.taken):
        raise InvalidMessage("no column is left for the body")
    kind = _kind(schema, columns.due)
    if kind in ("timestamp_ntz", "date") and columns.zone is None:
        raise InvalidMessage(
            f"column {columns.due}: {kind}, a wall-clock time that names no instant; say in which time zone it is meant"
        )
    if kind not in ("timestamp", "timestamp_ntz", "date", "bigint", "int", "string"):
        raise InvalidMessage(
            f"column {columns.due}: {kind}; wanted a timestamp, milliseconds since 1970, or text"
        )
    if columns.zone is not None:
        try:
            load_zone(columns.zone)
        except InvalidDelay as error:
            raise InvalidMessage(f"zone {error}") from error


# ---- the columns of a scheduled message -----------------------------------------------------------------------------


def _kind(schema: StructType, name: str) -> str:
    kind = schema[name].dataType.simpleString()
    return "string" if kind.startswith(("string ", "varchar", "char")) else kind


def _column(name: str) -> Column:
    return f.col("`" + name.replace("`", "``") + "`")


def _text(frame: DataFrame, name: str) -> Column:
    """Make a text column. Raises InvalidMessage for a binary column."""
    kind = _kind(frame.schema, name)
    if kind == "binary":
        raise InvalidMessage(f"column {name}: binary, wanted text")
    return _column(name) if kind == "string" else _column(name).cast("string")


def _keys(frame: DataFrame, name: str) -> Column:
    """Make the column of keys in the form of the log: one text, with blanks between several keys of a list."""
    if not _kind(frame.schema, name).startswith("array<"):
        return _text(frame, name)
    return f.array_join(_column(name).cast("array<string>"), " ")


def _body(frame: DataFrame, columns: Columns) -> Column:
    """Make the column of bodies. Without a body column, all columns without another purpose become one JSON object."""
    if columns.body is None:
        other_columns = [name for name in frame.columns if name not in columns.taken]
        return f.to_json(f.struct(*[_column(name) for name in other_columns]))
    kind = _kind(frame.schema, columns.body)
    if kind in ("string", "binary"):
        return _column(columns.body)
    column = _column(columns.body)
    return f.to_json(column) if kind.startswith(_AS_JSON) else column.cast("string")


def _properties(frame: DataFrame, name: str) -> Column:
    """Make the column of properties in the form of the log, from a map or from text that has this form already."""
    kind = _kind(frame.schema, name)
    if kind == "string":
        return _column(name)
    if not kind.startswith("map<string,"):
        raise InvalidMessage(f"column {name}: {kind}, wanted map<string,string> or RocketMQ's text form")
    entries = f.map_entries(_column(name).cast("map<string,string>"))
    texts = f.transform(
        entries,
        lambda e: f.concat(
            e["key"], f.lit(PROPERTY_NAME_END), f.coalesce(e["value"], f.lit("")), f.lit(PROPERTY_END)
        ),
    )
    # For a null, `concat_ws` alone would make an empty text.
    return f.when(_column(name).isNotNull(), f.concat_ws("", texts))


_STORED = {"keys": _keys, "tag": _text, "unique_key": _text, "properties": _properties}


def _bad_form(frame: DataFrame, name: str, column: str) -> Column:
    """Make the column that marks values which break the rule of shape "form" of `name`, as rules.form_faults does."""
    kind = _kind(frame.schema, column)
    if name == "properties":
        is_bad = f.lit(False) if kind == "string" else _bad_pairs(column)
    elif name == "keys" and kind.startswith("array<"):
        is_bad = f.exists(
            _column(column).cast("array<string>"),
            lambda key: key.isNull() | key.rlike(rules.NOT_AN_ENTRY),
        )
    else:
        is_bad = _text(frame, column).rlike(rules.NOT_IN_KEY if name == "keys" else rules.NOT_A_LABEL)
    return f.coalesce(is_bad, f.lit(False))


def _bad_pairs(column: str) -> Column:
    """Make the column that marks maps with a pair that cannot be a property. It is null for a null."""
    return f.exists(
        f.map_entries(_column(column).cast("map<string,string>")),
        lambda e: (
            (e["key"] == "")
            | e["key"].rlike(rules.MARKS)
            | f.coalesce(e["value"].rlike(rules.MARKS), f.lit(False))
        ),
    )


# ---- the due time -----------------------------------------------------------------------------------------


def _due_ms(frame: DataFrame, columns: Columns) -> Column:
    """Make the column of due times in ms since 1970. It is null for a text that is no due time."""
    kind, column = _kind(frame.schema, columns.due), _column(columns.due)
    if kind in ("bigint", "int"):
        return column.cast("bigint")
    if kind == "timestamp":
        return _up_to_ms(column)
    if kind in ("timestamp_ntz", "date"):
        return _in_zone(column.cast("timestamp_ntz"), columns.zone)
    text = f.trim(column)
    has_finer_digits = text.rlike(_DIGITS_BELOW_MICROS).cast("int")
    wall_clock = f.when(text.rlike(_LOCAL), text.try_cast("timestamp_ntz"))
    wall_clock = wall_clock + f.make_dt_interval(secs=has_finer_digits / 1_000_000)
    timestamp = f.when(text.rlike(_WITH_OFFSET), text.try_cast("timestamp"))
    timestamp = timestamp + f.make_dt_interval(secs=has_finer_digits / 1_000_000)
    milliseconds = f.when(text.rlike(_NUMBER), text.try_cast("bigint"))
    return f.coalesce(milliseconds, _up_to_ms(timestamp), _in_zone(wall_clock, columns.zone))


def _no_zone(frame: DataFrame, columns: Columns) -> Column:
    """Make the column that marks texts which are a valid wall-clock time, but without the zone that they need."""
    if columns.zone is not None or _kind(frame.schema, columns.due) != "string":
        return f.lit(False)
    text = f.trim(_column(columns.due))
    return text.rlike(_LOCAL) & text.try_cast("timestamp_ntz").isNotNull()


def _in_zone(wall_clock: Column, zone: str | None) -> Column:
    """Convert a wall-clock time in a zone to milliseconds since 1970, rounded up. Null without a zone."""
    if zone is None:
        return f.lit(None).cast("bigint")
    time_zone = load_zone(zone)

    def resolve(local: pa.Array) -> pa.Array:
        times_us = time_zone.instants_us(int64(local.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(0)))
        return pa.array(-(-times_us // 1_000), mask=np.asarray(local.is_null()))

    due_ms: Column = arrow_udf(resolve, "bigint")(wall_clock)  # type: ignore[call-overload]
    return due_ms


def _up_to_ms(timestamp: Column) -> Column:
    """Convert to milliseconds since 1970. Rounded up, because a message may never be early."""
    has_microseconds = f.pmod(f.unix_micros(timestamp), f.lit(1000)) > 0
    return f.unix_millis(timestamp) + has_microseconds.cast("bigint")


# ---- the rules --------------------------------------------------------------------------------------------


def reason(screened: DataFrame, now_ms: int) -> Column:
    """Make the column with the text of the first rule that a row breaks. It is null for valid rows."""
    conditions: list[tuple[Column, str]] = [
        (f.col("_no_zone"), NO_ZONE),
        (f.col("due_ms").isNull(), NO_DUE_TIME),
    ]
    conditions += [
        (breaks(rule, now_ms), rule.text) for rule in rules.RULES if rule.column in screened.columns
    ]
    first_reason = f.lit(None).cast("string")
    for condition, text in reversed(conditions):
        first_reason = f.when(condition, f.lit(text)).otherwise(first_reason)
    return first_reason


def breaks(rule: rules.Rule, now_ms: int) -> Column:
    """Make the column that marks rows which break a rule, as an expression that Spark evaluates without Python."""
    column = f.col(rule.column)
    match rule.shape:
        case "name":
            name = f.coalesce(column, f.lit(""))
            pattern = limits.NAME.pattern.removesuffix("$") + r"\z"  # Java's $ also matches before a line end
            return ~name.rlike(pattern) | (f.octet_length(name) > limits.TOPIC_BYTES_MAX)
        case "reserved":
            is_reserved = column.isin(list(reserved.NOT_SCHEDULED))
            for prefix in reserved.NOT_SCHEDULED_PREFIXES:
                is_reserved |= column.startswith(prefix)
            return is_reserved
        case "form":
            return f.col(_BAD_FORM + rule.column)
        case "present":
            return column.isNull()
        case "one":
            return column.rlike(rules.MARKS)
        case "longest":
            return f.octet_length(column) >= rule.needs_bytes
        case "words":
            blanks = f.length(column) - f.length(f.replace(column, f.lit(" "), f.lit("")))
            return blanks >= rule.needs_bytes
        case "between":
            return (column < rule.low) | (column > rule.high(now_ms))
