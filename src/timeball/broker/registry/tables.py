"""The tables of a broker's state, each stored as META rows of the log."""

from __future__ import annotations

from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.dead_letters import ExpiredMessages, RepeatedDeadLetters, ResolvedDeadLetters
from timeball.broker.registry.drains import Drains
from timeball.broker.registry.groups import PREFIX, EpochFacts, Groups, Offsets, RequestModes
from timeball.broker.registry.idempotency import IdempotencyKeys, SourcePositions
from timeball.broker.registry.lease_meta import ReceiptSecret, SavedPart
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.push_subscriptions import PushSubscriptions
from timeball.broker.registry.topics import Topics
from timeball.io.files import Files


class Tables:
    """All tables. They are registered before recovery reads the first row of the log."""

    def __init__(self, files: Files, queues_per_topic: int) -> None:
        self.meta = meta = MetaLog()  # writes the META rows of all tables
        self.topics = Topics(files, meta, queues_per_topic=queues_per_topic)
        self.offsets, self.groups, self.request_modes = Offsets(meta), Groups(meta), RequestModes(meta)
        self.receipt_secret = ReceiptSecret(meta)
        self.leases = MetaTable(
            meta, "leases", SavedPart
        )  # open leases of all groups (consuming/lease_saver.py)
        self.campaigns = Campaigns(meta)
        self.idempotency_keys = IdempotencyKeys(meta)
        self.source_positions = SourcePositions(meta)
        self.push_subscriptions = PushSubscriptions(meta)
        self.resolved_dead_letters = ResolvedDeadLetters(meta)
        # Dead letters whose rows in the queue retention has removed.
        self.repeated_dead_letters = RepeatedDeadLetters(meta)
        self.expired = ExpiredMessages(meta)  # counts of messages that expired before a group read them
        self.epochs = MetaTable(meta, PREFIX, EpochFacts)
        self.drains = Drains(meta)  # states of drains: to another group of the cluster, or from one
