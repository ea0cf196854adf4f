"""Changes of the pending table by another program with delta-rs, and a broker on a real folder for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Field, write_deltalake
from tests.crash.world import World

from timeball.io.clock import ManualClock
from timeball.io.files import RealFiles

Operation = Callable[[str], Any]


class UncutFiles(RealFiles):
    """A real folder for a `World`, which cannot cut the power here."""

    cut = False


class RealWorld(World):
    """A node on a folder that other programs can open."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(UncutFiles(folder), ManualClock(), **settings)  # type: ignore[arg-type]


def _vacuum(uri: str) -> None:
    DeltaTable(uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)


def _optimize(uri: str) -> None:
    DeltaTable(uri).optimize.compact()


def _optimize_and_vacuum(uri: str) -> None:
    _optimize(uri)
    _vacuum(uri)


def _delete_and_vacuum(uri: str) -> None:
    DeltaTable(uri).delete()
    _vacuum(uri)


def _delete_one_row(uri: str) -> None:
    table = DeltaTable(uri)
    seq = table.to_pyarrow_table(columns=["seq"])["seq"].to_pylist()
    table.delete(f"seq = {seq[0]}" if seq else None)


def _checkpoint(uri: str) -> None:
    """Write a checkpoint of the Delta log, and delete the commits that it replaces."""
    table = DeltaTable(uri)
    table.create_checkpoint()
    table.cleanup_metadata()


def _overwrite(uri: str) -> None:
    """Replace all rows by one row with an additional column."""
    table = DeltaTable(uri)
    rows = table.to_pyarrow_table().slice(0, 1)
    changed_rows = rows.append_column("mine", pa.array([1] * len(rows)))
    write_deltalake(table, changed_rows, mode="overwrite", schema_mode="overwrite")


def _append(uri: str) -> None:
    table = DeltaTable(uri)
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")


def _property(name: str) -> Operation:
    return lambda uri: DeltaTable(uri).alter.set_table_properties({name: "true"})


OPERATIONS: dict[str, Operation] = {
    "OPTIMIZE": _optimize,
    "OPTIMIZE and VACUUM": _optimize_and_vacuum,
    "ZORDER": lambda uri: DeltaTable(uri).optimize.z_order(["seq"]),
    "VACUUM": _vacuum,
    "DELETE": lambda uri: DeltaTable(uri).delete(),
    "DELETE of one row": _delete_one_row,
    "DELETE and VACUUM": _delete_and_vacuum,
    "UPDATE": lambda uri: DeltaTable(uri).update({"due_ms": "1"}),
    "INSERT": _append,
    "checkpoint": _checkpoint,
    "RESTORE": lambda uri: DeltaTable(uri).restore(0),
    "ADD COLUMN": lambda uri: DeltaTable(uri).alter.add_columns([Field("mine", "string")]),  # type: ignore[arg-type]
    "another schema": _overwrite,
    "ADD CONSTRAINT": lambda uri: DeltaTable(uri).alter.add_constraint({"later": "seq > 0"}),
    "append-only": _property("delta.appendOnly"),
    "change data feed": _property("delta.enableChangeDataFeed"),
    "rm _delta_log": lambda uri: shutil.rmtree(Path(uri) / "_delta_log"),
}
