"""The real table, as columns."""

import json

import numpy as np
import pytest

from timeball.cli.demo.flights import Flights, read_year
from timeball.errors import SetupError

pytest.importorskip("matplotlib", reason="the extra `demo` is not installed")


@pytest.fixture(scope="module")
def year() -> Flights:
    return read_year()


def test_the_year_is_whole_and_every_flight_has_an_id_of_its_own(year: Flights) -> None:
    """336,776 flights, 8,255 of them without a departure."""
    assert len(year) == 336_776
    assert int(year.cancelled.sum()) == 8_255
    assert len(year.id.unique()) == len(year)


def test_days_divide_the_year(year: Flights) -> None:
    """The day is New York's: by UTC an evening flight would be on the next."""
    storm = year.on(2, 8)
    assert (len(storm), int(storm.cancelled.sum())) == (930, 472)
    assert len(year.on(1, 1)) == 842
    days = np.arange("2013-01-01", "2014-01-01", dtype="datetime64[D]")
    dates = [(int(str(day)[5:7]), int(str(day)[8:10])) for day in days]
    assert sum(len(year.on(*date)) for date in dates) == len(year)


def test_a_day_that_is_none_is_refused(year: Flights) -> None:
    """With the date that was asked for."""
    with pytest.raises(SetupError, match=r"30\.2"):
        year.on(2, 30)


def test_messages_have_ids_instants_and_json_bodies(year: Flights) -> None:
    """As the client and the Spark writer take them."""
    storm = year.on(2, 8)
    batch = storm.messages("departures", storm.departs_ms, "x-")
    first = batch.slice(0, 1).to_pylist()[0]
    assert first["unique_key"] == "x-" + storm.id[0].as_py()
    assert first["due_ms"] == storm.departs_ms[0]
    assert json.loads(first["body"])["flight"] == first["keys"]
    assert batch.num_rows == len(storm)
