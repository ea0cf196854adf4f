"""The broker's figures as Prometheus metrics. docs/metrics.md lists them.

Each figure is read from its owner when the metrics are requested. So nothing is counted twice, and a message costs
nothing more. Figures are read on the event loop, in shares of topics and groups (broker/registry/redeliveries.py), and
converted to text in another thread. The number of series is limited: beyond SERIES_MAX the largest topics and groups
are shown, and the others are one series. So a client that invents topics does not fill the memory of the scraper.
Topics and groups that the caller may not look at are also among the others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from timeball.broker.accepting.delivery import Lateness
from timeball.broker.admin.administration import JobState
from timeball.broker.policy import Policy
from timeball.broker.registry.rates import Stat, shares
from timeball.broker.service import Broker
from timeball.broker.tables.compact import Figures
from timeball.io.clock import BOUNDS_NS, Durations
from timeball.io.threads import LoopLag
from timeball.model.access import Caller, Verb
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import DLQ_PREFIX
from timeball.monitoring.figures import PushFigures, ReplicaFigures, ReplicaReaders
from timeball.table.object_store import FileCache

# ---- the metrics of a broker ----------------------------------------------------------------------------------

CONTENT_TYPE = CONTENT_TYPE_LATEST
SERIES_MAX = 200  # of one metric
OTHERS = "(others)"
BY_TOPIC = (
    Stat.TOPIC_PUT_NUMS, Stat.RELEASED_NUMS, Stat.CANCELLED_NUMS, Stat.RESCHEDULED_NUMS, Stat.EXPIRED_NUMS,
)  # fmt: skip

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Labels = TypeVar("Labels", bound=tuple[str, ...])
Names = tuple[
    str, ...
]  # of labels; `_Reading.may_see` passes them to Policy.allows as names of its arguments
TOPIC, GROUP, GROUP_TOPIC = ("topic",), ("group",), ("group", "topic")
HORIZONS = (("1m", MINUTE_MS), ("1h", HOUR_MS), ("1d", DAY_MS))  # of timeball_due_messages


class Metrics:
    """Builds the metrics of a broker. `free_bytes` and `connections` (by edge) are called for each request."""

    def __init__(
        self,
        broker: Broker,
        version: str,
        loop_lag: LoopLag,
        free_bytes: Callable[[], int],
        connections: Callable[[], Mapping[str, int]],
        replica: ReplicaReaders | None = None,
    ) -> None:
        self._broker, self._version, self._loop_lag = broker, version, loop_lag
        self._free_bytes, self._connections = free_bytes, connections
        self.replica = replica  # None outside a cluster
        self._process = ProcessCollector(registry=None)
        self._others, self._reading_lock = _Others(), asyncio.Lock()
        self.push: dict[str, PushFigures] = {}  # by subscription; the push edge writes these figures

    async def text(self, caller: Caller) -> bytes:
        """Build all metrics in Prometheus' text format, as `caller` may see them.

        Raises Forbidden and Unauthorized.
        """
        self._broker.policy.allow(caller, Verb.LOOK)
        reading, metrics = _Reading(self._broker.policy, caller, self._others), list[Metric]()
        # One reading at a time. Of two at once, the slower one could pass smaller sums to `_others` after larger ones,
        # which would count as a fall.
        async with self._reading_lock:
            async for metric in self._collect(reading):
                metrics.append(metric)
                await asyncio.sleep(0)  # lets the event loop do its other work
        metrics += await table_and_job_metrics(self._broker)
        return await asyncio.to_thread(as_text, metrics)

    async def _collect(self, reading: _Reading) -> AsyncIterator[Metric]:
        """Yield each metric but those of the pending table and of jobs. Runs on the event loop."""
        async for metric in self._messages(reading):
            yield metric
        for build in (self._waiting, self._log):
            for metric in build():
                yield metric
        async for metric in self._consumers(reading):
            yield metric
        for metric in self._pushes(reading):
            yield metric
        for build in (self._spans, self._machine, self._replica):
            for metric in build():
                yield metric

    def _replica(self) -> Iterator[Metric]:
        if self.replica is not None:
            yield from replica_metrics(self.replica.figures())

    async def _messages(self, reading: _Reading) -> AsyncIterator[Metric]:
        """Yield the metrics of messages accepted, released, settled and delivered, and of the lateness of releases."""
        broker, rates = self._broker, self._broker.rates
        largest = {stat: _Largest() for stat in BY_TOPIC}
        async for topics in shares(broker.tables.topics.all()):
            for topic in topics:
                is_visible = reading.may_see(TOPIC, (topic.name,))
                for stat, counts in largest.items():
                    # Dead letters are counted below, by the topics that they were sent to.
                    if stat != Stat.TOPIC_PUT_NUMS or not topic.name.startswith(DLQ_PREFIX):
                        counts.add((topic.name,), rates.total(stat, topic.name), is_visible=is_visible)
        dead_letters = {
            (group, topic): count
            for key, count in rates.totals(Stat.DEAD_NUMS).items()
            for topic, _, group in (key.partition("@"),)  # a key is topic@group
        }
        # Scheduled messages count for RocketMQ's timer topic until they are released into their own topics.
        yield reading.build(
            CounterMetricFamily,
            "timeball_accepted_messages",
            "Messages that entered a topic.",
            TOPIC,
            largest[Stat.TOPIC_PUT_NUMS],
        )
        yield await reading.largest(
            CounterMetricFamily,
            "timeball_dead_letters",
            "Messages a group gave up.",
            GROUP_TOPIC,
            dead_letters,
        )
        for name, text, stat in (
            ("released", "Scheduled messages put into their queues.", Stat.RELEASED_NUMS),
            ("cancelled", "Scheduled messages that were cancelled.", Stat.CANCELLED_NUMS),
            ("rescheduled", "Scheduled messages that were given another instant.", Stat.RESCHEDULED_NUMS),
            ("expired", "Scheduled messages that were not released in time.", Stat.EXPIRED_NUMS),
        ):
            yield reading.build(CounterMetricFamily, f"timeball_{name}_messages", text, TOPIC, largest[stat])
        unique = CounterMetricFamily(
            "timeball_unique_sends", "Sends with a unique key, by their outcome.", labels=["outcome"]
        )
        for outcome, count in broker.unique_sends.counts.items():
            unique.add_metric([outcome], count)
        yield unique
        yield CounterMetricFamily(
            "timeball_delivered_messages",
            "Messages that were handed to consumers.",
            value=rates.total(Stat.BROKER_GET_NUMS),
        )
        lateness = broker.lateness
        yield histogram(
            "timeball_release_lateness_seconds",
            "From a message's instant to its release on disk.",
            [bound / 1_000 for bound in Lateness.BOUNDS],
            lateness.counts.tolist(),
            lateness.sum_ms / 1_000,
        )
        yield GaugeMetricFamily(
            "timeball_release_interval_seconds",
            "Time between two commits of releases under load. An idle broker releases at the millisecond.",
            broker.ticker.interval_ms / 1_000,
        )

    def _table(self, table_files: int) -> Iterator[Metric]:
        """Yield the metrics of the pending table, which has `table_files` data files."""
        yield GaugeMetricFamily(
            "timeball_selected_messages",
            "Scheduled messages that selections have cancelled, and that are not due yet.",
            self._broker.tables.selections.pending_rows,
        )
        yield GaugeMetricFamily("timeball_table_files", "Data files of the pending table.", table_files)
        foreign = self._broker.pending_table.catalog.foreign
        yield CounterMetricFamily(
            "timeball_table_foreign_commits",
            "Commits of other programs to the pending table, corrected since.",
            foreign.commits,
        )
        yield GaugeMetricFamily(
            "timeball_table_lost_files",
            "Data files that the log names and that are gone.",
            len(foreign.missing),
        )

    def _waiting(self) -> Iterator[Metric]:
        """Yield the metrics of pending messages, compaction, draining, transactions and idempotency keys."""
        broker = self._broker
        counts, levels = broker.schedule_statistics(), broker.scheduling.levels.statistics()
        rows_by_place = {
            "near": counts["near_rows"],
            "table": counts["table_rows"],
            "levels": levels["waiting_rows"],
        }
        if broker.scheduling.compacts:
            rows_by_place["tail"] = counts["tail_rows"]
        else:  # a strategy without a tail: the rows that are not near are shown as one
            rows_by_place["tail"] = counts["waiting_rows"] - counts["near_rows"]
        yield GaugeMetricFamily(
            "timeball_waiting_messages", "Scheduled messages that wait.", broker.pending_messages
        )
        schedule_rows = GaugeMetricFamily(
            "timeball_schedule_rows", "What the schedule keeps, by where it lies.", labels=["place"]
        )
        for place, rows in rows_by_place.items():
            schedule_rows.add_metric([place], max(0, rows))
        yield schedule_rows
        now_ms = broker.clock.now_ms()
        due = GaugeMetricFamily(
            "timeball_due_messages",
            "Of those in the tail and in the pending table: due within this time, files by their share.",
            labels=["within"],
        )
        rows_due = broker.scheduling.hour_log.rows_due([now_ms + horizon_ms for _, horizon_ms in HORIZONS])
        for (name, _), rows in zip(HORIZONS, rows_due, strict=True):
            due.add_metric([name], rows)
        yield due
        yield from self._table(counts["table_files"])
        yield GaugeMetricFamily(
            "timeball_compaction_pending_rows",
            "Scheduled messages in the log that compaction is still to look at.",
            broker.mover.tail_count.rows,
        )
        yield GaugeMetricFamily(
            "timeball_pipeline_compacts",
            "1 while a pipeline compacts, and the broker leaves that to it.",
            _flag(broker.mover.external_compactor_until_ms > broker.clock.elapsed_ms()),
        )
        yield CounterMetricFamily(
            "timeball_rewritten_messages",
            "Scheduled messages written again to wait on.",
            counts["moved_rows"],
        )
        yield from self._drain()
        yield GaugeMetricFamily(
            "timeball_transactions_open", "Transactions not ended yet.", len(broker.transactions.open())
        )
        yield GaugeMetricFamily(
            "timeball_idempotency_keys",
            "Idempotency keys that are known.",
            len(broker.tables.idempotency_keys),
        )

    def _drain(self) -> Iterator[Metric]:
        """Yield the metrics of a group that hands its messages to another one."""
        out = self._broker.tables.drains.out
        yield CounterMetricFamily(
            "timeball_handed_over_messages",
            "Scheduled messages that the group's heir has taken over.",
            out.moved_rows if out else 0,
        )
        yield GaugeMetricFamily(
            "timeball_handing_over_messages",
            "Those on their way to the heir, which wait nowhere until it confirms.",
            out.rows if out else 0,
        )

    def _log(self) -> Iterator[Metric]:
        """Yield the metrics of the commit log and its disk."""
        statistics = self._broker.log.writer.statistics
        yield CounterMetricFamily("timeball_log_rows", "Rows written to the log.", statistics.rows)
        yield CounterMetricFamily("timeball_log_commits", "Group commits.", statistics.commits)
        yield GaugeMetricFamily(
            "timeball_log_bytes", "Bytes of the log's segments.", self._broker.log.reader.segments.size_bytes
        )
        yield durations(
            "timeball_log_commit_seconds", "Writing and syncing a group commit.", statistics.commit_durations
        )
        yield durations(
            "timeball_log_sync_seconds", "fdatasync of a group commit.", statistics.sync_durations
        )
        yield GaugeMetricFamily(
            "timeball_log_stopped",
            "1 when a write has failed and the log has stopped.",
            _flag(self._broker.log.writer.failed),
        )
        yield GaugeMetricFamily(
            "timeball_disk_full",
            "1 while sends are refused for want of room.",
            _flag(self._broker.log.writer.no_room),
        )
        yield GaugeMetricFamily("timeball_disk_free_bytes", "Free space of the disk.", self._free_bytes())

    async def _consumers(self, reading: _Reading) -> AsyncIterator[Metric]:
        """Yield the metrics of consumer groups, of messages that wait for their topic's limit, and of connections."""
        groups = self._broker.groups
        for name, text, counts in (
            (
                "timeball_group_lag_messages",
                "Messages behind a group's stored offsets.",
                await groups.lags(),
            ),
            (
                "timeball_group_in_flight_messages",
                "Messages that members of a group hold.",
                await groups.in_flight(),
            ),
            (
                "timeball_group_retry_messages",
                "Messages that members have given back and that wait for their next delivery.",
                self._broker.redeliveries.counts(),
            ),
        ):
            yield await reading.largest(GaugeMetricFamily, name, text, GROUP_TOPIC, counts)
        yield await reading.largest(
            GaugeMetricFamily,
            "timeball_held_messages",
            "Messages that wait for their topic's limit.",
            TOPIC,
            {(topic,): rows for topic, rows in self._broker.pacing.held().items()},
        )
        expired_messages, expired_letters = groups.expired()
        yield await reading.largest(
            CounterMetricFamily,
            "timeball_expired_unread_messages",
            "Messages that retention removed, or a deleted topic took along, before a group read them.",
            GROUP_TOPIC,
            expired_messages,
        )
        yield await reading.largest(
            CounterMetricFamily,
            "timeball_expired_dead_letters",
            "Dead letters that retention removed.",
            GROUP,
            expired_letters,
        )
        connections = GaugeMetricFamily("timeball_connections", "Open connections.", labels=["edge"])
        for edge, count in self._connections().items():
            connections.add_metric([edge], count)
        yield connections

    def _pushes(self, reading: _Reading) -> Iterator[Metric]:
        """Yield the metrics of the push subscriptions that the caller may see."""
        requests = CounterMetricFamily(
            "timeball_push_requests",
            "Requests to receivers that have ended.",
            labels=["subscription", "outcome"],
        )
        seconds = HistogramMetricFamily(
            "timeball_push_seconds", "How long a request to a receiver took.", labels=["subscription"]
        )
        in_flight = GaugeMetricFamily(
            "timeball_push_in_flight", "Requests under way.", labels=["subscription"]
        )
        failing = GaugeMetricFamily(
            "timeball_push_failing", "1 while single requests try a receiver.", labels=["subscription"]
        )
        late_acks = CounterMetricFamily(
            "timeball_push_late_acks",
            "Granted after the lease had ended: sent again.",
            labels=["subscription"],
        )
        # There are at most PUSH_SUBSCRIPTIONS_MAX. Those with the most requests are shown.
        names = self.push if reading.is_all else self.push.keys() & self._broker.push.all(reading.caller)
        shown = sorted(names, key=lambda name: -sum(self.push[name].durations.counts))[:SERIES_MAX]
        for name in shown:
            figures = self.push[name]
            for outcome, count in figures.outcomes.items():
                requests.add_metric([name, outcome], count)
            bounds_s = [bound / 1e9 for bound in BOUNDS_NS]
            seconds.add_metric(
                [name], buckets(bounds_s, figures.durations.counts), figures.durations.sum_ns / 1e9
            )
            in_flight.add_metric([name], figures.in_flight)
            failing.add_metric([name], _flag(figures.is_held))
            late_acks.add_metric([name], figures.late_acks)
        yield from (requests, seconds, in_flight, failing, late_acks)

    def _spans(self) -> Iterator[Metric]:
        """Yield the metrics of traces. Without `--traces` they have no series."""
        traces = self._broker.traces
        spans = CounterMetricFamily("timeball_trace_spans", "Spans, by how far they came.", labels=["state"])
        left_out = CounterMetricFamily(
            "timeball_trace_spans_left_out",
            "Messages with a trace that got no span: the allowance of a second was used up.",
            labels=["operation"],
        )
        if traces is not None:
            for family, counts in ((spans, traces.counts), (left_out, traces.left_out)):
                for name, count in counts.items():
                    family.add_metric([name], count)
        yield from (spans, left_out)

    def _machine(self) -> Iterator[Metric]:
        """Yield the metrics of the process and of its event loop."""
        settings = self._broker.settings
        info = GaugeMetricFamily(
            "timeball_build_info", "1, with what runs.", labels=["version", "strategy", "durability"]
        )
        info.add_metric([self._version, settings.strategy, settings.durability], 1)
        yield info
        yield durations(
            "timeball_event_loop_lag_seconds",
            "How late the event loop is for what it has planned.",
            self._loop_lag.durations,
        )
        yield from self._process.collect()


class _FixedCollector(Collector):
    """A collector of metrics that were read before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


def as_text(metrics: Sequence[Metric]) -> bytes:
    """Format metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FixedCollector(metrics))
    return generate_latest(registry)


class _Others:
    """Converts the sums of `(others)` to counters that never fall. Belongs to the event loop.

    Prometheus takes a fall of a counter for a restart, and counts its whole value again. The sum of the others falls
    when one of them is deleted, when one of them takes the place of a deleted topic, when an idle counter is dropped,
    and when the caller may look at more. The amount of each fall is added to all later values.
    """

    def __init__(self) -> None:
        # By account and metric, because each account sees other topics: the latest sum, and the total of its falls.
        self._sums: dict[tuple[str, str], tuple[int, int]] = {}

    def count(self, account: str, metric: str, value: int) -> int:
        """Convert `value`, the present sum of the others in a metric as an account sees it, to a counter."""
        latest, falls = self._sums.get((account, metric), (0, 0))
        falls += max(0, latest - value)
        self._sums[account, metric] = value, falls
        return value + falls


class _Largest:
    """Finds the SERIES_MAX largest of many counts, and the sum of all others.

    It receives one count at a time, so a loop over a hundred thousand topics can pause in between, and needs memory
    only for the largest ones.
    """

    def __init__(self) -> None:
        self.others, self.has_others = 0, False
        # A heap of (count, order, values of the labels), with the smallest count first. `order` falls, so that of equal
        # counts the one that came last is replaced first.
        self._heap: list[tuple[int, int, tuple[str, ...]]] = []
        self._order = 0

    def add(self, values: tuple[str, ...], count: int, *, is_visible: bool) -> None:
        """Add a count. `values`: of its labels. A count that is not visible is always among the others."""
        if is_visible and len(self._heap) < SERIES_MAX:
            self._order -= 1
            heapq.heappush(self._heap, (count, self._order, values))
            return
        self.has_others = True
        if is_visible and count > self._heap[0][0]:
            self._order -= 1
            count, _, _ = heapq.heapreplace(self._heap, (count, self._order, values))
        self.others += count

    def shown(self) -> list[tuple[tuple[str, ...], int]]:
        """List the largest counts, the largest first: pairs of the values of the labels and the count."""
        return [(values, count) for count, _, values in sorted(self._heap, reverse=True)]


class _Reading:
    """Builds the metrics of topics and groups, as one caller may see them."""

    def __init__(self, policy: Policy, caller: Caller, others: _Others) -> None:
        self._policy, self.caller, self._others = policy, caller, others
        self.is_all = policy.allows(caller, Verb.ADMIN)

    def may_see(self, labels: Names, values: tuple[str, ...]) -> bool:
        """Check whether the caller may look at the topic or group that the labels of a series name."""
        return self.is_all or self._policy.allows(
            self.caller, Verb.LOOK, **dict(zip(labels, values, strict=True))
        )

    async def largest(
        self, kind: type[Family], name: str, text: str, labels: Names, counts: Mapping[Labels, int]
    ) -> Family:
        """Build a metric from the counts by the values of its labels: a series for each of the largest, one for others.

        `kind` is its class, `text` its help text. Counts that the caller may not see are among the others.
        """
        largest = _Largest()
        async for share in shares(counts.items()):
            for values, count in share:
                largest.add(values, count, is_visible=self.may_see(labels, values))
        return self.build(kind, name, text, labels, largest)

    def build(self, kind: type[Family], name: str, text: str, labels: Names, largest: _Largest) -> Family:
        """Build a metric with a series for each of the largest counts, and one for the sum of all others."""
        family, others = kind(name, text, labels=labels), largest.others
        for values, count in largest.shown():
            family.add_metric(values, count)
        if isinstance(family, CounterMetricFamily):
            others = self._others.count(self.caller.name, name, others)
        # Even if nothing is among the others now, a counter keeps the sum of its falls.
        if others or largest.has_others:
            family.add_metric([OTHERS] * len(labels), others)
        return family


def _flag(value: object) -> int:
    """Convert a truth value to the value of a metric: 1 or 0."""
    return int(bool(value))


# ---- histograms ----------------------------------------------------------------------------------------------


def durations(name: str, text: str, measured: Durations) -> HistogramMetricFamily:
    """Build a histogram of durations, in seconds. `text` is the help text of the metric."""
    return histogram(name, text, [bound / 1e9 for bound in BOUNDS_NS], measured.counts, measured.sum_ns / 1e9)


def histogram(
    name: str, text: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float
) -> HistogramMetricFamily:
    """Build a histogram without labels. `counts` has the number of values in each bucket, as `buckets` expects it."""
    return HistogramMetricFamily(name, text, buckets=buckets(bounds_s, counts), sum_value=sum_s)


def buckets(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Convert the numbers of values in each bucket to the numbers at or below each bound, as Prometheus expects.

    `counts` has one more element than `bounds_s`: the number of values above all bounds.

    >>> buckets([0.5, 1.0], [1, 2, 3])
    [('0.5', 1), ('1.0', 3), ('+Inf', 6)]
    """
    total, totals = 0, list[tuple[str, float]]()
    for bound, count in zip([*map(str, bounds_s), "+Inf"], counts, strict=True):
        total += count
        totals.append((bound, total))
    return totals


# ---- metrics of compaction, pipeline jobs and the object store -----------------------------------------------
# These are the parts of the path of scheduled messages from the log into tables. Jobs are separate processes that send
# reports to the broker (broker/admin/administration.py). The lag of a job is computed here from the position in its
# latest report. So the lag grows after a job has died.


async def table_and_job_metrics(broker: Broker) -> list[Metric]:
    """Build the metrics of compactions, of a table in an object store, and of jobs.

    Waits for the reader thread, which reads the reports of the jobs and single rows of the log.
    """
    lag_ms = await broker.job_reports.compaction_lag_ms() if broker.mover.tail_count.rows else 0
    compaction, cache = _compaction_metrics(broker.mover.compactions, lag_ms), broker.pending_table.cache
    store = [] if cache is None else _store_metrics(cache)
    return [*compaction, *store, *_job_metrics(await broker.job_reports.states())]


def _compaction_metrics(figures: Figures, lag_ms: int) -> list[Metric]:
    """Build the metrics of compactions. `lag_ms`: the age of the oldest row that is not compacted yet."""
    runs = CounterMetricFamily(
        "timeball_compactions", "Compactions that have ended with an attach.", labels=["by"]
    )
    rows = CounterMetricFamily(
        "timeball_compacted_messages", "Scheduled messages that these have moved to the table.", labels=["by"]
    )
    last = GaugeMetricFamily(
        "timeball_compaction_last_timestamp_seconds", "When the last of these was attached.", labels=["by"]
    )
    for by, count in figures.runs.items():
        runs.add_metric([by], count)
        rows.add_metric([by], figures.rows[by])
        last.add_metric([by], figures.last_ms[by] / SECOND_MS)
    seconds = durations(
        "timeball_compaction_seconds", "How long the broker's own took, with their attach.", figures.durations
    )
    failures = CounterMetricFamily(
        "timeball_compaction_failures", "The broker's own that have failed.", value=figures.failures
    )
    lag = GaugeMetricFamily(
        "timeball_compaction_lag_seconds",
        "Age of the oldest row of the log that compaction is still to look at.",
        lag_ms / SECOND_MS,
    )
    return [runs, rows, last, seconds, failures, lag]


def _store_metrics(cache: FileCache) -> list[Metric]:
    """Build the metrics of a pending table in an object store."""
    return [
        GaugeMetricFamily(
            "timeball_store_up", "1 if the object store has answered last.", int(not cache.problem)
        ),
        GaugeMetricFamily(
            "timeball_store_missing_files",
            "Data files with something due within the hour that are not in the data folder.",
            cache.missing_files,
        ),
        GaugeMetricFamily(
            "timeball_store_cached_bytes", "Data files that are in the data folder.", cache.size_bytes
        ),
        CounterMetricFamily(
            "timeball_store_fetched_bytes",
            "Read of data files in the object store.",
            value=cache.fetched_bytes,
        ),
        CounterMetricFamily(
            "timeball_store_failures", "Requests that it did not answer.", value=cache.failures
        ),
    ]


def _job_metrics(states: list[JobState]) -> list[Metric]:
    """Build the metrics of pipeline jobs from their latest reports and their lags."""
    state = GaugeMetricFamily(
        "timeball_pipeline_job_state", "1 for the state it has reported.", labels=["pipeline_job", "state"]
    )
    heard_at = GaugeMetricFamily(
        "timeball_pipeline_job_heard_timestamp_seconds",
        "When a job has reported last.",
        labels=["pipeline_job"],
    )
    batches = CounterMetricFamily(
        "timeball_pipeline_batches", "Micro-batches since the job began.", labels=["pipeline_job"]
    )
    rows = CounterMetricFamily("timeball_pipeline_rows", "Rows of the log in these.", labels=["pipeline_job"])
    failures = CounterMetricFamily(
        "timeball_pipeline_failures", "Micro-batches that failed.", labels=["pipeline_job"]
    )
    seconds = GaugeMetricFamily(
        "timeball_pipeline_last_batch_seconds",
        "How long the latest micro-batch took.",
        labels=["pipeline_job"],
    )
    lag_rows = GaugeMetricFamily(
        "timeball_pipeline_lag_rows", "Rows of the log behind a job's position.", labels=["pipeline_job"]
    )
    lag = GaugeMetricFamily(
        "timeball_pipeline_lag_seconds",
        "Age of the oldest of these, or of the instant up to which a job has come.",
        labels=["pipeline_job"],
    )
    for figures, behind_rows, behind_ms in states:
        job = figures.job
        state.add_metric([job, figures.state], 1)
        heard_at.add_metric([job], figures.updated_ms / SECOND_MS)
        batches.add_metric([job], figures.epochs)
        rows.add_metric([job], figures.rows)
        failures.add_metric([job], figures.failures)
        if figures.last is not None:
            seconds.add_metric([job], figures.last.took_ms / SECOND_MS)
        if behind_rows is not None:
            lag_rows.add_metric([job], behind_rows)
        if behind_ms is not None:
            lag.add_metric([job], behind_ms / SECOND_MS)
    return [state, heard_at, batches, rows, failures, seconds, lag_rows, lag]


# ---- the metrics of a replica ---------------------------------------------------------------------------------

ROLES = ("learner", "follower", "candidate", "sealing", "syncing", "leader", "stopped")


def replica_metrics(figures: ReplicaFigures) -> Iterator[Metric]:
    """Yield the metrics of a replica."""
    role = GaugeMetricFamily(
        "timeball_cluster_role", "1 for the state that this replica is in.", labels=["group", "role"]
    )
    for name in ROLES:
        role.add_metric([figures.group, name], int(name == figures.role))
    yield role
    for name, text, value in (
        ("has_leader", "1 while this node knows of a leader.", int(bool(figures.leader))),
        ("epoch", "Epoch that this replica leads or stands in; 0 for a follower.", figures.epoch),
        ("promised_epoch", "Epoch below which this replica obeys no leader.", figures.promised),
        ("log_rows", "Rows of this replica's log since its first.", figures.log_seq),
        ("committed_rows", "Of these, known to be committed.", figures.committed_seq),
        (
            "commit_lag_rows",
            "Rows of this replica's log not known to be committed.",
            max(0, figures.log_seq - figures.committed_seq),
        ),
        (
            "apply_lag_rows",
            "Committed rows that this replica has not applied.",
            max(0, min(figures.committed_seq, figures.log_seq) - figures.applied_seq),
        ),
        ("connections", "Connections with other replicas.", figures.connections),
    ):
        family = GaugeMetricFamily(f"timeball_cluster_{name}", text, labels=["group"])
        family.add_metric([figures.group], value)
        yield family
    yield from _peer_metrics(figures)


def _peer_metrics(figures: ReplicaFigures) -> Iterator[Metric]:
    """Yield the metrics of the other replicas, which only a leader has."""
    lag = GaugeMetricFamily(
        "timeball_cluster_replica_lag_rows",
        "Rows of the leader's log that are not on a replica's disk.",
        labels=["group", "node"],
    )
    offset = GaugeMetricFamily(
        "timeball_cluster_clock_offset_seconds",
        "That a replica's clock is ahead of the leader's.",
        labels=["group", "node"],
    )
    for node, peer in figures.peers.items():
        lag.add_metric([figures.group, node], max(0, figures.log_seq - peer.acked_seq))
        if peer.clock_offset_ms is not None:
            offset.add_metric([figures.group, node], peer.clock_offset_ms / 1_000)
    yield from (lag, offset)
