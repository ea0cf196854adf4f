"""Check, before a job starts, that a Spark task can read the broker's pending table and write into its folder.

If executors and broker do not share the folder, a job would run for minutes and then fail at its attach. Or it would
write into a folder of the same name on another machine. Therefore one task opens the table at the given URI, compares
its version with the broker's, and writes and removes an empty file. With a local master, this process does the check
itself.
"""

from __future__ import annotations

import uuid
from functools import partial

from pyspark.sql import SparkSession

from timeball.model.errors import SetupError, TimeballError
from timeball.spark.source.spark_api import described
from timeball.spark.spark_errors import spark_errors
from timeball.spark.table_store import Store, open_table


def check_table(spark: SparkSession, uri: str, version: int, option: str) -> None:
    """Raise SetupError unless a task can use the table at `uri`, which has at least `version` at the broker.

    `option`: the command line option with which a user can give another URI, for the error.
    """
    reason = _in_a_task(spark, uri, version)
    if reason is not None:
        raise SetupError(
            f"a task of Spark cannot use the broker's pending table at {uri}: {reason}. Share this folder with the "
            f"executors, under the same name, or say with {option} where they reach it"
        )


def reason_against(uri: str, version: int) -> str | None:
    """Explain why the table at a URI is older than the broker's `version` or cannot be written to, or return None."""
    try:
        there = open_table(uri).version()
        if there < version:
            return f"it is of version {there} there, and of version {version} at the broker"
        store = Store(uri)
        # The name does not begin with `_` or `.`, so if this task dies, Delta's vacuum at the broker deletes the file.
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
