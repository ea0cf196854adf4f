"""The process from which Spark forks its Python workers on one machine, with the modules of jobs already imported.

Spark's own daemon does not import the modules of a task. So each worker would have its own copy of Arrow, Delta and
this package: 60 MB. Here they are imported once, and the workers share the memory pages. Spark starts one daemon for
each kind of worker. Workers that only plan a query run no tasks, so their daemons import nothing in advance.
"""

from __future__ import annotations

import sys

from pyspark.daemon import manager

TASKS = "pyspark.worker"

if __name__ == "__main__":
    if sys.argv[1:] == [TASKS]:
        import timeball.spark.jobs.archive
        import timeball.spark.jobs.compact
        import timeball.spark.jobs.ledger  # noqa: F401 - workers unpickle tasks of these modules
    manager()
