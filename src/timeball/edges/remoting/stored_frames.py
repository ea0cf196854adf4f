"""Frames of the log as the source of stored messages: each answer to a pull is written from them.

A frame is opened and its checksum compared once. It stays open for the pulls of other queues and groups. A small frame
with rows written a moment ago is opened on the event loop. Any other frame is opened in the reader thread, because it
may have to come from the disk. The thread also opens the frames behind it. A consumer that lags continues there, and so
do the consumers of other queues that wait for the same frames.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from concurrent.futures import Executor
from typing import NamedTuple

from timeball.edges.remoting.codec.implementation import PYTHON, Codec, StoredFrame
from timeball.edges.remoting.codec.records import Host
from timeball.io.threads import in_thread
from timeball.log.queue_entry import EntryArray
from timeball.log.reader import CACHE_FRAMES_MAX, FrameCache, LogReader, Place
from timeball.log.segment import Segment
from timeball.model.errors import Corrupt, OutOfRange

FRESH_ROWS = 65_536  # rows at the log's end that are in the page cache, since they were written a moment ago
LOOP_BYTES_MAX = 1024 * 1024  # of a frame that is opened on the loop, which takes about 100 us
AHEAD_BYTES = 1024 * 1024  # that the reader thread opens at once

Messages = tuple[int, bytes]  # number of messages, and their bytes
Opened = dict[Place, StoredFrame]


class _Closed(NamedTuple):
    """The place of a frame that is not opened yet and must be opened in the reader thread."""

    segment: Segment
    position: int


class StoredFrames:
    """Opened frames of the log. Belongs to the event loop. Only `_open_from` runs in the reader thread."""

    def __init__(self, codec: Codec = PYTHON, *, reader: LogReader, reader_thread: Executor) -> None:
        self._codec = codec
        self._reader, self._reader_thread = reader, reader_thread
        self._frames: FrameCache[StoredFrame] = FrameCache(reader.segments, CACHE_FRAMES_MAX)
        self._opening: dict[Place, asyncio.Future[Opened]] = {}
        self._last: StoredFrame | None = None  # the last used, mostly also by the next pull
        reader.segments.on_drop.append(self._forget_last)

    def _forget_last(self, _: list[Segment]) -> None:
        self._last = None

    def get_now(self, seqs: list[int], host: Host, bytes_max: int) -> Messages | None:
        """Return as many of these messages as fit into an answer, at least one, or None if that requires the disk.

        `seqs` ascend. Raises OutOfRange.
        """
        body = bytearray()
        count = self._put(body, seqs, host, bytes_max, {})
        return None if isinstance(count, _Closed) else (count, bytes(body))

    def put_now(self, out: bytearray, entries: EntryArray, host: Host, bytes_max: int) -> int:
        """Append the messages of these entries to `out` while it stays within `bytes_max`, and return their number.

        Returns 0 if that requires the disk: messages appended until then are not to be used. Raises OutOfRange.
        """
        at, count, last = 0, len(entries), self._last
        # Mostly all messages are in the frame that the previous pull used.
        if last is not None:
            at = last.put(out, entries, 0, host, bytes_max)
        while at < count:
            frame = self._frame(int(entries[at]["seq"]), {})
            if isinstance(frame, _Closed):
                return 0
            begin, at = at, frame.put(out, entries, at, host, bytes_max)
            if at == begin:
                break  # no room for this message
        return at

    async def get(self, seqs: list[int], host: Host, bytes_max: int) -> Messages:
        """Return the same as `get_now`, from the disk if necessary."""
        opened: Opened = {}  # kept here, because other pulls may push them out of the cache meanwhile
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
                break  # no room for this message
        return at

    def _frame(self, seq: int, opened: Opened) -> StoredFrame | _Closed:
        """Return the frame that contains a row. Raises OutOfRange if the log does not have the row."""
        last = self._last
        if last is not None and last.first_seq <= seq < last.end_seq:
            return last
        reader = self._reader
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
            opening = in_thread(self._reader_thread, self._open_from, closed)
            self._opening[place] = opening
            opening.add_done_callback(lambda _: self._opening.pop(place))
        # Shielded: if one pull is cancelled because its client disconnects, the others still need the frame.
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
                    frame = self._reader.open_frame(segment, position, self._codec.open_frame)[1]
                except Corrupt:
                    if opened:
                        break  # a pull that asks for the corrupt frame gets the error
                    raise
                self._frames.keep(place, frame)
            opened[place] = frame
        return opened
