"""Which version of the pending table belongs to which end of the log: a status and a table that say the same.

The Delta commit follows its TABLE row by milliseconds, and carries that row's number. So a status is asked for again
until its table has caught up; and an older version is what waited when it was made: its TABLE row is the end of
the log then.
"""

from __future__ import annotations

import threading

import msgspec
from deltalake import DeltaTable

from timeball.errors import NotFound, SetupError, Unavailable
from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint, Status
from timeball.pipeline.table_store import open_table
from timeball.table import attachment as att

_TABLE_APP_ID = "timeball"  # the broker's mark in its Delta table: the TABLE row a version stands for
_TRIES = 50
_PAUSE_S = 0.1


def open_version(uri: str, version: int) -> DeltaTable:
    """One version of the table; NotFound, or SetupError when the table is out of reach."""
    try:
        return open_table(uri, version)
    except NotFound as error:
        if str(error).startswith("no version"):
            raise
        raise SetupError(
            f"cannot read the pending table at {uri}: run this where the broker's data folder is"
        ) from error


def settled_status(broker: Endpoint, table_uri: str | None = None) -> Status:
    """A status whose table version has all that its log has attached."""
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
    """The TABLE row that a version of the pending table stands for; 0 for the empty table."""
    mark = None if version == 0 else open_version(uri, version).transaction_version(_TABLE_APP_ID)
    return int(mark or 0)


def status_of_version(broker: Endpoint, now: Status, uri: str, version: int) -> tuple[Status, bool]:
    """What `status` would have said when an older version was made, and whether the log still has its whole tail."""
    if not 0 <= version <= now.table.version:
        raise NotFound(f"no version {version} of the pending table: there are 0 to {now.table.version}")
    mark = attach_mark(uri, version)
    first = now.log.first_seq
    end = mark + 1
    watermark, made_ms = None, None
    batches = broker.read_log(first, end, [Kind.TABLE], columns=["body", "store_ms"])
    for batch in batches if first < end else ():
        for row in batch.to_pylist():  # one for each change of the table
            change = att.decode_change(row["body"])
            if isinstance(change, att.Attachment):
                made_ms = row["store_ms"]
                watermark = change.to_seq if change.job == "compact" else watermark
    if made_ms is None:
        made_ms = 0 if version == 0 else _commit_ms(uri, version)
    then = replace_status(now, version=version, end_seq=end, watermark=watermark or first, now_ms=made_ms)
    return then, watermark is not None or first == 1


def _is_attach(body: bytes) -> bool:
    return isinstance(att.decode_change(body), att.Attachment)


def replace_status(status: Status, *, version: int, end_seq: int, watermark: int, now_ms: int) -> Status:
    """`status` with another end of the log."""
    return msgspec.structs.replace(
        status,
        now_ms=now_ms,
        watermark=watermark,
        log=msgspec.structs.replace(status.log, durable_seq=end_seq, next_seq=end_seq),
        table=msgspec.structs.replace(status.table, version=version),
    )


def _commit_ms(uri: str, version: int) -> int:
    return int(open_version(uri, version).history(1)[0]["timestamp"])
