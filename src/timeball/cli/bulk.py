"""`timeball bulk` schedules the rows of files as one campaign, and `timeball campaign` inspects and changes campaigns.

`bulk`: the broker accepts all rows in one step. Spark reads the files. Options map the columns to the fields of a
message. Rows that cannot be scheduled go to a separate table of rejects. By default, the campaign's id is derived from
the files and the options, so the same command creates the same campaign: run it again after an interruption, or if its
outcome is unknown.

`campaign`: list, count, pause, resume and cancel the scheduled messages of one bulk write. The broker carries out the
changes. This process requests them, and counts without Spark and Java (spark/jobs/campaign.py). Each command may be
interrupted and run again.
"""

from __future__ import annotations

import glob
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from timeball.cli.options import (
    DEFAULT_FLIGHT,
    SPARK_AS_IT_IS,
    FlightEndpointOption,
    JsonOption,
    SparkOptions,
    pair,
    reach,
    show_bytes,
    show_instant,
    show_ms,
    spark_options,
)
from timeball.cli.output import ExitCode, bars, err, print_json, print_line, print_note, progress_bar, show
from timeball.model.errors import NotFound, RequestError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from timeball.spark.jobs.bulk import BulkReport
    from timeball.spark.jobs.campaign import CampaignParts, Progress


# ---- timeball bulk --------------------------------------------------------------------------------------------


PEAKS_SHOWN = 3
LOOK_EVERY_S = 0.2
STEPS = {"survey": "reading the rows", "rejects": "writing rejects", "write": "writing"}


class Format(StrEnum):
    """The formats that `--format` accepts."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    JDBC = "jdbc"


_SUFFIXES = {".parquet": Format.PARQUET, ".csv": Format.CSV, ".json": Format.JSON, ".jsonl": Format.JSON}


def _column_option(option: str, help_text: str) -> Any:
    return typer.Option(option, metavar="COLUMN", help=help_text)


Files = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE]...", help="Files, folders, patterns or URIs.")
]
Topic = Annotated[str | None, typer.Option("--topic", help="The topic of all messages.")]
TopicColumn = Annotated[str | None, _column_option("--topic-column", "Or the column with the topic.")]
DueColumn = Annotated[
    str, _column_option("--due-column", "The column with the due time: timestamp, text or milliseconds.")
]
BodyColumn = Annotated[
    str | None, _column_option("--body-column", "The column with the body; by default 'body'.")
]
BodyJson = Annotated[bool, typer.Option("--body-json", help="Or: all other columns as one JSON object.")]
KeyColumn = Annotated[
    str | None, _column_option("--key-column", "The column with business keys, by which you can cancel.")
]
TagColumn = Annotated[
    str | None, _column_option("--tag-column", "The column with tags, by which consumers can filter.")
]
IdColumn = Annotated[
    str | None, _column_option("--id-column", "The column with message ids; by default they are generated.")
]
Zone = Annotated[
    str | None,
    typer.Option("--zone", help="Time zone of wall-clock times without one, such as Europe/Paris."),
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="By default chosen by the name of the first file.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of Spark's reader; may be repeated."),
]
CampaignOption = Annotated[
    str | None, typer.Option("--campaign", metavar="ID", help="By default derived from files and options.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be scheduled and rejected.")]
Rejects = Annotated[
    str | None,
    typer.Option("--rejects", metavar="URI", help="Delta table for rejects; by default beside the data."),
]
TableUri = Annotated[
    str | None, typer.Option("--table-uri", metavar="URI", help="Where executors reach the pending table.")
]


@spark_options
def bulk(
    files: Files = None,
    topic: Topic = None,
    topic_column: TopicColumn = None,
    due_column: DueColumn = "due",
    body_column: BodyColumn = None,
    body_json: BodyJson = False,
    key_column: KeyColumn = None,
    tag_column: TagColumn = None,
    id_column: IdColumn = None,
    zone: Zone = None,
    format_: FormatOption = None,
    options: Options = None,
    campaign: CampaignOption = None,
    dry_run: DryRun = False,
    rejects: Rejects = None,
    table_uri: TableUri = None,
    spark: SparkOptions = SPARK_AS_IT_IS,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Schedule every row of some files: all valid rows in one step, or none.

    Rows that cannot be scheduled go to the table of rejects, each with its
    reason, and the exit code is then 1. The command prints the campaign's id:
    use it with `timeball campaign` to show, pause, resume and cancel the
    campaign. If the command is killed, run it again to continue. After it has
    finished, running it again changes nothing.

    \b
    Examples:
      timeball bulk reminders.parquet --topic reminders --due-column at --dry-run
      timeball bulk reminders.parquet --topic reminders --due-column at --key-column customer
      timeball bulk 'export/*.csv' --topic-column topic --body-json --due-column when --zone Europe/Paris
      timeball bulk --format jdbc --option url=jdbc:postgresql://db/shop --option dbtable=invoices \\
          --conf spark.jars=/opt/postgresql.jar --topic dunning --body-json --due-column due_date \\
          --zone Europe/Berlin --campaign dunning-2027-01
    """
    if body_json and body_column is not None:
        raise RequestError("--body-column and --body-json: give one of them")
    if (topic is None) == (topic_column is None):
        raise RequestError("give exactly one of --topic and --topic-column")
    columns = {
        "due": due_column,
        "topic": topic_column,
        "topic_name": topic,
        "body": None if body_json else body_column or "body",
        "keys": key_column,
        "tag": tag_column,
        "unique_key": id_column,
        "zone": zone,
    }
    source = build_source(files or [], format_, options or [])
    if source.format is Format.JDBC and campaign is None and not dry_run:
        raise RequestError("--format jdbc: name the campaign with --campaign, since a table's rows change")
    name = campaign or campaign_id(source, columns)
    job_options = {"campaign": name, "dry_run": dry_run, "rejects_uri": rejects, "table_uri": table_uri}
    from timeball.cli.spark import spark_session

    reach(endpoint)
    if not dry_run:
        print_note(f"campaign {name}")
    with spark_session(spark, "timeball-bulk") as session:
        report = _run_job(session, source, endpoint, columns, job_options, quiet=as_json)
    show(document(report), describe_report(report), as_json=as_json)
    if report.rejected:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _run_job(
    spark: SparkSession,
    source: Source,
    endpoint: str,
    columns: dict[str, str | None],
    job_options: dict[str, Any],
    *,
    quiet: bool,
) -> BulkReport:
    """Run the Spark job, and show its steps unless `quiet`. Raises RequestError for input that Spark cannot read."""
    from timeball.spark.jobs import bulk as job
    from timeball.spark.jobs.bulk import Columns

    with _progress(spark, quiet=quiet) as show_step:
        frame = _read_source(spark, source)
        # The ignored type: `columns` could have None for `due`, but the command always sets it.
        return job.run(spark, frame, endpoint, columns=Columns(**columns), tell=show_step, **job_options)  # type: ignore[arg-type]


# ---- the input ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The input of a bulk write: paths or URIs, their format, and the options of Spark's reader."""

    uris: list[str]
    format: Format
    options: dict[str, str]


def build_source(files: Sequence[str], format_: Format | None, options: Sequence[str]) -> Source:
    """Build the source from the command's arguments. Raises RequestError or NotFound, which name the wrong argument."""
    uris = [absolute_uri(file) for file in files]
    source_format = choose_format(uris, format_)
    reader_options = {"header": "true"} if source_format is Format.CSV else {}
    return Source(uris, source_format, reader_options | dict(pair("--option", option) for option in options))


def absolute_uri(text: str) -> str:
    """Convert a file, folder or pattern into an absolute path. A URI stays as it is. NotFound without such a path."""
    if "://" in text:
        return text
    path = Path(text).absolute()
    if not any(sign in text for sign in "*?[{") and not path.exists():
        raise NotFound(f"{text}: no such file or folder")
    return str(path)


def choose_format(uris: Sequence[str], requested: Format | None) -> Format:
    """Choose the format: `requested`, or by the suffix of the first file. For a folder, the suffix of a file in it.

    RequestError when neither decides, and for `jdbc` with files or another format without any.
    """
    if requested is Format.JDBC:
        if uris:
            raise RequestError("--format jdbc: the table is named with --option dbtable=…, not as a file")
        return requested
    if not uris:
        raise RequestError("name a file, or --format jdbc with --option url=… --option dbtable=…")
    source_format = requested or _SUFFIXES.get(Path(uris[0].removesuffix(".gz")).suffix.lower())
    if source_format is None and Path(uris[0]).is_dir():
        source_format = next(
            (_SUFFIXES[suffix] for suffix in _SUFFIXES if any(Path(uris[0]).glob(f"*{suffix}"))), None
        )
    if source_format is None:
        raise RequestError(f"{uris[0]}: the format is not clear from its name; add --format")
    return source_format


def campaign_id(source: Source, columns: Mapping[str, str | None]) -> str:
    """Derive the campaign's id from the files, the reader's options and the mapping of the columns.

    For a local file, name, size and modification time enter the id, so a changed file makes another campaign. For a
    URI, only its text does.
    """
    stamps = []
    for uri in source.uris:
        paths = [Path(name) for name in sorted(glob.glob(uri))]
        paths = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        stamps += [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in paths if file.is_file()
        ]
    identity = [source.uris, source.format, sorted(source.options.items()), sorted(columns.items()), stamps]
    return f"bulk-{hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]}"


def _read_source(spark: SparkSession, source: Source) -> DataFrame:
    """Open the source as a DataFrame. Spark may read files to find their schema.

    Raises RequestError, with the first URI or "jdbc", for a SetupError of Spark, such as a missing path. Raises the
    other errors of `spark_errors` unchanged.
    """
    from timeball.spark.source.spark_api import spark_errors

    reader = spark.read.format(source.format.value).options(**source.options)
    try:
        with spark_errors():
            return reader.load(source.uris) if source.uris else reader.load()
    except SetupError as error:
        raise RequestError(f"{source.uris[0] if source.uris else 'jdbc'}: {error}") from error


@contextmanager
def _progress(spark: SparkSession, *, quiet: bool) -> Iterator[Any]:
    """Show Spark's completed tasks as a progress bar, and yield a function that sets the current step."""
    with progress_bar(quiet=quiet) as bar:
        task = bar.add_task(STEPS["survey"], total=None)
        stopped = threading.Event()
        tracker = spark.sparkContext.statusTracker()

        def show_progress() -> None:
            """Update the bar until the end, from a thread. Spark reports only stages that run."""
            while not stopped.wait(LOOK_EVERY_S):
                stages = [tracker.getStageInfo(stage_id) for stage_id in tracker.getActiveStageIds()]
                totals = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
                if totals:
                    done, total = map(sum, zip(*totals, strict=True))
                    bar.update(task, completed=done, total=total)

        thread = threading.Thread(target=show_progress, name="spark-progress", daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield lambda step: bar.update(task, description=STEPS.get(step, step), completed=0, total=None)
        finally:
            stopped.set()
            if thread.is_alive():
                thread.join()


# ---- the output ---------------------------------------------------------------------------------------------


def document(report: BulkReport) -> dict[str, Any]:
    """Build the JSON document of a report, with the due load as counts per bar."""
    unit, due = curve(report)
    excluded = {"load"} if report.groups else {"load", "groups"}
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name not in excluded}
    return {
        **fields,
        "rows_per_s": report.rows_per_s,
        "amplification": report.amplification,
        "by": unit,
        "due": due,
    }


def curve(report: BulkReport) -> tuple[str, dict[str, int]]:
    """Count the messages by the name of the bar in which they are due. Returns the width of a bar and the counts."""
    from timeball.spark.views.due_histogram import bar_name

    load = report.load.curve()
    starts_ms = (load.start_s * 1_000).tolist()
    return load.unit.value, {
        bar_name(at_ms, load.unit): rows for at_ms, rows in zip(starts_ms, load.rows.tolist(), strict=True)
    }


def describe_report(report: BulkReport) -> Iterator[str]:
    """Yield the report for people, line by line."""
    if report.repeated:
        yield f"campaign {report.campaign} was scheduled before: {report.rows:,} messages; nothing is changed"
        return
    yield from bars(curve(report)[1])
    for peak in report.load.peaks(PEAKS_SHOWN):
        yield f"peak: {peak.minute_rows:,} in the minute of {show_instant(peak.at_ms)}"
    for reason, rows in report.reasons.items():
        yield f"{'would be ' if report.dry_run else ''}rejected: {rows:,}, {reason}"
    if report.dry_run:
        yield f"would schedule {report.rows:,} messages, {show_bytes(report.payload_bytes)} of payload"
        return
    if report.rejects_uri is not None:
        yield f"rejects are in {report.rejects_uri}"
    written = f"{show_bytes(report.written_bytes)} in {report.files:,} files"
    ratio = f", {report.amplification:.2f} bytes a byte of payload" if report.amplification else ""
    yield (
        f"scheduled {report.rows:,} messages in {report.seconds:.1f} s ({report.rows_per_s:,}/s), {written}{ratio}"
    )
    yield f"campaign {report.campaign}"


# ---- timeball campaign ----------------------------------------------------------------------------------------


campaign_app = typer.Typer(help="Inspect, pause, resume and cancel bulk writes.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The campaign's id.")]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--table-uri",
        metavar="URI",
        help="The pending table's URI on this machine, if it differs from the broker's.",
    ),
]


@campaign_app.callback()
def _campaign() -> None:
    pass


@campaign_app.command("list")
def list_(endpoint: FlightEndpointOption = DEFAULT_FLIGHT, as_json: JsonOption = False) -> None:
    """List all campaigns, the newest last.

    \b
    Examples:
      timeball campaign list
      timeball campaign list --json | jq -r 'select(.state == "paused").campaign'
    """
    from timeball.spark.endpoint import Endpoint, read_groups

    reach(endpoint)
    groups, campaigns = read_groups(endpoint), []
    for group in groups:
        with Endpoint(group.endpoint) as broker:
            campaigns += [(group.name, row) for row in broker.campaigns()]
    for group_name, row in campaigns:
        if as_json:
            fields = {name: getattr(row, name) for name in ("campaign", "state", "rows", "planned_ms")}
            print_json({**fields, "group": group_name} if len(groups) > 1 else fields)
        else:
            in_group = f", in group {group_name}" if len(groups) > 1 else ""
            print_line(
                f"{row.campaign}  {row.state}  {row.rows:,} messages, of {show_instant(row.planned_ms)}{in_group}"
            )
    if not campaigns and not as_json:
        print_line("no campaigns yet: create one with timeball bulk")


@campaign_app.command("status")
def status(
    campaign: IdArgument,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a campaign: how many of its rows are released, cancelled, waiting and held.

    The four counts add up to all rows.

    \b
    Examples:
      timeball campaign status spring-2027
      timeball campaign status spring-2027 --json | jq .percent
    """
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("counting", as_json):
        progress = campaign_jobs.progress()
    show(progress, describe_progress(progress), as_json=as_json)


@campaign_app.command("pause")
def pause(
    campaign: IdArgument,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold all pending messages of a campaign: none of them is released until you resume it.

    \b
    Examples:
      timeball campaign pause spring-2027
    """
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("pausing", as_json):
        paused = campaign_jobs.pause()
    outcome = "was already paused" if paused.repeated else "paused"
    show(paused, [f"{campaign}: {outcome}, {paused.held:,} messages are held"], as_json=as_json)


@campaign_app.command("resume")
def resume(
    campaign: IdArgument,
    shift: Annotated[
        bool,
        typer.Option(
            "--shift",
            help="Move all due times by the length of the pause. Else overdue messages go out at once.",
        ),
    ] = False,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Schedule held messages again: at their own due times, or all of them later by the length of the pause.

    \b
    Examples:
      timeball campaign resume spring-2027
      timeball campaign resume spring-2027 --shift
    """
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("scheduling again", as_json):
        resumed = campaign_jobs.resume(shift=shift)
    later = f", each {show_ms(resumed.shift_ms)} later" if resumed.shift_ms else ""
    outcome = "nothing is held" if resumed.repeated else f"{resumed.rows:,} messages wait again{later}"
    show(resumed, [f"{campaign}: {outcome}"], as_json=as_json)


@campaign_app.command("cancel")
def cancel(
    campaign: IdArgument,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel all pending and held messages of a campaign for good, and show an exact count.

    \b
    Examples:
      timeball campaign cancel spring-2027
      timeball campaign cancel spring-2027 --json | jq .cancelled
    """
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("cancelling", as_json):
        report = campaign_jobs.cancel()
    summary = (
        f"{campaign}: {report.cancelled:,} of {report.rows:,} messages are cancelled, {report.newly:,} of them now; "
        f"{report.released:,} were released"
    )
    show(report, [summary], as_json=as_json)


# ---- for people -------------------------------------------------------------------------------------------


def describe_progress(progress: Progress) -> Iterator[str]:
    """Yield the progress of a campaign for people, line by line."""
    yield f"{progress.campaign}: {progress.state}, {progress.percent:g} % of {progress.rows:,} messages"
    yield (
        f"released {progress.released:,} + cancelled {progress.cancelled:,} "
        f"+ waiting {progress.waiting:,} + held {progress.held:,}"
    )
    if progress.next_due_ms is not None and progress.last_due_ms is not None:
        yield f"next at {show_instant(progress.next_due_ms)}, last at {show_instant(progress.last_due_ms)}"
    if not progress.whole:
        yield "retention has deleted a part of the campaign's log: messages without a record count as released"


@contextmanager
def _open_campaign(endpoint: str, campaign: str, table_uri: str | None) -> Iterator[CampaignParts]:
    """Open the campaign in all groups of the cluster. Raises Unavailable when no broker answers."""
    from timeball.spark.jobs.campaign import CampaignParts, open_parts

    reach(endpoint)
    with open_parts(endpoint, campaign, table_uri) as groups:
        yield CampaignParts(groups)


@contextmanager
def _busy(activity: str, as_json: bool) -> Iterator[None]:
    """Show the current activity on stderr, if that is a terminal and the output is not JSON."""
    if as_json or not err().is_terminal:
        yield
        return
    with err().status(activity):
        yield
