"""`timeball pipeline`: run jobs on Spark, against any broker and any master, and show their state.

The same jobs run inside `timeball up`. Run by hand, they go to a cluster with other values of --master and --endpoint.
Spark is imported only in functions that start a job.

Each job writes a small status file beside its checkpoint every few seconds. `pipeline status` reads these files, and
asks the broker for the end of its log, so it needs no Spark. A job without a new file for a while is shown as silent:
the job or its machine was killed.

`timeball audit` checks that every accepted message is in one state. A batch job on Spark or DuckDB
(spark/jobs/audit.py) reads the ledger, the pending table and the log. This module prints its report, draws it, and
turns its verdict into the exit code.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from timeball.cli import output
from timeball.cli.options import (
    DEFAULT_FLIGHT,
    SPARK_AS_IT_IS,
    FlightEndpointOption,
    JsonOption,
    NoSparkOption,
    SparkOptions,
    reach,
    spark_options,
)
from timeball.cli.output import ExitCode, out, print_json, print_line, show
from timeball.model.config import LogFormat, LogLevel
from timeball.model.errors import RequestError, Unavailable

if TYPE_CHECKING:
    from timeball.spark.jobs.audit import AuditReport
    from timeball.spark.run.runner import JobStatus


# ---- timeball pipeline ----------------------------------------------------------------------------------------


pipeline_app = typer.Typer(help="Run Spark jobs on the log and on pending messages.", no_args_is_help=True)


class Job(StrEnum):
    """The jobs that `pipeline run` accepts."""

    COMPACT = "compact"
    LEDGER = "ledger"
    ARCHIVE = "archive"
    DISPATCH = "dispatch"


@pipeline_app.callback()
def _pipeline() -> None:
    pass


@pipeline_app.command("run")
@spark_options
def run(
    jobs: Annotated[list[Job], typer.Argument(metavar="JOB...", help="compact, ledger, archive, dispatch")],
    spark: SparkOptions = SPARK_AS_IT_IS,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    once: Annotated[bool, typer.Option("--once", help="Process everything up to now, then end.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="URI",
            help="Folder for the jobs' status files and dispatch's position; by default beside the data.",
        ),
    ] = None,
    no_spark: NoSparkOption = False,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="JOB.NAME=VALUE", help="An option of one job; may be repeated."),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option("--log-level", envvar="TIMEBALL_LOG_LEVEL", help="warning: no line for every epoch."),
    ] = "info",
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", envvar="TIMEBALL_LOG_FORMAT", help="json: one document a line."),
    ] = "text",
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Run pipeline jobs until Ctrl-C, or with --once until they have caught up.

    compact moves scheduled messages from the log's tail to the pending table.
    ledger records their events: accepted, released, cancelled, and lateness.
    archive stores every message that became visible. dispatch releases due
    messages in place of the broker's own scheduler, for clusters. A job that
    was killed continues where it was.

    \b
    Examples:
      timeball pipeline run compact ledger
      timeball pipeline run ledger --once
      timeball pipeline run compact --option compact.min_rows_per_batch=100000
      timeball pipeline run ledger archive --no-spark
      timeball pipeline run compact --master spark://head:7077 --endpoint grpc://broker:7400
      timeball pipeline run dispatch --option dispatch.lead_ms=500 --master spark://head:7077
    """
    if len(set(jobs)) < len(jobs):
        raise RequestError(f"{' '.join(jobs)}: name each job once")
    job_options = parse_job_options(jobs, options or [])
    output.configure_logging(log_level, log_format)
    from timeball.cli.spark import load_runner, spark_session

    runner = load_runner(with_spark=not no_spark)
    if stop_on_eof:
        _stop_on_eof()
    names = [job.value for job in jobs]
    arguments = {"endpoint": endpoint, "once": once, "checkpoint": checkpoint, "options": job_options}
    if no_spark:
        runner.run(names, with_spark=False, **arguments)
        return
    from timeball.spark.run.session import continuous

    session_options = SparkOptions(spark.master, tuple(continuous(spark.master, dict(spark.conf)).items()))
    with spark_session(session_options, "timeball " + " ".join(names)) as session:
        runner.run(names, spark=session, **arguments)


def parse_job_options(jobs: list[Job], texts: list[str]) -> dict[str, dict[str, str]]:
    """Group JOB.NAME=VALUE by job. RequestError for a job that is not run, and for another form."""
    options_by_job: dict[str, dict[str, str]] = {}
    for text in texts:
        job, dot, rest = text.partition(".")
        name, equals, value = rest.partition("=")
        if not (dot and name and equals):
            raise RequestError(f"--option {text}: write JOB.NAME=VALUE, such as compact.few_rows=1000")
        if job not in [chosen_job.value for chosen_job in jobs]:
            raise RequestError(f"--option {text}: the job {job!r} is not among those to run")
        options_by_job.setdefault(job, {})[name] = value
    return options_by_job


def _stop_on_eof() -> None:
    """Send SIGTERM to this process when stdin closes: then the parent process, which holds the other end, has died."""

    stdin = sys.stdin.fileno()

    def watch() -> None:
        """Read stdin to its end, and then send the signal."""
        # os.read, not sys.stdin: this thread would still hold the lock of sys.stdin when the interpreter ends.
        while os.read(stdin, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-on-eof", daemon=True).start()


# ---- status ---------------------------------------------------------------------------------------------------


@pipeline_app.command("status")
def status(
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="URI", help="The jobs' --checkpoint; by default beside the data."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of the pipeline's jobs: position, lag, speed and failures.

    The command asks the broker, and reads the status files beside the jobs'
    checkpoints. With --checkpoint it works while the broker is away.

    \b
    Examples:
      timeball pipeline status
      timeball pipeline status --json | jq '{job, state, behind_rows}'
      timeball pipeline status --checkpoint s3://bucket/checkpoints --endpoint grpc://broker:7400
    """
    from timeball.io.clock import SystemClock
    from timeball.spark.run.runner import read_statuses

    broker = _read_broker_status(endpoint, needed=checkpoint is None)
    folder = checkpoint or broker["table"]["uri"].rstrip("/").rpartition("/")[0] + "/pipeline"
    now_ms = SystemClock().wall_ms()
    documents = [_job_document(job_status, broker, now_ms) for job_status in read_statuses(folder)]
    if as_json:
        for document in documents:
            print_json(document)
        return
    if not documents:
        print_line(f"no job has run with its checkpoints in {folder}")
        return
    out().print(_jobs_table(documents))
    for document in documents:
        # A separate line: a column would wrap the text, and a search would not find it.
        if document["error"]:
            print_line(f"{document['job']}: {document['error']}")
    if broker:
        print_line(f"the log ends at row {broker['log']['durable_seq']:,}; watermark {broker['watermark']:,}")


def _read_broker_status(endpoint: str, *, needed: bool) -> dict[str, Any]:
    """Read the broker's status. It is empty when the broker is away and the status is not `needed`."""
    try:
        return reach(endpoint)
    except Unavailable:
        if needed:
            raise
        return {}


def _job_document(job: JobStatus, broker: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """Build the JSON document of a job. `broker`: the broker's status, empty if it did not answer."""
    last = job.last
    position_seq = last.position if last is not None and last.unit == "seq" else None
    # With several groups, the broker's status has the log of one group only.
    is_one_log = bool(broker) and len(broker.get("groups") or []) < 2
    if job.job == Job.COMPACT and is_one_log:
        # While the job does not run, the broker itself moves the tail, so the watermark may be ahead of the job.
        position_seq = max(position_seq or 0, broker["watermark"])
    behind_rows = last.lag if position_seq is not None and last is not None else None
    if position_seq is not None and is_one_log:
        behind_rows = max(0, broker["log"]["durable_seq"] - position_seq)
    position = None if last is None else {last.unit: last.position}
    return {
        "job": job.job,
        "state": job.shown(now_ms),
        "position": position if position_seq is None else {"seq": position_seq},
        "behind_rows": behind_rows,
        "behind_ms": last.lag if last is not None and last.unit == "due_ms" else None,
        "watermark": broker.get("watermark"),
        "epoch": None if last is None else last.epoch,
        "epoch_ms": None if last is None else last.took_ms,
        "epoch_ended_ms": job.last_ms,
        "rows_per_s": None if last is None else last.rows_per_s,
        "epochs": job.epochs,
        "rows": job.rows,
        "failures": job.failures,
        "error": job.error,
        "started_ms": job.started_ms,
        "updated_ms": job.updated_ms,
        "host": job.host,
        "pid": job.pid,
    }


def _jobs_table(documents: list[dict[str, Any]]) -> Table:
    """Build the table of `timeball pipeline status` from the documents of the jobs."""
    table = Table(box=None, pad_edge=False)
    for name in ("job", "state"):
        table.add_column(name)
    for name in ("at", "behind", "rows/s", "epoch", "epoch took", "failures"):
        table.add_column(name, justify="right")
    for job in documents:
        behind = _format_number(job["behind_rows"], " rows") or _format_number(job["behind_ms"], " ms")
        position = next(iter((job["position"] or {}).values()), None)
        numbers = [
            _format_number(position),
            behind,
            _format_number(job["rows_per_s"]),
            _format_number(job["epoch"]),
        ]
        duration, failures = _format_number(job["epoch_ms"], " ms"), str(job["failures"])
        table.add_row(job["job"], job["state"], *numbers, duration, failures)
    return table


def _format_number(value: int | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,}{unit}"


# ---- timeball audit -------------------------------------------------------------------------------------------


OFFENDERS_SHOWN = 10


@spark_options
def audit(
    spark: SparkOptions = SPARK_AS_IT_IS,
    no_spark: NoSparkOption = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read all events, not only those since the last balanced audit.")
    ] = False,
    ledger: Annotated[
        str | None,
        typer.Option(
            "--ledger",
            metavar="URI",
            help="The ledger's table, {group} for a group's name; by default beside the pending table.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the balance (.svg, .png or .pdf)."),
    ] = None,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Check that each accepted message is in one state: released, cancelled, pending, …

    The audit reads the events since the last audit that balanced, or with
    --full all of them. It runs on Spark, or with --no-spark on DuckDB in the
    command's process. In a cluster, it checks each group and adds up the counts.

    Exit code 1: there are differences. The report then names the messages
    concerned. Exit codes from 2 on: the audit could not run.

    \b
    Examples:
      timeball audit
      timeball audit --no-spark --picture audit.svg
      timeball audit --json | jq .ok
      timeball audit --master spark://head:7077 --endpoint grpc://broker:7400
    """
    from timeball.cli.spark import load_runner, spark_session

    load_runner(with_spark=not no_spark)
    if picture is not None:
        from timeball.cli.forecast_report import check_picture

        check_picture(picture)
    reach(endpoint)
    with nullcontext() if no_spark else spark_session(spark, "timeball-audit") as session:
        from timeball.spark.jobs import audit as job
        from timeball.spark.run.runner import Board, default_folder

        report = job.run(session, endpoint, ledger_uri=ledger, full=full)
        # The status file gets the counts alone: the lists of messages may be long, and are printed below.
        groups = {
            name: msgspec.structs.replace(group_report, offenders={})
            for name, group_report in report.groups.items()
        }
        counts = msgspec.structs.replace(report, offenders={}, groups=groups)
        Board(default_folder(endpoint)).write_audit(msgspec.json.encode(counts))
    if picture is not None:
        draw_balance(report, picture)
    show(report, describe_audit(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def describe_audit(report: AuditReport) -> Iterator[str]:
    """Yield the report for people: the balance, each breach with some of its messages, and the verdict."""
    for name, group_report in report.groups.items() or [("", report)]:
        if group_report.full_because:
            yield f"full audit{' of group ' if name else ''}{name}: {group_report.full_because}"
    for name, group_report in report.groups.items():
        yield f"group {name}: {balance(group_report)}{'' if group_report.ok else ', IT DOES NOT BALANCE'}"
    yield f"{'all groups: ' if report.groups else ''}{balance(report)}"
    for name, offenders in report.offenders.items():
        # The job lists at most 100 messages of a breach (OFFENDERS_MAX), so 100 may stand for more.
        yield f"{name}: {len(offenders):,}{' or more' if len(offenders) >= 100 else ''}, for example"
        for offender in offenders[:OFFENDERS_SHOWN]:
            shown = ", ".join(
                f"{key} {value}"
                for key, value in offender.items()
                if value is not None and value is not False  # 0 is shown: it can be a queue or a time
            )
            yield f"  {shown}"
    yield "it balances" if report.ok else "IT DOES NOT BALANCE"


def balance(report: AuditReport) -> str:
    """Format the audit's equation with its numbers: accepted = released + cancelled + …"""
    return f"accepted {report.accepted:,} = " + " + ".join(
        f"{name} {number:,}" for name, number in _outcomes(report).items()
    )


def _outcomes(report: AuditReport) -> dict[str, int]:
    from timeball.spark.jobs.audit import OUTCOMES

    return {name: getattr(report, name) for name in OUTCOMES}


def draw_balance(report: AuditReport, file: Path) -> None:
    """Write a picture of the balance to the file: a flow from the accepted messages to each outcome."""
    from matplotlib.figure import Figure

    from timeball.cli.forecast_report import COLOURS

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    outcomes = {name: number for name, number in _outcomes(report).items() if number}
    outcomes |= {"difference": abs(report.accepted - sum(outcomes.values()))}
    outcomes = {name: number for name, number in outcomes.items() if number}
    total, gap = max(sum(outcomes.values()), 1), 0.12  # `gap` keeps the names of small outcomes apart
    # A smooth step from 0 to 1, which is the bend of a flow.
    curve = [(3 - 2 * x / 40) * (x / 40) ** 2 for x in range(41)]
    left = right = 0.0  # where the next flow begins on each side, as a part of the height
    for (name, number), colour in zip(outcomes.items(), itertools.cycle(COLOURS)):
        share = number / total
        low = [left + (right - left) * y for y in curve]
        axes.fill_between([x / 40 for x in range(41)], low, [y + share for y in low], color=colour, alpha=0.6)
        axes.text(1.02, right + share / 2, f"{name} {number:,}", va="center")
        left, right = left + share, right + share + gap
    axes.text(-0.02, 0.5, f"accepted {report.accepted:,}", va="center", ha="right")
    axes.set_title("balanced" if report.ok else "NOT BALANCED", loc="left")
    axes.set_xlim(-0.5, 1.5)
    figure.savefig(file)
