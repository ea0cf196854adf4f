"""The engine that runs the tasks of jobs on the executors of a Spark session.

Only pieces and names of files pass through the JVM, as an RDD: a data source would start a process for its planning,
one for its commit and one for the stream beside each query, and a DataFrame of pointers has nothing to optimize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from timeball.pipeline.jobs.engine import Piece, Result
from timeball.pipeline.source.spark_api import described
from timeball.pipeline.spark_errors import spark_errors


class OnSpark:
    """Runs tasks on the executors of a session."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Do the task of each piece; Spark's failures are raised as ours."""
        if not pieces:
            return []
        text = f"{job}: {work}"
        with spark_errors(), described(self.session, text):
            context = self.session.sparkContext
            context.setJobGroup(job, text, interruptOnCancel=True)  # by which `cancel` knows the tasks
            return context.parallelize(pieces, len(pieces)).map(task).collect()

    def lives(self) -> bool:
        """Return whether the JVM is there and its context was not stopped: no task starts in a stopped one."""
        try:
            return not self.session.sparkContext._jsc.sc().isStopped()
        except (Py4JError, OSError, AttributeError):  # the last one, when this side has noticed the stop
            return False

    def cancel(self, job: str) -> None:
        """End the tasks of a job that are at work."""
        if self.lives():
            self.session.sparkContext.cancelJobGroup(job)
