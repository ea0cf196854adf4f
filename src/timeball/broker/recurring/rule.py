"""A rule of a recurring schedule: parse it, and compute its occurrences.

A rule is a mapping with exactly one of these keys:

    cron    text of five fields, or of six with `seconds` (cron_rule.py)
    every   a duration such as "15m": elapsed time from `anchor`, an instant (default 1970-01-01T00:00:00Z)
    rrule   text of RFC 5545 with DTSTART (rrule_rule.py)
    at      a list of local times

`zone` is the IANA name of the zone of all local times. It is required for cron, rrule and at. With `every` it is the
zone of `exclude`, and of local times in `starts_at` and `ends_at` (default UTC). These keys are optional:

    seconds     true: `cron` has six fields, the first one for seconds
    gap         "after" (default) or "skip": the run of a local time that clocks skip (occurrences.py)
    fold        "first" (default) or "both": the runs of a local time that clocks show twice
    starts_at   no occurrence is earlier: an instant with an offset from UTC, or a local time in `zone`
    ends_at     no occurrence is later
    count       number of occurrences from `starts_at` on, with `every` from `anchor` on if there is no `starts_at`
    exclude     list of dates in `zone` without occurrences
    move        "skip" (default), "before" or "after": occurrences of an excluded date are left out, or take place at
                the same local time on the nearest earlier or later date that is not excluded

Occurrences lie between 1970 and 9999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import partial
from typing import NoReturn

import msgspec

from timeball.broker.recurring.cron_rule import parse_cron
from timeball.broker.recurring.exclusions import ExcludedDays, Excluding
from timeball.broker.recurring.kept_results import cached
from timeball.broker.recurring.local_times import (
    ListedTimes,
    LocalTimes,
    instant_text,
    local_seconds,
    local_text,
)
from timeball.broker.recurring.occurrences import (
    ClockTimetable,
    IntervalTimetable,
    Occurrence,
    Timetable,
)
from timeball.broker.recurring.rrule_rule import parse_rrule
from timeball.model import limits
from timeball.model.errors import UNDECODABLE, InvalidDelay
from timeball.model.message import Int64Array
from timeball.model.time_parsing import Zone, delay_ms, instant_ms, load_zone
from timeball.model.values import shown, valid

__all__ = ["Occurrence", "Rule"]

_KINDS = ("cron", "every", "rrule", "at")
_CHOICES = {"gap": ("after", "skip"), "fold": ("first", "both"), "move": ("skip", "before", "after")}
_KEYS = (
    *_KINDS, "seconds", "anchor", "zone", "gap", "fold", "starts_at", "ends_at", "count", "exclude", "move",
)  # fmt: skip
_FOR_ONE_KIND = {
    "seconds": ("cron",),
    "anchor": ("every",),
    "gap": ("cron", "rrule", "at"),
    "fold": ("cron", "rrule", "at"),
}
_UNIT_MS = {
    "w": 7 * limits.DAY_MS, "d": limits.DAY_MS, "h": limits.HOUR_MS, "m": limits.MINUTE_MS, "s": limits.SECOND_MS,
    "ms": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule. Rules are equal if their canonical texts are equal.

    `text` is the form to store: the JSON of `spec()`, about 60 bytes for a cron rule with a zone.
    """

    text: str
    _timetable: Timetable = field(compare=False, repr=False)

    @classmethod
    def parse(cls, spec: Mapping[str, object]) -> Rule:
        """Parse a rule from the keys above. Raises InvalidDelay, which says how to write the rule instead."""
        return cls.from_text(_to_text(_read_spec(spec)))

    @classmethod
    def from_text(cls, text: str) -> Rule:
        """Parse the JSON text of a rule. Recent rules are cached, so equal texts mostly give one object.

        Raises InvalidDelay.
        """
        return _parse_rule(text)

    def spec(self) -> dict[str, object]:
        """Build the canonical form of the mapping: `parse(rule.spec()) == rule`."""
        spec: dict[str, object] = msgspec.json.decode(self.text)
        return spec

    def after(self, instant_ms: int, number: int = 1) -> list[Occurrence]:
        """Compute the first occurrences later than an instant (ms since 1970), at most `number`.

        They are strictly increasing. The list is empty when the rule has ended.
        """
        return self._timetable.occurrences(instant_ms, limits.INSTANT_MS_MAX, number)

    def between(self, from_ms: int, until_ms: int, limit: int) -> list[Occurrence]:
        """Compute the first occurrences later than `from_ms` and not later than `until_ms`, at most `limit`."""
        return self._timetable.occurrences(from_ms, until_ms, limit)

    def instants(self, from_ms: int, until_ms: int, limit: int) -> Int64Array:
        """Compute the instants (ms since 1970) of the occurrences of `between`."""
        return self._timetable.instants(from_ms, until_ms, limit)

    def resumes_after_ms(self, local: str, after_ms: int) -> int:
        """Find a time (ms) after which the first occurrence is the one at this local time.

        Used after an update of the time zone database: `local` is the local time of an occurrence that is pending by
        the former rules of its zone, and `after_ms` the time of its predecessor. The result is `after_ms` if the local
        time does not identify the occurrence: for `every`, for rules that run in every hour, and with `fold` "both".
        """
        return self._timetable.resumes_after_ms(local, after_ms)


@cached()
def _parse_rule(text: str) -> Rule:
    """Parse the text of a rule (`Rule.text`, or the JSON of any mapping that describes one). Raises InvalidDelay."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
    except UNDECODABLE:
        raise InvalidDelay(f"rule: {shown(text)} is not a JSON object") from None
    spec = _read_spec(fields)
    return Rule(_to_text(spec), _build_timetable(spec))


def _to_text(spec: dict[str, object]) -> str:
    """Convert a canonical form to the text of its rule."""
    return msgspec.json.encode(spec).decode("utf-8")


# ---- the canonical form -----------------------------------------------------------------------------------------


def _read_spec(fields: Mapping[str, object]) -> dict[str, object]:
    """Check a mapping, and build its canonical form: keys in one order, without defaults. Raises InvalidDelay."""
    spec = {key: value for key, value in fields.items() if value is not None}
    for key in spec:
        if key not in _KEYS:
            _refuse("rule", key, f"is no key of a rule; {valid(str(key), _KEYS)}")
    kinds = [kind for kind in _KINDS if kind in spec]
    if len(kinds) != 1:
        raise InvalidDelay(
            f"rule: exactly one of cron, every, rrule and at is needed; given: {', '.join(kinds) or 'none'}"
        )
    kind = kinds[0]
    for key, allowed in _FOR_ONE_KIND.items():
        if key in spec and kind not in allowed:
            _refuse(key, spec[key], f"belongs to {', '.join(allowed)}; leave it out for {kind}")
    zone = _read_zone(spec, kind)
    seconds = _read_flag(spec, "seconds")
    # A default is read as None and left out, so that rules with equal meaning have equal texts.
    readers: dict[str, Callable[[], object]] = {
        "cron": lambda: parse_cron(_read_text(spec, "cron"), seconds).text,
        "every": lambda: _duration_text(_read_every(spec)),
        "rrule": lambda: parse_rrule(_read_text(spec, "rrule"), zone.name).text,
        "at": lambda: [local_text(local_s) for local_s in _read_local_times(spec)],
        "seconds": lambda: seconds or None,
        "anchor": lambda: _read_moment(spec, "anchor", None)[0],
        "zone": lambda: zone.name,
        "starts_at": lambda: _read_moment(spec, "starts_at", zone)[0],
        "ends_at": lambda: _read_moment(spec, "ends_at", zone)[0],
        "count": lambda: _read_count(spec, kind),
        "exclude": lambda: [day.isoformat() for day in _read_dates(spec)] or None,
        **{key: partial(_read_choice, spec, key) for key in _CHOICES},
    }
    canonical = {key: readers[key]() for key in _KEYS if key in spec}
    _check_together(canonical, zone)
    return {key: value for key, value in canonical.items() if value is not None}


def _check_together(spec: dict[str, object], zone: Zone) -> None:
    """Check keys that depend on each other, in a canonical form. Raises InvalidDelay."""
    if spec.get("move") and "every" in spec:
        _refuse(
            "move",
            spec["move"],
            "an interval has no local time to keep; leave it out, or write the rule as cron",
        )
    if spec.get("move") and not spec.get("exclude"):
        _refuse("move", spec["move"], "needs exclude, a list of dates such as '2030-12-25'")
    if "starts_at" in spec and "ends_at" in spec:
        starts_ms, ends_ms = (_read_moment(spec, key, zone)[1] for key in ("starts_at", "ends_at"))
        if ends_ms < starts_ms:
            _refuse("ends_at", spec["ends_at"], "is earlier than starts_at")


def _read_zone(spec: Mapping[str, object], kind: str) -> Zone:
    """Load the zone of a rule. UTC is the default for `every`. Raises InvalidDelay."""
    if "zone" in spec:
        return load_zone(_read_text(spec, "zone"))
    if kind != "every":
        raise InvalidDelay(f"zone: {kind} needs the zone of its local times, such as Europe/Berlin or UTC")
    return load_zone("UTC")


def _read_text(spec: Mapping[str, object], key: str) -> str:
    """Read a text of at most RULE_CHARACTERS_MAX characters. Raises InvalidDelay."""
    value = spec[key]
    if not isinstance(value, str):
        _refuse(key, value, "must be text")
    if len(value) > limits.RULE_CHARACTERS_MAX:
        raise InvalidDelay(
            f"{key}: has {len(value)} characters, at most {limits.RULE_CHARACTERS_MAX} are allowed"
        )
    return value


def _read_flag(spec: Mapping[str, object], key: str) -> bool:
    """Read true or false (the default). Raises InvalidDelay."""
    value = spec.get(key, False)
    if not isinstance(value, bool):
        _refuse(key, value, "must be true or false")
    return value


def _read_choice(spec: Mapping[str, object], key: str) -> str | None:
    """Read one of the values that the key allows. None stands for the first one, the default. Raises InvalidDelay."""
    value = _read_text(spec, key)
    if value not in _CHOICES[key]:
        _refuse(key, value, valid(value, _CHOICES[key]))
    return None if value == _CHOICES[key][0] else value


def _read_count(spec: Mapping[str, object], kind: str) -> int:
    """Read the number of occurrences. Raises InvalidDelay, also for a rule without a first occurrence."""
    value = spec["count"]
    # JSON's `true` is an int in Python.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limits.RULE_COUNT_MAX:
        _refuse(
            "count", value, f"must be a number from 1 to {limits.RULE_COUNT_MAX}; for more, write ends_at"
        )
    # Without a first occurrence there is no place from which to count. `rrule` and `at` have one.
    if (kind == "cron" and "starts_at" not in spec) or (
        kind == "every" and not {"starts_at", "anchor"} & spec.keys()
    ):
        _refuse("count", value, "needs starts_at, from which occurrences are counted")
    return value


def _read_every(spec: Mapping[str, object]) -> int:
    """Read the interval in ms. Raises InvalidDelay."""
    every_ms = delay_ms(_read_text(spec, "every"), "every")
    if every_ms < limits.SECOND_MS:
        _refuse("every", spec["every"], "must be at least 1s")
    return every_ms


def _duration_text(duration_ms: int) -> str:
    """Write a duration in the largest unit without a remainder ("90m" for 1.5 h), so that each has only one text."""
    unit = next(unit for unit, unit_ms in _UNIT_MS.items() if duration_ms % unit_ms == 0)
    return f"{duration_ms // _UNIT_MS[unit]}{unit}"


def _read_list(spec: Mapping[str, object], key: str, example: str) -> list[str]:
    """Read a list of at most RULE_LISTED_MAX texts. Empty without the key. `example`: for errors.

    Raises InvalidDelay.
    """
    values = spec.get(key, [])
    # A text is an iterable of its characters, so it must be excluded.
    if isinstance(values, str) or not isinstance(values, Iterable):
        _refuse(key, values, f"must be a list such as [{example!r}]")
    texts = list(values)
    if len(texts) > limits.RULE_LISTED_MAX:
        raise InvalidDelay(f"{key}: has {len(texts)} entries, at most {limits.RULE_LISTED_MAX} are allowed")
    for text in texts:
        if not isinstance(text, str):
            _refuse(key, text, f"must be text such as {example!r}")
    return texts


def _read_dates(spec: Mapping[str, object]) -> list[date]:
    """Read `exclude`: dates in order, without repetitions. Raises InvalidDelay."""
    days = set()
    for text in _read_list(spec, "exclude", "2030-12-25"):
        try:
            days.add(date.fromisoformat(text))
        except ValueError:
            _refuse("exclude", text, "must be a date such as '2030-12-25'")
    return sorted(days)


def _read_local_times(spec: Mapping[str, object]) -> tuple[int, ...]:
    """Read `at`: local times (local_times.py) in order and without repetitions. Raises InvalidDelay."""
    example = "2030-01-31T09:00"
    times = set()
    for text in _read_list(spec, "at", example):
        # `fromisoformat` also reads a date alone, as midnight, which is rarely meant.
        local = _parse_time(text) if "T" in text else None
        if local is None or local.tzinfo is not None or local.microsecond:
            _refuse(
                "at",
                text,
                f"must be a local time such as '{example}' in whole seconds; its offset follows from zone",
            )
        times.add(local_seconds(local))
    if not times:
        raise InvalidDelay(f"at: is empty; list local times such as '{example}'")
    return tuple(sorted(times))


def _read_moment(spec: Mapping[str, object], key: str, zone: Zone | None) -> tuple[str, int]:
    """Read an instant or, with `zone`, a local time in whole seconds. Returns its canonical text, and ms since 1970.

    Raises InvalidDelay.
    """
    text = _read_text(spec, key)
    shown_time = _parse_time(text) if "T" in text else None
    if shown_time is None or (shown_time.tzinfo is None and zone is None):
        local = "" if zone is None else ", or '2030-01-31T09:00' for a local time in the zone"
        _refuse(key, text, f"must be an instant such as '2030-01-31T09:00:00Z'{local}")
    local_s = 0
    if shown_time.tzinfo is not None:
        at_ms = instant_ms(text)
    else:
        assert zone is not None
        if shown_time.microsecond:
            _refuse(key, text, "a local time has whole seconds")
        local_s = local_seconds(shown_time)
        at_ms = zone.instant_us(local_s * 1_000_000) // 1_000
    # Before the text is built: with an offset, an instant may be outside the years of a datetime.
    if not 0 <= at_ms <= limits.INSTANT_MS_MAX:
        _refuse(key, text, "must be from 1970 to 9999")
    return local_text(local_s) if shown_time.tzinfo is None else instant_text(at_ms), at_ms


def _parse_time(text: str) -> datetime | None:
    """Parse an ISO date or time, with or without an offset. None for other texts."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _refuse(key: str, value: object, advice: str) -> NoReturn:
    raise InvalidDelay(f"{key}={shown(value)}: {advice}")


# ---- the timetable of a canonical form --------------------------------------------------------------------------


def _build_timetable(spec: dict[str, object]) -> Timetable:
    """Build the timetable of a rule in its canonical form."""
    zone = load_zone(str(spec.get("zone", "UTC")))
    starts_ms = _read_moment(spec, "starts_at", zone)[1] if "starts_at" in spec else 0
    ends_ms = _read_moment(spec, "ends_at", zone)[1] if "ends_at" in spec else limits.INSTANT_MS_MAX
    excluded = ExcludedDays(tuple(_read_dates(spec)), str(spec.get("move", "skip")))
    if "every" in spec:
        anchor_ms = _read_moment(spec, "anchor", None)[1] if "anchor" in spec else 0
        timetable: Timetable = IntervalTimetable(
            interval_ms=_read_every(spec), anchor_ms=anchor_ms, starts_ms=starts_ms, ends_ms=ends_ms,
            zone=zone, excluded=excluded,
        )  # fmt: skip
    else:
        times, times_end_ms = _build_local_times(spec, zone)
        # With "after", the last times may move to days after the end of the recurrence rule, but not after `ends_at`.
        if spec.get("move") != "after":
            ends_ms = min(ends_ms, times_end_ms)
        timetable = ClockTimetable(
            times=Excluding(times, excluded) if excluded.days else times, zone=zone,
            starts_ms=starts_ms, ends_ms=ends_ms,
            skips_gaps=spec.get("gap") == "skip", runs_twice=spec.get("fold") == "both",
        )  # fmt: skip
    count = spec.get("count")
    return timetable.ending_after(count) if isinstance(count, int) else timetable


def _build_local_times(spec: dict[str, object], zone: Zone) -> tuple[LocalTimes, int]:
    """Build the local times of a rule. Returns them, and the last instant that an rrule's UNTIL allows."""
    if "cron" in spec:
        return parse_cron(_read_text(spec, "cron"), _read_flag(spec, "seconds")), limits.INSTANT_MS_MAX
    if "at" in spec:
        return ListedTimes(_read_local_times(spec)), limits.INSTANT_MS_MAX
    times = parse_rrule(_read_text(spec, "rrule"), zone.name)
    return times, times.ends_ms
