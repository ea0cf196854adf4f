"""Which files belong to the pending table: a Delta Lake log, kept by delta-rs and made durable by us.

The commit log is the truth and this is a cache of its TABLE rows: each Delta commit carries the sequence number
of the row it stands for as Delta's own application transaction. At each start the broker compares the table with the
files that these rows (and the checkpoint, for those that retention has let go) say live. TABLE rows that the
table has not got, as after a crash, are committed again; a table that differs in any other way is made anew.

The table is public, so another program may commit to it: OPTIMIZE, VACUUM, DELETE, another schema. Such a commit
changes nothing about the messages. `look` finds it within a second and commits on top of it: the live files join again,
all others leave. Only the version of a commit is looked for, so a look costs one question about a file name.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pyarrow as pa

from timeball import descriptors, limits
from timeball.descriptors import RESERVE_OF_LIBRARIES
from timeball.errors import Corrupt, DiskFailed, MissingFile, NotFound, OverLimit
from timeball.files import disk_full, no_room_to_sync
from timeball.message import TABLE_SCHEMA
from timeball.table import live_files
from timeball.table.attachment import Attachment, FileEntry, apply_to
from timeball.table.layout import FOLDER, KEYS_FOLDER, PARTITION_COLUMN
from timeball.table.live_files import Linking, LiveFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable

logger = logging.getLogger(__name__)

DELTA_LOG = f"{FOLDER}/_delta_log"
COMMIT_TRIES = 3
COMMITS_MAX = 100  # of other programs, looked at together
CHECKPOINT_EVERY = 100  # Delta commits; a reader then opens the table from one file instead of hundreds


class Folder(Linking, Protocol):
    """The folder of a table: of the data folder (`files.Files`), or in an object store (object_store.py)."""

    def sync_file(self, name: str) -> None: ...
    def external(self, name: str) -> str: ...
    def absorb(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TableState:
    """The table as delta-rs knows it: live files, and the TABLE row its last commit stands for."""

    version: int
    attach_seq: int
    files: list[FileEntry]


@dataclass(slots=True)
class Foreign:
    """Commits of other programs to the table since the start."""

    commits: int = 0
    last: str = ""  # the newest: "OPTIMIZE at version 7"
    missing: tuple[FileEntry, ...] = ()  # live files that are gone


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
        self.data, self.foreign = LiveFiles(files), Foreign()
        # The TABLE row and the watermark that the table stands for; 0: it has not been brought up yet.
        self._attach_seq = self._watermark = 0
        self._is_up = False  # whether the table holds `data.live`

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
                # Of another program's file there may be less.
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
        """Raise Corrupt when a data file is not there, or has another size than its attach says."""
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
        except OverLimit:
            raise
        except self._says_nothing:
            raise
        except Exception as error:
            # A damaged entry makes delta-rs fail in any way. A disk that fails by itself fails the next step too.
            wrong = f"{type(error).__name__}: {error}"
        self.data.keep_only({entry.path: entry for entry in live})
        self._attach_seq, self._watermark, self._is_up = attach_seq, watermark, True
        if wrong is not None:
            self._correct(wrong, self._foreign_commits(), now_ms)

    # -- another program's commits -----------------------------------------------------------------------------------

    def look(self, now_ms: int) -> None:
        """Correct the table when another program has committed to it; until it is brought up there is nothing to do.

        `foreign.missing` then names the live files that are gone. Raises OverLimit while the disk is full.
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
        """Put back the live files that are gone, and note those that cannot be."""
        known = {entry.path for entry in self.foreign.missing}
        gone = self._put_back()
        self.foreign.missing = tuple(gone)
        for entry in gone:
            if entry.path not in known:
                logger.error("live data file is gone reason=%s", live_files.missing(entry))

    def _put_back(self) -> list[FileEntry]:
        return self.data.put_back()

    def _is_ours(self) -> bool:
        """Return whether the newest version is the one that we have committed."""
        names = (f"{DELTA_LOG}/{version:020d}.json" for version in (self._version, self._version + 1))
        return [self._files.exists(name) for name in names] == [True, False]

    def _follow(self, now_ms: int) -> None:
        """Correct the table behind commits of another program."""
        self._files.absorb(FOLDER)
        found = self._foreign_commits(behind=self._version)
        if not found and self._files.exists(f"{DELTA_LOG}/{self._version + 1:020d}.json"):
            return  # ours, whose answer was lost: it is found when the commit is repeated
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
        """Return the newest commits behind a version that are none of ours, and their operations."""
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
        """Let the table hold the live files: in a commit on top of another program's, else by making it anew."""
        wrong_still: str | None = wrong
        # Again, when the other program goes on and commits meanwhile.
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
        """Return the first thing in which the table is not as it must be."""
        state, table = self.state(), self._opened()
        # An entry that delta-rs wrote, and that a failing disk kept us from seeing, is there all the same.
        self._files.absorb(FOLDER)
        # delta-rs reads a table from a checkpoint alone, and then fails to commit without the entry beside it.
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
        # Readers skip files by these too: a file that is said to hold only nulls would not be read.
        counts = pa.table(table.get_add_actions(flatten=True))
        for name in ("null_count.due_ms", "null_count.seq") if live else ():
            if counts[name].to_pylist() != [0] * len(live):
                return f"{name} is not 0 for every file"
        return None

    def _layout_difference(self) -> str | None:
        """Return the first thing in which the table's schema or its rules for writers are not ours."""
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
        """Step 1: make the named files durable; another process may have written them."""
        folders = {f"{FOLDER}/{entry.path.rpartition('/')[0]}" for entry in entries}
        self._files.absorb(FOLDER)
        try:
            with no_room_to_sync("syncing data files"):
                for entry in entries:
                    self._files.sync_file(f"{FOLDER}/{entry.path}")
        except OverLimit:
            # They may be lost, and another sync of them would succeed: no attach may name them any more.
            for entry in entries:
                self._files.remove(f"{FOLDER}/{entry.path}")
            raise
        for folder in folders:
            self._files.sync_dir(folder)
        if folders:
            self._files.sync_dir(FOLDER)
        self.data.keep(entries)

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Steps 3 and 4; returns the table's new version. Does nothing when the table has this TABLE row already."""
        with self._failing(f"committing the TABLE row {attach_seq}"), descriptors.lent(RESERVE_OF_LIBRARIES):
            return self._commit(attachment, attach_seq, removed, now_ms)

    def _commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        from timeball.table import delta_rs

        if self._is_up and not self._is_ours():
            self._follow(now_ms)
        table = self._opened()
        table.update_incremental()
        if (table.transaction_version(delta_rs.APP_ID) or 0) >= attach_seq:
            self._make_durable()  # the last try may have failed behind the commit
            self._committed(attachment, attach_seq, removed, now_ms)
            return int(table.version())
        self.data.put_back_all(attachment.files)  # a VACUUM takes what no version names yet, too
        self._files.external(FOLDER)
        delta_rs.commit(table, attachment, attach_seq, removed, now_ms)
        table.update_incremental()
        version = self._version = int(table.version())
        if version % CHECKPOINT_EVERY == 0:
            table.create_checkpoint()
            table.cleanup_metadata()  # entries older than Delta's own log retention (30 days)
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
        # It goes on naming what has left the table and is gone since. Another program may have let live files leave.
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
        """Sync what delta-rs has written since the last time: new entries of its log."""
        self._files.absorb(FOLDER)
        names = self._files.list_dir(DELTA_LOG)
        for name in names:
            # An entry that another program is writing has another name until it is whole, or may be cleaned up.
            if (name not in self._synced and "#" not in name) or name == "_last_checkpoint":
                with suppress(NotFound):
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
        # Every commit of ours ends with its application transaction; those that create the table have its schema. One
        # of another program is whole if it parses: else it leaves a table that differs from the log, all the same.
        info = _info(actions)
        if info is not None and "job" not in info and not _creates(info):
            return True
        return any("txn" in action or "metaData" in action for action in actions)

    def _actions(self, name: str) -> list[dict[str, Any]] | None:
        """Return the actions of an entry of the Delta log; None when it does not parse."""
        text = bytes(self._files.map_readonly(f"{DELTA_LOG}/{name}"))
        try:
            actions = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return None
        return actions if all(isinstance(action, dict) for action in actions) else None

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Give delta-rs's failures our type and the folder's name; its own say neither what failed nor where.

        A full disk is OverLimit: what the log has decided is tried again once there is room.
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
