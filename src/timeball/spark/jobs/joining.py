"""Join the small files of the ledger and the archive, to which each epoch adds one or two files.

Every TIDY_EVERY versions, a job joins small files of one partition (a day of the archive, or the whole ledger) that
follow each other in the log. A week later it deletes the replaced files and the files of dead tasks. The delay protects
readers that still use an older version.

Two jobs may join files of one table at the same time, and may choose the same files. delta-rs reports no conflict if
two commits remove the same files without a change of data. Both new files would stay, with each row twice. So each
commit of a join has the same application id, APP_ID. If two of these commits begin at one version, Delta refuses the
second one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from timeball.io.clock import SystemClock
from timeball.model.errors import StorageError
from timeball.spark.table_store import CHUNK_BYTES, Store, dataset_of, open_table, raw_bytes, table_schema

LOG = logging.getLogger("timeball.spark")

APP_ID = "timeball-tidy"
TIDY_EVERY = 100  # versions
JOINED_ROWS = 1_000_000
JOINED_BYTES = 64 * 1024 * 1024  # of Parquet
# Uncompressed. The rows of a join are in memory, and rows that compress well take a hundred times their bytes of
# Parquet.
JOINED_RAW_BYTES = CHUNK_BYTES

# (table, rows, now_ms) -> entries of the Delta log for new files with these rows, without a change of data.
Write = Callable[[Store, pa.Table, int], Iterable[AddAction]]


@dataclass(frozen=True)
class SmallFile:
    """A file that is small enough to be joined with others."""

    path: str
    partition: dict[str, str | None]  # value by column
    rows: int
    size_bytes: int
    first_seq: int  # 0 without statistics


def maintain(job: str, uri: str, write: Write) -> None:
    """Every TIDY_EVERY versions, join small files, and delete files that no version has used for a week.

    `job`: its name, for log lines. Errors are only logged, because the next call may succeed.
    """
    table = open_table(uri)
    if table.version() % TIDY_EVERY != TIDY_EVERY - 1:
        return
    # Unused files are deleted also if the join fails, because each try may leave some.
    for step in (partial(join_small_files, table, write), partial(_delete_unused, uri)):
        try:
            step()
        except (DeltaError, StorageError, pa.ArrowException, OSError) as error:
            # Mostly another process has committed at the same time. The next try is enough.
            LOG.warning("table not tidied job=%s reason=%s", job, error)


def _delete_unused(uri: str) -> None:
    """Delete files that no version has used for a week, and write a checkpoint of the Delta log."""
    table = open_table(uri)
    table.vacuum(dry_run=False, full=True)
    table.create_checkpoint()


def join_small_files(table: DeltaTable, write: Write) -> int:
    """Join adjacent small files. Returns the number of replaced files, which stay on disk for older versions.

    Raises CommitFailedError if another job joins files of the same version.
    """
    store, replaced = Store(table.table_uri), 0
    raw_bytes_of = cache(partial(raw_bytes, table.table_uri))
    for files in adjacent_files(small_files(table), raw_bytes_of):
        now_ms = SystemClock().wall_ms()
        added = list(write(store, _read_rows(table, files), now_ms))
        _replace(table, files, added, now_ms)
        replaced += len(files)
    return replaced


def _replace(
    table: DeltaTable, removed: Sequence[SmallFile], added: Sequence[AddAction], now_ms: int
) -> None:
    """Replace files in one commit, and load the new version. Raises CommitFailedError if another job has joined."""
    actions: list[AddAction | RemoveAction] = [
        *added,
        *(RemoveAction(file.path, False, now_ms, file.size_bytes, file.partition) for file in removed),
    ]
    table.create_write_transaction(
        actions,
        "append",
        table.schema(),
        partition_by=table.metadata().partition_columns,
        # Only the application id matters (see the module docstring). Delta requires a version with it.
        commit_properties=CommitProperties(app_transactions=[Transaction(APP_ID, table.version())]),
    )
    table.update_incremental()


def small_files(table: DeltaTable) -> list[SmallFile]:
    """List the files with less than half the size limits of a joined file, ordered by partition and age.

    The age is the first row of the log in a file, or the time of its commit if it has no statistics.
    """
    columns = table.metadata().partition_columns
    actions = pa.table(table.get_add_actions(flatten=True)).sort_by("modification_time").to_pylist()
    files = [
        SmallFile(
            action["path"],
            {column: str(action[f"partition.{column}"]) for column in columns},
            action["num_records"],
            action["size_bytes"],
            action.get("min.seq") or 0,
        )
        for action in actions
    ]
    small = [file for file in files if file.rows < JOINED_ROWS // 2 and file.size_bytes < JOINED_BYTES // 2]
    # The sort is stable, so files without statistics (the ledger's) stay in the order of their times.
    return sorted(small, key=lambda file: (*map(str, file.partition.values()), file.first_seq))


def adjacent_files(
    small_files: Sequence[SmallFile], raw_bytes_of: Callable[[str], int]
) -> Iterator[list[SmallFile]]:
    """Yield groups of two or more consecutive files of one partition, each within the limits of a joined file.

    `raw_bytes_of` reads the uncompressed size of a file, by its path, if it is within the other limits.
    """
    group: list[SmallFile] = []
    for file in small_files:
        together = [*group, file]
        if group and (
            group[0].partition != file.partition
            or sum(each.rows for each in together) > JOINED_ROWS
            or sum(each.size_bytes for each in together) > JOINED_BYTES
            or sum(raw_bytes_of(each.path) for each in together) > JOINED_RAW_BYTES
        ):
            if len(group) > 1:
                yield group
            group = []
        group.append(file)
    if len(group) > 1:
        yield group


def _read_rows(table: DeltaTable, files: Sequence[SmallFile]) -> pa.Table:
    """Read the rows of some files, without the partition columns. Older files may lack columns, which are then null."""
    partition_columns = table.metadata().partition_columns
    schema = pa.schema([field for field in table_schema(table) if field.name not in partition_columns])
    uris = [f"{table.table_uri.rstrip('/')}/{file.path}" for file in files]
    return dataset_of(uris, schema, ()).to_table()
