"""The state of one replica, as one immutable record. The modules election, leading, following and machine change it.

    LEARNER --caught up, in the record--> FOLLOWER --no holder--> CANDIDATE --swapped--> SEALING
       ^                                   ^    ^                     | lost                | majority promised, and
       | out of the record                 |    +---------------------+---------------------+ what it lacked fetched
       +-----------------------------------+                                                |
                                           | restart                 SYNCING <----------+
                                           |                            | EPOCH committed
                                           |                            v
                                        STOPPED <-- REFUSE, lost ----- LEADER

    caught up     the replica has all committed rows
    the record    the group's entry at the coordinator, replaced by compare-and-swap (see Record)
    no holder     no node has the holder's key, which stands for a leader that is alive
    swapped       the candidate's record has replaced the former one
    promised      a majority has promised to refuse lower epochs, and the candidate has fetched the rows that it lacked

Rule 1: a step that raises `promised` lists a KeepPromise effect before any message of the new epoch, and no message is
sent in a lower epoch (I2).
Rule 2: a replica enters SEALING only with an epoch above `promised`, so neither a crash nor an outdated read of the
record makes it lead twice in one epoch (I1).
Rule 3: a replica that has served does not become a follower in the same process. It stops, and the next start reads the
disk.

"I1", "I2" and so on are the invariants in docs/cluster-protocol.md.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from timeball.cluster.protocol.messages import BEGINNING, Ends, Members, Position, Promise, last_position

# ---- the record of a group -----------------------------------------------------------------------------------
# The record is the entry in the coordinator that each change of leader replaces by compare-and-swap. A replica is a
# node and an incarnation, written `node/incarnation`. A node whose disk is new, wiped or damaged gets another
# incarnation, which is not in the record. Such a replica neither counts towards a majority nor becomes a candidate
# until a leader has seen that it has all committed rows and has added it to the record.


# A change of the set ends when a majority of the former set has stored the new one beside its promise. Until then,
# commits need a majority of the former set as well. So when etcd is restored from an older copy, the set in this copy
# either has all committed rows, or a majority of it knows that it is not the last one.


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """The leader of an epoch, and the replicas whose promises and acknowledgements count."""

    epoch: int
    leader: str  # a replica; empty before the first election
    replicas: tuple[str, ...]
    generation: int = 1  # number of this set of replicas: grows by 1 with each change of the set
    # The set before, until a majority of it is known to have stored this one.
    former: tuple[str, ...] = ()

    @property
    def members(self) -> Members:
        """The set of replicas with its number."""
        return Members(self.generation, self.replicas)


def node_of(replica: str) -> str:
    """Extract the node's name from a replica (`node/incarnation`)."""
    return replica.partition("/")[0]


def majority(replicas: tuple[str, ...]) -> int:
    """Compute the smallest number of replicas that is more than half."""
    return len(replicas) // 2 + 1


# ---- the state of a replica ----------------------------------------------------------------------------------


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
    group: str = "cluster/g1"  # as in HELLO: cluster and group
    acks_all: bool = False  # a commit needs every replica of the set, not a majority
    may_be_candidate: bool = True  # False: this replica never becomes a candidate
    # A leader to which no majority answers for this time stops. A candidate that does not lead by then gives up.
    quorum_ms: int = 3_000
    # A leader whose lease has ended continues while all other replicas of the set answer. As long as they all answer,
    # no majority can have elected another leader.
    may_lead_without_lease: bool = True
    # A replica that a hand-over names has this time to begin before another one becomes a candidate.
    hand_over_ms: int = 500
    # A leader whose holder's key has ended has this time to create it again, while it sends PINGs at least every
    # `heard_ms_max`. The time is bounded, because a leader may send PINGs and yet not serve.
    hold_ms: int = 1_000
    heard_ms_max: int = 250
    # A replica whose clock deviates from the group's median by more than `deviation_ms_max` waits for at most
    # `defer_ms`, so that others become candidates first.
    deviation_ms_max: int = 500
    defer_ms: int = 10_000
    # A replica waits before it becomes a candidate if the coordinator is slow, or if the last epochs have been short:
    # see `election.back_off_ms`.
    quick_etcd_ms: int = 125
    steady_ms: int = 10_000  # a shorter epoch is short
    back_off_ms: int = 250  # after the third short epoch, and twice as long after each further one
    back_off_ms_max: int = 4_000
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
    next_byte: int = 0  # byte of this segment at which the next frame will be written
    seq: int = 0  # sequence number of the next row

    @property
    def end(self) -> Position:
        """The end of the last frame."""
        return last_position(self.ends)

    @property
    def is_at_a_frame(self) -> bool:
        """True if the log ends with a frame, and False if the header of an empty segment follows the last frame."""
        return (self.ordinal, self.next_byte) == self.end[:2]


class Source(msgspec.Struct, frozen=True):
    """The leader or candidate whose messages this replica accepts."""

    node: str
    matched: bool = (
        False  # True once its CUT has named the end of the common log: then its frames may be written
    )


class Seal(msgspec.Struct, frozen=True):
    """The promises that a candidate has collected for its epoch, without its own."""

    epoch: int
    since_ms: int
    promises: dict[str, Promise]  # by node
    fetching: str = ""  # the node whose longer log is being fetched
    refused_by: frozenset[str] = frozenset()  # nodes that know a newer set of replicas


class Peer(msgspec.Struct, frozen=True):
    """Another replica, as seen by the leader over one connection."""

    replica: str
    sent: Position  # end of the frames sent so far
    acked: Position | None = None  # None until the replica has confirmed the end of the common log
    is_shipping: bool = False  # older frames are being read from the segments for it
    heard_ms: int = 0  # boot clock at its last answer
    answered_ms: int = 0  # boot clock when the last PING that it has answered was sent
    # End of this leader's log when the connection began. A replica may join the set once it has the data files of all
    # rows below it. The files of later rows need no check: a majority had each file before its row was appended.
    seq_at_connect: int = 0
    complete_seq: int = -1  # it has the data files of all rows below this one
    clock_ahead_ms: int | None = None  # its clock minus this one, from its last quick answer; None: unknown
    generation: int = 0  # of the set of replicas that it has stored


class Lead(msgspec.Struct, frozen=True):
    """The state that only a leader has."""

    epoch: int
    since_ms: int
    replicas: tuple[str, ...]  # whose acknowledgements count
    peers: dict[str, Peer]  # by node
    opening_end: Position | None = None  # end of the epoch's first frame, which holds the EPOCH row
    committed: Position = BEGINNING
    wanted: tuple[str, ...] = ()  # the set that an operator requested; it does not count yet
    joining: tuple[str, ...] = ()  # the new set: commits need its majority as well, until it is in the record
    former: tuple[str, ...] = ()  # as in the record: commits need a majority of it as well
    is_proposed: bool = False  # a swap of the record is in flight
    hand_over_node: str = ""  # the node to which this leader hands over


class Replica(msgspec.Struct, frozen=True):
    """The whole state. Only the promise, with its set of replicas, and the log are read from the disk at a start."""

    rules: Rules
    role: Role = Role.LEARNER
    promised: int = 0
    promised_to: str = (
        ""  # the replica to which this epoch is promised; "" if only the log proves the promise
    )
    members: Members = Members()  # the newest set of replicas that this one knows, stored with the promise
    # A majority of the record's set has refused to elect this replica, because it knows the set of this number.
    refused_generation: int = 0
    log: Log = Log()
    first: Position = BEGINNING  # begin of the log, after the segments that retention has deleted
    revision: int = 0  # of the record; records of older revisions are ignored
    record: Record | None = None
    revised_ms: int = 0  # when this revision was first read
    epoch_since_ms: int = 0  # when the record's epoch was first read
    short_epochs: int = 0  # number of short epochs before this one
    etcd_ms: int = 0  # round trip of the last read of the record
    now_ms: int = 0  # the boot clock
    wall_ms: int = 0
    lease_until_ms: int = 0
    source: Source | None = None
    unsynced_bytes: int = 0
    vacant_since_ms: int = 0  # when the group was first read without a holder; 0: it has one
    heard_ms: int = 0  # the boot clock at the last PING of the source
    deviation_ms: int = 0  # deviation of the local clock from the median, as the last leader's PING stated
    committed_seq: int = 0  # as the leader's messages state
    applied_seq: int = 0
    seal: Seal | None = None
    lead: Lead | None = None

    @property
    def epoch(self) -> int:
        """The epoch that this replica leads or is sealing, 0 when it does neither."""
        return self.lead.epoch if self.lead else self.seal.epoch if self.seal else 0
