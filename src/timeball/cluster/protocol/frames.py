"""Checks of the frames in a message, before they are written.

A replica writes the leader's bytes unchanged, so a byte that was corrupted on the way would stay corrupted. Therefore
the CRC-32C of every frame is verified here, and its numbers are compared with those of the message around it.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from timeball.cluster.protocol.positions import Position
from timeball.log import format as fmt
from timeball.model.errors import Corrupt, PeerError


class Shipped(NamedTuple):
    """A frame of a message: its epoch and its end."""

    epoch: int
    end: Position


def read_frames(frames: bytes, ordinal: int, position: int, first_seq: int) -> list[Shipped]:
    """Decode the frames from `position` on. Raises PeerError unless they are whole and in sequence."""
    buffer, found, place, seq = pa.py_buffer(frames), [], 0, first_seq
    while place < len(frames):
        try:
            frame = fmt.read_frame(buffer, place, origin=position)
        except Corrupt as error:
            raise PeerError(f"frames for segment {ordinal}: {error}") from error
        if frame is None or frame.first_seq != seq:
            raise PeerError(
                f"frames for segment {ordinal}, byte {position + place}: expected seq {seq}, "
                f"got {'no frame' if frame is None else frame.first_seq}"
            )
        place, seq = frame.end, frame.next_seq
        found.append(Shipped(frame.epoch, Position(ordinal, position + place, seq)))
    return found
