"""Read stored messages from the frames of the commit log, for the answers to pulls.

A frame is opened, and its checksum verified, only once. It stays in a cache for the pulls of other queues and groups. A
small frame with recently written rows is opened on the event loop, because it is in the page cache. Any other frame is
opened in the reader thread, because the disk may have to be read. The thread also opens the frames that follow: a
consumer that lags will need them next, and so will the consumers of other queues.
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

FRESH_ROWS = 65_536  # newest rows of the log, which are still in the page cache
LOOP_BYTES_MAX = 1024 * 1024  # of a frame that is opened on the loop, which takes about 100 us
AHEAD_BYTES = 1024 * 1024  # of frames that the reader thread opens at once

EncodedMessages = tuple[int, bytes]  # number of messages, and their bytes
OpenedFrames = dict[Place, StoredFrame]


class _UnopenedFrame(NamedTuple):
    """The position of a frame that must be opened in the reader thread."""

    segment: Segment
    position: int


class StoredFrames:
    """A cache of opened frames. Belongs to the event loop. Only `_open_following` runs in the reader thread."""

    def __init__(self, codec: Codec = PYTHON, *, reader: LogReader, reader_thread: Executor) -> None:
        self._codec, self._reader, self._reader_thread = codec, reader, reader_thread
        self._frames: FrameCache[StoredFrame] = FrameCache(reader.segments, CACHE_FRAMES_MAX)
        self._opening: dict[Place, asyncio.Future[OpenedFrames]] = {}
        # The frame that the last pull used. In most cases the next pull uses it too.
        self._last_frame: StoredFrame | None = None
        reader.segments.on_drop.append(self._forget_last_frame)

    def _forget_last_frame(self, _: list[Segment]) -> None:
        self._last_frame = None

    def get_from_memory(self, seqs: list[int], host: Host, bytes_max: int) -> EncodedMessages | None:
        """Encode as many of these messages as fit into an answer, at least one. Returns None if the disk must be read.

        `seqs` are ascending. `host` is the store host in the messages. Raises OutOfRange.
        """
        body = bytearray()
        count = self._append(body, seqs, host, bytes_max, {})
        return None if isinstance(count, _UnopenedFrame) else (count, bytes(body))

    def append_from_memory(self, out: bytearray, entries: EntryArray, host: Host, bytes_max: int) -> int:
        """Append the messages of these queue entries to `out` while they fit into `bytes_max`. Returns their number.

        If the disk must be read, it returns 0, and the caller must discard `out`. Raises OutOfRange.
        """
        index, count, last_frame = 0, len(entries), self._last_frame
        # In most cases all messages are in the frame that the previous pull used.
        if last_frame is not None:
            index = last_frame.put(out, entries, 0, host, bytes_max)
        while index < count:
            frame = self._find_frame(int(entries[index]["seq"]), {})
            if isinstance(frame, _UnopenedFrame):
                return 0
            previous_index, index = index, frame.put(out, entries, index, host, bytes_max)
            if index == previous_index:
                break  # the next message does not fit into the answer
        return index

    async def get(self, seqs: list[int], host: Host, bytes_max: int) -> EncodedMessages:
        """Encode as many of these messages as fit into an answer, at least one. Reads the disk if necessary."""
        opened: OpenedFrames = {}  # a reference of our own, because other pulls may evict them from the cache meanwhile
        while True:
            body = bytearray()
            result = self._append(body, seqs, host, bytes_max, opened)
            if not isinstance(result, _UnopenedFrame):
                return result, bytes(body)
            opened |= await self._open(result)

    def _append(
        self, out: bytearray, seqs: list[int], host: Host, bytes_max: int, opened: OpenedFrames
    ) -> int | _UnopenedFrame:
        """Append the messages that fit, and return their number, or the frame that must be opened first."""
        index = 0
        while index < len(seqs):
            frame = self._find_frame(seqs[index], opened)
            if isinstance(frame, _UnopenedFrame):
                return frame
            index = frame.put(out, seqs, index, host, bytes_max)
            if index < len(seqs) and frame.first_seq <= seqs[index] < frame.end_seq:
                break  # the next message does not fit into the answer
        return index

    def _find_frame(self, seq: int, opened: OpenedFrames) -> StoredFrame | _UnopenedFrame:
        """Find the frame that contains a row, and open it if this is possible on the event loop.

        Raises OutOfRange if the log does not have the row.
        """
        last_frame = self._last_frame
        if last_frame is not None and last_frame.first_seq <= seq < last_frame.end_seq:
            return last_frame
        reader = self._reader
        segment = reader.segments.holding(seq)
        position = segment.frame_position_of(seq)
        frame_key = segment.ordinal, position
        frame = self._frames.get(frame_key) or opened.get(frame_key)
        if frame is None:
            is_fresh = seq >= reader.next_seq - FRESH_ROWS
            if not is_fresh or segment.frame_bytes(position) > LOOP_BYTES_MAX:
                return _UnopenedFrame(segment, position)
            frame = reader.open_frame(segment, position, self._codec.open_frame)[1]
            self._frames.keep(frame_key, frame)
        if seq >= frame.end_seq:
            raise OutOfRange(f"seq {seq} was set aside for a bulk attach and is not in the log")
        self._last_frame = frame
        return frame

    async def _open(self, unopened: _UnopenedFrame) -> OpenedFrames:
        """Open a frame and the following ones in the reader thread. Pulls that need the same frame share this."""
        frame_key = unopened.segment.ordinal, unopened.position
        opening = self._opening.get(frame_key)
        if opening is None:
            opening = in_thread(self._reader_thread, self._open_following, unopened)
            self._opening[frame_key] = opening
            opening.add_done_callback(lambda _: self._opening.pop(frame_key))
        # Shielded: if one pull is cancelled because its client disconnects, the others still need the frame.
        return await asyncio.shield(opening)

    def _open_following(self, unopened: _UnopenedFrame) -> OpenedFrames:
        """Open a frame and the following ones, up to AHEAD_BYTES. Runs in the reader thread."""
        segment, first_position = unopened
        opened: OpenedFrames = {}
        for index in range(bisect_left(segment.frame_positions, first_position), len(segment.frame_seqs)):
            position = int(segment.frame_positions[index])
            if opened and position >= first_position + AHEAD_BYTES:
                break
            frame_key = segment.ordinal, position
            frame = self._frames.get(frame_key)
            if frame is None:
                try:
                    frame = self._reader.open_frame(segment, position, self._codec.open_frame)[1]
                except Corrupt:
                    if opened:
                        break  # only a pull that needs the corrupt frame gets the error
                    raise
                self._frames.keep(frame_key, frame)
            opened[frame_key] = frame
        return opened
