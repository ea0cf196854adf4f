"""`timeball dump`: what stands in a data folder, without a broker and without changing a byte.

For the day on which a broker does not start, and for people who want to see what is on their disk. It reads
only, takes no lock and needs none, so it also works beside a running broker. What is damaged is named and stepped
over, and the exit code is 5 when there was any.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.messages import show_instant
from timeball.cli.options import JsonOption
from timeball.cli.output import print_json, print_line
from timeball.cli.quantities import show_bytes
from timeball.errors import RequestError, SetupError

if TYPE_CHECKING:
    from timeball.log.dump import Damage, FolderDump, Found, FrameFound, SegmentFound, Torn

BODY_SHOWN = 60  # characters of a body, for people; --json has all of it


@dataclass(frozen=True)
class Wanted:
    """What of the log is to be shown."""

    segments: frozenset[int]  # empty: all
    kinds: frozenset[int]  # empty: all
    from_seq: int
    to_seq: int | None

    def wants(self, segment: SegmentFound) -> bool:
        """Whether it is named, and may hold some of the range."""
        if self.segments:
            return segment.ordinal in self.segments
        begins, ends = segment.first_seq, segment.until_seq
        is_before = ends is not None and ends <= self.from_seq
        return not is_before and (self.to_seq is None or begins is None or begins < self.to_seq)

    def overlaps(self, found: FrameFound) -> bool:
        """Whether the frame holds a number of the range and a row of a kind that is wanted."""
        frame = found.frame
        if frame.next_seq <= self.from_seq or (self.to_seq is not None and frame.first_seq >= self.to_seq):
            return False
        return not self.kinds or not self.kinds.isdisjoint(found.rows.column("kind").to_pylist())


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
        typer.Option("--kind", metavar="KIND", help="Only rows of this kind, e.g. promise; may be repeated."),
    ] = None,
    from_seq: Annotated[int, typer.Option("--from-seq", help="Only from this sequence number on.")] = 0,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="Only below this one.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the caches beside the log with it, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what stands in a data folder: segments, torn tail, damage, checkpoint, queues.

    Needs no broker and changes nothing; it may run beside one. Every frame it reads is checked against its
    checksum. Exit code 5 says that something is damaged.

    \b
    Examples:
      timeball dump
      timeball dump --data /var/lib/timeball --verify
      timeball dump --frames --segment 3
      timeball dump --rows --kind promise --kind cancel --from-seq 1000 --to-seq 2000 --json | jq .due_ms
    """
    if frames and rows:
        raise RequestError("--frames or --rows, not both")
    if verify and (frames or rows or segment or kind or from_seq or to_seq is not None):
        raise RequestError("--verify looks at everything: leave the other choices out")
    wanted = Wanted(frozenset(segment or ()), _kinds(kind), from_seq, to_seq)
    folder = _open(data, wanted)
    if frames or rows:
        damaged = _list(folder, wanted, rows=rows, as_json=as_json)
    else:
        damaged = _summarise(data, folder, wanted, verify=verify, as_json=as_json)
    if damaged:
        raise typer.Exit(ExitCode.STORAGE)


def _kinds(names: list[str] | None) -> frozenset[int]:
    from timeball.message import Kind

    for name in names or ():
        if name.upper() not in Kind.__members__:
            raise RequestError(f"--kind {name}: one of {', '.join(Kind.__members__).lower()}")
    return frozenset(int(Kind[name.upper()]) for name in names or ())


def _open(data: Path, wanted: Wanted) -> FolderDump:
    from timeball.files import RealFiles
    from timeball.log.dump import FolderDump
    from timeball.node import FORMAT_NAME, check_folder

    files = RealFiles(data)
    check_folder(files)
    if not files.exists(FORMAT_NAME):
        raise SetupError(f"--data {files.root} holds no Timeball data; name the folder of a broker")
    folder = FolderDump(files)
    missing = wanted.segments - {segment.ordinal for segment in folder.segments}
    if missing:
        raise RequestError(f"--segment {min(missing)}: there is no such file in {files.root / 'log'}")
    return folder


# ---- frames and rows -------------------------------------------------------------------------------------


def _list(folder: FolderDump, wanted: Wanted, *, rows: bool, as_json: bool) -> bool:
    """Print what is wanted as it is found; True when something is damaged."""
    from timeball.log.dump import Damage, FrameFound

    damaged = bool(folder.damage)
    for found in _found(folder, wanted):
        if not isinstance(found, FrameFound):
            damaged |= isinstance(found, Damage)
            _print_flaw(found, as_json)
        elif wanted.overlaps(found):
            for line in _rows(found, wanted) if rows else [_frame(found)]:
                if as_json:
                    print_json(line)
                else:
                    print_line(_row_text(line) if rows else _frame_text(line))
    return damaged


def _found(folder: FolderDump, wanted: Wanted) -> Iterator[Found]:
    yield from folder.damage
    for segment in folder.segments:
        if wanted.wants(segment):
            yield from folder.walk(segment)


def _frame(found: FrameFound) -> dict[str, Any]:
    frame = found.frame
    return {
        "segment": found.segment.ordinal,
        **asdict(frame),
        "checksum": "ok",
        "kinds": found.kinds(),
    }


def _frame_text(frame: dict[str, Any]) -> str:
    aside = frame["span"] - frame["rows"]
    kinds = _counts_text(frame["kinds"]) + (f", {aside:,} numbers set aside" if aside else "")
    where = f"{frame['segment']:>4} @{frame['position']:<10}"
    return f"{where} seq {frame['first_seq']:<10} {show_instant(frame['append_ms'])}  {frame['length']:>9,} B  {kinds}"


def _rows(found: FrameFound, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Rows of the range and kinds wanted, as dictionaries without the columns that are null."""
    from timeball.message import Kind

    first_seq = found.frame.first_seq
    begin = max(0, wanted.from_seq - first_seq)
    end = found.rows.num_rows if wanted.to_seq is None else max(begin, wanted.to_seq - first_seq)
    names = {int(kind): kind.name for kind in Kind}
    for seq, row in enumerate(found.rows.slice(begin, end - begin).to_pylist(), first_seq + begin):
        kind = row.pop("kind")
        if wanted.kinds and kind not in wanted.kinds:
            continue
        shown = {name: value for name, value in row.items() if value is not None}
        yield {"seq": seq, "kind": names.get(kind, str(kind)), **_body(shown.pop("body", None)), **shown}


def _body(body: bytes | None) -> dict[str, str]:
    if body is None:
        return {}
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _row_text(row: dict[str, Any]) -> str:
    rest = [f"{name} {row[name]}" for name in ("topic", "unique_key", "keys", "source_seq") if name in row]
    if row.get("queue_offset") is not None:
        rest.insert(1, f"queue {row['queue_id']}@{row['queue_offset']}")
    if "due_ms" in row:
        rest.append(f"due {show_instant(row['due_ms'])}")
    body = repr(row.get("body", row.get("body_base64", "")))
    rest.append(body if len(body) <= BODY_SHOWN else f"{body[:BODY_SHOWN]}…")
    return f"{row['seq']:>10} {row['kind']:<8} {'  '.join(rest)}"


def _print_flaw(found: Torn | Damage, as_json: bool) -> None:
    from timeball.log.dump import Torn

    if as_json:
        print_json({"torn" if isinstance(found, Torn) else "damage": asdict(found)})
    else:
        print_line(_flaw_text(found))


def _flaw_text(found: Torn | Damage) -> str:
    from timeball.log.dump import Torn

    at = "" if found.position is None else f", byte {found.position}"
    if isinstance(found, Torn):
        size = f"{found.size_bytes:,} bytes of a commit that nobody was told of"
        return f"torn tail: {found.file}{at}: {size}, which a start cuts off ({found.text})"
    return f"DAMAGE: {found.file}{at}: {found.text}"


# ---- the summary -----------------------------------------------------------------------------------------


@dataclass
class SegmentSummary:
    """One file of the log; figures of the frames that are whole."""

    file: str
    size_bytes: int
    state: str  # spare, sealed or active
    first_seq: int | None
    next_seq: int | None = None
    created_ms: int | None = None
    last_append_ms: int | None = None
    used_bytes: int = 0
    frames: int = 0
    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, found: FrameFound) -> None:
        """One frame more."""
        self.frames += 1
        self.rows += found.frame.rows
        self.used_bytes = found.frame.end
        self.next_seq, self.last_append_ms = found.frame.next_seq, found.frame.append_ms
        for name, count in found.kinds().items():
            self.kinds[name] = self.kinds.get(name, 0) + count


def _summarise(data: Path, folder: FolderDump, wanted: Wanted, *, verify: bool, as_json: bool) -> bool:
    """Print the summary; True when something is damaged."""
    from timeball.log.cache_check import CacheCheck
    from timeball.log.dump import Damage, FrameFound

    check = CacheCheck(folder) if verify else None
    segments, flaws = [], list[Any](folder.damage)
    for segment in filter(wanted.wants, folder.segments):
        state = "spare" if segment.is_spare else "active" if segment.is_last else "sealed"
        summary = SegmentSummary(
            segment.name, segment.size_bytes, state, segment.first_seq, segment.first_seq, segment.created_ms
        )
        for found in folder.walk(segment):
            if not isinstance(found, FrameFound):
                flaws.append(found)
                continue
            if check is not None:
                check.take(found)
            if wanted.overlaps(found):
                summary.add(found)
        if check is not None:
            flaws += check.end_of(segment)
        segments.append(summary)
    damage = [flaw for flaw in flaws if isinstance(flaw, Damage)]
    torn = [flaw for flaw in flaws if not isinstance(flaw, Damage)]
    report = {
        "data": str(data.absolute()),
        "segments": [asdict(segment) for segment in segments],
        "torn": [asdict(flaw) for flaw in torn],
        "checkpoint": _checkpoint(folder),
        "queues": _queues(folder),
        "verified": verify,
        "damage": [asdict(flaw) for flaw in damage],
    }
    if as_json:
        print_json(report)
    else:
        for line in (*_describe(report), *map(_flaw_text, flaws), _verdict(len(damage), verify)):
            print_line(line)
    return bool(damage)


def _verdict(count: int, verify: bool) -> str:
    if count:
        return f"{count:,} damaged place{'s' if count > 1 else ''}"
    return "no damage, and the caches agree with the log" if verify else "no damage"


def _checkpoint(folder: FolderDump) -> dict[str, Any] | None:
    import msgspec

    if folder.checkpoint is None:
        return None
    # All of them: on disk what says nothing is left out.
    facts: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(folder.checkpoint.facts))
    del facts["queues"]  # shown with the queues
    facts["files"] = len(facts["files"] or [])
    return {**facts, "settled_rows": len(folder.checkpoint.settled_seq)}


def _queues(folder: FolderDump) -> list[dict[str, Any]]:
    known = folder.checkpoint.facts.queues if folder.checkpoint is not None else {}
    return [
        {"topic": topic, "queue_id": queue_id, "min_offset": low, "max_offset": high}
        for topic, queues in known.items()
        for queue_id, (low, high) in queues.items()
    ]


def _describe(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield f"data folder {report['data']}"
    for segment in report["segments"]:
        yield _segment_text(segment)
    if not report["segments"]:
        yield "no log yet"
    yield _checkpoint_text(report["checkpoint"])
    for topic, entries, queues in _topics(report["queues"]):
        yield f"topic {topic}: {entries:,} in {queues} queue{'s' if queues > 1 else ''}, as of the checkpoint"


def _segment_text(segment: dict[str, Any]) -> str:
    head = f"{segment['file']}  {segment['state']:<6} {show_bytes(segment['size_bytes'])}"
    if not segment["frames"]:
        return f"{head}, nothing of it" if segment["state"] != "spare" else head
    rows = f"seq {segment['first_seq']} to {segment['next_seq'] - 1}, {segment['frames']:,} frames"
    return (
        f"{head}, {rows}, until {show_instant(segment['last_append_ms'])}: {_counts_text(segment['kinds'])}"
    )


def _counts_text(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.lower()}" for name, count in kinds.items())


def _checkpoint_text(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "no checkpoint that can be read"
    settled = f"{facts['settled_rows']:,} settled before their instant"
    return f"checkpoint at seq {facts['seq']}, watermark {facts['watermark']}, {settled}"


def _topics(queues: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """(topic, entries, queues) for people, who have many queues."""
    topics: dict[str, list[int]] = {}
    for queue in queues:
        topics.setdefault(queue["topic"], []).append(queue["max_offset"] - queue["min_offset"])
    for name, lengths in topics.items():
        yield name, sum(lengths), len(lengths)
