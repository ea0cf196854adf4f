"""The state of one replica, as one immutable record. The decisions are in election, leading, following and replicas.

    LEARNER --caught up, in the record--> FOLLOWER --no holder--> CANDIDATE --swapped--> SEALING
       ^                                   ^    ^                     | lost                | majority promised, and
       | out of the record                 |    +---------------------+---------------------+ what it lacked fetched
       +-----------------------------------+                                                |
                                           | restart                 SYNCING <----------+
                                           |                            | EPOCH committed
                                           |                            v
                                        STOPPED <-- REFUSE, lost ----- LEADER

Rule 1: a step that raises `promised` lists a KeepPromise effect before any message of the new epoch, and no message is
sent in a lower epoch (I2).
Rule 2: a replica enters SEALING only with an epoch above `promised`, so neither a crash nor an outdated read of the
record makes it lead twice in one epoch (I1).
Rule 3: a replica that has led does not become a follower in the same process. It stops, and the next start reads the
disk.

"I1", "I2" and so on are the invariants in docs/cluster-protocol.md.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from timeball.cluster.protocol.messages import Promise
from timeball.cluster.protocol.positions import BEGINNING, Ends, Position, last

# The record of a group: the entry in the coordinator that each change of leader replaces by compare-and-swap.
#
# A replica is a node and an incarnation, written `node/incarnation`. A node whose disk is new, wiped or damaged gets
# another incarnation, which is not in the record. Such a replica neither counts towards a majority nor becomes a
# candidate until a leader has seen that it holds all committed rows and has added it to the record.


class Record(msgspec.Struct, frozen=True):
    """The leader of an epoch, and the replicas whose promises and acknowledgements count."""

    epoch: int
    leader: str  # a replica; empty before the first election
    replicas: tuple[str, ...]
    generation: int = 1  # number of this set of replicas: grows by 1 with each change of the set


def node_of(replica: str) -> str:
    """Extract the node from a replica (`node/incarnation`)."""
    return replica.partition("/")[0]


def majority(replicas: tuple[str, ...]) -> int:
    """Compute how many replicas are more than half."""
    return len(replicas) // 2 + 1


class Role(StrEnum):
    """The roles of a replica, as in the diagram above."""

    LEARNER = "learner"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    SEALING = "sealing"
    SYNCING = "syncing"
    LEADER = "leader"
    STOPPED = "stopped"


class Rules(msgspec.Struct, frozen=True):
    """The settings of a replica, constant while it runs."""

    replica: str  # node and incarnation
    group: str = "cluster/g1"  # as HELLO names it: the cluster and its group
    acks_all: bool = False  # a commit needs every replica of the set, not a majority
    stands: bool = True  # False: this replica never becomes a candidate
    # A leader that hears from no majority for this time stops. A candidate that does not get to lead gives up after it.
    quorum_ms: int = 3_000
    # A leader whose lease is over goes on while all other replicas of the set answer it. As long as they all answer,
    # no majority can have elected another leader.
    leads_without_coordinator: bool = True
    # A replica that a hand-over names has this time to begin before another one becomes a candidate.
    hand_over_ms: int = 500
    # A replica whose clock deviates from the median by more than `off_ms_max` lets others become candidates first, for
    # at most `stand_back_ms`.
    off_ms_max: int = 500
    stand_back_ms: int = 10_000
    # A replica syncs after at most this many bytes. So a torn batch is no longer than this, and recovery can tell a
    # torn batch from damage (log/recovery.py).
    batch_bytes: int = 8 << 20

    @property
    def node(self) -> str:
        """The replica's node, without the incarnation."""
        return node_of(self.replica)


class Log(msgspec.Struct, frozen=True):
    """The local log: the end of each epoch, and the position of the next frame."""

    ends: Ends = ()
    ordinal: int = 0  # of the last segment that was begun, 0 when there is none
    place: int = 0  # byte in this segment at which the next frame goes
    seq: int = 0  # sequence number of the next row

    @property
    def end(self) -> Position:
        """The end of the last frame."""
        return last(self.ends)

    @property
    def is_at_a_frame(self) -> bool:
        """True if the log ends with a frame, and False if the header of an empty segment follows the last frame."""
        return (self.ordinal, self.place) == self.end[:2]


class Source(msgspec.Struct, frozen=True):
    """The leader or candidate whose messages this replica accepts."""

    node: str
    matched: bool = False  # its CUT has named the end of the common log, so its frames may be written


class Seal(msgspec.Struct, frozen=True):
    """The promises that a candidate has collected for its epoch, without its own."""

    epoch: int
    since_ms: int
    promises: dict[str, Promise]  # by node
    fetching: str = ""  # the node whose longer log is being fetched


class Peer(msgspec.Struct, frozen=True):
    """Another replica, as seen by the leader over one connection."""

    replica: str
    sent: Position  # the log was sent up to here
    acked: Position | None = None  # None until the replica has confirmed the end of the common log
    is_shipping: bool = False  # older frames are being read from the segments for it
    heard_ms: int = 0  # boot clock at its last answer
    # Length of this leader's log when the connection began. A replica may join the set when it has the data files of
    # all rows below. The files of later rows need no check: a majority had each before its row was appended.
    met_seq: int = 0
    complete_seq: int = -1  # it has the data files of all rows below this one
    ahead_ms: int | None = None  # its clock minus this one, by its last quick answer; None: not known


class Lead(msgspec.Struct, frozen=True):
    """The state that only a leader has."""

    epoch: int
    since_ms: int
    replicas: tuple[str, ...]  # whose acknowledgements count
    peers: dict[str, Peer]  # by node
    opened: Position | None = None  # end of the epoch's first frame, which holds the EPOCH row
    committed: Position = BEGINNING
    wanted: tuple[str, ...] = ()  # a requested set of replicas that does not count yet
    joining: tuple[str, ...] = ()  # a new set whose majority is needed as well, until it is in the record
    is_proposed: bool = False  # a swap of the record is in flight
    handing_to: str = ""  # the node to which this leader hands over


class Replica(msgspec.Struct, frozen=True):
    """The whole state. Only `promised` and `log` are read from the disk at a start."""

    rules: Rules
    role: Role = Role.LEARNER
    promised: int = 0
    log: Log = Log()
    first: Position = BEGINNING  # begin of the log, after the segments that retention has deleted
    revision: int = 0  # of the record; records of older revisions are ignored
    record: Record | None = None
    revised_ms: int = 0  # when this revision was first read
    now_ms: int = 0  # the boot clock
    wall_ms: int = 0
    lease_until_ms: int = 0
    source: Source | None = None
    unsynced_bytes: int = 0
    vacant_since_ms: int = 0  # when the group was first read without a holder; 0: it has one
    off_ms: int = 0  # deviation of the local clock from the median, as the last leader's PING stated
    committed_seq: int = 0  # as the leader's messages state
    applied_seq: int = 0
    seal: Seal | None = None
    lead: Lead | None = None

    @property
    def epoch(self) -> int:
        """The epoch that this replica leads or is sealing, 0 when it does neither."""
        return self.lead.epoch if self.lead else self.seal.epoch if self.seal else 0
