"""Options of the data source `timeball`: text in, checked values out, and an error that names the option.

Spark hands options over as text under lower-case names, from `.option(...)` and from `.load(path)` alike. An
option nobody knows is refused, because a misspelt `max_rows_per_bach` would otherwise be obeyed by silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from timeball import limits
from timeball.errors import SetupError
from timeball.message import READ_SCHEMA, TABLE_SCHEMA, Kind

DEFAULT_ENDPOINT = "grpc://127.0.0.1:7400"
READS = ("log", "pending", "ranges")
STARTS = ("first", "latest", "watermark")
RANGE_COLUMNS = ("from_seq", "to_seq")
# Spark's own words, which it passes on to the sink of a stream.
SPARK_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}

T = TypeVar("T", bound=msgspec.Struct)


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a read; see `describe` for what each is for."""

    endpoint: str = DEFAULT_ENDPOINT
    read: str = "log"
    from_seq: int | str | None = None
    to_seq: int | None = None
    kinds: tuple[int, ...] | None = None
    body_kinds: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    version: int | None = None
    rows_per_partition: int = 500_000
    max_rows_per_batch: int = 1_000_000
    min_rows_per_batch: int = 1
    max_trigger_delay_ms: int = 0
    few_rows: int = 1


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a write; see `describe` for what each is for."""

    endpoint: str = DEFAULT_ENDPOINT
    on_invalid: str = "fail"
    job_id: str | None = None
    table_uri: str | None = None


def describe() -> dict[str, str]:
    """What each option means, for help texts and documentation."""
    return {
        "endpoint": f"broker, grpc://host:port ({DEFAULT_ENDPOINT})",
        "read": "log: rows of the log; pending: of the pending table (batch only); ranges: only (from_seq, to_seq)",
        "from_seq": "first row to read: a number, or first, latest, watermark",
        "to_seq": "row to stop before (batch; default: everything durable)",
        "kinds": "only these kinds of rows, filtered by the broker: promise,release or 2,3",
        "body_kinds": "only rows of these kinds keep their body; null for the others",
        "columns": "only these columns, in this order",
        "version": "version of the pending table (default: the current one)",
        "rows_per_partition": "rows of the log that one task reads",
        "max_rows_per_batch": "rows of the log in one micro-batch, at most",
        "min_rows_per_batch": "wait for so many new rows before a micro-batch starts",
        "max_trigger_delay_ms": "but start after this time with few_rows or more; 0 waits for ever",
        "few_rows": "see max_trigger_delay_ms",
        "on_invalid": "fail: one invalid row fails the write; drop: leave invalid rows out and count them",
        "job_id": "name of this write; a second write with the same name changes nothing",
        "table_uri": "where executors reach the pending table, if not where the broker says",
    }


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checked options of a read; SetupError names the first bad one."""
    parsed = _parse(options, ReadOptions)
    if parsed.columns is not None:
        known = {"log": READ_SCHEMA.names, "pending": TABLE_SCHEMA.names, "ranges": RANGE_COLUMNS}[
            parsed.read
        ]
        for name in parsed.columns:
            if name not in known:
                raise SetupError(
                    f"option columns: no column {name!r} when read={parsed.read}; there are {list(known)}"
                )
    if parsed.version is not None and parsed.read != "pending":
        raise SetupError("option version: only with read=pending")
    return parsed


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Checked options of a write; SetupError names the first bad one."""
    return _parse({k: v for k, v in options.items() if k.lower() not in SPARK_OPTIONS}, WriteOptions)


def _parse(options: Mapping[str, str], record: type[T]) -> T:
    values: dict[str, Any] = {}
    for key, text in options.items():
        name = key.lower()
        if name not in record.__struct_fields__:
            raise SetupError(f"option {key}: unknown; there are {', '.join(record.__struct_fields__)}")
        try:
            values[name] = _PARSERS[name](text.strip())
        except ValueError as error:
            raise SetupError(f"option {name}={text!r}: {error}") from error
    return record(**values)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return parse


def _count(least: int, most: int = 2**62) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"at least {least}" if value < least else f"at most {most}")
        return value

    return parse


def _position(text: str) -> int | str:
    if text.lower() in STARTS:
        return text.lower()
    try:
        return _count(0)(text)
    except ValueError as error:
        raise ValueError(f"a sequence number of 0 or more, or one of {', '.join(STARTS)}") from error


def _endpoint(text: str) -> str:
    scheme, _, place = text.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not host or not port.isdigit():
        raise ValueError("grpc://host:port, for example " + DEFAULT_ENDPOINT)
    return text


def _kinds(text: str) -> tuple[int, ...]:
    known = {kind.name.lower(): int(kind) for kind in Kind if kind}
    known.update({str(value): value for value in known.values()})
    found = tuple(known.get(word.strip().lower(), 0) for word in text.split(","))
    if not all(found):
        raise ValueError("a list of " + ", ".join(kind.name.lower() for kind in Kind if kind))
    return found


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise ValueError("column names, separated by commas, each once")
    return names


def _text(text: str) -> str:
    if not text:
        raise ValueError("may not be empty")
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    "endpoint": _endpoint,
    "read": _one_of(*READS),
    "from_seq": _position,
    "to_seq": _count(0),
    "kinds": _kinds,
    "body_kinds": _kinds,
    "columns": _names,
    "version": _count(0),
    "rows_per_partition": _count(1),
    "max_rows_per_batch": _count(1),
    "min_rows_per_batch": _count(1),
    "max_trigger_delay_ms": _count(0, limits.DAY_MS),
    "few_rows": _count(1),
    "on_invalid": _one_of("fail", "drop"),
    "job_id": _text,
    "table_uri": _text,
}
