"""Campaigns: what was decided about the promises of one bulk write, in a Delta table beside the pending table.

    event        written                                      number  rows        ranges
    planned      before anything else                         0       valid rows  -
    attached     when the attach is in the broker's log       0       attached    its numbers
    pausing      before the waiting rows are copied           n       -           -
    paused       when they are cancelled                      n       held        the numbers that are held
    resuming     before they are written again                n       -           -
    resumed      when they are attached again                 n       attached    their new numbers
    cancelled    before what waits is cancelled               0       -           -
    ended        when that is done                            0       cancelled   -

The table is append-only and each event is there once: its Delta commit carries a name of its own (an application
transaction), so that a command that is repeated, or runs twice at the same time, writes nothing twice. It says what
was decided, never what happened: that is in the broker's log, and a campaign whose process died between the two is
completed from there (pipeline/jobs/campaign.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from timeball.errors import InvalidMessage, NotFound, StorageError
from timeball.pipeline.table_store import sibling

NAME = "campaigns"
EVENTS = ("planned", "attached", "pausing", "paused", "resuming", "resumed", "cancelled", "ended")
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = ("spark-compact", "broker", "broker-rewrite", "broker-behind")  # jobs of pipeline and broker
WRITE_TRIES = 20

SCHEMA = pa.schema(
    [
        ("campaign", pa.string()),
        ("event", pa.string()),
        ("number", pa.int32()),
        ("at_ms", pa.int64()),
        ("log_seq", pa.int64()),  # end of the log then: what the event brings about comes behind it
        ("rows", pa.int64()),
        ("ranges", pa.string()),  # JSON: [[first_seq, rows], …]
        ("detail", pa.string()),  # JSON
    ]
)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    campaign: str
    event: str
    number: int = 0
    at_ms: int
    log_seq: int
    rows: int = 0
    ranges: list[tuple[int, int]] = []
    detail: dict[str, object] = {}

    @property
    def app_id(self) -> str:
        """Return what makes it unique in the table."""
        return f"{self.campaign}/{self.event}-{self.number}"


def check_id(campaign: str) -> str:
    """Return the id; InvalidMessage when it cannot name a folder and a job in the broker's log."""
    if not ID.fullmatch(campaign) or campaign in RESERVED:
        raise InvalidMessage(
            f"campaign {campaign!r}: letters, digits, dots, dashes and underscores, at most 100, and none of "
            + ", ".join(RESERVED)
        )
    return campaign


class Campaigns:
    """The table at `<beside the pending table>/campaigns`; made by the first event."""

    def __init__(self, table_uri: str) -> None:
        self.uri = sibling(table_uri, NAME)

    def record(self, event: Event) -> None:
        """Append an event; nothing happens when it is there already."""
        assert event.event in EVENTS
        try:
            for _ in range(WRITE_TRIES):
                table = self._open() or self._create()
                if table is None:
                    continue
                if table.transaction_version(event.app_id) is not None or _appended(table, event):
                    return
        except (DeltaError, OSError) as error:
            raise StorageError(f"cannot write to the campaigns at {self.uri}: {error}") from error
        raise StorageError(f"cannot write to the campaigns at {self.uri}: others write all the time")

    def events(self, campaign: str | None = None) -> list[Event]:
        """Read all events (of one campaign), oldest first; none when there is no table yet."""
        table = self._open()
        if table is None:
            return []
        try:
            rows = [row for uri in table.file_uris() for row in _read(uri)]
        except OSError as error:
            raise StorageError(f"cannot read the campaigns at {self.uri}: {error}") from error
        found = [_event(row) for row in rows if campaign in (None, row["campaign"])]
        return sorted(found, key=lambda e: (e.log_seq, e.at_ms, e.number, EVENTS.index(e.event)))

    def of(self, campaign: str) -> list[Event]:
        """Read the events of a campaign; NotFound when it has none."""
        found = self.events(campaign)
        if not found:
            raise NotFound(f"no campaign {campaign!r}; `timeball campaign list` shows those there are")
        return found

    def _create(self) -> DeltaTable | None:
        """Create the table; None when another process creates it at this moment."""
        try:
            return DeltaTable.create(
                self.uri, SCHEMA, mode="ignore", name=NAME, description="What was decided about bulk writes"
            )
        except CommitFailedError:
            return None

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise StorageError(f"cannot read the campaigns at {self.uri}: {error}") from error


def _appended(table: DeltaTable, event: Event) -> bool:
    """Append the event; False when another writer committed since `table` was opened."""
    row = msgspec.structs.asdict(event)
    for name in ("ranges", "detail"):
        row[name] = msgspec.json.encode(row[name]).decode()
    properties = CommitProperties(app_transactions=[Transaction(event.app_id, 1)])
    try:
        write_deltalake(
            table, pa.Table.from_pylist([row], SCHEMA), mode="append", commit_properties=properties
        )
    except CommitFailedError:
        return False
    return True


def _read(uri: str) -> list[dict[str, Any]]:
    # Not through Delta's own reader: its file system is called from Arrow's threads into Python, and one that is
    # still at it when a command ends aborts the process.
    files, path = fs.FileSystem.from_uri(uri if "://" in uri else Path(uri).absolute().as_uri())
    with files.open_input_file(path) as source:
        rows: list[dict[str, Any]] = pq.ParquetFile(source).read(use_threads=False).to_pylist()
    return rows


def _event(row: dict[str, Any]) -> Event:
    parsed = {name: msgspec.json.decode(row[name]) for name in ("ranges", "detail")}
    parsed["ranges"] = [(first_seq, rows) for first_seq, rows in parsed["ranges"]]
    return Event(**{**row, **parsed})


def last(events: Sequence[Event], *names: str, number: int | None = None) -> Event | None:
    """Return the newest event with one of these names (and this number)."""
    found = [e for e in events if e.event in names and number in (None, e.number)]
    return found[-1] if found else None


def held(events: Sequence[Event]) -> dict[str, int]:
    """Return how many promises each paused campaign holds; these wait nowhere until it is resumed."""
    found: dict[str, int] = {}
    for campaign in sorted({event.campaign for event in events}):
        own = [event for event in events if event.campaign == campaign]
        newest, paused = last(own, "pausing", "paused", "resuming", "resumed"), last(own, "paused")
        if newest and paused and newest.event in ("paused", "resuming") and not last(own, "cancelled"):
            found[campaign] = paused.rows
    return found
