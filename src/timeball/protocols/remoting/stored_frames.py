"""Frames of the log as the source of stored messages: what pulls are answered with is written from them each time.

A frame is opened once, its checksum compared, and kept open for the pulls of other queues and groups. That happens on
the loop when its rows were written a moment ago and it is not large; in the reader thread otherwise, since it may have
to come from the disk. The thread opens what follows, too: a consumer that is behind goes on there, and so do those
of the other queues, which wait for one stretch together.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import NamedTuple

from timeball.broker.components import Components, in_thread
from timeball.errors import Corrupt, OutOfRange
from timeball.log.queue_entry import EntryArray
from timeball.log.reader import CACHE_FRAMES_MAX, FrameCache, Place
from timeball.log.segment import Segment
from timeball.protocols.remoting.codec.implementation import PYTHON, Codec, StoredFrame
from timeball.protocols.remoting.codec.records import Host

FRESH_ROWS = 65_536  # of the log's end: in the page cache, since they were written a moment ago
LOOP_BYTES_MAX = 1024 * 1024  # of a frame that is opened on the loop: some 100 us
AHEAD_BYTES = 1024 * 1024  # that the reader thread opens at once

Messages = tuple[int, bytes]  # how many of those asked for, and their bytes
Opened = dict[Place, StoredFrame]


class _Closed(NamedTuple):
    """A frame that is to be opened in the reader thread."""

    segment: Segment
    position: int


class StoredFrames:
    """Opened frames of the log. Belongs to the event loop; only `_open_from` runs in the reader thread."""

    def __init__(self, parts: Components, codec: Codec = PYTHON) -> None:
        self._parts, self._codec = parts, codec
        self._frames: FrameCache[StoredFrame] = FrameCache(parts.reader.segments, CACHE_FRAMES_MAX)
        self._opening: dict[Place, asyncio.Future[Opened]] = {}
        self._last: StoredFrame | None = None  # that was used; mostly the next pull is of the same commit
        parts.reader.segments.on_drop.append(self._forget_last)

    def _forget_last(self, _: list[Segment]) -> None:
        self._last = None

    def get_now(self, seqs: list[int], host: Host, bytes_max: int) -> Messages | None:
        """Return as many of these messages as go into an answer, at least one; None when that takes the disk.

        `seqs` ascend. Raises OutOfRange.
        """
        body = bytearray()
        count = self._put(body, seqs, host, bytes_max, {})
        return None if isinstance(count, _Closed) else (count, bytes(body))

    def put_now(self, out: bytearray, entries: EntryArray, host: Host, bytes_max: int) -> int:
        """Append the messages of these entries to `out` while it stays within `bytes_max`, and return how many.

        None where that takes the disk: what was appended counts for nothing then. Raises OutOfRange.
        """
        at, count, last = 0, len(entries), self._last
        # Mostly all are in the frame of the pull before.
        if last is not None:
            at = last.put(out, entries, 0, host, bytes_max)
        while at < count:
            frame = self._frame(int(entries[at]["seq"]), {})
            if isinstance(frame, _Closed):
                return 0
            begin, at = at, frame.put(out, entries, at, host, bytes_max)
            if at == begin:
                break  # there is no room for this one
        return at

    async def get(self, seqs: list[int], host: Host, bytes_max: int) -> Messages:
        """Return what `get_now` does, from the disk if need be."""
        opened: Opened = {}  # held: others may push them out of the cache meanwhile
        while True:
            body = bytearray()
            found = self._put(body, seqs, host, bytes_max, opened)
            if not isinstance(found, _Closed):
                return found, bytes(body)
            opened |= await self._open(found)

    def _put(
        self, out: bytearray, seqs: list[int], host: Host, bytes_max: int, opened: Opened
    ) -> int | _Closed:
        at = 0
        while at < len(seqs):
            frame = self._frame(seqs[at], opened)
            if isinstance(frame, _Closed):
                return frame
            at = frame.put(out, seqs, at, host, bytes_max)
            if at < len(seqs) and frame.first_seq <= seqs[at] < frame.end_seq:
                break  # there is no room for this one
        return at

    def _frame(self, seq: int, opened: Opened) -> StoredFrame | _Closed:
        """Return the frame that holds a row; raises OutOfRange when the log does not have it."""
        last = self._last
        if last is not None and last.first_seq <= seq < last.end_seq:
            return last
        reader = self._parts.reader
        segment = reader.segments.holding(seq)
        position = segment.frame_position_of(seq)
        place = segment.ordinal, position
        frame = self._frames.get(place) or opened.get(place)
        if frame is None:
            is_fresh = seq >= reader.next_seq - FRESH_ROWS
            if not is_fresh or segment.frame_bytes(position) > LOOP_BYTES_MAX:
                return _Closed(segment, position)
            frame = reader.open_frame(segment, position, self._codec.open_frame)[1]
            self._frames.keep(place, frame)
        if seq >= frame.end_seq:
            raise OutOfRange(f"seq {seq} was set aside for a bulk attach and is not in the log")
        self._last = frame
        return frame

    async def _open(self, closed: _Closed) -> Opened:
        place = closed.segment.ordinal, closed.position
        opening = self._opening.get(place)
        if opening is None:
            opening = in_thread(self._parts.reader_thread, self._open_from, closed)
            self._opening[place] = opening
            opening.add_done_callback(lambda _: self._opening.pop(place))
        # Shielded: one of those that wait for it may be cancelled, when its client goes.
        return await asyncio.shield(opening)

    def _open_from(self, closed: _Closed) -> Opened:
        """Open a frame and those behind it (reader thread)."""
        segment, begin = closed
        opened: Opened = {}
        for at in range(bisect_left(segment.frame_positions, begin), len(segment.frame_seqs)):
            position = int(segment.frame_positions[at])
            if opened and position >= begin + AHEAD_BYTES:
                break
            place = segment.ordinal, position
            frame = self._frames.get(place)
            if frame is None:
                try:
                    frame = self._parts.reader.open_frame(segment, position, self._codec.open_frame)[1]
                except Corrupt:
                    if opened:
                        break  # those who ask for this one are told
                    raise
                self._frames.keep(place, frame)
            opened[place] = frame
        return opened
