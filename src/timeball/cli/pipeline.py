"""`timeball pipeline run JOB...`: jobs on Spark, against any broker and any master.

The same jobs run inside `timeball up`; run by hand they go to a cluster by changing --master and --endpoint.
Spark is imported only here and below, when a job really starts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from enum import StrEnum
from typing import Annotated

import typer

from timeball.cli import log_lines, pipeline_status
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption
from timeball.config import LogFormat, LogLevel
from timeball.errors import RequestError

app = typer.Typer(help="Run Spark jobs on the log and on what waits.", no_args_is_help=True)


class Job(StrEnum):
    """Jobs that `run` knows."""

    COMPACT = "compact"
    LEDGER = "ledger"
    ARCHIVE = "archive"
    DISPATCH = "dispatch"


app.command("status")(pipeline_status.status)


@app.callback()
def _pipeline() -> None:
    pass


@app.command("run")
def run(
    jobs: Annotated[list[Job], typer.Argument(metavar="JOB...", help="compact, ledger, archive, dispatch")],
    master: Annotated[
        str,
        typer.Option("--master", envvar="TIMEBALL_MASTER", help="Spark master; the same job runs on any."),
    ] = "local[2]",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    once: Annotated[bool, typer.Option("--once", help="Process what is there now, then end.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="URI", help="Where Spark keeps its place; by default beside the data."
        ),
    ] = None,
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

    compact moves scheduled messages from the log's tail to the pending table; ledger keeps their events:
    accepted, released, cancelled, lateness; archive keeps every message that became visible; dispatch brings
    what is due in place of the broker's own wheel, for clusters. Killed at any moment they go on where they were.

    \b
    Examples:
      timeball pipeline run compact ledger
      timeball pipeline run ledger --once
      timeball pipeline run compact --option compact.min_rows_per_batch=100000
      timeball pipeline run compact --master spark://head:7077 --endpoint grpc://broker:7400
      timeball pipeline run dispatch --option dispatch.lead_ms=500 --master spark://head:7077
    """
    if len(set(jobs)) < len(jobs):
        raise RequestError(f"{' '.join(jobs)}: name each job once")
    chosen = parse_job_options(jobs, options or [])
    log_lines.configure(log_level, log_format)
    from timeball.cli.spark import close_session, load_runner, open_session

    runner = load_runner()
    if stop_on_eof:
        _stop_on_eof()
    names = [job.value for job in jobs]
    session = open_session(master, "timeball " + " ".join(names))
    try:
        runner.run(names, spark=session, endpoint=endpoint, once=once, checkpoint=checkpoint, options=chosen)
    finally:
        close_session(session)


def parse_job_options(jobs: list[Job], given: list[str]) -> dict[str, dict[str, str]]:
    """JOB.NAME=VALUE by job; RequestError for a job that is not run or a text of another shape."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        job, dot, rest = text.partition(".")
        name, equals, value = rest.partition("=")
        if not (dot and name and equals):
            raise RequestError(f"--option {text}: write JOB.NAME=VALUE, such as compact.few_rows=1000")
        if job not in [each.value for each in jobs]:
            raise RequestError(f"--option {text}: the job {job!r} is not among those to run")
        found.setdefault(job, {})[name] = value
    return found


def _stop_on_eof() -> None:
    """End as on SIGTERM once stdin closes: whoever started this process with a pipe has died."""

    stdin = sys.stdin.fileno()

    def watch() -> None:
        # Not through sys.stdin, whose lock this thread would still hold when the interpreter ends.
        while os.read(stdin, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-on-eof", daemon=True).start()
