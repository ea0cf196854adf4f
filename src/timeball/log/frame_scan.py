"""Loads bytes of a mapped log from the disk before they are read. Those that it cannot read raise `Unreadable`.

A read of such a byte through a mapping would end the process with SIGBUS (`files.load`).
"""

from __future__ import annotations

import pyarrow as pa

from timeball.io.files import check_readable, load
from timeball.log import format as fmt
from timeball.model import limits

LOAD_BYTES = 1024 * 1024  # of a mapped file, loaded at once from the disk by a scan
NEAR_BYTES = 64 * 1024  # the same around a single frame; the system reads more than this ahead
PAGE_BYTES = 4096  # the smallest part that a disk can or cannot read


class FrameScan:
    """Reads frames of a mapped segment, mostly from front to back.

    Loads the bytes of the frames from the disk in steps, because a call for each frame would cost more than a small
    frame's checksum.
    """

    def __init__(self, segment: pa.Buffer, step_bytes: int = LOAD_BYTES) -> None:
        self.segment, self._step_bytes = segment, step_bytes
        self._loaded = 0, 0  # begin and end of the loaded bytes: one value, because threads may share a scan

    def read(self, position: int) -> fmt.Frame | None:
        """Read and check the frame at `position` as `read_frame` does. Also raises Unreadable."""
        self._load(position, position + fmt.ALIGN)
        if position + fmt.ALIGN <= self.segment.size:
            # The field `length` of the header, which is not checked yet.
            length = fmt.FRAME.unpack_from(self.segment, position)[3]
            if length <= limits.FRAME_BYTES_MAX:  # else `read_frame` refuses the header
                self._load(position, position + length)
        return fmt.read_frame(self.segment, position)

    def _load(self, begin: int, end: int) -> None:
        """Load the bytes [begin, end) from the disk, and the bytes after them up to the step. Raises Unreadable."""
        loaded_begin, loaded_end = self._loaded
        if loaded_begin <= begin and end <= loaded_end:
            return
        step_end = min(max(end, begin + self._step_bytes), self.segment.size)
        if load(self.segment, begin, step_end) is not None:
            check_readable(self.segment, begin, end)  # the bytes after the frame do not count
            step_end = end
        self._loaded = begin, step_end


def read_segment_header(segment: pa.Buffer) -> int | None:
    """Read a segment's header as `format.read_segment_header` does. Also raises Unreadable."""
    check_readable(segment, 0, fmt.ALIGN)
    return fmt.read_segment_header(segment)
