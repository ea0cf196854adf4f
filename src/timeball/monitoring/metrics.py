"""The broker's figures as Prometheus metrics; docs/metrics.md lists them.

Each figure is read where it is kept, when it is asked for: nothing is counted twice, and a message costs nothing more.
Reading takes place on the event loop and making text of it in another thread. Topics and groups are bounded: of more
than SERIES_MAX the largest are shown and the others are one series, so a client that makes up topics does not fill the
memory of what scrapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from timeball.broker.delivery import Lateness
from timeball.broker.rates import Stat
from timeball.broker.service import Broker
from timeball.clock import BOUNDS_NS, Durations
from timeball.limits import DAY_MS, HOUR_MS, MINUTE_MS
from timeball.message import DLQ_PREFIX
from timeball.monitoring.loop_lag import LoopLag

CONTENT_TYPE = CONTENT_TYPE_LATEST
SERIES_MAX = 200  # of one metric
OTHERS = "(others)"
HORIZONS = (("1m", MINUTE_MS), ("1h", HOUR_MS), ("1d", DAY_MS))


class Metrics(Collector):
    """Reads a broker. `free_bytes` and `connections` (by edge) are asked for with each reading."""

    def __init__(
        self,
        broker: Broker,
        version: str,
        loop_lag: LoopLag,
        free_bytes: Callable[[], int],
        connections: Callable[[], Mapping[str, int]],
    ) -> None:
        self._broker, self._version, self._loop_lag = broker, version, loop_lag
        self._free_bytes, self._connections = free_bytes, connections
        self._process = ProcessCollector(registry=None)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        found = list(self.collect())
        return await asyncio.to_thread(_as_text, found)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric; on the event loop."""
        yield from self._messages()
        yield from self._waiting()
        yield from self._log()
        yield from self._consumers()
        yield from self._machine()

    def _messages(self) -> Iterator[Metric]:
        broker, rates = self._broker, self._broker.parts.rates
        names = [topic.name for topic in broker.parts.topics.all()]
        accepted = {name: rates.total(Stat.TOPIC_PUT_NUMS, name) for name in names}
        dead = {
            name.removeprefix(DLQ_PREFIX): accepted.pop(name) for name in names if name.startswith(DLQ_PREFIX)
        }
        # Promises are counted by RocketMQ's timer topic until they are released into their own.
        yield _by_name(
            CounterMetricFamily(
                "timeball_accepted_messages", "Messages that entered a topic.", labels=["topic"]
            ),
            accepted,
        )
        yield _by_name(
            CounterMetricFamily("timeball_dead_letters", "Messages a group gave up.", labels=["group"]), dead
        )
        for name, text, stat in (
            ("cancelled", "Scheduled messages that were cancelled.", Stat.CANCELLED_NUMS),
            ("rescheduled", "Scheduled messages that were given another instant.", Stat.RESCHEDULED_NUMS),
            ("delivered", "Messages that were handed to consumers.", Stat.BROKER_GET_NUMS),
        ):
            yield CounterMetricFamily(f"timeball_{name}_messages", text, value=rates.total(stat))
        late = broker.lateness
        yield CounterMetricFamily(
            "timeball_released_messages", "Scheduled messages put into their queues.", value=late.released
        )
        yield _histogram(
            "timeball_release_lateness_seconds",
            "From a message's instant to its release on disk.",
            [bound / 1_000 for bound in Lateness.BOUNDS],
            late.counts.tolist(),
            late.sum_ms / 1_000,
        )

    def _waiting(self) -> Iterator[Metric]:
        broker, parts = self._broker, self._broker.parts
        counts, levels = broker.schedule_statistics(), parts.levels.statistics()
        places = {
            "near": counts["near_rows"],
            "tail": counts["tail_rows"] if parts.compacts else counts["waiting_rows"] - counts["near_rows"],
            "table": counts["table_rows"],
            "levels": levels["waiting_rows"],
        }
        waiting = GaugeMetricFamily(
            "timeball_waiting_messages", "Scheduled messages, by where they wait.", labels=["place"]
        )
        for place, rows in places.items():
            waiting.add_metric([place], max(0, rows))
        yield waiting
        now_ms = parts.clock.now_ms()
        due = GaugeMetricFamily(
            "timeball_due_messages",
            "Of those in the tail and in the pending table: due within this time, files by their share.",
            labels=["within"],
        )
        rows_due = parts.hour_log.rows_due([now_ms + horizon_ms for _, horizon_ms in HORIZONS])
        for (name, _), rows in zip(HORIZONS, rows_due, strict=True):
            due.add_metric([name], rows)
        yield due
        yield GaugeMetricFamily(
            "timeball_table_files", "Data files of the pending table.", counts["table_files"]
        )
        yield GaugeMetricFamily(
            "timeball_compaction_pending_rows",
            "Scheduled messages in the log that compaction is still to look at.",
            broker.mover.tail_count.rows,
        )
        yield CounterMetricFamily(
            "timeball_rewritten_messages",
            "Scheduled messages written again to wait on.",
            counts["moved_rows"],
        )
        yield GaugeMetricFamily(
            "timeball_transactions_open", "Transactions not ended yet.", len(broker.transactions.open())
        )
        yield GaugeMetricFamily(
            "timeball_idempotency_keys", "Idempotency keys that are known.", len(parts.idempotency_keys)
        )

    def _log(self) -> Iterator[Metric]:
        parts = self._broker.parts
        statistics = parts.writer.statistics
        yield CounterMetricFamily("timeball_log_rows", "Rows written to the log.", statistics.rows)
        yield CounterMetricFamily("timeball_log_commits", "Group commits.", statistics.commits)
        yield GaugeMetricFamily(
            "timeball_log_bytes", "Bytes of the log's segments.", parts.reader.segments.size_bytes
        )
        yield _durations(
            "timeball_log_commit_seconds", "Writing and syncing a group commit.", statistics.commit_durations
        )
        yield _durations(
            "timeball_log_sync_seconds", "fdatasync of a group commit.", statistics.sync_durations
        )
        yield GaugeMetricFamily(
            "timeball_log_stopped",
            "1 when a write has failed and the log has stopped.",
            _flag(parts.writer.failed),
        )
        yield GaugeMetricFamily(
            "timeball_disk_full", "1 while sends are refused for want of room.", _flag(parts.writer.no_room)
        )
        yield GaugeMetricFamily("timeball_disk_free_bytes", "Free space of the disk.", self._free_bytes())

    def _consumers(self) -> Iterator[Metric]:
        parts = self._broker.parts
        lags: dict[tuple[str, str], int] = {}
        for group, topics in parts.offsets.table.items():
            for name, offsets in topics.items():
                topic = parts.topics.find_topic(name)
                if topic is not None:
                    ends = [queue.index.max_offset for queue in topic.queues]
                    lags[group, name] = sum(
                        max(0, ends[queue] - offset) for queue, offset in offsets.items() if queue < len(ends)
                    )
        lag = GaugeMetricFamily(
            "timeball_group_lag_messages",
            "Messages behind a group's stored offsets.",
            labels=["group", "topic"],
        )
        shown = sorted(lags, key=lags.__getitem__, reverse=True)
        for key in shown[:SERIES_MAX]:
            lag.add_metric(list(key), lags[key])
        if len(shown) > SERIES_MAX:
            lag.add_metric([OTHERS, OTHERS], sum(lags[key] for key in shown[SERIES_MAX:]))
        yield lag
        connections = GaugeMetricFamily("timeball_connections", "Open connections.", labels=["edge"])
        for edge, count in self._connections().items():
            connections.add_metric([edge], count)
        yield connections

    def _machine(self) -> Iterator[Metric]:
        settings = self._broker.parts.settings
        info = GaugeMetricFamily(
            "timeball_build_info", "1, with what runs.", labels=["version", "strategy", "durability"]
        )
        info.add_metric([self._version, settings.strategy, settings.durability], 1)
        yield info
        yield _durations(
            "timeball_event_loop_lag_seconds",
            "How late the event loop is for what it has planned.",
            self._loop_lag.durations,
        )
        yield from self._process.collect()


class _Read(Collector):
    """Metrics that have been read."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Sequence[Metric]:
        return self._found


def _as_text(found: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(found))
    return generate_latest(registry)


def _by_name(family: CounterMetricFamily, counts: Mapping[str, int]) -> CounterMetricFamily:
    """Add a series for each of the largest, and one for the others."""
    ordered = sorted(counts, key=counts.__getitem__, reverse=True)
    for name in ordered[:SERIES_MAX]:
        family.add_metric([name], counts[name])
    if len(ordered) > SERIES_MAX:
        family.add_metric([OTHERS], sum(counts[name] for name in ordered[SERIES_MAX:]))
    return family


def _durations(name: str, text: str, durations: Durations) -> HistogramMetricFamily:
    return _histogram(
        name, text, [bound / 1e9 for bound in BOUNDS_NS], durations.counts, durations.sum_ns / 1e9
    )


def _histogram(
    name: str, text: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float
) -> HistogramMetricFamily:
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip([*map(str, bounds_s), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=sum_s)


def _flag(value: object) -> int:
    return int(bool(value))
