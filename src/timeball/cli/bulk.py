"""`timeball bulk`: schedule the rows of files as one campaign, which the broker accepts in one step.

Spark reads the files. Options map the columns to the fields of a message. Rows that cannot be scheduled go to a
separate table of rejects. By default, the campaign's id is derived from the files and the options, so the same command
creates the same campaign: run it again after an interruption, or if its outcome is unknown.
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

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    SPARK_AS_IT_IS,
    EndpointOption,
    JsonOption,
    SparkOptions,
    pair,
    reach,
    spark_options,
)
from timeball.cli.output import bars, print_note, progress_bar, show
from timeball.cli.units import show_bytes, show_instant
from timeball.model.errors import NotFound, RequestError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from timeball.spark.jobs.bulk import BulkReport

PEAKS_SHOWN = 3
LOOK_EVERY_S = 0.2
STEPS = {"survey": "looking at the rows", "rejects": "putting rejects aside", "write": "writing"}


class Format(StrEnum):
    """The formats that `--format` accepts."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    JDBC = "jdbc"


_SUFFIXES = {".parquet": Format.PARQUET, ".csv": Format.CSV, ".json": Format.JSON, ".jsonl": Format.JSON}


def _column(name: str, what: str) -> Any:
    return typer.Option(name, metavar="COLUMN", help=what)


Files = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE]...", help="Files, folders, patterns or URIs.")
]
Topic = Annotated[str | None, typer.Option("--topic", help="One topic for all.")]
TopicColumn = Annotated[str | None, _column("--topic-column", "Or the column that holds it.")]
DueColumn = Annotated[str, _column("--due-column", "When: a timestamp, text, or milliseconds.")]
BodyColumn = Annotated[str | None, _column("--body-column", "The body; by default 'body'.")]
BodyJson = Annotated[bool, typer.Option("--body-json", help="Or: all other columns as one JSON object.")]
KeyColumn = Annotated[str | None, _column("--key-column", "Business keys, to cancel by.")]
TagColumn = Annotated[str | None, _column("--tag-column", "A tag, to filter by.")]
IdColumn = Annotated[str | None, _column("--id-column", "Message ids; by default made up.")]
Zone = Annotated[
    str | None,
    typer.Option("--zone", help="Time zone of wall-clock times without one, such as Europe/Paris."),
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="By default by the name of the first file.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of Spark's reader; may be repeated."),
]
CampaignOption = Annotated[
    str | None, typer.Option("--campaign", metavar="ID", help="By default from files and options.")
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
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
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
        raise RequestError("say where the messages go: exactly one of --topic and --topic-column")
    meaning = {
        "due": due_column,
        "topic": topic_column,
        "topic_name": topic,
        "body": None if body_json else body_column or "body",
        "keys": key_column,
        "tag": tag_column,
        "unique_key": id_column,
        "zone": zone,
    }
    source = source_of(files or [], format_, options or [])
    if source.format is Format.JDBC and campaign is None and not dry_run:
        raise RequestError("--format jdbc: name the campaign with --campaign, since a table's rows change")
    name = campaign or campaign_id(source, meaning)
    where = {"campaign": name, "dry_run": dry_run, "rejects_uri": rejects, "table_uri": table_uri}
    from timeball.cli.spark import spark_session

    reach(endpoint)
    if not dry_run:
        print_note(f"campaign {name}")
    with spark_session(spark, "timeball-bulk") as session:
        report = _run(session, source, endpoint, meaning, where, quiet=as_json)
    show(document(report), describe(report), as_json=as_json)
    if report.rejected:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _run(
    spark: SparkSession,
    source: Source,
    endpoint: str,
    meaning: dict[str, str | None],
    where: dict[str, Any],
    *,
    quiet: bool,
) -> BulkReport:
    from timeball.spark.jobs import bulk as job
    from timeball.spark.jobs.bulk_input import Columns

    with _progress(spark, quiet=quiet) as tell:
        frame = _read(spark, source)
        return job.run(spark, frame, endpoint, columns=Columns(**meaning), tell=tell, **where)  # type: ignore[arg-type]


# ---- what is read -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The input of a bulk write: paths or URIs, their format, and the options of Spark's reader."""

    places: list[str]
    format: Format
    options: dict[str, str]


def source_of(files: Sequence[str], format_: Format | None, options: Sequence[str]) -> Source:
    """Build the source from the command's arguments. RequestError or NotFound names the wrong one."""
    places = [place(each) for each in files]
    chosen = format_of(places, format_)
    read = {"header": "true"} if chosen is Format.CSV else {}
    return Source(places, chosen, read | dict(pair("--option", each) for each in options))


def place(text: str) -> str:
    """Convert a file, folder or pattern into an absolute path, and keep a URI. NotFound if a path does not exist."""
    if "://" in text:
        return text
    path = Path(text).absolute()
    if not any(sign in text for sign in "*?[{") and not path.exists():
        raise NotFound(f"{text}: no such file or folder")
    return str(path)


def format_of(places: Sequence[str], wanted: Format | None) -> Format:
    """Choose the format: the option's, or that of the first file's suffix (of a folder: of a file in it).

    RequestError when neither decides, and for `jdbc` with files or another format without any.
    """
    if wanted is Format.JDBC:
        if places:
            raise RequestError("--format jdbc: the table is named with --option dbtable=…, not as a file")
        return wanted
    if not places:
        raise RequestError("name a file, or --format jdbc with --option url=… --option dbtable=…")
    found = wanted or _SUFFIXES.get(Path(places[0].removesuffix(".gz")).suffix.lower())
    if found is None and Path(places[0]).is_dir():
        found = next(
            (_SUFFIXES[suffix] for suffix in _SUFFIXES if any(Path(places[0]).glob(f"*{suffix}"))), None
        )
    if found is None:
        raise RequestError(f"{places[0]}: its name does not tell the format; add --format")
    return found


def campaign_id(source: Source, meaning: Mapping[str, str | None]) -> str:
    """Derive the campaign's id from the files, the reader's options and the meaning of the columns.

    Local files count with name, size and modification time, so a changed file makes another campaign. A URI counts with
    its text only.
    """
    stamps = []
    for each in source.places:
        found = [Path(name) for name in sorted(glob.glob(each))]
        found = [file for path in found for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        stamps += [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file()]
    said = [source.places, source.format, sorted(source.options.items()), sorted(meaning.items()), stamps]
    return f"bulk-{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]}"


def _read(spark: SparkSession, source: Source) -> DataFrame:
    from timeball.spark.spark_errors import spark_errors

    reader = spark.read.format(source.format.value).options(**source.options)
    try:
        with spark_errors():
            return reader.load(source.places) if source.places else reader.load()
    except SetupError as error:
        raise RequestError(f"{source.places[0] if source.places else 'jdbc'}: {error}") from error


@contextmanager
def _progress(spark: SparkSession, *, quiet: bool) -> Iterator[Any]:
    """Show Spark's completed tasks as a progress bar, and yield a function that sets the current step."""
    with progress_bar(quiet=quiet) as bar:
        task = bar.add_task(STEPS["survey"], total=None)
        over = threading.Event()
        tracker = spark.sparkContext.statusTracker()

        def show_progress() -> None:
            while not over.wait(LOOK_EVERY_S):
                stages = [tracker.getStageInfo(i) for i in tracker.getActiveStageIds()]
                totals = [(s.numCompletedTasks, s.numTasks) for s in stages if s is not None]
                if totals:
                    done, total = map(sum, zip(*totals, strict=True))
                    bar.update(task, completed=done, total=total)

        thread = threading.Thread(target=show_progress, name="spark-progress", daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield lambda step: bar.update(task, description=STEPS.get(step, step), completed=0, total=None)
        finally:
            over.set()
            if thread.is_alive():
                thread.join()


# ---- what is told -----------------------------------------------------------------------------------------


def document(report: BulkReport) -> dict[str, Any]:
    """Build the report as JSON, with the due load in bars of one unit of time."""
    unit, due = curve(report)
    left_out = {"load"} if report.groups else {"load", "groups"}
    found = {name: getattr(report, name) for name in report.__struct_fields__ if name not in left_out}
    return {
        **found,
        "rows_per_s": report.rows_per_s,
        "amplification": report.amplification,
        "by": unit,
        "due": due,
    }


def curve(report: BulkReport) -> tuple[str, dict[str, int]]:
    """Find the unit of time of a bar, and count the messages by the name of the bar in which they are due."""
    from timeball.spark.views.due_histogram import bar_name

    found = report.load.curve()
    starts_ms = (found.start_s * 1_000).tolist()
    return found.unit.value, {
        bar_name(at_ms, found.unit): rows for at_ms, rows in zip(starts_ms, found.rows.tolist(), strict=True)
    }


def describe(report: BulkReport) -> Iterator[str]:
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
