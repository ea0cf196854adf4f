"""`timeball pipeline status`: how the streaming jobs are doing, wherever they run.

Each job leaves a small file beside its checkpoint every few seconds. This command reads these, and asks the broker how
far its log goes; it needs no Spark. A job that has left nothing for a while is said to be silent: it was killed, or its
machine was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from timeball.cli.connection import connect
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.output import out, print_json, print_line
from timeball.errors import Unavailable

if TYPE_CHECKING:
    from timeball.pipeline.run.job_status import JobStatus


COMPACT = "compact"  # jobs/compact.py's name, which only Spark's side can import


def status(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="URI", help="The jobs' --checkpoint; by default beside the data."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how the pipeline's jobs are doing: where they stand, how far behind, how fast, what failed.

    Asks the broker, and reads what the jobs leave beside their checkpoints. With --checkpoint it works while the
    broker is away.

    \b
    Examples:
      timeball pipeline status
      timeball pipeline status --json | jq '{job, state, behind_rows}'
      timeball pipeline status --checkpoint s3://bucket/checkpoints --endpoint grpc://broker:7400
    """
    from timeball.clock import SystemClock
    from timeball.pipeline.run.job_status import read_statuses

    broker = _ask(endpoint, needed=checkpoint is None)
    folder = checkpoint or broker["table"]["uri"].rstrip("/").rpartition("/")[0] + "/pipeline"
    now_ms = SystemClock().wall_ms()
    found = [_document(each, broker, now_ms) for each in read_statuses(folder)]
    if as_json:
        for document in found:
            print_json(document)
        return
    if not found:
        print_line(f"no job has run with its checkpoints in {folder}")
        return
    out.print(_table(found))
    for document in found:
        # A line of its own: in a column it would be folded, and nobody could look for it.
        if document["error"]:
            print_line(f"{document['job']}: {document['error']}")
    if broker:
        print_line(f"the log ends at row {broker['log']['durable_seq']:,}; watermark {broker['watermark']:,}")


def _ask(endpoint: str, *, needed: bool) -> dict[str, Any]:
    """The broker's status; empty when it is away and its folder is known."""
    try:
        with connect(endpoint) as ball:
            found: dict[str, Any] = ball.status()
            return found
    except Unavailable:
        if needed:
            raise
        return {}


def _document(job: JobStatus, broker: dict[str, Any], now_ms: int) -> dict[str, Any]:
    last = job.last
    stands = last.position if last is not None and last.unit == "seq" else None
    if job.job == COMPACT and broker:
        # The watermark says how far the tail is moved, and the broker moves it too while the job does not.
        stands = max(stands or 0, broker["watermark"])
    behind = None if stands is None else last.lag if last is not None else None
    if stands is not None and broker:
        behind = max(0, broker["log"]["durable_seq"] - stands)
    position = None if last is None else {last.unit: last.position}
    return {
        "job": job.job,
        "state": job.shown(now_ms),
        "position": position if stands is None else {"seq": stands},
        "behind_rows": behind,
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


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("job", "state"):
        table.add_column(name)
    for name in ("at", "behind", "rows/s", "epoch", "epoch took", "failures"):
        table.add_column(name, justify="right")
    for job in found:
        behind = _number(job["behind_rows"], " rows") or _number(job["behind_ms"], " ms")
        at = next(iter((job["position"] or {}).values()), None)
        numbers = [_number(at), behind, _number(job["rows_per_s"]), _number(job["epoch"])]
        took, failures = _number(job["epoch_ms"], " ms"), str(job["failures"])
        table.add_row(job["job"], job["state"], *numbers, took, failures)
    return table


def _number(value: int | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,}{unit}"
