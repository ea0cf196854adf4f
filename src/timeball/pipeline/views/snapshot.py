"""What waits: the promises at rest as of one answer of the broker, as Arrow batches, without Spark.

One definition for the whole house. As of one `status`, a promise waits when it lies in one of three places and no
RELEASE or CANCEL row of the kept log names it:

    table   a row of the pending table, at the version of that status, due at settled_before_ms or later
    tail    a PROMISE row of the log from the watermark on, or a MOVED row that stands for one whose own row is gone
    level   a LEVEL_PROMISE row anywhere in the kept log: it stays there until it is settled

Places and version belong together: a promise is neither hidden by a compaction in between nor counted twice. The
Delta commit follows its TABLE row by milliseconds, so a status is asked for again until its table has caught up.

An older version is what waited when it was made: its TABLE row is the end of the log, and what was due by then was
being delivered. `upcoming` takes the same view of now: promises due after the broker's clock cannot have been
released, so only cancels are looked for, which spares reading the releases of days.

A row of the table stays there a while when it is cancelled, maybe longer than retention keeps its CANCEL row; the
ledger, where there is one, remembers it. Knowingly imperfect: without a ledger it counts as waiting again.

Memory is bounded by a batch and by eight bytes for each settlement in the kept log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs

from timeball.errors import NotFound, OutOfRange, StorageError
from timeball.message import PROPERTY_END, PROPERTY_NAME_END, TABLE_SCHEMA, Int64Array, Kind, int64
from timeball.pipeline.endpoint import Endpoint, Status
from timeball.pipeline.table_store import as_dataset, open_table, sibling
from timeball.pipeline.views.table_version import open_version, settled_status, status_of_version

Due = tuple[int | None, int | None]  # low <= due_ms < high; None is open

PLACES = ("table", "tail", "level")
ALWAYS: Due = (None, None)
_CANCELS = pa.schema([("event", pa.string()), ("first_seq", pa.int64()), ("event_seq", pa.int64())])
LEVEL_PROPERTIES = (
    f"REAL_TOPIC{PROPERTY_NAME_END}(?P<topic>[^{PROPERTY_END}]+){PROPERTY_END}"
    f"REAL_QID{PROPERTY_NAME_END}(?P<queue>-?[0-9]+){PROPERTY_END}$"
)


@dataclass(frozen=True)
class TableFile:
    """One file of the pending table: its path below the table's URI, and what its statistics say."""

    path: str
    rows: int
    size_bytes: int
    min_due_ms: int | None
    max_due_ms: int | None

    def may_hold(self, due: Due) -> bool:
        """Whether a row due within these bounds can be in it."""
        low, high = due
        above = low is not None and self.max_due_ms is not None and self.max_due_ms < low
        below = high is not None and self.min_due_ms is not None and self.min_due_ms >= high
        return not (above or below)


class Snapshot:
    """What waits, as of one version. Take one with `take`; the endpoint must stay open while it is read.

    Rows of the log first_seq <= seq < end_seq count; the tail begins at `watermark`. `due_from_ms`: what was due
    earlier is settled, delay levels aside. `is_whole` is False when retention has let go of a part of an older
    version's tail.
    """

    def __init__(
        self,
        broker: Endpoint,
        status: Status,
        *,
        uri: str,
        due_from_ms: int,
        only_cancels: bool = False,
        is_whole: bool = True,
    ) -> None:
        self._broker = broker
        self._settled: Int64Array | None = None
        self._moved: Int64Array | None = None
        self.only_cancels = only_cancels
        self.uri = uri
        self.now_ms = status.now_ms
        self.version = status.table.version
        self.first_seq = status.log.first_seq
        self.end_seq = status.log.durable_seq
        self.watermark = status.watermark
        self.due_from_ms = due_from_ms
        self.is_whole = is_whole

    @classmethod
    def take(
        cls,
        broker: Endpoint,
        *,
        version: int | None = None,
        upcoming: bool = False,
        table_uri: str | None = None,
    ) -> Snapshot:
        """What waits now, or what waited when `version` of the table was made; see the module.

        `table_uri`: where this process reaches the table, if not where the broker says. NotFound for a version that
        does not exist, SetupError for a table that is out of reach.
        """
        status = settled_status(broker, table_uri)
        uri = table_uri or status.table.uri
        if version is not None:  # also the newest one: a named version means the same for ever
            then, is_whole = status_of_version(broker, status, uri, version)
            due_from_ms = then.now_ms + 1
            return cls(broker, then, uri=uri, due_from_ms=due_from_ms, only_cancels=True, is_whole=is_whole)
        due_from_ms = status.now_ms + 1 if upcoming else status.settled_before_ms
        return cls(broker, status, uri=uri, due_from_ms=due_from_ms, only_cancels=upcoming)

    # ---- the parts ------------------------------------------------------------------------------------------

    def files(self, due: Due = ALWAYS) -> list[TableFile]:
        """Files of this version of the table that may hold a row which waits and is due within the bounds."""
        bounds = self._clip(due)
        return [file for file in table_files(self.uri, self.version) if file.may_hold(bounds)]

    def settled(self) -> Int64Array:
        """Sorted numbers of the promises that are released or cancelled, as far as log and ledger know. Read once."""
        if self._settled is None:
            kinds = [Kind.CANCEL] if self.only_cancels else [Kind.RELEASE, Kind.CANCEL]
            found = _numbers(self._log(kinds, self.first_seq, ["source_seq"]), "source_seq")
            forgotten = cancelled_before(self.uri, min(self.first_seq, self.end_seq))
            self._settled = np.union1d(found, forgotten) if len(forgotten) else found
        return self._settled

    def batches(
        self, columns: Sequence[str] = tuple(TABLE_SCHEMA.names), due: Due = ALWAYS
    ) -> Iterator[pa.RecordBatch]:
        """Everything that waits and is due within the bounds, in these columns of TABLE_SCHEMA. In no order."""
        for _, rows in self.places(columns, due):
            yield rows

    def places(
        self,
        columns: Sequence[str] = tuple(TABLE_SCHEMA.names),
        due: Due = ALWAYS,
        among: Sequence[str] = PLACES,
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The same with the place of each batch, and only of the places `among`."""
        wanted = list(dict.fromkeys([*columns, "seq", "due_ms"]))
        schema = pa.schema([TABLE_SCHEMA.field(name) for name in columns])
        for place in among:
            # One of a level may count as due before its instant, when the clock was set back behind its acceptance.
            bounds = due if place == "level" and not self.only_cancels else self._clip(due)
            gone = (self.settled(), self.moved()) if place == "table" else (self.settled(),)
            for batch in self._at(place, wanted, due):
                rows = _kept(batch, bounds, gone)
                if rows.num_rows:
                    yield place, rows.select(columns).cast(schema)

    def moved(self) -> Int64Array:
        """Sorted numbers of the promises in the tail whose own rows lie before it, so maybe in the table too."""
        if self._moved is None:
            numbers = _numbers(self._log([Kind.MOVED], self.watermark, ["source_seq"]), "source_seq")
            self._moved = numbers[numbers < max(self.watermark, self.first_seq)]
        return self._moved

    # ---- where they lie -------------------------------------------------------------------------------------

    def _clip(self, due: Due) -> Due:
        low, high = due
        return (self.due_from_ms if low is None else max(low, self.due_from_ms)), high

    def _log(self, kinds: Sequence[Kind], from_seq: int, columns: Iterable[str]) -> Iterator[pa.RecordBatch]:
        begin = max(from_seq, self.first_seq)
        if begin >= self.end_seq:
            return iter(())
        return self._broker.read_log(begin, self.end_seq, kinds, columns=list(dict.fromkeys(columns)))

    def _at(self, place: str, wanted: list[str], due: Due) -> Iterator[pa.RecordBatch]:
        if place == "table":
            return self._table(wanted, due)
        return self._tail(wanted) if place == "tail" else self._levels(wanted)

    def _tail(self, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        """Promises behind the watermark, each once."""
        begin = max(self.watermark, self.first_seq)
        columns = ["seq", "kind", "source_seq", "store_ms", *wanted]
        seen = np.empty(0, np.int64)
        for batch in self._log([Kind.PROMISE, Kind.MOVED], self.watermark, columns):
            rows = self._own_numbers(batch)
            is_moved = batch.column("kind").to_numpy() == Kind.MOVED
            if is_moved.any():
                numbers = rows.column("seq").to_numpy()
                first = np.zeros(len(numbers), dtype=bool)
                first[np.unique(numbers, return_index=True)[1]] = True
                keep = ~is_moved | (first & (numbers < begin) & ~np.isin(numbers, seen))
                seen = np.concatenate([seen, numbers[is_moved & keep]])
                rows = rows.filter(pa.array(keep))
            yield rows

    @staticmethod
    def _own_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
        """PROMISE and MOVED rows under the number and the acceptance of the promise they hold."""
        is_moved = pc.equal(batch.column("kind"), int(Kind.MOVED))
        seq = pc.if_else(is_moved, batch.column("source_seq"), batch.column("seq"))
        batch = _with(batch, "seq", seq)
        if "accepted_ms" in batch.schema.names:
            accepted = pc.if_else(is_moved, batch.column("accepted_ms"), batch.column("store_ms"))
            batch = _with(batch, "accepted_ms", accepted)
        return batch

    def _levels(self, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        """Promises of delay levels, under the topic and queue they are for and not the ones they wait in."""
        is_disguised = not {"topic", "queue_id"}.isdisjoint(wanted)
        columns = ["store_ms", *wanted, *(["properties"] if is_disguised else [])]
        for batch in self._log([Kind.LEVEL_PROMISE], self.first_seq, columns):
            rows = batch
            if is_disguised:
                real = pc.extract_regex(rows.column("properties"), LEVEL_PROPERTIES)
                for name, field, kind in (("topic", "topic", pa.string()), ("queue_id", "queue", pa.int32())):
                    if name in wanted:
                        value = pc.struct_field(real, field).cast(kind)
                        rows = _with(rows, name, pc.coalesce(value, rows.column(name)))
            if "accepted_ms" in wanted:
                rows = _with(rows, "accepted_ms", rows.column("store_ms"))
            yield rows

    def _table(self, wanted: list[str], due: Due) -> Iterator[pa.RecordBatch]:
        low, high = self._clip(due)
        bounds = ds.field("due_ms") >= low
        if high is not None:
            bounds &= ds.field("due_ms") < high
        yield from read_files(self.uri, [file.path for file in self.files(due)], wanted, bounds)


# ---- the table's files --------------------------------------------------------------------------------------


def table_files(uri: str, version: int) -> list[TableFile]:
    """The files of one version of the pending table; NotFound, or SetupError when the table is out of reach."""
    if version == 0:
        return []  # the broker makes the table before anything lies in it
    actions = pa.table(open_version(uri, version).get_add_actions(flatten=True))
    return [
        TableFile(
            path=action["path"],
            rows=action["num_records"] or 0,
            size_bytes=action["size_bytes"],
            min_due_ms=action.get("min.due_ms"),
            max_due_ms=action.get("max.due_ms"),
        )
        for action in actions.to_pylist()
    ]


def read_files(
    uri: str, paths: Sequence[str], columns: Sequence[str], rows: ds.Expression | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of files of the table; row groups that cannot hold a row of `rows` (a filter) are not read."""
    if not paths:
        return
    try:
        files, root = fs.FileSystem.from_uri(uri)
        found = ds.dataset(
            [f"{root}/{path}" for path in paths], TABLE_SCHEMA, format="parquet", filesystem=files
        )
        # Little is read ahead: bodies may be large, and a file is a day's promises.
        yield from found.to_batches(
            columns=list(columns), filter=rows, batch_size=65_536, batch_readahead=4, fragment_readahead=2
        )
    except FileNotFoundError as error:
        raise OutOfRange(
            f"a file of the pending table at {uri} has gone meanwhile, or this version was cleaned up: {error}"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read the pending table at {uri}: {error}") from error


def cancelled_before(uri: str, first_seq: int) -> Int64Array:
    """Numbers of the promises whose CANCEL rows lie below `first_seq`, from the ledger beside the table at `uri`."""
    try:
        table = open_table(sibling(uri, "ledger")) if first_seq > 1 else None
    except NotFound:
        table = None
    if table is None:
        return np.empty(0, np.int64)
    wanted = (ds.field("event") == "cancelled") & (ds.field("event_seq") < first_seq)
    events = as_dataset(table, _CANCELS)
    return _numbers(events.to_batches(columns=["first_seq"], filter=wanted), "first_seq")


# ---- rows ---------------------------------------------------------------------------------------------------


def _kept(batch: pa.RecordBatch, due: Due, gone: Sequence[Int64Array]) -> pa.RecordBatch:
    """Rows due within the bounds whose numbers are in none of the sorted arrays."""
    low, high = due
    due_ms, seq = int64(batch.column("due_ms")), int64(batch.column("seq"))
    keep = np.ones(batch.num_rows, dtype=bool)
    if low is not None:
        keep &= due_ms >= low
    if high is not None:
        keep &= due_ms < high
    for numbers in gone:
        if len(numbers):
            at = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
            keep &= numbers[at] != seq
    return batch if keep.all() else batch.filter(pa.array(keep))


def _numbers(batches: Iterable[pa.RecordBatch], column: str) -> Int64Array:
    found = [int64(batch.column(column)) for batch in batches]
    numbers = np.concatenate([np.empty(0, np.int64), *found])
    numbers.sort()  # numpy's own `unique` makes a table of hashes first, which takes ten times as long
    kept: Int64Array = numbers[np.diff(numbers, prepend=-1) != 0]
    return kept


def _with(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), values)
