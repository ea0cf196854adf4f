"""Forecasts without a broker: two topics at 9:00, and an extra load at 10:00."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.cli.forecast_options import Extra, Moment, Request
from timeball.cli.forecast_report import Answer, CountedLoad, answer
from timeball.model.limits import HOUR_MS
from timeball.spark.table_store import Due
from timeball.spark.views.due_histogram import from_due_ms

EIGHT_MS = 1_896_076_800_000  # 2030-01-31T08:00:00Z
NINE_MS, TEN_MS = EIGHT_MS + HOUR_MS, EIGHT_MS + 2 * HOUR_MS
EXTRA = Extra(rows=60, at=Moment(TEN_MS), topic="campaign")
NO_EXTRA = Extra()


def counted(due: Due = (None, None), *, is_whole: bool = True, came: int | None = None) -> CountedLoad:
    """Build the load of 100 orders in the second of 9:00, and ten mails from 10:00 on, one a second.

    `came`: the number of orders that were released until 10 s before 10:00. None: they were not counted.
    """
    due_ms = np.concatenate([NINE_MS + np.arange(100), TEN_MS + 1_000 * np.arange(10)])
    load = from_due_ms(due_ms, pa.array(["orders"] * 100 + ["mail"] * 10))
    since = None
    if came is not None:
        since = (from_due_ms(due_ms[:came], pa.array(["orders"] * came)), TEN_MS - 10_000)
    return CountedLoad(now_ms=EIGHT_MS, version=7, is_whole=is_whole, due=due, load=load, came=since)


def asked(**more: object) -> Request:
    """Build a request: bars by hour, two peaks, by topic, unless `more` says otherwise."""
    options = {"by": "hour", "peaks": 2, "by_topic": True, "topics": [], "rates": {}, **more}
    return Request(**options)  # type: ignore[arg-type]


def answered(extra: Extra = NO_EXTRA, **more: object) -> Answer:
    """Build the answer for the load of `counted`."""
    return answer(counted(), asked(**more), extra)
