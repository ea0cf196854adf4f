"""Sizes, durations and instants as people write them, and as they are shown: 256MiB, 72h, 1h30m, 2030-01-31T09:00:00Z.

A bare number keeps the unit that the option's name ends in (`--segment-bytes`, `--retention-ms`). Anything
that does not parse is refused: "10m" must never quietly become ten of something else.
"""

from __future__ import annotations

import re
from datetime import datetime

from timeball.errors import InvalidDelay, RequestError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_TIME_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)", re.IGNORECASE)


def parse_size_bytes(text: str) -> int:
    """Bytes in `text`: a whole number, or a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB."""
    match = _SIZE.match(text)
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise RequestError(f"{text!r} is no size: write 268435456, 256MiB or 1GB")
    size = float(match[1]) * factor
    if size != int(size):
        raise RequestError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_duration_ms(text: str, advice: str = "write 500 (milliseconds), 250ms, 90s, 1h30m or 7d") -> int:
    """Milliseconds in `text`: a whole number, or parts of ms, s, m, h, d, w such as 72h or 1h30m."""
    stripped = text.strip()
    if stripped.isdecimal():
        return int(stripped)
    parts = _DURATION_PART.findall(stripped)
    if not parts or _DURATION_PART.sub("", stripped).strip():
        raise RequestError(f"{text!r} is no duration: {advice}")
    total = sum(float(number) * _TIME_UNITS_MS[unit.lower()] for number, unit in parts)
    if total != int(total):
        raise RequestError(f"{text!r} is not a whole number of milliseconds")
    return int(total)


def parse_instant_ms(text: str) -> int:
    """Milliseconds since 1970 in `text`: ISO 8601 with an offset from UTC, or such a number itself."""
    stripped = text.strip()
    if stripped.isdecimal():
        return int(stripped)
    try:
        instant = datetime.fromisoformat(stripped)
    except ValueError as error:
        raise InvalidDelay(f"{text!r} is no instant: write 2030-01-31T09:00:00Z or 1895994000000") from error
    if instant.tzinfo is None:
        raise InvalidDelay(
            f"{text!r} names no time zone, and would fire at a different instant on another machine: "
            "end it with Z or an offset such as +01:00"
        )
    return round(instant.timestamp() * 1000)


def parse_property(text: str) -> tuple[str, str]:
    """Name and value in NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RequestError(f"{text!r} is no property: write NAME=VALUE")
    return name, value


def show_bytes(size_bytes: int) -> str:
    """A size for people: 256 MiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_ms(duration_ms: int) -> str:
    """A duration for people, in its largest whole unit: 72h."""
    for unit in ("d", "h", "m", "s"):
        factor = _TIME_UNITS_MS[unit]
        if duration_ms and duration_ms % factor == 0 and (unit != "d" or duration_ms >= 10 * factor):
            return f"{duration_ms // factor}{unit}"
    return f"{duration_ms}ms"


def show_instant(instant_ms: int) -> str:
    """An instant as ISO 8601 in UTC, with milliseconds."""
    import numpy as np

    return f"{np.datetime64(instant_ms, 'ms')}Z"


def show_wait(wait_ms: int) -> str:
    """How long it is until then, in its two largest units: 1,166 d 15 h; below a minute to the millisecond."""
    if wait_ms < 60_000:
        return f"{wait_ms / 1000:.3f} s"
    minutes = wait_ms // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {wait_ms // 1000 % 60} s"
