"""The engine that runs the tasks of jobs on the executors of a Spark session.

Only pieces and results of tasks (entries of written files) pass through the JVM as an RDD, and no rows. A Python data
source would be more expensive: for each query Spark starts one process for its planning, one for its commit and one for
its stream. A DataFrame of pointers would not help either, because there is nothing to optimize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from timeball.spark.jobs.marked import Piece, Result
from timeball.spark.source.spark_api import described
from timeball.spark.spark_errors import spark_errors


class OnSpark:
    """Runs tasks on the executors of a Spark session."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Run the task for each piece, one Spark task per piece. Raises Spark's failures as Timeball's errors."""
        if not pieces:
            return []
        text = f"{job}: {work}"
        with spark_errors(), described(self.session, text):
            context = self.session.sparkContext
            context.setJobGroup(job, text, interruptOnCancel=True)  # `cancel` finds the tasks by it
            return context.parallelize(pieces, len(pieces)).map(task).collect()

    def lives(self) -> bool:
        """Check whether tasks can be started: the JVM runs and its Spark context is not stopped."""
        try:
            return not self.session.sparkContext._jsc.sc().isStopped()
        except (Py4JError, OSError, AttributeError):  # AttributeError: PySpark has set `_jsc` to None
            return False

    def cancel(self, job: str) -> None:
        """Cancel the running tasks of a job."""
        if self.lives():
            self.session.sparkContext.cancelJobGroup(job)
