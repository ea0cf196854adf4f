"""Parse sizes, durations and properties in options, and format sizes, durations and times for output.

A number without a unit takes the unit at the end of the option's name (`--segment-bytes`, `--retention-ms`). A duration
of another option needs a unit. Any other text is refused, so that "10m" never silently becomes 10 of another unit.
`timeball.model.time_parsing` parses durations with units, and times, in the same way as for a Python program.
"""

from __future__ import annotations

import re

from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.time_parsing import duration_ms

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
_TIME_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)


def parse_size_bytes(text: str) -> int:
    """Parse a size in bytes: a whole number, or a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB."""
    match = _SIZE.match(text)
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise RequestError(f"{text!r} is no size: write 268435456, 256MiB or 1GB")
    size = float(match[1]) * factor
    if size != int(size):
        raise RequestError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_duration_ms(text: str, advice: str = "write 500ms, 10s, 1h30m or 7d") -> int:
    """Parse a duration with units, such as 72h or 1h30m, into milliseconds. Only 0 needs no unit."""
    number = text.strip()
    if number.isdecimal() and number != "0":
        raise InvalidDelay(f"{number[:100]}: add a unit, as in 500ms or 10s")
    return duration_ms(text, advice)


def parse_setting_ms(text: str) -> int:
    """Parse the value of an option whose name ends in `-ms`: whole milliseconds, or a duration with units."""
    number = text.strip()
    return int(number) if number.isdecimal() else duration_ms(text, "write 500, 500ms, 10s, 1h30m or 7d")


def parse_property(text: str) -> tuple[str, str]:
    """Split NAME=VALUE into name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RequestError(f"{text!r} is no property: write NAME=VALUE")
    return name, value


def show_bytes(size_bytes: int) -> str:
    """Format a size for people: 256 MiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_ms(duration_ms: int) -> str:
    """Format a duration for people, in the largest unit that divides it: 72h. Days only from 10 days on."""
    for unit, factor in _TIME_UNITS_MS.items():
        if duration_ms and duration_ms % factor == 0 and (unit != "d" or duration_ms >= 10 * factor):
            return f"{duration_ms // factor}{unit}"
    return f"{duration_ms}ms"


def show_instant(time_ms: int) -> str:
    """Format a time as ISO 8601 in UTC, with milliseconds."""
    import numpy as np

    return f"{np.datetime64(time_ms, 'ms')}Z"


def show_wait(wait_ms: int) -> str:
    """Format a remaining time in its two largest units: 1,166 d 15 h. Below 1 min: seconds, to the millisecond."""
    if wait_ms < 60_000:
        return f"{wait_ms / 1000:.3f} s"
    minutes = wait_ms // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {wait_ms // 1000 % 60} s"
