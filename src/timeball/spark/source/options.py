"""Parse and check the options of Spark data sources: parsers for texts, the options of `timeball`, the pace of streams.

Spark passes options as text under lower-case names, whether they come from `.option(...)` or from `.load(path)`. An
unknown option is refused, because a misspelt `max_rows_per_bach` would otherwise have no effect. An option that does
not apply to the read, for example `kinds` with read=pending, is refused, too. Errors name the option.

Some option names of Kafka's and Delta's sources are accepted as aliases. `ALIASES` lists all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from timeball.io.clock import Clock, SystemClock
from timeball.model import limits
from timeball.model.errors import SetupError
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA, Kind
from timeball.spark.endpoint import GROUP, pin_to_group, split_endpoint
from timeball.spark.log_events import EVENT_SCHEMA

# ---- parsers: one for each kind of value ----------------------------------------------------------------------
# A parser raises ValueError with a description of the allowed values. `parse` prepends the option's name and text.

Offsets = dict[int, int]  # queue -> offset
NUMBER_MAX = 2**62  # default upper bound of a whole number
NO_ALIASES: Mapping[str, str] = {}
# Kafka's name of the first offset. In JSON, Kafka uses two numbers as positions.
EARLIEST = "earliest"
KAFKA_POSITIONS = {-2: "first", -1: "latest"}

T = TypeVar("T", bound=msgspec.Struct)


def parse(
    options: Mapping[str, str],
    record: type[T],
    parsers: Mapping[str, Callable[[str], Any]],
    ignored: Collection[str] = (),
    aliases: Mapping[str, str] = NO_ALIASES,
) -> T:
    """Parse options, whose names may be in any case, to a `record`.

    `parsers`: option -> its parser. `ignored`: names of options that are skipped, in lower case. `aliases`: another
    name, in lower case, -> option. Raises SetupError for the first bad option, with the name that the user wrote.
    """
    parsed: dict[str, Any] = {}
    for key, value in options.items():
        if key.lower() in ignored:
            continue
        name = aliases.get(key.lower(), key.lower())
        if name not in record.__struct_fields__:
            raise SetupError(f"option {key}: unknown; there are {', '.join(record.__struct_fields__)}")
        if name in parsed:
            raise SetupError(f"option {key}: another name of {name}, which is given as well")
        try:
            parsed[name] = parsers[name](value.strip())
        except ValueError as error:
            raise SetupError(f"option {key}={value!r}: {error}") from error
    return record(**parsed)


def one_of(*words: str) -> Callable[[str], str]:
    """Build a parser for one of these words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return parse


def count(lowest: int, highest: int = NUMBER_MAX) -> Callable[[str], int]:
    """Build a parser for a whole number from `lowest` to `highest`. It raises ValueError for other texts."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number") from None
        if not lowest <= value <= highest:
            raise ValueError(f"at least {lowest}" if value < lowest else f"at most {highest}")
        return value

    return parse


def position(*names: str) -> Callable[[str], int | str]:
    """Build a parser for a sequence number or one of these names. It raises ValueError for other texts."""

    def parse(text: str) -> int | str:
        word = from_kafka_word(text)
        if word in names:
            return word
        try:
            return count(0)(text)
        except ValueError as error:
            raise ValueError(f"a sequence number of 0 or more, or one of {', '.join(names)}") from error

    return parse


def from_kafka_word(text: str) -> str:
    """Convert a word to lower case, and Kafka's `earliest` to `first`."""
    return "first" if text.lower() == EARLIEST else text.lower()


def end_seq(text: str) -> int | None:
    """Parse the number of the row to stop before. `latest`, the end of the durable rows, becomes None."""
    return None if text.lower() == "latest" else count(0)(text)


def offsets(*names: str, default: str = "first") -> Callable[[str], int | str | Offsets]:
    """Build a parser for positions in queues: a name, one offset for all queues, or queue=offset,queue=offset.

    It also parses Kafka's form, {"orders": {"0": 100}}, and raises ValueError for other texts. `names`: the names of
    positions. `default`: the position of the queues that are not listed.
    """
    expected = ", ".join([*names, "an offset of 0 or more", "or one a queue: 0=100,1=250"])

    def parse(text: str) -> int | str | Offsets:
        word = from_kafka_word(text)
        if word in names:
            return word
        try:
            if text.startswith("{"):
                pairs = kafka_offsets(text, default)
            elif "=" in text:
                pairs = [(queue, offset) for queue, offset in (entry.split("=") for entry in text.split(","))]
            else:
                return count(0)(text)
            offset_by_queue = {queue_id(queue): count(0)(offset) for queue, offset in pairs}
        except ValueError as error:
            raise ValueError(expected) from error
        if len(offset_by_queue) != len(pairs):
            raise ValueError("each queue once")
        return offset_by_queue

    return parse


def kafka_offsets(text: str, default: str) -> list[tuple[str, str]]:
    """Read the (queue, offset) pairs of the topic from Kafka's JSON, without the queues at the position `default`.

    Raises ValueError.
    """
    [queues] = kafka_topics(text).values()
    return [
        (queue, str(offset))
        for queue, offset in queues.items()
        if KAFKA_POSITIONS.get(offset, offset) != default
    ]


def kafka_topics(text: str) -> dict[str, dict[str, int]]:
    """Decode Kafka's JSON to {topic: {queue: offset}}. Raises ValueError unless it has exactly one topic."""
    try:
        topics = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if len(topics) != 1:
        raise ValueError("one topic")
    return topics


def queue_id(text: str) -> int:
    """Parse a queue number."""
    return count(0, limits.QUEUES_PER_TOPIC_MAX - 1)(text)


def endpoint(text: str) -> str:
    """Parse the address of a broker, or addresses of a cluster. Either may be pinned to one group: …#g2."""
    addresses, _ = split_endpoint(text)
    scheme, _, address = addresses.partition("://")
    host, _, port = address.rpartition(":")
    if scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not host or not port.isdigit():
        raise ValueError("grpc://host:port, for example grpc://127.0.0.1:7400")
    return text


def kinds(text: str) -> tuple[int, ...]:
    """Parse a list of kinds of rows, by name or number, separated by commas."""
    number_by_word = {kind.name.lower(): int(kind) for kind in Kind if kind}
    number_by_word.update({str(number): number for number in number_by_word.values()})
    numbers = tuple(number_by_word.get(word.strip().lower(), 0) for word in text.split(","))
    if not all(numbers):
        raise ValueError("a list of " + ", ".join(kind.name.lower() for kind in Kind if kind))
    return numbers


def flag(text: str) -> bool:
    """Parse `true` or `false`."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def names(text: str) -> tuple[str, ...]:
    """Parse a list of distinct column names, separated by commas."""
    columns = tuple(name.strip() for name in text.split(","))
    if not all(columns) or len(set(columns)) != len(columns):
        raise ValueError("column names, separated by commas, each once")
    return columns


def text(value: str) -> str:
    """Parse a nonempty text."""
    if not value:
        raise ValueError("may not be empty")
    return value


def instant_ms(text: str) -> int:
    """Parse a point in time to milliseconds since 1970: that number, or ISO 8601 with an offset from UTC."""
    if text.isdecimal():
        return count(0, limits.INSTANT_MS_MAX)(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("an instant such as 2030-01-31T09:00:00Z or 1895994000000") from None
    if time.tzinfo is None:
        raise ValueError("names no time zone: end it with Z or an offset such as +01:00")
    return round(time.timestamp() * 1000)


# ---- the options of `timeball` --------------------------------------------------------------------------------

DEFAULT_ENDPOINT = "grpc://127.0.0.1:7400"
RANGE_SCHEMA = pa.schema([("from_seq", pa.int64()), ("to_seq", pa.int64())])
# A version of the pending table: when it became current, and the job that made it (compact, bulk, rewrite).
HISTORY_SCHEMA = pa.schema(
    [("version", pa.int64()), ("at_ms", pa.int64()), ("job", pa.string()), ("watermark", pa.int64())]
)
# Value of the option `read` -> the columns of the read.
SCHEMAS = {
    "log": READ_SCHEMA,
    "queue": READ_SCHEMA,
    "pending": TABLE_SCHEMA,
    "ledger": EVENT_SCHEMA,
    "events": EVENT_SCHEMA,
    "history": HISTORY_SCHEMA,
    "ranges": RANGE_SCHEMA,
}
GROUP_FIELD = pa.field(GROUP, pa.string())  # in any read, if `columns` names it
ALL_COLUMNS = "*"
STREAMED = ("log", "queue", "ranges")  # reads that also work as a stream
STARTS = ("first", "latest", "watermark")
OFFSET_STARTS = ("first", "latest")
# Options that Spark's catalog adds when a table is created, and its prefix before the names of the user's options.
CATALOG_OPTIONS = ("provider", "location", "owner")
CATALOG_PREFIX = "option."
# Spark's own options, which it passes on to the sink of a stream.
SPARK_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}
# Option names of Kafka's and Delta's sources -> options of Timeball. In lower case, because Spark may pass them so.
ALIASES = {
    "subscribe": "topic",
    "startingoffsets": "from_offset",
    "endingoffsets": "to_offset",
    "maxoffsetspertrigger": "max_rows_per_batch",
    "maxrowspertrigger": "max_rows_per_batch",
    "minoffsetspertrigger": "min_rows_per_batch",
    "minpartitions": "min_partitions",
    "versionasof": "version",
    "timestampasof": "timestamp",
}
# Kafka's option for a topic as consumers see it. It implies read=queue, unless `read` is given.
SUBSCRIBED = "subscribe"
IN_LOG = {"from_offset": "from_seq", "to_offset": "to_seq"}  # in the log, an offset is a row number


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a read. `describe` documents each of them."""

    endpoint: str = DEFAULT_ENDPOINT
    group: str | None = None
    read: str = "log"
    columns: tuple[str, ...] | None = None
    topic: str | None = None
    from_seq: int | str | None = None
    to_seq: int | None = None
    kinds: tuple[int, ...] | None = None
    body_kinds: tuple[int, ...] | None = None
    placed: bool | None = None
    queue_id: int | None = None
    from_offset: int | str | Offsets = "first"
    to_offset: int | str | Offsets = "latest"
    version: int | None = None
    timestamp: int | None = None
    table_uri: str | None = None
    ledger_uri: str | None = None
    rows_per_partition: int = 500_000
    min_partitions: int = 1
    max_rows_per_batch: int = 1_000_000
    min_rows_per_batch: int = 1
    max_trigger_delay_ms: int = 0
    few_rows: int = 1


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a write. `describe` documents each of them."""

    endpoint: str = DEFAULT_ENDPOINT
    group: str | None = None
    on_invalid: str = "fail"
    as_stored: bool = False
    job_id: str | None = None
    epoch: int = 0
    on_repeat: str = "fail"
    table_uri: str | None = None


# Option -> the values of `read` to which it applies. An option that is not listed applies to all of them.
APPLIES_TO_READS: dict[str, tuple[str, ...]] = {
    "topic": ("log", "queue", "pending", "ledger"),
    "from_seq": ("log", "events", "ranges"),
    "to_seq": ("log", "events", "ranges"),
    "kinds": ("log",),
    "body_kinds": ("log",),
    "placed": ("log",),
    "queue_id": ("queue",),
    "from_offset": ("queue",),
    "to_offset": ("queue",),
    "version": ("pending", "ledger"),
    "timestamp": ("pending", "ledger"),
    "table_uri": ("pending", "ledger", "history"),
    "ledger_uri": ("ledger",),
    "max_rows_per_batch": STREAMED,
    "min_rows_per_batch": STREAMED,
    "max_trigger_delay_ms": STREAMED,
    "few_rows": STREAMED,
}
BATCH_ONLY = ("to_seq", "to_offset", "version", "timestamp")
STREAM_ONLY = ("max_rows_per_batch", "min_rows_per_batch", "max_trigger_delay_ms", "few_rows")


def describe() -> dict[str, str]:
    """Describe each option, for help texts and documentation: {option: description}."""
    return {
        "endpoint": f"broker, grpc://host:port ({DEFAULT_ENDPOINT})",
        "group": "only this group of a cluster; by default a write goes to the group of the endpoint's node",
        "read": "log, queue, pending, ledger, events (of the log), history (versions), or ranges of the log (log)",
        "columns": "only these columns, in this order; of the log, the broker sends no others. * is all; group is more",
        "topic": "only rows of this topic; required with read=queue",
        "from_seq": "first row to read: a number, or first, latest, watermark",
        "to_seq": "row to stop before; latest: everything durable (latest)",
        "kinds": "only these kinds of rows, filtered by the broker: scheduled,release or 2,4",
        "body_kinds": "only rows of these kinds keep their body; null for the others",
        "placed": "true: only rows with a queue position; false: only rows without one",
        "queue_id": "only this queue of the topic",
        "from_offset": "the offset to begin at in each queue: first, latest, an offset, or 0=100,1=250",
        "to_offset": "the offset to stop before in each queue: latest, an offset, or 0=100,1=250",
        "version": "version of the Delta table (default: the current one)",
        "timestamp": "the version that was current then: 2030-01-31T09:00:00Z, or milliseconds since 1970",
        "table_uri": "the pending table's URI for executors, if it is not the broker's; {group}: the group's name",
        "ledger_uri": "the URI of the ledger, if it is not beside the pending table; {group}: the group's name",
        "rows_per_partition": "the most rows of one task (500000)",
        "min_partitions": "the least number of tasks, such as the number of cores (1)",
        "max_rows_per_batch": "the most rows of one micro-batch; for the log, of all kinds (1000000)",
        "min_rows_per_batch": "the least number of new rows for a micro-batch (1)",
        "max_trigger_delay_ms": "start a micro-batch of few_rows or more after this time; 0: never (0)",
        "few_rows": "see max_trigger_delay_ms (1)",
        "on_invalid": "fail: one invalid row fails the write; drop: leave invalid rows out and count them (fail)",
        "as_stored": "true: tags, ids and keys have the form of a read, with blanks between keys (false)",
        "job_id": "name of a batch write: a second write of its rows changes nothing; of a stream, for log lines",
        "epoch": "with job_id: the number of the write of that name, such as the batch id in foreachBatch (0)",
        "on_repeat": "if a repeated write has other rows, fail: the write fails; skip: it changes nothing (fail)",
    }


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse and check the options of a read. Raises SetupError for the first bad one."""
    _check_no_catalog(options)
    by_lower_name = {key.lower(): text for key, text in options.items()}
    if SUBSCRIBED in by_lower_name and "read" not in by_lower_name:
        options = {"read": "queue", **options}
    names = aliases(options)
    parsed = parse(options, ReadOptions, _PARSERS, aliases=names)
    parsed = msgspec.structs.replace(
        parsed, endpoint=pin_to_option_group(parsed.endpoint, parsed.group), columns=_expand_columns(parsed)
    )
    for key in options:
        reads = APPLIES_TO_READS.get(names.get(key.lower(), key.lower()), tuple(SCHEMAS))
        if parsed.read not in reads:
            raise SetupError(
                f"option {key}: only with read={' or '.join(reads)}, not with read={parsed.read}"
            )
    if parsed.read == "queue" and parsed.topic is None:
        raise SetupError("option topic: missing; read=queue needs it")
    _check_topic_of_offsets(options, parsed)
    if parsed.version is not None and parsed.timestamp is not None:
        raise SetupError("options version and timestamp: give one of them")
    arrow_schema(parsed)
    return parsed


def aliases(options: Mapping[str, str]) -> dict[str, str]:
    """Choose the aliases for this read: {alias in lower case: option}. For the log, offsets are row numbers."""
    read = next((text.strip().lower() for key, text in options.items() if key.lower() == "read"), None)
    if read == "queue":
        return ALIASES
    return {name: IN_LOG.get(option, option) for name, option in ALIASES.items()}


def _check_no_catalog(options: Mapping[str, str]) -> None:
    """Refuse tables in Spark's catalog. Spark drops their options, so queries would read the default endpoint."""
    for key in options:
        if key.startswith(CATALOG_PREFIX) or key.lower() in CATALOG_OPTIONS:
            raise SetupError(
                "CREATE TABLE … USING timeball: Spark hands no option of such a table to a source in Python; write "
                "CREATE TEMPORARY VIEW … USING timeball OPTIONS (…)"
            )


def _check_topic_of_offsets(options: Mapping[str, str], parsed: ReadOptions) -> None:
    """Refuse offsets in Kafka's JSON whose topic is not the option `topic`."""
    for key, text in options.items():
        is_kafkas = ALIASES.get(key.lower(), key) in IN_LOG and text.lstrip().startswith("{")
        if is_kafkas and {*kafka_topics(text)} != {parsed.topic}:
            raise SetupError(f"option {key}={text!r}: the topic that is read is {parsed.topic!r}")


def _expand_columns(options: ReadOptions) -> tuple[str, ...] | None:
    """Replace `*` in the option `columns` by all columns of the read. Raises SetupError for a repeated column."""
    if options.columns is None or ALL_COLUMNS not in options.columns:
        return options.columns
    index = options.columns.index(ALL_COLUMNS)
    columns = (*options.columns[:index], *SCHEMAS[options.read].names, *options.columns[index + 1 :])
    if len(set(columns)) != len(columns):
        raise SetupError("option columns: each once; * is all but group")
    return columns


def pin_to_option_group(endpoint: str, group: str | None) -> str:
    """Pin an endpoint to the group of the option `group`. Raises SetupError if it is pinned to another group."""
    if group is None:
        return endpoint
    _, pinned_group = split_endpoint(endpoint)
    if pinned_group not in ("", group):
        raise SetupError(f"option group={group!r}: the endpoint is confined to the group {pinned_group!r}")
    return pin_to_group(endpoint, group)


def arrow_schema(options: ReadOptions) -> pa.Schema:
    """Build the schema of a read with these options. Raises SetupError for an unknown column."""
    schema = SCHEMAS[options.read]
    if options.columns is None:
        return schema
    for name in options.columns:
        if name not in (*schema.names, GROUP):
            raise SetupError(
                f"option columns: no column {name!r} when read={options.read}; there are {', '.join(schema.names)}, "
                f"and {GROUP}"
            )
    with_group = schema.append(GROUP_FIELD)
    return pa.schema([with_group.field(name) for name in options.columns])


def check_batch(options: ReadOptions) -> None:
    """Refuse options that only streams have. Raises SetupError."""
    for name in STREAM_ONLY:
        if getattr(options, name) != getattr(ReadOptions(), name):
            raise SetupError(f"option {name}: only for streams; a batch reads everything at once")


def check_stream(options: ReadOptions) -> None:
    """Refuse reads and options that only batches have. Raises SetupError."""
    if options.read not in STREAMED:
        raise SetupError(f"option read={options.read}: a batch source; use spark.read")
    for name in BATCH_ONLY:
        if getattr(options, name) != getattr(ReadOptions(), name):
            raise SetupError(f"option {name}: only for batch reads; a stream has no end")


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse and check the options of a write. Raises SetupError for the first bad one."""
    parsed = parse(options, WriteOptions, _PARSERS, ignored=SPARK_OPTIONS)
    if parsed.epoch and parsed.job_id is None:
        raise SetupError("option epoch: only with job_id, the name of the writes that it counts")
    return msgspec.structs.replace(parsed, endpoint=pin_to_option_group(parsed.endpoint, parsed.group))


_PARSERS: dict[str, Callable[[str], Any]] = {
    "endpoint": endpoint,
    "group": text,
    "read": one_of(*SCHEMAS),
    "columns": names,
    "topic": text,
    "from_seq": position(*STARTS),
    "to_seq": end_seq,
    "kinds": kinds,
    "body_kinds": kinds,
    "placed": flag,
    "queue_id": queue_id,
    "from_offset": offsets(*OFFSET_STARTS),
    "to_offset": offsets("latest", default="latest"),
    "version": count(0),
    "timestamp": instant_ms,
    "table_uri": text,
    "ledger_uri": text,
    "rows_per_partition": count(1),
    "min_partitions": count(1, 100_000),
    "max_rows_per_batch": count(1),
    "min_rows_per_batch": count(1),
    "max_trigger_delay_ms": count(0, limits.DAY_MS),
    "few_rows": count(1),
    "on_invalid": one_of("fail", "drop"),
    "as_stored": flag,
    "job_id": text,
    "epoch": count(0),
    "on_repeat": one_of("fail", "skip"),
}


# ---- the pace of streams: when there are enough rows for a micro-batch, and how rows are divided --------------


# The key of a lag: a queue, a group, or a queue of a group.
Part = TypeVar("Part", int, str, tuple[str, int])


class Pace:
    """Starts a micro-batch at `min_rows_per_batch` new rows, or at `few_rows` after `max_trigger_delay_ms`."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        self.options = options
        self._clock = clock or SystemClock()
        self._idle_since_ns = self._clock.monotonic_ns()

    def is_worth_a_batch(self, rows: int) -> bool:
        """Check whether this number of new rows is enough for a micro-batch now."""
        options = self.options
        if rows >= min(options.min_rows_per_batch, options.max_rows_per_batch):
            return True
        waited_ms = (self._clock.monotonic_ns() - self._idle_since_ns) // 1_000_000
        return 0 < options.max_trigger_delay_ms <= waited_ms and rows >= options.few_rows

    def begin_batch(self) -> None:
        """Restart the wait of `max_trigger_delay_ms`."""
        self._idle_since_ns = self._clock.monotonic_ns()


SINGLE_GROUP_KEY = "seq"  # the only key in the offset of a broker that is in no cluster


def encode_offset(seqs: Mapping[str, int]) -> dict[str, int]:
    """Encode {group: row} as an offset of a stream of the log, in order, so that equal offsets have equal texts.

    The key is SINGLE_GROUP_KEY for a broker that is in no cluster.
    """
    return {name or SINGLE_GROUP_KEY: seqs[name] for name in sorted(seqs)}


def split_range(begin: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Cut the range begin <= i < end into even pieces (begin, end) of at most `rows`. An empty range has no pieces."""
    span = max(0, end - begin)
    pieces = -(-span // rows)
    cuts = [begin + span * i // pieces for i in range(pieces + 1)] if pieces else []
    return list(itertools.pairwise(cuts))


def divide_rows(lag: Mapping[Part, int], rows: int) -> dict[Part, int]:
    """Divide `rows` rows among groups or queues in proportion to their lags, but take no more than the lags.

    `lag`: part -> number of its rows that are not read yet.
    """
    total = sum(lag.values())
    if total <= rows:
        return dict(lag)
    shares: dict[Part, int] = {}
    divided_rows = lag_so_far = 0
    # Rounding the running total instead of each share makes the shares add up to exactly `rows`.
    for part in sorted(lag):
        lag_so_far += lag[part]
        shares[part] = rows * lag_so_far // total - divided_rows
        divided_rows += shares[part]
    return shares
