"""`timeball dump`: show the contents of a data folder, without a broker and without changing a byte.

Use it when a broker does not start, or to look at your data. `timeball.node.inspect` reads the folder, and this module
prints the result. Exit code 5: a part of the folder is damaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import JsonOption
from timeball.cli.output import print_json, print_line
from timeball.cli.units import show_bytes, show_instant
from timeball.model.errors import RequestError, SetupError

if TYPE_CHECKING:
    from timeball.node.inspect.folder import Damage, FolderDump, Torn
    from timeball.node.inspect.report import SegmentSummary, Selection, Summary

BODY_SHOWN = 60  # characters of a body in the output for people (--json prints the whole body)


def dump(
    data: Annotated[
        Path, typer.Option("--data", envvar="TIMEBALL_DATA", metavar="DIR", help="The data folder.")
    ] = Path("timeball-data"),
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
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="Only below this one.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the caches beside the log with it, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a data folder: segments, torn tail, damage, checkpoint, queues.

    The command needs no broker and changes nothing, and it may run beside a
    broker. It compares every frame that it reads with its checksum.

    Exit code 5: a part of the folder is damaged.

    \b
    Examples:
      timeball dump
      timeball dump --data /var/lib/timeball --verify
      timeball dump --frames --segment 3
      timeball dump --rows --kind scheduled message --kind cancel --from-seq 1000 --to-seq 2000 --json | jq .due_ms
    """
    if frames and rows:
        raise RequestError("--frames or --rows, not both")
    if verify and (frames or rows or segment or kind or from_seq or to_seq is not None):
        raise RequestError("--verify looks at everything: leave the other choices out")
    from timeball.node.inspect.report import Selection

    selection = Selection(frozenset(segment or ()), _kinds(kind), from_seq, to_seq)
    folder = _open(data, selection)
    if frames or rows:
        is_damaged = _list(folder, selection, rows=rows, as_json=as_json)
    else:
        is_damaged = _summarise(data, folder, selection, verify=verify, as_json=as_json)
    if is_damaged:
        raise typer.Exit(ExitCode.STORAGE)


def _kinds(names: list[str] | None) -> frozenset[int]:
    from timeball.model.message import Kind

    for name in names or ():
        if name.upper() not in Kind.__members__:
            raise RequestError(f"--kind {name}: one of {', '.join(Kind.__members__).lower()}")
    return frozenset(int(Kind[name.upper()]) for name in names or ())


def _open(data: Path, selection: Selection) -> FolderDump:
    from timeball.io.files import RealFiles
    from timeball.node.data_folder import FORMAT_NAME, check_folder
    from timeball.node.inspect.folder import FolderDump

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


def _list(folder: FolderDump, selection: Selection, *, rows: bool, as_json: bool) -> bool:
    """Print the selected rows or frames while reading, and return whether there is damage."""
    from timeball.node.inspect.folder import Damage, FrameFound
    from timeball.node.inspect.report import describe_frame, describe_rows, find_rows

    is_damaged = False
    for found in find_rows(folder, selection):
        if isinstance(found, FrameFound):
            for line in describe_rows(found, selection) if rows else [describe_frame(found)]:
                if as_json:
                    print_json(line)
                else:
                    print_line(_row_text(line) if rows else _frame_text(line))
            continue
        is_damaged |= isinstance(found, Damage)
        if as_json:
            print_json({"damage" if isinstance(found, Damage) else "torn": asdict(found)})
        else:
            print_line(_flaw_text(found))
    return is_damaged


def _frame_text(frame: dict[str, Any]) -> str:
    aside = frame["span"] - frame["rows"]
    kinds = _counts_text(frame["kinds"]) + (f", {aside:,} numbers set aside" if aside else "")
    where = f"{frame['segment']:>4} @{frame['position']:<10}"
    return f"{where} seq {frame['first_seq']:<10} {show_instant(frame['append_ms'])}  {frame['length']:>9,} B  {kinds}"


def _row_text(row: dict[str, Any]) -> str:
    rest = [f"{name} {row[name]}" for name in ("topic", "unique_key", "keys", "source_seq") if name in row]
    if row.get("queue_offset") is not None:
        rest.insert(1, f"queue {row['queue_id']}@{row['queue_offset']}")
    if "due_ms" in row:
        rest.append(f"due {show_instant(row['due_ms'])}")
    body = repr(row.get("body", row.get("body_base64", "")))
    rest.append(body if len(body) <= BODY_SHOWN else f"{body[:BODY_SHOWN]}…")
    return f"{row['seq']:>10} {row['kind']:<8} {'  '.join(rest)}"


def _flaw_text(found: Torn | Damage) -> str:
    from timeball.node.inspect.folder import Torn

    at = "" if found.position is None else f", byte {found.position}"
    if isinstance(found, Torn):
        size = f"{found.size_bytes:,} bytes of a commit that was never acknowledged"
        return f"torn tail: {found.file}{at}: {size}, which a start cuts off ({found.text})"
    return f"DAMAGE: {found.file}{at}: {found.text}"


# ---- the summary -----------------------------------------------------------------------------------------


def _summarise(data: Path, folder: FolderDump, selection: Selection, *, verify: bool, as_json: bool) -> bool:
    """Print the summary, and return whether there is damage."""
    from timeball.node.inspect.report import summarise

    summary = summarise(folder, selection, verify=verify)
    if as_json:
        print_json({"data": str(data.absolute()), **summary.document()})
    else:
        for line in _summary_lines(data, summary):
            print_line(line)
    return bool(summary.damage)


def _summary_lines(data: Path, summary: Summary) -> Iterator[str]:
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
    yield from map(_flaw_text, summary.flaws)
    if damaged := len(summary.damage):
        yield f"{damaged:,} damaged place{'s' if damaged > 1 else ''}"
    else:
        yield "no damage, and the caches agree with the log" if summary.verified else "no damage"


def _segment_text(segment: SegmentSummary) -> str:
    head = f"{segment.file}  {segment.state:<6} {show_bytes(segment.size_bytes)}"
    if not segment.frames or segment.next_seq is None or segment.last_append_ms is None:
        return head if segment.state == "spare" else f"{head}, nothing of it"
    rows = f"seq {segment.first_seq} to {segment.next_seq - 1}, {segment.frames:,} frames"
    return f"{head}, {rows}, until {show_instant(segment.last_append_ms)}: {_counts_text(segment.kinds)}"


def _counts_text(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.lower()}" for name, count in kinds.items())


def _checkpoint_text(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "no checkpoint that can be read"
    settled = f"{facts['settled_rows']:,} settled before their instant"
    return f"checkpoint at seq {facts['seq']}, watermark {facts['watermark']}, {settled}"
