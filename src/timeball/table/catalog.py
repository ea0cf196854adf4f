"""The list of the pending table's files: a Delta Lake log, written by delta-rs and made durable here.

The broker's commit log is the source of truth, and the Delta log is a cache of its TABLE rows. Each Delta commit
carries the sequence number of its TABLE row, as Delta's application transaction. At each start the broker compares the
table with the live files according to these rows (and to the checkpoint, for rows that retention has removed). TABLE
rows that the table lacks, for example after a crash, are committed again. A table that differs in any other way is
recreated.

The table is public, so another program may commit to it: OPTIMIZE, VACUUM, DELETE, another schema. These commits do not
affect the messages. `check_foreign_commits` finds them within a second and commits on top: it adds the live files again
and removes all others. Without foreign commits, it only checks two file names: the entry of this version must exist,
and the entry of the next version must not.

An attach has these steps:

    1. sync the data files and their folders, and      a row must never name a file that may vanish
       have other replicas do so (log/disk_thread.py)
    2. append the TABLE row to the log, synced        the decision
    3. Delta commit                                    visible to Spark, DuckDB and Polars
    4. sync the commit entry                           delta-rs does not; before this, segments stay

delta-rs writes through the operating system and not through `Files`. So it works in the folder `Files.external`, and
`Files.absorb` then takes over its files. Known limit: readers of the Delta table see an attach after step 3, some
milliseconds later than the broker.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pyarrow as pa

from timeball.io import files
from timeball.io.files import RESERVE_OF_LIBRARIES, disk_full, full_disk_as_over_limit
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
COMMITS_MAX = 100  # the newest commits among which those of other programs are searched
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
class ForeignCommits:
    """Commits that other programs made to the table since the broker's start, for display."""

    commits: int = 0
    last: str = ""  # the newest commit, such as "OPTIMIZE at version 7"
    missing: tuple[FileEntry, ...] = ()  # live files that are missing on disk


class Catalog:
    """The pending table's Delta log. Blocking. Belongs to the reader thread."""

    # Errors that do not mean that the table is damaged. They are raised instead of recreating the table.
    _errors_without_damage: ClassVar[tuple[type[Exception], ...]] = (OverLimit,)

    def __init__(self, files: Folder, storage_options: dict[str, str] | None = None) -> None:
        """`storage_options`: delta-rs options for a folder in an object store."""
        self._files, self._options = files, storage_options
        self._table: DeltaTable | None = None
        self._version = 0  # of the table: the newest that this broker committed or opened
        # Names of the entries in the Delta log's folder that are durable.
        self._synced_entries: frozenset[str] = frozenset()
        # Path -> time (ms) at which a commit of this run removed the file from the table.
        self._removed_ms: dict[str, int] = {}
        # Files that a reader still needs, even if they leave the table.
        self._protected: list[frozenset[str]] = []
        self.live_files, self.foreign = LiveFiles(files), ForeignCommits()
        # Paths of the files of the commit that has begun. They are in the table if only its answer was lost.
        self._committing: frozenset[str] = frozenset()
        # The newest TABLE row that the table includes, and its watermark. Both are 0 before `bring_up`.
        self._attach_seq = self._watermark = 0
        self._is_reconciled = (
            False  # True once `bring_up` has made the table contain exactly `live_files.live`
        )

    @property
    def uri(self) -> str:
        """The URI of the table for readers and writers."""
        return self._files.external(FOLDER)

    @property
    def version(self) -> int:
        """The newest version that this broker committed."""
        return self._version

    def open(self) -> TableState:
        """Open the table, or create it if there is none. Raises Corrupt if delta-rs cannot open an existing table.

        First deletes the newest entry if a power cut left it incomplete. `bring_up` commits its attach again.
        """
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
        """Read the files and the last TABLE row of the version that delta-rs has loaded. Sets `version` to it."""
        from timeball.table.delta_rs import APP_ID

        table = self._delta_table()
        self._version = int(table.version())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        entries = [
            FileEntry(
                path=action["path"],
                # Files of another program may lack the partition or the bounds.
                bucket=action.get(f"partition.{PARTITION_COLUMN}"),
                rows=action["num_records"],
                size_bytes=action["size_bytes"],
                min_due_ms=action.get("min.due_ms"),
                max_due_ms=action.get("max.due_ms"),
                min_seq=action.get("min.seq"),
                max_seq=action.get("max.seq"),
            )
            for action in actions
        ]
        return TableState(self._version, table.transaction_version(APP_ID) or 0, entries)

    def check_data(self, live: list[FileEntry]) -> None:
        """Set the live files, and check that all of them exist with the right size.

        Restores a missing file from its link. Raises MissingFile for a lost file, Corrupt for a different size.
        """
        self.live_files.live = {entry.path: entry for entry in live}
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            if not self._files.exists(name) and not self.live_files.restore_file(entry.path):
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
        """Open the table and make it contain exactly `live`, the live files after the TABLE row `attach_seq`.

        `attaches`: (sequence number, attach) of the TABLE rows that the table may lack, in the order of the log. Each
        missing attach becomes a separate version. `watermark`: the watermark after these TABLE rows. `now_ms`: the
        time of new commits.

        A table that then differs from the log is repaired. Raises OverLimit while the disk is full, and DiskFailed if
        the repair fails.
        """
        try:
            state = self.open()
            for seq, attachment in attaches:
                if seq > state.attach_seq:
                    table_files = {entry.path: entry for entry in self.state().files}
                    self.commit(
                        attachment,
                        seq,
                        [table_files[path] for path in attachment.removes if path in table_files],
                        now_ms,
                    )
            difference = self._difference(live, attach_seq)
        except self._errors_without_damage:
            raise
        except Exception as error:
            # A damaged entry can make delta-rs fail with any exception. If the disk is the cause, the repair fails too.
            difference = f"{type(error).__name__}: {error}"
        self.live_files.link_only({entry.path: entry for entry in live})
        self._attach_seq, self._watermark, self._is_reconciled = attach_seq, watermark, True
        if difference is not None:
            self._repair(difference, self._foreign_commits(), now_ms)

    # -- another program's commits -----------------------------------------------------------------------------------

    def check_foreign_commits(self, now_ms: int) -> None:
        """Repair the table if another program has committed to it. Does nothing before `bring_up`.

        Updates `foreign.missing`, the live files that are missing on disk. Raises OverLimit while the disk is full,
        and DiskFailed for other failures of delta-rs.
        """
        if self._is_reconciled and not self._is_newest_ours():
            with (
                self._translate_errors("looking at another program's commits"),
                files.lent(RESERVE_OF_LIBRARIES),
            ):
                self._follow_foreign_commits(now_ms)
        elif self.foreign.missing:
            self.restore_missing_live_files()

    def restore_missing_live_files(self) -> None:
        """Restore missing live files. Lists files that cannot be restored in `foreign.missing`, and logs each once."""
        reported = {entry.path for entry in self.foreign.missing}
        missing = self._restore_missing_files()
        self.foreign.missing = tuple(missing)
        for entry in missing:
            if entry.path not in reported:
                logger.error("live data file is missing reason=%s", live_files.missing(entry))

    def _restore_missing_files(self) -> list[FileEntry]:
        """Restore the live files that are missing. Returns the files that cannot be restored."""
        return self.live_files.restore_missing()

    def _is_newest_ours(self) -> bool:
        """Check whether the newest version is the last one that this broker committed."""
        names = (f"{DELTA_LOG}/{version:020d}.json" for version in (self._version, self._version + 1))
        return [self._files.exists(name) for name in names] == [True, False]

    def _follow_foreign_commits(self, now_ms: int) -> None:
        """Compare the table with the log after commits of another program, and repair it if they differ."""
        self._files.absorb(FOLDER)
        self._check_committers()
        commits = self._foreign_commits(after_version=self._version)
        if not commits and self._files.exists(f"{DELTA_LOG}/{self._version + 1:020d}.json"):
            return  # a commit of this broker whose answer was lost; `commit` is repeated and finds it
        try:
            self._delta_table().update_incremental()
            difference = self._difference(list(self.live_files.live.values()), self._attach_seq)
        except self._errors_without_damage:
            raise
        except Exception as error:  # of any type: see bring_up
            difference = f"{type(error).__name__}: {error}"
        if difference is not None:
            self._repair(difference, commits, now_ms)
        else:
            self._log_foreign_commits(commits, "none")
        self.restore_missing_live_files()

    def _check_committers(self) -> None:
        """Check that no other broker has committed to the table. Nothing to do: only one broker has the data folder."""

    def _foreign_commits(self, after_version: int = 0) -> list[tuple[int, str]]:
        """List the commits of other programs after a version, as (version, operation)."""
        commits = []
        for version, actions in self._commits(after_version):
            info = _commit_info(actions) or {}
            if actions and not is_of_broker(actions) and not _is_creation(info):
                commits.append((version, str(info.get("operation", "a commit"))))
        return commits

    def _commits(self, after_version: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the (version, actions) of the commits after a version, among the newest COMMITS_MAX ones.

        The actions of an unreadable entry are empty.
        """
        names = self._files.list_dir(DELTA_LOG)
        for name in [name for name in names if name.endswith(".json") and name[0].isdigit()][-COMMITS_MAX:]:
            version = int(name.removesuffix(".json"))
            if version > after_version:
                yield version, self._read_actions(name) or []

    def _repair(self, difference: str, commits: list[tuple[int, str]], now_ms: int) -> None:
        """Make the table contain exactly the live files. Raises OverLimit and DiskFailed.

        A commit on top of the other program's `commits` keeps the table's history. If there are no such commits, or if
        the table still differs, it is recreated. `difference`: the difference from the commit log, for log lines.
        """
        remaining: str | None = difference
        # Several tries, because the other program may commit again meanwhile.
        for _ in range(COMMIT_TRIES if commits else 0):
            try:
                self._delta_table().update_incremental()
                self._commit_on_top(now_ms)
                remaining = self._difference(list(self.live_files.live.values()), self._attach_seq)
            except self._errors_without_damage:
                raise
            except Exception as error:  # of any type: see bring_up
                self._raise_if_full(error)
                remaining = f"{type(error).__name__}: {error}"
            if remaining is None:
                break
        if remaining is not None:
            logger.warning("table recreated from the log folder=%s reason=%s", DELTA_LOG, remaining)
            with self._translate_errors("recreating the table"):
                self._recreate(list(self.live_files.live.values()), self._attach_seq, self._watermark, now_ms)
        self._log_foreign_commits(commits, difference)

    def _log_foreign_commits(self, commits: list[tuple[int, str]], difference: str) -> None:
        """Log the commits (version, operation) of other programs, and count them for display."""
        if not commits:
            return
        version, operation = commits[-1]
        logger.warning(
            "pending table was changed by another program and follows the log again commits=%s difference=%s",
            ",".join(f"{operation}@{version}" for version, operation in commits), difference,
        )  # fmt: skip
        self.foreign.commits += len(commits)
        self.foreign.last = f"{operation} at version {version}"

    def _commit_on_top(self, now_ms: int) -> None:
        """Commit the difference between the table's files and the live files."""
        from timeball.table import delta_rs

        if self._layout_difference() is not None:
            self._table = delta_rs.replace_table(self.uri, self._options)
        state = self.state()
        table_files = {entry.path: entry for entry in state.files}
        live = self.live_files.live
        added = [entry for path, entry in live.items() if table_files.get(path) != entry]
        removed = [entry for path, entry in table_files.items() if path not in live]
        correction = Attachment(job="rewrite", job_id="log", epoch=0, files=added)
        self._files.external(FOLDER)
        delta_rs.commit(self._delta_table(), correction, self._attach_seq, removed, now_ms)
        self._delta_table().update_incremental()
        self._version = int(self._delta_table().version())
        self._make_durable()
        for entry in removed:
            self._removed_ms[entry.path] = now_ms

    def _difference(self, live: list[FileEntry], attach_seq: int) -> str | None:
        """Describe the first difference between the table and the commit log, or return None if there is none."""
        state, table = self.state(), self._delta_table()
        # If the disk failed meanwhile, delta-rs may have written an entry that `Files` does not know yet.
        self._files.absorb(FOLDER)
        # With a checkpoint, delta-rs opens a table without this entry, but its next commit needs the entry.
        if not self._files.exists(f"{DELTA_LOG}/{state.version:020d}.json"):
            return f"the entry of version {state.version} is missing"
        if difference := self._layout_difference():
            return difference
        if state.attach_seq != attach_seq:
            return f"the table ends at the TABLE row {state.attach_seq}, the log at {attach_seq}"
        expected, actual = ({entry.path: entry for entry in entries} for entries in (live, state.files))
        for path in sorted(expected.keys() | actual.keys()):
            if expected.get(path) != actual.get(path):
                return f"{path}: the table has {actual.get(path)}, the log {expected.get(path)}"
        # Readers also skip files by their null counts: a file whose values are all null would not be read.
        counts = pa.table(table.get_add_actions(flatten=True))
        for name in ("null_count.due_ms", "null_count.seq") if live else ():
            if counts[name].to_pylist() != [0] * len(live):
                return f"{name} is not 0 for every file"
        return None

    def _layout_difference(self) -> str | None:
        """Describe the first difference between the table and its required partitioning, columns and protocol.

        Returns None if there is no difference.
        """
        table = self._delta_table()
        if table.metadata().partition_columns != [PARTITION_COLUMN]:
            return f"it is partitioned by {table.metadata().partition_columns}"
        if pa.schema(table.schema()).names != [*TABLE_SCHEMA.names, PARTITION_COLUMN]:
            return "it has different columns"
        protocol = table.protocol()
        if (versions := (protocol.min_reader_version, protocol.min_writer_version)) != (1, 2):
            return f"it requires the reader and writer versions {versions}"
        if table.metadata().configuration.get("delta.appendOnly") == "true":
            return "it is append-only"
        return None

    def _recreate(self, live: list[FileEntry], attach_seq: int, watermark: int, now_ms: int) -> None:
        """Delete the Delta log, and create the table again with all live files in a single commit."""
        from timeball.table.delta_rs import RECREATED_JOB_ID

        self._table, self._synced_entries = None, frozenset()
        for name in self._files.list_dir(DELTA_LOG):
            self._files.remove(f"{DELTA_LOG}/{name}")
        if self._files.exists(DELTA_LOG):
            self._files.sync_dir(DELTA_LOG)
        self.open()
        if attach_seq:
            attachment = Attachment(
                job="rewrite", job_id=RECREATED_JOB_ID, epoch=0, files=live, to_seq=watermark
            )
            self._commit(attachment, attach_seq, [], now_ms)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Sync these data files, which another process may have written, and their folders (step 1).

        If the disk is full, raises OverLimit and deletes the files. No attach may name them any more.
        """
        folders = {f"{FOLDER}/{entry.path.rpartition('/')[0]}" for entry in entries}
        self._files.absorb(FOLDER)
        try:
            with full_disk_as_over_limit("syncing data files"):
                for entry in entries:
                    self._files.sync_file(f"{FOLDER}/{entry.path}")
        except OverLimit:
            # After a failed sync the bytes may be lost, although a second sync would succeed.
            for entry in entries:
                self._files.remove(f"{FOLDER}/{entry.path}")
            raise
        for folder in folders:
            self._files.sync_dir(folder)
        if folders:
            self._files.sync_dir(FOLDER)
        self.live_files.link_files(entries)

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Commit an attach to the Delta log and make it durable (steps 3 and 4). Returns the table's version.

        `attach_seq`: the number of its TABLE row. Commits nothing if the table already includes this row. `removed`:
        the entries of the paths `attachment.removes`. Raises OverLimit while the disk is full, else DiskFailed.
        """
        with (
            self._translate_errors(f"committing the TABLE row {attach_seq}"),
            files.lent(RESERVE_OF_LIBRARIES),
        ):
            return self._commit(attachment, attach_seq, removed, now_ms)

    def _commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Commit an attach, as `commit` does, but raise the errors of delta-rs."""
        from timeball.table import delta_rs

        self._committing = frozenset(entry.path for entry in attachment.files)
        if self._is_reconciled and not self._is_newest_ours():
            self._follow_foreign_commits(now_ms)
        table = self._delta_table()
        table.update_incremental()
        if self._is_reconciled and table.version() != self._version:
            self._check_committers()  # for a commit that came after `_is_newest_ours`
        if (table.transaction_version(delta_rs.APP_ID) or 0) >= attach_seq and self._is_committed(attachment):
            self._make_durable()  # the last try may have failed between the commit and its sync
            self._record_commit(attachment, attach_seq, removed, now_ms)
            return int(table.version())
        # A foreign VACUUM may have removed files that no version names yet.
        self.live_files.restore_files(attachment.files)
        self._files.external(FOLDER)
        delta_rs.commit(table, attachment, attach_seq, removed, now_ms)
        table.update_incremental()
        version = self._version = int(table.version())
        if version % CHECKPOINT_EVERY == 0:
            table.create_checkpoint()
            table.cleanup_metadata()  # removes entries older than Delta's log retention (30 days)
        self._make_durable()
        self._record_commit(attachment, attach_seq, removed, now_ms)
        return version

    def _is_committed(self, attachment: Attachment) -> bool:
        """Check whether the table has the files of an attach.

        The number of its TABLE row proves nothing, because another broker's log may have a TABLE row of this number.
        """
        return not attachment.files or self._committing <= {entry.path for entry in self.state().files}

    def _record_commit(
        self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int
    ) -> None:
        """Update the live files, the last TABLE row and the watermark in memory after a commit."""
        self._committing = frozenset()
        for entry in removed:
            self._removed_ms[entry.path] = now_ms
        if self._is_reconciled and attach_seq > self._attach_seq:
            live = dict(self.live_files.live)
            apply_to(live, attachment)
            self.live_files.live, self._attach_seq = live, attach_seq
            self._watermark = max(self._watermark, attachment.to_seq)

    @contextmanager
    def keeping(self, paths: Iterable[str]) -> Iterator[None]:
        """Protect these files from removal during the block, even if they leave the table. Called on the event loop."""
        protected = frozenset(paths)
        # A new list, because the reader thread may be iterating over the old one.
        self._protected = [*self._protected, protected]
        try:
            yield
        finally:
            self._protected = [other for other in self._protected if other is not protected]

    def delete_removed_files(self, before_ms: int) -> int:
        """Delete files that commits of this run removed from the table before this time. Returns their number.

        Rewrites remove files from the table every minute, so this must be cheap. `vacuum` also deletes the files of
        failed jobs and earlier runs. But its age limit is in hours, and it scans the whole folder.
        """
        protected = frozenset().union(*self._protected)
        removed = [
            path
            for path, removed_ms in self._removed_ms.items()
            if removed_ms < before_ms and path not in protected
        ]
        for path in removed:
            self._remove_file(path)
            del self._removed_ms[path]
        return len(removed)

    def vacuum(self, older_than_ms: int) -> int:
        """Delete data files that no version of the last `older_than_ms` names, among them files of failed jobs.

        The age is rounded down to hours, but at least one hour. Returns the number of files. Raises OverLimit while
        the disk is full, else DiskFailed.
        """
        with self._translate_errors("looking for files that no version names"):
            return self._vacuum(max(1, older_than_ms // limits.HOUR_MS))

    def _vacuum(self, hours: int) -> int:
        """Delete unused files, as `vacuum` does, but raise the errors of delta-rs."""
        self._files.external(FOLDER)
        # `full` scans the folder, because no version names the files of failed jobs. delta-rs only lists the files (a
        # dry run), because it would record a vacuum in two entries of its log, and a power cut could separate the two.
        candidates = self._delta_table().vacuum(
            retention_hours=hours, enforce_retention_duration=False, dry_run=True, full=True
        )
        # The list also contains deleted files, and live files that another program took out of the table.
        needed = frozenset(self.live_files.live).union(*self._protected)
        unused = [
            name for name in candidates if name not in needed and self._files.exists(f"{FOLDER}/{name}")
        ]
        for name in unused:
            self._remove_file(name)
        return len(unused)

    def _remove_file(self, path: str) -> None:
        live_files.remove(self._files, path)

    def _delta_table(self) -> DeltaTable:
        assert self._table is not None, "open() comes first"
        return self._table

    def _make_durable(self) -> None:
        """Sync the entries that delta-rs has added to the Delta log since the last call (step 4)."""
        self._files.absorb(FOLDER)
        names = self._files.list_dir(DELTA_LOG)
        for name in names:
            # Another program writes an entry under a temporary name with "#" until it is complete. It may also delete
            # old entries meanwhile.
            if (name not in self._synced_entries and "#" not in name) or name == "_last_checkpoint":
                with suppress(NotFound):
                    self._files.sync_file(f"{DELTA_LOG}/{name}")
        self._files.sync_dir(DELTA_LOG)
        self._files.sync_dir(FOLDER)
        self._synced_entries = frozenset(names)

    def _drop_torn_commits(self) -> None:
        """Delete the newest commit entry if it is incomplete, because a power cut interrupted its writing.

        Also deletes temporary files, and an unreadable `_last_checkpoint`, which only saves delta-rs time.
        """
        names = self._files.list_dir(DELTA_LOG)
        commits = [n for n in names if n.endswith(".json") and n[0].isdigit()]
        useless = [n for n in names if n.endswith(".tmp") or "#" in n]
        if commits and not self._is_complete(commits[-1]):
            logger.warning("torn Delta commit removed, it is repeated from the log file=%s", commits[-1])
            useless.append(commits[-1])
        if "_last_checkpoint" in names and not self._is_complete("_last_checkpoint"):
            useless.append("_last_checkpoint")
        for name in useless:
            self._files.remove(f"{DELTA_LOG}/{name}")
        if useless:
            self._files.sync_dir(DELTA_LOG)

    def _is_complete(self, name: str) -> bool:
        """Check whether an entry of the Delta log was written completely."""
        actions = self._read_actions(name)
        if not actions or name == "_last_checkpoint":
            return bool(actions)
        # Each commit of this broker ends with an application transaction or, if it creates the table, contains the
        # schema. A commit of another program counts as complete if it parses. If it is truncated, the table differs
        # from the commit log anyway and is repaired.
        info = _commit_info(actions)
        if info is not None and not is_of_broker(actions) and not _is_creation(info):
            return True
        return any("txn" in action or "metaData" in action for action in actions)

    def _read_actions(self, name: str) -> list[dict[str, Any]] | None:
        """Read the actions of an entry of the Delta log. Returns None when it does not parse."""
        text = bytes(self._files.map_readonly(f"{DELTA_LOG}/{name}"))
        try:
            actions = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return None
        return actions if all(isinstance(action, dict) for action in actions) else None

    @contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        """Convert errors of delta-rs to DiskFailed with the operation and the folder, which its messages omit.

        A full disk becomes OverLimit. The TABLE row is in the commit log, so the step is repeated when there is space.
        """
        from timeball.table.delta_rs import DeltaError, one_line

        try:
            yield
        except (OSError, DeltaError) as error:
            self._raise_if_full(error)
            failure = f"{DELTA_LOG}: {operation} failed: {one_line(error)}"
            raise DiskFailed(f"{failure}; repair the disk, then start again") from error

    @staticmethod
    def _raise_if_full(error: Exception) -> None:
        """Raise OverLimit if an error of delta-rs means a full disk."""
        from timeball.table.delta_rs import is_disk_full

        if is_disk_full(error):
            raise disk_full(f"writing {DELTA_LOG}") from error


def is_of_broker(actions: list[dict[str, Any]]) -> bool:
    """Check whether a broker made this commit, and not another program."""
    return "job" in (_commit_info(actions) or {})


def _commit_info(actions: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), None)


def _is_creation(info: dict[str, Any]) -> bool:
    return "CREATE" in str(info.get("operation", ""))
