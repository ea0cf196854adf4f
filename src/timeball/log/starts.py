"""When the log was taken up again: each life of its writer has a number, the *epoch*, in the header of its frames.

Epochs only grow, so a new one is found by bisection, from a few headers however long the log is. Between the last
frame of one life and the first of the next nobody kept promises: what fell due there was late for that reason. A
life that wrote nothing leaves no trace, and needs none.
"""

from __future__ import annotations

from timeball.errors import Corrupt
from timeball.log import format as fmt
from timeball.log.segment import Segment, Segments
from timeball.wire import Start


def last_epoch(segments: Segments) -> int:
    """The epoch of the newest frame; 0 for a log without one."""
    for segment in reversed(segments.all):
        if len(segment.frame_positions):
            return frame_of(segment, len(segment.frame_positions) - 1).epoch
    return 0


def starts(segments: Segments, from_seq: int, to_seq: int) -> list[Start]:
    """Every start whose first row lies in [from_seq, to_seq), oldest first.

    The very first start of a log is none, and of the oldest frame that is kept nobody can tell. Raises Corrupt.
    """
    found: list[Start] = []
    before: fmt.Frame | None = None
    for segment in segments.all:
        count = len(segment.frame_positions)
        at = 0
        while at < count:
            frame = frame_of(segment, at)
            if before is not None and frame.epoch != before.epoch and from_seq <= frame.first_seq < to_seq:
                found.append(Start(frame.first_seq, frame.append_ms, before.append_ms))
            at = _end_of_epoch(segment, at, count, frame.epoch)
            before = frame_of(segment, at - 1)
    return found


def _end_of_epoch(segment: Segment, low: int, high: int, epoch: int) -> int:
    """Number of the first frame in (low, high) of a later epoch; `high` when there is none."""
    if frame_of(segment, high - 1).epoch == epoch:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if frame_of(segment, middle).epoch == epoch:
            low = middle
        else:
            high = middle
    return high


def frame_of(segment: Segment, number: int) -> fmt.Frame:
    """The header of a segment's frame."""
    position = int(segment.frame_positions[number])
    frame = fmt.read_frame_header(segment.buffer, position)
    if frame is None:
        raise Corrupt(f"{segment.name}: the frame at byte {position} has become blank")
    return frame
