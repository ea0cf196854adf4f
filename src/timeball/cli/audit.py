"""`timeball audit`: check that every accepted message is accounted for.

A batch job on Spark (spark/jobs/audit.py) reads the ledger, the pending table and the log. It compares the number of
accepted messages with the numbers of released, cancelled, expired and pending ones. This module prints its report, and
turns its verdict into the exit code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    SPARK_AS_IT_IS,
    EndpointOption,
    JsonOption,
    SparkOptions,
    reach,
    spark_options,
)
from timeball.cli.output import ExitCode, show

if TYPE_CHECKING:
    from timeball.spark.jobs.audit import AuditReport

OFFENDERS_SHOWN = 10


@spark_options
def audit(
    spark: SparkOptions = SPARK_AS_IT_IS,
    ledger: Annotated[
        str | None,
        typer.Option(
            "--ledger",
            metavar="URI",
            help="The ledger's table, {group} for a group's name; by default beside the pending table.",
        ),
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Check that accepted = released + cancelled + expired + pending, message by message.

    In a cluster, the command checks each group and adds up the counts.

    Exit code 1: the counts do not balance. The report then names the messages
    concerned.

    \b
    Examples:
      timeball audit
      timeball audit --json | jq .ok
      timeball audit --master spark://head:7077 --endpoint grpc://broker:7400
    """
    from timeball.cli.spark import spark_session

    reach(endpoint)
    with spark_session(spark, "timeball-audit") as session:
        from timeball.spark.jobs import audit as job
        from timeball.spark.run.job_status import Board
        from timeball.spark.run.runner import default_folder

        report = job.run(session, endpoint, ledger_uri=ledger)
        # The status file gets the counts alone: the lists of messages may be long, and are printed below.
        groups = {
            name: msgspec.structs.replace(group_report, offenders={})
            for name, group_report in report.groups.items()
        }
        counts = msgspec.structs.replace(report, offenders={}, groups=groups)
        Board(default_folder(endpoint)).write_audit(msgspec.json.encode(counts))
    show(report, describe(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def describe(report: AuditReport) -> Iterator[str]:
    """Yield the report for people: the balance, each breach with some of its messages, and the verdict."""
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
    """Format the audit's equation with its numbers."""
    return (
        f"accepted {report.accepted:,} = released {report.released:,} + cancelled {report.cancelled:,} "
        f"+ expired {report.expired:,} + pending {report.pending:,}"
    )
