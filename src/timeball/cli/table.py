"""`timeball table`: the files of the pending table, and the merges that the broker would make of them.

The command reads the newest version of the Delta table, and chooses as the broker does (table/merging.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from typing import Annotated, Any

import typer

from timeball.cli.options import (
    DEFAULT_FLIGHT,
    FlightEndpointOption,
    JsonOption,
    addresses_of,
    advising,
    show_bytes,
)
from timeball.cli.output import show


def table(
    table_uri: Annotated[
        str | None,
        typer.Option(
            "--table-uri",
            metavar="URI",
            help="The pending table's URI on this machine, if it differs from the broker's.",
        ),
    ] = None,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Show the files and sizes of the pending table by bucket, and what merging would do.

    The command reads the pending table where the broker keeps it, so run it
    where that folder can be read. It changes nothing: the broker merges by itself.

    \b
    Examples:
      timeball table
      timeball table --json | jq '.tables[].files'
    """
    with advising(addresses_of(endpoint)):
        tables = [describe(*table_facts) for table_facts in _read_tables(endpoint, table_uri)]
    lines = (line for document in tables for line in _lines(document))
    show({"tables": tables}, lines, as_json=as_json)


def _read_tables(
    endpoint: str, table_uri: str | None
) -> Iterator[tuple[str, int, list[Any], int, Callable[[str], int]]]:
    """Read (group, version, files, now_ms, raw_bytes) of the table of each group.

    `raw_bytes` reads the size of a file without compression, by its path.
    """
    from timeball.spark.endpoint import Endpoint, group_table_uri, groups_of
    from timeball.spark.table_store import raw_bytes, table_files

    with closing(Endpoint(endpoint, patience_s=0)) as broker:
        groups = groups_of(broker.status(), endpoint)
    for group in groups:
        with closing(Endpoint(group.endpoint, patience_s=0)) as broker:
            status = broker.status()
        uri = group_table_uri("--table-uri", table_uri, group.name, len(groups)) or status.table.uri
        files = table_files(uri, status.table.version)
        yield group.name, status.table.version, files, status.now_ms, partial(raw_bytes, uri)


def describe(
    group: str, version: int, files: list[Any], now_ms: int, raw_bytes: Callable[[str], int]
) -> dict[str, Any]:
    """Describe the files of one version (table_store.TableFile) by bucket, and their merges.

    `raw_bytes` reads the size of a file without compression, by its path.
    """
    from timeball.table import merging
    from timeball.table.attachment import FileEntry

    entries = [
        FileEntry(
            path=file.path,
            bucket=file.path.partition("/")[0].partition("=")[2],
            rows=file.rows,
            size_bytes=file.size_bytes,
            min_due_ms=file.min_due_ms,
            max_due_ms=file.max_due_ms,
            min_seq=file.min_seq,
            max_seq=file.max_seq,
        )
        for file in files
    ]
    by_bucket = defaultdict[str, list[FileEntry]](list)
    for entry in entries:
        by_bucket[entry.bucket].append(entry)
    return {
        "group": group,
        "version": version,
        **_totals(entries),
        "buckets": [{"bucket": bucket, **_totals(by_bucket[bucket])} for bucket in sorted(by_bucket)],
        "merges": [
            {
                "reason": merge.reason,
                "buckets": sorted({entry.bucket for entry in merge.files}),
                **_totals(merge.files),
                "files_after": merge.files_after,
            }
            for merge in merging.plan(entries, now_ms, cache(lambda entry: raw_bytes(entry.path)))
        ],
    }


def _totals(entries: list[Any]) -> dict[str, int]:
    """Count files (FileEntry), and add up their rows and sizes."""
    return {
        "files": len(entries),
        "rows": sum(entry.rows for entry in entries),
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Format the description of a table for people."""
    if document["group"]:
        yield f"group {document['group']}"
    yield f"{'bucket':<14}{'files':>6}{'rows':>14}{'size':>12}"
    for row in [*document["buckets"], {**document, "bucket": "all"}]:
        yield f"{row['bucket']:<14}{row['files']:>6}{row['rows']:>14,}{show_bytes(row['size_bytes']):>12}"
    for merge in document["merges"]:
        verb = "split" if merge["reason"] == "split" else "merge"
        yield (
            f"the broker would {verb} {merge['files']} files of {merge['buckets'][0]}"
            f"{' and later' if len(merge['buckets']) > 1 else ''} ({merge['rows']:,} rows, "
            f"{show_bytes(merge['size_bytes'])}) into about {merge['files_after']}"
        )
    if not document["merges"]:
        yield "no merge is worth its cost"
