"""The process from which Spark forks its Python workers on one machine, with what the tasks of jobs import.

Spark's own daemon imports nothing of a task's, so each worker holds its own copy of Arrow, Delta and this package:
60 MB. Here they are imported once and the workers share the pages. Spark starts a daemon for each kind of worker, and
those that only plan a query do not run tasks: they import nothing ahead.
"""

from __future__ import annotations

import sys

from pyspark.daemon import manager

TASKS = "pyspark.worker"

if __name__ == "__main__":
    if sys.argv[1:] == [TASKS]:
        import timeball.pipeline.jobs.archive
        import timeball.pipeline.jobs.compact
        import timeball.pipeline.jobs.ledger  # noqa: F401 - what workers unpickle is there before they are forked
    manager()
