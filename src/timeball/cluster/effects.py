"""Effects: what a step of the protocol asks of its runtime.

The runtime carries them out one after the other, each finished before the next, and only then gives the next event. So
an acknowledgement that stands behind a `Sync` leaves when the bytes are on the disk. The first effect on the disk that
fails ends the process (docs/decisions/0003-fail-stop.md); the rest of the list is then not carried out.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from timeball.cluster.messages import Begin, Message
from timeball.cluster.positions import Position
from timeball.cluster.record import Record


class Effect(msgspec.Struct, frozen=True):
    """One thing to do."""


class Send(Effect, frozen=True):
    """Send a message on the connection with this node; drop it when there is none."""

    node: str
    message: Message


class Ship(Effect, frozen=True):
    """Read the own log from `begin` on, send it to this node, and answer with a Shipped event.

    One message of whole frames, DATA, or BYTES when the node has asked by FETCH; behind a BEGIN when they stand in the
    next segment.
    """

    node: str
    epoch: int
    begin: Position
    fetched: bool = False


class BeginSegment(Effect, frozen=True):
    """Make this segment and write its header, as it is in the message, and sync."""

    begin: Begin


class Write(Effect, frozen=True):
    """Write frames into the segment at this position."""

    ordinal: int
    position: int
    frames: bytes


class Sync(Effect, frozen=True):
    """Put on the disk all that was written to the log."""


class CutLog(Effect, frozen=True):
    """Remove all behind this position, later segments too, and sync: zeros in its segment, no name behind it."""

    at: Position


class KeepPromise(Effect, frozen=True):
    """Put the promised epoch on the disk, so that a crash does not take it back."""

    epoch: int


class Holder(StrEnum):
    """The fate of the holder's key in the transaction that swaps the record."""

    TAKE = "take"  # it must not exist, and is made for this node, bound to its lease
    KEEP = "keep"  # it is not looked at
    RELEASE = "release"  # it is removed if it is this node's


class Propose(Effect, frozen=True):
    """Swap the record if it has this revision, and answer with Proposed; one transaction with the holder's key.

    `displaces` names a node whose process is known to have died: TAKE then removes its key in the same transaction.
    """

    revision: int
    record: Record
    holder: Holder
    displaces: str = ""


class Hold(Effect, frozen=True):
    """Make the holder's key for this node, bound to its lease, if there is none."""


class Resign(Effect, frozen=True):
    """Remove the holder's key if it is this node's: another replica may try."""


class Dial(Effect, frozen=True):
    """Open connections to all other nodes and keep trying; tell of each new one with Connected."""

    epoch: int


class HangUp(Effect, frozen=True):
    """Close the connections that Dial has opened."""


class AppendEpoch(Effect, frozen=True):
    """Append the row that opens an epoch, alone, through an Appended event."""

    epoch: int


class Commit(Effect, frozen=True):
    """All rows before `position` are committed: answer their senders, index them, let them be seen."""

    position: Position


class Apply(Effect, frozen=True):
    """All rows below `seq` are committed: bring this follower's caches up to there."""

    seq: int


class PassOn(Effect, frozen=True):
    """Give a message about data files to what sends and receives them; it is of the promised epoch."""

    node: str
    message: Message


class Serve(Effect, frozen=True):
    """Finish applying the committed rows, and serve: this replica leads."""

    epoch: int


class StopServing(Effect, frozen=True):
    """End the process, which starts again and reads its disk; what waits for an acknowledgement gets none."""

    reason: str
