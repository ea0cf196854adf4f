"""Effects: the output of the protocol, which the runtime carries out.

The runtime carries out the effects of a step one after the other, and passes on the next event after the last of them.
So an acknowledgement listed after a `Sync` is sent when the bytes are on the disk. The first disk operation that fails
ends the process (docs/decisions/0003-fail-stop.md), and the rest of the list is skipped.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from timeball.cluster.protocol.messages import Begin, Members, Message, Position
from timeball.cluster.protocol.replica import Record


class Effect(msgspec.Struct, frozen=True):
    """One action to carry out."""


class Send(Effect, frozen=True):
    """Send a message on the connection with this node, or drop it when there is no connection."""

    node: str
    message: Message


class Ship(Effect, frozen=True):
    """Read the local log from `begin` on, send one message of whole frames, and report it with a Shipped event.

    The message is DATA, or BYTES if the node has asked with FETCH. When the frames are in the next segment, a BEGIN
    is sent first. There is no Shipped event after BYTES.
    """

    node: str
    epoch: int
    begin: Position
    fetched: bool = False


class BeginSegment(Effect, frozen=True):
    """Create this segment, write the header in the message, and sync it."""

    begin: Begin


class Write(Effect, frozen=True):
    """Write frames into a segment at this position."""

    ordinal: int
    position: int
    frames: bytes


class Sync(Effect, frozen=True):
    """Sync everything that was written to the log."""


class CutLog(Effect, frozen=True):
    """Remove the log after this position, later segments included, and sync.

    The rest of the position's segment is overwritten with zeros.
    """

    position: Position


class KeepPromise(Effect, frozen=True):
    """Store durably that an epoch is promised to a replica, and the newest known set of replicas."""

    epoch: int
    to: str
    members: Members


class Holder(StrEnum):
    """The change of the holder's key in the transaction that swaps the record."""

    TAKE = "take"  # the key must not exist; it is created for this node and bound to its lease
    KEEP = "keep"  # the key is neither compared nor changed
    RELEASE = "release"  # the key must be this node's and is removed


class Propose(Effect, frozen=True):
    """Swap the record if it has this revision, and report the outcome with Proposed.

    The holder's key is changed in the same transaction. `displaces` names a node whose process is known to have
    ended: TAKE then replaces its key.
    """

    revision: int
    record: Record
    holder: Holder
    displaces: str = ""


class Hold(Effect, frozen=True):
    """Create the holder's key for this node, bound to its lease, if the key does not exist."""


class Resign(Effect, frozen=True):
    """Remove the holder's key if it is this node's, so that another replica may become a candidate."""


class Dial(Effect, frozen=True):
    """Open connections to all other nodes, reopen them when they end, and report each with Connected."""

    epoch: int


class HangUp(Effect, frozen=True):
    """Close the connections that Dial has opened."""


class AppendEpoch(Effect, frozen=True):
    """Append the row that opens an epoch, in a commit of its own, through an Appended event."""

    epoch: int


class Commit(Effect, frozen=True):
    """Mark all rows before `position` as committed: acknowledge them to senders, index them, make them visible."""

    position: Position


class Apply(Effect, frozen=True):
    """Apply all rows below `seq` to this follower's caches: they are committed."""

    seq: int


class PassOn(Effect, frozen=True):
    """Pass a message about data files, of the promised epoch, to the thread of the data files."""

    node: str
    message: Message


class Serve(Effect, frozen=True):
    """Apply the last committed rows and begin to serve: this replica leads."""

    epoch: int


class StopServing(Effect, frozen=True):
    """End the process. Requests that wait for an acknowledgement get none, and the next start reads the disk."""

    reason: str
