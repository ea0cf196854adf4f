"""The pending table as the broker uses it: its Delta log, its index of keys, and the cache of an object store.

A table in an object store (compare catalog.py) takes these steps for an attach:

    1. put the data files        replaces the syncs; for files of other writers, the footer is read by a range request
                                 and compared with the file's entry
    2. append the TABLE row      the decision, as for a local table
    3. Delta commit              a put on condition that the entry does not exist: of two writers the store refuses
                                 one, and a commit whose answer was lost is found when it is repeated
    4. -                         not needed: an answered put is durable

A request without an answer raises `Unavailable` and changes nothing in the commit log. The commit log stays the source
of truth: when the store answers again, the table is updated from it.

Two brokers must not share a URI. A table with files that the commit log does not contain is refused. It is not
recreated, because another broker may own it. A start checks this, and so do each attach, before its row, and each check
for commits of others: two brokers may both have opened a table that was empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar
from urllib.parse import unquote

from timeball.io import files
from timeball.io.files import RESERVE_OF_LIBRARIES, Files
from timeball.model.errors import Corrupt, OverLimit, SetupError, Unavailable
from timeball.table.attachment import PATH, Attachment, FileEntry
from timeball.table.catalog import Catalog, is_of_broker
from timeball.table.data_file import DataFiles
from timeball.table.key_index import TableKeys
from timeball.table.object_store import ANSWER_S, FileCache, ObjectStore, RangedFiles

T = TypeVar("T")

# How long a start waits for the store. Overdue messages are late by up to this time.
START_ANSWER_S = 5.0


def open_table(
    uri: str, files: Files, size_bytes_max: int, *, is_known: bool
) -> tuple[Catalog, FileCache | None]:
    """Open the pending table's Delta log. For a table in an object store, also open the local cache of its files.

    `uri`: the object store, or "" for the data folder. `size_bytes_max`: the size limit of the cache. `is_known`: this
    broker has used the table before. It then starts even if the store does not answer within START_ANSWER_S. A new
    table raises SetupError if the store does not answer. An unusable URI raises SetupError, too.
    """
    if not uri:
        return Catalog(files), None
    store, problem = ObjectStore(uri), ""
    try:
        store.check(START_ANSWER_S if is_known else ANSWER_S)
    except Unavailable as error:
        if not is_known:
            raise SetupError(f"--table {store.uri}: {error}") from error
        problem = str(error)
    cache = FileCache(files, store, size_bytes_max, problem)
    return StoredCatalog(store, cache), cache


class StoredCatalog(Catalog):
    """The Delta log in an object store.

    Blocking. All calls come from one thread. This is not the reader thread, because a request may take half a minute to
    fail.
    """

    _errors_without_damage: ClassVar[tuple[type[Exception], ...]] = (
        OverLimit, OSError, Unavailable, SetupError,
    )  # fmt: skip

    def __init__(self, store: ObjectStore, cache: FileCache) -> None:
        super().__init__(store, store.storage_options)
        self._store, self._cache = store, cache
        self._lags_log = True  # True while the Delta log lacks TABLE rows of the commit log

    @property
    def version(self) -> int:
        """See Catalog.

        It is -1 while the table lacks rows of the commit log, because its readers would miss messages.
        """
        return -1 if self._lags_log else self._version

    def check_data(self, live: list[FileEntry]) -> None:
        """Upload live files that are only in the data folder. Raises Corrupt if the store lacks a file, Unavailable.

        A file of a wrong size raises Corrupt, too.
        """
        self._cache.check_answers()  # `open_table` has just sent a request: do not wait for a second time-out
        self._cache.upload_missing(live)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Upload the data files (step 1). Raises SetupError if another broker uses the table, Unavailable."""
        # Before the decision: a file of the commit log must not be in another broker's folder, which may delete it.
        if self._is_reconciled and not self._is_newest_ours():
            self._check_committers()
        self._cache.put(entries)

    def bring_up(
        self,
        live: list[FileEntry],
        attaches: list[tuple[int, Attachment]],
        attach_seq: int,
        watermark: int,
        now_ms: int,
    ) -> None:
        """Open and update the table, as Catalog does.

        Raises SetupError for the table of another broker, Unavailable when the store does not answer.
        """
        bring_up = partial(super().bring_up, live, attaches, attach_seq, watermark, now_ms)

        def check_and_bring_up() -> None:
            with self._translate_errors("opening the table"), files.lent(RESERVE_OF_LIBRARIES):
                self._check_owner(live, attaches)
                bring_up()

        self._ask(check_and_bring_up)
        self._lags_log = False

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """Commit an attach, as Catalog does. Returns the table's version.

        Raises Unavailable if the store does not answer. The call may then be repeated.
        """
        try:
            version = self._ask(partial(super().commit, attachment, attach_seq, removed, now_ms))
        except Unavailable:
            self._lags_log = True
            raise
        self._lags_log = False
        return version

    def vacuum(self, older_than_ms: int) -> int:
        """See Catalog. Raises Unavailable."""
        return self._ask(partial(super().vacuum, older_than_ms))

    def check_foreign_commits(self, now_ms: int) -> None:
        """See Catalog. Raises Unavailable."""
        self._ask(partial(super().check_foreign_commits, now_ms))

    def _restore_missing_files(self) -> list[FileEntry]:
        # A store has no hard links. Removed files are uploaded again from local copies. There are local copies of all
        # files with messages due soon.
        return self._cache.restore_missing(list(self.live_files.live.values()))

    def _ask(self, step: Callable[[], T]) -> T:
        """Run a step on the Delta log, and return its result or raise its error."""
        # No time limit: delta-rs gives up by itself, and no other step may run at the same time. Only a stop of the
        # broker abandons the step.
        return self._store.requests.ask(step, None)

    def _check_owner(self, live: list[FileEntry], attaches: list[tuple[int, Attachment]]) -> None:
        """Raise SetupError if the table has data files that this broker's log has never attached."""
        own_paths = {entry.path for entry in live}
        # The table may lack these attaches, and still have the files that they remove.
        own_paths.update(path for _, attachment in attaches for path in attachment.removes)
        try:
            paths = [entry.path for entry in self.open().files]
        except Corrupt:
            return  # the table is unreadable; `bring_up` recreates it
        # Other programs use another form of file name. `_repair` removes their files from the table.
        if foreign_paths := [path for path in paths if path not in own_paths and PATH.fullmatch(path)]:
            raise self._foreign_table_error(foreign_paths)

    def _check_committers(self) -> None:
        """Raise SetupError if another broker has committed to the table since the last commit of this broker.

        A commit of this broker whose answer was lost adds only files of its own log. Names of files are random, so no
        other broker adds files of these names.
        """
        own_paths = self._committing.union(self.live_files.live)
        added_paths = [
            unquote(action["add"]["path"])
            for _, actions in self._commits(after_version=self._version)
            if is_of_broker(actions)
            for action in actions
            if "add" in action
        ]
        if foreign_paths := [path for path in added_paths if path not in own_paths]:
            raise self._foreign_table_error(foreign_paths)

    def _foreign_table_error(self, foreign_paths: list[str]) -> SetupError:
        """Build the error for a table with files that the commit log does not know."""
        return SetupError(
            f"--table {self.uri}: the table there has {len(foreign_paths)} files that this data folder's log does not "
            f"know, as {foreign_paths[0]}: it is another broker's, or the log was restored from a backup; name an "
            "empty folder"
        )

    def _remove_file(self, path: str) -> None:
        super()._remove_file(path)
        self._cache.forget([path])

    def _make_durable(self) -> None:
        """Do nothing, because an answered put is durable."""

    def _drop_torn_commits(self) -> None:
        """Do nothing, because a put is atomic."""

    @contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        """Convert errors of delta-rs to Unavailable: the step is repeated when the store answers again."""
        from timeball.table.delta_rs import DeltaError, one_line

        try:
            yield
        except (OSError, DeltaError) as error:
            raise Unavailable(f"{self.uri}: {operation} failed: {one_line(error)}; retried later") from error


@dataclass(frozen=True, slots=True)
class PendingTable:
    """The pending table of one broker."""

    catalog: Catalog  # the Delta log: a cache of the live files
    file_keys: TableKeys  # rows of the live files by id, key and number
    cache: FileCache | None = (
        None  # local copies of a table in an object store; None: it is in the data folder
    )

    @property
    def data_files(self) -> DataFiles:
        """The source of any data file, for threads that may wait for an object store."""
        return self.catalog.live_files if self.cache is None else RangedFiles(self.cache)

    @property
    def whole_files(self) -> DataFiles:
        """The source of any data file, for callers that read whole files: a file that is not local is fetched."""
        return self.catalog.live_files if self.cache is None else self.cache

    def status(self) -> dict[str, object]:
        """Build the fields of `TableStatus` (model/answers.py) that this package knows."""
        foreign = self.catalog.foreign
        figures: dict[str, object] = {
            "uri": self.catalog.uri,
            "version": self.catalog.version,
            "foreign_commits": foreign.commits,
            "last_foreign_commit": foreign.last,
            "lost_files": len(foreign.missing),
            "lost_rows": sum(entry.rows for entry in foreign.missing),
        }
        if self.cache is not None:
            figures |= {
                "problem": self.cache.problem,
                "cached_bytes": self.cache.size_bytes,
                "missing_files": self.cache.missing_files,
            }
        return figures

    async def leave_store(self) -> None:
        """Stop using the object store, if there is one. Abandons requests without an answer."""
        if self.cache is not None:
            # Waits for answers that are on their way, at most one second.
            await asyncio.to_thread(self.cache.leave_store)
