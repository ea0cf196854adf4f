"""`timeball up`: a broker and its pipeline, started and stopped together.

The broker serves first; Spark starts behind it and needs some seconds, in which nothing waits for it. On
SIGTERM or Ctrl-C the pipeline goes first, because it is a client of the broker. Only what an `hour_log` keeps is
compacted: with another schedule the pipeline is the ledger alone.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from timeball.cli import log_lines
from timeball.cli.options import JsonOption, settings_options
from timeball.cli.output import note, print_json
from timeball.cli.serve import announce, local_endpoint
from timeball.cli.subprocesses import Say, Supervisor
from timeball.config import Settings


@settings_options
def up(
    settings: Settings,
    master: Annotated[
        str, typer.Option("--master", envvar="TIMEBALL_MASTER", help="Spark master for the pipeline.")
    ] = "local[2]",
    as_json: JsonOption = False,
) -> None:
    """Run the broker with its Spark pipeline (jobs compact and ledger), until Ctrl-C.

    The broker serves at once; the pipeline follows some seconds later in a process of its own. If it dies it
    is started again; without Java or pyspark the broker says so, goes on, and compacts by itself. With another
    --strategy than hour_log there is nothing to compact.

    \b
    Examples:
      timeball up
      timeball up --data /var/lib/timeball --durability sync
      timeball up --strategy timer_wheel
      timeball up --port 0 --json | jq -c .
      timeball up --master spark://head:7077
    """
    asyncio.run(_up(settings, master, as_json))


async def _up(settings: Settings, master: str, as_json: bool) -> None:
    from timeball.broker.memory import use_system_pool
    from timeball.descriptors import allow_many
    from timeball.node import Node

    log_lines.configure(settings.log_level, settings.log_format)
    use_system_pool()
    allow_many()
    node = Node(settings)
    await node.start()
    announce(node, as_json)
    endpoint = local_endpoint(settings, node.port)
    say, compacts = _speaker(as_json), settings.strategy == "hour_log"
    if not compacts:
        why = f"with the strategy {settings.strategy} messages wait in the log"
        say("ledger_only", f"nothing to compact: {why}; the pipeline keeps the ledger")
    alone = "goes on and compacts by itself" if compacts else "goes on"
    pipeline = Supervisor(pipeline_command(settings, endpoint, master), say, alone=alone)
    supervising = asyncio.create_task(pipeline.run())

    async def stop_pipeline() -> None:
        await pipeline.stop()
        await supervising

    await node.run_until_signal(before_stop=stop_pipeline)


def pipeline_command(settings: Settings, endpoint: str, master: str) -> list[str]:
    """The child's command line: compaction, where there is any, by the broker's own settings."""
    compacts = settings.strategy == "hour_log"
    compact = {
        "min_rows_per_batch": settings.compact_rows,
        "max_trigger_delay_ms": settings.compact_interval_ms,
        "few_rows": settings.compact_rows_min,
    }
    jobs = ["compact", "ledger"] if compacts else ["ledger"]
    command = [sys.executable, "-m", "timeball", "pipeline", "run", *jobs]
    command += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    command += ["--endpoint", endpoint, "--master", master, "--stop-on-eof"]
    for name, value in compact.items() if compacts else ():
        command += ["--option", f"compact.{name}={value}"]
    return command


def _speaker(as_json: bool) -> Say:
    """What happens to the pipeline, as a line for people on stderr or a JSON line on stdout."""
    if not as_json:
        return lambda state, sentence: note(f"timeball: {sentence}")
    return lambda state, sentence: print_json({"event": "pipeline", "state": state, "text": sentence})
