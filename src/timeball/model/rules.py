"""The rules of valid messages, and the topics that RocketMQ reserves.

The rules are in one table (`RULES`). Each rule can check a whole column or a single value:

    admission         refuses a batch with `check_columns`, and due times with `check_time_range`
    Spark's writer    separates bad rows with `first_broken`, and builds Spark expressions from each rule's `shape`
    codecs, client    check a message before it becomes a row, with `fault` and `check`

Whether a caller may send to a topic is not a rule of the message: broker/policy.py decides that. This module does no
I/O and reads no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import (
    DLQ_PREFIX,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Int64Array,
    byte_lengths,
    filled,
)
from timeball.model.values import BLANK, CONTROL, KEY_TEXT, LABEL_TEXT, NOT_IN_KEY_PATTERN
from timeball.model.values import Keys as Keys
from timeball.model.values import check_key as check_key
from timeball.model.values import check_label as check_label
from timeball.model.values import keys_text as keys_text
from timeball.model.values import properties_text as properties_text
from timeball.model.values import shown as shown
from timeball.model.values import size_bytes as size_bytes
from timeball.model.values import valid as valid
from timeball.model.values import with_valid_fields as with_valid_fields

BoolArray = npt.NDArray[np.bool_]

# The longest value of each text, in bytes (UTF-8).
BYTES_MAX = {
    "topic": limits.TOPIC_BYTES_MAX,
    "body": limits.BODY_BYTES_MAX,
    "tag": limits.TAG_BYTES_MAX,
    "keys": limits.KEYS_BYTES_MAX,
    "unique_key": limits.UNIQUE_KEY_BYTES_MAX,
    "properties": limits.PROPERTIES_BYTES_MAX,
}
ANY_QUEUE = -1
_INT64_MAX = (1 << 63) - 1
TIMES = ("due_ms", "delay_ms")
MARKS = f"[{PROPERTY_NAME_END}{PROPERTY_END}]"
_MARK_BYTES = PROPERTY_NAME_END.encode(), PROPERTY_END.encode()
NOT_IN_KEY = NOT_IN_KEY_PATTERN.pattern
NOT_AN_ENTRY = rf"{NOT_IN_KEY}|\A\z"  # for entries of a list of keys
NOT_A_LABEL = rf"{CONTROL.pattern}|\A{BLANK}|{BLANK}\z"
_CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Job names that the pipeline and the broker use, so no campaign may have them.
_RESERVED_JOBS = ("spark-compact", "broker", "broker-rewrite", "broker-behind")


Shape = Literal["name", "reserved", "present", "longest", "words", "between", "form", "one"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule about one column.

    `in_column(values, now_ms)` returns True for each row that breaks the rule, and False for a null. `in_value` does
    the same for a single value. Due times are compared with `now_ms`. Only a text of at least `needs_bytes` bytes can
    break the rule.

    `shape` and the bounds describe the same rule as data, for an engine that can run neither function (Spark). Shape
    "between": numbers from `low` to `high(now_ms)`. Shape "words": a text with fewer than `needs_bytes` spaces. Shape
    "one": a text without property separators. Shape "form": a rule for values of a DataFrame before they become the
    text that the log stores, checked by `form_faults`.
    """

    column: str
    text: str  # the error text for users
    in_column: Callable[[pa.Array, int], BoolArray]
    in_value: Callable[[Any, int], bool]
    shape: Shape
    needs_bytes: int = 0
    low: int = 0
    high: Callable[[int], int] = lambda _: 0


def _form_rule(column: str, text: str) -> Rule:
    """Make a rule that holds before values are stored. On stored texts it never fails.

    For example, each key must be without blanks, but stored keys are joined by blanks.
    """
    return Rule(
        column,
        f"{column}: {text}",
        lambda values, _: np.zeros(len(values), np.bool_),
        lambda *_: False,
        "form",
    )


def _no_separator(column: str) -> Rule:
    """Make the rule that a text contains no property separator.

    RocketMQ's consumers receive these columns as properties, so a separator would begin another property.
    """
    return Rule(
        column,
        f"{column}: the characters U+0001 and U+0002 separate properties",
        lambda values, _: _has_separators(values),
        lambda value, _: PROPERTY_NAME_END in value or PROPERTY_END in value,
        "one",
    )


def _has_separators(values: pa.Array) -> BoolArray:
    """Compute a mask of the texts with a property separator. False for a null."""
    # The whole buffer is searched first: a regular expression for each of a million ids takes ten times as long. The
    # copy and two searches take less than a pass of numpy.
    data = values.buffers()[2]
    text = b"" if data is None else data.to_pybytes()
    if _MARK_BYTES[0] not in text and _MARK_BYTES[1] not in text:
        return np.zeros(len(values), np.bool_)
    return np.asarray(pc.match_substring_regex(values, MARKS).fill_null(False), dtype=np.bool_)


def _length_rule(column: str) -> Rule:
    """Build the rule that a value has at most BYTES_MAX bytes in UTF-8."""
    max_bytes = BYTES_MAX[column]
    return Rule(
        column,
        f"{column}: more than {max_bytes} bytes",
        lambda values, _: byte_lengths(values) > max_bytes,
        # The number of characters is compared first, because it is cheap: a character has at most 4 bytes.
        lambda value, _: 4 * len(value) > max_bytes and size_bytes(value) > max_bytes,
        "longest",
        max_bytes + 1,
    )


def _range_rule(column: str, text: str, low: int, high: Callable[[int], int]) -> Rule:
    """Build the rule low <= value <= `high(now_ms)`. `text`: the sentence for a value that breaks it."""

    def in_column(values: pa.Array, now_ms: int) -> BoolArray:
        numbers = values.fill_null(low).to_numpy() if values.null_count else values.to_numpy()
        return np.asarray((numbers < low) | (numbers > high(now_ms)), dtype=np.bool_)

    def in_value(value: int, now_ms: int) -> bool:
        return not low <= value <= high(now_ms)

    return Rule(column, text, in_column, in_value, "between", low=low, high=high)


def _bad_topics(values: pa.Array, _: int) -> BoolArray:
    """Compute a mask of the names that no topic may have, nulls included."""
    # The dictionary has each distinct name once, and a million rows have a handful of topics.
    topics = values.fill_null("").dictionary_encode()
    is_good = pc.and_(
        pc.match_substring_regex(topics.dictionary, limits.NAME.pattern),
        pc.less_equal(pc.binary_length(topics.dictionary), limits.TOPIC_BYTES_MAX),
    )
    return ~np.asarray(is_good.take(topics.indices))


def _reserved_topics(values: pa.Array, _: int) -> BoolArray:
    """Compute a mask of the topics that `_is_reserved` refuses. False for a null."""
    topics = values.fill_null("").dictionary_encode()
    is_reserved = pa.array([_is_reserved(name, 0) for name in topics.dictionary.to_pylist()], pa.bool_())
    return np.asarray(is_reserved.take(topics.indices))


def _is_reserved(value: str, _: int) -> bool:
    """Check whether the topic belongs to the broker or to a group, so that no scheduled message may have it."""
    return value in NOT_SCHEDULED or value.startswith(NOT_SCHEDULED_PREFIXES)


def _is_bad_topic(value: str | None, _: int) -> bool:
    return not value or len(value) > limits.TOPIC_BYTES_MAX or not limits.NAME.fullmatch(value)


RULES: tuple[Rule, ...] = (
    Rule(
        "topic",
        "topic: missing, too long, or with other characters than letters, digits, % | _ -",
        _bad_topics,
        _is_bad_topic,
        "name",
    ),
    # Only for Spark's writer. For a send the policy decides, because it has the list of groups.
    Rule(
        "topic",
        "topic: belongs to the broker, or to the retries and dead letters of a group",
        _reserved_topics,
        _is_reserved,
        "reserved",
    ),
    Rule(
        "body",
        "body: missing",
        lambda values, _: np.asarray(values.is_null()),
        lambda value, _: value is None,
        "present",
    ),
    _length_rule("body"),
    _length_rule("tag"),
    _no_separator("tag"),
    _form_rule("tag", LABEL_TEXT),
    _length_rule("keys"),
    Rule(
        "keys",
        f"keys: more than {limits.KEYS_PER_MESSAGE_MAX} of them",
        lambda values, _: np.asarray(
            pc.greater_equal(pc.count_substring(values, " "), limits.KEYS_PER_MESSAGE_MAX).fill_null(False)
        ),
        lambda value, _: value.count(" ") >= limits.KEYS_PER_MESSAGE_MAX,
        "words",
        limits.KEYS_PER_MESSAGE_MAX,
    ),
    _no_separator("keys"),
    _form_rule("keys", f"{KEY_TEXT}; give several keys as a list, in a column of type array<string>"),
    _length_rule("unique_key"),
    _no_separator("unique_key"),
    _form_rule("unique_key", LABEL_TEXT),
    _length_rule("properties"),
    # For a map column. In RocketMQ's text form these characters separate properties.
    _form_rule("properties", "a name is empty, or a name or value has the character U+0001 or U+0002"),
    _range_rule(
        "queue_id",
        f"queue_id: not between 0 and {limits.QUEUES_PER_TOPIC_MAX - 1}",
        ANY_QUEUE,
        lambda _: limits.QUEUES_PER_TOPIC_MAX - 1,
    ),
    Rule(
        "due_ms",
        "due: missing; leave the column out to deliver at once",
        lambda values, _: np.asarray(values.is_null()),
        lambda value, _: value is None,
        "present",
    ),
    _range_rule(
        "due_ms",
        "due: before March 1973; give milliseconds since 1970, neither seconds nor a date such as 20300131",
        limits.DUE_MS_MIN,
        lambda _: _INT64_MAX,
    ),
    _range_rule(
        "due_ms",
        f"due: more than {limits.DELAY_MS_MAX // limits.DAY_MS} days ahead",
        limits.DUE_MS_MIN,
        lambda now_ms: now_ms + limits.DELAY_MS_MAX,
    ),
)
_NO_SEPARATOR_COLUMNS = [rule.column for rule in RULES if rule.shape == "one"]
_RULES_BY_COLUMN = {
    name: [rule for rule in RULES if rule.column == name] for name in {r.column for r in RULES}
}
# The rules that admission checks on columns. The others are checked elsewhere: topics by the policy, the largest delay
# by the operator's setting, and missing values before.
_CHECKED_ON_COLUMNS = [
    rule for rule in RULES if rule.needs_bytes or rule.shape == "one" or rule.column == "queue_id"
]
# A text with at most this many characters (or bytes, for a body) can break no length rule of its column, because a
# character has at most 4 bytes. It can still break the rule about separators.
SAFE_LENGTHS = {
    name: min(rule.needs_bytes - 1 for rule in rules if rule.needs_bytes) // (1 if name == "body" else 4)
    for name, rules in _RULES_BY_COLUMN.items()
    if any(rule.needs_bytes for rule in rules)
}


# ---- columns ------------------------------------------------------------------------------------------------


def first_broken(columns: Mapping[str, pa.Array], rows: int, now_ms: int) -> npt.NDArray[np.int8]:
    """Find the first rule that each row breaks, as an index in RULES, or -1. Rules of omitted columns are skipped."""
    first = np.full(rows, -1, np.int8)
    for index, rule in enumerate(RULES):
        if rule.column in columns:
            first[(first < 0) & rule.in_column(columns[rule.column], now_ms)] = index
    return first


def check_columns(columns: Mapping[str, pa.Array]) -> None:
    """Raise InvalidMessage if a row breaks a rule. Topics and times are not checked.

    The error names the first bad row of the first broken rule.
    """
    for rule in _CHECKED_ON_COLUMNS:
        column = columns.get(rule.column)
        if column is None or (rule.needs_bytes and not _has_bytes(column, rule.needs_bytes)):
            continue
        broken = rule.in_column(column, 0)
        if broken.any():
            raise InvalidMessage(f"row {int(broken.argmax())}: {rule.text}")


def _has_bytes(column: pa.Array, size_bytes: int) -> bool:
    """Check whether some value may have `size_bytes` bytes. False if all values together have fewer."""
    data = column.buffers()[2]
    return data is not None and data.size >= size_bytes


def check_time_range(name: str, values: Int64Array, low: int, high: int) -> None:
    """Raise InvalidDelay for the first row whose due time or delay (ms) is not in [low, high]."""
    is_outside = (values < low) | (values > high)
    if is_outside.any():
        row = int(np.argmax(is_outside))
        raise InvalidDelay(f"{name} {values[row]} of row {row}: between {low} and {high}")


def check_due_times(due_ms: pa.Array) -> None:
    """Raise InvalidDelay if a due time is too small to be in milliseconds. Nulls are allowed and mean "now"."""
    if (least := pc.min(due_ms).as_py()) is not None and least < limits.DUE_MS_MIN:
        row = pc.index(due_ms, pa.scalar(least, due_ms.type)).as_py()
        raise InvalidDelay(f"due_ms {least} of row {row}: {limits.NOT_MILLISECONDS_TEXT}")


def past_due(due_ms: pa.Array, store_ms: int) -> tuple[int, int]:
    """Count the rows that were due before `store_ms`, when the broker accepted them.

    Returns the count, and the largest time by which a row was past due, in ms.
    """
    times = filled(pc.cast(due_ms, pa.int64()), store_ms).to_numpy()
    rows = int(np.count_nonzero(times < store_ms))
    return rows, store_ms - int(times.min()) if rows else 0


def check_no_nulls(columns: Mapping[str, pa.Array], names: Iterable[str], first_row: int = 0) -> None:
    """Raise InvalidDelay for the first row with a null in one of these columns. Missing columns are allowed.

    A null may be a time that was lost in a conversion, so it must not mean "now".
    """
    for name in names:
        column = columns.get(name)
        if column is not None and column.null_count:
            row = first_row + pc.index(column.is_null(), True).as_py()
            raise InvalidDelay(f"{name} of row {row} is null; leave the column out to deliver at once")


def form_faults(name: str, column: pa.Array) -> BoolArray:
    """Compute a mask of the values that break the rule of shape "form" of this column. False for a null."""
    if name == "properties":
        return map_faults(column)
    return key_faults(column) if name == "keys" else label_faults(column)


def map_faults(column: pa.Array) -> BoolArray:
    """Compute a mask of the rows of a map<string, string> column whose pairs cannot be properties.

    A separator in a name or value would add a property of another name, such as a due time.
    """
    if not pa.types.is_map(column.type):
        return np.zeros(len(column), np.bool_)
    wrong = pc.or_kleene(
        pc.equal(pc.binary_length(column.keys), 0), pc.match_substring_regex(column.keys, MARKS)
    )
    wrong = pc.or_(wrong, pc.fill_null(pc.match_substring_regex(column.items, MARKS), False))
    return _rows_with(wrong, column)


def _rows_with(wrong: pa.Array, column: pa.Array) -> BoolArray:
    """Compute a mask of the rows of a list or map column with at least one wrong entry."""
    # wrong_before[i] is the number of wrong entries before entry i, so a difference counts those of a row.
    wrong_before = np.concatenate([[0], np.cumsum(np.asarray(wrong))])
    # In a slice, `offsets` and the entries still refer to the whole column.
    offsets = np.asarray(column.offsets)
    return np.asarray(wrong_before[offsets[1:]] > wrong_before[offsets[:-1]], dtype=np.bool_)


FORM_RULES = {rule.column: index for index, rule in enumerate(RULES) if rule.shape == "form"}


# ---- single values ------------------------------------------------------------------------------------------


def fault(column: str, value: str | bytes) -> str | None:
    """Describe the rule that a text (or bytes, for a body) of this column breaks. None if it breaks none."""
    # Separators are control characters, so a printable text contains none.
    has_no_separator = (
        column not in _NO_SEPARATOR_COLUMNS or not isinstance(value, str) or value.isprintable()
    )
    if has_no_separator and len(value) <= SAFE_LENGTHS[column]:  # the case of nearly every text
        return None
    for rule in _RULES_BY_COLUMN[column]:
        if rule.in_value(value, 0):
            return rule.text
    return None


def check(column: str, value: str | bytes) -> None:
    """Raise InvalidMessage if a text (or bytes, for a body) of this column breaks a rule."""
    text = fault(column, value)
    if text is not None:
        raise InvalidMessage(text)


def check_campaign(campaign: str) -> str:
    """Check a campaign's id and return it. Raises InvalidMessage if it cannot be a key and a job name in the log."""
    if not _CAMPAIGN.fullmatch(campaign) or campaign in _RESERVED_JOBS:
        raise InvalidMessage(
            f"campaign {campaign!r}: letters, digits, dots, dashes and underscores, at most 100, and none of "
            + ", ".join(_RESERVED_JOBS)
        )
    return campaign


def check_idempotency_key(key: str, attempt: str = "", *, anew: bool = False) -> None:
    """Raise InvalidMessage for an invalid idempotency key, or an invalid name of an attempt to send.

    `anew`: the caller wants settled messages to be sent again, which requires a name of the attempt.
    """
    if not 0 < size_bytes(key) <= limits.IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidMessage(f"an idempotency key has 1 to {limits.IDEMPOTENCY_KEY_BYTES_MAX} bytes")
    if size_bytes(attempt) > limits.IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidMessage(f"the name of an attempt has at most {limits.IDEMPOTENCY_KEY_BYTES_MAX} bytes")
    if anew and not attempt:
        raise InvalidMessage(
            "to send again, give the attempt a name, and the same name when you repeat it: otherwise a send whose "
            "answer was lost is sent twice"
        )


def is_too_far(due_ms: int, now_ms: int, delay_ms_max: int) -> bool:
    """Check whether a due time is further away than the operator's largest delay."""
    return due_ms - now_ms > delay_ms_max


# ---- texts of several values ------------------------------------------------------------------------------------


def key_faults(column: pa.Array) -> BoolArray:
    """Compute a mask of the rows whose keys are invalid. A text is one key, and a list may have several.

    A null and an empty text mean "no key" and are valid. Every entry of a list must be a key.
    """
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return np.asarray(pc.match_substring_regex(column, NOT_IN_KEY).fill_null(False))
    wrong = pc.match_substring_regex(column.values, NOT_AN_ENTRY).fill_null(True)
    return np.asarray(_rows_with(wrong, column) & np.asarray(column.is_valid()), dtype=np.bool_)


def label_faults(column: pa.Array) -> BoolArray:
    """Compute a mask of the tags or ids that `check_label` refuses. False for a null."""
    return np.asarray(pc.match_substring_regex(column, NOT_A_LABEL).fill_null(False))


def queue_of_priority(priority: int, queues: int) -> int:
    """Choose the queue of a message with this priority, as in RIP-80: 0 is the lowest."""
    return min(priority, queues - 1)


# ---- RocketMQ's system topics --------------------------------------------------------------------------------
# Clients may not create or delete them, and may not send to most of them. A client that could write to the schedule
# topic or to the topic of half messages could forge scheduled messages and transactions. The names and the error
# messages are RocketMQ's. A refused send is answered with NO_PERMISSION, a refused attempt to create or delete a topic
# with INVALID_PARAMETER. Only the name decides, so topics that Timeball does not have are refused as well
# (`rmq_sys_wheel_timer`).

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT = "OFFSET_MOVED_EVENT"
SYSTEM_PREFIX = "rmq_sys_"

AUTO_CREATE_TOPIC = "TBW102"  # a producer asks for its route before it writes to a topic that does not exist
BENCHMARK_TOPIC = "BenchmarkTest"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"  # RocketMQ's clients write their traces to it

_NOT_WRITABLE = frozenset(
    {
        SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
    }
)  # fmt: skip
_SYSTEM = _NOT_WRITABLE | {AUTO_CREATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}
SYSTEM_TOPICS = tuple(sorted(_SYSTEM))  # tools leave these out of lists


# Topics that a rule refuses for scheduled messages. Retry and dead letter topics belong to them, because only
# RocketMQ's own clients write to these, as a part of their retries.
NOT_SCHEDULED = tuple(sorted(_NOT_WRITABLE))
NOT_SCHEDULED_PREFIXES = (SYSTEM_PREFIX, RETRY_PREFIX, DLQ_PREFIX)


def reply_topic(cluster_name: str) -> str:
    """Build the name of the topic to which clients send replies to requests."""
    return f"{cluster_name}_REPLY_TOPIC"


def is_reply_topic(topic: str, cluster_name: str) -> bool:
    """Check whether clients send replies to this topic. A client with a namespace puts `namespace%` in front."""
    name = reply_topic(cluster_name)
    return topic == name or topic.endswith(f"%{name}")


def forbidden(topic: str) -> str | None:
    """Explain why no client may send to this topic (answer NO_PERMISSION). None if clients may."""
    if topic in _NOT_WRITABLE or topic.startswith(SYSTEM_PREFIX):
        # RocketMQ's exact text, which its tools and clients show or compare.
        return f"Sending message to topic[{topic}] is forbidden."
    return None


def conflict(topic: str) -> str | None:
    """Explain why no client may create or delete this topic (answer INVALID_PARAMETER). None if clients may."""
    if topic in _SYSTEM or topic.startswith(SYSTEM_PREFIX):
        return f"The topic[{topic}] is conflict with system topic."
    return None
