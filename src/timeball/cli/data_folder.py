"""Commands on a data folder: `timeball dump`, `timeball backup` and `timeball restore`.

    dump             show the contents without a broker, and without changing a byte. Use it when a broker does not
                     start, or to look at your data. Exit code 5: a part of the folder is damaged
    backup, restore  make a consistent copy of a folder, even of one in use, and restore it

`timeball.node.inspect_folder` reads a folder, and `timeball.node.backup` copies one. This module prints the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.options import JsonOption, show_bytes, show_instant
from timeball.cli.output import ExitCode, print_json, print_line, progress_bar, show
from timeball.model.errors import RequestError, SetupError

if TYPE_CHECKING:
    from timeball.node.backup import Manifest
    from timeball.node.inspect_folder import Damage, FolderDump, SegmentSummary, Selection, Summary, Torn


DataOption = Annotated[
    Path, typer.Option("--data", envvar="TIMEBALL_DATA", metavar="DIR", help="The data folder.")
]
DATA = Path("timeball-data")


# ---- timeball dump --------------------------------------------------------------------------------------------

BODY_SHOWN = 60  # characters of a body in the output for people (--json prints the whole body)


def dump(
    data: DataOption = DATA,
    frames: Annotated[bool, typer.Option("--frames", help="Show each frame of the log.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Show each row of the log.")] = False,
    segment: Annotated[
        list[int] | None, typer.Option("--segment", metavar="N", help="Only log/…N.log; may be repeated.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Only rows of this kind, e.g. scheduled; may be repeated."
        ),
    ] = None,
    from_seq: Annotated[int, typer.Option("--from-seq", help="Only from this sequence number on.")] = 0,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="Only below this sequence number.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also compare the caches with the log, and check all data files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a data folder: segments, torn tail, damage, checkpoint, queues.

    The command needs no broker and changes nothing, and it may run beside a
    broker. It compares every frame that it reads with its checksum, and the
    sizes of the pending table's data files with the log.

    Exit code 5: a part of the folder is damaged.

    \b
    Examples:
      timeball dump
      timeball dump --data /var/lib/timeball --verify
      timeball dump --frames --segment 3
      timeball dump --rows --kind scheduled --kind cancel --from-seq 1000 --to-seq 2000 --json | jq .due_ms
    """
    if frames and rows:
        raise RequestError("--frames or --rows, not both")
    if verify and (frames or rows or segment or kind or from_seq or to_seq is not None):
        raise RequestError("--verify reads the whole folder: omit the other options")
    from timeball.node.inspect_folder import Selection

    selection = Selection(frozenset(segment or ()), _parse_kinds(kind), from_seq, to_seq)
    folder = _open_folder(data, selection)
    if frames or rows:
        is_damaged = _print_log(folder, selection, rows=rows, as_json=as_json)
    else:
        is_damaged = _print_summary(data, folder, selection, verify=verify, as_json=as_json)
    if is_damaged:
        raise typer.Exit(ExitCode.STORAGE)


def _parse_kinds(names: list[str] | None) -> frozenset[int]:
    """Convert the names of --kind into values of Kind. Raises RequestError for an unknown name."""
    from timeball.model.message import Kind

    for name in names or ():
        if name.upper() not in Kind.__members__:
            raise RequestError(
                f"--kind {name}: no such kind; write one of {', '.join(Kind.__members__).lower()}"
            )
    return frozenset(int(Kind[name.upper()]) for name in names or ())


def _open_folder(data: Path, selection: Selection) -> FolderDump:
    """Open a data folder to read it, with its damage.

    Raises SetupError for a folder without data of this version of Timeball, and RequestError for a --segment that does
    not exist.
    """
    from timeball.io.files import RealFiles
    from timeball.node.data_folder import FORMAT_NAME, check_folder
    from timeball.node.inspect_folder import FolderDump

    files = RealFiles(data)
    check_folder(files)
    if not files.exists(FORMAT_NAME):
        raise SetupError(f"--data {files.root} holds no Timeball data; name the folder of a broker")
    folder = FolderDump(files)
    missing = selection.segments - {segment.ordinal for segment in folder.segments}
    if missing:
        raise RequestError(f"--segment {min(missing)}: there is no such file in {files.root / 'log'}")
    return folder


# ---- frames and rows -------------------------------------------------------------------------------------


def _print_log(folder: FolderDump, selection: Selection, *, rows: bool, as_json: bool) -> bool:
    """Print the selected frames, or with `rows` their rows, while reading. True if a part of the folder is damaged."""
    from timeball.node.inspect_folder import Damage, InspectedFrame, describe_frame, describe_rows, find_rows

    is_damaged = False
    for entry in find_rows(folder, selection):
        if isinstance(entry, InspectedFrame):
            for line in describe_rows(entry, selection) if rows else [describe_frame(entry)]:
                if as_json:
                    print_json(line)
                else:
                    print_line(_row_text(line) if rows else _frame_text(line))
            continue
        is_damaged |= isinstance(entry, Damage)
        if as_json:
            print_json({"damage" if isinstance(entry, Damage) else "torn": asdict(entry)})
        else:
            print_line(_problem_text(entry))
    return is_damaged


def _frame_text(frame: dict[str, Any]) -> str:
    """Format a frame as a line: segment and position, first row, time of the append, length, and rows by kind.

    Reserved numbers are sequence numbers of the frame without a row.
    """
    reserved = frame["span"] - frame["rows"]
    kinds = _counts_text(frame["kinds"]) + (f", {reserved:,} reserved numbers" if reserved else "")
    at = f"{frame['segment']:>4} @{frame['position']:<10}"
    return f"{at} seq {frame['first_seq']:<10} {show_instant(frame['append_ms'])}  {frame['length']:>9,} B  {kinds}"


def _row_text(row: dict[str, Any]) -> str:
    """Format a row as a line: sequence number, kind, and the fields that it has. The queue stands after the topic."""
    fields = [f"{name} {row[name]}" for name in ("topic", "unique_key", "keys", "source_seq") if name in row]
    if row.get("queue_offset") is not None:
        fields.insert(1, f"queue {row['queue_id']}@{row['queue_offset']}")
    if "due_ms" in row:
        fields.append(f"due {show_instant(row['due_ms'])}")
    body = repr(row.get("body", row.get("body_base64", "")))
    fields.append(body if len(body) <= BODY_SHOWN else f"{body[:BODY_SHOWN]}…")
    return f"{row['seq']:>10} {row['kind']:<8} {'  '.join(fields)}"


def _problem_text(problem: Torn | Damage) -> str:
    """Format damage or a torn tail as a line for people."""
    from timeball.node.inspect_folder import Torn

    position = "" if problem.position is None else f", byte {problem.position}"
    if isinstance(problem, Torn):
        lost = f"{problem.size_bytes:,} bytes of a commit that was never acknowledged"
        return f"torn tail: {problem.file}{position}: {lost}, which a start cuts off ({problem.text})"
    return f"DAMAGE: {problem.file}{position}: {problem.text}"


# ---- the summary -----------------------------------------------------------------------------------------


def _print_summary(
    data: Path, folder: FolderDump, selection: Selection, *, verify: bool, as_json: bool
) -> bool:
    """Print the summary. True if a part of the folder is damaged."""
    from timeball.node.inspect_folder import summarise

    summary = summarise(folder, selection, verify=verify)
    if as_json:
        print_json({"data": str(data.absolute()), **summary.document()})
    else:
        for line in _summary_lines(data, summary):
            print_line(line)
    return bool(summary.damage)


def _summary_lines(data: Path, summary: Summary) -> Iterator[str]:
    """Yield the lines of `timeball dump` for people: segments, checkpoint, topics, problems and the conclusion."""
    yield f"data folder {data.absolute()}"
    for segment in summary.segments:
        yield _segment_text(segment)
    if not summary.segments:
        yield "no log yet"
    yield _checkpoint_text(summary.checkpoint)
    entries, queues = Counter[str](), Counter[str]()
    for queue in summary.queues:
        entries[queue["topic"]] += queue["max_offset"] - queue["min_offset"]
        queues[queue["topic"]] += 1
    for topic, count in queues.items():
        yield f"topic {topic}: {entries[topic]:,} in {count} queue{'s' if count > 1 else ''}, as of the checkpoint"
    yield from map(_problem_text, summary.flaws)
    if damaged := len(summary.damage):
        yield f"{damaged:,} damaged place{'s' if damaged > 1 else ''}"
    else:
        yield "no damage, and the caches agree with the log" if summary.verified else "no damage"


def _segment_text(segment: SegmentSummary) -> str:
    """Format a segment as a line: name, state, size, and the selected rows by kind. A spare segment has no rows."""
    file_text = f"{segment.file}  {segment.state:<6} {show_bytes(segment.size_bytes)}"
    if not segment.frames or segment.next_seq is None or segment.last_append_ms is None:
        return file_text if segment.state == "spare" else f"{file_text}, no frame selected"
    rows_text = f"seq {segment.first_seq} to {segment.next_seq - 1}, {segment.frames:,} frames"
    return f"{file_text}, {rows_text}, until {show_instant(segment.last_append_ms)}: {_counts_text(segment.kinds)}"


def _counts_text(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.lower()}" for name, count in kinds.items())


def _checkpoint_text(checkpoint: dict[str, Any] | None) -> str:
    """Format the checkpoint as a line. `checkpoint` is None if there is none, or if it cannot be read."""
    if checkpoint is None:
        return "no readable checkpoint"
    settled = f"{checkpoint['settled_rows']:,} settled before their due time"
    return f"checkpoint at seq {checkpoint['seq']}, watermark {checkpoint['watermark']}, {settled}"


# ---- timeball backup, timeball restore ------------------------------------------------------------------------


def backup(
    target: Annotated[Path, typer.Argument(metavar="TO", help="An empty or new folder.")],
    data: DataOption = DATA,
    as_json: JsonOption = False,
) -> None:
    """Copy a data folder, even one in use by a broker, consistent up to one row of the log.

    The backup contains every message that was acknowledged before the command
    began. If the command is interrupted, run it again to continue. The backup
    contains all data of the log, including the secrets of receipts.

    \b
    Examples:
      timeball backup /backups/monday
      timeball backup /backups/monday --data /var/lib/timeball --json | jq .row
    """
    from timeball.io.clock import SystemClock
    from timeball.io.files import RealFiles
    from timeball.node import backup

    if not data.is_dir():
        raise SetupError(f"--data {data}: there is no such folder")
    if target.resolve().is_relative_to(data.resolve()):
        raise SetupError(f"{target} lies in the data folder: name a folder elsewhere")
    with _progress("copying", as_json) as report_progress:
        manifest = backup.backup(RealFiles(data), RealFiles(target), SystemClock(), report_progress)
    _print_manifest(manifest, f"backup of {data} in {target}", as_json=as_json)


def restore(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="The folder of a backup.")],
    data: DataOption = DATA,
    as_json: JsonOption = False,
) -> None:
    """Copy a backup into an empty data folder, and check every byte of it.

    If the command is interrupted, run it again to continue. No broker starts on
    the folder until the restore is finished.

    \b
    Examples:
      timeball restore /backups/monday
      timeball restore /backups/monday --data /var/lib/timeball-2 --json
    """
    from timeball.io.files import RealFiles
    from timeball.node import backup

    if not source.is_dir():
        raise SetupError(f"{source}: there is no such folder")
    with _progress("restoring", as_json) as report_progress:
        manifest = backup.restore(RealFiles(source), RealFiles(data), report_progress)
    _print_manifest(manifest, f"{source} restored into {data}", as_json=as_json)


@contextmanager
def _progress(activity: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, and yield a function that sets the completed bytes and the total."""
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task(activity, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)


def _print_manifest(manifest: Manifest, subject: str, *, as_json: bool) -> None:
    """Print which rows and files a backup contains. `subject` begins the line for people."""
    size_bytes, count = manifest.used_bytes, len(manifest.files)
    document = {
        "row": manifest.row, "first_row": manifest.first_row, "made_ms": manifest.made_ms,
        "files": count, "bytes": size_bytes,
    }  # fmt: skip
    line = (
        f"{subject}: rows {manifest.first_row:,} to {manifest.row - 1:,} as of {show_instant(manifest.made_ms)}, "
        f"{count:,} files, {show_bytes(size_bytes)}"
    )
    show(document, [line], as_json=as_json)
