"""Events: the input of the protocol, which the runtime passes to `machine.step`.

Times are readings of the boot clock in milliseconds, unless their name contains `wall`.
"""

from __future__ import annotations

import msgspec

from timeball.cluster.protocol.messages import Begin, Message, Position
from timeball.cluster.protocol.replica import Record


class Event(msgspec.Struct, frozen=True):
    """One input of the protocol."""


class Received(Event, frozen=True):
    """A message arrived.

    Messages of one connection arrive in their order. No message arrives from a connection that a later one has
    replaced.
    """

    node: str
    message: Message
    # Time of arrival, set for messages that carry a time (PONG). 0: the time of the last tick is good enough.
    now_ms: int = 0
    wall_ms: int = 0


class Flush(Event, frozen=True):
    """All messages that had arrived were passed on: sync once and acknowledge the last position."""


class Connected(Event, frozen=True):
    """A new connection to this node is open. Only a leader or a candidate opens connections."""

    node: str


class Disconnected(Event, frozen=True):
    """A connection with this node has ended, either one opened here or one opened by the node."""

    node: str
    opened_here: bool


class Seen(Event, frozen=True):
    """The coordinator's record was read, possibly an old version. `holder` is the node in the holder's key."""

    revision: int
    record: Record
    holder: str | None
    etcd_ms: int | None = None  # round trip of the request to the coordinator, if it was measured


class Proposed(Event, frozen=True):
    """The outcome of a Propose effect. `succeeded` is None when the coordinator's answer was lost."""

    revision: int  # of the record after the swap, if it succeeded
    record: Record  # as proposed
    succeeded: bool | None


class LeaderDied(Event, frozen=True):
    """The leader's process has ended: its connection closed and its port refuses new ones.

    A follower may become a candidate at once, without waiting for the end of the leader's lease.
    """

    node: str


class LeaseExtended(Event, frozen=True):
    """The lease of this node is extended until `until_ms`.

    Its length is counted from before the request was sent to the coordinator.
    """

    until_ms: int


class Tick(Event, frozen=True):
    """Time has passed. `wall_ms` is sent to other replicas and compared with their clocks."""

    now_ms: int
    wall_ms: int = 0


class Appended(Event, frozen=True):
    """A commit of this leader is ready to be written. `begin` is set when the commit is the first of its segment."""

    ordinal: int
    position: int
    end_seq: int
    frames: bytes
    now_ms: int
    begin: Begin | None = None


class Dropped(Event, frozen=True):
    """Retention has deleted segments, so the local log now begins at `first`."""

    first: Position


class Shipped(Event, frozen=True):
    """A Ship effect has sent the log up to `end`."""

    node: str
    end: Position


class ReplicasWanted(Event, frozen=True):
    """Request of an operator for this set of replicas. The current set withdraws an earlier request."""

    replicas: tuple[str, ...]


class HandOver(Event, frozen=True):
    """Request of an operator to hand the lead over to this node. The broker appends nothing from now on."""

    node: str
