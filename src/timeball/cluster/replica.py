"""The state of one replica, as one frozen record; what it decides is in the files named for the acts.

    LEARNER --caught up, in the record--> FOLLOWER --no holder--> CANDIDATE --swapped--> SEALING
       ^                                   ^    ^                     | lost                | majority promised, and
       | out of the record                 |    +---------------------+---------------------+ what it lacked fetched
       +-----------------------------------+                                                |
                                           | restart                 SYNCING <----------+
                                           |                            | EPOCH committed
                                           |                            v
                                        STOPPED <-- REFUSE, lost ----- LEADER

Rule 1: `promised` grows only behind a KeepPromise effect, and nothing is sent in a lower epoch (I2).
Rule 2: a replica enters SEALING only with an epoch above `promised`, so neither a crash nor a stale read makes it lead
twice in one epoch (I1).
Rule 3: one that led does not become a follower in the same process: it stops, and the next start reads the disk.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from timeball.cluster.messages import Promise
from timeball.cluster.positions import BEGINNING, Ends, Position, last
from timeball.cluster.record import Record, node_of


class Role(StrEnum):
    """The state of a replica."""

    LEARNER = "learner"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    SEALING = "sealing"
    SYNCING = "syncing"
    LEADER = "leader"
    STOPPED = "stopped"


class Rules(msgspec.Struct, frozen=True):
    """The settings of a replica, fixed while it runs."""

    replica: str  # node and incarnation
    group: str = "cluster/g1"  # as HELLO names it: the cluster and its group
    acks_all: bool = False  # every replica of the set must have a commit, not most
    stands: bool = True  # False: told not to
    # A leader that hears no majority for this long stops; so does a candidate that does not get to lead.
    quorum_ms: int = 3_000
    # A leader whose lease is over goes on while all other replicas of the set answer it: no majority is without it.
    leads_without_coordinator: bool = True
    # A replica that the record names has this long before another one stands.
    hand_over_ms: int = 500
    # One whose clock is off the majority's by more than `off_ms_max` lets others stand first, for this long.
    off_ms_max: int = 500
    stand_back_ms: int = 10_000
    # Bytes a replica writes before it syncs. A torn batch is no longer than this (recovery tells it from damage by it).
    batch_bytes: int = 8 << 20

    @property
    def node(self) -> str:
        """Return the replica's node."""
        return node_of(self.replica)


class Log(msgspec.Struct, frozen=True):
    """The own log: where epochs end, and where the next frame goes."""

    ends: Ends = ()
    ordinal: int = 0  # of the last segment that was begun; 0 when there is none
    place: int = 0  # in it
    seq: int = 0  # of the next row

    @property
    def end(self) -> Position:
        """Return the end of the last frame."""
        return last(self.ends)

    @property
    def is_at_a_frame(self) -> bool:
        """Return whether nothing stands behind the last frame, not even the header of a segment."""
        return (self.ordinal, self.place) == self.end[:2]


class Source(msgspec.Struct, frozen=True):
    """The leader, or a candidate, that this replica listens to."""

    node: str
    matched: bool = False  # it has said where both logs agree, so its frames may be written


class Seal(msgspec.Struct, frozen=True):
    """A candidate's promises so far, its own left out."""

    epoch: int
    since_ms: int
    promises: dict[str, Promise]
    fetching: str = ""  # the node that knows more


class Peer(msgspec.Struct, frozen=True):
    """Another replica, as the leader sees it over one connection."""

    replica: str
    sent: Position  # where the next frames go on
    acked: Position | None = None  # None until it has confirmed where the logs agree
    is_shipping: bool = False  # older frames are being read for it
    heard_ms: int = 0
    # It joins the set when it has the data files of all rows that this log had when both met. Those of later rows were
    # counted on a majority before their rows were appended.
    met_seq: int = 0
    complete_seq: int = -1  # it has the data files of the rows below
    ahead_ms: int | None = None  # its clock, of this one, as its last quick answer told; None: not known


class Lead(msgspec.Struct, frozen=True):
    """The knowledge of a leader alone."""

    epoch: int
    since_ms: int
    replicas: tuple[str, ...]  # whose acknowledgements count
    peers: dict[str, Peer]  # by node
    opened: Position | None = None  # the end of the epoch's first frame, the EPOCH row
    committed: Position = BEGINNING
    wanted: tuple[str, ...] = ()  # a set that is asked for, and not yet counted
    joining: tuple[str, ...] = ()  # a set whose majority is needed besides, until the record names it
    is_proposed: bool = False  # a swap is on its way
    handing_to: str = ""  # a node


class Replica(msgspec.Struct, frozen=True):
    """The whole state. Only `promised` and `log` are read from the disk at a start."""

    rules: Rules
    role: Role = Role.LEARNER
    promised: int = 0
    log: Log = Log()
    first: Position = BEGINNING  # where the log begins: behind what retention has dropped
    revision: int = 0  # of the record; older ones are not looked at
    record: Record | None = None
    revised_ms: int = 0  # when this revision was first read
    now_ms: int = 0  # the boot clock
    wall_ms: int = 0
    lease_until_ms: int = 0
    source: Source | None = None
    unsynced_bytes: int = 0
    vacant_since_ms: int = 0  # since when the record has been seen without a holder; 0: it has one
    off_ms: int = 0  # how far the own clock is off the majority's, as the last leader told
    committed_seq: int = 0  # as the leader tells
    applied_seq: int = 0
    seal: Seal | None = None
    lead: Lead | None = None

    @property
    def epoch(self) -> int:
        """Return the epoch that this replica leads, or stands in."""
        return self.lead.epoch if self.lead else self.seal.epoch if self.seal else 0
