"""A Spark session for Timeball: small on one machine, ordinary on a cluster.

The local settings are measured on two cores: Unix sockets and a plain checkpoint writer halve a
micro-batch, a serial collector and a small heap suit two cores beside a broker. `RawLocalFileSystem` avoids two
child processes a checkpoint file, but Spark's RocksDB state store cannot work on it: jobs here are stateless, and
must stay so on a session built by this module. None of it is set for a cluster master, whose owner knows better.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

import timeball
from timeball.errors import TimeballError
from timeball.pipeline.dispatch.due_stream import DueDataSource
from timeball.pipeline.run.java import cached_file, java_home
from timeball.pipeline.source.data_source import TimeballDataSource
from timeball.pipeline.source.delta_writer import DeltaDataSource
from timeball.pipeline.spark_errors import spark_errors

LOG = logging.getLogger("timeball.pipeline")
LOCAL_MASTER = "local[2]"
COMMON = {
    # Without it Spark refuses a reader that can take filters.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.ui.showConsoleProgress": "false",
    # Arrow's own pool touches fresh memory far more slowly: sorting a million rows takes twice as long with it.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
}
_CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": f"{_CHECKPOINTING}.FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.pollingDelay": "100ms",
}


# Failures reach us as exceptions; on the terminal they would only be the stack trace before the sentence.
LOG_SETTINGS = """\
rootLogger.level = fatal
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def settings(master: str, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a session on `master`; `conf` has the last word."""
    chosen = {**COMMON, **(LOCAL if master.startswith("local") else {}), **(conf or {})}
    java_options = "spark.driver.extraJavaOptions"
    chosen[java_options] = f"{_logging()} {chosen.get(java_options, '')}".strip()
    return chosen


def build_session(
    master: str = LOCAL_MASTER, app_name: str = "timeball", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Build a session that knows the format `timeball`; SetupError when Java or Spark cannot start."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _show_package_to_workers()
    with spark_errors(), _java(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        builder = SparkSession.builder.master(master).appName(app_name)
        for key, value in settings(master, conf).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        register(spark)
    return spark


def close(spark: SparkSession) -> None:
    """Stop a session. One whose JVM is lost is no failure of its own: what has lost it has been told already."""
    try:
        with spark_errors():
            spark.stop()
    except TimeballError as error:
        LOG.warning("session did not end well reason=%s", error)


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("timeball")` work in any session."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(TimeballDataSource)
    spark.dataSource.register(DeltaDataSource)
    spark.dataSource.register(DueDataSource)


def make_active(spark: SparkSession) -> None:
    """Let this thread start streams to our sink.

    Spark looks for a Python data source in the thread's active session, which a thread that did not build the
    session has not got. PySpark sets it nowhere in public but on the way of `createDataFrame`.
    """
    spark.createDataFrame([], "nothing int")


@contextmanager
def _java() -> Iterator[None]:
    """Set JAVA_HOME only while the JVM is launched; other programs may want another."""
    before = os.environ.get("JAVA_HOME")
    if SparkContext._gateway is None:
        os.environ["JAVA_HOME"] = str(java_home())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("JAVA_HOME", None)
        else:
            os.environ["JAVA_HOME"] = before


def _logging() -> str:
    """Return the JVM options that name our log settings: Spark's own ones print six lines of warnings at each start."""
    path = cached_file("log4j2.properties", LOG_SETTINGS)
    return f"-Dlog4j2.configurationFile={path.as_uri()}"


def _show_package_to_workers() -> None:
    """Put this package on PYTHONPATH: workers are processes of their own, and it may not be installed."""
    root = str(Path(timeball.__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths and not root.endswith("site-packages"):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
