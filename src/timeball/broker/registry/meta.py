"""Store rarely changed state as META rows of the log. A row contains a key and a value. The last row of a key counts.

    key                                value                    kept by
    topic/<name>                       TopicFacts               topics.py
    group/<name>                       SubscriptionGroup        groups.py
    mode/<topic>@<group>               RequestMode              groups.py
    offsets/<group>@<topic>            {queue: offset}          groups.py
    leases/<group>@<topic>@<queue>@<part>   SavedPart           tables.py
    shown/<topic>                      {queue: offset}          tables.py
    campaign/<id>                      CampaignFacts            campaigns.py
    selection/<id>                     SelectionFacts           selections.py
    push/<name>                        PushSubscription         push_subscriptions.py
    schedule/<name>                    ScheduleFacts            schedules.py
    occurrence/<name>                  Progress                 schedules.py
    zones/used                         ZoneFacts                zones.py
    schedules/<n>                      bytes, as base64         schedules.py, only in snapshots
    secret/receipts                    32 bytes, as base64      tables.py
    secret/push/<name>                 PushSecrets              push_subscriptions.py
    dead/<group>                       {queue: [[begin, end]]}  dead_letters.py
    repeated/<group>                   {queue: [Run]}           dead_letters.py
    expired/<group>                    ExpiredFacts             dead_letters.py
    once/<hash of caller and key>      KeyedSend                idempotency.py
    source/<hash of caller and name>   SourceState              idempotency.py
    cluster/epoch                      EpochFacts               groups.py, written by the replica that leads
    drain/out                          DrainFacts               tables.py
    adopted/<group>                    AdoptedFacts             tables.py
    snapshot                           all of these at once     log/checkpoint.py

Values are JSON, and an empty value deletes its key. A change is appended at once, on the event loop. So it precedes
every row of the log that needs it, for example a topic precedes its first message, usually in the same sync. A caller
who needs the change on disk before the answer waits for `LogWriter.flushed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow as pa

from timeball.model.errors import Corrupt, SetupError
from timeball.model.message import SNAPSHOT_KEY, LogRow, meta_row, meta_rows

T = TypeVar("T")

# Rows of earlier versions, which are ignored: leases that the last orderly stop saved.
IGNORED_PREFIXES = {"in_flight"}


class Change(NamedTuple):
    """Changed values, encoded, for a frame that may also contain other rows."""

    pairs: list[tuple[str, bytes]]  # key and value of each row. An empty value deletes the key
    now_ms: int  # the store time of the rows
    # Applies the change in memory. Called after the append, because a refused append must not change anything.
    apply: Callable[[], None]

    @property
    def rows(self) -> pa.RecordBatch:
        """The values as META rows."""
        return meta_rows(self.pairs, self.now_ms)

    @property
    def log_rows(self) -> list[LogRow]:
        """The same rows, for a frame of a few rows."""
        return [meta_row(key, value, self.now_ms) for key, value in self.pairs]


def combined(*changes: Change) -> Change:
    """Combine changes of several tables into one."""

    def apply() -> None:
        for change in changes:
            change.apply()

    # One batch becomes one frame, so after a crash the log has all changes or none.
    pairs = [pair for change in changes for pair in change.pairs]
    return Change(pairs, max(change.now_ms for change in changes), apply)


class Restorable(Protocol):
    """State in memory that is restored from the values of one key prefix."""

    def restore(self, name: str, value: bytes) -> None:
        """Apply a value from the log. An empty value deletes the name. Recovery calls this in log order."""


Values = Iterable[tuple[str, bytes]]


class Holder(Protocol):
    """A table that holds its values itself, in less memory than `MetaLog.values`."""

    def copied(self) -> Callable[[], Values]:
        """Copy the values. Another thread may call the result, which encodes them for a snapshot."""


class MetaLog:
    """Writes META rows, and at a start restores the tables from them. Belongs to the event loop.

    `values` contains the newest values, up to the last row appended, without those of a `Holder`.
    """

    def __init__(self) -> None:
        # Kept encoded, because a snapshot copies all values on the event loop and needs no decoded value.
        self.values: dict[str, msgspec.Raw] = {}
        self._tables: dict[str, Restorable] = {}
        self._holders: dict[str, Holder] = {}  # by prefix
        # None during recovery, when the tables are filled from the log and must not write to it.
        self._append: Callable[[pa.RecordBatch], object] | None = None
        self.now_ms: Callable[[], int] = lambda: 0

    def register(self, prefix: str, table: Restorable, holds: Holder | None = None) -> None:
        """Register the table for the values of a prefix. Every table is registered before recovery begins.

        `holds`: the object that stores the values instead of `values`. None for most tables.
        """
        self._tables[prefix] = table
        if holds is not None:
            self._holders[prefix] = holds

    def open(self, append: Callable[[pa.RecordBatch], object], now_ms: Callable[[], int]) -> None:
        """Switch from recovery to writing."""
        self._append, self.now_ms = append, now_ms

    def put(self, changes: Iterable[tuple[str, object]]) -> None:
        """Append changed values in one frame, so that all of them are stored or none. None deletes a key."""
        assert self._append is not None, "recovery changes nothing"
        pairs = _encode_values(changes)
        if pairs:
            # Appended first, because a refused append must not change the state in memory.
            self._append(meta_rows(pairs, self.now_ms()))
            for key, value in pairs:
                self._remember(key, value)

    def build_change(self, changes: Iterable[tuple[str, object]]) -> Change:
        """Encode changed values. None deletes a key.

        The caller appends the rows in one frame with its own rows. Then it calls `apply`, which changes the values in
        memory.
        """
        pairs = _encode_values(changes)

        def apply() -> None:
            for key, value in pairs:
                self._remember(key, value)

        return Change(pairs, self.now_ms(), apply)

    def restore(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        """Recovery: apply values from the log, in its order.

        Raises SetupError for an unknown prefix, Corrupt for a damaged value.
        """
        for key, value in pairs:
            if key == SNAPSHOT_KEY:
                continue  # its values are also in earlier rows, which have been applied
            prefix, _, name = key.rpartition("/")  # names contain no slash
            if prefix in IGNORED_PREFIXES:
                continue
            table = self._tables.get(prefix)
            # Unknown values must not be skipped: the next snapshot would lack them, and they would be lost.
            if table is None:
                raise SetupError(f"the log holds state of a newer Timeball ({prefix!r}): use that one")
            if prefix not in self._holders:
                self._remember(key, value)
            try:
                table.restore(name, value)
            except msgspec.DecodeError as error:
                raise Corrupt(f"META row of {key!r}: {error}; restore the log from a copy") from error

    def copied(self) -> Callable[[], dict[str, msgspec.Raw]]:
        """Copy all values. Another thread may call the result, which encodes them in the form of a snapshot."""
        values = dict(self.values)
        # A holder may be registered for several prefixes. `fromkeys` removes duplicates.
        encoders = [holder.copied() for holder in dict.fromkeys(self._holders.values())]
        return lambda: values | {key: msgspec.Raw(value) for encode in encoders for key, value in encode()}

    def _remember(self, key: str, value: bytes) -> None:
        """Store an encoded value in memory. An empty value deletes the key."""
        if value:
            self.values[key] = msgspec.Raw(value)
        else:
            self.values.pop(key, None)


def _encode_values(changes: Iterable[tuple[str, object]]) -> list[tuple[str, bytes]]:
    """Encode values as JSON. None becomes an empty value, which deletes the key."""
    # Called before the append, so that an invalid value changes nothing.
    return [(key, b"" if value is None else msgspec.json.encode(value)) for key, value in changes]


class MetaTable(Generic[T]):
    """The decoded values of one key prefix, for state that only needs lookups."""

    def __init__(self, log: MetaLog, prefix: str, kind: type[T]) -> None:
        """`kind`: the type to which the JSON values of the prefix are decoded."""
        self._log, self._prefix, self._kind = log, prefix, kind
        self.values: dict[str, T] = {}
        log.register(prefix, self)

    def put(self, changes: Iterable[tuple[str, T | None]]) -> None:
        """Change values, in one frame. None deletes a value."""
        change_list = list(changes)
        self._log.put((f"{self._prefix}/{name}", value) for name, value in change_list)
        # After the append, as in MetaLog: memory never contains values that the log refused.
        for name, value in change_list:
            self._remember(name, value)

    def build_change(self, changes: Iterable[tuple[str, T | None]]) -> Change:
        """Encode changed values, as `MetaLog.build_change` does. None deletes a value."""
        change_list = list(changes)
        encoded = self._log.build_change((f"{self._prefix}/{name}", value) for name, value in change_list)

        def apply() -> None:
            encoded.apply()
            for name, value in change_list:
                self._remember(name, value)

        return encoded._replace(apply=apply)

    def restore(self, name: str, value: bytes) -> None:
        """Apply a value from the log."""
        self._remember(name, msgspec.json.decode(value, type=self._kind) if value else None)

    def _remember(self, name: str, value: T | None) -> None:
        """Store a decoded value in memory. None deletes the name."""
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
