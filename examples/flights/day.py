"""One day, lived in a minute: schedule every departure, cancel what was cancelled, receive the rest.

Every flight is scheduled before the day begins. Flights that never left are cancelled while the day runs,
each some hours before its departure, as an airline would. A consumer in a thread of its own receives what
falls due and writes down what came and when; it knows nothing of the cancellations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from examples.flights.data import CompressedDay, Flights
from examples.time_limits import limit_s

from timeball.client import Timeball
from timeball.io.clock import Clock
from timeball.model.errors import Unavailable
from timeball.model.message import Int64Array

TOPIC = "departures"
GROUP = "tower"
CANCEL_AHEAD = 0.1  # of a day before departure: 2 h 24 min, or 6 s of a day that takes a minute
STEP_S = 0.2
LINGER_S = 15.0  # the wait for a departure that is missing at midnight, on an idle machine
QUIET_S = 1.0  # and how long a surplus one


@dataclass
class Arrivals:
    """What the consumer received, one entry a message in order of arrival."""

    ids: list[str] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)
    store_ms: list[int] = field(default_factory=list)
    seen_ms: list[int] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch, now_ms: int) -> None:
        """Note a batch in READ_SCHEMA that arrived at `now_ms`."""
        self.due_ms += batch.column("due_ms").to_pylist()
        self.store_ms += batch.column("store_ms").to_pylist()
        self.seen_ms += [now_ms] * batch.num_rows
        self.ids += batch.column("unique_key").to_pylist()


@dataclass
class DayRun:
    """A day and what became of it. `verdicts`: what the broker said to each cancel, by flight."""

    flights: Flights
    due_ms: Int64Array
    clock: CompressedDay
    arrivals: Arrivals
    verdicts: dict[str, str] = field(default_factory=dict)

    def said(self, verdict: str) -> set[str]:
        """The flights to whose cancel the broker said this."""
        return {flight for flight, found in self.verdicts.items() if found == verdict}


def live_through(
    connect: Callable[[], Timeball],
    flights: Flights,
    day: CompressedDay,
    clock: Clock,
    show: Callable[[int, int], None],
    *,
    asks_again: bool = False,
) -> DayRun:
    """Run the day to its end. `connect` opens a client with columns.

    `show` gets (departures received, cancellations) several times a second.

    `asks_again`: for what a broker has not answered, as another one soon leads in its place.
    """
    due_ms = day.due_ms(flights.minutes)
    run = DayRun(flights, due_ms, day, Arrivals())
    with connect() as ball:
        ball.send_many(flights.messages(TOPIC, due_ms))
        consumer = _Consumer(connect, run.arrivals, clock)
        try:
            _cancel_as_it_goes(ball, run, clock, show, asks_again=asks_again)
            expected = len(flights) - len(run.said("cancelled"))
            consumer.await_count(expected, limit_s(LINGER_S))
            # Whatever is wrong, a duplicate or a cancelled flight, would come at its instant: these have passed.
            consumer.await_count(expected + 1, QUIET_S)
            show(len(run.arrivals.ids), len(run.said("cancelled")))
        finally:
            consumer.stop()
    return run


def _cancel_as_it_goes(
    ball: Timeball, run: DayRun, clock: Clock, show: Callable[[int, int], None], *, asks_again: bool
) -> None:
    """Until midnight, cancel each cancelled flight once its departure is near."""
    ahead_ms = int(CANCEL_AHEAD * run.clock.length_ms)
    doomed = np.flatnonzero(run.flights.cancelled)
    doomed = doomed[np.argsort(run.due_ms[doomed], kind="stable")]
    pause, done, lost = threading.Event(), 0, set[str]()
    while True:
        now_ms = clock.wall_ms()
        near = int(np.searchsorted(run.due_ms[doomed], now_ms + ahead_ms))
        if near > done:
            ids = run.flights.id.take(pa.array(doomed[done:near])).to_pylist()
            try:
                found = ball.cancel(ids=ids)
            except Unavailable:
                if not asks_again:
                    raise
                lost |= set(ids)
            else:
                # A call whose answer was lost may have cancelled them.
                own = {each.subject for each in found if each.verdict == "already_cancelled"} & lost
                run.verdicts.update(
                    (each.subject, "cancelled" if each.subject in own else each.verdict) for each in found
                )
                done = near
        show(len(run.arrivals.ids), len(run.said("cancelled")))
        # Asked last: a machine that was busy until midnight has still asked for every flight.
        if now_ms >= run.clock.end_ms:
            return
        pause.wait(STEP_S)


class _Consumer:
    """Pulls the day's topic in a thread until told to stop."""

    def __init__(self, connect: Callable[[], Timeball], arrivals: Arrivals, clock: Clock) -> None:
        self._connect = connect
        self._arrivals = arrivals
        self._clock = clock
        self._more = threading.Condition()
        self._stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="demo-consumer", daemon=True)
        self._thread.start()

    def await_count(self, count: int, bound_s: float) -> None:
        """Wait until `count` messages have come, or the bound has passed; raises what ended the consumer."""
        with self._more:
            self._more.wait_for(lambda: self._failure or len(self._arrivals.ids) >= count, bound_s)
            if self._failure:
                raise self._failure

    def stop(self) -> None:
        """End after the pull under way."""
        self._stopping = True
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._pull()
        except Exception as error:  # handed to the thread that waits, which raises it
            with self._more:
                self._failure = error
                self._more.notify_all()

    def _pull(self) -> None:
        with self._connect() as ball:
            while not self._stopping:
                batch = ball.browse_batch(TOPIC, GROUP, max_messages=1_024, wait="0.5s")
                if batch.num_rows == 0:
                    continue
                with self._more:
                    self._arrivals.add(batch, self._clock.wall_ms())
                    self._more.notify_all()
                ball.commit(TOPIC, GROUP)
