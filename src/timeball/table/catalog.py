"""Which files belong to the pending table: a Delta Lake log, kept by delta-rs and made durable by us.

The commit log is the truth and this is a cache of its TABLE rows: each Delta commit carries the sequence number
of the row it stands for as Delta's own application transaction. At each start the broker compares the table with the
files that these rows (and the checkpoint, for those that retention has let go) say live. TABLE rows that the
table has not got, as after a crash, are committed again; a table that differs in any other way is made anew.
Hence the order of an attach:

    1. sync the data files and their folders, and      a row must never name a file that may vanish
       have other replicas do so (log/replication.py)
    2. append the TABLE row to the log, synced        the decision
    3. Delta commit                                    what Spark, DuckDB and Polars see
    4. sync the commit entry                           delta-rs does not; before this, segments stay

delta-rs writes through the operating system, so it works in `Files.external`, and what it wrote is `absorb`ed.
Knowingly imperfect: readers of the Delta table lag the broker by step 3, some milliseconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import pyarrow as pa

from timeball import descriptors, limits
from timeball.descriptors import RESERVE_OF_LIBRARIES
from timeball.errors import Corrupt, DiskFailed
from timeball.message import TABLE_SCHEMA
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import FOLDER, KEYS_FOLDER, PARTITION_COLUMN

if TYPE_CHECKING:
    from deltalake import DeltaTable

logger = logging.getLogger(__name__)

DELTA_LOG = f"{FOLDER}/_delta_log"
CHECKPOINT_EVERY = 100  # Delta commits; a reader then opens the table from one file instead of hundreds


class Folder(Protocol):
    """The folder of a table: of the data folder (`files.Files`), or in an object store (object_store.py)."""

    def make_dir(self, name: str) -> None: ...
    def list_dir(self, name: str) -> list[str]: ...
    def exists(self, name: str) -> bool: ...
    def size(self, name: str) -> int: ...
    def map_readonly(self, name: str) -> pa.Buffer: ...
    def remove(self, name: str) -> None: ...
    def sync_file(self, name: str) -> None: ...
    def sync_dir(self, name: str) -> None: ...
    def external(self, name: str) -> str: ...
    def absorb(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TableState:
    """The table as delta-rs knows it: live files, and the TABLE row its last commit stands for."""

    version: int
    attach_seq: int
    files: list[FileEntry]


class Catalog:
    """The pending table's Delta log. Blocking; belongs to the reader thread."""

    # What says nothing about the table when it is opened: it is raised, and the table is not made anew.
    _says_nothing: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, files: Folder, storage_options: dict[str, str] | None = None) -> None:
        """`storage_options`: as delta-rs wants them for a folder that is in an object store."""
        self._files, self._options = files, storage_options
        self._table: DeltaTable | None = None
        self._version = 0
        self._synced: frozenset[str] = frozenset()
        self._left: dict[str, int] = {}  # files that a commit of this life took out, and when
        self._kept: list[frozenset[str]] = []  # files that are read also when they have left

    @property
    def uri(self) -> str:
        """Return the URI by which readers and writers find the table."""
        return self._files.external(FOLDER)

    @property
    def version(self) -> int:
        """Newest version committed by us."""
        return self._version

    def open(self) -> TableState:
        """Open or create the table; a newest commit that a power cut left unreadable is dropped (step 3 repeats it)."""
        from timeball.table import delta_rs

        self._table = None
        self._files.make_dir(KEYS_FOLDER)
        self._drop_torn_commits()
        try:
            self._table = delta_rs.open_table(self.uri, self._options)
        except delta_rs.DeltaError as error:
            if self._files.list_dir(DELTA_LOG):
                raise Corrupt(f"the pending table cannot be opened: {error}") from error
        if self._table is None:
            self._table = delta_rs.create_table(self.uri, self._options)
            self._make_durable()
        return self.state()

    def state(self) -> TableState:
        """Live files of the newest version."""
        from timeball.table.delta_rs import APP_ID

        table = self._opened()
        self._version = int(table.version())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        entries = [
            FileEntry(
                path=a["path"],
                bucket=a[f"partition.{PARTITION_COLUMN}"],
                rows=a["num_records"],
                size_bytes=a["size_bytes"],
                min_due_ms=a["min.due_ms"],
                max_due_ms=a["max.due_ms"],
                min_seq=a["min.seq"],
                max_seq=a["max.seq"],
            )
            for a in actions
        ]
        return TableState(self._version, table.transaction_version(APP_ID) or 0, entries)

    def check_data(self, live: list[FileEntry]) -> None:
        """Raise Corrupt when a data file is not there, or has another size than its attach says."""
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            size_bytes = self._files.size(name) if self._files.exists(name) else None
            if size_bytes != entry.size_bytes:
                if size_bytes is None:
                    raise Corrupt(
                        f"{name} is missing: restore this file from a copy, or name the object store that it is in "
                        "(--table)"
                    )
                raise Corrupt(
                    f"{name} has {size_bytes} bytes, not {entry.size_bytes}: restore this file from a copy"
                )

    def bring_up(
        self,
        live: list[FileEntry],
        attaches: list[tuple[int, Attachment]],
        attach_seq: int,
        watermark: int,
        now_ms: int,
    ) -> None:
        """Open the table and make it hold `live`, as of the TABLE row `attach_seq`.

        `attaches`: the TABLE rows that it may lack, each of which becomes a version of its own.
        """
        try:
            state = self.open()
            for seq, attachment in attaches:
                if seq > state.attach_seq:
                    here = {entry.path: entry for entry in self.state().files}
                    self.commit(attachment, seq, [here[p] for p in attachment.removes if p in here], now_ms)
            wrong = self._difference(live, attach_seq)
        except self._says_nothing:
            raise
        except Exception as error:
            # A damaged entry makes delta-rs fail in any way. A disk that fails by itself fails the next step too.
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            logger.warning("table made anew from the log folder=%s reason=%s", DELTA_LOG, wrong)
            with self._failing("making the table anew"):
                self._make_anew(live, attach_seq, watermark, now_ms)

    def _difference(self, live: list[FileEntry], attach_seq: int) -> str | None:
        """Return the first thing in which the table is not as it must be."""
        state, table = self.state(), self._opened()
        # An entry that delta-rs wrote, and that a failing disk kept us from seeing, is there all the same.
        self._files.absorb(FOLDER)
        # delta-rs reads a table from a checkpoint alone, and then fails to commit without the entry beside it.
        if not self._files.exists(f"{DELTA_LOG}/{state.version:020d}.json"):
            return f"the entry of version {state.version} is missing"
        if table.metadata().partition_columns != [PARTITION_COLUMN]:
            return f"it is partitioned by {table.metadata().partition_columns}"
        if pa.schema(table.schema()).names != [*TABLE_SCHEMA.names, PARTITION_COLUMN]:
            return "it has other columns"
        if state.attach_seq != attach_seq:
            return f"it stands at the TABLE row {state.attach_seq}, the log at {attach_seq}"
        wanted, found = ({entry.path: entry for entry in entries} for entries in (live, state.files))
        for path in sorted(wanted.keys() | found.keys()):
            if wanted.get(path) != found.get(path):
                return f"it says of {path} {found.get(path)}, the log {wanted.get(path)}"
        # Readers skip files by these too: a file that is said to hold only nulls would not be read.
        counts = pa.table(table.get_add_actions(flatten=True))
        for name in ("null_count.due_ms", "null_count.seq") if live else ():
            if counts[name].to_pylist() != [0] * len(live):
                return f"{name} is not 0 for every file"
        return None

    def _make_anew(self, live: list[FileEntry], attach_seq: int, watermark: int, now_ms: int) -> None:
        self._table, self._synced = None, frozenset()
        for name in self._files.list_dir(DELTA_LOG):
            self._files.remove(f"{DELTA_LOG}/{name}")
        if self._files.exists(DELTA_LOG):
            self._files.sync_dir(DELTA_LOG)
        self.open()
        if attach_seq:
            everything = Attachment(job="rewrite", job_id="anew", epoch=0, files=live, to_seq=watermark)
            self._commit(everything, attach_seq, [], now_ms)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Step 1: make the named files durable; another process may have written them."""
        folders = {f"{FOLDER}/{entry.path.rpartition('/')[0]}" for entry in entries}
        self._files.absorb(FOLDER)
        for entry in entries:
            self._files.sync_file(f"{FOLDER}/{entry.path}")
        for folder in folders:
            self._files.sync_dir(folder)
        if folders:
            self._files.sync_dir(FOLDER)

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Steps 3 and 4; returns the table's new version. Does nothing when the table has this TABLE row already."""
        with self._failing(f"committing the TABLE row {attach_seq}"), descriptors.lent(RESERVE_OF_LIBRARIES):
            return self._commit(attachment, attach_seq, removed, now_ms)

    def _commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        from timeball.table import delta_rs

        table = self._opened()
        table.update_incremental()
        if (table.transaction_version(delta_rs.APP_ID) or 0) >= attach_seq:
            return int(table.version())
        self._files.external(FOLDER)
        delta_rs.commit(table, attachment, attach_seq, removed, now_ms)
        table.update_incremental()
        version = self._version = int(table.version())
        if version % CHECKPOINT_EVERY == 0:
            table.create_checkpoint()
            table.cleanup_metadata()  # entries older than Delta's own log retention (30 days)
        self._make_durable()
        for entry in removed:
            self._left[entry.path] = now_ms
        return version

    @contextmanager
    def keeping(self, paths: Iterable[str]) -> Iterator[None]:
        """Remove none of these files meanwhile, though they leave the table; the event loop's."""
        kept = frozenset(paths)
        self._kept = [*self._kept, kept]  # replaced, not changed: the reader thread may be looking at it
        try:
            yield
        finally:
            self._kept = [each for each in self._kept if each is not kept]

    def remove_left(self, before_ms: int) -> int:
        """Remove files that have left the table before this instant, as far as this life knows; returns how many.

        A rewrite takes files out every minute: `vacuum`, which is for what failed jobs and earlier lives have left,
        counts in hours and goes through the whole folder.
        """
        kept = frozenset().union(*self._kept)
        gone = [path for path, left_ms in self._left.items() if left_ms < before_ms and path not in kept]
        for path in gone:
            self._remove(path)
            del self._left[path]
        return len(gone)

    def vacuum(self, older_than_ms: int) -> int:
        """Remove data files that no version of the last `older_than_ms` names, orphans of failed jobs included."""
        with self._failing("looking for files that no version names"):
            return self._vacuum(max(1, older_than_ms // limits.HOUR_MS))

    def _vacuum(self, hours: int) -> int:
        self._files.external(FOLDER)
        # Full: a sweep of the folder, since files of failed jobs are named by no version. Dry, and removed by us:
        # delta-rs would note it in two entries of its log, which a power cut may tear one without the other.
        named = self._opened().vacuum(
            retention_hours=hours, enforce_retention_duration=False, dry_run=True, full=True
        )
        # It goes on naming what has left the table and is gone since.
        kept = frozenset().union(*self._kept)
        gone = [name for name in named if name not in kept and self._files.exists(f"{FOLDER}/{name}")]
        for name in gone:
            self._remove(name)
        return len(gone)

    def _remove(self, path: str) -> None:
        self._files.remove(f"{FOLDER}/{path}")

    def _opened(self) -> DeltaTable:
        assert self._table is not None, "open() comes first"
        return self._table

    def _make_durable(self) -> None:
        """Sync what delta-rs has written since the last time: new entries of its log."""
        self._files.absorb(FOLDER)
        names = self._files.list_dir(DELTA_LOG)
        for name in names:
            if name not in self._synced or name == "_last_checkpoint":
                self._files.sync_file(f"{DELTA_LOG}/{name}")
        self._files.sync_dir(DELTA_LOG)
        self._files.sync_dir(FOLDER)
        self._synced = frozenset(names)

    def _drop_torn_commits(self) -> None:
        """Remove the newest commit entry if it does not parse: it was being written when the power went.

        An unreadable checkpoint is only a shortcut: without `_last_checkpoint` delta-rs reads the entries.
        """
        names = self._files.list_dir(DELTA_LOG)
        commits = [n for n in names if n.endswith(".json") and n[0].isdigit()]
        gone = [n for n in names if n.endswith(".tmp")]
        if commits and not self._parses(commits[-1]):
            logger.warning("torn Delta commit removed, it is made again from the log file=%s", commits[-1])
            gone.append(commits[-1])
        if "_last_checkpoint" in names and not self._parses("_last_checkpoint"):
            gone.append("_last_checkpoint")
        for name in gone:
            self._files.remove(f"{DELTA_LOG}/{name}")
        if gone:
            self._files.sync_dir(DELTA_LOG)

    def _parses(self, name: str) -> bool:
        text = bytes(self._files.map_readonly(f"{DELTA_LOG}/{name}"))
        try:
            actions = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return False
        if name == "_last_checkpoint":
            return bool(actions)
        # Every commit of ours ends with its application transaction; the first one creates the table instead.
        return any("txn" in action or "metaData" in action for action in actions)

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Give delta-rs's failures our type and the folder's name; its own say neither what failed nor where.

        A full disk is DiskFailed too: the TABLE row is decided, so no caller can be asked to try again later.
        """
        from timeball.table.delta_rs import DeltaError, said

        try:
            yield
        except (OSError, DeltaError) as error:
            failure = f"{DELTA_LOG}: {doing} failed: {said(error)}"
            raise DiskFailed(f"{failure}; mend the disk, then start again") from error
