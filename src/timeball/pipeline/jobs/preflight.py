"""Before a job starts: one task must find the broker's pending table, and be able to write into it.

Without a folder that both see, a job runs for minutes and fails at its attach, or writes into a folder of the same name
on another machine. A task therefore opens the table where it is said to lie, compares its version with the broker's,
and writes and removes an empty file. On a local master this process is the one task there is.
"""

from __future__ import annotations

import uuid
from functools import partial

from pyspark.sql import SparkSession

from timeball.errors import SetupError, TimeballError
from timeball.pipeline.source.spark_api import described
from timeball.pipeline.spark_errors import spark_errors
from timeball.pipeline.table_store import Store, open_table


def check_table(spark: SparkSession, uri: str, version: int, option: str) -> None:
    """Raise SetupError unless a task reaches the table that the broker has at `version`; `option` can say where."""
    reason = _in_a_task(spark, uri, version)
    if reason is not None:
        raise SetupError(
            f"a task of Spark cannot use the broker's pending table at {uri}: {reason}. Share this folder with the "
            f"executors, under the same name, or say with {option} where they reach it"
        )


def reason_against(uri: str, version: int) -> str | None:
    """Return why the table at a URI is not the broker's at `version`, or is not to be written to; None when it is."""
    try:
        there = open_table(uri).version()
        if there < version:
            return f"it is of version {there} there, and of version {version} at the broker"
        store = Store(uri)
        # Not hidden: should this task die, the broker sweeps the file as any other that no version names.
        probe = f"preflight-{uuid.uuid4().hex}"
        store.put(probe, b"")
        store.remove([probe])
    except TimeballError as error:
        return str(error)
    return None


def _in_a_task(spark: SparkSession, uri: str, version: int) -> str | None:
    context = spark.sparkContext
    if (context.master or "").startswith("local["):
        return reason_against(uri, version)
    with spark_errors(), described(spark, f"preflight: is the table at {uri}?"):
        [reason] = context.parallelize([uri], 1).map(partial(reason_against, version=version)).collect()
    return None if reason is None else str(reason)
