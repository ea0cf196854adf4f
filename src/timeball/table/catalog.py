"""The list of the pending table's files: a Delta Lake log, written by delta-rs and made durable here.

The commit log is the source of truth, and the Delta log is a cache of its TABLE rows. Each Delta commit carries the
sequence number of its TABLE row, as Delta's application transaction. At each start the broker compares the table with
the live files according to these rows (and to the checkpoint, for rows that retention has removed). TABLE rows that the
table lacks, for example after a crash, are committed again. A table that differs in any other way is recreated.

The table is public, so another program may commit to it: OPTIMIZE, VACUUM, DELETE, another schema. Such a commit does
not affect the messages. `look` finds it within a second and commits on top of it: the live files join again, all others
leave. If there is no such commit, `look` only checks two file names, those of this version and of the next one.

An attach has these steps:

    1. sync the data files and their folders, and      a row must never name a file that may vanish
       have other replicas do so (log/disk_thread.py)
    2. append the TABLE row to the log, synced        the decision
    3. Delta commit                                    visible to Spark, DuckDB and Polars
    4. sync the commit entry                           delta-rs does not; before this, segments stay

delta-rs writes through the operating system, so it works in `Files.external`, and its files are then `absorb`ed. Known
limit: readers of the Delta table lag the broker by step 3, some milliseconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pyarrow as pa

from timeball.io import descriptors
from timeball.io.descriptors import RESERVE_OF_LIBRARIES
from timeball.io.files import disk_full, no_room_to_sync
from timeball.model import limits
from timeball.model.errors import Corrupt, DiskFailed, MissingFile, NotFound, OverLimit
from timeball.model.message import TABLE_SCHEMA
from timeball.table import live_files
from timeball.table.attachment import Attachment, FileEntry, apply_to
from timeball.table.layout import FOLDER, KEYS_FOLDER, PARTITION_COLUMN
from timeball.table.live_files import Linking, LiveFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable

logger = logging.getLogger(__name__)

DELTA_LOG = f"{FOLDER}/_delta_log"
COMMIT_TRIES = 3
COMMITS_MAX = 100  # commits of other programs examined together
CHECKPOINT_EVERY = 100  # Delta commits; a reader then opens the table from one file instead of hundreds


class Folder(Linking, Protocol):
    """The folder of a table, in the data folder (`files.Files`) or in an object store (object_store.py)."""

    def sync_file(self, name: str) -> None: ...
    def external(self, name: str) -> str: ...
    def absorb(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TableState:
    """The table according to delta-rs: its live files, and the TABLE row of its last commit."""

    version: int
    attach_seq: int
    files: list[FileEntry]


@dataclass(slots=True)
class Foreign:
    """Commits of other programs to the table since the start."""

    commits: int = 0
    last: str = ""  # the newest, such as "OPTIMIZE at version 7"
    missing: tuple[FileEntry, ...] = ()  # live files that are missing


class Catalog:
    """The pending table's Delta log. Blocking. Belongs to the reader thread."""

    # Errors that do not prove damage of the table. They are raised, and the table is not recreated.
    _says_nothing: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, files: Folder, storage_options: dict[str, str] | None = None) -> None:
        """`storage_options`: delta-rs options for a folder in an object store."""
        self._files, self._options = files, storage_options
        self._table: DeltaTable | None = None
        self._version = 0
        self._synced: frozenset[str] = frozenset()
        self._left: dict[str, int] = {}  # path -> time (ms) at which a commit of this run removed it
        self._kept: list[frozenset[str]] = []  # files that are still read after they leave
        self.data, self.foreign = LiveFiles(files), Foreign()
        # The newest TABLE row, and the watermark, that the table includes; 0 before `bring_up`.
        self._attach_seq = self._watermark = 0
        self._is_up = False  # whether the table contains exactly `data.live`

    @property
    def uri(self) -> str:
        """The URI of the table for readers and writers."""
        return self._files.external(FOLDER)

    @property
    def version(self) -> int:
        """The newest version that this broker committed."""
        return self._version

    def open(self) -> TableState:
        """Open or create the table. Drops a newest commit that a power cut left unreadable (step 3 repeats it)."""
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
        """Read the live files of the newest version."""
        from timeball.table.delta_rs import APP_ID

        table = self._opened()
        self._version = int(table.version())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        entries = [
            FileEntry(
                path=a["path"],
                # A file of another program may lack some of these.
                bucket=a.get(f"partition.{PARTITION_COLUMN}"),
                rows=a["num_records"],
                size_bytes=a["size_bytes"],
                min_due_ms=a.get("min.due_ms"),
                max_due_ms=a.get("max.due_ms"),
                min_seq=a.get("min.seq"),
                max_seq=a.get("max.seq"),
            )
            for a in actions
        ]
        return TableState(self._version, table.transaction_version(APP_ID) or 0, entries)

    def check_data(self, live: list[FileEntry]) -> None:
        """Raise MissingFile when a data file is missing, Corrupt when its size differs from its attach."""
        self.data.live = {entry.path: entry for entry in live}
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            if not self._files.exists(name) and not self.data.put_back_one(entry.path):
                raise MissingFile(
                    f"{name} is missing: restore this file from a copy, or name the object store that it is in "
                    "(--table)"
                )
            size_bytes = self._files.size(name)
            if size_bytes != entry.size_bytes:
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
        """Open the table and make it contain exactly `live`, the state of the TABLE row `attach_seq`.

        `attaches`: the TABLE rows that it may lack. Each becomes a version of its own.
        """
        try:
            state = self.open()
            for seq, attachment in attaches:
                if seq > state.attach_seq:
                    here = {entry.path: entry for entry in self.state().files}
                    self.commit(attachment, seq, [here[p] for p in attachment.removes if p in here], now_ms)
            wrong = self._difference(live, attach_seq)
        except OverLimit:
            raise
        except self._says_nothing:
            raise
        except Exception as error:
            # A damaged entry can make delta-rs fail in any way. If the disk itself fails, the next step fails too.
            wrong = f"{type(error).__name__}: {error}"
        self.data.keep_only({entry.path: entry for entry in live})
        self._attach_seq, self._watermark, self._is_up = attach_seq, watermark, True
        if wrong is not None:
            self._correct(wrong, self._foreign_commits(), now_ms)

    # -- another program's commits -----------------------------------------------------------------------------------

    def look(self, now_ms: int) -> None:
        """Correct the table if another program has committed to it. Does nothing before `bring_up`.

        `foreign.missing` then contains the live files that are missing. Raises OverLimit while the disk is full.
        """
        if self._is_up and not self._is_ours():
            with (
                self._failing("looking at another program's commits"),
                descriptors.lent(RESERVE_OF_LIBRARIES),
            ):
                self._follow(now_ms)
        elif self.foreign.missing:
            self.look_for_missing()

    def look_for_missing(self) -> None:
        """Restore the names of live files that are missing, and record the files that cannot be restored."""
        known = {entry.path for entry in self.foreign.missing}
        gone = self._put_back()
        self.foreign.missing = tuple(gone)
        for entry in gone:
            if entry.path not in known:
                logger.error("live data file is gone reason=%s", live_files.missing(entry))

    def _put_back(self) -> list[FileEntry]:
        return self.data.put_back()

    def _is_ours(self) -> bool:
        """Check whether the newest version is the one that this broker committed."""
        names = (f"{DELTA_LOG}/{version:020d}.json" for version in (self._version, self._version + 1))
        return [self._files.exists(name) for name in names] == [True, False]

    def _follow(self, now_ms: int) -> None:
        """Correct the table after commits of another program."""
        self._files.absorb(FOLDER)
        found = self._foreign_commits(behind=self._version)
        if not found and self._files.exists(f"{DELTA_LOG}/{self._version + 1:020d}.json"):
            return  # our own commit, whose answer was lost: the repeated commit finds it
        try:
            self._opened().update_incremental()
            wrong = self._difference(list(self.data.live.values()), self._attach_seq)
        except OverLimit:
            raise
        except self._says_nothing:
            raise
        except Exception as error:  # of any kind: see bring_up
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            self._correct(wrong, found, now_ms)
        else:
            self._note(found, "none")
        self.look_for_missing()

    def _foreign_commits(self, behind: int = 0) -> list[tuple[int, str]]:
        """List the newest commits of other programs after a version, with their operations."""
        names = self._files.list_dir(DELTA_LOG)
        found = []
        for name in [name for name in names if name.endswith(".json") and name[0].isdigit()][-COMMITS_MAX:]:
            version = int(name.removesuffix(".json"))
            actions = (self._actions(name) or []) if version > behind else []
            info = _info(actions) or {}
            if actions and "job" not in info and not _creates(info):
                found.append((version, str(info.get("operation", "a commit"))))
        return found

    def _correct(self, wrong: str, found: list[tuple[int, str]], now_ms: int) -> None:
        """Make the table contain the live files: by a commit on top of another program's, else by recreating it."""
        wrong_still: str | None = wrong
        # Repeated if the other program commits again meanwhile.
        for _ in range(COMMIT_TRIES if found else 0):
            try:
                self._opened().update_incremental()
                self._commit_on_top(now_ms)
                wrong_still = self._difference(list(self.data.live.values()), self._attach_seq)
            except OverLimit:
                raise
            except self._says_nothing:
                raise
            except Exception as error:  # of any kind: see bring_up
                self._raise_if_full(error)
                wrong_still = f"{type(error).__name__}: {error}"
            if wrong_still is None:
                break
        if wrong_still is not None:
            logger.warning("table made anew from the log folder=%s reason=%s", DELTA_LOG, wrong_still)
            with self._failing("making the table anew"):
                self._make_anew(list(self.data.live.values()), self._attach_seq, self._watermark, now_ms)
        self._note(found, wrong)

    def _note(self, found: list[tuple[int, str]], wrong: str) -> None:
        if not found:
            return
        version, operation = found[-1]
        logger.warning(
            "another program has changed the pending table, which follows the log again commits=%s difference=%s",
            ",".join(f"{operation}@{version}" for version, operation in found), wrong,
        )  # fmt: skip
        self.foreign.commits += len(found)
        self.foreign.last = f"{operation} at version {version}"

    def _commit_on_top(self, now_ms: int) -> None:
        from timeball.table import delta_rs

        self._table = delta_rs.corrected_layout(
            self.uri, self._options, self._opened(), self._layout_difference()
        )
        state = self.state()
        there = {entry.path: entry for entry in state.files}
        live = self.data.live
        joins = [entry for path, entry in live.items() if there.get(path) != entry]
        leaves = [entry for path, entry in there.items() if path not in live]
        again = Attachment(job="rewrite", job_id="log", epoch=0, files=joins)
        self._files.external(FOLDER)
        delta_rs.commit(self._opened(), again, self._attach_seq, leaves, now_ms)
        self._opened().update_incremental()
        self._version = int(self._opened().version())
        self._make_durable()
        for entry in leaves:
            self._left[entry.path] = now_ms

    def _difference(self, live: list[FileEntry], attach_seq: int) -> str | None:
        """Describe the first difference between the table and its required state, or None if there is none."""
        state, table = self.state(), self._opened()
        # delta-rs may have written an entry that is not visible here yet because the disk failed meanwhile.
        self._files.absorb(FOLDER)
        # delta-rs opens a table from a checkpoint alone, but then cannot commit without the entry of that version.
        if not self._files.exists(f"{DELTA_LOG}/{state.version:020d}.json"):
            return f"the entry of version {state.version} is missing"
        if wrong := self._layout_difference():
            return wrong
        if state.attach_seq != attach_seq:
            return f"it stands at the TABLE row {state.attach_seq}, the log at {attach_seq}"
        wanted, found = ({entry.path: entry for entry in entries} for entries in (live, state.files))
        for path in sorted(wanted.keys() | found.keys()):
            if wanted.get(path) != found.get(path):
                return f"it says of {path} {found.get(path)}, the log {wanted.get(path)}"
        # Readers skip files by these counts too: a file with only nulls according to them would not be read.
        counts = pa.table(table.get_add_actions(flatten=True))
        for name in ("null_count.due_ms", "null_count.seq") if live else ():
            if counts[name].to_pylist() != [0] * len(live):
                return f"{name} is not 0 for every file"
        return None

    def _layout_difference(self) -> str | None:
        """Describe the first difference of the table's schema or writer rules from ours, or None if there is none."""
        table = self._opened()
        if table.metadata().partition_columns != [PARTITION_COLUMN]:
            return f"it is partitioned by {table.metadata().partition_columns}"
        if pa.schema(table.schema()).names != [*TABLE_SCHEMA.names, PARTITION_COLUMN]:
            return "it has other columns"
        protocol = table.protocol()
        if (versions := (protocol.min_reader_version, protocol.min_writer_version)) != (1, 2):
            return f"it asks for reader and writer versions {versions}"
        if table.metadata().configuration.get("delta.appendOnly") == "true":
            return "it is append-only"
        return None

    def _make_anew(self, live: list[FileEntry], attach_seq: int, watermark: int, now_ms: int) -> None:
        from timeball.table.delta_rs import ANEW

        self._table, self._synced = None, frozenset()
        for name in self._files.list_dir(DELTA_LOG):
            self._files.remove(f"{DELTA_LOG}/{name}")
        if self._files.exists(DELTA_LOG):
            self._files.sync_dir(DELTA_LOG)
        self.open()
        if attach_seq:
            everything = Attachment(job="rewrite", job_id=ANEW, epoch=0, files=live, to_seq=watermark)
            self._commit(everything, attach_seq, [], now_ms)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Step 1: make the named files durable. Another process may have written them."""
        folders = {f"{FOLDER}/{entry.path.rpartition('/')[0]}" for entry in entries}
        self._files.absorb(FOLDER)
        try:
            with no_room_to_sync("syncing data files"):
                for entry in entries:
                    self._files.sync_file(f"{FOLDER}/{entry.path}")
        except OverLimit:
            # Their bytes may be lost although a second sync would succeed, so no attach may name these files any more.
            for entry in entries:
                self._files.remove(f"{FOLDER}/{entry.path}")
            raise
        for folder in folders:
            self._files.sync_dir(folder)
        if folders:
            self._files.sync_dir(FOLDER)
        self.data.keep(entries)

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Steps 3 and 4. Returns the new version. Does nothing if the table includes this TABLE row already."""
        with self._failing(f"committing the TABLE row {attach_seq}"), descriptors.lent(RESERVE_OF_LIBRARIES):
            return self._commit(attachment, attach_seq, removed, now_ms)

    def _commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        from timeball.table import delta_rs

        if self._is_up and not self._is_ours():
            self._follow(now_ms)
        table = self._opened()
        table.update_incremental()
        if (table.transaction_version(delta_rs.APP_ID) or 0) >= attach_seq:
            self._make_durable()  # the last try may have failed after the commit
            self._committed(attachment, attach_seq, removed, now_ms)
            return int(table.version())
        self.data.put_back_all(attachment.files)  # VACUUM also removes files that no version names yet
        self._files.external(FOLDER)
        delta_rs.commit(table, attachment, attach_seq, removed, now_ms)
        table.update_incremental()
        version = self._version = int(table.version())
        if version % CHECKPOINT_EVERY == 0:
            table.create_checkpoint()
            table.cleanup_metadata()  # removes entries older than Delta's log retention (30 days)
        self._make_durable()
        self._committed(attachment, attach_seq, removed, now_ms)
        return version

    def _committed(
        self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int
    ) -> None:
        for entry in removed:
            self._left[entry.path] = now_ms
        if self._is_up and attach_seq > self._attach_seq:
            live = dict(self.data.live)
            apply_to(live, attachment)
            self.data.live, self._attach_seq = live, attach_seq
            self._watermark = max(self._watermark, attachment.to_seq)

    @contextmanager
    def keeping(self, paths: Iterable[str]) -> Iterator[None]:
        """Keep these files on disk during the block, even if they leave the table (event loop)."""
        kept = frozenset(paths)
        self._kept = [*self._kept, kept]  # replaced, not changed: the reader thread may be reading it
        try:
            yield
        finally:
            self._kept = [each for each in self._kept if each is not kept]

    def remove_left(self, before_ms: int) -> int:
        """Remove files that left the table before this time in this run of the broker. Returns their number.

        A rewrite removes files every minute. `vacuum` is for files left by failed jobs and earlier runs: its age limit
        is in hours, and it scans the whole folder.
        """
        kept = frozenset().union(*self._kept)
        gone = [path for path, left_ms in self._left.items() if left_ms < before_ms and path not in kept]
        for path in gone:
            self._remove(path)
            del self._left[path]
        return len(gone)

    def vacuum(self, older_than_ms: int) -> int:
        """Remove data files that no version of the last `older_than_ms` names, including those of failed jobs."""
        with self._failing("looking for files that no version names"):
            return self._vacuum(max(1, older_than_ms // limits.HOUR_MS))

    def _vacuum(self, hours: int) -> int:
        self._files.external(FOLDER)
        # `full` scans the folder, because no version names the files of failed jobs. Dry run, and removal here:
        # delta-rs would record a vacuum in two entries of its log, and a power cut could leave one without the other.
        named = self._opened().vacuum(
            retention_hours=hours, enforce_retention_duration=False, dry_run=True, full=True
        )
        # delta-rs also names files that are removed already, and live files that another program took out of the table.
        kept = frozenset(self.data.live).union(*self._kept)
        gone = [name for name in named if name not in kept and self._files.exists(f"{FOLDER}/{name}")]
        for name in gone:
            self._remove(name)
        return len(gone)

    def _remove(self, path: str) -> None:
        live_files.remove(self._files, path)

    def _opened(self) -> DeltaTable:
        assert self._table is not None, "open() comes first"
        return self._table

    def _make_durable(self) -> None:
        """Sync the entries that delta-rs has added to its log since the last call."""
        self._files.absorb(FOLDER)
        names = self._files.list_dir(DELTA_LOG)
        for name in names:
            # An entry that another program is writing has a temporary name until it is whole. It may also be cleaned up
            # meanwhile.
            if (name not in self._synced and "#" not in name) or name == "_last_checkpoint":
                with suppress(NotFound):
                    self._files.sync_file(f"{DELTA_LOG}/{name}")
        self._files.sync_dir(DELTA_LOG)
        self._files.sync_dir(FOLDER)
        self._synced = frozenset(names)

    def _drop_torn_commits(self) -> None:
        """Remove the newest commit entry if it does not parse: a power cut interrupted its writing.

        An unreadable `_last_checkpoint` is removed too. It is only a shortcut: without it delta-rs reads the entries.
        """
        names = self._files.list_dir(DELTA_LOG)
        commits = [n for n in names if n.endswith(".json") and n[0].isdigit()]
        gone = [n for n in names if n.endswith(".tmp") or "#" in n]
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
        actions = self._actions(name)
        if not actions or name == "_last_checkpoint":
            return bool(actions)
        # Every commit of this broker ends with its application transaction, except those that create the table, which
        # contain its schema. A commit of another program counts as whole if it parses: if it is not, the table differs
        # from the log anyway.
        info = _info(actions)
        if info is not None and "job" not in info and not _creates(info):
            return True
        return any("txn" in action or "metaData" in action for action in actions)

    def _actions(self, name: str) -> list[dict[str, Any]] | None:
        """Read the actions of an entry of the Delta log, or None when it does not parse."""
        text = bytes(self._files.map_readonly(f"{DELTA_LOG}/{name}"))
        try:
            actions = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return None
        return actions if all(isinstance(action, dict) for action in actions) else None

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Convert failures of delta-rs to our error type, naming the operation and folder, which its messages omit.

        A full disk becomes OverLimit: the decision is in the log, and is applied again when there is space.
        """
        from timeball.table.delta_rs import DeltaError, said

        try:
            yield
        except (OSError, DeltaError) as error:
            self._raise_if_full(error)
            failure = f"{DELTA_LOG}: {doing} failed: {said(error)}"
            raise DiskFailed(f"{failure}; mend the disk, then start again") from error

    @staticmethod
    def _raise_if_full(error: Exception) -> None:
        from timeball.table.delta_rs import is_disk_full

        if is_disk_full(error):
            raise disk_full(f"writing {DELTA_LOG}") from error


def _info(actions: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), None)


def _creates(info: dict[str, Any]) -> bool:
    return "CREATE" in str(info.get("operation", ""))
