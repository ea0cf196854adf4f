"""The command `timeball`: all commands in one app, and the boundary where errors become exit codes.

Each command imports what it needs when it runs: `timeball send` should not wait for Spark's or Parquet's
modules to load. Nothing below this boundary prints an error or ends the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from timeball.cli import (
    audit,
    bench,
    bulk,
    campaign,
    cancel,
    dump,
    forecast,
    log_lines,
    pending,
    pipeline,
    pull,
    replay,
    reschedule,
    schedule,
    send,
    serve,
    sql,
    status,
    up,
)
from timeball.cli.exit_codes import explain
from timeball.cli.output import note

EPILOG = (
    "Exit codes: 0 done, 1 a check did not hold, 2 usage, 3 broker out of reach, "
    "4 set-up, 5 storage. TIMEBALL_DEBUG=1 shows stack traces."
)

app = typer.Typer(
    help="Timeball keeps a message until its instant, and then delivers it exactly once into its queue.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUN, _MESSAGES, _LOOK = "Run a broker", "Messages", "Look and check"
app.command("up", rich_help_panel=_RUN)(up.up)
app.command("serve", rich_help_panel=_RUN)(serve.serve)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_RUN)
app.command("send", rich_help_panel=_MESSAGES)(send.send)
app.command("schedule", rich_help_panel=_MESSAGES)(schedule.schedule)
app.command("cancel", rich_help_panel=_MESSAGES)(cancel.cancel)
app.command("reschedule", rich_help_panel=_MESSAGES)(reschedule.reschedule)
app.command("pull", rich_help_panel=_MESSAGES)(pull.pull)
app.command("bulk", rich_help_panel=_MESSAGES)(bulk.bulk)
app.add_typer(campaign.app, name="campaign", rich_help_panel=_MESSAGES)
app.command("replay", rich_help_panel=_MESSAGES)(replay.replay)
app.command("pending", rich_help_panel=_LOOK)(pending.pending)
app.command("sql", rich_help_panel=_LOOK)(sql.sql)
app.command("forecast", rich_help_panel=_LOOK)(forecast.forecast)
app.command("status", rich_help_panel=_LOOK)(status.status)
app.command("audit", rich_help_panel=_LOOK)(audit.audit)
app.command("dump", rich_help_panel=_LOOK)(dump.dump)
app.command("bench", rich_help_panel=_LOOK)(bench.bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        from timeball import __version__

        typer.echo(f"timeball {__version__}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code (see exit_codes.py)."""
    log_lines.configure("warning", "text")  # serve, up and pipeline run have options for it
    try:
        app(args=arguments, prog_name="timeball")
    except Exception as error:  # the end of the line: whatever it is, a person or a script is told
        if os.environ.get("TIMEBALL_DEBUG") == "1":
            raise
        sentence, code = explain(error)
        note(f"timeball: {sentence}")
        sys.exit(code)
    sys.exit(0)
