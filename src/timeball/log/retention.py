"""Let old segments go, when nothing needs them any more.

A segment may go when it is older than the retention time and lies wholly below every position somebody still
depends on: the watermark (promises that are not yet in the pending table) and the checkpoint (recovery starts
there). The newest segment always stays. A streaming job that lags further behind than the retention time has lost
rows it never saw, and says so (OutOfRange).
"""

from __future__ import annotations

from timeball.files import Files
from timeball.log.segment import FOLDER, Segment, Segments


def expired(segments: Segments, *, now_ms: int, retention_ms: int, needed_from_seq: int) -> list[Segment]:
    """The oldest segments that may go, in order."""
    found = []
    for segment in segments.all[:-1]:
        if segment.next_seq > needed_from_seq or segment.last_append_ms > now_ms - retention_ms:
            break
        found.append(segment)
    return found


def remove(files: Files, segments: Segments, gone: list[Segment]) -> None:
    """Drop `gone` from the log and from the disk, oldest first, so that a crash leaves no hole.

    Readers that hold a mapping keep it until they are done.
    """
    if not gone:
        return
    segments.drop(gone)
    for segment in gone:
        files.remove(segment.name)
        for cache in ("keys", "frames"):
            files.remove(f"{FOLDER}/{segment.ordinal:010d}.{cache}")
        # Synced one by one: a later name must never be gone while an earlier one is back.
        files.sync_dir(FOLDER)
