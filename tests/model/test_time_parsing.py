"""after= and at=: their values in milliseconds, never early, and the reason of each refusal."""

import io
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.local_time_oracle import (
    CHANGED_ZONES,
    EPOCH,
    US,
    changes,
    clock,
    first_instant_us,
    local_times_around,
)

from timeball.model import limits, time_parsing
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import delay_ms, due_ms, duration_text, signed_duration_ms, when


@pytest.mark.parametrize(
    ("after", "ms"),
    [
        (0, 0),
        (0.0, 0),
        ("0", 0),
        ("0.29s", 290),
        ("0.0001s", 1),
        ("250ms", 250),
        ("30m", 1_800_000),
        ("1h30m", 5_400_000),
        ("1.5h", 5_400_000),
        ("1 h 30m", 5_400_000),
        (" 2D ", 2 * limits.DAY_MS),
        ("1w1d1h1m1s1ms", 8 * limits.DAY_MS + limits.HOUR_MS + limits.MINUTE_MS + 1_001),
        ("0.1ms", 1),
        ("PT30M", 1_800_000),
        ("P1DT2H30M0.5S", limits.DAY_MS + 9_000_500),
        ("P2W", 14 * limits.DAY_MS),
        (timedelta(microseconds=1), 1),
        (timedelta(days=40), 40 * limits.DAY_MS),
    ],
)
def test_a_delay_is_converted_to_milliseconds(after: object, ms: int) -> None:
    assert delay_ms(after) == ms  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (5, "after=5: a number has no unit; write text such as '5s' or '30m', or a timedelta"),
        (2.5, "after=2.5: a number has no unit"),
        (-1, "no unit"),
        (np.int64(3), "no unit"),
        (np.float64(0.5), "no unit"),
        (timedelta(seconds=-1), "negative"),
        (float("nan"), "no unit"),
        (float("inf"), "no unit"),
        (True, "a timedelta, or text"),
        (None, "a timedelta, or text"),
        ([5], "a timedelta, or text"),
        ("", "units"),
        ("30", "units"),
        ("m", "units"),
        ("30x", "units"),
        ("-5m", "units"),
        ("5m!", "units"),
        ("P", "units"),
        ("PT", "units"),
        ("P1M", "units"),
        ("P1Y", "units"),
        ("P1DT", "units"),
        ("P1H", "units"),
        ("1e3s", "units"),
        ("1s" * 60, "units"),
        ("9" * 15 + "d", "further away"),
        (timedelta(milliseconds=limits.DELAY_MS_MAX + 1), "further away"),
        pytest.param(10**5000, "an integer of 16610 bits: a number has no unit", id="enormous"),
    ],
)
def test_an_invalid_delay_is_refused_with_a_reason(after: object, reason: str) -> None:
    with pytest.raises(InvalidDelay, match=reason):
        delay_ms(after)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", [3600, 1.5, None, float("nan"), "--5m", "", "-"])
def test_a_shift_needs_a_unit_and_one_sign(by: object) -> None:
    with pytest.raises(InvalidDelay):
        signed_duration_ms(by)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", ["2030-01-31T09:00", "soon", "5", 5, -1, 1.5, None, datetime(2030, 1, 1)])  # noqa: DTZ001
def test_an_error_of_a_due_time_names_the_argument(at: object) -> None:
    for arguments, name in (((at,), "at"), ((at, "from"), "from")):
        with pytest.raises(InvalidDelay, match=f"^{name}="):
            due_ms(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["x", "-x", "--5m", 5])
def test_an_error_of_a_signed_duration_names_the_argument(by: object) -> None:
    for arguments, name in (((by,), "by"), ((by, "shift"), "shift")):
        with pytest.raises(InvalidDelay, match=f"^{name}="):
            signed_duration_ms(*arguments)  # type: ignore[arg-type]


@given(st.timedeltas(timedelta(0), timedelta(days=3_000)))
def test_a_timedelta_is_rounded_up_to_whole_milliseconds(after: timedelta) -> None:
    exact = Fraction(after // timedelta(microseconds=1), 1_000)
    assert 0 <= delay_ms(after) - exact < 1


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.sampled_from(["ms", "s", "m", "h", "d"])), min_size=1, max_size=5
    )
)
def test_a_delay_text_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    units = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    total = sum((timedelta(**{units[unit]: count}) for count, unit in parts), timedelta())
    assert delay_ms("".join(f"{count}{unit}" for count, unit in parts)) == delay_ms(total)


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)))  # noqa: DTZ001
def test_all_forms_of_an_instant_give_the_same_milliseconds(at: datetime) -> None:
    text = at.isoformat(timespec="milliseconds")
    at_ms = due_ms(f"{text}Z")
    assert (
        at_ms
        == due_ms(f"{text}+00:00")
        == due_ms(f" {text}000Z")
        == due_ms(datetime.fromisoformat(f"{text}Z"))
    )
    with pytest.raises(InvalidDelay, match="an instant as in"):
        due_ms(f"{text[:17]}60{text[19:]}Z")


def test_a_due_time_is_converted_to_milliseconds() -> None:
    assert due_ms(1_767_225_600_000) == 1_767_225_600_000
    assert due_ms(np.int64(1_767_225_600_000)) == 1_767_225_600_000
    assert due_ms(datetime(2026, 1, 1, tzinfo=UTC)) == 1_767_225_600_000
    assert due_ms(datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))) == 1_767_225_600_000
    assert due_ms(datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)) == 1_767_225_600_001
    assert due_ms(100_000_000_000) == 100_000_000_000
    assert due_ms(datetime(1970, 1, 1, tzinfo=UTC)) == 0
    assert due_ms("1767225600000") == due_ms("2026-01-01T01:00:00+01:00") == 1_767_225_600_000


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)))  # noqa: DTZ001
def test_a_due_time_is_rounded_up_to_whole_milliseconds(at: datetime) -> None:
    exact = Fraction((at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1), 1_000)
    assert 0 <= due_ms(at) - exact < 1


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (datetime(2030, 1, 1), "without a time zone"),  # noqa: DTZ001
        (1_767_225_600, "looks like seconds"),
        ("1767225600", "looks like seconds"),
        ("", "aware datetime"),
        ("2030-13-01T00:00:00Z", "aware datetime"),
        (-1, "between 1970 and 9999"),
        (limits.INSTANT_MS_MAX + 1, "between 1970 and 9999"),
        pytest.param(10**5000, "between 1970 and 9999", id="enormous"),
        (datetime(1969, 12, 31, tzinfo=UTC), "between 1970 and 9999"),
        (True, "aware datetime"),
        (1.5, "aware datetime"),
        ("tomorrow", "aware datetime"),
        ("2030-01-01T00:00:00", "without a time zone"),
        ("2030-01-01T00:00:00Z" + " " * 5_000, "aware datetime"),
    ],
)
def test_an_invalid_due_time_is_refused_with_a_reason(at: object, reason: str) -> None:
    with pytest.raises(InvalidDelay, match=reason):
        due_ms(at)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_tzdata", [True, False])
@pytest.mark.parametrize("zone", [*CHANGED_ZONES, "Europe/Berlin", "Australia/Lord_Howe", "Africa/Cairo"])
def test_a_datetime_of_zoneinfo_is_the_instant_that_the_oracle_finds(
    zone: str, has_tzdata: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_tzdata:  # a client alone: its Python has the same rules here
        monkeypatch.setattr(time_parsing, "tzdata", None)
    for change in changes(zone, 2020, 2037):
        for local in local_times_around(change, zone):
            wanted = -(-first_instant_us(local, zone) // 1_000)
            assert due_ms(local.replace(tzinfo=clock(zone))) == wanted
            microsecond_later = (EPOCH + (first_instant_us(local, zone) + 1) * US).astimezone(clock(zone))
            assert due_ms(microsecond_later) == -(-(first_instant_us(local, zone) + 1) // 1_000)


def test_fold_1_means_the_second_pass_of_a_repeated_time() -> None:
    second = datetime(2026, 10, 25, 2, 30, tzinfo=clock("Europe/Berlin"), fold=1)
    assert due_ms(second) == due_ms("2026-10-25T02:30:00+01:00")


def host_zone(name: str) -> ZoneInfo:
    """Make a zone from an old file, by whose rules Vancouver changes its clocks every year for ever."""
    old = b"TZif2" + bytes(15) + bytes(24) + b"TZif2" + bytes(15)
    old += b"".join(n.to_bytes(4, "big") for n in (0, 0, 0, 0, 1, 4)) + (-28_800).to_bytes(
        4, "big", signed=True
    )
    return ZoneInfo.from_file(io.BytesIO(old + b"\0\0PST\0\nPST8PDT,M3.2.0,M11.1.0\n"), key=name)


def test_a_zone_whose_rules_differ_from_tzdata_is_refused() -> None:
    """Python reads the host's files first."""
    host = host_zone("America/Vancouver")
    with pytest.raises(
        InvalidDelay, match="at=2026-12-01T08:00:00-08:00: this machine's rules of America/Vancouver"
    ):
        due_ms(datetime(2026, 12, 1, 8, tzinfo=host))
    assert due_ms(datetime(2026, 7, 1, 8, tzinfo=host)) == due_ms("2026-07-01T08:00:00-07:00")


def test_without_tzdata_a_datetime_means_the_instant_that_python_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_parsing, "tzdata", None)
    berlin = clock("Europe/Berlin")
    assert due_ms(datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=1)) == due_ms("2026-10-25T02:30:00+01:00")
    for fold in (0, 1):
        skipped = datetime(2026, 3, 29, 2, 30, tzinfo=berlin, fold=fold)
        assert due_ms(skipped) == due_ms("2026-03-29T03:00:00+02:00")
    for name in ("America/Vancouver", "Mars/Olympus"):
        assert due_ms(datetime(2026, 12, 1, 8, tzinfo=host_zone(name))) == due_ms("2026-12-01T08:00:00-08:00")


def test_a_delay_with_a_due_time_is_refused() -> None:
    assert when(None, None) == (None, None)
    assert when("1s", None) == (1_000, None)
    assert when(None, 2**40) == (None, 2**40)
    with pytest.raises(InvalidDelay, match="two due times"):
        when(1, 2**40)


@given(st.integers(-(2**50), 2**50))
def test_the_text_of_a_duration_is_parsed_to_the_duration(duration: int) -> None:
    assert signed_duration_ms(duration_text(duration)) == duration
