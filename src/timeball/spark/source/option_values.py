"""Parsers for the texts of options: one parser for each kind of value.

A parser raises ValueError with a description of the allowed values. `parse` prepends the option's name and text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from timeball.model import limits
from timeball.model.errors import SetupError
from timeball.model.message import Kind
from timeball.spark.groups import split_endpoint

Offsets = dict[int, int]  # queue -> offset
NUMBER_MAX = 2**62  # default upper bound of a whole number
NO_ALIASES: Mapping[str, str] = {}
# Kafka's name of the first offset. In JSON, Kafka uses two numbers as positions.
EARLIEST = "earliest"
KAFKA_WORDS = {-2: "first", -1: "latest"}

T = TypeVar("T", bound=msgspec.Struct)


def parse(
    options: Mapping[str, str],
    record: type[T],
    parsers: Mapping[str, Callable[[str], Any]],
    ignored: Collection[str] = (),
    aliases: Mapping[str, str] = NO_ALIASES,
) -> T:
    """Parse options, whose names may be in any case, to a `record`.

    `ignored` and the keys of `aliases` are names in lower case. Raises SetupError for the first bad option, with the
    name that the user wrote.
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
    """Build a parser for a whole number from `lowest` to `highest`."""

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
    """Build a parser for a sequence number or one of these names."""

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

    It also parses Kafka's form, {"orders": {"0": 100}}. `default`: the position of the queues that are not listed.
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
    """Read the (queue, offset) pairs of the topic from Kafka's JSON, without the queues at the position `default`."""
    [queues] = kafka_topics(text).values()
    return [
        (queue, str(offset)) for queue, offset in queues.items() if KAFKA_WORDS.get(offset, offset) != default
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
    known = {kind.name.lower(): int(kind) for kind in Kind if kind}
    known.update({str(value): value for value in known.values()})
    numbers = tuple(known.get(word.strip().lower(), 0) for word in text.split(","))
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
