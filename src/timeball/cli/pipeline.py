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

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption

app = typer.Typer(help="Run Spark jobs on the log and on what waits.", no_args_is_help=True)


class Job(StrEnum):
    """Jobs that `run` knows."""

    COMPACT = "compact"
    LEDGER = "ledger"


@app.callback()
def _pipeline() -> None:
    pass


@app.command("run")
def run(
    jobs: Annotated[list[Job], typer.Argument(metavar="JOB...", help="compact, ledger")],
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
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Run pipeline jobs until Ctrl-C, or with --once until they have caught up.

    compact moves promises from the log's tail to the pending table; ledger keeps one row per promise:
    accepted, due, released or cancelled, lateness. Killed at any moment they go on where they were.

    \b
    Examples:
      timeball pipeline run compact ledger
      timeball pipeline run ledger --once
      timeball pipeline run compact --master spark://head:7077 --endpoint grpc://broker:7400
    """
    from timeball.pipeline import runner

    if stop_on_eof:
        _stop_on_eof()
    runner.run(
        [job.value for job in jobs], endpoint=endpoint, master=master, checkpoint=checkpoint, once=once
    )


def _stop_on_eof() -> None:
    """End as on SIGTERM once stdin closes: whoever started this process with a pipe has died."""

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-on-eof", daemon=True).start()
