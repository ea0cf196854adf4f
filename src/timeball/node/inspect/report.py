"""Reports about a data folder for `timeball dump`: rows, frames or a summary, as plain dictionaries.

A `Selection` chooses the part of the log. Every frame of a selected segment is read and checked, even if it is not
shown. Torn tails and damage (`Torn`, `Damage`) are always reported.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from timeball.model.message import Kind, without_secrets
from timeball.node.inspect.folder import (
    Damage,
    FolderDump,
    InspectedFrame,
    InspectedSegment,
    Torn,
    WalkResult,
)
from timeball.node.inspect.verify import CacheCheck

KIND_NAMES = {int(kind): kind.name for kind in Kind}


@dataclass(frozen=True)
class Selection:
    """The part of the log to report. The defaults select all of it."""

    segments: frozenset[int] = frozenset()  # empty: all
    kinds: frozenset[int] = frozenset()  # empty: all
    from_seq: int = 0
    to_seq: int | None = None

    def has_segment(self, segment: InspectedSegment) -> bool:
        """Check whether the segment is selected and may have rows in the range."""
        if self.segments:
            return segment.ordinal in self.segments
        first_seq, until_seq = segment.first_seq, segment.until_seq
        is_before_range = until_seq is not None and until_seq <= self.from_seq
        return not is_before_range and (self.to_seq is None or first_seq is None or first_seq < self.to_seq)

    def has_frame(self, inspected: InspectedFrame) -> bool:
        """Check whether the frame has rows in the range, and a row of a selected kind."""
        frame = inspected.frame
        if frame.next_seq <= self.from_seq or (self.to_seq is not None and frame.first_seq >= self.to_seq):
            return False
        return not self.kinds or not self.kinds.isdisjoint(inspected.rows.column("kind").to_pylist())


def find_rows(folder: FolderDump, selection: Selection) -> Iterator[WalkResult]:
    """Yield the damage of the folder, then the selected frames, torn tails and damage of the selected segments."""
    yield from folder.damage
    for segment in filter(selection.has_segment, folder.segments):
        for result in folder.walk(segment):
            if not isinstance(result, InspectedFrame) or selection.has_frame(result):
                yield result


def describe_frame(inspected: InspectedFrame) -> dict[str, Any]:
    """Describe a frame: its header and the number of rows of each kind."""
    return {
        "segment": inspected.segment.ordinal,
        **msgspec.structs.asdict(inspected.frame),
        "checksum": "ok",
        "kinds": inspected.kinds(),
    }


def describe_rows(inspected: InspectedFrame, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a frame as dictionaries, without null columns."""
    first_seq = inspected.frame.first_seq
    begin = max(0, selection.from_seq - first_seq)
    end = inspected.rows.num_rows if selection.to_seq is None else max(begin, selection.to_seq - first_seq)
    # Users attach dumps to bug reports, so the broker's secrets are removed.
    rows = without_secrets(inspected.rows.slice(begin, end - begin))
    for seq, row in enumerate(rows.to_pylist(), first_seq + begin):
        kind = row.pop("kind")
        if selection.kinds and kind not in selection.kinds:
            continue
        shown = {name: value for name, value in row.items() if value is not None}
        yield {
            "seq": seq,
            "kind": KIND_NAMES.get(kind, str(kind)),
            **_encode_body(shown.pop("body", None)),
            **shown,
        }


def _encode_body(body: bytes | None) -> dict[str, str]:
    if body is None:
        return {}
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


@dataclass
class SegmentSummary:
    """A file of the log, with totals of its selected frames."""

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

    def add(self, inspected: InspectedFrame) -> None:
        """Add a frame to the totals. Frames come in the order of the log."""
        self.frames += 1
        self.rows += inspected.frame.rows
        self.used_bytes = inspected.frame.end
        self.next_seq, self.last_append_ms = inspected.frame.next_seq, inspected.frame.append_ms
        for name, count in inspected.kinds().items():
            self.kinds[name] = self.kinds.get(name, 0) + count


@dataclass
class Summary:
    """A summary of a folder. `flaws` are the torn tails and damage in the order of the log."""

    segments: list[SegmentSummary]
    checkpoint: dict[str, Any] | None
    queues: list[dict[str, Any]]
    flaws: list[Torn | Damage]
    verified: bool

    @property
    def damage(self) -> list[Damage]:
        """The flaws that a start of the broker does not repair by itself."""
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
    """Summarise the selected part of a folder. With `verify`, also compare the caches with the log.

    The log is read only once.
    """
    check = CacheCheck(folder) if verify else None
    segments: list[SegmentSummary] = []
    flaws: list[Torn | Damage] = list(folder.damage)
    for segment in filter(selection.has_segment, folder.segments):
        state = "spare" if segment.is_spare else "active" if segment.is_last else "sealed"
        first_seq = segment.first_seq
        summary = SegmentSummary(
            segment.name, segment.size_bytes, state, first_seq, first_seq, segment.created_ms
        )
        for result in folder.walk(segment):
            if not isinstance(result, InspectedFrame):
                flaws.append(result)
                continue
            if check is not None:
                check.add(result)
            if selection.has_frame(result):
                summary.add(result)
        if check is not None:
            flaws += check.finish(segment)
        segments.append(summary)
    return Summary(segments, _checkpoint_fields(folder), _queue_ranges(folder), flaws, verify)


def _checkpoint_fields(folder: FolderDump) -> dict[str, Any] | None:
    if folder.checkpoint is None:
        return None
    # `asdict`, because encoding the struct itself leaves out fields with their default value.
    facts = msgspec.structs.asdict(folder.checkpoint.facts)
    del facts["queues"]  # `_queue_ranges` shows them
    # These are shown as counts, because there may be thousands of files, and META values may be secret.
    for name in ("files", "meta"):
        facts[name] = len(facts[name] or ())
    shown: dict[str, Any] = msgspec.to_builtins(facts)
    return {**shown, "settled_rows": len(folder.checkpoint.settled_seq)}


def _queue_ranges(folder: FolderDump) -> list[dict[str, Any]]:
    topics = folder.checkpoint.facts.queues if folder.checkpoint is not None else {}
    return [
        {"topic": topic, "queue_id": queue_id, "min_offset": low, "max_offset": high}
        for topic, queues in topics.items()
        for queue_id, (low, high) in queues.items()
    ]
