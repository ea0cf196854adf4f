"""Events: what the runtime tells a step of the protocol. Times are the boot clock's, in milliseconds."""

from __future__ import annotations

import msgspec

from timeball.cluster.messages import Begin, Message
from timeball.cluster.positions import Position
from timeball.cluster.record import Record


class Event(msgspec.Struct, frozen=True):
    """One thing that has happened."""


class Received(Event, frozen=True):
    """A message came. Messages of one connection come in order, and none of a connection that a later one replaced."""

    node: str
    message: Message
    # When it came, of a message that tells a time; 0: as of the last tick.
    now_ms: int = 0
    wall_ms: int = 0


class Flush(Event, frozen=True):
    """All that has arrived was handed over: sync it once and acknowledge the last."""


class Connected(Event, frozen=True):
    """A connection to this node, opened here, is new. Only who leads or stands opens any."""

    node: str


class Disconnected(Event, frozen=True):
    """A connection with this node has ended: one that was opened here, or one that the node opened."""

    node: str
    opened_here: bool


class Seen(Event, frozen=True):
    """The coordinator's record was read, perhaps from a member that is behind; `holder` is the node in its key."""

    revision: int
    record: Record
    holder: str | None


class Proposed(Event, frozen=True):
    """A proposal was carried out, or was not; `succeeded` is None when its answer was lost."""

    revision: int  # of the record now, if it succeeded
    record: Record  # as proposed
    succeeded: bool | None


class LeaderDied(Event, frozen=True):
    """The leader's process ended: its connection closed, and its port refuses another. Try without waiting."""

    node: str


class LeaseExtended(Event, frozen=True):
    """The coordinator has granted the lease of this node up to here, counted from before it was asked."""

    until_ms: int


class Tick(Event, frozen=True):
    """Time has passed. `wall_ms` is told to others, and compared with theirs."""

    now_ms: int
    wall_ms: int = 0


class Appended(Event, frozen=True):
    """A commit is ready to be written here; `begin` when it is the first of its segment."""

    ordinal: int
    position: int
    end_seq: int
    frames: bytes
    now_ms: int
    begin: Begin | None = None


class Dropped(Event, frozen=True):
    """Retention has dropped segments: the own log begins here now."""

    first: Position


class Shipped(Event, frozen=True):
    """A Ship effect has sent the log up to here."""

    node: str
    end: Position


class ReplicasWanted(Event, frozen=True):
    """The operator, or a replaced disk, asks for this set."""

    replicas: tuple[str, ...]


class HandOver(Event, frozen=True):
    """The operator asks this leader to give way to this node; nothing more is appended from now on."""

    node: str
