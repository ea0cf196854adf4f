"""The pending table: data files of scheduled messages, and the list of the files that belong to it.

Receives: batches of scheduled messages, from the broker's own compaction or from Spark's executors.
Keeps: immutable Parquet files sorted by due time, listed in a Delta Lake log, and sorted runs of their keys.
Hands on: the rows of a range of due times to the schedule, file lists to Spark.

This package is below `schedule` and imports no part of the broker. So an executor on another machine writes files with
the same functions as the broker.
"""
