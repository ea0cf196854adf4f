"""Reports about a data folder for `timeball dump`: rows, frames or a summary, as plain dictionaries.

A `Selection` chooses the part of the log. Every frame of a selected segment is read and checked, even if it is not
shown. Bytes that are not a frame (`Torn`, `Damage`) are passed on as they were found.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from timeball.model.message import Kind, without_secrets
from timeball.node.inspect.folder import Damage, FolderDump, Found, FrameFound, SegmentFound, Torn
from timeball.node.inspect.verify import CacheCheck

KIND_NAMES = {int(kind): kind.name for kind in Kind}


@dataclass(frozen=True)
class Selection:
    """The part of the log to report. The defaults select all of it."""

    segments: frozenset[int] = frozenset()  # empty: all
    kinds: frozenset[int] = frozenset()  # empty: all
    from_seq: int = 0
    to_seq: int | None = None

    def has_segment(self, segment: SegmentFound) -> bool:
        """Return whether the segment is selected and may contain a part of the range."""
        if self.segments:
            return segment.ordinal in self.segments
        begins, ends = segment.first_seq, segment.until_seq
        is_before = ends is not None and ends <= self.from_seq
        return not is_before and (self.to_seq is None or begins is None or begins < self.to_seq)

    def has_frame(self, found: FrameFound) -> bool:
        """Return whether the frame contains a number of the range and a row of a selected kind."""
        frame = found.frame
        if frame.next_seq <= self.from_seq or (self.to_seq is not None and frame.first_seq >= self.to_seq):
            return False
        return not self.kinds or not self.kinds.isdisjoint(found.rows.column("kind").to_pylist())


def find_rows(folder: FolderDump, selection: Selection) -> Iterator[Found]:
    """Yield the folder's damage, then the selected frames, and all other bytes found in selected segments."""
    yield from folder.damage
    for segment in filter(selection.has_segment, folder.segments):
        for found in folder.walk(segment):
            if not isinstance(found, FrameFound) or selection.has_frame(found):
                yield found


def describe_frame(found: FrameFound) -> dict[str, Any]:
    """Describe a frame: its header and the number of rows of each kind."""
    return {
        "segment": found.segment.ordinal,
        **msgspec.structs.asdict(found.frame),
        "checksum": "ok",
        "kinds": found.kinds(),
    }


def describe_rows(found: FrameFound, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a frame, without the columns that are null."""
    first_seq = found.frame.first_seq
    begin = max(0, selection.from_seq - first_seq)
    end = found.rows.num_rows if selection.to_seq is None else max(begin, selection.to_seq - first_seq)
    # Users attach dumps to bug reports, so the broker's secrets are removed.
    rows = without_secrets(found.rows.slice(begin, end - begin))
    for seq, row in enumerate(rows.to_pylist(), first_seq + begin):
        kind = row.pop("kind")
        if selection.kinds and kind not in selection.kinds:
            continue
        shown = {name: value for name, value in row.items() if value is not None}
        yield {"seq": seq, "kind": KIND_NAMES.get(kind, str(kind)), **_body(shown.pop("body", None)), **shown}


def _body(body: bytes | None) -> dict[str, str]:
    if body is None:
        return {}
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


@dataclass
class SegmentSummary:
    """One file of the log, with figures of its whole frames."""

    file: str
    size_bytes: int
    state: str  # spare, sealed or active
    first_seq: int | None
    next_seq: int | None
    created_ms: int | None
    last_append_ms: int | None = None
    used_bytes: int = 0
    frames: int = 0
    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, found: FrameFound) -> None:
        """Add one more frame to the figures."""
        self.frames += 1
        self.rows += found.frame.rows
        self.used_bytes = found.frame.end
        self.next_seq, self.last_append_ms = found.frame.next_seq, found.frame.append_ms
        for name, count in found.kinds().items():
            self.kinds[name] = self.kinds.get(name, 0) + count


@dataclass
class Summary:
    """The contents of a folder, and all bytes found that are not a frame, in the order of the log."""

    segments: list[SegmentSummary]
    checkpoint: dict[str, Any] | None
    queues: list[dict[str, Any]]
    flaws: list[Torn | Damage]
    verified: bool

    @property
    def damage(self) -> list[Damage]:
        """The flaws that a start of the broker would not repair by itself."""
        return [flaw for flaw in self.flaws if isinstance(flaw, Damage)]

    def document(self) -> dict[str, Any]:
        """Build the summary as one JSON document."""
        return {
            "segments": [asdict(segment) for segment in self.segments],
            "torn": [asdict(flaw) for flaw in self.flaws if isinstance(flaw, Torn)],
            "checkpoint": self.checkpoint,
            "queues": self.queues,
            "verified": self.verified,
            "damage": [asdict(flaw) for flaw in self.damage],
        }


def summarise(folder: FolderDump, selection: Selection, *, verify: bool = False) -> Summary:
    """Read the selected part of the log once. With `verify`, compare the caches with it at the same time."""
    check = CacheCheck(folder) if verify else None
    segments: list[SegmentSummary] = []
    flaws: list[Torn | Damage] = list(folder.damage)
    for segment in filter(selection.has_segment, folder.segments):
        state = "spare" if segment.is_spare else "active" if segment.is_last else "sealed"
        first_seq = segment.first_seq
        summary = SegmentSummary(
            segment.name, segment.size_bytes, state, first_seq, first_seq, segment.created_ms
        )
        for found in folder.walk(segment):
            if not isinstance(found, FrameFound):
                flaws.append(found)
                continue
            if check is not None:
                check.add(found)
            if selection.has_frame(found):
                summary.add(found)
        if check is not None:
            flaws += check.finish(segment)
        segments.append(summary)
    return Summary(segments, _checkpoint(folder), _queues(folder), flaws, verify)


def _checkpoint(folder: FolderDump) -> dict[str, Any] | None:
    if folder.checkpoint is None:
        return None
    # `asdict` first, because encoding the struct leaves out fields with their default value.
    facts = msgspec.structs.asdict(folder.checkpoint.facts)
    del facts["queues"]  # shown with the queues
    # as counts, because there are thousands of names, and values that may be secret
    for name in ("files", "meta"):
        facts[name] = len(facts[name] or ())
    shown: dict[str, Any] = msgspec.to_builtins(facts)
    return {**shown, "settled_rows": len(folder.checkpoint.settled_seq)}


def _queues(folder: FolderDump) -> list[dict[str, Any]]:
    known = folder.checkpoint.facts.queues if folder.checkpoint is not None else {}
    return [
        {"topic": topic, "queue_id": queue_id, "min_offset": low, "max_offset": high}
        for topic, queues in known.items()
        for queue_id, (low, high) in queues.items()
    ]
