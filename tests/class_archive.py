"""Write Spark's classes into one file that the JVMs of tests map, which halves the CPU time of a start of Spark.

The Makefile runs it once (`python -m tests.class_archive FILE`), with a program that does a little of the tests' work.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext
from tests.java_options import FAST_START
from tests.node_fixture import running_node

from timeball.spark.run.session import build_session


def write(path: Path) -> None:
    """Let the JVM of a small program write the classes when it ends. If anything fails, tests run without the file."""
    partial = path.with_suffix(".part")  # tests may start JVMs meanwhile
    os.environ["SPARK_SUBMIT_OPTS"] = f"{FAST_START} -XX:ArchiveClassesAtExit={partial} -Xlog:cds=off"
    spark = build_session()
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.range(1_000).selectExpr("id", "id % 7 as key", "cast(id as string) as text")
        rows.repartition(2, "key").sortWithinPartitions("id").write.parquet(f"{folder}/rows")
        read = spark.read.parquet(f"{folder}/rows")
        read.join(rows.groupBy("key").count(), "key").collect()
        stream = spark.readStream.schema(read.schema).parquet(f"{folder}/rows")
        query = stream.writeStream.foreachBatch(_count).option("checkpointLocation", f"{folder}/at")
        query.trigger(availableNow=True).start().awaitTermination()
        with running_node(Path(folder) / "data") as node, node.client() as ball:
            ball.send_many([{"body": b"x", "after": "3600s"} for _ in range(10)], topic="orders")
            rows = spark.read.format("timeball").option("endpoint", node.endpoint).load()
            rows.groupBy("topic").count().collect()
    jvm = SparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()  # the JVM ends, and writes the classes
    jvm.wait(120)
    partial.replace(path)


def _count(rows: object, _: int) -> None:
    """Count the rows of a batch of the stream."""
    rows.count()  # type: ignore[attr-defined]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
