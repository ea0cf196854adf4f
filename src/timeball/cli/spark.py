"""The entrance to Spark: imported when a command needs it, with a clear error when Spark is not installed.

Java and Spark's workers write to stderr (greetings, broken pipes at the end). Their output goes to a file, not to the
user's terminal, because failures arrive as exceptions. If Java does not even start, the file's last line contains the
reason, so it becomes part of the error. With TIMEBALL_DEBUG=1, everything stays on the terminal.

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
    """Open a session with the data source `timeball`. SetupError when pyspark or Java is missing.

    `master`: None for the master of spark-submit, or else a local one. `log`: the file for Spark's stderr. The default
    is a file without a name, which is deleted with the session.
    """
    try:
        from timeball.spark.run.session import build_session
    except ModuleNotFoundError as error:
        raise not_installed(error, SPARK) from error
    with _children_write_to(log), no_child_left_behind():
        return build_session(master, name, conf)


@contextmanager
def spark_session(chosen: SparkOptions, name: str) -> Iterator[SparkSession]:
    """Open a session for the block. `name` is the application's name unless the options contain one."""
    spark = open_session(chosen.master, name, dict(chosen.conf))
    try:
        yield spark
    finally:
        from timeball.spark.run.session import close

        close(spark)


@contextmanager
def _children_write_to(log: Path | None) -> Iterator[None]:
    """Redirect stderr of the processes that the block starts into a file, and restore our own stderr after it."""
    if os.environ.get("TIMEBALL_DEBUG") == "1":
        yield
        return
    with open(log, "a+b") if log is not None else tempfile.TemporaryFile() as file:
        own = os.dup(STDERR)
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        except (SetupError, Unavailable) as error:
            raise type(error)(_with_reason(error, file.fileno())) from error
        finally:
            os.dup2(own, STDERR)
            os.close(own)


def _with_reason(error: TimeballError, descriptor: int) -> str:
    """Append the last line of the file, if there is one, to the error's text."""
    size = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, 4_096, max(0, size - 4_096)).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{error} ({last})" if last and last not in str(error) else str(error)


@contextmanager
def no_child_left_behind() -> Iterator[None]:
    """On Ctrl-C or a failure in the block, end the processes that it has started.

    The block starts a process. A JVM that is interrupted in the middle of its start may wait forever, and its caller
    does not yet have a handle to end it.
    """
    import psutil  # installed with Spark, not in a plain installation

    here = psutil.Process()
    before = set(here.children())
    try:
        yield
    except BaseException:  # Ctrl-C above all, which is raised again below
        for child in set(here.children()) - before:
            for process in (*_descendants(child), child):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass  # it has ended by itself
        raise


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """List the descendants of a process, none if it has ended meanwhile."""
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
