"""Parse the text of an option: one parser for each kind of value.

A parser raises ValueError with a sentence about what it wants; `parse` puts the option's name and text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from timeball import limits
from timeball.errors import SetupError
from timeball.message import Kind
from timeball.pipeline.groups import split_endpoint

Offsets = dict[int, int]  # queue -> offset
MOST = 2**62
NO_ALIASES: Mapping[str, str] = {}
# Kafka's words. In its JSON an offset may be one of two numbers instead.
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
    """Parse options, given in any case, as a record; SetupError names the first bad one as it was given."""
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
    """Parse one of these words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return parse


def count(least: int, most: int = MOST) -> Callable[[str], int]:
    """Parse a whole number from `least` to `most`."""

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
    """Parse a sequence number, or one of these names."""

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
    """Return a word in lower case, and Kafka's word for the first row as ours."""
    return "first" if text.lower() == EARLIEST else text.lower()


def end_seq(text: str) -> int | None:
    """Parse the number of the row to stop before; `latest` is where everything ends that is durable."""
    return None if text.lower() == "latest" else count(0)(text)


def offsets(*named: str, rest: str = "first") -> Callable[[str], int | str | Offsets]:
    """Parse where to stand in queues: a name, one offset for all of them, or queue=offset,queue=offset.

    Kafka's form is understood too, {"orders": {"0": 100}}. `rest`: where queues stand that are not named.
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
    """Return the queues and offsets of one topic in Kafka's JSON, without those that stand where the rest does."""
    [queues] = kafka_topics(text).values()
    return [
        (queue, str(offset)) for queue, offset in queues.items() if KAFKA_WORDS.get(offset, offset) != rest
    ]


def kafka_topics(text: str) -> dict[str, dict[str, int]]:
    """Return the offsets by queue of the one topic that Kafka's JSON names; ValueError for another number of them."""
    try:
        topics = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if len(topics) != 1:
        raise ValueError("one topic")
    return topics


def queue_id(text: str) -> int:
    """Parse the number of a queue."""
    return count(0, limits.QUEUES_PER_TOPIC_MAX - 1)(text)


def endpoint(text: str) -> str:
    """Parse the address of a broker, or addresses of a cluster, which may be confined to one group: …#g2."""
    addresses, _ = split_endpoint(text)
    scheme, _, place = addresses.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not host or not port.isdigit():
        raise ValueError("grpc://host:port, for example grpc://127.0.0.1:7400")
    return text


def kinds(text: str) -> tuple[int, ...]:
    """Parse kinds of rows, by name or number."""
    known = {kind.name.lower(): int(kind) for kind in Kind if kind}
    known.update({str(value): value for value in known.values()})
    found = tuple(known.get(word.strip().lower(), 0) for word in text.split(","))
    if not all(found):
        raise ValueError("a list of " + ", ".join(kind.name.lower() for kind in Kind if kind))
    return found


def flag(text: str) -> bool:
    """Return whether the text says true."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def names(text: str) -> tuple[str, ...]:
    """Parse names of columns."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) != len(found):
        raise ValueError("column names, separated by commas, each once")
    return found


def text(given: str) -> str:
    """Parse a text that is not empty."""
    if not given:
        raise ValueError("may not be empty")
    return given


def instant_ms(text: str) -> int:
    """Parse milliseconds since 1970, or ISO 8601 with an offset from UTC."""
    if text.isdecimal():
        return count(0, limits.INSTANT_MS_MAX)(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("an instant such as 2030-01-31T09:00:00Z or 1895994000000") from None
    if instant.tzinfo is None:
        raise ValueError("names no time zone: end it with Z or an offset such as +01:00")
    return round(instant.timestamp() * 1000)
