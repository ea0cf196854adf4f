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
MOST = 2**62  # default upper bound of a whole number
NO_ALIASES: Mapping[str, str] = {}
# Kafka's names of positions. Kafka's JSON has the two numbers in their place.
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
    found: dict[str, Any] = {}
    for key, given in options.items():
        if key.lower() in ignored:
            continue
        name = aliases.get(key.lower(), key.lower())
        if name not in record.__struct_fields__:
            raise SetupError(f"option {key}: unknown; there are {', '.join(record.__struct_fields__)}")
        if name in found:
            raise SetupError(f"option {key}: another name of {name}, which is given as well")
        try:
            found[name] = parsers[name](given.strip())
        except ValueError as error:
            raise SetupError(f"option {key}={given!r}: {error}") from error
    return record(**found)


def one_of(*words: str) -> Callable[[str], str]:
    """Build a parser for one of these words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return parse


def count(least: int, most: int = MOST) -> Callable[[str], int]:
    """Build a parser for a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"at least {least}" if value < least else f"at most {most}")
        return value

    return parse


def position(*named: str) -> Callable[[str], int | str]:
    """Build a parser for a sequence number, or one of these names."""

    def parse(text: str) -> int | str:
        word = ours(text)
        if word in named:
            return word
        try:
            return count(0)(text)
        except ValueError as error:
            raise ValueError(f"a sequence number of 0 or more, or one of {', '.join(named)}") from error

    return parse


def ours(text: str) -> str:
    """Convert a word to lower case, and Kafka's `earliest` to our `first`."""
    return "first" if text.lower() == EARLIEST else text.lower()


def end_seq(text: str) -> int | None:
    """Parse the number of the row to stop before. None stands for `latest`: the end of the durable rows."""
    return None if text.lower() == "latest" else count(0)(text)


def offsets(*named: str, rest: str = "first") -> Callable[[str], int | str | Offsets]:
    """Build a parser for positions in queues: a name, one offset for all queues, or queue=offset,queue=offset.

    It also parses Kafka's form, {"orders": {"0": 100}}. `rest` is the position of the queues that are not listed.
    """
    wanted = ", ".join([*named, "an offset of 0 or more", "or one a queue: 0=100,1=250"])

    def parse(text: str) -> int | str | Offsets:
        word = ours(text)
        if word in named:
            return word
        try:
            if text.startswith("{"):
                pairs = kafka_offsets(text, rest)
            elif "=" in text:
                pairs = [(queue, offset) for queue, offset in (entry.split("=") for entry in text.split(","))]
            else:
                return count(0)(text)
            found = {queue_id(queue): count(0)(offset) for queue, offset in pairs}
        except ValueError as error:
            raise ValueError(wanted) from error
        if len(found) != len(pairs):
            raise ValueError("each queue once")
        return found

    return parse


def kafka_offsets(text: str, rest: str) -> list[tuple[str, str]]:
    """Return the (queue, offset) pairs of the topic in Kafka's JSON, without the queues at the position `rest`."""
    [queues] = kafka_topics(text).values()
    return [
        (queue, str(offset)) for queue, offset in queues.items() if KAFKA_WORDS.get(offset, offset) != rest
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
    """Parse the address of a broker, or addresses of a cluster. Either may be confined to one group: …#g2."""
    addresses, _ = split_endpoint(text)
    scheme, _, place = addresses.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not host or not port.isdigit():
        raise ValueError("grpc://host:port, for example grpc://127.0.0.1:7400")
    return text


def kinds(text: str) -> tuple[int, ...]:
    """Parse a list of kinds of rows, by name or number, separated by commas."""
    known = {kind.name.lower(): int(kind) for kind in Kind if kind}
    known.update({str(value): value for value in known.values()})
    found = tuple(known.get(word.strip().lower(), 0) for word in text.split(","))
    if not all(found):
        raise ValueError("a list of " + ", ".join(kind.name.lower() for kind in Kind if kind))
    return found


def flag(text: str) -> bool:
    """Parse `true` or `false`."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def names(text: str) -> tuple[str, ...]:
    """Parse a list of distinct column names, separated by commas."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) != len(found):
        raise ValueError("column names, separated by commas, each once")
    return found


def text(given: str) -> str:
    """Parse a nonempty text."""
    if not given:
        raise ValueError("may not be empty")
    return given


def instant_ms(text: str) -> int:
    """Parse a point in time to milliseconds since 1970: that number, or ISO 8601 with an offset from UTC."""
    if text.isdecimal():
        return count(0, limits.INSTANT_MS_MAX)(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("an instant such as 2030-01-31T09:00:00Z or 1895994000000") from None
    if instant.tzinfo is None:
        raise ValueError("names no time zone: end it with Z or an offset such as +01:00")
    return round(instant.timestamp() * 1000)
