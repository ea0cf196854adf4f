"""Opening of Spark sessions for commands. Spark is imported on demand, with a clear error if it is not installed.

Java and Spark's workers write to stderr (greetings, broken pipes at the end). Users need none of this, because
failures arrive as exceptions, so the output goes to a file instead of the terminal. If Java does not even start, the
last line of the file contains the reason, and becomes part of the error. With TIMEBALL_DEBUG=1, all output goes to the
terminal.

An interrupted start leaves no process behind.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from timeball.cli.options import BROKER, SPARK, not_installed
from timeball.model.errors import SetupError, TimeballError, Unavailable

if TYPE_CHECKING:
    import psutil
    from pyspark.sql import SparkSession

    from timeball.cli.options import SparkOptions

STDERR = 2


def load_runner(*, with_spark: bool = True) -> ModuleType:
    """Import the module that runs continuous jobs. SetupError when a package is missing."""
    try:
        if with_spark:
            import pyspark  # noqa: F401 - only a check: it is used when a session is built
        from timeball.spark.run import runner
    except ModuleNotFoundError as error:
        raise not_installed(error, SPARK if with_spark else BROKER) from error
    return runner


def open_session(
    master: str | None, name: str, conf: Mapping[str, str] | None = None, log: Path | None = None
) -> SparkSession:
    """Open a session with the data source `timeball`. SetupError if pyspark is missing, or Java or Spark cannot start.

    `master`: None for the master of spark-submit, or else a local one. `log`: the file for Spark's stderr. The default
    is a file without a name, which is deleted with the session.
    """
    try:
        from timeball.spark.run.session import build_session
    except ModuleNotFoundError as error:
        raise not_installed(error, SPARK) from error
    with _redirected_stderr(log), kill_children_on_failure():
        return build_session(master, name, conf)


@contextmanager
def spark_session(options: SparkOptions, name: str) -> Iterator[SparkSession]:
    """Open a session, and close it after the block. `name` is the application's name unless the options set one."""
    spark = open_session(options.master, name, dict(options.conf))
    try:
        yield spark
    finally:
        from timeball.spark.run.session import close

        close(spark)


@contextmanager
def _redirected_stderr(log: Path | None) -> Iterator[None]:
    """Redirect stderr, also of the processes that the block starts, into a file, and restore our own after it.

    Without `log`, the file has no name. A SetupError or Unavailable of the block gets the file's last line. With
    TIMEBALL_DEBUG=1, nothing is redirected.
    """
    if os.environ.get("TIMEBALL_DEBUG") == "1":
        yield
        return
    with open(log, "a+b") if log is not None else tempfile.TemporaryFile() as file:
        saved_stderr = os.dup(STDERR)
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        except (SetupError, Unavailable) as error:
            raise type(error)(_with_reason(error, file.fileno())) from error
        finally:
            os.dup2(saved_stderr, STDERR)
            os.close(saved_stderr)


def _with_reason(error: TimeballError, descriptor: int) -> str:
    """Append the last line of the file, which is read from its last 4 KiB, to the error's text. "" is not appended."""
    size_bytes = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, 4_096, max(0, size_bytes - 4_096)).decode(errors="replace").split("\n")
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{error} ({last_line})" if last_line and last_line not in str(error) else str(error)


@contextmanager
def kill_children_on_failure() -> Iterator[None]:
    """On Ctrl-C or a failure in the block, kill the processes that it has started.

    The block starts a process. A JVM that is interrupted in the middle of its start may wait forever, and its caller
    does not yet have a handle to end it.
    """
    import psutil  # installed with Spark, not in a plain installation

    this_process = psutil.Process()
    earlier_children = set(this_process.children())
    try:
        yield
    except BaseException:  # Ctrl-C above all, which is raised again below
        for child in set(this_process.children()) - earlier_children:
            for process in (*_descendants(child), child):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass  # it has ended by itself
        raise


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """List the descendants of a process. Empty if the process has ended meanwhile."""
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
