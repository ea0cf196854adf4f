"""Metrics of the path of scheduled messages from the log into tables: compaction, pipeline jobs and the object store.

Jobs are separate processes that send reports to the broker (broker/admin/job_reports.py). The lag of a job is computed
here from the position in its latest report. So the lag grows after a job has died.
"""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from timeball.broker.admin.job_reports import JobState
from timeball.broker.service import Broker
from timeball.broker.tables.compact import Figures
from timeball.model.limits import SECOND_MS
from timeball.monitoring.histograms import durations
from timeball.table.file_cache import FileCache


async def read(broker: Broker) -> list[Metric]:
    """Read the metrics. The reader thread reads the jobs' reports and single rows of the log."""
    lag_ms = await broker.job_reports.compaction_lag_ms() if broker.mover.tail_count.rows else 0
    compaction, cache = _compaction_metrics(broker.mover.compactions, lag_ms), broker.pending_table.cache
    store = [] if cache is None else _store_metrics(cache)
    return [*compaction, *store, *_job_metrics(await broker.job_reports.states())]


def _compaction_metrics(figures: Figures, lag_ms: int) -> list[Metric]:
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
    took = durations(
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
    return [runs, rows, last, took, failures, lag]


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
    state = GaugeMetricFamily(
        "timeball_pipeline_job_state", "1 for the state it has reported.", labels=["pipeline_job", "state"]
    )
    heard = GaugeMetricFamily(
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
    took = GaugeMetricFamily(
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
        heard.add_metric([job], figures.updated_ms / SECOND_MS)
        batches.add_metric([job], figures.epochs)
        rows.add_metric([job], figures.rows)
        failures.add_metric([job], figures.failures)
        if figures.last is not None:
            took.add_metric([job], figures.last.took_ms / SECOND_MS)
        if behind_rows is not None:
            lag_rows.add_metric([job], behind_rows)
        if behind_ms is not None:
            lag.add_metric([job], behind_ms / SECOND_MS)
    return [state, heard, batches, rows, failures, took, lag_rows, lag]
