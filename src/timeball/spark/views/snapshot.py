"""Snapshots of the pending messages: one version of the table, and the end of the log that belongs to it.

As of one `status` of the broker, a scheduled message is pending if it is stored in one of these places, and if no
RELEASE or CANCEL row of the kept log settles it:

    table   a row of the pending table, at the version of that status, due at settled_before_ms or later
    tail    a SCHEDULED row of the log from the watermark on, or the newest MOVED row of the scheduled message
    level   a SCHEDULED row with a queue position, anywhere in the kept log: it stays there until it is settled

The rule itself is SQL (view_sql.py). This module determines the rows to which it applies. The version and the end of
the log come from the same status, so a compaction at the same time neither hides a scheduled message nor counts it
twice. A commit in the Delta log follows some milliseconds after its TABLE row in the broker's log, and contains the
number of that row. `status_with_all_attaches` waits until the table contains all attaches of the log.

A snapshot of an older version has the messages that were pending when the version was made. Its TABLE row is the end of
the log, and messages that were due by then do not count as pending. An `upcoming` snapshot applies the same rule to
now: messages that are due after the broker's current time cannot be released yet. So only CANCEL rows are read, which
saves reading the RELEASE rows of days.

A cancelled scheduled message remains in the table for a while, maybe longer than retention keeps its CANCEL row. The
ledger, if there is one, still has the cancel. Without a ledger such a scheduled message counts as pending again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
from deltalake import DeltaTable
from msgspec import UNSET, UnsetType

from timeball.model.answers import Status
from timeball.model.errors import NotFound, OutOfRange, RequestError, Unavailable
from timeball.model.message import Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.log_events import LEDGER_APP_ID
from timeball.spark.table_store import app_version, created_at_ms, default_table_uri, open_table, open_version
from timeball.spark.views.broker_state import effective_selections
from timeball.table import attachment as att

# Application id of the broker's mark in its Delta table. The mark is the number of the TABLE row that made the version.
_TABLE_APP_ID = "timeball"
_TRIES = 50
_PAUSE_S = 0.1  # between two tries


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a query saw: versions of the tables, and the end of the log."""

    now_ms: int
    table: int | None = None
    log_end: int | None = None
    ledger: int | None = None  # None if the query did not read it
    archive: int | None = None  # None if the query did not read it
    # False for an older version if retention has removed some of the messages that were pending then.
    is_whole: bool = True
    # With several groups: the version of each group, which has its own table and log. Then `table`, `log_end`, `ledger`
    # and `archive` of the whole are None.
    groups: dict[str, Version] | UnsetType = UNSET


def all_versions(groups: dict[str, Version]) -> Version:
    """Combine the versions of all groups into one."""
    if len(groups) == 1:
        [only] = groups.values()
        return only
    return Version(
        now_ms=min(version.now_ms for version in groups.values()),
        is_whole=all(version.is_whole for version in groups.values()),
        groups=groups,
    )


def check_version(version: int | None, groups: int) -> None:
    """Raise RequestError for a version number in a read of several groups, because each group has its own.

    `groups`: the number of groups.
    """
    if version is not None and groups > 1:
        raise RequestError(
            f"version {version}: each of the {groups} groups has its own; pin the endpoint to one of them: "
            "grpc://host:port#g1"
        )


class HeldRange(NamedTuple):
    """A paused campaign holds back the rows first_seq <= seq < end_seq that are due at `due_from_ms` or later."""

    first_seq: int
    end_seq: int
    due_from_ms: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The bounds of one version. Rows first_seq <= seq < end_seq of the log belong to it."""

    uri: str
    ledger_uri: str
    archive_uri: str
    now_ms: int
    version: int
    first_seq: int
    end_seq: int
    watermark: int  # the tail begins at this row
    due_from_ms: int  # messages due earlier do not belong to the snapshot, except those of delay levels
    only_cancels: bool = False  # no message of the snapshot can be released yet, so RELEASE rows are not read
    upcoming: bool = False  # only messages with a due time to come: not those that a bulk operation holds
    is_whole: bool = True
    held: tuple[HeldRange, ...] = ()  # the rows that paused campaigns hold back now. Empty for older versions
    selections: bytes = b""  # the bulk operations that may cover pending messages (broker_state.py)

    @classmethod
    def pin(
        cls,
        broker: Endpoint,
        *,
        version: int | None = None,
        upcoming: bool = False,
        table_uri: str | None = None,
    ) -> Snapshot:
        """Take a snapshot of the messages that are pending now.

        `version`: of the messages that were pending, and not due yet, when this version of the table was made.
        `upcoming`: without messages that are due at the time of the snapshot, and without those that a bulk operation
        holds. `table_uri`: the table's URI for this process, if it differs from the broker's. Raises NotFound for a
        version that does not exist, SetupError if this process cannot reach the table, and Unavailable if the table
        lags behind the log.
        """
        status = status_with_all_attaches(broker, table_uri)
        uri = table_uri or status.table.uri
        if version is not None:  # the newest, too: a version number must always give the same snapshot
            then, is_whole = status_of_version(broker, status, uri, version)
            shot = cls.of(then, uri, then.now_ms + 1, only_cancels=True, is_whole=is_whole)
        else:
            due_from_ms = status.now_ms + 1 if upcoming else status.settled_before_ms
            shot = replace(
                cls.of(status, uri, due_from_ms, only_cancels=upcoming), held=paused_ranges(broker)
            )
        # Read after the status, so that no selection before the end of the snapshot is missing.
        selections = effective_selections(
            broker.selections(), shot.end_seq, shot.due_from_ms, is_now=version is None
        )
        return replace(shot, selections=selections, upcoming=upcoming)

    @classmethod
    def of(
        cls, status: Status, uri: str, due_from_ms: int, *, only_cancels: bool = False, is_whole: bool = True
    ) -> Snapshot:
        """Build the snapshot of one status. The arguments are fields of Snapshot."""
        return cls(
            uri=uri,
            ledger_uri=default_table_uri("ledger", uri, status),
            archive_uri=default_table_uri("archive", uri, status),
            now_ms=status.now_ms,
            version=status.table.version,
            first_seq=status.log.first_seq,
            end_seq=status.log.durable_seq,
            watermark=status.watermark,
            due_from_ms=due_from_ms,
            only_cancels=only_cancels,
            is_whole=is_whole,
        )

    def log_range(self, from_seq: int = 0) -> tuple[int, int]:
        """Compute the snapshot's rows of the kept log from `from_seq` on, as (begin, end): begin <= seq < end."""
        # An older version may end before the kept log begins.
        end = max(self.end_seq, self.first_seq)
        return min(max(from_seq, self.first_seq), end), end

    def describe_version(self) -> Version:
        """Describe the version to the user of a query on this snapshot."""
        return Version(now_ms=self.now_ms, table=self.version, log_end=self.end_seq, is_whole=self.is_whole)

    def open_ledger_or_archive(self, name: Literal["ledger", "archive"]) -> DeltaTable | None:
        """Open the ledger or the archive. Returns None if it does not exist."""
        try:
            return open_table(self.ledger_uri if name == "ledger" else self.archive_uri)
        except NotFound:
            return None

    def fresh_events_range(self, ledger: DeltaTable | None) -> tuple[int, int]:
        """Compute the rows of the log whose events are not in the ledger, as (begin, end): begin <= seq < end.

        Without a ledger, these are all rows of the snapshot in the kept log. Raises OutOfRange if retention has removed
        rows of the snapshot that the ledger does not have.
        """
        if ledger is None:
            return self.log_range()
        mark = app_version(ledger, LEDGER_APP_ID) or 0
        # An older version that ends at the mark needs no row of the log.
        if mark < min(self.first_seq, self.end_seq):
            raise OutOfRange(
                f"the ledger ends at row {mark}, the log begins at {self.first_seq}: events are lost; "
                f"move the ledger at {self.ledger_uri} away to read the events of the log alone"
            )
        return self.log_range(mark)


def paused_ranges(broker: Endpoint) -> tuple[HeldRange, ...]:
    """Read the ranges that paused campaigns hold back."""
    return tuple(
        HeldRange(first_seq, first_seq + rows, campaign.held_from_ms)
        for listed in broker.campaigns()
        if listed.held_from_ms is not None
        for campaign in broker.campaigns(listed.campaign)  # the list has no ranges
        if campaign.held_from_ms is not None  # it may have been resumed meanwhile
        for first_seq, rows in campaign.ranges
    )


# ---- versions and their ends of the log ---------------------------------------------------------------------


def status_with_all_attaches(broker: Endpoint, table_uri: str | None = None) -> Status:
    """Read the broker's status repeatedly, until its table version contains all attaches of its log.

    `table_uri`: the table's URI for this process, if it differs from the broker's. Raises Unavailable after _TRIES
    tries.
    """
    for _ in range(_TRIES):
        status = broker.status()
        begin = max(
            table_row_of_version(table_uri or status.table.uri, status.table.version) + 1,
            status.log.first_seq,
        )
        if begin >= status.log.durable_seq:
            return status
        table_rows = broker.read_log(begin, status.log.durable_seq, [Kind.TABLE], columns=["body"])
        if not any(_is_attach(body) for batch in table_rows for body in batch.column("body").to_pylist()):
            return status
        threading.Event().wait(_PAUSE_S)
    raise Unavailable("the pending table lags behind the broker's log; try again when less is being attached")


def table_row_of_version(uri: str, version: int) -> int:
    """Read the number of the TABLE row that made a version of the pending table. It is 0 for the empty table."""
    mark = None if version == 0 else open_version(uri, version).transaction_version(_TABLE_APP_ID)
    return int(mark or 0)


def status_of_version(broker: Endpoint, current: Status, uri: str, version: int) -> tuple[Status, bool]:
    """Reconstruct the status at the time when an older version was made.

    `current`: the status now. Also returns whether the kept log has the whole tail of that version. Raises NotFound for
    a version that does not exist.
    """
    if not 0 <= version <= current.table.version:
        raise NotFound(f"no version {version} of the pending table: there are 0 to {current.table.version}")
    first, end = current.log.first_seq, table_row_of_version(uri, version) + 1
    watermark, created_ms = None, None
    batches = broker.read_log(first, end, [Kind.TABLE], columns=["body", "store_ms"])
    for batch in batches if first < end else ():
        for row in batch.to_pylist():  # few rows: one per change of the table
            change = att.decode_change(row["body"])
            if isinstance(change, att.Attachment):
                created_ms = row["store_ms"]
                watermark = change.to_seq if change.job == "compact" else watermark
    if created_ms is None:
        created_ms = 0 if version == 0 else created_at_ms(open_version(uri, version))
    status = msgspec.structs.replace(
        current,
        now_ms=created_ms,
        watermark=watermark or first,
        log=msgspec.structs.replace(current.log, durable_seq=end, next_seq=end),
        table=msgspec.structs.replace(current.table, version=version),
    )
    return status, watermark is not None or first == 1


def _is_attach(body: bytes) -> bool:
    return isinstance(att.decode_change(body), att.Attachment)
