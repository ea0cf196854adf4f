"""`timeball audit`: do the books balance, to the message?

A batch job on Spark (pipeline/jobs/audit.py) reads the ledger, the pending table and the log, and compares what
was accepted with what was released, cancelled, expired and is still waiting. Here its report becomes lines, and
its verdict the exit code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    SPARK_AS_IT_IS,
    EndpointOption,
    JsonOption,
    SparkOptions,
    reach,
    spark_options,
)
from timeball.cli.output import show

if TYPE_CHECKING:
    from timeball.pipeline.jobs.audit import AuditReport

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
    """Check that accepted = released + cancelled + expired + pending, to the message.

    Of a cluster it checks each group, and adds them up. Exit code 1 says that it does not balance; the report
    names the messages concerned.

    \b
    Examples:
      timeball audit
      timeball audit --json | jq .ok
      timeball audit --master spark://head:7077 --endpoint grpc://broker:7400
    """
    from timeball.cli.spark import spark_session

    reach(endpoint)
    with spark_session(spark, "timeball-audit") as session:
        from timeball.pipeline.jobs import audit as job
        from timeball.pipeline.run.job_status import Board
        from timeball.pipeline.run.runner import default_folder

        report = job.run(session, endpoint, ledger_uri=ledger)
        # Without the messages concerned, which may be long: these are shown here.
        groups = {name: msgspec.structs.replace(each, offenders={}) for name, each in report.groups.items()}
        counts = msgspec.structs.replace(report, offenders={}, groups=groups)
        Board(default_folder(endpoint)).write_audit(msgspec.json.encode(counts))
    show(report, describe(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def describe(report: AuditReport) -> Iterator[str]:
    """The report for people: the balance, each breach with some of its promises, the verdict."""
    for name, each in report.groups.items():
        yield f"group {name}: {balance(each)}{'' if each.ok else ', IT DOES NOT BALANCE'}"
    yield f"{'all groups: ' if report.groups else ''}{balance(report)}"
    for name, offenders in report.offenders.items():
        yield f"{name}: {len(offenders):,}{' or more' if len(offenders) >= 100 else ''}, for example"
        for offender in offenders[:OFFENDERS_SHOWN]:
            shown = ", ".join(
                f"{key} {value}"
                for key, value in offender.items()
                if value is not None and value is not False  # 0 is a value: a queue, or an instant
            )
            yield f"  {shown}"
    yield "it balances" if report.ok else "IT DOES NOT BALANCE"


def balance(report: AuditReport) -> str:
    """The equation with its numbers."""
    return (
        f"accepted {report.accepted:,} = released {report.released:,} + cancelled {report.cancelled:,} "
        f"+ expired {report.expired:,} + pending {report.pending:,}"
    )
