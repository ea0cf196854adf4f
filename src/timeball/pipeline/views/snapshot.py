"""Pin one version of what waits: a table version and the end of the log that belongs to it.

As of one `status` of the broker, a promise waits when it lies in one of three places and no RELEASE or CANCEL row of
the kept log names it:

    table   a row of the pending table, at the version of that status, due at settled_before_ms or later
    tail    a PROMISE row of the log from the watermark on, or the newest MOVED row that stands for the promise
    level   a PROMISE row with a place in a queue, anywhere in the kept log: it stays there until it is settled

The rule itself is SQL (view_sql.py); this module says which rows it is applied to. Places and version belong
together, so a compaction in between neither hides a promise nor counts it twice. The Delta commit follows its TABLE
row by milliseconds, and carries that row's number: `settled_status` asks again until the table has caught up.

An older version is what waited when it was made: its TABLE row is the end of the log, and what was due by then was
being delivered. An `upcoming` snapshot takes the same view of now: promises due after the broker's clock cannot have
been released, so only cancels are looked for, which spares reading the releases of days.

A row of the table stays there a while when it is cancelled, maybe longer than retention keeps its CANCEL row; the
ledger, where there is one, remembers it. Without a ledger such a promise counts as waiting again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from deltalake import DeltaTable
from msgspec import UNSET, UnsetType

from timeball.errors import NotFound, RequestError, Unavailable
from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.table_store import beside, open_table, open_version
from timeball.table import attachment as att
from timeball.wire import Status

_TABLE_APP_ID = "timeball"  # the broker's mark in its Delta table: the TABLE row a version stands for
_TRIES = 50
_PAUSE_S = 0.1


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a query saw: of the table, of ledger and archive if they were asked, and of the log its end.

    `is_whole` is False when retention has let go of a part of what waited at an older version. `groups`: of several
    groups the version of each, since each has its own table and log; then the whole has none.
    """

    now_ms: int
    table: int | None = None
    log_end: int | None = None
    ledger: int | None = None
    archive: int | None = None
    is_whole: bool = True
    groups: dict[str, Version] | UnsetType = UNSET


def all_versions(groups: dict[str, Version]) -> Version:
    """Return the version of all groups together."""
    if len(groups) == 1:
        [only] = groups.values()
        return only
    return Version(
        now_ms=min(each.now_ms for each in groups.values()),
        is_whole=all(each.is_whole for each in groups.values()),
        groups=groups,
    )


def check_version(version: int | None, groups: int) -> None:
    """Refuse a version where several groups are read: each has its own."""
    if version is not None and groups > 1:
        raise RequestError(
            f"version {version}: each of the {groups} groups has its own; confine the endpoint to one: grpc://host:port#g1"
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The bounds of one version.

    Rows of the log first_seq <= seq < end_seq count; the tail begins at `watermark`. `due_from_ms`: what was due
    earlier is settled, delay levels aside. `only_cancels`: no promise in it can have been released. `held`: what paused
    campaigns hold now, as (first_seq, end_seq, from_ms); an older version knows of no pause.
    """

    uri: str
    ledger_uri: str
    archive_uri: str
    now_ms: int
    version: int
    first_seq: int
    end_seq: int
    watermark: int
    due_from_ms: int
    only_cancels: bool = False
    is_whole: bool = True
    held: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def pin(
        cls,
        broker: Endpoint,
        *,
        version: int | None = None,
        upcoming: bool = False,
        table_uri: str | None = None,
    ) -> Snapshot:
        """Pin what waits now, or what waited when `version` of the table was made.

        `table_uri`: where this process reaches the table, if not where the broker says. NotFound for a version that
        does not exist, SetupError for a table that is out of reach.
        """
        status = settled_status(broker, table_uri)
        uri = table_uri or status.table.uri
        if version is not None:  # also the newest one: a named version means the same for ever
            then, is_whole = status_of_version(broker, status, uri, version)
            return cls.of(then, uri, then.now_ms + 1, only_cancels=True, is_whole=is_whole)
        due_from_ms = status.now_ms + 1 if upcoming else status.settled_before_ms
        return replace(cls.of(status, uri, due_from_ms, only_cancels=upcoming), held=held_ranges(broker))

    @classmethod
    def of(
        cls, status: Status, uri: str, due_from_ms: int, *, only_cancels: bool = False, is_whole: bool = True
    ) -> Snapshot:
        """Build the snapshot of one status."""
        return cls(
            uri=uri,
            ledger_uri=beside("ledger", uri, status),
            archive_uri=beside("archive", uri, status),
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
        """Return the kept rows of the log from `from_seq` on that count, as begin <= seq < end."""
        # An older version may have been made before the kept log begins.
        end = max(self.end_seq, self.first_seq)
        return min(max(from_seq, self.first_seq), end), end

    def shown(self) -> Version:
        """Return what a query on this snapshot tells its caller."""
        return Version(now_ms=self.now_ms, table=self.version, log_end=self.end_seq, is_whole=self.is_whole)

    def open_beside(self, name: Literal["ledger", "archive"]) -> DeltaTable | None:
        """Open the ledger or the archive; None when there is none."""
        try:
            return open_table(self.ledger_uri if name == "ledger" else self.archive_uri)
        except NotFound:
            return None


def held_ranges(broker: Endpoint) -> tuple[tuple[int, int, int], ...]:
    """Return what paused campaigns hold: numbers first_seq <= seq < end_seq, due at from_ms or later."""
    return tuple(
        (first_seq, first_seq + rows, each.held_from_ms)
        for paused in broker.campaigns()
        if paused.held_from_ms is not None
        for each in broker.campaigns(paused.campaign)
        if each.held_from_ms is not None  # it may have been resumed meanwhile
        for first_seq, rows in each.ranges
    )


# ---- which version belongs to which end of the log ----------------------------------------------------------


def settled_status(broker: Endpoint, table_uri: str | None = None) -> Status:
    """Return a status whose table version has all that its log has attached."""
    for _ in range(_TRIES):
        status = broker.status()
        begin = max(
            attach_mark(table_uri or status.table.uri, status.table.version) + 1, status.log.first_seq
        )
        if begin >= status.log.durable_seq:
            return status
        behind = broker.read_log(begin, status.log.durable_seq, [Kind.TABLE], columns=["body"])
        if not any(_is_attach(body) for batch in behind for body in batch.column("body").to_pylist()):
            return status
        threading.Event().wait(_PAUSE_S)
    raise Unavailable("the pending table lags behind the broker's log; try again when less is being attached")


def attach_mark(uri: str, version: int) -> int:
    """Return the TABLE row that a version of the pending table stands for; 0 for the empty table."""
    mark = None if version == 0 else open_version(uri, version).transaction_version(_TABLE_APP_ID)
    return int(mark or 0)


def status_of_version(broker: Endpoint, now: Status, uri: str, version: int) -> tuple[Status, bool]:
    """Return what `status` would have said when an older version was made, and whether its whole tail is kept."""
    if not 0 <= version <= now.table.version:
        raise NotFound(f"no version {version} of the pending table: there are 0 to {now.table.version}")
    first, end = now.log.first_seq, attach_mark(uri, version) + 1
    watermark, made_ms = None, None
    batches = broker.read_log(first, end, [Kind.TABLE], columns=["body", "store_ms"])
    for batch in batches if first < end else ():
        for row in batch.to_pylist():  # one for each change of the table
            change = att.decode_change(row["body"])
            if isinstance(change, att.Attachment):
                made_ms = row["store_ms"]
                watermark = change.to_seq if change.job == "compact" else watermark
    if made_ms is None:
        made_ms = 0 if version == 0 else int(open_version(uri, version).history(1)[0]["timestamp"])
    then = msgspec.structs.replace(
        now,
        now_ms=made_ms,
        watermark=watermark or first,
        log=msgspec.structs.replace(now.log, durable_seq=end, next_seq=end),
        table=msgspec.structs.replace(now.table, version=version),
    )
    return then, watermark is not None or first == 1


def _is_attach(body: bytes) -> bool:
    return isinstance(att.decode_change(body), att.Attachment)
