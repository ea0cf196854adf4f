"""The demo itself: the steps of `__main__.py`, with what they measured.

RAM per scheduled message in the table is the growth of the memory that the broker's process holds at rest (mapped files
are page cache and not counted) while the second half of the scheduled messages is added, over their number. The first
half brings the process to its working size, with buffers that it keeps. A megabyte of noise is three bytes a scheduled
message here; `timeball bench memory` measures this at millions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from examples.flights.broker import Broker, broker_in
from examples.flights.data import CHECK_IN_MS, CompressedDay, Flights, coming_year, read_year
from examples.flights.day import DayRun, live_through
from examples.flights.group import Group, group_in
from examples.flights.outcome import Outcome, draw, judge, outcome_table
from examples.flights.questions import Ahead, answer_table, ask, look_ahead
from examples.flights.writers import CAMPAIGN, CalledOff, Client, Spark, Writer
from examples.time_limits import limit_s

from timeball.cli.output import err, out, progress_bar
from timeball.client import Timeball
from timeball.io.clock import Clock, SystemClock
from timeball.model.config import StrategyName
from timeball.model.errors import SetupError

HEAD_START_MS = 1_500  # between scheduling the day and its midnight
COMPACTED_S = 90.0  # on an idle machine: a Spark starts, and moves 336,776 rows
CAMPAIGN_ROWS = 10_000
REST_S, LOOK_S = 5.0, 0.2


@dataclass(frozen=True)
class Work:
    """What the demo is asked to do. `flights_max`: of the year."""

    day: date
    length_ms: int
    flights_max: int
    strategy: StrategyName
    on_cluster: bool = False
    on_spark: bool = False


@dataclass(frozen=True)
class DemoReport:
    """All that --json prints. `compacted_s` is null where nothing is compacted."""

    day: str
    strategy: str
    outcome: Outcome
    bulk_rows: int
    bulk_s: float
    bulk_bytes_per_payload_byte: float | None
    sent_rows: int
    sent_s: float
    compacted_s: float | None
    campaign: CalledOff
    forecast: Ahead
    sql: list[dict[str, Any]]
    waiting: int
    ram_bytes_per_message: float
    audit: dict[str, Any]
    balanced: bool
    pictures: list[str]
    took_s: float

    @property
    def good(self) -> bool:
        """The day was faultless, the campaign's end is definite, and the audit balances."""
        whole = self.campaign.cancelled + self.campaign.released == self.campaign.rows
        return self.outcome.faultless and self.balanced and whole


class Steps:
    """Prints each step when it ends, with the seconds it took."""

    def __init__(self, clock: Clock, quiet: bool) -> None:
        self.clock = clock
        self.quiet = quiet
        self._began_ns = self._last_ns = clock.monotonic_ns()

    def done(self, text: str) -> float:
        """Say that a step has ended; returns its seconds."""
        now_ns = self.clock.monotonic_ns()
        took_s, self._last_ns = (now_ns - self._last_ns) / 1e9, now_ns
        if not self.quiet:
            err().print(f"[green]✓[/green] {text} [dim]({took_s:.1f} s)[/dim]")
        return took_s

    def left_out(self, text: str) -> None:
        """Say that there is no such step here, and why."""
        if not self.quiet:
            err().print(f"[dim]– {text}[/dim]")

    def busy(self, text: str) -> AbstractContextManager[object]:
        """A sign of life on a terminal, for a step that shows nothing by itself."""
        return err().status(text) if err().is_terminal and not self.quiet else nullcontext()

    @property
    def total_s(self) -> float:
        """Seconds since the first step began."""
        return (self.clock.monotonic_ns() - self._began_ns) / 1e9


def run_demo(data: Path, work: Work, out_folder: Path, *, quiet: bool) -> DemoReport:
    """Run all steps; returns what was measured."""
    steps, chosen = Steps(SystemClock(), quiet), work.day
    year = read_year()
    flights = year.on(chosen.month, chosen.day)
    day_name = f"{chosen:%A}, {chosen.day} {chosen:%B %Y}"
    steps.done(f"{len(year):,} flights of 2013 read; {day_name}: {len(flights)} departures")
    with _served(data, work) as broker, broker.client() as ball:
        steps.done(_greeting(broker, work))
        out_folder.mkdir(parents=True, exist_ok=True)
        with _writer(ball, broker.endpoint, work, out_folder, steps) as writer:
            waits = _fill_year(ball, broker, writer, year.head(work.flights_max), steps)
            ended = _call_off(writer, year.head(min(work.flights_max, CAMPAIGN_ROWS)), steps)
            view = look_ahead(broker.endpoint)
            steps.done(f"forecast: {view.sentence()}")
            run = _live(broker, flights, work.length_ms, steps, day_name)
            with steps.busy("DuckDB reads the ledger and the table"):
                answer = ask(broker.endpoint)
            steps.done("a question in SQL over the ledger, the table and the log")
            sent = waits.sent_rows + waits.bulk_rows + ended.rows + len(flights)
            with steps.busy(writer.audit_name):
                books = writer.audit(sent, answer)
            steps.done(f"{writer.audit_name}: {books.summary}")
    outcome = judge(run)
    pictures = draw(run, outcome, day_name, out_folder)
    if not quiet:
        table = outcome_table(outcome, waits.rows, waits.ram_bytes, writer.audit_name, books.summary)
        out().print(table)
        out().print(answer_table(answer))
        out().print(f"pictures: {', '.join(map(str, pictures))}", markup=False)
        out().print(f"the whole took {steps.total_s:.0f} s", markup=False)
    return DemoReport(
        day=chosen.isoformat(),
        strategy=work.strategy,
        outcome=outcome,
        bulk_rows=waits.bulk_rows,
        bulk_s=waits.bulk_s,
        bulk_bytes_per_payload_byte=waits.bulk_bytes_per_payload_byte,
        campaign=ended,
        forecast=view,
        sql=answer,
        sent_rows=waits.sent_rows,
        sent_s=waits.sent_s,
        compacted_s=waits.compacted_s,
        waiting=waits.rows,
        ram_bytes_per_message=waits.ram_bytes,
        audit=books.counts,
        balanced=books.balanced,
        pictures=[str(picture) for picture in pictures],
        took_s=steps.total_s,
    )


@dataclass(frozen=True)
class _Waiting:
    """A year of scheduled messages, and what they cost."""

    bulk_rows: int
    bulk_s: float
    bulk_bytes_per_payload_byte: float | None
    sent_rows: int
    sent_s: float
    compacted_s: float | None
    rows: int
    ram_bytes: float


@contextmanager
def _writer(ball: Timeball, endpoint: str, work: Work, out_folder: Path, steps: Steps) -> Iterator[Writer]:
    if not work.on_spark:
        yield Client(ball, endpoint)
        return
    with steps.busy("the demo's own Spark session starts"):
        session = Spark(endpoint, out_folder / "spark.log")
    with session as spark:
        steps.done("the demo's own Spark session is ready")
        yield spark


def _fill_year(
    ball: Timeball, broker: Broker | Group, writer: Writer, year: Flights, steps: Steps
) -> _Waiting:
    """Steps 2 and 3: scheduled messages through the client and compaction, then those of the writer."""
    begun, now_ms = _waiting_rows(ball), steps.clock.wall_ms()
    opens = coming_year(year.departs_ms - CHECK_IN_MS, now_ms)
    ball.send_many(year.messages("check-in-year", opens, "check-in-"))
    sent_s = steps.done(
        f"{len(year):,} check-in reminders of the coming year sent into the log by the client"
    )
    compacted_s = _compacted(ball, broker, steps)
    before_bytes = _held_at_rest(ball)
    departures = year.messages("departures-year", coming_year(year.departs_ms, now_ms), "year-")
    with steps.busy(f"{writer.name} writes the departures of the coming year"):
        amplification = writer.schedule(departures, "departures-year")
    text = f"{len(year):,} departures of the coming year written by {writer.name}"
    if amplification is None:
        bulk_s = steps.done(text)
        _compacted(ball, broker, steps)
    else:
        bulk_s = steps.done(
            f"{text}: {_table_rows(ball):,} in the pending table, {amplification:.1f} bytes for each of payload"
        )
    rows = _waiting_rows(ball) - begun
    grown = max(0, _held_at_rest(ball) - before_bytes) / max(1, len(year))
    return _Waiting(len(year), bulk_s, amplification, len(year), sent_s, compacted_s, rows, grown)


def _call_off(writer: Writer, some: Flights, steps: Steps) -> CalledOff:
    """Step 4: a campaign that somebody thinks better of."""
    opens = coming_year(some.departs_ms, steps.clock.wall_ms())
    with steps.busy(f"{writer.name} writes a campaign"):
        writer.schedule(some.messages(CAMPAIGN, opens, f"{CAMPAIGN}-"), CAMPAIGN)
    steps.done(f"a campaign of {len(some):,} written in the same way")
    ended = writer.call_off()
    steps.done(f"called off by one call: {ended.cancelled:,} cancelled, {ended.released:,} too late")
    return ended


def _held_at_rest(ball: Timeball) -> int:
    """Bytes that the broker's process holds once the keys of new files are indexed: the least of some looks."""
    pause = threading.Event()
    pause.wait(REST_S)
    looks = []
    for _ in range(5):
        looks.append(int(ball.status()["anon_bytes"]))
        pause.wait(LOOK_S)
    return min(looks)


def _table_rows(ball: Timeball) -> int:
    return int(ball.status()["schedule"]["table_rows"])


def _waiting_rows(ball: Timeball) -> int:
    """Messages in the pending table, in the log's tail and near their instant, or as their schedule counts them."""
    rows = ball.status()["schedule"]
    kept = rows["waiting_rows"] if "waiting_rows" in rows else rows["tail_rows"] + rows["near_rows"]
    return int(rows["table_rows"] + kept)


def _compacted(ball: Timeball, broker: Broker | Group, steps: Steps) -> float | None:
    """The end of step 2; None where scheduled messages stay in the log until they are due."""
    strategy = ball.status()["strategy"]
    if strategy != "hour_log":
        steps.left_out(f"nothing is compacted: with {strategy} they wait in the log")
        return None
    _await_compaction(ball, broker, steps)
    return steps.done(f"{broker.compaction} has moved them: {_table_rows(ball):,} in the pending table")


def _await_compaction(ball: Timeball, broker: Broker | Group, steps: Steps) -> None:
    """Wait until the log's tail is empty; SetupError when the pipeline does not do its work."""
    pause = threading.Event()
    bound_s = limit_s(COMPACTED_S)
    give_up_ns = steps.clock.monotonic_ns() + int(bound_s * 1e9)
    while ball.status()["schedule"]["tail_rows"] > 0:
        if steps.clock.monotonic_ns() > give_up_ns:
            raise SetupError(
                f"the compaction ({broker.pipeline_state() or 'not started'}) did not end within {bound_s:.0f} s, "
                f"the limit for this machine's speed: {broker.last_words() or 'it wrote no error'}"
            )
        pause.wait(LOOK_S)


def _served(data: Path, work: Work) -> AbstractContextManager[Broker | Group]:
    if work.on_cluster:
        return group_in(data, work.strategy)
    return broker_in(data, work.strategy, on_spark=work.on_spark)


def _greeting(broker: Broker | Group, work: Work) -> str:
    if isinstance(broker, Group):
        return f"three nodes ({work.strategy}) serve {broker.endpoint}, each message on two disks"
    pipeline = "its Spark pipeline" if work.on_spark else "its pipeline"
    return f"broker ({work.strategy}) serves {broker.endpoint}; {pipeline} starts behind it"


def _live(broker: Broker | Group, flights: Flights, length_ms: int, steps: Steps, day_name: str) -> DayRun:
    """Step 5, with the day's clock on the screen. The leader of a group is killed at noon."""
    day = CompressedDay(steps.clock.wall_ms() + HEAD_START_MS, length_ms)
    with progress_bar(quiet=steps.quiet) as progress, ThreadPoolExecutor(1) as pool:
        task = progress.add_task(day_name, total=len(flights))
        show = _shower(progress, task, day, steps.clock, day_name)
        killed = pool.submit(_kill_at_noon, broker, day, steps.clock) if isinstance(broker, Group) else None
        run = live_through(
            broker.client, flights, day, steps.clock, show, asks_again=isinstance(broker, Group)
        )
    if killed is not None:
        steps.done(killed.result())
    cancelled, received = len(run.said("cancelled")), len(run.arrivals.ids)
    steps.done(f"{day_name}: {len(flights)} scheduled, {cancelled} cancelled in time, {received} received")
    return run


def _kill_at_noon(group: Group, day: CompressedDay, clock: Clock) -> str:
    threading.Event().wait(max(0, day.end_ms - day.length_ms // 2 - clock.wall_ms()) / 1_000)
    return group.kill_leader()


def _shower(
    progress: Any, task: Any, day: CompressedDay, clock: Clock, day_name: str
) -> Callable[[int, int], None]:
    def show(received: int, cancelled: int) -> None:
        text = f"{day_name} {day.clock(clock.wall_ms())}, {cancelled} cancelled"
        progress.update(task, completed=received + cancelled, description=text)

    return show
