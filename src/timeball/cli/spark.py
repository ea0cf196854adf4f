"""The door to Spark: imported when a command needs it, with one sentence when it is not installed.

What Java and Spark's workers write on their stderr (greetings, broken pipes at the end) goes to a file, not over
the user's terminal: failures reach us as exceptions. If Java does not even start, the file's last line is the
reason, so it becomes part of the error. With TIMEBALL_DEBUG=1 everything stays on the terminal.

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

from timeball.cli.extras import BROKER, SPARK, not_installed
from timeball.errors import SetupError, TimeballError, Unavailable

if TYPE_CHECKING:
    import psutil
    from pyspark.sql import SparkSession

    from timeball.cli.options import SparkOptions

STDERR = 2


def load_runner(*, with_spark: bool = True) -> ModuleType:
    """The module that runs continuous jobs; SetupError when what it needs is missing."""
    try:
        if with_spark:
            import pyspark  # noqa: F401 - only asked for: it is imported when a session is built
        from timeball.pipeline.run import runner
    except ModuleNotFoundError as error:
        raise not_installed(error, SPARK if with_spark else BROKER) from error
    return runner


def open_session(
    master: str | None, name: str, conf: Mapping[str, str] | None = None, log: Path | None = None
) -> SparkSession:
    """A session that knows the format `timeball`; SetupError when pyspark or Java is missing.

    `master`: None for spark-submit's, or a local one. `log`: where Spark's own stderr goes; by default a file without
    a name, gone with the session.
    """
    try:
        from timeball.pipeline.run.session import build_session
    except ModuleNotFoundError as error:
        raise not_installed(error, SPARK) from error
    with _children_write_to(log), no_child_left_behind():
        return build_session(master, name, conf)


@contextmanager
def spark_session(chosen: SparkOptions, name: str) -> Iterator[SparkSession]:
    """Open a session for the length of a block; `name` is the application's if none was chosen."""
    spark = open_session(chosen.master, name, dict(chosen.conf))
    try:
        yield spark
    finally:
        from timeball.pipeline.run.session import close

        close(spark)


@contextmanager
def _children_write_to(log: Path | None) -> Iterator[None]:
    """Processes started in this block inherit a file as their stderr; this process keeps its own after it."""
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
    """The error's text and the last line that was written to the file, if there is one."""
    size = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, 4_096, max(0, size - 4_096)).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{error} ({last})" if last and last not in str(error) else str(error)


@contextmanager
def no_child_left_behind() -> Iterator[None]:
    """Ctrl-C or a failure in this block ends the processes that it has started.

    For the start of a process: a JVM that is interrupted in the middle of its start may wait for ever, and its caller
    has no handle yet that could end it.
    """
    import psutil  # with Spark, and not in a plain installation

    here = psutil.Process()
    before = set(here.children())
    try:
        yield
    except BaseException:  # Ctrl-C above all, and it goes on below
        for child in set(here.children()) - before:
            for process in (*_descendants(child), child):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass  # it has ended by itself
        raise


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return none of a process that has ended meanwhile."""
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
