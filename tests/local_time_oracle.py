"""The time at which a clock shows a local time, by its definition: by reading clocks.

A clock is only asked for the local time at an instant. No library converts a local time to an instant, so no library's
rule for gaps and repeated times is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
US = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)

# Zones whose rules for the coming years differ between tzdata 2026.6 and 2025b, which Java 25 and Debian 12 have.
CHANGED_ZONES = (
    "Africa/Casablanca", "Africa/El_Aaiun", "America/Edmonton", "America/Havana", "America/Inuvik",
    "America/Rainy_River", "America/Vancouver", "America/Winnipeg", "America/Yellowknife", "Canada/Central",
    "Canada/Mountain", "Canada/Pacific", "Cuba", "Europe/Chisinau",
)  # fmt: skip


@cache
def zone_names() -> tuple[str, ...]:
    """Return the zones of the installed tzdata."""
    return tuple(sorted(resources.files("tzdata").joinpath("zones").read_text("ascii").split()))


@cache
def distinct_zones() -> tuple[str, ...]:
    """Return one zone for each set of rules, because many zones are aliases."""
    zones = {
        resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes(): name
        for name in zone_names()
    }
    return tuple(zones.values())


@cache
def clock(zone: str) -> ZoneInfo:
    """Return a zone of the installed tzdata, whatever the host has."""
    with resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=zone)


def shown(at: datetime, zone: str) -> datetime:
    """Return the local time that a clock in the zone shows at an instant."""
    return at.astimezone(clock(zone)).replace(tzinfo=None, fold=0)


def first_instant(local: datetime, zone: str) -> datetime:
    """Return the first instant with this local time. If there is none, the first one with a later local time."""
    guess = local.replace(tzinfo=UTC)
    around = [guess + timedelta(hours=hours) for hours in range(-30, 31, 3)]
    offsets = {shown(at, zone) - at.replace(tzinfo=None) for at in around}
    matches = [guess - offset for offset in offsets if shown(guess - offset, zone) == local]
    if matches:
        return min(matches)
    low, high = around[0].replace(microsecond=0), around[-1].replace(microsecond=0)
    while high - low > SECOND:
        middle = low + (high - low) // SECOND // 2 * SECOND
        if shown(middle, zone) < local:
            low = middle
        else:
            high = middle
    return high


def first_instant_us(local: datetime, zone: str) -> int:
    """Return `first_instant` in microseconds since 1970."""
    return (first_instant(local, zone) - EPOCH) // US


def changes(zone: str, first_year: int = 1970, end_year: int = 2038) -> Iterator[datetime]:
    """Yield the first second of each new UTC offset. Of two changes within three days, both may be missed."""
    at, end, step = (
        datetime(first_year, 1, 1, tzinfo=UTC),
        datetime(end_year, 1, 1, tzinfo=UTC),
        timedelta(days=3),
    )
    rules = clock(zone)
    offset = at.astimezone(rules).utcoffset()
    while at < end:
        low, at = at, at + step
        new = at.astimezone(rules).utcoffset()
        if new != offset:
            high = at
            while high - low > SECOND:
                middle = low + (high - low) // SECOND // 2 * SECOND
                if middle.astimezone(rules).utcoffset() == offset:
                    low = middle
                else:
                    high = middle
            yield high
            offset = new


def local_times_around(change: datetime, zone: str) -> list[datetime]:
    """Return local times before, at, within and after a gap or a repeated period."""
    before, after = shown(change - SECOND, zone) + SECOND, shown(change, zone)
    low, high = min(before, after), max(before, after)
    return [
        low - timedelta(hours=1), low - US, low, low + US, low + (high - low) / 2, high - US, high, high + US,
        high + timedelta(hours=1),
    ]  # fmt: skip
