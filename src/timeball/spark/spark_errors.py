"""Convert Spark's failures to Timeball's errors, with a message of one sentence.

Spark reports a failure as a page of stack traces of two languages, with our own error somewhere in it. This module
finds that error. Spark's exception stays chained as the cause, for the log. The user sees the sentence first.

A failure becomes Unavailable unless it is known to need the operator. Examples are a killed JVM or worker, and a broken
connection. A new start may help, so the runner tries again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException

from timeball.model import errors
from timeball.model.errors import SetupError, StorageError, TimeballError, Unavailable

_OURS = re.compile(r"timeball\.model\.errors\.(\w+): (.+)")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
_KNOWN: list[tuple[re.Pattern[str], type[TimeballError], str]] = [
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


def plain(error: BaseException) -> TimeballError:
    """Convert an exception of Spark to one of our errors. Returns an error of ours unchanged."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    found = _OURS.findall(text)
    if found:
        name, sentence = found[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TimeballError):
            return kind(sentence.strip())
    for pattern, kind, sentence in _KNOWN:
        match = pattern.search(text)
        if match is not None:
            return kind(match.expand(sentence))
    missing = _MODULE.search(text)
    if missing:
        return SetupError(
            f"Spark's Python workers cannot import {missing.group(1)}: install it on every executor, or name the "
            "Python that has it with PYSPARK_PYTHON."
        )
    # The last line of a worker's Python traceback is more specific than the first line of Spark's message.
    raised = _RAISED.findall(text)
    if raised:
        return Unavailable(f"Spark failed in a Python worker: {raised[-1]}")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, AnalysisException):
        return SetupError(f"Spark cannot run this: {first}")
    return Unavailable(f"Spark failed: {first}")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert exceptions of Spark in the body to our errors, with Spark's exception as the cause."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:  # ConnectionError: the JVM has ended
        raise plain(error) from error
