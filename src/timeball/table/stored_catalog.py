"""The Delta log of a pending table in an object store, and the steps of an attach there (compare catalog.py).

    1. put the data files        instead of syncs; those of other writers are compared with their claims by range
    2. append the TABLE row      the decision, as for a local table
    3. Delta commit              a put on condition that the entry does not exist: of two writers the store refuses
                                 one, and a commit whose answer was lost is found when it is repeated
    4. -                         not needed: an answered put is durable

A request without an answer raises `Unavailable` and changes nothing in the log. The log stays the source of truth: a
table that is behind it is brought up when the store answers again.

Two brokers must not share a URI. A table with files that the log does not contain is refused, and not recreated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

from timeball.io import descriptors
from timeball.io.descriptors import RESERVE_OF_LIBRARIES
from timeball.io.files import Files
from timeball.model.errors import Corrupt, SetupError, Unavailable
from timeball.table.attachment import PATH, Attachment, FileEntry
from timeball.table.catalog import Catalog
from timeball.table.file_cache import FileCache
from timeball.table.object_store import ANSWER_S, ObjectStore

T = TypeVar("T")

# Seconds. Overdue messages are late by up to this time.
START_ANSWER_S = 5.0


def open_table(
    place: str, files: Files, size_bytes_max: int, *, is_known: bool
) -> tuple[Catalog, FileCache | None]:
    """Open the pending table's Delta log at a URI, and, for an object store, the cache of its files.

    Raises SetupError for a URI that cannot be used. If the store does not answer, this is a SetupError only when the
    table is not known (`is_known`): a broker that has used the table before starts without it, after at most
    START_ANSWER_S.
    """
    if not place:
        return Catalog(files), None
    store, problem = ObjectStore(place), ""
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

    Blocking. Belongs to one thread, but not to the reader thread, because a store may take half a minute to fail.
    """

    _says_nothing: ClassVar[tuple[type[Exception], ...]] = (OSError, Unavailable, SetupError)

    def __init__(self, store: ObjectStore, cache: FileCache) -> None:
        super().__init__(store, store.storage_options)
        self._store, self._cache = store, cache
        self._is_behind = True  # true until it is brought up to the log

    @property
    def version(self) -> int:
        """See Catalog. It is -1 while the table is behind the log, because its readers would miss messages."""
        return -1 if self._is_behind else self._version

    def check_data(self, live: list[FileEntry]) -> None:
        """Raise Corrupt when the store lacks a data file. A file that is only in the data folder is put there."""
        self._cache.check_answers()  # the start has sent a request just before
        self._cache.bring(live)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Step 1: put the data files."""
        self._cache.put(entries)

    def bring_up(
        self,
        live: list[FileEntry],
        attaches: list[tuple[int, Attachment]],
        attach_seq: int,
        watermark: int,
        now_ms: int,
    ) -> None:
        """See Catalog. Raises SetupError for another log's table, Unavailable when the store does not answer."""
        bring_up = partial(super().bring_up, live, attaches, attach_seq, watermark, now_ms)

        def check_and_bring_up() -> None:
            with self._failing("opening the table"), descriptors.lent(RESERVE_OF_LIBRARIES):
                self._check_owner(live, attaches)
                bring_up()

        self._ask(check_and_bring_up)
        self._is_behind = False

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """See Catalog. Raises Unavailable, after which the call may be repeated."""
        try:
            version = self._ask(partial(super().commit, attachment, attach_seq, removed, now_ms))
        except Unavailable:
            self._is_behind = True
            raise
        self._is_behind = False
        return version

    def vacuum(self, older_than_ms: int) -> int:
        """See Catalog. Raises Unavailable."""
        return self._ask(partial(super().vacuum, older_than_ms))

    def look(self, now_ms: int) -> None:
        """See Catalog. Raises Unavailable."""
        self._ask(partial(super().look, now_ms))

    def _put_back(self) -> list[FileEntry]:
        # A store has no links. Files are put there again from local copies, which include all files with messages due
        # soon.
        return self._cache.put_back(list(self.data.live.values()))

    def _ask(self, step: Callable[[], T]) -> T:
        # Without a limit: delta-rs gives up by itself, and no other step may run beside it. Only a stop of the broker
        # leaves it behind.
        return self._store.requests.ask(step, None)

    def _check_owner(self, live: list[FileEntry], attaches: list[tuple[int, Attachment]]) -> None:
        known = {entry.path for entry in live}
        known.update(path for _, attachment in attaches for path in attachment.removes)
        try:
            found = self.open().files
        except Corrupt:
            return  # it is recreated later
        # Files of other programs have names of another form, and `_correct` removes them from the table.
        unknown = [e.path for e in found if e.path not in known and PATH.fullmatch(e.path)]
        if unknown:
            raise SetupError(
                f"--table {self.uri}: the table there has {len(unknown)} files that this data folder's log does not "
                f"know, as {unknown[0]}: it is another broker's, or the log was put back; name an empty place"
            )

    def _remove(self, path: str) -> None:
        super()._remove(path)
        self._cache.forget([path])

    def _make_durable(self) -> None:
        """Do nothing: an answered put is durable."""

    def _drop_torn_commits(self) -> None:
        """Do nothing: a put is atomic."""

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        from timeball.table.delta_rs import DeltaError, said

        try:
            yield
        except (OSError, DeltaError) as error:
            raise Unavailable(f"{self.uri}: {doing} failed: {said(error)}; it is tried again") from error
