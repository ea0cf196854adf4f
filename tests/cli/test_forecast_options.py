"""The meaning of the options of `timeball forecast`."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeball.cli.forecast_options import OTHER_TOPICS, Bars, Extra, Moment, Window, parse_moment, parse_rates
from timeball.model.errors import RequestError
from timeball.spark.views import due_histogram, forecast


def test_the_options_equal_the_units_of_the_pipeline() -> None:
    assert [str(unit) for unit in Bars] == [str(unit) for unit in due_histogram.Unit]
    assert OTHER_TOPICS == forecast.OTHER_TOPICS


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1896080400000", 1_896_080_400_000),
        ("2030-01-31T09:00:00Z", 1_896_080_400_000),
        ("36h", 1_000 + 36 * 3_600_000),
        ("1h30m", 1_000 + 90 * 60_000),
    ],
)
def test_a_moment_is_a_time_or_a_duration_from_now(text: str, at_ms: int) -> None:
    assert parse_moment(text).at_ms(1_000) == at_ms


@pytest.mark.parametrize("text", ["soon", "2030-01-31T09:00:00", "", "1.5"])
def test_a_text_that_is_neither_time_nor_duration_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(RequestError, match="or write a duration from now: 90s, 36h, 7d"):
        parse_moment(text)


def test_consumer_rates_are_read_for_all_topics_and_for_single_ones() -> None:
    assert parse_rates(["500"]) == {"*": 500}
    assert parse_rates(["500", "orders=0.5", "a%b= 1_000"]) == {"*": 500, "orders": 0.5, "a%b": 1000}
    assert parse_rates([]) == {}


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf", "orders=", "=5", "orders=fast", ""])
def test_an_invalid_consumer_rate_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--consumer-rate"):
        parse_rates([text])


def test_a_consumer_rate_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="--consumer-rate 'a=2': given twice"):
        parse_rates(["a=1", "a=2"])


def test_a_window_has_bounds_unless_it_is_empty_or_contradictory() -> None:
    assert Window().bounds(5) == (None, None)
    assert Window(Moment(1, is_relative=True), Moment(9)).bounds(5) == (6, 9)
    with pytest.raises(RequestError, match="--until lies before now"):
        Window(end=Moment(5)).bounds(5)
    with pytest.raises(RequestError, match="--until lies before --from"):
        Window(Moment(7), Moment(6)).bounds(5)
    with pytest.raises(RequestError, match="--version and --timestamp: give one"):
        Window(version=0, timestamp_ms=0).check()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (Extra(rows=1), "--extra-rows and --extra-at"),
        (Extra(at=Moment(1)), "--extra-rows and --extra-at"),
        (Extra(over_ms=1), "--extra-over has no effect"),
        (Extra(topic="a"), "--extra-topic has no effect"),
        (Extra(column="a"), "--extra-column has no effect"),
    ],
)
def test_an_extra_option_without_its_partner_is_refused(extra: Extra, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        extra.check()


def test_an_extra_load_adds_the_rows_of_options_and_of_a_file(tmp_path: Path) -> None:
    assert Extra().is_none
    (tmp_path / "a.csv").write_text("due_ms\n5000\n")
    extra = Extra(rows=10, at=Moment(2_000, is_relative=True), file=tmp_path / "a.csv", topic="t")
    extra.check()
    load = extra.load(1_000)
    assert (load.topics, load.second.tolist(), load.rows.tolist()) == (("t",), [3, 5], [10, 1])
