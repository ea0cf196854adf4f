"""Promises at rest: how the pending table is laid out, and which files belong to it.

Receives: batches of promises, from the broker's own compaction or from Spark's executors.
Keeps: immutable Parquet files sorted by due time, named by a Delta Lake log; sorted runs of their keys.
Hands on: rows of a due range to the schedule, file lists to Spark.

It stands below `schedule` and beside nothing of the broker, so that an executor on another machine writes
files with the very functions that the broker uses.
"""
