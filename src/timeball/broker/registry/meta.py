"""State that changes rarely, as META rows of the log: a key and a value each, of which the last one counts.

    key                                value                    kept by
    topic/<name>                       TopicFacts               topics.py
    group/<name>                       SubscriptionGroup        groups.py
    mode/<topic>@<group>               RequestMode              groups.py
    offsets/<group>@<topic>            {queue: offset}          offsets.py
    offsets/parked                     Parked                   offsets.py
    in_flight/<group>@<topic>@<queue>  leases at a clean stop   leases.py
    campaign/<id>                      CampaignFacts            campaigns.py
    push/<name>                        PushSubscription         push_subscriptions.py
    secret/receipts                    32 bytes, as base64      leases.py
    secret/push/<name>                 PushSecrets              push_subscriptions.py
    dead/<group>                       {queue: [[begin, end]]}  dead_letters.py
    repeated/<group>                   {queue: [Run]}           dead_letters.py
    expired/<group>                    ExpiredFacts             expired.py
    once/<hash of caller and key>      KeyedSend                idempotency.py
    source/<hash of caller and name>   SourceState              source_positions.py
    cluster/epoch                      EpochFacts               epochs.py, written by the replica that leads
    drain/out                          DrainFacts               drains.py
    adopted/<group>                    AdoptedFacts             drains.py
    snapshot                           all of these at once     log/checkpoint.py

Values are JSON; an empty one deletes the key. A change is appended at once, on the event loop, so it stands in the log
before every row that needs it: a topic before its first message, in the same commit and under the same sync. A caller
who must not be answered before the change is on disk waits for `LogWriter.flushed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow as pa

from timeball.errors import Corrupt, SetupError
from timeball.message import SNAPSHOT_KEY, meta_rows

T = TypeVar("T")


class Change(NamedTuple):
    """Changed values that go into a frame with other rows."""

    rows: pa.RecordBatch
    # Called right after the append: an append that is refused must leave memory as the log is.
    keep: Callable[[], None]


def together(*changes: Change) -> Change:
    """Return changes of several tables as one."""

    def keep() -> None:
        for change in changes:
            change.keep()

    return Change(pa.concat_batches([change.rows for change in changes]), keep)


class Restorable(Protocol):
    """State in memory that follows from the values of one prefix."""

    def restore(self, name: str, value: bytes) -> None:
        """Take a value that the log says, empty when the name is deleted; recovery calls it in log order."""


class MetaLog:
    """Writes META rows, and at a start gives what they say to the tables. Belongs to the event loop.

    `values` is what the log says up to the last row appended: a snapshot is a copy of it.
    """

    def __init__(self) -> None:
        # As the snapshot needs them, which copies them on the event loop and decodes none.
        self.values: dict[str, msgspec.Raw] = {}
        self._tables: dict[str, Restorable] = {}
        # None during recovery: the tables are filled from the log then, and must not write to it.
        self._append: Callable[[pa.RecordBatch], object] | None = None
        self._now_ms: Callable[[], int] = lambda: 0

    def register(self, prefix: str, table: Restorable) -> None:
        """Name the table that keeps the values of a prefix; all are named before recovery begins."""
        self._tables[prefix] = table

    def open(self, append: Callable[[pa.RecordBatch], object], now_ms: Callable[[], int]) -> None:
        """Go from recovery to writing."""
        self._append, self._now_ms = append, now_ms

    def put(self, changes: Iterable[tuple[str, object]]) -> None:
        """Append changed values in one frame, so that all of them are kept or none; None deletes a key."""
        assert self._append is not None, "recovery changes nothing"
        pairs = _encoded(changes)
        if pairs:
            # Appended first: an append that is refused must leave memory as the log is.
            self._append(meta_rows(pairs, self._now_ms()))
            for key, value in pairs:
                self._keep(key, value)

    def changed(self, changes: Iterable[tuple[str, object]]) -> Change:
        """Return changed values for a frame with other rows; None deletes a key."""
        pairs = _encoded(changes)

        def keep() -> None:
            for key, value in pairs:
                self._keep(key, value)

        return Change(meta_rows(pairs, self._now_ms()), keep)

    def restore(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        """Take values that the log says, in log order."""
        for key, value in pairs:
            if key == SNAPSHOT_KEY:
                continue  # it says what the rows before it have said, all of which are known here
            prefix, _, name = key.rpartition("/")  # no name has one
            table = self._tables.get(prefix)
            # Dropping it would lose state for good, as the next snapshot is made of `values`.
            if table is None:
                raise SetupError(f"the log holds state of a newer Timeball ({prefix!r}): use that one")
            self._keep(key, value)
            try:
                table.restore(name, value)
            except msgspec.DecodeError as error:
                raise Corrupt(f"META row of {key!r}: {error}; restore the log from a copy") from error

    def _keep(self, key: str, value: bytes) -> None:
        if value:
            self.values[key] = msgspec.Raw(value)
        else:
            self.values.pop(key, None)


def _encoded(changes: Iterable[tuple[str, object]]) -> list[tuple[str, bytes]]:
    return [(key, b"" if value is None else msgspec.json.encode(value)) for key, value in changes]


class MetaTable(Generic[T]):
    """The decoded values of one prefix, for state that needs no more than to be looked up."""

    def __init__(self, log: MetaLog, prefix: str, kind: type[T]) -> None:
        self._log, self._prefix, self._kind = log, prefix, kind
        self.values: dict[str, T] = {}
        log.register(prefix, self)

    def put(self, changes: Iterable[tuple[str, T | None]]) -> None:
        """Change values, in one frame; None deletes one."""
        listed = list(changes)
        self._log.put((f"{self._prefix}/{name}", value) for name, value in listed)
        # After the append, as in MetaLog: memory never holds what the log refused.
        for name, value in listed:
            self._keep(name, value)

    def changed(self, changes: Iterable[tuple[str, T | None]]) -> Change:
        """Return changed values for a frame with other rows; None deletes one."""
        listed = list(changes)
        rows, keep_encoded = self._log.changed((f"{self._prefix}/{name}", value) for name, value in listed)

        def keep() -> None:
            keep_encoded()
            for name, value in listed:
                self._keep(name, value)

        return Change(rows, keep)

    def restore(self, name: str, value: bytes) -> None:
        """Take a value that the log says."""
        self._keep(name, msgspec.json.decode(value, type=self._kind) if value else None)

    def _keep(self, name: str, value: T | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
