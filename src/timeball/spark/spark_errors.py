"""Convert Spark's failures to Timeball's errors, with a message of one sentence.

Spark reports a failure as a page of Java and Python stack traces. If the cause is an error of Timeball, it is somewhere
in that text. This module finds it. Spark's exception stays chained as the cause, for the log.

Failures that need the operator become SetupError or StorageError. All others become Unavailable, for example a killed
JVM or worker, or a broken connection. After an Unavailable the runner starts the job again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException

from timeball.model import errors
from timeball.model.errors import SetupError, StorageError, TimeballError, Unavailable

_TIMEBALL_ERROR = re.compile(r"timeball\.model\.errors\.(\w+): (.+)")
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_TRACEBACK_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
_KNOWN_FAILURES: list[tuple[re.Pattern[str], type[TimeballError], str]] = [
    (
        re.compile(r"JAVA_GATEWAY_EXITED|Java gateway process exited"),
        Unavailable,
        "Java started but Spark did not: see the lines above; is JAVA_HOME a full Java 17 or later?",
    ),
    (
        re.compile(r'Cannot run program "([^"]*python[^"]*)"'),
        SetupError,
        r"an executor has no \1: set PYSPARK_PYTHON, or --conf spark.pyspark.python=…, to the Python there that has "
        "the packages, for example ./environment/bin/python of a packed one.",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\D*(\d+\.\d+)\D*(\d+\.\d+)", re.DOTALL),
        SetupError,
        r"executors run Python \1 and the driver \2: set PYSPARK_PYTHON, or --conf spark.pyspark.python=…, to the same "
        "version on all of them.",
    ),
    (
        re.compile(r"OutOfMemoryError|GC overhead limit"),
        SetupError,
        "Spark ran out of memory: raise spark.driver.memory (or spark.executor.memory), or lower max_rows_per_batch.",
    ),
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        StorageError,
        "Spark found no space left on the disk of its checkpoint, its scratch folder or the table.",
    ),
    (
        re.compile(r"Permission denied|AccessDeniedException"),
        SetupError,
        "Spark may not read or write one of its folders: check the owner of the checkpoint and the table.",
    ),
    (
        re.compile(r"DATA_SOURCE_NOT_FOUND|Failed to find the data source: timeball"),
        SetupError,
        "this Spark session does not know the format 'timeball': call timeball.spark.run.session.register(spark).",
    ),
]


def to_timeball_error(error: BaseException) -> TimeballError:
    """Convert an exception of Spark to an error of Timeball. An error of Timeball stays as it is."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    timeball_errors = _TIMEBALL_ERROR.findall(text)
    if timeball_errors:
        name, sentence = timeball_errors[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TimeballError):
            return kind(sentence.strip())
    for pattern, kind, sentence in _KNOWN_FAILURES:
        match = pattern.search(text)
        if match is not None:
            return kind(match.expand(sentence))
    missing_module = _MISSING_MODULE.search(text)
    if missing_module:
        return SetupError(
            f"Spark's Python workers cannot import {missing_module.group(1)}: install it on every executor, or name "
            "the Python that has it with PYSPARK_PYTHON."
        )
    # The last line of a worker's Python traceback is more specific than the first line of Spark's message.
    traceback_errors = _TRACEBACK_ERROR.findall(text)
    if traceback_errors:
        return Unavailable(f"Spark failed in a Python worker: {traceback_errors[-1]}")
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, AnalysisException):
        return SetupError(f"Spark cannot run this: {first_line}")
    return Unavailable(f"Spark failed: {first_line}")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert exceptions of Spark in the block to errors of Timeball, with Spark's exception as the cause."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:  # ConnectionError: the JVM has ended
        raise to_timeball_error(error) from error
