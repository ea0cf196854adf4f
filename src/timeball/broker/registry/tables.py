"""The tables of a broker's state, each stored as META rows of the log. The small ones are defined here.

Drains: a drained group moves its pending messages to another group of the cluster, the heir.

    drain/out          DrainFacts, in the drained group: the heir, and the transfer that it has not confirmed yet
    adopted/<group>    AdoptedFacts, in the heir: the last transfer that it has adopted from <group>

Each row is in the same frame as the transfer's messages: the rows that end them in the drained group, or those that
begin them in the heir. So a transfer that is sent again after a crash has the same messages, and is adopted once.
"""

from __future__ import annotations

import secrets

import msgspec

from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.dead_letters import ExpiredMessages, RepeatedDeadLetters, ResolvedDeadLetters
from timeball.broker.registry.groups import PREFIX, EpochFacts, Groups, Offsets, RequestModes
from timeball.broker.registry.idempotency import IdempotencyKeys, SourcePositions
from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.broker.registry.push_subscriptions import PushSubscriptions
from timeball.broker.registry.schedules import Schedules
from timeball.broker.registry.selections import Selections
from timeball.broker.registry.topics import Topics
from timeball.broker.registry.zones import Zones
from timeball.io.files import Files
from timeball.model.answers import HANDED
from timeball.model.message import SECRET_PREFIX

DRAIN_OUT = "out"


class DrainFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a drained group's META row. Group and `since_ms` identify a drain."""

    heir: str  # the group that receives the messages
    since_ms: int
    account: str = ""  # the account used for requests to the heir
    transfer: int = 0  # number of the last transfer, counted from 1
    moved_rows: int = 0  # confirmed by the heir
    # The unconfirmed transfer: its rows in this log, and the time when they were written. Without one, rows is 0.
    first_seq: int = 0
    rows: int = 0
    at_ms: int = 0


class AdoptedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the META row in the group that receives a drain: its last transfer."""

    since_ms: int  # identifies the drain
    transfer: int
    rows: int  # in all transfers from the group, of this drain and of earlier ones


class Drains:
    """The drain of this group, and the drains of other groups to it. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._out = MetaTable(meta, "drain", DrainFacts)
        self._adopted = MetaTable(meta, "adopted", AdoptedFacts)

    @property
    def out(self) -> DrainFacts | None:
        """The drain of this group, or None if it is not drained."""
        return self._out.values.get(DRAIN_OUT)

    @property
    def needed_seq(self) -> int | None:
        """The first row of the unconfirmed transfer, which may have to be sent again. None if there is none."""
        out = self.out
        return out.first_seq if out is not None and out.rows else None

    def was_handed_over(self, word: str, at_ms: int | None) -> bool:
        """Check whether a message of this log was, or may have been, handed over, by its verdict or state `word`.

        `at_ms`: the time when the message ended, None if no row shows it any more.
        """
        # Without a row, a message that was handed over looks like a cancelled one. In a drained group it must not be
        # reported as cancelled.
        is_unknown = at_ms is None and word in ("cancelled", "already_cancelled")
        return word == HANDED or (is_unknown and self.out is not None)

    def is_moving(self, at_ms: int | None) -> bool:
        """Check whether messages handed over at `at_ms` may not have arrived at the heir yet."""
        out = self.out
        return out is not None and bool(out.rows) and (at_ms is None or at_ms >= out.at_ms)

    def put(self, facts: DrainFacts) -> None:
        """Append the state of this group's drain."""
        self._out.put([(DRAIN_OUT, facts)])

    def build_change(self, facts: DrainFacts) -> Change:
        """Build the row of the drain's state, for a frame with other rows."""
        return self._out.build_change([(DRAIN_OUT, facts)])

    def adopted(self, source: str) -> AdoptedFacts | None:
        """Find the last transfer that this group has adopted from the group `source`. None if there is none."""
        return self._adopted.values.get(source)

    def adoption_row(self, source: str, facts: AdoptedFacts) -> Change:
        """Build the META row of an adopted transfer, for the frame with its messages."""
        return self._adopted.build_change([(source, facts)])


# ---- saved leases --------------------------------------------------------------------------------------------
# consuming/lease_saver.py writes and reads these rows. A row covers PART_POSITIONS positions of one queue, so that an
# acknowledgement in a queue with thousands of leases does not write all of them again.


class LeaseRun(msgspec.Struct, array_like=True):
    """Consecutive positions that are open, and whose leases are equal."""

    offset: int  # of the first one
    count: int
    pop_ms: int  # identifies the receipts, or NO_RECEIPT for positions that are leased again before new ones
    deadline_ms: int  # on the wall clock. In memory a deadline is elapsed time
    since_ms: int  # when the deadline was set, on the wall clock
    in_order: bool = False
    counts: bool = True
    times: int = 0
    nacked_ms: int | None = None
    nack_reason: str = ""
    key: str = ""  # of which a leased position has a slot (consuming/key_limits.py)


class SavedPart(msgspec.Struct):
    """The leases of one group in a part of one queue. Positions before `next_offset` are done unless they are open."""

    group: str
    topic: str
    queue_id: int
    part: int  # of the positions from part * PART_POSITIONS on
    next_offset: int
    runs: list[LeaseRun]
    acked_ahead: list[int]  # positions from `next_offset` on that are done
    last_pop_ms: int = 0
    attempt_id: str = ""


# ---- the secret of receipts ----------------------------------------------------------------------------------

SECRET_NAME = "receipts"
SECRET_BYTES = 32


class ReceiptSecret:
    """The secret of this data folder, which seals the texts of receipts. Belongs to the event loop.

    Receipts that consumers hold must stay valid across a restart, so the secret is a META row. It protects only against
    invented or changed receipts: a user who can read the folder can read the secret too. Readers of the log outside the
    broker do not get its value (`Broker.read_log`).
    """

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """True if the log contains the secret. It must be durable before a receipt is returned to a consumer."""
        return SECRET_NAME in self._table.values

    def get(self) -> bytes:
        """Read the secret. Create it if there is none."""
        if not self.is_made:
            # Created with the first receipt, so that a broker that never leases a message stores no secret.
            self._table.put([(SECRET_NAME, secrets.token_bytes(SECRET_BYTES))])
        return self._table.values[SECRET_NAME]


class Tables:
    """All tables. They are registered before recovery reads the first row of the log."""

    def __init__(self, files: Files, queues_per_topic: int) -> None:
        self.meta = meta = MetaLog()  # writes the META rows of all tables
        self.topics = Topics(files, meta, queues_per_topic=queues_per_topic)
        self.offsets, self.groups, self.request_modes = Offsets(meta), Groups(meta), RequestModes(meta)
        self.receipt_secret = ReceiptSecret(meta)
        # The open leases of all groups (consuming/lease_saver.py).
        self.leases = MetaTable(meta, "leases", SavedPart)
        # Of each topic with a limit: how far consumers see its queues (accepting/pacing.py).
        self.shown = MetaTable(meta, "shown", dict[int, int])
        self.campaigns = Campaigns(meta)
        self.selections = Selections(meta)
        self.idempotency_keys = IdempotencyKeys(meta)
        self.source_positions = SourcePositions(meta)
        self.push_subscriptions = PushSubscriptions(meta)
        self.schedules = Schedules(meta)
        self.zones = Zones(meta)
        self.resolved_dead_letters = ResolvedDeadLetters(meta)
        # Dead letters whose rows in the queue retention has removed.
        self.repeated_dead_letters = RepeatedDeadLetters(meta)
        self.expired = ExpiredMessages(meta)  # counts of messages that expired before a group read them
        self.epochs = MetaTable(meta, PREFIX, EpochFacts)
        self.drains = Drains(meta)  # states of drains: to another group of the cluster, or from one
