"""The Delta log of a pending table in an object store, and the steps of an attach there (catalog.py).

    1. put the data files        instead of syncs; those of other writers are compared with their claims by range
    2. append the TABLE row      the decision, as ever
    3. Delta commit              a put on condition that the entry is not there: of two writers the store refuses one,
                                 and a commit whose answer was lost is found when it is repeated
    4. -                         what the store has answered is durable

What the store does not answer is `Unavailable` and changes nothing. The log stays the truth: a table that lags it is
brought up when the store answers again.

Two brokers must not share a place. A table with files that the log does not know is refused, and not made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

from timeball import descriptors
from timeball.descriptors import RESERVE_OF_LIBRARIES
from timeball.errors import Corrupt, SetupError, Unavailable
from timeball.files import Files
from timeball.table.attachment import PATH, Attachment, FileEntry
from timeball.table.catalog import Catalog
from timeball.table.file_cache import FileCache
from timeball.table.object_store import ANSWER_S, ObjectStore

T = TypeVar("T")

START_ANSWER_S = 5.0  # what is due is late by as much


def open_table(
    place: str, files: Files, size_bytes_max: int, *, is_known: bool
) -> tuple[Catalog, FileCache | None]:
    """Return the Delta log of the pending table at a place, and the copies of its files if that is an object store.

    Raises SetupError for a place that cannot be used, also when the store does not answer unless the table `is_known`
    from before: a broker that has waited for it once starts without it, and waits no more than START_ANSWER_S.
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
    """Blocking; belongs to one thread, and not to the reader thread: a store may take half a minute to fail."""

    _says_nothing: ClassVar[tuple[type[Exception], ...]] = (OSError, Unavailable, SetupError)

    def __init__(self, store: ObjectStore, cache: FileCache) -> None:
        super().__init__(store, store.storage_options)
        self._store, self._cache = store, cache
        self._is_behind = True  # until it has been brought up to the log

    @property
    def version(self) -> int:
        """See Catalog; -1 while the table is behind the log: a reader of it would miss promises."""
        return -1 if self._is_behind else self._version

    def check_data(self, live: list[FileEntry]) -> None:
        """Raise Corrupt when the store lacks a data file; one that lies in the data folder alone is put there."""
        self._cache.check_answers()  # a start has asked just now
        self._cache.bring(live)

    def sync_data(self, entries: list[FileEntry]) -> None:
        """Step 1."""
        self._cache.put(entries)

    def bring_up(
        self,
        live: list[FileEntry],
        attaches: list[tuple[int, Attachment]],
        attach_seq: int,
        watermark: int,
        now_ms: int,
    ) -> None:
        """See Catalog; raise SetupError when the table is another log's, Unavailable when the store does not answer."""
        bring_up = partial(super().bring_up, live, attaches, attach_seq, watermark, now_ms)

        def check_and_bring_up() -> None:
            with self._failing("opening the table"), descriptors.lent(RESERVE_OF_LIBRARIES):
                self._check_owner(live, attaches)
                bring_up()

        self._ask(check_and_bring_up)
        self._is_behind = False

    def commit(self, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int) -> int:
        """See Catalog; raise Unavailable, after which it may be repeated."""
        try:
            version = self._ask(partial(super().commit, attachment, attach_seq, removed, now_ms))
        except Unavailable:
            self._is_behind = True
            raise
        self._is_behind = False
        return version

    def vacuum(self, older_than_ms: int) -> int:
        """See Catalog; raise Unavailable."""
        return self._ask(partial(super().vacuum, older_than_ms))

    def look(self, now_ms: int) -> None:
        """See Catalog; raise Unavailable."""
        self._ask(partial(super().look, now_ms))

    def _put_back(self) -> list[FileEntry]:
        # A store has no second names. Local copies, of all that is due soon among others, are put there again.
        return self._cache.put_back(list(self.data.live.values()))

    def _ask(self, step: Callable[[], T]) -> T:
        # delta-rs gives up by itself, and is left behind only when the broker stops: no other step may run beside it.
        return self._store.requests.ask(step, None)

    def _check_owner(self, live: list[FileEntry], attaches: list[tuple[int, Attachment]]) -> None:
        known = {entry.path for entry in live}
        known.update(path for _, attachment in attaches for path in attachment.removes)
        try:
            found = self.open().files
        except Corrupt:
            return  # it is made anew
        # Files of other programs have names of another shape, and leave the table again (`_correct`).
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
        """Do nothing: an answer says that it is."""

    def _drop_torn_commits(self) -> None:
        """Do nothing: a put is whole or not there."""

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        from timeball.table.delta_rs import DeltaError, said

        try:
            yield
        except (OSError, DeltaError) as error:
            raise Unavailable(f"{self.uri}: {doing} failed: {said(error)}; it is tried again") from error
