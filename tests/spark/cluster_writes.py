"""Writes on a cluster, with faults at exact moments, as a program, so that a test can kill it or its executors.

    python cluster_writes.py            the settings of the session are a line of JSON on stdin, then a write is a line
    spark-submit cluster_writes.py WRITE

It prints a line for the session, and a line for each write: its error, or null. The lines begin with SAID, as Java
prints others. Processes on several machines wait for each other by files in the folder `marks`, which all of them see.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeball.model.errors import TimeballError
from timeball.model.limits import HOUR_MS
from timeball.spark import table_store
from timeball.spark.jobs import bulk
from timeball.spark.jobs.bulk import Columns
from timeball.spark.run.session import build_session, register
from timeball.spark.source.data_source import TimeballDataSource, pin_to_one_group
from timeball.spark.source.options import WriteOptions, write_options
from timeball.spark.source.scheduled_writer import ScheduledWriter
from timeball.spark.source.spark_api import spark_errors

FAULTY = "timeball_with_faults"
SKEW = 20  # one row in so many is not in the large partition, and not in the large minute
# A faulty task gets its rows in pieces, and writes each piece to a file when the next one comes.
PIECE_ROWS, HALF_PIECES = 50, 6
HANG_S = 240
SAID, ENDED = "said ", "ended.json"


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """A write of numbered rows to the topic `case`, and what goes wrong with it."""

    case: str
    rows: int
    first_due_ms: int
    endpoint: str
    marks: str
    partitions: int = 4
    shape: str = (
        "even"  # shuffled: the number of partitions is Spark's choice. skewed: nearly all rows in one of them
    )
    fault: str = ""  # fail, sleep, wait (in a task), or hold (before and after the attach)
    campaign: bool = False  # by the job bulk
    name: str = ""  # the name of the write, by default that of its case
    conf: dict[str, str] = {}

    def due_ms(self, number: int) -> int:
        """Compute the due time of a row, as `frame` does."""
        is_elsewhere = self.shape != "skewed" or number % SKEW == 0
        return self.first_due_ms + (number % 12 * HOUR_MS if is_elsewhere else 0)


def frame(spark: SparkSession, write: Write) -> DataFrame:
    """Make the rows of a write."""
    rows: DataFrame = spark.range(0, write.rows, numPartitions=write.partitions)
    hour = "id % 12"
    if write.shape == "shuffled":
        rows = rows.repartition("id")
    elif write.shape == "skewed":
        rows = rows.repartition(write.partitions, f.expr(f"if(id % {SKEW} = 0, id, 0)"))
        hour = f"if(id % {SKEW} = 0, id % 12, 0)"
    return rows.selectExpr(
        f"'{write.case}' as topic",
        "concat('body ', id) as body",
        f"concat('{write.case} ', id) as unique_key",
        f"{write.first_due_ms} + {hour} * {HOUR_MS} as due_ms",
    )


def run(spark: SparkSession, write: Write) -> str | None:
    """Carry out a write. Returns its error."""
    job_id = write.name or write.case
    try:
        with spark_errors():
            for name, value in write.conf.items():
                spark.conf.set(name, value)
            if write.campaign:
                bulk.TASK_ROWS = write.rows // 10
                columns = Columns(due="due_ms", topic="topic", unique_key="unique_key")
                bulk.run(spark, frame(spark, write), write.endpoint, columns=columns, campaign=job_id)
                return None
            options = {"endpoint": write.endpoint, "job_id": job_id}
            if write.fault:
                options |= {"fault": write.fault, "marks": write.marks}
            sink = frame(spark, write).write.format(FAULTY if write.fault else "timeball")
            sink.options(**options).mode("append").save()
    except TimeballError as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- the faults -----------------------------------------------------------------------------------------------


def mark(marks: str, name: str) -> None:
    """Tell the others that this moment has come."""
    (Path(marks) / name).touch()


def wait_for(marks: str, name: str) -> None:
    """Wait for a moment of another process. Raises TimeoutError if it does not come."""
    pause = threading.Event()
    for _ in range(HANG_S * 100):
        if (Path(marks) / name).exists():
            return
        pause.wait(0.01)
    raise TimeoutError(f"nobody has marked {name}")


class FaultySource(TimeballDataSource):
    """The data source `timeball`, whose writes have a fault."""

    @classmethod
    def name(cls) -> str:
        return FAULTY

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        given = dict(self.options)
        fault, marks = given.pop("fault"), given.pop("marks")
        return FaultyWriter(schema, pin_to_one_group(write_options(given)), fault, marks)


class FaultyWriter(ScheduledWriter):
    """The writer of `timeball`. Its tasks fail or wait with half of their rows in files, or its commit waits.

    All decisions and all files are ScheduledWriter's.
    """

    def __init__(self, schema: StructType, options: WriteOptions, fault: str, marks: str) -> None:
        super().__init__(schema, options)
        self.fault, self.marks = fault, marks

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write in chunks of PIECE_ROWS rows, with the fault of this task."""
        task: Any = TaskContext.get()
        usual, table_store.CHUNK_ROWS = table_store.CHUNK_ROWS, PIECE_ROWS  # Python workers are used again
        try:
            return super().write(self._pieces(iterator, task.partitionId(), task.attemptNumber()))
        finally:
            table_store.CHUNK_ROWS = usual

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit. With the fault "hold", wait for the test before and after the attach."""
        if self.fault != "hold":
            super().commit(messages)
            return
        mark(self.marks, "written")
        wait_for(self.marks, "attach")
        mark(self.marks, "attaching")
        super().commit(messages)
        mark(self.marks, "attached")
        wait_for(self.marks, "answer")

    def _pieces(
        self, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
    ) -> Iterator[pa.RecordBatch]:
        """Cut the batches into pieces of PIECE_ROWS rows. Causes the fault before piece HALF_PIECES."""
        count = 0
        for batch in batches:
            for begin in range(0, batch.num_rows, PIECE_ROWS):
                if count == HALF_PIECES:
                    self._half_written(partition, attempt)
                yield batch.slice(begin, PIECE_ROWS)
                count += 1
        if self.fault == "sleep" and partition == 0 and attempt:
            mark(self.marks, "copied")

    def _half_written(self, partition: int, attempt: int) -> None:
        """Cause the fault of this task, if it has one: an error, the end of the process, or a wait."""
        match self.fault, partition, attempt:
            case "fail", 0, 0:
                mark(self.marks, "raised")
                raise RuntimeError("half of the rows are written")
            case "fail", 1, 0:
                mark(self.marks, "exited")
                os._exit(1)
            case "sleep", 0, 0:  # until its copy has read all rows: both of them write all files
                mark(self.marks, "half")
                wait_for(self.marks, "copied")
            case "wait", 0, _:
                mark(self.marks, "half")
                wait_for(self.marks, "killed")


# ---- the program ----------------------------------------------------------------------------------------------


def say(document: object) -> None:
    print(f"{SAID}{json.dumps(document)}", flush=True)


def main(*given: str) -> None:
    conf: dict[str, str] = {} if given else json.loads(sys.stdin.readline())
    if "remote" in conf:
        spark = SparkSession.builder.remote(conf["remote"]).getOrCreate()
        register(spark)
        say({"app": ""})
    else:
        spark = build_session(conf.pop("spark.master", None), "cluster writes", conf)
        say({"app": spark.sparkContext.applicationId})
    spark.dataSource.register(FaultySource)
    for text in given or sys.stdin:
        write = msgspec.json.decode(text, type=Write)
        error = run(spark, write)
        unnamed = Path(write.marks) / "ended.part"
        unnamed.write_text(json.dumps(error))
        unnamed.replace(Path(write.marks) / ENDED)
        say(error)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
